"""Averaging under central differential privacy: the server clips, sums and adds noise."""

from dataclasses import dataclass, field
from math import ceil
from typing import Literal

import torch
from pydantic import Field

from fedbayes import seeds
from fedbayes.contracts import Federation, Info, PointEstimate, Report, Sum
from fedbayes.errors import ModelError
from fedbayes.inference.local import LocalTraining
from fedbayes.inference.optimizers import ServerOptimizer
from fedbayes.inference.privacy import epsilon
from fedbayes.messages import dense
from fedbayes.models import Network
from fedbayes.tensors import Tensors


@dataclass(frozen=True)
class Server:
    """The weights, the optimizer's memory, and what the accounting needs."""

    weights: Tensors
    memory: Tensors
    cohort: int
    """Clients in a round, B."""
    rate: float
    """Probability that a client is in a round; 1 if rounds are a fixed cycle."""
    sums: float
    """Noisy sums that a round counts for: 1, or B/S in a fixed cycle."""
    round: int
    seed: int


@dataclass
class ClippedSum(Sum):
    """Sums changes φ_s − w, each shortened to a norm; every client counts alike."""

    centre: Tensors = field(default_factory=dict)
    norm: float = 1.0
    clipped: int = 0
    """Reports that were shortened."""

    def add(self, client: int, report: Report) -> None:
        """Fold one report in."""
        change = {n: w.double() - self.centre[n].double() for n, w in dense(report.tensors).items()}
        length = float(torch.stack([c.norm() for c in change.values()]).norm())
        factor = min(1.0, self.norm / length) if length else 1.0
        self.clipped += factor < 1.0
        super().add(client, Report({n: factor * c for n, c in change.items()}))


class PrivateFedAvg(ServerOptimizer, PointEstimate[Server]):
    """FedAvg with client-level differential privacy (central: the server is trusted).

    w moves by (Σ_s clip(φ_s − w, C) + N(0, z² C² I)) / B, or the server's optimizer takes the
    negative as its gradient. One client's presence changes the sum by at most C. ε is accounted
    for as if every client were in a round with probability B/S by itself; in a fixed cycle, as
    many sums without that amplification as a client takes part in.

    The guarantee is for the global models. Figures that clients send for the display (losses,
    accuracies) are outside of it.
    """

    name = "dp-fedavg"
    summary = "FedAvg with differential privacy of clients: clipped, with noise at the server"
    paper = "McMahan et al. 2018"
    server_state = Server

    weighting: Literal["uniform"] = Field("uniform", description="every client counts alike")
    clip: float = Field(1.0, gt=0, description="C, largest norm of a client's change")
    noise_multiplier: float = Field(
        1.0, gt=0, description="z, deviation of the noise on the sum in units of C"
    )
    delta: float = Field(1e-5, gt=0, lt=1, description="δ at which ε is told")
    noise: Literal["seed", "secret"] = Field(
        "seed",
        description="where noise comes from: the run's seed (repeatable, for research), or the "
        "operating system, as real privacy needs it",
    )

    def check(self, training: LocalTraining) -> None:
        """The accounting must be possible before the first round."""
        epsilon(self.noise_multiplier, 1.0, 1, self.delta)

    def init(self, network: Network, federation: Federation) -> Server:
        """The network's initialization.

        Raises:
            ModelError: the network has buffers, which would be released without noise.
        """
        if network.frozen:
            raise ModelError(
                f"dp-fedavg cannot protect what is not trained: {', '.join(sorted(network.frozen))}"
            )
        share = federation.cohort / federation.clients
        rate, sums = (1.0, share) if federation.cyclic else (share, 1.0)
        return Server(network.initial, {}, federation.cohort, rate, sums, 0, federation.seed)

    def reports(self, server: Server) -> ClippedSum:
        """A sum of changes from the server's weights."""
        return ClippedSum(centre=server.weights, norm=self.clip)

    def update(self, server: Server, reports: Sum) -> tuple[Server, Info]:
        """A step along the noisy mean of the clipped changes."""
        assert isinstance(reports, ClippedSum)
        stream = torch.Generator()
        if self.noise == "secret":
            stream.seed()
        else:
            stream.manual_seed(seeds.integer(server.seed, "privacy", round=server.round + 1))
        gradient = {}
        for name, total in reports.tensors.items():
            noise = torch.randn(total.shape, generator=stream, dtype=torch.float64)
            noisy = total + self.clip * self.noise_multiplier * noise
            gradient[name] = (-noisy / server.cohort).to(server.weights[name].dtype)
        weights, memory = self.server_step(server.weights, gradient, server.memory)
        after = Server(
            weights,
            memory,
            server.cohort,
            server.rate,
            server.sums,
            server.round + 1,
            server.seed,
        )
        return after, {
            "clipped": reports.clipped / reports.clients,
            **self.figures(after),
        }

    def figures(self, server: Server) -> Info:
        """ε spent so far, and its δ."""
        sums = ceil(server.round * server.sums)
        spent = epsilon(self.noise_multiplier, server.rate, sums, self.delta)
        return {"epsilon": spent, "delta": self.delta}

    def model(self, server: Server) -> Tensors:
        """The weights."""
        return server.weights
