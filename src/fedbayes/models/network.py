"""A network as a pure function of its weights."""

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from fedbayes.models.settings import Precision
from fedbayes.models.units import find_units
from fedbayes.tensors import Tensors


class Network:
    """A module seen as `logits = network(weights, x)`.

    The module keeps no weights of its own between calls: each call binds the given tensors and
    leaves them bound, which saves the bookkeeping of `torch.func.functional_call` on every
    step. Layers whose output follows from their weights (linear, convolution) accept weights of
    other widths than the module was built with, so one network serves models of any width.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        device: torch.device | str = "cpu",
        precision: Precision = "float32",
    ) -> None:
        self.module = module.to(device)
        self.device = torch.device(device)
        self.precision = precision
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.initial: Tensors = {
            name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()
        }
        self.buffers = frozenset(name for name, _ in module.named_buffers())
        self.frozen = self.buffers | {
            name for name, parameter in module.named_parameters() if not parameter.requires_grad
        }
        self.convolutional = any(isinstance(m, nn.Conv2d) for m in module.modules())
        self.units = find_units(module)
        """Units of each layer, inputs to outputs."""
        self._slots = self._find_slots()

    def _find_slots(self) -> list[tuple[dict[str, Tensor | None], str, str]]:
        """Where each tensor lives: the owner's table, its key, and the name in `weights`.

        A tensor that two layers share has two places and one name.
        """
        names: dict[int, str] = {}
        slots: list[tuple[dict[str, Tensor | None], str, str]] = []
        for prefix, owner in self.module.named_modules():
            for table in (owner._parameters, owner._buffers):
                for key, tensor in table.items():
                    if tensor is None:
                        continue
                    own = f"{prefix}.{key}" if prefix else key
                    name = names.setdefault(id(tensor), own)
                    if name in self.initial:
                        slots.append((table, key, name))
        return slots

    def split(self) -> tuple[Tensors, Tensors]:
        """The initial tensors: those that gradients train, and the others (running means, say)."""
        trained = {name: t for name, t in self.initial.items() if name not in self.frozen}
        return trained, {name: t for name, t in self.initial.items() if name in self.frozen}

    def prepare(self, weights: Tensors) -> Tensors:
        """The weights on this network's device, filters laid out channels last."""
        return {
            name: tensor.to(self.device, memory_format=torch.channels_last)
            if self.convolutional and tensor.ndim == 4
            else tensor.to(self.device)
            for name, tensor in weights.items()
        }

    def __call__(self, weights: Tensors, x: Tensor, *, training: bool = False) -> Tensor:
        """Logits [n, classes] of the inputs [n, ...] under these weights, at least float32."""
        for table, key, name in self._slots:
            table[key] = weights[name]
        if self.module.training != training:
            self.module.train(training)
        if self.convolutional and x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        half = (
            torch.autocast(self.device.type, dtype=torch.bfloat16)
            if self.precision == "bf16"
            else nullcontext()
        )
        with half:
            logits: Tensor = self.module(x)
        return logits.float() if self.precision == "bf16" else logits
