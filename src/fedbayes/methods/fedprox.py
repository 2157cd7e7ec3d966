"""FedProx: the Gaussian prior of positive precision."""

from pydantic import Field
from torch import Tensor

from fedbayes.contracts import Federation, Info, PointEstimate, Site, Sum, Weights
from fedbayes.inference.local import Objective
from fedbayes.models import Network
from fedbayes.tensors import Samples, Tensors


class FedProx(PointEstimate[Weights]):
    """FedAvg with a pull towards the server's weights.

    Hard EM on p(φ_s | w) = N(w, 1/λ): a client minimizes nll(φ) + λ/2 ‖φ − w‖² (EM paper,
    Eq. 7 with the prior of Eq. 3), the server averages. λ = 0 is FedAvg.
    """

    name = "fedprox"
    summary = "FedAvg whose clients are drawn to the server's weights"
    paper = "Li et al. 2018; EM view: Louizos et al. 2021, section 2.1"
    server_state = Weights

    proximal: float = Field(0.01, ge=0, description="precision λ of the prior around the server")

    def init(self, network: Network, federation: Federation) -> Weights:
        """The network's initialization."""
        return Weights(network.initial)

    def objective(self, message: Tensors, site: Site) -> Objective:
        """The negative log-likelihood plus λ/2 ‖φ − w‖², over the trainable weights."""
        nll = super().objective(message, site)
        centre = site.network.prepare(message)
        if self.proximal == 0:
            return nll

        def loss(weights: Tensors, batch: Samples) -> Tensor:
            drift = sum(
                (weights[name] - w).square().sum()
                for name, w in centre.items()
                if name not in site.network.buffers
            )
            return nll(weights, batch) + 0.5 * self.proximal * drift

        return loss

    def update(self, server: Weights, reports: Sum) -> tuple[Weights, Info]:
        """The mean of the reports."""
        return Weights(reports.mean()), {}
