"""FedIVON: clients train a Gaussian by IVON, and the server multiplies their posteriors."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    About,
    Averaged,
    Federation,
    Info,
    Known,
    Loss,
    Method,
    Part,
    Problem,
    Report,
    Reports,
    RoundContext,
    Sampler,
    Solved,
    Stateless,
    Sum,
    Tree,
    nll,
    sgd,
)
from fedbayes.contracts.changes import norm
from fedbayes.contracts.drawn import expected_loss, sampler_of, weight_noise
from fedbayes.contracts.needs import own_prior, weights_alone
from fedbayes.core.fields import Chosen
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples, Tensors, flat, named, part, shaped
from fedbayes.errors import MessageError
from fedbayes.inference.gaussian import kl_terms
from fedbayes.inference.ivon import UNUSED, Ivon
from fedbayes.inference.reparametrized import reparametrized


@dataclass(frozen=True)
class FedIvonServer:
    """The global Gaussian."""

    mean: Tensors
    precision: Tensors


def _length(method: Any, server: FedIvonServer, run: Federation) -> float:
    """Ten times the norm of the shifts, of which `max_change` = 5 allows 5/`bounds.FAR`.

    That is half of the norm, as far as honest clients of unequal sizes move them.
    """
    return 10 * norm(server.precision[n].double() * m.double() for n, m in server.mean.items())


class FedIvon(Averaged, Method[FedIvonServer, Stateless, Sum]):
    """Federated variational learning with IVON (Pal et al. 2025).

    A client starts at the server's Gaussian N(m, 1/Λ), and takes steps of the improved variational
    online Newton method (Shen et al. 2024) down

        E_{q_k}[ℓ_k(θ)] + (ζ/n_k) KL(q_k ‖ N(0, s²)),

    with its mean loss ℓ_k. Of the clients' Gaussians the server takes the weighted geometric mean,

        Λ ← Σ p_k Λ_k,   m ← Λ⁻¹ Σ p_k Λ_k m_k,   p_k = n_k / Σ n,

    so that a weight follows the clients that are certain of it. Where all Λ_k are equal it is
    FedAvg of the means. The model predicts by draws.
    """

    name = "fedivon"
    about = About(
        "FedAvg of Gaussians, weighted by their precisions (IVON)",
        "Pal et al. 2025; Shen et al. 2024",
        unused=UNUSED,
        needs=(weights_alone, own_prior),
    )
    server_state = FedIvonServer
    reports = Reports(
        {
            "precision": Part(exact=True),
            "shift": Part(exact=True, range=65536.0, typical=_length),
        }
    )

    samples: int = Field(1, ge=1, description="Monte-Carlo samples of a training step")
    predictions: int = Field(20, ge=1, description="Monte-Carlo samples of a prediction")
    prior_std: float = Field(1.0, gt=0, description="s, standard deviation of the prior")
    kl_weight: Annotated[float, Chosen()] = Field(
        1.0,
        gt=0,
        description="ζ, factor of the KL term. A smaller value gives the data more weight",
    )
    start_std: float = Field(0.03, gt=0, description="standard deviation of the first Gaussian")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of the means in IVON")
    rate: float = Field(
        1e-3,
        ge=0,
        le=1,
        description="share of a precision that a step updates. 0: precisions are fixed",
    )

    def recommended(self, known: Known) -> dict[str, Any]:
        """A Newton step for a client of median size, of weights that start narrow."""
        lr = min(0.4, 200 / known.median) * (0.25 if known.real else 1.0)
        return {
            **sgd(known),
            "training.lr": float(f"{lr:.2g}"),
            "method.kl_weight": known.tempered(0.2),
        }

    def init(self, run: Federation) -> FedIvonServer:
        """A narrow Gaussian around the network's initialization."""
        initial = run.network.initial
        precision = {n: torch.full_like(t, self.start_std**-2) for n, t in initial.items()}
        return FedIvonServer(initial, precision)

    def message(self, server: FedIvonServer, at: RoundContext) -> Message:
        """Send means and precisions, the same to all."""
        return {**named("mean", server.mean), **named("precision", server.precision)}

    def expected(self, message: Message, run: Federation) -> Message:
        """Precisions, and precisions times means."""
        sent = part(message, "precision")
        return named("precision", sent) | named("shift", part(message, "mean"))

    def problem(
        self, message: Message, client: Stateless, samples: Samples, at: RoundContext
    ) -> Problem:
        """Train from the server's Gaussian."""
        network, sent = at.run.network, dense(message)
        mean, precision = (
            flat(part(sent, kind), network.initial).to(network.device)
            for kind in ("mean", "precision")
        )
        count = len(samples.y)
        build = partial(self._stepper, float(count), at.lr)
        return Problem(
            {"q/mean": mean, "q/log_precision": precision.log()},
            given={"count": torch.tensor(float(count), device=network.device)},
            noise=weight_noise(at.run, self.samples),
            param_groups={"q": build},
        )

    def _stepper(self, count: float, lr: float, leaves: list[Tensor]) -> Ivon:
        """IVON over means and log-precisions."""
        mean, log_precision = leaves
        own = {"momentum": self.momentum, "rate": self.rate}
        return Ivon(mean, log_precision, lr, scale=count, **own)

    def loss(self, run: Federation) -> Loss:
        """The free energy per sample, by Monte Carlo."""

        def loss(parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> Tensor:
            mean, log_precision = parameters["q/mean"], parameters["q/log_precision"]
            prior = (mean.new_full((), value) for value in (self.prior_std**-2, 0.0))
            drawn, apart = reparametrized(
                run.network.initial, mean, log_precision, noise["weights"], kl_terms, *prior
            )
            fit = expected_loss(run.likelihood.nll, run, drawn, batch, training=True)
            energy: Tensor = fit + self.kl_weight * apart / given["count"]
            return energy

        return loss

    def validation(self, run: Federation) -> Loss:
        """The negative log-likelihood at the mean, without dropout."""
        like = run.network.initial
        return nll(run, training=False, weights=lambda found, _: shaped(found["q/mean"], like))

    def report(
        self, solved: Solved, problem: Problem, client: Stateless, at: RoundContext
    ) -> tuple[Report, Stateless, Info]:
        """Report natural parameters."""
        mean, log_precision = solved.parameters.values()
        precision = log_precision.exp()
        tensors: Message = {}
        for kind, entries in (("precision", precision), ("shift", precision * mean)):
            tensors |= named(kind, shaped(entries, at.run.network.initial))
        return Report(tensors, self.weight(solved)), client, solved.info

    def accept(self, server: FedIvonServer, report: Report, run: Federation) -> None:
        """Precisions are positive."""
        for name, precision in part(dense(report.tensors), "precision").items():
            if bool((precision <= 0).any()):
                raise MessageError(f"a precision of {name!r} is not positive")

    def origin(self, server: FedIvonServer, run: Federation) -> Tensors:
        """Precisions and shifts are measured from the server's."""
        shift = {n: server.precision[n] * m for n, m in server.mean.items()}
        return named("precision", server.precision) | named("shift", shift)

    def update(
        self, server: FedIvonServer, reports: Sum, at: RoundContext
    ) -> tuple[FedIvonServer, Info]:
        """Take the geometric mean of the Gaussians; what noise made too small is floored."""
        found = {n: t / reports.weight for n, t in reports.tensors.items()}
        least = _LEAST * self.start_std**-2
        precision = {n: t.clamp_min(least) for n, t in part(found, "precision").items()}
        kind = {n: t.dtype for n, t in server.mean.items()}
        mean = {n: (h / precision[n]).to(kind[n]) for n, h in part(found, "shift").items()}
        entries = sum(t.numel() for t in precision.values())
        std = sum(float(t.rsqrt().sum()) for t in precision.values()) / entries
        after = FedIvonServer(mean, {n: t.to(kind[n]) for n, t in precision.items()})
        return after, {"mean_std": std}

    def model(self, server: FedIvonServer, run: Federation) -> Tensors:
        """Return means and standard deviations."""
        std = {name: t.rsqrt() for name, t in server.precision.items()}
        return named("mean", server.mean) | named("std", std)

    def personal_model(
        self, message: Message, report: Report | None, client: Stateless, run: Federation
    ) -> Tensors | None:
        """Return the client's Gaussian, right after its training."""
        if report is None:
            return None
        tensors = dense(report.tensors)
        precision = part(tensors, "precision")
        mean = {n: h / precision[n] for n, h in part(tensors, "shift").items()}
        return named("mean", mean) | named("std", {n: t.rsqrt() for n, t in precision.items()})

    def draws(self, model: Tensors, run: Federation) -> Sampler:
        """Outputs under draws from a Gaussian, the same on every call."""
        return sampler_of(part(model, "mean"), part(model, "std"), run.network, self.predictions)


_LEAST = 1e-6
"""Least precision, as a share of that at the start."""
