"""FedNova: normalized averaging, in which clients with more steps do not pull harder."""

import torch

from fedbayes.contracts import (
    About,
    Federation,
    Info,
    Part,
    PointEstimate,
    Problem,
    Report,
    Reports,
    RoundContext,
    Solved,
    Stateless,
    Sum,
    Weights,
)
from fedbayes.contracts.needs import sgd_steps
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Tensors


class FedNova(PointEstimate[Weights]):
    """Normalized averaging (Wang et al. 2020, Eqs. 7 and 8).

    Client s reports its change divided by its length, d_s = (w − φ_s)/‖a_s‖₁. The entries of a_s
    are the factors of its gradients in the change: ones for plain SGD, so that ‖a_s‖₁ is the
    number τ_s of its steps. With momentum ρ their sum is

        (τ_s − ρ (1 − ρ^τ_s)/(1 − ρ))/(1 − ρ).

    The server goes w ← w − (Σ p_s ‖a_s‖₁) Σ p_s d_s. With equal numbers of steps it is FedAvg.
    """

    name = "fednova"
    about = About(
        "averages changes by the number of local steps",
        "Wang et al. 2020",
        needs=(sgd_steps,),
    )
    server_state = Weights
    reports = Reports(
        {
            "weights": Part(origin="zero"),
            "fednova": Part(origin="zero", exact=True, linear=False, range=65536.0),
        }
    )

    def expected(self, message: Message, run: Federation) -> Message:
        """A network, and a length."""
        return {**message, "fednova/length": torch.zeros((), dtype=torch.float64)}

    def report(
        self, solved: Solved, problem: Problem, client: Stateless, at: RoundContext
    ) -> tuple[Report, Stateless, Info]:
        """Report the change divided by its length, and the length."""
        steps, rho = solved.steps, at.run.training.momentum
        length = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        change: Message = dict(solved.parameters)
        for name in at.run.network.split()[0]:
            change[name] = (problem.start[name] - solved.parameters[name]) / length
        change["fednova/length"] = torch.tensor(length, dtype=torch.float64)
        return Report(change, self.weight(solved)), client, solved.info

    def update(self, server: Weights, reports: Sum, at: RoundContext) -> tuple[Weights, Info]:
        """Take as many mean steps as the clients did on average."""
        mean = reports.mean()
        length = float(mean.pop("fednova/length"))
        trained = {n: server.weights[n] - length * mean[n] for n in at.run.network.split()[0]}
        return Weights({**mean, **trained}), {"effective_steps": length}

    def personal_model(
        self, message: Message, report: Report | None, client: Stateless, run: Federation
    ) -> Tensors | None:
        """Return the network where the client's training ended."""
        if report is None:
            return None
        change, sent = dense(report.tensors), dense(message)
        length = float(change.pop("fednova/length"))
        return {**change, **{n: sent[n] - length * change[n] for n in run.network.split()[0]}}
