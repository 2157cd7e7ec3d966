"""What a federated method is: a prior, a local inference, a message and an update.

A method is a frozen bag of hyperparameters with pure functions over explicit state. One round
of any method, as `fedbayes.federation.round` runs it:

    message           = method.message(server, client)          the prior, sent to a client
    report, client, _ = method.local(message, client, data, …)  the E-step, on the client
    reports           = Sum() or Gathered(), fed one by one     what the M-step needs
    server, _         = method.update(server, reports)          the M-step, on the server

A whole method, for a feeling of the size: federated averaging with a server that forgets.

    class Forgetful(PointEstimate[Weights]):
        name = "forgetful"
        summary = "averages, then shrinks"
        server_state = Weights

        keep: float = Field(0.99, description="share of a weight that survives a round")

        def init(self, network: Network, federation: Federation) -> Weights:
            return Weights(network.initial)

        def update(self, server: Weights, reports: Sum) -> tuple[Weights, Info]:
            mean = reports.mean()
            return Weights({name: self.keep * t for name, t in mean.items()}), {}

What is carried from round to round is State (server's or client's); what is only reported to
the user is Info. Nothing else remembers anything, so a run can stop and go on anywhere.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn import functional

from fedbayes import seeds
from fedbayes.inference.local import (
    LocalTraining,
    Objective,
    OptimizerBuilder,
    Projection,
    train,
)
from fedbayes.messages import Masked, Message, dense, dtype_of, shape_of
from fedbayes.metrics import Predictor, Sampler
from fedbayes.models import Network
from fedbayes.models.units import Group
from fedbayes.tensors import Samples, Tensors

Info = dict[str, float]
"""Figures for the user, by name: a loss, a norm. They go into the metrics of the round."""


@dataclass(frozen=True)
class Federation:
    """What the server knows of the federation before the first round."""

    clients: int
    """Number of clients, S."""
    cohort: int
    """Number of clients sampled in a round, B."""
    rounds: int
    """Number of rounds, T."""
    classes: int
    """Number of classes, K."""
    seed: int
    """Seed of the run."""


@dataclass(frozen=True)
class Site:
    """The place of one client in one round: what the engine lends to a method there."""

    client: int
    """Index of the client, 0..S-1."""
    round: int
    """The round, from 1."""
    rounds: int
    """Number of rounds of the run."""
    seed: int
    """Seed of the run; use `stream` for randomness."""
    network: Network
    """The network that all clients share, as a function of its weights."""
    training: LocalTraining
    """How clients train."""
    own_network: Callable[[], Network]
    """Builds a network with an initialization that is this client's own."""
    held_out: Samples | None = None
    """Training samples set aside for early stopping, if the config asks for it."""

    def stream(self, purpose: str) -> torch.Generator:
        """The random stream of this client in this round for one purpose."""
        return seeds.torch_stream(self.seed, purpose, round=self.round, client=self.client)

    @property
    def lr(self) -> float:
        """Learning rate of the client's weights in this round."""
        return self.training.learning_rate(self.round, self.rounds)

    def fit(
        self,
        weights: Tensors,
        objective: Objective,
        samples: Samples,
        *,
        apart: Mapping[str, OptimizerBuilder] | None = None,
        project: Projection | None = None,
        validation: Objective | None = None,
    ) -> tuple[Tensors, dict[str, float]]:
        """Train weights of the network with the round's settings; see `inference.local.train`."""
        return train(
            self.network.prepare(weights),
            objective,
            samples,
            self.training,
            lr=self.lr,
            stream=self.stream("batches"),
            fixed=self.network.buffers,
            apart=apart,
            project=project,
            held_out=self.held_out,
            validation=validation,
        )


@dataclass(frozen=True)
class Report:
    """What a client says to the server at the end of its E-step."""

    tensors: Message
    """The update, by name."""
    weight: float = 1.0
    """Its weight in a sum over clients, at least 0: the number of samples, for instance."""


@dataclass
class Sum:
    """Reports that add: each is folded in and forgotten, so memory does not grow with them.

    Sums are kept in float64 and folded in the order of the cohort: the result does not depend
    on which client was ready first.
    """

    tensors: Tensors = field(default_factory=dict)
    """Sum over clients of weight times tensor, float64, by name."""
    weight: float = 0.0
    """Sum of the weights."""
    clients: int = 0
    """Number of reports."""
    present: Tensors = field(default_factory=dict)
    """Of tensors that came sparse, the sum of the weights of the reports that held each entry,
    float64 by name."""
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """Types of the tensors as they were reported."""

    def add(self, client: int, report: Report) -> None:
        """Fold one report in."""
        for name, item in report.tensors.items():
            if name not in self.tensors:
                self.tensors[name] = torch.zeros(shape_of(item), dtype=torch.float64)
                self.dtypes[name] = dtype_of(item)
            if isinstance(item, Masked):
                whole = torch.full_like(self.tensors[name], self.weight)
                self.present.setdefault(name, whole).add_(item.mask(), alpha=report.weight)
                item = item.dense()
            elif name in self.present:
                self.present[name].add_(report.weight)
            self.tensors[name].add_(item, alpha=report.weight)
        self.weight += report.weight
        self.clients += 1

    def mean(self) -> Tensors:
        """The weighted mean of the reports, in the types that they came in."""
        return {name: (t / self.weight).to(self.dtypes[name]) for name, t in self.tensors.items()}

    def share(self, name: str) -> Tensor:
        """Share of the reports, by weight, that held each entry of a tensor, float64."""
        if name not in self.present:
            return torch.ones_like(self.tensors[name])
        return self.present[name] / self.weight


@dataclass
class Gathered:
    """Reports that do not add (a median, a matching needs them all), by client."""

    reports: dict[int, Report] = field(default_factory=dict)

    def add(self, client: int, report: Report) -> None:
        """Keep one report."""
        self.reports[client] = report

    @property
    def clients(self) -> int:
        """Number of reports."""
        return len(self.reports)


@dataclass(frozen=True)
class Nothing:
    """The private state of a client that keeps none."""


@dataclass(frozen=True)
class Weights:
    """A state that is nothing but the weights of a network."""

    weights: Tensors


ServerState = TypeVar("ServerState")
ClientState = TypeVar("ClientState")
Reduced = TypeVar("Reduced", Sum, Gathered)


class Method(BaseModel, Generic[ServerState, ClientState, Reduced]):
    """A federated method. Fields are its hyperparameters; functions are pure.

    States are frozen dataclasses of tensors (see `fedbayes.tensors.pack`). No function changes
    its arguments. Tensors of a message may have other shapes for every client, and the global
    model may change its size from round to round.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: ClassVar[str]
    """The name on the command line and in a config."""
    summary: ClassVar[str]
    """One line for the list of methods."""
    paper: ClassVar[str] = ""
    """Where the method comes from."""
    server_state: ClassVar[type]
    """Type of the server's state."""
    client_state: ClassVar[type] = Nothing
    """Type of a client's private state."""
    reduction: ClassVar[type[Sum] | type[Gathered]] = Sum
    """Whether reports are summed or gathered."""
    summable: ClassVar[bool] = False
    """Whether all clients get the same broadcast and report the very tensors of it, whole: what
    secure aggregation can sum."""
    pooled: ClassVar[bool] = False
    """Whether all data lie in one place: a baseline, not a federation."""
    has_global_model: ClassVar[bool] = True
    """Whether what `model` gives is a model to predict with; if not, it is neither evaluated nor
    saved, and only clients have models."""
    headline: ClassVar[Literal["global_accuracy", "local_accuracy"]] = "global_accuracy"
    """The figure that the method is for: what a summary leads with, and what is best."""
    hands_out: ClassVar[bool] = False
    """Whether every client gets a copy of the last global model, whose bytes count."""

    def check(self, training: LocalTraining) -> None:
        """Refuse, before anything runs, clients' training that the method cannot work with.

        Raises:
            ConfigError: says which setting, and what would do.
        """
        return None

    def remarks(self, network: Network) -> list[str]:
        """What a user should know before the first round of how the method takes to a network:
        a layer that it leaves out, say. A sentence each.
        """
        return []

    @abstractmethod
    def init(self, network: Network, federation: Federation) -> ServerState:
        """The server's state before the first round."""

    def join(self, site: Site) -> ClientState:
        """The private state of a client before its first round; it never leaves the client."""
        state: ClientState = self.client_state()
        return state

    @abstractmethod
    def message(self, server: ServerState, client: int) -> Message:
        """The broadcast: what the server sends to this client.

        Messages that consist of the very same tensors are encoded once.
        """

    @abstractmethod
    def local(
        self, message: Message, client: ClientState, data: Samples, site: Site
    ) -> tuple[Report, ClientState, Info]:
        """The E-step: infer the client's parameters from its data under the server's prior."""

    def expected(self, message: Message) -> Message:
        """A pattern for the answer to `message`: names, shapes and types of a proper report.

        A report that differs is refused. By default it looks like the message.
        """
        return message

    def accept(self, server: ServerState, report: Report) -> None:
        """Refuse a report whose values, beyond being finite, are none that a client can have.

        Args:
            server: the state that the client was sent a message of.
            report: of the expected names, shapes and types.

        Raises:
            MessageError: says what is wrong with it.
        """
        return None

    @abstractmethod
    def update(self, server: ServerState, reports: Reduced) -> tuple[ServerState, Info]:
        """The M-step: the server's new state from at least one report."""

    def stopped(self, server: ServerState) -> str:
        """Why the server wants no further rounds, in words; empty while it does."""
        return ""

    @abstractmethod
    def model(self, server: ServerState) -> Tensors:
        """The global model as it is saved and evaluated."""

    def predict(self, model: Tensors, network: Network) -> Predictor:
        """The predictor that a global model stands for."""
        return point_predictor(model, network)

    def sampler(self, model: Tensors, network: Network) -> Sampler | None:
        """Single draws behind a global model's predictions, for methods that have several."""
        return None

    @abstractmethod
    def personal(
        self, message: Message, report: Report, client: ClientState, network: Network
    ) -> Predictor:
        """The client's own predictor right after its E-step."""

    def personal_sampler(
        self, message: Message, client: ClientState, network: Network
    ) -> Sampler | None:
        """Draws behind a client's own predictions between rounds, for methods that keep a model
        for every client: from what the server would send it now, and its private state.
        """
        return None

    def personal_model(self, client: ClientState) -> Tensors | None:
        """A client's own network between rounds as weights, for methods that keep one in its
        private state.
        """
        return None


def units_remarks(name: str, network: Network, touched: Collection[Group]) -> list[str]:
    """What a method that leaves units out says of a network in which it cannot everywhere.

    Args:
        name: the method.
        network: all clients' network.
        touched: groups whose units it may leave out.
    """
    reasons = {
        group.layer: group.whole_because or "the network's code counts on its width"
        for group in network.groups
        if not group.output and group not in touched
    }
    reasons |= {n.removesuffix(".weight"): why for n, why in network.traced.untouched.items()}
    left = [f"{layer} ({why})" for layer, why in reasons.items()]
    shown = "; ".join(left[:8]) + (f"; and {len(left) - 8} more" if len(left) > 8 else "")
    found = [f"{name} sends these layers whole: {shown}"] if left else []
    if not touched:
        found.insert(
            0,
            f"{name} finds no units in this network that it could leave out: messages are as "
            "long as under fedavg",
        )
    return found


def point_predictor(weights: Tensors, network: Network) -> Predictor:
    """Prediction by one network with these weights."""
    ready = network.prepare(weights)
    return lambda x: network(ready, x)


def cross_entropy(network: Network, *, training: bool = True) -> Objective:
    """The mean negative log-likelihood of a batch under a network, with dropout in training."""

    def loss(weights: Tensors, batch: Samples) -> Tensor:
        return functional.cross_entropy(network(weights, batch.x, training=training), batch.y)

    return loss


Weighting = Literal["samples", "uniform"]


class PointEstimate(Method[ServerState, Nothing, Sum]):
    """Methods where server and clients know single weights: hard EM on a Gaussian prior.

    The server broadcasts its weights w, a client answers with its own, φ_s, found by gradients
    from w. Derived methods say how the server starts and updates, and may change the client's
    objective. The server's state has a field `weights` unless `message` and `model` are
    overridden.
    """

    summable = True

    weighting: Weighting = Field(
        "samples", description="weight of a client in the mean: its number of samples, or 1"
    )

    def objective(self, message: Tensors, site: Site) -> Objective:
        """What a client minimizes on each batch; `message` holds the server's weights."""
        return cross_entropy(site.network)

    def message(self, server: ServerState, client: int) -> Message:
        """Send the weights, the same to all."""
        message: Message = server.weights  # type: ignore[attr-defined]
        return message

    def local(
        self, message: Message, client: Nothing, data: Samples, site: Site
    ) -> tuple[Report, Nothing, Info]:
        """Train from the server's weights and report the result."""
        start = dense(message)
        validation = cross_entropy(site.network, training=False)
        weights, info = site.fit(start, self.objective(start, site), data, validation=validation)
        weight = float(len(data.y)) if self.weighting == "samples" else 1.0
        return Report(dict(weights), weight), client, info

    def model(self, server: ServerState) -> Tensors:
        """The server's weights."""
        weights: Tensors = server.weights  # type: ignore[attr-defined]
        return weights

    def personal(
        self, message: Message, report: Report, client: Nothing, network: Network
    ) -> Predictor:
        """The network as the client reported it."""
        return point_predictor(dense(report.tensors), network)


AnyMethod = Method[Any, Any, Any]
"""A method whose states we do not look into: what engines work with."""
