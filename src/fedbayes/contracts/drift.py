"""Methods whose server takes a step of an optimizer along the mean drift of its clients."""

from abc import abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedbayes.contracts.method import About, Info
from fedbayes.contracts.point import PointEstimate
from fedbayes.contracts.reports import Sum
from fedbayes.contracts.run import RoundContext
from fedbayes.core.tensors import Tensors
from fedbayes.inference import optimizers
from fedbayes.inference.schedules import ServerSchedule


@dataclass(frozen=True)
class DriftServer:
    """The global weights, the network's buffers, and the state of the server's optimizer."""

    weights: Tensors
    buffers: Tensors
    optimizer: Tensors = field(default_factory=dict)


class GeneralizedFedAvg(ServerSchedule, PointEstimate[DriftServer]):
    """The mean drift w − mean φ_s as a gradient for an optimizer at the server.

    It is the gradient of the M-step's objective, (λ/2) Σ_s ‖φ_s − w‖² (EM paper, Eq. 10), so a
    step of plain gradient descent with rate 1 is FedAvg. What no gradient trains (running
    means of a network, say) is averaged.
    """

    about = About(paper="Reddi et al. 2021; EM view: Louizos et al. 2021, section 2.1")
    server_state = DriftServer

    @abstractmethod
    def optimizer(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        """The server's optimizer over the global weights."""

    def update(
        self, server: DriftServer, reports: Sum, at: RoundContext
    ) -> tuple[DriftServer, Info]:
        """One step along the pseudo-gradient."""
        mean = reports.mean()
        drift = {name: w - mean[name] for name, w in server.weights.items()}
        weights, optimizer = optimizers.step(
            self.optimizer,
            server.weights,
            drift,
            server.optimizer,
            self.server_factor(at.round, at.run.rounds),
        )
        norm = torch.stack([d.norm() for d in drift.values()]).norm()
        buffers = {name: mean[name] for name in server.buffers}
        return DriftServer(weights, buffers, optimizer), {"pseudo_gradient": float(norm)}
