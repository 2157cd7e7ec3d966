"""Likelihoods of numbers: real values and counts."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbayes.core.tensors import Tensors
from fedbayes.errors import ConfigError, ModelError
from fedbayes.likelihoods.base import Likelihood, mean_of

LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Probabilities of central intervals."""
MEMBERS = 400
"""Quantiles that stand for a distribution where a score is of the whole of it."""
_FEWEST = 20
"""Those of each draw at least."""
_ROUNDING = 1e-14
"""Share of a sum of squares below which a variance is what rounding left of none."""


class Numeric(Likelihood):
    """Likelihoods of one or more columns of numbers, which are independent given f.

    Examples:
        >>> import torch
        >>> from fedbayes.core.targets import Target
        >>> from fedbayes.likelihoods import Numeric, build_likelihood
        >>> target = Target("real", ("dose",), (10.0,), (2.0,))
        >>> likelihood = build_likelihood("gaussian", target, noise=1.0)
        >>> isinstance(likelihood, Numeric), likelihood.mean(torch.zeros(1, 1, 1))
        (True, tensor([[10.]]))
    """

    higher_is_better = False
    nonnegative: ClassVar[tuple[str, ...]] = ("squared_error", "absolute_error", "squared_offset")

    @property
    def width(self) -> int:
        """Columns of the outputs behind the head."""
        return self.outputs

    @property
    def interval_levels(self) -> tuple[float, ...]:
        """Levels of central intervals to look at for calibration, of those that there are."""
        return LEVELS

    @abstractmethod
    def interval(self, draws: Tensor, level: float) -> tuple[Tensor, Tensor]:
        """The central predictive interval of each column, in the unit of the target.

        Args:
            draws: outputs under draws from a posterior, [draws, n, width].
            level: probability that the target is inside, above 0 and below 1.

        Returns:
            Lower and upper ends, [n, columns] each, float64.

        Raises:
            ConfigError: the level is invalid.
        """

    def check(self, f: Tensor, y: Tensor | None = None) -> None:
        """See that outputs and targets have the columns that belong to the likelihood, or raise a
        ModelError.
        """
        if f.shape[-1] != self.width:
            way = ""
            if getattr(self, "noise", None) == "learnt" and f.shape[-1] == self.target.columns:
                way = f". If it predicts only means, set task.likelihood={self.name} task.noise=1"
            raise ModelError(
                f"the network has {f.shape[-1]} outputs, but the likelihood {self.name} needs "
                f"{self.width}{way}"
            )
        wanted = (*f.shape[-2:-1], self.target.columns)
        if y is not None and y.shape != wanted:
            raise ModelError(f"targets have shape {tuple(y.shape)}, expected {wanted}")


class Std(NamedTuple):
    """How uncertain a prediction is: standard deviations in the unit of the target."""

    total: Tensor
    """Of the predictive distribution, [n, columns]."""
    between: Tensor
    """Of its mean between draws, the part that more data would remove, [n, columns]."""


class Parametric(Numeric):
    """Each column has a distribution whose parameters are outputs of the network.

    Examples:
        >>> import torch
        >>> from fedbayes.core.targets import Target
        >>> from fedbayes.likelihoods import Parametric, build_likelihood
        >>> target = Target("real", ("dose",), (10.0,), (2.0,))
        >>> likelihood = build_likelihood("gaussian", target, noise=1.0)
        >>> low, high = likelihood.interval(torch.zeros(1, 1, 1), 0.95)
        >>> isinstance(likelihood, Parametric), round(float(low), 2), round(float(high), 2)
        (True, 6.08, 13.92)
    """

    metric = "rmse"

    @abstractmethod
    def moments(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of each column given outputs f [..., n, width], in its own unit.

        Returns:
            [..., n, columns] each.
        """

    @abstractmethod
    def distribution(self, f: Tensor) -> Any:
        """The distribution of each column given outputs, as SciPy has it.

        Args:
            f: float64 [..., n, width], on the CPU.

        Returns:
            A frozen distribution of `scipy.stats` of shape [..., n, columns].
        """

    def mean(self, draws: Tensor) -> Tensor:
        """The mean of the mixture: the mean over draws of their means, [n, columns]."""
        return self.moments(draws)[0].mean(dim=0)

    def std(self, draws: Tensor) -> Std:
        """The standard deviation of the mixture, by the law of total variance.

        Args:
            draws: outputs under draws from a posterior, [draws, n, width].
        """
        means, variances = self.moments(draws)
        between = means.var(dim=0, correction=0)
        return Std((variances.mean(dim=0) + between).sqrt(), between.sqrt())

    def interval(self, draws: Tensor, level: float) -> tuple[Tensor, Tensor]:
        """Quantiles (1 − level) / 2 and (1 + level) / 2 of the mixture, by bisection.

        A quantile of a mixture lies between the least and the greatest of its components; of a
        single draw it is exact.
        """
        check_share(level)
        each = self.distribution(draws.detach().cpu().double())
        tail = (1 - level) / 2
        low, high = (torch.from_numpy(_quantile(each, p)) for p in (tail, 1 - tail))
        return low.to(draws.device), high.to(draws.device)

    @torch.no_grad()
    def crps(self, draws: Tensor, y: Tensor) -> Tensor:
        """The continuous ranked probability score of the mixture, ∫ (F(z) − [y ≤ z])² dz.

        It is 2 ∫ ρ_τ(y − F⁻¹(τ)) dτ of the pinball loss ρ (Gneiting & Ranjan 2011, Eq. 17), here
        of `MEMBERS` quantiles at evenly spaced levels that stand for the mixture: those of its
        components, put in order.

        Args:
            draws: outputs under draws from a posterior, [draws, n, width].
            y: targets, [n, columns].

        Returns:
            Of each sample, in the unit of the target, of several columns their mean, float64 [n].
        """
        self.check(draws, y)
        each = self.distribution(draws.detach().cpu().double())
        count = max(_FEWEST, math.ceil(MEMBERS / len(draws)))
        own = (np.arange(count) + 0.5) / count
        members = torch.from_numpy(np.asarray(each.ppf(own[:, None, None, None]))).flatten(0, 1)
        levels = (torch.arange(len(members), dtype=torch.float64) + 0.5) / len(members)
        quantiles = members.movedim(0, -1).sort(dim=-1).values
        return 2 * pinball(quantiles, y.cpu().double(), levels).mean(dim=(-2, -1))

    @torch.no_grad()
    def terms(self, draws: Tensor, y: Tensor) -> Tensors:
        """Counts, "nll", and of each column what errors of the predictive mean come to.

        They are "squared_error/NAME" and "absolute_error/NAME", and for the share of variance
        explained "offset/NAME" and "squared_offset/NAME", of the target less the training mean.
        """
        self.check(draws, y)
        terms = super().terms(draws, y)
        error = (self.mean(draws.double()) - y).abs().nan_to_num(nan=torch.inf)
        offset = y.double()
        if self.target.center:
            offset = offset - offset.new_tensor(self.target.center)
        for column, name in enumerate(self.target.names):
            terms[f"squared_error/{name}"] = error[:, column].square()
            terms[f"absolute_error/{name}"] = error[:, column]
            terms[f"offset/{name}"] = offset[:, column]
            terms[f"squared_offset/{name}"] = offset[:, column].square()
        return terms

    def metrics(self, scores: Mapping[str, float]) -> dict[str, float]:
        """Errors of the predictive mean, and the mean negative log-likelihood.

        "rmse" and "mae" are in the unit of the target, "r2" is the share of variance explained
        (NaN below two samples). Of several columns they are means over columns, as in
        scikit-learn, and "rmse/NAME" is that of each.
        """
        names = self.target.names
        rmse = {name: math.sqrt(mean_of(scores, f"squared_error/{name}")) for name in names}
        mae = [mean_of(scores, f"absolute_error/{name}") for name in names]
        r2 = [_explained(scores, name) for name in names]
        return {
            "rmse": sum(rmse.values()) / len(names),
            "mae": sum(mae) / len(names),
            "r2": sum(r2) / len(names),
            **super().metrics(scores),
            **({f"rmse/{name}": value for name, value in rmse.items()} if len(names) > 1 else {}),
        }


def _explained(scores: Mapping[str, float], name: str) -> float:
    """R² of a column; where its targets are all the same, 1 for no error and else 0."""
    count, error = scores["count"], scores[f"squared_error/{name}"]
    if count < 2:
        return math.nan
    squares = scores[f"squared_offset/{name}"]
    total = squares - scores[f"offset/{name}"] ** 2 / count
    if total <= _ROUNDING * squares:
        return float(error == 0)
    return 1 - error / total


def _quantile(each: Any, p: float, steps: int = 40) -> np.ndarray:
    """The least x at which the mean of distributions [draws, ...] has CDF(x) ≥ p, [...]."""
    from scipy.stats import rv_discrete

    components = each.ppf(p)
    low, high = components.min(axis=0), components.max(axis=0)
    if len(components) == 1:
        return np.asarray(high)
    for _ in range(steps):
        middle = low + (high - low) / 2
        below = each.cdf(middle).mean(axis=0) < p
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return np.floor(high) if isinstance(each.dist, rv_discrete) else np.asarray(high)


def pinball(quantiles: Tensor, y: Tensor, levels: Tensor) -> Tensor:
    """The pinball loss ρ_τ(y − q_τ) = max(τ (y − q_τ), (τ − 1) (y − q_τ)).

    Args:
        quantiles: q, [..., n, columns, levels].
        y: targets [n, columns].
        levels: τ, [levels].

    Returns:
        Of every column and level, in the unit of the target, as the quantiles.
    """
    error = y[..., None] - quantiles
    return torch.maximum(levels * error, (levels - 1) * error)


def check_share(share: float, what: str = "level of an interval") -> None:
    """See that a probability or a share of something is one, or raise a ConfigError."""
    if not 0 < share < 1:
        raise ConfigError(f"the {what} is {share}. Give a number above 0 and below 1")


def bounded(x: Tensor, limit: float) -> Tensor:
    """Keep x within ± limit by limit · tanh(x / limit), which is x itself near 0."""
    return limit * torch.tanh(x / limit)


def unbounded(y: Tensor, limit: float) -> Tensor:
    """The x of which `bounded` makes y; of a y at the limit or beyond a large one."""
    return limit * torch.atanh((y / limit).clamp(-1 + 1e-6, 1 - 1e-6))
