"""pFedMe: personal models around the client's copy of the global one."""

import torch
from pydantic import Field

from fedbayes.contracts import (
    About,
    Federation,
    Info,
    Loss,
    Problem,
    Report,
    RoundContext,
    Solved,
    Sum,
    Tree,
    Weights,
)
from fedbayes.contracts.personal import PersonalModels, PersonalTensors
from fedbayes.contracts.run import with_centre
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples, Tensors, named, part


class PFedMe(PersonalModels):
    """Moreau envelopes as clients' losses (Dinh et al. 2020, Algorithm 1, Eqs. 2 and 3).

    A client trains θ on f(θ) + λ/2 ‖θ − w_s‖² from the server's w, where after every `inner` steps

        w_s ← w_s − η λ (w_s − θ).

    The paper takes these steps on one batch, here each has a new one. The client keeps θ and
    reports w_s. The server goes w ← (1 − β) w + β Σ p_s w_s.
    """

    name = "pfedme"
    about = About(
        "personal models by Moreau envelopes",
        "Dinh et al. 2020",
    )

    strength: float = Field(
        1.0, gt=0, description="λ, strength of the regularization of θ toward the client's copy"
    )
    rate: float = Field(1.0, gt=0, description="η, learning rate of the client's copy")
    inner: int = Field(5, ge=1, description="K, number of steps of θ before each step of the copy")
    beta: float = Field(
        1.0, gt=0, description="β, step of the server toward the mean of the copies. 1: the mean"
    )

    def problem(
        self, message: Message, client: PersonalTensors, samples: Samples, at: RoundContext
    ) -> Problem:
        """Train θ from the server's weights, and a copy of them."""
        theta = at.run.network.prepare(dense(message))
        copy = {n: theta[n] for n in at.run.network.split()[0]}
        turn = {"turn/steps": torch.zeros((), device=at.run.network.device)}
        return Problem({**theta, **named("copy", copy), **turn}, project=self._follow)

    def _follow(self, parameters: Tensors, given: Tree, lr: float) -> None:
        """A step of the copy towards θ, after every `inner` steps, in place."""
        steps = parameters["turn/steps"].add_(1)
        share = self.rate * self.strength * (steps % self.inner == 0)
        for name, w in part(parameters, "copy").items():
            w -= share * (w - parameters[name])

    def loss(self, run: Federation) -> Loss:
        """The negative log-likelihood plus λ/2 ‖θ − w_s‖²."""
        return with_centre(run, self.strength, _copy)

    def report(
        self, solved: Solved, problem: Problem, client: PersonalTensors, at: RoundContext
    ) -> tuple[Report, PersonalTensors, Info]:
        """Report the copy, keep θ."""
        theta = {name: solved.parameters[name] for name in at.run.network.initial}
        copy: Message = {**theta, **part(solved.parameters, "copy")}
        return Report(copy, self.weight(solved)), PersonalTensors(theta), solved.info

    def update(self, server: Weights, reports: Sum, at: RoundContext) -> tuple[Weights, Info]:
        """Go part of the way to the mean of the copies."""
        mean, trained = reports.mean(), at.run.network.split()[0]
        moved = {n: (1 - self.beta) * server.weights[n] + self.beta * mean[n] for n in trained}
        return Weights({**mean, **moved}), {}


def _copy(parameters: Tensors, given: Tree) -> Tensors:
    """The client's copy w_s of the global weights, which does not follow the loss."""
    return {name: w.detach() for name, w in part(parameters, "copy").items()}
