"""Clients of one class each: how far networks prefer their class, made comparable on inputs.

A network that was trained on one class knows no other. How far it prefers its class depends most
on what all networks have in common, such as how much ink there is, and on how long it was trained.
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

SPREAD, RIDGE = 1.5, 1e-3
"""Standard deviation of scores on synthetic inputs, and what is added to each preference's variance
of 1 before whitening. Chosen on validation rows (`docs/benchmarks/fusion.md`)."""
_SMALLEST = 1e-12
"""Standard deviation of preferences that are as good as constant, and count for nothing."""
_ITERATIONS = 200
"""Of Sinkhorn, for offsets."""


@dataclass(frozen=True)
class Evidence:
    """Log-probabilities of classes by preferences o(x) for them.

    The preferences are standardized and whitened on inputs from the prior, and each class gets an
    offset with which it is as frequent there as among all samples:

        log t(x) = c (R + ρ I)^(−1/2) (o(x) − μ) / σ + b + const,

    with means μ, standard deviations σ and correlations R of the preferences, c = `SPREAD` and
    ρ = `RIDGE`. Without ρ, no whitening stays closer to the preferences (Kessy, Lewin and
    Strimmer 2018).
    It removes what networks have in common, and does not depend on the scale of any of them.
    """

    weights: Tensor
    """Of the preferences, [K, K]."""
    offsets: Tensor
    """[K]."""

    @classmethod
    def of(cls, preferences: Tensor, held: Tensor, theta: Tensor) -> Self:
        """By preferences on inputs.

        Args:
            preferences: [n, K].
            held: classes that clients have samples of, [K]; the others get offsets alone.
            theta: frequencies of classes, [K].
        """
        o = preferences.double()
        own = o[:, held]
        std = own.std(0)
        std = std.where(std > _SMALLEST, torch.inf)
        z = (own - own.mean(0)) / std
        values, vectors = torch.linalg.eigh(z.T @ z / (len(z) - 1))
        whitening = (vectors / (values.clamp_min(0) + RIDGE).sqrt()) @ vectors.T
        places = held.nonzero()[:, 0]
        weights = o.new_zeros(o.shape[1], o.shape[1])
        weights[places[:, None], places] = SPREAD * whitening / std
        scores, wanted = (o - o.mean(0)) @ weights.T, theta.log().to(o)
        offsets = wanted
        for _ in range(_ITERATIONS):
            log = scores - torch.logsumexp(scores + offsets, -1, keepdim=True)
            offsets = wanted - torch.logsumexp(log, 0) + math.log(len(o))
        return cls(weights, offsets - o.mean(0) @ weights.T)

    def log_probabilities(self, preferences: Tensor) -> Tensor:
        """Of classes, by preferences [n, K]."""
        scores = preferences.double() @ self.weights.T + self.offsets
        return scores.log_softmax(-1).to(preferences.dtype)
