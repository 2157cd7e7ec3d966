"""Methods whose server and clients know single weights."""

from typing import Generic

from fedbayes.contracts.method import Averaged, Info, Method, ServerState, Stateless, server_state
from fedbayes.contracts.reports import Sum
from fedbayes.contracts.run import RoundContext


class PointEstimate(Averaged, Method[ServerState, Stateless, Sum], Generic[ServerState]):
    """Hard EM on a Gaussian prior.

    The server broadcasts its weights w, a client answers with its own, φ_s, found by gradients
    from w, and the server takes their mean. Derived methods may change the client's loss, and what
    the server does.

    Examples:
        >>> import fedbayes
        >>> from fedbayes.contracts import PointEstimate, Weights
        >>> class Mean(PointEstimate[Weights]):
        ...     name, server_state = "mean", Weights
        >>> run = fedbayes.run(method=Mean(), rounds=1, clients=2, model={"hidden": [4]})
        >>> run.summary["rounds"]
        1
    """

    def update(
        self, server: ServerState, reports: Sum, at: RoundContext
    ) -> tuple[ServerState, Info]:
        """The mean of the reports."""
        state: ServerState = server_state(self, reports.mean(), getattr(server, "buffers", ()))
        return state, {}
