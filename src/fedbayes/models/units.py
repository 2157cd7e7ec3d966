"""The units of a network: which tensors a unit or filter owns, and who reads its output.

Methods that leave units out (sparse, dropped, cut away) ask here. A unit of a linear layer, or
a filter of a convolution, owns its row of the weights, its bias, and its scale and shift in the
normalization that follows. Where the layer that reads the unit is known, so are the columns
there that a missing unit leaves without input.

The chain from layer to layer is followed through `nn.Sequential`. A module of another kind may
tell its own as a class attribute: `links = {"conv1": ("norm1", "conv2")}` says that `norm1`
follows the convolution `conv1` and that `conv2` alone reads it, with nothing between but what
maps zero to zero; None stands for "nobody known". Layers in other modules have owners but no
known readers.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from fedbayes.messages import Masked, Message
from fedbayes.tensors import Tensors

_ZERO_TO_ZERO = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Dropout,
    nn.Dropout2d,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
    nn.Flatten,
    nn.Identity,
)
"""Modules after which the output of a unit that is gone is still zero."""

_NORMS = (nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d)


@dataclass(frozen=True)
class Units:
    """The units of one layer."""

    layer: str
    """Name of the layer in the module."""
    kind: Literal["conv", "dense"]
    count: int
    """Number of units or filters."""
    owned: tuple[str, ...]
    """Tensors of which unit j owns slice j along axis 0; the weights come first."""
    norm: str | None
    """Name of the normalization that follows, if any."""
    norm_groups: int
    """Channels are normalized in so many groups (1 if alone, or not at all)."""
    reader: str | None
    """The weights that read these units along axis 1, if that layer is known."""
    repeats: int
    """Inputs of the reader per unit: pixels of a flattened map, or 1."""
    last: bool
    """Whether these are the network's outputs: the units of the last layer."""
    running: tuple[str, ...] = ()
    """Buffers of which unit j owns entry j: running statistics of the normalization."""

    @property
    def weight(self) -> str:
        """Name of the layer's weights, [count, ...]."""
        return self.owned[0]


_STORED = TypeAdapter(tuple[Units, ...])


def store_units(units: tuple[Units, ...]) -> str:
    """Units as text, for the state of a server."""
    return _STORED.dump_json(units).decode()


@lru_cache(maxsize=8)
def load_units(text: str) -> tuple[Units, ...]:
    """The inverse of `store_units`."""
    return _STORED.validate_json(text)


Alive = Mapping[str, Tensor]
"""Which units remain: layer to a boolean tensor [count]; layers that are missing are whole."""


def find_units(module: nn.Module) -> tuple[Units, ...]:
    """The units of every linear and convolutional layer, inputs to outputs.

    Layers that share their weights with another, and convolutions in groups, are left out.
    """
    finder = _Finder(module)
    finder.walk(module, "")
    return finder.result()


class _Finder:
    """Walks through a module in the order of its data."""

    def __init__(self, root: nn.Module) -> None:
        self.modules = dict(root.named_modules())
        owners: dict[int, int] = {}
        for child in self.modules.values():
            for parameter in child._parameters.values():
                if parameter is not None:
                    owners[id(parameter)] = owners.get(id(parameter), 0) + 1
        self.shared = {key for key, count in owners.items() if count > 1}
        self.found: dict[str, dict[str, str | None]] = {}
        self.open: str | None = None
        """The layer whose output is what flows, if a single one's."""

    def walk(self, module: nn.Module, name: str) -> None:
        if isinstance(module, nn.Linear | nn.Conv2d):
            self._layer(module, name)
        elif isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            for key, child in module.named_children():
                self.walk(child, f"{name}.{key}" if name else key)
        elif isinstance(module, _NORMS):
            self._norm(module, name)
        elif not isinstance(module, _ZERO_TO_ZERO):
            self._unknown(module, name)

    def _layer(self, layer: nn.Linear | nn.Conv2d, name: str) -> None:
        grouped = isinstance(layer, nn.Conv2d) and layer.groups > 1
        if id(layer.weight) in self.shared or grouped:
            self.open = None
            return
        if self.open is not None:
            self.found[self.open]["reader"] = name
        self.found[name] = {"norm": None, "reader": None}
        self.open = name

    def _norm(self, norm: nn.Module, name: str) -> None:
        if self.open is None:
            return
        owner = self.modules[self.open]
        size = norm.num_channels if isinstance(norm, nn.GroupNorm) else norm.num_features
        fits = size == len(owner.weight)
        if fits and norm.weight is not None and self.found[self.open]["norm"] is None:
            self.found[self.open]["norm"] = name
        else:
            self.open = None

    def _unknown(self, module: nn.Module, name: str) -> None:
        """A module with a forward of its own: its layers, and the links that it declares."""
        links = getattr(type(module), "links", {})
        prefix = f"{name}." if name else ""
        self.open = None
        for path, child in module.named_modules():
            if isinstance(child, nn.Linear | nn.Conv2d):
                self._layer(child, prefix + path)
                self.open = None
        for path, (norm, reader) in links.items():
            if prefix + path in self.found:
                self.found[prefix + path] = {
                    "norm": None if norm is None else prefix + norm,
                    "reader": None if reader is None else prefix + reader,
                }

    def result(self) -> tuple[Units, ...]:
        layers = list(self.found)
        return tuple(self._units(name, last=name == layers[-1]) for name in layers)

    def _units(self, name: str, *, last: bool) -> Units:
        layer, norm, reader = self.modules[name], *self.found[name].values()
        owned = [f"{name}.weight"] + [f"{name}.bias"] * (layer.bias is not None)
        groups, repeats = 1, 1
        running: tuple[str, ...] = ()
        if norm is not None:
            module = self.modules[norm]
            running = tuple(f"{norm}.{key}" for key, b in module.named_buffers() if b.ndim)
            owned += [f"{norm}.weight", f"{norm}.bias"]
            groups = module.num_groups if isinstance(module, nn.GroupNorm) else 1
        count = len(layer.weight)
        if reader is not None:
            inputs = self.modules[reader].weight.shape[1]
            repeats = inputs // count
            if repeats * count != inputs:
                reader, repeats = None, 1
        return Units(
            layer=name,
            kind="conv" if isinstance(layer, nn.Conv2d) else "dense",
            count=count,
            owned=tuple(owned),
            norm=norm,
            norm_groups=groups,
            reader=f"{reader}.weight" if reader is not None else None,
            repeats=repeats,
            last=last,
            running=running,
        )


def trained_units(units: tuple[Units, ...], trained: Set[str]) -> tuple[Units, ...]:
    """Of these units those whose tensors are all trained; a reader that is not is none."""
    return tuple(
        layer if layer.reader in trained else replace(layer, reader=None, repeats=1)
        for layer in units
        if trained >= set(layer.owned)
    )


def mark_outputs(units: tuple[Units, ...], layer: str) -> tuple[Units, ...]:
    """The units with `layer` as the network's last, whether it is among them or not."""
    return tuple(replace(found, last=found.layer == layer) for found in units)


def last_layer(module: nn.Module, run: Callable[[], object]) -> str:
    """Name of the module with weights that computes last in a forward pass.

    The order in which modules were registered may be another.

    Args:
        module: the network.
        run: makes a forward pass.
    """
    called = [""]
    hooks = [
        child.register_forward_hook(lambda *_, name=name: called.append(name))
        for name, child in module.named_modules()
        if any(parameter.ndim > 1 for parameter in child.parameters(recurse=False))
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return called[-1]


def unknown_layers(module: nn.Module, units: tuple[Units, ...]) -> list[str]:
    """Layers with weights whose units are not among these, as `name (Type)`."""
    known = {layer.layer for layer in units}
    return [
        f"{name or 'the network'} ({type(child).__name__})"
        for name, child in module.named_modules()
        if name not in known
        and any(p.requires_grad and p.ndim > 1 for p in child.parameters(recurse=False))
    ]


Masks = dict[str, dict[tuple[int, ...], Tensor]]
"""By tensor, the masks of its axes, as `Masked` takes them."""


def masks(
    units: tuple[Units, ...], alive: Alive, *, readers: bool = True, running: bool = False
) -> Masks:
    """What remains of each tensor when only these units do.

    Args:
        units: of the network.
        alive: units that remain.
        readers: whether the columns that read a missing unit go as well.
        running: whether its running statistics go as well.
    """
    found: Masks = {}
    for layer in units:
        keep = alive.get(layer.layer)
        if keep is None:
            continue
        for name in layer.owned + (layer.running if running else ()):
            found.setdefault(name, {})[(0,)] = keep
        if readers and layer.reader is not None:
            found.setdefault(layer.reader, {})[(1,)] = keep.repeat_interleave(layer.repeats)
    return found


def restrict(weights: Tensors, found: Masks) -> Message:
    """The weights as a message from which everything that is masked is left out."""
    return {
        name: Masked.keep(tensor, found[name]) if name in found else tensor
        for name, tensor in weights.items()
    }


def cut(message: Message) -> Tensors:
    """The weights of the smaller network that a message of whole units stands for.

    Every masked tensor shrinks to the slices that its masks keep.
    """
    return {
        name: item.compact() if isinstance(item, Masked) else item for name, item in message.items()
    }


def blank(weights: Tensors, found: Masks) -> Tensors:
    """The weights with zeros where they are masked."""
    result = dict(weights)
    for name, axes in found.items():
        tensor = result[name]
        for (axis,), mask in axes.items():
            shape = [-1 if index == axis else 1 for index in range(tensor.ndim)]
            tensor = tensor * mask.to(tensor.dtype).reshape(shape)
        result[name] = tensor
    return result


def row_norms(weights: Tensors, layer: Units) -> Tensor:
    """‖w_g‖₂ of each unit's weights, [count]."""
    norms: Tensor = torch.linalg.vector_norm(weights[layer.weight].flatten(1), dim=1)
    return norms
