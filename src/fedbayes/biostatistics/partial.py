"""Cox's partial likelihood from sums over risk sets, with ties after Breslow or Efron."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedbayes.biostatistics.exchange import Array
from fedbayes.biostatistics.newton import unpacked

_PIECE = 1 << 12
"""Events whose matrices are held at once."""


@dataclass(frozen=True)
class Counts:
    """What happens at each of K event times."""

    events: Array
    """Events, by weight [K]."""
    rows: Array
    """In how many rows [K]."""


@dataclass(frozen=True)
class _Terms:
    """Terms of the log-likelihood, of at most `_PIECE` rows with events."""

    time: NDArray[np.int64]
    """Entry of the event times of each [m]."""
    share: Array
    """l / d: how many of the d rows with an event at this time come before [m]."""
    weight: Array
    """Mean weight of the events at this time [m]."""
    sums: Array
    """A_l: S less the share of D [m, q]."""


def _terms(counts: Counts, tied: Array, risk: Array, ties: Array) -> Iterator[_Terms]:
    repeats = counts.rows.astype(np.int64)
    time = np.repeat(np.arange(len(repeats)), repeats)
    rank = np.arange(len(time)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    place = np.full(len(repeats), -1)
    place[tied.astype(np.int64)] = np.arange(len(tied))
    for start in range(0, len(time), _PIECE):
        k, rest = time[start : start + _PIECE], rank[start : start + _PIECE]
        share = np.where(place[k] >= 0, rest / counts.rows[k], 0.0)
        sums = risk[k]
        mine = place[k] >= 0
        if mine.any():
            sums[mine] -= share[mine][:, None] * ties[place[k[mine]]]
        yield _Terms(np.asarray(k, np.int64), share, counts.events[k] / counts.rows[k], sums)


def partial_likelihood(
    at: Array, counts: Counts, tied: Array, risk: Array, ties: Array, events: Array
) -> tuple[float, Array, Array]:
    """Log-likelihood, gradient [p] and negative Hessian [p, p].

    The log-likelihood is that of Efron (1977):

        log L = Σ_events w xβ − Σ_times w̄ Σ_l log A⁰_l,    A_l = S − (l / d) D,  l = 0 … d − 1.

    - S holds Σ w r, Σ w r x and Σ w r x xᵀ over the rows at risk at an event time.
    - D holds the same sums over the d rows with an event at that time; Breslow (1974) has D = 0.
    - w̄ is the mean weight of these d rows.

    Args:
        at: coefficients [p].
        counts: events at each of K times.
        tied: entries of the times with sums in `ties` [T].
        risk: S [K, q], as `tell_risk_sets` gives them.
        ties: D [T, q].
        events: Σ w xβ and Σ w x over all events [1 + p].
    """
    p = len(at)
    loglik, gradient, triangle = float(events[0]), events[1:].copy(), np.zeros(p * (p + 1) // 2)
    upper = np.triu_indices(p)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for each in _terms(counts, tied, risk, ties):
            sums, weight = each.sums, each.weight
            mean = sums[:, 1 : p + 1] / sums[:, :1]
            second = sums[:, p + 1 :] / sums[:, :1] - mean[:, upper[0]] * mean[:, upper[1]]
            loglik -= float((weight * np.log(sums[:, 0])).sum())
            gradient -= (weight[:, None] * mean).sum(axis=0)
            triangle += (weight[:, None] * second).sum(axis=0)
    return loglik, gradient, unpacked(triangle, p)


def score_terms(p: int, counts: Counts, tied: Array, risk: Array, ties: Array) -> dict[str, Array]:
    """What rows need to know of the K event times for their scores, the derivatives of the
    log-likelihood by their weights and the coefficients; x̄_l = A¹_l / A⁰_l.

    Returns:
        `hazard`, Σ_l w̄ / A⁰_l and Σ_l w̄ x̄_l / A⁰_l [K, 1 + p]; `shared`, the same with each term
        times l / d, which is what those are spared to whom it happens there; `mean`, the mean of
        the x̄_l [K, p].
    """
    size = len(counts.rows)
    hazard, shared, mean = np.zeros((size, 1 + p)), np.zeros((size, 1 + p)), np.zeros((size, p))
    for each in _terms(counts, tied, risk, ties):
        own = each.sums[:, 1 : p + 1] / each.sums[:, :1]
        rate = (each.weight / each.sums[:, 0])[:, None]
        terms = np.concatenate([rate, rate * own], axis=1)
        np.add.at(hazard, each.time, terms)
        np.add.at(shared, each.time, each.share[:, None] * terms)
        np.add.at(mean, each.time, own / counts.rows[each.time][:, None])
    return {"hazard": hazard, "shared": shared, "mean": mean}
