"""IVON, the improved variational online Newton method, as an optimizer of the training loop."""

import torch
from torch import Tensor

UNUSED = dict.fromkeys(
    ("optimizer", "momentum", "weight_decay"),
    "uses the optimizer IVON with the learning rate training.lr",
)
"""Settings of `training` that a method with this optimizer does not use, each with the reason."""


class Ivon:
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
        mean: Tensor,
        log_precision: Tensor,
        lr: float,
        *,
        scale: float = 1.0,
        momentum: float = 0.9,
        rate: float = 1e-3,
    ) -> None:
        """Step on means and log-precisions.

        Args:
            mean: the leaf tensor m.
            log_precision: the leaf tensor log Λ, of the same shape.
            lr: of the means; 1 is a Newton step.
            scale: what gradients are multiplied by to be those of F, such as the number of samples
                where a loss is their mean.
            momentum: β.
            rate: ρ, the share of Λ that a step renews; 0 leaves precisions as they are.
        """
        self.mean, self.log_precision = mean, log_precision
        self.lr, self.scale, self.momentum, self.rate = lr, scale, momentum, rate
        self._taken, self._average = 0, torch.zeros_like(mean)

    @torch.no_grad()
    def step(self) -> None:
        """One update of both, if they have gradients."""
        if self.mean.grad is None or self.log_precision.grad is None:
            return
        self._taken += 1
        z = -2 * self.rate * self.scale * self.log_precision.grad
        self.log_precision.add_(torch.log1p(z + 0.5 * z.square()))
        self._average.lerp_(self.scale * self.mean.grad, 1 - self.momentum)
        correction = 1 - self.momentum**self._taken
        self.mean.sub_(self.lr / correction * self._average * (-self.log_precision).exp())
