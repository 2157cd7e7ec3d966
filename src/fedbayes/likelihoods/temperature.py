"""A temperature that makes probabilities of classes true, from sums that clients send.

Predictions p become p^(1/T), normalized, with the T of the least negative log-likelihood of
held-out rows (Guo et al. 2017); of several draws p is their mean (Rahaman and Thiery 2021). Clients
send that sum, its slope and its curvature on a grid of temperatures that all share, once. Sums add,
so the server sees what the rows of all clients together would say, and finds the minimum between
two points of the grid from slopes and curvatures.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbayes.errors import DataError
from fedbayes.likelihoods.base import Classes

LIMIT = 100.0
"""Temperatures are between 1 / LIMIT and LIMIT."""
POINTS = 401
GRID = torch.linspace(-math.log(LIMIT), math.log(LIMIT), POINTS, dtype=torch.float64)
"""Logarithms of 1 / T at which sums are taken, 2.3 % apart."""
_BATCH = 200
"""Samples of which the grid is computed at a time."""


@dataclass(frozen=True)
class TemperatureSums:
    """What a client says of its held-out rows; the sums of several clients add."""

    nll: Tensor
    """Sum of −log p of the true class at each point of `GRID`, float64 [POINTS]."""
    slope: Tensor
    """Its derivative by the logarithm of 1 / T."""
    curvature: Tensor
    """The second one."""
    rows: int
    """That are in the sums."""
    left_out: int
    """Rows of which nothing is predicted, or that the true class is impossible."""

    def __add__(self, other: "TemperatureSums") -> "TemperatureSums":
        return TemperatureSums(
            self.nll + other.nll,
            self.slope + other.slope,
            self.curvature + other.curvature,
            self.rows + other.rows,
            self.left_out + other.left_out,
        )

    @property
    def numbers(self) -> int:
        """How many numbers that is."""
        return 3 * POINTS + 2

    def temperature(self) -> float:
        """The T of the least sum.

        Raises:
            DataError: there is none: predictions are all right, or worse than chance, or there are
                no rows.
        """
        if not self.rows:
            raise DataError("no row was counted, so there is no temperature")
        place = POINTS - 1 - int(self.nll.flip(0).argmin())  # the last of several
        if place in (0, POINTS - 1):
            what = (
                "the counted rows are predicted no better than by chance"
                if place == 0
                else f"the likeliest class is the true one in all {self.rows:,} counted rows, or "
                "predictions are almost flat"
            )
            raise DataError(
                f"no temperature between {1 / LIMIT:g} and {LIMIT:g} is the best: {what}. Count "
                "more rows with --share, or train longer"
            )
        from scipy.interpolate import CubicHermiteSpline
        from scipy.optimize import brentq

        # The sum falls, then rises: its slope is 0 next to the least point.
        first = place - 1 if float(self.slope[place]) > 0 else place
        ends = slice(first, first + 2)
        slope = CubicHermiteSpline(
            GRID[ends].numpy(), self.slope[ends].numpy(), self.curvature[ends].numpy()
        )
        if not float(self.slope[first]) <= 0 <= float(self.slope[first + 1]):
            return math.exp(-float(GRID[place]))
        return math.exp(-float(brentq(slope, *GRID[ends].tolist(), xtol=1e-14)))


@torch.no_grad()
def temperature_sums(likelihood: Classes, draws: Tensor, y: Tensor) -> TemperatureSums:
    """What these predictions add.

    Args:
        likelihood: of the outputs.
        draws: outputs under draws from a posterior, [draws, n, width].
        y: classes, [n].
    """
    logs = likelihood.log_probabilities(draws.double()).cpu()
    true = logs.gather(1, y.cpu()[:, None])[:, 0]
    fine = likelihood.told(draws).cpu() & torch.isfinite(true)
    found = torch.zeros(3, POINTS, dtype=torch.float64)
    powers = GRID.exp()[:, None]
    for log, own in zip(
        torch.split(logs[fine], _BATCH), torch.split(true[fine], _BATCH), strict=True
    ):
        scaled = powers[..., None] * log
        whole = torch.logsumexp(scaled, dim=-1)
        p, bounded = (scaled - whole[..., None]).exp(), log.nan_to_num(neginf=0.0)
        mean = (p * bounded).sum(dim=-1)
        variance = (p * (bounded - mean[..., None]).square()).sum(dim=-1)
        gap = powers * (mean - own)
        parts = (whole - powers * own, gap, gap + powers.square() * variance)
        found += torch.stack([part.sum(dim=1) for part in parts])
    return TemperatureSums(found[0], found[1], found[2], int(fine.sum()), int((~fine).sum()))


def cooled(logs: Tensor, temperature: float) -> Tensor:
    """Log-probabilities [..., classes] at a temperature."""
    return torch.log_softmax(logs / temperature, dim=-1)
