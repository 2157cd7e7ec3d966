"""Losses of samples that outliers move less than the negative log-likelihood."""

import math

import torch
from torch import Tensor

from fedbayes.likelihoods.base import Likelihood


def generalized_cross_entropy(likelihood: Likelihood, f: Tensor, y: Tensor, delta: float) -> Tensor:
    """(1 − p(y | f)^δ)/δ of each sample (Zhang & Sabuncu 2018, Eq. 6), [..., n].

    It is between 0 and 1/δ, tends to −log p as δ tends to 0, and is 1 − p where δ is 1.

    Args:
        likelihood: of classes.
        f: outputs [..., n, width].
        y: classes [n].
        delta: δ, above 0 and at most 1.
    """
    return -torch.expm1(delta * likelihood.log_prob(f, y)) / delta


def density_power(likelihood: Likelihood, f: Tensor, y: Tensor, beta: float) -> Tensor:
    """(1 − p(y | f)^b)/b + (∫ p(z | f)^(1+b) dz − 1)/(1 + b) of each sample, b = β − 1, [..., n].

    The loss of the β-divergence (Basu et al. 1998; Knoblauch et al. 2022) with constants that let
    it tend to −log p as β tends to 1. Densities are those of standardized targets, so that the loss
    does not depend on units.

    Args:
        likelihood: one with `log_power`.
        f: outputs [..., n, width].
        y: targets, [n] or [n, columns].
        beta: β, above 1.
    """
    power = beta - 1
    unit = sum(map(math.log, likelihood.target.scale)) if likelihood.target.kind == "real" else 0.0
    density = likelihood.log_prob(f, y) + unit
    whole = likelihood.log_power(f, beta) + power * unit
    return torch.expm1(whole) / beta - torch.expm1(power * density) / power


def has_density_power(likelihood: Likelihood) -> bool:
    """Whether a likelihood has the integral of a power of its density."""
    return type(likelihood).log_power is not Likelihood.log_power
