"""Methods whose server keeps draws of a Markov chain, and sees whether they suffice."""

from dataclasses import dataclass, field
from math import isfinite
from typing import Annotated

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from fedbayes.contracts.drawn import sampler_over
from fedbayes.contracts.method import Info, Sampler
from fedbayes.contracts.run import Federation, RoundContext
from fedbayes.core.fields import Chosen
from fedbayes.core.tensors import Tensors, named, part


@dataclass(frozen=True)
class ChainServer:
    """The chain's last state, and the draws that were kept of it."""

    weights: Tensors
    draws: Tensors = field(default_factory=dict)
    """Weights after the rounds that count, [draws, ...], oldest first."""
    track: Tensor = field(default_factory=lambda: torch.zeros(0, _TRACKED, dtype=torch.float64))
    """Projections of the weights on fixed directions after each of these rounds, float64."""


class Chain(BaseModel):
    """A posterior whose draws are the server's weights after single rounds.

    The model predicts by the mean over draws that the server keeps after `burn_in` of the rounds.
    Two numbers say whether these suffice: split R̂ (Gelman et al. 2013), which comes to 1, and the
    effective sample size, each of the worst of 16 fixed random projections of the weights.
    """

    temperature: Annotated[float, Chosen()] = Field(
        1.0, ge=0, description="T of the posterior; 1 is Bayes' rule, 0 has no noise"
    )
    prior_std: float = Field(1.0, gt=0, description="s, standard deviation of the prior")
    burn_in: float = Field(
        0.5, ge=0, lt=1, description="share of the rounds before the first sample is kept"
    )
    keep: int = Field(
        20, ge=1, description="largest number of samples that the server keeps (the last ones)"
    )

    def kept(
        self, server: ChainServer, weights: Tensors, at: RoundContext
    ) -> tuple[ChainServer, Info]:
        """The chain with its next state, which is a draw after burn-in."""
        if at.round <= self.burn_in * at.run.rounds:
            return ChainServer(weights), {}
        draws = {
            n: torch.cat([server.draws[n], w[None]] if server.draws else [w[None]])[-self.keep :]
            for n, w in weights.items()
        }
        track = torch.cat([server.track, _projected(weights)[None]])
        info = {"draws": float(len(track)), "r_hat": r_hat(track), "ess": effective_size(track)}
        kept = {name: value for name, value in info.items() if isfinite(value)}
        return ChainServer(weights, draws, track), kept

    def model(self, server: ChainServer, run: Federation) -> Tensors:
        """Return the draws; before the first one, the weights."""
        return named("draw", server.draws or {n: w[None] for n, w in server.weights.items()})

    def draws(self, model: Tensors, run: Federation) -> Sampler:
        """Outputs of the networks that were drawn."""
        drawn = part(model, "draw") or {n: t[None] for n, t in model.items()}
        return sampler_over(drawn, run.network)


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
