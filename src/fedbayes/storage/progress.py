"""The state of a run between two rounds."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedbayes.core.by_client import ByClient
from fedbayes.core.tensors import Tensors, named, pack, part
from fedbayes.federation.clock.queue import UnderWay
from fedbayes.federation.privacy.spending import Spending
from fedbayes.storage.scores import ClientScores

DIGEST = 32
"""Bytes of a SHA-256 digest."""


def _nobody(dtype: torch.dtype) -> Tensor:
    return torch.zeros(0, dtype=dtype)


@dataclass(frozen=True)
class Timing:
    """Simulated time between two rounds, and who is at work then in asynchronous rounds."""

    now: float = 0.0
    """Seconds of the clock so far."""
    clients: Tensor = field(default_factory=lambda: _nobody(torch.int64))
    """Who is at work, int64 [n]."""
    since: Tensor = field(default_factory=lambda: _nobody(torch.int64))
    """The round in which each of them started, int64 [n]."""
    ends: Tensor = field(default_factory=lambda: _nobody(torch.float64))
    """When their reports come, in seconds of the clock, float64 [n]."""
    clock: str = ""
    """Digest of clients' seconds, rates and spells; empty without a clock."""
    first: int = 0
    """Whose turn it is to start, where clients of asynchronous rounds start in a cycle."""

    @classmethod
    def of(cls, now: float, under_way: Iterable[UnderWay], clock: str, first: int = 0) -> "Timing":
        """The time, with clients at work.

        Args:
            now: seconds of the clock so far.
            under_way: who is at work.
            clock: digest of it.
            first: whose turn it is to start.
        """
        each = list(under_way)
        return cls(
            now,
            torch.tensor([one.client for one in each], dtype=torch.int64),
            torch.tensor([one.since for one in each], dtype=torch.int64),
            torch.tensor([one.ends for one in each], dtype=torch.float64),
            clock,
            first,
        )

    @property
    def under_way(self) -> tuple[UnderWay, ...]:
        """Who is at work."""
        columns = self.ends.tolist(), self.since.tolist(), self.clients.tolist()
        return tuple(map(UnderWay, *columns))


@dataclass(frozen=True)
class Progress:
    """The state of a run between two rounds."""

    round: int
    """Rounds done."""
    server: Tensors
    """The server's state, packed."""
    clients: ClientScores
    """Of each client, scores of the model that it last reported."""
    states: ByClient
    """Of each client with a private state on disk, the `round` that it is of, int64 [n], and the
    SHA-256 `digest` of it, uint8 [n, 32], zeros as by older versions."""
    bytes_down: int = 0
    """Bytes sent to clients so far."""
    bytes_up: int = 0
    """Bytes received from clients so far."""
    refused: int = 0
    """Reports refused so far."""
    seconds: float = 0.0
    """Time that the rounds took."""
    constants: str = ""
    """Digest of the frozen parameters that the rounds were made with; empty without any."""
    privacy: Spending = Spending.empty()  # noqa: RUF009 - it is frozen
    """What the rounds have spent of privacy, as they were run."""
    weights: ByClient = field(default_factory=ByClient)
    """Of each client that a report has counted of, the `weight` of the first one, float64 [n]."""
    timing: Timing = field(default_factory=Timing)
    """Simulated time."""
    keys: ByClient = field(default_factory=ByClient)
    """Of each client of a federation that came with a key, its SHA-256 `digest`, uint8 [n, 32]."""

    @property
    def client_keys(self) -> dict[int, bytes]:
        """The same, by client."""
        digests = self.keys.columns.get("digest", torch.empty(0, DIGEST, dtype=torch.uint8))
        return dict(zip(self.keys.clients.tolist(), map(bytes, digests.tolist()), strict=True))


def with_keys(known: ByClient, keys: Mapping[int, bytes]) -> ByClient:
    """Keys as a checkpoint has them, with these instead of those that clients had."""
    digests = [list(digest) for digest in keys.values()]
    column = torch.tensor(digests, dtype=torch.uint8).reshape(-1, DIGEST)
    order = torch.tensor(list(keys), dtype=torch.int64).sort()
    return known.having(order.values, {"digest": column[order.indices]})


def first_progress(server: Tensors, constants: str) -> Progress:
    """The state before the first round."""
    return Progress(0, server, ClientScores(), ByClient(), constants=constants)


def renewed(stored: Tensors) -> Tensors:
    """The tensors of a checkpoint as this version writes them.

    Older versions had a row for each client, whether anything was known of it or not.
    """
    if "stored" not in stored:
        return stored
    kept = {n: t for n, t in stored.items() if n not in _DENSE and not n.startswith(_SCORES)}
    scores = part(stored, _SCORES)
    rounds = stored["stored"]
    digests = stored.get("digests", torch.empty(0, DIGEST, dtype=torch.uint8))
    if not len(digests):
        digests = torch.zeros(len(rounds), DIGEST, dtype=torch.uint8)
    states = ByClient.of({"round": rounds, "digest": digests}, rounds > 0)
    weights = stored.get("weights", torch.empty(0, dtype=torch.float64))
    return (
        kept
        | named("clients", pack(ClientScores(ByClient.of(scores, scores["count"] > 0))))
        | named("states", pack(states))
        | named("weights", pack(ByClient.of({"weight": weights}, weights > 0)))
    )


_DENSE = ("stored", "digests", "weights")
_SCORES = "clients/sums"
