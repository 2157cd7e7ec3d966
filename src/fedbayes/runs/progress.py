"""The state of a run between two rounds."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedbayes.federation.privacy.spending import Spending
from fedbayes.federation.weights import none_yet
from fedbayes.runs.scores import ClientScores
from fedbayes.tensors import Tensors

DIGEST = 32
"""Bytes of a SHA-256 digest."""
UNKNOWN = torch.empty(0, DIGEST, dtype=torch.uint8)
"""Digests of private states before there is any."""


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


def first_progress(server: Tensors, clients: int, constants: str) -> Progress:
    """The state before the first round."""
    stored = torch.zeros(clients, dtype=torch.int64)
    return Progress(0, server, ClientScores.none(clients), stored, constants=constants)
