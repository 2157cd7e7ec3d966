"""The reports of clients, and how the server reduces them."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor

from fedbayes.core.brief import Brief
from fedbayes.core.messages import Masked, Message, dtype_of, shape_of
from fedbayes.core.tensors import Tensors, add_to, quotient, shaped


@dataclass(frozen=True, repr=False)
class Report(Brief):
    """The message of a client to the server at the end of its E-step.

    Examples:
        >>> import torch
        >>> from fedbayes.contracts import Report
        >>> Report({"weight": torch.ones(2)}, weight=30.0).weight
        30.0
    """

    tensors: Message
    """The update, by name."""
    weight: float = 1.0
    """Its weight in a sum over clients, at least 0: the number of samples, for instance."""


class ReportRows(NamedTuple):
    """Tensors of several reports of one form: what is done with all of these is one operation."""

    stacked: Tensors
    """Those of each name, with a first axis for the reports."""
    entries: Tensor | None
    """All of them in the same memory, [reports, entries]; None where types differ."""
    form: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    """Names, shapes and types, in the order of a report."""
    each: list[tuple[Tensor, ...]]
    """The tensors of each report."""

    @classmethod
    def of(cls, stacked: Tensors) -> "ReportRows":
        """Those of these names, with a first axis for the reports, one at least; copied."""
        entries = None
        if len({tensor.dtype for tensor in stacked.values()}) == 1:
            sizes = [tensor[0].numel() for tensor in stacked.values()]
            vectors = zip(stacked.values(), sizes, strict=True)
            entries = torch.cat([tensor.reshape(len(tensor), size) for tensor, size in vectors], 1)
            columns = zip(torch.split(entries, sizes, 1), stacked.items(), strict=True)
            stacked = {name: own.view(old.shape) for own, (name, old) in columns}
        form = tuple((name, tuple(t.shape[1:]), t.dtype) for name, t in stacked.items())
        each = zip(*(tensor.unbind() for tensor in stacked.values()), strict=True)
        return cls(stacked, entries, form, list(each))

    @property
    def version(self) -> int:
        """Another number after the tensors were changed."""
        own = self.stacked.values() if self.entries is None else (self.entries,)
        return sum(tensor._version for tensor in own)


@dataclass(frozen=True, repr=False)
class ReportRow(Report):
    """A report whose tensors are a row of several reports'."""

    rows: ReportRows | None = None
    """These reports."""
    place: int = 0
    """Which of them it is."""

    @classmethod
    def of(cls, rows: ReportRows, place: int, weight: float) -> "ReportRow":
        """One of several reports."""
        tensors: Message = dict(zip(rows.stacked, rows.each[place], strict=True))
        return cls(tensors, weight, rows, place)

    @property
    def known(self) -> ReportRows | None:
        """The reports that it is a row of; None where a stage has put other tensors into it."""
        rows = self.rows
        if rows is None or len(self.tensors) != len(rows.form):
            return None
        return rows if all(map(is_, self.tensors.values(), rows.each[self.place])) else None


@dataclass(repr=False)
class Sum(Brief):
    """Reports that add: each is folded in and forgotten, so memory does not grow with them.

    Sums are kept in float64 and folded in the order of the cohort: the result does not depend
    on which client was ready first.

    Examples:
        >>> import torch
        >>> from fedbayes.contracts import Report, Sum
        >>> reports = Sum()
        >>> reports.add(0, Report({"w": torch.tensor([1.0])}, weight=1.0))
        >>> reports.add(1, Report({"w": torch.tensor([4.0])}, weight=2.0))
        >>> reports.mean()
        {'w': tensor([3.])}
    """

    tensors: Tensors = field(default_factory=dict)
    """Sum over clients of weight times tensor, float64, by name."""
    weight: float = 0.0
    """Sum of the weights."""
    clients: int = 0
    """Number of reports."""
    present: Tensors = field(default_factory=dict)
    """Of tensors that came sparse, the sum of the weights of the reports that held each entry,
    float64 by name."""
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """Types of the tensors as they were reported."""
    _rows: ReportRows | None = field(default=None, init=False, compare=False)
    """Those of the first report, if that is why the sums lie in one piece of memory."""
    _entries: Tensor = field(default_factory=lambda: torch.empty(0), init=False, compare=False)
    """All of the sums then."""

    def add(self, client: int, report: Report) -> None:
        """Fold one report in."""
        entries = self._entries_of(report) if isinstance(report, ReportRow) else None
        if entries is not None:
            add_to(self._entries, entries, report.weight)
        else:
            self._add_each(report)
        self.weight += report.weight
        self.clients += 1

    def _entries_of(self, report: ReportRow) -> Tensor | None:
        """The entries of a report, in the order of the sums' own; None where it has another."""
        rows = report.known
        if rows is None or rows.entries is None:
            return None
        if not self.tensors:
            self._rows = rows
            self._entries = torch.zeros(rows.entries.shape[1], dtype=torch.float64)
            self.tensors = shaped(self._entries, dict(zip(rows.stacked, rows.each[0], strict=True)))
            self.dtypes = {name: dtype for name, _, dtype in rows.form}
        if self._rows is None or self._rows.form != rows.form:
            return None
        return rows.entries[report.place]

    def _add_each(self, report: Report) -> None:
        for name, item in report.tensors.items():
            if name not in self.tensors:
                self.tensors[name] = torch.zeros(shape_of(item), dtype=torch.float64)
                self.dtypes[name] = dtype_of(item)
            if isinstance(item, Masked):
                whole = torch.full_like(self.tensors[name], self.weight)
                add_to(self.present.setdefault(name, whole), item.mask(), report.weight)
                item = item.dense()
            elif name in self.present:
                self.present[name].add_(report.weight)
            add_to(self.tensors[name], item, report.weight)

    def mean(self) -> Tensors:
        """The weighted mean of the reports, in the types that they came in."""
        return {
            name: quotient(total, self.weight, self.dtypes[name])
            for name, total in self.tensors.items()
        }

    def share(self, name: str) -> Tensor:
        """Share of the reports, by weight, that held each entry of a tensor, float64."""
        if name not in self.present:
            return torch.ones_like(self.tensors[name])
        return self.present[name] / self.weight


Middle = Callable[[Tensor, Tensor], Tensor | None]
"""The middle of tensors [n, ...] of weights [n], both float64; None if there is none to be had."""


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor | None:
    """The mean of tensors [n, ...] of weights [n]; None if they weigh nothing."""
    total = weights.sum()
    return torch.tensordot(weights, values, dims=1) / total if total > NOBODY else None


NOBODY = 1e-12
"""Total weight below which nobody is heard."""


@dataclass(repr=False)
class ReportList(Brief):
    """Reports that do not add (a median, a matching needs them all), by client.

    Examples:
        >>> import torch
        >>> from fedbayes.contracts import Report, ReportList
        >>> reports = ReportList()
        >>> reports.add(3, Report({"w": torch.tensor([1.0])}))
        >>> list(reports.reports)
        [3]
    """

    reports: dict[int, Report] = field(default_factory=dict)
    middle: Middle = weighted_mean
    """What an update that takes a middle uses instead of a weighted mean."""
    refused: Collection[int] = ()
    """Clients whose report was rejected in this round: their earlier reports do not count."""

    def add(self, client: int, report: Report) -> None:
        """Keep the report of a client, under its number."""
        self.reports[client] = report

    @property
    def clients(self) -> int:
        """Number of reports."""
        return len(self.reports)
