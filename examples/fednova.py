"""FedNova: clients that take more steps do not pull harder."""

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
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Tensors
from fedbayes.errors import ConfigError


class FedNova(PointEstimate[Weights]):
    """Normalized averaging (Wang et al. 2020).

    A client reports its change by its length, d_s = (w − φ_s)/‖a_s‖₁, where a_s holds the factors
    of its gradients in the change: ones for plain SGD, so that ‖a_s‖₁ is the number τ_s of its
    steps; with momentum ρ their sum is (τ_s − ρ (1 − ρ^τ_s)/(1 − ρ))/(1 − ρ). The server goes
    w ← w − (Σ p_s ‖a_s‖₁) Σ p_s d_s. With equal numbers of steps it is FedAvg.
    """

    name = "fednova"
    about = About("averages changes by the number of local steps", "Wang et al. 2020")
    server_state = Weights
    reports = Reports(
        {"weights": Part(origin="zero"), "fednova": Part(origin="zero", exact=True, linear=False)}
    )

    def check(self, run: Federation) -> None:
        if run.training.optimizer != "sgd":
            raise ConfigError("fednova counts steps of SGD; set training.optimizer = 'sgd'")

    def init(self, run: Federation) -> Weights:
        return Weights(run.network.initial)

    def expected(self, message: Message, run: Federation) -> Message:
        return {**message, "fednova/length": torch.zeros((), dtype=torch.float64)}

    def report(
        self, solved: Solved, problem: Problem, client: Stateless, at: RoundContext
    ) -> tuple[Report, Stateless, Info]:
        steps, rho = solved.steps, at.run.training.momentum
        length = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        change: Message = dict(solved.parameters)
        for name in at.run.network.split()[0]:
            change[name] = (problem.start[name] - solved.parameters[name]) / length
        change["fednova/length"] = torch.tensor(length, dtype=torch.float64)
        return Report(change, float(solved.count)), client, solved.info

    def update(self, server: Weights, reports: Sum, at: RoundContext) -> tuple[Weights, Info]:
        mean = reports.mean()
        length = float(mean.pop("fednova/length"))
        trained = {n: server.weights[n] - length * mean[n] for n in at.run.network.split()[0]}
        return Weights({**mean, **trained}), {"effective_steps": length}

    def personal_model(
        self, message: Message, report: Report | None, client: Stateless, run: Federation
    ) -> Tensors | None:
        if report is None:
            return None
        change, sent = dense(report.tensors), dense(message)
        length = float(change.pop("fednova/length"))
        return {**change, **{n: sent[n] - length * change[n] for n in run.network.split()[0]}}
