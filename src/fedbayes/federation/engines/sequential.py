"""Clients run sequentially in this process."""

from collections.abc import Iterable, Iterator
from typing import Any

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


def start(simulation: Any) -> Sequential:
    """The engine for a `Simulation`."""
    return Sequential(simulation.runtime)
