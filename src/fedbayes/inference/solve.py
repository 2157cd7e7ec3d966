"""The local training loop, the only one: every method's E-step by gradients is solved here."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat

import torch
from torch import Tensor

from fedbayes.core.devices import nondeterministic, out_of_memory, placed
from fedbayes.core.tensors import Samples, Tensors
from fedbayes.errors import ConfigError, NetworkError
from fedbayes.inference.problem import Loss, OptimizerBuilder, Problem, Solved, Stepper, Tree
from fedbayes.inference.settings import LocalTraining


def orders(count: int, sizes: Sequence[int], rng: torch.Generator) -> Iterator[Tensor]:
    """The order of the samples in one epoch after the other, without end.

    Args:
        count: samples of a client.
        sizes: of the batches of an epoch; samples beyond their sum are left out of it.
        rng: what the orders are drawn from.
    """
    used = sum(sizes)
    while True:
        order = torch.randperm(count, generator=rng)
        yield order if used == count else order[:used]


def batches(
    samples: Samples, sizes: Sequence[int], steps: int, rng: torch.Generator
) -> Iterator[Samples]:
    """`steps` batches: epochs over the samples, each in a fresh random order.

    The samples are permuted once an epoch and then cut into views, so a step copies nothing.

    Args:
        samples: of a client.
        sizes: of the batches of an epoch; samples beyond their sum are left out of it.
        steps: how many batches.
        rng: what the orders are drawn from.
    """
    for drawn in orders(len(samples.y), sizes, rng):
        order = placed(drawn, samples.y.device)
        xs, ys = (torch.split(each[order], list(sizes)) for each in samples)
        for x, y in zip(xs[:steps], ys[:steps], strict=True):
            yield Samples(x, y)
        if (steps := steps - len(ys)) <= 0:
            return


def solve(
    problem: Problem,
    loss: Loss,
    samples: Samples,
    settings: LocalTraining,
    *,
    lr: float,
    rng: Callable[[str], torch.Generator],
    buffers: frozenset[str] = frozenset(),
    held_out: Samples | None = None,
    validation: Loss | None = None,
) -> Solved:
    """Minimize the loss by stochastic gradients from the problem's start, on one client.

    No step waits for the device: what the loss was is read once, at the end. Patience is the
    exception, which looks after every epoch.

    Args:
        problem: where to start, what is given, which noise there is; not changed.
        loss: the scalar to be minimized on a batch.
        samples: the client's training data, at least one sample.
        settings: optimizer, epochs, batch size, patience.
        lr: learning rate of this round.
        rng: the generator for a purpose; `batches` has the order of the samples.
        buffers: names that no gradient changes; the network itself may.
        held_out: samples to watch if training ends by patience; None watches the training loss.
        validation: the loss on them; that of the training by default.

    Returns:
        The parameters at the end (if samples are held out, those of the epoch that was best on
        them), on the device of the start; the mean loss over the steps, and the number of steps
        that led to the parameters.
    """
    current = {
        name: tensor.detach().clone(memory_format=torch.preserve_format)
        for name, tensor in problem.start.items()
    }
    trained = {name: t.requires_grad_() for name, t in current.items() if name not in buffers}
    leaves = list(trained.values())
    optimizers = _optimizers(trained, settings, lr, problem.param_groups)
    steps, sizes = settings.step_count(len(samples.y)), settings.batch_sizes(len(samples.y))
    epoch = len(sizes)
    draw = _draws(problem, rng, problem.noise.purpose if problem.noise else "")
    watch = _draws(problem, rng, "validation")
    losses: list[Tensor] = []
    lowest, waited = math.inf, 0
    best: tuple[Tensors, int] | None = None
    for batch in batches(samples, sizes, steps, rng("batches")):
        value = loss(current, batch, problem.given, draw(batch))
        _set_gradients(leaves, _gradients(value, leaves, len(batch.y)))
        for optimizer in optimizers:
            optimizer.step()
        _set_gradients(leaves, repeat(None))  # or there are those of two steps at once
        if problem.project is not None:
            with torch.no_grad():
                problem.project(current, problem.given, lr)
        losses.append(value.detach())
        if settings.patience is None or len(losses) % epoch:
            continue
        if held_out is None:
            watched = float(torch.stack(losses[-epoch:]).mean())
        else:
            watched = _mean_loss(
                lambda piece: (validation or loss)(current, piece, problem.given, watch(piece)),
                held_out,
                settings.batch_size,
            )
        waited += 1
        if watched < lowest - settings.min_improvement:
            lowest, waited = watched, 0
            if held_out is not None:
                best = {name: t.detach().clone() for name, t in current.items()}, len(losses)
        if waited >= settings.patience:
            break
    ended, taken = best or (current, len(losses))
    return Solved(
        {name: tensor.detach() for name, tensor in ended.items()},
        steps=taken,
        loss=float(torch.stack(losses).mean()),
        count=len(samples.y),
    )


def _gradients(value: Tensor, leaves: list[Tensor], count: int) -> tuple[Tensor | None, ...]:
    """Gradients of the loss of a batch; None where it does not depend on a leaf."""
    try:
        return torch.autograd.grad(value, leaves, allow_unused=True)
    except RuntimeError as error:
        if out_of_memory(error) or nondeterministic(error):
            raise
        raise NetworkError(
            f"the loss on a training batch of {count:,} samples has no gradient: "
            f"{str(error).partition(chr(10))[0]}"
        ) from error


def _set_gradients(leaves: list[Tensor], gradients: Iterable[Tensor | None]) -> None:
    """Give each leaf its gradient for a step."""
    for leaf, gradient in zip(leaves, gradients, strict=False):
        leaf.grad = gradient


def _draws(
    problem: Problem, rng: Callable[[str], torch.Generator], purpose: str
) -> Callable[[Samples], Tree]:
    """What draws the noise of one batch after the other from the generator for a purpose."""
    noise = problem.noise
    if noise is None:
        return lambda batch: {}
    generator = rng(purpose)
    return lambda batch: noise.draw(generator, batch)


@torch.no_grad()
def _mean_loss(loss: Callable[[Samples], Tensor], samples: Samples, batch_size: int) -> float:
    """Mean over samples of a loss, piece by piece."""
    total = 0.0
    for batch in samples.batches(batch_size):
        total += len(batch.y) * float(loss(batch))
    return total / len(samples.y)


def _optimizers(
    trained: Tensors, settings: LocalTraining, lr: float, groups: Mapping[str, OptimizerBuilder]
) -> list[Stepper]:
    """An optimizer for each kind of parameters: of the longest prefix that fits a name."""
    kinds: dict[str | None, list[Tensor]] = {}
    for name, leaf in trained.items():
        fitting = [prefix for prefix in groups if name.startswith(prefix)]
        kinds.setdefault(max(fitting, key=len, default=None), []).append(leaf)
    if unused := groups.keys() - kinds.keys():
        raise ConfigError(
            f"param_groups lists {min(unused)!r}, but no parameter begins with it. The parameters "
            f"are {', '.join([*trained][:10])}"
        )
    return [
        settings.build_optimizer(leaves, lr) if kind is None else groups[kind](leaves)
        for kind, leaves in kinds.items()
    ]
