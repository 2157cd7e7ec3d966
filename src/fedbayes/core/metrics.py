"""How far probabilities and intervals can be trusted: calibration, coverage, uncertainty, and what
a prediction is worth if uncertain ones are left to others.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Calibration:
    """How often predictions of some confidence are right, in bins of equal width.

    Examples:
        >>> import torch
        >>> from fedbayes.core.metrics import Calibration, calibrate
        >>> found = calibrate(torch.tensor([0.9, 0.9]), torch.tensor([True, True]))
        >>> isinstance(found, Calibration), round(found.error, 2)
        (True, 0.1)
    """

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

    Examples:
        >>> import torch
        >>> from fedbayes.core.metrics import calibrate
        >>> found = calibrate(torch.tensor([0.9, 0.9]), torch.tensor([True, False]))
        >>> round(found.error, 2)
        0.4
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


CONFIDENCES = torch.cat(
    [
        torch.arange(0, 299, dtype=torch.float64) / 300,
        1 - torch.logspace(math.log10(1 / 300), -12, 700, dtype=torch.float64),
        torch.ones(1, dtype=torch.float64),
    ]
)
"""Where the bins of confidence end, float64 [bins]: 300 of equal width, the last of them cut finely
towards 1, where confidences crowd. The first bin holds predictions that are none."""


@dataclass(frozen=True)
class Confidences:
    """Predictions counted by their confidence: what clients send of them, and what adds.

    From the sums over clients follow the calibration error and the curve of selective prediction.

    Examples:
        >>> import torch
        >>> from fedbayes.core.metrics import Confidences
        >>> north = Confidences.of(torch.tensor([0.9, 0.6]), torch.tensor([True, False]))
        >>> south = Confidences.of(torch.tensor([0.8]), torch.tensor([True]))
        >>> int((north + south).right.sum())
        2
    """

    rows: Tensor
    """Predictions in each bin of `CONFIDENCES`, int64 [bins]."""
    right: Tensor
    """Right ones among them, int64 [bins]."""
    summed: Tensor
    """Sums of their confidences, float64 [bins]."""

    @classmethod
    def of(cls, confidence: Tensor, right: Tensor) -> "Confidences":
        """Count predictions.

        Args:
            confidence: probability of the predicted class, [n]; 0 where nothing was predicted.
            right: whether it is the true one, bool [n].
        """
        confidence = confidence.cpu().double().clamp(0, 1)
        place, bins = torch.bucketize(confidence, CONFIDENCES), len(CONFIDENCES)
        return cls(
            torch.bincount(place, minlength=bins),
            torch.bincount(place[right.cpu()], minlength=bins),
            torch.bincount(place, confidence, minlength=bins),
        )

    def __add__(self, other: "Confidences") -> "Confidences":
        return Confidences(
            self.rows + other.rows, self.right + other.right, self.summed + other.summed
        )

    def calibration(self, bins: int = 15) -> Calibration:
        """As `calibrate` gives it of the predictions themselves, for a number of bins that divides
        300.
        """
        if 300 % bins:
            raise ValueError("the number of bins must divide 300")
        edges = torch.arange(1, bins, dtype=torch.float64) / bins
        place = torch.bucketize(CONFIDENCES[1:], edges)

        def together(values: Tensor) -> Tensor:
            return torch.bincount(place, values[1:].double(), minlength=bins)

        count = together(self.rows)
        share = 1 / count.clamp_min(1)
        return Calibration(
            together(self.summed) * share,
            together(self.right) * share,
            count.long(),
            int(self.rows[0]),
        )

    @property
    def curve(self) -> tuple[Tensor, Tensor]:
        """Shares of predictions that are kept, the most confident first, and their accuracy: a
        point for each bin that is not empty, float64 [points] each, by rising coverage.
        """
        rows, right = self.rows.flip(0).double(), self.right.flip(0).double()
        kept, hits = rows.cumsum(0), right.cumsum(0)
        some = rows > 0
        return (kept / rows.sum())[some], (hits / kept)[some]

    def accuracy_at(self, coverage: float) -> float:
        """Accuracy of the most confident share of the predictions; of a bin that is cut, as many
        right ones as it has on average. NaN if there are none.
        """
        kept, accuracy = self.curve
        if not len(kept):
            return math.nan
        ends = torch.cat([torch.zeros(1, dtype=torch.float64), kept])
        hits = torch.cat([torch.zeros(1, dtype=torch.float64), kept * accuracy])
        place = int(torch.searchsorted(ends, coverage).clamp(1, len(kept)))
        part = (coverage - ends[place - 1]) / (ends[place] - ends[place - 1])
        return float((hits[place - 1] + part * (hits[place] - hits[place - 1])) / coverage)

    @property
    def aurc(self) -> float:
        """Area under the risk-coverage curve (Geifman and El-Yaniv 2017): the mean over k of the
        share of wrong ones among the k most confident predictions; of those in a bin, in random
        order. NaN
        if there are none.
        """
        rows = self.rows.flip(0).double()
        wrong = rows - self.right.flip(0).double()
        some = rows > 0
        rows, wrong = rows[some], wrong[some]
        before, missed = rows.cumsum(0) - rows, wrong.cumsum(0) - wrong
        share = wrong / rows
        # Σ_j (W + j w/m) / (N + j) over j = 1..m, by harmonic numbers.
        harmonic = torch.digamma(before + rows + 1) - torch.digamma(before + 1)
        total = (share * rows + (missed - share * before) * harmonic).sum()
        return float(total / rows.sum())


@dataclass(frozen=True)
class Coverage:
    """The share of targets in their central predictive intervals.

    Examples:
        >>> from fedbayes.core.metrics import Coverage
        >>> Coverage((0.9,), (0.88,), ((2.5,),), 100).inside
        (0.88,)
    """

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
    """Uncertainty of a posterior's predictions, in nats per sample, [n] each.

    Examples:
        >>> import torch
        >>> from fedbayes.core.metrics import Uncertainty, uncertainty
        >>> same = torch.tensor([[[0.5, 0.5]], [[0.5, 0.5]]]).log()
        >>> found = uncertainty(same)
        >>> isinstance(found, Uncertainty), round(float(found.information[0]), 4)
        (True, 0.0)
    """

    entropy: Tensor
    """Of the mean prediction: all that is unknown."""
    information: Tensor
    """Mutual information of label and weights: the part that more data would remove."""


@torch.no_grad()
def uncertainty(draws: Tensor) -> Uncertainty:
    """Entropy of the mean, and that less the mean entropy, of log-probabilities [draws, n, k].

    Examples:
        >>> import torch
        >>> from fedbayes.core.metrics import uncertainty
        >>> sure = torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]]]).log()
        >>> found = uncertainty(sure)
        >>> round(float(found.entropy[0]), 2), round(float(found.information[0]), 2)
        (0.69, 0.37)
    """
    mean = torch.logsumexp(draws, dim=0) - math.log(len(draws))
    entropy = -(mean.exp() * mean).nan_to_num().sum(dim=-1)
    each = -(draws.exp() * draws).nan_to_num().sum(dim=-1)
    return Uncertainty(entropy, (entropy - each.mean(dim=0)).clamp_min(0.0))
