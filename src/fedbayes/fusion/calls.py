"""What dense layers and convolutions get and give in a forward pass, place by place.

A layer gives W a_t at every place t of a sample: one of a dense layer (each token of a sequence),
each pixel of a convolution, whose a_t is a patch. So with the gradient g_t of something by what it
gives, that by its weight is Σ_t g_t a_tᵀ.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedbayes.models.hooks import watched


@dataclass
class Call:
    """One call of a layer in a forward pass."""

    name: str
    layer: nn.Module
    given: Tensor
    """What the layer got."""
    outputs: Tensor
    """As the layer gave them."""

    @property
    def inputs(self) -> Tensor:
        """The inputs a [n, places, d], 1 for the bias; made when asked for: patches are many."""
        return patches(self.layer, self.given)


@contextmanager
def recorded(layers: Mapping[str, nn.Module]) -> Iterator[list[Call]]:
    """Note inputs and outputs of layers, dense ones and convolutions, in a forward pass, call by
    call.
    """
    calls: list[Call] = []

    def note(name: str, layer: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
        calls.append(Call(name, layer, given[0].detach(), out))
        return out.clone()  # what comes next may write over it

    with watched(layers, note):
        yield calls


def patches(layer: nn.Module, x: Tensor) -> Tensor:
    """What a layer multiplies its weight with, [n, places, d], with a 1 for its bias.

    Args:
        layer: a dense one, or a convolution not in groups, padded by numbers of zeros.
        x: what it gets.
    """
    if isinstance(layer, nn.Conv1d):
        x = functional.unfold(
            x[:, :, None],
            (1, *layer.kernel_size),
            (1, *layer.dilation),
            (0, int(layer.padding[0])),
            (1, *layer.stride),
        ).transpose(1, 2)
    elif isinstance(layer, nn.Conv2d):
        assert not isinstance(layer.padding, str)  # such layers have no factors
        x = functional.unfold(
            x, layer.kernel_size, layer.dilation, layer.padding, layer.stride
        ).transpose(1, 2)
    else:
        x = x.reshape(len(x), -1, x.shape[-1])
    if layer.bias is None:
        return x
    return torch.cat([x, x.new_ones(*x.shape[:2], 1)], dim=2)


def places(layer: nn.Module, gradient: Tensor) -> Tensor:
    """Gradients of a layer's outputs, [n, places, o]."""
    if isinstance(layer, nn.Linear):
        return gradient.reshape(len(gradient), -1, gradient.shape[-1])
    return gradient.flatten(2).transpose(1, 2)
