"""One round of any method on any engine."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from fedbayes import seeds
from fedbayes.contracts import AnyMethod, At, Info, Run
from fedbayes.contracts.returned import updated
from fedbayes.federation.aggregation import Aggregation, fold
from fedbayes.federation.bounds import Intake
from fedbayes.federation.broadcast import Broadcast, Broadcasts
from fedbayes.federation.client_runtime import NoReport, Outcome
from fedbayes.federation.engines import Engine
from fedbayes.federation.fold import Fold, Way
from fedbayes.federation.kept import Kept
from fedbayes.federation.ledger import Ledger
from fedbayes.federation.privacy.mechanism import Mechanism, Private
from fedbayes.federation.privacy.spending import Spending
from fedbayes.federation.settings import AS_IT_IS, Compression
from fedbayes.federation.timing.clock import Lengths
from fedbayes.federation.timing.stale import Past, as_of_now
from fedbayes.federation.weights import Weights
from fedbayes.tensors import all_finite, pack


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
    spared_down: int = 0
    """Bytes by which compression made the former less."""
    spared_up: int = 0
    """Bytes by which compression made the latter less."""
    skipped: bool = False
    """Whether there was no update, so that the server is as before."""
    undone: str = ""
    """Why an update that was made does not count, in words; empty if it does, or none was made."""
    outliers: dict[int, str] = field(default_factory=dict)
    """Clients whose networks were unlike the others, and how."""
    reported: Info = field(default_factory=dict)
    """What clients say of their work, on average: nothing of it is known to be true."""
    info: Info = field(default_factory=dict)
    """What the server's update says of itself."""
    privacy: Spending | None = None
    """What the rounds so far have spent, where this one was made private."""


def sample_cohort(
    seed: int, number: int, clients: int, size: int, *, cyclic: bool = False
) -> list[int]:
    """The clients of a round: `size` of them, ascending.

    Uniformly without replacement, or in a fixed cycle: the first `size`, then the next.
    """
    if cyclic:
        return sorted((size * (number - 1) + place) % clients for place in range(size))
    rng = seeds.numpy_rng(seed, "cohort", round=number)
    return sorted(rng.choice(clients, size, replace=False, shuffle=False).tolist())


def run_round(
    run: Run,
    method: AnyMethod,
    server: Any,
    engine: Engine,
    states: MutableMapping[int, bytes],
    *,
    number: int,
    cohort: list[int],
    min_reports: int = 1,
    aggregation: Aggregation | None = None,
    privacy: Mechanism | None = None,
    weights: Weights | None = None,
    compression: Compression = AS_IT_IS,
    past: Past | None = None,
    heard: Callable[[int], object] = lambda done: None,
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
        min_reports: how many good reports an update needs.
        aggregation: what is done with reports before they are averaged.
        privacy: what makes the round private, if anything does. Then every round has an update,
            also one that nobody reports in, and no report is measured by others.
        weights: what reports weigh; those of the ones that count are noted there.
        compression: in how many bytes numbers are sent; as they are by default.
        past: where clients of the cohort started, in an asynchronous round. Their reports count as
            if they had been learnt from `server`, and bytes are counted when clients start.
        heard: is told, client by client, how many of the cohort are done.

    A report that is not what the method expects, or whose change is out of all proportion, is
    refused: the client counts as if it had not taken part, and the round goes on. So does a client
    that was lost, and every client of a round that comes to too few reports, or after which the
    server's state is not sound: their states stay as they were, like the server's. All other errors
    leave here.

    Raises:
        EngineError: every client was lost, and the round is not private.
    """
    aggregation = aggregation or Aggregation()
    weights = weights or Weights.of(method, aggregation.max_weight)
    broadcast = Broadcast(run, method, server, number, compression)
    ledger = Ledger(weights=weights)
    reports: Fold
    if privacy is None:
        reports = fold(aggregation, method, server, run)
    else:
        pattern = method.expected(broadcast.message(cohort[0] if cohort else 0), run)
        reports, min_reports = privacy.begin(Way.of(method, server, run), pattern), 0
        aggregation = Aggregation(max_change=0.0, max_weight=aggregation.max_weight)
    intake, after = Intake(aggregation, method, server, run, reports), Kept()
    had = Broadcasts(broadcast, past.since, past.server) if past else Broadcasts(broadcast, {}, int)
    answers = _answers(engine, cohort, had, states, past)
    if past and past.live:
        cohort = []
    for done, (client, outcome) in enumerate(answers, 1):
        heard(done)
        if past and past.live:
            cohort.append(client)
        if privacy is not None:
            outcome = privacy.kept(outcome)
        then = had.of(client)
        report = ledger.enter(client, outcome, then, method)
        had.answered(client)
        if report is None or isinstance(outcome, NoReport):
            continue
        if past and past.timed:
            then.require_foreseen(client, ledger.up[client])
        if past and then is not broadcast:
            share = past.settings.weight(number - then.number)
            report = as_of_now(report, method, run, then=then.server, now=server, weight=share)
        intake.add(client, report)
        if outcome.state:
            after.add(client, outcome.state)
    for client, reason in intake.close():
        ledger.refuse(client, reason)
    if privacy is None and (cohort or past):
        ledger.require_someone(number, cohort)
    info: Info = {}
    skipped, undone = reports.clients < min_reports, ""
    if not skipped:
        told = method.without(server, ledger.refused)
        new, metrics = updated(method, method.update(told, reports.reduced(), At(run, number)))
        undone = unsound(new, method, run)
        if not undone:
            server, info = new, metrics
            intake.count(weights)
            for client, state in after:
                if client not in ledger.refused:
                    states[client] = state
    after.close()
    if skipped or undone:  # clients' models are as before, and these scores are of others
        ledger.scores.clear()
    bytes_down, spared_down = _sent(broadcast, past)
    return Round(
        number=number,
        server=server,
        cohort=cohort,
        ledger=ledger,
        bytes_down=0 if method.centralized else bytes_down,
        bytes_up=0 if method.centralized else ledger.bytes_up,
        lengths={
            client: Lengths(broadcast.sent.get(client, 0), ledger.up.get(client, 0))
            for client in (() if past else cohort)
        },
        spared_down=spared_down,
        spared_up=ledger.spared_up,
        skipped=skipped or bool(undone),
        undone=undone,
        outliers={} if privacy is not None else intake.outlying,  # these speak of single reports
        reported=ledger.info(),
        info=info,
        privacy=reports.record if isinstance(reports, Private) else None,
    )


def _answers(
    engine: Engine,
    cohort: list[int],
    had: Broadcasts,
    states: Mapping[int, bytes],
    past: Past | None,
) -> Iterator[tuple[int, Outcome | NoReport]]:
    """What came of the clients' work: of the cohort in its order, or of whoever comes first."""
    if past is not None and past.live is not None:
        yield from past.live.answers(had, states)
    elif cohort:
        yield from zip(cohort, engine.train(had.tasks(cohort, states)), strict=True)


def _sent(broadcast: Broadcast, past: Past | None) -> tuple[int, int]:
    """Encoded bytes that went to clients in the round, and what compression spared of them."""
    if past is not None:
        live = past.live
        lengths = live.lengths if live else [broadcast.length(client) for client in past.starts]
        return sum(sent for sent, _ in lengths), sum(spared for _, spared in lengths)
    return sum(broadcast.sent.values()), sum(broadcast.spared.values())


def unsound(server: Any, method: AnyMethod, run: Run) -> str:
    """Why a server's state cannot be gone on with, in words; empty if it can."""
    for what, tensors in (("state", pack(server)), ("model", method.model(server, run))):
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not all_finite(tensor):
                return f"the update left NaN or infinite values in {name!r} of the server's {what}"
    return ""
