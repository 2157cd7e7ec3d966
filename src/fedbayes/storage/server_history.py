"""States of the server that clients are still at work from, on disk."""

import re
from collections.abc import Collection
from pathlib import Path

from fedbayes.core.files import read_bytes, write_beside
from fedbayes.core.messages import decode_file, metadata
from fedbayes.core.seals import check_seal, sealed
from fedbayes.core.tensors import Tensors
from fedbayes.errors import MessageError, RunError, told_as
from fedbayes.storage.private_states import START_AGAIN

_VERSION = re.compile(r"\.?before-([0-9]{7,})\.safetensors(\.[0-9]+)?")
"""The name of a state, or of a half of one; others in the folder are somebody else's."""
_ROUND = "fedbayes-before-round"


class ServerHistory:
    """The server's states before rounds, packed, one file each.

    A round writes its state if clients start from it that do not report in the same round. A state
    is removed when no client is at work from it by the last checkpoint and the one before.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._new: list[Path] = []
        self._before: set[int] = set()

    def path(self, number: int) -> Path:
        """The file of the state before a round."""
        return self._folder / f"before-{number:07d}.safetensors"

    def save(self, number: int, server: Tensors) -> None:
        """Write the state before a round."""
        self._folder.mkdir(exist_ok=True)
        write_beside(self.path(number), sealed(server, {_ROUND: str(number)}))
        self._new.append(self.path(number))

    def load(self, number: int) -> Tensors:
        """The state before a round. Raises a RunError if it is lost or damaged."""
        path = self.path(number)
        what = f"the server's state before round {number}, which clients still use, is lost or"
        after = f"; {START_AGAIN}"
        with told_as(RunError, f"{what} damaged: {path}", OSError, MessageError, after=after):
            data = read_bytes(path)
            check_seal(data, required=True)
            if metadata(data).get(_ROUND) != str(number):
                raise MessageError("it belongs to another round")
            return decode_file(data)

    def check(self, needed: Collection[int]) -> None:
        """See that all states are there, and whole, from which clients are at work, or raise a
        RunError.
        """
        for number in sorted(needed):
            self.load(number)
        self._before = set(needed)

    def remove_strays(self, needed: Collection[int], last: int, *, keep_older: bool) -> None:
        """Remove what a killed process left behind.

        Args:
            needed: rounds whose states a checkpoint needs.
            last: the last complete round.
            keep_older: whether all older checkpoints are kept.
        """
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            name = _VERSION.fullmatch(path.name)
            if name is None or (name[2] is None and int(name[1]) in needed):
                continue
            if name[2] is not None or not keep_older or int(name[1]) > last:
                path.unlink()

    def commit(
        self, needed: Collection[int], *, keep_older: bool = False
    ) -> tuple[list[Path], list[Path]]:
        """The files of a checkpoint that has just been written.

        Args:
            needed: rounds from whose states clients are at work.
            keep_older: whether all older checkpoints are kept.

        Returns:
            Those written since the last call; and those that neither this checkpoint needs nor the
            one before, to be removed once it is on the disk.
        """
        written, self._new = self._new, []
        kept, self._before = self._before | set(needed), set(needed)
        return written, [] if keep_older else self._beside(kept)

    def retire(self) -> list[Path]:
        """States that the last checkpoint does not need, to be removed once it is on the disk."""
        return self._beside(self._before)

    def _beside(self, needed: Collection[int]) -> list[Path]:
        """The files of all other states."""
        names = [path.name for path in self._folder.iterdir()] if self._folder.is_dir() else []
        found = [name for name in map(_VERSION.fullmatch, names) if name and name[2] is None]
        return [self._folder / name[0] for name in found if int(name[1]) not in needed]
