"""MOON: FedAvg whose clients keep their features close to those of the global model."""

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus

from fedbayes.contracts import (
    About,
    Federation,
    Info,
    Loss,
    Models,
    Problem,
    Report,
    RoundContext,
    Solved,
    Tree,
)
from fedbayes.contracts.personal import PersonalModels, PersonalTensors
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples, Tensors
from fedbayes.errors import ConfigError
from fedbayes.models import Network


class Moon(PersonalModels):
    """Model-contrastive federated learning (Li et al. 2021, Eqs. 3 and 4).

    A client minimizes its negative log-likelihood plus μ times

        −log [ exp(sim(z, z_glob)/τ) / (exp(sim(z, z_glob)/τ) + exp(sim(z, z_prev)/τ)) ],

    where z, z_glob and z_prev are features of a sample under the weights that train, the server's,
    and those with which the client's last round ended (at first: the initialization), and sim is
    the cosine. Features are the inputs of the network's last layer; the
    paper puts a projection there. The server averages. μ = 0 is FedAvg.
    """

    name = "moon"
    about = About(
        "FedAvg with a contrastive loss on features",
        "Li et al. 2021 (MOON)",
    )
    models = Models.GLOBAL

    mu: float = Field(1.0, ge=0, description="μ, weight of the contrastive loss")
    tau: float = Field(0.5, gt=0, description="τ, temperature of the contrastive loss")

    def check(self, run: Federation) -> None:
        """Some layer computes features."""
        super().check(run)
        if len(run.network.layers) < 2:
            raise ConfigError(
                "moon compares features below the last layer, and this network has one layer. "
                "Add a hidden layer (model.hidden), or set method.name = 'fedavg'"
            )

    def join(self, at: RoundContext) -> PersonalTensors:
        """Start at the network's initialization."""
        return PersonalTensors(at.run.network.initial)

    def problem(
        self, message: Message, client: PersonalTensors, samples: Samples, at: RoundContext
    ) -> Problem:
        """Train from the server's weights, which are given together with the client's last."""
        network = at.run.network
        start = network.prepare(dense(message))
        previous = network.prepare(client.tensors)
        copies = [{n: t.clone() for n, t in each.items()} for each in (start, previous)]
        return Problem(start, given={"server": copies[0], "previous": copies[1]})

    def loss(self, run: Federation) -> Loss:
        """The negative log-likelihood plus the contrastive term."""
        network, layer = run.network, _last(run.network)

        def loss(parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> Tensor:
            outputs, z = _seen(network, layer, parameters, batch.x, training=True)
            value = run.likelihood.nll(outputs, batch.y)
            if self.mu == 0:
                return value
            others = (given["server"], given["previous"])
            near, far = (_features(network, layer, each, batch.x) for each in others)
            apart = cosine_similarity(z, far) - cosine_similarity(z, near)
            return value + self.mu * softplus(apart / self.tau).mean()

        return loss

    def report(
        self, solved: Solved, problem: Problem, client: PersonalTensors, at: RoundContext
    ) -> tuple[Report, PersonalTensors, Info]:
        """Report the weights where training ended, and keep them for the next round."""
        ended = solved.parameters
        return Report(dict(ended), self.weight(solved)), PersonalTensors(ended), solved.info

    def personal_model(
        self, message: Message, report: Report | None, client: PersonalTensors, run: Federation
    ) -> Tensors | None:
        """Return the network as the client reported it."""
        return dense(report.tensors) if report is not None else None


def _last(network: Network) -> str:
    """Name of the module that computes the outputs."""
    return next(reversed(network.layers), "")


def _features(network: Network, layer: str, weights: Tensors, x: Tensor) -> Tensor:
    """Features under fixed weights [n, width], without a gradient."""
    with torch.no_grad():
        return _seen(network, layer, weights, x, training=False)[1]


def _seen(
    network: Network, layer: str, weights: Tensors, x: Tensor, *, training: bool
) -> tuple[Tensor, Tensor]:
    """Outputs of the network, and the inputs of a layer [n, width]."""
    found: list[Tensor] = []
    module = network.module.get_submodule(layer)
    with module.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0])):
        outputs = network(weights, x, training=training)
    return outputs, found[-1].flatten(1)
