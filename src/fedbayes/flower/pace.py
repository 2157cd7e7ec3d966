"""How long to wait before looking again."""

SHARE = 0.2
"""Of what was waited, how much longer it may become because nobody looks."""


def pause(waited: float, soonest: float, latest: float) -> float:
    """Seconds until the next look, after so many without anything: a fifth of them.

    Who waits for the slowest of a round looks seldom, and the slowest, for whom the round waits, is
    asked again soon. The number of looks grows as the logarithm of the time, until they come every
    `latest`.

    Args:
        waited: seconds since something came.
        soonest: seconds between two looks, at least.
        latest: at most.
    """
    return min(max(soonest, SHARE * waited), latest)
