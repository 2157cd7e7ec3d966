"""One-shot fusion of networks that were trained apart: models in, one model out.

import fedbayes

fused = fedbayes.fuse([a.state_dict(), b.state_dict()], counts=[[50, 3], [0, 41]])
model.load_state_dict(fused.weights)  # of an MLP with hidden layers of sizes fused.sizes
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from pydantic import ValidationError

from fedbayes.core.brief import Brief
from fedbayes.core.fields import idle
from fedbayes.core.tensors import Tensors, parameter_count
from fedbayes.errors import ConfigError, ModelError
from fedbayes.fusion.combining import weighted_sum
from fedbayes.inference.combination import Combination, factors
from fedbayes.matching import Dense, MatchingSettings, NetworkMatching, match_networks
from fedbayes.models import DenseLayer, dense_layers

FusionMethod = Literal["gpi-fnm", "pfnm", "combined", "average"]
"""How models are fused."""

FusionSettings = MatchingSettings | Combination
"""Parameters of the matching, or of a linear combination, of which the average is one."""

Layers = Sequence[DenseLayer]
"""A fully connected network, first layer to last."""


@dataclass(frozen=True, repr=False)
class Fusion(Brief):
    """A fused model, with the assignment of neurons that led to it.

    Examples:
        >>> import fedbayes
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> nets = [Sequential(Linear(4, 6), ReLU(), Linear(6, 3)) for _ in range(2)]
        >>> fusion = fedbayes.fuse([net.state_dict() for net in nets])
        >>> len(fusion.sizes), fusion.method
        (1, 'gpi-fnm')
    """

    weights: Tensors
    """The model as a `state_dict` with the first input's names."""
    layers: list[DenseLayer]
    """The same, layer by layer."""
    sizes: list[int]
    """Neurons in each hidden layer."""
    assignments: dict[str, list[npt.NDArray[np.int64]]]
    """Of each input by name and of each of its hidden layers: the fused neuron that each of its
    neurons became [L]."""
    matching: NetworkMatching | None
    """The matching in full; None for a combination or an average."""
    settings: FusionSettings
    """Settings of the matching, or of the combination."""
    method: str
    """What it was made with."""
    seconds: float
    """Time that it took."""

    @property
    def parameters(self) -> int:
        """Scalars of the fused model."""
        return parameter_count(self.weights)


def fuse(
    models: Mapping[str, Tensors] | Sequence[Tensors],
    *,
    method: FusionMethod = "gpi-fnm",
    counts: npt.ArrayLike | None = None,
    seed: int = 0,
    watch: Callable[[str], None] | None = None,
    **settings: Any,
) -> Fusion:
    """Fuse fully connected ReLU networks into one, by matching their neurons.

    Args:
        models: `state_dict`s of MLPs, with names for errors and assignments (else "0", "1", …).
            Names of tensors are free; depth, inputs and outputs must agree, widths need not. A
            model without biases counts as one whose biases are 0 if other models have biases.
        method: `gpi-fnm`, `pfnm` (ε = 0), or, weight by weight, `average` or `combined`.
        counts: training samples of each model and class [S, K], in the order of the models; a
            model says nothing of classes that it never saw, and has the share of its samples in
            a combination; the mean is weighted by these. Equal shares by default.
        seed: of the order of models in sweeps.
        watch: called with what is being done.
        settings: of the matching (see `fedbayes.matching.MatchingSettings`), or of the
            combination: `alpha` (mean, linear, exp), `c` and `normalized`.

    Raises:
        ModelError: the models cannot be fused, or the counts do not fit.
        ConfigError: a setting is unknown, out of range, or has no effect with the others.

    Examples:
        >>> import fedbayes
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> nets = [Sequential(Linear(4, 6), ReLU(), Linear(6, 3)) for _ in range(2)]
        >>> fedbayes.fuse([net.state_dict() for net in nets], method="average").sizes
        [6]
    """
    if not isinstance(models, Mapping):
        models = {str(index): weights for index, weights in enumerate(models)}
    for name, weights in models.items():
        if not isinstance(weights, Mapping):
            raise ModelError(
                f"model {name} is of type {type(weights).__name__}. Give the state_dict of each, "
                "as module.state_dict() or fedbayes.models.read_model(path)[0] has it"
            )
    layers = {name: dense_layers(weights, name) for name, weights in models.items()}
    chosen = fusion_settings(method, settings)
    refuse_idle(chosen)
    return fuse_layers(
        layers,
        chosen,
        counts=None if counts is None else np.asarray(counts, dtype=np.float64),
        seed=seed,
        watch=watch,
    )


def fusion_settings(method: str, settings: Mapping[str, Any]) -> FusionSettings:
    """The settings of a fusion method by name.

    Raises:
        ConfigError: a setting is unknown, out of range, or not of this method.
    """
    if method not in get_args(FusionMethod):
        known = ", ".join(get_args(FusionMethod))
        raise ConfigError(f"unknown fusion method {method!r}. Choose {known}")
    if method == "average":
        if settings:
            raise ConfigError(f"the average has no setting {next(iter(settings))!r}")
        return Combination(alpha="mean")
    if method == "pfnm" and settings.get("epsilon"):
        raise ConfigError("pfnm has epsilon = 0. Use gpi-fnm for another epsilon")
    fixed = {"epsilon": 0.0} if method == "pfnm" else {}
    kind = Combination if method == "combined" else MatchingSettings
    try:
        return kind(**{**settings, **fixed})
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(str(part) for part in problem["loc"])
        allowed = ", ".join(kind.model_fields)
        hint = f". It has {allowed}" if problem["type"] == "extra_forbidden" else ""
        raise ConfigError(f"{name} = {problem['input']!r}: {problem['msg']}{hint}") from None


def refuse_idle(settings: FusionSettings, varied: Collection[str] = ()) -> None:
    """See that all settings have an effect, if none is `varied`, or raise a ConfigError."""
    for remark in () if varied else idle(settings):
        raise ConfigError(remark)


def fuse_layers(
    models: Mapping[str, Layers],
    settings: FusionSettings,
    *,
    counts: npt.NDArray[np.float64] | None = None,
    seed: int = 0,
    watch: Callable[[str], None] | None = None,
) -> Fusion:
    """The same for networks that are lists of layers already."""
    if not models:
        raise ModelError("there are no models to fuse")
    if isinstance(settings, Combination):
        return _combined(models, settings, counts)
    begin = perf_counter()
    first = next(iter(models.values()))
    biased = any(layer.bias is not None for layers in models.values() for layer in layers)
    matching = match_networks(
        [_plain(layers, biased) for layers in models.values()],
        settings,
        counts=counts,
        names=list(models),
        seed=seed,
        watch=watch,
    )
    fused = _layers(matching.network, first)
    return Fusion(
        weights=_state_dict(fused),
        layers=fused,
        sizes=matching.network.widths[1:-1],
        assignments={
            name: [layer.assignments[client] for layer in matching.layers]
            for client, name in enumerate(models)
        },
        matching=matching,
        settings=settings,
        method="gpi-fnm" if settings.epsilon else "pfnm",
        seconds=perf_counter() - begin,
    )


def _combined(
    models: Mapping[str, Layers], settings: Combination, counts: npt.NDArray[np.float64] | None
) -> Fusion:
    """A linear combination; arguments and errors as for `fuse_layers`."""
    begin = perf_counter()
    samples = np.ones(len(models)) if counts is None else counts.sum(axis=1)
    if len(samples) != len(models) or not samples.sum() > 0:
        raise ModelError(f"the counts have {len(samples)} models, but there are {len(models)}")
    alpha = samples / samples.sum()
    if settings.alpha != "mean":
        alpha = factors(settings.alpha, settings.c, samples, normalized=settings.normalized)
    combined = combination(list(models.values()), alpha.tolist())
    if combined is None:
        raise ModelError("the models have different shapes, so they have no average")
    weights = _state_dict(combined)
    if not all(bool(torch.isfinite(t).all()) for t in weights.values()):
        raise ModelError(
            f"with {settings.alpha} factors and c = {settings.c:g} the weights overflow. Choose a "
            "smaller c"
        )
    sizes = [len(layer.weight) for layer in combined[:-1]]
    own = {name: [np.arange(size) for size in sizes] for name in models}
    method = "average" if settings.alpha == "mean" else "combined"
    seconds = perf_counter() - begin
    return Fusion(weights, combined, sizes, own, None, settings, method, seconds)


def coordinate_average(models: Sequence[Layers]) -> list[DenseLayer] | None:
    """The mean of networks weight by weight, or None where their shapes differ."""
    return combination(models, [1 / len(models)] * len(models))


def combination(models: Sequence[Layers], alpha: Sequence[float]) -> list[DenseLayer] | None:
    """Σ_s α_s of networks weight by weight, or None where their shapes differ.

    Biases of a layer without any are 0.
    """
    if len({len(layers) for layers in models}) > 1:
        return None
    combined = []
    for layers in zip(*models, strict=True):
        shapes = {tuple(layer.weight.shape) for layer in layers}
        if len(shapes) > 1:
            return None
        weight = weighted_sum([layer.weight for layer in layers], alpha)
        weight = weight.to(layers[0].weight.dtype)
        biased = next((layer for layer in layers if layer.bias is not None), None)
        if biased is None:
            combined.append(DenseLayer(layers[0].name, weight, layers[0].bias_name, None))
            continue
        none = torch.zeros_like(weight[:, 0])
        biases = [none if layer.bias is None else layer.bias for layer in layers]
        bias = weighted_sum(biases, alpha).to(biases[0].dtype)
        combined.append(DenseLayer(biased.name, weight, biased.bias_name, bias))
    return combined


def _plain(layers: Layers, biased: bool) -> Dense:
    weights = [_array(layer.weight) for layer in layers]
    if not biased:
        return Dense(weights, None)
    biases = [
        np.zeros(len(layer.weight)) if layer.bias is None else _array(layer.bias)
        for layer in layers
    ]
    return Dense(weights, biases)


def _layers(network: Dense, like: Layers) -> list[DenseLayer]:
    """The network as tensors with the names and the type of `like`."""
    dtype = like[0].weight.dtype
    biases: Sequence[npt.NDArray[np.float64] | None]
    biases = network.biases or [None] * len(network.weights)
    return [
        DenseLayer(
            old.name,
            torch.from_numpy(weight).to(dtype),
            old.bias_name,
            None if bias is None else torch.from_numpy(bias).to(dtype),
        )
        for old, weight, bias in zip(like, network.weights, biases, strict=True)
    ]


def _state_dict(layers: Layers) -> Tensors:
    weights: OrderedDict[str, torch.Tensor] = OrderedDict()
    for layer in layers:
        weights[layer.name] = layer.weight
        if layer.bias is not None:
            weights[layer.bias_name] = layer.bias
    return weights


def _array(tensor: torch.Tensor) -> npt.NDArray[np.float64]:
    array: npt.NDArray[np.float64] = tensor.detach().cpu().double().numpy()
    return array
