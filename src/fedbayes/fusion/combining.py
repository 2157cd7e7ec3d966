"""Networks added weight by weight."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedbayes.core.tensors import Tensors
from fedbayes.errors import ModelError


@dataclass(frozen=True)
class Merging:
    """Networks of one graph that are to become one."""

    states: Sequence[Tensors]
    """Their weights, by the same names."""
    alpha: Sequence[float]
    """Their shares of all samples, which add to 1."""
    network: nn.Module
    """The first of them."""
    example: Tensor
    """Inputs [n, ...], as they see them."""
    start: Tensors | None = None
    """Weights that all clients started from, where a method asks for them."""
    draw: Callable[[int], Tensor] | None = None
    """Synthetic inputs by their number [n, ...], as the networks see them, likewise."""


@dataclass(frozen=True)
class MergedWeights:
    """What became of them."""

    weights: Tensors
    told: dict[str, Any] = field(default_factory=dict)
    """Numbers of how it went, for reports."""


def averaged(merging: Merging, settings: None = None) -> MergedWeights:
    """The mean weight by weight; arguments and errors as for `combine`."""
    return MergedWeights(combine(merging.states, merging.alpha))


def combine(models: Sequence[Tensors], alpha: Sequence[float]) -> Tensors:
    """Σ_s α_s of `state_dict`s of one graph, in double precision and back; integers are rounded.

    Raises:
        ModelError: they have other names or shapes.

    Examples:
        >>> import torch
        >>> from fedbayes.fusion.combining import combine
        >>> combine([{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}], [0.5, 0.5])
        {'w': tensor([2.])}
    """
    first = models[0]
    for number, model in enumerate(models):
        absent = sorted(model.keys() ^ first.keys())
        if absent:
            raise ModelError(
                f"network {number} and the first have different graphs: only one of them has "
                f"{absent[0]!r}"
            )
        for name, tensor in model.items():
            if tensor.shape != first[name].shape:
                raise ModelError(
                    f"network {number} has {name!r} of shape {tuple(tensor.shape)}, the first "
                    f"{tuple(first[name].shape)}. Networks of different widths have no mean"
                )
    combined = {}
    for name, like in first.items():
        total = weighted_sum([model[name] for model in models], alpha)
        whole = not (like.is_floating_point() or like.is_complex())
        combined[name] = (total.round() if whole else total).to(like.dtype)
    return combined


def weighted_sum(tensors: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """Σ_s factor_s tensor_s, float64, of complex numbers complex128."""
    kind = torch.complex128 if tensors[0].is_complex() else torch.float64
    total = torch.zeros(tensors[0].shape, dtype=kind, device=tensors[0].device)
    for tensor, factor in zip(tensors, factors, strict=True):
        total.add_(tensor, alpha=factor)
    return total
