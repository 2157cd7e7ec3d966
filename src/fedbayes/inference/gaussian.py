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

    Examples:
        >>> import torch
        >>> from fedbayes.inference.gaussian import NaturalGaussian
        >>> one = NaturalGaussian.of({"w": torch.tensor([0.0])}, {"w": torch.tensor([1.0])})
        >>> two = NaturalGaussian.of({"w": torch.tensor([2.0])}, {"w": torch.tensor([1.0])})
        >>> (one * two).mean, (one * two / two).mean
        ({'w': tensor([1.])}, {'w': tensor([0.])})
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
    """N(0, std²) over tensors of these shapes, float64.

    Examples:
        >>> import torch
        >>> from fedbayes.inference.gaussian import standard
        >>> standard({"w": torch.zeros(2)}, std=0.5).std
        {'w': tensor([0.5000, 0.5000], dtype=torch.float64)}
    """
    precision = {
        name: torch.full(t.shape, std**-2, dtype=torch.float64) for name, t in like.items()
    }
    return NaturalGaussian(precision, {name: torch.zeros_like(p) for name, p in precision.items()})


Terms = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""(means, variances, others …) of some entries of a Gaussian → the sum of what a divergence is
there, and fresh tensors of its gradients in means and in log standard deviations. It may overwrite
the variances."""


def kl_terms(
    mean: Tensor, variance: Tensor, precision: Tensor, centre: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """KL(N(mean, variance) ‖ N(centre, 1/precision)) in nats, as `Terms`.

    With σ² the variance and Λ0, μ0 the prior's: ½ Σ [Λ0 σ² − 1 − log(Λ0 σ²) + Λ0 (μ − μ0)²].
    """
    apart = mean - centre
    slope = precision * apart
    distance = dot(slope, apart)
    ratio = variance.mul_(precision)
    spread = ratio - 1
    return 0.5 * (distance + spread.sum() - ratio.log_().sum()), slope, spread


def renyi_terms(
    mean: Tensor, variance: Tensor, precision: Tensor, centre: Tensor, *, alpha: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Rényi's divergence of N(mean, variance) from N(centre, 1/precision), as `Terms`.

    1/(α(α − 1)) log ∫ q^α p^(1−α) dθ (Liese & Vajda 1987, as in Knoblauch et al. 2022), which tends
    to KL(q ‖ p) as α tends to 1. With ρ = Λ0 σ² and r = α + (1 − α)ρ an entry adds

        ½ [(1 − α) log ρ − log r]/(α(α − 1)) + ½ (μ − μ0)² Λ0/r.

    For α > 1 it is infinite where r ≤ 0, where q is too wide; there log r goes on as its tangent,
    so that gradients lead back.

    Args:
        mean: of q.
        variance: of q.
        precision: of p.
        centre: the mean of p.
        alpha: above 0, and not 1.
    """
    least = min(_NARROW, alpha)
    apart = mean - centre
    ratio = variance.mul_(precision)
    mixed = alpha + (1 - alpha) * ratio
    inside = mixed.clamp_min(least)
    past = (mixed / least - 1).clamp_max_(0.0)
    logs = ((1 - alpha) * ratio.log()).sub_(inside.log()).sub_(past)
    slope = (precision * apart).div_(inside)
    distance = apart.mul_(slope)
    value = 0.5 * (logs.sum() / (alpha * (alpha - 1)) + distance.sum())
    pull = distance.mul_(ratio).masked_fill_(past < 0, 0.0).mul_(alpha * (1 - alpha))
    return value, slope, (ratio - inside).sub_(pull).div_(inside).div_(alpha)


_NARROW = 1e-3
"""What r is at least where its logarithm is taken."""


def alike(tensors: Tensors, value: float) -> Tensors:
    """One number for all entries of each tensor, of its type and on its device."""
    return {name: tensor.new_full((), value) for name, tensor in tensors.items()}


def dot(one: Tensor, other: Tensor) -> Tensor:
    """The sum of the products of entries, a scalar."""
    return torch.dot(one.flatten(), other.flatten())


def divergence(terms: Terms, mean: Tensors, precision: Tensors, *others: Tensors) -> Tensor:
    """A divergence of N(mean, 1/precision), summed over all entries; a scalar.

    Gradients are those of means and precisions.

    Args:
        terms: of a divergence.
        mean: by name.
        precision: of the same names and shapes.
        others: what `terms` are given next to means and variances, by name.

    Examples:
        >>> import torch
        >>> from fedbayes.inference.gaussian import divergence, kl_terms
        >>> zero, one = {"w": torch.zeros(1)}, {"w": torch.ones(1)}
        >>> float(divergence(kl_terms, one, one, one, zero))
        0.5
    """
    found = []
    for name, m in mean.items():
        own = precision[name]
        with torch.no_grad():
            value, slope, spread = terms(m, 1 / own, *(tree[name] for tree in others))
            spread.div_(own).mul_(-0.5)
        found.append(differentiated(value, slope, spread, m, own))
    return added(found)


def kl(mean: Tensors, precision: Tensors, prior: NaturalGaussian) -> Tensor:
    """KL(N(mean, 1/precision) ‖ prior) in nats, summed over all entries; a scalar.

    Gradients are those of means and precisions; `kl_terms` has the equation.

    Examples:
        >>> import torch
        >>> from fedbayes.inference.gaussian import kl, standard
        >>> prior = standard({"w": torch.zeros(1)})
        >>> mean, precision = {"w": torch.ones(1).double()}, {"w": torch.ones(1).double()}
        >>> float(kl(mean, precision, prior))
        0.5
    """
    return divergence(kl_terms, mean, precision, prior.precision, prior.mean)


class _Differentiated(torch.autograd.Function):
    """A scalar whose gradients in two tensors are known, which saves autograd's own steps."""

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
