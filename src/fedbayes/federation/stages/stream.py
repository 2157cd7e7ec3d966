"""A round as a stream: what arrives from clients passes stages on its way to the update.

A stage is a function from arrivals to arrivals. It may change one, hold one back until the cohort
was heard, or reject one, in which case it tells the ledger. The order of stages is in `round.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from fedbayes.contracts import AnyMethod, Report
from fedbayes.federation.broadcast import ServerMessages, VersionedMessages
from fedbayes.federation.client_runtime import ClientFailure, ClientResult
from fedbayes.federation.ledger import Ledger
from fedbayes.federation.stages.stale import AsyncRound, as_of_now


@dataclass(frozen=True)
class Arrival:
    """A proper report of a client."""

    client: int
    report: Report
    broadcast: ServerMessages
    """What its client started from."""


Answers = Iterator[tuple[int, ClientResult | ClientFailure]]
"""What came of each client's task."""
Stage = Callable[[Iterator[Arrival]], Iterator[Arrival]]


def decoded(
    answers: Answers, sent: VersionedMessages, ledger: Ledger, method: AnyMethod
) -> Iterator[Arrival]:
    """The reports that can be read and that fit the method's pattern; the ledger has the others."""
    for client, outcome in answers:
        broadcast = sent.of(client)
        report = ledger.record(client, outcome, broadcast, method)
        sent.answered(client)
        if report is not None:
            yield Arrival(client, report, broadcast)


def up_to_date(
    arrivals: Iterator[Arrival], own: ServerMessages, past: AsyncRound, ledger: Ledger
) -> Iterator[Arrival]:
    """Reports from older states of the server, as if they had been learnt from today's.

    Args:
        arrivals: in the order in which they count.
        own: the broadcast of the round.
        past: where clients started.
        ledger: how many bytes they sent.
    """
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
