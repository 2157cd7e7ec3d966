"""Quantiles of real values, without a distribution."""

import math
from collections.abc import Mapping

import torch
from pydantic import Field, field_validator
from torch import Tensor

from fedbayes.core.fields import Several
from fedbayes.core.tensors import Tensors
from fedbayes.errors import ConfigError
from fedbayes.likelihoods.base import constants, mean_of
from fedbayes.likelihoods.numeric import Numeric, check_share, pinball


class Quantile(Numeric):
    """Quantile regression: output q_τ of every level τ is the quantile of the target there.

    The pinball loss is ρ_τ(u) = u (τ − [u < 0]). Up to constants it is −log of the asymmetric
    Laplace density of Koenker & Machado (1999), with the fixed scale s = noise · scale:

        p_τ(y) = τ (1 − τ) / s · exp(−ρ_τ((y − q_τ) / s)).

    With several levels, log p is the mean of log p_τ over levels: a composite likelihood, in which
    a sample counts once. With one level it is a density.

    The quantiles of several draws are averaged, and put in order where they cross (Chernozhukov
    et al. 2010).
    """

    name = "quantile"
    summary = "quantiles of real values, by the pinball loss"
    kinds = ("real",)
    metric = "pinball"
    shares = ("inside",)
    nonnegative = ("pinball", *Numeric.nonnegative)

    levels: Several[float] = Field(
        (0.05, 0.5, 0.95), min_length=1, description="probabilities, each above 0 and below 1"
    )
    noise: float = Field(
        1.0, gt=0, description="scale of the asymmetric Laplace density, in the target's std"
    )

    @field_validator("levels")
    @classmethod
    def _increasing(cls, levels: tuple[float, ...]) -> tuple[float, ...]:
        if not all(0 < level < 1 for level in levels):
            raise ValueError("levels must be above 0 and below 1")
        if list(levels) != sorted(set(levels)):
            raise ValueError("levels must increase")
        return levels

    @property
    def outputs(self) -> int:
        """Every level of the first column, then of the next."""
        return self.target.columns * len(self.levels)

    def quantiles(self, f: Tensor) -> Tensor:
        """Outputs [..., n, outputs] in the unit of the target, [..., n, columns, levels]."""
        self.check(f)
        f = f.reshape(*f.shape[:-1], self.target.columns, len(self.levels))
        center, scale = (constants(c, f) for c in (self.target.center, self.target.scale))
        return center[:, None] + scale[:, None] * f

    def pinball(self, quantiles: Tensor, y: Tensor) -> Tensor:
        """The pinball loss of quantiles [..., n, columns, levels] for targets [n, columns].

        Returns:
            Of every column and level, in the unit of the target, as the quantiles.
        """
        return pinball(quantiles, y, constants(self.levels, quantiles))

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Mean over levels of asymmetric Laplace log-densities, summed over columns, [..., n]."""
        self.check(f, y)
        width = self.noise * constants(self.target.scale, f)[:, None]
        levels = constants(self.levels, f)
        constant = (levels * (1 - levels) / width).log()
        density = constant - self.pinball(self.quantiles(f), y) / width
        return density.mean(dim=-1).sum(dim=-1)

    def combined(self, draws: Tensor) -> Tensor:
        """Quantiles of the mean over draws, in order, [n, columns, levels]."""
        return self.quantiles(draws).mean(dim=0).sort(dim=-1).values

    def pooled(self, draws: Tensor, weights: Tensor) -> Tensor:
        """The weighted mean of the networks' quantiles, in order, [n, outputs]."""
        mean = (weights.to(draws)[:, None, None] * draws).sum(dim=0)
        levels = mean.reshape(len(mean), self.target.columns, len(self.levels))
        return levels.sort(dim=-1).values.reshape(mean.shape)

    def divergence(self, f: Tensor, g: Tensor) -> Tensor:
        """KL of asymmetric Laplace densities, the mean over levels, summed over columns, [..., n].

        With d = (q_g − q_f) / s it is (1 − τ) (d − (1 − e^(−τ d)) / τ) where d ≥ 0, and where it
        is not, the same of −d and 1 − τ.
        """
        self.check(f)
        self.check(g)
        split = (*f.shape[:-1], self.target.columns, len(self.levels))
        d = ((g - f) / self.noise).reshape(split)
        level = constants(self.levels, d)
        tau = torch.where(d >= 0, level, 1 - level)
        each = (1 - tau) * (d.abs() + torch.expm1(-tau * d.abs()) / tau)
        return each.mean(dim=-1).sum(dim=-1)

    def mean(self, draws: Tensor) -> Tensor:
        """The quantile whose level is nearest to one half, [n, columns]: the median, mostly."""
        nearest = min(range(len(self.levels)), key=lambda i: abs(self.levels[i] - 0.5))
        return self.combined(draws)[..., nearest]

    def interval(self, draws: Tensor, level: float) -> tuple[Tensor, Tensor]:
        """The quantiles of levels (1 − level) / 2 and (1 + level) / 2, which must be among them."""
        check_share(level)
        ends = [self._place(p) for p in ((1 - level) / 2, (1 + level) / 2)]
        combined = self.combined(draws.double())
        return combined[..., ends[0]], combined[..., ends[1]]

    @property
    def interval_levels(self) -> tuple[float, ...]:
        """Levels of the intervals between two of its quantiles, rising."""
        low = [level for level in self.levels if level < 0.5]
        return tuple(
            round(1 - 2 * level, 12)
            for level in reversed(low)
            if any(math.isclose(1 - level, other, abs_tol=1e-9) for other in self.levels)
        )

    def _place(self, p: float) -> int:
        for place, level in enumerate(self.levels):
            if math.isclose(level, p, abs_tol=1e-9):
                return place
        raise ConfigError(
            f"an interval needs the quantile of level {p:.6g}, but task.levels are "
            f"{', '.join(map(str, self.levels))}. Add it to task.levels"
        )

    @torch.no_grad()
    def terms(self, draws: Tensor, y: Tensor) -> Tensors:
        """Counts, "nll", "pinball": the mean loss over levels and columns, and "inside": the
        share of columns between the lowest and the highest quantile.
        """
        terms = super().terms(draws, y)
        quantiles, y = self.combined(draws.double()), y.double()
        inside = (quantiles[..., 0] <= y) & (y <= quantiles[..., -1])
        loss = self.pinball(quantiles, y).mean(dim=(-2, -1)).nan_to_num(nan=torch.inf)
        return terms | {"pinball": loss, "inside": inside.double().mean(dim=-1)}

    def metrics(self, scores: Mapping[str, float]) -> dict[str, float]:
        """The mean pinball loss over levels and columns in the unit of the target, the mean
        negative log-likelihood, and with several levels how many targets lie between the lowest
        and the highest quantile.
        """
        metrics = {"pinball": mean_of(scores, "pinball"), **super().metrics(scores)}
        return metrics | ({"coverage": mean_of(scores, "inside")} if len(self.levels) > 1 else {})
