"""Batch normalization over clients: statistics that are averaged, frozen, or each client's own."""

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class _Frozen:
    """A batch normalization that stays as in evaluation: its running statistics are constants."""

    def train(self, mode: bool = True) -> Any:
        """Stay in evaluation."""
        return super().train(False)  # type: ignore[misc]


def layers(module: nn.Module) -> dict[str, nn.Module]:
    """The batch normalizations of a module, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, _BatchNorm)}


def freeze(module: nn.Module) -> None:
    """Have batch normalizations use their running statistics in training too, in place; nothing
    changes these any more. Scales and shifts are left as they are.
    """
    for layer in layers(module).values():
        if layer.running_mean is not None and not isinstance(layer, _Frozen):
            layer.__class__ = type(f"Frozen{type(layer).__name__}", (_Frozen, type(layer)), {})
            layer.eval()


def frozen_buffers(module: nn.Module) -> frozenset[str]:
    """Names of the running statistics that nothing changes."""
    return frozenset(
        _joined(name, key)
        for name, layer in layers(module).items()
        if isinstance(layer, _Frozen)
        for key, _ in layer.named_buffers(recurse=False)
    )


def tensors(module: nn.Module) -> frozenset[str]:
    """Names of all that belongs to batch normalizations and changes: scales and shifts that are
    trained, and running statistics.
    """
    fixed = frozen_buffers(module)
    return frozenset(
        name
        for prefix, layer in layers(module).items()
        for key, tensor in (
            *layer.named_parameters(recurse=False),
            *layer.named_buffers(recurse=False),
        )
        if (name := _joined(prefix, key)) not in fixed
        and (tensor.requires_grad or not isinstance(tensor, nn.Parameter))
    )


def _joined(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key
