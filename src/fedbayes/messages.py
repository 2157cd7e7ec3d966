"""Messages: named tensors to bytes and back.

All that passes between server and client, process and process, program and file is encoded
here, and the length of the encoded bytes is what communication is measured by. Dense tensors
are stored as safetensors; a sparse one as its surviving values and one bit for every position
(or row, or filter) that a mask can remove. The header, which holds names and shapes as JSON, is
deflated on the way: in a network of many small tensors it would weigh more than the masks.
Nothing is pickled.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedbayes.errors import MessageError
from fedbayes.tensors import Tensors


@dataclass(frozen=True, eq=False)
class Masked:
    """A tensor of which only some entries are kept; the others are zero.

    Each mask covers some axes and removes whole slices along them: a mask over axis 0 of a
    convolution's weight removes filters, a second one over axis 1 their inputs, one over all
    axes single weights. Masks cover disjoint axes, so an entry survives if each mask keeps it.
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


Message = dict[str, Tensor | Masked]
"""What server and client say to each other: tensors by name, some of them sparse."""


def dense(message: Message) -> Tensors:
    """The message with every sparse tensor filled up with zeros."""
    return {
        name: item.dense() if isinstance(item, Masked) else item for name, item in message.items()
    }


def shape_of(item: Tensor | Masked) -> tuple[int, ...]:
    """Shape of the dense tensor that an item of a message stands for."""
    return tuple(item.shape)


def dtype_of(item: Tensor | Masked) -> torch.dtype:
    """Type of the entries of an item of a message."""
    return item.values.dtype if isinstance(item, Masked) else item.dtype


_UNREADABLE = (KeyError, TypeError, ValueError, RuntimeError, OverflowError)
"""What the reader of safetensors raises on invalid bytes, besides its own error."""
_SHAPE, _MASK, _METADATA = "#shape", "#mask:", "__metadata__"


_DEFLATED = 1 << 63
"""Flag in the header's length, the first eight bytes: the header is deflated."""
LONGEST_HEADER = 100_000_000
"""Bytes; the limit of safetensors."""


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
            `__metadata__`, under which a safetensors file has its text.
    """
    flat: Tensors = {}
    for name, item in message.items():
        if "#" in name:
            raise MessageError(f"the name {name!r} of a tensor contains the reserved sign '#'")
        if name == _METADATA:
            raise MessageError(f"the name {name!r} of a tensor is reserved for text in the header")
        if isinstance(item, Masked):
            flat[name] = item.values
            flat[name + _SHAPE] = torch.tensor(item.shape, dtype=torch.int32)
            for axes, mask in item.masks.items():
                key = name + _MASK + ",".join(map(str, axes))
                flat[key] = torch.from_numpy(np.packbits(mask.cpu().numpy().ravel()))
        else:
            flat[name] = item
    if not flat:
        return b""
    # Tensors that share memory must be stored apart; only then is a copy needed.
    owners: set[int] = set()
    for name, tensor in flat.items():
        stored = tensor.detach().to("cpu").contiguous()
        if stored.numel() and stored.untyped_storage().data_ptr() in owners:
            stored = stored.clone()
        owners.add(stored.untyped_storage().data_ptr())
        flat[name] = stored
    data = bytes(save(flat, dict(metadata) if metadata else None))
    if plain:
        return data
    end = 8 + int.from_bytes(data[:8], "little")
    header = zlib.compress(data[8:end], 9)
    return (len(header) | _DEFLATED).to_bytes(8, "little") + header + data[end:]


def metadata(data: bytes) -> dict[str, str]:
    """The text in the header of a safetensors file; none of bytes that are no such file."""
    size = int.from_bytes(data[:8], "little")
    if size > min(len(data), LONGEST_HEADER):
        return {}
    try:
        header = json.loads(data[8 : 8 + size])
    except ValueError:
        return {}
    found = header.get(_METADATA) if isinstance(header, dict) else None
    return found if isinstance(found, dict) else {}


def _inflated(data: bytes, longest: int) -> bytes:
    """The bytes as a safetensors file, if its header is not longer than so many bytes."""
    size = int.from_bytes(data[:8], "little")
    if not size & _DEFLATED:
        if size > longest:
            raise MessageError("not a message: its header is too long")
        return bytes(data)
    end = 8 + (size ^ _DEFLATED)
    stream = zlib.decompressobj()
    header = stream.decompress(data[8:end], longest)
    if not stream.eof or stream.unused_data or end > len(data):
        raise MessageError("not a message: its header is cut off or too long")
    return len(header).to_bytes(8, "little") + header + data[end:]


def decode(data: bytes, *, longest_header: int = LONGEST_HEADER) -> Message:
    """The message that `encode` turned into these bytes; the inverse of `encode`.

    Names come in ascending order, whatever order they were encoded in.

    Safe on bytes from a stranger: it allocates no more than the bytes justify. A sparse tensor
    stays sparse, for the shape that it claims costs nothing to write; compare it with what you
    expect before you call `dense`.

    Args:
        data: the bytes.
        longest_header: bytes of names and shapes, inflated. A header costs time and memory far
            beyond its deflated size, so a stranger is to be given no more than is expected.

    Raises:
        MessageError: the bytes are not an encoded message. No other error leaves here.
    """
    if not data:
        return {}
    try:
        # In the order of the names, since the reader's is random; and in memory that PyTorch
        # laid out, since products of matrices round differently on other alignments.
        flat = {
            name: tensor.clone()
            for name, tensor in sorted(load(_inflated(data, longest_header)).items())
        }
    except MessageError:
        raise
    except (SafetensorError, zlib.error, *_UNREADABLE) as error:
        raise MessageError(f"not a message: {error}") from None
    message: Message = {name: tensor for name, tensor in flat.items() if "#" not in name}
    parts: dict[str, Tensors] = {}
    for name, tensor in flat.items():
        owner, sign, part = name.partition("#")
        if sign:
            parts.setdefault(owner, {})[sign + part] = tensor
    for name, pieces in parts.items():
        values = flat.get(name)
        if values is None or _SHAPE not in pieces:
            raise MessageError(f"not a message: {name!r} has a mask but no values or no shape")
        message[name] = _sparse(name, values, pieces)
    return message


def _sparse(name: str, values: Tensor, pieces: Tensors) -> Masked:
    """Rebuild one sparse tensor from its values, shape and packed masks, trusting none."""
    sizes = pieces.pop(_SHAPE)
    if values.ndim != 1 or sizes.ndim != 1 or sizes.dtype != torch.int32 or (sizes < 0).any():
        raise MessageError(f"not a message: {name!r} is sparse but has no proper shape")
    shape = tuple(int(size) for size in sizes)
    masks: dict[tuple[int, ...], Tensor] = {}
    free = set(range(len(shape)))
    alive = 1
    for key, packed in pieces.items():
        try:
            axes = tuple(int(axis) for axis in key.removeprefix(_MASK).split(","))
        except ValueError:
            raise MessageError(f"not a message: {name!r} has an unknown part {key!r}") from None
        if not free.issuperset(axes) or len(set(axes)) != len(axes) or list(axes) != sorted(axes):
            raise MessageError(f"not a message: the masks of {name!r} overlap or leave its shape")
        free -= set(axes)
        sizes_covered = tuple(shape[axis] for axis in axes)
        count = prod(sizes_covered)
        if packed.dtype != torch.uint8 or packed.ndim != 1 or len(packed) != -(-count // 8):
            raise MessageError(f"not a message: a mask of {name!r} does not fit its shape")
        bits = np.unpackbits(packed.numpy(), count=count).astype(bool)
        masks[axes] = torch.from_numpy(bits).reshape(sizes_covered)
        alive *= int(bits.sum())
    alive *= prod(shape[axis] for axis in free)
    if alive != len(values):
        raise MessageError(
            f"not a message: the masks of {name!r} keep {alive} values, {len(values)} were sent"
        )
    return Masked(values, shape, masks)
