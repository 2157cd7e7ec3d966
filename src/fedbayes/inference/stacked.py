"""Problems of several clients solved at once, where a step costs more calls than arithmetic.

The same steps as `solve`, of stacked tensors: one call of the loss, one backward pass and one step
of the optimizer for all. Sums are added up in another order, so numbers agree up to rounding.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, cycle, islice, pairwise, zip_longest
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbayes.core.tensors import Samples, Tensors
from fedbayes.inference.problem import Loss, Problem, Solved, Tree, each, stack
from fedbayes.inference.settings import LocalTraining
from fedbayes.inference.solve import orders

Rows = np.ndarray[Any, np.dtype[np.int64]]
"""Rows of the samples of all clients."""
ELEMENTWISE = ("sgd", "adam", "amsgrad", "adamax")
"""Optimizers that treat every entry of a tensor alike, so that a stack is as good as its parts."""


def stackable(problems: Sequence[Problem], counts: Sequence[int], settings: LocalTraining) -> bool:
    """Whether to solve problems together: they are alike, an optimizer of ours steps them, and
    batches of one size meet often enough to save time.

    Args:
        problems: of the clients.
        counts: samples of each.
        settings: optimizer, epochs, batch size.
    """
    if (
        settings.optimizer not in ELEMENTWISE
        or settings.patience is not None
        or any(each.project or each.param_groups for each in problems)
        or len({_form([each.start, each.given]) for each in problems}) > 1
    ):
        return False
    sizes_of = {count: _sizes(count, settings) for count in set(counts)}
    sizes = [sizes_of[count] for count in counts]
    groups = [Counter(filter(None, met)).values() for met in zip_longest(*sizes)]
    cost = sum(_MAPPED if clients >= _FEW else 1.5 * clients for g in groups for clients in g)
    return cost < sum(map(len, sizes))


def _sizes(count: int, settings: LocalTraining) -> list[int]:
    """The size of the batch of every step."""
    return list(islice(cycle(settings.batch_sizes(count)), settings.step_count(count)))


_FEW = 3
"""Clients with batches of one size from which on their losses are mapped, at least."""
_MAPPED = 3.0
"""Time of a mapped step relative to one of a client alone."""


def solve_stacked(
    problems: Sequence[Problem],
    loss: Loss,
    samples: Sequence[Samples],
    settings: LocalTraining,
    *,
    lr: float,
    rngs: Sequence[Callable[[str], torch.Generator]],
) -> list[Solved]:
    """Minimize the loss for several clients from the problems' starts, as `solve` does for one.

    A loss that cannot be mapped over clients raises PyTorch's own error, as with a layer that draws
    random numbers or a branch on values.

    Args:
        problems: of the clients, such that `stackable` holds; all that is started from is trained.
        loss: the scalar to be minimized on a batch of one client.
        samples: training data of each, at least one sample.
        settings: optimizer, epochs, batch size.
        lr: learning rate of this round.
        rngs: of each client, the generator for a purpose.
    """
    counts = [len(each.y) for each in samples]
    steps = [settings.step_count(count) for count in counts]
    with torch.no_grad():
        stacked = {
            name: torch.stack([each.start[name] for each in problems]).requires_grad_()
            for name in problems[0].start
        }
    leaves = list(stacked.values())
    optimizer = settings.build_optimizer(leaves, lr)
    given = stack([each.given for each in problems])
    every = Samples(*map(torch.cat, zip(*samples, strict=True)))

    def at(rows: Rows) -> Samples:
        chosen = torch.from_numpy(rows)
        return Samples(every.x[chosen], every.y[chosen])

    firsts = accumulate(counts, initial=0)
    sizes_of = {count: settings.batch_sizes(count) for count in set(counts)}
    drawn = [
        _batches(problem, range(first, first + count), sizes_of[count], at, rng)
        for problem, first, count, rng in zip(problems, firsts, counts, rngs, strict=False)
    ]
    losses = torch.zeros(max(steps), len(problems), device=leaves[0].device)
    ended: dict[int, Tensors] = {}
    mapped = torch.func.vmap(loss)
    for step in range(max(steps)):
        active = [client for client, count in enumerate(steps) if count > step]
        found = {client: next(drawn[client]) for client in active}
        sizes: dict[int, list[int]] = {}
        for client, (rows, _) in found.items():
            sizes.setdefault(len(rows), []).append(client)
        total = torch.zeros(())
        for group in sizes.values():
            if len(group) < _FEW:
                alone = [{name: t[c] for name, t in stacked.items()} for c in group]
                values = torch.stack(
                    [
                        loss(own, at(found[c][0]), problems[c].given, found[c][1])
                        for own, c in zip(alone, group, strict=True)
                    ]
                )
            else:
                rows = np.concatenate([found[c][0] for c in group]).reshape(len(group), -1)
                noise = stack([found[c][1] for c in group])
                own, fixed = stacked, given
                if len(group) < len(problems):
                    own, fixed = each(itemgetter(group), (stacked, given))
                values = mapped(own, at(rows), fixed, noise)
            total = total + values.sum()
            losses[step, group] = values.detach()
        gradients = torch.autograd.grad(total, leaves, allow_unused=True)
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        optimizer.step()
        done = [client for client in active if steps[client] == step + 1]
        if done:
            # The optimizer moves clients that have ended too, by momentum or decay.
            last = step + 1 == max(steps)
            now = {name: t.detach() if last else t.detach().clone() for name, t in stacked.items()}
            ends = {name: tensor.unbind() for name, tensor in now.items()}
            ended |= {client: {name: row[client] for name, row in ends.items()} for client in done}
    means = (losses.cpu().sum(0) / torch.tensor(steps)).tolist()
    return [
        Solved(
            ended[client],
            steps=count,
            loss=mean,
            count=counts[client],
        )
        for client, (count, mean) in enumerate(zip(steps, means, strict=True))
    ]


def _batches(
    problem: Problem,
    own: range,
    sizes: Sequence[int],
    at: Callable[[Rows], Samples],
    rng: Callable[[str], torch.Generator],
) -> Iterator[tuple[Rows, Tree]]:
    """The rows of a client's batches, and their noise, by the generators of `solve`."""
    noise = problem.noise
    generator = rng(noise.purpose) if noise else None
    cuts = list(pairwise(accumulate(sizes, initial=0)))
    for order in orders(len(own), sizes, rng("batches")):
        rows = order.numpy() + own.start  # NumPy cuts them in a tenth of the time
        for first, last in cuts:
            batch = rows[first:last]
            yield batch, noise.draw(generator, at(batch)) if noise and generator else {}


def _form(tree: Any) -> Any:
    """What trees must have in common to be stacked: names, shapes and types of tensors."""
    if isinstance(tree, Tensor):
        return tree.shape, tree.dtype
    if isinstance(tree, Mapping):
        return tuple((name, _form(each)) for name, each in tree.items())
    # A number or a text cannot be stacked, so its form is that of no other tree.
    return tuple(map(_form, tree)) if isinstance(tree, list | tuple) else object()
