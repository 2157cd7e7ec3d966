"""What an input prior is, and the inputs that a fusion draws from one."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedbayes.core import seeds
from fedbayes.core.brief import Brief
from fedbayes.data.preprocessing import Preprocessing
from fedbayes.errors import ConfigError

MEASURED = 1024
"""Inputs whose mean and standard deviation are taken for those of all."""


class InputPrior(ABC):
    """Draws inputs of one shape: images in [0, 1], or rows of a table in their own units.

    Args:
        shape: of one input.

    Examples:
        >>> import torch
        >>> from fedbayes.inputs import InputPrior
        >>> class Zeros(InputPrior):
        ...     name = "zeros"
        ...     assumes = "inputs are zero"
        ...
        ...     def draw(self, count, rng):
        ...         return torch.zeros(count, *self.shape)
        >>> Zeros((2,)).draw(3, None).shape
        torch.Size([3, 2])
    """

    name: str
    """As `--inputs` has it."""
    assumes: str
    """What it takes inputs for: a result that rests on it should say so."""
    bounded: bool = False
    """Whether it draws values between 0 and 1, whatever the clients' are."""
    standard: bool = False
    """Whether it draws inputs as networks see them: of mean 0 and standard deviation 1."""
    mirrors: bool = False
    """Whether mirrored inputs (along the last axis) are of the same class."""
    movable: bool = False
    """Whether it invents images, which may be moved toward what networks know of their data."""
    notes: tuple[str, ...] = ()
    """What a user should know of how it was chosen or read."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    @property
    def held_out(self) -> "InputPrior":
        """Draws inputs that nothing was fitted to: itself, as long as it draws afresh."""
        return self

    @abstractmethod
    def draw(self, count: int, rng: np.random.Generator) -> Tensor:
        """So many inputs, float32 [count, *shape]."""

    def augmented(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """Augmented inputs with the same distribution; unchanged by default.

        Args:
            x: inputs [n, *shape].
            rng: of what is changed.
        """
        return x


@dataclass(frozen=True, repr=False)
class Inputs(Brief):
    """Inputs as networks see them: scaled draws, the same for the same seed and batch.

    Examples:
        >>> import torch
        >>> from fedbayes.inputs import Inputs
        >>> from fedbayes.inputs import build_prior
        >>> inputs = Inputs(build_prior("gaussian", (2,)), torch.zeros(2), torch.ones(2))
        >>> inputs.batch(0, 5).shape
        torch.Size([5, 2])
    """

    prior: InputPrior
    mean: Tensor
    """Subtracted from draws; [C] by channel of an image, [*shape], or a number []."""
    std: Tensor
    """Draws are divided by it; as `mean`."""
    seed: int = 0

    @classmethod
    def seen(cls, prior: InputPrior, by: Preprocessing, seed: int = 0) -> "Inputs":
        """Draws as networks with a preprocessing see them.

        Images are drawn in [0, 1], and so are rows of a `bounded` prior. Draws of a `standard`
        prior are what networks see; and so are images and signals of a bounded one, by their own
        mean and standard deviation, if those of the clients' data are not between 0 and 1. Others
        are in the units of the clients' data.

        Raises:
            ConfigError: rows of a prior of values between 0 and 1 are to stand for others.

        Args:
            prior: of the inputs.
            by: what networks see of a sample.
            seed: of all that is drawn.
        """
        mean, std = torch.tensor(by.mean), torch.tensor(by.std)
        if prior.standard:
            return cls(prior, torch.zeros_like(mean), torch.ones_like(std), seed)
        within = bool(mean.min() >= 0 and mean.max() <= 1 and std.max() <= 1)
        if prior.bounded and not within:
            own = f"mean {float(mean.mean()):.3g} and standard deviation {float(std.mean()):.3g}"
            if len(by.shape) == 1:
                raise ConfigError(
                    f"{prior.name!r} gives values between 0 and 1, but the networks were trained "
                    f"on values of {own}. Give the clients' sums with --sums, real samples or your "
                    "own function with --inputs, or train on values between 0 and 1 (data.scale)"
                )
            prior.notes += (f"inputs from {prior.name!r} are moved to the data's {own}",)
            x = prior.draw(MEASURED, seeds.numpy_rng(seed, "inputs held out"))
            return cls(prior, x.mean(), x.std(), seed)
        if len(by.shape) > 1 or prior.bounded:
            return cls(prior, mean, std, seed)
        return cls(prior, mean * by.scale, std * by.scale, seed)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one input."""
        return self.prior.shape

    @property
    def mirrors(self) -> bool:
        """As `InputPrior.mirrors`."""
        return self.prior.mirrors

    @property
    def movable(self) -> bool:
        """As `InputPrior.movable`."""
        return self.prior.movable

    def batch(self, number: int, count: int) -> Tensor:
        """So many inputs [count, *shape], fresh for every number.

        Args:
            number: of the batch, from 0; inputs that are held out have numbers below 0.
            count: of inputs.
        """
        purpose = "inputs" if number >= 0 else "inputs held out"
        rng = seeds.numpy_rng(self.seed, purpose, round=abs(number))
        prior = self.prior if number >= 0 else self.prior.held_out
        return self.scaled(prior.draw(count, rng))

    def scaled(self, x: Tensor) -> Tensor:
        """Draws as networks see them."""
        return (x - self._along(self.mean, x)) / self._along(self.std, x)

    def augmented(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """As `InputPrior.augmented`, of scaled inputs."""
        raw = x * self._along(self.std, x) + self._along(self.mean, x)
        return self.scaled(self.prior.augmented(raw, rng))

    def _along(self, values: Tensor, x: Tensor) -> Tensor:
        """Values on the device of inputs; by channel where inputs have several axes."""
        values = values.to(x.device)
        axes = len(self.shape)
        return values.reshape(-1, *[1] * (axes - 1)) if values.ndim == 1 and axes > 1 else values
