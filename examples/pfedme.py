"""pFedMe: personal models around the client's copy of the global one."""

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    About,
    Federation,
    Info,
    Loss,
    Method,
    Models,
    Problem,
    Report,
    Reports,
    RoundContext,
    Solved,
    Sum,
    Tree,
    Weights,
    nll,
)
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples, Tensors, named, part


@dataclass(frozen=True)
class Client:
    """The client's personal model θ, with its buffers."""

    weights: Tensors


class PFedMe(Method[Weights, Client, Sum]):
    """Moreau envelopes as clients' losses (Dinh et al. 2020, Algorithm 1).

    A client trains θ on f(θ) + λ/2 ‖θ − w_s‖² from the server's w, where w_s ← w_s − ηλ (w_s − θ)
    after every `inner` steps; the paper takes these on one batch, here each has a fresh one. It
    keeps θ and reports w_s; the server goes w ← (1 − β) w + β Σ p_s w_s.
    """

    name = "pfedme"
    about = About("personal models by Moreau envelopes", "Dinh et al. 2020")
    server_state = Weights
    client_state = Client
    models = Models.BOTH
    reports = Reports(weighted=True)

    strength: float = Field(1.0, gt=0, description="λ, pull of θ towards the client's copy")
    rate: float = Field(0.05, gt=0, description="η, learning rate of the client's copy")
    inner: int = Field(5, ge=1, description="K, steps of θ before each step of the copy")
    beta: float = Field(1.0, gt=0, description="β, part of the way to the mean of the copies")

    def init(self, run: Federation) -> Weights:
        return Weights(run.network.initial)

    def join(self, at: RoundContext) -> Client:
        return Client(at.run.network.initial)

    def message(self, server: Weights, at: RoundContext) -> Message:
        return dict(server.weights)

    def problem(
        self, message: Message, client: Client, samples: Samples, at: RoundContext
    ) -> Problem:
        theta = at.run.network.prepare(dense(message))
        copy = {n: theta[n] for n in at.run.network.split()[0]}
        turn = {"turn/steps": torch.zeros((), device=at.run.network.device)}
        return Problem({**theta, **named("copy", copy), **turn}, project=self._follow)

    def _follow(self, parameters: Tensors, given: Tree, lr: float) -> None:
        steps = parameters["turn/steps"].add_(1)
        share = self.rate * self.strength * (steps % self.inner == 0)
        for name, w in part(parameters, "copy").items():
            w -= share * (w - parameters[name])

    def loss(self, run: Federation) -> Loss:
        likelihood = nll(run)

        def loss(parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> Tensor:
            copy = part(parameters, "copy")
            distance = sum((parameters[n] - w.detach()).square().sum() for n, w in copy.items())
            return likelihood(parameters, batch, given, noise) + self.strength / 2 * distance

        return loss

    def report(
        self, solved: Solved, problem: Problem, client: Client, at: RoundContext
    ) -> tuple[Report, Client, Info]:
        theta = {name: solved.parameters[name] for name in at.run.network.initial}
        copy: Message = {**theta, **part(solved.parameters, "copy")}
        return Report(copy, float(solved.count)), Client(theta), solved.info

    def update(self, server: Weights, reports: Sum, at: RoundContext) -> tuple[Weights, Info]:
        mean, trained = reports.mean(), at.run.network.split()[0]
        moved = {n: (1 - self.beta) * server.weights[n] + self.beta * mean[n] for n in trained}
        return Weights({**mean, **moved}), {}

    def model(self, server: Weights, run: Federation) -> Tensors:
        return server.weights

    def personal_model(
        self, message: Message, report: Report | None, client: Client, run: Federation
    ) -> Tensors:
        return client.weights
