"""The temperature at which a network is as sure as its teacher."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedbayes.core.tensors import Samples
from fedbayes.errors import ModelError
from fedbayes.likelihoods import Classes, Likelihood
from fedbayes.likelihoods.temperature import LIMIT, TemperatureSums, sums_of


class TemperatureScaled(nn.Module):
    """A network whose logits are divided by a temperature, so that it is as sure as its teacher."""

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
            f"{tuple(teacher_outputs.shape)}. They must be the same, with at least one input"
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


def own_temperature(
    network: Callable[[Tensor], Tensor],
    likelihood: Likelihood,
    samples: Samples,
    counts: npt.NDArray[np.float64] | None = None,
) -> float | None:
    """The temperature of a network's predictions of samples that it was not trained on.

    Args:
        network: of inputs [n, ...] to outputs [n, K].
        likelihood: of the outputs, one that has a temperature.
        samples: of any clients.
        counts: training samples of the network of each class, [K]: samples of a class then weigh
            as much as it does among these. Without, all samples weigh alike.

    Returns:
        T under the prior of `TemperatureSums.with_prior`; None where no sample is of its classes.
    """

    def summed(chosen: Tensor) -> TemperatureSums:
        return sums_of(
            likelihood, lambda x: network(x)[None], Samples(samples.x[chosen], samples.y[chosen])
        )

    if counts is None:
        sums = summed(torch.ones(len(samples.y), dtype=torch.bool))
    else:
        there = torch.bincount(samples.y, minlength=len(counts)).numpy()
        own = np.where(there > 0, counts, 0)
        weights = own / max(own.sum(), 1) * there[own > 0].sum() / np.maximum(there, 1)
        sums = TemperatureSums.nothing()
        for k in np.flatnonzero(own):
            sums += summed(samples.y == int(k)).times(weights[k])
    return sums.with_prior().temperature() if sums.rows else None
