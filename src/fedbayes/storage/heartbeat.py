"""What a run is busy with, in a small file of its folder while it goes: for `report --watch`.

The file is replaced once a second by a thread of its own, so rounds never wait for it, and is
removed when the process ends. The age of the file shows whether a killed process left it.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakMethod

from pydantic import TypeAdapter, ValidationError

from fedbayes.core.files import read_bytes, write_beside
from fedbayes.storage.activity import Activity
from fedbayes.storage.pace import Pace

ACTIVITY_FILE = "activity.json"
"""In the folder of a run that goes on."""
BEAT = 1.0
"""Seconds between two beats."""
MOST_NAMES = 50
"""Largest number of clients that it names; of more, it has the number."""


@dataclass(frozen=True)
class Work:
    """What goes on at the clients, by their names."""

    working: tuple[str, ...] = ()
    """Clients at work, `MOST_NAMES` at most."""
    working_total: int = 0
    """How many are at work."""
    away: Mapping[str, str] = field(default_factory=dict)
    """Clients that cannot be reached, and why, `MOST_NAMES` at most."""
    away_total: int = 0
    """How many cannot be reached."""
    answered: int = 0
    """Clients of the round that have answered, also those whose turn has not come."""


@dataclass(frozen=True)
class Pulse:
    """A run at a moment."""

    process: int
    """Number of the process that runs it."""
    host: str
    """Where that is."""
    written: float
    """When this was true, in seconds since 1970."""
    what: str
    """What it is busy with, in words."""
    round: int
    """The round under way, from 1; 0 before the first."""
    rounds: int
    """Rounds that are planned."""
    done: int
    """Clients of the round that are done."""
    cohort: int
    """Clients in the round; 0 between two rounds."""
    elapsed: float
    """Seconds since this process took the run up."""
    left: float | None
    """Seconds until the last round ends, as far as can be told."""
    work: Work


_FORM = TypeAdapter(Pulse)


class Heartbeat:
    """Writes what a run is busy with, until it is closed.

    Nothing depends on it: where the file cannot be written, the run goes on without.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / ACTIVITY_FILE
        # What follows is replaced, never changed: another thread reads it at any moment.
        self._activity = Activity("starting")
        self._pace: Pace | None = None
        self._rounds = 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def notify(self, activity: Activity) -> None:
        """Take note of what the run is busy with."""
        self._activity = activity
        if self._pace is not None:
            self._pace.heard(time.monotonic())

    def begin(self, rounds: int, work: Callable[[], Work]) -> None:
        """Start to write, once the run folder is this process's own.

        Args:
            rounds: that are planned.
            work: a bound method that tells what goes on at the clients; when its object is gone,
                the writing ends.
        """
        self._rounds, self._pace = rounds, Pace(rounds, time.monotonic())
        told, file, over = WeakMethod(work), self._file, self._over

        def beat() -> None:
            while (tell := told()) is not None:
                pulse = self._pulse(tell())
                del tell  # nothing is kept alive by being watched
                with suppress(OSError):
                    write_beside(file, _FORM.dump_json(pulse))
                if over.wait(BEAT):
                    return

        self._thread = threading.Thread(target=beat, daemon=True, name="fedbayes-heartbeat")
        self._thread.start()

    def round_ended(self) -> None:
        """Note that a round is complete."""
        if self._pace is not None:
            self._pace.round_ended(time.monotonic())

    def close(self) -> None:
        """Stop, and remove the file; for who has the lock of the run."""
        if self._thread is None:
            return
        self._over.set()
        self._thread.join()
        self._thread = None
        with suppress(OSError):
            self._file.unlink(missing_ok=True)

    def _pulse(self, work: Work) -> Pulse:
        now, pace = time.monotonic(), self._pace
        assert pace is not None
        activity = pace.noticed(self._activity, work.answered, now)
        return Pulse(
            process=os.getpid(),
            host=socket.gethostname(),
            written=time.time(),
            what=activity.what,
            round=activity.round,
            rounds=self._rounds,
            done=activity.done,
            cohort=activity.total,
            elapsed=pace.elapsed(now),
            left=pace.left(now, activity),
            work=work,
        )


def read_pulse(folder: Path) -> Pulse | None:
    """What the run in a folder is, or was last, busy with.

    None where no process is at work on it, or its file is none of ours.
    """
    try:
        return _FORM.validate_json(read_bytes(folder / ACTIVITY_FILE))
    except (OSError, ValidationError):
        return None
