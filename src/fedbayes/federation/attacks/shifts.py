"""What a report says beyond that of a client that learnt nothing, and reports that say other."""

from typing import Any

import torch
from torch import Tensor

from fedbayes.contracts import AnyMethod, ChangeCoordinates, Federation, Report
from fedbayes.core.messages import Masked, Message
from fedbayes.core.tensors import Tensors


def changes(method: AnyMethod, report: Report, server: Any, run: Federation) -> Tensors:
    """The changes of a report relative to a client without training; see `View.changes`."""
    parts = ChangeCoordinates.of(method, server, run).changes(report).values()
    named = {name: change for part in parts for name, change in part.items()}
    return {name: named[name] for name, _ in _real(report.tensors) if name in named}


def shifted(report: Report, own: Tensors, wanted: Tensors) -> Report:
    """The report of the same form as this one, whose own changes become the wanted ones."""
    tensors = dict(report.tensors)
    for name, item in _real(report.tensors):
        if name in wanted:
            start = _whole(item) - own[name]  # what a client that learnt nothing would say
            values = start + wanted[name]
            tensors[name] = _formed(item, torch.where(values.isnan(), _whole(item), values))
    return Report(tensors, report.weight)


def filled(report: Report, value: float) -> Report:
    """The report of the same form with one value in every real number; as large as the type has."""
    tensors = dict(report.tensors)
    for name, item in _real(report.tensors):
        sent = item.values if isinstance(item, Masked) else item
        most = torch.finfo(sent.dtype).max
        same = torch.full_like(sent, min(value, most) if value == value else value)
        tensors[name] = Masked(same, item.shape, item.masks) if isinstance(item, Masked) else same
    return Report(tensors, report.weight)


def holds_numbers(message: Message) -> bool:
    """Whether an attack on reports of this form can change anything."""
    return bool(_real(message))


def _real(message: Message) -> list[tuple[str, Tensor | Masked]]:
    """The tensors of a message that are of real numbers; counters and masks are left alone."""
    return [
        (name, item)
        for name, item in message.items()
        if (item.values if isinstance(item, Masked) else item).is_floating_point()
    ]


def _whole(item: Tensor | Masked) -> Tensor:
    """An item of a message, dense, float64; NaN where it has no entry."""
    if not isinstance(item, Masked):
        return item.double()
    return item.dense().double().masked_fill_(~item.mask(), torch.nan)


def _formed(item: Tensor | Masked, values: Tensor) -> Tensor | Masked:
    """Values in the form and type of an item of a message."""
    if isinstance(item, Masked):
        return item.like(values.to(item.values.dtype))
    return values.to(item.dtype)
