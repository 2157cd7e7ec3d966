"""How long the rounds of a run take, and how long the rest will; light to import."""

import statistics
from dataclasses import replace

from fedbayes.runs.activity import EVALUATING, TRAINING, Activity


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

    def left(self, now: float, activity: Activity) -> float | None:
        """Seconds until the last round ends; None while nothing tells."""
        usual = statistics.median(self._seen) if self._seen else None
        spent = now - self._round_began
        if not activity.total or activity.what == EVALUATING:
            rest = 0.0
        elif activity.done:
            each = (self._heard - self._round_began) / activity.done
            rest = max(0.0, each * (activity.total - activity.done) - (now - self._heard))
        elif usual is not None:
            rest = max(0.0, usual - spent)
        else:
            return None
        if usual is None and activity.total:
            usual = spent + rest
        return None if usual is None else rest + (self._rounds - activity.round) * usual
