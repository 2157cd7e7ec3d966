"""Private states of clients where the clients are: files, and tickets that name them."""

import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path

from fedbayes.errors import EngineError


@dataclass(frozen=True)
class StateStore:
    """Private states of the clients of one node: a folder that belongs to the client.

    A ticket is the name of a state's file, `RANDOM-CLIENT-ROUND`, and the digest of its bytes.
    """

    folder: Path
    checkpoint_every: int = 1
    """Rounds between the server's checkpoints; what it may go back to is kept."""
    keep_all: bool = False
    """Whether the server may go back to any older state: it keeps all of its checkpoints, or the
    best one, which only it knows."""

    def load(self, ticket: bytes, client: int) -> bytes:
        """The state that a ticket names.

        Raises:
            EngineError: it is not here, or not what it was.
        """
        owner, number, digest = _read_ticket(ticket)
        path = self._path(owner, client, number)
        try:
            state = path.read_bytes()
        except OSError:
            raise EngineError(
                f"the private state of client {client} after round {number} is not in "
                f"{self.folder}; start its node with the folder that it had"
            ) from None
        if hashlib.sha256(state).hexdigest() != digest:
            raise EngineError(f"the private state {path} is damaged")
        return state

    def save(self, state: bytes, ticket: bytes | None, client: int, number: int) -> bytes:
        """Keep the state after a round; the ticket for it.

        Args:
            state: what to keep.
            ticket: the ticket of the state that came before; None for the first.
            client: whose it is.
            number: the round.
        """
        owner = _read_ticket(ticket)[0] if ticket else secrets.token_hex(8)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._path(owner, client, number)
        beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        beside.touch(mode=0o600)
        beside.write_bytes(state)
        beside.replace(path)
        if ticket and not self.keep_all:
            self._forget(owner, client, number, since=_read_ticket(ticket)[1])
        return f"{owner}:{number}:{hashlib.sha256(state).hexdigest()}".encode()

    def _forget(self, owner: str, client: int, number: int, *, since: int) -> None:
        """Remove states that no checkpoint of the server can name any more."""
        checkpoint = (number - 1) // self.checkpoint_every * self.checkpoint_every
        if since > checkpoint:
            return  # the checkpoint may name any older one
        for path in self.folder.glob(f"{owner}-{client}-*.safetensors"):
            if int(path.stem.rpartition("-")[2]) < since:
                path.unlink(missing_ok=True)

    def _path(self, owner: str, client: int, number: int) -> Path:
        return self.folder / f"{owner}-{client}-{number}.safetensors"


def _read_ticket(ticket: bytes) -> tuple[str, int, str]:
    try:
        owner, number, digest = ticket.decode().split(":")
        if not owner.isalnum():
            raise ValueError
        return owner, int(number), digest
    except ValueError:
        raise EngineError("the server's ticket for a private state is damaged") from None
