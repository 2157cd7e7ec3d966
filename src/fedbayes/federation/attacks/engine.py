"""An engine whose malicious clients lie to the server."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from fedbayes.contracts import AnyMethod, Federation, Report, RoundContext
from fedbayes.core.tensors import Tensors
from fedbayes.errors import MessageError
from fedbayes.federation.attacks.adversary import Adversary
from fedbayes.federation.attacks.base import View
from fedbayes.federation.client_runtime import ClientFailure, ClientResult, Evaluation, Task
from fedbayes.federation.engines import AtWork, Engine, at_work
from fedbayes.federation.settings import AS_IT_IS, Compression
from fedbayes.federation.stages.report_codec import Compressor, ReportCodec


@dataclass(frozen=True)
class AdversarialEngine:
    """Runs the clients honestly on another engine, and rewrites the reports of malicious ones.

    Results pass as they arrive; where malicious clients collude, they wait for all of the round.
    Reports of honest clients pass unchanged, byte by byte.
    """

    engine: Engine
    """Runs the clients."""
    adversary: Adversary
    """Who attacks, when, and how."""
    method: AnyMethod
    """The method of the run."""
    run: Federation
    """What no round changes."""
    server: Callable[[int], Any]
    """The server's state before a round: the one under way, or one in which a client started."""
    compression: Compression = AS_IT_IS
    """In how many bytes numbers are sent."""

    def train(self, tasks: Iterable[Task]) -> Iterator[ClientResult | ClientFailure]:
        """Run the tasks; malicious clients answer with a lie."""
        asked: list[tuple[int, int]] = []

        def noted() -> Iterator[Task]:
            for task in tasks:
                asked.append((task.client, task.round))
                yield task

        outcomes = self.engine.train(noted())
        if self.adversary.attack.collusion:
            yield from self._together(list(outcomes), asked)
            return
        for place, outcome in enumerate(outcomes):
            client, number = asked[place]
            yield self._answer(outcome, self._view(client, number))

    def evaluate(self, evaluations: Iterable[Evaluation]) -> Iterator[Tensors]:
        """Run the evaluations on the engine inside."""
        return self.engine.evaluate(evaluations)

    def at_work(self) -> AtWork:
        """What goes on at the clients of the engine inside."""
        return at_work(self.engine)

    def close(self) -> None:
        """Close the engine inside."""
        self.engine.close()

    def _together(
        self, outcomes: list[ClientResult | ClientFailure], asked: list[tuple[int, int]]
    ) -> Iterator[ClientResult | ClientFailure]:
        """The answers of clients that know the honest ones."""
        views = [self._view(client, number) for client, number in asked]
        if not any(self._lies(view) for view in views):
            yield from outcomes
            return
        reports = [self._read(outcome, view) for outcome, view in zip(outcomes, views, strict=True)]
        honest: list[Tensors] = []
        liars: list[Tensors] = []
        for report, view in zip(reports, views, strict=True):
            if report is not None:
                (liars if self._lies(view) else honest).append(view.changes(report))
        for outcome, view in zip(outcomes, views, strict=True):
            # Where all are malicious, they imitate what they would have said themselves.
            known = replace(view, honest=honest or liars, hostile=len(liars))
            yield self._answer(outcome, known)

    def _view(self, client: int, number: int) -> View:
        return View(self.method, self.server(number), RoundContext(self.run, number, client))

    def _lies(self, view: View) -> bool:
        return self.adversary.attacks(view.at.client, view.at.round)

    def _read(self, outcome: ClientResult | ClientFailure, view: View) -> Report | None:
        """The report of a client; None if the server would refuse it."""
        if isinstance(outcome, ClientFailure):
            return None
        try:
            return self._codec(view).read(outcome.report)[0]
        except MessageError:
            return None

    def _answer(
        self, outcome: ClientResult | ClientFailure, view: View
    ) -> ClientResult | ClientFailure:
        """What a client answers: what it would honestly, unless it attacks."""
        if isinstance(outcome, ClientFailure) or not self._lies(view):
            return outcome
        report = self._read(outcome, view)
        if report is None:
            return outcome
        codec, lie = self._codec(view), self.adversary.attack.report(report, view)
        return replace(outcome, report=codec.write(codec.sent_by(lie), {}).data)

    def _codec(self, view: View) -> ReportCodec:
        """The way of a client's report."""
        message = self.method.message(view.server, view.at)
        return Compressor(self.compression, self.method, self.run).codec(message, view.at)
