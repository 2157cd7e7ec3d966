"""Private states of clients where the clients are: files, and tickets that name them."""

import hashlib
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from fedbayes.core.files import flush, write_beside
from fedbayes.errors import EngineError

HALF = 3600.0
"""Seconds after which half a file is one that a killed process left."""


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
    late: bool = False
    """Whether the server may take a report rounds after the client started (asynchronous rounds),
    and so go back to the state before the last one that a checkpoint's round had begun."""

    def load(self, ticket: bytes, client: int) -> bytes:
        """The state that a ticket names. An EngineError if it is not here, or not what it was."""
        owner, number, digest = _read_ticket(ticket)
        path = self._path(owner, client, number)
        try:
            state = path.read_bytes()
        except OSError:
            raise EngineError(
                f"the private state of client {client} after round {number} is not in "
                f"{self.folder}. Start its node with its former folder"
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
        write_beside(path, state, private=True, durable=True)
        flush(self.folder)
        self._remove_halves()
        if ticket and not self.keep_all:
            self._forget(owner, client, number, since=_read_ticket(ticket)[1])
        return f"{owner}:{number}:{hashlib.sha256(state).hexdigest()}".encode()

    def _forget(self, owner: str, client: int, number: int, *, since: int) -> None:
        """Remove states that no checkpoint of the server can name any more."""
        # The newest checkpoint may not be on its disk yet, so the one before counts.
        name = re.compile(rf"{owner}-{client}-([0-9]+)\.safetensors")
        found = (name.fullmatch(path.name) for path in self.folder.iterdir())
        states = {int(match[1]) for match in found if match}
        # The server never took those between, since it still had the state before them.
        gone = {state for state in states if since < state < number}
        newest = (number - 1) // self.checkpoint_every * self.checkpoint_every
        past = {state for state in states - gone if state <= newest - self.checkpoint_every}
        for state in gone | past - {*sorted(past)[-2 if self.late else -1 :]}:
            self._path(owner, client, state).unlink(missing_ok=True)

    def _remove_halves(self) -> None:
        """Remove what killed processes left of files."""
        for path in self.folder.glob(".*.safetensors.*"):
            try:
                if time.time() - path.stat().st_mtime > HALF:
                    path.unlink()
            except FileNotFoundError:  # another process was quicker
                continue

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
