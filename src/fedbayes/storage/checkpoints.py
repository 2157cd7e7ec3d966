"""Checkpoints: the state of a run after a round, a file for each that is kept.

A checkpoint has a digest of itself and an inventory of what else the run had written by then. A run
that goes on replaces them, while others may be reading.
"""

import re
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TypeVar

from fedbayes.core.files import read_bytes, write_beside
from fedbayes.core.messages import decode_file, metadata
from fedbayes.core.seals import check_seal, has_seal, sealed
from fedbayes.core.tensors import pack, unpack
from fedbayes.errors import MessageError, RunError, told_as
from fedbayes.storage.inventory import INVENTORY, Inventory
from fedbayes.storage.private_states import START_AGAIN
from fedbayes.storage.progress import Progress, renewed

_NAME = re.compile(r"round-([0-9]{7}|[1-9][0-9]{7,})\.safetensors")
"""The name of a checkpoint; of others, such as copies next to them, nothing is known."""
_TRIES = 20
"""How often the newest is looked for while a run goes on that replaces it."""

Found = TypeVar("Found")


class Checkpoints:
    """The checkpoints of one run.

    Args:
        path: the folder that holds them, in the run folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: tuple[object, Inventory | None] = (None, None)

    def file(self, number: int) -> Path:
        """The file of a round."""
        return self.path / f"round-{number:07d}.safetensors"

    def rounds(self) -> list[int]:
        """The rounds that there are checkpoints of, ascending."""
        found = map(_NAME.fullmatch, (path.name for path in self.path.glob("round-*")))
        return sorted(int(name[1]) for name in found if name)

    def beside(self, rounds: Collection[int]) -> list[Path]:
        """The files of all but these rounds."""
        return [self.file(number) for number in set(self.rounds()).difference(rounds)]

    @property
    def newest_name(self) -> str:
        """The newest one within the run folder, for messages."""
        return f"{self.path.name}/{self.file(self.rounds()[-1]).name}"

    def write(self, progress: Progress, known: Inventory) -> Path:
        """Write the one of the round that ended with this state."""
        path = self.file(progress.round)
        write_beside(path, sealed(pack(progress), {INVENTORY: known.dump()}))
        return path

    def inventory(self) -> Inventory | None:
        """What the newest checkpoint knows of the other files; None where there is none, or of an
        older version.

        Raises:
            RunError: the checkpoint is damaged.
        """
        return self._of_newest(self._inventory)

    def newest(self) -> Progress | None:
        """The state that a resume starts from, whole; None where there is no checkpoint."""
        return self._of_newest(self._progress)

    def progress(self, number: int) -> Progress:
        """The state after a round. A RunError if there is no such checkpoint, or it is damaged."""
        if number not in self.rounds():
            raise RunError(
                f"{self.path.parent} has no checkpoint of round {number}, only of "
                f"{self.rounds() or 'none'}. Keep all with keep_checkpoints = 'all', or the best "
                "with 'best'"
            )
        with told_as(RunError, f"cannot read the checkpoint {self.file(number)}", OSError):
            return self._progress(number)

    def _of_newest(self, read: Callable[[int], Found]) -> Found | None:
        """What is read of the newest; None where there is none."""
        for _ in range(_TRIES):
            if not (rounds := self.rounds()):
                return None
            try:
                return read(rounds[-1])
            except FileNotFoundError:  # a run that goes on has just written another one
                continue
            except OSError as error:
                raise RunError(f"cannot read {self.file(rounds[-1])}: {error}") from None
            except RunError as error:
                raise RunError(f"{error}{self._way_back(rounds[:-1])}") from None
        raise RunError(f"the checkpoints in {self.path} change too fast to be read")

    def _way_back(self, older: Sequence[int]) -> str:
        """What to add to an error on the newest, where an older one is whole."""
        for number in reversed(older):
            with suppress(RunError, FileNotFoundError):
                self._progress(number)
                return f"; or remove it, to resume from round {number}, whose checkpoint is intact"
        return ""

    def _inventory(self, number: int) -> Inventory | None:
        """The inventory in the checkpoint of a round, read again only where the file is another."""
        path = self.file(number)
        found = path.stat()
        key = path, found.st_mtime_ns, found.st_size
        if self._read[0] != key:
            self._read = key, _inventory_of(path, read_bytes(path))
        return self._read[1]

    def _progress(self, number: int) -> Progress:
        """The state in the checkpoint of a round."""
        path = self.file(number)
        with _whole(path):
            data = read_bytes(path)
            _inventory_of(path, data)
            stored = decode_file(data)
            if "correct" in stored:
                raise RunError(
                    f"{path} is a run of fedbayes 0.1, which this version cannot resume. Use "
                    "fedbayes 0.1, or start a new run. Its model and summary can be read"
                )
            progress = unpack(Progress, renewed(stored))
            if progress.round != number:
                raise MessageError(f"it belongs to round {progress.round}")
            return progress


def _inventory_of(path: Path, data: bytes) -> Inventory | None:
    """The inventory in a checkpoint, which is as it was written; None of older ones."""
    with _whole(path):
        check_seal(data)
        text = metadata(data).get(INVENTORY)
        if (text is None) == has_seal(data):
            raise MessageError("it lacks its digest, or its inventory of other files")
        return None if text is None else Inventory.load(text)


def _whole(path: Path) -> AbstractContextManager[None]:
    """Errors in a checkpoint say that it is damaged, and what to do."""
    damaged = f"the checkpoint {path} is damaged"
    return told_as(RunError, damaged, MessageError, after=f"; {START_AGAIN}")
