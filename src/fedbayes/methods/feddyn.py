"""FedDyn: dynamic regularization, which makes the clients' optima those of the federation."""

from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    UNIFORM,
    About,
    Averaged,
    Federation,
    Info,
    Loss,
    Method,
    Part,
    Problem,
    Report,
    Reports,
    RoundContext,
    Solved,
    Sum,
    Tree,
    nll,
)
from fedbayes.contracts.changes import norm
from fedbayes.contracts.personal import PersonalTensors
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples, Tensors, named, part
from fedbayes.inference.controls import less


@dataclass(frozen=True)
class FedDynServer:
    """The weights, and the mean of the clients' accumulated changes."""

    weights: Tensors
    drift: Tensors
    """Σ_k p_k d_k, like the trained weights; h = −α drift in the paper."""
    heard: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    """Of all reports so far, the sum of their weights and their number, float64 [2]."""


def _retracted(client: PersonalTensors, missed: Tensors) -> PersonalTensors:
    """The sum of the changes that arrived."""
    return PersonalTensors(less(client.tensors, missed))


def _length(method: Any, server: FedDynServer, run: Federation) -> float:
    """A client's change may be as long as the weights are."""
    return norm(server.weights[name].double() for name in server.drift)


class FedDyn(Averaged, Method[FedDynServer, PersonalTensors, Sum]):
    """Federated learning with dynamic regularization (Acar et al. 2021, Algorithm 1).

    Client k keeps d_k, the sum of its changes θ_k − θ over its rounds, and minimizes

        L_k(θ_k) + α ⟨d_k, θ_k⟩ + α/2 ‖θ_k − θ‖²,

    where −α d_k is the paper's ∇L_k(θ_k) of the client's last round. The server goes to

        θ ← mean θ_k + Σ_k p_k d_k,   p_k = n_k / Σ n,

    whose last term is the paper's −h/α. At a fixed point all θ_k = θ and Σ p_k ∇L_k(θ) = 0: the
    optimum of the federation's objective, however much the clients' data differ. In the paper all
    clients weigh alike. Otherwise Σ n is the mean weight of the reports so far times the number
    of clients: exact where all of them report.
    """

    name = "feddyn"
    about = About(
        "a regularizer that aligns the clients' optima",
        "Acar et al. 2021",
        published=UNIFORM,
    )
    server_state = FedDynServer
    client_state = PersonalTensors
    reports = Reports(
        {"change": Part(origin="zero", tracked=True, retract=_retracted, typical=_length)}
    )

    alpha: float = Field(
        0.1,
        gt=0,
        description="α, strength of the regularizer, about 1 / (learning rate × steps of a "
        "round). A smaller value is unstable, a larger one slow",
    )

    def init(self, run: Federation) -> FedDynServer:
        """Start at the network's initialization, with no changes."""
        initial = run.network.initial
        return FedDynServer(initial, _zeros(run))

    def join(self, at: RoundContext) -> PersonalTensors:
        """Start with no changes."""
        return PersonalTensors(_zeros(at.run))

    def expected(self, message: Message, run: Federation) -> Message:
        """Changes of the trained weights, and buffers."""
        trained = run.network.split()[0]
        changes = named("change", {n: t for n, t in message.items() if n in trained})
        return {**{n: t for n, t in message.items() if n not in trained}, **changes}

    def problem(
        self, message: Message, client: PersonalTensors, samples: Samples, at: RoundContext
    ) -> Problem:
        """Train from the server's weights θ, regularized by them and by d_k."""
        network = at.run.network
        start = network.prepare(dense(message))
        centre = {name: start[name] for name in client.tensors}
        given = {"centre": centre, "drift": network.prepare(client.tensors)}
        return Problem(start, given=given)

    def loss(self, run: Federation) -> Loss:
        """The negative log-likelihood plus α ⟨d_k, θ_k⟩ + α/2 ‖θ_k − θ‖²."""
        likelihood = nll(run)

        def loss(parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> Tensor:
            value = likelihood(parameters, batch, given, noise)
            for name, centre in given["centre"].items():
                w = parameters[name]
                linear = (given["drift"][name] * w).sum()
                value = value + self.alpha * (linear + 0.5 * (w - centre).square().sum())
            return value

        return loss

    def report(
        self, solved: Solved, problem: Problem, client: PersonalTensors, at: RoundContext
    ) -> tuple[Report, PersonalTensors, Info]:
        """Report the change of the weights, and add it to d_k."""
        ended, centre = solved.parameters, problem.given["centre"]
        change = at.run.clips.shortened("change", {n: ended[n] - w for n, w in centre.items()})
        drift = {n: problem.given["drift"][n] + moved for n, moved in change.items()}
        buffers = {n: t for n, t in ended.items() if n not in centre}
        report = Report({**buffers, **named("change", change)}, self.weight(solved))
        return report, PersonalTensors(drift), solved.info

    def update(
        self, server: FedDynServer, reports: Sum, at: RoundContext
    ) -> tuple[FedDynServer, Info]:
        """Go to the mean of the reports plus the mean of all accumulated changes."""
        mean = reports.mean()
        heard = server.heard + torch.tensor([reports.weight, reports.clients], dtype=torch.float64)
        before, after = (float(h[0] / h[1]) if h[1] else 0.0 for h in (server.heard, heard))
        kept = before / after if before else 1.0
        share = reports.weight / (at.run.clients * after)
        moved = part(mean, "change")
        drift = {n: kept * d + share * moved[n] for n, d in server.drift.items()}
        weights = {
            n: w + moved[n] + drift[n] if n in moved else mean[n] for n, w in server.weights.items()
        }
        length = torch.stack([d.norm() for d in drift.values()]).norm()
        return FedDynServer(weights, drift, heard), {"drift_norm": float(length)}

    def personal_model(
        self, message: Message, report: Report | None, client: PersonalTensors, run: Federation
    ) -> Tensors | None:
        """Return the network where the client's training ended."""
        if report is None:
            return None
        found, sent = dense(report.tensors), dense(message)
        changed = {n: sent[n] + moved for n, moved in part(found, "change").items()}
        return {n: changed[n] if n in changed else found[n] for n in sent}


def _zeros(run: Federation) -> Tensors:
    """No changes, like the trained weights."""
    return {name: torch.zeros_like(w) for name, w in run.network.split()[0].items()}
