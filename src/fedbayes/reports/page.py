"""One self-contained HTML page of some runs: opens from disk, needs no network."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from rich.filesize import decimal

from fedbayes.core.files import writable, write_beside
from fedbayes.reports.charts import Chart, Heat, telling
from fedbayes.reports.figures import FIGURES, tried
from fedbayes.reports.gather import Record, Watch, gather, notes_on
from fedbayes.reports.headlines import count, dataset, headlines, lowest
from fedbayes.reports.marks import spark
from fedbayes.reports.palette import looks
from fedbayes.reports.template import TIME, brief, filled
from fedbayes.reports.troubles import troubles
from fedbayes.runs.outcome import notes_of
from fedbayes.storage.client_spread import rows as rows_of
from fedbayes.storage.formatting import words

COLUMNS: dict[str, tuple[str, str]] = {
    "global_nll": ("NLL", ".3g"),
    "global_uncalibrated_nll": ("NLL before calibration", ".3g"),
    "global_ece": ("calibration error", ".3f"),
    "sparsity": ("sparsity", ".3f"),
    "model_parameters": ("parameters", ",.0f"),
}
"""Newest metrics in the table of runs next to the headline metrics: heading and format."""

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
        "seconds",
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
NOTES = {
    "Training": "Metrics of global models are on {metrics}.",
    "Predictions of the global model": "The global model on {predictions}.",
}
"""What is true of all charts of a section, and whose samples they are of."""
COST = ("parameters", "sent down", "sent up", "seconds a round")
"""Columns of the table of runs that are no metrics of a model."""

MORE = 5
"""Metrics of each client besides the headline in the list of clients."""
LISTED_CLIENTS = 24
"""Clients listed by name, of all runs together; of each run there are at least five."""
LISTED_TROUBLES = 30
"""Troubles with clients that are listed, the newest."""
WIDE_COLUMNS = 40
"""Clients, or columns of a heat map, beyond which a chart has the width of the page."""


@dataclass(frozen=True)
class PageCell:
    """A cell of the list of clients."""

    text: str
    worst: bool = False
    share: float | None = None
    """The length of its bar; None where it has none."""


@dataclass(frozen=True)
class SpreadTable:
    """How clients differ: in the metrics of a model, or in what they contribute to it."""

    run: int
    title: str
    heads: list[str]
    rows: list[tuple[str, ...]]
    note: str


@dataclass(frozen=True)
class ClientTable:
    """Clients of a run by name, those that do worst first."""

    run: int
    metric: str
    """The headline metric, in words."""
    more: list[str]
    """Other metrics, in words."""
    rows: list[list[PageCell]]
    """Name, headline metric, training samples, test samples, others."""
    note: str


def write_page(folders: Sequence[Path], out: Path, watch: Watch = lambda _: None) -> list[str]:
    """Write the report of one run, or the comparison of several, as an HTML file.

    Args:
        folders: the run folders; runs may still go on.
        out: the file to write.
        watch: is called with which run is being read.

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
    names = [record.label for record in records]
    own = looks([str(record.settings.get("method.name", "")) for record in records])
    columns, rows = _table(records) if records else ([], [])
    most = max(5, LISTED_CLIENTS // max(1, len(records)))
    wrong = troubles(records)
    wide = len(records) > 1
    return filled(
        "page.html",
        names,
        own,
        charts,
        data={
            "runs": [
                {"name": record.label, "method": record.settings.get("method.name")}
                for record in records
            ]
        },
        made=made,
        paper="landscape" if wide else "portrait",
        title=_title(records) or title,
        about=_about(records) if records else [],
        live=None if live is None else json.loads(json.dumps(live)),
        headlines=[
            (one, spark(one.curve, own[one.run])) for one in (*headlines(records), *lowest(records))
        ],
        columns=columns,
        cost=COST,
        rows=rows,
        ended=all(record.ending != "so far" for record in records),
        notes=[(record.label, note) for record in records for note in record.notes],
        differences=differences(records),
        troubles=wrong[:LISTED_TROUBLES],
        untold=len(wrong) - len(wrong[:LISTED_TROUBLES]),
        settings=list(records[0].settings.items()) if len(records) == 1 else [],
        sections=_sections(charts, tried(records, all_of_them=True), tried(records)),
        clients=[_clients(run, record, most) for run, record in enumerate(records)],
        between=[found for run, one in enumerate(records) for found in _between(run, one)],
        by_class=[
            (run, [(name, brief(share)) for name, share in found])
            for run, record in enumerate(records)
            # The diagonal of a confusion matrix tells it too.
            if record.confusion is None and (found := record.by_class())
        ],
    )


def _title(records: Sequence[Record]) -> str:
    """Which methods ran on which data; empty if nothing did."""
    if not records:
        return ""
    methods = list(dict.fromkeys(str(r.settings.get("method.name", "?")) for r in records))
    shown = f"{len(methods)} methods" if len(methods) > 4 else ", ".join(methods)
    count = f"{len(records)} runs of " if len(records) > len(methods) else ""
    return f"{count}{shown} on {_each(dataset(record) for record in records)}"


def _about(records: Sequence[Record]) -> list[str]:
    """How long, with how many clients, and when."""
    if len(records) > 1:
        times = [f"last round {_day(record)}" for record in records[: int(_same(records, _day))]]
        endings = [f"all {record.ending}" for record in records[: int(_same(records, _ending))]]
        return [line for line in (", ".join([*times, *endings]),) if line]
    (record,) = records
    settings = record.settings
    planned = settings.get("rounds", record.rounds)
    rounds = f"{record.rounds:,} of {count(planned, 'round')}"
    parts = [
        count(len(record.clients), "client") if record.clients else "",
        count(record.rounds, "round") if record.rounds == planned else rounds,
        str(settings.get("model.name", "")),
    ]
    times = [
        f"{what} {time:{TIME}}"
        for what, time in (("started", record.started), ("last round", record.changed))
        if time is not None
    ]
    ending = "not ended" if record.ending == "so far" else record.ending
    folder = f"run folder {record.label}"
    return [", ".join(part for part in parts if part), ", ".join([folder, *times, ending])]


def _same(records: Sequence[Record], of: Callable[[Record], str]) -> bool:
    """Whether it is the same of all runs, so that it need be told only once."""
    return len({of(record) for record in records}) == 1


def _day(record: Record) -> str:
    return f"{record.changed:%Y-%m-%d}" if record.changed else "–"


def _ending(record: Record) -> str:
    return record.ending


def _each(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _sections(
    charts: Sequence[Chart], metrics: str, predictions: str
) -> list[tuple[str, str, list[tuple[int, bool]]]]:
    """The sections of a page: title, note, and charts with whether they need its width."""
    placed = [
        (index, chart.key, isinstance(chart, Heat) and len(chart.columns) > WIDE_COLUMNS)
        for index, chart in enumerate(charts)
    ]
    # Wide ones come last, so that the others stand side by side.
    placed.sort(key=lambda place: place[2])
    return [
        (
            title,
            NOTES.get(title, "").format(metrics=metrics, predictions=predictions),
            [(index, wide) for index, key, wide in placed if key in keys],
        )
        for title, keys in SECTIONS.items()
    ]


def _clients(run: int, record: Record, most: int) -> ClientTable:
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
    worst = (min if record.higher_is_better else max)(known.values(), default=math.nan)
    top = max(known.values(), default=0.0)
    for client in order[:most]:
        name = record.clients[client]
        sizes = [
            "–" if counts is None or (size := counts[client]) is None else f"{size:,}"
            for counts in (record.train_sizes, record.test_sizes)
        ]
        value = known.get(name)
        headline = PageCell(
            brief(value),
            value == worst and len(known) > 1,
            None if value is None or top <= 0 else min(1.0, max(0.0, value / max(1.0, top))),
        )
        others = (PageCell(brief(each.get(name, {}).get(metric))) for metric in more)
        rows.append([PageCell(name), headline, *map(PageCell, sizes), *others])
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
    return ClientTable(run, words(record.metric), named, rows, " ".join(notes))


def _between(run: int, record: Record) -> Iterator[SpreadTable]:
    """How metrics of the main model, and of clients' own, differ between clients."""
    for whose, model in (("global", "the global model"), ("local", "clients' own models")):
        title = f"Metrics of {model} over clients"
        found = rows_of(record.between, whose) if record.between else []
        if len(found) < (2 if whose == record.whose else 3):
            continue  # a headline and its likelihood alone
        table = [
            (
                words(row.metric),
                *((brief(row.whole),) if whose == "global" else ()),
                brief(row.mean),
                brief(row.spread),
                f"{brief(row.worst)} ({row.client})" if row.client else brief(row.worst),
            )
            for row in found
        ]
        heads = ["metric", *(["all rows"] if whose == "global" else [])]
        heads += ["mean of clients", "SD", "worst client"]
        yield SpreadTable(run, title, heads, table, " ".join(notes_of(record.between, found)))
    if (added := record.contributions) is not None:
        heads, *rows = added.table()
        cells = [tuple(row) for row in rows[:LISTED_CLIENTS]]
        yield SpreadTable(run, "What each client contributes", heads, cells, added.note)


def differences(records: Sequence[Record]) -> list[tuple[str, list[str]]]:
    """Settings in which the runs differ, and the value of each run; – where it has none."""
    keys = list(dict.fromkeys(key for record in records for key in record.settings))
    values = {key: [str(record.settings.get(key, "–")) for record in records] for key in keys}
    return [(key, own) for key, own in values.items() if len(set(own)) > 1]


def _table(records: Sequence[Record]) -> tuple[list[str], list[dict[str, Any]]]:
    """Headings and rows of the table of runs, without what `_about` or no run tells."""
    metrics = list(dict.fromkeys(record.metric for record in records))
    every = [_cells(record, metrics) for record in records]
    above = {"method", "data", "clients", "rounds"} if len(records) == 1 else set()
    above |= {"last round"} if _same(records, _day) else set()
    above |= {"ended"} if _same(records, _ending) else set()
    # So is a model without zeros, as most are.
    above |= {"sparsity"} if all(cells["sparsity"][1] in ("", 0.0) for cells in every) else set()
    headings = [
        heading
        for heading in every[0]
        if heading not in above and any(cells[heading][1] != "" for cells in every)
    ]
    rows = [
        {
            "label": record.label,
            "cells": [(heading, *cells[heading]) for heading in headings],
        }
        for record, cells in zip(records, every, strict=True)
    ]
    return headings, rows


def _cells(record: Record, metrics: Sequence[str]) -> dict[str, tuple[str, float | str]]:
    """What the table says of a run: what is shown, and what is sorted by."""
    none = ("–", "")
    method = str(record.settings.get("method.name", ""))
    cells: dict[str, tuple[str, float | str]] = {
        "method": (method, method),
        "data": (dataset(record), dataset(record)),
        "clients": (f"{len(record.clients):,}", len(record.clients)),
        "rounds": (f"{record.rounds:,}", record.rounds),
    }
    for metric in metrics:
        for name in (f"global_{metric}", f"local_{metric}"):
            cells[words(name)] = _cell(record.last(name), brief)
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
