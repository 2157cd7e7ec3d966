"""Networks with Gaussian weights, as functions of their means and stds.

Several Monte-Carlo samples are one batch: inputs [n, ...] become [samples · n, ...], sample by
sample. Two estimators give every sample its own noise (`Estimator`):

- `flipout` (Wen et al. 2018) draws one perturbation ΔW and turns its signs for every row of the
  batch, y = x Wᵀ + ((x ∘ s) ΔWᵀ) ∘ r. The signs of sample k and row b are products of one sign
  of k and one of b, so that any two rows remain uncorrelated, at the price of far fewer draws;
- `reparametrization` draws the weights of each sample, and shares them between its rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedbayes.core.devices import placed
from fedbayes.core.tensors import Tensors
from fedbayes.errors import ModelError
from fedbayes.likelihoods.noise import LearntNoise
from fedbayes.models.layout import filters_last, gradient_channels_last

Estimator = Literal["flipout", "reparametrization"]

_POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
_PLAIN = (*_POOLS, nn.Flatten, nn.Identity, nn.Unflatten)
_ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid)


@dataclass(frozen=True)
class LayerStage:
    """One layer with weights, and what lies between it and the next."""

    name: str
    """Name of the layer."""
    layer: nn.Linear | nn.Conv2d
    before: tuple[nn.Module, ...]
    """Pooling, reshaping and dropout between the stage before and the layer."""
    activation: nn.Module | None

    @property
    def width(self) -> int:
        """Units or filters."""
        return len(self.layer.weight)


@dataclass(frozen=True)
class Stack:
    """A plain stack of layers, and the learnt noise behind it."""

    stages: tuple[LayerStage, ...]
    """The layers, inputs to outputs."""
    log_std: str | None = None
    """Name of the log stds of learnt noise, if the stack ends with them."""

    @property
    def convolutional(self) -> bool:
        """Whether there are convolutions."""
        return any(isinstance(stage.layer, nn.Conv2d) for stage in self.stages)


def stack(module: nn.Module) -> Stack:
    """The layers of a plain stack, inputs to outputs, and learnt noise behind them.

    Raises:
        ModelError: the module is no `nn.Sequential` of linear layers, plain convolutions,
            activations, pooling, dropout and reshaping.
    """
    if not isinstance(module, nn.Sequential):
        raise ModelError(
            f"a {type(module).__name__} is not a stack of layers (torch.nn.Sequential)"
        )
    found: list[LayerStage] = []
    waiting: list[nn.Module] = []
    log_std = None
    for key, child in module.named_children():
        if isinstance(child, LearntNoise):
            log_std = f"{key}.log_std"
        elif isinstance(child, nn.Linear | nn.Conv2d):
            if isinstance(child, nn.Conv2d) and not _is_plain(child):
                raise ModelError(
                    f"layer {key!r} has no variational form: convolutions with groups, dilation "
                    "or a padding other than zeros are not supported"
                )
            found.append(LayerStage(key, child, tuple(waiting), None))
            waiting = []
        elif isinstance(child, _ACTIVATIONS) and found and not waiting and not found[-1].activation:
            found[-1] = replace(found[-1], activation=child)
        elif isinstance(child, (*_PLAIN, nn.Dropout)):
            waiting.append(child)
        else:
            raise ModelError(
                f"layer {key!r}, a {type(child).__name__}, has no variational form. Use linear "
                "layers and convolutions, each followed by its activation, with pooling, dropout "
                "and reshaping between them"
            )
    if not found or waiting:
        raise ModelError("the network does not end with a linear layer or a convolution")
    return Stack(tuple(found), log_std)


def _is_plain(layer: nn.Conv2d) -> bool:
    return layer.groups == 1 and set(layer.dilation) == {1} and layer.padding_mode == "zeros"


class Source(Protocol):
    """Where random numbers come from."""

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """Standard normal draws."""

    def signs(self, shape: tuple[int, ...]) -> Tensor:
        """Draws of -1 and 1."""


class WeightDraws(NamedTuple):
    """Random numbers from a generator on the CPU."""

    rng: torch.Generator

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """Standard normal draws."""
        return torch.randn(shape, generator=self.rng)

    def signs(self, shape: tuple[int, ...]) -> Tensor:
        """Draws of -1 and 1."""
        return torch.empty(shape).bernoulli_(0.5, generator=self.rng).mul_(2).sub_(1)


class Requests:
    """Notes which random numbers a pass on the device `meta` asks for, and can draw them after."""

    def __init__(self) -> None:
        self._asked: list[tuple[str, tuple[int, ...]]] = []

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """A tensor without values."""
        self._asked.append(("normal", shape))
        return torch.empty(shape, device="meta")

    def signs(self, shape: tuple[int, ...]) -> Tensor:
        """A tensor without values."""
        self._asked.append(("signs", shape))
        return torch.empty(shape, device="meta")

    def draw(self, rng: torch.Generator) -> list[Tensor]:
        """The numbers that were asked for, in that order."""
        source = WeightDraws(rng)
        return [getattr(source, kind)(shape) for kind, shape in self._asked]


class GivenDraws:
    """Random numbers that were drawn before, in the order in which they are asked for."""

    def __init__(self, draws: Sequence[Tensor]) -> None:
        self._draws = iter(draws)

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """The next draws."""
        return next(self._draws)

    signs = normal


class Repeated:
    """Random numbers that are drawn once, and come again in the same order."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._drawn: list[Tensor] = []
        self._place = 0

    def again(self) -> None:
        """From the first number on."""
        self._place = 0

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """Standard normal draws."""
        return self._next(self._source.normal, shape)

    def signs(self, shape: tuple[int, ...]) -> Tensor:
        """Draws of -1 and 1."""
        return self._next(self._source.signs, shape)

    def _next(self, draw: Callable[[tuple[int, ...]], Tensor], shape: tuple[int, ...]) -> Tensor:
        if self._place == len(self._drawn):
            self._drawn.append(draw(shape))
        self._place += 1
        return self._drawn[self._place - 1]


class Perturbation(NamedTuple):
    """How weights are perturbed in one pass."""

    samples: int
    """Monte-Carlo samples in the batch."""
    estimator: Estimator
    source: Source

    def normal(self, *shape: int, like: Tensor) -> Tensor:
        """Standard normal draws."""
        return placed(self.source.normal(shape), like.device).to(like)

    def signs(self, rows: int, width: int, like: Tensor) -> Tensor:
        """Signs [rows, width], the product of one for the sample and one for the row."""
        drawn = self.source.signs((self.samples + rows // self.samples, width))
        turned = placed(drawn, like.device).to(like)
        each, own = turned[: self.samples], turned[self.samples :]
        return (each[:, None] * own).reshape(rows, width)


def affine(
    layer: nn.Linear | nn.Conv2d,
    x: Tensor,
    mean: tuple[Tensor, Tensor | None],
    std: tuple[Tensor, Tensor | None],
    noise: Perturbation,
) -> Tensor:
    """A linear layer or convolution with Gaussian weight and bias.

    Args:
        layer: which map; its own weights are not used.
        x: inputs [samples · n, ...].
        mean: of weight and bias.
        std: of weight and bias.
        noise: how to perturb.
    """
    weight, bias = mean
    spread, bias_spread = std
    if noise.estimator == "flipout":
        delta = spread * noise.normal(*weight.shape, like=weight)
        rows, extra = len(x), [1] * (x.ndim - 2)
        incoming = noise.signs(rows, x.shape[1], x).reshape(rows, -1, *extra)
        other = _apply(layer, x * incoming, delta)
        signs = noise.signs(rows, other.shape[1], other).reshape(rows, -1, *extra)
        own = _bias(bias, bias_spread, noise)
        shared = own[0] if own is not None and noise.samples == 1 else None
        y = torch.addcmul(_apply(layer, x, weight, shared), other, signs)
        if shared is not None:
            return y
    else:
        drawn = weight + spread * noise.normal(noise.samples, *weight.shape, like=weight)
        own = _bias(bias, bias_spread, noise)
        if noise.samples == 1:
            return _apply(layer, x, drawn[0], None if own is None else own[0])
        y = _each(layer, x, drawn)
    if own is not None:
        own = own.repeat_interleave(len(x) // noise.samples, dim=0)
        y = y + own.reshape(*own.shape, *[1] * (y.ndim - 2))
    return y


def _bias(mean: Tensor | None, std: Tensor | None, noise: Perturbation) -> Tensor | None:
    """Biases of each sample, [samples, width], if there are any."""
    if mean is None or std is None:
        return None
    return mean + std * noise.normal(noise.samples, *mean.shape, like=mean)


def _apply(
    layer: nn.Linear | nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    if isinstance(layer, nn.Linear):
        return functional.linear(x, weight, bias)
    return functional.conv2d(x, filters_last(weight), bias, layer.stride, layer.padding)


def _each(layer: nn.Linear | nn.Conv2d, x: Tensor, weights: Tensor) -> Tensor:
    """Every sample with weights of its own, [samples, out, in, ...], in one product."""
    count = len(weights)
    split = x.reshape(count, -1, *x.shape[1:])
    if isinstance(layer, nn.Linear):
        return torch.bmm(split, weights.transpose(1, 2)).reshape(len(x), -1)
    # As a convolution in groups: the samples' channels beside each other.
    side = split.transpose(0, 1).flatten(1, 2)
    flat = weights.flatten(0, 1)
    y = functional.conv2d(side, flat, None, layer.stride, layer.padding, 1, count)
    own = y.reshape(len(y), count, -1, *y.shape[2:])
    return own.transpose(0, 1).flatten(0, 1)


def repeat(x: Tensor, samples: int) -> Tensor:
    """Inputs [n, ...] as [samples · n, ...], sample by sample."""
    return x.repeat(samples, *[1] * (x.ndim - 1))


def through(modules: Sequence[nn.Module], x: Tensor, training: bool) -> Tensor:
    """Pooling, reshaping and dropout; dropout in training alone."""
    for module in modules:
        if isinstance(module, nn.Dropout):
            x = functional.dropout(x, module.p, training)
        else:
            x = module(x)
            if training and isinstance(module, _POOLS):
                x = gradient_channels_last(x)
    return x


def activate(stage: LayerStage, x: Tensor) -> Tensor:
    """The stage's activation, the identity where there is none."""
    return x if stage.activation is None else stage.activation(x)


class GaussianWeights(NamedTuple):
    """Means and stds of a network's weights, by name."""

    mean: Tensors
    std: Tensors

    def of(self, name: str) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
        """Those of weight and bias of a layer, as `affine` takes them."""
        weight, bias = f"{name}.weight", f"{name}.bias"
        return (
            (self.mean[weight], self.mean.get(bias)),
            (self.std[weight], self.std.get(bias)),
        )


def forward(
    network: Stack,
    weights: GaussianWeights,
    x: Tensor,
    noise: Perturbation,
    *,
    training: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Outputs [samples · n, width] of a repeated batch, and the activation of every stage."""
    seen: list[Tensor] = []
    for stage in network.stages:
        x = through(stage.before, x, training)
        x = activate(stage, affine(stage.layer, x, *weights.of(stage.name), noise))
        seen.append(x)
    return with_noise(network, weights, x, noise), seen


def with_noise(network: Stack, weights: GaussianWeights, x: Tensor, noise: Perturbation) -> Tensor:
    """The outputs with log stds that are learnt behind them, drawn for each sample."""
    if network.log_std is None:
        return x
    mean, std = weights.mean[network.log_std], weights.std[network.log_std]
    drawn = mean + std * noise.normal(noise.samples, *mean.shape, like=mean)
    return torch.cat([x, drawn.repeat_interleave(len(x) // noise.samples, dim=0)], dim=1)
