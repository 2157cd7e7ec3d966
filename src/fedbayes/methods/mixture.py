"""The mixture-of-Gaussians prior: the server learns an ensemble."""

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedbayes import seeds
from fedbayes.contracts import (
    At,
    Gathered,
    Info,
    Loss,
    Method,
    Nothing,
    Problem,
    Report,
    Run,
    Sampler,
    Solved,
    Tree,
    nll,
    single_draw,
)
from fedbayes.contracts.changes import norm
from fedbayes.likelihoods import evaluate
from fedbayes.messages import Message, dense
from fedbayes.tensors import Samples, Tensors, part


@dataclass(frozen=True)
class Server:
    """The centres w_k of the mixture."""

    components: Tensors
    """Weights and buffers of each, as `k/name`."""


class Mixture(Method[Server, Nothing, Gathered]):
    """Hard EM on p(φ_s | w_1..K) = (1/K) Σ_k N(w_k, 1/λ) (EM paper, appendix J.2).

    A client starts from one of the centres and minimizes
    Σ_i nll_i(φ) − log Σ_k exp(−λ/2 ‖φ − w_k‖²) (Eq. 48), here divided by its number of samples
    as all losses are: so one λ rules both how far a client goes and whose it is. The server
    computes the responsibilities p_sk ∝ exp(−λ/2 ‖φ_s − w_k‖²) (Eq. 51) and sets
    w_k = Σ_s p_sk φ_s / Σ_s p_sk (Eq. 52). The mean of the K predictive distributions predicts.
    Down go K models, up goes one.
    """

    name = "mixture"
    summary = "an ensemble at the server: the mixture-of-Gaussians prior"
    paper = "Louizos et al. 2021, appendix J.2"
    server_state = Server
    reduction = Gathered
    takes_middle = True

    components: int = Field(2, ge=1, description="number K of components")
    precision: float = Field(
        10.0, ge=0, description="λ, precision of each component, beside the summed loss of a client"
    )
    spread: Literal["independent", "near"] = Field(
        "independent",
        description="initial centres: independent draws, or one draw with noise around it",
    )
    noise: float = Field(0.1, ge=0, description="relative std of the noise (spread = near)")
    begin: Literal["turn", "best"] = Field(
        "turn",
        description="where a client starts: from the centres in turn (client + round modulo K), "
        "or from the one that fits its data best",
    )
    weighting: Literal["samples", "uniform"] = Field(
        "samples", description="weight of a client in the centres: its number of samples, or 1"
    )

    def init(self, run: Run) -> Server:
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
        return Server(components)

    def _other(self, w: Tensor, rng: torch.Generator) -> Tensor:
        if self.spread == "independent":
            return w.flatten()[torch.randperm(w.numel(), generator=rng)].reshape(w.shape)
        std = w.std() if w.numel() > 1 else w.abs().mean()
        return w + self.noise * std * torch.randn(w.shape, generator=rng)

    def message(self, server: Server, at: At) -> Message:
        """All centres, the same to all."""
        return dict(server.components)

    def expected(self, message: Message, run: Run) -> Message:
        """The weights of one model, without the number of its component."""
        return part(message, "0")

    def loss(self, run: Run) -> Loss:
        """Eq. 48 per sample, as a minimum: mean nll(φ) − log Σ_k exp(−λ/2 ‖φ − w_k‖²) / N_s."""
        likelihood, trained = nll(run), list(run.network.split()[0])

        def loss(parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> Tensor:
            squares = torch.stack([_distance(parameters, c, trained) for c in given["centres"]])
            prior = torch.logsumexp(-0.5 * self.precision * squares, dim=0)
            value: Tensor = likelihood(parameters, batch, given, noise) - prior / given["samples"]
            return value

        return loss

    def problem(self, message: Message, client: Nothing, samples: Samples, at: At) -> Problem:
        """Train from one of the centres."""
        run, sent = at.run, dense(message)
        centres = [run.network.prepare(part(sent, str(k))) for k in range(self.components)]
        first = (at.client + at.round) % self.components
        if self.begin == "best":
            fits = [
                evaluate(run.likelihood, single_draw(c, run.network), samples)["nll"].sum()
                for c in centres
            ]
            first = min(range(self.components), key=fits.__getitem__)
        count = torch.tensor(len(samples.y), device=run.network.device)
        return Problem(centres[first], given={"centres": centres, "samples": count})

    def report(
        self, solved: Solved, problem: Problem, client: Nothing, at: At
    ) -> tuple[Report, Nothing, Info]:
        """Report the weights where training ended."""
        weight = float(solved.count) if self.weighting == "samples" else 1.0
        return Report(dict(solved.parameters), weight), client, solved.info

    def ordinary(self, server: Server, run: Run) -> dict[str, float]:
        """The norm of a centre."""
        trained = run.network.split()[0]
        return {"weights": norm(server.components[f"0/{name}"].double() for name in trained)}

    def centre(self, report: Report, server: Server, run: Run) -> Tensors:
        """The nearest centre."""
        phi, trained = dense(report.tensors), list(run.network.split()[0])
        centres = [part(server.components, str(k)) for k in range(self.components)]
        return min(centres, key=lambda centre: float(_distance(phi, centre, trained)))

    def update(self, server: Server, reports: Gathered, at: At) -> tuple[Server, Info]:
        """Responsibilities and the centres' weighted means; a centre of nobody stays."""
        found = [dense(report.tensors) for report in reports.reports.values()]
        sizes = torch.tensor([report.weight for report in reports.reports.values()]).double()
        centres = [part(server.components, str(k)) for k in range(self.components)]
        shares = self.responsibilities(found, centres, list(at.run.network.split()[0]))
        weights = shares * sizes[:, None]
        components = {}
        for k, centre in enumerate(centres):
            for name, w in centre.items():
                stacked = torch.stack([phi[name] for phi in found]).double()
                middle = reports.middle(stacked, weights[:, k])
                components[f"{k}/{name}"] = w if middle is None else middle.to(w.dtype)
        info = {f"responsibility_{k}": float(shares[:, k].mean()) for k in range(self.components)}
        return Server(components), info

    def responsibilities(
        self, found: list[Tensors], centres: list[Tensors], trained: list[str]
    ) -> Tensor:
        """p(k given φ_s), float64 [clients, K], by a stable log-sum-exp (Eq. 51)."""
        squares = torch.stack(
            [torch.stack([_distance(phi, c, trained).double() for c in centres]) for phi in found]
        )
        return torch.softmax(-0.5 * self.precision * squares, dim=1)

    def model(self, server: Server, run: Run) -> Tensors:
        """All centres, as `k/name`; the network itself where there is but one."""
        if self.components == 1:
            return part(server.components, "0")
        return server.components

    def personal_model(
        self, message: Message, report: Report | None, client: Nothing, run: Run
    ) -> Tensors | None:
        """The network as the client reported it."""
        return dense(report.tensors) if report is not None else None

    def draws(self, model: Tensors, run: Run) -> Sampler:
        """The components, one by one; or the one network of a client."""
        if not part(model, "0"):
            return single_draw(model, run.network)
        members = [single_draw(part(model, str(k)), run.network) for k in range(self.components)]
        return lambda x: torch.cat([member(x) for member in members])


def _distance(weights: Tensors, centre: Tensors, trained: list[str]) -> Tensor:
    """‖φ − w_k‖² over the trained tensors."""
    return torch.stack([(weights[name] - centre[name]).square().sum() for name in trained]).sum()
