"""The mixture-of-Gaussians prior: the server learns an ensemble."""

from dataclasses import dataclass
from math import log
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedbayes import seeds
from fedbayes.contracts import (
    Federation,
    Gathered,
    Info,
    Method,
    Nothing,
    Report,
    Site,
    cross_entropy,
    point_predictor,
)
from fedbayes.inference.local import Objective
from fedbayes.messages import Message, dense
from fedbayes.metrics import Predictor, Sampler, evaluate
from fedbayes.models import Network
from fedbayes.tensors import Samples, Tensors


@dataclass(frozen=True)
class Server:
    """The centres w_k of the mixture."""

    components: Tensors
    """Weights and buffers of each, as `k/name`."""
    trained: Tensors
    """Which tensors the distances are over: their names, with empty tensors."""


class Mixture(Method[Server, Nothing, Gathered]):
    """Hard EM on p(φ_s | w_1..K) = (1/K) Σ_k N(w_k, 1/λ) (EM paper, appendix J.2).

    A client starts from one of the centres and minimizes
    Σ_i nll_i(φ) − log Σ_k exp(−λ/2 ‖φ − w_k‖²) (Eq. 48), here divided by its number of samples
    as all losses are: so one λ rules both how far a client goes and whose it is. The server
    computes the responsibilities p_sk ∝ exp(−λ/2 ‖φ_s − w_k‖²) (Eq. 51) and sets
    w_k = Σ_s p_sk φ_s / Σ_s p_sk (Eq. 52). The mean of the K softmaxes predicts. Down go K
    models, up goes one.
    """

    name = "mixture"
    summary = "an ensemble at the server: the mixture-of-Gaussians prior"
    paper = "Louizos et al. 2021, appendix J.2"
    server_state = Server
    reduction = Gathered

    components: int = Field(2, ge=1, description="number K of components")
    precision: float = Field(
        10.0, ge=0, description="λ, precision of each component, beside the summed loss of a client"
    )
    spread: Literal["independent", "near"] = Field(
        "independent",
        description="initial centres: independent draws, or one draw with noise around it",
    )
    noise: float = Field(0.1, ge=0, description="relative deviation of the noise (spread = near)")
    begin: Literal["turn", "best"] = Field(
        "turn",
        description="where a client starts: from the centres in turn (client + round modulo K), "
        "or from the one that fits its data best",
    )
    weighting: Literal["samples", "uniform"] = Field(
        "samples", description="weight of a client in the centres: its number of samples, or 1"
    )

    def init(self, network: Network, federation: Federation) -> Server:
        """Centres that differ, so that the components can part.

        The first is the network's initialization. An independent one has the entries of every
        tensor of it in a random order: as good as another draw, whatever drew it.
        """
        components = {}
        for k in range(self.components):
            stream = seeds.torch_stream(federation.seed, "components", client=k)
            for name, w in network.initial.items():
                if k and name not in network.buffers:
                    w = self._other(w, stream)
                components[f"{k}/{name}"] = w
        trained = {n: torch.empty(0) for n in network.initial if n not in network.buffers}
        return Server(components, trained)

    def _other(self, w: Tensor, stream: torch.Generator) -> Tensor:
        if self.spread == "independent":
            return w.flatten()[torch.randperm(w.numel(), generator=stream)].reshape(w.shape)
        deviation = w.std() if w.numel() > 1 else w.abs().mean()
        return w + self.noise * deviation * torch.randn(w.shape, generator=stream)

    def message(self, server: Server, client: int) -> Message:
        """All centres, the same to all."""
        return dict(server.components)

    def expected(self, message: Message) -> Message:
        """One model."""
        return dict(_component(dense(message), 0))

    def objective(self, centres: list[Tensors], samples: int, site: Site) -> Objective:
        """Eq. 48 per sample, as a minimum: mean nll(φ) − log Σ_k exp(−λ/2 ‖φ − w_k‖²) / N_s."""
        nll = cross_entropy(site.network)
        trained = [name for name in centres[0] if name not in site.network.buffers]

        def loss(weights: Tensors, batch: Samples) -> Tensor:
            squares = torch.stack([_distance(weights, centre, trained) for centre in centres])
            prior = torch.logsumexp(-0.5 * self.precision * squares, dim=0)
            return nll(weights, batch) - prior / samples

        return loss

    def local(
        self, message: Message, client: Nothing, data: Samples, site: Site
    ) -> tuple[Report, Nothing, Info]:
        """Train from one of the centres."""
        everything = dense(message)
        centres = [site.network.prepare(_component(everything, k)) for k in range(self.components)]
        first = (site.client + site.round) % self.components
        if self.begin == "best":
            fits = [evaluate(point_predictor(c, site.network), data).nll for c in centres]
            first = min(range(self.components), key=fits.__getitem__)
        weights, info = site.fit(centres[first], self.objective(centres, len(data.y), site), data)
        weight = float(len(data.y)) if self.weighting == "samples" else 1.0
        return Report(dict(weights), weight), client, info

    def update(self, server: Server, reports: Gathered) -> tuple[Server, Info]:
        """Responsibilities and the centres' weighted means; a centre of nobody stays."""
        found = [dense(report.tensors) for report in reports.reports.values()]
        sizes = torch.tensor([report.weight for report in reports.reports.values()]).double()
        centres = [_component(server.components, k) for k in range(self.components)]
        shares = self.responsibilities(found, centres, list(server.trained))
        weights = shares * sizes[:, None]
        components = {}
        for k, centre in enumerate(centres):
            total = weights[:, k].sum()
            for name, w in centre.items():
                moved = w
                if total > _NOBODY:
                    stacked = torch.stack([phi[name] for phi in found]).double()
                    mean = torch.tensordot(weights[:, k], stacked, dims=1) / total
                    moved = mean.to(w.dtype)
                components[f"{k}/{name}"] = moved
        info = {f"responsibility_{k}": float(shares[:, k].mean()) for k in range(self.components)}
        return Server(components, server.trained), info

    def responsibilities(
        self, found: list[Tensors], centres: list[Tensors], trained: list[str]
    ) -> Tensor:
        """p(k given φ_s), float64 [clients, K], by a stable log-sum-exp (Eq. 51)."""
        squares = torch.stack(
            [torch.stack([_distance(phi, c, trained).double() for c in centres]) for phi in found]
        )
        return torch.softmax(-0.5 * self.precision * squares, dim=1)

    def model(self, server: Server) -> Tensors:
        """All centres, as `k/name`; the network itself where there is but one."""
        if self.components == 1:
            return _component(server.components, 0)
        return server.components

    def predict(self, model: Tensors, network: Network) -> Predictor:
        """The logarithm of the mean of the K softmaxes."""
        members = self.sampler(model, network)
        return lambda x: torch.logsumexp(members(x), dim=0) - log(self.components)

    def sampler(self, model: Tensors, network: Network) -> Sampler:
        """The K components, one by one."""
        if self.components == 1:
            model = {f"0/{name}": w for name, w in model.items()}
        members = [point_predictor(_component(model, k), network) for k in range(self.components)]
        return lambda x: torch.stack([torch.log_softmax(m(x), dim=-1) for m in members])

    def personal(
        self, message: Message, report: Report, client: Nothing, network: Network
    ) -> Predictor:
        """The network as the client reported it."""
        return point_predictor(dense(report.tensors), network)


_NOBODY = 1e-12
"""Total weight below which a component has no client."""


def _component(tensors: dict[str, Tensor], k: int) -> Tensors:
    prefix = f"{k}/"
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _distance(weights: Tensors, centre: Tensors, trained: list[str]) -> Tensor:
    """‖φ − w_k‖² over the trained tensors."""
    return torch.stack([(weights[name] - centre[name]).square().sum() for name in trained]).sum()
