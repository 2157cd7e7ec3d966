"""FedL1: group lasso at the clients, and whole units below a threshold are not sent."""

from math import sqrt
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    UNIFORM,
    About,
    Averaged,
    Federation,
    Info,
    Known,
    Loss,
    Method,
    Part,
    Problem,
    Report,
    Reports,
    RoundContext,
    Solved,
    Stateless,
    Sum,
    Tree,
    nll,
    sgd,
    units_remarks,
)
from fedbayes.contracts.drift import DriftServer
from fedbayes.core.messages import Message
from fedbayes.core.tensors import Samples, Tensors
from fedbayes.inference.optimizers import ServerOptimizer
from fedbayes.models import units
from fedbayes.models.units import Group


class FedL1(Averaged, ServerOptimizer, Method[DriftServer, Stateless, Sum]):
    """Group lasso with a hard threshold (EM paper, appendix A, Eq. 24 and 25).

    A client minimizes nll(φ) + λ Σ_g ‖φ_g‖₂ over the weights of units and filters. Client and
    server leave out every group of norm at most λ before they send, with all that the unit
    owns. The server takes an optimizer's step along the difference of the sparse models.
    """

    name = "fedl1"
    about = About(
        "group lasso with a threshold: small units are not sent",
        "Louizos et al. 2021, appendix A; Wen et al. 2016",
        published=UNIFORM,
    )
    server_state = DriftServer
    reports = Reports({"weights": Part(mask="chosen", missing="zero")})

    l1: float = Field(2e-3, ge=0, description="λ, penalty of a group's norm, and the threshold")
    output_groups: bool = Field(
        False,
        description="whether the units of the last layer are groups too, so that classes can be "
        "removed",
    )
    by_size: bool = Field(
        False,
        description="whether a group of d weights counts √d times in penalty and threshold (Yuan "
        "and Lin 2006). false: all groups count once, as in the paper",
    )
    server_optimizer: Literal["sgd", "adam", "yogi"] = Field(
        "adam", description="optimizer of the server's weights"
    )

    def recommended(self, known: Known) -> dict[str, Any]:
        """A server's rate that lets a first run learn."""
        rate = None if self.server_optimizer == "sgd" else 0.02
        return {**sgd(known), "method.server_lr": rate}

    def remarks(self, run: Federation) -> list[str]:
        """Layers that have no groups."""
        return units_remarks(self.name, run.network, self._groups(run))

    def init(self, run: Federation) -> DriftServer:
        """The network's initialization."""
        weights, buffers = run.network.split()
        return DriftServer(self._thresholded(weights, self._groups(run)), buffers)

    def message(self, server: DriftServer, at: RoundContext) -> Message:
        """The groups above the threshold, and what belongs to none."""
        return self._sparse({**server.weights, **server.buffers}, self._groups(at.run))

    def price(self, weights: int) -> float:
        """λ of a group with `weights` weights, which is also its threshold."""
        return self.l1 * sqrt(weights) if self.by_size else self.l1

    def _above(self, weights: Tensors, groups: tuple[Group, ...]) -> units.Masks:
        """The groups that stay (Eq. 25)."""
        alive = {u.layer: units.row_norms(weights, u) > self._prices(u, weights) for u in groups}
        return units.masks(groups, alive, readers=False)

    def _prices(self, group: Group, weights: Tensors) -> float:
        """λ of each unit of a group: all of them have as many weights."""
        found = sum(weights[axis.tensor].numel() for axis in group.made)
        return self.price(found // group.count)

    def _sparse(self, weights: Tensors, groups: tuple[Group, ...]) -> Message:
        return units.mask(weights, self._above(weights, groups))

    def _thresholded(self, weights: Tensors, groups: tuple[Group, ...]) -> Tensors:
        return units.zero(weights, self._above(weights, groups))

    def _groups(self, run: Federation) -> tuple[Group, ...]:
        return tuple(u for u in run.network.groups if self.output_groups or not u.output)

    def loss(self, run: Federation) -> Loss:
        """Nll + λ Σ_g ‖φ_g‖₂ (Eq. 24); the subgradient at a zero group is zero."""
        likelihood, groups = nll(run), self._groups(run)

        def loss(parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> Tensor:
            norms = [
                self._prices(layer, parameters) * units.row_norms(parameters, layer)
                for layer in groups
            ]
            lasso = torch.cat(norms).sum() if norms else 0.0
            return likelihood(parameters, batch, given, noise) + lasso

        return loss

    def report(
        self, solved: Solved, problem: Problem, client: Stateless, at: RoundContext
    ) -> tuple[Report, Stateless, Info]:
        """Report the groups above the threshold."""
        sparse = self._sparse(solved.parameters, self._groups(at.run))
        return Report(sparse, self.weight(solved)), client, solved.info

    def update(
        self, server: DriftServer, reports: Sum, at: RoundContext
    ) -> tuple[DriftServer, Info]:
        """A step along w − mean ŵ_s, and the threshold."""
        groups = self._groups(at.run)
        mean = reports.mean()
        drift: Tensors = {name: w - mean[name] for name, w in server.weights.items()}
        factor = self.server_factor(at.round, at.run.rounds)
        weights, optimizer = self.server_step(server.weights, drift, server.optimizer, factor)
        weights = self._thresholded(weights, groups)
        info = {f"alive_{u.layer}": float((units.row_norms(weights, u) > 0).sum()) for u in groups}
        buffers = {name: mean[name] for name in server.buffers}
        return DriftServer(weights, buffers, optimizer), info
