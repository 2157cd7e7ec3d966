"""One round of any method on any engine."""

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedbayes import seeds
from fedbayes.contracts import AnyMethod, At, Info, Run
from fedbayes.federation.aggregation import Aggregation, NoiseRng, fold
from fedbayes.federation.broadcast import Broadcast
from fedbayes.federation.client_runtime import NoReport
from fedbayes.federation.engines import Engine
from fedbayes.federation.ledger import Ledger


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
    skipped: bool = False
    """Whether too few reports came for an update, so that the server is as before."""
    info: Info = field(default_factory=dict)
    """The method's metrics: means over the clients, and the server's."""


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
    noise: NoiseRng = lambda _: np.random.default_rng(),
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
        noise: where its noise comes from.
        heard: is told, client by client, how many of the cohort are done.

    A report that is not what the method expects is refused: the client counts as if it had not
    taken part, and the round goes on. So does a client that was lost, and every client of a
    round that comes to too few reports: their states stay as they were, like the server's. All
    other errors leave here.

    Raises:
        EngineError: every client was lost.
    """
    broadcast, ledger = Broadcast(run, method, server, number), Ledger()
    reports = fold(aggregation or Aggregation(), method, server, run, len(cohort), noise)
    waiting: dict[int, bytes] = {}
    outcomes = engine.train(broadcast.tasks(cohort, states))
    for done, (client, outcome) in enumerate(zip(cohort, outcomes, strict=True), 1):
        heard(done)
        report = ledger.enter(client, outcome, broadcast, method)
        if report is None or isinstance(outcome, NoReport):
            continue
        reports.add(client, report)
        if outcome.state:
            waiting[client] = outcome.state
        if reports.clients >= min_reports:
            states.update(waiting)
            waiting.clear()
    ledger.require_someone(number, cohort)
    info, skipped = ledger.info(), reports.clients < min_reports
    if not skipped:
        server, metrics = method.update(server, reports.reduced(), At(run, number))
        info |= metrics
    return Round(
        number=number,
        server=server,
        cohort=cohort,
        ledger=ledger,
        bytes_down=0 if method.centralized else sum(broadcast.sent.values()),
        bytes_up=0 if method.centralized else ledger.bytes_up,
        skipped=skipped,
        info=info,
    )
