"""One round of any method on any engine."""

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedbayes import seeds
from fedbayes.contracts import AnyMethod, Info
from fedbayes.errors import EngineError, MessageError
from fedbayes.federation.aggregation import Aggregation, Noise, reduction
from fedbayes.federation.checks import decode_report
from fedbayes.federation.client_runtime import NoReport, Task
from fedbayes.federation.engines import Engine
from fedbayes.messages import Message, encode


@dataclass(frozen=True)
class Round:
    """What one round did."""

    number: int
    """The round, from 1."""
    server: Any
    """The server's state after it."""
    cohort: list[int]
    """The clients that were sampled."""
    bytes_down: int = 0
    """Encoded bytes from the server to the clients."""
    bytes_up: int = 0
    """Encoded bytes from the clients to the server."""
    scores: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of each client whose report counted: test samples its model got right, and tested."""
    refused: dict[int, str] = field(default_factory=dict)
    """Clients whose report was refused, and why."""
    lost: dict[int, str] = field(default_factory=dict)
    """Clients of whom no report came, and why."""
    troubles: dict[int, str] = field(default_factory=dict)
    """Clients whose report came after all, and what went wrong before."""
    link_down: int = 0
    """Bytes that a network carried to the clients; 0 where there is none."""
    link_up: int = 0
    """Bytes that a network carried from the clients."""
    skipped: bool = False
    """Whether too few reports came for an update, so that the server is as before."""
    info: Info = field(default_factory=dict)
    """The method's figures: means over the clients, and the server's."""


def sample_cohort(
    seed: int, number: int, clients: int, size: int, *, cyclic: bool = False
) -> list[int]:
    """The clients of a round: `size` of them, ascending.

    Uniformly without replacement, or in a fixed cycle: the first `size`, then the next.
    """
    if cyclic:
        return sorted((size * (number - 1) + place) % clients for place in range(size))
    stream = seeds.numpy_stream(seed, "cohort", round=number)
    return sorted(stream.choice(clients, size, replace=False, shuffle=False).tolist())


def run_round(
    method: AnyMethod,
    server: Any,
    engine: Engine,
    states: MutableMapping[int, bytes],
    *,
    number: int,
    cohort: list[int],
    min_reports: int = 1,
    aggregation: Aggregation | None = None,
    constants: str = "",
    noise: Noise = lambda _: np.random.default_rng(),
    heard: Callable[[int], object] = lambda done: None,
) -> Round:
    """Broadcast, E-steps, reports, M-step.

    Args:
        method: what to run.
        server: the server's state before the round.
        engine: who carries messages to the clients.
        states: encoded private states by client; the round stores the new ones.
        number: the round, from 1.
        cohort: the clients that take part.
        min_reports: how many good reports an update needs.
        aggregation: what is done with reports before they are averaged.
        constants: digest of the frozen weights that clients must have.
        noise: where its noise comes from.
        heard: is told, client by client, how many of the cohort are done.

    A report that is not what the method expects is refused: the client counts as if it had not
    taken part, and the round goes on. So does a client that was lost, and every client of a
    round that comes to too few reports: their states stay as they were, like the server's. All
    other errors leave here.

    Raises:
        EngineError: every client was lost.
    """
    encoded = _Encoder()
    expected: dict[int, Message] = {}
    sent: dict[int, int] = {}
    up = link_down = link_up = 0

    def tasks() -> Iterator[Task]:
        for client in cohort:
            message = method.message(server, client)
            expected[client] = method.expected(message)
            data = encoded(message)
            sent[client] = len(data)
            yield Task(client, number, data, states.get(client), constants)

    reports = method.reduction()
    if aggregation is not None and not aggregation.plain:
        broadcast = method.message(server, cohort[0])
        reports = reduction(aggregation, broadcast, len(cohort), noise)
    missing = 0
    infos: list[Info] = []
    scores: dict[int, tuple[int, int]] = {}
    refused: dict[int, str] = {}
    lost: dict[int, str] = {}
    troubles: dict[int, str] = {}
    waiting: dict[int, bytes] = {}
    for done, (client, outcome) in enumerate(zip(cohort, engine.train(tasks()), strict=True), 1):
        heard(done)
        link_down += outcome.link_down
        link_up += outcome.link_up
        if isinstance(outcome, NoReport):
            (refused if outcome.refused else lost)[client] = outcome.reason
            missing += not (outcome.refused or outcome.in_vain)
            if not outcome.link_down:
                sent[client] = 0
            continue
        up += outcome.sent or len(outcome.report)
        if outcome.trouble:
            troubles[client] = outcome.trouble
        try:
            report = decode_report(outcome.report, expected.pop(client))
            method.accept(server, report)
        except MessageError as error:
            refused[client] = str(error)
            continue
        reports.add(client, report)
        if outcome.state:
            waiting[client] = outcome.state
        if reports.clients >= min_reports:
            states.update(waiting)
            waiting.clear()
        infos.append(outcome.info)
        scores[client] = (outcome.correct, outcome.tested)

    if missing == len(cohort):
        reasons = "; ".join(f"client {client}: {reason}" for client, reason in lost.items())
        raise EngineError(f"no client reported in round {number}. {reasons}")
    info = _mean(infos)
    skipped = reports.clients < min_reports
    if not skipped:
        server, server_info = method.update(server, reports)
        info |= server_info
    return Round(
        number=number,
        server=server,
        cohort=cohort,
        bytes_down=0 if method.pooled else sum(sent.values()),
        bytes_up=0 if method.pooled else up,
        scores=scores,
        refused=refused,
        lost=lost,
        troubles=troubles,
        link_down=link_down,
        link_up=link_up,
        skipped=skipped,
        info=info,
    )


class _Encoder:
    """Encodes a message once while it consists of the very same tensors."""

    def __init__(self) -> None:
        self._message: Message = {}
        self._data = b""

    def __call__(self, message: Message) -> bytes:
        same = message.keys() == self._message.keys() and all(
            item is self._message[name] for name, item in message.items()
        )
        if not same:
            self._message, self._data = message, encode(message)
        return self._data


def _mean(infos: list[Info]) -> Info:
    """The mean of each figure over the clients that gave it."""
    values: dict[str, list[float]] = {}
    for info in infos:
        for name, value in info.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}
