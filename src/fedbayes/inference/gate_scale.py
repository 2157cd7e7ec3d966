"""What a gate's threshold is counted in, and how far steps move it at clients and server."""

from dataclasses import dataclass
from math import log
from typing import Annotated, Literal, Self

import torch
from pydantic import BaseModel, Field, model_validator
from torch import Tensor

from fedbayes.core.fields import Chosen
from fedbayes.core.tensors import Tensors
from fedbayes.inference import gates, optimizers

Scale = Literal["paper", "logits"]
"""What thresholds are learnt in: see `GateScale`."""

CLOSED = 1e4
"""A threshold that no unit reaches, on either scale."""


@dataclass(frozen=True)
class _Rates:
    """Settings of a scale that were not given."""

    temperature: float
    gate_lr: float
    gate_slope: float
    server_gate_lr: float


RATES: dict[Scale, _Rates] = {
    "paper": _Rates(temperature=1e-3, gate_lr=1e-3, gate_slope=1e-8, server_gate_lr=1e-2),
    "logits": _Rates(temperature=0.05, gate_lr=1.0, gate_slope=0.01, server_gate_lr=0.2),
}


class GateScale(BaseModel):
    """The scale of gates: open with probability sigmoid((‖w_g‖₂ − τ_g)/T).

    `paper` learns v with τ = softplus(v), by Adamax at clients and server. One step of the server
    is 0.0044 in τ, as much as the distance T logit 0.99 = 0.0046 of a gate from its threshold at
    the start. A logit beyond ±17 has no slope in float32.

    `logits` learns τ/T, so that a step is one of the logit. Clients use Adamax, which moves gates
    by less than a full step where the slope is small. The server uses stochastic EM:
    θ ← θ + ρ (z̄ − θ), whose stationary point is that of Eq. 22. The server's gates follow their
    probabilities and not the norms, and none is more certain than it was at the start.
    """

    scale: Annotated[Scale, Chosen()] = Field(
        "paper",
        description="scale of the learned thresholds: v, as in the paper, or logits, with small "
        "steps relative to the margin, so that l0 decides",
    )
    temperature: float | None = Field(
        None,
        gt=0,
        description="temperature T of the gates' probabilities. none: 0.001 (paper), 0.05 (logits)",
    )
    start: float = Field(
        0.99,
        gt=0,
        lt=1,
        description="initial probability of every gate. With scale = logits it is also the upper "
        "bound",
    )
    gate_lr: float | None = Field(
        None,
        gt=0,
        description="learning rate of Adamax for the clients' thresholds. none: 0.001 (of v), 1 "
        "(logit per step)",
    )
    gate_slope: float | None = Field(
        None,
        gt=0,
        description="slope of a client's loss at which a threshold moves by half a step. Smaller "
        "slopes move it proportionally. none: 1e-8 (paper), 0.01 (logits)",
    )
    server_gate_lr: float | None = Field(
        None,
        gt=0,
        description="paper: Adamax of the server's thresholds, none: 0.01; logits: ρ, at most 1, "
        "by which its probabilities move to the share of open gates, none: 0.2",
    )

    @model_validator(mode="after")
    def _shares(self) -> Self:
        if self.scale == "logits" and self._rate("server_gate_lr") > 1:
            raise ValueError("server_gate_lr must be at most 1 with scale = 'logits'")
        return self

    @property
    def heat(self) -> float:
        """T."""
        return self._rate("temperature")

    def _rate(self, name: str) -> float:
        """A setting, or what it is on this scale where it was not given."""
        own: float | None = getattr(self, name)
        found: float = getattr(RATES[self.scale], name) if own is None else own
        return found

    def gate_logits(self, norms: Tensor, thresholds: Tensor) -> Tensor:
        """ℓ_g of gates with these norms and thresholds, [groups]."""
        if self.scale == "logits":
            return norms / self.heat - thresholds
        return gates.logits(norms, thresholds, self.heat)

    def gate_thresholds(self, norms: Tensor, logits: Tensor) -> Tensor:
        """The thresholds of gates with these norms and logits, [groups]."""
        if self.scale == "logits":
            return norms / self.heat - logits
        return gates.thresholds(norms, logits, self.heat)

    def gate_optimizer(self, leaves: list[Tensor]) -> torch.optim.Optimizer:
        """What moves the thresholds of a client."""
        rate, slope = self._rate("gate_lr"), self._rate("gate_slope")
        return torch.optim.Adamax(leaves, lr=rate, eps=slope)

    def server_gates(
        self, thresholds: Tensors, logits: Tensors, norms: Tensors, opened: Tensors, state: Tensors
    ) -> tuple[Tensors, Tensors]:
        """A step of the server's thresholds towards the share of clients whose gates were open.

        Args:
            thresholds: before the step, by layer, [groups].
            logits: of the gates before the step, by layer.
            norms: of the weights after the step of the round, by layer.
            opened: z̄, by layer.
            state: of the optimizer.

        Returns:
            Thresholds and state after it.
        """
        theta = {layer: torch.sigmoid(level) for layer, level in logits.items()}
        rate = self._rate("server_gate_lr")
        if self.scale == "logits":
            means = {
                layer: torch.lerp(old, opened[layer].to(old.dtype), rate)
                for layer, old in theta.items()
            }
            return {n: self.gates_of(norms[n], mean) for n, mean in means.items()}, state
        slopes = {
            layer: (opened[layer] - theta[layer]) * torch.sigmoid(v) / self.heat
            for layer, v in thresholds.items()
        }
        return optimizers.step(
            lambda leaves: torch.optim.Adamax(leaves, lr=rate), thresholds, slopes, state
        )

    def gates_of(self, norms: Tensor, probability: Tensor) -> Tensor:
        """The thresholds of gates with these norms and probabilities, as far as the scale lets
        gates be sure, [groups].
        """
        level = torch.logit(probability, eps=1e-6)
        if self.scale == "logits":
            level = level.clamp_max(log(self.start / (1 - self.start)))
        return self.gate_thresholds(norms, level)
