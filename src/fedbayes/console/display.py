"""What a run looks like while it goes: a live line on a terminal, one output of a notebook that
follows it, plain lines elsewhere.

Light to import (no PyTorch), so that a command shows something before it loads anything.
"""

import math
import sys
import threading
import time
from typing import TYPE_CHECKING, Self

import rich
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from fedbayes.config.settings import toml_value
from fedbayes.console.notebook import Panel, panel
from fedbayes.core.lazy import shown
from fedbayes.storage.activity import TRAINING, Activity
from fedbayes.storage.best_tracker import flat
from fedbayes.storage.formatting import clock, number, words
from fedbayes.storage.pace import Pace

if TYPE_CHECKING:
    from fedbayes.runs.simulation import Simulation, Step
    from fedbayes.storage.heartbeat import Work
    from fedbayes.storage.metrics_file import Metrics

QUIET = 10.0
"""Seconds without a line after which, off a terminal, one says how far the round is."""
QUIET_START = 2.0
"""Seconds that something before the first round takes, off a terminal, before a line says what."""
_TICK = 0.1
"""Seconds between two looks whether such a line is due."""
_GAP = 2
"""Spaces between two parts of the live line."""
_BAR = (8, 24)
"""Least and greatest width of its bar."""
_NAMED = 3
"""Clients at work, or away, that are named."""


def console_for(progress: bool | None) -> Console | None:
    """Where a run that Python started is shown, if it is.

    Args:
        progress: whether it is; None: if someone sits at IPython or a notebook.
    """
    ipython = sys.modules.get("IPython")
    if progress is None:
        progress = ipython is not None and ipython.get_ipython() is not None
    if not progress:
        return None
    return rich.get_console()


class Display:
    """Shows a run from before its data are loaded until its last round.

        with Display(console) as display:
            simulation = Simulation(config, notify=display.notify)
            display.begin(simulation)
            for step in simulation:
                display.show(simulation, step)

    Args:
        console: where; None shows nothing.
        busy: what goes on at the start.
        title: words to print before the method's name.
    """

    def __init__(self, console: Console | None, busy: str = "starting", *, title: str = "") -> None:
        self._console, self._title = console, title
        # What follows is replaced, never changed: another thread draws it at any moment.
        self._activity = Activity(busy)
        self._since = time.monotonic()  # when that began
        self._printed = -math.inf  # when the last line was
        self._pace: Pace | None = None
        self._simulation: Simulation | None = None
        self._metrics: Metrics = {}
        self._spinner = Spinner("dots")
        self._over = threading.Event()
        self._live: Live | None = None
        self._panel: Panel | None = None
        self._lines: list[str] = []  # what a notebook is told beside its line
        self._curve: list[float] = []  # the headline metric of the rounds so far
        if console is not None and console.is_jupyter:
            self._panel = Panel(self._sheet)
        elif console is not None and console.is_terminal:
            self._live = Live(console=console, get_renderable=self._picture)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start(refresh=True)
        elif self._panel is not None:
            self._panel.draw(at_once=True)
        elif self._console is not None:
            threading.Thread(target=self._watch, daemon=True, name="fedbayes-display").start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._over.set()
        if self._live is not None:
            self._live.transient = self._pace is None  # a spinner leaves nothing behind
            self._live.stop()
        if self._panel is not None:
            if error is not None:
                self._lines.append(f"interrupted: {str(error) or type(error).__name__}")
            self._panel.draw(at_once=True)

    def notify(self, activity: Activity) -> None:
        """Take note of what the run is busy with."""
        if (activity.what, activity.round) != (self._activity.what, self._activity.round):
            self._since = time.monotonic()
        if self._pace is not None:
            self._pace.heard(time.monotonic())
        self._activity = activity
        if self._panel is not None:
            self._panel.draw()

    def begin(self, simulation: "Simulation") -> None:
        """Say what is run; from here on its rounds are shown."""
        from fedbayes.contracts.prior import in_words

        config = simulation.config
        divided = "each with its own data" if config.reference else simulation.scheme
        self._print(
            f"{self._title}{shown(config.method['name'])} on {simulation.data.dataset.name}: "
            f"{simulation.data.clients} clients ({divided}), {simulation.cohort} in a round, "
            f"{shown(config.model.name)}" + f", {config.engine}" * (config.engine != "auto")
        )
        idle = {f"training.{name}" for name in simulation.method.about.unused}
        told = {k: v for k, v in config.settings_chosen.items() if k not in idle}
        if told:
            chosen = ", ".join(f"{k} = {toml_value(v)}" for k, v in told.items())
            self._print(f"{self._title}{config.method['preset']} settings: {chosen}")
        sizes, method = simulation.data.train_sizes().tolist(), simulation.method
        if prior := in_words(lambda size: method.note(size, simulation.run).prior, sizes):
            self._print(f"{self._title}{prior}")
        if simulation.adversary is not None:
            self._print(f"{self._title}{simulation.adversary.words}")
        lines = simulation.folder.metrics()
        self._metrics = {name: value for line in lines for name, value in flat(line).items()}
        self._curve = [
            v for line in lines if (v := flat(line).get(simulation.headline)) is not None
        ]
        self._simulation = simulation
        self._activity = Activity(TRAINING, simulation.progress.round)
        self._pace = Pace(config.rounds, time.monotonic())

    def show(self, simulation: "Simulation", step: "Step") -> None:
        """Show a round that is complete."""
        self._metrics = {**self._metrics, **flat(step.metrics)}
        self._activity = Activity(TRAINING, step.number)
        if self._pace is not None:
            self._pace.round_ended(time.monotonic())
        if (value := flat(step.metrics).get(simulation.headline)) is not None:
            self._curve.append(value)
        if self._panel is not None:
            self._lines += (f"round {step.number}: {line}" for line in _troubles(step.metrics))
            self._panel.draw()
        elif self._live is None:
            self._print(_line(step, simulation))
        else:
            for line in _troubles(step.metrics):
                self._print(line)

    def _print(self, text: str) -> None:
        self._printed = time.monotonic()
        if self._panel is not None:
            self._lines.append(text)
        elif self._console is not None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _watch(self) -> None:
        """Print a line now and then while nothing else is printed, off a terminal."""
        while not self._over.wait(_TICK):
            now, quiet, last = time.monotonic(), QUIET, self._printed
            if self._pace is None and last < self._since:
                quiet, last = QUIET_START, self._since
            if now - last >= quiet:
                self._print(self._words(now))

    def _words(self, now: float) -> str:
        """What goes on, as a plain line."""
        busy, pace, simulation = self._activity, self._pace, self._simulation
        if pace is None or simulation is None or not busy.total:
            return f"{busy.what} ({clock(now - self._since)})"
        work = simulation.work()
        busy = pace.noticed(busy, work.answered, now)
        what = f"{busy.done} of {busy.total} clients" if busy.what == TRAINING else busy.what
        left = pace.left(now, busy)
        return (
            f"round {busy.round}/{simulation.config.rounds}: {what}, "
            f"{clock(pace.elapsed(now))} elapsed"
            + ("" if left is None else f", about {clock(left)} left")
            + (f"; {away}" if (away := _away(work)) else "")
        )

    def _sheet(self) -> tuple[str, str]:
        """What a notebook shows: HTML and plain text."""
        now, busy, pace, simulation = (
            time.monotonic(),
            self._activity,
            self._pace,
            self._simulation,
        )
        title, *lines = self._lines or [f"{self._title}{busy.what}"]
        if pace is None or simulation is None:
            return panel(title, [clock(now - self._since)], 0.0, [], lines)
        work = simulation.work()
        busy = pace.noticed(busy, work.answered, now)
        parts = [part.plain for part in _parts(simulation, self._metrics, busy, pace, now)]
        parts += filter(None, [_away(work)])
        done = _done(busy) / simulation.config.rounds
        return panel(title, parts, done, self._curve, lines)

    def _picture(self) -> RenderableType:
        """The live line, no wider than the console."""
        assert self._console is not None
        now, busy, pace, simulation = (
            time.monotonic(),
            self._activity,
            self._pace,
            self._simulation,
        )
        if pace is not None and simulation is not None:
            work, width = simulation.work(), self._console.width
            busy = pace.noticed(busy, work.answered, now)
            row = _row(width, simulation, self._metrics, busy, pace, now)
            if busy.total > 1 and pace.is_long(now):
                head = f"round {busy.round}/{simulation.config.rounds}"
                return Group(row, _clients_row(width, len(head), busy, work, pace, now))
            return row
        took = now - self._since
        words = busy.what + (f" {clock(took)}" if took >= 1 else "")
        self._spinner.update(text=Text(words, no_wrap=True, overflow="ellipsis"))
        return self._spinner


def _row(
    width: int,
    simulation: "Simulation",
    metrics: "Metrics",
    busy: Activity,
    pace: Pace,
    now: float,
) -> Table:
    """A run in one line: what comes first stays where the line is too narrow for all."""
    rounds, done = simulation.config.rounds, _done(busy)
    fitting: list[RenderableType] = []
    room = width + _GAP
    for part in _parts(simulation, metrics, busy, pace, now):
        room -= part.cell_len + _GAP
        if room < 0:
            break
        fitting.append(part)
    least, most = _BAR
    if room >= least + _GAP:
        bar = ProgressBar(total=rounds, completed=done, width=min(room - _GAP, most))
        fitting.insert(1, bar)
    row = Table.grid(padding=(0, _GAP, 0, 0))
    for _ in fitting:
        row.add_column(no_wrap=True)
    row.add_row(*fitting)
    return row


def _done(busy: Activity) -> float:
    """Rounds that are done, the one under way by its clients."""
    if not busy.total or busy.what != TRAINING:
        return float(busy.round)
    return busy.round + busy.done / busy.total - 1


def _parts(
    simulation: "Simulation", metrics: "Metrics", busy: Activity, pace: Pace, now: float
) -> list[Text]:
    """How far a run is, in a few words each, the most important first."""
    rounds, left = simulation.config.rounds, pace.left(now, busy)
    doing = f"{busy.done:>{len(str(busy.total))}}/{busy.total} clients" if busy.total else ""
    if busy.what != TRAINING:
        doing = busy.what.ljust(len(doing))
    taken, progress = clock(pace.elapsed(now)), simulation.progress
    going = left is not None and _done(busy) < rounds
    parts = [
        Text(f"round {busy.round:>{len(str(rounds))}}/{rounds}"),
        Text(f"{taken}, {clock(left or 0)} left" if going else taken),
        Text(doing),
        *(
            Text.assemble(f"{name} ", (value, "bold"))
            for name, value in _headlines(simulation, metrics)
        ),
        Text(f"clock {clock(metrics['clock_seconds'])}" if "clock_seconds" in metrics else ""),
        Text(f"down {decimal(progress.bytes_down)}  up {decimal(progress.bytes_up)}"),
    ]
    return [part for part in parts if part]


def _clients_row(
    width: int, head: int, busy: Activity, work: "Work", pace: Pace, now: float
) -> Table:
    """How far a long round is: its clients as a bar, and who is at work or away."""
    left = None if busy.what != TRAINING else pace.left_of_round(now, busy)
    names = ", ".join(work.working[:_NAMED])
    if names and (more := work.working_total - _NAMED) > 0:
        names += f" and {more} more"
    texts = (
        "" if left is None else f"{clock(left)} left in the round",
        _away(work),
        names and f"at work: {names}",
    )
    title, least_or_most = Text("clients".ljust(head)), _BAR[width > 80]
    bar = ProgressBar(total=busy.total, completed=busy.done, width=least_or_most)
    said = Text((_GAP * " ").join(filter(None, texts)))
    said.truncate(max(1, width - title.cell_len - least_or_most - 3 * _GAP), overflow="ellipsis")
    row = Table.grid(padding=(0, _GAP, 0, 0))
    for _ in range(3):
        row.add_column(no_wrap=True)
    row.add_row(title, bar, said)
    return row


def _away(work: "Work") -> str:
    """Whose node is away, in a few words; empty if none is."""
    if not work.away:
        return ""
    names = ", ".join(list(work.away)[:_NAMED])
    more = work.away_total - _NAMED
    return f"away: {names}" + (f" and {more} more" if more > 0 else "")


def _headlines(simulation: "Simulation", metrics: "Metrics") -> list[tuple[str, str]]:
    """Headline metrics of the global and own models, then those that were asked for."""
    metric, method = simulation.likelihood.metric, simulation.method
    shown = []
    for whose in sorted(("global", "local"), key=method.models.headline.__ne__):
        if whose == "local" or method.models.has_global:
            # Accuracy goes without saying.
            name = whose if metric == "accuracy" else words(f"{whose}_{metric}")
            shown.append((name, number(metrics.get(f"{whose}_{metric}"))))
    for name in simulation.config.metrics:
        value = metrics.get(f"{method.models.headline}_{name}")
        if name != metric and value is not None:
            worst = metrics.get(f"{method.models.headline}_worst_{name}")
            shown.append((words(name), f"{number(value)} (worst {number(worst)})"))
    return shown


def _line(step: "Step", simulation: "Simulation") -> str:
    metrics, rounds = step.metrics, simulation.config.rounds
    troubles = "".join(f"\n  {line}" for line in _troubles(metrics))
    headlines = _headlines(simulation, flat(metrics))
    return (
        f"round {step.number:>{len(str(rounds))}}/{rounds}  "
        f"{'  '.join(map(' '.join, headlines))}  "
        f"down {decimal(metrics['bytes_down'])}  up {decimal(metrics['bytes_up'])}  "
        f"{_time(metrics)}{metrics['seconds']:.2f} s{troubles}"
    )


def _time(metrics: "Metrics") -> str:
    """Simulated time so far, and staleness, where a round tells them."""
    if "clock_seconds" not in metrics:
        return ""
    waited = metrics.get("asynchronous")
    stale = f" (staleness {waited['staleness_mean']:.1f})" if waited else ""
    return f"clock {clock(metrics['clock_seconds'])}{stale}  "


def _troubles(metrics: "Metrics") -> list[str]:
    """What went wrong in a round, a line each."""
    lines = [
        f"report of client {client} rejected: {reason}"
        for client, reason in metrics["refused"].items()
    ]
    lines += [f"client {client} lost: {reason}" for client, reason in metrics["lost"].items()]
    lines += [
        f"client {client} answered after a problem: {reason}"
        for client, reason in metrics.get("troubles", {}).items()
    ]
    lines += [
        f"client {client} is an outlier: {reason}"
        for client, reason in metrics.get("outliers", {}).items()
    ]
    if undone := metrics.get("undone"):
        lines.append(f"{undone}: the update is undone, and the global model is unchanged")
    elif metrics["skipped"]:
        lines.append("too few valid updates: the global model is unchanged")
    return lines
