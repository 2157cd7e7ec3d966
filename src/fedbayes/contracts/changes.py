"""What reports add, measured from what a client that learnt nothing would say.

Whoever bounds reports, takes a robust middle of them or puts noise on their sum works on changes,
and knows nothing of the method: `ChangeCoordinates` takes a report apart, and puts the sum of what
became of the changes together again, as the `Sum` of reports that the update knows.
Both follow from what the method declares (`Reports`, `Method.origin`, `Method.chart`).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedbayes.contracts.parts import Reports
from fedbayes.contracts.reports import Report, Sum
from fedbayes.core.messages import Masked, Message, dense, dtype_of
from fedbayes.core.tensors import Tensors, add_to
from fedbayes.models import Network

if TYPE_CHECKING:
    from fedbayes.contracts.run import Federation

Changes = dict[str, Tensors]
"""By part (`weights`, `buffers`, `control`, …) and name, float64; NaN: a report says nothing."""


@dataclass
class Total:
    """The sum of the bounded changes of reports."""

    changes: Changes = field(default_factory=dict)
    """Sum over clients of weight times change, float64; an entry that nobody spoke of is 0."""
    present_weight: Changes = field(default_factory=dict)
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
            counts = self.present_weight.setdefault(part, {})
            for name, change in tensors.items():
                silent = change.isnan()
                if name not in sums:
                    sums[name] = torch.zeros_like(change)
                if bool(silent.any()):
                    before = torch.full_like(change, self.weight)
                    add_to(counts.setdefault(name, before), ~silent, weight)
                    change = change.nan_to_num(nan=0.0)
                elif name in counts:
                    counts[name].add_(weight)
                sums[name].add_(change, alpha=weight)
        self.weight += weight
        self.clients += 1

    def whole(self, origin: Mapping[str, Tensor]) -> Sum:
        """The sum of the reports that come to this total.

        Args:
            origin: where changes are measured from, by name; see `start_of`.
        """
        summed = Sum(weight=self.weight, clients=self.clients)
        for part, tensors in self.changes.items():
            for name, change in tensors.items():
                heard = self.present_weight[part].get(name)
                start = start_of(name, change.shape, origin)
                if start is not None:
                    count = self.weight if heard is None else heard
                    change = change + start.cpu().double() * count
                summed.tensors[name] = change
                summed.dtypes[name] = self.dtypes[name]
                if heard is not None:
                    summed.present[name] = heard
        return summed


@dataclass(frozen=True)
class Chart:
    """From changes to coordinates that add, and back, where changes themselves are none.

    What is bounded, put in the middle and covered by noise are the coordinates: for a Gaussian in
    natural parameters the shift beyond the one that leaves its mean where it is.
    """

    coordinates: Callable[[Changes], Changes] | None = None
    """Of the changes of a report, by part; None: the changes."""
    total: Callable[[Total], Total] | None = None
    """Of a sum of coordinates, the sum of changes that it stands for; None: itself."""


@dataclass(frozen=True)
class ChangeCoordinates:
    """How reports to one state of the server are taken apart and put together again."""

    network: Network
    declared: Reports
    origins: list[Tensors]
    """What changes are measured from: of several, a report's from the nearest (`Method.origin`)."""
    chart: Chart

    @classmethod
    def of(cls, method: Any, server: Any, run: "Federation") -> "ChangeCoordinates":
        """That of a method whose server is in this state."""
        declared, found = Reports.of(method), method.origin(server, run)
        origins = found if isinstance(found, list) else [found]
        return cls(run.network, declared, origins, method.chart(server, run))

    def origin(self, report: Report) -> Tensors:
        """What the changes of a report are measured from."""
        if len(self.origins) == 1:
            return self.origins[0]
        found, trained = dense(report.tensors), list(self.network.split()[0])
        return min(self.origins, key=lambda each: float(squared_distance(found, each, trained)))

    def changes(self, report: Report) -> Changes:
        """The changes of a report by part, each with its own norm bound.

        Trained weights are the part `weights`, other real tensors of the network `buffers`,
        integers `counters`, and what is called `part/name` the part of that name.

        Args:
            report: of the expected names, shapes and types.

        Returns:
            Float64 on the CPU; NaN where the report says nothing.
        """
        found = changes_of(report, self.origin(report), self.network, self.declared)
        return self.chart.coordinates(found) if self.chart.coordinates else found

    def resummed(self, total: Total) -> Sum:
        """The sum of reports whose changes come to a total, for `update`; the inverse of summing
        what `changes` gives.
        """
        return (self.chart.total(total) if self.chart.total else total).whole(self.origins[0])

    def moved(self, report: Report, changes: Changes) -> Report:
        """A report with other changes."""
        return moved(report, changes, self.origin(report))


def length_of(part: str, tensors: Tensors, declared: Reports) -> float:
    """The L2 norm of a part's change, or its root where these are squares (`Part.squared`)."""
    found = norm(tensors.values())
    return math.sqrt(found) if declared.part(part).squared else found


def typical_norms(method: Any, server: Any, run: "Federation") -> dict[str, float]:
    """By part, the L2 norm that changes are measured by where a cohort tells little; parts that are
    not here have none (`Part.typical`).
    """
    found = method.origin(server, run)
    origin = found[0] if isinstance(found, list) else found
    parts = Changes()
    for name, tensor in origin.items():
        part = part_of(name, tensor.dtype, run.network)
        parts.setdefault(part, {})[name] = tensor.double()
    declared = Reports.of(method)
    norms = {part: length_of(part, tensors, declared) for part, tensors in parts.items()}
    for part, p in declared.parts.items():
        if p.typical is not None:
            typical = p.typical
            norms[part] = typical if isinstance(typical, float) else typical(method, server, run)
    return norms


def squared_distance(left: Tensors, right: Tensors, names: Iterable[str]) -> Tensor:
    """‖left − right‖² over the tensors of these names, a scalar."""
    return torch.stack([(left[name] - right[name]).square().sum() for name in names]).sum()


def reference(method: Any, message: Message, run: "Federation") -> Tensors:
    """Where secure aggregation and compression measure reports from, dense, for who knows the
    broadcast: its own tensors, or zero where the declaration says so.
    """
    sent, declared = dense(message), Reports.of(method)
    found = {}
    for name, pattern in dense(method.expected(message, run)).items():
        part = declared.part(part_of(name, pattern.dtype, run.network))
        moves = part.origin == "server" and name in sent
        found[name] = sent[name] if moves else torch.zeros_like(pattern)
    return found


def changes_of(
    report: Report, origin: Mapping[str, Tensor], network: Network, declared: Reports
) -> Changes:
    """The changes of a report by part, float64 on the CPU.

    Args:
        report: dense or sparse.
        origin: where they are measured from, by name; see `start_of`.
        network: of the run.
        declared: what entries say that a sparse tensor leaves out (`Part.missing`).
    """
    whole = dense(report.tensors)
    changes: Changes = {}
    for name, item in report.tensors.items():
        part = part_of(name, dtype_of(item), network)
        change = whole[name].cpu().double()
        if (start := start_of(name, change.shape, origin)) is not None:
            change = change - start.cpu().double()
        if isinstance(item, Masked) and (missing := declared.part(part).missing) != "zero":
            silent = torch.nan if missing == "unknown" else 0.0
            change = torch.where(item.mask().cpu(), change, silent)
        changes.setdefault(part, {})[name] = change
    return changes


def start_of(name: str, shape: torch.Size, origin: Mapping[str, Tensor]) -> Tensor | None:
    """What a tensor's change is measured from; None, which is zero, where there is no tensor of
    this name and shape: clients may have networks of other widths than the server.
    """
    start = origin.get(name)
    return start if start is not None and start.shape == shape else None


def part_of(name: str, dtype: torch.dtype, network: Network) -> str:
    """The part that a tensor belongs to: `weights` that are trained, `buffers` of real numbers,
    `counters` of integers; and what is called `part/name` belongs to the part of that name.

    Args:
        name: of the tensor.
        dtype: its type, as it is reported.
        network: of the run.
    """
    if not dtype.is_floating_point:
        return "counters"
    if name in network.initial:
        return "buffers" if name in network.buffers else "weights"
    return name.partition("/")[0] if "/" in name else "weights"


def norm(tensors: Iterable[Tensor]) -> float:
    """The L2 norm over all entries of some float64 tensors; NaN counts as zero."""
    squares = 0.0
    for tensor in tensors:
        length = float(torch.linalg.vector_norm(tensor))
        if math.isnan(length):
            length = float(torch.linalg.vector_norm(tensor.nan_to_num(nan=0.0)))
        squares += length * length
    return math.sqrt(squares)


def types_of(report: Report) -> dict[str, torch.dtype]:
    """Types of a report's tensors by name."""
    return {name: dtype_of(item) for name, item in report.tensors.items()}


def clipped(changes: Changes, clip: float) -> Changes:
    """Changes, each part of which is shortened until its norm is at most `clip`.

    The norm is L2 over all of a part's tensors; what a report says nothing of counts as no change.
    Integers count what no client can be moved by, and are left alone.
    """
    return {
        part: tensors if part == "counters" else shortened(tensors, clip)
        for part, tensors in changes.items()
    }


def shortened(tensors: Tensors, bound: float) -> Tensors:
    """Scale the tensors together until their L2 norm is at most `bound`.

    Tensors that are short enough are returned unchanged. So are tensors with an infinite entry,
    which no factor makes short; the server rejects such a report.

    Args:
        tensors: float64; NaN counts as zero.
        bound: above 0.
    """
    largest = max((_largest(t) for t in tensors.values() if t.numel()), default=0.0)
    if not largest or math.isinf(largest):
        return tensors
    # In units of the largest entry, since squares can be beyond all numbers.
    ratio = norm(t / largest for t in tensors.values())
    if largest * ratio <= bound:
        return tensors
    return {name: t / largest * (bound / ratio) for name, t in tensors.items()}


def _largest(tensor: Tensor) -> float:
    """The largest magnitude of an entry, NaN apart."""
    return float(tensor.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf).abs().max())


@dataclass(frozen=True)
class Clips:
    """The L2 norms to which the server shortens what a report adds, as clients know them.

    Who keeps a state that repeats its report shortens the change itself: what it keeps is then what
    the server adds.
    """

    most: float | None = None
    """Of every part that is not in `parts`; None: no bound."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Of single parts."""

    def __bool__(self) -> bool:
        """Whether any part has a bound."""
        return self.most is not None or bool(self.parts)

    def shortened(self, part: str, change: Tensors) -> Tensors:
        """The change of a part of a report of weight 1, no longer than the server lets it be.

        Args:
            part: its name, see `part_of`.
            change: by name; NaN counts as zero.

        Returns:
            In the types that they came in; the same tensors if they are not longer. Shortened so
            far that rounding leaves the server nothing to shorten.
        """
        bound = self.parts.get(part, self.most)
        if bound is None:
            return change
        whole = {n: t.double() for n, t in change.items()}
        short = shortened(whole, bound * (1 - _ROUNDING))
        return change if short is whole else {n: t.to(change[n].dtype) for n, t in short.items()}


_ROUNDING = 1e-6
"""Relative precision of a report's numbers, on the safe side."""


def moved(report: Report, changes: Changes, origin: Mapping[str, Tensor]) -> Report:
    """A report whose changes are others: dense, in the types that it came in.

    Args:
        report: as it came.
        changes: what its changes are to be; NaN: it says nothing, and the origin stays.
        origin: where they are measured from, by name; see `start_of`.
    """
    tensors: Message = {}
    for part in changes.values():
        for name, change in part.items():
            value = change.nan_to_num(nan=0.0)
            if (start := start_of(name, value.shape, origin)) is not None:
                value = value + start.cpu().double()
            tensors[name] = value.to(dtype_of(report.tensors[name]))
    return Report(tensors, report.weight)
