"""Kinds of charts, as plain data for whoever draws them: the page, a figure for a paper."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from fedbayes.core.metrics import Calibration, Coverage

LEAST_SAMPLES, LEAST_SHARE = 10, 0.01
"""Samples, and share of all samples, that a bin of a reliability diagram has at least."""
WIDE = 100.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""


@dataclass(frozen=True)
class ChartCurve:
    """One line of a chart."""

    run: int
    """Which run it belongs to: colour and marker."""
    x: list[float]
    y: list[float]
    dashed: bool = False
    low: list[float] = field(default_factory=list)
    """Lower end of a band around it, point by point; empty where there is none."""
    high: list[float] = field(default_factory=list)
    """Upper end likewise."""


@dataclass(frozen=True)
class Lines:
    """Curves over rounds or bytes."""

    key: str
    title: str
    x_label: str
    y_label: str
    curves: list[ChartCurve]
    note: str = ""
    log: bool = False
    """Whether the values are of such different sizes that their axis is logarithmic."""
    styles: str = ""
    """What solid and dashed curves are."""
    dashed: str = "ideal"
    """What a dashed curve is, in a word or two."""
    log_x: bool = False
    """Whether the other axis is logarithmic too."""
    diagonal: bool = False
    """Whether both axes are shares, and a line marks where they are equal."""


@dataclass(frozen=True)
class ChartGroup:
    """The clients of one run."""

    run: int
    names: list[str]
    values: list[float]


@dataclass(frozen=True)
class Spread:
    """A distribution over clients for each run."""

    key: str
    title: str
    x_label: str
    groups: list[ChartGroup]
    note: str = ""


@dataclass(frozen=True)
class Heat:
    """Counts in a grid; a cell is as strong as its share of its row, or of its column."""

    key: str
    title: str
    runs: list[int]
    """The runs that it is true of."""
    row_label: str
    rows: list[str]
    column_label: str
    columns: list[str]
    counts: list[list[int]]
    by: str
    """`row` or `column`: whose total a cell is a share of."""
    note: str = ""


@dataclass(frozen=True)
class Points:
    """True values and predictions of them, one point for each sample."""

    key: str
    title: str
    runs: list[int]
    """The run that it is true of."""
    x_label: str
    y_label: str
    x: list[float]
    y: list[float]
    note: str = ""


@dataclass(frozen=True)
class Bin:
    """Predictions of about the same confidence."""

    low: float
    """Confidence that the bin begins at."""
    high: float
    """Confidence that it ends at."""
    confidence: float
    """Mean confidence of its samples."""
    accuracy: float
    """Share of them that is right."""
    count: int
    """Number of samples."""


@dataclass(frozen=True)
class Reliability:
    """How often predictions of some confidence are right."""

    key: str
    title: str
    runs: list[int]
    """The run that it is true of."""
    bins: list[Bin]
    """Bins with enough samples to be drawn, by rising confidence; none is empty."""
    error: float
    """Expected calibration error, of the bins before any were merged."""
    note: str = ""


Chart = Lines | Spread | Heat | Points | Reliability


def coverage_curve(found: Coverage, run: int = 0) -> Lines:
    """The share of targets inside intervals over the probability that these have."""
    return Lines(
        "coverage",
        "Coverage of intervals",
        "probability of a central interval",
        "share of targets inside the interval",
        [ChartCurve(run, list(found.levels), list(found.inside))],
        "Below the dashed line intervals are too narrow: the model is overconfident. Intervals "
        "of counts contain slightly more than their probability.",
        styles=f"mean distance from the dashed line {found.error:.4f}",
        diagonal=True,
    )


def diagram(calibration: Calibration, run: int = 0) -> Reliability:
    """A reliability diagram whose bins have enough samples.

    Bins under `LEAST_SAMPLES` or `LEAST_SHARE` of the samples are merged with the neighbour that
    has fewer; the calibration error stays that of the bins as they are defined.

    Args:
        calibration: bins of equal width.
        run: which run it is true of.
    """
    width = 1 / len(calibration.count)
    bins = [
        Bin(index * width, (index + 1) * width, float(confidence), float(accuracy), int(count))
        for index, (confidence, accuracy, count) in enumerate(
            zip(calibration.confidence, calibration.accuracy, calibration.count, strict=True)
        )
        if count
    ]
    total = sum(one.count for one in bins)
    least = max(LEAST_SAMPLES, math.ceil(LEAST_SHARE * total))
    before = len(bins)
    while len(bins) > 1 and min(one.count for one in bins) < least:
        thin = min(range(len(bins)), key=lambda index: bins[index].count)
        beside = [index for index in (thin - 1, thin + 1) if 0 <= index < len(bins)]
        first, second = sorted((thin, min(beside, key=lambda index: bins[index].count)))
        bins[first : second + 1] = [_merged(bins[first], bins[second])]
    note = (
        f"Expected calibration error {calibration.error:.4f}, of {len(calibration.count)} bins of "
        "equal width (Guo et al., 2017)"
    )
    if len(bins) < before:
        note += f"; drawn with bins of fewer than {least} samples merged"
    if calibration.untold:
        note += f"; without {calibration.untold} samples that have no prediction"
    note += "."
    return Reliability("reliability", "Reliability diagram", [run], bins, calibration.error, note)


def _merged(a: Bin, b: Bin) -> Bin:
    count = a.count + b.count
    return Bin(
        a.low,
        b.high,
        (a.confidence * a.count + b.confidence * b.count) / count,
        (a.accuracy * a.count + b.accuracy * b.count) / count,
        count,
    )


def filled(chart: Chart) -> bool:
    """Whether there is anything to draw."""
    match chart:
        case Lines():
            return any(curve.x for curve in chart.curves)
        case Spread():
            return bool(chart.groups)
        case Heat():
            return bool(chart.counts)
        case Points():
            return bool(chart.x)
        case Reliability():
            return bool(chart.bins)


def telling(chart: Chart) -> bool:
    """Whether a chart shows more than the table of runs.

    The sparsity and the size of a model that stay as they are do not.
    """
    if isinstance(chart, Lines) and chart.key in ("sparsity", "size"):
        return any(_moves(curve.y) for curve in chart.curves)
    return filled(chart)


def _moves(values: Sequence[float]) -> bool:
    """Whether values differ by more than a thousandth: of themselves, or of 1 if they are less."""
    return bool(values) and max(values) - min(values) > 1e-3 * max(1.0, max(values))


def widely_spread(values: Sequence[float]) -> bool:
    """Whether values are of too different sizes for a linear axis."""
    return bool(values) and min(values) > 0 and max(values) / min(values) >= WIDE


def table(chart: Chart, names: Sequence[str]) -> tuple[list[str], list[list[str | float]]]:
    """The numbers of a chart, for a file: headings and rows.

    Args:
        chart: the chart.
        names: of the runs.
    """
    rows: list[list[str | float]]
    match chart:
        case Lines():
            banded = any(curve.low for curve in chart.curves)
            rows = []
            for c in chart.curves:
                name = f"{names[c.run]} ({chart.dashed})" if c.dashed else names[c.run]
                for i, (x, y) in enumerate(zip(c.x, c.y, strict=True)):
                    ends: list[str | float] = [c.low[i], c.high[i]] if c.low else ["", ""]
                    rows.append([name, x, y, *(ends if banded else [])])
            return ["run", chart.x_label, chart.y_label, *(["low", "high"] * banded)], rows
        case Spread():
            rows = [
                [names[group.run], name, value]
                for group in chart.groups
                for name, value in zip(group.names, group.values, strict=True)
            ]
            return ["run", "client", chart.x_label], rows
        case Heat():
            rows = [
                [row, column, count]
                for row, counts in zip(chart.rows, chart.counts, strict=True)
                for column, count in zip(chart.columns, counts, strict=True)
            ]
            return [chart.row_label, chart.column_label, "samples"], rows
        case Points():
            return [chart.x_label, chart.y_label], [
                list(pair) for pair in zip(chart.x, chart.y, strict=True)
            ]
        case Reliability():
            rows = [[b.low, b.high, b.confidence, b.accuracy, b.count] for b in chart.bins]
            return ["from", "to", "confidence", "accuracy", "samples"], rows
