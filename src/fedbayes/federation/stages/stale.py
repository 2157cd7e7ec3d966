"""Reports that were learnt from an older state of the server, as the server of today takes them.

FedBuff (Nguyen et al. 2022, Algorithm 1) adds changes: w ← w + η Σ_s n_s a_s (φ_s − w_s) / Σ_s n_s,
with w_s the state that the client started from and a_s what a change of its staleness counts. A
report φ_s is the same as w + a_s (φ_s − w_s) to a method that adds reports, so that is what the
method gets, and with it bounds, clipping and robust rules.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedbayes.contracts import AnyMethod, ChangeCoordinates, Federation, Report, Reports
from fedbayes.contracts.changes import start_of
from fedbayes.contracts.natural import GaussianServer
from fedbayes.core.messages import Masked, Message
from fedbayes.errors import ConfigError
from fedbayes.federation.clock.live import Live
from fedbayes.federation.clock.settings import Asynchronous, ClockSettings
from fedbayes.methods import METHODS


@dataclass(frozen=True)
class AsyncRound:
    """Where clients of a round started that did not start from its server."""

    settings: Asynchronous
    """The `[asynchronous]` table."""
    since: Mapping[int, int]
    """The round in which each of them started, by client; those that are not here start now."""
    server: Callable[[int], Any]
    """The server's state before a round."""
    starts: Sequence[int]
    """Clients that start from the server's state before this round, whenever they report."""
    live: Live | None = None
    """Who finds out whose reports come; None where the cohort is known."""


def as_of_now(
    report: Report, method: AnyMethod, run: Federation, *, then: Any, now: Any, weight: float
) -> Report:
    """A report as if it had been learnt from the server's state of today.

    Args:
        report: that the server accepts.
        method: of the run.
        run: the run.
        then: the server's state that the client started from.
        now: the server's state.
        weight: what the change counts, in (0, 1].

    Returns:
        In the types that it came in, to whose precision it is rounded; sparse where it was. What
        the server has no tensor of is measured from zero, so it stays; integers count whole.
        Running statistics are means of the report's and of today's: a variance that changes as
        another one did would become negative.
    """
    before, after = (
        ChangeCoordinates.of(method, server, run).origin(report) for server in (then, now)
    )
    tensors: Message = {}
    for name, item in report.tensors.items():
        values = item.dense() if isinstance(item, Masked) else item
        start, end = (start_of(name, values.shape, centre) for centre in (before, after))
        if start is not None and end is not None:
            now_at = end.to(values.device).double()
            running = values.is_floating_point() and name in run.network.buffers
            origin = now_at if running else start.to(values.device).double()
            share = weight if values.is_floating_point() else 1.0
            moved = (now_at + share * (values.double() - origin)).to(values.dtype)
            tensors[name] = item.like(moved) if isinstance(item, Masked) else moved
        else:
            tensors[name] = item
    return Report(tensors, report.weight)


def check(
    settings: Asynchronous,
    clock: ClockSettings,
    method: AnyMethod,
    *,
    clocked: bool,
    clients: int,
    sampling: str,
    min_reports: int,
    engine: str,
    beside: Mapping[str, bool],
    noise: bool,
    secure: bool,
    clips: bool,
) -> None:
    """See that rounds can be asynchronous, where they are to be, and time simulated.

    Args:
        settings: the `[asynchronous]` table.
        clock: the `[clock]` table.
        method: of the run.
        clocked: whether the engine's clients go by a simulated clock.
        clients: how many there are.
        sampling: who is in a round.
        min_reports: good reports that an update needs.
        engine: its name.
        beside: settings that need clients who wait for a round, by what they say, and whether they
            are on.
        noise: whether rounds are private.
        secure: whether reports are added in secret.
        clips: whether changes are shortened.

    Raises:
        ConfigError: they cannot; the text says what could.
    """
    if clock.ticks and sampling == "poisson":
        raise ConfigError(
            "sampling = 'poisson' keeps secret who is in a round, and the seconds of the clock "
            "would tell; leave clock.speeds out"
        )
    away = clock.ticks and clock.availability != "always"
    if away and sampling != "uniform" and not settings.active:
        raise ConfigError(
            f"sampling = {sampling!r} says who is in a round whether or not they are there; "
            "clock.availability is for sampling = 'uniform'"
        )
    if not settings.active:
        return
    if Reports.of(method).stale == "refused":
        raise ConfigError(f"asynchronous.buffer is not for {method.name}: {_why(method)}")
    if Reports.of(method).stale == "whole" and settings.weight(1) != 1.0:
        raise ConfigError(
            f"{method.name} adds reports whole alone, since clients keep what they reported or "
            "parts of a report grow otherwise than its change; set asynchronous.staleness = "
            "'constant'"
        )
    if clips and isinstance(method, GaussianServer) and not method.fixed_precision:
        raise ConfigError(
            f"{method.name} measures a change of its posterior from the mean that a client started "
            "from, and with asynchronous.buffer the server from another one: it would shorten what "
            "the client keeps whole; leave aggregation.clip out"
        )
    if not clocked and (busy := [name for name, on in beside.items() if on]):
        raise ConfigError(
            f"on engine {engine!r}, {busy[0]} does not go with asynchronous.buffer, under which "
            "clients are at work at any time; have one or the other"
        )
    if clocked and not clock.ticks:
        raise ConfigError(
            "asynchronous.buffer needs a clock, which says whose report comes first: set "
            "clock.speeds, as in clock.speeds = 'log-normal'"
        )
    size = settings.buffer or 1
    if size > clients:
        raise ConfigError(
            f"asynchronous.buffer = {size}, but there are {clients} clients, and none has two "
            "reports in a buffer"
        )
    if min_reports > size:
        raise ConfigError(
            f"min_reports = {min_reports}, but a buffer has {size} reports (asynchronous.buffer): "
            "no update would be made"
        )
    if sampling != "uniform" and not clocked:
        raise ConfigError(
            f"sampling = {sampling!r} says who is in which round; over a network, in asynchronous "
            "rounds, it is whoever is connected and free when another ends: set sampling = "
            "'uniform'"
        )
    if secure:
        raise ConfigError(
            "secure.enabled needs a cohort whose masks cancel, and the reports of a buffer are of "
            "clients that started apart; have it or asynchronous.buffer"
        )
    if noise:
        raise ConfigError(
            "privacy.noise counts on cohorts that are drawn for each round, and who is in a buffer "
            "depends on how fast clients are; have it or asynchronous.buffer"
        )


def _why(method: AnyMethod) -> str:
    """Why reports of a method do not outlive a change of the server, in words."""
    able = ", ".join(name for name, kind in METHODS.items() if kind.reports.stale != "refused")
    if method.reports.pooled:
        return "all its data lie in one place"
    return (
        "its reports do not add to a state of the server that is not the one they were learnt "
        f"from. Methods whose reports do: {able}"
    )


def remarks(
    settings: Asynchronous, clock: ClockSettings, *, clocked: bool, clients: int, cohort: int
) -> list[str]:
    """What a user should know of simulated time; as for `check`, with the clients at work."""
    notes = []
    if clock.ticks and not clocked:
        notes.append("clock has no effect: clients on other machines take the time that they take")
    drawn = any(isinstance(rate, float) for rate in (clock.download, clock.upload))
    if clock.ticks and clock.rate_spread and not drawn:
        notes.append(
            "clock.rate_spread has no effect: it is of a rate that is drawn, and clock.download "
            "and clock.upload give none"
        )
    size = settings.buffer or 0
    if settings.active and cohort + size - 1 > clients:
        notes.append(
            f"of {clients} clients not always {cohort} are at work: up to {size - 1} have reports "
            "that wait for the others of their buffer (asynchronous.buffer)"
        )
    return notes
