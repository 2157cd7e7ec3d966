"""Real values with Gaussian noise."""

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

    def moments(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of each column, [..., n, columns] each."""
        mean, std = self.own_unit(f)
        return mean, std.square()

    def distribution(self, f: Tensor) -> Any:
        """Normal distributions [..., n, columns]."""
        from scipy.stats import norm

        return norm(*(part.numpy() for part in self.own_unit(f)))
