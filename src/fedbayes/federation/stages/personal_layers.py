"""Any averaging method, with layers that are each client's own: FedBN where they normalize."""

from dataclasses import make_dataclass, replace
from typing import Any, ClassVar

from fedbayes.contracts import (
    AnyMethod,
    Federation,
    Info,
    Method,
    Models,
    Problem,
    Report,
    RoundContext,
    Solved,
)
from fedbayes.contracts.parts import Retract
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples, Tensors
from fedbayes.errors import ConfigError
from fedbayes.methods import METHODS


def with_personal_layers(method: AnyMethod) -> AnyMethod:
    """The method, with the same settings, whose clients keep `Network.own` to themselves.

    Server and messages are as if the network had no such tensors. A client trains its own together
    with the tensors from the server, and keeps them in its private state. So only clients have
    models (Li et al. 2021, FedBN: Federated Learning on Non-IID Features via Local Batch
    Normalization).
    """
    base = type(method)
    state = make_dataclass(
        "PersonalState", [("inner", base.client_state), ("own", Tensors)], frozen=True
    )
    kind = type(
        base.__name__,
        (_PersonalLayers, base),
        {
            "client_state": state,
            "reports": base.reports.in_states(_inside),
            "behind": base,
            "__module__": base.__module__,
            "__doc__": base.__doc__,
        },
    )
    made: AnyMethod = kind.model_validate(method.model_dump())  # type: ignore[attr-defined]
    return made


class _PersonalLayers(Method[Any, Any, Any]):
    """What differs from the method that comes behind it in the order of classes."""

    models = Models.PERSONAL

    behind: ClassVar[type[AnyMethod]]
    """The method."""

    def check(self, run: Federation) -> None:
        """All clients get the same weights, and report the very same; they train by gradients."""
        if not _able(self.behind):
            able = [name for name, kind in METHODS.items() if _able(kind)]
            raise ConfigError(
                "model.batch_norm = 'local' works only with methods that average whole weights "
                f"({', '.join(able)}), not with {self.name}. Choose another method.name, or "
                "batch_norm = 'averaged'"
            )
        if getattr(self, "control", "path") == "gradient":
            raise ConfigError(
                "model.batch_norm = 'local' works only with method.control = 'path', whose "
                "variates are gradients of the training steps"
            )
        self.behind.check(self, run)

    def join(self, at: RoundContext) -> Any:
        """The method's state, and own layers as they are initialized."""
        plain = self.behind.join is Method.join  # an empty state of the type that it finds
        inner = self.behind.client_state() if plain else self.behind.join(self, at)
        own = at.run.network.prepare(at.run.network.own)
        return type(self).client_state(inner=inner, own=own)

    def problem(self, message: Message, client: Any, samples: Samples, at: RoundContext) -> Problem:
        """Train own layers too, from where they were left."""
        problem = self.behind.problem(self, message, client.inner, samples, at)
        return replace(problem, start={**problem.start, **at.run.network.prepare(client.own)})

    def report(
        self, solved: Solved, problem: Problem, client: Any, at: RoundContext
    ) -> tuple[Report, Any, Info]:
        """Keep own layers, report the others."""
        names = at.run.network.own
        shared = replace(solved, parameters=_without(solved.parameters, names))
        problem = replace(problem, start=_without(problem.start, names))
        report, inner, info = self.behind.report(self, shared, problem, client.inner, at)
        kept = {name: solved.parameters[name] for name in names}
        return report, type(self).client_state(inner=inner, own=kept), info

    def personal_model(
        self, message: Message, report: Report | None, client: Any, run: Federation
    ) -> Tensors | None:
        """What the client reported, or the server's weights between rounds, with own layers."""
        shared = self.behind.personal_model(self, message, report, client.inner, run)
        if shared is None:
            sent = dense(message)
            shared = {name: sent[name] for name in run.network.initial}
        return {**shared, **run.network.prepare(client.own)}


def _able(kind: type[AnyMethod]) -> bool:
    """Whether clients of a method train whole weights by gradients, and report these very ones."""
    whole = not kind.reports.refusals["secure sums"] and "weights" in kind.reports.parts
    return whole and kind.models is Models.GLOBAL and kind.local is Method.local


def _inside(retract: Retract) -> Retract:
    """How the method's own state, inside that of a client with own layers, takes back a part."""
    return lambda client, missed: replace(client, inner=retract(client.inner, missed))


def _without(tensors: Tensors, names: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in names}
