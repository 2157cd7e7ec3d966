"""How far a report may be from where it started: by part, a multiple of what the cohort does.

Any number of the right type is a well-formed report, also one of 3e38, after which no weight means
anything. So the change of every part (`Part`) has a largest norm: `max_change` times the cohort's
median. The server's own part (`Part.typical`) stands in where a median tells little:
where all changes are far shorter, and in cohorts of one or two.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedbayes.contracts import AnyMethod, ChangeCoordinates, Changes, Federation, Report, Reports
from fedbayes.contracts.changes import length_of, norm, part_of, start_of, typical_norms
from fedbayes.contracts.reports import ReportRow, ReportRows
from fedbayes.core.messages import dense, payload
from fedbayes.core.tensors import Tensors
from fedbayes.federation.broadcast import ServerMessages
from fedbayes.federation.ledger import MEMORY, Ledger, SpillBuffer
from fedbayes.federation.settings import Aggregation
from fedbayes.federation.stages.checks import encode_report, read_report
from fedbayes.federation.stages.stage import Arrival


def norms_of(changes: Changes, declared: Reports) -> dict[str, float]:
    """The norm of every part, as `length_of` measures it."""
    return {part: length_of(part, tensors, declared) for part, tensors in changes.items()}


class ChangeNorms:
    """The norms of the changes of a round's reports.

    Reports that are rows of the same tensors, as those of clients that were trained at once, are
    measured at once.

    Args:
        way: what the changes are.
    """

    def __init__(self, way: ChangeCoordinates) -> None:
        self._way = way
        self._direct = way.chart.coordinates is None and len(way.origins) == 1
        self._measured: tuple[ReportRows | None, int, list[dict[str, float]]] = None, 0, []

    def of(self, report: Report) -> dict[str, float]:
        """The norm of the change of every part of a report.

        Whole reports whose changes are the coordinates are not widened to float64, unless their
        size asks for it.
        """
        norms = self._of_row(report) if isinstance(report, ReportRow) and self._direct else None
        if norms is None:
            whole = {n: t[None] for n, t in report.tensors.items() if isinstance(t, Tensor)}
            if not self._direct or len(whole) < len(report.tensors):
                return norms_of(self._way.changes(report), self._way.declared)
            norms = self._norms(whole)[0]
        if all(norm < _EXACT for norm in norms.values()):
            return norms
        return norms_of(self._way.changes(report), self._way.declared)

    def _of_row(self, report: ReportRow) -> dict[str, float] | None:
        """Of a report that is a row of others; None where it is not."""
        if (rows := report.known) is None:
            return None
        if self._measured[0] is not rows or self._measured[1] != rows.version:
            self._measured = rows, rows.version, self._norms(rows.stacked)
        return self._measured[2][report.place]

    def _norms(self, stacked: Tensors) -> list[dict[str, float]]:
        """The norms of the changes of reports, whose tensors have a first axis for the reports."""
        squares: dict[str, list[float]] = {}
        for name, rows in stacked.items():
            start = start_of(name, rows.shape[1:], self._way.origins[0])
            exact = rows if rows.dtype in (torch.float32, torch.float64) else rows.double()
            change = exact if start is None else exact - start.cpu().to(exact.dtype)
            flat = change.reshape(len(rows), math.prod(rows.shape[1:]))
            lengths = torch.linalg.vector_norm(flat, dim=1).tolist()
            part = part_of(name, rows.dtype, self._way.network)
            before = squares.get(part, [0.0] * len(lengths))
            squares[part] = [s + x * x for s, x in zip(before, lengths, strict=True)]
        for part, row in squares.items():
            squares[part] = [math.sqrt(x) for x in row]
            if self._way.declared.part(part).squared:
                squares[part] = [math.sqrt(x) for x in squares[part]]
        each = zip(*squares.values(), strict=True)
        return [dict(zip(squares, row, strict=True)) for row in each] or [{}]


_EXACT = 1e15
"""Norms up to which float32 has no overflow."""


def norms_compared(report: Report, declared: Reports, run: Federation) -> dict[str, float]:
    """Return the norms that distinguish outlying reports, by tensor or part (`Part.compared`)."""
    squares = dict[str, float]()
    for name, tensor in dense(report.tensors).items():
        part = part_of(name, tensor.dtype, run.network)
        if part == "counters" or (how := declared.part(part).compared) == "no":
            continue
        key = name if how == "tensors" else part
        squares[key] = squares.get(key, 0.0) + norm([tensor.cpu().double()]) ** 2
    return {key: math.sqrt(square) for key, square in squares.items()}


def median(values: list[float]) -> float:
    """Return the middle value, the lower of two: of two clients one may be malicious."""
    return sorted(values)[(len(values) - 1) // 2]


class Bounds:
    """The norms of a round's changes, and what they may be.

    Args:
        most: the multiple of the cohort's median; 0: no bound.
        ordinary: by part, the norm of the server's own.
        alone: stands for that where it is more, in cohorts that have no median.
    """

    def __init__(
        self, most: float, ordinary: dict[str, float], alone: Callable[[], float] = lambda: 1.0
    ) -> None:
        self._most, self._ordinary, self._alone = most, ordinary, alone
        self.norms: dict[int, dict[str, float]] = {}
        """Of each client's change, by part."""

    def within(self, client: int, norms: dict[str, float]) -> bool:
        """Note the norms of a client's change; whether they are good whatever others' are."""
        self.norms[client] = norms
        return all(norm <= self._most * self._least(part) for part, norm in norms.items())

    def limits(self) -> dict[str, float]:
        """By part, the largest norm, once the cohort was heard."""
        found: dict[str, list[float]] = {}
        for norms in self.norms.values():
            for part, length in norms.items():
                found.setdefault(part, []).append(length)
        return {part: self._limit(part, lengths) for part, lengths in found.items()}

    def _limit(self, part: str, found: list[float]) -> float:
        if len(found) < FEWEST:  # of two, either may be hostile
            return max(self._most, FAR) * max(self._ordinary.get(part, 0.0), self._alone())
        return self._most * max(median(found), self._least(part))

    def _least(self, part: str) -> float:
        return self._ordinary.get(part, 0.0) / FAR

    def excess(self, client: int, limits: dict[str, float]) -> str:
        """Why the change of a client is too long, in words; empty if it is not."""
        for part, length in self.norms[client].items():
            if not length <= limits[part]:
                return (
                    f"its change of the {part} has norm {length:.3g}; the limit of this round is "
                    f"{limits[part]:.3g} (aggregation.max_change = {self._most:g}; increase it if "
                    "honest clients differ more)"
                )
        return ""


MOST_TIMES_MEDIAN = 10.0
"""With clipping, the most that a report weighs, as a multiple of the median weight."""
FEWEST = 3
"""Reports of which one can be told apart."""
DEVIATIONS = 6.0
"""Robust standard deviations from the median beyond which a norm is outlying."""
RATIO = 2.0
"""And the ratio to the median beyond which it is: honest clients may be very alike."""
FAR = 100.0
"""Times that a change may be longer than the server's own part, where no cohort tells; and times
shorter that all changes have to be before they are no measure of one another."""


def size_of(run: Federation) -> float:
    """The norm of the network before any training; where it is zero, as if all weights were 1."""
    first = [t.cpu().double() for t in run.network.initial.values() if t.is_floating_point()]
    return norm(first) or math.sqrt(sum(t.numel() for t in first))


def outliers(norms: dict[int, dict[str, float]]) -> dict[int, str]:
    """The clients whose networks are outlying, each with the reason.

    Methods that match neurons or combine whole networks have no mean that a robust rule could take
    the place of. What can be told without knowing which neuron is which is the size of each
    tensor.

    Of every tensor the logarithms of the clients' norms have a median, and a median absolute
    deviation; 1.4826 times that is a standard deviation if most are normal. A client is outlying if
    one of its tensors is more than `DEVIATIONS` of these from the median, and more than `RATIO`
    times longer or shorter. Norms are the same in whatever order neurons are.

    Args:
        norms: of each client, the L2 norm of every tensor by name.
    """
    if len(norms) < FEWEST:
        return {}
    strange: dict[int, str] = {}
    for name in sorted({name for each in norms.values() for name in each}):
        logs = {c: math.log(max(each[name], _TINY)) for c, each in norms.items() if name in each}
        middle = statistics.median(logs.values())
        spread = 1.4826 * statistics.median(abs(x - middle) for x in logs.values())
        limit = max(DEVIATIONS * spread, math.log(RATIO))
        for client, x in logs.items():
            if abs(x - middle) > limit:
                strange.setdefault(
                    client,
                    f"{name!r} has norm {norms[client][name]:.3g}; the median of the round is "
                    f"{math.exp(middle):.3g}",
                )
    return dict(sorted(strange.items()))


_TINY = 1e-30
"""Used instead of a norm of zero, which has no logarithm."""


class NormBound:
    """The stage that lets reports pass once they are known to be within bounds.

    A report whose change is short relative to the server's own passes at once. The others wait
    until the whole cohort has reported, and then pass in the order of arrival: so the order depends
    on the reports alone. Waiting reports are in memory up to a limit, then in a file.

    Args:
        settings: the `[aggregation]` table.
        method: of the run.
        server: its state before the round.
        run: the run.
    """

    def __init__(
        self, settings: Aggregation, method: AnyMethod, server: Any, run: Federation
    ) -> None:
        self._method, self._run, self._declared = method, run, Reports.of(method)
        self._bounded = bool(settings.max_change) and not self._declared.pooled
        ordinary = typical_norms(method, server, run) if self._bounded else {}
        ordinary["counters"] = FAR * settings.max_weight  # batches and samples differ with sizes
        self._bounds = Bounds(settings.max_change, ordinary, partial(size_of, run))
        self._relative = settings.weighs and self._declared.weighted
        self._leave_out = settings.outliers == "leave-out"
        self._compared: dict[int, dict[str, float]] = {}
        way = ChangeCoordinates.of(method, server, run) if self._bounded else None
        self._norms = None if way is None else ChangeNorms(way)
        self._waiting = SpillBuffer(encode_report, read_report, MEMORY)
        self._held: dict[int, tuple[tuple[str, ...], ServerMessages]] = {}
        self._weights: dict[int, float] = {}

    def __call__(self, arrivals: Iterator[Arrival], ledger: Ledger) -> Iterator[Arrival]:
        """Those within bounds; the ledger refuses the others."""
        for arrival in arrivals:
            if self._passes(arrival):
                yield arrival
            else:
                self._hold(arrival)
            del arrival  # while the next one is awaited
        refused = self._refused()
        good = {c: w for c, w in self._weights.items() if not refused.get(c)}
        usual = median(list(good.values())) if good else 1.0
        for client in self._held:
            if reason := refused.get(client):
                ledger.refuse(client, reason)
                continue
            weight = good[client]
            if self._relative:
                weight = min(weight / usual, MOST_TIMES_MEDIAN)
            yield self._released(client, weight)
        self._waiting.close()

    def _passes(self, arrival: Arrival) -> bool:
        """Whether a report is good whatever others are; its norms are noted."""
        client, report = arrival.client, arrival.report
        self._weights[client] = report.weight
        if self._declared.compared:
            self._compared[client] = norms_compared(report, self._declared, self._run)
        norms = self._norms
        within = norms is None or self._bounds.within(client, norms.of(report))
        return within and not (self._relative or (self._declared.compared and self._leave_out))

    def _hold(self, arrival: Arrival) -> None:
        """Keep a report until the cohort was heard."""
        client, report = arrival.client, arrival.report
        self._held[client] = tuple(report.tensors), arrival.broadcast
        self._waiting.add(client, report, payload(report.tensors))

    def _released(self, client: int, weight: float) -> Arrival:
        """A report that was held, with the weight that it counts with."""
        names, broadcast = self._held[client]
        report = self._waiting.pop(client)
        report = Report({name: report.tensors[name] for name in names}, weight)
        return Arrival(client, report, broadcast)

    @property
    def outlying(self) -> dict[int, str]:
        """Clients whose networks are unlike the others of the round, and how."""
        return outliers(self._compared)

    def _refused(self) -> dict[int, str]:
        """Why each client that was held is refused; empty where it is not."""
        refused: dict[int, str] = {}
        if self._bounded and self._held:
            limits = self._bounds.limits()
            refused = {client: self._bounds.excess(client, limits) for client in self._held}
            if self._declared.remedy is not None:
                remedy = self._declared.remedy(self._method, self._run)
                refused = {c: why and f"{why}; {remedy}" for c, why in refused.items()}
        for client in refused:  # which are no measure of the others
            if refused[client]:
                self._compared.pop(client, None)
        if self._leave_out:
            strange = {c: f"left out as an outlier: {why}" for c, why in self.outlying.items()}
            refused = strange | {c: why for c, why in refused.items() if why}
        return refused
