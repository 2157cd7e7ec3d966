"""Weights drawn from mean-field Gaussians, and a divergence of these, whose gradients are known.

In small networks this arithmetic takes longer than the network, and most of that is the time in
which memory brings tensors. Autograd would bring each of them once more.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedbayes.core.tensors import Tensors, added
from fedbayes.inference.gaussian import Terms


def reparametrized(
    mean: Tensors,
    log_precision: Tensors,
    noise: Tensors,
    terms: Terms,
    *others: Tensors,
    rest: Tensors | None = None,
) -> tuple[list[Tensors], Tensor]:
    """Draw weights μ + Λ^(−1/2) ε, and measure a divergence of N(μ, 1/Λ).

    Gradients are those of means and log-precisions: nothing goes through noise, others and rest.
    They can be taken once.

    Args:
        mean: μ, by name.
        log_precision: log λ, of the same names and shapes.
        noise: ε, standard normal, [samples, ...] by name.
        terms: of the divergence.
        others: what `terms` are given next to means and variances, by name.
        rest: Λ = λ + rest. None: Λ = λ.

    Returns:
        The weights of each sample, and the divergence, a scalar.

    Examples:
        >>> import torch
        >>> from fedbayes.inference.gaussian import kl_terms
        >>> from fedbayes.inference.reparametrized import reparametrized
        >>> zero, one = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
        >>> noise = {"w": torch.tensor([[1.0, -1.0]])}
        >>> reparametrized(one, zero, noise, kl_terms, one, zero)  # N(1, 1) next to N(0, 1)
        ([{'w': tensor([2., 0.])}], tensor(1.))
    """
    values, weights, known = [], [], []
    with torch.no_grad():
        for name, own in mean.items():
            share = log_precision[name].exp()
            if rest is None:
                variance = share.reciprocal()
            else:
                variance = rest[name].add(share).reciprocal_()
                share.mul_(variance)
            std, (*first, last) = variance.sqrt(), noise[name].unbind()
            steps = [*(each * std for each in first), std.mul_(last)]
            weights += [own + step for step in steps]
            value, slope, spread = terms(own, variance, *(tree[name] for tree in others))
            if rest is not None:
                for each in (spread, *steps):
                    each.mul_(share)
            values.append(value)
            known += [slope, spread, *steps]
    logs = [log_precision[name] for name in mean]
    total, *drawn = _closed(len(mean), added(values), *mean.values(), *logs, *weights, *known)
    samples = len(drawn) // len(mean)
    return [dict(zip(mean, drawn[k::samples], strict=True)) for k in range(samples)], total


class _Closed(torch.autograd.Function):
    """A divergence and weights whose gradients in means and log-precisions are known.

    Of each tensor these are the divergence's gradients in means and in log standard deviations, and
    the steps from means to weights. log λ moves log standard deviations by −λ/(2 Λ), and all but
    the first come times λ/Λ. The backward pass writes over them.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:  # named inputs would be bound in every call
        names, value, *tensors = inputs
        count = (len(tensors) - 4 * names) // 2
        drawn = tensors[2 * names : 2 * names + count]
        return value.clone(), *drawn

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.names, ctx.inputs = inputs[0], len(inputs)
        ctx.save_for_backward(*inputs[1 + 2 * ctx.names + len(output) :])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        known, half = iter(ctx.saved_tensors), -0.5 * outer
        samples = len(gradients) // ctx.names
        means, logs = [], []
        for first in range(0, len(gradients), samples):
            mean, log = next(known).mul_(outer), next(known).mul_(half)
            for gradient in gradients[first : first + samples]:
                mean.add_(gradient)
                log.sub_(next(known).mul_(gradient), alpha=0.5)
            means.append(mean)
            logs.append(log)
        return None, None, *means, *logs, *[None] * (ctx.inputs - 2 - 2 * ctx.names)


_closed: Callable[..., tuple[Tensor, ...]] = _Closed.apply
