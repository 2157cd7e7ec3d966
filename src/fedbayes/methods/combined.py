"""Combined Learning: linear combinations, convex or not, of models trained to convergence."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from fedbayes.contracts import (
    Federation,
    Gathered,
    Info,
    Method,
    Nothing,
    Report,
    Site,
    cross_entropy,
    point_predictor,
)
from fedbayes.inference.combination import Combination, factors
from fedbayes.messages import Message, dense
from fedbayes.metrics import Predictor, evaluate
from fedbayes.models import Network
from fedbayes.tensors import Samples, Tensors


@dataclass(frozen=True)
class Server:
    """The combined model, and what the coordinator decides by."""

    weights: Tensors
    buffers: Tensors
    history: torch.Tensor
    """What the clients said of the combined model of each round, float64 [rounds]: its accuracy
    or its loss on their data."""
    stopped: str
    """Why there are no further rounds; empty while there are."""


class Combined(Combination, Method[Server, Nothing, Gathered]):
    """The coordinator takes w = Σ_s α_s φ_s of the clients' models (paper, Eq. 2).

    α_s = 1/S (Eq. 1), c + r_s (Eq. 3) or exp(c r_s) (Eq. 4), with r_s the client's share of the
    samples. Clients train to local convergence before every round: give `training.patience`, and
    `training.epochs` as the most.

    A client also says how good the combined model that it received is on its own data (on what
    is set aside by `training.validation`, if anything). The coordinator ends the rounds at a
    stable point: when that moved by no more than `tolerance` within `window` rounds. Then every
    client gets a copy.

    Weights of the non-convex rules grow by Σ_s α_s a round, in every layer. Before that can
    overflow, or when a client's training does, the rounds end at the last sound combined model.
    """

    name = "combined"
    summary = "linear combinations, convex or not, of converged models"
    paper = "Ioste and Finger 2022"
    server_state = Server
    reduction = Gathered
    hands_out = True

    watch: Literal["accuracy", "loss"] = Field(
        "accuracy", description="of the combined model on the clients' data: what becomes stable"
    )
    window: int = Field(5, ge=2, description="rounds that the coordinator looks back on")
    tolerance: float | None = Field(
        None, ge=0, description="movement that counts as none; none: all rounds are done"
    )
    safe: float = Field(
        30.0,
        gt=0,
        description="orders of magnitude by which a network may amplify its inputs (linear, exp); "
        "float32 holds 38",
    )

    def init(self, network: Network, federation: Federation) -> Server:
        """The network's initialization."""
        weights, buffers = network.split()
        return Server(weights, buffers, torch.zeros(0, dtype=torch.float64), "")

    def message(self, server: Server, client: int) -> Message:
        """The combined model, the same to all."""
        return {**server.weights, **server.buffers}

    def expected(self, message: Message) -> Message:
        """A model, and three numbers."""
        number = torch.zeros((), dtype=torch.float64)
        return {**message, **dict.fromkeys((_ACCURACY, _LOSS, _OVERFLOWED), number)}

    def local(
        self, message: Message, client: Nothing, data: Samples, site: Site
    ) -> tuple[Report, Nothing, Info]:
        """Try the combined model, train from it, and report the result if it is finite."""
        start = dense(message)
        received = evaluate(point_predictor(start, site.network), site.held_out or data)
        accuracy = received.correct / received.count
        loss = min(received.nll / received.count, float(torch.finfo(torch.float32).max))
        weights, info = site.fit(
            start,
            cross_entropy(site.network),
            data,
            validation=cross_entropy(site.network, training=False),
        )
        overflowed = not all(bool(torch.isfinite(w).all()) for w in weights.values())
        report: Message = dict(start if overflowed else weights)
        for name, value in ((_ACCURACY, accuracy), (_LOSS, loss), (_OVERFLOWED, overflowed)):
            report[name] = torch.tensor(float(value), dtype=torch.float64)
        if overflowed:
            info = {"steps": info["steps"]}
        info |= {"received_accuracy": accuracy, "received_loss": loss}
        return Report(report, float(len(data.y))), client, info

    def update(self, server: Server, reports: Gathered) -> tuple[Server, Info]:
        """Combine the models; say if the rounds are to end."""
        heard = list(reports.reports.values())
        found = [dense(report.tensors) for report in heard]
        sizes = np.array([report.weight for report in heard])
        shares = torch.from_numpy(sizes / sizes.sum())
        key = _ACCURACY if self.watch == "accuracy" else _LOSS
        values = torch.stack([tensors[key] for tensors in found])
        history = torch.cat([server.history, (shares * values).sum()[None]])
        alpha = torch.from_numpy(factors(self.alpha, self.c, sizes))
        info = {"alpha_sum": float(alpha.sum())}
        if any(bool(tensors[_OVERFLOWED]) for tensors in found):
            return self._last(server, history, "overflow: a client's training left what is finite")
        weights = _combination(alpha, found, server.weights)
        orders = amplification(weights)
        if self.alpha != "mean" and not orders <= self.safe:
            why = f"overflow: inputs would be amplified by {orders:.1f} orders of magnitude"
            return self._last(server, history, why)
        info["amplification"] = orders
        buffers = _combination(shares, found, server.buffers)
        return Server(weights, buffers, history, self._stability(history)), info

    def _last(self, server: Server, history: torch.Tensor, why: str) -> tuple[Server, Info]:
        """The last sound model, for good."""
        return Server(server.weights, server.buffers, history, why), {}

    def _stability(self, history: torch.Tensor) -> str:
        """Whether what is watched is flat over the window, in words; empty if not."""
        if self.tolerance is None or len(history) < self.window:
            return ""
        recent = history[-self.window :]
        movement = float(recent.max() - recent.min())
        if movement > self.tolerance:
            return ""
        return f"stable point: {self.watch} moved by {movement:.2g} in {self.window} rounds"

    def stopped(self, server: Server) -> str:
        """The coordinator's decision."""
        return server.stopped

    def model(self, server: Server) -> Tensors:
        """The combined model."""
        return {**server.weights, **server.buffers}

    def personal(
        self, message: Message, report: Report, client: Nothing, network: Network
    ) -> Predictor:
        """The network as the client reported it."""
        return point_predictor(
            {name: dense(report.tensors)[name] for name in network.initial}, network
        )


_ACCURACY, _LOSS, _OVERFLOWED = "received/accuracy", "received/loss", "received/overflowed"
"""What a client says besides its weights."""


def amplification(weights: Tensors) -> float:
    """Orders of magnitude by which a network can amplify its inputs at most: log10 Π_l ‖W_l‖_∞.

    The bound holds for layers one after another with activations that do not grow; biases are
    left out. Normalization and shortcuts are not seen, so it is loose for residual networks.
    """
    rows = [w.double().flatten(1).abs().sum(dim=1) for w in weights.values() if w.ndim > 1]
    return sum(float(row.max().log10()) for row in rows if row.numel())


def _combination(alpha: torch.Tensor, found: list[Tensors], like: Tensors) -> Tensors:
    """Σ_s α_s φ_s in float64, in the types of `like`."""
    combined = {}
    for name, own in like.items():
        total = torch.zeros(own.shape, dtype=torch.float64)
        for factor, tensors in zip(alpha.tolist(), found, strict=True):
            total.add_(tensors[name], alpha=factor)
        combined[name] = total.to(own.dtype)
    return combined
