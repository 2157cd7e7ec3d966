"""Asynchronous rounds of clients that take the time that they take."""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field

from fedbayes.core import seeds
from fedbayes.federation.broadcast import Sent
from fedbayes.federation.client_runtime import ClientFailure, ClientResult, Task
from fedbayes.federation.clock.queue import Slot, UnderWay
from fedbayes.federation.clock.settings import Asynchronous
from fedbayes.federation.engines import SupportsAsync


@dataclass
class Live:
    """One round whose reports are those that come first.

    Args:
        engine: over which clients report as they end.
        settings: the `[asynchronous]` table.
        number: the round, from 1.
        seed: of the run.
        concurrency: clients at work at any time, as far as so many are connected.
        under_way: who is at work when the round begins.
    """

    engine: SupportsAsync
    settings: Asynchronous
    number: int
    seed: int
    concurrency: int
    under_way: tuple[UnderWay, ...]
    starts: list[int] = field(default_factory=list, init=False)
    """Clients that have started in the round."""
    reports: list[UnderWay] = field(default_factory=list, init=False)
    """Whose reports have come, as they came."""
    lengths: list[tuple[int, int]] = field(default_factory=list, init=False)
    """Of each message that went out in the round, whenever its client started, encoded bytes, and
    by how many compression made them less."""
    _since: dict[int, int] = field(default_factory=dict, init=False)
    _late: tuple[UnderWay, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        longest = self.settings.longest
        if longest is not None:
            self._late = tuple(e for e in self.under_way if self.number - e.since > longest)
        self._since = {e.client: e.since for e in self.under_way if e not in self._late}
        self._rng = seeds.numpy_rng(self.seed, "cohort", round=self.number)

    @property
    def since(self) -> dict[int, int]:
        """The round in which clients started that are at work when the round begins."""
        return dict(self._since)

    def answers(
        self, had: Sent, states: Mapping[int, bytes]
    ) -> Iterator[tuple[int, ClientResult | ClientFailure]]:
        """What comes of clients' work, as it comes, until the buffer is full or time is over.

        Args:
            had: what clients are sent.
            states: their private states.
        """
        self.engine.forget([each.client for each in self._late])
        heard: set[int] = set()

        def more(connected: Set[int]) -> Iterator[Task]:
            # After a resume nobody is at work any more who was.
            lost = sorted(self._since.keys() - self.engine.at_hand())
            free = sorted(connected - self._since.keys() - heard)
            wanted = min(self.concurrency - len(self._since), len(free))
            drawn = self._rng.choice(len(free), wanted, replace=False) if wanted > 0 else ()
            started = sorted(free[place] for place in drawn)
            self.starts.extend(started)
            self._since |= dict.fromkeys(started, self.number)
            yield from had.tasks([*lost, *started], states)

        def sent(task: Task) -> None:
            self.lengths.append(had.of(task.client).length(task.client))

        for client, outcome in self.engine.arrivals(self.settings.buffer or 1, more, sent):
            heard.add(client)
            each = UnderWay(0.0, self._since.pop(client), client)
            if not isinstance(outcome, ClientFailure) or outcome.refused:
                self.reports.append(each)
            yield client, outcome

    def turn(self) -> Slot:
        """What happened in the round."""
        left = (UnderWay(0.0, since, client) for client, since in self._since.items())
        return Slot(
            self.number,
            0.0,
            tuple(self.starts),
            tuple(self.reports),
            self._late,
            tuple(sorted(left)),
        )
