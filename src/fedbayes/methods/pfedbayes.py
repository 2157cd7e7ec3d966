"""pFedBayes: every client has a Gaussian posterior of its own, drawn to the global Gaussian."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    UNIFORM,
    About,
    Averaged,
    Federation,
    Info,
    Known,
    Loss,
    Method,
    Models,
    Part,
    Problem,
    Report,
    Reports,
    RoundContext,
    Sampler,
    Solved,
    Sum,
    adam,
)
from fedbayes.contracts.drawn import expected_loss, sampler_of, weight_noise
from fedbayes.contracts.needs import own_prior, weights_alone
from fedbayes.contracts.run import nll
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples, Tensors, flat, named, part, shaped
from fedbayes.errors import MessageError
from fedbayes.inference.gaussian import kl_terms
from fedbayes.inference.problem import Tree
from fedbayes.inference.reparametrized import reparametrized


@dataclass(frozen=True)
class PFedBayesServer:
    """The global Gaussian w."""

    mean: Tensors
    std: Tensors


@dataclass(frozen=True)
class PFedBayesClient:
    """A client's own Gaussian q_i, which never leaves it; empty before its first round."""

    mean: Tensors
    log_std: Tensors


class PFedBayes(Averaged, Method[PFedBayesServer, PFedBayesClient, Sum]):
    """Personal posteriors whose common prior is learnt (Zhang et al. 2022, Eqs. 4 and 5),

        min_w Σ_i F_i(w),   F_i(w) = min_{q_i} −E_{θ ~ q_i}[log p(D_i | θ)] + ζ KL(q_i ‖ w),

    with mean-field Gaussians w and q_i. In every step a client takes one down the gradient of F_i
    in q_i, by weights that it draws, and then one in w, of which it has a copy. The copy's step is
    of the natural gradient of KL(q_i ‖ w), which has no unit and no optimizer: with rate η the
    moments go to those of q_i,

        m ← (1 − η) m + η m_i,   v ← (1 − η) v + η v_i + η (1 − η) (m − m_i)².

    The server averages the copies' means and standard deviations, w ← (1 − β) w + β mean_i w_i.
    Clients predict by draws from q_i, the global model by draws from w.
    """

    name = "pfedbayes"
    about = About(
        "a posterior for each client, around a global Gaussian",
        "Zhang et al. 2022",
        published=UNIFORM,
        needs=(weights_alone, own_prior),
    )
    server_state = PFedBayesServer
    client_state = PFedBayesClient
    reports = Reports({"mean": Part(), "std": Part(exact=True)})
    models = Models.BOTH

    zeta: float = Field(
        0.1,
        gt=0,
        description="ζ, weight of the KL term relative to the summed loss. 1: the free energy. A "
        "smaller value gives a client's data more weight",
    )
    global_lr: float = Field(
        0.3, gt=0, le=1, description="η, rate of the client's copy of the global Gaussian"
    )
    beta: float = Field(
        1.0,
        gt=0,
        le=1,
        description="β, step of the server toward the mean of the copies. 1: the mean",
    )
    start: Literal["own", "global"] = Field(
        "own",
        description="start of a client's Gaussian in a round: its last one, or the global one",
    )
    start_std: float = Field(0.03, gt=0, description="standard deviation of the first Gaussians")
    samples: int = Field(1, ge=1, description="Monte-Carlo samples of a training step")
    predictions: int = Field(20, ge=1, description="Monte-Carlo samples of a prediction")

    def recommended(self, known: Known) -> dict[str, Any]:
        """Adam, for means and log-deviations."""
        return adam(known, drawn=True)

    def init(self, run: Federation) -> PFedBayesServer:
        """Narrow Gaussians around the network's initialization."""
        initial = run.network.initial
        return PFedBayesServer(
            initial, {n: torch.full_like(t, self.start_std) for n, t in initial.items()}
        )

    def join(self, at: RoundContext) -> PFedBayesClient:
        """No own state until its first round."""
        return PFedBayesClient({}, {})

    def message(self, server: PFedBayesServer, at: RoundContext) -> Message:
        """Means and standard deviations, the same to all."""
        return {**named("mean", server.mean), **named("std", server.std)}

    def problem(
        self, message: Message, client: PFedBayesClient, samples: Samples, at: RoundContext
    ) -> Problem:
        """Start from the client's Gaussian (a new client: the global one), and a copy of w."""
        network, sent = at.run.network, dense(message)
        mean, std = network.prepare(part(sent, "mean")), network.prepare(part(sent, "std"))
        spread = {name: s.log() for name, s in std.items()}
        goes_on = client.mean and self.start == "own"
        own = client if goes_on else PFedBayesClient(mean, spread)
        start = {"mean": own.mean, "log_std": own.log_std, "global_mean": mean, "global_std": std}
        return Problem(
            {kind: flat(tensors, network.initial) for kind, tensors in start.items()},
            given={"count": torch.tensor(float(len(samples.y)), device=network.device)},
            noise=weight_noise(at.run, self.samples),
            project=self._follow,
        )

    def _follow(self, current: Tensors, given: Tree, lr: float) -> None:
        """A natural-gradient step of the copy, in place."""
        rate = self.global_lr
        mean, centre, std = current["mean"], current["global_mean"], current["global_std"]
        own = (2 * current["log_std"]).exp()
        apart = rate * (1 - rate) * (mean - centre).square()
        std.copy_(((1 - rate) * std.square() + rate * own + apart).sqrt())
        centre.lerp_(mean, rate)

    def loss(self, run: Federation) -> Loss:
        """F_i per sample, by Monte Carlo, as a function of the client's own Gaussian."""

        def loss(parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> Tensor:
            own = parameters["mean"], -2 * parameters["log_std"], noise["weights"]
            copy = parameters["global_std"].detach().pow(-2), parameters["global_mean"]
            drawn, apart = reparametrized(run.network.initial, *own, kl_terms, *copy)
            fit = expected_loss(run.likelihood.nll, run, drawn, batch, training=True)
            energy: Tensor = fit + self.zeta * apart / given["count"]
            return energy

        return loss

    def validation(self, run: Federation) -> Loss:
        """The negative log-likelihood at the mean of the client's own Gaussian, without dropout."""
        like = run.network.initial
        return nll(run, training=False, weights=lambda found, _: shaped(found["mean"], like))

    def report(
        self, solved: Solved, problem: Problem, client: PFedBayesClient, at: RoundContext
    ) -> tuple[Report, PFedBayesClient, Info]:
        """Report the copy, keep the client's own Gaussian."""
        ended = {n: shaped(t, at.run.network.initial) for n, t in solved.parameters.items()}
        tensors: Message = {**named("mean", ended["global_mean"])}
        tensors |= named("std", ended["global_std"])
        after = PFedBayesClient(ended["mean"], ended["log_std"])
        return Report(tensors, self.weight(solved)), after, solved.info

    def accept(self, server: PFedBayesServer, report: Report, run: Federation) -> None:
        """Standard deviations are positive."""
        for name, std in part(dense(report.tensors), "std").items():
            if bool((std <= 0).any()):
                raise MessageError(f"a standard deviation of {name!r} is not positive")

    def update(
        self, server: PFedBayesServer, reports: Sum, at: RoundContext
    ) -> tuple[PFedBayesServer, Info]:
        """Go to the mean of the copies; deviations that noise made negative are floored."""
        found, least = reports.mean(), _NARROWEST * self.start_std
        mean = {n: m.lerp(found[f"mean/{n}"], self.beta) for n, m in server.mean.items()}
        std = {
            n: s.lerp(found[f"std/{n}"], self.beta).clamp_min(least) for n, s in server.std.items()
        }
        entries = sum(s.numel() for s in std.values())
        return PFedBayesServer(mean, std), {
            "mean_std": sum(float(s.sum()) for s in std.values()) / entries
        }

    def model(self, server: PFedBayesServer, run: Federation) -> Tensors:
        """Means and standard deviations of the global Gaussian."""
        return named("mean", server.mean) | named("std", server.std)

    def personal_model(
        self, message: Message, report: Report | None, client: PFedBayesClient, run: Federation
    ) -> Tensors | None:
        """Means and standard deviations of the client's Gaussian; of the global one before any."""
        if not client.mean:
            return dense(message)
        return named("mean", client.mean) | named(
            "std", {name: s.exp() for name, s in client.log_std.items()}
        )

    def draws(self, model: Tensors, run: Federation) -> Sampler:
        """Outputs under draws from a Gaussian, the same draws on every call."""
        return sampler_of(part(model, "mean"), part(model, "std"), run.network, self.predictions)


_NARROWEST = 1e-3
"""Least standard deviation, as a share of that at the start."""
