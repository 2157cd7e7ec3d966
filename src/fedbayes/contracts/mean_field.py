"""Factors that are refined with weights drawn as they are, of any network: PVI and its kin."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from fedbayes.contracts.drawn import Fit, expected_loss, weight_noise
from fedbayes.contracts.factors import VariationalFactor
from fedbayes.contracts.method import Info, Sampler
from fedbayes.contracts.natural import sampler
from fedbayes.contracts.reports import Report
from fedbayes.contracts.run import Federation, RoundContext
from fedbayes.core.fields import Only
from fedbayes.core.messages import Message
from fedbayes.core.tensors import Samples, Tensors, flat, part, shaped
from fedbayes.inference.gaussian import NaturalGaussian, kl_terms, renyi_terms
from fedbayes.inference.problem import Loss, Problem, Solved, Tree
from fedbayes.inference.reparametrized import reparametrized


@dataclass(frozen=True)
class MeanFieldClient:
    """What never leaves a client: its factor s_i(θ), float64. Empty before its first refinement."""

    factor: NaturalGaussian


class MeanField(VariationalFactor[MeanFieldClient]):
    """A client minimizes D(s_new ‖ s/s_i · p(θ)^(1/K)) + E_{θ ~ s_new}[Σ L(y, θ)] by Monte Carlo.

    D is the KL divergence or Rényi's, L the negative log-likelihood or what a method has in its
    place.
    """

    client_state = MeanFieldClient

    samples: int = Field(1, ge=1, description="Monte-Carlo samples of a training step")
    predictions: int = Field(20, ge=1, description="Monte-Carlo samples of a prediction")
    divergence: Literal["kl", "renyi"] = Field(
        "kl",
        description="divergence from the cavity and the prior: Kullback-Leibler, or "
        "Rényi's of order α",
    )
    alpha: Annotated[float, Only("divergence", "renyi")] = Field(
        2.5,
        gt=0,
        description="order of Rényi's divergence. Near 1 it is KL; below 1 the posterior is "
        "wider, above 1 narrower",
    )

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.divergence == "renyi" and self.alpha == 1:
            raise ValueError("Rényi's divergence of order 1 is KL. Set divergence = 'kl'")
        return self

    def join(self, at: RoundContext) -> MeanFieldClient:
        """An empty factor, which the first refinement fills."""
        return MeanFieldClient(NaturalGaussian({}, {}))

    def problem(
        self, message: Message, client: MeanFieldClient, samples: Samples, at: RoundContext
    ) -> Problem:
        """Minimize the free energy from the posterior that came."""
        start, given = self.taken_out(message, client, samples, at)
        names = at.run.network.initial
        begun = {kind: flat(part(start, kind), names) for kind in ("mean", "log_precision")}
        given["rest"] = flat(given["rest"], names)
        given["prior"] = {kind: flat(known, names) for kind, known in given["prior"].items()}
        return Problem(begun, given=given, noise=weight_noise(at.run, self.samples))

    def fit(self, run: Federation) -> Fit:
        """The mean loss L of samples: the negative log-likelihood."""
        return run.likelihood.nll

    def loss(self, run: Federation) -> Loss:
        """The free energy per sample, by Monte Carlo, its divergence times `kl_weight`."""
        return self._free_energy(run, training=True)

    def validation(self, run: Federation) -> Loss:
        """Only the loss term of the free energy, without dropout."""
        return self._free_energy(run, training=False)

    def _free_energy(self, run: Federation, *, training: bool) -> Loss:
        fit = self.fit(run)
        terms = kl_terms if self.divergence == "kl" else partial(renyi_terms, alpha=self.alpha)

        def loss(parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> Tensor:
            own = parameters["mean"], parameters["log_precision"], noise["weights"]
            prior = given["prior"]["precision"], given["prior"]["mean"]
            drawn, apart = reparametrized(
                run.network.initial, *own, terms, *prior, rest=given["rest"]
            )
            total = expected_loss(fit, run, drawn, batch, training=training)
            if not training:
                return total
            energy: Tensor = total + self.kl_weight * apart / given["count"]
            return energy

        return loss

    def report(
        self, solved: Solved, problem: Problem, client: MeanFieldClient, at: RoundContext
    ) -> tuple[Report, MeanFieldClient, Info]:
        """Report the change of the factor; keep the factor with that change."""
        mean, spread = (shaped(t, at.run.network.initial) for t in solved.parameters.values())
        report, factor = self.refined(mean, spread, problem.given, at)
        return report, MeanFieldClient(factor), solved.info

    def draws(self, model: Tensors, run: Federation) -> Sampler:
        """Outputs under draws from the posterior, the same draws on every call."""
        return sampler(model, run, self.predictions)
