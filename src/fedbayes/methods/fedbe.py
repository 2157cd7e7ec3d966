"""FedBE: a distribution over networks at the server, fitted to the clients', and its ensemble."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Generic, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    About,
    Averaged,
    Federation,
    Info,
    Method,
    Part,
    Problem,
    Report,
    ReportList,
    Reports,
    RoundContext,
    Sampler,
    Solved,
    Stateless,
    Sum,
    single_draw,
)
from fedbayes.contracts.changes import norm
from fedbayes.contracts.drawn import draws_of
from fedbayes.contracts.method import Reduced
from fedbayes.core import seeds
from fedbayes.core.fields import Only, unused
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Tensors, named, part
from fedbayes.fusion.combining import combine
from fedbayes.fusion.rounds import drawable, ensemble_of, input_remarks, learnt
from fedbayes.fusion.settings import DistillationSettings


@dataclass(frozen=True)
class FedBeServer:
    """The network to send, and the distribution that predicts; none before the first update."""

    weights: Tensors
    """Of the network that clients get."""
    mean: Tensors = field(default_factory=dict)
    """The weighted mean of the clients' networks."""
    std: Tensors = field(default_factory=dict)
    """Their weighted standard deviation, of what is trained."""
    clients: Tensors = field(default_factory=dict)
    """Their networks, as `k/name`, where predictions need them."""
    sizes: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    """Weights of these, float64 [clients]."""


class _Ensemble(Averaged, Method[FedBeServer, Stateless, Reduced], Generic[Reduced]):
    """What both ways to the distribution share: clients as of FedAvg, predictions, distillation."""

    about = About(paper="Chen and Chao 2021", needs=(drawable,), notes=(input_remarks,))
    server_state = FedBeServer

    members: int = Field(10, ge=1, description="number of networks sampled for the ensemble")
    predicts: Literal["ensemble", "single"] = Field(
        "ensemble", description="the global model: the ensemble, or only the network that is sent"
    )
    inputs: str | None = Field(
        None,
        description="inputs on which the network to send learns the ensemble: auto (synthetic, "
        "by their shape), leaves, strokes, noise, gaussian, package.module:function, or a "
        "folder or file of real samples at the server. none: the clients' mean is sent",
    )
    steps: Annotated[int, Only("inputs")] = Field(
        1500, ge=1, description="steps of the server's training in a round"
    )
    drawn: Annotated[int, Only("inputs")] = Field(
        4096, ge=64, description="number of different inputs in a round"
    )
    server_lr: Annotated[float, Only("inputs")] = Field(
        5e-4, gt=0, description="highest learning rate at the server"
    )
    cycles: Annotated[int, Only("inputs")] = Field(
        1,
        ge=1,
        description="cycles of the server's learning rate in its steps. The server sends the "
        "mean of the networks at the ends of the cycles (stochastic weight averaging)",
    )

    def remarks(self, run: Federation) -> list[str]:
        """Whether the distribution is of use, too."""
        notes: list[str] = super().remarks(run)
        if self.inputs is None:
            names = ("steps", "drawn", "server_lr", "cycles")
            notes += unused(self, names, "method.inputs is unset", "method.")
        if self.inputs is None and self.predicts == "single":
            return [
                *notes,
                "method.predicts = 'single' without method.inputs is federated averaging. Set "
                "method.inputs, or method.predicts = 'ensemble'",
            ]
        return notes

    def origin(self, server: FedBeServer, run: Federation) -> Tensors:
        """The network that clients start from."""
        return server.weights

    def fitted(self, server: FedBeServer, at: RoundContext) -> tuple[FedBeServer, Info]:
        """The server's state once a distribution is fitted, and what goes out has learnt it.

        Args:
            server: with the distribution, and the clients' mean as what goes out.
            at: the round.
        """
        entries = sum(s.numel() for s in server.std.values())
        info = {"spread": norm(s.double() for s in server.std.values()) / entries**0.5}
        weights = server.weights
        if self.inputs is not None:
            settings = DistillationSettings(
                steps=max(1, self.steps // self.cycles),
                draws=self.drawn,
                lr=self.server_lr,
                held_out=_HELD_OUT,
            )
            teacher = ensemble_of(list(self.ensemble(_model(server), at.run)), at.run)
            weights, told = learnt(teacher, weights, self.inputs, settings, at, self.cycles)
            info |= told
        if self.predicts == "single":
            return FedBeServer(weights), info
        return FedBeServer(weights, server.mean, server.std, server.clients, server.sizes), info

    def model(self, server: FedBeServer, run: Federation) -> Tensors:
        """The distribution, as `mean/…`, `std/…` and `client/k/…`; or the network that goes out."""
        return _model(server) if server.mean else server.weights

    def draws(self, model: Tensors, run: Federation) -> Sampler:
        """Outputs of the members of the ensemble, the same on every call; or of one network."""
        if not part(model, "mean"):
            return single_draw(model, run.network)
        network = run.network

        def sampler(x: Tensor) -> Tensor:
            members = self.ensemble(model, run)
            return torch.stack([network(network.prepare(member), x) for member in members])

        return sampler

    def ensemble(self, model: Tensors, run: Federation) -> Iterator[Tensors]:
        """The mean, the clients' networks as far as they are there, and those drawn."""
        clients = part(model, "client")
        numbers = sorted({int(name.partition("/")[0]) for name in clients})
        networks = [part(clients, str(k)) for k in numbers]
        yield part(model, "mean")
        yield from networks
        yield from self.drawn_networks(model, networks, run)

    def drawn_networks(
        self, model: Tensors, networks: list[Tensors], run: Federation
    ) -> Iterator[Tensors]:
        """Networks drawn from the Gaussian; buffers are the mean's."""
        mean, std = part(model, "mean"), part(model, "std")
        for drawn in draws_of({name: mean[name] for name in std}, std, self.members):
            yield {**mean, **drawn}


class FedBe(_Ensemble[ReportList]):
    """A Gaussian over networks, fitted to the clients' of a round (Chen and Chao 2021, Eq. 5),

        w̄ = Σ r_s φ_s,   σ² = Σ r_s (φ_s − w̄)²,   r_s = n_s / Σ n_s,

    entry by entry; or a Dirichlet distribution of the clients' shares (Eq. 6). The ensemble of w̄,
    the clients' networks and `members` draws predicts by its mean probabilities. Down goes w̄, or
    with `inputs` a network that starts there and learns what the ensemble predicts.
    """

    name = "fedbe"
    about = About("a distribution over the clients' networks, and its ensemble")
    reports = Reports({"weights": Part(compared="tensors")}, reduce="set")

    distribution: Literal["gaussian", "dirichlet"] = Field(
        "gaussian",
        description="distribution over weights, or over the clients' shares in a mean of networks",
    )
    alpha: Annotated[float, Only("distribution", "dirichlet")] = Field(
        1.0, gt=0, description="concentration of the Dirichlet distribution"
    )

    def update(
        self, server: FedBeServer, reports: ReportList, at: RoundContext
    ) -> tuple[FedBeServer, Info]:
        """Fit the distribution, and distill its ensemble into the network to send."""
        found = [dense(report.tensors) for report in reports.reports.values()]
        sizes = torch.tensor([r.weight for r in reports.reports.values()], dtype=torch.float64)
        shares = sizes / sizes.sum()
        mean = combine(found, shares.tolist())
        std: Tensors = {}
        for name, like in at.run.network.split()[0].items():
            values = torch.stack([weights[name] for weights in found]).double()
            centre = torch.tensordot(shares, values, dims=1)
            variance = torch.tensordot(shares, (values - centre).square(), dims=1)
            std[name] = variance.sqrt().to(like.dtype)
        clients: Tensors = {}
        for k, weights in enumerate(found):
            clients |= named(str(k), weights)
        if self.distribution == "gaussian":
            sizes = torch.zeros(0, dtype=torch.float64)
        return self.fitted(FedBeServer(mean, mean, std, clients, sizes), at)

    def drawn_networks(
        self, model: Tensors, networks: list[Tensors], run: Federation
    ) -> Iterator[Tensors]:
        """Networks drawn from the Gaussian, or means of the clients' with drawn shares."""
        if self.distribution == "gaussian":
            yield from super().drawn_networks(model, networks, run)
            return
        rng, sizes = seeds.numpy_rng(run.seed, "ensemble"), model["sizes"].cpu()
        for _ in range(self.members):
            shares = torch.from_numpy(rng.dirichlet([self.alpha] * len(networks))) * sizes
            yield combine(networks, (shares / shares.sum()).tolist())


class FedBeSums(_Ensemble[Sum]):
    """The Gaussian of `fedbe` from sums.

    Clients report φ_s and (φ_s − w)², where w are the weights from the server. The server needs
    their means alone:

        w̄ = Σ r_s φ_s,   σ² = Σ r_s (φ_s − w)² − (w̄ − w)².

    So reports can be added in secret, bounded, and have noise. No client's network is in the
    ensemble, and reports are twice as long.
    """

    name = "fedbe-sums"
    about = About("fedbe with a Gaussian from sums, which can be secure")
    reports = Reports(
        {
            "weights": Part(),
            "square": Part(
                origin="zero",
                linear=False,
                uncompressed="its variance is a difference of sums, which must be exact",
            ),
        }
    )

    def expected(self, message: Message, run: Federation) -> Message:
        """A network, and squares of its trained weights."""
        trained = run.network.split()[0]
        return {**message, **named("square", {name: message[name] for name in trained})}

    def report(
        self, solved: Solved, problem: Problem, client: Stateless, at: RoundContext
    ) -> tuple[Report, Stateless, Info]:
        """Report the weights where training ended, and the squares of their changes."""
        report, client, info = super().report(solved, problem, client, at)
        squares = {
            name: (solved.parameters[name] - problem.start[name]).square()
            for name in at.run.network.split()[0]
        }
        return Report({**report.tensors, **named("square", squares)}, report.weight), client, info

    def update(
        self, server: FedBeServer, reports: Sum, at: RoundContext
    ) -> tuple[FedBeServer, Info]:
        """Fit the Gaussian, and distill its ensemble into the network to send.

        A variance below 0, of noise or of rounding, counts as 0.
        """
        mean = reports.mean()
        exact = {name: total / reports.weight for name, total in reports.tensors.items()}
        std: Tensors = {}
        for name in at.run.network.split()[0]:
            drift = exact[name] - server.weights[name].double()
            variance = (exact[f"square/{name}"] - drift.square()).clamp_min(0)
            std[name] = variance.sqrt().to(server.weights[name].dtype)
        centre = {name: mean[name] for name in server.weights}
        return self.fitted(FedBeServer(centre, centre, std), at)


def _model(server: FedBeServer) -> Tensors:
    """The distribution in the form of a model."""
    model = named("mean", server.mean) | named("std", server.std) | named("client", server.clients)
    return model | ({"sizes": server.sizes} if len(server.sizes) else {})


_HELD_OUT = 512
"""Inputs that the best step is chosen by."""
