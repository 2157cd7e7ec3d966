"""Secure aggregation: how a report becomes numbers that add.

The protocol is Flower's SecAgg+ (`fedbayes.federation.secagg` runs it). It adds vectors of
integers of which the server sees the sum alone. What is here is the way there and back: a report
as a vector of bounded reals, which Flower rounds to integers, and the mean that comes of them.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fedbayes.contracts import Report
from fedbayes.errors import EngineError, MessageError
from fedbayes.federation.aggregation import clipped
from fedbayes.federation.settings import MODULUS, Secure
from fedbayes.messages import Masked, Message, dense

__all__ = ["MODULUS", "Plan", "Secure", "Vector"]

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Plan:
    """The numbers of one run's secure aggregation, known to server and clients.

    A report of tensors φ and weight n becomes x = [R n / N, (φ − w) n / N], of which every entry is
    in [−R, R]; w is the broadcast and N the largest weight. Rounding to a grid of L steps errs by
    less than the step 2 R / L in each entry, without bias.
    """

    shares: int
    threshold: int
    range: float
    """R."""
    levels: int
    """L."""
    max_weight: float
    """N; 0 if all weights are equal."""
    clip: float
    """Largest L2 norm of a change, at which clients clip; 0 for none."""

    @property
    def step(self) -> float:
        """Distance of two numbers that can be told apart, 2 R / L."""
        return 2 * self.range / self.levels

    def write(self, report: Report, broadcast: Message) -> Vector:
        """The vector that stands for a report, float64 [1 + entries].

        A change is clipped so short that rounding cannot make it longer than `clip`.

        Raises:
            EngineError: the report cannot be written so. The text says why.
        """
        centre = dense(broadcast)
        if any(isinstance(item, Masked) for item in report.tensors.values()):
            raise EngineError("its report is sparse; secure aggregation adds whole tensors alone")
        tensors = dense(report.tensors)
        if tensors.keys() != centre.keys():
            raise EngineError("its report holds other tensors than the broadcast; they cannot add")
        share = report.weight / self.max_weight if self.max_weight else 1.0
        if share > 1:
            raise EngineError(
                f"its weight is {report.weight:g}; secure.max_weight is {self.max_weight:g}"
            )
        if self.clip:
            entries = sum(t.numel() for t in tensors.values())
            tensors = clipped(tensors, centre, max(0.0, self.clip - self.step * math.sqrt(entries)))
        changes = [(tensors[n].double() - centre[n].double()).flatten() for n in sorted(centre)]
        vector: Vector = torch.cat([torch.tensor([self.range]).double(), *changes]).numpy() * share
        if not float(np.abs(vector).max()) <= self.range:
            raise EngineError(
                f"a weight changed by {np.abs(vector[1:]).max() / share:g}, by far more than "
                f"secure.range = {self.range:g} lets through"
            )
        return vector

    def read(self, mean: Vector, broadcast: Message) -> Report:
        """The mean of the reports whose vectors have this mean, and the mean of their weights.

        Raises:
            MessageError: no vectors of honest clients have this mean.
        """
        centre = dense(broadcast)
        weight = float(mean[0]) / self.range
        if not (np.abs(mean) <= self.range + self.step).all() or weight <= 0:
            raise MessageError("the sum is none of honest reports: some client spoilt it")
        if not self.max_weight:
            weight = 1.0
        changes, start = torch.from_numpy(mean[1:] / weight), 0
        tensors: Message = {}
        for name in sorted(centre):
            before = centre[name]
            change = changes[start : start + before.numel()].reshape(before.shape)
            tensors[name] = (before.double() + change).to(before.dtype)
            start += before.numel()
        return Report(tensors, weight * self.max_weight if self.max_weight else 1.0)
