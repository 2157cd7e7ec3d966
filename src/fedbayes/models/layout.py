"""How images lie in memory: channels last, where convolutions are fastest."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PORTION = 128
"""Images that a network with convolutions predicts at a time on a CPU: the maps of a thousand fill
more than its caches, which costs a third to a half of the time."""


class _ChannelsLast(torch.autograd.Function):
    """Images laid out channels last; as they are where `torch.func.vmap` has one more axis."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None], x: Tensor) -> tuple[Tensor, int | None]:
        return x, in_dims[0]


channels_last: Callable[[Tensor], Tensor] = _ChannelsLast.apply


class _GradientChannelsLast(torch.autograd.Function):
    """Pooled images as they are, whose gradient is laid out like them, which saves copies."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return channels_last(gradient) if gradient.ndim == 4 else gradient

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None], x: Tensor) -> tuple[Tensor, int | None]:
        return x, in_dims[0]


gradient_channels_last: Callable[[Tensor], Tensor] = _GradientChannelsLast.apply


def filters_last(weights: Tensor) -> Tensor:
    """Filters [n, 1, height, width] of one channel, as a view whose strides say channels last.

    With one channel both layouts are the same memory. PyTorch goes by the strides, and a
    convolution of images with channels last takes up to 1.6 times as long with the others. Other
    weights are returned as they are.
    """
    if weights.ndim != 4 or weights.shape[1] != 1:
        return weights
    return weights.squeeze(1).unsqueeze(-1).permute(0, 3, 1, 2)


def by_portions(function: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Outputs [n, width] of a function for images [n, channels, height, width], on a CPU some at a
    time.
    """
    if images.device.type != "cpu" or len(images) <= PORTION:
        return function(images)
    return torch.cat([function(part) for part in torch.split(images, PORTION)])
