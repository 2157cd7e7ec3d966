"""Clients one after the other in this process."""

from collections.abc import Iterable, Iterator
from typing import Any

from fedbayes.federation.client_runtime import ClientRuntime, Evaluation, Outcome, Task
from fedbayes.tensors import Tensors


class Sequential:
    """The engine without processes: tasks run in order where they are given."""

    def __init__(self, runtime: ClientRuntime) -> None:
        self._runtime = runtime

    def train(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        """Run the tasks in order."""
        return map(self._runtime.train, tasks)

    def evaluate(self, evaluations: Iterable[Evaluation]) -> Iterator[Tensors]:
        """Run the evaluations in order."""
        return map(self._runtime.evaluate, evaluations)

    def close(self) -> None:
        """There is nothing to free: clients run in this process."""


def start(simulation: Any) -> Sequential:
    """The engine for a `Simulation`."""
    return Sequential(simulation.runtime)
