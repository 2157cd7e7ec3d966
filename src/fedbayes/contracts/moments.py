"""Clients that refine their factor of the posterior by mean and precision of a tilted one."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts.method import About, Info, Sampler
from fedbayes.contracts.natural import (
    KNOWN_STD,
    few_rounds,
    is_unlearnt,
    means_and_stds,
    norms,
    retracting,
    sampler,
    shifted,
)
from fedbayes.contracts.product import PartitionedPosterior, PosteriorServer
from fedbayes.contracts.recommended import Known, adam
from fedbayes.contracts.reports import Report
from fedbayes.contracts.run import Federation, RoundContext, nll
from fedbayes.core.fields import Chosen, Tuned
from fedbayes.core.messages import Message
from fedbayes.core.tensors import Samples, Tensors, named, part
from fedbayes.inference.gaussian import NaturalGaussian
from fedbayes.inference.problem import Loss, Problem, Projection, Solved, Tree


def implicit(run: Federation) -> bool:
    """Whether steps toward the cavity are taken apart: optimizers whose steps are no multiples of
    the gradient would end elsewhere.
    """
    return run.training.optimizer == "sgd"


@dataclass(frozen=True)
class MomentsClient:
    """What never leaves a client: its factor s_i(θ), float64. Empty before its first refinement."""

    factor: NaturalGaussian


def retracted(client: MomentsClient, missed: Tensors) -> MomentsClient:
    """The factor changes by what arrived, so that the posterior stays the factors' product."""
    return MomentsClient(shifted(client.factor, missed, -1.0))


class MomentMatching(PartitionedPosterior[MomentsClient]):
    """Clients infer a Gaussian of the tilted posterior, p(D_i | θ)^(1/T) p(θ)^(1/K) s(θ)/s_i(θ).

    The Gaussian has the mean m, and the cavity has precision and shift (Λ, h). The data and the
    client's share of the prior add the precision Λ_i to the cavity's. The refined factor then has
    the precision Λ_i and the shift (Λ + Λ_i) m − h.
    """

    about = About(notes=(few_rounds,))
    client_state = MomentsClient
    reports = retracting(PartitionedPosterior.reports, retracted)

    kl_weight: Annotated[float, Chosen(), Tuned(times=30)] = Field(
        1.0,
        gt=0,
        description="T of the tempered likelihood p(D_i | θ)^(1/T). 1: the posterior. A smaller "
        "value gives the data more weight",
    )
    predictions: int = Field(
        20,
        ge=1,
        description="number of posterior samples of a prediction, if the posterior has "
        "a covariance",
    )

    predictive: Literal["linearized", "sampled"] = Field(
        "linearized",
        description="network of a posterior sample: linear in its weights around their means, as "
        "in Laplace's approximation, or the network itself, which needs small standard "
        "deviations",
    )

    def recommended(self, known: Known) -> dict[str, Any]:
        """Adam, and a prior that lets the model fit the data."""
        return {**adam(known, lr=0.003), "method.kl_weight": known.tempered(0.06)}

    def join(self, at: RoundContext) -> MomentsClient:
        """An empty factor, which the first refinement fills."""
        return MomentsClient(NaturalGaussian({}, {}))

    def learnt(self, server: PosteriorServer, run: Federation) -> dict[str, float]:
        """The posterior's own natural parameters; or those of weights that a client's data may well
        say as much of, so that the only report of a first round is none too long.
        """
        if self.fixed_precision:
            return super().learnt(server, run)
        return norms(server.posterior, KNOWN_STD, run)

    def problem(
        self, message: Message, client: MomentsClient, samples: Samples, at: RoundContext
    ) -> Problem:
        """Descend the energy of the tilted posterior from the posterior's mean, or from the
        initialization if nothing is learnt yet.
        """
        split = self.split(message, client, at)
        mean, initial = split.posterior.mean, at.run.network.initial
        began = initial if is_unlearnt(mean) else mean
        device = at.run.network.device
        start = {name: began[name].to(device, initial[name].dtype) for name in mean}
        prior = split.cavity * split.share
        given: Tree = {
            "centre": {n: m.to(start[n]) for n, m in prior.mean.items()},
            "pull": {n: p.to(start[n]) for n, p in prior.precision.items()},
            "count": torch.tensor(len(samples.y), device=at.run.network.device),
            "mean": mean,
            "cavity": vars(split.cavity),
            "factor": vars(split.factor),
            "share": split.share.precision,
        }
        project = self._pulled(at.run.training.momentum) if implicit(at.run) else None
        return Problem(at.run.network.prepare(start), given=given, project=project)

    def _pulled(self, momentum: float) -> Projection:
        """What follows a step of SGD down the likelihood: one toward the cavity's mean, implicit,
        w ← (w + a c)/(1 + a), which is stable whatever the cavity's precision and the rate.
        """

        def project(parameters: Tensors, given: Tree, lr: float) -> None:
            for name, centre in given["centre"].items():
                a = lr / (1 - momentum) * self.kl_weight / given["count"] * given["pull"][name]
                parameters[name].add_(a * centre).div_(1 + a)

        return project

    def loss(self, run: Federation) -> Loss:
        """The tilted posterior's energy per sample, times T; under SGD, whose steps are followed by
        the cavity's, only the likelihood.
        """
        likelihood = nll(run)
        if implicit(run):
            return likelihood

        def loss(parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> Tensor:
            energy = likelihood(parameters, batch, given, noise)
            pulls = [
                (given["pull"][name] * (parameters[name] - centre).square()).sum()
                for name, centre in given["centre"].items()
            ]
            total: Tensor = energy + 0.5 * self.kl_weight * sum(pulls) / given["count"]
            return total

        return loss

    @abstractmethod
    def moments(
        self, problem: Problem, samples: Samples, at: RoundContext
    ) -> tuple[Solved, Tensors, Tensors, Info]:
        """Infer a Gaussian of the tilted posterior.

        Returns:
            Where training ended, the mean m and the precision Λ_i by name, and metrics.
        """

    def local(
        self, message: Message, client: MomentsClient, samples: Samples, at: RoundContext
    ) -> tuple[Report, MomentsClient, Info]:
        """Infer the tilted posterior, and divide the cavity out of it."""
        problem = self.problem(message, client, samples, at)
        solved, mean, precision, told = self.moments(problem, samples, at)
        found = replace(solved, parameters=named("mean", mean) | named("precision", precision))
        report, after, info = self.report(found, problem, client, at)
        return report, after, {**info, **told}

    def report(
        self, solved: Solved, problem: Problem, client: MomentsClient, at: RoundContext
    ) -> tuple[Report, MomentsClient, Info]:
        """Report the change of the factor; keep the factor with that change."""
        given, cavity = problem.given, NaturalGaussian(**problem.given["cavity"])
        mean = {n: t.double() for n, t in part(solved.parameters, "mean").items()}
        own = {n: t.double() for n, t in part(solved.parameters, "precision").items()}
        shift = {n: (cavity.precision[n] + own[n]) * m - cavity.shift[n] for n, m in mean.items()}
        factor, sent = NaturalGaussian(**given["factor"]), given["mean"]
        report, after = self.answered(NaturalGaussian(own, shift), factor, sent, at)
        return report, MomentsClient(after), solved.info

    def model(self, server: object, run: Federation) -> Tensors:
        """Means and stds; of a posterior that is a point, its weights."""
        found = super().model(server, run)  # type: ignore[arg-type]
        return self._pointed(found, run)

    def _pointed(self, model: Tensors, run: Federation) -> Tensors:
        """A model without stds where the posterior is a point: the initialization at first."""
        if not self.fixed_precision:
            return model
        mean = part(model, "mean")
        return run.network.initial if is_unlearnt(mean) else mean

    def personal_model(
        self, message: Message, report: Report | None, client: MomentsClient, run: Federation
    ) -> Tensors | None:
        """The posterior after the client's update; between rounds a client has none."""
        if report is None:
            return None
        known = self.known(message, report).to(run.network.device, torch.float32)
        return self._pointed(means_and_stds(known), run)

    def draws(self, model: Tensors, run: Federation) -> Sampler:
        """Outputs under draws from the posterior, or of the network that is its one point."""
        if self.fixed_precision:
            return super().draws(model, run)
        return sampler(model, run, self.predictions, linearized=self.predictive == "linearized")
