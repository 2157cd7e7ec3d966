"""Engines: who carries a round's tasks to the clients and brings the outcomes back.

An engine runs tasks where the clients are and yields their outcomes in the order of the cohort. A
new one is a file with `train`, `evaluate` and `close`, and a row of `federation/engine_table.py`,
which says what it can: the config, the help and the checks ask that table and know no engine by
name. Engines carry bytes and never look into them, and every `exact` one must end at the same bits.

An engine may say who is at work and who is away (`SupportsStatus.at_work`), for the display and for
`report --watch`. Processes elsewhere, of `workers` as of `ray`, are asked by a header in JSON and
bytes (`questions.py`).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from fedbayes.core.tensors import Tensors
from fedbayes.federation.client_runtime import ClientFailure, ClientResult, Evaluation, Task


class Engine(Protocol):
    """Runs tasks where the clients are; results come in the order of the tasks."""

    def train(self, tasks: Iterable[Task]) -> Iterator[ClientResult | ClientFailure]:
        """The E-step of each task's client."""

    def evaluate(self, evaluations: Iterable[Evaluation]) -> Iterator[Tensors]:
        """Evaluate global models on test samples."""

    def close(self) -> None:
        """Free what the engine holds; it cannot be used after."""


NOT_CONNECTED = "not connected"
"""Why a client cannot be reached of which nothing else is known."""


@dataclass(frozen=True)
class AtWork:
    """The current work of the clients."""

    working: tuple[int, ...] = ()
    """Clients that are at work."""
    answered: int = 0
    """Tasks of the round that are answered, also those whose turn to be handed on has not come; 0
    where that is never more than what was handed on."""
    away: Mapping[int, str] = field(default_factory=dict)
    """Clients that cannot be reached, and why."""


@runtime_checkable
class SupportsStatus(Protocol):
    """An engine that reports its current work to another thread."""

    def at_work(self) -> AtWork:
        """The current work of the clients. It is quick, and changes nothing."""


def at_work(engine: Engine | None) -> AtWork:
    """What goes on at the clients of an engine, if there is one yet and it tells."""
    return engine.at_work() if isinstance(engine, SupportsStatus) else AtWork()


@runtime_checkable
class SupportsClientEvaluation(Protocol):
    """An engine whose clients can try a global model on their own test samples."""

    def tried(self, tasks: Iterable[Task]) -> Iterator[ClientResult | ClientFailure]:
        """The scores of the model in each task, in the order of the tasks."""


@runtime_checkable
class SupportsFinalBroadcast(Protocol):
    """An engine whose clients are elsewhere, and can be handed what they are to keep."""

    def deliver(self, copies: Iterable[Task]) -> dict[int, str]:
        """Hand clients copies of the last global model; those that got none, each with why."""


@runtime_checkable
class Recognizes(Protocol):
    """An engine whose clients are elsewhere, and are known by their keys."""

    @property
    def keys(self) -> Mapping[int, bytes]:
        """Digest of the key that each client came with first, of those that have one."""

    def recognize(self, keys: Mapping[int, bytes]) -> None:
        """Have clients come with these keys alone."""


@runtime_checkable
class SupportsAsync(Protocol):
    """An engine whose clients stay at work from one round to the next, and report as they end."""

    def arrivals(
        self,
        reports: int,
        more: Callable[[Set[int]], Iterable[Task]],
        sent: Callable[[Task], object],
    ) -> Iterator[tuple[int, ClientResult | ClientFailure]]:
        """Yield the first `reports` reports, and the failures meanwhile, as they arrive.

        Args:
            reports: number of reports wanted; fewer arrive when the round's time is over.
            more: returns the tasks that may start on connected clients; called again and again.
            sent: called with each task when it is sent for the first time.
        """

    def at_hand(self) -> set[int]:
        """Clients that are at work, or whose report waits for the next round."""

    def forget(self, clients: Collection[int]) -> None:
        """Wait no more for the reports of some clients."""
