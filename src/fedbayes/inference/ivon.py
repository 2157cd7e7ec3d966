"""IVON, the improved variational online Newton method, as an optimizer of the training loop."""

from collections.abc import Callable, Sequence
from typing import overload

import torch
from torch import Tensor

UNUSED = dict.fromkeys(
    ("optimizer", "momentum", "weight_decay"),
    "uses the optimizer IVON with the learning rate training.lr",
)
"""Settings of `training` that a method with this optimizer does not use, each with the reason."""


class Ivon(torch.optim.Optimizer):
    """Natural-gradient steps on Gaussians N(m, 1/Λ) with diagonal precision (Shen et al. 2024).

    It minimizes an objective F of means m and log-precisions log Λ, whose gradients come from
    weights θ = m + Λ^(−1/2) ε. Of E[ℓ(θ)] the gradient by log Λ is −½ E[∇ℓ(θ) ε √Λ]/Λ. So
    −2 ∂F/∂log Λ is (ŝ − Λ)/Λ, where ŝ is the paper's reparametrization estimate of the Hessian plus
    the precision that the terms of a prior in F ask for. With it

        Λ ← Λ (1 + z + z²/2),  z = ρ (ŝ − Λ)/Λ;    g ← β g + (1 − β) ∂F/∂m;    m ← m − lr ĝ/Λ,

    ĝ = g/(1 − β^t): their Algorithm 1, line 6, in precisions. The quadratic term keeps Λ positive,
    whatever ŝ is (Lin et al. 2020). Momentum is of all of the gradient, where the paper has it
    without the prior's.

    Its implementation `ivon-opt` (version 0.1.3) is under the GPL, which this package is not, and
    draws weights itself, from PyTorch's global generator and around a prior with mean 0.
    """

    def __init__(
        self,
        means: Sequence[Tensor],
        log_precisions: Sequence[Tensor],
        lr: float,
        *,
        scale: float = 1.0,
        momentum: float = 0.9,
        rate: float = 1e-3,
    ) -> None:
        """Step on pairs of means and log-precisions.

        Args:
            means: leaf tensors m.
            log_precisions: leaf tensors log Λ of the same shapes, in the same order.
            lr: of the means; 1 is a Newton step.
            scale: what gradients are multiplied by to be those of F, such as the number of samples
                where a loss is their mean.
            momentum: β.
            rate: ρ, the share of Λ that a step renews; 0 leaves precisions as they are.
        """
        super().__init__(
            [{"params": [*pair]} for pair in zip(means, log_precisions, strict=True)],
            {"lr": lr, "scale": scale, "momentum": momentum, "rate": rate},
        )

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every pair that has gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            mean, log_precision = group["params"]
            if mean.grad is None or log_precision.grad is None:
                continue
            state = self.state[mean]
            if not state:
                state["step"], state["average"] = 0, torch.zeros_like(mean)
            state["step"] += 1
            z = -2 * group["rate"] * group["scale"] * log_precision.grad
            log_precision.add_(torch.log1p(z + 0.5 * z.square()))
            average, momentum = state["average"], group["momentum"]
            average.lerp_(group["scale"] * mean.grad, 1 - momentum)
            correction = 1 - momentum ** state["step"]
            mean.sub_(group["lr"] / correction * average * (-log_precision).exp())
        return loss
