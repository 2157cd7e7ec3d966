"""An E-step as it is stated, before anything solves it.

A problem is data: where to start, what is given, which noise a step has. The loss that goes with
it is a pure function of parameters, batch, given and noise, and captures no tensor. So the
problems of a whole cohort can be stacked, and one call of `torch.func.vmap` evaluates them all.
The contract tests do so with every method. The engine `stacked` does so (`stacked.py`); the others
solve clients one by one, which gives the same bits everywhere.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fedbayes.core.brief import Brief
from fedbayes.core.messages import Message
from fedbayes.core.tensors import Samples, Tensors

Tree = dict[str, Any]
"""Tensors by name, in dicts, lists and tuples nested as one likes."""


def each(change: Callable[..., Tensor], *trees: Any) -> Any:
    """What a function makes of the tensors at each place of trees of one form."""
    first = trees[0]
    if isinstance(first, Tensor):
        return change(*trees)
    if isinstance(first, dict):
        return {name: each(change, *(tree[name] for tree in trees)) for name in first}
    if isinstance(first, list | tuple):
        items = [each(change, *parts) for parts in zip(*trees, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    raise TypeError(f"a problem needs tensors in dicts, lists and tuples, got {first!r}")


def stack(trees: Sequence[Any]) -> Any:
    """Trees of one form as one, each tensor with a first axis for the trees.

    Rows are contiguous: some of PyTorch's layers (GroupNorm) cannot be mapped over filters that are
    laid out channels last.
    """
    return each(lambda *tensors: torch.stack(tensors).contiguous(), *trees)


class Loss(Protocol):
    """What a client minimizes: pure, and it can be mapped over stacked arguments.

    Examples:
        >>> import torch
        >>> from fedbayes.contracts import Loss
        >>> from fedbayes.core.tensors import Samples
        >>> def squared(parameters, batch, given, noise):
        ...     return ((batch.x @ parameters["w"] - batch.y) ** 2).mean()
        >>> loss: Loss = squared
        >>> loss({"w": torch.tensor([3.0])}, Samples(torch.ones(2, 1), torch.zeros(2)), {}, {})
        tensor(9.)
    """

    def __call__(self, parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> Tensor:
        """The scalar to be minimized on one batch.

        Args:
            parameters: what is trained, and buffers.
            batch: some samples.
            given: what the problem holds fixed: a prior, control variates.
            noise: the random numbers of this step; empty if the problem has none.
        """


Projection = Callable[[Tensors, Tree, float], None]
"""What follows every step: changes the parameters in place, given the given and the lr."""


class Stepper(Protocol):
    """What changes leaf tensors by their gradients: an optimizer of PyTorch, or one like it."""

    def step(self) -> object:
        """One update of every leaf that has a gradient."""


OptimizerBuilder = Callable[[list[Tensor]], Stepper]
"""Makes an optimizer over leaf tensors."""


@dataclass(frozen=True)
class Noise:
    """Where the random numbers of a step come from.

    Examples:
        >>> import torch
        >>> from fedbayes.inference.problem import Noise
        >>> noise = Noise("weights", lambda rng, batch: {"w": torch.randn(3, generator=rng)})
        >>> noise.draw(torch.Generator().manual_seed(0), None)["w"].shape
        torch.Size([3])
    """

    purpose: str
    """What the generator of random numbers is for, in training; it is part of its seed."""
    draw: Callable[[torch.Generator, Samples], Tree]
    """Draws for one batch."""


@dataclass(frozen=True, repr=False)
class Problem(Brief):
    """One client's E-step in one round.

    Examples:
        >>> import torch
        >>> from fedbayes.inference.problem import Problem
        >>> Problem({"w": torch.zeros(1)}, given={"centre": torch.ones(1)}).noise is None
        True
    """

    start: Tensors
    """Parameters and buffers where training starts; names as the network has them, or with a
    prefix and a slash for parameters of other kinds (`threshold/…`)."""
    given: Tree = field(default_factory=dict)
    """What the loss holds fixed, on the network's device."""
    noise: Noise | None = None
    """Random numbers of every step."""
    message: Message = field(default_factory=dict)
    """The broadcast, where the report has its form."""
    param_groups: Mapping[str, OptimizerBuilder] = field(default_factory=dict)
    """Optimizers of parameters whose names start so, `""` of all; the longest start that fits
    counts. The others have the config's (`training.optimizer`)."""
    project: Projection | None = None
    """What follows every step."""


@dataclass(frozen=True, repr=False)
class Solved(Brief):
    """Where the solution of a problem ended.

    Examples:
        >>> import torch
        >>> from fedbayes.inference.problem import Solved
        >>> Solved({"w": torch.zeros(1)}, steps=5, loss=0.5, count=20).info
        {'loss': 0.5, 'steps': 5.0}
    """

    parameters: Tensors
    """Parameters and buffers, on the network's device."""
    steps: int
    """Optimizer steps that led there."""
    loss: float
    """Mean loss over all steps."""
    count: int
    """Samples that were trained on."""

    @property
    def info(self) -> dict[str, float]:
        """Loss and steps for the metrics of the round."""
        return {"loss": self.loss, "steps": float(self.steps)}
