"""Cox's partial likelihood from sums over risk sets, with ties after Breslow or Efron."""

import numpy as np

from fedbayes.biostatistics.exchange import Array
from fedbayes.biostatistics.newton import unpacked

_PIECE = 1 << 12
"""Events whose matrices are held at once."""


def partial_likelihood(
    at: Array, counts: Array, tied: Array, risk: Array, ties: Array, events: Array
) -> tuple[float, Array, Array]:
    """Log-likelihood, gradient [p] and negative Hessian [p, p].

    With S = Σ r, r x, r x xᵀ over who is at risk at an event time, D the same over the d to whom it
    happens there, and A_l = S − (l / d) D for l = 0 … d − 1 (Efron 1977; Breslow 1974 has D = 0),

        log L = Σ_events xβ − Σ_times Σ_l log A⁰_l.

    Args:
        at: coefficients [p].
        counts: events at each of K times [K].
        tied: entries of the times with sums in `ties` [T].
        risk: S [K, q], as `tell_risk_sets` gives them.
        ties: D [T, q].
        events: Σ xβ and Σ x over all events [1 + p].
    """
    p = len(at)
    loglik, gradient, triangle = float(events[0]), events[1:].copy(), np.zeros(p * (p + 1) // 2)
    repeats = counts.astype(np.int64)
    time = np.repeat(np.arange(len(counts)), repeats)
    rank = np.arange(len(time)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    place = np.full(len(counts), -1)
    place[tied.astype(np.int64)] = np.arange(len(tied))
    upper = np.triu_indices(p)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for start in range(0, len(time), _PIECE):
            k, rest = time[start : start + _PIECE], rank[start : start + _PIECE]
            sums = risk[k]
            mine = place[k] >= 0
            if mine.any():
                share = (rest[mine] / counts[k[mine]])[:, None]
                sums[mine] -= share * ties[place[k[mine]]]
            mean = sums[:, 1 : p + 1] / sums[:, :1]
            second = sums[:, p + 1 :] / sums[:, :1]
            loglik -= float(np.log(sums[:, 0]).sum())
            gradient -= mean.sum(axis=0)
            triangle += (second - mean[:, upper[0]] * mean[:, upper[1]]).sum(axis=0)
    return loglik, gradient, unpacked(triangle, p)
