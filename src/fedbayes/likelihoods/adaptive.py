"""Scores of adaptive prediction sets (APS; Romano, Sesia and Candès 2020)."""

import numpy as np
import torch
from torch import Tensor

from fedbayes.core import seeds


def adaptive_scores(logs: Tensor, coins: Tensor | None) -> Tensor:
    """How far down each class is in a sample's probabilities, float64 [n, classes].

    Of a class it is −log(1 − m), with m the probability of all classes that are more probable: 0
    of the
    most probable. With coins u it is m + u p, p the class's own probability, instead of m; that is
    Romano et al. (2020), equation 5, and sets are then no larger than they have to be. A logarithm
    instead of m itself tells classes apart that are very unlikely; the order is the same.

    Args:
        logs: log-probabilities [n, classes].
        coins: u of each sample [n], at least 0 and below 1; None for none.
    """
    ordered, order = logs.double().sort(dim=1, descending=True, stable=True)
    tails = ordered.flip(1).logcumsumexp(dim=1).flip(1)
    left = tails
    if coins is not None:
        below = torch.cat([tails[:, 1:], torch.full_like(tails[:, :1], -torch.inf)], dim=1)
        left = torch.logaddexp(below, ordered + torch.log1p(-coins.to(ordered))[:, None])
    return torch.empty_like(ordered).scatter_(1, order, tails[:, :1] - left)


def row_coins(start: int, rows: int) -> Tensor:
    """Coins of the rows of a file from `start` on, float64 [rows]: the same row has the same one,
    however many rows are read at a time.
    """
    generator = np.random.PCG64(seeds.sequence(0, "adaptive sets"))
    generator.advance(start)
    return torch.from_numpy(np.random.Generator(generator).random(rows))
