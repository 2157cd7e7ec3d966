"""Locations of points of which some may lie: what hostile clients cannot drag far."""

import torch
from torch import Tensor


def trimmed_mean(points: Tensor, share: float) -> Tensor:
    """The mean of each coordinate without its lowest and highest values (Yin et al. 2018).

    Args:
        points: [n, ...], floating point.
        share: part of the n values left out at either end, in [0, 0.5).
    """
    cut = int(share * len(points))
    return points.sort(dim=0).values[cut : len(points) - cut].mean(dim=0)


def median(points: Tensor) -> Tensor:
    """The median of each coordinate of [n, ...]; the middle of the inner two if n is even."""
    ordered = points.sort(dim=0).values
    low, high = ordered[(len(points) - 1) // 2], ordered[len(points) // 2]
    return low if len(points) % 2 else low + (high - low) / 2


def krum(points: Tensor, hostile: int, keep: int) -> Tensor:
    """The points that are nearest to their n − f − 2 nearest (Blanchard et al. 2017).

    Args:
        points: [n, p].
        hostile: number f of points that may lie; the guarantee needs n ≥ 2 f + 3.
        keep: how many points to choose; 1 is Krum, more is Multi-Krum.

    Returns:
        Indices, the best first, int64 [keep].
    """
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist").square()
    near = max(1, len(points) - hostile - 2)
    scores = distances.sort(dim=1).values[:, 1 : near + 1].sum(dim=1)
    return scores.argsort(stable=True)[:keep]
