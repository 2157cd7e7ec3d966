"""Inputs that a fusion draws, and draws that are kept for the next pass."""

from typing import Protocol

import torch
from torch import Tensor

from fedbayes.core import seeds

CHUNK = 512
"""Inputs that are drawn at once."""
MEMORY = 512 * 2**20
"""Bytes of draws that are kept."""


class Batches(Protocol):
    """Batches of inputs, the same for the same number."""

    def batch(self, number: int, count: int) -> Tensor:
        """Inputs [count, *shape]; each number has its own, and those below 0 are held out."""

    @property
    def mirrors(self) -> bool:
        """Whether mirrored inputs (along the last axis) are of the same class."""


class Draws(Batches, Protocol):
    """Inputs as networks see them; `fedbayes.inputs.prior.Inputs`."""

    @property
    def seed(self) -> int:
        """Of all that is drawn."""

    @property
    def movable(self) -> bool:
        """Whether they are invented images, which may be moved toward those of the clients."""

    def augmented(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """Other inputs, made of these, that are drawn as often."""


class Derived:
    """Draws that are made of others; `batch` says how."""

    def __init__(self, draws: Draws) -> None:
        self.draws = draws

    @property
    def seed(self) -> int:
        """That of the draws."""
        return self.draws.seed

    @property
    def mirrors(self) -> bool:
        """As `Batches.mirrors`."""
        return self.draws.mirrors

    @property
    def movable(self) -> bool:
        """As `Draws.movable`."""
        return self.draws.movable

    def augmented(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """As `Draws.augmented`."""
        return self.draws.augmented(x, rng)


class Augmented(Derived):
    """Draws that are changed as augmentation changes them, each number in one way.

    Of draws that were moved toward classes: solved on these as they are, networks are worse on
    samples than on draws that nobody moved, and solved on turned ones they are about as good.
    """

    def batch(self, number: int, count: int) -> Tensor:
        """As `Draws.batch`."""
        purpose = "augmented draws" if number >= 0 else "augmented draws held out"
        rng = seeds.torch_rng(self.seed, purpose, round=abs(number))
        return self.augmented(self.draws.batch(number, count), rng)


class CachedInputs(Derived):
    """Draws that are kept in memory, up to a number of bytes; the rest is drawn again, except that
    the latest batch is kept always.

    Args:
        draws: where they come from.
        memory: largest number of bytes to keep.
        device: where to keep them; None: where they were drawn.
    """

    def __init__(
        self, draws: Draws, memory: int = MEMORY, device: torch.device | None = None
    ) -> None:
        super().__init__(draws)
        self.memory, self.device = memory, device
        self._kept: dict[tuple[int, int], Tensor] = {}
        self._latest: dict[tuple[int, int], Tensor] = {}

    def batch(self, number: int, count: int) -> Tensor:
        """As `Draws.batch`; not to be changed in place."""
        key = number, count
        for kept in (self._kept, self._latest):
            if key in kept:
                return kept[key]
        x = self.draws.batch(number, count).to(self.device)
        if x.nbytes <= self.memory:
            self.memory -= x.nbytes
            self._kept[key] = x
        else:
            self._latest = {key: x}
        return x
