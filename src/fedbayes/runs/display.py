"""What a run looks like while it goes: a live line on a terminal, one output of a notebook that
follows it, plain lines elsewhere.

Light to import (no PyTorch), so that a command shows something before it loads anything.
"""

import math
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Self

import rich
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from fedbayes.likelihoods.measures import MEASURES, Measure
from fedbayes.runs.activity import TRAINING, Activity
from fedbayes.runs.between import rows
from fedbayes.runs.notebook import Panel, panel
from fedbayes.runs.pace import Pace
from fedbayes.runs.standing import flat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedbayes.runs.between import Row
    from fedbayes.runs.folder import Metrics
    from fedbayes.runs.heartbeat import Work
    from fedbayes.runs.simulation import Simulation, Step

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


def number(value: float | None) -> str:
    """A metric for people, in any unit, or a dash where there is none yet."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "undefined"
    size = abs(value)
    if size == 0 or 1e-3 <= size < 10:
        return f"{value:.4f}"
    if 10 <= size < 1e4:
        return f"{value:.2f}"
    return f"{value:,.0f}" if 1e4 <= size < 1e7 else f"{value:.4g}"


def words(metric: str) -> str:
    """The name of a metric for people, as in `global accuracy`."""
    name = metric.replace("c_index", "C-index").replace("_", " ")
    return re.sub(r"\b(ece|nll|auroc|crps|f1)\b", lambda m: m[0].upper(), name)


def clock(seconds: float) -> str:
    """A duration as 0:41, or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


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
        title: what is said before the method's name.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._live is not None:
            self._live.transient = self._pace is None  # a spinner leaves nothing behind
            self._live.stop()
        if self._panel is not None:
            if error is not None:
                self._lines.append(f"broken off: {str(error) or type(error).__name__}")
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
        self._print(
            f"{self._title}{config.method['name']} on {simulation.data.dataset.name}: "
            f"{simulation.data.clients} clients ({simulation.scheme}), {simulation.cohort} in a "
            "round, "
            f"{config.model.name}, {config.engine}"
        )
        if prior := in_words(simulation.method.prior, simulation.data.train_sizes().tolist()):
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
        done = _done(simulation, busy) / simulation.config.rounds
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
    rounds, done = simulation.config.rounds, _done(simulation, busy)
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


def _done(simulation: "Simulation", busy: Activity) -> float:
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
    going = left is not None and _done(simulation, busy) < rounds
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
    """How far a long round is: its clients as a bar, and who is at work or away.

    Args:
        width: of the console.
        head: where the bar of rounds above begins, less the gap.
        busy: what the run is busy with.
        work: what goes on at the clients.
        pace: of the run.
        now: the time.
    """
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
    """The headline metric of the global model and of clients' own, the method's own first; then
    those that were asked for by name, of all rows (or the mean of clients' own) and worst client.
    """
    metric, method = simulation.likelihood.metric, simulation.method
    shown = []
    for whose in sorted(("global", "local"), key=method.headline.__ne__):
        if whose == "local" or method.has_global_model:
            # Accuracy goes without saying.
            name = whose if metric == "accuracy" else words(f"{whose}_{metric}")
            shown.append((name, number(metrics.get(f"{whose}_{metric}"))))
    for name in simulation.config.metrics:
        value = metrics.get(f"{method.headline}_{name}")
        if name != metric and value is not None:
            worst = metrics.get(f"{method.headline}_worst_{name}")
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
    lines = [f"client {client} refused: {reason}" for client, reason in metrics["refused"].items()]
    lines += [f"client {client} lost: {reason}" for client, reason in metrics["lost"].items()]
    lines += [
        f"client {client} reported after trouble: {reason}"
        for client, reason in metrics.get("troubles", {}).items()
    ]
    lines += [
        f"client {client} is unlike the others: {reason}"
        for client, reason in metrics.get("outliers", {}).items()
    ]
    if undone := metrics.get("undone"):
        lines.append(f"{undone}: the update is undone, the global model as before")
    elif metrics["skipped"]:
        lines.append("too few good reports: the global model is as before")
    return lines


def outcome(summary: "Metrics") -> Group:
    """The summary as a table, and how metrics differ between clients where it tells that."""
    own = summary["headline"].partition("_")[0]
    shown = sorted(("global", "local"), key=own.__ne__)
    between = [table for whose in shown if (table := between_clients(summary, whose))]
    return Group(_outcome(summary), *(part for table in between for part in ("", table)))


def between_clients(summary: "Metrics", whose: str = "global") -> Table | None:
    """How metrics of a model differ between clients; None if that is not told, or is of another
    model than the method is judged by and of no metric that was asked for.

    Args:
        summary: of a run.
        whose: `global` or `local`.
    """
    found = rows(summary, whose)
    headline = summary.get("headline", whose).startswith(whose)
    if not found or not (headline or any(MEASURES.get(_base(r.metric), _OWN).value for r in found)):
        return None
    first = [] if whose == "local" else ["all rows"]
    title = "global model" if whose == "global" else "clients' own models"
    table = Table(title, *first, "mean of clients", "spread", "worst client", box=None)
    table.pad_edge = False
    for row in found:
        worst = f"{number(row.worst)} ({row.client})" if row.client else number(row.worst)
        whole = [number(row.whole)] if first else []
        cells = [*whole, number(row.mean), number(row.spread), worst]
        table.add_row(f"[bold]{escape(words(row.metric))}", *map(escape, cells))
    notes = notes_of(summary, found)
    if notes:
        table.caption, table.caption_justify = "\n".join(map(escape, notes)), "left"
    return table


def notes_of(summary: "Metrics", found: "Sequence[Row]") -> list[str]:
    """Which class is the positive one, and at which clients metrics are undefined."""
    from fedbayes.data.wording import listed

    names = {_base(row.metric) for row in found}
    ranked = any(name in MEASURES and MEASURES[name].two_classes for name in names) or (
        "auroc" in names
    )
    notes = []
    if ranked and "positive_class" in summary:
        notes.append(f"positive: {summary['positive_class']}")
    lacking: dict[tuple[str, ...], list[str]] = {}
    for row in found:
        if row.undefined:
            lacking.setdefault(row.undefined, []).append(words(row.metric))
    for clients, metrics in lacking.items():
        notes.append(
            f"{listed(metrics, 8)} undefined, and in no mean: {listed(clients, 5)} (test rows of "
            "one class alone, or too few)"
        )
    return notes


_OWN = Measure("", (), None)


def _base(name: str) -> str:
    """A metric without its threshold."""
    return name.partition("@")[0]


def _outcome(summary: "Metrics") -> Table:
    """The summary as a table."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in outcome_rows(summary).items():
        table.add_row(f"[bold]{name}", escape(value))
    return table


def _compressed(summary: "Metrics") -> str:
    """What compression left of the bytes, in brackets; empty where there is none."""
    if (shares := summary.get("compressed")) is None:
        return ""
    return f" ({shares['down']:.1%} / {shares['up']:.1%} of the uncompressed)"


def outcome_rows(summary: "Metrics") -> dict[str, str]:
    """What came of a run, by name, for people."""
    metrics, headline = flat(summary), summary["headline"]
    metric = headline.partition("_")[2]
    names = sorted((f"global_{metric}", f"local_{metric}"), key=headline.__ne__)
    rows = {
        **{words(name): number(metrics.get(name)) for name in names},
        "bytes down / up": f"{decimal(summary['bytes_down'])} / {decimal(summary['bytes_up'])}"
        f"{_compressed(summary)}",
        "on the link": f"{decimal(summary['link_down'])} / {decimal(summary['link_up'])}",
        "parameters": f"{summary['model_parameters']:,} ({summary['sparsity']:.1%} zero)",
        "seconds a round": f"{summary['seconds_per_round']:.3f} (median; "
        f"{summary['seconds']:.1f} in all)",
        "simulated time": _simulated(summary),
        "refused reports": f"{summary['refused_reports']} ({summary['skipped_rounds']} rounds "
        f"without an update{_noise_rounds(summary)}){_of_whom(summary)}",
        "lost reports": str(summary["lost_reports"]),
        "stopped": f"{summary['stopped_reason']} after {summary['rounds']} "
        + ("round" if summary["rounds"] == 1 else "rounds"),
        "folder": summary["folder"],
    }
    if "best_round" in summary:
        best = number(flat({"metrics": summary["best_metrics"]})[headline])
        rows["best round"] = (
            f"{summary['best_round']} ({words(headline)} {best}); the checkpoint is kept"
            + (", and model.safetensors is its model" if "model_round" in summary else "")
        )
    if "label_noise" in summary:
        noise = summary["label_noise"]
        rows["label noise"] = f"{noise['labels']:,} of {noise['of']:,} training labels are wrong"
    if "attack" in summary:
        attack = summary["attack"]
        rows["attack"] = (
            f"{attack['kind']} by client{'s' * (len(attack['clients']) > 1)} "
            f"{', '.join(map(str, attack['clients']))} from round {attack['start']} on"
        )
    if "attack_success" in summary:
        rows["attack success"] = f"{summary['attack_success']:.1%} of the test samples it is about"
    if "privacy" in summary:
        rows["privacy"] = _privacy(summary)
    if "clock_seconds" not in summary:
        del rows["simulated time"]
    if not summary["link_down"]:
        del rows["on the link"], rows["lost reports"]
    return rows


def _simulated(summary: "Metrics") -> str:
    """Seconds of the clock, and how stale reports were, where that is told."""
    told = summary.get("asynchronous")
    stale = ""
    if told:
        late = f", {told['too_stale']} too stale" if told["too_stale"] else ""
        stale = (
            f" (staleness {told['staleness_mean']:.1f} on average, {told['staleness_max']} at "
            f"most{late})"
        )
    return f"{clock(summary.get('clock_seconds', 0.0))}{stale}"


def _privacy(summary: "Metrics") -> str:
    """ε and δ, and what else is to be known of them."""
    told = [
        f"{value:.3g} ({kind})"
        for kind, value in summary["privacy"]["epsilon"].items()
        if value is not None
    ]
    sentences = [f"ε = {', '.join(told)} at δ = {summary['delta']:g}"] if told else []
    if summary["privacy"]["client_metrics"] == "off":
        sentences.append("clients send no metrics")
    return "; ".join([*sentences, *summary["privacy"]["notes"]])


def _noise_rounds(summary: "Metrics") -> str:
    """How many rounds were noise alone, if any."""
    rounds = summary.get("noise_rounds")
    return f", {rounds} of noise alone" if rounds else ""


def _of_whom(summary: "Metrics") -> str:
    """Whose reports were refused, the most first."""
    counts = sorted(summary.get("refused_clients", {}).items(), key=lambda item: -item[1])
    if not counts:
        return ""
    shown = [f"{client} {times} times" if times > 1 else client for client, times in counts[:3]]
    more = [f"{len(counts) - 3} more"] if len(counts) > 3 else []
    return f": {', '.join(shown + more)}"


def outcome_of_seeds(summary: "Metrics") -> Table:
    """Mean and standard deviation of several seeds' metrics as a table."""
    seeds = summary["seeds"]
    table = Table(
        f"{len(seeds)} seeds" if len(seeds) > 1 else "1 seed",
        "mean",
        "standard deviation",
        box=None,
        pad_edge=False,
    )
    for name, metric in summary["metrics"].items():
        if name.startswith(_BESIDE):
            continue
        values = (metric["mean"], metric["std"])
        table.add_row(
            f"[bold]{escape(words(name))}",
            *("–" if value is None else _written(name, value) for value in values),
        )
    return table


_BESIDE = ("global_mean_", "global_spread_", "local_spread_")
"""Beginnings of metrics of several seeds that are in the file alone."""


def _written(name: str, value: float) -> str:
    """A number of a summary for people."""
    if name.startswith("bytes"):
        return decimal(round(value))
    return f"{value:.1f}" if name in ("rounds", "seconds") else number(value)


@contextmanager
def stop_after_round(simulation: "Simulation", console: Console) -> Iterator[None]:
    """Let Ctrl-C (and SIGTERM) end the run after the round under way, a second one at once."""

    def ask(number: int, frame: FrameType | None) -> None:
        if simulation.stop:
            raise KeyboardInterrupt
        simulation.stop = True
        console.print("stopping after this round; Ctrl-C again stops at once", highlight=False)

    before = {name: signal.signal(name, ask) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
