"""Conformal thresholds where classes are as frequent as nowhere before, or a client lies.

Under label shift new rows have other shares q of the classes than those that were counted, but
within a class they are drawn alike. With counts of scores by class, F_y(t) of n_y rows, the
threshold is the least t at which

    Σ_y q_y n_y F_y(t)/(n_y + 1) ≥ level,

so that a new row is inside with at least that probability: within a class the share n_y F_y/(n_y +
1) never promises too much, as in split conformal prediction (Podkopaev and Ramdas 2021).

A malicious client sends counts that no honest client has. Honest ones agree within a class whatever
their shares of the classes are. So clients are compared class by class, and those that are furthest
from their nearest fellows are left out, as Rob-FCP does without classes (Kang et al. 2024).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedbayes.errors import ConfigError
from fedbayes.likelihoods.base import Likelihood
from fedbayes.likelihoods.conformal import BINS, GRID, Conformal, Score, count, unit


def count_by_class(found: Tensor, y: Tensor, classes: int) -> Tensor:
    """Count the scores of each class.

    Args:
        found: scores [n, 1].
        y: classes [n].
        classes: how many there are.

    Returns:
        As `conformal.count`, int64 [classes, BINS].
    """
    if not len(found):
        return torch.zeros(classes, BINS, dtype=torch.int64)
    return torch.cat([count(found[y == label]) for label in range(classes)])


def outlying(counts: Sequence[Tensor], malicious: int) -> list[int]:
    """Find the clients whose counts are furthest from those of the others.

    The distance of two clients is the Kolmogorov-Smirnov distance of their scores times
    √(n m/(n + m)), so that chance alone makes it as large for few rows as for many; squared, and
    averaged over the classes that both have. A client is judged by the sum of the distances to its
    nearest fellows, as many as are honest.

    Args:
        counts: of each client, [strata, BINS].
        malicious: how many clients are left out.

    Returns:
        Their places, the furthest first.

    Raises:
        ConfigError: they are half of the clients or more.
    """
    clients = len(counts)
    if malicious < 0 or clients <= 2 * malicious:
        raise ConfigError(
            f"{malicious} of {clients} clients are to be left out as malicious, but more than "
            f"half must be honest. Give at most {max(0, (clients - 1) // 2)}"
        )
    if not malicious:
        return []
    rows = torch.stack([one.sum(1) for one in counts]).double()  # [clients, strata]
    shares = torch.stack([one.cumsum(1) for one in counts]).double()
    shares = shares / rows.clamp_min(1)[:, :, None]
    far = torch.full((clients, clients), math.inf, dtype=torch.float64)
    for one in range(clients):
        for other in range(one):
            both = (rows[one] > 0) & (rows[other] > 0)
            if not both.any():
                continue
            n, m = rows[one][both], rows[other][both]
            gap = (shares[one][both] - shares[other][both]).abs().amax(1)
            far[one, other] = far[other, one] = (gap.square() * n * m / (n + m)).mean()
    nearest = far.sort(1).values[:, : clients - malicious - 1]
    return nearest.sum(1).argsort(descending=True)[:malicious].tolist()


def shifted_threshold(
    counts: Tensor, prior: Tensor, likelihood: Likelihood, score: Score, level: float
) -> Conformal:
    """The threshold for new rows with other shares of the classes.

    Args:
        counts: the sum of what `count_by_class` gave at clients, [classes, BINS].
        prior: shares q of the classes, [classes], which sum to 1.
        likelihood: of the targets.
        score: that was counted.
        level: the coverage that is guaranteed.
    """
    inside = counts.cumsum(1).double() / (counts.sum(1)[:, None] + 1)
    reached = (prior.double()[:, None] * inside).sum(0) >= level - _ROUNDING
    place = int(reached.int().argmax()) if bool(reached.any()) else BINS
    end = float(GRID[place]) * float(unit(likelihood)[0]) if place < len(GRID) else None
    return Conformal(level, score, (end,), int(counts.sum()))


_ROUNDING = 1e-12
"""That a sum of shares may be short by."""


def checked_prior(given: dict[str, float], names: Sequence[str]) -> Tensor:
    """Shares of classes, given by name, in the order of the classes, [classes]; 0 of a class that
    is not named.

    Raises:
        ConfigError: a name is no class, or they are no shares.
    """
    if unknown := [name for name in given if name not in names]:
        raise ConfigError(
            f"the prior has an unknown class {unknown[0]!r}. The classes are {', '.join(names[:8])}"
        )
    shares = torch.tensor([given.get(name, 0.0) for name in names], dtype=torch.float64)
    total = float(shares.sum())
    if not bool((shares >= 0).all()) or abs(total - 1) > 1e-6:
        raise ConfigError(f"the shares of the classes sum to {total:g}. They must sum to 1")
    return shares / total
