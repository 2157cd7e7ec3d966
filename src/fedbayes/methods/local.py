"""The baseline without federation: one model per client."""

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
    Weights,
    cross_entropy,
    point_predictor,
)
from fedbayes.messages import Message
from fedbayes.metrics import Predictor, Sampler
from fedbayes.models import Network
from fedbayes.tensors import Samples, Tensors


@dataclass(frozen=True)
class Client:
    """The client's own weights."""

    weights: Tensors


class Local(Method[Weights, Client, Sum]):
    """Every client trains alone and nothing is sent: the lower bound of sharing.

    There is no global model: none is evaluated or saved.
    """

    name = "local"
    summary = "one model per client, nothing is sent (baseline)"
    server_state = Weights
    client_state = Client
    has_global_model = False
    headline = "local_accuracy"

    start: Literal["own", "common"] = Field(
        "own", description="whether clients start from weights of their own or from common ones"
    )

    def init(self, network: Network, federation: Federation) -> Weights:
        """The common initialization, which no round changes."""
        return Weights(network.initial)

    def join(self, site: Site) -> Client:
        """The initialization of the client."""
        network = site.own_network() if self.start == "own" else site.network
        return Client(network.initial)

    def message(self, server: Weights, client: int) -> Message:
        """Nothing."""
        return {}

    def local(
        self, message: Message, client: Client, data: Samples, site: Site
    ) -> tuple[Report, Client, Info]:
        """Go on training where the client's last round ended."""
        weights, info = site.fit(
            client.weights,
            cross_entropy(site.network),
            data,
            validation=cross_entropy(site.network, training=False),
        )
        return Report({}), Client(weights), info

    def update(self, server: Weights, reports: Sum) -> tuple[Weights, Info]:
        """Nothing to learn from."""
        return server, {}

    def model(self, server: Weights) -> Tensors:
        """The common initialization."""
        return server.weights

    def personal(
        self, message: Message, report: Report, client: Client, network: Network
    ) -> Predictor:
        """The client's own network."""
        return point_predictor(client.weights, network)

    def personal_sampler(self, message: Message, client: Client, network: Network) -> Sampler:
        """The client's own network, which is a single draw."""
        predict = point_predictor(client.weights, network)
        return lambda x: torch.log_softmax(predict(x), dim=-1)[None]

    def personal_model(self, client: Client) -> Tensors:
        """The client's own weights."""
        return client.weights
