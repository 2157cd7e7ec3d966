"""From the `[model]` table of a config to a network."""

import inspect
from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from fedbayes.core import seeds
from fedbayes.core.lazy import in_memory, named, raised
from fedbayes.errors import ModelError, NetworkError
from fedbayes.models import normalization, trials
from fedbayes.models.files import frozen_digest, named_as, read_model, unlike
from fedbayes.models.network import Network
from fedbayes.models.networks import CNN, MLP, LeNet5, ResNet20
from fedbayes.models.others import build_other
from fedbayes.models.settings import BUILT_IN, NAMES, OTHERS, ModelSettings, Precision
from fedbayes.models.units import WRITES_OVER


def build(
    settings: ModelSettings,
    shape: tuple[int, ...],
    outputs: int,
    *,
    head: nn.Module | None = None,
    seed: int,
    client: int | None = None,
    device: torch.device | str = "cpu",
    precision: Precision = "float32",
) -> Network:
    """The network for inputs of this shape, initialized from the seed.

    Args:
        settings: the `[model]` table.
        shape: of one sample.
        outputs: width of the last layer (`Likelihood.outputs`).
        head: what is appended behind the network (`Likelihood.head`).
        seed: of the run.
        client: whose own initialization it has, instead of the common one; weights from a file
            are everybody's.
        device: where it computes.
        precision: in which it computes.

    Raises:
        ModelError: the name is unknown, or the network does not fit the data, or the weights of
            the file.
    """
    purpose = "initialization" if client is None else "own initialization"
    own_code = settings.name not in NAMES
    if own_code:
        _factory(settings.name)  # imported before generators are seeded, from which it may draw

    def draw(purpose: str) -> nn.Module:
        with seeds.global_rng(seed, purpose, client=client or 0):
            module = _module(settings, shape, outputs)
            trials.materialize(module, shape, settings.name)
            initialize(module, settings)
        return module

    module = draw(purpose)
    if own_code and client is None:
        trials.require_registered(draw, purpose, module, shape, settings.name)
    width = outputs
    if head is not None:
        width = head(torch.zeros(1, outputs)).shape[-1]
        module = _with_head(module, head)
    fixed = trials.fixed_buffers(module, shape, settings.name)
    if settings.weights is not None:
        _load(module, settings, settings.weights, fixed)
    own = _batch_norm(module, settings)
    network = Network(
        module,
        device=device,
        precision=precision,
        shape=shape,
        own=own,
        fixed=fixed,
        name=settings.name if own_code else "",
    )
    _try_out(network, settings.name, shape, width)
    return network


def _batch_norm(module: nn.Module, settings: ModelSettings) -> frozenset[str]:
    """Have batch normalization as the settings say, in place; names of clients' own tensors."""
    kind = settings.batch_norm
    if kind == "default":
        kind = "frozen" if settings.frozen_body else "averaged"
    elif not normalization.layers(module):
        raise ModelError(
            f"model {settings.name!r} has no batch normalization, so model.batch_norm has no "
            "effect. Leave it out"
        )
    if kind == "frozen":
        normalization.freeze(module)
    return normalization.tensors(module) if kind == "local" else frozenset()


def _with_head(module: nn.Module, head: nn.Module) -> nn.Module:
    """The module with a head behind it: a longer stack, or a stack of the two."""
    if type(module).forward is nn.Sequential.forward and isinstance(module, nn.Sequential):
        return module.append(head)
    return nn.Sequential(OrderedDict(network=module, noise=head))


def _module(settings: ModelSettings, shape: tuple[int, ...], outputs: int) -> nn.Module:
    """The network that the settings name, its weights drawn from the global generators."""
    try:
        return _found(settings, shape, outputs)
    except (RuntimeError, MemoryError, OverflowError) as error:
        if isinstance(error, ModelError):
            raise
        reason = str(error).partition("\n")[0] or "not enough memory"
        raise ModelError(f"model {settings.name!r} cannot be built: {reason}") from error


def _found(settings: ModelSettings, shape: tuple[int, ...], outputs: int) -> nn.Module:
    if settings.dropout and settings.name not in ("mlp", "lenet5"):
        raise ModelError(
            f"model.dropout works only with mlp and lenet5, not with {settings.name!r}"
        )
    if settings.name == "mlp":
        if any(width < 1 for width in settings.hidden):
            raise ModelError(f"model.hidden has {min(settings.hidden)}. Widths must be at least 1")
        _require_memory([prod(shape), *settings.hidden, outputs])
        batch_norm = settings.norm == "batch"
        return MLP(
            prod(shape), settings.hidden, outputs, settings.bias, settings.dropout, batch_norm
        )
    least = 4 if settings.name == "lenet5" else 16
    if settings.name in BUILT_IN and (len(shape) != 3 or min(shape[1:]) < least):
        way = "use model 'mlp'"
        if len(shape) == 2 and min(shape) >= least:
            way = "If it is an image without a channel, set data.channels to 'absent'"
        raise ModelError(
            f"model {settings.name!r} needs images of at least {least} by {least} pixels, but a "
            f"sample of this data has shape {shape}. {way}"
        )
    if settings.name == "lenet5":
        channels, height, width = shape
        return LeNet5(channels, height, width, outputs, settings.dropout)
    if settings.name == "cnn":
        channels, height, width = shape
        return CNN(channels, height, width, outputs)
    if settings.name == "resnet20":
        if 16 % settings.groups:
            raise ModelError(f"model.groups is {settings.groups}. It must divide 16")
        return ResNet20(shape[0], outputs, settings.groups)
    if settings.name in OTHERS:
        return build_other(settings, shape, outputs)
    module = _own(settings, shape, outputs)
    if not isinstance(module, nn.Module):
        raise ModelError(f"{settings.name!r} made a {type(module).__name__}, not a torch.nn.Module")
    return module


def _require_memory(widths: Sequence[int]) -> None:
    """See that a fully connected network of these widths has room here."""
    needed = 4 * sum(one * two for one, two in pairwise(widths))
    if needed > psutil.virtual_memory().total:
        raise ModelError(
            f"a network with layers of {', '.join(f'{width:,}' for width in widths)} takes "
            f"{needed / 1e9:,.0f} GB, more than this machine has. Choose a smaller model.hidden"
        )


def _load(module: nn.Module, settings: ModelSettings, file: Path, fixed: frozenset[str]) -> None:
    """Put the weights of a file into a module, of which the buffers `fixed` do not train."""
    weights, card = read_model(file)
    wanted = module.state_dict()
    digest = frozen_digest(card)
    if digest:
        weights = Network(module, fixed=fixed).completed(weights, digest, file)
    named = named_as(weights, module)
    if named is None or any(t.shape != wanted[name].shape for name, t in named.items()):
        odd = unlike(weights if named is None else named, wanted)
        raise ModelError(f"{file} has no weights of model {settings.name!r}: {odd}")
    for name, tensor in named.items():
        same = torch.equal(tensor, wanted[name])  # as of a mask with infinite values
        if tensor.is_floating_point() and not (same or torch.isfinite(tensor.float()).all()):
            raise ModelError(f"{file}: {name} has NaN or infinite values")
    module.load_state_dict(named, strict=False)  # which has shared tensors under all names


def _factory(place: str) -> Any:
    """The user's factory; its module is imported."""
    return named(place, "model", ModelError)


def _own(settings: ModelSettings, shape: tuple[int, ...], outputs: int) -> object:
    """Call the user's class or function with the arguments that it has parameters for."""
    factory = _factory(settings.name)
    if isinstance(factory, nn.Module):
        if not in_memory(settings.name):
            raise ModelError(
                f"{settings.name!r} is a network instance, with different weights in every "
                "process. Give its class, or a function that builds it"
            )
        return deepcopy(factory).cpu()
    known = {"shape": shape, "outputs": outputs, "classes": outputs}
    try:
        parameters = inspect.signature(factory).parameters
        takes = set(parameters)
        open_ = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    except (TypeError, ValueError):
        takes, open_ = set(), True
    if open_:  # it takes whatever it is given
        takes = {"shape", "classes" if "classes" in takes else "outputs"}
    given = {name: value for name, value in known.items() if name in takes}
    try:
        return factory(**given, **settings.arguments)
    except TypeError as error:
        called = "".join(f"{name}=..., " for name in given)
        raise ModelError(
            f"{settings.name!r} is called as factory({called}**arguments), with shape and outputs "
            f"(or classes) if it has parameters of these names, and model.arguments: {error}"
        ) from error
    except (ModelError, RuntimeError, MemoryError, OverflowError):
        raise
    except Exception as error:
        raise ModelError(
            f"the model {settings.name!r} failed: {raised(error, settings.name)}"
        ) from error


def initialize(module: nn.Module, settings: ModelSettings) -> None:
    """Draw the weights of linear and convolutional layers again, unless `init` is default.

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


def _try_out(network: Network, name: str, shape: tuple[int, ...], width: int) -> None:
    """One forward pass of zeros, so that a misfit is told before anything trains."""
    (x,) = network.prepare({"inputs": torch.zeros(2, *shape)}).values()  # as it is laid out there
    before = x._version
    try:
        with torch.no_grad():
            outputs = network(network.prepare(network.initial), x)
    except NetworkError as error:
        way = ""
        if "Long" in str(error):
            way = ". Samples are float32; call x.long() before an embedding"
        elif len(shape) == 3 and shape[0] == 1:
            way = ". If samples are not images, set data.channels to 'first'"
        raise ModelError(f"model {name!r} fails on inputs of shape {shape}: {error}{way}") from None
    if not isinstance(outputs, Tensor):
        raise ModelError(
            f"model {name!r} returns a {type(outputs).__name__}. Let forward return only its "
            "outputs, a tensor"
        )
    if not outputs.is_floating_point():
        raise ModelError(
            f"model {name!r} returns outputs of type {str(outputs.dtype).removeprefix('torch.')}. "
            "Return real numbers, such as logits"
        )
    if tuple(outputs.shape) != (2, width):
        raise ModelError(
            f"model {name!r} maps 2 inputs to shape {tuple(outputs.shape)}, but the likelihood "
            f"needs {(2, width)} (such as a logit per class)"
        )
    if x._version != before:
        raise ModelError(f"model {name!r} {WRITES_OVER}")
