"""Physically smaller networks: units that are gone are cut out of the tensors.

A unit is gone when all that it owns (`fedbayes.models.units`) is zero. Then everything of it goes,
and the columns that read it. Group normalization goes on counting the channels that are gone, as
zeros, so that the outputs stay what they were.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedbayes.core.tensors import Tensors
from fedbayes.models.resize import named_tensor, placed, resized, with_weights
from fedbayes.models.units import Group

ROUNDING = 1e-4
"""By which answers may differ, as a part of the largest, when sums have fewer zeros in them."""


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
        alive = axis.rows((named_tensor(module, axis.tensor) != 0).float(), group.count)
        kept |= alive.any(dim=1)
    for axis in (*group.owned, *group.readers):
        # Tensors of no unit at all are nothing to compute with.
        own = [unit for unit in axis.units if unit >= 0]
        kept[own[0]] |= not kept[own].any()
    return kept


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
    return bool((answer - wanted).abs().max() <= ROUNDING * wanted.abs().max())


def _without(module: nn.Module, gone: list[tuple[Group, Tensor]]) -> nn.Module:
    """A copy of a module from which units are cut."""
    left = [(group, kept.nonzero()[:, 0].tolist()) for group, kept in gone]
    axes = placed(left)
    small = resized(module, left)
    for name in {name for group, _ in gone for name in group.norms}:
        norm = module.get_submodule(name)
        if isinstance(norm, nn.GroupNorm) and f"{name}.weight" in axes:
            kept = torch.zeros(norm.num_channels, dtype=torch.bool)
            kept[axes[f"{name}.weight"][0].entry] = True
            path, _, key = name.rpartition(".")
            setattr(small.get_submodule(path), key, PrunedGroupNorm(norm, kept))
    return small


def difference(one: nn.Module, two: nn.Module, x: Tensor) -> float:
    """The largest difference of two modules' log-probabilities on some inputs."""
    with torch.no_grad():
        left, right = (functional.log_softmax(m(x), dim=-1) for m in (one, two))
    return float((left - right).abs().max())
