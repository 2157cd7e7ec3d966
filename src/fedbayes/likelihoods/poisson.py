"""Counts."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedbayes.core.tensors import Tensors
from fedbayes.likelihoods.base import constants, mean_of
from fedbayes.likelihoods.numeric import Parametric, bounded, unbounded

LIMIT = 20.0
"""Bound of the log rate: rates are between e^-20 and e^20 (4.9e8) times the center."""


class Poisson(Parametric):
    """y ~ Poisson(center · exp(f)), for each column; the center is 1 unless the target has one.

    The log rate is bounded by 20 · tanh(f / 20), which is f near 0: exp(f) of a bad start would
    overflow.
    """

    name = "poisson"
    summary = "counts, by the logarithm of their rate"
    kinds = ("count",)
    nonnegative = ("nll", "deviance", *Parametric.nonnegative)

    @property
    def outputs(self) -> int:
        """The log rate of every column."""
        return self.target.columns

    def log_rate(self, f: Tensor) -> Tensor:
        """Logarithm of the mean of each column, [..., n, columns]."""
        log_rate = bounded(f, LIMIT)
        if self.target.center:
            log_rate = log_rate + constants(self.target.center, f).log()
        return log_rate

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Log-probability of counts y [n, columns], summed over columns, [..., n]."""
        self.check(f, y)
        log_rate = self.log_rate(f)
        return (y * log_rate - log_rate.exp() - torch.lgamma(y + 1)).sum(dim=-1)

    def moments(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of each column, which are the same, [..., n, columns] each."""
        rate = self.log_rate(f).exp()
        return rate, rate

    def pooled(self, draws: Tensor, weights: Tensor) -> Tensor:
        """Outputs of the weighted mean of the networks' rates, [n, columns]."""
        logs = bounded(draws, LIMIT) + weights.to(draws).log()[:, None, None]
        return unbounded(torch.logsumexp(logs, dim=0), LIMIT)

    def divergence(self, f: Tensor, g: Tensor) -> Tensor:
        """λ log(λ / μ) − λ + μ of the rates λ of f and μ of g, summed over columns, [..., n]."""
        log_rate, other = self.log_rate(f), self.log_rate(g)
        rate = log_rate.exp()
        return (rate * (log_rate - other) - rate + other.exp()).sum(dim=-1)

    def distribution(self, f: Tensor) -> Any:
        """Poisson distributions [..., n, columns]."""
        from scipy.stats import poisson

        return poisson(self.log_rate(f).exp().numpy())

    @torch.no_grad()
    def terms(self, draws: Tensor, y: Tensor) -> Tensors:
        """Those of numbers, and "deviance", summed over columns: 2 (y log(y / μ) − y + μ) with the
        predictive mean μ.
        """
        terms = super().terms(draws, y)
        y, mean = y.double(), self.mean(draws.double())
        deviance = 2 * (torch.xlogy(y, y / mean) - y + mean).sum(dim=-1)
        return terms | {"deviance": deviance.nan_to_num(nan=torch.inf)}

    def metrics(self, scores: Mapping[str, float]) -> dict[str, float]:
        """Those of numbers, and the mean Poisson deviance, of several columns their mean."""
        deviance = mean_of(scores, "deviance") / self.target.columns
        return super().metrics(scores) | {"deviance": deviance}
