"""Tensors of a compressed report: what is sent of their entries, and under which names."""

from dataclasses import replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from fedbayes.core.coding import Code, Coded
from fedbayes.core.messages import Masked, Message
from fedbayes.errors import MessageError
from fedbayes.federation.stages.checks import check_form

PLACES, MASK = "/places/", "/mask:"
"""Prefix of the name under which a message lists the entries of a tensor that are sent."""


def cast(item: Tensor | Masked, dtype: torch.dtype) -> Tensor | Masked:
    """A tensor of the same form in another type."""
    if isinstance(item, Masked):
        return replace(item, values=item.values.to(dtype))
    return item.to(dtype)


def entries_of(item: Tensor | Masked) -> Tensor:
    """The entries that a tensor holds, in row-major order, [entries]."""
    return item.values if isinstance(item, Masked) else item.reshape(-1)


def same_entries(item: Tensor | Masked, whole: Tensor) -> Tensor:
    """The entries of another tensor that this one holds, [entries]."""
    return entries_of(item.like(whole) if isinstance(item, Masked) else whole)


def filled(item: Tensor | Masked, entries: Tensor) -> Tensor | Masked:
    """A tensor of the same form with other entries."""
    if isinstance(item, Masked):
        return replace(item, values=entries)
    return entries.reshape(item.shape)


def spread(item: Tensor | Masked, entries: Tensor, before: Tensor | None = None) -> Tensor:
    """A dense tensor with these entries, and as before, or zero, where `item` holds none."""
    if not isinstance(item, Masked):
        return entries.reshape(item.shape)
    whole = torch.zeros(item.shape) if before is None else before.clone()
    whole[item.mask()] = entries
    return whole


def coded_tensor(name: str, item: Tensor | Masked, coded: Coded, code: Code) -> Message:
    """What is sent of a tensor."""
    if code.whole:
        return {name: filled(item, coded.values)}
    sent: Message = {name: coded.values}
    if coded.places is not None:
        sent[PLACES + name] = coded.places
    if isinstance(item, Masked):
        for axes, mask in item.masks.items():
            bits = torch.from_numpy(np.packbits(mask.cpu().numpy().ravel()))
            sent[f"{MASK}{','.join(map(str, axes))}/{name}"] = bits
    return sent


def masks_told(sent: Message) -> dict[str, dict[str, str]]:
    """Of each tensor, by axes, under which name the mask over them is sent."""
    found: dict[str, dict[str, str]] = {}
    for key in sent:
        if key.startswith(MASK):
            axes, _, name = key.removeprefix(MASK).partition("/")
            found.setdefault(name, {})[axes] = key
    return found


def coded_received(
    name: str, sent: Message, shape: tuple[int, ...], code: Code, told: dict[str, str]
) -> tuple[Tensor | Masked, Coded]:
    """A tensor of the form that came, whose entries do not count, and its numbers as they came."""
    item = sent[name]
    if code.whole:
        check_form(name, item, shape, code.dtype)
        return item, Coded(entries_of(item))
    form = _masked(name, shape, {axes: sent[key] for axes, key in told.items()})
    check_form(name, item, (code.sent(len(entries_of(form))),), code.dtype)
    if isinstance(item, Masked):
        raise MessageError(f"{name!r} is sparse, and so are its values")
    if not code.places:
        return form, Coded(item)
    places = sent.get(PLACES + name)
    if not isinstance(places, Tensor) or places.dtype != torch.uint8 or places.ndim != 1:
        raise MessageError(f"the positions of {name!r} are missing")
    return form, Coded(item, places=places)


def _masked(name: str, shape: tuple[int, ...], told: Message) -> Tensor | Masked:
    """A tensor of zeros of this shape, which holds what a stranger's masks keep."""
    free, masks = set(range(len(shape))), dict[tuple[int, ...], Tensor]()
    for words, bits in told.items():
        axes = tuple(axis for axis in range(len(shape)) if str(axis) in words.split(","))
        count = prod(shape[axis] for axis in axes)
        if (
            words != ",".join(map(str, axes))
            or not free.issuperset(axes)
            or not isinstance(bits, Tensor)
            or bits.dtype != torch.uint8
            or tuple(bits.shape) != (-(-count // 8),)
        ):
            raise MessageError(f"a mask of {name!r} does not fit its shape")
        free -= set(axes)
        unpacked = np.unpackbits(bits.numpy(), count=count)
        masks[axes] = torch.from_numpy(unpacked.view(np.bool_)).reshape([shape[a] for a in axes])
    if not masks:
        return torch.zeros(shape)
    alive = prod(int(mask.sum()) for mask in masks.values()) * prod(shape[axis] for axis in free)
    return Masked(torch.zeros(alive), shape, masks)
