"""Methods whose server and clients know single weights."""

from typing import Generic

from fedbayes.contracts.method import Averaged, Method, ServerState, Stateless
from fedbayes.contracts.reports import Sum


class PointEstimate(Averaged, Method[ServerState, Stateless, Sum], Generic[ServerState]):
    """Hard EM on a Gaussian prior.

    The server broadcasts its weights w, a client answers with its own, φ_s, found by gradients
    from w. Derived methods say how the server starts and updates, and may change the client's
    loss.
    """
