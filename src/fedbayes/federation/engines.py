"""Engines: who carries a round's tasks to the clients and brings the outcomes back."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from fedbayes.federation.party import Exam, NoReport, Outcome, Party, Task
from fedbayes.metrics import Predictions


class Engine(Protocol):
    """Runs tasks where the clients are; results come in the order of the tasks."""

    def train(self, tasks: Iterable[Task]) -> Iterator[Outcome | NoReport]:
        """The E-step of each task's client."""

    def examine(self, exams: Iterable[Exam]) -> Iterator[Predictions]:
        """Try global models on test samples."""

    def close(self) -> None:
        """Free what the engine holds; it cannot be used after."""


class Sequential:
    """Clients one after the other in this process."""

    def __init__(self, party: Party) -> None:
        self._party = party

    def train(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        """Run the tasks in order."""
        return map(self._party.train, tasks)

    def examine(self, exams: Iterable[Exam]) -> Iterator[Predictions]:
        """Run the exams in order."""
        return map(self._party.examine, exams)

    def close(self) -> None:
        """Nothing to free."""
