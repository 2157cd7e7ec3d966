"""Mean-field Gaussians by their natural parameters, which products add and quotients subtract."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedbayes.core.tensors import Tensors, added


@dataclass(frozen=True)
class NaturalGaussian:
    """Independent Gaussians over the entries of named tensors.

    A factor of a product need not be normalizable: its precision may be anything.
    """

    precision: Tensors
    """Λ = 1/variance."""
    shift: Tensors
    """Λ times mean."""

    @classmethod
    def of(cls, mean: Tensors, variance: Tensors) -> "NaturalGaussian":
        """From means and variances."""
        precision = {name: 1 / v for name, v in variance.items()}
        return cls(precision, {name: precision[name] * m for name, m in mean.items()})

    def __mul__(self, other: "NaturalGaussian") -> "NaturalGaussian":
        """The product of densities, unnormalized."""
        return NaturalGaussian(
            {name: p + other.precision[name] for name, p in self.precision.items()},
            {name: h + other.shift[name] for name, h in self.shift.items()},
        )

    def __truediv__(self, other: "NaturalGaussian") -> "NaturalGaussian":
        """The quotient of densities, unnormalized."""
        return NaturalGaussian(
            {name: p - other.precision[name] for name, p in self.precision.items()},
            {name: h - other.shift[name] for name, h in self.shift.items()},
        )

    def __pow__(self, exponent: float) -> "NaturalGaussian":
        """A power of the density, unnormalized."""
        return NaturalGaussian(
            {name: exponent * p for name, p in self.precision.items()},
            {name: exponent * h for name, h in self.shift.items()},
        )

    @property
    def mean(self) -> Tensors:
        """The mean h/Λ of each entry."""
        return {name: h / self.precision[name] for name, h in self.shift.items()}

    @property
    def std(self) -> Tensors:
        """The standard deviation Λ^(−1/2) of each entry."""
        return {name: p.rsqrt() for name, p in self.precision.items()}

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "NaturalGaussian":
        """The same on a device, in a type."""
        return NaturalGaussian(
            {name: p.to(device, dtype) for name, p in self.precision.items()},
            {name: h.to(device, dtype) for name, h in self.shift.items()},
        )


def standard(like: Mapping[str, Tensor], std: float = 1.0) -> NaturalGaussian:
    """N(0, std²) over tensors of these shapes, float64."""
    precision = {
        name: torch.full(t.shape, std**-2, dtype=torch.float64) for name, t in like.items()
    }
    return NaturalGaussian(precision, {name: torch.zeros_like(p) for name, p in precision.items()})


def kl(mean: Tensors, precision: Tensors, prior: NaturalGaussian) -> Tensor:
    """KL(N(mean, 1/precision) ‖ prior) in nats, summed over all entries; a scalar.

    With Λ0, h0 the prior's natural parameters:
    ½ Σ [Λ0/Λ − 1 + log(Λ/Λ0) + (Λ0 μ − h0)²/Λ0]. Gradients are those of means and precisions.
    """
    found = []
    for name, m in mean.items():
        own, other = precision[name], prior.precision[name]
        with torch.no_grad():
            ratio, gap = other / own, (other * m).sub_(prior.shift[name])
            terms = (ratio - 1).sub_(ratio.log()).add_(gap.square().div_(other))
            slope = (1 - ratio).div_(own).mul_(0.5)
            value = 0.5 * terms.sum()
        found.append(differentiated(value, gap, slope, m, own))
    return added(found)


def renyi(mean: Tensors, precision: Tensors, prior: NaturalGaussian, alpha: float) -> Tensor:
    """Rényi's divergence of N(mean, 1/precision) from a prior, summed over all entries; a scalar.

    1/(α(α − 1)) log ∫ q^α p^(1−α) dθ (Liese & Vajda 1987, as in Knoblauch et al. 2022), which tends
    to KL(q ‖ p) as α tends to 1. With ρ = Λ0/Λ and r = α + (1 − α)ρ an entry adds

        ½ [(1 − α) log ρ − log r]/(α(α − 1)) + ½ (μ − μ0)² Λ0/r.

    For α > 1 it is infinite where r ≤ 0, where q is too wide; there log r goes on as its tangent,
    so that gradients lead back. Gradients are those of means and precisions.

    Args:
        mean: of q, by name.
        precision: of q.
        prior: p.
        alpha: above 0, and not 1.
    """
    found, least = [], min(_NARROW, alpha)
    for name, m in mean.items():
        own, other = precision[name], prior.precision[name]
        with torch.no_grad():
            ratio, gap = other / own, (other * m).sub_(prior.shift[name])
            mixed = alpha + (1 - alpha) * ratio
            inside = mixed.clamp_min(least)
            past = (mixed / least - 1).clamp_max_(0.0)
            logs = ((1 - alpha) * ratio.log()).sub_(inside.log()).sub_(past)
            steep = gap / inside
            distance = (gap / other).mul_(steep)
            value = 0.5 * (logs.sum() / (alpha * (alpha - 1)) + distance.sum())
            pull = distance.mul_(ratio).masked_fill_(past < 0, 0.0).mul_(alpha * (1 - alpha))
            slope = (inside - ratio).add_(pull).div_(inside * own).mul_(0.5 / alpha)
        found.append(differentiated(value, steep, slope, m, own))
    return added(found)


_NARROW = 1e-3
"""What r is at least where its logarithm is taken."""


class _Differentiated(torch.autograd.Function):
    """A scalar whose gradients in two tensors are known: autograd would go through all of the
    elementwise steps once more, which are most of a step's cost in small networks.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, first: Tensor, second: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1], inputs[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        first, second = ctx.saved_tensors
        return None, None, None, gradient * first, gradient * second


differentiated: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] = _Differentiated.apply
"""(value, its gradient in x, its gradient in y, x, y) → value, a function of x and y."""
