"""Who is in a round, from which state of the server, and how long it lasts by the clock."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from fedbayes.config.config import Config
from fedbayes.contracts import AnyMethod, Federation, Reports
from fedbayes.core.tensors import pack, unpack
from fedbayes.data import FederatedData
from fedbayes.errors import RunError
from fedbayes.federation.broadcast import ServerMessages
from fedbayes.federation.client_runtime import set_aside
from fedbayes.federation.clock.clock import Clock, Lengths
from fedbayes.federation.clock.live import Live
from fedbayes.federation.clock.queue import Queue, Slot
from fedbayes.federation.engine_table import ENGINES
from fedbayes.federation.engines import Engine, SupportsAsync
from fedbayes.federation.round import Round
from fedbayes.federation.stages.stale import AsyncRound
from fedbayes.storage.metrics_file import Metrics
from fedbayes.storage.progress import Progress, Timing
from fedbayes.storage.server_history import ServerHistory


@dataclass(frozen=True)
class RoundPlan:
    """A round as it will go."""

    cohort: list[int]
    """The clients whose reports the round takes."""
    timing: Timing
    """Simulated time after it; of a synchronous round before it went, when it begins."""
    turn: Slot | None = None
    """What happens in it by the clock, where it is asynchronous."""
    past: AsyncRound | None = None
    """Where the clients started, where it is asynchronous."""

    def line(self) -> Metrics:
        """What the line of the round says of time; nothing without a clock."""
        line: Metrics = {"clock_seconds": self.timing.now} if self.timing.clock else {}
        if self.turn is not None:
            staleness = self.turn.staleness or [0]
            line["asynchronous"] = {
                "started": len(self.turn.starts),
                "under_way": len(self.turn.under_way),
                "staleness_mean": fmean(staleness),
                "staleness_max": max(staleness),
                "too_stale": len(self.turn.too_stale),
            }
        return line


@dataclass
class Scheduler:
    """Plans the rounds of a run.

    Args:
        config: the settings.
        run: what no round changes.
        method: of the run.
        data: the clients' data.
        versions: states of the server that clients are at work from.

    Raises:
        ConfigError: a file of the clock cannot be read, or lacks a client.
    """

    config: Config
    run: Federation
    method: AnyMethod
    data: FederatedData
    versions: ServerHistory
    _queue: Queue | None = field(default=None, init=False)
    _digest: str = field(default="", init=False)

    def __post_init__(self) -> None:
        config = self.config
        if clock_of(config, self.method):
            names, sizes = self.data.names[: self.data.clients], self.data.train_sizes()
            clock = Clock(config.clock, names, sizes, config.seed)
            cyclic = config.sampling == "cyclic"
            self._queue = Queue(clock, config.seed, self.run.cohort, cyclic)
            self._digest = clock.digest

    def take_up(self, progress: Progress) -> Timing:
        """The time that a run goes on from, of a checkpoint.

        Raises:
            RunError: the clock is not what it was, or a state of the server is lost or damaged
                that clients are at work from.
        """
        timing = progress.timing
        if timing.clock and self._queue is not None and timing.clock != self._digest:
            raise RunError(
                "the clock has changed since the run began: see clock.file and clock.spells. "
                "Restore them, or start a new run"
            )
        needed = states_needed(timing)
        self.versions.remove_strays(
            needed, progress.round, keep_older=self.config.keep_checkpoints == "all"
        )
        self.versions.check(needed)
        return replace(timing, clock=self._digest)

    def plan(
        self,
        number: int,
        timing: Timing,
        server: Any,
        cohort_of: Callable[[int], list[int]],
        engine: Callable[[], Engine],
    ) -> RoundPlan:
        """A round.

        Args:
            number: the round, from 1.
            timing: simulated time before it.
            server: the server's state before it; kept on disk where clients start from it that do
                not report in it.
            cohort_of: who is in a synchronous round, whoever is there.
            engine: of the run.
        """
        config, queue = self.config, self._queue
        if config.asynchronous.active and queue is None:
            arriving = engine()
            assert isinstance(arriving, SupportsAsync)
            live = Live(
                arriving,
                config.asynchronous,
                number,
                config.seed,
                self.run.cohort,
                timing.under_way,
            )
            past = AsyncRound(config.asynchronous, live.since, self.state, live.starts, live=live)
            return RoundPlan([], timing, None, past)
        if queue is None:
            return RoundPlan(cohort_of(number), timing)
        if config.asynchronous.buffer is None:
            if config.clock.availability == "always":
                return RoundPlan(cohort_of(number), timing)
            cohort, begins = queue.synchronous(number, timing.now)
            return RoundPlan(cohort, Timing.of(begins, (), self._digest))
        turn = queue.buffer(
            number,
            timing.now,
            timing.under_way,
            config.asynchronous.buffer,
            config.asynchronous.longest,
            self._foreseen(number, server),
            timing.first,
        )
        if any(each.since == number for each in turn.under_way):
            self.versions.save(number, pack(server))
        since = {each.client: each.since for each in turn.reports if each.since != number}
        past = AsyncRound(config.asynchronous, since, self.state, turn.starts)
        after = Timing.of(turn.now, turn.under_way, self._digest, turn.first)
        return RoundPlan(turn.cohort, after, turn, past)

    def _foreseen(self, number: int, server: Any) -> Callable[[int], Lengths]:
        """Lengths of a client's messages in an asynchronous round, before it has trained."""
        if not self.config.clock.carries:
            return lambda client: Lengths()
        config, weighted = self.config, Reports.of(self.method).weighted
        sent = ServerMessages(self.run, self.method, server, number, config.compression)
        # How many samples clients of a generator have is not known before they are asked.
        sizes = None if config.data.generator else self.data.train_sizes()

        def lengths(client: int) -> Lengths:
            count = 2 if sizes is None else int(sizes[client])
            kept = count - set_aside(count, config.training.validation)
            return sent.lengths(client, float(kept) if weighted else 1.0)

        return lengths

    def ended(self, planned: RoundPlan, server: Any, result: Round) -> RoundPlan:
        """A round as it went, where that was not known before; as planned, where it was.

        Args:
            planned: the round.
            server: the server's state before it; kept on disk as in `plan`.
            result: what the round did.
        """
        if planned.past is None and self._queue is not None:
            now = self._queue.ended(
                planned.cohort, result.number, planned.timing.now, result.lengths
            )
            return replace(planned, timing=Timing.of(now, (), self._digest))
        if planned.past is None or planned.past.live is None:
            return planned
        turn = planned.past.live.turn()
        if any(each.since == turn.number for each in turn.under_way):
            self.versions.save(turn.number, pack(server))
        timing = Timing.of(planned.timing.now, turn.under_way, "")
        return replace(planned, cohort=turn.cohort, timing=timing, turn=turn)

    def state(self, number: int) -> Any:
        """The server's state before an earlier round, from which clients are at work.

        Raises:
            RunError: it is lost or damaged.
        """
        return unpack(self.method.server_state, self.versions.load(number))


def clock_of(config: Config, method: AnyMethod) -> bool:
    """Whether a run has simulated time."""
    return config.clock.ticks and ENGINES[config.engine].clocked and not method.reports.pooled


def states_needed(timing: Timing) -> set[int]:
    """Rounds before which the server's states are that clients are at work from."""
    return set(timing.since.tolist())


def time_line(lines: Iterable[Metrics]) -> Metrics:
    """What a summary says of simulated time: the last round's, and staleness over all rounds."""
    told = list(lines)
    times = [line["clock_seconds"] for line in told if "clock_seconds" in line]
    summary: Metrics = {"clock_seconds": times[-1]} if times else {}
    waits = [line["asynchronous"] for line in told if "asynchronous" in line]
    if waits:
        summary["asynchronous"] = {
            "staleness_mean": fmean(wait["staleness_mean"] for wait in waits),
            "staleness_max": max(wait["staleness_max"] for wait in waits),
            "too_stale": sum(wait["too_stale"] for wait in waits),
        }
    return summary
