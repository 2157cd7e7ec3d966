"""What a layer sees at single places of its outputs."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional


def picked(value: Tensor, channel: int, places: Tensor) -> Tensor:
    """The values at some places, [n, channels].

    Args:
        value: of a batch.
        channel: the axis of its channels.
        places: indices of the other axes, in their order, [axes, n].
    """
    return value.movedim(channel, -1)[tuple(places)]


def patches(
    given: Mapping[str, Any], shape: Sequence[int], places: Tensor, *, transposed: bool = False
) -> Tensor:
    """What a convolution multiplies with its filters at some places of its outputs.

    Args:
        given: the arguments of the convolution.
        shape: of its outputs without channels, [batch, *pixels].
        places: indices of these axes, [axes, n].
        transposed: whether it is a transposed one: of inputs with zeros between them, and filters
            turned round.

    Returns:
        [groups of channels, n, channels of a group × taps].
    """
    x, taps = given["input"], given["weight"].shape[2:]
    space = len(taps)
    stride, dilation = (_each(given[key], space) for key in ("stride", "dilation"))
    if transposed:
        more = _each(given["output_padding"], space)
        pads = [
            d * (k - 1) - p
            for d, k, p in zip(dilation, taps, _each(given["padding"], space), strict=True)
        ]
        ends = [(pad, pad + end) for pad, end in zip(pads, more, strict=True)]
        x, stride = _apart(x, stride), [1] * space
    else:
        ends = _ends(given["padding"], taps, dilation)
    x = functional.pad(x, [end for pair in reversed(ends) for end in pair]).contiguous()
    steps = x.stride()
    pixels = [step * by for step, by in zip(steps[2:], stride, strict=True)]
    inner = [step * by for step, by in zip(steps[2:], dilation, strict=True)]
    view = x.as_strided(
        (*shape, x.shape[1], *taps), (steps[0], *pixels, steps[1], *inner), x.storage_offset()
    )
    found = view[tuple(places)]
    if transposed:
        found = found.flip(list(range(2, found.ndim)))
    return found.reshape(len(found), given["groups"], -1).transpose(0, 1)


def _each(value: int | Sequence[int], space: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * space if len(values) == 1 else values


def _ends(
    padding: str | int | Sequence[int], taps: Sequence[int], dilation: Sequence[int]
) -> list[tuple[int, int]]:
    """How much is added before and behind each axis of pixels."""
    if isinstance(padding, str):
        whole = [
            (k - 1) * d if padding == "same" else 0 for k, d in zip(taps, dilation, strict=True)
        ]
        return [(total // 2, total - total // 2) for total in whole]
    return [(side, side) for side in _each(padding, len(taps))]


def _apart(x: Tensor, stride: Sequence[int]) -> Tensor:
    """Images with zeros between their pixels."""
    sizes = [(size - 1) * by + 1 for size, by in zip(x.shape[2:], stride, strict=True)]
    wide = x.new_zeros(*x.shape[:2], *sizes)
    places = [slice(None), slice(None), *(slice(None, None, by) for by in stride)]
    wide[tuple(places)] = x
    return wide
