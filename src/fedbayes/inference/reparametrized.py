"""Weights drawn from mean-field Gaussians, and a divergence of these, whose gradients are known.

In small networks this arithmetic takes longer than the network: most of that are the calls, hence
one for all weights, and the time in which memory brings tensors. Autograd would bring each of them
once more.
"""

from collections.abc import Callable
from inspect import signature
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedbayes.core.tensors import Tensors
from fedbayes.inference.gaussian import Terms


def reparametrized(
    like: Tensors,
    mean: Tensor,
    log_precision: Tensor,
    noise: Tensor,
    terms: Terms,
    *others: Tensor,
    rest: Tensor | None = None,
) -> tuple[list[Tensors], Tensor]:
    """Draw weights μ + Λ^(−1/2) ε, and measure a divergence of N(μ, 1/Λ).

    Gradients are those of means and log-precisions: nothing goes through noise, others and rest.
    They can be taken once.

    Args:
        like: names and shapes of the weights, of which the others have the entries concatenated.
        mean: μ, [entries].
        log_precision: log λ, [entries].
        noise: ε, standard normal, [samples, entries].
        terms: of the divergence.
        others: what `terms` are given next to means and variances, [entries] or a scalar each.
        rest: Λ = λ + rest, [entries]. None: Λ = λ.

    Returns:
        The weights of each sample, and the divergence, a scalar.

    Examples:
        >>> import torch
        >>> from fedbayes.inference.gaussian import kl_terms
        >>> from fedbayes.inference.reparametrized import reparametrized
        >>> zero, one = torch.zeros(2), torch.ones(2)
        >>> noise = torch.tensor([[1.0, -1.0]])
        >>> like = {"w": zero}
        >>> reparametrized(like, one, zero, noise, kl_terms, one, zero)  # N(1, 1) next to N(0, 1)
        ([{'w': tensor([2., 0.])}], tensor(1.))
    """
    with torch.no_grad():
        own = log_precision.exp()
        variance = (own if rest is None else rest + own).reciprocal_()
        share = None if rest is None else own.mul_(variance)
        std, (*first, last) = variance.sqrt(), noise.unbind()
        steps = [*(each * std for each in first), std.mul_(last)]
        weights = [mean + step for step in steps]
        value, slope, spread = terms(mean, variance, *others)
    shapes = tuple(tensor.shape for tensor in like.values())
    known = share, slope, spread, *steps
    total, *drawn = _closed(shapes, value, mean, log_precision, *weights, *known)
    parts = range(0, len(drawn), len(like))
    return [dict(zip(like, drawn[k : k + len(like)], strict=True)) for k in parts], total


class _Closed(torch.autograd.Function):
    """A divergence and weights whose gradients in means and log-precisions are known.

    Given are λ/Λ, the divergence's gradients in means and in log standard deviations, and the steps
    from means to weights. log λ moves log standard deviations by −λ/(2 Λ). The backward pass writes
    over them.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        shapes, value, _, _, *others = inputs
        weights, sizes = others[: len(others) // 2 - 1], [*map(prod, shapes)]
        pieces = (zip(shapes, entries.split(sizes), strict=True) for entries in weights)
        return value.clone(), *(part.view(shape) for each in pieces for shape, part in each)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.inputs, ctx.samples = len(inputs), len(inputs) // 2 - 3
        ctx.save_for_backward(*inputs[4 + ctx.samples :])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        share, slope, spread, *steps = ctx.saved_tensors
        mean, log = slope.mul_(outer), spread.mul_(-0.5 * outer)
        parts = [each.reshape(-1) for each in gradients]
        for first, step in zip(range(0, len(parts), len(parts) // len(steps)), steps, strict=True):
            gradient = torch.cat(parts[first : first + len(parts) // len(steps)])
            mean.add_(gradient)
            log.sub_(step.mul_(gradient), alpha=0.5)
        if share is not None:
            log.mul_(share)
        return None, None, mean, log, *[None] * (ctx.inputs - 4)


# PyTorch would find it anew in every call, which takes longer than some of the arithmetic.
_Closed.forward.__signature__ = signature(_Closed.forward)  # type: ignore[attr-defined]
_closed: Callable[..., tuple[Tensor, ...]] = _Closed.apply
