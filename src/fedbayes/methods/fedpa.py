"""FedPA: posterior averaging, FedAvg whose clients correct their drift by their own covariance."""

from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    About,
    ClientNote,
    Federation,
    Info,
    Known,
    Report,
    RoundContext,
    Stateless,
    sgd,
)
from fedbayes.contracts.drift import GeneralizedFedAvg
from fedbayes.contracts.needs import all_steps, langevin, where
from fedbayes.core.fields import Only
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples, Tensors
from fedbayes.inference.optimizers import ServerOptimizer
from fedbayes.inference.sampling import Langevin, sampled
from fedbayes.inference.shrinkage import drift


class FedPa(ServerOptimizer, GeneralizedFedAvg):
    """The mode of the product of the clients' Gaussian posteriors N(μ_s, Σ_s), by gradients of

        ½ Σ_s r_s (w − μ_s)ᵀ Σ_s⁻¹ (w − μ_s),   r_s = n_s / Σ n_s

    (Al-Shedivat et al. 2021, Proposition 2). A client samples its posterior along its training and
    answers w − Δ_s with Δ_s = Σ̂_s⁻¹ (w − μ̂_s), the covariance shrunk towards the identity; the
    server takes a step along Σ r_s Δ_s. Where Σ_s is the identity, and in the first rounds, that
    is generalized FedAvg.
    """

    name = "fedpa"
    about = About(
        "corrects drift with clients' posterior covariances",
        "Al-Shedivat et al. 2021",
        needs=(all_steps, where("sampler", "langevin", need=langevin)),
    )

    burn_in_rounds: int = Field(
        5, ge=0, description="rounds of federated averaging before posteriors are sampled"
    )
    sampler: Literal["iterates", "langevin"] = Field(
        "iterates",
        description="samples: means of successive iterates of the training (IASG), or single "
        "iterates of stochastic gradient Langevin dynamics",
    )
    samples: int = Field(10, ge=2, description="largest number of samples of a client in a round")
    burn_in: float = Field(
        0.5, ge=0, lt=1, description="share of a client's steps before its first sample"
    )
    shrinkage: float = Field(
        0.1,
        ge=0,
        description="ρ: the covariance of l samples has weight (l − 1) ρ relative to the "
        "identity, which has 1. 0: federated averaging",
    )
    temperature: Annotated[float, Only("sampler", "langevin")] = Field(
        1.0,
        gt=0,
        description="temperature of the posterior. 1: the posterior of the client's samples",
    )

    def recommended(self, known: Known) -> dict[str, Any]:
        """Langevin dynamics has plain steps."""
        return sgd(known) if self.sampler == "langevin" else super().recommended(known)

    def remarks(self, run: Federation) -> list[str]:
        """Whether there are rounds in which posteriors are sampled."""
        if run.rounds > self.burn_in_rounds:
            return []
        return [
            f"all {run.rounds} rounds are federated averaging: fedpa samples posteriors after "
            f"method.burn_in_rounds = {self.burn_in_rounds}"
        ]

    def note(self, samples: int, run: Federation) -> ClientNote:
        """A client with too few steps for two samples averages."""
        if self._steps(samples, run)[1] >= 2 or run.rounds <= self.burn_in_rounds:
            return ClientNote()
        why = (
            "use federated averaging, because they have too few steps in a round for two samples "
            f"after method.burn_in = {self.burn_in:g}. Set more training.epochs or training.steps"
        )
        return ClientNote(falls_short=why)

    def _steps(self, samples: int, run: Federation) -> tuple[int, int]:
        """Steps of a round for so many samples: all, and those after burn-in."""
        steps = run.training.step_count(samples)
        return steps, steps - int(self.burn_in * steps)

    def optimizer(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        """The one that the settings name."""
        return self.build_server(parameters)

    def local(
        self, message: Message, client: Stateless, samples: Samples, at: RoundContext
    ) -> tuple[Report, Stateless, Info]:
        """Train; after the first rounds, answer with the drift that the samples correct.

        A client with too few steps for two samples answers as in federated averaging.
        """
        steps, after = self._steps(len(samples.y), at.run)
        if at.round <= self.burn_in_rounds or after < 2:
            report, client, info = super().local(message, client, samples, at)
            return report, client, {**info, "posterior_samples": 1.0}
        problem, loss = self.problem(message, client, samples, at), self.loss(at.run)
        names = list(at.run.network.split()[0])
        noise = Langevin(at.rng("langevin"), len(samples.y), self.temperature)
        solved, found = sampled(
            problem,
            lambda stated: at.solve(stated, loss, samples),
            names,
            burn_in=steps - after,
            every=max(1, after // self.samples),
            averaged=self.sampler == "iterates",
            langevin=noise if self.sampler == "langevin" else None,
        )
        last = {name: drawn[-self.samples :] for name, drawn in found.items()}
        report, client, info = self.report(solved, problem, client, at)
        corrected = drift(last, problem.start, self.shrinkage)
        tensors = dense(report.tensors)
        for name, change in corrected.items():
            start = problem.start[name]
            tensors[name] = (start.double() - change).to(start.dtype)
        count = float(len(next(iter(last.values()))))
        return Report({**tensors}, report.weight), client, {**info, "posterior_samples": count}

    def personal_model(
        self, message: Message, report: Report | None, client: Stateless, run: Federation
    ) -> Tensors | None:
        """None, because a report is not a network for predictions."""
        return None
