"""How long the rounds of a run take, and how long the rest will; light to import."""

import statistics
from dataclasses import replace

from fedbayes.storage.activity import EVALUATING, TRAINING, Activity

LONG = 5.0
"""Seconds of a round from which how far it is has a line of its own."""


class Pace:
    """How long the rounds of a run took in this process, and how long the rest will take.

    The rest of a round is reckoned from its clients that are done, every later round as the median
    of those that were seen.
    """

    def __init__(self, rounds: int, now: float) -> None:
        self._rounds, self._began, self._round_began, self._heard = rounds, now, now, now
        self._seen: list[float] = []
        self._answered = (0, 0)  # in which round how many had, when that was last more

    def heard(self, now: float) -> None:
        """Note that a client is done."""
        self._heard = now

    def noticed(self, activity: Activity, answered: int, now: float) -> Activity:
        """What a run is busy with, where clients have answered whose turn has not come.

        Args:
            activity: as the run tells it, client by client in the order of the cohort.
            answered: clients of the round that have answered.
            now: the time.
        """
        if activity.what != TRAINING or answered <= activity.done:
            return activity
        if (activity.round, answered) != self._answered:
            self._answered = activity.round, answered
            self.heard(now)
        return replace(activity, done=min(answered, activity.total))

    def round_ended(self, now: float) -> None:
        """Note that a round is complete."""
        self._seen.append(now - self._round_began)
        self._round_began = now

    def elapsed(self, now: float) -> float:
        """Seconds since the first round in this process began."""
        return now - self._began

    def is_long(self, now: float) -> bool:
        """Whether rounds take so long that one asks how far a single one is."""
        return max(now - self._round_began, self._usual or 0.0) >= LONG

    def left(self, now: float, activity: Activity) -> float | None:
        """Seconds until the last round ends; None while nothing tells."""
        rest, usual = self.left_of_round(now, activity), self._usual
        if rest is None:
            return None
        if usual is None and activity.total:
            usual = now - self._round_began + rest
        return None if usual is None else rest + (self._rounds - activity.round) * usual

    def left_of_round(self, now: float, activity: Activity) -> float | None:
        """Seconds until the round under way ends; None while nothing tells."""
        spent = now - self._round_began
        if not activity.total or activity.what == EVALUATING:
            return 0.0
        if activity.done:
            each = (self._heard - self._round_began) / activity.done
            return max(0.0, each * (activity.total - activity.done) - (now - self._heard))
        return None if self._usual is None else max(0.0, self._usual - spent)

    @property
    def _usual(self) -> float | None:
        """Seconds that a round takes; None before one was seen."""
        return statistics.median(self._seen) if self._seen else None
