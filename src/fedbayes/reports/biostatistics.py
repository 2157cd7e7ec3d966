"""Figures of biostatistics: survival curves with their intervals, and forest plots."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbayes.biostatistics import MetaAnalysis, Regression, Survival
from fedbayes.biostatistics.results import RATIOS
from fedbayes.core.files import writable, write_beside
from fedbayes.data.plot import PICTURES, drawn, in_legend, plain_numbers
from fedbayes.reports.palette import BLUE, LIGHT, ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_survival(survival: Survival, path: Path, level: float = 0.95) -> None:
    """Draw Kaplan-Meier curves, their intervals and the numbers at risk.

    Args:
        survival: the curves.
        path: PNG, SVG or PDF file; its suffix is the format.
        level: of the confidence intervals.

    Raises:
        RunError: the file cannot be written.
    """
    figure, axes = _figure(path, 7.0, 4.0 + 0.22 * len(survival.curves))
    ends = [curve.times[-1] for curve in survival.curves.values() if len(curve.times)]
    last = max(ends, default=1.0)  # no client says its times of censoring
    for number, (name, curve) in enumerate(survival.curves.items()):
        colour = LIGHT.hues[number % len(LIGHT.hues)]
        times = np.concatenate([[0.0], curve.times, [last]])
        survived = np.concatenate([[1.0], curve.survival])
        low, high = np.concatenate([[[1.0, 1.0]], curve.intervals(level)]).T
        survived, low, high = (np.append(each, each[-1]) for each in (survived, low, high))
        label = f"{survival.by}={name}" if survival.by else "all"
        axes.step(
            times, survived, where="post", color=colour, label=in_legend(label), linewidth=1.5
        )
        axes.fill_between(times, low, high, step="post", color=colour, alpha=0.15, linewidth=0)
    axes.set(xlim=(0, last), ylim=(0, 1.02), ylabel="survival")
    axes.legend(frameon=False)
    if survival.test is not None:
        axes.set_title(f"log-rank test: p = {survival.test.p:.3g}", fontsize=10)
    _numbers_at_risk(axes, survival)
    _save(figure, path)


def _numbers_at_risk(axes: "Axes", survival: Survival) -> None:
    """Below the axis of times, how many are at risk at the first event from each tick on."""
    ticks = [tick for tick in axes.get_xticks() if 0 <= tick <= axes.get_xlim()[1]]
    lines = ["at risk at the next event"]
    axes.set_xticks(ticks)
    for row, (name, curve) in enumerate(survival.curves.items()):
        lines.append("")
        place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        height = -55 - 13 * row
        for tick in ticks:
            following = int(np.searchsorted(curve.times, tick))
            there = following < len(curve.times)
            count = f"{curve.at_risk[following]:,.0f}" if there else "–"
            axes.annotate(
                count,
                (tick, 0),
                (0, height),
                ha="center",
                fontsize=8,
                **place,  # type: ignore[arg-type]
            )
        axes.annotate(
            name,
            (0, 0),
            (-34, height),
            ha="right",
            fontsize=8,
            **place,  # type: ignore[arg-type]
        )
    axes.set_xlabel("time\n" + "\n".join(lines), fontsize=9)


def plot_forest(found: Regression | MetaAnalysis, path: Path, level: float = 0.95) -> None:
    """Draw coefficients and their intervals; of a meta-analysis, for every site and together.

    Args:
        found: the fit; the intercept is left out.
        path: PNG, SVG or PDF file; its suffix is the format.
        level: of the confidence intervals.

    Raises:
        RunError: the file cannot be written.
    """
    rows = _rows_of(found, level)
    figure, axes = _figure(path, 7.5, 1.2 + 0.24 * len(rows))
    places = np.arange(len(rows))[::-1]
    change = np.exp if found.ratio else np.asarray
    for place, (_, values, bold) in zip(places, rows, strict=True):
        if values is None:
            continue
        middle, low, high = change(np.array(values))
        colour = LIGHT.hues[BLUE] if bold else LIGHT.hues[ORANGE]
        axes.plot([low, high], [place, place], color=colour, linewidth=1.4)
        axes.plot([middle], [place], marker="D" if bold else "s", color=colour, markersize=5)
    if found.ratio:
        axes.set_xscale("log")
        plain_numbers(axes.xaxis)
    axes.axvline(1.0 if found.ratio else 0.0, color="0.6", linewidth=0.8, zorder=0)
    axes.set_yticks(places, [label for label, *_ in rows], fontsize=8)
    for text, (_, values, _) in zip(axes.get_yticklabels(), rows, strict=True):
        text.set_fontweight("bold" if values is None else "normal")
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.set_xlabel(f"{RATIOS.get(found.ratio, 'coefficient')} ({100 * level:g}% interval)")
    _save(figure, path)


_Row = tuple[str, tuple[float, float, float] | None, bool]
"""A label, the estimate with its interval (none for a heading), and whether it is a sum."""


def _rows_of(found: Regression | MetaAnalysis, level: float) -> list[_Row]:
    if isinstance(found, Regression):
        bounds = found.intervals(level)
        return [
            (name, (float(found.estimates[i]), float(bounds[i, 0]), float(bounds[i, 1])), False)
            for i, name in enumerate(found.names)
            if name != "intercept"
        ]
    rows: list[_Row] = []
    for term, pooled in found.coefficients.items():
        if term == "intercept":
            continue
        rows.append((f"{term}   I² {pooled.i2:.0%}, Q p = {pooled.q_p:.2g}", None, False))
        half = (pooled.effect(False, level)[3] - pooled.effect(False, level)[0]) * np.sqrt(
            pooled.fixed_weights.sum()
        )
        for site, b, error in zip(pooled.sites, pooled.estimates, pooled.std_errors, strict=True):
            rows.append((site, (float(b), float(b - half * error), float(b + half * error)), False))
        for name, random in (("fixed effect", False), ("random effects", True)):
            estimate, _, low, high, _ = pooled.effect(random, level)
            rows.append((name, (estimate, low, high), True))
    return rows


def _figure(path: Path, width: float, height: float) -> "tuple[Figure, Axes]":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    writable(path, "the figure", PICTURES)
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _save(figure: "Figure", path: Path) -> None:
    write_beside(path, drawn(figure, path.suffix.lower().lstrip(".")))
