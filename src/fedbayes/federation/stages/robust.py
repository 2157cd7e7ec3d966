"""Sums of reports of bounded change, and robust middles instead of their mean.

A rule works on the changes of reports (`contracts.changes`), part by part. The weights of the
reports do not count, since a malicious client chooses its own.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fedbayes.contracts import ChangeCoordinates, Changes, Report, ReportList, Sum, Total
from fedbayes.contracts.changes import clipped, types_of
from fedbayes.contracts.reports import Middle, weighted_mean
from fedbayes.core.tensors import Tensors
from fedbayes.federation.settings import Rule


class ChangeReducer(ABC):
    """A fold by way of changes."""

    def __init__(self, way: ChangeCoordinates) -> None:
        self._way = way
        self._total = Total()

    @property
    def clients(self) -> int:
        """Number of reports."""
        return self._total.clients

    @abstractmethod
    def add(self, client: int, report: Report) -> None:
        """Fold one report in."""

    def _add(self, changes: Changes, report: Report, weight: float) -> None:
        self._total.add(changes, weight)
        self._total.dtypes |= types_of(report)

    def reduced(self) -> Sum:
        """The sum of reports that come to the total."""
        return self._way.resummed(self._total)


class Clipped(ChangeReducer):
    """A sum of reports whose weight times change is bounded.

    So a client cannot move the sum by more, however heavy it says that it is. The intake makes the
    weights multiples of the cohort's median, and bounds them.
    """

    def __init__(self, way: ChangeCoordinates, clip: float) -> None:
        super().__init__(way)
        self._clip = clip

    def add(self, client: int, report: Report) -> None:
        """Fold one report in."""
        bound = self._clip / report.weight
        self._add(clipped(self._way.changes(report), bound), report, report.weight)


class Robust(ChangeReducer):
    """Keeps all the changes, and returns a robust middle of them instead of their mean.

    An entry that only some reports contain has the middle of those.
    """

    def __init__(
        self, way: ChangeCoordinates, rule: Rule, hostile: int, clip: float | None
    ) -> None:
        super().__init__(way)
        self._rule, self._hostile, self._clip = rule, hostile, clip
        self._found: list[Changes] = []
        self._dtypes: dict[str, torch.dtype] = {}

    @property
    def clients(self) -> int:
        """Number of reports."""
        return len(self._found)

    def add(self, client: int, report: Report) -> None:
        """Keep one report, its change bounded if there is a bound."""
        changes = self._way.changes(report)
        self._dtypes |= types_of(report)
        self._found.append(changes if self._clip is None else clipped(changes, self._clip))

    def reduced(self) -> Sum:
        """The sum of as many reports as came, all of which are the middle."""
        chosen = self._found
        if self._rule == "krum":
            chosen = [self._found[place] for place in nearest(self._found, self._hostile)]
        total = Total(weight=float(self.clients), clients=self.clients, dtypes=self._dtypes)
        for part, tensors in chosen[0].items():
            total.changes[part], total.present_weight[part] = {}, {}
            for name in tensors:
                stack = torch.stack([changes[part][name] for changes in chosen])
                share = (~stack.isnan()).double().mean(0)
                if bool((share < 1).any()):
                    total.present_weight[part][name] = share * self.clients
                total.changes[part][name] = self._middle(stack) * share * self.clients
        return self._way.resummed(total)

    def _middle(self, stack: Tensor) -> Tensor:
        """The middle of numbers [n, ...] entry by entry, NaN left out; 0 where all are NaN."""
        if self._rule == "krum":
            return stack.nanmean(0).nan_to_num(nan=0.0)
        ordered = stack.sort(0).values  # NaN come last
        count = (~ordered.isnan()).sum(0)
        most = (count - 1).clamp_min(0) // 2
        cut = most if self._rule == "median" else most.clamp_max(self._hostile)
        rank = torch.arange(len(stack)).reshape(-1, *[1] * (stack.ndim - 1))
        kept = (rank >= cut) & (rank < count - cut)
        return torch.where(kept, ordered, 0.0).sum(0) / kept.sum(0).clamp_min(1)


class RobustGather:
    """Gathered reports of bounded change, of which the update takes robust middles.

    For methods whose update asks for `ReportList.middle`. Weights count under the rule `mean`
    alone, where weight times change is bounded.
    """

    def __init__(
        self, way: ChangeCoordinates, rule: Rule, hostile: int, clip: float | None
    ) -> None:
        self._way, self._rule, self._hostile, self._clip = way, rule, hostile, clip
        self._found: dict[int, tuple[Report, Changes]] = {}

    @property
    def clients(self) -> int:
        """Number of reports."""
        return len(self._found)

    def add(self, client: int, report: Report) -> None:
        """Keep one report, its change bounded if there is a bound."""
        if self._rule != "mean":
            report = replace(report, weight=1.0)
        changes = self._way.changes(report)
        if self._clip is not None:
            changes = clipped(changes, self._clip / report.weight)
            report = self._way.moved(report, changes)
        self._found[client] = report, changes

    def reduced(self) -> ReportList:
        """The reports, with the rule for their middle."""
        found = self._found
        if self._rule == "krum":
            chosen = nearest([changes for _, changes in found.values()], self._hostile)
            found = {client: found[client] for client in [list(found)[place] for place in chosen]}
        reports = {client: report for client, (report, _) in found.items()}
        return ReportList(reports, self._middle())

    def _middle(self) -> Middle:
        if self._rule == "median":
            return partial(trimmed, cut=None)
        return (
            partial(trimmed, cut=self._hostile) if self._rule == "trimmed-mean" else weighted_mean
        )


def trimmed(values: Tensor, weights: Tensor, cut: float | None) -> Tensor | None:
    """The weighted mean of each entry, without the largest and smallest that weigh `cut`.

    Args:
        values: float64 [n, ...].
        weights: of each, float64 [n], 1 at most.
        cut: weight that is left out at each end; None: all but the middle, a weighted median.

    Returns:
        Float64 [...]; None where what is left out may be all: those that lie could be the
        majority.
    """
    total = float(weights.sum())
    if total <= 2 * (1 if cut is None else cut):
        return None
    least = (0.5 - 1e-6) * total if cut is None else float(cut)
    ordered, order = values.sort(0)
    after = weights[order].cumsum(0)
    before = after - weights[order]
    kept = (after.clamp_max(total - least) - before.clamp_min(least)).clamp_min(0.0)
    return (kept * ordered).sum(0) / kept.sum(0)


def nearest(found: list[Changes], hostile: int) -> list[int]:
    """Multi-Krum (Blanchard et al. 2017): places of the reports nearest to their neighbours.

    A report's score is the sum of its squared distances to the n − f − 2 nearest others. In each
    part the f reports with the largest scores are left out, so an honest client that is far from
    others in one part takes no liar's place in another. At least one report is left. Integers, and
    what a report says nothing of, are no distance.
    """
    worst = torch.zeros(len(found), dtype=torch.int64)
    for part in found[0]:
        if part != "counters":
            flat = torch.stack([_flat(changes[part]) for changes in found])
            near = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist").square()
            scores = near.sort(1).values[:, 1 : len(flat) - hostile - 1].sum(1)
            worst = worst.maximum((scores < scores[:, None]).sum(1))  # equal scores, equal ranks
    most = max(len(found) - hostile, int(worst.min()) + 1)
    return (worst < most).nonzero().flatten().tolist()


def _flat(tensors: Tensors) -> Tensor:
    return torch.cat([t.flatten() for t in tensors.values()]).nan_to_num(nan=0.0)
