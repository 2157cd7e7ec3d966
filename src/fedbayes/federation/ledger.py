"""The accounts of a round: clients that reported, their weights, and rejected or lost reports."""

from collections.abc import MutableMapping
from dataclasses import dataclass, field

from fedbayes.contracts import AnyMethod, Info, Report, Reports
from fedbayes.core.messages import Message, dense
from fedbayes.errors import EngineError, MessageError
from fedbayes.federation.broadcast import ServerMessages
from fedbayes.federation.client_runtime import ClientFailure, ClientResult
from fedbayes.federation.stages.checks import (
    check_entries,
    check_scores,
    decode_report,
    figures,
    means,
)
from fedbayes.federation.stages.spill_buffer import SpillBuffer
from fedbayes.federation.stages.weights import ReportWeights, reweighted
from fedbayes.likelihoods import Scores


@dataclass
class Ledger:
    """What came of the cohort's tasks, entered one by one."""

    up: dict[int, int] = field(default_factory=dict)
    """Encoded bytes from each client to the server, of those that a report came of."""
    bytes_saved_up: int = 0
    """Bytes by which compression made that less, of the reports that could be read."""
    link_down: int = 0
    """Bytes that a network carried to the clients; 0 where there is none."""
    link_up: int = 0
    """Bytes that a network carried from the clients."""
    scores: dict[int, Scores] = field(default_factory=dict)
    """Of each client whose report counted: scores of its own model; empty without test samples."""
    refused: dict[int, str] = field(default_factory=dict)
    """Clients whose report was rejected, and why."""
    lost: dict[int, str] = field(default_factory=dict)
    """Clients of whom no report came, and why."""
    troubles: dict[int, str] = field(default_factory=dict)
    """Clients whose report came after all, and what went wrong before."""
    infos: dict[int, Info] = field(default_factory=dict)
    """Metrics of each client whose report counted, in its own words."""
    weights_of: dict[int, float] = field(default_factory=dict)
    """What each report weighs that could be read, in number of samples."""
    weights: ReportWeights = field(default_factory=lambda: ReportWeights(weighted=True))
    """What reports weigh."""
    _missing: int = field(default=0, init=False)
    _states: SpillBuffer = field(default_factory=SpillBuffer, init=False)

    @property
    def bytes_up(self) -> int:
        """Encoded bytes from the clients to the server."""
        return sum(self.up.values())

    def record(
        self,
        client: int,
        outcome: ClientResult | ClientFailure,
        broadcast: ServerMessages,
        method: AnyMethod,
    ) -> Report | None:
        """Account for the result of one client's task.

        Args:
            client: index of the client.
            outcome: its result or failure. Bytes of a task that never arrived do not count as sent.
            broadcast: of the round.
            method: of the run, which may reject values that no client can have.

        Returns:
            The report, if it is valid.
        """
        self.link_down += outcome.link_down
        self.link_up += outcome.link_up
        expected, codec = broadcast.expected(client), broadcast.codec(client)
        if isinstance(outcome, ClientFailure):
            (self.refused if outcome.refused else self.lost)[client] = outcome.reason
            self._missing += not (outcome.refused or outcome.blocked_by_others)
            if not outcome.link_down:
                broadcast.sent[client] = broadcast.saved[client] = 0
            return None
        self.up[client] = outcome.sent or len(outcome.report)
        if outcome.exact:
            expected = _exact(expected)
        try:
            if codec is None:
                report = decode_report(outcome.report, expected)
            else:
                report, saved = codec.read(outcome.report)
                self.bytes_saved_up += saved
            info = figures(outcome.info, "metrics")
            check_scores(outcome.scores, broadcast.run.likelihood, broadcast.run.measures)
            weight, why = self.weights.believed(client, report)
            check_entries(report, expected, method, broadcast.run.network)
            note = method.accept(broadcast.server, report, broadcast.run)
            if weight != report.weight:
                report = reweighted(report, weight, Reports.of(method).counts)
        except MessageError as error:
            self.refused[client] = str(error)
            return None
        if troubles := [*filter(None, (outcome.trouble, why, note))]:
            self.troubles[client] = "; ".join(troubles)
        self.infos[client] = info
        self.scores[client] = outcome.scores
        self.weights_of[client] = report.weight
        if outcome.state:
            self._states.add(client, outcome.state)
        return report

    def refuse(self, client: int, reason: str) -> None:
        """Take back what a client said whose report, once the cohort was heard, does not count."""
        self.refused[client] = reason
        for said in (self.infos, self.scores, self.troubles):
            said.pop(client, None)

    def keep(self, states: MutableMapping[int, bytes]) -> None:
        """The round counts: store the private states of clients whose reports do, and note what
        these weigh.
        """
        for client, state in self._states:
            if client not in self.refused:
                states[client] = state
        for client, weight in self.weights_of.items():
            if client not in self.refused:
                self.weights.counted(client, weight)

    def close(self) -> None:
        """Let go of private states."""
        self._states.close()

    def require_someone(self, number: int, cohort: list[int]) -> None:
        """See that not every client was lost.

        Raises:
            EngineError: all were.
        """
        if self._missing == len(cohort):
            reasons = "; ".join(f"client {c}: {reason}" for c, reason in self.lost.items())
            raise EngineError(f"no client reported in round {number}. {reasons}")

    def info(self) -> Info:
        """The mean of each metric over the clients that gave it, of a bounded number of them."""
        return means(self.infos.values())


def _exact(expected: Message) -> Message:
    """The pattern of a report in float64."""
    return {n: t.double() if t.is_floating_point() else t for n, t in dense(expected).items()}
