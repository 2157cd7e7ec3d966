"""FALD: federated averaging Langevin dynamics, whose server draws from the posterior."""

from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    About,
    Federation,
    Info,
    Known,
    Loss,
    PointEstimate,
    Problem,
    RoundContext,
    Sampler,
    Stateless,
    Sum,
    Tree,
    sgd,
)
from fedbayes.contracts.drawn import refuse_weight_decay, require_weights_alone
from fedbayes.contracts.run import with_prior
from fedbayes.core.fields import Chosen
from fedbayes.core.messages import Message
from fedbayes.core.tensors import Samples, Tensors, named, part
from fedbayes.inference.sampling import Langevin, require_langevin


@dataclass(frozen=True)
class FaldServer:
    """The chain's last state, and the draws that were kept of it."""

    weights: Tensors
    draws: Tensors = field(default_factory=dict)
    """Weights after the rounds that count, [draws, ...], oldest first."""
    track: Tensor = field(default_factory=lambda: torch.zeros(0, _TRACKED, dtype=torch.float64))
    """Projections of the weights on fixed directions after each of these rounds, float64."""


class Fald(PointEstimate[FaldServer]):
    """Federated averaging Langevin dynamics (Plassier et al. 2023, Algorithm 1; Deng et al. 2021).

    In every step a client goes down the gradient of its mean loss ℓ_k, and adds noise,

        θ_k ← θ_k − η ∇[ℓ_k(θ_k) + ‖θ_k‖²/(2 s² N)] + N(0, 2 η T/n_k),

    with N = Σ n_k. The server averages with p_k = n_k/N. The noise of the mean then has the
    variance 2 η T/N. With one local step, rounds are Langevin dynamics of the posterior of all N
    rows under the prior N(0, s²), at the temperature T. The model predicts by the mean over draws
    that the server keeps after `burn_in` of the rounds. Two numbers say whether these suffice:
    split R̂ (Gelman et al. 2013), which comes to 1, and the effective sample size, each of the
    worst of 16 fixed random projections of the weights.
    """

    name = "fald"
    about = About(
        "Langevin dynamics over rounds, whose draws predict",
        "Plassier et al. 2023; Deng et al. 2021",
    )
    server_state = FaldServer

    temperature: Annotated[float, Chosen()] = Field(
        1.0, ge=0, description="T of the posterior; 1 is Bayes' rule, 0 has no noise"
    )
    prior_std: float = Field(1.0, gt=0, description="s, standard deviation of the prior")
    burn_in: float = Field(
        0.5, ge=0, lt=1, description="share of the rounds before the first draw is kept"
    )
    keep: int = Field(20, ge=1, description="most draws that the server keeps, the last ones")

    def recommended(self, known: Known) -> dict[str, Any]:
        """Plain steps, and a temperature that leaves the data their say."""
        return {**sgd(known), "method.temperature": known.tempered(0.2)}

    def check(self, run: Federation) -> None:
        """Langevin dynamics has plain steps, of trained weights alone.

        Raises:
            ConfigError: the optimizer makes no sampler, or has weight decay.
            ModelError: the network has buffers, such as running means.
        """
        require_langevin(run.training)
        refuse_weight_decay(self.name, run)
        require_weights_alone(self.name, run)

    def init(self, run: Federation) -> FaldServer:
        """Start at the network's initialization."""
        return FaldServer(run.network.initial)

    def problem(
        self, message: Message, client: Stateless, samples: Samples, at: RoundContext
    ) -> Problem:
        """Train from the server's weights, with noise after every step."""
        problem = super().problem(message, client, samples, at)
        count, names = len(samples.y), list(problem.start)
        noise = Langevin(at.rng("langevin"), count, self.temperature)

        def follow(parameters: Tensors, given: Tree, lr: float) -> None:
            noise.add(parameters, names, lr)

        # Σ p_k / (n_k K) is 1/N: on average it is the prior's share.
        total = torch.tensor(float(count * at.run.clients), device=at.run.network.device)
        return replace(problem, given={"total": total}, project=follow)

    def loss(self, run: Federation) -> Loss:
        """The negative log-likelihood plus the prior's share of it."""
        return with_prior(run, self.prior_std)

    def update(self, server: FaldServer, reports: Sum, at: RoundContext) -> tuple[FaldServer, Info]:
        """Average, and keep a draw after burn-in."""
        weights = reports.mean()
        if at.round <= self.burn_in * at.run.rounds:
            return FaldServer(weights), {}
        draws = {
            n: torch.cat([server.draws[n], w[None]] if server.draws else [w[None]])[-self.keep :]
            for n, w in weights.items()
        }
        track = torch.cat([server.track, _projected(weights)[None]])
        info = {"draws": float(len(track)), "r_hat": r_hat(track), "ess": effective_size(track)}
        kept = {name: value for name, value in info.items() if isfinite(value)}
        return FaldServer(weights, draws, track), kept

    def model(self, server: FaldServer, run: Federation) -> Tensors:
        """Return the draws; before the first one, the weights."""
        return named("draw", server.draws or {n: w[None] for n, w in server.weights.items()})

    def draws(self, model: Tensors, run: Federation) -> Sampler:
        """Outputs of the networks that were drawn."""
        network, drawn = run.network, part(model, "draw") or {n: t[None] for n, t in model.items()}
        count = len(next(iter(drawn.values())))
        every = [network.prepare({n: t[k] for n, t in drawn.items()}) for k in range(count)]
        return lambda x: torch.stack([network(weights, x) for weights in every])


def r_hat(track: Tensor) -> float:
    """Split R̂ of the worst column of a chain [draws, columns]; NaN for fewer than four draws."""
    half = len(track) // 2
    if half < 2:
        return float("nan")
    halves = torch.stack([track[:half], track[-half:]])
    within = halves.var(dim=1).mean(dim=0)
    between = half * halves.mean(dim=1).var(dim=0)
    return float((((half - 1) / half * within + between / half) / within).sqrt().max())


def effective_size(track: Tensor) -> float:
    """Effective sample size of the worst column [draws, columns], by Geyer's monotone sequence.

    NaN for fewer than four draws.
    """
    count = len(track)
    if count < 4:
        return float("nan")
    centred = track - track.mean(dim=0)
    spectrum = torch.fft.rfft(centred, n=2 * count, dim=0).abs().square()
    covariance = torch.fft.irfft(spectrum, n=2 * count, dim=0)[:count] / count
    correlation = covariance / covariance[0]
    pairs = correlation[: count // 2 * 2].reshape(-1, 2, track.shape[1]).sum(dim=1)
    positive = (pairs > 0).to(torch.float64).cumprod(dim=0)
    total = (torch.cummin(pairs, dim=0).values * positive).sum(dim=0)
    return float((count / (2 * total - 1).clamp_min(1 / count)).min())


def _projected(weights: Tensors) -> Tensor:
    """The weights along fixed random directions, float64 [_TRACKED]."""
    rng = torch.Generator().manual_seed(0)
    found = torch.zeros(_TRACKED, dtype=torch.float64)
    for tensor in weights.values():
        flat = tensor.cpu().double().flatten()
        found += torch.randn(_TRACKED, len(flat), generator=rng).double() @ flat
    return found


_TRACKED = 16
"""Directions along which the chain is watched."""
