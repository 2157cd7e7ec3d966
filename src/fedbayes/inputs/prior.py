"""What an input prior is, and the inputs that a fusion draws from one."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedbayes import seeds
from fedbayes.data.preprocessing import Preprocessing


class InputPrior(ABC):
    """Draws inputs of one shape: images in [0, 1], or rows of a table in their own units.

    Args:
        shape: of one input.
    """

    name: str
    """As `--inputs` has it."""
    assumes: str
    """What it takes inputs for: a result that rests on it should say so."""
    notes: tuple[str, ...] = ()
    """What a user should know of how it was chosen or read."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    @abstractmethod
    def draw(self, count: int, rng: np.random.Generator) -> Tensor:
        """So many inputs, float32 [count, *shape]."""

    def augmented(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """Other inputs that the prior draws as often, made of some of its own; the same by default.

        Args:
            x: inputs [n, *shape].
            rng: of what is changed.
        """
        return x


@dataclass(frozen=True)
class Inputs:
    """Inputs as networks see them: scaled draws, the same for the same seed and batch."""

    prior: InputPrior
    mean: Tensor
    """Subtracted from draws; [C] by channel of an image, [*shape], or a number []."""
    std: Tensor
    """Draws are divided by it; as `mean`."""
    seed: int = 0

    @classmethod
    def seen(
        cls, prior: InputPrior, by: Preprocessing, seed: int = 0, *, sums: bool = False
    ) -> "Inputs":
        """Draws as networks with a preprocessing see them.

        Images are drawn in [0, 1], rows in their own units; but rows of a normal prior that knows
        no sums as networks see them.

        Args:
            prior: of the inputs.
            by: what networks see of a sample.
            seed: of all that is drawn.
            sums: whether the prior knows the clients' sums.
        """
        mean, std = torch.tensor(by.mean), torch.tensor(by.std)
        if len(by.shape) > 1:
            return cls(prior, mean, std, seed)
        if prior.name == "gaussian" and not sums:
            return cls(prior, torch.zeros_like(mean), torch.ones_like(std), seed)
        return cls(prior, mean * by.scale, std * by.scale, seed)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one input."""
        return self.prior.shape

    def batch(self, number: int, count: int) -> Tensor:
        """So many inputs [count, *shape], fresh for every number.

        Args:
            number: of the batch, from 0; inputs that are held out have numbers below 0.
            count: of inputs.
        """
        purpose = "inputs" if number >= 0 else "inputs held out"
        rng = seeds.numpy_rng(self.seed, purpose, round=abs(number))
        return self.scaled(self.prior.draw(count, rng))

    def scaled(self, x: Tensor) -> Tensor:
        """Draws as networks see them."""
        return (x - self._along(self.mean)) / self._along(self.std)

    def augmented(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """As `InputPrior.augmented`, of scaled inputs."""
        raw = x * self._along(self.std) + self._along(self.mean)
        return self.scaled(self.prior.augmented(raw, rng))

    def _along(self, values: Tensor) -> Tensor:
        return values.reshape(-1, 1, 1) if values.ndim == 1 and len(self.shape) == 3 else values
