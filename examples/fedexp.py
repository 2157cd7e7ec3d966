"""FedExP: the server goes further where clients' changes disagree."""

import torch
from pydantic import Field

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
from fedbayes.core.messages import Message
from fedbayes.core.tensors import Tensors


class FedExP(PointEstimate[Weights]):
    """Server-side extrapolation (Jhunjhunwala et al. 2023, Algorithm 1).

    A client reports its weights φ_s, and the square of its change Δ_s = φ_s − w. The server goes
    w ← w + η Δ̄ with Δ̄ = Σ p_s Δ_s and

        η = max(1, Σ p_s ‖Δ_s‖² / (2 (‖Δ̄‖² + ε))).

    Where all clients agree it is FedAvg.
    """

    name = "fedexp"
    about = About(
        "FedAvg that goes further where clients disagree",
        "Jhunjhunwala et al. 2023",
    )
    server_state = Weights
    reports = Reports(
        {"weights": Part(), "fedexp": Part(origin="zero", exact=True, linear=False, range=65536.0)}
    )

    epsilon: float = Field(1e-3, gt=0, description="ε, which keeps steps short near a solution")

    def init(self, run: Federation) -> Weights:
        return Weights(run.network.initial)

    def expected(self, message: Message, run: Federation) -> Message:
        return {**message, "fedexp/square": torch.zeros((), dtype=torch.float64)}

    def report(
        self, solved: Solved, problem: Problem, client: Stateless, at: RoundContext
    ) -> tuple[Report, Stateless, Info]:
        ended, start = solved.parameters, problem.start
        square = sum(float((ended[n] - start[n]).square().sum()) for n in at.run.network.split()[0])
        tensors = {**ended, "fedexp/square": torch.tensor(square, dtype=torch.float64)}
        return Report({**tensors}, self.weight(solved)), client, solved.info

    def update(self, server: Weights, reports: Sum, at: RoundContext) -> tuple[Weights, Info]:
        mean, trained = reports.mean(), at.run.network.split()[0]
        squares = float(mean.pop("fedexp/square"))
        change = {n: mean[n] - server.weights[n] for n in trained}
        length = sum(float(c.double().square().sum()) for c in change.values())
        rate = max(1.0, squares / (2 * (length + self.epsilon)))
        moved = {n: server.weights[n] + rate * c for n, c in change.items()}
        return Weights({**mean, **moved}), {"server_rate": rate}

    def personal_model(
        self, message: Message, report: Report | None, client: Stateless, run: Federation
    ) -> Tensors | None:
        model = super().personal_model(message, report, client, run)
        return None if model is None else {n: model[n] for n in run.network.initial}
