"""Uncertainty of a fused network: a Laplace approximation of all its layers on synthetic inputs.

The weights [o, d] of every dense layer and convolution, its bias as a column, get the Gaussian
around them of precision

    N A ⊗ B + p,    A = E_x Σ_t a_t a_tᵀ,    B = E_{x, t} E_{y ~ p(y | f)} g_t g_tᵀ,

with N samples of the clients, what the layer gets a_t and the gradients g_t of log p(y | f) by what
it gives at its places t (`fusion.curvature`; Ritter et al. 2018). Its eigenvectors are those of A
and B. All other weights are held fixed.

Through the network as it is near its weights, f + J (w − ŵ), logits are Gaussian (Immer, Korzepa
and Bauer 2021): their covariance is Σ J_l S_l J_lᵀ over the layers l, with the layer's covariance
S_l and the gradient Σ_t g_t a_tᵀ of a logit in its row of J_l. Draws of weights would need no
gradients, but are noise, and far from ŵ a network says nothing that was fitted. Probabilities of
classes are those of `fusion.laplace`.

All gradients of a sample come from one pass there and back of as many copies as there are classes.
Recorded, that is a list of operations which knows of no gradients any more, and can be exported;
mapped over samples, its memory is that of one.
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as each
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fedbayes.core.brief import Brief
from fedbayes.core.tensors import Tensors
from fedbayes.errors import ModelError
from fedbayes.fusion.calls import patches, places, recorded
from fedbayes.fusion.curvature import layer_factors
from fedbayes.fusion.frozen import Function
from fedbayes.fusion.laplace import PRECISIONS, Draw, expected, nearest
from fedbayes.fusion.posteriors import KroneckerFactors
from fedbayes.inference.kronecker import Spectrum
from fedbayes.likelihoods import Likelihood
from fedbayes.models.units import require_apart

PIECE = 2**24
"""Entries of Jacobians that are held at once."""
COPIES = 256
"""Inputs that go through a network at once."""


@dataclass(frozen=True, repr=False)
class AllLayers(Brief):
    """A Gaussian around the weights of a network's layers."""

    width: int
    """K, its outputs."""
    spectra: dict[str, Spectrum]
    """Of N A ⊗ B by layer, float64."""
    fixed: tuple[str, ...]
    """Parameters that are held fixed."""
    precision: float = 1.0
    """p, of the prior."""
    temperature: float = 1.0
    """What logits are divided by."""


@dataclass(frozen=True, repr=False)
class Along(Brief):
    """Gradients of a network's K outputs by the weights of a layer, along its eigenvectors."""

    gradients: Tensor
    """Vᵀ g [n, K, o] of a layer with one place, else Σ_t Vᵀ g_t a_tᵀ U [n, K, o, d]."""
    squares: Tensor | None
    """(Uᵀ a)² [n, d] of a layer with one place."""

    @classmethod
    def of(cls, spectrum: Spectrum, a: Tensor, g: Tensor) -> "Along":
        """Of what the layer gets [n, T, d] and gradients by what it gives [n, K, T, o]."""
        a, g = a @ spectrum.right.to(a), g @ spectrum.left.to(g)
        if a.shape[1] == 1:
            return cls(g[:, :, 0], a[:, 0].square())
        return cls(torch.einsum("nkto,ntd->nkod", g, a), None)

    def covariance(self, spread: Tensor) -> Tensor:
        """Of the outputs [n, K, K], by the variances [o, d] along the eigenvectors."""
        g = self.gradients
        if self.squares is not None:
            return (g * (self.squares @ spread.T)[:, None]) @ g.mT
        return (g * spread).flatten(2) @ g.flatten(2).mT


def all_layers(
    module: nn.Module, likelihood: Likelihood, draw: Draw, batches: int, samples: int
) -> AllLayers:
    """The Laplace approximation of all layers of a network on synthetic inputs.

    Memory is that of `fusion.curvature.posterior`, and 8 (2 d² + 2 o² + o d) bytes for a layer.

    Args:
        module: the network.
        likelihood: what its outputs mean.
        draw: inputs.
        batches: how many to take, from 0.
        samples: N, how many the clients trained on, all together.

    Raises:
        ModelError: no layer has factors, or there is nothing to go on.
    """
    if batches < 1 or samples < 1:
        raise ModelError(
            f"a Laplace approximation needs synthetic inputs and training samples, got {batches} "
            f"batches and {samples} samples. Pass at least 1 of each"
        )
    spectra = {}
    for name, both in _factors(module, likelihood, map(draw, range(batches))).items():
        a, right = torch.linalg.eigh(both.inputs.double())
        b, left = torch.linalg.eigh(both.outputs.double())
        values = samples * torch.outer(b.clamp_min(0), a.clamp_min(0))
        spectra[name] = Spectrum(left, right, values)
    mapped = {id(p) for name in spectra for p in module.get_submodule(name).parameters()}
    fixed = tuple(name for name, p in module.named_parameters() if id(p) not in mapped)
    with torch.no_grad():
        width = module.eval()(draw(0)[:1]).shape[-1]
    return AllLayers(width, spectra, fixed)


def jacobians(
    module: nn.Module, layers: Sequence[str], width: int, x: Tensor
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Outputs of a network, and of every layer what outputs' gradients by its weights are made of.

    Args:
        module: the network, in evaluation mode.
        layers: dense ones and convolutions.
        width: K, the network's outputs.
        x: inputs [n, ...].

    Returns:
        The outputs [n, K], and by layer what it gets a [n, T, d] (1 for the bias) and the gradients
        g [n, K, T, o]: that of output k is Σ_t g_kt a_tᵀ [o, d]. Places T are of all its calls.
    """
    with torch.enable_grad(), recorded({n: module.get_submodule(n) for n in layers}) as calls:
        outputs: Tensor = module(x.repeat_interleave(width, 0)).reshape(len(x), width, width)
        gradients = torch.autograd.grad(
            outputs.diagonal(dim1=1, dim2=2).sum(),
            [call.outputs for call in calls],
            materialize_grads=True,
        )
    parts: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for call, gradient in zip(calls, gradients, strict=True):
        g = places(call.layer, gradient)
        g = g.reshape(len(x), width, *g.shape[1:])
        parts.setdefault(call.name, []).append((patches(call.layer, call.given[::width]), g))
    return outputs[:, 0].detach(), {
        name: (torch.cat([a for a, _ in both], 1), torch.cat([g for _, g in both], 2))
        for name, both in parts.items()
    }


def fitted_layers(
    found: AllLayers, module: nn.Module, teacher: Function, draw: Draw, batches: int
) -> tuple[AllLayers, float]:
    """The prior precision and temperature whose predictions are the nearest to a teacher's.

    Args:
        found: the Gaussian.
        module: the network.
        teacher: logits or log-probabilities of classes [n, K].
        draw: held-out inputs.
        batches: how many to take, from 0; 8 bytes times K and the number of `PRECISIONS` are held
            for each input.

    Returns:
        The Gaussian with these, and the mean KL divergence from the teacher, in nats.
    """
    spectra = {name: spectrum.to("cpu", torch.float32) for name, spectrum in found.spectra.items()}
    module = module.eval()
    some = _at_once(found, module, draw(0)[:1])
    said, wanted = [], []
    for number in range(batches):
        x = draw(number)
        with torch.no_grad():
            wanted.append(teacher(x).double().log_softmax(-1))
        for part in torch.split(x, some):
            f, seen = jacobians(module, list(spectra), found.width, part)
            along = {name: Along.of(spectra[name], *both) for name, both in seen.items()}
            tried = [expected(f, _covariance(along, _spreads(spectra, p))) for p in PRECISIONS]
            said.append(torch.stack(tried).double())
    best = nearest(torch.cat(wanted), zip(PRECISIONS, torch.cat(said, 1), strict=True))
    return replace(found, precision=best.precision, temperature=best.temperature), best.divergence


class Linearized(nn.Module):
    """A network with calibrated logits, by a posterior of all its layers. Can be exported.

    The softmax of its logits is the predictive probability. A sample costs a forward and a backward
    pass of as many copies as there are classes; samples are processed sequentially.

    Args:
        module: the network.
        found: the Gaussian.
        example: inputs [n, ...], the first of which operations are recorded with.

    Raises:
        ModelError: they cannot be.
    """

    def __init__(self, module: nn.Module, found: AllLayers, example: Tensor) -> None:
        super().__init__()
        spectra = {name: s.to("cpu", torch.float32) for name, s in found.spectra.items()}
        spreads = _spreads(spectra, found.precision)

        def logits(network: nn.Module, x: Tensor) -> Tensor:
            f, seen = jacobians(network, list(spectra), found.width, x)
            along = {name: Along.of(spectra[name], *both) for name, both in seen.items()}
            return (expected(f, _covariance(along, spreads)) / found.temperature)[0]

        self.one = _operations(module, logits, example)

    def forward(self, x: Tensor) -> Tensor:
        """Inputs [n, ...] to logits [n, K]."""
        if torch.compiler.is_compiling():
            mapped: Tensor = each(self._of_one, x)
            return mapped
        return torch.stack([self._of_one(row) for row in x])

    def _of_one(self, row: Tensor, *_: object) -> Tensor:
        """A sample to its logits [K]."""
        logits: Tensor = self.one(row[None])
        return logits


def check_layers(module: nn.Module, likelihood: Likelihood, x: Tensor) -> None:
    """See early that a network can have a posterior of all layers, or raise a ModelError."""
    names = list(_factors(module, likelihood, [x]))
    require_apart(module, x, "with a posterior of all layers they are predicted one by one")
    with torch.no_grad():
        width = module.eval()(x[:1]).shape[-1]

    def gradients(network: nn.Module, x: Tensor) -> Mapping[str, tuple[Tensor, Tensor]]:
        return jacobians(network, names, width, x)[1]

    _operations(module, gradients, x)


def _operations(
    module: nn.Module, function: Callable[[nn.Module, Tensor], object], example: Tensor
) -> GraphModule:
    """What a function of a network and of one sample does, operation by operation."""
    network = copy.deepcopy(module).eval()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of how tensors are reached that are recorded
            found = make_fx(lambda x: function(network, x))(example[:1])
    except Exception as error:  # whatever a module of somebody's own may raise
        raise _without_gradients(module, error) from None
    found.graph.eliminate_dead_code()
    found.recompile()
    found.requires_grad_(False)
    return found


def _without_gradients(module: nn.Module, error: Exception) -> ModelError:
    line = str(error).strip().partition("\n")[0] or type(error).__name__
    return ModelError(
        f"a {type(module).__name__} has no gradients that can be exported, which a posterior of "
        f"all layers needs ({line}). Use last-layer, or leave it out"
    )


def _factors(
    module: nn.Module, likelihood: Likelihood, batches: Iterable[Tensor]
) -> dict[str, KroneckerFactors]:
    """Kronecker factors by layer."""
    try:
        factors = layer_factors(module, likelihood, batches)
    except RuntimeError as error:  # of a module of somebody's own
        raise _without_gradients(module, error) from None
    if not factors:
        raise ModelError(
            f"a {type(module).__name__} has no dense layer or convolution with Kronecker factors, "
            "which a posterior of all layers needs. Leave it out"
        )
    return factors


def _spreads(spectra: Mapping[str, Spectrum], precision: float) -> Tensors:
    """By layer the variances [o, d] along the eigenvectors."""
    return {name: 1 / (spectrum.values + precision) for name, spectrum in spectra.items()}


def _covariance(along: Mapping[str, Along], spreads: Tensors) -> Tensor:
    """Of the outputs [n, K, K], by all layers."""
    return torch.stack([one.covariance(spreads[name]) for name, one in along.items()]).sum(0)


def _at_once(found: AllLayers, module: nn.Module, one: Tensor) -> int:
    """Inputs whose Jacobians are held at once."""
    _, seen = jacobians(module, list(found.spectra), found.width, one)
    most = max((a.shape[2] * g.shape[3] for a, g in seen.values() if a.shape[1] > 1), default=1)
    return max(1, min(PIECE // (found.width * most), COPIES // found.width))
