"""Gates: binary variables with a relaxation that gradients pass through.

A gate z ~ Bernoulli(π) is given by its logit ℓ = logit π. In training it is replaced by a
hard-concrete variable (Louizos et al. 2018), which is 0 or 1 with positive probability and
smooth between: s = sigmoid((logit u + ℓ)/temperature) with u uniform, stretched to (γ, ζ) and
clamped to [0, 1].
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

LOW, HIGH = -0.1, 1.1
"""γ and ζ, the limits that the relaxation is stretched to."""


def logits(norms: Tensor, thresholds: Tensor, temperature: float) -> Tensor:
    """ℓ_g = (‖w_g‖₂ − softplus(v_g)) / T, the logit of Eq. 23 of the EM paper, [groups]."""
    return (norms - functional.softplus(thresholds)) / temperature


def thresholds(norms: Tensor, logits: Tensor, temperature: float) -> Tensor:
    """The v_g of gates with these logits, as far as positive thresholds can, [groups]."""
    tau = (norms - temperature * logits).clamp_min(torch.finfo(norms.dtype).eps)
    return tau + torch.log(-torch.expm1(-tau))


def relaxed(logits: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """Hard-concrete samples with these logits, from uniform noise of the same shape."""
    soft = torch.sigmoid((torch.logit(noise, eps=1e-6) + logits) / temperature)
    return (soft * (HIGH - LOW) + LOW).clamp(0.0, 1.0)


def open_probability(logits: Tensor, temperature: float) -> Tensor:
    """P(z > 0) of the hard-concrete variable."""
    return torch.sigmoid(logits - temperature * math.log(-LOW / HIGH))


def cross_entropy(probability: Tensor, logits: Tensor) -> Tensor:
    """−π log θ − (1 − π) log(1 − θ) of Bernoulli(π) under θ = sigmoid(logits), per gate."""
    closed = 1 - probability
    return -(probability * functional.logsigmoid(logits) + closed * functional.logsigmoid(-logits))
