"""What a federated method is: a prior, a local inference, a message and an update.

A method is a frozen set of hyperparameters with pure functions over explicit state. This is one
round of any method, as `fedbayes.federation.round` runs it:

    message           = method.message(server, at)              the prior, sent to a client
    problem           = method.problem(message, client, …)      the E-step, stated
    solved            = at.solve(problem, method.loss(run), …)  the E-step, solved
    report, client, _ = method.report(solved, problem, …)       the client's answer

    reports           = Sum() or ReportList(), fed one by one   the input of the M-step
    server, _         = method.update(server, reports, at)      the M-step, on the server

This is a whole method, with its declaration: federated averaging with a server that forgets. What
it does not define has a default: the server sends its weights, clients train from them by the
negative log-likelihood, and answer with weights.

    class Forgetful(Averaged, Method[Weights, Stateless, Sum]):
        name = "forgetful"
        about = About("averages, then shrinks")
        server_state = Weights
        reports = Reports({"weights": Part()})  # dense, measured from the broadcast, averaged

        keep: float = Field(0.99, description="share of a weight that survives a round")

        def init(self, run):
            return Weights(run.network.initial)

        def update(self, server, reports, at):
            return Weights({n: self.keep * t for n, t in reports.mean().items()}), {}

What is carried from round to round is State (server's or client's); what is only reported to
the user is Info, and no method reads it. Nothing else remembers anything, so a run can stop and
go on anywhere. A server's state may have a field `stopped`: why it wants no further rounds, in
words; empty while it does. A client's may have a field `temperature`: of the predictions of its own
model (`RoundContext.temperature`); 0 where it has none. If there is no global model, clients hold
out samples for it.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, Field
from torch import Tensor

from fedbayes.contracts.changes import Chart, part_of
from fedbayes.contracts.former import FormerNames
from fedbayes.contracts.parts import Reports
from fedbayes.contracts.prior import ClientNote
from fedbayes.contracts.recommended import Known, adam, sgd
from fedbayes.contracts.reports import Report, ReportList, Sum
from fedbayes.contracts.run import Federation, RoundContext, nll
from fedbayes.core.brief import Brief
from fedbayes.core.fields import Choosable, Chosen, unused
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples, Tensors
from fedbayes.errors import ConfigError
from fedbayes.inference.problem import Loss, Problem, Solved
from fedbayes.models import Network
from fedbayes.models.units import Gateable

Info = dict[str, float]
"""Metrics for the user, by name: a loss, a norm. They go into the metrics of the round."""

Sampler = Callable[[Tensor], Tensor]
"""Inputs [n, ...] to the network's outputs [draws, n, width] under draws from a posterior."""


class Models(StrEnum):
    """Who has a model to predict with after a run.

    Examples:
        >>> from fedbayes.contracts import Models
        >>> Models.GLOBAL.has_global, Models.BOTH.headline
        (True, 'local')
    """

    GLOBAL = "global"
    """The server: its model is evaluated and saved, and clients keep none between rounds."""
    PERSONAL = "personal"
    """Every client one of its own, kept in its private state; what `model` gives is none."""
    BOTH = "both"
    """Every client one of its own, which the method is for, and the server another."""
    COPIED = "copied"
    """The server; after the last round it sends every client a copy, whose bytes count."""

    @property
    def has_global(self) -> bool:
        """Whether the server has a model, which is evaluated and saved."""
        return self is not Models.PERSONAL

    @property
    def headline(self) -> Literal["global", "local"]:
        """Whose metric a summary leads with: the global model's or the clients' own models'."""
        return "global" if self in (Models.GLOBAL, Models.COPIED) else "local"


@dataclass(frozen=True)
class About:
    """What a method says of itself: in lists, for presets, and what it needs of a run."""

    summary: str = ""
    """One line for the list of methods."""
    paper: str = ""
    """Where the method comes from."""
    published: Mapping[str, Any] = field(default_factory=dict)
    """Published values of fields whose default is another one, for `preset = "published"`."""
    unused: Mapping[str, str] = field(default_factory=dict)
    """Settings of `training` that have no effect, each with the reason."""
    needs: Sequence["Need"] = ()
    """What a run must be, such as `contracts.needs.own_prior`, after what base classes need."""
    notes: Sequence["Note"] = ()
    """What a user should know of a run, such as `contracts.natural.few_rounds`; likewise."""

    def completed(self, other: "About") -> "About":
        """With what another one has of what this one leaves out."""
        return About(
            self.summary or other.summary,
            self.paper or other.paper,
            self.published or other.published,
            self.unused or other.unused,
            tuple(dict.fromkeys((*other.needs, *self.needs))),
            tuple(dict.fromkeys((*other.notes, *self.notes))),
        )


@dataclass(frozen=True)
class Stateless:
    """The private state of a client that keeps none.

    Examples:
        >>> from fedbayes.contracts import Stateless
        >>> Stateless()
        Stateless()
    """


@dataclass(frozen=True, repr=False)
class Weights(Brief):
    """A state that is nothing but the weights of a network.

    Examples:
        >>> import torch
        >>> from fedbayes.contracts import Weights
        >>> sorted(Weights({"bias": torch.zeros(2)}).weights)
        ['bias']
    """

    weights: Tensors


ServerState = TypeVar("ServerState")
ClientState = TypeVar("ClientState")
Reduced = TypeVar("Reduced", Sum, ReportList)


class Method(Choosable, Generic[ServerState, ClientState, Reduced], metaclass=FormerNames):
    """A federated method. Fields are its hyperparameters; functions are pure.

    States are frozen dataclasses of tensors (see `fedbayes.core.tensors.pack`). No function changes
    its arguments. Tensors of a message may have other shapes for every client, and the global
    model may change its size from round to round. What no round changes is in the `Federation`, and
    need not be in a state.

    Examples:
        >>> from fedbayes.contracts import Method
        >>> from fedbayes.methods import METHODS
        >>> issubclass(METHODS["fedavg"], Method)
        True
        >>> METHODS["fedprox"](proximal=0.1).proximal
        0.1
    """

    name: ClassVar[str]
    """The name on the command line and in a config."""
    about: ClassVar[About] = About()
    """A line for lists, the paper, and published values."""
    server_state: ClassVar[type]
    """Type of the server's state."""
    client_state: ClassVar[type] = Stateless
    """Type of a client's private state."""
    reports: ClassVar[Reports] = Reports()
    """What reports are made of and how they are reduced; see `fedbayes.contracts.parts`."""
    models: ClassVar[Models] = Models.GLOBAL
    """Who has a model to predict with after a run: the server, the clients, or both."""

    preset: Literal["recommended", "published"] = Field(
        "recommended",
        description="values of settings at auto: recommended, which work in a first run; or "
        "published",
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse parameters that would stand in the place of what a method has by contract; what
        `about` leaves out is as in the classes that it derives from.
        """
        super().__pydantic_init_subclass__(**kwargs)
        for base in cls.__mro__[1:]:
            cls.about = cls.about.completed(vars(base).get("about", About()))
        for name in cls.model_fields:
            if name in Method.__class_vars__:
                what, way = "an attribute", f"write it without a type, as in {name} = ..."
            elif any(name in vars(base) for base in cls.__mro__[1:]):
                what, way = "a function or property", "rename the parameter"
            else:
                continue
            raise ConfigError(
                f"the method {cls.__name__} has a parameter {name!r}, and methods have {what} of "
                f"this name; {way}"
            )

    def weight(self, solved: Solved) -> float:
        """The weight of a report: its training samples if reports are weighted, else 1."""
        return float(solved.count) if Reports.of(self).weighted else 1.0

    def variant(self) -> "AnyMethod":
        """The method that runs with these settings: itself, by default."""
        return self

    def check(self, run: Federation) -> None:
        """Reject, before anything runs, training, network or likelihood that it cannot work with:
        by default, what `about.needs` says.

        Raises:
            ConfigError: says which setting, and what would do.
            ModelError: says which layer.
        """
        for need in self.about.needs:
            need(self, run)

    def recommended(self, known: Known) -> dict[str, Any]:
        """Settings that learn at the first try, for those that are left at `auto`.

        Args:
            known: what is known before the first round.

        Returns:
            Values by key, as in `training.lr` and `method.kl_weight`: of training and of fields of
            the method that are marked with `fields.Chosen`.
        """
        return adam(known) if known.pretrained else sgd(known)

    def remarks(self, run: Federation) -> list[str]:
        """Notes before the first round, such as a layer that the method leaves out: by default,
        those of `about.notes`, and settings without effect. A sentence each.
        """
        notes = [sentence for note in self.about.notes for sentence in note(self, run)]
        for name, why in self.about.unused.items():
            notes += unused(run.training, [name], f"{self.name} {why}", "training.")
        return notes

    def note(self, samples: int, run: Federation) -> ClientNote:
        """A note on a client with this number of training samples: its prior, and whether it has
        too few. Nothing by default.
        """
        return ClientNote()

    def init(self, run: Federation) -> ServerState:
        """The server's state before the first round: by default the network's initialization as
        `weights`, without `buffers` if the state has these too.
        """
        state: ServerState = server_state(self, run.network.initial, run.network.buffers)
        return state

    def join(self, at: RoundContext) -> ClientState:
        """The private state of a client before its first round; it never leaves the client."""
        state: ClientState = self.client_state()
        return state

    def message(self, server: ServerState, at: RoundContext) -> Message:
        """The broadcast: what the server sends to the client `at.client`.

        Messages that consist of the very same tensors are encoded once. By default the weights of
        the server's state, the same to all.
        """
        return {**weights_of(server)}

    def loss(self, run: Federation) -> Loss:
        """What clients minimize on each batch: the negative log-likelihood by default.

        It is pure and captures no tensor: what is not a parameter, it finds in the problem's
        `given` and `noise`. So it can be mapped over clients.
        """
        return nll(run)

    def validation(self, run: Federation) -> Loss:
        """What early stopping watches on samples that are held out: the negative log-likelihood
        by default, without dropout.
        """
        return nll(run, training=False)

    def problem(
        self, message: Message, client: ClientState, samples: Samples, at: RoundContext
    ) -> Problem:
        """The E-step, stated: where a client's training starts, and what its loss is given.

        By default it starts from the weights that came.
        """
        return Problem(at.run.network.prepare(dense(message)))

    def report(
        self, solved: Solved, problem: Problem, client: ClientState, at: RoundContext
    ) -> tuple[Report, ClientState, Info]:
        """The client's answer, its new private state, and metrics.

        By default the weights where training ended.
        """
        return Report(dict(solved.parameters), self.weight(solved)), client, solved.info

    def local(
        self, message: Message, client: ClientState, samples: Samples, at: RoundContext
    ) -> tuple[Report, ClientState, Info]:
        """The E-step: infer the client's parameters from its data under the server's prior.

        States the problem, solves it by stochastic gradients and reports. A method with a closed
        form overrides this; its clients are then run one by one on every engine.
        """
        problem = self.problem(message, client, samples, at)
        solved = at.solve(problem, self.loss(at.run), samples, validation=self.validation(at.run))
        return self.report(solved, problem, client, at)

    def expected(self, message: Message, run: Federation) -> Message:
        """A pattern for the answer to `message`: names, shapes and types of a proper report.

        The server rejects a report that differs. By default it looks like the message.
        """
        return message

    def accept(self, server: ServerState, report: Report, run: Federation) -> str | None:
        """Reject a report with finite but invalid values, such as no honest client can have.

        Args:
            server: the state that the client was sent a message of.
            report: of the expected names, shapes and types.
            run: the run.

        Returns:
            What a user should know of a report that is good but does not say what it should, in
            words; nothing by default.

        Raises:
            MessageError: says what is wrong with it.
        """
        return None

    def origin(self, server: ServerState, run: Federation) -> Tensors | list[Tensors]:
        """What changes are measured from: tensors as a client that learnt nothing would report
        them, dense, by name. What is not here, or has another shape, is measured from zero, as
        are changes themselves.

        By default the global model, as far as the declaration says that reports start from it.

        Returns:
            Several where the server has several models: a report is measured from the nearest.
        """
        declared = Reports.of(self)
        return {
            name: tensor
            for name, tensor in self.model(server, run).items()
            if declared.starts_at_server(part_of(name, tensor.dtype, run.network))
        }

    def chart(self, server: ServerState, run: Federation) -> Chart:
        """The map between changes of a report and coordinates that can be added; by default the
        identity.
        """
        return Chart()

    def forget(
        self, server: ServerState, client: ClientState, run: Federation
    ) -> ServerState | None:
        """Remove from the server's state all that one client ever reported.

        Called with the same `run` for each of several clients, it removes all of them.

        Args:
            server: the state between two rounds.
            client: the private state of the client that withdraws.
            run: the run, with that client.

        Returns:
            The state. None by default: averages do not tell one client's reports apart later.
        """
        return None

    def remaining(self, client: ClientState, run: Federation, left: int) -> ClientState:
        """The private state of another client once `forget` has removed some.

        Args:
            client: its private state.
            run: the run, with those that were removed.
            left: how many clients remain.
        """
        return client

    @abstractmethod
    def update(
        self, server: ServerState, reports: Reduced, at: RoundContext
    ) -> tuple[ServerState, Info]:
        """The M-step: the server's new state from at least one report."""

    def model(self, server: ServerState, run: Federation) -> Tensors:
        """The global model to save and evaluate: by default the server's weights."""
        return weights_of(server)

    def personal_model(
        self, message: Message, report: Report | None, client: ClientState, run: Federation
    ) -> Tensors | None:
        """The client's own model, in the form of a global one or another that `draws` knows.

        By default the network as the client reported it.

        Args:
            message: what the server sent, or would send now.
            report: the client's answer to it, right after its E-step; None between rounds.
            client: its private state.
            run: the run.

        Returns:
            The model; None between rounds if the method keeps none for its clients.
        """
        if report is None:
            return None
        return {n: t for n, t in dense(report.tensors).items() if n in run.network.initial}

    def draws(self, model: Tensors, run: Federation) -> Sampler:
        """What a model predicts with: outputs of the network under one or several draws.

        By default a model is the weights of a network, a single draw.
        """
        return single_draw(model, run.network)


def weights_of(server: Any) -> Tensors:
    """The weights of a network in a server's state: its field `weights`, and `buffers` if it has
    such.

    Raises:
        ConfigError: it has no weights.
    """
    if not hasattr(server, "weights"):
        raise ConfigError(
            f"the server's state {type(server).__name__} has no field `weights`. Add one, or "
            "define message, problem, report and model"
        )
    return {**server.weights, **getattr(server, "buffers", {})}


def server_state(method: "AnyMethod", tensors: Tensors, buffers: Collection[str]) -> Any:
    """A server's state of these tensors, some of which are buffers, with defaults for the rest.

    Raises:
        ConfigError: a field has no default.
    """
    kind, parts = method.server_state, {"weights": tensors}
    if "buffers" in kind.__annotations__:
        parts = {"weights": {n: t for n, t in tensors.items() if n not in buffers}}
        parts["buffers"] = {n: t for n, t in tensors.items() if n in buffers}
    try:
        return kind(**parts)
    except TypeError:
        raise ConfigError(
            f"the server's state {kind.__name__} of {method.name} has more than weights. Define "
            "init and update"
        ) from None


def units_remarks(name: str, network: Network, touched: Collection[Gateable]) -> list[str]:
    """Notes on layers of which a method can leave no units out; `touched` are the others."""
    reasons = {
        group.layer: group.whole_because or "the network's code depends on its width"
        for group in network.groups
        if not group.output and group not in touched
    }
    reasons |= {n.removesuffix(".weight"): why for n, why in network.traced.untouched.items()}
    left = [f"{layer} ({why})" for layer, why in reasons.items()]
    shown = "; ".join(left[:8]) + (f"; and {len(left) - 8} more" if len(left) > 8 else "")
    sentences = [f"{name} sends these layers whole: {shown}"] if left else []
    if not touched:
        sentences.insert(
            0,
            f"{name} finds no units of this network to leave out, so messages contain the whole "
            "network",
        )
    return sentences


def single_draw(weights: Tensors, network: Network) -> Sampler:
    """The outputs [1, n, width] of one network with these weights.

    Examples:
        >>> import torch
        >>> from fedbayes.contracts import single_draw
        >>> from fedbayes.models import Network
        >>> network = Network(torch.nn.Linear(3, 2))
        >>> single_draw(network.initial, network)(torch.zeros(5, 3)).shape
        torch.Size([1, 5, 2])
    """
    ready = network.prepare(weights)
    return lambda x: network(ready, x)[None]


class Averaged(BaseModel):
    """The hyperparameter of every method whose server averages what clients report.

    One default for all: methods that weigh clients otherwise have other objectives, and say nothing
    of one another.

    Examples:
        >>> from fedbayes.contracts import Averaged
        >>> from fedbayes.methods import METHODS
        >>> issubclass(METHODS["fedavg"], Averaged), METHODS["fedavg"]().weighting
        (True, 'samples')
    """

    weighting: Annotated[Literal["samples", "uniform"], Chosen()] = Field(
        "samples",
        description="weight of a client at the server: its number of training samples, or 1",
    )


UNIFORM: Mapping[str, Any] = MappingProxyType({"weighting": "uniform"})
"""What papers publish in which all clients weigh alike."""

AnyMethod = Method[Any, Any, Any]
"""A method whose states we do not look into: what engines work with."""

Need = Callable[[AnyMethod, Federation], None]
"""What a method needs of a run: raises an error, which says what would do, where it is not so."""
Note = Callable[[AnyMethod, Federation], list[str]]
"""What a user of the method should know of a run before its first round, a sentence each."""
