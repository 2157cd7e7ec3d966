"""Losses of training that let rare or hard classes count more; scores stay those of all samples."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedbayes.errors import ConfigError
from fedbayes.likelihoods.base import Classes, Likelihood
from fedbayes.likelihoods.categorical import Categorical

ClassWeights = Literal["none", "balanced"] | Sequence[float]
"""How much each class counts in training."""


def reweighted(
    likelihood: Likelihood, weights: ClassWeights, focal: float, y: Tensor
) -> Likelihood:
    """The likelihood whose `nll` is that of training on these samples.

    Args:
        likelihood: of the run.
        weights: none; balanced, n / (K n_k) for a class with n_k of the n samples, where K classes
            have any; or a number for each class.
        focal: γ ≥ 0: the loss of a sample is multiplied by (1 − p(y))^γ (Lin et al. 2017).
        y: classes of the client's training samples, int64 [n].

    Raises:
        ConfigError: it is not of classes, or they are of another number.
    """
    if weights == "none" and not focal:
        return likelihood
    require_reweightable(likelihood, weights)
    assert isinstance(likelihood, Classes)
    found: tuple[float, ...] = ()
    if weights == "balanced":
        counts = torch.bincount(y.cpu(), minlength=likelihood.target.classes).double()
        share = len(y) / (counts.clamp_min(1) * (counts > 0).sum().clamp_min(1))
        found = tuple(torch.where(counts > 0, share, 1.0).tolist())
    elif weights != "none":
        found = tuple(map(float, weights))
    return likelihood.reweighted(found, focal)


def require_reweightable(likelihood: Likelihood, weights: ClassWeights) -> None:
    """See that a likelihood has classes whose loss can be weighted.

    Raises:
        ConfigError: it has not, or there are other classes than weights.
    """
    key = "training.focal" if weights == "none" else "training.class_weights"
    if not isinstance(likelihood, Classes) or type(likelihood).nll not in (
        Classes.nll,
        Categorical.nll,
    ):
        raise ConfigError(
            f"{key} has no effect: the likelihood {likelihood.name} has no classes. Leave it out"
        )
    names = likelihood.target.names
    if not isinstance(weights, str) and len(weights) != len(names):
        raise ConfigError(
            f"training.class_weights has {len(weights)} numbers, but there are {len(names)} "
            f"classes: {', '.join(names[:10])}. Give one for each, in this order"
        )
