"""An engine whose hostile clients know the honest reports of the round before they answer."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from fedbayes.contracts import AnyMethod, Report, Run
from fedbayes.errors import MessageError
from fedbayes.federation.attacks.adversary import Adversary
from fedbayes.federation.attacks.base import View
from fedbayes.federation.attacks.shifts import changes
from fedbayes.federation.checks import decode_report, encode_report
from fedbayes.federation.client_runtime import Evaluation, NoReport, Outcome, Task
from fedbayes.federation.engines import Engine
from fedbayes.messages import Message, decode
from fedbayes.tensors import Tensors


class Colluding:
    """Holds the outcomes of a round, and re-writes those of the hostile clients.

    Where no client attacks in a round, outcomes pass as they come.

    Args:
        engine: runs the clients, all of them honestly.
        adversary: who attacks, by `collusion`.
        method: of the run.
        run: what no round changes.
    """

    def __init__(self, engine: Engine, adversary: Adversary, method: AnyMethod, run: Run) -> None:
        self._engine, self._adversary = engine, adversary
        self._method, self._run = method, run

    def train(self, tasks: Iterable[Task]) -> Iterator[Outcome | NoReport]:
        """Run the tasks; the hostile clients answer last."""
        kept = list(tasks)
        outcomes = self._engine.train(kept)
        if not any(self._hostile(task) for task in kept):
            yield from outcomes
            return
        pairs = list(zip(kept, outcomes, strict=True))
        read = [(task, outcome, self._read(task, outcome)) for task, outcome in pairs]
        honest = [
            changes(self._method, report, message, self._run)
            for task, _, (message, report) in read
            if report is not None and not self._hostile(task)
        ]
        liars = sum(report is not None for task, _, (_, report) in read if self._hostile(task))
        for task, outcome, (message, report) in read:
            if report is None or isinstance(outcome, NoReport) or not self._hostile(task):
                yield outcome
            else:
                yield self._lie(task, outcome, message, report, honest, liars)

    def evaluate(self, evaluations: Iterable[Evaluation]) -> Iterator[Tensors]:
        """Run the evaluations on the engine inside."""
        return self._engine.evaluate(evaluations)

    def close(self) -> None:
        """Close the engine inside."""
        self._engine.close()

    def _hostile(self, task: Task) -> bool:
        return self._adversary.attacks(task.client, task.round)

    def _read(self, task: Task, outcome: Outcome | NoReport) -> tuple[Message, Report | None]:
        """The broadcast and the report; none that the server would refuse."""
        message = decode(task.message)
        if isinstance(outcome, NoReport):
            return message, None
        try:
            expected = self._method.expected(message, self._run)
            return message, decode_report(outcome.report, expected)
        except MessageError:
            return message, None

    def _lie(
        self,
        task: Task,
        outcome: Outcome,
        message: Message,
        report: Report,
        honest: list[Tensors],
        hostile: int,
    ) -> Outcome:
        own = honest or [changes(self._method, report, message, self._run)]
        view = View(
            self._method, self._run, message, task.round, task.client, honest=own, hostile=hostile
        )
        return replace(outcome, report=encode_report(self._adversary.attack.report(report, view)))
