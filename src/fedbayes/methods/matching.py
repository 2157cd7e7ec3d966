"""PFNM and GPI-FNM over rounds: neurons are matched, and clients go on from their own."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedbayes import seeds
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
from fedbayes.errors import MessageError, ModelError
from fedbayes.matching import Dense, MatchingSettings, match_networks
from fedbayes.messages import Message, dense, shape_of
from fedbayes.metrics import Predictor
from fedbayes.models import DenseLayer, Network, dense_layers
from fedbayes.tensors import Samples, Tensors


@dataclass(frozen=True)
class Server:
    """The global network, what every client last reported, and where its neurons went."""

    weights: Tensors
    """The global network, in the network's names; its widths change from round to round."""
    latest: Tensors
    """Last report of each client that ever took part: `client/name`."""
    places: Tensors
    """Global neuron of each neuron of such a client, int64: `client/hidden layer`."""
    widths: Tensor
    """A client's own widths, inputs to outputs, int64; they never change."""
    bias: bool
    """Whether layers have biases."""
    round: int
    """Rounds done."""
    seed: int
    """Seed of the run."""


class GpiFnm(MatchingSettings, Method[Server, Nothing, Gathered]):
    """Global-posterior-incorporated federated neural matching over rounds (paper, section 4.3).

    A client of round 1 trains from an initialization of its own. The server matches the neurons
    of all clients and infers the global ones. A client of a later round starts from its own
    columns of the global network, w_sj = Σ_i A_ij θ_i, so that its size stays as it was while the
    global size is free. Clients that do not take part in a round are matched by what they
    reported last.
    """

    name = "gpi-fnm"
    summary = "neurons matched as by pfnm, and with the global posterior"
    paper = "GPI-FNM, sections 4.2 and 4.3"
    server_state = Server
    reduction = Gathered

    class_shares: bool = Field(
        True, description="clients tell their samples of each class, which weights their outputs"
    )

    def init(self, network: Network, federation: Federation) -> Server:
        """The network's initialization, and nobody heard.

        Raises:
            ModelError: the network is not fully connected, or has no hidden layer or frozen
                weights.
        """
        if network.constants:
            raise ModelError(
                f"{self.name} matches the neurons of whole networks, but frozen are "
                f"{', '.join(network.constants)}"
            )
        layers = dense_layers(network.initial, "the network")
        widths = [layers[0].weight.shape[1], *(len(layer.weight) for layer in layers)]
        biased = any(layer.bias is not None for layer in layers)
        return Server(network.initial, {}, {}, torch.tensor(widths), biased, 0, federation.seed)

    def message(self, server: Server, client: int) -> Message:
        """The client's own columns; to a newcomer, the widths that it is to have."""
        if f"{client}/0" not in server.places:
            return {"widths": server.widths, "bias": torch.tensor(server.bias)}
        layers = dense_layers(server.weights, "the global network")
        places = [server.places[f"{client}/{depth}"] for depth in range(len(layers) - 1)]
        columns: Message = {}
        for depth, layer in enumerate(layers):
            weight, bias = layer.weight, layer.bias
            if depth:
                weight = weight[:, places[depth - 1]]
            if depth < len(places):
                weight = weight[places[depth]]
                bias = None if bias is None else bias[places[depth]]
            columns[f"{depth}.weight"] = weight.contiguous()
            if bias is not None:
                columns[f"{depth}.bias"] = bias
        return columns

    def expected(self, message: Message) -> Message:
        """Weights of the client's widths, and its counts of classes."""
        if "widths" not in message:
            pattern = dict(message)
        else:
            start = dense(message)
            pattern = {}
            for depth, (inputs, outputs) in enumerate(pairwise(start["widths"].tolist())):
                pattern[f"{depth}.weight"] = torch.zeros(1).expand(outputs, inputs)
                if start["bias"]:
                    pattern[f"{depth}.bias"] = torch.zeros(1).expand(outputs)
        if self.class_shares:
            last = max(int(name.partition(".")[0]) for name in pattern)
            classes = shape_of(pattern[f"{last}.weight"])[0]
            pattern["counts"] = torch.zeros(1, dtype=torch.int64).expand(classes)
        return pattern

    def local(
        self, message: Message, client: Nothing, data: Samples, site: Site
    ) -> tuple[Report, Nothing, Info]:
        """Train from the own columns, or from an own initialization, and report the result."""
        layers = dense_layers(site.network.initial, "the network")
        start = (
            site.own_network().initial if "widths" in message else _named(dense(message), layers)
        )
        weights, info = site.fit(
            start,
            cross_entropy(site.network),
            data,
            validation=cross_entropy(site.network, training=False),
        )
        report = _numbered(weights, layers)
        if self.class_shares:
            classes = len(layers[-1].weight)
            report["counts"] = torch.bincount(data.y.cpu(), minlength=classes)
        return Report(report, float(len(data.y))), client, info

    def accept(self, server: Server, report: Report) -> None:
        """Counts of classes are not negative."""
        if self.class_shares and bool((dense(report.tensors)["counts"] < 0).any()):
            raise MessageError("its counts of classes are negative")

    def update(self, server: Server, reports: Gathered) -> tuple[Server, Info]:
        """Match the last reports of all clients (Algorithms 1 and 2)."""
        latest = dict(server.latest)
        for client, report in reports.reports.items():
            latest |= {f"{client}/{name}": t for name, t in dense(report.tensors).items()}
        clients = sorted({int(name.partition("/")[0]) for name in latest})
        depth = len(server.widths) - 1
        counts = None
        if self.class_shares:
            counts = np.stack([latest[f"{client}/counts"].double().numpy() for client in clients])
        number = server.round + 1
        matching = match_networks(
            [_plain(latest, client, depth, server.bias) for client in clients],
            self,
            counts=counts,
            names=[f"client {client}" for client in clients],
            seed=seeds.integer(server.seed, "matching", round=number),
        )
        layers = dense_layers(server.weights, "the global network")
        network = matching.network
        fused = {
            f"{index}.weight": torch.from_numpy(weight).float()
            for index, weight in enumerate(network.weights)
        }
        for index, bias in enumerate(network.biases or []):
            fused[f"{index}.bias"] = torch.from_numpy(bias).float()
        places = {
            f"{client}/{index}": torch.from_numpy(layer.assignments[row])
            for row, client in enumerate(clients)
            for index, layer in enumerate(matching.layers)
        }
        info = {f"neurons_{i}": float(x.size) for i, x in enumerate(matching.layers, start=1)}
        info["objective"] = matching.objective[-1]
        state = Server(
            _named(fused, layers), latest, places, server.widths, server.bias, number, server.seed
        )
        return state, info

    def model(self, server: Server) -> Tensors:
        """The global network."""
        return server.weights

    def personal(
        self, message: Message, report: Report, client: Nothing, network: Network
    ) -> Predictor:
        """The network as the client reported it."""
        layers = dense_layers(network.initial, "the network")
        return point_predictor(_named(dense(report.tensors), layers), network)


class Pfnm(GpiFnm):
    """Probabilistic federated neural matching over rounds: GPI-FNM with ε = 0."""

    name = "pfnm"
    summary = "neurons matched with a Bayesian nonparametric model"
    paper = "Yurochkin et al. 2019; GPI-FNM, Prop. 1"

    epsilon: float = Field(0.0, ge=0, le=0, description="0; with another value it is gpi-fnm")


def _named(numbered: Tensors, layers: Sequence[DenseLayer]) -> Tensors:
    """Tensors by depth (`0.weight`, `0.bias`, …) under the names of the network."""
    named = {}
    for depth, layer in enumerate(layers):
        named[layer.name] = numbered[f"{depth}.weight"]
        if f"{depth}.bias" in numbered:
            named[layer.bias_name] = numbered[f"{depth}.bias"]
    return named


def _numbered(named: Tensors, layers: Sequence[DenseLayer]) -> Message:
    """The inverse of `_named`."""
    numbered: Message = {}
    for depth, layer in enumerate(layers):
        numbered[f"{depth}.weight"] = named[layer.name]
        if layer.bias is not None:
            numbered[f"{depth}.bias"] = named[layer.bias_name]
    return numbered


def _plain(latest: Tensors, client: int, depth: int, bias: bool) -> Dense:
    def arrays(kind: str) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
        return [latest[f"{client}/{index}.{kind}"].double().numpy() for index in range(depth)]

    return Dense(arrays("weight"), arrays("bias") if bias else None)
