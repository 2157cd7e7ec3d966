"""Outcomes of generalized linear models with their canonical links.

With the canonical link the gradient of the log-likelihood is Σ w (y − μ) x. Its negative Hessian is
Σ w v(μ) x xᵀ. So Newton's method is iteratively reweighted least squares (McCullagh and Nelder
1989, section 2.5).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import expit, gammaln, xlogy

from fedbayes.biostatistics.exchange import Array

FamilyName = Literal["gaussian", "binomial", "poisson"]


@dataclass(frozen=True)
class Family:
    """A distribution of the outcome; every function takes and gives arrays [n]."""

    mean: Callable[[Array], Array]
    """μ of the linear predictor."""
    variance: Callable[[Array], Array]
    """v of μ, with a dispersion of 1."""
    loglik: Callable[[Array, Array], Array]
    """Of the outcome y and the linear predictor, with a dispersion of 1."""
    deviance: Callable[[Array, Array], Array]
    """Of y and the linear predictor, of which μ may round to 0 or 1."""
    link: Callable[[float], float]
    """The linear predictor of a mean."""
    ratio: str
    """What exp(coefficient) is called; empty where it is nothing."""


def _bernoulli(y: Array, eta: Array) -> Array:
    return np.asarray(y * eta - np.logaddexp(0.0, eta))


def _poisson(y: Array, eta: Array) -> Array:
    return np.asarray(y * eta - np.exp(eta) - gammaln(y + 1))


def _poisson_deviance(y: Array, eta: Array) -> Array:
    return np.asarray(2 * (xlogy(y, y) - y * eta - y + np.exp(eta)))


FAMILIES: dict[str, Family] = {
    "gaussian": Family(
        mean=lambda eta: eta,
        variance=np.ones_like,
        loglik=lambda y, eta: -((y - eta) ** 2) / 2,
        deviance=lambda y, eta: (y - eta) ** 2,
        link=lambda mu: mu,
        ratio="",
    ),
    "binomial": Family(
        mean=expit,
        variance=lambda mu: mu * (1 - mu),
        loglik=_bernoulli,
        deviance=lambda y, eta: -2 * _bernoulli(y, eta),
        link=lambda mu: float(np.log(mu / (1 - mu))),
        ratio="odds_ratio",
    ),
    "poisson": Family(
        mean=np.exp,
        variance=lambda mu: mu,
        loglik=_poisson,
        deviance=_poisson_deviance,
        link=lambda mu: float(np.log(mu)),
        ratio="rate_ratio",
    ),
}
"""Families by name, with the canonical link: identity, logit, logarithm."""
