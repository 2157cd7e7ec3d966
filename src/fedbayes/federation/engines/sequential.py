"""Clients run in this process: one by one, or several at once."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from fedbayes.core import seeds
from fedbayes.core.tensors import Tensors
from fedbayes.federation.client_runtime import ClientResult, ClientRuntime, Evaluation, Task
from fedbayes.federation.engines import AtWork


class Sequential:
    """The engine without processes: tasks run in order where they are given."""

    def __init__(self, runtime: ClientRuntime) -> None:
        self._runtime = runtime
        self._working: tuple[int, ...] = ()

    def train(self, tasks: Iterable[Task]) -> Iterator[ClientResult]:
        """Run the tasks in order."""
        for task in tasks:
            self._working = (task.client,)
            with seeds.kept():  # of one client: what runs after it may use the generators
                outcome = self._runtime.train(task)
            self._working = ()
            yield outcome

    def evaluate(self, evaluations: Iterable[Evaluation]) -> Iterator[Tensors]:
        """Run the evaluations in order."""
        return map(self._runtime.evaluate, evaluations)

    def at_work(self) -> AtWork:
        """The client that is at work."""
        return AtWork(self._working)

    def close(self) -> None:
        """There is nothing to free: clients run in this process."""


class Stacked(Sequential):
    """Several clients are trained at once, as tensors with an axis for the client."""

    def train(self, tasks: Iterable[Task]) -> Iterator[ClientResult]:
        """Run the tasks in order, some at a time."""
        weights = self._runtime.run.network.initial.values()
        together = max(1, min(_MOST, _STACKED // sum(tensor.nbytes for tensor in weights)))
        waiting = iter(tasks)
        while group := list(islice(waiting, together)):
            self._working = tuple(task.client for task in group)
            if len(group) < _FEWEST:
                outcomes = [self._runtime.train(task) for task in group]
            else:
                outcomes = self._runtime.train_stacked(group)
            self._working = ()
            yield from outcomes


_STACKED = 4 << 20
"""Bytes of weights of the clients that are trained at once, at most: what caches hold."""
_MOST, _FEWEST = 64, 6
"""Clients that are trained at once; one by one, fewer are trained faster."""


def start(simulation: Any) -> Sequential:
    """The engine for a `Simulation`."""
    return Sequential(simulation.runtime)


def start_stacked(simulation: Any) -> Stacked:
    """The engine `stacked` for a `Simulation`."""
    return Stacked(simulation.runtime)
