"""Reports that were learnt from an older state of the server, as the server of today takes them.

FedBuff (Nguyen et al. 2022, Algorithm 1) adds changes: w ← w + η Σ_s n_s a_s (φ_s − w_s) / Σ_s n_s,
with w_s the state that the client started from and a_s what a change of its staleness counts. A
report φ_s is the same as w + a_s (φ_s − w_s) to a method that adds reports, so that is what the
method gets, and with it bounds, clipping and robust rules.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedbayes.contracts import AnyMethod, ChangeCoordinates, Federation, Report
from fedbayes.contracts.changes import start_of
from fedbayes.core.messages import Masked, Message
from fedbayes.federation.broadcast import ServerMessages
from fedbayes.federation.client_runtime import Task
from fedbayes.federation.clock.live import Live
from fedbayes.federation.clock.settings import Asynchronous, ClockSettings
from fedbayes.federation.stages.stage import Arrival


@dataclass(frozen=True)
class AsyncRound:
    """Where clients of a round started that did not start from its server."""

    settings: Asynchronous
    """The `[asynchronous]` table."""
    since: Mapping[int, int]
    """The round in which each of them started, by client; those that are not here start now."""
    server: Callable[[int], Any]
    """The server's state before a round."""
    starts: Sequence[int]
    """Clients that start from the server's state before this round, whenever they report."""
    live: Live | None = None
    """Who finds out whose reports come; None where the cohort is known."""


class VersionedMessages:
    """The broadcasts that the clients of a round have: the round's own, and those of rounds before
    in which clients started whose reports come now.

    Args:
        own: that of the round.
        since: the round in which a client started, by client; those that are not here start now.
        server: the server's state before a round.
    """

    def __init__(
        self, own: ServerMessages, since: Mapping[int, int], server: Callable[[int], Any]
    ) -> None:
        self._own, self._since, self._server = own, dict(since), server
        self._older: dict[int, ServerMessages] = {}
        self._left: dict[int, int] = {}
        for number in since.values():
            self._left[number] = self._left.get(number, 0) + 1

    def tasks(self, cohort: list[int], states: Mapping[int, bytes]) -> Iterator[Task]:
        """The task of each client of the cohort."""
        for client in cohort:
            yield from self.of(client).tasks([client], states)

    def of(self, client: int) -> ServerMessages:
        """What a client had."""
        number = self._since.get(client)
        if number is None:
            return self._own
        if number not in self._older:
            own = self._own
            self._older[number] = ServerMessages(
                own.run, own.method, self._server(number), number, own.compression
            )
        return self._older[number]

    def answered(self, client: int) -> None:
        """Let go of a state of the server when the last client has answered that started there."""
        if (number := self._since.pop(client, None)) is None:
            return
        self._left[number] -= 1
        if not self._left[number]:
            self._older.pop(number, None)


def as_of_now(
    report: Report, method: AnyMethod, run: Federation, *, then: Any, now: Any, weight: float
) -> Report:
    """A report as if it had been learnt from the server's state of today.

    Args:
        report: that the server accepts.
        method: of the run.
        run: the run.
        then: the server's state that the client started from.
        now: the server's state.
        weight: what the change counts, in (0, 1].

    Returns:
        In the types that it came in, to whose precision it is rounded; sparse where it was. What
        the server has no tensor of is measured from zero, so it stays; integers count whole.
        Running statistics are means of the report's and of today's: a variance that changes as
        another one did would become negative.
    """
    before, after = (
        ChangeCoordinates.of(method, server, run).origin(report) for server in (then, now)
    )
    tensors: Message = {}
    for name, item in report.tensors.items():
        values = item.dense() if isinstance(item, Masked) else item
        start, end = (start_of(name, values.shape, centre) for centre in (before, after))
        if start is not None and end is not None:
            now_at = end.to(values.device).double()
            running = values.is_floating_point() and name in run.network.buffers
            origin = now_at if running else start.to(values.device).double()
            share = weight if values.is_floating_point() else 1.0
            moved = (now_at + share * (values.double() - origin)).to(values.dtype)
            tensors[name] = item.like(moved) if isinstance(item, Masked) else moved
        else:
            tensors[name] = item
    return Report(tensors, report.weight)


def up_to_date(
    arrivals: Iterator[Arrival], own: ServerMessages, past: AsyncRound
) -> Iterator[Arrival]:
    """Reports from older states of the server, as if they had been learnt from today's."""
    for arrival in arrivals:
        then = arrival.broadcast
        if then is not own:
            share = past.settings.weight(own.number - then.number)
            report = as_of_now(
                arrival.report,
                own.method,
                own.run,
                then=then.server,
                now=own.server,
                weight=share,
            )
            arrival = replace(arrival, report=report)
        yield arrival


def remarks(
    settings: Asynchronous, clock: ClockSettings, *, clocked: bool, clients: int, cohort: int
) -> Iterator[str]:
    """What a user should know of simulated time; as for `check`, with the clients at work."""
    if clock.ticks and not clocked:
        yield "clock has no effect: clients on other machines use real time"
    drawn = any(isinstance(rate, float) for rate in (clock.download, clock.upload))
    if clock.ticks and clock.rate_spread and not drawn:
        yield (
            "clock.rate_spread has no effect: clock.download and clock.upload set no median rate"
        )
    size = settings.buffer or 0
    if settings.active and cohort + size - 1 > clients:
        yield (
            f"of {clients} clients fewer than {cohort} can be at work: up to {size - 1} have "
            "updates that wait in the buffer (asynchronous.buffer)"
        )
