"""Engines: who carries a round's tasks to the clients and brings the outcomes back."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from fedbayes.federation.client_runtime import Evaluation, NoReport, Outcome, Task
from fedbayes.tensors import Tensors


class Engine(Protocol):
    """Runs tasks where the clients are; results come in the order of the tasks."""

    def train(self, tasks: Iterable[Task]) -> Iterator[Outcome | NoReport]:
        """The E-step of each task's client."""

    def evaluate(self, evaluations: Iterable[Evaluation]) -> Iterator[Tensors]:
        """Evaluate global models on test samples."""

    def close(self) -> None:
        """Free what the engine holds; it cannot be used after."""
