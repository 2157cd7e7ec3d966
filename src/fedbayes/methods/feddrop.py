"""Federated dropout: every client trains a smaller network."""

from dataclasses import dataclass, replace
from math import floor

import torch
from pydantic import Field
from torch import Tensor

from fedbayes import seeds
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
from fedbayes.inference.optimizers import ServerOptimizer
from fedbayes.messages import Masked, Message
from fedbayes.metrics import Predictor
from fedbayes.models import Network, units
from fedbayes.models.units import Group
from fedbayes.tensors import Samples, Tensors


@dataclass(frozen=True)
class Server:
    """The whole network."""

    weights: Tensors
    buffers: Tensors
    memory: Tensors
    """Of the server's optimizer."""
    structure: str
    """Groups of which units are dropped, as text."""
    round: int
    """Rounds done."""
    seed: int
    """Seed of the run."""


class FedDrop(ServerOptimizer, Method[Server, Nothing, Sum]):
    """Federated dropout (Caldas et al. 2018).

    For every client of a round the server drops a fixed share of the units of each hidden layer
    and of the filters of each convolution, and sends the smaller network that is left: without
    their rows, and without the columns that read them. The client trains it as an ordinary
    network. Each weight moves to the mean over the clients that had it. Seen from the EM paper
    (section 4), the gates are the server's, with a fixed probability.

    A residual stream is one layer of units, and loses them in every convolution that adds into it.
    What group normalization counts loses the same share of every group. Units of which the trace
    does not know all readers are kept (`remarks` names them), and so are the outputs: the paper's
    rate of 0.01 on in- and outputs comes to less than one.
    """

    name = "feddrop"
    summary = "every client trains a smaller network: federated dropout"
    paper = "Caldas et al. 2018; Louizos et al. 2021, appendix A"
    server_state = Server

    conv_rate: float = Field(0.1, ge=0, lt=1, description="share of dropped filters")
    dense_rate: float = Field(0.5, ge=0, lt=1, description="share of dropped units")

    def remarks(self, network: Network) -> list[str]:
        """Layers of which no unit is dropped."""
        dropped = self._droppable(network)
        few = [u for u in dropped if not self._dropped(u)]
        found = units_remarks(self.name, network, dropped)
        if few:
            layers = ", ".join(f"{u.layer} ({u.step})" for u in few)
            found.append(
                f"{self.name} drops nothing of {'these' if len(few) < len(dropped) else 'all'} "
                "layers, which have too few units for their rate (units drawn from in brackets): "
                f"{layers}"
            )
        return found

    def _droppable(self, network: Network) -> tuple[Group, ...]:
        return network.narrowing

    def init(self, network: Network, federation: Federation) -> Server:
        """The network's initialization."""
        dropped = self._droppable(network)
        weights, buffers = network.split()
        structure = units.store_units(dropped)
        return Server(weights, buffers, {}, structure, 0, federation.seed)

    def message(self, server: Server, client: int) -> Message:
        """The client's smaller network of the round."""
        stream = seeds.torch_stream(
            server.seed, "dropped units", round=server.round + 1, client=client
        )
        dropped = units.load_units(server.structure)
        alive = {u.layer: self._kept(u, stream) for u in dropped}
        found = units.masks(dropped, alive, running=True)
        return units.mask({**server.weights, **server.buffers}, found)

    def _kept(self, layer: Group, stream: torch.Generator) -> Tensor:
        """The units that stay, bool [count]: the same share of every cell."""
        return layer.thinned(self._dropped(layer), torch.rand(layer.count, generator=stream))

    def _dropped(self, layer: Group) -> int:
        """How many units go, of every `step`."""
        rate = self.conv_rate if layer.kind == "conv" else self.dense_rate
        return floor(rate * layer.step)

    def local(
        self, message: Message, client: Nothing, data: Samples, site: Site
    ) -> tuple[Report, Nothing, Info]:
        """Train the smaller network."""
        weights, info = site.fit(
            units.slice(message),
            cross_entropy(site.network),
            data,
            validation=cross_entropy(site.network, training=False),
        )
        report = {
            name: replace(item, values=weights[name].reshape(-1))
            if isinstance(item, Masked)
            else weights[name]
            for name, item in message.items()
        }
        return Report(report), client, info

    def update(self, server: Server, reports: Sum) -> tuple[Server, Info]:
        """A step towards each weight's mean over the clients that had it."""
        mean = reports.mean()
        drift = {}
        for name, w in server.weights.items():
            share = reports.share(name).to(w.dtype)
            drift[name] = torch.where(share > 0, w - mean[name] / share.clamp_min(1e-12), 0.0)
        weights, memory = self.server_step(server.weights, drift, server.memory)
        buffers = dict(server.buffers)
        for name, before in server.buffers.items():
            share = reports.share(name)
            seen = mean[name] / share.clamp_min(1e-12) if name in reports.present else mean[name]
            buffers[name] = torch.where(share > 0, seen.to(before.dtype), before)
        state = replace(
            server, weights=weights, buffers=buffers, memory=memory, round=server.round + 1
        )
        return state, {}

    def model(self, server: Server) -> Tensors:
        """The whole network."""
        return {**server.weights, **server.buffers}

    def personal(
        self, message: Message, report: Report, client: Nothing, network: Network
    ) -> Predictor:
        """The smaller network that the client reported."""
        return point_predictor(units.slice(report.tensors), network)
