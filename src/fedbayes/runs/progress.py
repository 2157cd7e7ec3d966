"""The state of a run between two rounds."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedbayes.federation.privacy.spending import Spending
from fedbayes.federation.timing.queue import UnderWay
from fedbayes.federation.weights import none_yet
from fedbayes.runs.scores import ClientScores
from fedbayes.tensors import Tensors

DIGEST = 32
"""Bytes of a SHA-256 digest."""
UNKNOWN = torch.empty(0, DIGEST, dtype=torch.uint8)
"""Digests of private states before there is any."""


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
    """Digest of clients' seconds and spells; empty without a clock."""

    @classmethod
    def of(cls, now: float, under_way: Iterable[UnderWay], clock: str) -> "Timing":
        """The time, with clients at work.

        Args:
            now: seconds of the clock so far.
            under_way: who is at work.
            clock: digest of it.
        """
        each = list(under_way)
        return cls(
            now,
            torch.tensor([one.client for one in each], dtype=torch.int64),
            torch.tensor([one.since for one in each], dtype=torch.int64),
            torch.tensor([one.ends for one in each], dtype=torch.float64),
            clock,
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
    stored: Tensor
    """Of each client, the round that its private state on disk is of; 0 if none, int64 [S]."""
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
    digests: Tensor = UNKNOWN
    """Of each client, the SHA-256 digest of its private state on disk, uint8 [S, 32], zeros if it
    has none; [0, 32] before there is any."""
    privacy: Spending = Spending.empty()  # noqa: RUF009 - it is frozen
    """What the rounds have spent of privacy, as they were run."""
    weights: Tensor = field(default_factory=lambda: none_yet(0))
    """Of each client, the weight of its first report that counted; 0 if none did, float64 [S], or
    [0] as by an older version."""
    timing: Timing = field(default_factory=Timing)
    """Simulated time."""


def first_progress(server: Tensors, clients: int, constants: str) -> Progress:
    """The state before the first round."""
    stored = torch.zeros(clients, dtype=torch.int64)
    return Progress(0, server, ClientScores.none(clients), stored, constants=constants)
