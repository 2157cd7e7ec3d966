"""A picture of the columns of a table."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedbayes.data.plot import save_figure
from fedbayes.data.tables.cells import as_numbers, dates, values
from fedbayes.data.tables.check import ColumnReport, TableCheck
from fedbayes.errors import DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_PANELS = 60
"""Columns that are drawn, the first ones."""
MOST_BARS = 12
"""Values of a column that are drawn, the most frequent ones."""
ACROSS = 4


def plot_check(check: TableCheck, path: Path, date_format: str = "") -> None:
    """Draw every column into a PNG, SVG or PDF file: a histogram of a quantity, bars of others.

    A title says what becomes of the column, and how much of it is missing.

    Args:
        check: The table.
        path: File to write; its suffix is the format.
        date_format: How dates are written, if not as in ISO 8601.

    Raises:
        RunError: the suffix is of no format that there is.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    looks = [look for look in check.columns if look.name in check.frame.columns][:MOST_PANELS]
    down = -(-len(looks) // ACROSS)
    figure = Figure(figsize=(3.2 * ACROSS, 2.6 * down + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    more = len(check.columns) - len(looks)
    figure.suptitle(
        f"{Path(check.file).name}: {check.rows:,} rows, {check.width:,} features of a row"
        f"{f'; {more:,} more columns' if more else ''}"
    )
    for number, look in enumerate(looks):
        axes = figure.add_subplot(down, ACROSS, number + 1)
        missing = f", {look.missing / check.rows:.0%} missing" if look.missing else ""
        what = "not usable" if look.refused else look.kind if look.role == "feature" else look.role
        axes.set_title(f"{look.name[:28]}\n{what}{missing}", fontsize="small")
        axes.tick_params(labelsize="x-small")
        _draw(axes, look, check, date_format)
    save_figure(figure, path)


def _draw(axes: "Axes", look: ColumnReport, check: TableCheck, date_format: str) -> None:
    column = check.frame[look.name]
    color = {"feature": "C0", "label": "C1", "group": "C2"}.get(look.role, "0.6")
    if look.refused:
        color = "C3"
    try:
        if look.kind == "number":
            numbers = as_numbers(column, look.name, check.file, "", texts=True).to_numpy(
                np.float64, na_value=np.nan
            )
            axes.hist(numbers[np.isfinite(numbers)], bins=30, color=color)
            return
        if look.kind == "date":
            days = dates(column, look.name, date_format, check.file)
            axes.hist(days[np.isfinite(days)].astype("datetime64[D]"), bins=30, color=color)
            axes.tick_params("x", rotation=30)
            return
        index, names = values(column, look.name, check.file)
    except DataError:
        axes.set_axis_off()
        return
    counts = np.bincount(index[index >= 0], minlength=len(names))
    first = np.argsort(-counts, kind="stable")[:MOST_BARS]
    axes.barh([names[k][:18] for k in first], counts[first], color=color)
    axes.invert_yaxis()
    if len(names) > MOST_BARS:
        axes.set_xlabel(f"and {len(names) - MOST_BARS:,} more values", fontsize="x-small")
