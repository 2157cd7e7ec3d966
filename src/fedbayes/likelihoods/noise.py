"""Real values with noise of a location-scale family."""

import math
from abc import abstractmethod
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.distributions import Distribution

from fedbayes.likelihoods.base import constants
from fedbayes.likelihoods.numeric import Parametric, bounded, unbounded

LIMIT = 7.0
"""Bound of the log std: noise is between 0.0009 and 1,097 times the scale of the target."""


class LearntNoise(nn.Module):
    """Appends a log std for every target column to the outputs of a network."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.log_std = nn.Parameter(torch.zeros(columns))

    def forward(self, f: Tensor) -> Tensor:
        """[..., columns] to [..., 2 · columns]."""
        return torch.cat([f, self.log_std.expand(*f.shape[:-1], -1)], dim=-1)


class LocationScale(Parametric):
    """y = center + scale · (f + σ ε): the network works in standardized units.

    σ is given; or log σ are outputs: learnt parameters behind the network, the same for all
    samples, or outputs of the network, for each its own. They are bounded by 7 · tanh(log σ / 7),
    which is log σ near 0, so that no start and no step makes the density overflow.
    """

    kinds = ("real",)

    noise: Annotated[float, Field(gt=0)] | Literal["learnt", "each"] = Field(
        "learnt",
        description="scale of the noise: a number in units of the target's standard deviation; "
        "learnt, one per target column; or each, an output of the network for each sample",
    )

    @property
    def outputs(self) -> int:
        """The location of every column, and its log std if each sample has its own."""
        return self.target.columns * (2 if self.noise == "each" else 1)

    @property
    def width(self) -> int:
        """Locations, and log stds unless they are given."""
        return self.target.columns * (2 if isinstance(self.noise, str) else 1)

    def head(self) -> nn.Module | None:
        """Log stds that are learnt, zero at the start: noise as large as the target's std."""
        return LearntNoise(self.target.columns) if self.noise == "learnt" else None

    def standardized(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Location and log of the noise's scale, in units of the target's std.

        Args:
            f: outputs [..., n, width].

        Returns:
            [..., n, columns] each.
        """
        self.check(f)
        location = f[..., : self.target.columns]
        if isinstance(self.noise, str):
            return location, bounded(f[..., self.target.columns :], LIMIT)
        return location, torch.full_like(location, math.log(self.noise))

    @abstractmethod
    def noisy(self, location: Tensor, scale: Tensor) -> Distribution:
        """The distribution of a standardized target, for each column."""

    @property
    def variance(self) -> float:
        """Variance of ε."""
        return 1.0

    def pooled(self, draws: Tensor, weights: Tensor) -> Tensor:
        """Outputs of the mixture's mean and variance, by the law of total variance, [n, width].

        Where the noise is given, they are of the mean alone, [n, columns].
        """
        location, log_std = self.standardized(draws)
        w = weights.to(draws)[:, None, None]
        mean = (w * location).sum(dim=0)
        if not isinstance(self.noise, str):
            return mean
        between = (w * (location - mean).square()).sum(dim=0)
        within = (w * (2 * log_std).exp()).sum(dim=0)
        log_scale = (within + between / self.variance).log() / 2
        return torch.cat([mean, unbounded(log_scale, LIMIT)], dim=-1)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Log-density of targets [n, columns] in their own unit, summed over columns, [..., n]."""
        self.check(f, y)
        location, log_std = self.standardized(f)
        scale = constants(self.target.scale, f)
        z = (y - constants(self.target.center, f)) / scale
        density: Tensor = self.noisy(location, log_std.exp()).log_prob(z) - scale.log()
        return density.sum(dim=-1)

    def own_unit(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Location and scale of each column in its own unit, [..., n, columns] each."""
        location, log_std = self.standardized(f)
        scale = constants(self.target.scale, f)
        return constants(self.target.center, f) + scale * location, scale * log_std.exp()
