"""How good predictions are."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fedbayes.tensors import Samples

Predictor = Callable[[Tensor], Tensor]
"""Inputs [n, ...] to log-probabilities (or logits: they are normalized) [n, classes]."""


@dataclass(frozen=True)
class Predictions:
    """What a predictor said about some samples."""

    labels: Tensor
    """The most probable class of each sample, int64 [n]."""
    correct: int
    """How many of them are right."""
    nll: float
    """Sum over samples of the negative log-likelihood of the true class, in nats."""

    @property
    def count(self) -> int:
        """Number of samples."""
        return len(self.labels)


@torch.no_grad()
def evaluate(predict: Predictor, samples: Samples, batch_size: int = 1000) -> Predictions:
    """Predict the samples batch by batch and compare with their labels.

    A non-finite prediction is a wrong one: its likelihood is 0 and its negative logarithm inf.
    """
    if not len(samples.y):
        return Predictions(torch.empty(0, dtype=torch.int64), 0, 0.0)
    labels, correct, nll = [], 0, 0.0
    for x, y in zip(
        torch.split(samples.x, batch_size), torch.split(samples.y, batch_size), strict=True
    ):
        log_probabilities = functional.log_softmax(predict(x).float(), dim=-1)
        guess = log_probabilities.argmax(dim=-1)
        finite = torch.isfinite(log_probabilities).all(dim=-1)
        correct += int(((guess == y) & finite).sum())
        true = log_probabilities.gather(1, y[:, None])[:, 0]
        nll -= float(torch.where(finite, true, -torch.inf).sum(dtype=torch.float64))
        labels.append(guess.cpu())
    return Predictions(torch.cat(labels), correct, nll)
