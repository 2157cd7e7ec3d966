"""Precisions of matrices of weights that are Kronecker products, by their eigenvectors."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbayes.core.tensors import Tensors


@dataclass(frozen=True)
class Spectrum:
    """A ⊗ B / n of the weights [o, d] of a layer: M ↦ B M A / n = V (λ ∘ (Vᵀ M U)) Uᵀ."""

    left: Tensor
    """V [o, o], eigenvectors of B in columns."""
    right: Tensor
    """U [d, d], eigenvectors of A in columns."""
    values: Tensor
    """λ [o, d], at least 0."""

    def scaled(self, factors: Tensor, m: Tensor) -> Tensor:
        """V (factors ∘ (Vᵀ M U)) Uᵀ, with factors [o, d] of the eigenvectors."""
        return self.left @ ((self.left.T @ m @ self.right) * factors) @ self.right.T

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Spectrum":
        """The same on a device, in a type."""
        return Spectrum(*(t.to(device, dtype) for t in (self.left, self.right, self.values)))


def rows_of(layer: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """The weights of a layer as [o, d], those of its bias in the last column if it has one."""
    weight, bias = tensors[f"{layer}.weight"].flatten(1), tensors.get(f"{layer}.bias")
    return weight if bias is None else torch.cat([weight, bias[:, None]], 1)


def layered(layer: str, rows: Tensor, like: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The inverse of `rows_of`: names and tensors in the shapes of others."""
    shape = like[f"{layer}.weight"].shape
    width = shape[1:].numel()
    yield f"{layer}.weight", rows[:, :width].reshape(shape)
    if f"{layer}.bias" in like:
        yield f"{layer}.bias", rows[:, width]


@dataclass(frozen=True)
class Metric:
    """A precision of all weights of a network: Kronecker products by layer, else diagonal."""

    layers: dict[str, Spectrum]
    """By layer."""
    diagonal: Tensors
    """By name, of the weights of no layer here."""

    def each(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Spectrum | None]]:
        """Tensors by layer, as [o, d] with its spectrum, and those that are diagonal."""
        for layer, spectrum in self.layers.items():
            yield layer, rows_of(layer, tensors), spectrum
        for name in self.diagonal:
            yield name, tensors[name], None

    def scaled(
        self, function: Callable[[Tensor], Tensor], tensors: Mapping[str, Tensor]
    ) -> Tensors:
        """A function of the precision, applied to named tensors.

        Args:
            function: of the eigenvalues.
            tensors: of the weights' names and shapes.
        """
        found: Tensors = {}
        for name, m, spectrum in self.each(tensors):
            if spectrum is None:
                found[name] = function(self.diagonal[name]) * m
            else:
                whole = spectrum.scaled(function(spectrum.values), m)
                found.update(layered(name, whole, tensors))
        return found
