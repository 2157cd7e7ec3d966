"""Classes that no client compares: outputs of their networks, made comparable on inputs.

A network that was trained on one class knows no other. How far it prefers its class depends most
on what all networks have in common, such as how much ink there is, and on how long it was trained.
A network of several classes finds inputs of these more clear-cut than others.
"""

import math
from collections.abc import Sequence
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


def preferences(scores: Tensor, shares: Tensor) -> Tensor:
    """How far networks prefer each class to the others, Σ_s π_sk log(p_sk / (1 − p_sk)), [n, K].

    Args:
        scores: logits of the clients, [S, n, K].
        shares: of each client in each class, [S, K].
    """
    top = scores.argmax(-1, keepdim=True)
    others = scores.logsumexp(-1, keepdim=True) + torch.log1p(-scores.softmax(-1))
    rest = scores.scatter(-1, top, -torch.inf).logsumexp(-1, keepdim=True)
    odds = scores - others.scatter(-1, top, rest)
    return (shares.to(odds)[:, None] * odds).sum(0)


def clarity(scores: Tensor, counts: Tensor, groups: Sequence[Tensor]) -> Tensor:
    """How clear-cut clients find inputs among their classes of each group G, [n, G].

    Σ_s w_s (log Σ_k exp f_sk − mean_k f_sk), over the classes k of G that client s has samples of,
    with its share w_s of all samples of G.

    Args:
        scores: logits of the clients, [S, n, K].
        counts: samples of each client and class, [S, K].
        groups: masks of the groups, [K].
    """
    found = []
    for group in groups:
        mine = (counts * group.to(counts.device)).to(scores)
        share, total = mine.sum(1) / mine.sum(), scores.new_zeros(scores.shape[1])
        for weight, f, had in zip(share, scores, mine > 0, strict=True):
            if weight > 0:
                total += weight * (f[:, had].logsumexp(-1) - f[:, had].mean(-1))
        found.append(total)
    return torch.stack(found, -1)


def scaling(clear: Tensor, warmth: Tensor) -> Tensor:
    """The matrix diag(1 / (σ T)) of `Evidence` for groups of classes, float64 [G, G].

    Args:
        clear: `clarity` on inputs, [n, G].
        warmth: T of each group, the mean temperature of its clients, [G].
    """
    std = clear.double().std(0)
    return torch.diag(1 / (std.where(std > _SMALLEST, torch.inf) * warmth.to(std)))


def whitening(preferred: Tensor, held: Tensor) -> Tensor:
    """The matrix c (R + ρ I)^(−1/2) diag(1 / σ) of `Evidence`, float64 [K, K].

    Args:
        preferred: preferences on inputs, [n, K].
        held: classes that clients have samples of, [K]; rows and columns of the others are 0.
    """
    own = preferred.double()[:, held]
    std = own.std(0)
    std = std.where(std > _SMALLEST, torch.inf)
    z = (own - own.mean(0)) / std
    values, vectors = torch.linalg.eigh(z.T @ z / (len(z) - 1))
    white = (vectors / (values.clamp_min(0) + RIDGE).sqrt()) @ vectors.T
    places = held.nonzero()[:, 0]
    found = own.new_zeros(len(held), len(held))
    found[places[:, None], places] = SPREAD * white / std
    return found


@dataclass(frozen=True)
class Evidence:
    """Log-probabilities of classes, or of groups of classes, by preferences o(x) for them.

    The preferences are standardized and whitened on inputs from the prior, and each class gets an
    offset b with which it is as frequent there as among all samples:

        log t(x) = c (R + ρ I)^(−1/2) (o(x) − μ) / σ + b + const,

    with means μ, standard deviations σ and correlations R of the preferences, c = `SPREAD` and
    ρ = `RIDGE`. This removes what networks have in common, and does not depend on the scale of any
    of them. Without ρ, no whitening stays closer to the standardized preferences (Kessy, Lewin and
    Strimmer 2018). For groups of classes preferences are standardized only (`scaling`).
    """

    weights: Tensor
    """Of the preferences, [K, K]."""
    offsets: Tensor
    """[K]."""

    @classmethod
    def of(cls, preferred: Tensor, weights: Tensor, theta: Tensor) -> Self:
        """With the offsets, which Sinkhorn's iteration finds.

        Args:
            preferred: preferences on inputs, [n, K].
            weights: see `whitening`.
            theta: frequencies of classes among all samples, [K].
        """
        scores, wanted = preferred.double() @ weights.T, theta.log().to(weights)
        offsets = -scores.mean(0)
        for _ in range(_ITERATIONS):
            log = scores - torch.logsumexp(scores + offsets, -1, keepdim=True)
            offsets = wanted - torch.logsumexp(log, 0) + math.log(len(scores))
        return cls(weights, offsets)

    def log_probabilities(self, preferred: Tensor) -> Tensor:
        """Of classes, by preferences [n, K]."""
        scores = preferred.double() @ self.weights.T + self.offsets
        return scores.log_softmax(-1).to(preferred.dtype)
