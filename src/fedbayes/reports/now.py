"""What a run is doing at the moment, in words, for the page that follows it."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbayes.federation.privacy.accounting import ADD_REMOVE, REPLACE
from fedbayes.reports.gather import Record
from fedbayes.storage.activity import TRAINING
from fedbayes.storage.folder import RunFolder
from fedbayes.storage.formatting import clock
from fedbayes.storage.heartbeat import Pulse

SILENT = 15.0
"""Seconds without a beat after which a run gives no sign of life."""
NAMED = 8
"""Clients at work, or away, that are named."""


@dataclass(frozen=True)
class Now:
    """A run at the moment."""

    label: str
    """Its name among the others."""
    state: str
    """`waiting` for it to begin, `running`, `silent`, `stopped` without an end, or `ended`."""
    line: str
    """What it is doing, in words."""
    rounds: tuple[int, int]
    """Rounds done, and rounds planned; 0 where that is not known."""
    clients: tuple[int, int]
    """Clients of the round that are done, and all of them; 0 where there is no round."""
    details: tuple[tuple[str, str], ...] = ()
    """More, as heading and text."""


def waiting(label: str, folder: Path) -> Now:
    """A run that has no folder yet, or nothing in it."""
    text = "waiting for the run to begin" if folder.exists() else f"there is no {folder} yet"
    return Now(label, "waiting", text, (0, 0), (0, 0))


def now(record: Record, pulse: Pulse | None, age: float, trouble: str = "") -> Now:
    """What a run is doing.

    Args:
        record: what its folder tells.
        pulse: its last beat, if a process is at work on it, or was when it was killed.
        age: seconds since then.
        trouble: what keeps its folder from being read, if anything does.
    """
    planned = max(int(record.settings.get("rounds", 0)), record.rounds)
    rounds = (record.rounds, planned)
    details = [*_spent(record), *([("trouble", trouble)] if trouble else [])]
    again = RunFolder(record.folder).resume_command
    alive = pulse is not None and not _gone(pulse)
    if pulse is not None and alive and age < SILENT:
        details = [*_work(pulse), *details]
        clients = (pulse.done, pulse.cohort)
        return Now(record.label, "running", _line(pulse, age), rounds, clients, tuple(details))
    if record.ending != "so far":
        state, line = "ended", f"ended after {record.rounds} of {planned} rounds: {record.ending}"
        again = again if record.ending == "interrupted" else ""
    elif pulse is None:
        state = "stopped"
        line = f"no process is running it after {record.rounds} of {planned} rounds"
    elif alive:
        state = "silent"
        line = (
            f"no heartbeat for {clock(age)} of process {pulse.process} on {pulse.host}, in "
            f"{_at(pulse)}"
        )
    else:
        state, line = "stopped", f"process {pulse.process} stopped unexpectedly in {_at(pulse)}"
    if again:
        line += f"; resume with: {again}"
    return Now(record.label, state, line, rounds, (0, 0), tuple(details))


def _gone(pulse: Pulse) -> bool:
    """Whether the process is known to be no more."""
    if pulse.host != socket.gethostname():
        return False
    try:
        os.kill(pulse.process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _at(pulse: Pulse) -> str:
    return f"round {pulse.round} of {pulse.rounds}" if pulse.round else pulse.what


def _line(pulse: Pulse, age: float) -> str:
    """What a run does, and how long it will take."""
    what = pulse.what
    if pulse.what == TRAINING:
        what = f"{pulse.done} of {pulse.cohort} clients have finished" if pulse.cohort else ""
    parts = [f"{_at(pulse)}: {what}" if what and pulse.round else what or _at(pulse)]
    parts.append(f"{clock(pulse.elapsed + age)} elapsed")
    if pulse.left is not None:
        parts.append(f"about {clock(max(0.0, pulse.left - age))} left")
    return ", ".join(parts)


def _work(pulse: Pulse) -> list[tuple[str, str]]:
    """Who is at work, and who is away."""
    work, found = pulse.work, []
    if work.working_total:
        text = _named(work.working, work.working_total)
        found.append(("at work", text or f"{work.working_total} clients with secret names"))
    if work.away_total:
        text = "; ".join(f"{name}: {why}" for name, why in list(work.away.items())[:NAMED])
        if (more := work.away_total - NAMED) > 0:
            text += f"; and {more} more"
        found.append(("away", text))
    return found


def _named(names: Sequence[str], total: int) -> str:
    """So many names, and how many more there are."""
    more = f" and {total - NAMED:,} more" if names and total > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _spent(record: Record) -> list[tuple[str, str]]:
    """What was spent of privacy so far."""
    if not record.spent:
        return []
    number, epsilon = record.spent[-1]
    delta: Any = record.settings.get("privacy.delta", 0.0)
    told = ", ".join(f"{epsilon[kind]:.3g} ({kind})" for kind in (REPLACE, ADD_REMOVE))
    return [("privacy spent", f"ε = {told} at δ = {delta:g}, after round {number}")]
