"""Control variates: what a client's gradients lack of the federation's (SCAFFOLD)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedbayes.core.tensors import Samples, Tensors
from fedbayes.inference.problem import Loss, Problem, Solved, Tree


def zeros(weights: Tensors) -> Tensors:
    """Control variates before the first round."""
    return {name: torch.zeros_like(w) for name, w in weights.items()}


def corrected(objective: Loss) -> Loss:
    """The loss plus ⟨given.correction, φ⟩, so that every gradient has the correction added."""

    def loss(parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> Tensor:
        linear = sum((c * parameters[name]).sum() for name, c in given["correction"].items())
        total: Tensor = objective(parameters, batch, given, noise) + linear
        return total

    return loss


def along_path(problem: Problem, solved: Solved, *, lr: float) -> Tensors:
    """The mean gradient of the client's own loss on the way, by where plain SGD has led.

    With the given `correction` = c − c_s added to each gradient, φ = w − lr Σ (g + c − c_s),
    so the mean g is c_s − c + (w − φ)/(steps · lr): option II of SCAFFOLD.
    """
    start, end = problem.start, solved.parameters
    return {
        name: (start[name] - end[name]) / (solved.steps * lr) - given
        for name, given in problem.given["correction"].items()
    }


def less(control: Tensors, missed: Tensors) -> Tensors:
    """A client's variate without what of its change did not arrive."""
    return {n: c - missed[n].to(c.device) if n in missed else c for n, c in control.items()}


OCTAVE = 4
"""Edges of norms in a doubling: a median is known up to a factor of 2^(1/4)."""


def _edges() -> Tensor:
    """Norms from 2^−20 to 2^20, and infinity, float64 [edges]."""
    edges = torch.exp2(torch.arange(-20 * OCTAVE, 20 * OCTAVE + 1, dtype=torch.float64) / OCTAVE)
    return torch.cat([edges, torch.tensor([torch.inf], dtype=torch.float64)])


def no_norms() -> Tensor:
    """The distribution of the norms of nobody, float32 [edges]."""
    return torch.zeros(len(_edges()))


def distribution_of(norm: float) -> Tensor:
    """Whether a norm is at most each edge, 0 or 1, float32 [edges].

    The mean over clients is the distribution function of their norms. Distribution functions add,
    as reports must, and of robust middles of them a median can be read too.
    """
    return (norm <= _edges()).float()


def usual(distribution: Tensor) -> float:
    """The median of norms (the lower one of two) by a multiple of their distribution function.

    Returns:
        The edge above it; infinity if it is larger than all, or nobody's norm is known.
    """
    reached = distribution.double() >= 0.5 * float(distribution[-1]) - 1e-6
    if not distribution[-1] > 0:
        return float("inf")
    return float(_edges()[int(reached.to(torch.int64).argmax())])


NORMS = "norms/variates"
"""Name of the distribution of the variates' norms in messages."""


def bounded(own: Tensors, ratio: float, norms: Tensor) -> tuple[Tensors, Tensor, dict[str, float]]:
    """A client's variate, no longer than a multiple of the median norm of the last round's.

    Args:
        own: the variate c_s.
        ratio: the multiple.
        norms: distribution function of the norms of the last round, [edges].

    Returns:
        The variate, the distribution of its norm before it was shortened (float32 [edges], to be
        reported), and metrics.
    """
    length = float(torch.stack([c.double().norm() for c in own.values()]).norm())
    most = ratio * usual(norms.cpu())
    if length > most:
        own = {name: c * (most / length) for name, c in own.items()}
    info = {"variate_norm": length, "variates_shortened": float(length > most)}
    return own, distribution_of(length), info


def mean_gradient(
    weights: Tensors, objective: Loss, samples: Samples, sizes: Sequence[int], names: list[str]
) -> Tensors:
    """The gradient of a mean loss over all samples at fixed weights: option I of SCAFFOLD.

    Running statistics, which a pass through the network moves, are moved in a copy.
    """
    leaves = {
        n: t.detach().requires_grad_() if n in names else t.clone() for n, t in weights.items()
    }
    sums = {name: torch.zeros_like(leaves[name]) for name in names}
    pieces = (torch.split(each, list(sizes)) for each in samples)
    for x, y in zip(*pieces, strict=True):
        loss = objective(leaves, Samples(x, y), {}, {}) * (len(y) / len(samples.y))
        gradients = torch.autograd.grad(loss, [leaves[name] for name in names])
        for name, gradient in zip(names, gradients, strict=True):
            sums[name] += gradient
    return sums
