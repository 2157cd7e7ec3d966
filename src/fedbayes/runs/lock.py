"""One process at a time goes on with a run."""

import os
import socket
from pathlib import Path

from filelock import FileLock, Timeout

from fedbayes.errors import RunError
from fedbayes.files import read_text

LOCK_FILE = ".lock"
"""In a run folder; it stays there, and says which process had it last. The lock itself is the
system's, so it ends with the process, however that ends."""


class RunLock:
    """The right to write into a run folder; nobody needs it to read.

    Args:
        folder: the run folder, which exists.

    Raises:
        RunError: another process has it, or the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_FILE
        # The thread that gives it back may be another one.
        self._lock = FileLock(self._path, timeout=0, thread_local=False)
        try:
            self._lock.acquire()
            self._path.write_text(f"{os.getpid()} {socket.gethostname()}\n")
        except Timeout:
            raise RunError(
                f"{self._holder()} is at work on the run in {folder}; wait until it ends, or end "
                "it first"
            ) from None
        except OSError as error:
            raise RunError(f"cannot write the run folder {folder}: {error}") from None

    def release(self) -> None:
        """Give it back; once more does nothing."""
        self._lock.release()

    def _holder(self) -> str:
        """Who has it, in words."""
        try:
            number, _, host = read_text(self._path).strip().partition(" ")
        except (OSError, ValueError):
            number = host = ""
        if not number.isdecimal():
            return "another process"
        if host != socket.gethostname():
            return f"process {number} on {host!r}"
        return "this process itself" if int(number) == os.getpid() else f"process {number}"
