"""Methods whose server and clients know single weights."""

from typing import Generic

from fedbayes.contracts.method import Averaged, Info, Method, ServerState, Stateless
from fedbayes.contracts.reports import Report, Sum
from fedbayes.contracts.run import Federation, RoundContext
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples, Tensors
from fedbayes.inference.problem import Problem, Solved


class PointEstimate(Averaged, Method[ServerState, Stateless, Sum], Generic[ServerState]):
    """Hard EM on a Gaussian prior.

    The server broadcasts its weights w, a client answers with its own, φ_s, found by gradients
    from w. Derived methods say how the server starts and updates, and may change the client's
    loss. The server's state has a field `weights` unless `message` and `model` are overridden.

    Examples:
        >>> from fedbayes.contracts import Part, Reports, Weights
        >>> from fedbayes.contracts import PointEstimate
        >>> class Mean(PointEstimate[Weights]):
        ...     name = "mean"
        ...     summary = "averages the clients' weights"
        ...     server_state = Weights
        ...     reports = Reports({"weights": Part()})
        ...
        ...     def init(self, run):
        ...         return Weights(run.network.initial)
        ...
        ...     def update(self, server, reports, at):
        ...         return Weights(reports.mean()), {}
        >>> Mean().reports.reduce
        'mean'
    """

    def message(self, server: ServerState, at: RoundContext) -> Message:
        """Send the weights, the same to all."""
        message: Message = server.weights  # type: ignore[attr-defined]
        return message

    def problem(
        self, message: Message, client: Stateless, samples: Samples, at: RoundContext
    ) -> Problem:
        """Train from the server's weights."""
        return Problem(at.run.network.prepare(dense(message)))

    def report(
        self, solved: Solved, problem: Problem, client: Stateless, at: RoundContext
    ) -> tuple[Report, Stateless, Info]:
        """Report the weights where training ended."""
        return Report(dict(solved.parameters), self.weight(solved)), client, solved.info

    def model(self, server: ServerState, run: Federation) -> Tensors:
        """The server's weights."""
        weights: Tensors = server.weights  # type: ignore[attr-defined]
        return weights

    def personal_model(
        self, message: Message, report: Report | None, client: Stateless, run: Federation
    ) -> Tensors | None:
        """The network as the client reported it."""
        return dense(report.tensors) if report is not None else None
