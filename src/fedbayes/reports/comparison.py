"""One self-contained HTML page of methods side by side; needs no network."""

import json
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from fedbayes.data.plot import drawn, in_legend
from fedbayes.reports.charts import widely_spread
from fedbayes.reports.page import environment, stamp
from fedbayes.reports.palette import LIGHT, MARKERS
from fedbayes.runs.readable import words
from fedbayes.version import __version__

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Line = tuple[Sequence[float], Sequence[float]]
"""x and y, round by round; y is NaN where there is none."""
Bins = Sequence[tuple[float, float, int]]
"""Mean confidence, accuracy and number of samples of each bin."""


@dataclass(frozen=True)
class Series:
    """What a method's runs tell, by seed."""

    label: str
    rounds: Mapping[str, Sequence[Line]]
    """Of each metric its curve over rounds, a curve for each seed."""
    over_bytes: Sequence[Line]
    """The headline metric over MB sent up to then."""
    reliability: Sequence[Bins]
    selective: Sequence[Sequence[float]]
    """Accuracy at coverages that are evenly spaced up to 1."""


@dataclass(frozen=True)
class Part:
    """What the page has of one config."""

    task: str
    metric: str
    """The headline of the likelihood."""
    heads: Sequence[str]
    rows: Sequence[tuple[str, Sequence[tuple[str, float | None, str]]]]
    """Of each method its name, and for each column what is shown, what is sorted by, and `best`,
    `near` or nothing."""
    series: Sequence[Series]


def render(parts: Sequence[Part], notes: Sequence[str], content: Mapping[str, Any]) -> str:
    """The page of a comparison.

    Args:
        parts: what is shown of each config.
        notes: what is to be known of the tables.
        content: the comparison as JSON, which the page holds too.
    """
    return (
        environment()
        .get_template("comparison.html")
        .render(
            parts=[(part, _pictures(part)) for part in parts],
            notes=notes,
            made=stamp(),
            version=__version__,
            light=LIGHT,
            data=json.loads(json.dumps(content, allow_nan=False)),
        )
    )


def _pictures(part: Part) -> list[tuple[str, str, str]]:
    """Figures with something to show: title, source, and what it is in words."""
    found = []
    for name in dict.fromkeys(name for one in part.series for name in one.rounds):
        title = _begun(f"{words(name)} over rounds")
        lines = {one.label: one.rounds.get(name, ()) for one in part.series}
        found.append((title, _curves(lines, "round", words(name)), _BANDS))
    name = words(f"global_{part.metric}")
    lines = {one.label: one.over_bytes for one in part.series}
    found.append((_begun(f"{name} over bytes"), _curves(lines, "MB sent", name), _BANDS))
    bins = {one.label: one.reliability for one in part.series}
    found.append(("Reliability", _each(bins, _reliability), _RELIABILITY))
    curves = {one.label: one.selective for one in part.series}
    found.append(("Selective prediction", _each(curves, _selective), _SELECTIVE))
    return [(title, _source(figure), note) for title, figure, note in found if figure is not None]


def _begun(words: str) -> str:
    return words[:1].upper() + words[1:]


_BANDS = "Lines: mean over seeds. Bands: one standard deviation on either side."
_RELIABILITY = (
    "Share of right predictions over their confidence, a line for each seed. Below the dashed line "
    "predictions are surer than they should be."
)
_SELECTIVE = (
    "Accuracy of the surest share of the test samples, mean over seeds: what it would be if the "
    "others were left to someone else."
)


def _source(figure: "Figure") -> str:
    return f"data:image/svg+xml;base64,{b64encode(drawn(figure, 'svg')).decode()}"


def _figure() -> "tuple[Figure, Axes]":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, color="#00000014")
    return figure, axes


def _colour(place: int) -> str:
    return LIGHT.runs[place % len(LIGHT.runs)]


def _curves(lines: Mapping[str, Sequence[Line]], x: str, y: str) -> "Figure | None":
    """Means over seeds with bands; a point where all seeds of a method have one."""
    if not any(_shared(own) for own in lines.values()):
        return None
    figure, axes = _figure()
    for place, (label, own) in enumerate(lines.items()):
        rounds = _shared(own)
        if not rounds:
            continue
        xs = [fmean(line[0][at] for line in own) for at in rounds]
        ys = [[line[1][at] for line in own] for at in rounds]
        means = [fmean(values) for values in ys]
        axes.plot(
            xs,
            means,
            color=_colour(place),
            marker=MARKERS[place % len(MARKERS)],
            markevery=max(1, len(rounds) // 10),
            markersize=4,
            label=in_legend(label),
        )
        if len(own) > 1:
            spread = [stdev(values) for values in ys]
            low = [mean - gap for mean, gap in zip(means, spread, strict=True)]
            high = [mean + gap for mean, gap in zip(means, spread, strict=True)]
            axes.fill_between(xs, low, high, color=_colour(place), alpha=0.15, linewidth=0)
    values = [line[1][at] for own in lines.values() for at in _shared(own) for line in own]
    if widely_spread(values):
        axes.set_yscale("log")
    axes.set(xlabel=x, ylabel=y)
    axes.legend(fontsize="small")
    return figure


def _shared(lines: Sequence[Line]) -> list[int]:
    """Places of the rounds in which all lines have a value."""
    rounds = range(min((len(x) for x, _ in lines), default=0))
    return [at for at in rounds if all(isfinite(y[at]) for _, y in lines)]


def _each(
    own: Mapping[str, Sequence[Any]], draw: "Callable[[Axes, int, str, Sequence[Any]], None]"
) -> "Figure | None":
    """A figure of all methods that have something to draw."""
    if not any(len(one) for each in own.values() for one in each):
        return None
    figure, axes = _figure()
    for place, (label, each) in enumerate(own.items()):
        if some := [one for one in each if len(one)]:
            draw(axes, place, label, some)
    if draw is _reliability:
        axes.plot([0, 1], [0, 1], "--", color=LIGHT.faint, linewidth=1)
    axes.legend(fontsize="small")
    return figure


def _reliability(axes: "Axes", place: int, label: str, each: Sequence[Bins]) -> None:
    for seed, bins in enumerate(each):
        axes.plot(
            [confidence for confidence, _, _ in bins],
            [accuracy for _, accuracy, _ in bins],
            color=_colour(place),
            marker=MARKERS[place % len(MARKERS)],
            markersize=4,
            alpha=0.8,
            label=None if seed else in_legend(label),
        )
    axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.02))


def _selective(axes: "Axes", place: int, label: str, each: Sequence[Sequence[float]]) -> None:
    points = len(each[0])
    means = [fmean(curve[i] for curve in each) for i in range(points)]
    coverage = [(i + 1) / points for i in range(points)]
    axes.plot(coverage, means, color=_colour(place), label=in_legend(label))
    axes.set(xlabel="coverage: share that is predicted", ylabel="accuracy of these")
