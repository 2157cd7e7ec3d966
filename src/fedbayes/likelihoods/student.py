"""Real values with noise of heavy tails."""

from functools import cache
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, distributions

from fedbayes.likelihoods.noise import LocationScale


class StudentT(LocationScale):
    """y = center + scale · (f + σ ε), ε of Student's t distribution, for each column.

    σ is the scale of the distribution; its standard deviation is σ √(df / (df − 2)).
    """

    name = "student-t"
    summary = "real values with outliers: noise of Student's t distribution"

    df: float = Field(4.0, gt=2, description="degrees of freedom. Small values give heavy tails")

    def noisy(self, location: Tensor, scale: Tensor) -> distributions.Distribution:
        """The distribution of a standardized target."""
        return distributions.StudentT(self.df, location, scale, validate_args=False)

    @property
    def variance(self) -> float:
        """Of Student's t distribution, df / (df − 2)."""
        return self.df / (self.df - 2)

    def divergence(self, f: Tensor, g: Tensor) -> Tensor:
        """∫ p_f (log p_f − log p_g), by the midpoint rule over the quantiles of p_f, [..., n].

        The integral has no closed form; 512 quantiles leave about a thousandth of it.
        """
        (mean, log_std), (other, wide) = self.standardized(f), self.standardized(g)
        z = _quantiles(self.df).to(f)
        u = (mean - other)[..., None] + log_std.exp()[..., None] * z
        u = u * (-wide).exp()[..., None]
        tails = torch.log1p(u.square() / self.df) - torch.log1p(z.square() / self.df)
        return (wide - log_std + (self.df + 1) / 2 * tails.mean(dim=-1)).sum(dim=-1)

    def moments(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of each column, [..., n, columns] each."""
        mean, scale = self.own_unit(f)
        return mean, scale.square() * self.variance

    def distribution(self, f: Tensor) -> Any:
        """Student's t distributions [..., n, columns]."""
        from scipy.stats import t

        return t(self.df, *(part.numpy() for part in self.own_unit(f)))


@cache
def _quantiles(df: float, count: int = 512) -> Tensor:
    """Quantiles of the t distribution at the middles of so many pieces of [0, 1], float64."""
    from scipy.stats import t

    return torch.from_numpy(t(df).ppf((np.arange(count) + 0.5) / count))
