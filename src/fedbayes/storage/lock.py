"""One process at a time resumes a run."""

import os
import socket
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from fedbayes.core.files import read_text
from fedbayes.errors import RunError

LOCK_FILE = ".lock"
"""In a run folder; it stays there, and says which process had it last. The lock itself is the
system's, so it ends with the process, however that ends."""


class RunLock:
    """The right to write into a run folder; nobody needs it to read.

    Raises:
        RunError: another process has it, or the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_FILE
        # The thread that gives it back may be another one.
        self._lock = FileLock(self._path, timeout=0, thread_local=False)
        before = self._note()
        try:
            self._lock.acquire()
            self._path.write_text(f"{os.getpid()} {socket.gethostname()}\n")
        except Timeout:
            if before and not self._note():  # versions of filelock empty the file they look at
                with suppress(OSError):
                    self._path.write_text(before)
            raise RunError(
                f"{self._holder()} already uses the run in {folder}. Wait until it ends, or stop "
                "it first"
            ) from None
        except NotImplementedError:
            raise RunError(
                f"the file system of {folder} has no file locks. Choose a folder on another file "
                "system"
            ) from None
        except OSError as error:
            raise RunError(f"cannot write the run folder {folder}: {error}") from None

    def release(self) -> None:
        """Give it back; once more does nothing."""
        self._lock.release()

    def _note(self) -> str:
        """What the file says; empty where it cannot be read."""
        try:
            return read_text(self._path)
        except (OSError, ValueError):
            return ""

    def _holder(self) -> str:
        """Who has it, in words."""
        number, _, host = self._note().strip().partition(" ")
        if not number.isdecimal():
            return "another process"
        if host != socket.gethostname():
            return f"process {number} on {host!r}"
        return "this process itself" if int(number) == os.getpid() else f"process {number}"
