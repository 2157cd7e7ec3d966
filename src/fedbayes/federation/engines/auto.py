"""The `auto` engine: clients run in this process until worker processes would save time."""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import psutil
from joblib import cpu_count

from fedbayes.core.tensors import Tensors
from fedbayes.errors import warn
from fedbayes.federation.client_runtime import ClientResult, Evaluation, Task
from fedbayes.federation.engines import AtWork
from fedbayes.federation.engines.sequential import Sequential
from fedbayes.federation.engines.workers import MOST, WORKER_BYTES, Workers, started

_GAIN = 0.8
"""Speed of n workers in ratio to n times that of one process."""
_LEAST = 20.0
"""Seconds that workers must save; they start in about five."""


class Auto:
    """Measures how long clients take, and starts workers once; the bits stay the same.

    Args:
        here: the engine to begin with.
        workers: starts a number of workers.
        most: how many workers this machine can have for the run.
        clients: of a round.
        rounds: of the run.
    """

    def __init__(
        self,
        here: Sequential,
        workers: Callable[[int], Workers],
        most: int,
        clients: int,
        rounds: int,
    ) -> None:
        self._engine: Sequential | Workers = here
        self._workers = workers
        self._most, self._clients, self._rounds = most, clients, rounds
        self._seconds, self._timed = 0.0, -1  # the first client's time includes what is done once

    def train(self, tasks: Iterable[Task]) -> Iterator[ClientResult]:
        """Run the tasks in order; the rest of them on workers, if these have just started."""
        waiting = iter(tasks)
        if isinstance(self._engine, Sequential):
            for place, task in enumerate(waiting, 1):
                begin = time.perf_counter()
                (outcome,) = self._engine.train([task])
                self._timed += 1
                self._seconds += (time.perf_counter() - begin) * (self._timed > 0)
                yield outcome  # what the server does with it is no client's time
                left = self._clients * (self._rounds - task.round + 1) - place
                if self._pays(left):
                    break
        yield from self._engine.train(waiting)

    def evaluate(self, evaluations: Iterable[Evaluation]) -> Iterator[Tensors]:
        """Run the evaluations in order."""
        return self._engine.evaluate(evaluations)

    def at_work(self) -> AtWork:
        """The clients that are at work."""
        return self._engine.at_work()

    def close(self) -> None:
        """End the workers, if there are any."""
        self._engine.close()

    def _pays(self, left: int) -> bool:
        """Start workers if they save enough time on the tasks that are left."""
        alone = left * self._seconds / max(1, self._timed)
        if alone < _LEAST:  # as in most runs; nothing is asked of the system
            return False
        memory = max(WORKER_BYTES, psutil.Process().memory_info().rss)
        count = min(self._most, psutil.virtual_memory().available // (2 * memory))
        saved = alone * (1 - 1 / (_GAIN * count)) if count > 1 else 0.0
        if saved < _LEAST:
            return False
        self._engine = self._workers(count)
        warn(
            f"{count} worker processes train the clients from now on, with the same results. That "
            f"saves about {saved / 60:.1f} minutes. Set engine = 'sequential' for one process"
        )
        return True


def start(simulation: Any) -> Sequential | Auto:
    """The engine for a `Simulation`."""
    here, config = Sequential(simulation.runtime), simulation.config
    here_only = simulation.folder.has_objects or config.device != "cpu"
    clients = simulation.cohort
    most = min(cpu_count() // config.threads, clients, MOST)
    if here_only or config.asynchronous.active or most < 2:
        return here
    return Auto(here, partial(started, simulation), most, clients, config.rounds)
