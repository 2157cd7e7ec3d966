"""What a run is busy with, told while it goes; light to import, so that start-up can be shown."""

from collections.abc import Callable
from dataclasses import dataclass

TRAINING, EVALUATING = "training", "evaluating"
"""What a round consists of."""


@dataclass(frozen=True)
class Activity:
    """What a run is busy with at a moment."""

    what: str
    """In words: `loading mnist`; within a round TRAINING or EVALUATING."""
    round: int = 0
    """The round under way, from 1; 0 before the first."""
    done: int = 0
    """Clients of the round that are done."""
    total: int = 0
    """Clients in the round; 0 between two rounds."""


Notify = Callable[[Activity], object]
"""Called with what a run is busy with, often; it must be quick, and changes nothing."""


def unnoticed(activity: Activity) -> None:
    """Does nothing: for runs that nobody watches."""
