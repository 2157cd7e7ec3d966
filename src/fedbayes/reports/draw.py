"""Single figures for a paper, by Matplotlib."""

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbayes.core.files import writable, write_beside
from fedbayes.data.plot import PICTURES, in_legend, literally
from fedbayes.errors import RunError
from fedbayes.reports.charts import Chart, Heat, Lines, Points, Reliability, Spread
from fedbayes.reports.figures import charts
from fedbayes.reports.gather import Record, Watch, gather, notes_on
from fedbayes.reports.palette import LIGHT, Look, looks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedbayes.reports.shown import Shown

MOST_NUMBERS = 12
"""Classes up to which the cells of a heat map have their counts written in them."""
MOST_LABELS = 40
"""Rows or columns up to which each has its name."""
MARKS = 10
"""Markers on a curve, about."""
PLAIN = looks(["fedavg"])[0]
"""How a figure of one run is drawn whose method does not matter."""
_STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "fedbayes", "pdf.fonttype": 42}
"""Text stays text in SVG and PDF, and a file is the same whenever it is drawn."""


def plot(
    folders: Sequence[Path], figure: str, out: Path, watch: Watch = lambda _: None
) -> list[str]:
    """Draw one figure of one run or several into a PNG, SVG or PDF file.

    Args:
        folders: the run folders.
        figure: a name in `figures.FIGURES`, or of any metric in `metrics.jsonl`.
        out: the file to write; its suffix is the format.
        watch: is called with which run is being read.

    Returns:
        Notes on the runs: what could not be read of them, and why.

    Raises:
        RunError: a folder holds no run, there is no such figure, or the file cannot be written.
    """
    if out.suffix.lower() not in PICTURES:
        raise RunError(f"cannot write {out}. Use a file name that ends in {', '.join(PICTURES)}")
    writable(out, "the figure")
    records = gather(folders, watch)
    names = [record.label for record in records]
    content = draw(
        charts(figure, records), names, out.suffix.lower().lstrip("."), looks_of(records)
    )
    write_beside(out, content)
    return notes_on(records)


def looks_of(records: Sequence[Record]) -> list[Look]:
    """The looks of runs, by their methods."""
    return looks([str(record.settings.get("method.name", "")) for record in records])


def draw(found: Sequence[Chart], names: Sequence[str], form: str, own: Sequence[Look]) -> bytes:
    """Charts side by side, as the bytes of a file.

    Args:
        found: the charts, of one kind.
        names: of the runs.
        form: `png`, `svg` or `pdf`.
        own: looks of the runs.
    """
    from matplotlib import rc_context

    with rc_context(_STYLE):
        file = io.BytesIO()
        date = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
        figure_of(found, names, own).savefig(file, format=form, dpi=200, metadata=date[form])
    return file.getvalue()


def figure_of(found: Sequence[Chart], names: Sequence[str], own: Sequence[Look]) -> "Shown":
    """Charts side by side, as a figure.

    Args:
        found: the charts, of one kind.
        names: of the runs.
        own: looks of the runs.
    """
    from matplotlib import rc_context

    from fedbayes.reports.shown import Shown

    columns = min(len(found), 3)
    rows = -(-len(found) // columns)
    width, height = (5.2, 3.4 + 0.35 * _taller(found)) if len(found) == 1 else (4.2, 4.0)
    if isinstance(found[0], Reliability):
        width, height = 4.6, 5.2
    with rc_context(_STYLE):
        figure = Shown(figsize=(width * columns, height * rows), layout="constrained")
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes in panels[len(found) :]:
            axes.axis("off")
        for chart, axes in zip(found, panels, strict=False):
            match chart:
                case Lines():
                    draw_lines(axes, chart, names, own)
                case Spread():
                    _spread(axes, chart, names, own)
                case Heat():
                    _heat(axes, chart)
                    if len(names) > 1:
                        title = ", ".join(names[run] for run in chart.runs)
                        axes.set_title(title, fontsize="medium", wrap=True)
                case Points():
                    _points(axes, chart, names, own)
                case Reliability():
                    (run,) = chart.runs
                    reliability(axes, chart, own[run], names[run] if len(names) > 1 else "")
    literally(figure)
    return figure


def _taller(found: Sequence[Chart]) -> int:
    """Rows that a chart needs room for, beyond a few."""
    chart = found[0]
    if isinstance(chart, Spread):
        return max(0, len(chart.groups) - 4)
    return max(0, len(chart.rows) - 8) // 2 if isinstance(chart, Heat) else 0


def draw_lines(
    axes: "Axes", chart: Lines, names: Sequence[str] = ("",), own: Sequence[Look] = (PLAIN,)
) -> None:
    """Curves with markers.

    Args:
        axes: where.
        chart: what is drawn.
        names: of the runs, for a legend if there are several.
        own: looks of the runs.
    """
    from matplotlib.ticker import MaxNLocator

    named = set()
    if chart.diagonal:
        axes.plot([0, 1], [0, 1], color=LIGHT.faint, linestyle="--", linewidth=1)
    for curve in chart.curves:
        if not curve.x:
            continue
        look = own[curve.run]
        axes.plot(
            curve.x,
            curve.y,
            color=look.colour(),
            marker=look.marker,
            markevery=max(1, len(curve.x) // MARKS),
            markersize=4.5,
            markerfacecolor=LIGHT.paper if curve.dashed else look.colour(),
            linewidth=1.4,
            linestyle="--" if curve.dashed else "-",
            label=None if curve.run in named else in_legend(names[curve.run]),
        )
        named.add(curve.run)
    axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
    if chart.log:
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if chart.x_label == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(names) > 1:
        axes.legend(fontsize="small", frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    if chart.styles:
        axes.set_title(chart.styles, fontsize="medium")


def _points(axes: "Axes", chart: Points, names: Sequence[str], own: Sequence[Look]) -> None:
    (run,) = chart.runs
    look = own[run]
    ends = [min(*chart.x, *chart.y), max(*chart.x, *chart.y)]
    axes.plot(ends, ends, color=LIGHT.faint, linestyle=":", linewidth=1)
    axes.scatter(
        chart.x, chart.y, s=14, color=look.colour(), alpha=0.6, linewidths=0, marker=look.marker
    )
    axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(names) > 1:
        axes.set_title(names[run], fontsize="medium", wrap=True)


def _spread(axes: "Axes", chart: Spread, names: Sequence[str], own: Sequence[Look]) -> None:
    for height, group in enumerate(chart.groups):
        values = np.array(group.values)
        colour = own[group.run].colour()
        axes.boxplot(
            values,
            positions=[height],
            orientation="horizontal",
            widths=0.55,
            showfliers=False,
            medianprops={"color": LIGHT.ink, "linewidth": 2},
            boxprops={"color": colour},
            whiskerprops={"color": colour},
            capprops={"color": colour},
        )
        # Equal values lie above one another, not upon one another.
        jitter = np.random.default_rng(0).uniform(-0.2, 0.2, len(values))
        axes.scatter(
            values,
            height + jitter,
            s=14,
            color=colour,
            alpha=0.6,
            linewidths=0,
            marker=own[group.run].marker,
        )
    axes.set_yticks(range(len(chart.groups)), [names[group.run] for group in chart.groups])
    axes.invert_yaxis()
    axes.set_xlabel(chart.x_label, wrap=True)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _heat(axes: "Axes", chart: Heat) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    counts = np.array(chart.counts)
    totals = counts.sum(axis=1 if chart.by == "row" else 0, keepdims=True)
    shares = counts / np.maximum(totals, 1)
    ramp = LinearSegmentedColormap.from_list("", [LIGHT.paper, LIGHT.heat])
    image = axes.imshow(shares, cmap=ramp, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, label=f"share of the {_whole(chart)}")
    axes.set(xlabel=chart.column_label, ylabel=chart.row_label)
    for axis, labels in ((axes.xaxis, chart.columns), (axes.yaxis, chart.rows)):
        step = -(-len(labels) // MOST_LABELS)
        axis.set_ticks(range(0, len(labels), step), labels[::step])
    if max(map(len, chart.columns)) > 2:
        axes.tick_params(axis="x", rotation=90)
    if chart.by == "row" and max(counts.shape) <= MOST_NUMBERS:
        for (row, column), count in np.ndenumerate(counts):
            if count:
                colour = LIGHT.paper if shares[row, column] > 0.5 else LIGHT.ink
                axes.text(column, row, count, ha="center", va="center", color=colour, size=6)


def reliability(axes: "Axes", chart: Reliability, look: Look = PLAIN, name: str = "") -> None:
    """Accuracy over confidence, and below it the number of samples of each point.

    Args:
        axes: gives its place to the two parts.
        chart: what is drawn.
        look: its colour and marker.
        name: of the run, for the title.
    """
    figure, place = axes.figure, axes.get_subplotspec()
    if place is None:
        raise ValueError("a reliability diagram needs a grid of subplots")
    axes.remove()
    parts = place.subgridspec(2, 1, height_ratios=(3, 1), hspace=0.04)
    above = figure.add_subplot(parts[0])
    below = figure.add_subplot(parts[1], sharex=above)
    colour = look.colour()
    confidence = [one.confidence for one in chart.bins]
    accuracy = [one.accuracy for one in chart.bins]
    above.plot([0, 1], [0, 1], color=LIGHT.faint, linestyle=":", linewidth=1)
    above.fill_between(confidence, confidence, accuracy, color=colour, alpha=0.25, linewidth=0)
    above.plot(
        confidence, accuracy, color=colour, marker=look.marker, markersize=4.5, linewidth=1.4
    )
    above.set(ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.03))
    error = f"calibration error {chart.error:.4f}"
    above.set_title(f"{name}\n{error}" if name else error, fontsize="medium", wrap=True)
    above.tick_params(axis="x", labelbottom=False)
    for one in chart.bins:
        width = one.high - one.low
        below.bar(one.low, one.count, width, align="edge", color=colour, alpha=0.35, edgecolor="w")
        below.annotate(
            f"{one.count:,}",
            ((one.low + one.high) / 2, one.count),
            xytext=(0, 1.5),
            textcoords="offset points",
            ha="center",
            va="bottom",
            rotation=90 if width < 0.1 else 0,
            size=6,
            color=LIGHT.ink,
        )
    # The numbers stand upright on the bars.
    below.set(ylabel="samples", yticks=[], ylim=(0, 1.7 * max(one.count for one in chart.bins)))
    below.set_xlabel("confidence\n" + _folded(chart.note), fontsize="small")
    for part in (above, below):
        part.spines[["top", "right"]].set_visible(False)
        part.grid(alpha=0.3)


def _folded(text: str) -> str:
    """A note in lines that fit under a figure."""
    return "\n".join(textwrap.wrap(text, 58))


def _whole(chart: Heat) -> str:
    return chart.row_label if chart.by == "row" else chart.column_label
