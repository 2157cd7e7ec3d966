"""The temperature at which a network is as sure as its teacher."""

import math

import torch
from torch import Tensor, nn

from fedbayes.errors import ModelError
from fedbayes.likelihoods import Classes

LIMIT = 100.0
"""Temperatures are between 1 / LIMIT and LIMIT."""


class TemperatureScaled(nn.Module):
    """A network whose logits are divided by a temperature, so that it is as sure as its teacher.

    Args:
        network: of inputs to logits.
        temperature: what they are divided by.
    """

    def __init__(self, network: nn.Module, temperature: float) -> None:
        super().__init__()
        self.network, self.temperature = network, temperature

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, K] of inputs [n, ...]."""
        logits: Tensor = self.network(x)
        return logits / self.temperature


def temperature(outputs: Tensor, teacher_outputs: Tensor, likelihood: Classes) -> float:
    """The T of the least cross-entropy −E Σ_k p_k log softmax(f / T)_k, p the teacher's prediction.

    The cross-entropy is convex in 1 / T, and its minimum is found by bisection of its slope.

    Args:
        outputs: of the network at inputs that it was not trained on, [n, K].
        teacher_outputs: at the same inputs, [n, K].
        likelihood: what outputs mean; of classes.

    Raises:
        ModelError: outputs differ in number, or are not finite.
    """
    if outputs.shape != teacher_outputs.shape or not len(outputs):
        raise ModelError(
            f"outputs have shape {tuple(outputs.shape)} and the teacher's "
            f"{tuple(teacher_outputs.shape)}: the same, of one input at least, are wanted"
        )
    if not (torch.isfinite(outputs).all() and torch.isfinite(teacher_outputs).all()):
        raise ModelError(
            "outputs are not all finite, which no temperature can fix. Check the models for "
            "infinite weights"
        )
    f = outputs.double()
    scores = likelihood.normalized(f)
    p = likelihood.normalized(teacher_outputs.double()).exp()
    low, high = -math.log(LIMIT), math.log(LIMIT)
    for _ in range(60):
        middle = (low + high) / 2
        q = likelihood.normalized(f * math.exp(middle)).exp()
        if float(((q - p) * scores).sum()) < 0:  # the slope by 1 / T
            low = middle
        else:
            high = middle
    return math.exp(-(low + high) / 2)
