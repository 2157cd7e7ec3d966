"""Files on their way to the disk, while the next round goes on."""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from fedbayes.core.files import flush


class Flusher:
    """Has the system write files to the disk itself, in parallel with other work.

    A rename that survives a power cut may be that of a file whose content does not. So what a new
    checkpoint replaces is removed only when the new one is on the disk, with all that it names.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fedbayes-flush")
        self._under_way: Future[None] | None = None

    def start(self, paths: Iterable[Path], replaced: Iterable[Path] = ()) -> None:
        """Begin to write files, and entries of folders, to the disk.

        Args:
            paths: they.
            replaced: files to remove when all of them are there.
        """
        self._under_way = self._thread.submit(_flush, list(paths), list(replaced))

    def wait(self) -> None:
        """Wait until all of them are there. Raises an OSError if the disk failed."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


def _flush(paths: Iterable[Path], replaced: Iterable[Path]) -> None:
    for path in paths:
        with suppress(FileNotFoundError):  # replaced meanwhile
            flush(path)
    for path in replaced:
        path.unlink(missing_ok=True)
