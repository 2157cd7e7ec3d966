"""A temperature that makes probabilities true, from sums that clients send.

Predictions p become p^(1/T), normalized, with the T of the least negative log-likelihood of
held-out rows (Guo et al. 2017); of several draws p is their mean (Rahaman and Thiery 2021). Of
labels each is a choice of its own, between yes and no. Clients
send that sum, its slope and its curvature on a grid of temperatures that all share, once. Sums add,
so the server sees what the rows of all clients together would say, and finds the minimum between
two points of the grid from slopes and curvatures.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor
from torch.nn import functional

from fedbayes.core.plausible import LARGEST, check_count
from fedbayes.core.tensors import PREDICTED, Samples, Tensors
from fedbayes.errors import DataError, MessageError
from fedbayes.likelihoods.base import Classes, Likelihood, finite
from fedbayes.likelihoods.multilabel import Multilabel

LIMIT = 100.0
"""Temperatures are between 1 / LIMIT and LIMIT."""
POINTS = 401
GRID = torch.linspace(-math.log(LIMIT), math.log(LIMIT), POINTS, dtype=torch.float64)
"""Logarithms of 1 / T at which sums are taken, 2.3 % apart."""
_ROUNDING = 1e-9
"""Part of its sums by which what a client says may contradict itself."""
PRIOR = 0.5
"""Standard deviation of log T around 0 in the prior of a temperature."""
_BATCH = 200
"""Samples of which the grid is computed at a time."""


@dataclass(frozen=True)
class TemperatureSums:
    """A client's sums over its held-out rows; sums of several clients can be added."""

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

    @classmethod
    def nothing(cls) -> "TemperatureSums":
        """Of no rows."""
        zeros = torch.zeros(POINTS, dtype=torch.float64)
        return cls(zeros, zeros, zeros, 0, 0)

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

    def check(self, where: str) -> None:
        """Check that rows can have these sums, or raise a DataError.

        As a function of 1 / T, −log p is convex and not below 0, and has the stated slope.
        """
        check_count(self.rows, "the number of rows", where)
        check_count(self.left_out, "the number of rows left out", where)
        several = self.nll, self.slope, self.curvature
        if any(part.shape != GRID.shape for part in several):
            raise DataError(f"{where}: there are {POINTS} points, but its sums have others")
        if not all(bool((part.abs() <= LARGEST).all()) for part in several):
            raise DataError(f"{where}: its sums are not finite in float32")
        powers = GRID.exp()
        slope, step = self.slope / powers, powers.diff()
        # By how much the sums rise from point to point, between their slopes at both ends.
        least, most = slope[:-1] * step, slope[1:] * step
        room = _ROUNDING * (self.nll.abs().amax() + (slope.abs()[1:] * step).amax() + 1)
        rise = self.nll.diff()
        convex = (least <= rise + room) & (rise <= most + room)
        if bool((self.nll < -room).any()) or not bool(convex.all()):
            raise DataError(f"{where}: these sums are impossible: −log p is convex in 1 / T")

    def times(self, weight: float) -> "TemperatureSums":
        """The sums with every row counted `n` times."""
        sums = (self.nll * weight, self.slope * weight, self.curvature * weight)
        return TemperatureSums(*sums, self.rows, self.left_out)

    def with_prior(self) -> "TemperatureSums":
        """With −log of a normal prior of log T, so that few rows find a T near 1 and no endless
        one.

        Where almost every row is right, a few rows decide T: it may be near 0, and the first
        confident error on new rows then costs more than T ever gained. Many rows outweigh the
        prior.
        """
        z = GRID / PRIOR
        curvature = torch.full_like(z, 1 / PRIOR**2)
        return self + TemperatureSums(z.square() / 2, z / PRIOR, curvature, 0, 0)

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
                "the predictions of the counted rows are not better than chance, or are "
                "confidently wrong"
                if place == 0
                else f"the predicted class is correct in all {self.rows:,} counted rows, or "
                "predictions are almost uniform"
            )
            raise DataError(
                f"no temperature between {1 / LIMIT:g} and {LIMIT:g} is the best: {what}"
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

    def tensors(self) -> Tensors:
        """As a client sends it."""
        counts = torch.tensor([self.rows, self.left_out])
        return {"sums": torch.stack([self.nll, self.slope, self.curvature]), "counts": counts}

    @classmethod
    def of(cls, told: Tensors) -> "TemperatureSums":
        """The inverse of `tensors`, of what a stranger may have sent.

        Raises:
            MessageError: it is no such sum.
        """
        sums, counts = told.get("sums"), told.get("counts")
        if told.keys() != {"sums", "counts"} or sums is None or counts is None:
            raise MessageError("it sent no sums for a temperature")
        whole = counts.dtype == torch.int64 and counts.shape == (2,) and bool((counts >= 0).all())
        fits = sums.dtype == torch.float64 and sums.shape == (3, POINTS)
        if not (whole and fits):
            raise MessageError("its sums for a temperature are invalid")
        found = cls(*sums, *counts.tolist())
        try:
            found.check("its sums for a temperature")
        except DataError as error:
            raise MessageError(str(error)) from None
        return found


def has_temperature(likelihood: Likelihood) -> bool:
    """Whether predictions of a likelihood can be at a temperature."""
    if isinstance(likelihood, Classes):
        return type(likelihood).outputs_of is not Classes.outputs_of
    return isinstance(likelihood, Multilabel)


def at_temperature(likelihood: Likelihood, draws: Tensor, temperature: float) -> Tensor:
    """Outputs of a single network that predicts what these draws do at a temperature.

    Args:
        likelihood: of the outputs, one that `has_temperature`.
        draws: outputs under draws from a posterior, [draws, n, width].
        temperature: above 0.

    Returns:
        [1, n, width].
    """
    if isinstance(likelihood, Classes):
        return likelihood.outputs_of(likelihood.log_probabilities(draws) / temperature)[None]
    return _logits(likelihood, draws)[None] / temperature


def sampled_at(
    likelihood: Likelihood, draw: Callable[[Tensor], Tensor], temperature: float | None
) -> Callable[[Tensor], Tensor]:
    """A model as a function from inputs to outputs [draws, n, width], at a temperature if any."""
    if temperature is None:
        return draw

    def cool(x: Tensor) -> Tensor:
        draws = draw(x)
        return at_temperature(likelihood, draws.double(), temperature).to(draws.dtype)

    return cool


def _logits(likelihood: Likelihood, draws: Tensor) -> Tensor:
    """Logits of the draws' mean probabilities of labels, [n, labels]."""
    return likelihood.pooled(draws, draws.new_full((len(draws),), 1 / len(draws)))


@torch.no_grad()
def sums_of(
    likelihood: Likelihood, draw: Callable[[Tensor], Tensor], samples: Samples
) -> TemperatureSums:
    """What a model's predictions of some samples, possibly none, add.

    Args:
        likelihood: of the outputs, one that `has_temperature`.
        draw: inputs [n, ...] to outputs [draws, n, width].
        samples: on the device of the network.
    """
    found = (temperature_sums(likelihood, draw(x), y) for x, y in samples.batches(PREDICTED))
    return reduce(add, found, TemperatureSums.nothing())


@torch.no_grad()
def temperature_sums(likelihood: Likelihood, draws: Tensor, y: Tensor) -> TemperatureSums:
    """What these predictions add.

    Args:
        likelihood: of the outputs.
        draws: outputs under draws from a posterior, [draws, n, width].
        y: classes [n], or labels [n, labels].
    """
    if isinstance(likelihood, Classes):
        logs, told = likelihood.log_probabilities(draws.double()), likelihood.told(draws)
        chosen = y
    else:  # every label of a sample is a choice between no and yes
        logits = _logits(likelihood, draws.double())
        logs = functional.logsigmoid(torch.stack([-logits, logits], dim=-1)).flatten(0, 1)
        chosen, told = y.flatten().long(), finite(draws)
    logs = logs.cpu()
    true = logs.gather(1, chosen.cpu()[:, None])[:, 0]
    each = max(1, len(true) // max(1, len(y)))
    rows = told.cpu() & torch.isfinite(true).reshape(-1, each).all(dim=1)
    fine = rows.repeat_interleave(each)
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
    return TemperatureSums(found[0], found[1], found[2], int(rows.sum()), int((~rows).sum()))


def cooled(logs: Tensor, temperature: float) -> Tensor:
    """Log-probabilities [..., classes] at a temperature."""
    return torch.log_softmax(logs / temperature, dim=-1)
