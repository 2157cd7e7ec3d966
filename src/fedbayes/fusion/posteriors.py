"""Networks of one graph, averaged by what each client knows of its own weights.

A client sends a Gaussian around its weights w_s whose precision is n_s F_s, n_s its samples and F_s
a Fisher matrix (`fedbayes.fusion.curvature`). The product of the clients' Gaussians and of a prior
around the mean of their weights has the mode that solves

    (Σ_s n_s F_s + p) w = Σ_s n_s F_s w_s + p w̄.

F_s is taken as diagonal (`fisher`, Matena and Raffel 2022), as A_s ⊗ B_s layer by layer (`kfac`;
FedFisher, Jhunjhunwala et al. 2024), or as A_s ⊗ I (`regmean`, Jin et al. 2023).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedbayes.core.brief import Brief
from fedbayes.core.tensors import Tensors
from fedbayes.errors import ModelError, warn
from fedbayes.fusion.combining import combine, weighted_sum
from fedbayes.fusion.posterior_settings import AveragingSettings
from fedbayes.inference.gaussian_head import Moments


@dataclass(frozen=True, repr=False)
class KroneckerFactors(Brief):
    """What is known of one layer: its Fisher matrix is about `inputs` ⊗ `outputs`.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from fedbayes.core.targets import Target
        >>> from fedbayes.core.tensors import Samples
        >>> from fedbayes.fusion.curvature import posterior
        >>> from fedbayes.fusion.posteriors import KroneckerFactors
        >>> from fedbayes.likelihoods import build_likelihood
        >>> likelihood = build_likelihood("auto", Target("class", ("no", "yes")))
        >>> samples = Samples(torch.randn(20, 3), torch.arange(20) % 2)
        >>> factors = posterior(nn.Sequential(nn.Linear(3, 2)), likelihood, samples).factors["0"]
        >>> tuple(factors.inputs.shape), tuple(factors.outputs.shape)
        ((4, 4), (2, 2))
    """

    inputs: Tensor
    """A [d, d], the mean over samples of Σ_t a_t a_tᵀ over the places t of a sample: one of a dense
    layer, each patch of a convolution. The last entry of a is 1 where the layer has a bias."""
    outputs: Tensor
    """B [o, o], the mean over samples and places of g_t g_tᵀ, the gradients of log p(y | x) by the
    layer's outputs, with y from the network's own prediction."""


@dataclass(frozen=True, repr=False)
class Posterior(Brief):
    """What a client sends: its weights, and how well its samples determine them.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from fedbayes.core.targets import Target
        >>> from fedbayes.core.tensors import Samples
        >>> from fedbayes.fusion import Posterior
        >>> from fedbayes.fusion.curvature import posterior
        >>> from fedbayes.likelihoods import build_likelihood
        >>> likelihood = build_likelihood("auto", Target("class", ("no", "yes")))
        >>> samples = Samples(torch.randn(20, 3), torch.arange(20) % 2)
        >>> posterior(nn.Sequential(nn.Linear(3, 2)), likelihood, samples).samples
        20
    """

    weights: Tensors
    """The `state_dict` of its network."""
    samples: int
    """How many it has."""
    counts: Tensor | None
    """Samples of each class, int64 [K]; None where the target is no class."""
    factors: dict[str, KroneckerFactors]
    """By layer; those of which there are any."""
    diagonal: Tensors
    """The mean over samples of squared gradients, by trained parameter."""
    temperature: float | None = None
    """Of its predictions, fitted to rows that it did not train on; None where it has none."""
    head: dict[str, Moments] = field(default_factory=dict)
    """Sums of what its last layer reads, by the name of that layer; empty where it sent none."""
    source: str = ""
    """The file that it was read from, for messages."""


def regmean(posteriors: Sequence[Posterior], settings: AveragingSettings | None = None) -> Tensors:
    """The weights whose layers answer as the clients' do, each on its own inputs (RegMean).

    For every layer with factors the minimum of Σ_s n_s E‖(W − W_s) a_s‖² over W, with A_s whose
    entries off the diagonal are scaled, and a ridge toward the mean; all else is the mean, weighted
    by samples.

    Raises:
        ModelError: the networks are not of one graph, or what they sent does not fit them.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from fedbayes.core.targets import Target
        >>> from fedbayes.core.tensors import Samples
        >>> from fedbayes.fusion.curvature import posterior
        >>> from fedbayes.fusion.posteriors import regmean
        >>> from fedbayes.likelihoods import build_likelihood
        >>> likelihood = build_likelihood("auto", Target("class", ("no", "yes")))
        >>> samples = Samples(torch.randn(20, 3), torch.arange(20) % 2)
        >>> networks = [nn.Sequential(nn.Linear(3, 2)) for _ in range(2)]
        >>> sent = [posterior(network, likelihood, samples) for network in networks]
        >>> regmean(sent)["0.weight"].shape
        torch.Size([2, 3])
    """
    settings = settings or AveragingSettings()

    def solve(
        factors: Sequence[KroneckerFactors], changes: Sequence[Tensor], n: Sequence[float]
    ) -> Tensor:
        scaled = [_scaled(one.inputs, settings.scaling) for one in factors]
        total = weighted_sum(scaled, n)
        right = weighted_sum([w @ a for w, a in zip(changes, scaled, strict=True)], n)
        prior = settings.precision_of("regmean")
        total.diagonal().add_(prior * total.diagonal().mean().clamp_min(_TINY))
        solved: Tensor = torch.linalg.solve(total, right, left=False)
        return solved

    return _by_layer(posteriors, solve, lambda name, mean: mean)


def fisher(posteriors: Sequence[Posterior], settings: AveragingSettings | None = None) -> Tensors:
    """The mean weighted by the diagonal of the Fisher matrices, entry by entry.

    Raises:
        ModelError: as for `regmean`.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from fedbayes.core.targets import Target
        >>> from fedbayes.core.tensors import Samples
        >>> from fedbayes.fusion.curvature import posterior
        >>> from fedbayes.fusion.posteriors import fisher
        >>> from fedbayes.likelihoods import build_likelihood
        >>> likelihood = build_likelihood("auto", Target("class", ("no", "yes")))
        >>> samples = Samples(torch.randn(20, 3), torch.arange(20) % 2)
        >>> networks = [nn.Sequential(nn.Linear(3, 2)) for _ in range(2)]
        >>> sent = [posterior(network, likelihood, samples) for network in networks]
        >>> fisher(sent)["0.weight"].shape
        torch.Size([2, 3])
    """
    prior = (settings or AveragingSettings()).precision_of("fisher")
    _check(posteriors)
    mean = _mean(posteriors)
    return {name: _diagonal(posteriors, name, mean[name], prior) for name in mean}


def kfac(posteriors: Sequence[Posterior], settings: AveragingSettings | None = None) -> Tensors:
    """The mode of the product of the clients' Gaussians with Kronecker factors.

    For every layer with factors M = W̄ + Δ with

        Σ_s n_s B_s Δ A_s + p Δ = Σ_s n_s B_s (W_s − W̄) A_s

    by conjugate gradients, weight and bias together; `fisher` for all other parameters.

    Raises:
        ModelError: as for `regmean`.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from fedbayes.core.targets import Target
        >>> from fedbayes.core.tensors import Samples
        >>> from fedbayes.fusion.curvature import posterior
        >>> from fedbayes.fusion.posteriors import kfac
        >>> from fedbayes.likelihoods import build_likelihood
        >>> likelihood = build_likelihood("auto", Target("class", ("no", "yes")))
        >>> samples = Samples(torch.randn(20, 3), torch.arange(20) % 2)
        >>> networks = [nn.Sequential(nn.Linear(3, 2)) for _ in range(2)]
        >>> sent = [posterior(network, likelihood, samples) for network in networks]
        >>> kfac(sent)["0.weight"].shape
        torch.Size([2, 3])
    """
    settings = settings or AveragingSettings()
    prior = settings.precision_of("kfac")

    def solve(
        factors: Sequence[KroneckerFactors], changes: Sequence[Tensor], n: Sequence[float]
    ) -> Tensor:
        kind = torch.float64 if settings.tolerance < _SINGLE else torch.float32
        traces = [
            float(one.outputs.double().trace() * one.inputs.double().trace()) for one in factors
        ]
        n = [number / sum(n) for number in n]
        size = sum(k * trace for k, trace in zip(n, traces, strict=True)) / changes[0].numel()
        if not size > 0:
            return torch.zeros_like(changes[0])
        # In units of the mean diagonal, since gradients may be far below 1.
        pairs = [((one.outputs.double() / size).to(kind), one.inputs.to(kind)) for one in factors]
        return product_mode(
            pairs,
            [w.to(kind) for w in changes],
            n,
            prior,
            tolerance=settings.tolerance,
            iterations=settings.iterations,
        )

    rest = settings.precision_of("fisher")
    return _by_layer(posteriors, solve, lambda name, mean: _diagonal(posteriors, name, mean, rest))


def product_mode(
    pairs: Sequence[tuple[Tensor, Tensor]],
    means: Sequence[Tensor],
    n: Sequence[float],
    prior: float,
    *,
    tolerance: float,
    iterations: int,
) -> Tensor:
    """The mode of a product of Gaussians of one layer: Σ_s n_s B_s (M − M_s) A_s + p M = 0.

    Args:
        pairs: B_s [o, o] and A_s [d, d].
        means: M_s [o, d], of the same type.
        n: n_s.
        prior: p, the precision of one more Gaussian around 0.
        tolerance: as for `conjugate_gradients`.
        iterations: as for `conjugate_gradients`.

    Returns:
        M [o, d], float64.

    Examples:
        >>> import torch
        >>> from fedbayes.fusion.posteriors import product_mode
        >>> pairs = [(torch.eye(1), torch.eye(1)), (torch.eye(1), 2 * torch.eye(1))]
        >>> means = [torch.zeros(1, 1), torch.full((1, 1), 6.0)]
        >>> product_mode(pairs, means, [1.0, 1.0], 1.0, tolerance=1e-6, iterations=9)
        tensor([[3.]], dtype=torch.float64)
    """
    right = weighted_sum([b @ m @ a for (b, a), m in zip(pairs, means, strict=True)], n)
    kind = pairs[0][0].dtype

    def apply(m: Tensor) -> Tensor:
        m = m.to(kind)
        return prior * m + weighted_sum([b @ m @ a for b, a in pairs], n)

    return conjugate_gradients(apply, right, _near(pairs, n, prior), tolerance, iterations)


def conjugate_gradients(
    apply: Callable[[Tensor], Tensor],
    right: Tensor,
    near: Callable[[Tensor], Tensor],
    tolerance: float,
    iterations: int,
) -> Tensor:
    """The solution of apply(x) = right for a symmetric positive definite map of tensors.

    Args:
        apply: the map.
        right: what it is to give.
        near: about the inverse of the map, symmetric positive definite too.
        tolerance: residual, relative to `right`, at which to stop.
        iterations: most steps.
    """
    x = torch.zeros_like(right)
    residual = right.clone()
    enough = tolerance * float(right.norm())
    direction = turned = near(residual)
    product = torch.vdot(residual.flatten(), turned.flatten())
    for _ in range(iterations):
        if float(residual.norm()) <= enough:
            break
        image = apply(direction)
        step = product / torch.vdot(direction.flatten(), image.flatten())
        x = x + step * direction
        residual = residual - step * image
        turned = near(residual)
        before, product = product, torch.vdot(residual.flatten(), turned.flatten())
        direction = turned + product / before * direction
    left = float(residual.norm())
    if left > enough:
        warn(
            f"conjugate gradients stopped after {iterations} steps at a residual of "
            f"{left / float(right.norm()):.2g}, above the tolerance {tolerance:g}. Set more "
            "iterations, or a higher precision"
        )
    return x


def _near(
    pairs: Sequence[tuple[Tensor, Tensor]], n: Sequence[float], prior: float
) -> Callable[[Tensor], Tensor]:
    """About the inverse of M ↦ Σ_s n_s B_s M A_s + p M, by means of the factors."""
    trace = [(float(b.trace()), float(a.trace())) for b, a in pairs]
    outputs = weighted_sum(
        [b for b, _ in pairs], [k * t for k, (_, t) in zip(n, trace, strict=True)]
    )
    inputs = weighted_sum(
        [a for _, a in pairs], [k * t for k, (t, _) in zip(n, trace, strict=True)]
    )
    whole = sum(k * b * a for k, (b, a) in zip(n, trace, strict=True))  # above 0
    (left, u), (right, v) = torch.linalg.eigh(outputs), torch.linalg.eigh(inputs)
    scale = torch.outer(left.clamp_min(0), right.clamp_min(0)) / whole + prior
    kind = pairs[0][0].dtype
    u, v, scale = u.to(kind), v.to(kind), scale.to(kind)
    return lambda m: (u @ ((u.T @ m.to(kind) @ v) / scale) @ v.T).double()


_SINGLE = 1e-5
"""Relative residual down to which float32 is enough to find steps of conjugate gradients."""
_TINY = 1e-300
"""What keeps a layer whose gradients are all zero from a division by zero."""

_Solve = Callable[[Sequence[KroneckerFactors], Sequence[Tensor], Sequence[float]], Tensor]
"""From factors, changes W_s − W̄ [o, d] and samples to the change of the fused layer."""


def _by_layer(
    posteriors: Sequence[Posterior], solve: _Solve, other: Callable[[str, Tensor], Tensor]
) -> Tensors:
    """Layers with factors solved for, weight and bias together; all else by `other`."""
    _check(posteriors)
    mean = _mean(posteriors)
    fused = dict(mean)
    samples = [one.samples for one in posteriors]
    left = set(mean)
    for layer in posteriors[0].factors:
        weight, bias = f"{layer}.weight", f"{layer}.bias"
        centre = _matrix(mean, weight, bias)
        changes = [_matrix(one.weights, weight, bias) - centre for one in posteriors]
        solved = centre + solve([one.factors[layer] for one in posteriors], changes, samples)
        columns = mean[weight][0].numel()
        fused[weight] = solved[:, :columns].reshape(mean[weight].shape).to(mean[weight].dtype)
        left.discard(weight)
        if bias in mean:
            fused[bias] = solved[:, columns].to(mean[bias].dtype)
            left.discard(bias)
    for name in left:
        fused[name] = other(name, mean[name])
    return fused


def _matrix(weights: Tensors, weight: str, bias: str) -> Tensor:
    """A layer's weight [o, d], its bias as the last column; float64."""
    matrix = weights[weight].flatten(1).double()
    if bias not in weights:
        return matrix
    return torch.cat([matrix, weights[bias].double()[:, None]], dim=1)


def _diagonal(posteriors: Sequence[Posterior], name: str, mean: Tensor, precision: float) -> Tensor:
    """A parameter's mean weighted by diagonals; the plain mean where it has none."""
    if name not in posteriors[0].diagonal:
        return mean
    n = [one.samples for one in posteriors]
    found = [one.diagonal[name].double() for one in posteriors]
    total = weighted_sum(found, n)
    prior = precision * total.mean().clamp_min(_TINY)
    changes = [
        f * (one.weights[name].double() - mean.double())
        for f, one in zip(found, posteriors, strict=True)
    ]
    return (mean.double() + weighted_sum(changes, n) / (total + prior)).to(mean.dtype)


def _scaled(moment: Tensor, scaling: float) -> Tensor:
    """Second moments with entries off the diagonal scaled; float64."""
    moment = moment.double()
    return scaling * moment + (1 - scaling) * torch.diag(moment.diagonal())


def _mean(posteriors: Sequence[Posterior]) -> Tensors:
    """Of the weights, by samples."""
    total = sum(one.samples for one in posteriors)
    return combine([one.weights for one in posteriors], [p.samples / total for p in posteriors])


def _check(posteriors: Sequence[Posterior]) -> None:
    """See that posteriors are of networks of one graph, and fit these."""
    if not posteriors:
        raise ModelError("there are no posteriors to fuse")
    first = posteriors[0]
    for number, one in enumerate(posteriors):
        if one.samples < 1:
            raise ModelError(f"posterior {number} has no samples")
        if one.factors.keys() != first.factors.keys() or one.diagonal.keys() != (
            first.diagonal.keys()
        ):
            raise ModelError(
                f"posterior {number} has other layers than the first. Compute all with the same "
                "settings"
            )
        for layer, factors in one.factors.items():
            if f"{layer}.weight" not in one.weights:
                raise ModelError(f"posterior {number} has factors of {layer!r}, but no weight")
            o, d = _matrix(one.weights, f"{layer}.weight", f"{layer}.bias").shape
            if factors.inputs.shape != (d, d) or factors.outputs.shape != (o, o):
                raise ModelError(
                    f"posterior {number} has factors of {layer!r} of shapes "
                    f"{tuple(factors.inputs.shape)} and {tuple(factors.outputs.shape)}, expected "
                    f"{(d, d)} and {(o, o)}"
                )
        for name, found in one.diagonal.items():
            if name not in one.weights or found.shape != one.weights[name].shape:
                raise ModelError(f"posterior {number} has a diagonal that fits no weight {name!r}")
