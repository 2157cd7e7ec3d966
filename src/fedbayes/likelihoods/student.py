"""Real values with noise of heavy tails."""

from typing import Any

from pydantic import Field
from torch import Tensor, distributions

from fedbayes.likelihoods.noise import LocationScale


class StudentT(LocationScale):
    """y = center + scale · (f + σ ε), ε of Student's t distribution, for each column.

    σ is the scale of the distribution; its standard deviation is σ √(df / (df − 2)).
    """

    name = "student-t"
    summary = "real values with outliers: noise of Student's t distribution"

    df: float = Field(4.0, gt=2, description="degrees of freedom; few of them: heavy tails")

    def noisy(self, location: Tensor, scale: Tensor) -> distributions.Distribution:
        """The distribution of a standardized target."""
        return distributions.StudentT(self.df, location, scale, validate_args=False)

    def moments(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of each column, [..., n, columns] each."""
        mean, scale = self.own_unit(f)
        return mean, scale.square() * (self.df / (self.df - 2))

    def distribution(self, f: Tensor) -> Any:
        """Student's t distributions [..., n, columns]."""
        from scipy.stats import t

        return t(self.df, *(part.numpy() for part in self.own_unit(f)))
