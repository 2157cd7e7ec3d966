"""Physically smaller networks: units that are gone are cut out of the tensors.

A unit is gone when all that it owns (`fedbayes.models.units`) is zero. Its row goes, and the
columns that read it where the reader is known; elsewhere a `Scatter` puts zeros in its place.
Group normalization goes on counting the channels that are gone, as zeros, so that the outputs
stay what they were.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedbayes.models.units import Units, find_units
from fedbayes.tensors import Tensors


class Scatter(nn.Module):
    """Puts channels back into their places among zeros: [n, kept, ...] to [n, channels, ...]."""

    index: Tensor

    def __init__(self, kept: Tensor) -> None:
        super().__init__()
        self.channels = len(kept)
        self.register_buffer("index", kept.nonzero()[:, 0])

    def forward(self, x: Tensor) -> Tensor:
        """Zeros for the channels that are gone."""
        whole = x.new_zeros(x.shape[0], self.channels, *x.shape[2:])
        return whole.index_copy(1, self.index, x)


class PrunedGroupNorm(nn.Module):
    """Group normalization of the channels that are left of a whole layer.

    Means and variances are over all channels of a group; those that are gone are zeros.
    """

    group: Tensor
    counts: Tensor

    def __init__(self, norm: nn.GroupNorm, kept: Tensor) -> None:
        super().__init__()
        size = norm.num_channels // norm.num_groups
        groups = torch.arange(norm.num_channels) // size
        self.size, self.groups, self.eps = size, norm.num_groups, norm.eps
        self.weight = nn.Parameter(norm.weight.detach()[kept].clone())
        self.bias = nn.Parameter(norm.bias.detach()[kept].clone())
        self.register_buffer("group", groups[kept])
        self.register_buffer("counts", torch.bincount(groups[~kept], minlength=self.groups))

    def forward(self, x: Tensor) -> Tensor:
        """[n, kept, h, w] to the same shape."""
        pixels = x.shape[2] * x.shape[3]
        total = self.size * pixels
        sums = x.new_zeros(x.shape[0], self.groups)
        mean = sums.index_add(1, self.group, x.sum(dim=(2, 3))) / total
        centred = x - mean[:, self.group, None, None]
        squares = sums.index_add(1, self.group, centred.square().sum(dim=(2, 3)))
        variance = (squares + self.counts * pixels * mean.square()) / total
        scale = (variance + self.eps).rsqrt()[:, self.group, None, None]
        return centred * scale * self.weight[:, None, None] + self.bias[:, None, None]


def with_weights(module: nn.Module, weights: Tensors) -> nn.Module:
    """A copy of a module with other weights, of other widths if need be."""
    whole = copy.deepcopy(module).eval()
    for name, tensor in weights.items():
        path, _, key = name.rpartition(".")
        owner = whole.get_submodule(path)
        fresh = tensor.detach().cpu().clone()
        if key in owner._parameters:
            owner._parameters[key] = nn.Parameter(fresh)
        else:
            owner._buffers[key] = fresh
    return whole


def compact(module: nn.Module, weights: Tensors) -> nn.Module:
    """A smaller module with the outputs of `module` under `weights`, in evaluation mode.

    Args:
        module: the network; not changed.
        weights: its parameters and buffers by name.
    """
    small = with_weights(module, weights)
    for units in find_units(small):
        kept = torch.zeros(units.count, dtype=torch.bool)
        for name in units.owned:
            kept |= (weights[name].detach().cpu() != 0).reshape(units.count, -1).any(dim=1)
        if kept.all() or units.last:
            continue
        kept[0] |= not kept.any()  # layers of no unit at all are nothing to compute with
        _cut(small, units, kept)
    return small


def _cut(module: nn.Module, units: Units, kept: Tensor) -> None:
    """Cut units out of a module in place."""
    layer = module.get_submodule(units.layer)
    _shrink(layer, 0, kept)
    final, replaced = units.layer, layer
    if units.norm is not None:
        norm = module.get_submodule(units.norm)
        final, replaced = units.norm, _shrunk_norm(norm, kept)
    if units.reader is not None:
        reader = module.get_submodule(units.reader.removesuffix(".weight"))
        _shrink(reader, 1, kept.repeat_interleave(units.repeats))
    else:
        replaced = nn.Sequential(replaced, Scatter(kept))
    path, _, key = final.rpartition(".")
    setattr(module.get_submodule(path), key, replaced)


def _shrunk_norm(norm: nn.Module, kept: Tensor) -> nn.Module:
    if isinstance(norm, nn.GroupNorm):
        return PrunedGroupNorm(norm, kept)
    assert isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d)
    small = type(norm)(int(kept.sum()), norm.eps, norm.momentum)
    for name, tensor in norm.state_dict().items():
        own = small.get_parameter(name) if name in small._parameters else small.get_buffer(name)
        own.data = tensor[kept].clone() if tensor.ndim else tensor.clone()
    return small.eval()


def _shrink(layer: nn.Module, axis: int, kept: Tensor) -> None:
    """Keep some rows (with their biases) or columns of a linear layer or a convolution."""
    assert isinstance(layer, nn.Linear | nn.Conv2d)
    count = int(kept.sum())
    index = kept.nonzero()[:, 0]
    layer.weight = nn.Parameter(layer.weight.detach().index_select(axis, index))
    if axis == 0 and layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias.detach()[index])
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif axis == 0:
        layer.out_channels = count
    else:
        layer.in_channels = count


def difference(one: nn.Module, two: nn.Module, x: Tensor) -> float:
    """The largest difference of two modules' log-probabilities on some inputs."""
    with torch.no_grad():
        left, right = (functional.log_softmax(m(x), dim=-1) for m in (one, two))
    return float((left - right).abs().max())
