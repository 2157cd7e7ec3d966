"""The local training loop, the only one: every method's E-step by gradients runs here."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from fedbayes.tensors import Samples, Tensors

Objective = Callable[[Tensors, Samples], Tensor]
"""Parameters and one batch to the scalar to be minimized; pure but for the random streams."""

Projection = Callable[[Tensors, float], None]
"""What follows every step: changes the parameters in place, given the learning rate."""

OptimizerBuilder = Callable[[list[Tensor]], torch.optim.Optimizer]
"""Makes an optimizer over leaf tensors."""


class LocalTraining(BaseModel):
    """How a client trains: the `[training]` table of a config."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    optimizer: Literal["sgd", "adam", "amsgrad", "adamax"] = Field(
        "sgd", description="client optimizer"
    )
    lr: float = Field(0.1, gt=0, description="learning rate in the first round")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of sgd")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty of the optimizer")
    epochs: int = Field(1, ge=1, description="passes over the client's data in a round")
    steps: int | None = Field(
        None, ge=1, description="optimizer steps in a round, in place of epochs"
    )
    batch_size: int = Field(32, ge=1, description="samples in a step")
    patience: int | None = Field(
        None, ge=1, description="epochs without improvement that end a client's training early"
    )
    min_improvement: float = Field(
        0.0, ge=0, description="fall of the loss that counts as an improvement (patience)"
    )
    validation: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of a client's training samples set aside for patience to watch, one "
        "sample at least; 0: it watches the training loss",
    )
    schedule: Literal["constant", "exponential", "step", "cosine"] = Field(
        "constant", description="learning rate over rounds"
    )
    decay: float = Field(
        0.99, gt=0, le=1, description="factor per round (exponential) or per decay_every (step)"
    )
    decay_every: int = Field(10, ge=1, description="rounds between decays (step)")

    @model_validator(mode="after")
    def _check(self) -> "LocalTraining":
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum is for optimizer = 'sgd', not '{self.optimizer}'")
        if self.patience is not None and self.steps is not None:
            raise ValueError("patience counts epochs; limit them by epochs, not by steps")
        if self.validation and self.patience is None:
            raise ValueError("validation sets samples aside for patience; give patience too")
        return self

    def learning_rate(self, round: int, rounds: int) -> float:
        """The learning rate of round `round` (from 1) of `rounds`."""
        past = round - 1
        match self.schedule:
            case "constant":
                return self.lr
            case "exponential":
                return self.lr * self.decay**past
            case "step":
                return self.lr * self.decay ** (past // self.decay_every)
            case "cosine":
                return self.lr * 0.5 * (1 + math.cos(math.pi * past / max(rounds, 1)))

    def build_optimizer(self, parameters: list[Tensor], lr: float) -> torch.optim.Optimizer:
        """A fresh optimizer of these settings over leaf tensors."""
        decay = self.weight_decay
        match self.optimizer:
            case "sgd":
                return torch.optim.SGD(
                    parameters, lr=lr, momentum=self.momentum, weight_decay=decay
                )
            case "adamax":
                return torch.optim.Adamax(parameters, lr=lr, weight_decay=decay)
            case "adam" | "amsgrad":
                amsgrad = self.optimizer == "amsgrad"
                return torch.optim.Adam(parameters, lr=lr, weight_decay=decay, amsgrad=amsgrad)

    def step_count(self, samples: int) -> int:
        """Optimizer steps in a round for a client with so many samples."""
        return self.steps or self.epochs * math.ceil(samples / self.batch_size)


def batches(
    samples: Samples, batch_size: int, steps: int, stream: torch.Generator
) -> Iterator[Samples]:
    """`steps` batches: epochs over the samples, each in a fresh random order.

    The samples are permuted once an epoch and then cut into views, so a step copies nothing.
    """
    while steps > 0:
        order = torch.randperm(len(samples.y), generator=stream).to(samples.y.device)
        xs, ys = (
            torch.split(samples.x[order], batch_size),
            torch.split(samples.y[order], batch_size),
        )
        for x, y in zip(xs[:steps], ys[:steps], strict=True):
            yield Samples(x, y)
        steps -= len(ys)


def train(
    parameters: Tensors,
    objective: Objective,
    samples: Samples,
    settings: LocalTraining,
    *,
    lr: float,
    stream: torch.Generator,
    fixed: frozenset[str] = frozenset(),
    apart: Mapping[str, OptimizerBuilder] | None = None,
    project: Projection | None = None,
    held_out: Samples | None = None,
    validation: Objective | None = None,
) -> tuple[Tensors, dict[str, float]]:
    """Minimize the objective by stochastic gradients, from `parameters`, on one client.

    Args:
        parameters: where to start; not changed.
        objective: the scalar to be minimized on a batch.
        samples: the client's training data, at least one sample.
        settings: optimizer, epochs, batch size, patience.
        lr: learning rate of this round.
        stream: source of the order of the samples.
        fixed: names that no gradient changes (a network's buffers); the network itself may.
        apart: parameters whose names start so have an optimizer of their own (thresholds of
            gates, say).
        project: is called after every step (a proximal step, say).
        held_out: samples to watch if training ends by patience; None watches the training loss.
        validation: the loss on them; the objective by default.

    Returns:
        The parameters at the end (if samples are held out, those of the epoch that was best on
        them), on the device of the start; the mean loss over the steps, and the number of steps
        that led to the parameters.
    """
    current = {
        name: tensor.detach().clone(memory_format=torch.preserve_format)
        for name, tensor in parameters.items()
    }
    trained = {name: t.requires_grad_() for name, t in current.items() if name not in fixed}
    leaves = list(trained.values())
    optimizers = _optimizers(trained, settings, lr, apart or {})
    steps = settings.step_count(len(samples.y))
    epoch = math.ceil(len(samples.y) / settings.batch_size)
    losses: list[Tensor] = []
    lowest, waited = math.inf, 0
    best: tuple[Tensors, int] | None = None
    for batch in batches(samples, settings.batch_size, steps, stream):
        loss = objective(current, batch)
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
        if project is not None:
            with torch.no_grad():
                project(current, lr)
        losses.append(loss.detach())
        if settings.patience is None or len(losses) % epoch:
            continue
        if held_out is None:
            watched = float(torch.stack(losses[-epoch:]).mean())
        else:
            watched = _mean_loss(validation or objective, current, held_out, settings.batch_size)
        waited += 1
        if watched < lowest - settings.min_improvement:
            lowest, waited = watched, 0
            if held_out is not None:
                best = {name: t.detach().clone() for name, t in current.items()}, len(losses)
        if waited >= settings.patience:
            break
    ended, taken = best or (current, len(losses))
    return {name: tensor.detach() for name, tensor in ended.items()}, {
        "loss": float(torch.stack(losses).mean()),
        "steps": float(taken),
    }


@torch.no_grad()
def _mean_loss(
    objective: Objective, parameters: Tensors, samples: Samples, batch_size: int
) -> float:
    """Mean over samples of a loss, piece by piece."""
    total = 0.0
    for x, y in zip(
        torch.split(samples.x, batch_size), torch.split(samples.y, batch_size), strict=True
    ):
        total += len(y) * float(objective(parameters, Samples(x, y)))
    return total / len(samples.y)


def _optimizers(
    trained: Tensors, settings: LocalTraining, lr: float, apart: Mapping[str, OptimizerBuilder]
) -> list[torch.optim.Optimizer]:
    """An optimizer for each kind of parameters, fresh."""
    kinds: dict[str, list[Tensor]] = {}
    for name, leaf in trained.items():
        kinds.setdefault(next((p for p in apart if name.startswith(p)), ""), []).append(leaf)
    return [
        apart[kind](leaves) if kind else settings.build_optimizer(leaves, lr)
        for kind, leaves in kinds.items()
    ]
