"""The files of a comparison, in its folder.

comparison.txt, .md, .tex, .csv   the table: for people, pages, papers, other programs
comparison.json                   all of it, with the value of every seed
comparison.html                   the table, and curves of all methods, on one page
runs.csv                          a row for each run
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbayes.core.files import write_beside
from fedbayes.reports.comparison import ComparisonPart, Line, Series, render
from fedbayes.workflows.experiments.comparison import MORE, Compared, heading
from fedbayes.workflows.experiments.comparison_table import (
    cell,
    latex,
    markdown,
    means_csv,
    runs_csv,
    text,
)
from fedbayes.workflows.experiments.method_grid import MethodGrid, RunResult
from fedbayes.workflows.experiments.variants import Variant


def write_comparison(
    grid: MethodGrid,
    outcomes: Sequence[RunResult],
    tables: Sequence[Compared],
    said: Sequence[str],
    content: Mapping[str, Any],
) -> list[Path]:
    """Write all files, and replace those that are there.

    Args:
        grid: the runs.
        outcomes: their results.
        tables: their means.
        said: notes below the tables.
        content: all of it, as JSON has it.

    Returns:
        The files.
    """
    parts = [_part(grid, table, outcomes) for table in tables]
    files = {
        "comparison.txt": text(tables, said),
        "comparison.md": markdown(tables, said),
        "comparison.tex": latex(tables, said),
        "comparison.csv": means_csv(tables),
        "comparison.json": json.dumps(content, indent=2, allow_nan=False) + "\n",
        "comparison.html": render(parts, [_without_marks(line) for line in said], content),
        "runs.csv": runs_csv(outcomes),
    }
    for name, written in files.items():
        write_beside(grid.folder / name, written.encode())
    return [grid.folder / name for name in files]


def _without_marks(line: str) -> str:
    """A note, for a page that marks cells by their looks."""
    return line.replace("* best mean", "Bold and coloured: best mean").replace(
        "≈ not told", "underlined: not told"
    )


def _part(grid: MethodGrid, table: Compared, outcomes: Sequence[RunResult]) -> ComparisonPart:
    names = [*table.columns, *(n for n in MORE if any(n in row.figures for row in table.rows))]
    rows = []
    for label, row in zip(table.labels, table.rows, strict=True):
        found = [(name, row.figures.get(name)) for name in names]
        cells = [
            (
                cell(name, one),
                None if one is None else one.mean,
                "" if one is None else "best" if one.best else "near" if one.near else "",
            )
            for name, one in found
        ]
        rows.append((label, cells))
    each = [[o for o in outcomes if _of(o, table, row)] for row in table.rows]
    calibrated = any(o.summary.get("temperature") is not None for own in each for o in own)
    series = [
        _series(table.metric, row.variant, own, calibrated)
        for row, own in zip(table.rows, each, strict=True)
    ]
    return ComparisonPart(table.task, table.metric, [heading(name) for name in names], rows, series)


def _of(outcome: RunResult, table: Compared, row: Any) -> bool:
    place = outcome.cell
    return bool(outcome.summary) and (place.task, place.label) == (table.task, row.variant.label)


def _series(metric: str, variant: Variant, ended: Sequence[RunResult], calibrated: bool) -> Series:
    names = (f"global_{metric}", f"local_{metric}", "global_nll")
    rounds = {name: [_line(one, name) for one in ended] for name in names}
    if calibrated:  # at the end alone, which the table tells
        rounds["global_uncalibrated_nll"] = rounds.pop("global_nll")
    trials = [one.trial for one in ended if one.trial is not None]
    return Series(
        variant.label,
        variant.method,
        {name: lines for name, lines in rounds.items() if any(_told(line) for line in lines)},
        [_line(one, f"global_{metric}", over_bytes=True) for one in ended],
        [trial.reliability for trial in trials],
        [trial.selective for trial in trials],
    )


def _told(line: Line) -> bool:
    """Whether there is a point to draw."""
    return any(map(math.isfinite, line[1]))


def _line(outcome: RunResult, name: str, *, over_bytes: bool = False) -> Line:
    """A metric over rounds, or over MB that were sent up to then; NaN where it is not finite."""
    x, y, sent = [], [], 0
    for line in outcome.lines:
        sent += line["bytes_down"] + line["bytes_up"]
        value = line.get(name)
        x.append(sent / 1e6 if over_bytes else float(line["round"]))
        y.append(value if value is not None and math.isfinite(value) else math.nan)
    return x, y
