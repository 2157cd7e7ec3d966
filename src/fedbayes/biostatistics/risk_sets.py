"""A client's sums over who is at risk at each event time, in one pass over sorted rows."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fedbayes.biostatistics.design import Design
from fedbayes.biostatistics.exchange import Array, Packet
from fedbayes.biostatistics.newton import packed
from fedbayes.biostatistics.partial import Counts, partial_likelihood, score_terms

Indices = NDArray[np.int64]

_PIECE = 1 << 14
"""Rows whose products are held at once."""


def tell_event_times(data: Design, groups: int) -> Packet:
    """A client's answer: its distinct event times, by group."""
    return Packet(
        numbers={
            str(group): np.unique(data.time[data.happened & (data.group == group)])
            for group in range(groups)
        }
    )


@dataclass(frozen=True)
class EventPlaces:
    """Where rows are among the event times; n rows, K times."""

    first: Indices
    """The first entry of a row's group [n]."""
    reach: Indices
    """Number of entries from there on that are not after its time [n]."""
    enter: Indices
    """Number of entries from there on that are not after its entry time: there it is not at risk
    yet [n]."""
    groups: Array
    """Group of each event time, rising [K]."""

    @property
    def last(self) -> Indices:
        """The last entry at which a row is at risk; of one with an event, that of the event [n]."""
        return self.first + self.reach - 1

    def cumulated(self, values: Array) -> Array:
        """Sums of what belongs to each event time [K, ...] over those at which a row is at risk
        [n, ...].
        """
        sums = np.concatenate([np.zeros_like(values[:1]), np.cumsum(values, axis=0)])
        return np.asarray(sums[self.first + self.reach] - sums[self.first + self.enter])


def places(data: Design, times: Array, groups: Array) -> EventPlaces:
    """Where the rows are among the event times.

    Args:
        data: the rows.
        times: event times [K], rising within each group.
        groups: group of each [K], rising.
    """
    starts = np.searchsorted(groups, np.arange(int(groups[-1]) + 2 if len(groups) else 1))
    first, reach, enter = (np.zeros(len(data.y), np.int64) for _ in range(3))
    for group, (start, stop) in enumerate(pairwise(starts)):
        mine = data.group == group
        reach[mine] = np.searchsorted(times[start:stop], data.time[mine], side="right")
        if data.entry is not None:
            enter[mine] = np.searchsorted(times[start:stop], data.entry[mine], side="right")
        first[mine] = start
    return EventPlaces(first, reach, enter, groups)


def tell_counts(data: Design, times: Array, groups: Array, *, rows: bool = False) -> Packet:
    """A client's answer: who is at risk and what happens at each event time [K], by weight.

    Args:
        data: its rows.
        times: event times [K], rising within each group.
        groups: group of each [K], rising.
        rows: whether it also says in how many rows it happens, whatever they weigh.
    """
    where = places(data, times, groups)
    at, weights = where.last[data.happened], data.weights[data.happened]
    numbers: dict[str, Array] = {
        # Where nobody is left, weights that came and went may leave a rounding below 0.
        "at_risk": np.maximum(_at_risk(data.weights[:, None], where)[:, 0], 0.0),
        "events": np.bincount(at, weights, minlength=len(times)).astype(np.float64),
    }
    if rows:
        numbers["rows"] = np.bincount(at, minlength=len(times)).astype(np.float64)
    return Packet(numbers=numbers)


def tell_risk_sets(data: Design, numbers: dict[str, Array]) -> Packet:
    """A client's answer for the partial likelihood at some coefficients.

    Args:
        data: its rows.
        numbers: coefficients `at` [p], `center` and `scale` of the columns [p], event `times` and
            their `groups` [K], and `tied`, the entries of them at which several events happen and
            ties are shared out after Efron.

    Returns:
        Sums by weight over who is at risk, `risk` [K, q], with q = 1 + p + p (p + 1) / 2: of
        r = exp(xβ), r x and r x xᵀ. The same of those to whom it happens at tied times, `ties`
        [T, q]. Σ xβ and Σ x over events, `events` [1 + p].
    """
    x = data.scaled(numbers["center"], numbers["scale"])
    times, groups = numbers["times"], numbers["groups"]
    where = places(data, times, groups)
    with np.errstate(over="ignore", invalid="ignore"):
        eta = x @ numbers["at"]
        rows = _Products(x, data.weights * np.exp(eta))
        happened = data.happened
        risk = _at_risk(rows, where)
        tied = numbers["tied"].astype(np.int64)
        place = np.full(len(times) + 1, -1)
        place[tied] = np.arange(len(tied))
        at = place[where.last]
        chosen = np.flatnonzero(happened & (at >= 0))
        ties = np.zeros((len(tied), rows.width))
        for piece in _pieces(chosen):
            np.add.at(ties, at[piece], rows.at(piece))
        weights = data.weights[happened]
        events = np.concatenate([[weights @ eta[happened]], weights @ x[happened]])
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


def _at_risk(rows: "_Products | Array", where: EventPlaces) -> Array:
    """At every event time, the sum of the rows that are at risk there [K, q]."""
    width = rows.width if isinstance(rows, _Products) else rows.shape[1]
    sums = np.zeros((len(where.groups), width))
    ends = ((1.0, where.reach), (-1.0, where.enter))
    for sign, reach in ends:
        for piece in _pieces(np.flatnonzero(reach > 0)):
            values = rows.at(piece) if isinstance(rows, _Products) else rows[piece]
            np.add.at(sums, (where.first + reach - 1)[piece], sign * values)
    edges = np.flatnonzero(np.diff(where.groups)) + 1
    for part in np.split(np.arange(len(where.groups)), edges):
        sums[part] = np.cumsum(sums[part][::-1], axis=0)[::-1]
    return sums


def tied_times(rows: Array, ties: str) -> Array:
    """Entries of the event times at which ties are shared out; none after Breslow.

    Args:
        rows: in how many rows it happens at each [K].
        ties: efron or breslow.
    """
    return np.flatnonzero(rows > 1 if ties == "efron" else rows < 0).astype(np.float64)


def tell_own_likelihood(data: Design, numbers: dict[str, Array], ties: str) -> Packet:
    """A client's answer where it is a stratum of its own: log-likelihood, gradient and Hessian of
    the partial likelihood of its rows alone.
    """
    mine, counts, found = _alone(data, numbers, ties)
    value, gradient, information = partial_likelihood(numbers["at"], counts, mine["tied"], **found)
    return Packet(
        numbers={
            "loglik": np.array([value]),
            "gradient": gradient,
            "hessian": packed(information),
            "events": np.array([counts.events.sum()]),
        }
    )


def _alone(
    data: Design, numbers: dict[str, Array], ties: str
) -> tuple[dict[str, Array], Counts, dict[str, Array]]:
    """A question, counts of events and sums over risk sets of these rows alone."""
    mine = dict(numbers)
    mine["times"] = np.unique(data.time[data.happened])
    mine["groups"] = np.zeros(len(mine["times"]))
    told = tell_counts(data, mine["times"], mine["groups"], rows=True).numbers
    mine["tied"] = tied_times(told["rows"], ties)
    counts = Counts(told["events"], told["rows"])
    return mine, counts, dict(tell_risk_sets(data, mine).numbers)


def tell_scores(data: Design, numbers: dict[str, Array]) -> Packet:
    """A client's answer for standard errors that hold whatever weights are: Σ w² u uᵀ over its
    rows, of their scores u [p (p + 1) / 2] (Lin and Wei 1989).

    Args:
        data: its rows.
        numbers: as for `tell_risk_sets`; and of the event times, what `score_terms` gives: `hazard`
            [K, 1 + p], `mean` [K, p] and `shared` [K, 1 + p].
    """
    x = data.scaled(numbers["center"], numbers["scale"])
    where = places(data, numbers["times"], numbers["groups"])
    r = np.exp(x @ numbers["at"])[:, None]
    sums = where.cumulated(numbers["hazard"])
    scores = -r * (x * sums[:, :1] - sums[:, 1:])
    at = where.last[data.happened]
    own, shared = x[data.happened], numbers["shared"][at]
    scores[data.happened] += own - numbers["mean"][at]
    scores[data.happened] += r[data.happened] * (own * shared[:, :1] - shared[:, 1:])
    scores = data.weights[:, None] * scores
    return Packet(numbers={"meat": packed(scores.T @ scores)})


def tell_own_scores(data: Design, numbers: dict[str, Array], ties: str) -> Packet:
    """The same where the client is a stratum of its own."""
    if not data.happened.any():
        return Packet(numbers={"meat": packed(np.zeros((len(numbers["at"]),) * 2))})
    mine, counts, found = _alone(data, numbers, ties)
    terms = score_terms(len(numbers["at"]), counts, mine["tied"], found["risk"], found["ties"])
    return tell_scores(data, {**mine, **terms})


def tell_influence(data: Design, numbers: dict[str, Array]) -> Packet:
    """A client's answer for standard errors of survival curves that hold whatever weights are:
    Σ w² φ² over its rows at each event time [K], where φ is what a row does to log S there (the
    infinitesimal jackknife).

    Args:
        data: its rows.
        numbers: event `times` and their `groups` [K], and all clients' `at_risk` and `events` [K].
    """
    times, groups = numbers["times"], numbers["groups"]
    at_risk, events = numbers["at_risk"], numbers["events"]
    where = places(data, times, groups)
    left = at_risk - events
    inverse = np.divide(1.0, left, out=np.zeros(len(left)), where=left > 1e-12 * at_risk)
    passed = np.cumsum(inverse * events / np.where(at_risk > 0, at_risk, 1.0))
    passed = np.concatenate([[0.0], passed])
    starts = np.searchsorted(groups, groups)
    until, happened, sums = np.arange(1, len(times) + 1), data.happened, np.zeros(len(times))
    for piece in np.array_split(
        np.arange(len(data.y)), 1 + len(data.y) * len(times) // (_PIECE * 64)
    ):
        begin, end = (where.first + where.enter)[piece], (where.first + where.reach)[piece]
        stop = np.clip(until[None], begin[:, None], np.maximum(end, begin)[:, None])
        shift = -(passed[stop] - passed[begin][:, None])
        at = where.last[piece]
        own = happened[piece][:, None] & (until[None] > at[:, None])
        shift += own * inverse[np.maximum(at, 0)][:, None]
        mine = (starts[None] == where.first[piece][:, None]) * data.weights[piece][:, None]
        sums += ((mine * shift) ** 2).sum(axis=0)
    return Packet(numbers={"variance": sums})
