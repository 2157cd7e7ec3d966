"""SCAFFOLD: control variates that take the clients' drift out of their gradients."""

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field

from fedbayes.contracts import (
    Federation,
    Info,
    Method,
    Report,
    Site,
    Sum,
    cross_entropy,
    point_predictor,
)
from fedbayes.inference.controls import (
    along_path,
    corrected,
    mean_gradient,
    require_plain_sgd,
)
from fedbayes.inference.local import LocalTraining
from fedbayes.inference.optimizers import ServerOptimizer
from fedbayes.messages import Message, dense
from fedbayes.metrics import Predictor
from fedbayes.models import Network
from fedbayes.tensors import Samples, Tensors


@dataclass(frozen=True)
class Server:
    """The weights, the federation's control variate, and what the optimizer remembers."""

    weights: Tensors
    buffers: Tensors
    control: Tensors
    """c, like the weights."""
    memory: Tensors
    clients: int
    """Number of clients, S."""


@dataclass(frozen=True)
class Control:
    """The client's control variate c_s, like the weights."""

    control: Tensors


class Scaffold(ServerOptimizer, Method[Server, Control, Sum]):
    """Stochastic controlled averaging.

    A client adds c − c_s to every gradient, a linear term ⟨c − c_s, φ⟩ of its loss, and then
    renews c_s: by the mean of its gradients on the way (`path`, option II of the paper) or by
    its gradient at the server's weights (`gradient`, option I). The server moves w by the mean
    of the clients' changes, and c by theirs over all clients, Σ Δc_s / S, so that c remains the
    mean of the c_s. Twice the bytes of FedAvg.
    """

    name = "scaffold"
    summary = "gradients corrected by control variates"
    paper = "Karimireddy et al. 2020; Louizos et al. 2021, appendix E"
    server_state = Server
    client_state = Control
    summable = True

    control: Literal["path", "gradient"] = Field(
        "path", description="how c_s is renewed: path (option II, plain SGD) or gradient (I)"
    )
    damping: float = Field(1.0, ge=0, le=1, description="factor of the correction c − c_s")

    def init(self, network: Network, federation: Federation) -> Server:
        """The network's initialization, with a control variate of zero."""
        weights, buffers = network.split()
        zero = {name: torch.zeros_like(w) for name, w in weights.items()}
        return Server(weights, buffers, zero, {}, federation.clients)

    def check(self, training: LocalTraining) -> None:
        """Variates along the path need plain SGD."""
        if self.control == "path":
            require_plain_sgd(training)

    def join(self, site: Site) -> Control:
        """A control variate of zero."""
        weights, _ = site.network.split()
        return Control({name: torch.zeros_like(w) for name, w in weights.items()})

    def message(self, server: Server, client: int) -> Message:
        """Weights, buffers and the control variate, the same to all."""
        control = {_CONTROL + name: c for name, c in server.control.items()}
        return {**server.weights, **server.buffers, **control}

    def local(
        self, message: Message, client: Control, data: Samples, site: Site
    ) -> tuple[Report, Control, Info]:
        """Train with corrected gradients; report the weights and the change of c_s."""
        start = dense(message)
        common = {n: start.pop(_CONTROL + n) for n in client.control}
        correction = site.network.prepare(
            {n: self.damping * (common[n] - own) for n, own in client.control.items()}
        )
        objective = cross_entropy(site.network)
        ended, info = site.fit(start, corrected(objective, correction), data)
        if self.control == "path":
            steps = int(info["steps"])
            own = along_path(start, ended, correction, steps=steps, lr=site.lr)
        else:
            weights = site.network.prepare(start)
            own = mean_gradient(weights, objective, data, site.training.batch_size, list(common))
        report: Message = dict(ended)
        report |= {_CONTROL + n: own[n] - client.control[n] for n in own}
        return Report(report), Control(own), info

    def update(self, server: Server, reports: Sum) -> tuple[Server, Info]:
        """A step of the server's optimizer on w; c ← c + (B/S) mean Δc_s."""
        mean = reports.mean()
        drift = {name: w - mean[name] for name, w in server.weights.items()}
        weights, memory = self.server_step(server.weights, drift, server.memory)
        share = reports.clients / server.clients
        control = {n: c + share * mean[_CONTROL + n] for n, c in server.control.items()}
        buffers = {name: mean[name] for name in server.buffers}
        norm = torch.stack([c.norm() for c in control.values()]).norm()
        state = Server(weights, buffers, control, memory, server.clients)
        return state, {"control_norm": float(norm)}

    def model(self, server: Server) -> Tensors:
        """Weights and buffers."""
        return {**server.weights, **server.buffers}

    def personal(
        self, message: Message, report: Report, client: Control, network: Network
    ) -> Predictor:
        """The network as the client reported it."""
        tensors = {name: report.tensors[name] for name in network.initial}
        return point_predictor(dense(tensors), network)


_CONTROL = "control/"
"""What names of control variates begin with in messages."""
