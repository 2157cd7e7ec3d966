"""Split conformal prediction in a federation: sets and intervals with a coverage guarantee.

A score says how badly a target fits a prediction. Clients count the scores of rows that were held
out, on a grid that all share; the sum of the counts gives the threshold under which a share of new
scores will be. The promise holds for any model, as long as new rows are drawn like those that were
counted (Vovk et al. 2005; Romano et al. 2019; Angelopoulos and Bates 2023).

Where K clients are unlike, and client k always has n_k of the N counted rows, only the rows of one
client are alike. A new row, of client k with probability (n_k + 1)/(N + K), is then inside with at
least level (N + 1)/(N + K), by the argument of Lu et al. (2023).
"""

import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

import torch
from torch import Tensor

from fedbayes.core.plausible import check_count
from fedbayes.errors import ConfigError, DataError
from fedbayes.likelihoods.adaptive import adaptive_scores
from fedbayes.likelihoods.base import Classes, Likelihood
from fedbayes.likelihoods.numeric import Numeric, check_share

Score = Literal["probability", "adaptive", "adaptive-random", "residual", "quantile"]
SCORES: dict[Score, str] = {
    "probability": "classes: −log of the probability of the true class",
    "adaptive": "classes: −log of the probability of the true class and all less probable ones "
    "(APS)",
    "adaptive-random": "classes: the same with a random share of the true class's own (APS)",
    "residual": "numbers: distance from the predictive mean",
    "quantile": "numbers: distance outside of the model's own interval (CQR)",
}
"""Scores by name, in words."""
OF_CLASSES: tuple[Score, ...] = ("probability", "adaptive", "adaptive-random")
_LEAST, _LARGEST, _STEPS = 1e-8, 1e4, 4096
_HALF = torch.logspace(math.log10(_LEAST), math.log10(_LARGEST), _STEPS, dtype=torch.float64)
GRID = torch.cat([-_HALF.flip(0), torch.zeros(1, dtype=torch.float64), _HALF])
"""Where the bins of scores end, float64 [edges]: 0.7 % apart on either side of 0. Scores of numbers
are in units of the target's standard deviation, those of classes in nats."""
BINS = len(GRID) + 1
"""Bin b holds the scores in (GRID[b − 1], GRID[b]], the last one all above."""


@dataclass(frozen=True)
class Conformal:
    """A threshold of scores, and what they are."""

    level: float
    """Share of new rows whose score the threshold promises to be above, or equal to."""
    score: Score
    threshold: tuple[float | None, ...]
    """Of classes one, in nats; of numbers one for each target column, in its unit. None where there
    is no end, as where too few rows were counted for the level: sets are whole then, and intervals
    endless."""
    rows: int
    """That were counted."""

    def __post_init__(self) -> None:
        """See that the numbers are possible."""
        ends = [end for end in self.threshold if end is not None]
        if not (0 < self.level < 1 and self.threshold and all(map(math.isfinite, ends))):
            raise ValueError("a conformal calibration needs a level and a threshold")

    @property
    def too_few(self) -> bool:
        """Whether there are too few rows for a threshold of the level."""
        return _rank(self.level, self.rows) > self.rows

    def fits(self, likelihood: Likelihood) -> bool:
        """Whether it is of predictions of this likelihood."""
        if isinstance(likelihood, Classes):
            return self.score in OF_CLASSES and len(self.threshold) == 1
        if not isinstance(likelihood, Numeric) or self.score in OF_CLASSES:
            return False
        return len(self.threshold) == likelihood.target.columns

    def sets(self, likelihood: Classes, draws: Tensor, coins: Tensor | None = None) -> Tensor:
        """Which classes are in the set of each sample, bool [n, classes].

        Args:
            likelihood: of the outputs.
            draws: outputs under draws from a posterior, [draws, n, width].
            coins: of `adaptive-random` one for each sample [n], at least 0 and below 1.
        """
        return _of_classes(likelihood, draws, self.score, coins) <= self._ends(draws)

    def interval(self, likelihood: Numeric, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Lower and upper ends, float64 [n, columns], in the unit of the target; of a count at
        least 0. Arguments as for `sets`.
        """
        ends = self._ends(draws)
        low, high = _inner(likelihood, draws, self.score, self.level)
        middle = (low + high) / 2
        low, high = torch.minimum(low - ends, middle), torch.maximum(high + ends, middle)
        if likelihood.target.kind == "count":
            nearest = middle.round().clamp_min(0.0)  # between two counts there may be none
            low = torch.minimum(low.ceil().clamp_min(0.0), nearest)
            high = torch.maximum(high.floor().clamp_min(0.0), nearest)
        return low, high

    def _ends(self, like: Tensor) -> Tensor:
        ends = [math.inf if end is None else end for end in self.threshold]
        return torch.tensor(ends, dtype=torch.float64, device=like.device)


def choose_score(likelihood: Likelihood, level: float, asked: str = "auto") -> Score:
    """The score of a likelihood.

    Args:
        likelihood: of the targets.
        level: the guaranteed coverage.
        asked: a name, or `auto`: of classes `probability`, of numbers `quantile`, or if the
            likelihood has no interval of the level `residual`.

    Raises:
        ConfigError: the level or the name is invalid, or the score is not one of such targets.
    """
    check_share(level, "level")
    kinds: tuple[Score, ...] = ()
    if isinstance(likelihood, Classes):
        kinds = OF_CLASSES
    elif isinstance(likelihood, Numeric):
        kinds = ("quantile", "residual") if _has_interval(likelihood, level) else ("residual",)
    if not kinds:
        raise ConfigError(
            "conformal prediction works with classes and numbers, and the likelihood "
            f"{likelihood.name} predicts neither"
        )
    if asked == "auto":
        return kinds[0]
    for kind in kinds:
        if kind == asked:
            return kind
    why = ""
    if asked == "quantile" and kinds == ("residual",):
        why = f": the model has no quantiles for an interval of {100 * level:g}%"
    raise ConfigError(
        f"the score {asked!r} does not work with the likelihood {likelihood.name}{why}. Choose "
        f"{', '.join(kinds)}"
    )


def _has_interval(likelihood: Numeric, level: float) -> bool:
    try:
        likelihood.interval(torch.zeros(1, 1, likelihood.width), level)
    except ConfigError:
        return False
    return True


@torch.no_grad()
def scores(
    likelihood: Likelihood,
    draws: Tensor,
    y: Tensor,
    score: Score,
    level: float,
    coins: Tensor | None = None,
) -> Tensor:
    """How badly targets fit predictions, float64 [n, columns], as `GRID` has them; inf where an
    output is not finite.

    Args:
        likelihood: of the targets.
        draws: outputs under draws from a posterior, [draws, n, width].
        y: targets, [n] or [n, columns].
        score: its name.
        level: the guaranteed coverage.
        coins: as for `Conformal.sets`.
    """
    if isinstance(likelihood, Classes):
        found = _of_classes(likelihood, draws, score, coins).gather(1, y[:, None])
    else:
        assert isinstance(likelihood, Numeric)
        low, high = _inner(likelihood, draws, score, level)
        found = torch.maximum(low - y, y - high) / unit(likelihood).to(draws.device)
    return found.nan_to_num(nan=math.inf, posinf=math.inf, neginf=math.inf)


def _of_classes(likelihood: Classes, draws: Tensor, score: Score, coins: Tensor | None) -> Tensor:
    """Scores of all classes, float64 [n, classes]."""
    logs = likelihood.log_probabilities(draws).double()
    if score == "probability":
        return -logs
    assert (coins is not None) == (score == "adaptive-random")
    return adaptive_scores(logs, coins)


def _inner(likelihood: Numeric, draws: Tensor, score: Score, level: float) -> tuple[Tensor, Tensor]:
    """The interval that a threshold of 0 would give, float64 [n, columns] each."""
    if score == "quantile":
        low, high = likelihood.interval(draws.double(), level)
        return low.double(), high.double()
    mean = likelihood.mean(draws.double())
    return mean, mean


def unit(likelihood: Likelihood) -> Tensor:
    """What scores are divided by, float64 [columns]: a number's standard deviation in training, a
    count's mean; 1 for classes.
    """
    target = likelihood.target
    if target.classes:
        return torch.ones(1, dtype=torch.float64)
    given = target.scale or target.center or (1.0,) * target.columns
    return torch.tensor([abs(value) or 1.0 for value in given], dtype=torch.float64)


def count(found: Tensor) -> Tensor:
    """How many scores [n, columns] are in each bin, int64 [columns, BINS]: what a client sends."""
    place = torch.bucketize(found.cpu(), GRID)
    return torch.stack([torch.bincount(column, minlength=BINS) for column in place.T])


def check_counts(counts: Tensor, columns: int, rows: int, where: str) -> None:
    """See that a client's counts of scores match its number of rows, or raise a DataError."""
    check_count(rows, "the number of rows", where)
    if tuple(counts.shape) != (columns, BINS) or counts.is_floating_point():
        raise DataError(f"{where}: counts of scores must be integers, {columns} times {BINS:,}")
    if bool((counts < 0).any()) or bool((counts > rows).any()):
        raise DataError(
            f"{where}: a bin of scores has a negative count, or more rows than there are"
        )
    if any(total != rows for total in counts.sum(dim=1).tolist()):
        raise DataError(f"{where}: its counts of scores do not add to {rows:,} rows")


def _rank(level: float, rows: int) -> int:
    """Which of so many scores, from the smallest, a new one is at most with this probability."""
    return math.ceil(Decimal(str(level)) * (rows + 1))


def threshold(counts: Tensor, likelihood: Likelihood, score: Score, level: float) -> Conformal:
    """The threshold that clients' counts together give.

    With n scores it is at least the ⌈(n + 1) level⌉-th smallest: a new score, drawn like them, is
    at most that with probability level or more. It is the end of that score's bin, so never below.

    Args:
        counts: the sum of what `count` gave at clients, [columns, BINS].
        likelihood: of the targets.
        score: that was counted.
        level: the guaranteed coverage.
    """
    rows = int(counts[0].sum())
    rank = _rank(level, rows)
    ends: list[float | None] = []
    for column, scale in zip(counts, unit(likelihood).tolist(), strict=True):
        place = int(torch.searchsorted(column.cumsum(0), rank))
        ends.append(float(GRID[place]) * scale if rank <= rows and place < len(GRID) else None)
    return Conformal(level, score, tuple(ends), rows)
