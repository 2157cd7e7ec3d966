"""The mixture-of-Gaussians prior: the server learns an ensemble."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    UNIFORM,
    About,
    Averaged,
    ClientNote,
    Federation,
    Info,
    Loss,
    Method,
    Prior,
    Problem,
    ReportList,
    Reports,
    RoundContext,
    Sampler,
    Stateless,
    Tree,
    nll,
    single_draw,
)
from fedbayes.contracts.changes import squared_distance
from fedbayes.core import seeds
from fedbayes.core.fields import Only, Tuned
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples, Tensors, named, part
from fedbayes.inference.optimizers import ServerOptimizer
from fedbayes.likelihoods import evaluate


@dataclass(frozen=True)
class MixtureServer:
    """The centres w_k of the mixture."""

    components: Tensors
    """Weights and buffers of each, as `k/name`."""
    optimizer: Tensors = field(default_factory=dict)
    """State of the server's optimizer of each, as `k/name:quantity`."""
    updates: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    """Sum of the responsibilities that each had in all rounds, float64 [K]; empty before any."""


class Mixture(Averaged, ServerOptimizer, Method[MixtureServer, Stateless, ReportList]):
    """Hard EM on p(φ_s | w_1..K) = (1/K) Σ_k N(w_k, 1/λ) (EM paper, appendix J.2).

    A client starts from one of the centres and minimizes
    Σ_i nll_i(φ) − log Σ_k exp(−λ/2 ‖φ − w_k‖²) (Eq. 48), here divided by its number of samples
    as all losses are: so one λ rules both how far a client goes and whose it is. The server
    computes the responsibilities p_sk ∝ exp(−λ/2 ‖φ_s − w_k‖²) (Eq. 51) and sets
    w_k = Σ_s p_sk φ_s / Σ_s p_sk (Eq. 52), or takes a step of another optimizer along
    w_k − Σ_s p_sk φ_s / Σ_s p_sk. Every component has an optimizer of its own, which takes no
    step in a round in which no client is its. The mean of the K predictive distributions
    predicts. Down go K models, up goes one.
    """

    name = "mixture"
    about = About(
        "an ensemble at the server: the mixture-of-Gaussians prior",
        "Louizos et al. 2021, appendix J.2",
        published=UNIFORM,
    )
    server_state = MixtureServer
    reports = Reports(reduce="middle")

    components: int = Field(2, ge=1, description="number K of components")
    precision: Annotated[float, Tuned(0.1, 1000)] = Field(
        10.0,
        ge=0,
        description="λ, precision of the prior around each component, for the summed loss of a "
        "client (λ / N_s for the mean loss)",
    )
    spread: Literal["independent", "near"] = Field(
        "independent",
        description="initial centres: independent samples, or one sample with added noise",
    )
    noise: Annotated[float, Only("spread", "near")] = Field(
        0.1, ge=0, description="relative std of the noise (spread = near)"
    )
    begin: Literal["turn", "best"] = Field(
        "turn",
        description="component where a client starts. turn: client + a random number of the "
        "round, modulo K. best: the one that fits its data best",
    )

    def note(self, samples: int, run: Federation) -> ClientNote:
        """A Gaussian of precision λ around each component, whatever the number of samples."""
        return ClientNote(Prior("precision", self.precision) if self.precision else None)

    def init(self, run: Federation) -> MixtureServer:
        """Centres that differ, so that the components can part.

        The first is the network's initialization. An independent one has the entries of every
        tensor of it in a random order: as good as another draw, whatever drew it.
        """
        components = {}
        for k in range(self.components):
            rng = seeds.torch_rng(run.seed, "components", client=k)
            for name, w in run.network.initial.items():
                if k and name not in run.network.buffers:
                    w = self._other(w, rng)
                components[f"{k}/{name}"] = w
        return MixtureServer(components)

    def _other(self, w: Tensor, rng: torch.Generator) -> Tensor:
        if self.spread == "independent":
            return w.flatten()[torch.randperm(w.numel(), generator=rng)].reshape(w.shape)
        std = w.std() if w.numel() > 1 else w.abs().mean()
        return w + self.noise * std * torch.randn(w.shape, generator=rng)

    def message(self, server: MixtureServer, at: RoundContext) -> Message:
        """All centres, the same to all."""
        return dict(server.components)

    def expected(self, message: Message, run: Federation) -> Message:
        """The weights of one model, without the number of its component."""
        return part(message, "0")

    def loss(self, run: Federation) -> Loss:
        """Eq. 48 per sample, as a minimum: mean nll(φ) − log Σ_k exp(−λ/2 ‖φ − w_k‖²) / N_s."""
        likelihood, trained = nll(run), list(run.network.split()[0])

        def loss(parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> Tensor:
            squares = torch.stack(
                [squared_distance(parameters, c, trained) for c in given["centres"]]
            )
            prior = torch.logsumexp(-0.5 * self.precision * squares, dim=0)
            value: Tensor = likelihood(parameters, batch, given, noise) - prior / given["samples"]
            return value

        return loss

    def problem(
        self, message: Message, client: Stateless, samples: Samples, at: RoundContext
    ) -> Problem:
        """Train from one of the centres."""
        run, sent = at.run, dense(message)
        centres = [run.network.prepare(part(sent, str(k))) for k in range(self.components)]
        first = self.turn(at)
        if self.begin == "best":
            fits = [
                evaluate(run.likelihood, single_draw(c, run.network), samples)["nll"].sum()
                for c in centres
            ]
            first = min(range(self.components), key=fits.__getitem__)
        count = torch.tensor(len(samples.y), device=run.network.device)
        return Problem(centres[first], given={"centres": centres, "samples": count})

    def turn(self, at: RoundContext) -> int:
        """The component whose turn it is at a client.

        Client s starts from component s + a number drawn for the round, modulo K: so no rhythm in
        which clients take part keeps from a component what another gets.
        """
        offset = seeds.integer(at.run.seed, "turn", round=at.round)
        return (at.client + offset) % self.components

    def origin(self, server: MixtureServer, run: Federation) -> list[Tensors]:
        """The centres."""
        return [part(server.components, str(k)) for k in range(self.components)]

    def update(
        self, server: MixtureServer, reports: ReportList, at: RoundContext
    ) -> tuple[MixtureServer, Info]:
        """Responsibilities, and a step to the clients' weighted means; a centre of nobody stays."""
        found = [dense(report.tensors) for report in reports.reports.values()]
        sizes = torch.tensor([report.weight for report in reports.reports.values()]).double()
        centres = [part(server.components, str(k)) for k in range(self.components)]
        trained = list(at.run.network.split()[0])
        shares = self.responsibilities(found, centres, trained)
        weights = shares * sizes[:, None]
        factor = self.server_factor(at.round, at.run.rounds)
        components: Tensors = {}
        optimizer: Tensors = {}
        for k, centre in enumerate(centres):
            state, mean = part(server.optimizer, str(k)), dict(centre)
            for name, w in centre.items():
                stacked = torch.stack([phi[name] for phi in found]).double()
                middle = reports.middle(stacked, weights[:, k])
                if middle is None:  # so it is for every tensor
                    break
                mean[name] = middle.to(w.dtype)
            else:
                stepped, state = self._step(centre, mean, trained, state, factor)
                mean |= stepped
            components |= named(str(k), mean)
            optimizer |= named(str(k), state)
        updates = shares.sum(dim=0) + (server.updates if len(server.updates) else 0.0)
        info = {f"responsibility_{k}": float(shares[:, k].mean()) for k in range(self.components)}
        info |= {f"updates_{k}": float(updates[k]) for k in range(self.components)}
        return MixtureServer(components, optimizer, updates), info

    def _step(
        self, centre: Tensors, mean: Tensors, trained: list[str], state: Tensors, factor: float
    ) -> tuple[Tensors, Tensors]:
        """A centre's trained weights after a step to the clients' mean, and its optimizer."""
        if self.server_optimizer == "sgd" and (self.server_lr or 1.0) * factor == 1.0:
            return {name: mean[name] for name in trained}, state
        weights = {name: centre[name] for name in trained}
        drift = {name: w - mean[name] for name, w in weights.items()}
        return self.server_step(weights, drift, state, factor)

    def responsibilities(
        self, found: list[Tensors], centres: list[Tensors], trained: list[str]
    ) -> Tensor:
        """p(k given φ_s), float64 [clients, K], by a stable log-sum-exp (Eq. 51)."""
        squares = torch.stack(
            [
                torch.stack([squared_distance(phi, c, trained).double() for c in centres])
                for phi in found
            ]
        )
        return torch.softmax(-0.5 * self.precision * squares, dim=1)

    def model(self, server: MixtureServer, run: Federation) -> Tensors:
        """All centres, as `k/name`; the network itself where there is but one."""
        if self.components == 1:
            return part(server.components, "0")
        return server.components

    def draws(self, model: Tensors, run: Federation) -> Sampler:
        """The components, one by one; or the one network of a client."""
        if not part(model, "0"):
            return single_draw(model, run.network)
        members = [single_draw(part(model, str(k)), run.network) for k in range(self.components)]
        return lambda x: torch.cat([member(x) for member in members])
