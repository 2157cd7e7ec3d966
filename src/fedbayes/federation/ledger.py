"""The accounts of a round: clients that reported, their weights, and rejected or lost reports.

A client chooses the weight of its report, and nobody can check it. So it is 1 where a method does
not weight; it has a largest value; and a client cannot grow: what it said when it first came is
the most that it counts for later.
"""

import tempfile
from collections.abc import Callable, Collection, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import IO, Generic, Self, TypeVar

import torch
from torch import Tensor

from fedbayes.contracts import AnyMethod, Info, Report, Reports
from fedbayes.core.by_client import ByClient
from fedbayes.core.messages import Message, dense
from fedbayes.errors import EngineError, MessageError
from fedbayes.federation.broadcast import Sent, ServerMessages
from fedbayes.federation.client_runtime import ClientFailure, ClientResult
from fedbayes.federation.stages.checks import (
    HEAVIEST,
    check_entries,
    check_scores,
    decode_report,
    decode_reports,
    figures,
    means,
)
from fedbayes.federation.stages.stage import Arrival
from fedbayes.likelihoods import Scores

Answer = tuple[int, ClientResult | ClientFailure]
"""What came of a client's task."""
Answers = Iterator[Answer]
"""What came of each client's task."""
T = TypeVar("T")
MEMORY = 256 * 2**20
"""Bytes that are kept in memory until the cohort was heard; what comes then goes to a file."""


class SpillBuffer(Generic[T]):
    """What waits until a whole cohort was heard, by client, in the order that it came in.

    What is beyond `memory` bytes is in a temporary file without a name, that nobody else can open
    and that is gone with the process.

    Args:
        write: makes bytes of a thing.
        read: its inverse.
        memory: bytes that are kept in memory.
    """

    def __init__(
        self, write: Callable[[T], bytes], read: Callable[[bytes], T], memory: int = MEMORY
    ) -> None:
        self._write, self._read, self._memory = write, read, memory
        self._near: dict[int, T] = {}
        self._far: dict[int, tuple[int, int]] = {}
        self._file: IO[bytes] | None = None

    def add(self, client: int, thing: T, size: int) -> None:
        """Keep what a client sent, which takes `size` bytes in memory."""
        if self._file is None and size <= self._memory:
            self._memory -= size
            self._near[client] = thing
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
        data = self._write(thing)
        self._far[client] = (self._file.seek(0, 2), len(data))
        self._file.write(data)

    def __iter__(self) -> Iterator[int]:
        yield from [*self._near, *self._far]

    def pop(self, client: int) -> T:
        """Let go of what a client sent, and return it."""
        if client in self._near:
            return self._near.pop(client)
        assert self._file is not None
        start, length = self._far.pop(client)
        self._file.seek(start)
        return self._read(self._file.read(length))

    def close(self) -> None:
        """Let go of all."""
        self._near.clear()
        if self._file is not None:
            self._file.close()


class ReportWeights:
    """The weights of a run's reports.

    Args:
        weighted: whether reports are weighted (`Reports.weighted`).
        most: the largest weight that is believed.
        first: of each client that a report has counted of, the weight of the first one, as
            `weight` float64 [n]. None: clients' weights are not compared with earlier ones.
    """

    def __init__(
        self, weighted: bool, most: float = HEAVIEST, first: ByClient | None = None
    ) -> None:
        self._weighted, self._most = weighted, most
        self._first = first
        self._new: dict[int, float] = {}

    @property
    def first(self) -> ByClient | None:
        """As the argument, with those that have counted since."""
        if self._first is not None and self._new:
            weights = torch.tensor(list(self._new.values()), dtype=torch.float64)
            self._first = self._first.having(torch.tensor(list(self._new)), {"weight": weights})
            self._new = {}
        return self._first

    def _first_of(self, client: int) -> float:
        """The weight that a client came with first; 0 where none has counted."""
        if self._first is None or client in self._new:
            return self._new.get(client, 0.0)
        row = self._first.row(client)
        return 0.0 if row is None else float(self._first.columns["weight"][row])

    @classmethod
    def of(cls, method: AnyMethod, most: float = HEAVIEST, first: ByClient | None = None) -> Self:
        """Those of a method's reports."""
        declared = Reports.of(method)
        # Where all data lie in one place, nobody else says how many there are.
        return cls(declared.weighted, HEAVIEST if declared.pooled else most, first)

    def believed(self, client: int, report: Report) -> tuple[float, str]:
        """The weight that a report counts with.

        Returns:
            It, and in words why it is another one than came; empty if it is not.

        Raises:
            MessageError: no client can have this weight.
        """
        said = report.weight
        if not self._weighted and said != 1.0:
            raise MessageError(
                f"its weight is {said:g}; with this method all updates have weight 1"
            )
        if said > self._most:
            raise MessageError(
                f"its weight is {said:g}; the limit is {self._most:g} (aggregation.max_weight)"
            )
        first = self._first_of(client)
        if first and said > first:
            why = f"its weight is {said:g}, but was {first:g} in its first update, which is used"
            return first, why
        return said, ""

    def counted(self, client: int, weight: float) -> None:
        """Note the weight of a report that counted."""
        if self._weighted and self._first is not None and not self._first_of(client):
            self._new[client] = weight


def reweighted(report: Report, weight: float, counts: Collection[str]) -> Report:
    """A report that counts with less weight than it came with.

    Args:
        report: that the server accepts.
        weight: above 0, less than its own.
        counts: names of tensors of it that count samples, which are lowered in proportion.
    """
    tensors = dict(report.tensors)
    for name in counts:
        if isinstance(count := tensors.get(name), Tensor):
            tensors[name] = (count.double() * (weight / report.weight)).to(count.dtype)
    return Report(tensors, weight)


@dataclass
class Ledger:
    """What came of the cohort's tasks, entered one by one."""

    up: dict[int, int] = field(default_factory=dict)
    """Encoded bytes from each client to the server, of those that a report came of."""
    bytes_saved_up: int = 0
    """Bytes by which compression made that less, of the reports that could be read."""
    link_down: int = 0
    """Bytes that a network carried to the clients; 0 where there is none."""
    link_up: int = 0
    """Bytes that a network carried from the clients."""
    scores: dict[int, Scores] = field(default_factory=dict)
    """Of each client whose report counted: scores of its own model; empty without test samples."""
    refused: dict[int, str] = field(default_factory=dict)
    """Clients whose report was rejected, and why."""
    lost: dict[int, str] = field(default_factory=dict)
    """Clients of whom no report came, and why."""
    troubles: dict[int, str] = field(default_factory=dict)
    """Clients whose report came after all, and what went wrong before."""
    infos: dict[int, Info] = field(default_factory=dict)
    """Metrics of each client whose report counted, in its own words."""
    weights_of: dict[int, float] = field(default_factory=dict)
    """What each report weighs that could be read, in number of samples."""
    weights: ReportWeights = field(default_factory=lambda: ReportWeights(weighted=True))
    """What reports weigh."""
    _missing: int = field(default=0, init=False)
    _group: tuple[bytes, ...] = field(default=(), init=False)
    _pattern: Message = field(default_factory=dict, init=False)
    _reports: dict[int, Report] = field(default_factory=dict, init=False)
    """Of the group, those that are read and not asked for yet, by the identity of their bytes."""
    _states: SpillBuffer[bytes] = field(
        default_factory=lambda: SpillBuffer(bytes, bytes), init=False
    )

    @property
    def bytes_up(self) -> int:
        """Encoded bytes from the clients to the server."""
        return sum(self.up.values())

    def arrivals(self, answers: Answers, sent: Sent, method: AnyMethod) -> Iterator[Arrival]:
        """The reports that can be read and that fit the method's pattern, one by one."""
        for client, outcome in answers:
            broadcast = sent.of(client)
            report = self.record(client, outcome, broadcast, method)
            del outcome  # its bytes, which the report does without
            sent.answered(client)
            if report is not None:
                yield Arrival(client, report, broadcast)
                del report  # while the next one is awaited

    def record(
        self,
        client: int,
        outcome: ClientResult | ClientFailure,
        broadcast: ServerMessages,
        method: AnyMethod,
    ) -> Report | None:
        """Account for the result of one client's task.

        Args:
            client: index of the client.
            outcome: its result or failure. Bytes of a task that never arrived do not count as sent.
            broadcast: of the round.
            method: of the run, which may reject values that no client can have.

        Returns:
            The report, if it is valid.
        """
        self.link_down += outcome.link_down
        self.link_up += outcome.link_up
        expected, codec = broadcast.expected(client), broadcast.codec(client)
        if isinstance(outcome, ClientFailure):
            (self.refused if outcome.refused else self.lost)[client] = outcome.reason
            self._missing += not (outcome.refused or outcome.blocked_by_others)
            if not outcome.link_down:
                broadcast.sent[client] = broadcast.saved[client] = 0
            return None
        self.up[client] = outcome.sent or len(outcome.report)
        if outcome.exact:
            pattern = dense(expected).items()
            expected = {n: t.double() if t.is_floating_point() else t for n, t in pattern}
        try:
            if codec is None:
                report = self._read(outcome, expected)
            else:
                report, saved = codec.read(outcome.report)
                self.bytes_saved_up += saved
            info = figures(outcome.info, "metrics")
            check_scores(outcome.scores, broadcast.run.likelihood, broadcast.run.measures)
            weight, why = self.weights.believed(client, report)
            check_entries(report, expected, method, broadcast.run.network)
            note = method.accept(broadcast.server, report, broadcast.run)
            if weight != report.weight:
                report = reweighted(report, weight, Reports.of(method).counts)
        except MessageError as error:
            self.refused[client] = str(error)
            return None
        if troubles := [*filter(None, (outcome.trouble, why, note))]:
            self.troubles[client] = "; ".join(troubles)
        self.infos[client] = info
        self.scores[client] = outcome.scores
        self.weights_of[client] = report.weight
        if outcome.state:
            self._states.add(client, outcome.state, len(outcome.state))
        return report

    def _read(self, outcome: ClientResult, expected: Message) -> Report:
        """The report of a result; those of its group are read at once, as far as they are proper.

        Raises:
            MessageError: it is not proper.
        """
        group = outcome.group
        if group and (group is not self._group or expected is not self._pattern):
            self._group, self._pattern = group, expected
            reports = decode_reports(group, expected)  # empty if one of them is not proper
            self._reports = {id(data): each for data, each in zip(group, reports, strict=False)}
        # The very same bytes: what came between, as an attack, may have replaced them.
        found = self._reports.pop(id(outcome.report), None) if group else None
        return decode_report(outcome.report, expected) if found is None else found

    def refuse(self, client: int, reason: str) -> None:
        """Take back what a client said whose report, once the cohort was heard, does not count."""
        self.refused[client] = reason
        for said in (self.infos, self.scores, self.troubles):
            said.pop(client, None)

    def keep(self, states: MutableMapping[int, bytes]) -> None:
        """The round counts: store the private states of clients whose reports do, and note what
        these weigh.
        """
        for client in self._states:
            if client not in self.refused:
                states[client] = self._states.pop(client)
        for client, weight in self.weights_of.items():
            if client not in self.refused:
                self.weights.counted(client, weight)

    def close(self) -> None:
        """Let go of private states."""
        self._states.close()

    def require_someone(self, number: int, cohort: list[int]) -> None:
        """See that not every client was lost, or raise an EngineError."""
        if self._missing == len(cohort):
            reasons = "; ".join(f"client {c}: {reason}" for c, reason in self.lost.items())
            raise EngineError(f"no client reported in round {number}. {reasons}")

    def info(self) -> Info:
        """The mean of each metric over the clients that gave it, of a bounded number of them."""
        return means(self.infos.values())
