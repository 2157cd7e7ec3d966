"""q-FedAvg: clients with a larger loss count more, so that performance is more uniform."""

from dataclasses import replace
from typing import Annotated, Any

import torch
from pydantic import Field

from fedbayes.contracts import (
    About,
    Federation,
    Info,
    Known,
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
from fedbayes.core.fields import Chosen
from fedbayes.core.messages import Message
from fedbayes.core.tensors import Samples, Tensors
from fedbayes.errors import ConfigError

FACTORS = "qfedavg/factors"
"""Name of a client's F^q and h in a report, float64 [2]."""


class QFedAvg(PointEstimate[Weights]):
    """Fair resource allocation (Li et al. 2020, Algorithm 2): minimizes Σ p_k F_k^(q+1) / (q+1).

    Client k has the loss F_k at the server's weights w, trains to w_k, and reports

        Δ_k = F_k^q L (w − w_k),   h_k = q F_k^(q−1) ‖L (w − w_k)‖² + L F_k^q,

    with L the inverse of the learning rate. The server goes
    w ← w − Σ p_k Δ_k / Σ p_k h_k. With q = 0 it is FedAvg.
    """

    name = "qfedavg"
    about = About(
        "weighs clients by a power of their loss, for fairness",
        "Li et al. 2020",
    )
    server_state = Weights
    reports = Reports(
        {
            "weights": Part(origin="zero", linear=False, range=65536.0),
            "qfedavg": Part(origin="zero", exact=True, linear=False, range=65536.0),
        }
    )

    q: Annotated[float, Chosen()] = Field(
        0.1, ge=0, description="q, extra weight of clients with a larger loss. 0: FedAvg"
    )

    def recommended(self, known: Known) -> dict[str, Any]:
        """Losses that are densities of numbers or times may be negative, and have no power."""
        return {**super().recommended(known), "method.q": 0.0 if known.real else 0.1}

    def expected(self, message: Message, run: Federation) -> Message:
        """A network, and two numbers."""
        return {**message, FACTORS: torch.zeros(2, dtype=torch.float64)}

    def problem(
        self, message: Message, client: Stateless, samples: Samples, at: RoundContext
    ) -> Problem:
        """Train from the server's weights, whose loss is F_k."""
        problem = super().problem(message, client, samples, at)
        loss, total = self.validation(at.run), torch.zeros((), dtype=torch.float64)
        size = at.run.training.batch_size
        with torch.no_grad():
            for x, y in zip(*(torch.split(t, size) for t in samples), strict=True):
                total += len(y) * loss(problem.start, Samples(x, y), {}, {}).cpu().double()
        mean = total / len(samples.y)
        if self.q and mean <= 0:
            raise ConfigError(
                f"qfedavg takes a power of each client's loss, and client {at.client} has a loss "
                f"of {float(mean):.3g}. Set method.q = 0, or choose a likelihood of classes"
            )
        return replace(problem, given={"loss": mean})

    def report(
        self, solved: Solved, problem: Problem, client: Stateless, at: RoundContext
    ) -> tuple[Report, Stateless, Info]:
        """Report Δ_k, F_k^q and h_k."""
        loss, scale = float(problem.given["loss"]), 1 / at.lr
        power = loss**self.q if self.q else 1.0
        change: Message = dict(solved.parameters)
        squares = 0.0
        for name in at.run.network.split()[0]:
            moved = scale * (problem.start[name] - solved.parameters[name])
            squares += float(moved.double().square().sum())
            change[name] = power * moved
        step = scale * power + (self.q * loss ** (self.q - 1) * squares if self.q else 0.0)
        change[FACTORS] = torch.tensor([power, step], dtype=torch.float64)
        return Report(change, self.weight(solved)), client, solved.info

    def update(self, server: Weights, reports: Sum, at: RoundContext) -> tuple[Weights, Info]:
        """Step down Σ p_k Δ_k, by the inverse of the estimated Lipschitz constant."""
        mean = reports.mean()
        step = float(mean.pop(FACTORS)[1])
        if step <= 0:  # of noise: there is no step to be had
            return server, {"lipschitz": step}
        trained = {n: server.weights[n] - mean[n] / step for n in at.run.network.split()[0]}
        return Weights({**mean, **trained}), {"lipschitz": step}

    def personal_model(
        self, message: Message, report: Report | None, client: Stateless, run: Federation
    ) -> Tensors | None:
        """None: the learning rate of the round, which a report is scaled by, is not in it."""
        return None
