"""The format of safetensors, read from a stranger's bytes at a cost that the bytes justify.

The library's own reader has no such bound: a header of small text makes objects of many times its
length, and of two tensors of one name the last one counts. So names, types, shapes and places are
read here, each checked, before any tensor is made; and what is made has the length of its bytes.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbayes.errors import MessageError, quoted

METADATA = "__metadata__"
"""Name under which a header has text instead of a tensor."""
MOST_AXES = 32
"""Axes that a tensor may have."""
MOST_ENTRIES = 2**56
"""Entries that a shape may stand for; axes without entries count as one."""
_COMMAS, _BRACKETS = MOST_AXES + 4, 3
"""Signs of either kind in the header's JSON that a tensor may need."""

_INT = {int}
NAMES = {
    "U64": ("uint64", ""),
    "I64": ("int64", "i8"),
    "F64": ("float64", "f8"),
    "C64": ("complex64", "c8"),
    "F32": ("float32", "f4"),
    "U32": ("uint32", ""),
    "I32": ("int32", "i4"),
    "BF16": ("bfloat16", ""),
    "F16": ("float16", "f2"),
    "U16": ("uint16", ""),
    "I16": ("int16", "i2"),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", ""),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", ""),
    "F8_E4M3": ("float8_e4m3fn", ""),
    "F8_E5M2": ("float8_e5m2", ""),
    "I8": ("int8", "i1"),
    "U8": ("uint8", "u1"),
    "BOOL": ("bool", "?"),
}
"""Types by their name in a header: PyTorch's name and NumPy's, if it has the type. Tensors are in a
file in this order of types, as the library writes them."""
_TYPES: dict[str, tuple[torch.dtype, int]] = {}
"""Types by their name in a header, and the bytes of an entry."""
_CODES: dict[torch.dtype, tuple[int, str]] = {}
"""The place of a type among all, and its name in a header."""
_STORED: dict[torch.dtype, tuple[np.dtype[Any], torch.dtype]] = {}
"""As what NumPy reads and writes a type, and that type of PyTorch: of as many bytes."""
for _place, (_code, (_name, _numpy)) in enumerate(NAMES.items()):
    if (_dtype := getattr(torch, _name, None)) is not None:
        _TYPES[_code] = (_dtype, _dtype.itemsize)
        _CODES[_dtype] = (_place, _code)
        _same: torch.dtype = getattr(torch, _name if _numpy else f"int{8 * _dtype.itemsize}")
        _STORED[_dtype] = (np.dtype(f"<{_numpy or f'i{_dtype.itemsize}'}"), _same)


class FilePart(NamedTuple):
    """What a file has under one name."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: memoryview
    """Its bytes, as many as type and shape ask for."""


def parts(header: bytes, body: memoryview, most: int) -> dict[str, FilePart]:
    """What a header says of the bytes that follow it, in the order of the names.

    Args:
        header: JSON, its length bounded by the caller.
        body: what follows; the parts are views of it.
        most: parts that there may be.

    Raises:
        MessageError: the header is none, it does not fit the body, or there are more parts.
    """
    return {
        name: FilePart(dtype, shape, body[start:stop])
        for name, dtype, shape, start, stop in _fitting(header, len(body), most)
    }


def stacked_parts(header: bytes, bodies: Sequence[memoryview], most: int) -> dict[str, FilePart]:
    """As `parts`, of several files of one header and length: with a first axis for the files."""
    places, count = _fitting(header, len(bodies[0]), most), len(bodies)
    rows = np.frombuffer(b"".join(bodies), np.uint8).reshape(count, -1)
    found: dict[str, FilePart] = {}
    for name, dtype, shape, start, stop in places:
        own = np.ascontiguousarray(rows[:, start:stop])
        found[name] = FilePart(dtype, (count, *shape), own.reshape(-1).data)
    return found


def _fitting(header: bytes, length: int, most: int) -> "tuple[_Place, ...]":
    """The parts that a header names, if they fill a body of this length."""
    places = (_remembered if len(header) <= _SHORT else _places)(header, most)
    end = max((stop for *_, stop in places), default=0)
    if end > length:
        raise MessageError("not a message: its tensors are longer than its bytes")
    if end < length:
        raise MessageError("not a message: bytes are in none of its tensors")
    return places


_Place = tuple[str, torch.dtype, tuple[int, ...], int, int]
"""Name, type and shape of a part, and where its bytes begin and end."""


def _places(header: bytes, most: int) -> tuple[_Place, ...]:
    """The parts of a file, in the order of their names; their bytes follow one another."""
    entries = parse(header, most)
    entries.pop(METADATA, None)
    if len(entries) > most:
        raise MessageError(f"not a message: it has {len(entries):,} parts, at most {most:,}")
    found: list[_Place] = []
    for name in sorted(entries):
        dtype, size, shape, start, stop = _entry(name, entries[name])
        if start + size * prod(shape) != stop:
            raise MessageError(
                f"not a message: {quoted(name)} has a number of bytes that does not match its shape"
            )
        found.append((name, dtype, shape, start, stop))
    spans = sorted((start, stop) for *_, start, stop in found)
    if any(stop != start for (_, stop), (start, _) in pairwise([(0, 0), *spans])):
        raise MessageError("not a message: its tensors overlap, or bytes are in none of them")
    return tuple(found)


_SHORT = 4096
"""Bytes of a header that is remembered: the reports of a round have the same one."""
_remembered = lru_cache(maxsize=16)(_places)


def parse(header: bytes, most: int) -> dict[str, object]:
    """The JSON of a header, at a cost that does not exceed that of so many parts.

    Raises:
        MessageError: it is no JSON object, or has more in it.
    """
    # Before anything is made of it: the signs that objects, lists and their entries need.
    if header.count(b"{") + header.count(b"[") > _BRACKETS * (most + 1) or header.count(
        b","
    ) > _COMMAS * (most + 1):
        raise MessageError(f"not a message: its header has more than {most:,} parts")
    try:
        text = header.decode()
        found, end = _JSON.raw_decode(text)
    except UnicodeDecodeError:
        raise MessageError("not a message: its header is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise MessageError(f"not a message: its header is not JSON ({str(error)[:80]})") from None
    if type(found) is not dict or text[end:].strip(" \n\r\t"):
        raise MessageError("not a message: its header is not a table of names")
    return found


def load(name: str, part: FilePart) -> Tensor:
    """The tensor of a part, in memory that PyTorch laid out.

    Raises:
        MessageError: truth values are neither 0 nor 1.
    """
    dtype, shape, data = part
    stored, same = _STORED[dtype]
    if dtype is torch.bool and np.frombuffer(data, "u1").max(initial=0) > 1:
        raise MessageError(f"not a message: {quoted(name)} has boolean values other than 0 and 1")
    found = torch.empty(shape, dtype=dtype)
    entries = found if same is dtype else found.view(same)
    entries.numpy()[...] = np.ndarray(shape, stored, data)
    return found


def contents(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in a file, in C order: its own memory, where it can be.

    Raises:
        MessageError: a file can have no entries of this type.
    """
    try:
        stored, same = _STORED[tensor.dtype]
    except KeyError:
        raise MessageError(f"tensors of {tensor.dtype} cannot be stored") from None
    here = tensor.detach()
    if not here.is_cpu or here.is_conj():
        here = here.to("cpu").resolve_conj()
    flat = here.reshape(-1)
    if same is not tensor.dtype:
        flat = flat.view(same)
    return np.ascontiguousarray(flat.numpy(), stored).data


Layout = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
"""Names, types and shapes of tensors."""


@lru_cache(maxsize=16)
def written(
    layout: Layout, text: tuple[tuple[str, str], ...] = ()
) -> tuple[tuple[str, ...], bytes]:
    """The order of tensors in a file, widest types first, and the header that says so."""
    ranked = sorted(layout, key=lambda one: (_CODES[one[1]], one[0]))
    entries: dict[str, object] = {METADATA: dict(text)} if text else {}
    end = 0
    for name, dtype, shape in ranked:
        start, end = end, end + dtype.itemsize * prod(shape)
        entries[name] = {"dtype": _CODES[dtype][1], "shape": shape, "data_offsets": (start, end)}
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    return tuple(name for name, *_ in ranked), header + b" " * (-len(header) % 8)


def _unique(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """A table of JSON, each name in it once."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise MessageError("not a message: a name comes twice in its header")
    return found


def _no_number(word: str) -> object:
    raise ValueError(f"{word} is not a number")


_JSON = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_number)


def _entry(name: str, entry: object) -> tuple[torch.dtype, int, tuple[int, ...], int, int]:
    """Type, shape and place of a part, each of its kind."""
    try:
        if not name.isascii():
            name.encode()  # half of a pair of surrogates is no text
        if type(entry) is not dict or len(entry) != 3:
            raise ValueError
        (dtype, size), shape = _TYPES[entry["dtype"]], entry["shape"]
        start, stop = entry["data_offsets"]
        numbers = (start, stop, *shape)
        if type(shape) is not list or len(shape) > MOST_AXES:
            raise ValueError
        if set(map(type, numbers)) != _INT or min(numbers) < 0:
            raise ValueError
        if 0 in shape and prod(number or 1 for number in shape) > MOST_ENTRIES:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise MessageError(
            f"not a message: {quoted(name)} has no proper type, shape and place in the file"
        ) from None
    return dtype, size, numbers[2:], start, stop
