"""One self-contained HTML page of methods side by side; needs no network."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean, stdev
from typing import Any

from fedbayes.reports.charts import ChartCurve, Lines, filled, widely_spread
from fedbayes.reports.palette import looks
from fedbayes.reports.template import filled as filled_page
from fedbayes.storage.formatting import words

Line = tuple[Sequence[float], Sequence[float]]
"""x and y, round by round; y is NaN where there is none."""
Bins = Sequence[tuple[float, float, int]]
"""Mean confidence, accuracy and number of samples of each bin."""


@dataclass(frozen=True)
class Series:
    """The results of a method's runs, by seed."""

    label: str
    method: str
    """Its name, by which it has its colour."""
    rounds: Mapping[str, Sequence[Line]]
    """Of each metric its curve over rounds, a curve for each seed."""
    over_bytes: Sequence[Line]
    """The headline metric over MB sent up to then."""
    reliability: Sequence[Bins]
    selective: Sequence[Sequence[float]]
    """Accuracy at coverages that are evenly spaced up to 1."""


@dataclass(frozen=True)
class ComparisonPart:
    """What the page has of one config."""

    task: str
    metric: str
    """The headline of the likelihood."""
    heads: Sequence[str]
    rows: Sequence[tuple[str, Sequence[tuple[str, float | None, str]]]]
    """Of each method its name, and for each column what is shown, what is sorted by, and `best`,
    `near` or nothing."""
    series: Sequence[Series]


def render(
    parts: Sequence[ComparisonPart], notes: Sequence[str], content: Mapping[str, Any]
) -> str:
    """The page of a comparison.

    Args:
        parts: what is shown of each config.
        notes: what is to be known of the tables.
        content: the comparison as JSON, which the page holds too.
    """
    methods = {one.label: one.method for part in parts for one in part.series}
    names = list(methods)
    charts: list[Lines] = []
    placed = []
    for part in parts:
        own = [chart for chart in _charts(part, names) if filled(chart)]
        placed.append((part, range(len(charts), len(charts) + len(own)), _winner(part)))
        charts += own
    return filled_page(
        "comparison.html",
        names,
        looks(list(methods.values())),
        charts,
        data=content,
        parts=placed,
        notes=notes,
    )


def _winner(part: ComparisonPart) -> tuple[str, str, str] | None:
    """The best value of the first column, its head and its method; None of a tie."""
    best = [(label, cells[0][0]) for label, cells in part.rows if cells and cells[0][2] == "best"]
    if len(best) != 1:
        return None
    ((label, text),) = best
    return text, part.heads[0], label


def _charts(part: ComparisonPart, names: Sequence[str]) -> Iterator[Lines]:
    """Curves of all methods: over rounds, over bytes, and of what their uncertainty is worth."""
    several = any(len(lines) > 1 for one in part.series for lines in one.rounds.values())
    bands = "Mean over seeds, with a band of one standard deviation." if several else ""
    runs = {one.label: names.index(one.label) for one in part.series}
    for name in dict.fromkeys(name for one in part.series for name in one.rounds):
        lines = {runs[one.label]: one.rounds.get(name, ()) for one in part.series}
        yield means(name, f"{words(name)} over rounds", "round", words(name), lines, bands)
    name = words(f"global_{part.metric}")
    lines = {runs[one.label]: one.over_bytes for one in part.series}
    yield means("bytes", f"{name} over bytes", "MB sent", name, lines, bands)
    yield Lines(
        "reliability",
        "Reliability",
        "confidence",
        "accuracy",
        [
            ChartCurve(runs[one.label], [c for c, _, _ in bins], [a for _, a, _ in bins])
            for one in part.series
            for bins in one.reliability
        ],
        "Share of correct predictions by "
        f"confidence{', a line for each seed' if several else ''}. Below the dashed line the "
        "model is overconfident.",
        diagonal=True,
    )
    yield Lines(
        "selective",
        "Selective prediction",
        "coverage: share of samples predicted",
        "accuracy of these",
        [
            ChartCurve(runs[one.label], [(i + 1) / len(curve) for i in range(len(curve))], curve)
            for one in part.series
            if one.selective
            for curve in [[fmean(values) for values in zip(*one.selective, strict=True)]]
        ],
        "Accuracy on the most confident share of the test samples"
        f"{', mean over seeds' if several else ''}.",
    )


def means(
    key: str, title: str, x: str, y: str, lines: Mapping[int, Sequence[Line]], note: str
) -> Lines:
    """Means over seeds with bands; a point where all seeds of a method have one.

    Args:
        key: of the chart.
        title: of the chart.
        x: label of the axis across.
        y: label of the other axis.
        lines: of each method, by its place among all, a line for each seed.
        note: of the chart.
    """
    curves, values = [], []
    for run, own in lines.items():
        rounds = _shared(own)
        ys = [[line[1][at] for line in own] for at in rounds]
        middle = [fmean(each) for each in ys]
        gaps = [stdev(each) for each in ys] if len(own) > 1 else []
        values += [value for each in ys for value in each]
        curves.append(
            ChartCurve(
                run,
                [fmean(line[0][at] for line in own) for at in rounds],
                middle,
                low=[mean - gap for mean, gap in zip(middle, gaps, strict=False)],
                high=[mean + gap for mean, gap in zip(middle, gaps, strict=False)],
            )
        )
    return Lines(key, title[:1].upper() + title[1:], x, y, curves, note, log=widely_spread(values))


def _shared(lines: Sequence[Line]) -> list[int]:
    """Places of the rounds in which all lines have a value."""
    rounds = range(min((len(x) for x, _ in lines), default=0))
    return [at for at in rounds if all(isfinite(y[at]) for _, y in lines)]
