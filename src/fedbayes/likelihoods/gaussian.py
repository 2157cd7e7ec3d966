"""Real values with Gaussian noise."""

import math
from typing import Any

from torch import Tensor, distributions

from fedbayes.likelihoods.noise import LocationScale


class Gaussian(LocationScale):
    """y ~ N(center + scale · f, (scale · σ)²), for each column."""

    name = "gaussian"
    summary = "real values with Gaussian noise"

    def noisy(self, location: Tensor, scale: Tensor) -> distributions.Distribution:
        """The distribution of a standardized target."""
        return distributions.Normal(location, scale, validate_args=False)

    def divergence(self, f: Tensor, g: Tensor) -> Tensor:
        """Log σ_g / σ_f + (σ_f² + (f − g)²) / 2 σ_g² − 1/2, summed over columns, [..., n]."""
        (mean, log_std), (other, wide) = self.standardized(f), self.standardized(g)
        ratio = log_std - wide
        offset = (mean - other) * (-wide).exp()
        return (((2 * ratio).exp() + offset.square() - 1) / 2 - ratio).sum(dim=-1)

    def log_power(self, f: Tensor, power: float) -> Tensor:
        """(1 − power)/2 · log 2πσ² − log(power)/2 of each column, summed, [..., n]."""
        _, scale = self.own_unit(f)
        spread = (math.log(2 * math.pi) + 2 * scale.log()) / 2
        return ((1 - power) * spread - math.log(power) / 2).sum(dim=-1)

    def moments(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of each column, [..., n, columns] each."""
        mean, std = self.own_unit(f)
        return mean, std.square()

    def distribution(self, f: Tensor) -> Any:
        """Normal distributions [..., n, columns]."""
        from scipy.stats import norm

        return norm(*(part.numpy() for part in self.own_unit(f)))
