"""Methods whose clients keep tensors of their own from round to round: whole models, or layers."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from pydantic import Field

from fedbayes.contracts.method import Averaged, Info, Method, Models, Weights
from fedbayes.contracts.reports import Report, Sum
from fedbayes.contracts.run import Federation, RoundContext
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples, Tensors
from fedbayes.errors import ConfigError
from fedbayes.inference.problem import Loss, Problem, Solved, Tree
from fedbayes.inference.solve import solve


@dataclass(frozen=True)
class PersonalTensors:
    """What never leaves a client; empty before its first round."""

    tensors: Tensors = field(default_factory=dict)


class PersonalModels(Averaged, Method[Weights, PersonalTensors, Sum]):
    """A global model that is averaged as in FedAvg, and also a model of every client.

    Derived methods state the problem, and report the global weights where training ended. A client
    that was in no round predicts with the server's weights.
    """

    server_state = Weights
    client_state = PersonalTensors
    models = Models.BOTH

    def update(self, server: Weights, reports: Sum, at: RoundContext) -> tuple[Weights, Info]:
        """Take the mean of the reports."""
        return Weights(reports.mean()), {}

    def personal_model(
        self, message: Message, report: Report | None, client: PersonalTensors, run: Federation
    ) -> Tensors | None:
        """Return the client's own weights; the server's before its first round."""
        return client.tensors or dense(message)


class PersonalLayers(PersonalModels):
    """FedAvg of all layers but some, which stay with the clients.

    There is no global model: nobody has these layers for a client that never took part.
    """

    models = Models.PERSONAL

    @abstractmethod
    def personal(self, run: Federation) -> list[str]:
        """Name the tensors that stay with the clients."""

    def init(self, run: Federation) -> Weights:
        """Start at the network's initialization, without the personal layers."""
        own = set(self.personal(run))
        return Weights({n: t for n, t in run.network.initial.items() if n not in own})

    def join(self, at: RoundContext) -> PersonalTensors:
        """Start personal layers at the network's initialization."""
        initial = at.run.network.initial
        return PersonalTensors({name: initial[name] for name in self.personal(at.run)})

    def problem(
        self, message: Message, client: PersonalTensors, samples: Samples, at: RoundContext
    ) -> Problem:
        """Train the server's layers and the client's own."""
        return Problem(at.run.network.prepare({**dense(message), **client.tensors}))

    def report(
        self, solved: Solved, problem: Problem, client: PersonalTensors, at: RoundContext
    ) -> tuple[Report, PersonalTensors, Info]:
        """Report the shared layers, keep the others."""
        own = {name: solved.parameters[name] for name in client.tensors}
        shared: Message = {n: t for n, t in solved.parameters.items() if n not in own}
        return Report(shared, self.weight(solved)), PersonalTensors(own), solved.info

    def model(self, server: Weights, run: Federation) -> Tensors:
        """Return the shared layers, and the initialization of the personal ones."""
        return {**run.network.initial, **server.weights}

    def personal_model(
        self, message: Message, report: Report | None, client: PersonalTensors, run: Federation
    ) -> Tensors | None:
        """Return the shared layers with the client's own."""
        return {**dense(report.tensors if report else message), **client.tensors}


def beside_fixed(parameters: Tensors, given: Tree) -> Tensors:
    """All weights of a network of which some are given, as `fixed`."""
    return {**parameters, **given["fixed"]}


class LastLayers(PersonalLayers):
    """FedAvg of all layers but the last ones, which stay with the clients."""

    layers: int = Field(
        1, ge=1, description="number of layers, counted from the output, that stay with the clients"
    )

    def check(self, run: Federation) -> None:
        """Some layer is shared."""
        super().check(run)
        every = run.network.layers
        if self.layers >= len(every):
            raise ConfigError(
                f"{self.name} keeps {self.layers} of the network's {len(every)} layers at the "
                "clients, and shares none. Set method.layers lower, or give the network more "
                "layers (model.hidden)"
            )

    def personal(self, run: Federation) -> list[str]:
        """Name the tensors of the last layers."""
        return [n for names in list(run.network.layers.values())[-self.layers :] for n in names]


def solved_apart(
    at: RoundContext,
    purpose: str,
    problem: Problem,
    loss: Loss,
    samples: Samples,
    *,
    epochs: int | None = None,
) -> Solved:
    """Solve a second problem of the same round, with its own random numbers.

    Args:
        at: the client and the round.
        purpose: the name of the problem, which seeds its order of batches.
        problem: where to start, and what is given.
        loss: the loss to minimize.
        samples: the client's training samples.
        epochs: passes over them instead of those of the training settings.
    """
    training = at.run.training
    if epochs is not None:
        training = training.model_copy(update={"epochs": epochs, "steps": None})
    rng: Callable[[str], torch.Generator] = partial(_purposed, at, purpose)
    return solve(
        problem,
        loss,
        samples,
        training,
        lr=at.lr,
        rng=rng,
        buffers=at.run.network.buffers,
        held_out=at.held_out,
    )


def _purposed(at: RoundContext, purpose: str, inner: str) -> torch.Generator:
    """The generator for one purpose of a second problem."""
    return at.rng(f"{purpose} {inner}")
