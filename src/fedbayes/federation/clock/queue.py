"""Who starts when, from which state of the server, and whose report comes next."""

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from fedbayes.core import seeds
from fedbayes.federation.clock.clock import Clock, Lengths

_TRIES = 32
"""Clients that are drawn for each that is wanted before all are looked at."""


@dataclass(frozen=True, order=True)
class UnderWay:
    """A client at work; the order is that in which reports come."""

    ends: float
    """When its report comes, in seconds of the clock."""
    since: int
    """The round in which it started, from 1: it knows the server's state before that."""
    client: int


@dataclass(frozen=True)
class Slot:
    """What happens in a round, by the clock."""

    number: int
    """The round, from 1."""
    now: float
    """When it ends, in seconds of the clock."""
    starts: tuple[int, ...]
    """Clients that start from the server's state before the round."""
    reports: tuple[UnderWay, ...]
    """Whose reports the round takes, by the round of their start and then as they started."""
    too_stale: tuple[UnderWay, ...] = ()
    """Whose reports came too late to be taken."""
    under_way: tuple[UnderWay, ...] = ()
    """Who is at work at its end."""
    first: int = 0
    """Whose turn it is then to start, where clients start in a cycle."""

    @property
    def cohort(self) -> list[int]:
        """The clients of the reports."""
        return [each.client for each in self.reports]

    @property
    def staleness(self) -> list[int]:
        """Of each report."""
        return [self.number - each.since for each in self.reports]


@dataclass
class Queue:
    """Clients at work by the clock.

    Args:
        clock: how long they take.
        seed: of the run.
        concurrency: clients at work at any time; fewer if fewer are available.
        cyclic: whether clients of asynchronous rounds start in a fixed order, and are not drawn.
    """

    clock: Clock
    seed: int
    concurrency: int
    cyclic: bool = False
    _busy: set[int] = field(default_factory=set, init=False)
    _first: int = field(default=0, init=False)

    def synchronous(self, number: int, now: float) -> tuple[list[int], float]:
        """The cohort of a synchronous round, drawn from the clients that are there, and when it
        begins: where nobody is there, when someone comes.
        """
        self._busy = set()
        rng = seeds.numpy_rng(self.seed, "cohort", round=number)
        cohort = self._drawn(rng, self.concurrency, now)
        if not cohort:
            now = self.clock.first(now, range(self.clock.clients))
            cohort = self._drawn(rng, self.concurrency, now)
        return sorted(cohort), now

    def ended(
        self, cohort: list[int], number: int, now: float, lengths: Mapping[int, Lengths]
    ) -> float:
        """When the slowest of a cohort has reported that starts now.

        Args:
            cohort: the clients.
            number: the round, from 1.
            now: when it begins, in seconds of the clock.
            lengths: of their messages.
        """
        ends = (self.clock.ends(client, number, now, lengths[client]) for client in cohort)
        return max(ends, default=now)

    def buffer(
        self,
        number: int,
        now: float,
        under_way: tuple[UnderWay, ...],
        size: int,
        longest: int | None = None,
        lengths: Callable[[int], Lengths] = lambda client: Lengths(),
        first: int = 0,
    ) -> Slot:
        """The next reports, as many as an update takes.

        Whenever a client ends, another starts; a report of a moment counts before anyone starts in
        it. A client does not start again while it is at work, nor while its report waits for the
        others of its buffer.

        Args:
            number: the round, from 1.
            now: when it begins, in seconds of the clock.
            under_way: who is at work then.
            size: reports that the round takes.
            longest: the largest staleness of a report that is taken; None: any.
            lengths: of the messages of a client that starts.
            first: whose turn it is to start, where clients start in a cycle.
        """
        rng = seeds.numpy_rng(self.seed, "cohort", round=number)
        queue = sorted(under_way)
        self._busy, self._first = {each.client for each in queue}, first
        starts, taken, refused = list[int](), list[UnderWay](), list[UnderWay]()
        while True:
            while queue and queue[0].ends <= now and len(taken) < size:
                ended = heapq.heappop(queue)
                if longest is not None and number - ended.since > longest:
                    refused.append(ended)
                    self._busy.remove(ended.client)
                else:
                    taken.append(ended)
            if len(taken) == size:
                break
            wanted = self.concurrency - len(queue)
            chosen = self._in_turn(wanted, now) if self.cyclic else self._drawn(rng, wanted, now)
            started = sorted(chosen)
            for client in started:
                self._busy.add(client)
                ends = self.clock.ends(client, number, now, lengths(client))
                heapq.heappush(queue, UnderWay(ends, number, client))
            starts += started
            now = self._next(queue, now, wanted - len(started))
        order = {client: place for place, client in enumerate(starts)}
        taken.sort(key=lambda each: (each.since, order.get(each.client, each.client)))
        return Slot(
            number,
            now,
            tuple(starts),
            tuple(taken),
            tuple(refused),
            tuple(sorted(queue)),
            self._first,
        )

    def _next(self, queue: list[UnderWay], now: float, lacking: int) -> float:
        """The next moment at which a report comes, or a client where too few are at work."""
        moments = [queue[0].ends] if queue else []
        idle = [c for c in range(self.clock.clients) if c not in self._busy] if lacking else []
        if idle:
            moments.append(self.clock.first(now, idle))
        return max(now, min(moments))

    def _in_turn(self, wanted: int, now: float) -> list[int]:
        """At most `wanted` free clients, in the order of their turns."""
        found: list[int] = []
        clients, first = self.clock.clients, self._first
        for place in range(clients):
            if len(found) >= wanted:
                break
            client = (first + place) % clients
            if self._may_start(client, now):
                found.append(client)
                self._first = (client + 1) % clients
        return found

    def _drawn(self, rng: np.random.Generator, wanted: int, now: float) -> list[int]:
        """At most `wanted` free clients, drawn uniformly; the time depends on these alone."""
        clients = self.clock.clients
        wanted = max(0, min(wanted, clients))
        first = rng.choice(clients, wanted, replace=False, shuffle=False).tolist()
        found = {client: None for client in first if self._may_start(client, now)}
        for _ in range(_TRIES * (wanted - len(found))):
            if len(found) == wanted:
                break
            client = int(rng.integers(clients))
            if client not in found and self._may_start(client, now):
                found[client] = None
        if len(found) < wanted:
            rest = [c for c in range(clients) if c not in found and self._may_start(c, now)]
            more = min(wanted - len(found), len(rest))
            for place in rng.choice(len(rest), more, replace=False) if more else ():
                found[rest[place]] = None
        return list(found)

    def _may_start(self, client: int, now: float) -> bool:
        return client not in self._busy and self.clock.availability.here(client, now)
