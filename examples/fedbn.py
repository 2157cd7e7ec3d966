"""FedBN: every client keeps its batch normalization to itself."""

from dataclasses import dataclass
from math import prod

from torch import nn

from fedbayes.contracts import (
    About,
    Federation,
    Info,
    Method,
    Models,
    Problem,
    Report,
    Reports,
    RoundContext,
    Solved,
    Sum,
    Weights,
)
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples, Tensors
from fedbayes.errors import ConfigError


@dataclass(frozen=True)
class Client:
    """What never leaves a client: parameters and running moments of its normalizations."""

    own: Tensors


class FedBN(Method[Weights, Client, Sum]):
    """Averages all but batch normalization, which answers a client's shift of features (Li 2021).

    There is no global model, since nobody has moments for a client that never took part.
    """

    name = "fedbn"
    about = About("FedAvg whose batch normalization stays with the clients", "Li et al. 2021")
    server_state = Weights
    client_state = Client
    models = Models.PERSONAL
    reports = Reports(weighted=True)

    def check(self, run: Federation) -> None:
        if not own_names(run):
            raise ConfigError("fedbn keeps batch normalization local, and the network has none")

    def init(self, run: Federation) -> Weights:
        return Weights({n: t for n, t in run.network.initial.items() if n not in own_names(run)})

    def join(self, at: RoundContext) -> Client:
        return Client({name: at.run.network.initial[name] for name in own_names(at.run)})

    def message(self, server: Weights, at: RoundContext) -> Message:
        return dict(server.weights)

    def problem(
        self, message: Message, client: Client, samples: Samples, at: RoundContext
    ) -> Problem:
        return Problem(at.run.network.prepare({**dense(message), **client.own}))

    def report(
        self, solved: Solved, problem: Problem, client: Client, at: RoundContext
    ) -> tuple[Report, Client, Info]:
        own = {name: solved.parameters[name] for name in client.own}
        shared: Message = {n: t for n, t in solved.parameters.items() if n not in own}
        return Report(shared, float(solved.count)), Client(own), solved.info

    def update(self, server: Weights, reports: Sum, at: RoundContext) -> tuple[Weights, Info]:
        return Weights(reports.mean()), {}

    def model(self, server: Weights, run: Federation) -> Tensors:
        return {**run.network.initial, **server.weights}

    def personal_model(
        self, message: Message, report: Report | None, client: Client, run: Federation
    ) -> Tensors:
        return {**dense(report.tensors if report else message), **client.own}


def own_names(run: Federation) -> list[str]:
    """Names of the parameters and running moments of batch normalizations."""
    kinds = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
    layers = [n for n, layer in run.network.module.named_modules() if isinstance(layer, kinds)]
    return [n for n in run.network.initial if n.rpartition(".")[0] in layers]


def network(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A hidden layer of 64 units with batch normalization, for `model.name`."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(prod(shape), 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, outputs),
    )
