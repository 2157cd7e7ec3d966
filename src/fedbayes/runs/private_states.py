"""Private states of clients on disk: what the newest checkpoints name is there, and is whole."""

import hashlib
import re
from collections.abc import Iterator, MutableMapping
from pathlib import Path

import torch
from torch import Tensor

from fedbayes.errors import RunError
from fedbayes.files import read_bytes, write_beside
from fedbayes.runs.progress import DIGEST, UNKNOWN

START_AGAIN = "put it back from a copy, or start a new run"
"""The way out where a file of a run is damaged or lost."""
_STATE = re.compile(r"\.?[0-9]{7,}-([0-9]{7,})\.safetensors(\.[0-9]+)?")
"""The name of a private state, or of a half of one; others in its folder are somebody else's."""


class ClientStates(MutableMapping[int, bytes]):
    """Private states of clients as files, with the last complete round's kept until the next.

    A file is named by client and round, and only its owner may read it. Writing one leaves the
    older one alone, since a kill may take the run back to it; `commit` says what no checkpoint
    needs. What is read is what was written, by its digest.

    Args:
        folder: where the files are.
        stored: of each client, the round of its newest state; 0 if none, int64 [S].
        digests: of each client, the digest of that state, as `Progress` has them.
    """

    def __init__(self, folder: Path, stored: Tensor, digests: Tensor = UNKNOWN) -> None:
        self._folder = folder
        self.stored = stored.clone()
        """Of each client, the round of its newest state; 0 if none."""
        self.digests = digests.clone()
        """Of each client, the digest of its newest state, as `Progress` has them."""
        self.round = 0
        """The round that is being run."""
        self._superseded: list[Path] = []
        """Named by the last checkpoint, and by no later one."""
        self._retired: list[Path] = []
        """Named by the checkpoint before that."""
        self._new: list[Path] = []

    def _path(self, client: int, number: int) -> Path:
        return self._folder / f"{client:07d}-{number:07d}.safetensors"

    def __getitem__(self, client: int) -> bytes:
        number = int(self.stored[client])
        if not number:
            raise KeyError(client)
        path = self._path(client, number)
        try:
            state = read_bytes(path)
        except OSError as error:
            raise RunError(
                f"the private state of client {client} is lost: {path}: {error.strerror or error}; "
                f"{START_AGAIN}"
            ) from None
        wanted = bytes(self.digests[client].tolist()) if len(self.digests) else b""
        # Older versions kept no digests.
        if any(wanted) and hashlib.sha256(state).digest() != wanted:
            raise RunError(
                f"the private state of client {client}, {path}, is damaged: it is not what round "
                f"{number} left; {START_AGAIN}"
            )
        return state

    def __setitem__(self, client: int, state: bytes) -> None:
        self._folder.mkdir(exist_ok=True, mode=0o700)
        before = int(self.stored[client])
        if before and before != self.round:
            self._superseded.append(self._path(client, before))
        path = self._path(client, self.round)
        write_beside(path, state)
        self._new.append(path)
        self.stored[client] = self.round
        if not len(self.digests):
            self.digests = torch.zeros(len(self.stored), DIGEST, dtype=torch.uint8)
        found = bytearray(hashlib.sha256(state).digest())
        self.digests[client] = torch.frombuffer(found, dtype=torch.uint8)

    def check(self) -> None:
        """See that every state is what it was, and closed to others.

        Raises:
            RunError: one is damaged or lost.
        """
        if self._folder.is_dir():
            self._folder.chmod(0o700)
        for client in self:
            self[client]

    def __delitem__(self, client: int) -> None:
        raise TypeError("a client's state is replaced, never deleted")

    def __iter__(self) -> Iterator[int]:
        return iter(self.stored.nonzero()[:, 0].tolist())

    def __len__(self) -> int:
        return int((self.stored > 0).sum())

    def _named(self, stored: Tensor | None) -> set[Path]:
        """The files of the states that a checkpoint names."""
        if stored is None:
            return set()
        return {self._path(c, int(stored[c])) for c in stored.nonzero()[:, 0].tolist()}

    def commit(
        self, best: Tensor | None = None, *, keep_older: bool = False
    ) -> tuple[list[Path], list[Path]]:
        """The files of a checkpoint that has just been written.

        Args:
            best: the `stored` of another checkpoint that is kept, int64 [S]; None if there is none.
            keep_older: whether all older checkpoints are kept, and with them all states.

        Returns:
            The files that were written since the last call; and those that neither this checkpoint
            names nor the one before, to be removed once it is on the disk.
        """
        gone = self.retire(best)
        self._retired += [] if keep_older else self._superseded
        self._superseded = []
        written, self._new = self._new, []
        return [path for path in written if path.exists()], gone

    def retire(self, best: Tensor | None = None) -> list[Path]:
        """The states that only the checkpoint before the last names, to be removed; as `commit`."""
        needed = self._named(best) if self._retired else set()
        gone = [path for path in self._retired if path not in needed]
        self._retired = [path for path in self._retired if path in needed]
        return gone

    def remove_strays(self, *, keep_older: bool, best: Tensor | None = None) -> None:
        """Remove what a killed process left behind: states of a round that never completed and,
        unless older checkpoints are kept, states that a later round replaced.

        Args:
            keep_older: whether all older checkpoints are kept.
            best: as for `commit`.
        """
        if not self._folder.is_dir():
            return
        current, needed = self._named(self.stored), self._named(best)
        self._superseded = [path for path in needed - current if path.exists()]
        for path in self._folder.iterdir():
            name = _STATE.fullmatch(path.name)
            if name is None or path in current | needed:
                continue
            half = name[2] is not None
            if half or not (keep_older and int(name[1]) <= self.round):
                path.unlink()
