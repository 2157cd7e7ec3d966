"""PVI: partitioned variational inference with mean-field Gaussians, over any network."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    At,
    Info,
    Loss,
    Noise,
    Problem,
    Report,
    Run,
    Sampler,
    Solved,
    Tree,
)
from fedbayes.contracts.factors import Factors, complexity, precisions
from fedbayes.contracts.product import means_and_stds, sampler
from fedbayes.inference.gaussian import Gaussian
from fedbayes.messages import Message
from fedbayes.tensors import Samples, Tensors, part


@dataclass(frozen=True)
class Client:
    """What never leaves a client: its factor s_i(θ), float64. Empty before its first refinement."""

    factor: Gaussian


class Pvi(Factors[Client]):
    """All clients share one network; its posterior s(θ) = p(θ) Π_i s_i(θ) is a product of factors.

    A client minimizes the free energy (Ashman et al. 2022, Algorithm 1)

        KL(s_new ‖ s/s_i · p(θ)^(1/K)) − E_{θ ~ s_new}[log p(D_i | θ)],   s_new = s_i,new · s/s_i,

    and sends the change of its factor's natural parameters. One client after another
    (`cohort = 1`, `sampling = "cyclic"`) is sequential PVI; several are synchronous, damped by
    their number. It is VIRTUAL without clients' own networks, of any network: weights are drawn as
    they are, whatever the layers that use them. Frozen weights are no random variables: with
    adapters, or a head on a frozen body, the posterior is of what trains.
    """

    name = "pvi"
    summary = "one posterior, the product of the clients' Gaussian factors"
    paper = "Bui et al. 2018; Ashman et al. 2022"
    client_state = Client

    samples: int = Field(1, ge=1, description="Monte-Carlo samples of a training step")
    predictions: int = Field(20, ge=1, description="Monte-Carlo samples of a prediction")

    def join(self, at: At) -> Client:
        """An empty factor, which the first refinement fills."""
        return Client(Gaussian({}, {}))

    def problem(self, message: Message, client: Client, samples: Samples, at: At) -> Problem:
        """Minimize the free energy from the posterior that came."""
        start, given = self.taken_out(message, client, samples, at)
        return Problem(start, given=given, noise=Noise("weights", self._draw(at.run)))

    def _draw(self, run: Run) -> Callable[[torch.Generator, Samples], Tree]:
        """What draws the noise of one step: standard normal for each weight and sample."""
        shapes = {name: tensor.shape for name, tensor in run.network.initial.items()}

        def draw(rng: torch.Generator, batch: Samples) -> Tree:
            return {
                name: torch.randn(self.samples, *shape, generator=rng).to(run.network.device)
                for name, shape in shapes.items()
            }

        return draw

    def loss(self, run: Run) -> Loss:
        """The free energy per sample, by Monte Carlo, its KL term times `kl_weight`."""
        return self._free_energy(run, training=True)

    def validation(self, run: Run) -> Loss:
        """The likelihood term of the free energy alone, without dropout."""
        return self._free_energy(run, training=False)

    def _free_energy(self, run: Run, *, training: bool) -> Loss:
        def loss(parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> Tensor:
            precision = precisions(parameters, given["rest"])
            mean = part(parameters, "mean")
            std = {name: p.rsqrt() for name, p in precision.items()}
            nll: Tensor = torch.zeros(())
            for sample in range(self.samples):
                weights = {name: m + std[name] * noise[name][sample] for name, m in mean.items()}
                outputs = run.network(weights, batch.x, training=training)
                nll = nll.to(outputs) + run.likelihood.nll(outputs, batch.y) / self.samples
            if not training:
                return nll
            energy: Tensor = nll + self.kl_weight * complexity(parameters, given) / given["count"]
            return energy

        return loss

    def report(
        self, solved: Solved, problem: Problem, client: Client, at: At
    ) -> tuple[Report, Client, Info]:
        """Report the change of the factor; keep the factor with that change."""
        report, factor = self.refined(solved, problem.given, at)
        return report, Client(factor), solved.info

    def personal_model(
        self, message: Message, report: Report | None, client: Client, run: Run
    ) -> Tensors | None:
        """The posterior as the client refined it; between rounds there is none of its own."""
        if report is None:
            return None
        return means_and_stds(self.known(message, report).to(run.network.device, torch.float32))

    def draws(self, model: Tensors, run: Run) -> Sampler:
        """Outputs under draws from the posterior, the same draws on every call."""
        return sampler(model, run, self.predictions)
