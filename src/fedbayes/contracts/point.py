"""Methods whose server and clients know single weights."""

from typing import Generic

from fedbayes.contracts.method import Averaged, Method, ServerState, Stateless
from fedbayes.contracts.reports import Sum


class PointEstimate(Averaged, Method[ServerState, Stateless, Sum], Generic[ServerState]):
    """Hard EM on a Gaussian prior.

    The server broadcasts its weights w, a client answers with its own, φ_s, found by gradients
    from w. Derived methods say how the server starts and updates, and may change the client's
    loss.

    Examples:
        >>> import fedbayes
        >>> from fedbayes.contracts import PointEstimate, Weights
        >>> class Mean(PointEstimate[Weights]):
        ...     name, server_state = "mean", Weights
        ...     def init(self, run):
        ...         return Weights(run.network.initial)
        ...     def update(self, server, reports, at):
        ...         return Weights(reports.mean()), {}
        >>> run = fedbayes.run(method=Mean(), rounds=1, clients=2, model={"hidden": [4]})
        >>> run.summary["rounds"]
        1
    """
