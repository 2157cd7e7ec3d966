"""FedL1: group lasso at the clients, and whole units below a threshold are not sent."""

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    Federation,
    Info,
    Method,
    Nothing,
    Report,
    Site,
    Sum,
    cross_entropy,
    point_predictor,
    units_remarks,
)
from fedbayes.inference.local import Objective
from fedbayes.inference.optimizers import ServerOptimizer
from fedbayes.messages import Message, dense
from fedbayes.metrics import Predictor
from fedbayes.models import Network, units
from fedbayes.models.units import Group
from fedbayes.tensors import Samples, Tensors


@dataclass(frozen=True)
class Server:
    """The weights, those of units below the threshold zero."""

    weights: Tensors
    buffers: Tensors
    memory: Tensors
    """Of the server's optimizer."""
    structure: str
    """Units of the layers with groups, as text."""


class FedL1(ServerOptimizer, Method[Server, Nothing, Sum]):
    """Group lasso with a hard threshold (EM paper, appendix A, Eq. 24 and 25).

    A client minimizes nll(φ) + λ Σ_g ‖φ_g‖₂ over the weights of units and filters. Client and
    server leave out every group of norm at most λ before they send, with all that the unit
    owns. The server takes an optimizer's step along the difference of the sparse models.
    """

    name = "fedl1"
    summary = "group lasso and a threshold: small units are not sent"
    paper = "Louizos et al. 2021, appendix A; Wen et al. 2016"
    server_state = Server

    l1: float = Field(2e-3, ge=0, description="λ, price of a group's norm, and the threshold")
    output_groups: bool = Field(
        False,
        description="whether the units of the last layer are groups too; classes may then go",
    )
    server_optimizer: Literal["sgd", "adam", "yogi"] = Field(
        "adam", description="optimizer of the server's weights"
    )

    def remarks(self, network: Network) -> list[str]:
        """Layers that have no groups."""
        return units_remarks(self.name, network, self._groups(network))

    def init(self, network: Network, federation: Federation) -> Server:
        """The network's initialization."""
        groups = self._groups(network)
        weights, buffers = network.split()
        return Server(self._thresholded(weights, groups), buffers, {}, units.store_units(groups))

    def message(self, server: Server, client: int) -> Message:
        """The groups above the threshold, and what belongs to none."""
        groups = units.load_units(server.structure)
        return self._sparse({**server.weights, **server.buffers}, groups)

    def _above(self, weights: Tensors, groups: tuple[Group, ...]) -> units.Masks:
        """The groups that stay (Eq. 25)."""
        alive = {u.layer: units.row_norms(weights, u) > self.l1 for u in groups}
        return units.masks(groups, alive, readers=False)

    def _sparse(self, weights: Tensors, groups: tuple[Group, ...]) -> Message:
        return units.mask(weights, self._above(weights, groups))

    def _thresholded(self, weights: Tensors, groups: tuple[Group, ...]) -> Tensors:
        return units.zero(weights, self._above(weights, groups))

    def _groups(self, network: Network) -> tuple[Group, ...]:
        return tuple(u for u in network.groups if self.output_groups or not u.output)

    def objective(self, site: Site) -> Objective:
        """Nll + λ Σ_g ‖φ_g‖₂ (Eq. 24); the subgradient at a zero group is zero."""
        nll = cross_entropy(site.network)
        groups = self._groups(site.network)

        def loss(weights: Tensors, batch: Samples) -> Tensor:
            norms = [units.row_norms(weights, layer) for layer in groups]
            lasso = self.l1 * torch.cat(norms).sum() if norms else 0.0
            return nll(weights, batch) + lasso

        return loss

    def local(
        self, message: Message, client: Nothing, data: Samples, site: Site
    ) -> tuple[Report, Nothing, Info]:
        """Train under the group lasso; report the groups above the threshold."""
        weights, info = site.fit(dense(message), self.objective(site), data)
        return Report(self._sparse(weights, self._groups(site.network))), client, info

    def update(self, server: Server, reports: Sum) -> tuple[Server, Info]:
        """A step along w − mean ŵ_s, and the threshold."""
        groups = units.load_units(server.structure)
        mean = reports.mean()
        drift: Tensors = {name: w - mean[name] for name, w in server.weights.items()}
        weights, memory = self.server_step(server.weights, drift, server.memory)
        weights = self._thresholded(weights, groups)
        info = {f"alive_{u.layer}": float((units.row_norms(weights, u) > 0).sum()) for u in groups}
        buffers = {name: mean[name] for name in server.buffers}
        return Server(weights, buffers, memory, server.structure), info

    def model(self, server: Server) -> Tensors:
        """The sparse weights, and the buffers."""
        return {**server.weights, **server.buffers}

    def personal(
        self, message: Message, report: Report, client: Nothing, network: Network
    ) -> Predictor:
        """The sparse network that the client reported."""
        return point_predictor(dense(report.tensors), network)
