"""Named tensors: what models, messages and states are made of.

A model, an update or an optimizer's state is a plain `dict[str, Tensor]`. The state of a
server or a client is a frozen dataclass of such things; `pack` and `unpack` turn it into one
flat dict and back, so that every state of every method is stored in one way.
"""

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, NamedTuple, TypeVar, get_origin, get_type_hints

import torch
from torch import Tensor

from fedbayes.errors import MessageError

Tensors = dict[str, Tensor]
"""Tensors by name, as in a `state_dict`."""

State = TypeVar("State")
Value = TypeVar("Value")


PREDICTED = 1000
"""Samples that are predicted at a time, where nobody says how many."""


class Samples(NamedTuple):
    """Inputs and targets of some samples, ready for a network.

    Examples:
        >>> import torch
        >>> from fedbayes.core.tensors import Samples
        >>> Samples(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)).y.shape
        torch.Size([4])
    """

    x: Tensor
    """Standardized inputs, float32 [n, ...]."""
    y: Tensor
    """Targets: class indices, int64 [n]; or float32 [n, columns] (see `fedbayes.core.targets`)."""

    def to(self, device: torch.device | str) -> "Samples":
        """The same samples on another device."""
        return Samples(self.x.to(device), self.y.to(device))

    def batches(self, size: int) -> Iterator["Samples"]:
        """The samples, so many at a time, in their order; none of no samples."""
        for first in range(0, len(self.y), size):
            yield Samples(self.x[first : first + size], self.y[first : first + size])


def to(tensors: Tensors, device: torch.device | str) -> Tensors:
    """The same tensors on another device; those already there are not copied."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def part(tensors: Mapping[str, Value], prefix: str) -> dict[str, Value]:
    """Those of the tensors whose names begin with `prefix/`, by the rest of their names."""
    start = f"{prefix}/"
    return {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}


def named(prefix: str, tensors: Mapping[str, Value]) -> dict[str, Value]:
    """The tensors with `prefix/` before their names; the inverse of `part`."""
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def flat(tensors: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    """All entries of tensors, concatenated in the order of the names, [entries]."""
    return torch.cat([tensors[name].reshape(-1) for name in names])


def shaped(entries: Tensor, like: Tensors) -> Tensors:
    """Views of what `flat` put together, by name.

    Args:
        entries: of all tensors, [entries].
        like: tensors of these names and shapes.
    """
    pieces = torch.split(entries, [tensor.numel() for tensor in like.values()])
    return {
        name: piece.view(tensor.shape)
        for (name, tensor), piece in zip(like.items(), pieces, strict=True)
    }


_PIECE = 1 << 16
"""Entries that are added at once: what is made of them stays in the processor's cache."""


def added(terms: Sequence[Tensor]) -> Tensor:
    """The sum of tensors on their own device, for whose copy no step waits; 0 if there are none."""
    return functools.reduce(operator.add, terms) if terms else torch.zeros(())


def add_to(total: Tensor, values: Tensor, weight: float) -> None:
    """Total += weight · values, in place and of one shape, as `Tensor.add_` does it, to the bit.

    Values of another type than the total are not copied whole, which takes several times as long
    as adding them.
    """
    whole = values.dtype == total.dtype or values.numel() <= _PIECE
    if whole or not total.is_contiguous():
        total.add_(values, alpha=weight)
        return
    pieces = (torch.split(flat, _PIECE) for flat in (total.view(-1), values.reshape(-1)))
    for own, more in zip(*pieces, strict=True):
        own.add_(more, alpha=weight)


def quotient(total: Tensor, divisor: float, dtype: torch.dtype) -> Tensor:
    """The total / divisor in another type, in pieces: no whole copy in float64 is made."""
    if total.numel() <= _PIECE or not total.is_contiguous():
        return (total / divisor).to(dtype)
    found = torch.empty(total.shape, dtype=dtype, device=total.device)
    pieces = (torch.split(flat, _PIECE) for flat in (found.view(-1), total.view(-1)))
    for own, piece in zip(*pieces, strict=True):
        own.copy_(piece / divisor)
    return found


def all_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite; in one pass where, as almost always, all are."""
    # A NaN or an infinity makes the sum non-finite. So may an overflow, hence the second look.
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())


def parameter_count(tensors: Tensors) -> int:
    """How many scalars the tensors hold."""
    return sum(tensor.numel() for tensor in tensors.values())


def sparsity(tensors: Tensors) -> float:
    """Share of scalars that are exactly zero; 0 when there are none at all."""
    count = parameter_count(tensors)
    zeros = sum(tensor.numel() - int(tensor.count_nonzero()) for tensor in tensors.values())
    return zeros / count if count else 0.0


_SCALARS: dict[type, torch.dtype] = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
}


def pack(state: object) -> Tensors:
    """Flatten a dataclass of tensors into one dict of named tensors.

    Fields may be tensors, dicts of tensors (each becomes `field/name`), dataclasses of these, or
    plain `bool`, `int`, `float` and `str` (as UTF-8 bytes). Names are sorted, so that a state is
    the same after it was stored as before. The result shares memory with the state.

    Examples:
        >>> import torch
        >>> from fedbayes.contracts import Weights
        >>> from fedbayes.core.tensors import pack
        >>> pack(Weights({"bias": torch.zeros(2)}))
        {'weights/bias': tensor([0., 0.])}
    """
    if not is_dataclass(state):
        raise TypeError(f"a state must be a dataclass of tensors, not {type(state).__name__}")
    flat: Tensors = {}
    for field in fields(state):
        value = getattr(state, field.name)
        if isinstance(value, dict):
            flat |= {f"{field.name}/{name}": value[name] for name in sorted(value)}
        elif is_dataclass(value):
            flat |= named(field.name, pack(value))
        elif isinstance(value, Tensor):
            flat[field.name] = value
        elif isinstance(value, str):
            flat[field.name] = torch.tensor(list(value.encode()), dtype=torch.uint8)
        elif type(value) in _SCALARS:
            flat[field.name] = torch.tensor(value, dtype=_SCALARS[type(value)])
        else:
            raise TypeError(
                f"{type(state).__name__}.{field.name} is a {type(value).__name__}; a state can "
                "have tensors, dicts of tensors, dataclasses of these, plain bool, int, float "
                "and str"
            )
    return flat


def unpack(kind: type[State], flat: Tensors) -> State:
    """The dataclass of type `kind` that `pack` flattened; the inverse of `pack`.

    A field that was not stored, as by an older version, has its default, if it has one.

    Raises:
        MessageError: a field is missing, or a tensor belongs to no field.

    Examples:
        >>> import torch
        >>> from fedbayes.contracts import Weights
        >>> from fedbayes.core.tensors import unpack
        >>> sorted(unpack(Weights, {"weights/bias": torch.zeros(2)}).weights)
        ['bias']
    """
    hints = get_type_hints(kind)
    groups: dict[str, Tensors] = {}
    for name, tensor in flat.items():
        field, _, rest = name.partition("/")
        groups.setdefault(field, {})[rest] = tensor
    values: dict[str, Any] = {}
    optional = {
        field.name
        for field in fields(kind)  # type: ignore[arg-type]
        if field.default is not MISSING or field.default_factory is not MISSING
    }
    for name, hint in hints.items():
        if name not in groups and name in optional:
            continue
        group = groups.pop(name, {})
        if dict in (hint, get_origin(hint)):
            values[name] = group
        elif isinstance(hint, type) and is_dataclass(hint):
            values[name] = unpack(hint, group)
        elif set(group) != {""}:
            raise MessageError(f"a stored {kind.__name__} lacks its field {name!r}")
        elif hint is str:
            values[name] = bytes(group[""].tolist()).decode()
        else:
            values[name] = group[""].item() if hint in _SCALARS else group[""]
    if groups:
        raise MessageError(f"a stored {kind.__name__} has unknown fields {sorted(groups)}")
    return kind(**values)
