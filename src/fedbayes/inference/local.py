"""The local training loop, the only one: every method's E-step by gradients runs here."""

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from fedbayes.inference.settings import LocalTraining
from fedbayes.tensors import Samples, Tensors

__all__ = ["LocalTraining", "Objective", "OptimizerBuilder", "Projection", "batches", "train"]

Objective = Callable[[Tensors, Samples], Tensor]
"""Parameters and one batch to the scalar to be minimized; pure but for the random streams."""

Projection = Callable[[Tensors, float], None]
"""What follows every step: changes the parameters in place, given the learning rate."""

OptimizerBuilder = Callable[[list[Tensor]], torch.optim.Optimizer]
"""Makes an optimizer over leaf tensors."""


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
