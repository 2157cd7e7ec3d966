"""One self-contained HTML page of some runs: opens from disk, needs no network."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.filesize import decimal

from fedbayes.files import writable, write_beside
from fedbayes.reports.charts import Chart, Heat, telling
from fedbayes.reports.figures import FIGURES
from fedbayes.reports.gather import Record, Watch, gather, notes_on
from fedbayes.reports.palette import DARK, LIGHT, MARKERS
from fedbayes.reports.troubles import troubles
from fedbayes.runs.between import rows as rows_of
from fedbayes.runs.outcome import notes_of
from fedbayes.runs.readable import number, words
from fedbayes.version import __version__

COLUMNS: dict[str, tuple[str, str]] = {
    "global_nll": ("NLL", ".4g"),
    "global_uncalibrated_nll": ("NLL before calibration", ".4g"),
    "global_ece": ("calibration error", ".4f"),
    "sparsity": ("sparsity", ".3f"),
    "model_parameters": ("parameters", ",.0f"),
}
"""Newest metrics in the table of runs beside the headline metrics: heading and format."""

SECTIONS: dict[str, tuple[str, ...]] = {
    "Training": (
        "headline",
        "metrics",
        "bytes",
        "clock",
        "local",
        "nll",
        "loss",
        "sparsity",
        "size",
        "privacy",
    ),
    "Clients": ("clients", "split"),
    "Predictions of the global model": (
        "confusion",
        "predictions",
        "coverage",
        "reliability",
        "selective",
    ),
}
"""Figures that stand together."""

MORE = 5
"""Metrics of each client beside the headline in the list of clients."""
LISTED_CLIENTS = 24
"""Clients listed by name, of all runs together; of each run there are at least five."""
LISTED_TROUBLES = 30
"""Troubles with clients that are listed, the newest."""
WIDE_COLUMNS = 40
"""Clients, or columns of a heat map, beyond which a chart has the width of the page."""


@dataclass(frozen=True)
class Headline:
    """What came of it, in one number."""

    value: str
    metric: str
    text: str
    run: int


@dataclass(frozen=True)
class Between:
    """How the metrics of a model differ between clients."""

    run: int
    title: str
    """Of which model."""
    heads: list[str]
    rows: list[tuple[str, ...]]
    note: str


@dataclass(frozen=True)
class Clients:
    """Clients of a run by name, those that do worst first."""

    run: int
    metric: str
    """The headline metric, in words."""
    more: list[str]
    """Other metrics, in words."""
    rows: list[tuple[str, ...]]
    """Name, training samples, test samples, headline metric, others."""
    many: bool
    """Whether the run has so many clients that they have the width of the page."""
    note: str


def write_page(folders: Sequence[Path], out: Path, watch: Watch = lambda _: None) -> list[str]:
    """Write the report of one run, or the comparison of several, as an HTML file.

    Args:
        folders: the run folders; runs may still go on.
        out: the file to write.
        watch: is told which run is being read.

    Returns:
        Its notes: what it leaves out, and why.

    Raises:
        RunError: a folder holds no run, or the file cannot be written.
    """
    writable(out, "the page", (".html", ".htm"))
    records = gather(folders, watch)
    write_beside(out, render(records).encode())
    return notes_on(records)


def render(
    records: Sequence[Record],
    made: datetime | None = None,
    *,
    live: Mapping[str, Any] | None = None,
    title: str = "",
) -> str:
    """The page of these runs.

    Args:
        records: what the runs tell.
        made: the time that the page names as its own; now if None.
        live: what the runs do now (`follow.Follower.state`), where a server goes on to tell the
            page; then there need not be a record yet.
        title: of the page; the runs' names by default.
    """
    charts = [chart for make in FIGURES.values() for chart in make(records) if telling(chart)]
    data = {
        "runs": [record.label for record in records],
        "markers": MARKERS,
        "charts": [{"kind": type(chart).__name__, **asdict(chart)} for chart in charts],
    }
    columns, rows = _table(records) if records else ([], [])
    most = max(5, LISTED_CLIENTS // max(1, len(records)))
    wrong = troubles(records)
    return (
        environment()
        .get_template("page.html")
        .render(
            title=title or ", ".join(record.label for record in records),
            about=_about(records) if records else [],
            live=None if live is None else json.loads(json.dumps(live)),
            headlines=headlines(records),
            columns=columns,
            rows=rows,
            ended=all(record.ending != "so far" for record in records),
            notes=[(record.label, note) for record in records for note in record.notes],
            labels=[record.label for record in records],
            differences=differences(records),
            troubles=wrong[:LISTED_TROUBLES],
            untold=len(wrong) - len(wrong[:LISTED_TROUBLES]),
            settings=list(records[0].settings.items()) if len(records) == 1 else [],
            sections=_sections(charts),
            clients=[_clients(run, record, most) for run, record in enumerate(records)],
            between=[table for run, one in enumerate(records) for table in _between(run, one)],
            by_class=[
                (run, [(name, "–" if share is None else f"{share:.4f}") for name, share in found])
                for run, record in enumerate(records)
                # The diagonal of a confusion matrix tells it too.
                if record.confusion is None and (found := record.by_class())
            ],
            made=stamp(made),
            version=__version__,
            light=LIGHT,
            dark=DARK,
            # JSON has no NaN; invalid numbers were left out of the charts.
            data=json.loads(json.dumps(data, default=float, allow_nan=False)),
        )
    )


_TIME = "%Y-%m-%d %H:%M"


def environment() -> Environment:
    """Where templates are, and how they are filled: all text is escaped."""
    return Environment(
        loader=PackageLoader("fedbayes.reports", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def stamp(made: datetime | None = None) -> str:
    """A time as pages show it; now by default."""
    return f"{made or datetime.now().astimezone():{_TIME}}"


def _about(records: Sequence[Record]) -> list[str]:
    """What ran, on what and when."""
    if len(records) > 1:
        methods = _each(str(record.settings.get("method.name", "?")) for record in records)
        datasets = _each(_dataset(record) for record in records)
        times = [f"last round {_day(record)}" for record in records[: int(_same(records, _day))]]
        endings = [f"all {record.ending}" for record in records[: int(_same(records, _ending))]]
        return [f"{methods} on {datasets}", ", ".join([*times, *endings])]
    (record,) = records
    settings = record.settings
    planned = settings.get("rounds", record.rounds)
    rounds = f"{record.rounds:,} of {_count(planned, 'round')}"
    parts = [
        f"{settings.get('method.name', '?')} on {_dataset(record)}",
        _count(len(record.clients), "client") if record.clients else "",
        _count(record.rounds, "round") if record.rounds == planned else rounds,
        str(settings.get("model.name", "")),
    ]
    times = [
        f"{what} {time:{_TIME}}"
        for what, time in (("started", record.started), ("last round", record.changed))
        if time is not None
    ]
    ending = "not ended" if record.ending == "so far" else record.ending
    return [", ".join(part for part in parts if part), ", ".join([*times, ending])]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _same(records: Sequence[Record], of: Callable[[Record], str]) -> bool:
    """Whether it is the same of all runs, so that it need be told only once."""
    return len({of(record) for record in records}) == 1


def _day(record: Record) -> str:
    return f"{record.changed:%Y-%m-%d}" if record.changed else "–"


def _ending(record: Record) -> str:
    return record.ending


def _each(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _dataset(record: Record) -> str:
    """Name of the data set, or of the file of one's own."""
    name, path = (str(record.settings.get(f"data.{key}", "")) for key in ("name", "path"))
    return Path(path).name if path else name


def headlines(records: Sequence[Record]) -> list[Headline]:
    """Of a run, the metric that it is judged by; of several, the best.

    Runs on other data, or judged by another metric, are not compared.
    """
    groups: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for run, record in enumerate(records):
        value = record.last(record.headline)
        if value is not None and math.isfinite(value):
            groups.setdefault((_dataset(record), record.headline), []).append((value, run))
    found = []
    for (dataset, metric), values in groups.items():
        higher = records[values[0][1]].higher_is_better
        value, run = (max if higher else min)(values, key=lambda pair: pair[0])
        name, text = (
            words(metric),
            f"after {_count(records[run].last_round(metric), 'round')}",
        )
        if len(records) > 1:
            text = f"{records[run].label}, {text}"
        if len(values) > 1:
            name = f"{'highest' if higher else 'lowest'} {name} of {len(values)} runs"
        if len(records) > 1:
            name += f" on {dataset}"
        found.append(Headline(number(value), name, text, run))
    return found


def _sections(charts: Sequence[Chart]) -> list[tuple[str, list[tuple[int, Chart, bool]]]]:
    """The charts of each section: their index, and whether they need the width of the page."""
    placed = [
        (index, chart, isinstance(chart, Heat) and len(chart.columns) > WIDE_COLUMNS)
        for index, chart in enumerate(charts)
    ]
    # Wide ones come last, so that the others stand side by side.
    placed.sort(key=lambda place: place[2])
    return [
        (title, [place for place in placed if place[1].key in keys])
        for title, keys in SECTIONS.items()
    ]


def _clients(run: int, record: Record, most: int) -> Clients:
    """The clients of a run that do worst; those without a metric come last."""
    known, worse = record.values, 1 if record.higher_is_better else -1
    order = sorted(
        range(len(record.clients)),
        key=lambda i: worse * known.get(record.clients[i], worse * math.inf),
    )
    each = record.between.get("per_client", {}).get(record.whose, {})
    told = dict.fromkeys(metric for own in each.values() for metric in own)
    more = [metric for metric in told if metric not in (record.metric, "nll")][:MORE]
    rows = []
    for client in order[:most]:
        name = record.clients[client]
        sizes = [
            "–" if counts is None or (size := counts[client]) is None else f"{size:,}"
            for counts in (record.train_sizes, record.test_sizes)
        ]
        others = (number(each.get(name, {}).get(metric)) for metric in more)
        rows.append((name, *sizes, number(known.get(name)), *others))
    notes = []
    if len(order) > most:
        notes.append(f"{len(order) - most:,} of {len(order):,} clients are not listed.")
    untried = len(order) - len(known)
    if known and untried:
        notes.append(
            f"{untried:,} have no {words(record.metric)}: no report yet, or no test samples."
        )
    named = [words(metric) for metric in more]
    if more and record.whose == "global":
        named = [f"{name}, global model" for name in named]
    return Clients(
        run, words(record.metric), named, rows, len(order) > WIDE_COLUMNS, " ".join(notes)
    )


def _between(run: int, record: Record) -> Iterator[Between]:
    """How metrics differ between clients: of the model that the run is judged by, and of clients'
    own ones where others were asked for.
    """
    for whose, title in (("global", "the global model"), ("local", "clients' own models")):
        found = rows_of(record.between, whose) if record.between else []
        if len(found) < (2 if whose == record.whose else 3):
            continue  # a headline and its likelihood alone
        table = [
            (
                words(row.metric),
                *((number(row.whole),) if whose == "global" else ()),
                number(row.mean),
                number(row.spread),
                f"{number(row.worst)} ({row.client})" if row.client else number(row.worst),
            )
            for row in found
        ]
        heads = ["metric", *(["all rows"] if whose == "global" else [])]
        heads += ["mean of clients", "spread", "worst client"]
        yield Between(run, title, heads, table, " ".join(notes_of(record.between, found)))


def differences(records: Sequence[Record]) -> list[tuple[str, list[str]]]:
    """Settings in which the runs differ, and the value of each run; – where it has none."""
    keys = list(dict.fromkeys(key for record in records for key in record.settings))
    values = {key: [str(record.settings.get(key, "–")) for record in records] for key in keys}
    return [(key, own) for key, own in values.items() if len(set(own)) > 1]


def _table(records: Sequence[Record]) -> tuple[list[str], list[dict[str, Any]]]:
    """Headings and rows of the table of runs.

    A column is left out if no run has a value for it, or if `_about` has told it already. A cell
    is what is shown and what is sorted by, which is empty where there is no value.
    """
    metrics = list(dict.fromkeys(record.metric for record in records))
    every = [_cells(record, metrics) for record in records]
    above = {"method", "data", "clients", "rounds"} if len(records) == 1 else set()
    above |= {"last round"} if _same(records, _day) else set()
    above |= {"ended"} if _same(records, _ending) else set()
    headings = [
        heading
        for heading in every[0]
        if heading not in above and any(cells[heading][1] != "" for cells in every)
    ]
    rows = [
        {
            "index": index,
            "label": record.label,
            "cells": [(heading, *cells[heading]) for heading in headings],
        }
        for index, (record, cells) in enumerate(zip(records, every, strict=True))
    ]
    return headings, rows


def _cells(record: Record, metrics: Sequence[str]) -> dict[str, tuple[str, float | str]]:
    """What the table says of a run.

    Args:
        record: the run.
        metrics: headline metrics of all runs.
    """
    none = ("–", "")
    method = str(record.settings.get("method.name", ""))
    cells: dict[str, tuple[str, float | str]] = {
        "method": (method, method),
        "data": (_dataset(record), _dataset(record)),
        "clients": (f"{len(record.clients):,}", len(record.clients)),
        "rounds": (f"{record.rounds:,}", record.rounds),
    }
    for metric in metrics:
        for name in (f"global_{metric}", f"local_{metric}"):
            cells[words(name)] = _cell(record.last(name), number)
    for key, (heading, form) in COLUMNS.items():
        cells[heading] = _cell(record.last(key), f"{{:{form}}}".format)
    for heading, key in (("sent down", "bytes_down"), ("sent up", "bytes_up")):
        total = record.total(key)
        cells[heading] = (decimal(int(total)), total)
    seconds = median([line.get("seconds", 0.0) for line in record.metrics] or [0.0])
    cells["seconds a round"] = (f"{seconds:.2f}", seconds)
    time = record.changed
    cells["last round"] = none if time is None else (_day(record), time.isoformat())
    cells["ended"] = (record.ending, record.ending)
    return cells


def _cell(value: float | None, text: Callable[[float], str]) -> tuple[str, float | str]:
    """A number as it is shown and sorted by; sorting knows infinity by its name."""
    if value is None or math.isnan(value):
        return ("–", "")
    if math.isinf(value):
        return (text(value), "Infinity" if value > 0 else "-Infinity")
    return (text(value), value)
