"""Networks of other widths: units of a group left out, or each of them several times.

A group of units (`fedbayes.models.units`) lies on axes of many tensors. A list of the old units, in
their order, defines a new width. If a unit is absent, its entries go. If it appears twice, its
entries appear twice, side by side, on every axis that they are on. So a flattened map keeps its
pixels together, heads of attention keep their rows, and layers still fit one another.
"""

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedbayes.core.tensors import Tensors
from fedbayes.models.units import Axis, Group, evaluating

Units = Sequence[tuple[Group, Sequence[int]]]
"""Groups, each with the old units in whose places its new ones stand, in rising order."""


@dataclass(frozen=True)
class Placed:
    """An axis of a tensor after its groups changed their widths; all int64 [new entries]."""

    entry: Tensor
    """The old entry that stands here."""
    group: Tensor
    """Place of its group in `Units`; -1 for entries of none."""
    slot: Tensor
    """Which of the group's new units it belongs to; -1 for entries of none."""
    rank: Tensor
    """Which of its unit's entries on this axis it is."""


def placed(units: Units) -> dict[str, dict[int, Placed]]:
    """By tensor and axis, what stands where after groups changed their widths."""
    touching: dict[tuple[str, int], list[tuple[int, Axis]]] = {}
    for number, (group, order) in enumerate(units):
        if list(order) != sorted(order):
            raise ValueError(f"the units of {group.layer!r} are not in rising order")
        for axis in (*group.owned, *group.readers, *group.running):
            touching.setdefault((axis.tensor, axis.axis), []).append((number, axis))
    slots: dict[tuple[int, int], list[int]] = {}
    for number, (_, order) in enumerate(units):
        for slot, unit in enumerate(order):
            slots.setdefault((number, unit), []).append(slot)
    found: dict[str, dict[int, Placed]] = {}
    for (tensor, at), axes in touching.items():
        found.setdefault(tensor, {})[at] = _placed(axes, slots)
    return found


def _placed(
    axes: Sequence[tuple[int, Axis]], slots: Mapping[tuple[int, int], Sequence[int]]
) -> Placed:
    """Every run of entries of one unit stands once for each new unit in its place."""
    owners = [(-1, -1)] * len(axes[0][1].units)
    for number, axis in axes:
        for entry, unit in enumerate(axis.units):
            if unit >= 0:
                owners[entry] = (number, unit)
    rows: list[tuple[int, int, int, int]] = []
    seen: dict[tuple[int, int], int] = {}
    for owner, run in groupby(range(len(owners)), key=owners.__getitem__):
        entries = list(run)
        if owner[0] < 0:
            rows += [(entry, -1, -1, 0) for entry in entries]
            continue
        first = seen.get(owner, 0)
        seen[owner] = first + len(entries)
        for slot in slots.get(owner, ()):
            rows += [(entry, owner[0], slot, first + k) for k, entry in enumerate(entries)]
    return Placed(*torch.tensor(rows, dtype=torch.int64).reshape(-1, 4).unbind(1))


def taken(weights: Tensors, units: Units) -> Tensors:
    """The tensors that change when groups change their widths: old entries, taken as told."""
    found: Tensors = {}
    for name, axes in placed(units).items():
        tensor = weights[name]
        for axis, place in axes.items():
            tensor = tensor.index_select(axis, place.entry.to(tensor.device))
        found[name] = tensor
    return found


def with_weights(module: nn.Module, weights: Tensors) -> nn.Module:
    """A copy of a module with other weights, of other widths if need be, in evaluation mode.

    Args:
        module: not changed.
        weights: parameters and buffers by name; those not named stay.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of what programs are made of
        whole = evaluating(copy.deepcopy(module))
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in whole.modules():
        for key, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                places.setdefault(id(tensor), []).append((owner, key))
    # A tensor that two layers share stays one.
    named = [(named_tensor(whole, name), tensor) for name, tensor in weights.items()]
    for old, tensor in named:
        fresh = tensor.detach().cpu().clone()
        parameter = nn.Parameter(fresh) if isinstance(old, nn.Parameter) else None
        for owner, key in places[id(old)]:
            if parameter is None:
                owner._buffers[key] = fresh
            else:
                owner._parameters[key] = parameter
            _fit(owner)
    return whole


def named_tensor(module: nn.Module, name: str) -> Tensor:
    """A parameter or a buffer of a module."""
    path, _, key = name.rpartition(".")
    tensor: Tensor = getattr(module.get_submodule(path), key)
    return tensor


def resized(module: nn.Module, units: Units) -> nn.Module:
    """A copy of a module whose groups have other widths, in evaluation mode.

    Group normalization keeps its number of groups, so what remains of each must be as many.
    """
    weights = {
        name: tensor.detach()
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    return with_weights(module, taken(weights, units))


def is_depthwise(layer: nn.Module) -> TypeGuard[_ConvNd]:
    """Whether a layer is a convolution of each channel by itself."""
    return isinstance(layer, _ConvNd) and 1 < layer.groups == layer.in_channels


def channels_by_weight(layer: _ConvNd) -> int:
    """How many channels a depthwise convolution has, going by its weight."""
    times = 1 if layer.transposed else layer.out_channels // layer.in_channels
    return len(layer.weight) // times


def _fit(layer: nn.Module) -> None:
    """Make a layer's attributes fit its weights."""
    match layer:
        case nn.Linear():
            layer.out_features, layer.in_features = layer.weight.shape
        case nn.Embedding():
            layer.embedding_dim = layer.weight.shape[1]
        case _ConvNd():
            if is_depthwise(layer):
                layer.groups = channels_by_weight(layer)
            sizes = len(layer.weight), layer.weight.shape[1] * layer.groups
            layer.in_channels, layer.out_channels = sizes if layer.transposed else sizes[::-1]
        case nn.BatchNorm1d() | nn.BatchNorm2d() | nn.BatchNorm3d() if layer.affine:
            layer.num_features = len(layer.weight)
        case nn.GroupNorm() if layer.affine:
            layer.num_channels = len(layer.weight)
        case nn.LayerNorm() | nn.RMSNorm() if layer.weight is not None:
            layer.normalized_shape = tuple(layer.weight.shape)


def widened(count: int, cells: Sequence[int], width: float) -> list[int]:
    """The old units in whose places those of a group of another width stand.

    Every cell of exchangeable units (a group of a group normalization, say) takes the same share,
    rounded, of one unit at least.

    Args:
        count: of old units.
        cells: of each old unit.
        width: new units for an old one.
    """
    order: list[int] = []
    for cell in dict.fromkeys(cells):
        own = [unit for unit in range(count) if cells[unit] == cell]
        new = max(1, round(width * len(own)))
        order += [own[place * len(own) // new] for place in range(new)]
    return sorted(order)
