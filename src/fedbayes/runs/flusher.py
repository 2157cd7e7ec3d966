"""Files on their way to the disk, while the next round goes on."""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from fedbayes.files import flush


class Flusher:
    """Has the system write files to the disk itself, beside other work.

    A rename that survives a power cut may be that of a file whose content does not. So what a new
    checkpoint replaces is removed only when the new one is on the disk, with all that it names.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fedbayes-flush")
        self._under_way: Future[None] | None = None

    def start(self, paths: Iterable[Path]) -> None:
        """Begin to write these files, and entries of folders, to the disk."""
        self._under_way = self._thread.submit(_flush, list(paths))

    def wait(self) -> None:
        """Wait until all of them are there.

        Raises:
            OSError: the disk failed.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


def _flush(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(FileNotFoundError):  # replaced meanwhile
            flush(path)
