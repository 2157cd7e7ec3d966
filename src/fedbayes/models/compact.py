"""Physically smaller networks: units that are gone are cut out of the tensors.

A unit is gone when all that it owns (`fedbayes.models.units`) is zero. Then everything of it goes,
and the columns that read it. Group normalization goes on counting the channels that are gone, as
zeros, so that the outputs stay what they were.
"""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedbayes.models.units import Group, masks
from fedbayes.tensors import Tensors


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
        """[n, kept, ...] to the same shape."""
        shape, x = x.shape, x.flatten(2)
        pixels = x.shape[2]
        total = self.size * pixels
        sums = x.new_zeros(x.shape[0], self.groups)
        mean = sums.index_add(1, self.group, x.sum(dim=2)) / total
        centred = x - mean[:, self.group, None]
        squares = sums.index_add(1, self.group, centred.square().sum(dim=2))
        variance = (squares + self.counts * pixels * mean.square()) / total
        scale = (variance + self.eps).rsqrt()[:, self.group, None]
        whole = centred * scale * self.weight[:, None] + self.bias[:, None]
        return whole.reshape(shape)


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


def compact(module: nn.Module, weights: Tensors, groups: Iterable[Group], x: Tensor) -> nn.Module:
    """A smaller module with the outputs of `module` under `weights`, in evaluation mode.

    Units whose readers are not known, or whose number counts, stay as zeros. So do those that the
    code of the module wants: every step is tried.

    Args:
        module: the network; not changed.
        weights: its parameters and buffers by name.
        groups: of its units.
        x: inputs to try both on, [n, ...] with two samples at least.
    """
    small = with_weights(module, weights)
    gone = [
        (group, kept)
        for group in groups
        if group.sliceable and not (kept := _kept(small, group)).all()
    ]
    together = _without(small, gone)
    if _alike(small, together, x):
        return together
    for one in gone:
        tried = _without(small, [one])
        if _alike(small, tried, x):
            small = tried
    return small


def _kept(module: nn.Module, group: Group) -> Tensor:
    """Units of which something is not zero, bool [count]; of every tensor there is one."""
    kept = torch.zeros(group.count, dtype=torch.bool)
    for axis in group.owned:
        alive = axis.rows((_tensor(module, axis.tensor) != 0).float(), group.count)
        kept |= alive.any(dim=1)
    for axis in (*group.owned, *group.readers):
        # Tensors of no unit at all are nothing to compute with.
        own = [unit for unit in axis.units if unit >= 0]
        kept[own[0]] |= not kept[own].any()
    return kept


def _tensor(module: nn.Module, name: str) -> Tensor:
    path, _, key = name.rpartition(".")
    tensor: Tensor = getattr(module.get_submodule(path), key)
    return tensor.detach()


def _alike(one: nn.Module, two: nn.Module, x: Tensor) -> bool:
    """Whether two modules answer the same."""
    with torch.no_grad():
        wanted = one(x)
        try:
            answer = two(x)
        except Exception:  # whatever a module of somebody's own may raise
            return False
    if answer.shape != wanted.shape:
        return False
    largest = max(1.0, float(wanted.abs().max()))
    return bool((answer - wanted).abs().max() <= 1e-3 * largest)


def _without(module: nn.Module, gone: list[tuple[Group, Tensor]]) -> nn.Module:
    """A copy of a module from which units are cut."""
    small = copy.deepcopy(module)
    groups = [group for group, _ in gone]
    found = masks(groups, {group.layer: kept for group, kept in gone}, running=True)
    for name in {name for group in groups for name in group.norms}:
        norm, keep = small.get_submodule(name), found.pop(f"{name}.weight", None)
        if isinstance(norm, nn.GroupNorm) and keep is not None:
            found.pop(f"{name}.bias")
            path, _, key = name.rpartition(".")
            setattr(small.get_submodule(path), key, PrunedGroupNorm(norm, keep[(0,)]))
    for name, axes in found.items():
        shrunk = _tensor(small, name)
        for (axis,), kept in axes.items():
            shrunk = shrunk.index_select(axis, kept.nonzero()[:, 0])
        path, _, key = name.rpartition(".")
        owner = small.get_submodule(path)
        if key in owner._parameters:
            owner._parameters[key] = nn.Parameter(shrunk)
        else:
            owner._buffers[key] = shrunk
        _resize(owner)
    return small


def _resize(layer: nn.Module) -> None:
    """Make a layer's attributes fit its weights."""
    match layer:
        case nn.Linear():
            layer.out_features, layer.in_features = layer.weight.shape
        case nn.ConvTranspose1d() | nn.ConvTranspose2d() | nn.ConvTranspose3d():
            layer.in_channels, layer.out_channels = layer.weight.shape[:2]
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
            if layer.groups > 1:  # of single channels
                layer.groups = len(layer.weight) // (layer.out_channels // layer.in_channels)
            layer.out_channels = len(layer.weight)
            layer.in_channels = layer.weight.shape[1] * layer.groups
        case nn.BatchNorm1d() | nn.BatchNorm2d() | nn.BatchNorm3d():
            layer.num_features = len(layer.weight)


def difference(one: nn.Module, two: nn.Module, x: Tensor) -> float:
    """The largest difference of two modules' log-probabilities on some inputs."""
    with torch.no_grad():
        left, right = (functional.log_softmax(m(x), dim=-1) for m in (one, two))
    return float((left - right).abs().max())
