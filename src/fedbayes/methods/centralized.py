"""The baseline without privacy: one model on the pooled data."""

from fedbayes.contracts import About, Federation, PointEstimate, Reports, Weights
from fedbayes.core.fields import unused


class Global(PointEstimate[Weights]):
    """Training on the union of all clients' data: the usual upper bound.

    A round is one local training over the pooled data, going on from the last round's weights.
    The data would have to move once; no model does, and no bytes are counted.
    """

    name = "global"
    about = About("one model on the pooled data of all clients (baseline)")
    server_state = Weights
    reports = Reports(pooled=True)

    def remarks(self, run: Federation) -> list[str]:
        """A note that weights have no effect on a single report."""
        return unused(self, ("weighting",), f"{self.name} pools all data", "method.")
