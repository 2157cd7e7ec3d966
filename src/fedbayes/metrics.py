"""How good predictions are."""

import math
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
    confidence: Tensor
    """Probability of the most probable class of each sample, float32 [n]."""

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
        return Predictions(torch.empty(0, dtype=torch.int64), 0, 0.0, torch.empty(0))
    labels, confidence, correct, nll = [], [], 0, 0.0
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
        certain = log_probabilities.amax(dim=-1).exp()
        confidence.append(torch.where(finite, certain, 0.0).cpu())
    return Predictions(torch.cat(labels), correct, nll, torch.cat(confidence))


@dataclass(frozen=True)
class Calibration:
    """How often predictions of some confidence are right, in bins of equal width."""

    confidence: Tensor
    """Mean confidence of each bin, [bins]; 0 where it is empty."""
    accuracy: Tensor
    """Share of right predictions in each bin, [bins]; 0 where it is empty."""
    count: Tensor
    """Samples in each bin, int64 [bins]."""

    @property
    def error(self) -> float:
        """Expected calibration error: mean over samples of |accuracy − confidence| of the bin."""
        gaps = (self.accuracy - self.confidence).abs() * self.count
        return float(gaps.sum() / self.count.sum().clamp_min(1))


def calibrate(confidence: Tensor, right: Tensor, bins: int = 15) -> Calibration:
    """Sort predictions by confidence into bins (Guo et al. 2017, Eq. 3).

    Args:
        confidence: probability of the predicted class, [n].
        right: whether it is the true one, bool [n].
        bins: number of bins of equal width.
    """
    place = (confidence.double() * bins).long().clamp(0, bins - 1)
    count = torch.bincount(place, minlength=bins)
    share = 1 / count.clamp_min(1).double()
    return Calibration(
        torch.bincount(place, confidence.double(), minlength=bins) * share,
        torch.bincount(place, right.double(), minlength=bins) * share,
        count,
    )


@dataclass(frozen=True)
class Coverage:
    """How often targets lie in their central predictive intervals."""

    levels: tuple[float, ...]
    """Probabilities of the intervals, rising."""
    inside: tuple[float, ...]
    """Share of the targets inside, of each level."""
    width: tuple[tuple[float, ...], ...]
    """Median width of the intervals of each level and target column, in the column's unit."""
    count: int
    """Number of targets, those of all columns."""

    @property
    def error(self) -> float:
        """Mean over levels of |share inside − level|."""
        gaps = [abs(a - b) for a, b in zip(self.inside, self.levels, strict=True)]
        return sum(gaps) / len(gaps)


@dataclass(frozen=True)
class Uncertainty:
    """What a posterior says of its predictions, in nats per sample, [n] each."""

    entropy: Tensor
    """Of the mean prediction: all that is unknown."""
    information: Tensor
    """Mutual information of label and weights: the part that more data would remove."""


@torch.no_grad()
def uncertainty(draws: Tensor) -> Uncertainty:
    """Entropy of the mean, and that less the mean entropy, of log-probabilities [draws, n, k]."""
    mean = torch.logsumexp(draws, dim=0) - math.log(len(draws))
    entropy = -(mean.exp() * mean).nan_to_num().sum(dim=-1)
    each = -(draws.exp() * draws).nan_to_num().sum(dim=-1)
    return Uncertainty(entropy, (entropy - each.mean(dim=0)).clamp_min(0.0))
