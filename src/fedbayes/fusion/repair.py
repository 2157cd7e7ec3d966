"""Activations of an average with the means and deviations of the networks' own (REPAIR).

Averaging weights averages out what units respond to, so that activations vary less from layer to
layer. REPAIR rescales and shifts each unit until its mean and its standard deviation over some
inputs are those of the networks, averaged (Jordan et al. 2023).
"""

import copy
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbayes.core.tensors import Tensors
from fedbayes.fusion.frozen import set_training
from fedbayes.models.hooks import watched
from fedbayes.models.resize import with_weights

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Whose outputs are repaired."""
_CONSTANT = 1e-12
"""Variance of a unit below which it is only shifted."""


@torch.no_grad()
def repaired(
    network: nn.Module,
    weights: Tensors,
    aligned: Sequence[Tensors],
    alpha: Sequence[float],
    x: Tensor,
) -> tuple[Tensors, dict[str, str]]:
    """Rescale the units of an average (equations 2 and 3 of the paper).

    Let μ_s and σ_s be mean and deviation of a unit's outputs in network s, over inputs and places.
    The unit gets the mean Σ_s α_s μ_s and the deviation Σ_s α_s σ_s: its weights are rescaled, and
    its bias shifts it. Layers come in the order that inputs go through them, so that each one gets
    outputs of repaired layers. The last layer stays as it is. Statistics of batch normalization are
    recomputed on the inputs.

    Args:
        network: of the graph; its weights do not count.
        weights: the average, a `state_dict`.
        aligned: the networks that it is of, in one order of units.
        alpha: their weights in it.
        x: inputs [n, ...], all of which go through the network together.

    Returns:
        The weights, and why layers were left out or only rescaled.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from fedbayes.fusion.repair import repaired
        >>> network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> own, x = network.state_dict(), torch.randn(50, 3)
        >>> smaller = {name: tensor / 2 for name, tensor in own.items()}
        >>> found, _ = repaired(network, smaller, [own], [1.0], x)
        >>> torch.allclose(found["0.weight"], own["0.weight"])
        True
    """
    layers, left = _layers(network, x[:2])
    wanted: dict[str, list[Tensor]] = {}
    for model, share in zip(aligned, alpha, strict=True):
        for name, own in _statistics(with_weights(network, model), layers, x).items():
            wanted.setdefault(name, []).append(share * torch.stack(own))
    fused = copy.deepcopy(with_weights(network, weights))
    _normalize(fused)

    def rescale(name: str, layer: Any, _: object, outputs: Tensor) -> Tensor:
        mean, std = _moments(layer, outputs)
        target = torch.stack(wanted[name]).sum(0)
        factor = torch.where(std.square() > _CONSTANT, target[1] / std.clamp_min(1e-30), 1.0)
        layer.weight.mul_(factor.to(layer.weight).reshape(-1, *[1] * (layer.weight.ndim - 1)))
        shift = torch.zeros_like(mean)
        if layer.bias is None:
            left[name] = "it has no bias, so only its deviations were restored"
        else:
            shift = target[0] - factor * mean
            layer.bias.copy_(factor * layer.bias + shift)
        shape = _along(layer, outputs)
        return outputs * factor.to(outputs).reshape(shape) + shift.to(outputs).reshape(shape)

    with watched({name: fused.get_submodule(name) for name in layers}, rescale):
        fused(x)
    state = fused.state_dict()
    found = {n: state[n].to(w.dtype) if w.is_floating_point() else w for n, w in weights.items()}
    return found, left


def _layers(network: nn.Module, x: Tensor) -> tuple[list[str], dict[str, str]]:
    """Layers to repair, in the order of inputs, and why others are left out."""
    twin, order = copy.deepcopy(network), list[str]()
    set_training(twin, False)
    leaves = {name: leaf for name, leaf in twin.named_modules() if not list(leaf.children())}
    with watched(leaves, lambda name, *_: order.append(name)):
        twin(x)
    ours = [name for name in dict.fromkeys(order) if isinstance(leaves[name], LAYERS)][:-1]
    owners = Counter(id(p) for leaf in leaves.values() for p in leaf._parameters.values())
    found, left = list[str](), dict[str, str]()
    for name in ours:
        following = [leaves[n] for o, n in pairwise(order) if o == name]
        if order.count(name) > 1 or owners[id(leaves[name].weight)] > 1:
            left[name] = "it is used more than once"
        elif not isinstance(following[0], _BatchNorm):
            found.append(name)
    return found, left


def _normalize(network: nn.Module) -> None:
    """Make batch normalization take the statistics of the batch that comes, for good."""
    set_training(network, True)
    for layer in network.modules():
        if isinstance(layer, _BatchNorm):
            layer.momentum = 1.0


def _along(layer: nn.Module, outputs: Tensor) -> list[int]:
    """The shape of a vector by unit that is to be multiplied with a layer's outputs."""
    if isinstance(layer, nn.Linear):
        return [1] * (outputs.ndim - 1) + [-1]
    return [1, -1] + [1] * (outputs.ndim - 2)


def _moments(layer: nn.Module, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Means and standard deviations of a layer's units, float64."""
    rows = outputs.double()
    rows = rows.flatten(0, -2) if isinstance(layer, nn.Linear) else rows.transpose(0, 1).flatten(1)
    dim = 0 if isinstance(layer, nn.Linear) else 1
    return rows.mean(dim), rows.std(dim, unbiased=False)


def _statistics(
    network: nn.Module, layers: Sequence[str], x: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each layer's units, over these inputs."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    set_training(network, False)

    def measure(name: str, layer: nn.Module, _: object, outputs: Tensor) -> None:
        found[name] = _moments(layer, outputs)

    with watched({name: network.get_submodule(name) for name in layers}, measure):
        network(x)
    return found
