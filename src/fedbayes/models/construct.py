"""From the `[model]` table of a config to a network."""

import importlib
from math import prod
from pathlib import Path

import torch
from torch import nn

from fedbayes import seeds
from fedbayes.errors import ModelError
from fedbayes.models.files import named_as, read_model, unlike
from fedbayes.models.network import Network
from fedbayes.models.networks import CNN, MLP, LeNet5, ResNet20
from fedbayes.models.settings import BUILT_IN, ModelSettings, Precision


def build(
    settings: ModelSettings,
    shape: tuple[int, ...],
    classes: int,
    *,
    seed: int,
    client: int | None = None,
    device: torch.device | str = "cpu",
    precision: Precision = "float32",
) -> Network:
    """The network for inputs of this shape, initialized from the seed.

    With `client`, the initialization is that client's own in place of the common one; weights from
    a file are everybody's.

    Raises:
        ModelError: the name is unknown, or the network does not fit the data, or the weights of
            the file.
    """
    purpose = "initialization" if client is None else "own initialization"
    with seeds.global_stream(seeds.integer(seed, purpose, client=client or 0)):
        module = _module(settings, shape, classes)
        initialize(module, settings)
    if settings.weights is not None:
        _load(module, settings, settings.weights)
    network = Network(module, device=device, precision=precision, shape=shape)
    _try_out(network, settings.name, shape, classes)
    return network


def _module(settings: ModelSettings, shape: tuple[int, ...], classes: int) -> nn.Module:
    if settings.dropout and settings.name not in ("mlp", "lenet5"):
        raise ModelError(f"model.dropout is for mlp and lenet5; {settings.name!r} has none")
    if settings.name == "mlp":
        if any(width < 1 for width in settings.hidden):
            raise ModelError(f"model.hidden has {min(settings.hidden)}; widths must be at least 1")
        return MLP(prod(shape), settings.hidden, classes, settings.bias, settings.dropout)
    if settings.name in BUILT_IN and (len(shape) != 3 or min(shape[1:]) < 16):
        raise ModelError(
            f"model {settings.name!r} needs images of at least 16 by 16 pixels, and a sample of "
            f"this data has shape {shape}; use model 'mlp'"
        )
    if settings.name == "lenet5":
        channels, height, width = shape
        return LeNet5(channels, height, width, classes, settings.dropout)
    if settings.name == "cnn":
        channels, height, width = shape
        return CNN(channels, height, width, classes)
    if settings.name == "resnet20":
        if 16 % settings.groups:
            raise ModelError(f"model.groups is {settings.groups}; it must divide 16")
        return ResNet20(shape[0], classes, settings.groups)
    module = _own(settings, shape, classes)
    if not isinstance(module, nn.Module):
        raise ModelError(f"{settings.name!r} made a {type(module).__name__}, not a torch.nn.Module")
    return module


def _load(module: nn.Module, settings: ModelSettings, file: Path) -> None:
    """Put the weights of a file into a module.

    Raises:
        ModelError: the file cannot be read, or holds the weights of another network.
    """
    weights, _ = read_model(file)
    wanted = module.state_dict()
    named = named_as(weights, wanted)
    if named is None or any(t.shape != wanted[name].shape for name, t in named.items()):
        odd = unlike(weights if named is None else named, wanted)
        raise ModelError(f"{file} holds no weights of model {settings.name!r}: {odd}")
    for name, tensor in named.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ModelError(f"{file}: {name} holds NaN or infinite values")
    module.load_state_dict(named)


def _own(settings: ModelSettings, shape: tuple[int, ...], classes: int) -> object:
    """Call the user's factory as `factory(shape=..., classes=..., **arguments)`."""
    place, _, name = settings.name.partition(":")
    try:
        factory = getattr(importlib.import_module(place), name)
    except (ImportError, AttributeError) as error:
        raise ModelError(f"cannot find the model {settings.name!r}: {error}") from None
    try:
        return factory(shape=shape, classes=classes, **settings.arguments)
    except TypeError as error:
        raise ModelError(
            f"{settings.name!r} is called as factory(shape=..., classes=..., **arguments): {error}"
        ) from error


def initialize(module: nn.Module, settings: ModelSettings) -> None:
    """Draw the weights of linear and convolutional layers anew, unless `init` is default.

    `normal` with its defaults is the start of the matching experiments (GPI-FNM, Table 1):
    weights of variance 0.01, biases 0.1.
    """
    if settings.init == "default":
        return
    for layer in module.modules():
        if not isinstance(layer, nn.Linear | nn.Conv2d):
            continue
        match settings.init:
            case "normal":
                nn.init.normal_(layer.weight, std=settings.init_std)
            case "xavier":
                nn.init.xavier_uniform_(layer.weight)
            case "kaiming":
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        if layer.bias is not None:
            nn.init.constant_(layer.bias, settings.init_bias)


def _try_out(network: Network, name: str, shape: tuple[int, ...], classes: int) -> None:
    """One forward pass of zeros, so that a misfit is told before anything trains."""
    x = torch.zeros(2, *shape, device=network.device)
    try:
        with torch.no_grad():
            logits = network(network.prepare(network.initial), x)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ModelError(f"model {name!r} fails on inputs of shape {shape}: {error}") from None
    if tuple(logits.shape) != (2, classes):
        raise ModelError(
            f"model {name!r} maps 2 inputs to shape {tuple(logits.shape)}; "
            f"{(2, classes)} is wanted: one logit for each of {classes} classes"
        )
