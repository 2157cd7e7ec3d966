"""When clients are there: spells that come again with a period."""

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedbayes.errors import ConfigError

Times = NDArray[np.float64]

_STEPS = 100
"""Moments that a clock tells apart in the shortest spell, at least."""


class Availability(Protocol):
    """When clients can start, and work."""

    def here(self, client: int, time: float) -> bool:
        """Whether a client is there."""

    def comes(self, client: int, time: float) -> float:
        """The first moment from `time` on at which a client is there."""

    def ends(self, client: int, start: float, work: float) -> float:
        """When a client has worked so many seconds that starts at a moment at which it is there;
        whenever it is away it rests.
        """


class Always:
    """Clients that are always there."""

    def here(self, client: int, time: float) -> bool:
        """It is."""
        return True

    def comes(self, client: int, time: float) -> float:
        """At once."""
        return time

    def ends(self, client: int, start: float, work: float) -> float:
        """Without a rest."""
        return start + work


class Spells:
    """Clients that are there for spells of every period.

    Args:
        period: seconds after which spells come again.
        of: a client's spells in a period, float64 [n, 2] of starts and stops, ascending and apart,
            in [0, period].
        shortest: seconds of the shortest of all spells.

    A time at which numbers are too coarse to tell when a spell ends is a ConfigError, here and in
    all that takes a time.
    """

    def __init__(self, period: float, of: Callable[[int], Times], shortest: float) -> None:
        self._period, self._of, self._shortest = period, of, shortest
        self._begun(period)

    def here(self, client: int, time: float) -> bool:
        """Whether one of its spells holds this moment; not its very end."""
        return self.comes(client, time) == time

    def comes(self, client: int, time: float) -> float:
        """Where the spell begins that comes next, or now."""
        spells, begun = self._of(client), self._begun(time)
        ahead = spells[begun + spells[:, 1] > time]
        if len(ahead):
            return max(time, float(begun + ahead[0, 0]))
        return max(time, float(begun + self._period + spells[0, 0]))

    def ends(self, client: int, start: float, work: float) -> float:
        """The end of the work, spell by spell; whole periods at once."""
        spells, begun = self._of(client), self._begun(start)
        left = work
        for first, last in (begun + spells).tolist():
            if last > start:
                first = max(first, start)
                if left <= last - first:
                    return float(first + left)
                left -= last - first
        lengths = spells[:, 1] - spells[:, 0]
        each = float(lengths.sum())
        whole = max(0, int(np.ceil(left / each)) - 1)
        left -= whole * each
        begun += (1 + whole) * self._period
        done = lengths.cumsum()
        place = min(int(np.searchsorted(done, left)), len(done) - 1)
        return float(begun + spells[place, 1] - (done[place] - left))

    def _begun(self, time: float) -> float:
        """Where the period began that holds this moment."""
        if _STEPS * math.ulp(time) > self._shortest:
            raise ConfigError(
                f"after {time:g} seconds the clock cannot resolve a spell of {self._shortest:g} "
                "seconds. Set shorter clock.seconds, or a longer clock.period or clock.available"
            )
        return float(np.floor(time / self._period) * self._period)


def shares(period: float, available: float, phases: Times) -> Spells:
    """One spell for each client in every period.

    Args:
        period: seconds.
        available: a spell's length, as a share of the period.
        phases: where spells begin, in [0, period), float64 [S].
    """
    length = available * period

    def of(client: int) -> Times:
        first = float(phases[client])
        last = first + length
        if last <= period:
            return np.array([[first, last]])
        return np.array([[0.0, last - period], [first, period]])

    return Spells(period, of, length)


def listed(period: float, spells: Mapping[int, Times]) -> Spells:
    """The spells of a list, by client."""
    shortest = min(float(np.diff(each).min()) for each in spells.values())
    return Spells(period, spells.__getitem__, shortest)
