"""The rounds of a federation, run sequentially until a rule stops them."""

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fedbayes.config.config import Config
from fedbayes.contracts.returned import stopped
from fedbayes.core.tensors import Tensors, pack, unpack
from fedbayes.errors import RunError
from fedbayes.federation.client_runtime import ClientRuntime
from fedbayes.federation.engines import Engine
from fedbayes.federation.ledger import ReportWeights
from fedbayes.federation.privacy.noise import Secret
from fedbayes.federation.privacy.spending import Spending
from fedbayes.federation.round import Round, Rules, run_round
from fedbayes.runs.cohorts import cohort_of
from fedbayes.runs.lines import wasted_round
from fedbayes.runs.privacy import mechanism
from fedbayes.storage.metrics_file import Metrics

Step = TypeVar("Step")


class RoundsInVain(RunError):
    """Too many rounds in a row came to nothing."""


@dataclass
class Rounds(Generic[Step]):
    """The loop over rounds; iterating over it runs the remaining rounds.

    `step` runs one: it calls `run`, `take` and `count`, and says what the iteration yields.
    """

    config: Config
    runtime: ClientRuntime
    secret: Secret | None
    """What noise and secret cohorts follow from, if anything does."""
    server: Any
    """The server's state."""
    states: MutableMapping[int, bytes]
    """Clients' private states, encoded."""
    weights: ReportWeights
    """What reports weigh, by what clients have said so far."""
    privacy: Spending
    """What the rounds so far have spent."""
    step: Callable[[int], Step]
    number: int = 0
    """Rounds that were run."""
    stopped: str = ""
    """Why the run ends before its last round; empty if it does not."""
    stop: bool = False
    """Set it to end after the round under way."""
    vain: int = 0
    """Rounds in a row that came to nothing, in this process."""
    why: str = ""
    """What the last of them came to."""

    def __iter__(self) -> Iterator[Step]:
        while not self.over and not self.stop:
            yield self.step(self.number + 1)
            self.require_sound()

    @property
    def over(self) -> bool:
        """Whether no round remains to be run."""
        done = self.number >= self.config.rounds or bool(self.stopped)
        return done or bool(stopped(self.server))

    def cohort(self, number: int) -> list[int]:
        """The clients of a synchronous round, including absent ones."""
        return cohort_of(self.config, self.runtime.run, self.secret, number)

    def run(self, number: int, engine: Engine, cohort: list[int], **more: Any) -> Round:
        """Broadcast, E-steps, reports, M-step.

        Args:
            number: the round.
            engine: the way to the clients.
            cohort: those that take part.
            **more: see `run_round`.
        """
        config, run, method = self.config, self.runtime.run, self.runtime.method
        rules = Rules(
            config.aggregation,
            config.compression,
            mechanism(config, run, self.privacy, self.secret, number=number, cohort=cohort),
            1 if method.reports.pooled else config.min_reports,
            self.runtime.stages,
        )
        return run_round(
            run,
            method,
            self.server,
            engine,
            self.states,
            number=number,
            cohort=cohort,
            rules=rules,
            weights=self.weights,
            **more,
        )

    def take(self, result: Round) -> Tensors:
        """Continue from the result of a round; the server's packed state."""
        packed = pack(result.server)
        # As it would be after a resume, down to the order of the names.
        self.server = unpack(self.runtime.method.server_state, packed)
        self.number, self.privacy = result.number, result.privacy or self.privacy
        return packed

    def count(self, line: Metrics) -> None:
        """Note whether a round, by its line of metrics, came to something."""
        self.why = wasted_round(line)
        self.vain = self.vain + 1 if self.why else 0

    def require_sound(self) -> None:
        """See that rounds come to something.

        Raises:
            RoundsInVain: for `stop_refused` rounds in a row every report was rejected, or the
                update undone.
        """
        most = self.config.stop_refused
        if self.over or not most or self.vain < most or self.config.privacy.noise:
            return  # with noise every round has an update, whoever reports
        raise RoundsInVain(
            f"in {most} consecutive rounds all updates were rejected or undone, the last time: "
            f"{self.why}. If the clients are honest, training diverges (set a smaller "
            "training.lr), or bounds are too small (aggregation.max_change, "
            "aggregation.max_weight)"
        )
