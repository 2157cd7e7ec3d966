"""How long to wait before looking again."""

SHARE = 0.1
"""Of what was waited, how much longer it may become because nobody looks."""


def pause(waited: float, soonest: float, latest: float) -> float:
    """Seconds until the next look, after so many without anything: a tenth of them.

    So waiting takes at most a tenth longer than it must, or `soonest`, and of looks there are as
    many as the logarithm of the time, until they come every `latest`.
    """
    return min(max(soonest, SHARE * waited), latest)
