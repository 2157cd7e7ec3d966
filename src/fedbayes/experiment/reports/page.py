"""One self-contained HTML page of some runs: opens from disk, needs no network."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.filesize import decimal

from fedbayes.experiment.record import write_beside
from fedbayes.experiment.reports.charts import FIGURES, filled
from fedbayes.experiment.reports.gather import Record, Watch, gather
from fedbayes.experiment.reports.palette import DARK, LIGHT, MARKERS
from fedbayes.experiment.silos import writable

COLUMNS: dict[str, tuple[str, str]] = {
    "global_accuracy": ("global accuracy", ".4f"),
    "local_accuracy": ("local accuracy", ".4f"),
    "global_nll": ("NLL", ".4g"),
    "global_ece": ("calibration error", ".4f"),
    "sparsity": ("sparsity", ".3f"),
    "model_parameters": ("parameters", ",.0f"),
}
"""Newest figures in the table of runs: heading and format."""


def write_page(folders: Sequence[Path], out: Path, watch: Watch = lambda _: None) -> None:
    """Write the report of one run, or the comparison of several, as an HTML file.

    Args:
        folders: the run folders; runs may still go on.
        out: the file to write.
        watch: is told which run is being read.

    Raises:
        RunError: a folder holds no run, or the file cannot be written.
    """
    writable(out, "the page", (".html", ".htm"))
    write_beside(out, render(gather(folders, watch)).encode())


def render(records: Sequence[Record]) -> str:
    """The page of these runs."""
    environment = Environment(
        loader=PackageLoader("fedbayes.experiment.reports", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found = [chart for make in FIGURES.values() for chart in make(records) if filled(chart)]
    data = {
        "runs": [record.label for record in records],
        "markers": MARKERS,
        "charts": [{"kind": type(chart).__name__, **asdict(chart)} for chart in found],
    }
    return environment.get_template("page.html").render(
        title=", ".join(record.label for record in records),
        headings=["run", "method", "data", "clients", "rounds", *_headings()],
        rows=[_row(index, record) for index, record in enumerate(records)],
        notes=[(record.label, note) for record in records for note in record.notes],
        labels=[record.label for record in records],
        differences=differences(records),
        settings=list(records[0].settings.items()) if len(records) == 1 else [],
        charts=found,
        light=LIGHT,
        dark=DARK,
        # JSON has no NaN; figures that are none were left out of the charts.
        data=json.loads(json.dumps(data, default=float, allow_nan=False)),
    )


def differences(records: Sequence[Record]) -> list[tuple[str, list[str]]]:
    """Settings in which the runs differ, and the value of each run; – where it has none."""
    keys = list(dict.fromkeys(key for record in records for key in record.settings))
    values = {key: [record.settings.get(key, "–") for record in records] for key in keys}
    return [
        (key, [str(value) for value in own])
        for key, own in values.items()
        if any(value != own[0] for value in own)
    ]


def _headings() -> list[str]:
    return [*(heading for heading, _ in COLUMNS.values()), "down", "up", "s a round", "ended"]


def _row(index: int, record: Record) -> dict[str, Any]:
    """Cells of the table: what is shown, and what is sorted by."""
    settings = record.settings
    cells: list[tuple[str, float | str]] = [
        (str(settings.get(key, "")), str(settings.get(key, "")))
        for key in ("method.name", "data.name")
    ]
    cells.append((f"{len(record.clients):,}", len(record.clients)))
    cells.append((f"{record.rounds:,}", record.rounds))
    for key, (_, form) in COLUMNS.items():
        value = record.last(key)
        cells.append(("–", -1.0) if value is None else (format(value, form), value))
    for key in ("bytes_down", "bytes_up"):
        total = record.total(key)
        cells.append((decimal(int(total)), total))
    seconds = record.total("seconds") / max(record.rounds, 1)
    cells.append((f"{seconds:.2f}", seconds))
    cells.append((record.ending, record.ending))
    return {"index": index, "label": record.label, "cells": cells}
