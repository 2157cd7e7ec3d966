"""The event times of all clients, and how many are at risk at each."""

from dataclasses import dataclass

import numpy as np

from fedbayes.biostatistics.columns import Coding
from fedbayes.biostatistics.exchange import Array, Exchange
from fedbayes.errors import MessageError

MOST_TIMES = 1 << 20
"""Distinct event times of a client."""


@dataclass(frozen=True)
class EventTimes:
    """Distinct times at which events happen, and what happens there; K entries, by group."""

    times: Array
    """Rising within each group [K]."""
    groups: Array
    """Index of the group of each, rising [K]; zeros without groups."""
    at_risk: Array
    """Rows at risk just before [K]."""
    events: Array
    """Events [K], as rows at risk by weight."""
    rows: Array
    """Rows with an event, whatever they weigh [K]."""


def event_times(
    exchange: Exchange, coding: Coding, *, shared: bool, rows: bool = False
) -> EventTimes:
    """The union of the clients' event times, and their counts there, in two rounds.

    Args:
        exchange: the way to the clients.
        coding: of their columns.
        shared: whether every group has the times of all groups, as tests between them need.
        rows: whether it matters how many rows have an event, where they have weights.

    Returns:
        Of no times where the event happens in no row.

    Raises:
        MessageError: an answer holds no times.
    """
    told = {"coding": coding.model_dump()}
    count = max(1, len(coding.groups))
    answers = exchange.each("event_times", {**told, "groups": count}, 8 * MOST_TIMES)
    by_group: list[Array] = []
    for group in range(count):
        own = []
        for name, answer in answers.items():
            times = answer.numbers.get(str(group))
            if times is None or times.ndim != 1 or not np.isfinite(times).all():
                raise MessageError(f"client {name} did not send its event times")
            own.append(times)
        by_group.append(np.unique(np.concatenate(own)))
    if shared:
        by_group = [np.unique(np.concatenate(by_group))] * count
    times = np.concatenate(by_group)
    if not len(times):
        return EventTimes(times, times, times, times, times)
    groups = np.repeat(np.arange(count, dtype=np.float64), [len(each) for each in by_group])
    names = ("at_risk", "events", "rows") if rows and coding.weighted else ("at_risk", "events")
    shapes = dict.fromkeys(names, (len(times),))
    asked = {**told, "rows": "rows" in shapes}
    numbers = {"times": times, "groups": groups}
    found = exchange.sum("counts", asked, numbers, shapes, counts=True)
    return EventTimes(
        times, groups, found["at_risk"], found["events"], found.get("rows", found["events"])
    )
