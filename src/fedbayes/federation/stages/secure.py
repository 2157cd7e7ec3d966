"""Secure aggregation: how a report becomes numbers that add.

The protocol is Flower's SecAgg+ (`fedbayes.flower.secagg` runs it). It adds vectors of
integers of which the server sees the sum alone. What is here is the way there and back: a report
as a vector of bounded reals, which Flower rounds to integers, and the mean that comes of them.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedbayes.contracts import AnyMethod, Federation, Report, Reports
from fedbayes.contracts.changes import part_of, shortened
from fedbayes.core.messages import Masked, Message, dense
from fedbayes.core.tensors import Tensors
from fedbayes.errors import EngineError, MessageError
from fedbayes.federation.settings import MODULUS, MOST_LEVELS, Aggregation, Secure

__all__ = ["MODULUS", "Plan", "Secure", "Vector"]

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Plan:
    """The numbers of one run's secure aggregation, known to server and clients.

    A report of tensors φ and weight n becomes x = [R n / N, (φ − w) R/r n / N], of which every
    entry is in [−R, R]; w is `contracts.changes.reference`, the broadcast mostly, N the largest
    weight, r the range of an entry's part and R the largest of these. Rounding to a grid of L
    steps errs by less than 2 r / L in each entry, without bias.
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
    by_part: bool = False
    """Whether r is what a part declares (`Part.range`); else it is R for all."""
    exact: bool = False
    """Whether the mean is read in float64: before noise, it must not be rounded to the weights'
    type, which could move it by more than a client may."""

    @property
    def step(self) -> float:
        """Distance of two numbers that can be told apart, 2 R / L."""
        return 2 * self.range / self.levels

    def error(self, samples: float) -> float:
        """How far a number of the mean may be off that no client changed, in the widest range.

        Args:
            samples: mean weight of the reports.
        """
        share = samples / self.max_weight if self.max_weight else 1.0
        left = share - self.step / self.range if self.max_weight else 1.0
        return self.step / left if left > 0 else math.inf

    def ranges(self, method: AnyMethod, centre: Tensors, run: Federation) -> dict[str, float]:
        """The range r of each tensor of a report where it may be another than R."""
        if not self.by_part:
            return {}
        declared = Reports.of(method)
        return {
            name: declared.part(part_of(name, start.dtype, run.network)).range
            for name, start in centre.items()
        }

    def write(self, report: Report, centre: Tensors, ranges: Mapping[str, float] = {}) -> Vector:
        """The vector that stands for a report, float64 [1 + entries].

        Args:
            report: of a client.
            centre: `contracts.changes.reference` of the broadcast.
            ranges: what `ranges` gives.

        A change is clipped so short that rounding cannot make it longer than `clip`.

        Raises:
            EngineError: the report cannot be written so. The text says why.
        """
        if any(isinstance(item, Masked) for item in report.tensors.values()):
            raise EngineError("its report is sparse; secure aggregation adds only whole tensors")
        tensors = dense(report.tensors)
        if tensors.keys() != centre.keys():
            raise EngineError(
                "its report has other tensors than the broadcast, so they cannot be added"
            )
        share = report.weight / self.max_weight if self.max_weight else 1.0
        if share > 1:
            raise EngineError(
                f"its weight is {report.weight:g}; secure.max_weight is {self.max_weight:g}"
            )
        changes = {n: tensors[n].double() - centre[n].double() for n in sorted(centre)}
        if self.clip:
            entries = sum(t.numel() for t in tensors.values())
            clip = max(0.0, self.clip - self.step * math.sqrt(entries))
            changes = shortened(changes, clip) if clip else {n: 0 * t for n, t in changes.items()}
        flat = [torch.tensor([self.range], dtype=torch.float64)]
        for name, change in changes.items():
            most = ranges.get(name, self.range)
            scaled = change.flatten() * (self.range / most)
            if not (scaled.abs() * share <= self.range).all():
                raise EngineError(
                    f"{name!r} changed by {float(change.abs().max()):g}, far more than "
                    f"secure.range = {most:g} allows"
                )
            flat.append(scaled)
        vector: Vector = torch.cat(flat).numpy() * share
        return vector

    def read(self, mean: Vector, centre: Tensors, ranges: Mapping[str, float] = {}) -> Report:
        """The mean of the reports whose vectors have this mean, and the mean of their weights.

        Args:
            mean: of the vectors.
            centre: `contracts.changes.reference` of the broadcast.
            ranges: what `ranges` gives.

        Raises:
            MessageError: no vectors of honest clients have this mean.
        """
        weight = float(mean[0]) / self.range
        if not (np.abs(mean) <= self.range + self.step).all() or weight <= 0:
            raise MessageError(
                "the sum is impossible for honest updates: a client sent invalid numbers"
            )
        if not self.max_weight:
            weight = 1.0
        changes, start = torch.from_numpy(mean[1:] / weight), 0
        tensors: Message = {}
        for name in sorted(centre):
            before = centre[name]
            change = changes[start : start + before.numel()].reshape(before.shape)
            moved = before.double() + change * (ranges.get(name, self.range) / self.range)
            tensors[name] = moved if self.exact else moved.to(before.dtype)
            start += before.numel()
        return Report(tensors, weight * self.max_weight if self.max_weight else 1.0)


def plan(
    settings: Secure,
    method: AnyMethod,
    aggregation: Aggregation,
    cohort: int,
    *,
    private: bool = False,
) -> Plan | None:
    """What server and clients go by; None without secure aggregation.

    Args:
        settings: the `[secure]` table.
        method: of the run.
        aggregation: what else is done with reports.
        cohort: number of clients in a round.
        private: whether there is noise, so that all weights are equal.
    """
    if not settings.enabled:
        return None
    shares = cohort if settings.shares is None else settings.shares
    # Half of what a sum can hold: one that comes out above was tampered with.
    most = 2 ** ((MODULUS // 2 // cohort).bit_length() - 1)
    declared = Reports.of(method)
    return Plan(
        shares=shares,
        threshold=settings.threshold or shares // 2 + 1,
        range=settings.range or aggregation.clip or declared.range,
        levels=settings.levels or min(most, MOST_LEVELS),
        max_weight=settings.max_weight if declared.weighted and not private else 0.0,
        clip=aggregation.clip or 0.0,
        by_part=not (settings.range or aggregation.clip),
        exact=private,
    )


def remarks(plan: Plan | None, sizes: NDArray[Any]) -> Iterator[str]:
    """What a user should know of how finely reports are added, a sentence each.

    Args:
        plan: of the run; None without secure aggregation.
        sizes: training samples of each client.
    """
    if plan is None or not plan.max_weight:
        return
    if plan.max_weight <= 10 * (largest := float(sizes.max())):
        return
    off, least = (p.error(float(sizes.mean())) for p in (plan, replace(plan, max_weight=largest)))
    if off < _FINE:
        return
    yield (
        f"secure.max_weight = {plan.max_weight:,g}, and no client has more than {largest:,.0f} "
        f"training samples. Numbers of updates may be off by {off:.1g} in a round; with "
        f"max_weight = {largest:.0f} by {least:.1g}"
    )


def remark_of_mean(plan: Plan, samples: float) -> str:
    """As `remarks`, once a round has told the mean weight of reports; empty without one."""
    off = plan.error(samples)
    if plan.max_weight <= 10 * samples or off < _FINE:
        return ""
    return (
        f"secure.max_weight = {plan.max_weight:,g}, and clients have {samples:,.0f} training "
        f"samples on average. Numbers of updates may be off by {off:.1g} in a round; a max_weight "
        "near the samples of the largest client reduces this"
    )


_FINE = 1e-4
"""Error of a weight that is not worth a word."""
