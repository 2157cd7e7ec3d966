"""From log-risks to probabilities of survival: baseline hazards by sums over clients.

The partial likelihood says nothing of when events happen. Breslow's estimate (1974) of the
cumulative baseline hazard adds, at every time at which events happen, their number over the sum of
exp(log-risk) of all who are at risk then; both are sums over clients.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedbayes.core.plausible import LARGEST, check_count
from fedbayes.errors import ConfigError, DataError, ModelError

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Hazards:
    """The cumulative hazard of a sample of log-risk 0, a step function."""

    times: tuple[float, ...]
    """At which events happened [K], rising."""
    cumulative: tuple[float, ...]
    """From each of them on [K]."""
    last: float
    """The longest time that a row was observed for: of later ones nothing is known."""
    events: int
    rows: int

    def __post_init__(self) -> None:
        """See that the numbers are possible."""
        times, hazards = np.array(self.times), np.array(self.cumulative)
        sound = len(times) == len(hazards) > 0 and np.isfinite([*times, *hazards]).all()
        if not sound or (np.diff(times) <= 0).any() or (np.diff(hazards, prepend=0) < 0).any():
            raise ValueError("times and hazards are not a cumulative hazard")
        if not (math.isfinite(self.last) and self.last >= self.times[-1]):
            raise ValueError("the last time is before the time of an event")

    def at(self, times: Sequence[float] | Array) -> Array:
        """The cumulative baseline hazard at some times, float64 of their shape."""
        steps = np.array([0.0, *self.cumulative])
        return np.asarray(steps[np.searchsorted(self.times, times, side="right")], np.float64)

    def survival(self, risk: Array, times: Sequence[float]) -> Array:
        """Probability that the event has not happened by each time, float64 [n, times].

        Args:
            risk: log-risks [n].
            times: up to `last`.
        """
        with np.errstate(over="ignore"):
            rates = np.exp(np.asarray(risk, np.float64))[:, None]
            return np.asarray(np.exp(-np.where(self.at(times) > 0, self.at(times) * rates, 0.0)))

    def require(self, times: Sequence[float], source: str) -> None:
        """See that something is known of these times.

        Raises:
            ConfigError: one is negative, no number, or later than any row was observed.
        """
        for time in times:
            if not 0 <= time <= self.last:
                raise ConfigError(
                    f"{time:g} cannot predict the time {time:g}: the longest observation was "
                    f"{self.last:g}. Choose times from 0 to that"
                )


def event_counts(y: Array) -> tuple[Array, Array]:
    """A client's distinct times of events [K], and how many there are at each [K].

    Args:
        y: times and events of its rows [n, 2].
    """
    times, counts = np.unique(y[y[:, 1] > 0.5, 0], return_counts=True)
    return times.astype(np.float64), counts.astype(np.float64)


def at_risk(risk: Array, y: Array, times: Array) -> Array:
    """A client's sums of exp(log-risk) of its rows that are at risk at each time, float64 [K].

    Args:
        risk: log-risks of its rows [n].
        y: times and events of its rows [n, 2].
        times: of events of all clients [K].

    Raises:
        ModelError: a log-risk is so large that the sum is not finite.
    """
    order = np.argsort(y[:, 0], kind="stable")
    with np.errstate(over="ignore"):
        rates = np.exp(np.asarray(risk, np.float64)[order])
    sums = np.append(np.cumsum(rates[::-1])[::-1], 0.0)
    if not np.isfinite(sums).all():
        raise ModelError(
            "log-risks are not finite, or so large that their exponentials have no sum; the "
            "model has diverged. Train it again with a smaller training.lr"
        )
    return np.asarray(sums[np.searchsorted(y[order, 0], times, side="left")])


def check_events(times: Array, counts: Array, rows: int, where: str) -> None:
    """Check that a client's events match its rows: increasing times, and at most its number of
    rows, or raise a DataError.

    Args:
        times: distinct times of events [K].
        counts: how many there are at each [K].
        rows: that the client says it has.
        where: the client, for errors.
    """
    check_count(rows, "the number of rows", where)
    if times.shape != counts.shape or not (np.abs([*times, *counts]) <= LARGEST).all():
        raise DataError(f"{where}: its times of events are not finite in float32, or lack counts")
    if (np.diff(times) <= 0).any() or (times < 0).any():
        raise DataError(f"{where}: its times of events do not increase from 0")
    if (counts < 1).any() or (counts % 1 != 0).any() or counts.sum() > rows:
        raise DataError(f"{where}: its numbers of events do not match {rows:,} rows")


def check_at_risk(sums: Array, where: str) -> None:
    """See that sums [K] over who is at risk fall with time, or raise a DataError."""
    if not (np.abs(sums) <= LARGEST).all():
        raise DataError(f"{where}: its sums over rows at risk are not finite in float32")
    if (sums < 0).any() or (np.diff(sums) > 1e-9 * sums[:-1]).any():
        raise DataError(f"{where}: its sums over rows at risk are negative, or increase with time")


def breslow(times: Array, events: Array, sums: Array, *, last: float, rows: int) -> Hazards:
    """Breslow's estimate.

    Args:
        times: of events of all clients [K], rising.
        events: at each of them, of all clients [K].
        sums: of exp(log-risk) of all who are at risk then [K].
        last: the longest time that a row was observed for.
        rows: of all clients.
    """
    cumulative = np.cumsum(events / sums)
    return Hazards(tuple(times), tuple(cumulative), last, int(events.sum()), rows)
