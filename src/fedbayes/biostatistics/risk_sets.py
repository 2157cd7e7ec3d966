"""A client's sums over who is at risk at each event time, in one pass over sorted rows."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fedbayes.biostatistics.design import Design
from fedbayes.biostatistics.exchange import Array, Packet
from fedbayes.biostatistics.newton import packed
from fedbayes.biostatistics.partial import partial_likelihood

Indices = NDArray[np.int64]

_PIECE = 1 << 14
"""Rows whose products are held at once."""


def tell_event_times(data: Design, groups: int) -> Packet:
    """A client's answer: its distinct event times, by group."""
    return Packet(
        numbers={
            str(group): np.unique(data.time[(data.y > 0) & (data.group == group)])
            for group in range(groups)
        }
    )


def places(data: Design, times: Array, groups: Array) -> tuple[Indices, Indices]:
    """Where the rows are among the event times.

    Args:
        data: the rows.
        times: event times [K], rising within each group.
        groups: group of each [K], rising.

    Returns:
        For each row the number of entries of `times`, from the first of its group on, at which it
        is at risk [n], and the first entry of its group [n], both int.
    """
    starts = np.searchsorted(groups, np.arange(int(groups[-1]) + 2 if len(groups) else 1))
    reach = np.zeros(len(data.y), np.int64)
    first = np.zeros(len(data.y), np.int64)
    for group, (start, stop) in enumerate(pairwise(starts)):
        mine = data.group == group
        reach[mine] = np.searchsorted(times[start:stop], data.time[mine], side="right")
        first[mine] = start
    return reach, first


def tell_counts(data: Design, times: Array, groups: Array) -> Packet:
    """A client's answer: who is at risk and what happens at each event time [K]."""
    reach, first = places(data, times, groups)
    happened = data.y > 0
    events = np.bincount((first + reach - 1)[happened], minlength=len(times))
    return Packet(
        numbers={
            "at_risk": _from_right(np.ones((len(reach), 1)), reach, first, groups)[:, 0],
            "events": events.astype(np.float64),
        }
    )


def tell_risk_sets(data: Design, numbers: dict[str, Array]) -> Packet:
    """A client's answer for the partial likelihood at some coefficients.

    Args:
        data: its rows.
        numbers: coefficients `at` [p], `center` and `scale` of the columns [p], event `times` and
            their `groups` [K], and `tied`, the entries of them at which several events happen and
            ties are shared out after Efron.

    Returns:
        Sums over who is at risk, `risk` [K, q], with q = 1 + p + p (p + 1) / 2: of r = exp(xβ), r x
        and r x xᵀ. The same of those to whom it happens at tied times, `ties` [T, q]. Σ xβ and Σ x
        over events, `events` [1 + p].
    """
    x = data.scaled(numbers["center"], numbers["scale"])
    times, groups = numbers["times"], numbers["groups"]
    reach, first = places(data, times, groups)
    with np.errstate(over="ignore", invalid="ignore"):
        eta = x @ numbers["at"]
        rows = _Products(x, np.exp(eta))
        happened = data.y > 0
        risk = _from_right(rows, reach, first, groups)
        tied = numbers["tied"].astype(np.int64)
        place = np.full(len(times) + 1, -1)
        place[tied] = np.arange(len(tied))
        where = place[first + reach - 1]
        chosen = np.flatnonzero(happened & (where >= 0))
        ties = np.zeros((len(tied), rows.width))
        for piece in _pieces(chosen):
            np.add.at(ties, where[piece], rows.at(piece))
        events = np.concatenate([[eta[happened].sum()], x[happened].sum(axis=0)])
    return Packet(numbers={"risk": risk, "ties": ties, "events": events})


class _Products:
    """Rows [n, q] of r, r x and r x xᵀ, made as they are asked for."""

    def __init__(self, x: Array, r: Array) -> None:
        self._x, self._r = x, r
        self._upper = np.triu_indices(x.shape[1])
        self.width = 1 + x.shape[1] + len(self._upper[0])

    def at(self, rows: Indices) -> Array:
        x, r = self._x[rows], self._r[rows][:, None]
        return np.concatenate([r, r * x, r * x[:, self._upper[0]] * x[:, self._upper[1]]], axis=1)

    def __len__(self) -> int:
        return len(self._x)


def _pieces(rows: Indices) -> list[Indices]:
    return [rows[start : start + _PIECE] for start in range(0, len(rows), _PIECE)]


def _from_right(rows: "_Products | Array", reach: Indices, first: Indices, groups: Array) -> Array:
    """At every entry of the event times, the sum of the rows that reach it [K, q]."""
    width = rows.width if isinstance(rows, _Products) else rows.shape[1]
    sums = np.zeros((len(groups), width))
    for piece in _pieces(np.flatnonzero(reach > 0)):
        values = rows.at(piece) if isinstance(rows, _Products) else rows[piece]
        np.add.at(sums, (first + reach - 1)[piece], values)
    edges = np.flatnonzero(np.diff(groups)) + 1
    for part in np.split(np.arange(len(groups)), edges):
        sums[part] = np.cumsum(sums[part][::-1], axis=0)[::-1]
    return sums


def tied_times(events: Array, ties: str) -> Array:
    """Entries of the event times [K] at which ties are shared out; none after Breslow."""
    return np.flatnonzero(events > 1 if ties == "efron" else events < 0).astype(np.float64)


def tell_own_likelihood(data: Design, numbers: dict[str, Array], ties: str) -> Packet:
    """A client's answer where it is a stratum of its own: log-likelihood, gradient and Hessian of
    the partial likelihood of its rows alone.
    """
    mine = dict(numbers)
    mine["times"] = np.unique(data.time[data.y > 0])
    mine["groups"] = np.zeros(len(mine["times"]))
    counts = tell_counts(data, mine["times"], mine["groups"]).numbers["events"]
    mine["tied"] = tied_times(counts, ties)
    found = tell_risk_sets(data, mine).numbers
    value, gradient, information = partial_likelihood(
        numbers["at"], counts, mine["tied"], found["risk"], found["ties"], found["events"]
    )
    return Packet(
        numbers={
            "loglik": np.array([value]),
            "gradient": gradient,
            "hessian": packed(information),
            "events": np.array([counts.sum()]),
        }
    )
