"""One round of any method on any engine.

A report that is not what the method expects, or whose change is out of all proportion, is rejected:
the client counts as if it had not taken part, and the round goes on. So does a client that was
lost, and every client of a round that comes to too few reports, or after which the server's state
is not sound: their states stay as they were, like the server's. All other errors leave here.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from fedbayes.contracts import (
    AnyMethod,
    ChangeCoordinates,
    Federation,
    Info,
    ReportList,
    RoundContext,
)
from fedbayes.contracts.returned import updated
from fedbayes.core.tensors import all_finite, pack
from fedbayes.federation.broadcast import Sent, ServerMessages
from fedbayes.federation.client_runtime import Task
from fedbayes.federation.clock.clock import Lengths
from fedbayes.federation.engines import Engine
from fedbayes.federation.ledger import Answer, Answers, Ledger, ReportWeights
from fedbayes.federation.privacy.mechanism import Mechanism, Private
from fedbayes.federation.privacy.spending import Spending
from fedbayes.federation.settings import AS_IT_IS, Aggregation, Compression
from fedbayes.federation.stages.aggregation import Fold, fold
from fedbayes.federation.stages.bounds import NormBound
from fedbayes.federation.stages.stage import Arrival, Stage, at_server
from fedbayes.federation.stages.stale import AsyncRound, VersionedMessages, up_to_date


@dataclass(frozen=True)
class Round:
    """What one round did."""

    number: int
    """The round, from 1."""
    server: Any
    """The server's state after it."""
    cohort: list[int]
    """The clients that were sampled."""
    ledger: Ledger
    """What came of their tasks."""
    bytes_down: int = 0
    """Encoded bytes from the server to the clients."""
    bytes_up: int = 0
    """Encoded bytes from the clients to the server."""
    lengths: dict[int, Lengths] = field(default_factory=dict)
    """The same of each client of a cohort that starts together."""
    bytes_saved_down: int = 0
    """Bytes by which compression made the former less."""
    bytes_saved_up: int = 0
    """Bytes by which compression made the latter less."""
    skipped: bool = False
    """Whether there was no update, so that the server is as before."""
    undone: str = ""
    """Why an update that was made does not count, in words; empty if it does, or none was made."""
    outliers: dict[int, str] = field(default_factory=dict)
    """Clients whose networks were unlike the others, and how."""
    reported: Info = field(default_factory=dict)
    """Metrics that clients report of their work, on average; the server cannot verify them."""
    info: Info = field(default_factory=dict)
    """What the server's update says of itself."""
    privacy: Spending | None = None
    """What the rounds so far have spent, where this one was made private."""


@dataclass(frozen=True)
class Rules:
    """What is done with the reports of a round."""

    aggregation: Aggregation = field(default_factory=Aggregation)
    """Bounds, outliers, and what replaces the mean."""
    compression: Compression = AS_IT_IS
    """In how many bytes numbers are sent."""
    privacy: Mechanism | None = None
    """What makes the round private, if anything does. Then every round has an update, also one
    without reports, and no report is measured by others."""
    min_reports: int = 1
    """Good reports that an update needs."""
    stages: tuple[Stage, ...] = ()
    """Of users, before reports are compared."""

    def reducer(self, method: AnyMethod, sent: ServerMessages, cohort: list[int]) -> Fold:
        """What collects the reports for the update."""
        if self.privacy is None:
            return fold(self.aggregation, method, sent.server, sent.run)
        pattern = method.expected(sent.message(cohort[0] if cohort else 0), sent.run)
        return self.privacy.begin(ChangeCoordinates.of(method, sent.server, sent.run), pattern)

    @property
    def bounds(self) -> Aggregation:
        """As far as reports are compared with one another."""
        if self.privacy is None:
            return self.aggregation
        return Aggregation(max_change=0.0, max_weight=self.aggregation.max_weight)


def run_round(
    run: Federation,
    method: AnyMethod,
    server: Any,
    engine: Engine,
    states: MutableMapping[int, bytes],
    *,
    number: int,
    cohort: list[int],
    rules: Rules | None = None,
    weights: ReportWeights | None = None,
    past: AsyncRound | None = None,
    on_progress: Callable[[int], object] = lambda done: None,
) -> Round:
    """Broadcast, E-steps, reports, M-step.

    Args:
        run: what no round changes.
        method: what to run.
        server: the server's state before the round.
        engine: who carries messages to the clients.
        states: encoded private states by client; the round stores the new ones.
        number: the round, from 1.
        cohort: the clients that take part.
        rules: what is done with reports.
        weights: what reports weigh; those of the ones that count are noted there.
        past: where clients of the cohort started, in an asynchronous round. Their reports count as
            if they had been learnt from `server`, and bytes are counted when clients start.
        on_progress: called after each client with the number of clients that are done.

    Raises:
        EngineError: every client was lost, and the round is not private.
    """
    rules = rules or Rules()
    weights = weights or ReportWeights.of(method, rules.aggregation.max_weight)
    own = ServerMessages(run, method, server, number, rules.compression)
    sent = VersionedMessages(own, past.since, past.server) if past else own
    ledger, reports = Ledger(weights=weights), rules.reducer(method, own, cohort)
    bounds = NormBound(rules.bounds, method, server, run)

    members = list[int]()
    answers = _heard(_answers(engine, cohort, sent, states, past), members, rules, on_progress)
    arrivals = ledger.arrivals(answers, sent, method)
    if past:
        arrivals = up_to_date(arrivals, own, past)
    _fold(bounds(at_server(rules.stages, arrivals, ledger), ledger), reports)

    cohort = members if past and past.live else cohort
    if rules.privacy is None and (cohort or past):
        ledger.require_someone(number, cohort)
    counts = rules.privacy is not None or reports.clients >= rules.min_reports
    update = _updated(own, ledger, reports, states) if counts else Update(server, skipped=True)
    # Outliers speak of single reports, as bounds do.
    outliers = {} if rules.privacy else bounds.outlying
    return _ended(own, ledger, past, update, cohort=cohort, outliers=outliers, reports=reports)


def _fold(arrivals: Iterator[Arrival], reports: Fold) -> None:
    """Take the reports in; none stays in memory for the sake of a local variable."""
    for arrival in arrivals:
        reports.add(arrival.client, arrival.report)
        del arrival  # while the next one is awaited


@dataclass(frozen=True)
class Update:
    """What the M-step of a round came to."""

    server: Any
    info: Info = field(default_factory=dict)
    undone: str = ""
    """Why it does not count, in words."""
    skipped: bool = False
    """Whether none was made."""


def _updated(
    own: ServerMessages, ledger: Ledger, reports: Fold, states: MutableMapping[int, bytes]
) -> Update:
    """The M-step; clients' private states are stored if it counts."""
    run, method, reduced = own.run, own.method, reports.reduced()
    if isinstance(reduced, ReportList):
        reduced.refused = frozenset(ledger.refused)
    given = method.update(own.server, reduced, RoundContext(run, own.number))
    server, info = updated(method, given, own.server)
    if undone := non_finite_state(server, method, run):
        return Update(own.server, undone=undone)
    ledger.keep(states)
    return Update(server, info)


def _heard(
    answers: Answers, members: list[int], rules: Rules, on_progress: Callable[[int], object]
) -> Answers:
    """The answers as the server may see them; who gave them is noted, and how many did."""

    def heard(answer: Answer) -> Answer:
        client, outcome = answer
        members.append(client)
        on_progress(len(members))
        return client, rules.privacy.kept(outcome) if rules.privacy else outcome

    return map(heard, answers)  # which holds none of them, as a loop would


def _ended(
    own: ServerMessages,
    ledger: Ledger,
    past: AsyncRound | None,
    update: Update,
    *,
    cohort: list[int],
    outliers: dict[int, str],
    reports: Fold,
) -> Round:
    """What a round did, with its bytes."""
    skipped = update.skipped or bool(update.undone)
    if skipped:  # clients' models are as before, and these scores are of others
        ledger.scores.clear()
    ledger.close()
    bytes_down, bytes_saved_down = _sent(own, past)
    nothing = own.method.reports.pooled
    alone = () if past else cohort
    return Round(
        number=own.number,
        server=update.server,
        cohort=cohort,
        ledger=ledger,
        bytes_down=0 if nothing else bytes_down,
        bytes_up=0 if nothing else ledger.bytes_up,
        lengths={c: Lengths(own.sent.get(c, 0), ledger.up.get(c, 0)) for c in alone},
        bytes_saved_down=bytes_saved_down,
        bytes_saved_up=ledger.bytes_saved_up,
        skipped=skipped,
        undone=update.undone,
        outliers=outliers,
        reported=ledger.info(),
        info=update.info,
        privacy=reports.record if isinstance(reports, Private) else None,
    )


def _answers(
    engine: Engine,
    cohort: list[int],
    sent: Sent,
    states: Mapping[int, bytes],
    past: AsyncRound | None,
) -> Answers:
    """What came of the clients' work: of the cohort in its order, or of whoever comes first."""
    if past is not None and past.live is not None:
        yield from past.live.answers(sent, states)
    elif cohort:
        outcomes = iter(engine.train(_tasks(sent, cohort, states, past)))
        try:
            for client in cohort:
                yield client, next(outcomes)  # zip would hold it while the next one is awaited
        except StopIteration:
            missing = len(cohort) - cohort.index(client)
            raise ValueError(f"the engine has {missing} outcomes fewer than tasks") from None
        if surplus := sum(1 for _ in outcomes):
            raise ValueError(f"the engine has {surplus} outcomes more than tasks")


def _tasks(
    sent: Sent, cohort: list[int], states: Mapping[int, bytes], past: AsyncRound | None
) -> Iterator[Task]:
    """The tasks of a cohort. After the last one, nobody is sent the encoded message again."""
    yield from sent.tasks(cohort, states)
    if past is None:
        sent.of(cohort[0]).forget()


def _sent(broadcast: ServerMessages, past: AsyncRound | None) -> tuple[int, int]:
    """Encoded bytes that went to clients in the round, and what compression saved of them."""
    if past is not None:
        live = past.live
        lengths = live.lengths if live else [broadcast.length(client) for client in past.starts]
        return sum(sent for sent, _ in lengths), sum(saved for _, saved in lengths)
    return sum(broadcast.sent.values()), sum(broadcast.saved.values())


def non_finite_state(server: Any, method: AnyMethod, run: Federation) -> str:
    """Why a server's state cannot be gone on with, in words; empty if it can."""
    for what, tensors in (("state", pack(server)), ("model", method.model(server, run))):
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not all_finite(tensor):
                return f"the update gave NaN or infinite values in {name!r} of the server's {what}"
    return ""
