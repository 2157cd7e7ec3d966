"""What reports add, measured from what a client that learnt nothing would say.

Whoever bounds reports, takes a robust middle of them or puts noise on their sum works on changes,
and knows nothing of the method: `Method.changes` takes a report apart, `Method.resummed` puts the
sum of what became of the changes together again, as the `Sum` of reports that the update knows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedbayes.contracts.reports import Report, Sum
from fedbayes.messages import Masked, dense, dtype_of
from fedbayes.models import Network
from fedbayes.tensors import Tensors

Changes = dict[str, Tensors]
"""By part (`weights`, `buffers`, `control`, …) and name, float64; NaN: a report says nothing."""


@dataclass
class Total:
    """Changes, summed: what is left of reports once each was bounded."""

    changes: Changes = field(default_factory=dict)
    """Sum over clients of weight times change, float64; an entry that nobody spoke of is 0."""
    heard: Changes = field(default_factory=dict)
    """Of tensors in which a report said nothing of some entry, the sum of the weights of the
    reports that did, by entry."""
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """Types of the tensors as they were reported."""
    weight: float = 0.0
    """Sum of the weights."""
    clients: int = 0
    """Number of reports."""

    def add(self, changes: Changes, weight: float = 1.0) -> None:
        """Fold in the changes of one report."""
        for part, tensors in changes.items():
            sums = self.changes.setdefault(part, {})
            counts = self.heard.setdefault(part, {})
            for name, change in tensors.items():
                silent = change.isnan()
                if name not in sums:
                    sums[name] = torch.zeros_like(change)
                if bool(silent.any()):
                    before = torch.full_like(change, self.weight)
                    counts.setdefault(name, before).add_(~silent, alpha=weight)
                    change = change.nan_to_num(nan=0.0)
                elif name in counts:
                    counts[name].add_(weight)
                sums[name].add_(change, alpha=weight)
        self.weight += weight
        self.clients += 1

    def whole(self, origin: Mapping[str, Tensor]) -> Sum:
        """The sum of the reports that come to this total.

        Args:
            origin: where changes are measured from, by name; zero where there is no such name.
        """
        summed = Sum(weight=self.weight, clients=self.clients)
        for part, tensors in self.changes.items():
            for name, change in tensors.items():
                heard = self.heard[part].get(name)
                start = origin.get(name)
                if start is not None:
                    count = self.weight if heard is None else heard
                    change = change + start.cpu().double() * count
                summed.tensors[name] = change
                summed.dtypes[name] = self.dtypes[name]
                if heard is not None:
                    summed.present[name] = heard
        return summed


def changes_of(report: Report, origin: Mapping[str, Tensor], absent: str) -> Tensors:
    """The changes of a report's tensors, float64 on the CPU.

    Args:
        report: dense or sparse.
        origin: where they are measured from, by name; zero where there is no such name.
        absent: what an entry that a sparse tensor leaves out says: `unknown`, `zero` (it is zero),
            or `unchanged`.
    """
    whole = dense(report.tensors)
    changes: Tensors = {}
    for name, item in report.tensors.items():
        change = whole[name].cpu().double()
        if name in origin:
            change = change - origin[name].cpu().double()
        if isinstance(item, Masked) and absent != "zero":
            silent = torch.nan if absent == "unknown" else 0.0
            change = torch.where(item.mask().cpu(), change, silent)
        changes[name] = change
    return changes


def parted(changes: Tensors, report: Report, network: Network) -> Changes:
    """Changes by part: `weights` that are trained, `buffers` of real numbers, `counters` of
    integers; and what is called `part/name` is the part of that name.
    """
    trained, found = network.split()[0], Changes()
    for name, change in changes.items():
        if not dtype_of(report.tensors[name]).is_floating_point:
            part = "counters"
        elif name in network.initial:
            part = "weights" if name in trained else "buffers"
        else:
            part = name.partition("/")[0] if "/" in name else "weights"
        found.setdefault(part, {})[name] = change
    return found


def types_of(report: Report) -> dict[str, torch.dtype]:
    """Types of a report's tensors by name."""
    return {name: dtype_of(item) for name, item in report.tensors.items()}
