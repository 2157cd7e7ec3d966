"""What a model says of each sample, column by column, for people and programs that read tables."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedbayes.core.metrics import uncertainty
from fedbayes.likelihoods.adaptive import row_coins
from fedbayes.likelihoods.base import Classes, Likelihood, finite
from fedbayes.likelihoods.conformal import Conformal
from fedbayes.likelihoods.numeric import Numeric, Parametric
from fedbayes.likelihoods.temperature import at_temperature, cooled

Answers = dict[str, npt.NDArray[Any]]
"""Columns by name, [n] each."""


@torch.no_grad()
def answers(
    likelihood: Likelihood,
    draws: Tensor,
    level: float | None = None,
    conformal: Conformal | None = None,
    start: int = 0,
    temperature: float | None = None,
) -> Answers:
    """Return the predictions of draws of a model, as columns.

    - Classes have `p_CLASS`, the probability of each, and `predicted`, the most probable class.
    - Labels have `p_LABEL`, the probability of each.
    - Times of events have `risk`, the relative log-risk.
    - Numbers have `mean`, and with a level `low` and `high`, the ends of the central interval.
      Several target columns have `mean_NAME` and so on.

    Several draws add columns for uncertainty:

    - Probabilities have `std_NAME`, their standard deviation between draws.
    - They also have, in nats, `entropy`, the total uncertainty, and `mutual_information`, the part
      that more data would remove. Labels have both for each label, by name.
    - Numbers have `std`, the standard deviation of the prediction, and `std_between`, the part
      between draws.

    A conformal threshold adds `set` for classes: a tuple of names, most probable first, that holds
    the true class with the probability of the level. For numbers, `low` and `high` are then the
    ends of the conformal interval.

    Args:
        likelihood: what the outputs mean.
        draws: outputs under draws from a posterior, [draws, n, width].
        level: probability that a number is in its interval, above 0 and below 1; None for none.
        conformal: a threshold of this model, if there is one; its level counts.
        start: number of samples before these, if they are a part of many. It decides the random
            numbers of `adaptive-random` sets.
        temperature: of the probabilities of classes or labels, if they are calibrated. It does not
            change sets, nor the columns for uncertainty.

    Returns:
        The columns in this order: float32 for probabilities, float64 for numbers. Where an output
        is not finite, values are NaN, nothing is predicted, and the set holds all classes. The
        exception is −∞ for some classes if others are finite: it rules these classes out.

    Raises:
        ConfigError: the level is invalid, or the likelihood has no interval of it.

    Examples:
        >>> import torch
        >>> from fedbayes.core.targets import Target
        >>> from fedbayes.likelihoods import build_likelihood
        >>> from fedbayes.likelihoods.answers import answers
        >>> likelihood = build_likelihood("auto", Target("class", ("no", "yes")))
        >>> answers(likelihood, torch.zeros(1, 2, 2))["p_yes"]
        array([0.5, 0.5], dtype=float32)
    """
    several = len(draws) > 1
    match likelihood:
        case Classes():
            found = _classes(likelihood, draws, several, temperature)
            if conformal is not None:
                found["set"] = _sets(likelihood, draws, conformal, start)
        case Numeric():
            interval = None
            if conformal is not None:
                interval = conformal.interval(likelihood, draws)
            elif level is not None:
                interval = likelihood.interval(draws.double(), level)
            found = _numbers(likelihood, draws.double(), interval, several)
        case _ if likelihood.target.kind == "labels":
            found = _labels(likelihood, draws, several, temperature)
        case _ if likelihood.target.kind == "survival":
            found = {"risk": _array(likelihood.mean(draws.double())[:, 0])}
        case _:
            found = number_columns({"mean": likelihood.mean(draws)}, likelihood.target.names)
    broken = ~_told(likelihood, draws).cpu().numpy()
    if broken.any():
        for name, column in found.items():
            if name != "set":
                column[broken] = "" if name == "predicted" else np.nan
    return found


def _told(likelihood: Likelihood, draws: Tensor) -> Tensor:
    """Samples of which something is predicted, bool [n]."""
    return likelihood.told(draws) if isinstance(likelihood, Classes) else finite(draws)


def _classes(
    likelihood: Classes, draws: Tensor, several: bool, temperature: float | None
) -> Answers:
    names = likelihood.target.names
    each = likelihood.normalized(draws)
    logs = likelihood.log_probabilities(draws)
    p = probabilities(likelihood, draws, temperature)
    found = _by_name("p_", names, p)
    found["predicted"] = np.array(names, object)[logs.argmax(dim=-1).cpu().numpy()]
    if several:
        found |= _by_name("std_", names, each.exp().std(dim=0, correction=0))
        unknown = uncertainty(each)
        found["entropy"] = _array(unknown.entropy)
        found["mutual_information"] = _array(unknown.information)
    return found


def probabilities(likelihood: Likelihood, draws: Tensor, temperature: float | None) -> Tensor:
    """Mean probabilities of classes or labels [n, names], at a temperature if there is one."""
    if temperature is None:
        return likelihood.mean(draws)
    if isinstance(likelihood, Classes):
        p = cooled(likelihood.log_probabilities(draws.double()), temperature).exp()
    else:
        p = likelihood.mean(at_temperature(likelihood, draws.double(), temperature))
    return p.to(draws.dtype)


def _labels(
    likelihood: Likelihood, draws: Tensor, several: bool, temperature: float | None
) -> Answers:
    names = likelihood.target.names
    found = _by_name("p_", names, probabilities(likelihood, draws, temperature))
    if several:
        each = torch.stack([likelihood.mean(draw[None]) for draw in draws])
        found |= _by_name("std_", names, each.std(dim=0, correction=0))
        coins = torch.stack([each, 1 - each], dim=-1).log()
        unknown = uncertainty(coins.flatten(1, 2))
        shape = each.shape[1:]
        found |= _by_name("entropy_", names, unknown.entropy.reshape(shape))
        found |= _by_name("mutual_information_", names, unknown.information.reshape(shape))
    return found


def _sets(likelihood: Classes, draws: Tensor, conformal: Conformal, start: int) -> npt.NDArray[Any]:
    """The names of the classes in each set, most probable first."""
    coins = row_coins(start, draws.shape[1]) if conformal.score == "adaptive-random" else None
    inside = conformal.sets(likelihood, draws, coins) | ~likelihood.told(draws)[:, None]
    order = likelihood.log_probabilities(draws).argsort(dim=-1, descending=True, stable=True)
    listed = torch.where(inside.gather(1, order), order, -1)
    distinct, which = torch.unique(listed, dim=0, return_inverse=True)
    sets = np.empty(len(distinct), object)
    for place, row in enumerate(distinct.tolist()):
        sets[place] = tuple(likelihood.target.names[k] for k in row if k >= 0)
    return np.asarray(sets[which.cpu().numpy()])


def _numbers(
    likelihood: Numeric, draws: Tensor, interval: tuple[Tensor, Tensor] | None, several: bool
) -> Answers:
    found = {"mean": likelihood.mean(draws)}
    if interval is not None:
        found["low"], found["high"] = interval
    if several and isinstance(likelihood, Parametric):
        found["std"], found["std_between"] = likelihood.std(draws)
    return number_columns(found, likelihood.target.names)


def number_columns(found: Mapping[str, Tensor], names: Sequence[str]) -> Answers:
    """What is known of target columns, [n, columns] by kind, as columns by name.

    Args:
        found: such as the means, by `mean`.
        names: of the target columns; a single one is not named.
    """
    columns: Answers = {}
    for kind, values in found.items():
        columns |= _by_name(f"{kind}_", names, values) if len(names) > 1 else {}
        if len(names) == 1:
            columns[kind] = _array(values[:, 0])
    return columns


def _by_name(prefix: str, names: Sequence[str], values: Tensor) -> Answers:
    """Columns of [n, names]."""
    return {f"{prefix}{name}": _array(values[:, k]) for k, name in enumerate(names)}


def _array(values: Tensor) -> npt.NDArray[Any]:
    return values.cpu().numpy().copy()
