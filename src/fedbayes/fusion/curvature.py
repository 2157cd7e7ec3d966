"""What a client computes in addition to its weights: how well its samples determine them.

The Fisher matrix is of the network's own prediction, E over x of the client and y ~ p(y | x): at
every sample vectors v with Σ v vᵀ = E_y[∇ log p(y | f) ∇ log p(y | f)ᵀ] are drawn back through the
network from its outputs f. The gradient of a dense layer's weight is g aᵀ, with its input a and the
gradient g of its output; for a convolution it is Σ_t g_t a_tᵀ over its patches. The Fisher matrix
is approximated by E[Σ_t a_t a_tᵀ] ⊗ E[g gᵀ] (Martens and Grosse 2015; Grosse and Martens 2016).
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedbayes.contracts import AnyMethod, Federation, RoundContext
from fedbayes.core import seeds
from fedbayes.core.tensors import Samples, Tensors, all_finite
from fedbayes.errors import ConfigError, ModelError
from fedbayes.fusion.calls import Call, places, recorded
from fedbayes.fusion.posterior_settings import CurvatureSettings
from fedbayes.fusion.posteriors import KroneckerFactors, Posterior
from fedbayes.likelihoods import Classes, Likelihood, Parametric
from fedbayes.likelihoods.gaussian import Gaussian
from fedbayes.likelihoods.multilabel import Multilabel
from fedbayes.models import Network
from fedbayes.models.resize import with_weights
from fedbayes.models.units import require_apart, require_gradients

FEW_CLASSES = 20
"""Classes up to which the expectation over y is exact by default."""
_ROOM = 1 << 24
"""Numbers that gradients of single samples may take at a time."""
_KEPT = 1 << 26
"""Numbers that layers' inputs may take that are kept for all vectors that are drawn back."""

Parts = Literal["all", "diagonal", "factors"]
"""Of a posterior: Kronecker factors and the whole diagonal; the diagonal alone; or factors, and the
diagonal of what has none."""


def posterior(
    module: nn.Module,
    likelihood: Likelihood,
    samples: Samples,
    settings: CurvatureSettings | None = None,
    *,
    rng: torch.Generator | None = None,
    watch: Callable[[int, int], None] | None = None,
    parts: Parts = "all",
) -> Posterior:
    """The weights of a network, and their curvature on its client's samples.

    Dense layers and convolutions that are no wider than `largest` and not in groups get Kronecker
    factors; all trained parameters get the diagonal of the Fisher matrix.

    Args:
        module: the network, with the likelihood's head if there is one; not changed.
        likelihood: what its outputs mean.
        samples: of the client, as the network sees them.
        settings: how.
        rng: of targets that are drawn; one of a fixed seed by default.
        watch: called with samples done and of all.
        parts: what is wanted.

    Raises:
        ModelError: there are no samples, or something is not finite.
        ConfigError: the likelihood has no distribution to draw from.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from fedbayes.core.targets import Target
        >>> from fedbayes.core.tensors import Samples
        >>> from fedbayes.fusion.curvature import posterior
        >>> from fedbayes.likelihoods import build_likelihood
        >>> likelihood = build_likelihood("auto", Target("class", ("no", "yes")))
        >>> samples = Samples(torch.randn(20, 3), torch.arange(20) % 2)
        >>> found = posterior(nn.Sequential(nn.Linear(3, 2)), likelihood, samples)
        >>> found.samples, sorted(found.weights)
        (20, ['0.bias', '0.weight'])
    """
    settings = settings or CurvatureSettings()
    total = len(samples.y)
    if not total:
        raise ModelError("a posterior needs samples, and there are none")
    module = copy.deepcopy(module).eval()
    require_gradients({"the network": module}, samples.x[:2])
    require_apart(module, samples.x[[0, -1]], "a posterior sums up gradients sample by sample")
    weights = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    _require_finite(module.parameters())  # masks among the buffers are infinite
    sums = _Sums(module, settings.largest, parts)
    rng = seeds.torch_rng(0, "curvature") if rng is None else rng
    done = 0
    for x in torch.split(samples.x, settings.batch_size):
        sums.add(x, lambda f: scores(likelihood, f, settings.draws, rng))
        done += len(x)
        if watch is not None:
            watch(done, total)
    found = sums.result(total)
    counts = None
    if likelihood.target.classes:
        counts = torch.bincount(samples.y, minlength=likelihood.target.classes)
    result = Posterior(weights, total, counts, *found)
    _require_finite(result.diagonal.values())
    return result


def _require_finite(tensors: Iterable[Tensor]) -> None:
    """Refuse a network with weights, outputs or gradients that are NaN or infinite."""
    if not all(all_finite(t) for t in tensors if t.is_floating_point()):
        raise ModelError(
            "weights, outputs or gradients of the network are not finite: its training diverged "
            "(try a smaller training.lr), or its inputs are not finite"
        )


def summed_diagonal(
    weights: Tensors, samples: Samples, settings: CurvatureSettings, at: RoundContext
) -> Tensors:
    """The diagonal of the Fisher matrix of a network's trained weights, summed over samples.

    Args:
        weights: where the matrix is taken.
        samples: all that it is summed over.
        settings: how.
        at: client and round, which targets are drawn for where they are drawn.

    Returns:
        By name, float32 on the CPU.
    """
    found = curvature_at(weights, samples, settings, at, "diagonal")
    return {name: found.samples * found.diagonal[name] for name in weights}


def curvature_at(
    weights: Tensors, samples: Samples, settings: CurvatureSettings, at: RoundContext, parts: Parts
) -> Posterior:
    """The curvature of a network at a client's samples, as for `posterior`, on the CPU."""
    network = at.run.network
    return posterior(
        _module(network, weights),
        at.run.likelihood,
        samples.to("cpu"),
        settings,
        rng=at.rng("curvature"),
        parts=parts,
    )


def layer_factors(
    module: nn.Module, likelihood: Likelihood, batches: Iterable[Tensor]
) -> dict[str, KroneckerFactors]:
    """Only the Kronecker factors of a network's layers, as for `posterior`.

    Args:
        module: the network; not changed.
        likelihood: what its outputs mean.
        batches: inputs [n, ...].

    Raises:
        ModelError: there are no inputs.
        ConfigError: the likelihood has no distribution to draw from.
    """
    settings = CurvatureSettings()
    sums = _Sums(copy.deepcopy(module).eval(), settings.largest, None)
    rng, total = seeds.torch_rng(0, "curvature"), 0
    for batch in batches:
        for x in torch.split(batch, settings.batch_size):
            sums.add(x, lambda f: scores(likelihood, f, settings.draws, rng))
            total += len(x)
    if not total:
        raise ModelError("there are no inputs to find a network's curvature on")
    return sums.result(total)[0]


def factored_layers(network: Network, largest: int) -> dict[str, tuple[int, int]]:
    """The layers of a network whose Fisher matrices have Kronecker factors, by name: how many
    inputs they have, the 1 for a bias among them, and how many outputs.

    Args:
        network: made with the shape of a sample.
        largest: most inputs or outputs of such a layer.

    Raises:
        ModelError: its shape is not known.
    """
    if network.shape is None:
        raise ModelError(
            "which layers have Kronecker factors is found with a sample; give its shape"
        )
    module = _module(network, network.initial)
    sums = _Sums(module, largest, None)
    rng = torch.Generator().manual_seed(0)
    kind = next(module.parameters()).dtype
    sums.add(torch.rand(2, *network.shape, generator=rng, dtype=kind), lambda f: iter([f.detach()]))
    return {
        name: (len(sums.inputs[name]), len(sums.outputs[name]))
        for name in sums.layers
        if name in sums.outputs
    }


def _module(network: Network, weights: Tensors) -> nn.Module:
    """The network with these weights, what is frozen frozen."""
    module = with_weights(network.module, network.whole(weights))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in network.constants)
    return module


def fisher_matrix(method: AnyMethod, run: Federation) -> None:
    """The likelihood has a distribution, and so a Fisher matrix, or a ConfigError is raised."""
    likelihood = run.likelihood
    if not isinstance(likelihood, Classes | Multilabel | Parametric):
        raise ConfigError(
            f"the likelihood {likelihood.name} has no distribution, so it has no Fisher matrix "
            "for a Laplace approximation. Choose another likelihood or method"
        )


def scores(
    likelihood: Likelihood, f: Tensor, draws: int | None, rng: torch.Generator
) -> Iterator[Tensor]:
    """Vectors v whose Σ v vᵀ is the Fisher matrix in the outputs, or is on average.

    Args:
        likelihood: what the outputs mean.
        f: outputs [n, width].
        draws: targets for each sample; None: all classes where they are few, exactly of Gaussian
            noise on few columns, else one.
        rng: of the draws.

    Yields:
        [n, width], for all samples at once.

    Raises:
        ConfigError: the likelihood has no distribution to draw from.
    """
    f = f.detach()
    _require_finite([f])
    if draws is None and isinstance(likelihood, Classes):
        probabilities = likelihood.normalized(f).exp()
        if probabilities.shape[1] <= FEW_CLASSES:
            for k, share in enumerate(probabilities.unbind(1)):
                y = torch.full((len(f),), k)
                yield share.sqrt()[:, None] * _score(likelihood, f, y)
            return
    if draws is None and isinstance(likelihood, Gaussian) and f.shape[1] <= FEW_CLASSES:
        yield from _gaussian_scores(likelihood, f)
        return
    draws = draws or 1
    for _ in range(draws):
        yield _score(likelihood, f, _targets(likelihood, f, rng)) / draws**0.5


def _gaussian_scores(likelihood: Gaussian, f: Tensor) -> Iterator[Tensor]:
    """The diagonal Fisher matrix in locations and log scales, exact by three nodes."""
    mean, std = likelihood.own_unit(f)
    total = torch.zeros_like(f)
    for node, weight in ((-(3**0.5), 1 / 6), (0.0, 2 / 3), (3**0.5, 1 / 6)):
        total += weight * _score(likelihood, f, mean + node * std).square()
    for column, entries in enumerate(total.sqrt().unbind(1)):
        found = torch.zeros_like(f)
        found[:, column] = entries
        yield found


def _score(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """∇ log p(y | f) by the outputs, [n, width]."""
    with torch.enable_grad():
        f = f.detach().requires_grad_()
        (found,) = torch.autograd.grad(likelihood.log_prob(f, y).sum(), f)
    return found


def _targets(likelihood: Likelihood, f: Tensor, rng: torch.Generator) -> Tensor:
    """A target for each sample, drawn from its prediction."""
    if isinstance(likelihood, Classes):
        return torch.multinomial(likelihood.normalized(f).exp(), 1, generator=rng)[:, 0]
    if isinstance(likelihood, Multilabel):
        return torch.bernoulli(likelihood.mean(f[None]), generator=rng)
    if isinstance(likelihood, Parametric):
        entropy = int(torch.randint(2**31, (1,), generator=rng))
        drawn = likelihood.distribution(f.double()).rvs(random_state=entropy)
        return torch.as_tensor(drawn).reshape(len(f), -1).to(f.dtype)
    raise ConfigError(
        f"the likelihood {likelihood.name} has no distribution, so there is no posterior. Choose "
        "another likelihood, or fuse only the weights"
    )


class _Sums:
    """Factors, and diagonals, as far as they are wanted, summed over samples."""

    def __init__(self, module: nn.Module, largest: int, parts: Parts | None) -> None:
        self.module = module
        self.layers = {
            name: layer
            for name, layer in module.named_modules()
            if _by_calls(layer) and (parts is not None or _width(layer) <= largest)
        }
        """Those whose sums are of what they get and of the gradients of what they give."""
        self.factored = {
            name
            for name, layer in self.layers.items()
            if parts != "diagonal" and _width(layer) <= largest
        }
        self.inputs: Tensors = {}
        self.outputs: Tensors = {}
        self.places: dict[str, int] = {}
        self.diagonal = {
            name: torch.zeros(parameter.shape, dtype=torch.float64)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and parts is not None
        }
        own = {id(parameter): name for name, parameter in module.named_parameters()}
        self.shared = {
            name: own[id(parameter)]
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if name in self.diagonal or own[id(parameter)] in self.diagonal
        }
        """Every name that a trained parameter has, and the first of them."""
        self.parts, self.checked = parts, False

    def add(self, x: Tensor, scores_of: Callable[[Tensor], Iterator[Tensor]]) -> None:
        """Add a batch of samples [n, ...]."""
        with torch.enable_grad(), recorded(self.layers) as uses:
            f = self.module(x)
        if not self.checked:
            self._keep_added(f, uses)
            self._leave_out()
            uses = [use for use in uses if use.name in self.layers]
        kept, room = dict[int, Tensor](), _KEPT
        for number, use in enumerate(uses):
            a = use.inputs
            if use.name in self.factored:
                _add(self.inputs, use.name, a.flatten(0, 1).T @ a.flatten(0, 1))
            self.places[use.name] = self.places.get(use.name, 0) + a.shape[1]
            if a.numel() <= room:
                kept[number], room = a, room - a.numel()
        each_sample = self._others()
        for v in scores_of(f):
            if uses:
                found = torch.autograd.grad(
                    f, [use.outputs for use in uses], v, retain_graph=True, allow_unused=True
                )
                self._add_gradients(uses, found, kept)
            if each_sample:
                self._add_each(x, v, each_sample)
        if not self.checked:
            self.places_per_sample = dict(self.places)
        self.places = {}
        self.checked = True

    def _add_gradients(
        self, uses: Sequence[Call], found: Sequence[Tensor | None], kept: Mapping[int, Tensor]
    ) -> None:
        """Outer products of the gradients, and squared gradients of samples."""
        by_layer: dict[str, list[tuple[Tensor, int]]] = {}
        for number, (use, gradient) in enumerate(zip(uses, found, strict=True)):
            if gradient is not None:
                g = places(use.layer, gradient)
                if use.name in self.factored:
                    _add(self.outputs, use.name, g.flatten(0, 1).T @ g.flatten(0, 1))
                by_layer.setdefault(use.name, []).append((g, number))
        for name, calls in by_layer.items():
            weight = f"{name}.weight"
            if weight not in self.diagonal:
                continue
            squares = _squares([(g, kept[n] if n in kept else uses[n].inputs) for g, n in calls])
            columns = self.diagonal[weight][0].numel()
            self.diagonal[weight] += squares[:, :columns].reshape(self.diagonal[weight].shape)
            if self.layers[name].bias is not None:
                self.diagonal[f"{name}.bias"] += squares[:, columns]

    def _add_each(self, x: Tensor, v: Tensor, names: Sequence[str]) -> None:
        """Squared gradients of other parameters, sample by sample."""
        parameters = {name: self.module.get_parameter(name).detach() for name in names}

        def value(others: Tensors, one: Tensor, along: Tensor) -> Tensor:
            f: Tensor = functional_call(self.module, others, (one[None],))
            return (f[0] * along).sum()

        most = max(1, _ROOM // sum(p.numel() for p in parameters.values()))
        try:
            # No gradients but these, or sums would hold on to all that they came from.
            with warnings.catch_warnings(), torch.no_grad():
                warnings.filterwarnings("ignore", "There is a performance drop")
                found = vmap(grad(value), in_dims=(None, 0, 0), chunk_size=most)(parameters, x, v)
            squares = {name: found[name].square().sum(0) for name in names}
        except RuntimeError:  # an operation that is not mapped, as of an LSTM
            squares = {name: torch.zeros_like(p) for name, p in parameters.items()}
            for one, along in zip(x, v, strict=True):
                with torch.no_grad():
                    single = grad(value)(parameters, one, along)
                for name in names:
                    squares[name] += single[name].square()
        for name in names:
            self.diagonal[name] += squares[name]

    def result(self, total: int) -> tuple[dict[str, KroneckerFactors], Tensors]:
        """Means over so many samples, float32."""
        factors = {
            name: KroneckerFactors(
                (self.inputs[name] / total).float(),
                (self.outputs[name] / (total * self.places_per_sample[name])).float(),
            )
            for name in self.layers
            if name in self.outputs
        }
        means = {name: (d / total).float() for name, d in self.diagonal.items()}
        shared = {n: means[first] for n, first in self.shared.items() if first in means}
        return factors, shared

    def _others(self) -> list[str]:
        """Parameters whose gradients are not summed by the calls of their layer."""
        covered = {f"{name}.{kind}" for name in self.layers for kind in ("weight", "bias")}
        return [name for name in self.diagonal if name not in covered]

    def _leave_out(self) -> None:
        """Diagonals that are not wanted beside factors."""
        if self.parts == "factors":
            for name in self.factored & self.layers.keys():
                for kind in ("weight", "bias"):
                    self.diagonal.pop(f"{name}.{kind}", None)

    def _keep_added(self, f: Tensor, uses: Sequence[Call]) -> None:
        """Keep the layers whose gradients are, sample by sample, the sums over their calls."""
        if not uses:
            self.layers = {}
            return
        v = torch.zeros_like(f)
        v[0] = torch.randn(f[0].shape, generator=torch.Generator().manual_seed(0))
        weights = {
            f"{name}.{kind}": parameter
            for name, layer in self.layers.items()
            for kind, parameter in layer.named_parameters()
        }
        found = torch.autograd.grad(
            f,
            [*(use.outputs for use in uses), *weights.values()],
            v,
            retain_graph=True,
            allow_unused=True,
        )
        whole = dict(zip(weights, found[len(uses) :], strict=True))
        own: dict[str, Tensor] = {}
        mixed = set()
        for use, gradient in zip(uses, found, strict=False):
            if len(use.given) != len(f) or (gradient is not None and bool(gradient[1:].any())):
                mixed.add(use.name)  # its first axis is not that of the samples
            elif gradient is not None:
                g = places(use.layer, gradient)
                _add(own, use.name, g[0].T @ use.inputs[0])
        self.layers = {
            name: layer
            for name, layer in self.layers.items()
            if name in own and name not in mixed and _same(own[name], layer, name, whole)
        }


def _by_calls(layer: nn.Module) -> bool:
    """Whether a layer's calls tell the gradients of its parameters, as far as it says."""
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        plain = layer.groups == 1 and layer.padding_mode == "zeros"
        if not plain or isinstance(layer.padding, str):
            return False
    elif not isinstance(layer, nn.Linear):
        return False
    if layer._parameters.get("weight") is None:  # computed, as weight_norm does it
        return False
    return all(parameter.requires_grad for parameter in layer.parameters())


def _width(layer: nn.Module) -> int:
    """The larger side of a layer's factors; of a layer `_by_calls` alone."""
    weight = layer.get_parameter("weight")
    return max(len(weight), weight[0].numel() + 1)


def _same(own: Tensor, layer: nn.Module, name: str, whole: Mapping[str, Tensor | None]) -> bool:
    """Whether a gradient [o, d] by the calls of a layer is that of its weight and bias."""
    weight, bias = whole[f"{name}.weight"], whole.get(f"{name}.bias")
    if weight is None or (layer.bias is not None and bias is None):
        return False
    wanted = weight.flatten(1) if bias is None else torch.cat([weight.flatten(1), bias[:, None]], 1)
    return bool((own - wanted).abs().max() <= 1e-3 * wanted.abs().max())


def _squares(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Squared gradients of a weight [o, d] from g and a of every call, summed over samples."""
    g, a = pairs[0]
    if len(pairs) == 1 and g.shape[1] == 1:
        return g[:, 0].square().T @ a[:, 0].square()
    total = g.new_zeros(g.shape[2], a.shape[2])
    some = max(1, _ROOM // total.numel())
    for first in range(0, len(g), some):
        part = slice(first, first + some)
        gradients = [g[part].transpose(1, 2) @ a[part] for g, a in pairs]
        whole = gradients[0] if len(gradients) == 1 else torch.stack(gradients).sum(0)
        total += whole.square_().sum(0)
    return total


def _add(sums: Tensors, name: str, value: Tensor) -> None:
    """Add to a sum, float64."""
    if name in sums:
        sums[name] += value
    else:
        sums[name] = value.double()
