"""Control variates: what a client's gradients lack of the federation's (SCAFFOLD)."""

import torch
from torch import Tensor

from fedbayes.errors import ConfigError
from fedbayes.inference.local import LocalTraining, Objective
from fedbayes.tensors import Samples, Tensors


def corrected(objective: Objective, correction: Tensors) -> Objective:
    """The objective plus ⟨correction, φ⟩, so that every gradient has the correction added."""

    def loss(weights: Tensors, batch: Samples) -> Tensor:
        linear = sum((c * weights[name]).sum() for name, c in correction.items())
        return objective(weights, batch) + linear

    return loss


def along_path(
    start: Tensors, end: Tensors, correction: Tensors, *, steps: int, lr: float
) -> Tensors:
    """The mean gradient of the client's own loss on the way, by where plain SGD has led.

    With `correction` = c − c_s added to each of `steps` gradients, φ = w − lr Σ (g + c − c_s),
    so the mean g is c_s − c + (w − φ)/(steps · lr): option II of SCAFFOLD.
    """
    return {
        name: (start[name] - end[name]) / (steps * lr) - given for name, given in correction.items()
    }


def require_plain_sgd(training: LocalTraining) -> None:
    """Refuse optimizers whose path is not a sum of gradients.

    Raises:
        ConfigError: the optimizer is not SGD without momentum.
    """
    if training.optimizer != "sgd" or training.momentum:
        raise ConfigError(
            "control variates along the path need training.optimizer = 'sgd' with momentum 0; "
            "with other optimizers use scaffold with method.control = 'gradient'"
        )


def mean_gradient(
    weights: Tensors, objective: Objective, samples: Samples, batch_size: int, names: list[str]
) -> Tensors:
    """The gradient of a mean loss over all samples at fixed weights: option I of SCAFFOLD."""
    leaves = {n: t.detach().requires_grad_() if n in names else t for n, t in weights.items()}
    sums = {name: torch.zeros_like(leaves[name]) for name in names}
    pieces = torch.split(samples.x, batch_size), torch.split(samples.y, batch_size)
    for x, y in zip(*pieces, strict=True):
        loss = objective(leaves, Samples(x, y)) * (len(y) / len(samples.y))
        found = torch.autograd.grad(loss, [leaves[name] for name in names])
        for name, gradient in zip(names, found, strict=True):
            sums[name] += gradient
    return sums
