"""Private states of clients on disk: what the newest checkpoints name is there, and is whole.

clients/0000012-0000003.safetensors         of client 12 after round 3
clients/0001/0001234-0000003.safetensors    of client 1234: from client 1,000 on, the thousands
have folders of their own
"""

import hashlib
import re
from collections.abc import Iterator, MutableMapping
from pathlib import Path

import torch

from fedbayes.core.by_client import ByClient
from fedbayes.core.files import flush, read_bytes, write_beside
from fedbayes.errors import RunError, told_as
from fedbayes.storage.progress import DIGEST

START_AGAIN = "restore it from a copy, or start a new run"
"""The way out where a file of a run is damaged or lost."""
FOLDER_OF = 1000
"""Clients whose states share a folder, so that no folder grows with the federation."""
_FOLDER = re.compile(r"[0-9]{4,}")
"""The name of a folder of states."""
_STATE = re.compile(r"\.?[0-9]{7,}-([0-9]{7,})\.safetensors(\.[0-9]+)?")
"""The name of a private state, or of a half of one; others in its folder are somebody else's."""


class ClientStates(MutableMapping[int, bytes]):
    """Private states of clients as files, with the last complete round's kept until the next.

    A file is named by client and round, and only its owner may read it. Writing one leaves the
    older one alone, since a kill may take the run back to it; `commit` says what no checkpoint
    needs. What is read is what was written, by its digest.

    Args:
        folder: where the files are.
        known: of each client that has a state, the round and digest of the newest, as `Progress`
            has them.
    """

    def __init__(self, folder: Path, known: ByClient | None = None) -> None:
        self._folder = folder
        self._known = known or ByClient()
        self._changed: dict[int, tuple[int, bytes]] = {}
        """Round and digest of states that `_known` has not yet."""
        self.round = 0
        """The round that is being run."""
        self._superseded: list[Path] = []
        """Named by the last checkpoint, and by no later one."""
        self._retired: list[Path] = []
        """Named by the checkpoint before that."""
        self._new: list[Path] = []
        self._made: list[Path] = []
        """Folders that were made since the last checkpoint."""

    @property
    def known(self) -> ByClient:
        """Of each client that has a state, the round and digest of the newest."""
        if self._changed:
            rounds, digests = zip(*self._changed.values(), strict=True)
            found = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8)
            columns = {"round": torch.tensor(rounds), "digest": found.reshape(-1, DIGEST)}
            self._known = self._known.having(torch.tensor([*self._changed]), columns)
            self._changed = {}
        return self._known

    def _newest(self, client: int) -> tuple[int, bytes]:
        """Round and digest of a client's newest state; round 0 if it has none."""
        if client in self._changed:
            return self._changed[client]
        row = self._known.row(client)
        if row is None:
            return 0, b""
        columns = self._known.columns
        return int(columns["round"][row]), bytes(columns["digest"][row].tolist())

    def _path(self, client: int, number: int) -> Path:
        return self._folder_of(client) / f"{client:07d}-{number:07d}.safetensors"

    def _folder_of(self, client: int) -> Path:
        thousands = client // FOLDER_OF
        return self._folder / f"{thousands:04d}" if thousands else self._folder

    def __getitem__(self, client: int) -> bytes:
        number, wanted = self._newest(client)
        if not number:
            raise KeyError(client)
        path = self._path(client, number)
        if not path.exists() and (older := self._folder / path.name).exists():
            path = older  # older versions had one folder, and nobody has gone on with the run
        lost = f"the private state of client {client} is lost: {path}"
        with told_as(RunError, lost, OSError, after=f"; {START_AGAIN}"):
            state = read_bytes(path)
        # Older versions kept no digests.
        if any(wanted) and hashlib.sha256(state).digest() != wanted:
            raise RunError(
                f"the private state of client {client}, {path}, is damaged: it differs from what "
                f"round {number} wrote; {START_AGAIN}"
            )
        return state

    def __setitem__(self, client: int, state: bytes) -> None:
        self._folder.mkdir(exist_ok=True, mode=0o700)
        folder = self._folder_of(client)
        if not folder.exists():
            folder.mkdir(mode=0o700)
            self._made.append(folder)
        before, _ = self._newest(client)
        if before and before != self.round:
            self._superseded.append(self._path(client, before))
        path = self._path(client, self.round)
        write_beside(path, state)
        self._new.append(path)
        self._changed[client] = self.round, hashlib.sha256(state).digest()

    def move_older(self) -> None:
        """Put states that an older version left in one folder where this one has them; for who has
        the lock of the run. A kill leaves each of them in one place or the other.
        """
        if not self._folder.is_dir():
            return
        moved: set[Path] = set()
        for path in self._folder.iterdir():
            if _STATE.fullmatch(path.name) is None or path.name.startswith("."):
                continue
            folder = self._folder_of(int(path.name.partition("-")[0]))
            if folder != self._folder and not path.name.rpartition(".")[2].isdecimal():
                folder.mkdir(exist_ok=True, mode=0o700)
                path.replace(folder / path.name)
                moved.add(folder)
        for folder in [*moved, self._folder] if moved else []:
            flush(folder)

    def check(self) -> None:
        """See that every state is what it was, and closed to others, or raise a RunError."""
        if self._folder.is_dir():
            for folder in (self._folder, *self._folder.glob("[0-9]*")):
                if folder.is_dir():
                    folder.chmod(0o700)
        for client in self:
            self[client]

    def __delitem__(self, client: int) -> None:
        raise TypeError("a client's state is replaced, never deleted")

    def __iter__(self) -> Iterator[int]:
        return iter(self.known.clients.tolist())

    def __len__(self) -> int:
        return len(self.known)

    def _named(self, known: ByClient | None) -> set[Path]:
        """The files of the states that a checkpoint names."""
        if not known:
            return set()
        rows = zip(known.clients.tolist(), known.columns["round"].tolist(), strict=True)
        return {self._path(client, number) for client, number in rows}

    def commit(
        self, best: ByClient | None = None, *, keep_older: bool = False
    ) -> tuple[list[Path], list[Path]]:
        """The files of a checkpoint that has just been written.

        Args:
            best: the `states` of another checkpoint that is kept; None if there is none.
            keep_older: whether all older checkpoints are kept, and with them all states.

        Returns:
            The files that were written since the last call; and those that neither this checkpoint
            names nor the one before, to be removed once it is on the disk.
        """
        gone = self.retire(best)
        self._retired += [] if keep_older else self._superseded
        self._superseded = []
        written, self._new = [path for path in self._new if path.exists()], []
        made, self._made = self._made, []
        return [*written, *made, *([self._folder] if made else [])], gone

    def retire(self, best: ByClient | None = None) -> list[Path]:
        """The states that only the checkpoint before the last names, to be removed; as `commit`."""
        needed = self._named(best) if self._retired else set()
        gone = [path for path in self._retired if path not in needed]
        self._retired = [path for path in self._retired if path in needed]
        return gone

    def remove_strays(self, *, keep_older: bool, best: ByClient | None = None) -> None:
        """Remove what a killed process left behind: states of a round that never completed and,
        unless older checkpoints are kept, states that a later round replaced.

        Args:
            keep_older: whether all older checkpoints are kept.
            best: as for `commit`.
        """
        if not self._folder.is_dir():
            return
        current, needed = self._named(self.known), self._named(best)
        self._superseded = [path for path in needed - current if path.exists()]
        named = current | needed
        for path in self._files():
            name = _STATE.fullmatch(path.name)
            if name is None or path in named:
                continue
            half = name[2] is not None
            if half or not (keep_older and int(name[1]) <= self.round):
                path.unlink()

    def _files(self) -> Iterator[Path]:
        """What is in the folder, and in those of thousands of clients."""
        for path in self._folder.iterdir():
            if _FOLDER.fullmatch(path.name) and path.is_dir():
                yield from path.iterdir()
            else:
                yield path


def folder_of_states(path: Path) -> Path:
    """The folder that holds all states of a run whose state may be in a file."""
    return path.parent.parent if _FOLDER.fullmatch(path.parent.name) else path.parent
