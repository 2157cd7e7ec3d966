"""How far probabilities and intervals can be trusted: calibration, coverage, uncertainty."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Calibration:
    """How often predictions of some confidence are right, in bins of equal width."""

    confidence: Tensor
    """Mean confidence of each bin, [bins]; 0 where it is empty."""
    accuracy: Tensor
    """Share of right predictions in each bin, [bins]; 0 where it is empty."""
    count: Tensor
    """Samples in each bin, int64 [bins]."""
    untold: int = 0
    """Samples of which nothing was predicted; they are in no bin."""

    @property
    def error(self) -> float:
        """Expected calibration error: mean over the samples in bins of |accuracy − confidence| of
        the bin; NaN if there are none.
        """
        gaps = (self.accuracy - self.confidence).abs() * self.count
        return float(gaps.sum() / self.count.sum())


def calibrate(confidence: Tensor, right: Tensor, bins: int = 15) -> Calibration:
    """Sort predictions by confidence into bins ((m − 1)/M, m/M] (Guo et al. 2017, Eq. 3).

    Args:
        confidence: probability of the predicted class, [n]; 0 where nothing was predicted, since
            an output was not a number.
        right: whether it is the true one, bool [n].
        bins: number M of bins of equal width.
    """
    told = confidence > 0
    untold = int((~told).sum())
    confidence, right = confidence[told].double(), right[told]
    edges = torch.arange(1, bins, device=confidence.device, dtype=torch.float64) / bins
    place = torch.bucketize(confidence, edges)
    count = torch.bincount(place, minlength=bins)
    share = 1 / count.clamp_min(1).double()
    return Calibration(
        torch.bincount(place, confidence, minlength=bins) * share,
        torch.bincount(place, right.double(), minlength=bins) * share,
        count,
        untold,
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
