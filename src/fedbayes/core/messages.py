"""Messages: named tensors to bytes and back.

All that passes between server and client, process and process, program and file is encoded
here, and the length of the encoded bytes is what communication is measured by. Dense tensors
are stored as safetensors; a sparse one as its surviving values and one bit for every position
(or row, or filter) that a mask can remove. The header, which holds names and shapes as JSON, is
deflated on the way: in a network of many small tensors it would weigh more than the masks.
Nothing is pickled.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import torch
from torch import Tensor

from fedbayes.core.tensor_files import (
    METADATA,
    MOST_AXES,
    MOST_ENTRIES,
    FilePart,
    Layout,
    contents,
    load,
    parse,
    parts,
    stacked_parts,
    written,
)
from fedbayes.core.tensors import Tensors
from fedbayes.errors import MessageError, quoted


@dataclass(frozen=True, eq=False)
class Masked:
    """A tensor of which only some entries are kept; the others are zero.

    Each mask covers some axes and removes whole slices along them: a mask over axis 0 of a
    convolution's weight removes filters, a second one over axis 1 their inputs, one over all
    axes single weights. Masks cover disjoint axes, so an entry survives if each mask keeps it.

    Examples:
        >>> import torch
        >>> from fedbayes.core.messages import Masked, dense
        >>> kept = torch.tensor([True, False, True])
        >>> item = Masked(torch.tensor([1.0, 2.0]), (3,), {(0,): kept})
        >>> dense({"w": item})["w"]
        tensor([1., 0., 2.])
    """

    values: Tensor
    """The surviving entries in row-major order, [alive]."""
    shape: tuple[int, ...]
    """Shape of the dense tensor."""
    masks: Mapping[tuple[int, ...], Tensor]
    """Axes to a boolean tensor with the sizes of those axes."""

    @classmethod
    def keep(cls, dense: Tensor, masks: Mapping[tuple[int, ...], Tensor]) -> "Masked":
        """The entries of `dense` that all the masks keep."""
        return cls(dense.new_empty(0), tuple(dense.shape), masks).like(dense)

    def like(self, dense: Tensor) -> "Masked":
        """The entries of another tensor of the same shape that these masks keep."""
        if self._sliced:
            kept = dense
            for (axis, *_), mask in self.masks.items():
                kept = kept.index_select(axis, mask.nonzero()[:, 0])
            return Masked(kept.reshape(-1), self.shape, self.masks)
        return Masked(dense[self.mask()], self.shape, self.masks)

    @property
    def _sliced(self) -> bool:
        """Whether every mask removes slices of one axis, which is much faster than entries."""
        return all(len(axes) == 1 for axes in self.masks)

    def compact(self) -> Tensor:
        """The surviving entries as a smaller tensor, where every mask is over one axis."""
        shape = list(self.shape)
        for (axis, *_), mask in self.masks.items():
            shape[axis] = int(mask.sum())
        return self.values.reshape(shape)

    def mask(self) -> Tensor:
        """One boolean tensor of the dense shape: the product of the masks."""
        whole = torch.ones(self.shape, dtype=torch.bool, device=self.values.device)
        for axes, mask in self.masks.items():
            sizes = [size if axis in axes else 1 for axis, size in enumerate(self.shape)]
            whole &= mask.reshape(sizes)
        return whole

    def dense(self) -> Tensor:
        """The tensor with zeros where entries were removed."""
        if self._sliced:
            whole = self.compact()
            for (axis, *_), mask in self.masks.items():
                shape = [*whole.shape]
                shape[axis] = self.shape[axis]
                kept = mask.nonzero()[:, 0]
                whole = whole.new_zeros(shape).index_copy_(axis, kept, whole)
            return whole
        result = self.values.new_zeros(self.shape)
        result[self.mask()] = self.values
        return result

    def to(self, device: torch.device | str) -> "Masked":
        """The same on another device."""
        masks = {axes: mask.to(device) for axes, mask in self.masks.items()}
        return Masked(self.values.to(device), self.shape, masks)


class _Packed(Mapping[tuple[int, ...], Tensor]):
    """Masks as bits of `np.packbits`, which are unpacked when they are asked for."""

    def __init__(self, shape: tuple[int, ...], packed: Mapping[tuple[int, ...], bytes]) -> None:
        self._shape, self._packed = shape, packed
        self._masks: dict[tuple[int, ...], Tensor] = {}

    def __getitem__(self, axes: tuple[int, ...]) -> Tensor:
        if axes not in self._masks:
            sizes = tuple(self._shape[axis] for axis in axes)
            bits = np.unpackbits(np.frombuffer(self._packed[axes], np.uint8), count=prod(sizes))
            self._masks[axes] = torch.from_numpy(bits.view(np.bool_)).reshape(sizes)
        return self._masks[axes]

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)


Message = dict[str, Tensor | Masked]
"""What server and client say to each other: tensors by name, some of them sparse."""


def dense(message: Message) -> Tensors:
    """The message with every sparse tensor filled up with zeros.

    Examples:
        >>> import torch
        >>> from fedbayes.core.messages import dense
        >>> dense({"w": torch.tensor([1.0, 2.0])})["w"]
        tensor([1., 2.])
    """
    return {
        name: item.dense() if isinstance(item, Masked) else item for name, item in message.items()
    }


def shape_of(item: Tensor | Masked) -> tuple[int, ...]:
    """Shape of the dense tensor that an item of a message stands for."""
    return tuple(item.shape)


def dtype_of(item: Tensor | Masked) -> torch.dtype:
    """Type of the entries of an item of a message."""
    return item.values.dtype if isinstance(item, Masked) else item.dtype


def payload(message: Mapping[str, Tensor | Masked]) -> int:
    """Bytes of the numbers and masks of an encoded message, without names and shapes."""
    total = 0
    for item in message.values():
        if isinstance(item, Masked):
            total += item.values.nbytes + 4 * len(item.shape)
            total += sum(-(-prod(item.shape[axis] for axis in axes) // 8) for axes in item.masks)
        else:
            total += item.nbytes
    return total


_SHAPE, _MASK = "#shape", "#mask:"
LONGEST_AXIS = 2**31 - 1
"""Entries along an axis of a sparse tensor, whose shape is int32. Dense ones have no limit."""

_DEFLATED = 1 << 63
"""Flag in the header's length, the first eight bytes: the header is deflated."""
LONGEST_HEADER = 100_000_000
"""Bytes; the limit of safetensors."""
SHORT_HEADER = 96 * 1024
"""Bytes of names and shapes, inflated, that any message may have."""
_SHORT_PART = 128
"""Bytes of the header for each part, of which a tensor is one and a sparse one several."""


def encode(
    message: Mapping[str, Tensor | Masked],
    *,
    plain: bool = False,
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """The message as bytes; an empty message costs none.

    Args:
        message: tensors by name.
        plain: leave the header as it is; then the bytes are a safetensors file.
        metadata: text for the header, which `decode` passes over.

    Raises:
        MessageError: a name contains `#`, which marks the parts of sparse tensors, or is
            `__metadata__`, under which a safetensors file has its text; or an axis of a sparse
            tensor is longer than `LONGEST_AXIS`.

    Examples:
        >>> import torch
        >>> from fedbayes.core.messages import decode, encode
        >>> data = encode({"w": torch.tensor([1.0, 2.0])})
        >>> decode(data)["w"]
        tensor([1., 2.])
    """
    return b"".join(pieces(message, plain=plain, metadata=metadata))


def pieces(
    message: Mapping[str, Tensor | Masked],
    *,
    plain: bool = False,
    metadata: Mapping[str, str] | None = None,
) -> list[bytes | memoryview]:
    """As `encode`, in pieces: the header, and the memory of the tensors itself where it can be."""
    flat: Tensors = {}
    for name, item in message.items():
        if "#" in name:
            raise MessageError(f"the name {name!r} of a tensor contains the reserved sign '#'")
        if name == METADATA:
            raise MessageError(f"the name {name!r} of a tensor is reserved for text in the header")
        if isinstance(item, Masked):
            if max(item.shape, default=0) > LONGEST_AXIS:
                raise MessageError(
                    f"the sparse tensor {name!r} has an axis of {max(item.shape):,} entries; the "
                    f"limit is {LONGEST_AXIS:,}. Give it several axes, or send it dense"
                )
            flat[name] = item.values
            flat[name + _SHAPE] = torch.tensor(item.shape, dtype=torch.int32)
            for axes, mask in item.masks.items():
                key = name + _MASK + ",".join(map(str, axes))
                flat[key] = torch.from_numpy(np.packbits(mask.cpu().numpy().ravel()))
        else:
            flat[name] = item
    if not flat:
        return []
    layout = tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in flat.items())
    order, header = written(layout, tuple((metadata or {}).items()))
    start = header if plain else _deflated(header)
    length = len(start) if plain else len(start) | _DEFLATED
    return [length.to_bytes(8, "little") + start, *(contents(flat[name]) for name in order)]


@lru_cache(maxsize=16)
def _deflated(header: bytes) -> bytes:
    return zlib.compress(header, 9)


def encode_each(messages: Sequence[Mapping[str, Tensor | Masked]]) -> list[bytes]:
    """As `encode` of each message, in fewer operations where all are of the same names, shapes and
    types.
    """
    layouts = {_layout(message) for message in messages} if len(messages) > 1 else set()
    if len(layouts) != 1 or not (layout := layouts.pop()):
        return [encode(message) for message in messages]
    stacked = {
        name: torch.stack([message[name] for message in messages])  # type: ignore[misc]
        for name, *_ in layout
    }
    first = encode(messages[0])
    start = first[: len(first) - payload(messages[0])]
    columns = [contents(stacked[name]) for name in written(layout)[0]]
    rows = [np.frombuffer(data, np.uint8).reshape(len(messages), -1) for data in columns]
    return [start + row.tobytes() for row in np.concatenate(rows, 1)]


def _layout(message: Mapping[str, Tensor | Masked]) -> Layout | None:
    """Names, types and shapes of a message; None if some of it is sparse."""
    layout = [
        (name, item.dtype, tuple(item.shape))
        for name, item in message.items()
        if isinstance(item, Tensor)
    ]
    return tuple(layout) if len(layout) == len(message) else None


def metadata(data: bytes) -> dict[str, str]:
    """The text in the header of a safetensors file; none of bytes that are no such file."""
    size = int.from_bytes(data[:8], "little")
    if size > min(len(data), LONGEST_HEADER):
        return {}
    try:
        found = parse(data[8 : 8 + size], len(data)).get(METADATA)
    except MessageError:
        return {}
    return found if isinstance(found, dict) else {}


def decode(data: bytes, *, longest_header: int | None = None) -> Message:
    """The message that `encode` turned into these bytes; the inverse of `encode`.

    Names come in ascending order, whatever order they were encoded in.

    Safe on bytes from a stranger: what it costs is bounded by their number. It takes less than
    four times their memory and some milliseconds a megabyte, over the 4 MB and 20 ms that a header
    of `SHORT_HEADER` may take. A sparse tensor stays sparse and its masks packed, for the shape
    that it claims costs nothing to write; compare it with what you expect before you call `dense`.

    Args:
        data: the bytes.
        longest_header: bytes of names and shapes, inflated, and 128 for each part: a tensor, or
            the values, the shape or a mask of a sparse one. To be given where it is known what to
            expect; by default it is as long as the number of bytes justifies.

    Raises:
        MessageError: the bytes are not an encoded message. No other error leaves here.

    Examples:
        >>> import torch
        >>> from fedbayes.core.messages import decode, encode
        >>> decode(encode({"w": torch.tensor([1.0, 2.0])}))["w"]
        tensor([1., 2.])
    """
    if not data:
        return {}
    if longest_header is None:
        longest_header = SHORT_HEADER + len(data) // 8
    longest_header = min(longest_header, LONGEST_HEADER)
    header, body = _split(data, longest_header)
    message: Message = {}
    sparse: dict[str, dict[str, FilePart]] = {}
    for name, part in parts(header, body, longest_header // _SHORT_PART).items():
        owner, sign, what = name.partition("#")
        if sign:
            sparse.setdefault(owner, {})[sign + what] = part
        else:
            message[name] = load(name, part)
    for name, pieces in sparse.items():
        values = message.get(name)
        if not isinstance(values, Tensor) or _SHAPE not in pieces:
            raise MessageError(f"not a message: {quoted(name)} has a mask but no values or shape")
        message[name] = _sparse(name, values, pieces)
    return message


def decode_stacked(data: Sequence[bytes], *, longest_header: int) -> Tensors:
    """Messages that begin with the same header, as `decode` reads them, with a first axis for the
    messages.

    Raises:
        MessageError: they are others, or sparse.
    """
    header, body = _split(data[0], longest_header)
    start, length = data[0][: len(data[0]) - len(body)], len(data[0])
    if any(len(each) != length or not each.startswith(start) for each in data):
        raise MessageError("not messages of one header")
    bodies = [memoryview(each)[len(start) :] for each in data]
    found = stacked_parts(header, bodies, longest_header // _SHORT_PART)
    if any("#" in name for name in found):
        raise MessageError("not messages without masks")
    return {name: load(name, part) for name, part in found.items()}


def decode_file(data: bytes, *, plain: bool = False) -> Tensors:
    """The tensors in bytes of a file: a state, a checkpoint, a model.

    As `decode`, but no tensor is sparse, and most of the bytes may be header: a state may be of
    many small tensors, each of which takes a kilobyte of memory.

    Args:
        data: the bytes.
        plain: whether the file is one of safetensors, whose header is not deflated. A stranger's
            should be; then the cost is some thirty times that of the bytes at most.

    Raises:
        MessageError: the bytes are not such a file. No other error leaves here.
    """
    if plain and len(data) >= 8 and data[7] & 0x80:
        raise MessageError("not a safetensors file: its header is compressed")
    message = decode(data, longest_header=SHORT_HEADER + (4 if plain else 32) * len(data))
    for name, item in message.items():
        if isinstance(item, Masked):
            raise MessageError(f"not a file of tensors: {quoted(name)} is sparse")
    return {name: item for name, item in message.items() if isinstance(item, Tensor)}


def _split(data: bytes, longest: int) -> tuple[bytes, memoryview]:
    """The header, if it is not longer than so many bytes, and what follows."""
    view = memoryview(data)
    size = int.from_bytes(view[:8], "little")
    end = 8 + (size & ~_DEFLATED)
    if end > len(view):
        raise MessageError("not a message: its header is cut off")
    if not size & _DEFLATED:
        if size > longest:
            raise MessageError("not a message: its header is too long")
        return bytes(view[8:end]), view[end:]
    stream = zlib.decompressobj()
    try:
        header = stream.decompress(view[8:end], longest)
    except zlib.error:
        raise MessageError("not a message: its header cannot be decompressed") from None
    if not stream.eof or stream.unused_data:
        raise MessageError("not a message: its header is cut off or too long")
    return header, view[end:]


def _axes(name: str, key: str) -> tuple[int, ...]:
    """The axes that a mask covers, as the name of its part says."""
    try:
        axes = tuple(int(axis) for axis in key.removeprefix(_MASK).split(","))
    except ValueError:
        axes = ()
    if key != _MASK + ",".join(map(str, axes)) or list(axes) != sorted(set(axes)):
        raise MessageError(f"not a message: {quoted(name)} has an unknown part {quoted(key)}")
    return axes


def _sparse(name: str, values: Tensor, pieces: dict[str, FilePart]) -> Masked:
    """Rebuild one sparse tensor from its values, shape and packed masks, trusting none."""
    sizes = pieces.pop(_SHAPE)
    if values.ndim != 1 or len(sizes.shape) != 1 or sizes.dtype is not torch.int32:
        raise MessageError(f"not a message: {quoted(name)} is sparse but has no proper shape")
    shape = tuple(np.frombuffer(sizes.data, "<i4").tolist())
    if (
        len(shape) > MOST_AXES
        or any(size < 0 for size in shape)
        or prod(size or 1 for size in shape) > MOST_ENTRIES
    ):
        raise MessageError(f"not a message: {quoted(name)} is sparse but has no proper shape")
    packed: dict[tuple[int, ...], bytes] = {}
    free = set(range(len(shape)))
    alive = 1
    for key, part in pieces.items():
        axes = _axes(name, key)
        if not free.issuperset(axes):
            raise MessageError(f"not a message: masks of {quoted(name)} overlap or leave its shape")
        free -= set(axes)
        count = prod(shape[axis] for axis in axes)
        if (
            part.dtype is not torch.uint8
            or len(part.shape) != 1
            or len(part.data) != -(-count // 8)
        ):
            raise MessageError(f"not a message: a mask of {quoted(name)} does not fit its shape")
        packed[axes] = bytes(part.data)
        alive *= (int.from_bytes(part.data, "big") >> -count % 8).bit_count()
    alive *= prod(shape[axis] for axis in free)
    if alive != len(values):
        raise MessageError(
            f"not a message: the masks of {quoted(name)} keep {alive} values, but {len(values)} "
            "were sent"
        )
    return Masked(values, shape, _Packed(shape, packed))
