"""What charts of pages are made of: axes, curves, markers and swatches, as SVG.

Across, everything is placed by percentages, so that a chart fills its card and its text keeps its
size; down, by pixels.
"""

import json
import math
from collections.abc import Iterable, Sequence
from html import escape

from markupsafe import Markup

from fedbayes.reports.palette import MARKERS, Look, heat_css, run_css

Stop = tuple[float, float, str | list[tuple[int, str]]]
"""Where something is to be read: a fraction across, pixels down, and the text, or one for each run
(-1: of all)."""
LETTER = 6.6
"""Pixels of a letter, about."""
_SHAPES = {
    "o": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0",
    "s": "M-3.6 -3.6h7.2v7.2h-7.2z",
    "^": "M0 -4.6L4.4 3.4H-4.4z",
    "D": "M0 -4.8L4.8 0L0 4.8L-4.8 0z",
    "v": "M0 4.6L4.4 -3.4H-4.4z",
    "P": "M-1.6 -4.4h3.2v2.8h2.8v3.2h-2.8v2.8h-3.2v-2.8h-2.8v-3.2h2.8z",
    "X": "M-4 -2.2L-2.2 -4L0 -1.8L2.2 -4L4 -2.2L1.8 0L4 2.2L2.2 4L0 1.8L-2.2 4L-4 2.2L-1.8 0z",
    "<": "M-4.6 0L3.4 -4.4V4.4z",
}


def defs() -> Markup:
    """The markers; once on each page."""
    shapes = "".join(
        f'<path id="m{place}" d="{_SHAPES[marker]}"/>' for place, marker in enumerate(MARKERS)
    )
    head = '<svg width="0" height="0" style="position: absolute" aria-hidden="true">'
    return Markup(f"{head}<defs>{shapes}</defs></svg>")


def key(look: Look) -> Markup:
    """The swatch of a run next to its name."""
    return Markup(
        f'<svg class="key" width="26" height="12" aria-hidden="true" fill="currentColor" '
        f'style="color: {run_css(look)}">'
        f'<path d="M0 6H26" stroke="currentColor" stroke-width="2"/>{mark(look, "13", 6)}</svg>'
    )


def spark(values: Sequence[float], look: Look) -> Markup:
    """How a number changed, as a small curve; nothing for less than two values."""
    if len(values) < 2:
        return Markup("")
    low, high = min(values), max(values)
    room = (high - low) or 1.0
    steps = len(values) - 1
    points = [
        f"{1000 * i / steps:.0f} {56 - 52 * (v - low) / room:.1f}" for i, v in enumerate(values)
    ]
    path = "M" + "L".join(points)
    return Markup(
        '<svg class="spark" viewBox="0 0 1000 60" preserveAspectRatio="none" aria-hidden="true" '
        f'style="color: {run_css(look)}"><path class="band" d="{path}L1000 60L0 60z"/>'
        f'<path class="line" d="{path}"/></svg>'
    )


def ticks(low: float, high: float, count: int) -> list[float]:
    """About so many round numbers; the first is not above `low`, the last not below `high`."""
    if low == high:
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{step * at:.12g}") for at in range(first, last + 1)]


def powers(low: float, high: float) -> list[float]:
    """Round numbers between two on a logarithmic axis."""
    wide = math.log10(high / low)
    steps = (1,) if wide > 3 else (1, 2, 5)
    every = max(1, round(wide / 6))
    first = math.floor(math.log10(low))
    found = [
        s * 10.0**power
        for power in range(first, math.ceil(math.log10(high)) + 1, every)
        for s in steps
    ]
    return [at for at in found if low <= at <= high]


def short(value: float) -> str:
    """A number next to an axis."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.4g} M"
    return f"{value / 1e3:.4g} k" if size >= 1e4 else f"{value:.4g}"


class ChartAxis:
    """From values to places: 0 to 1 along an axis.

    Args:
        values: all that are shown.
        log: whether it is logarithmic.
        count: ticks, about.
        round_ends: whether it begins and ends at a tick.
    """

    def __init__(self, values: Sequence[float], log: bool, count: int, round_ends: bool) -> None:
        self._log = log
        low, high = min(values), max(values)
        if high - low < 1e-9 * max(abs(low), abs(high)):
            high = low  # but for rounding they are the same
        if log:
            low, high = low / 1.12, high * 1.12
            self.ticks = powers(low, high) or [min(values)]
        else:
            self.ticks = ticks(low, high, count)
            if round_ends:
                low, high = self.ticks[0], self.ticks[-1]
            elif low == high:
                low, high = low - 0.5, high + 0.5
        self._low, self._high = self._level(low), self._level(high)
        self.ticks = [at for at in self.ticks if -1e-9 <= self(at) <= 1 + 1e-9]

    def _level(self, value: float) -> float:
        return math.log10(value) if self._log else value

    def __call__(self, value: float) -> float:
        """Where a value is."""
        return (self._level(value) - self._low) / (self._high - self._low)


def heat_key(label: str) -> Markup:
    """The legend of the colours of a heat map."""
    cells = ""
    for share in (0.0, 0.05, 0.25, 0.5, 1.0):
        fill, on = heat_css(share)
        cells += f'<i style="background: {fill}; color: {on}">{share:.0%}</i>'
    return Markup(f'<p class="scale">{cells} <span>{escape(label)}</span></p>')


def grid(labels: Iterable[tuple[float, str]]) -> str:
    """Lines across, and their numbers at the left."""
    return "".join(
        f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="-8" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
        for y, text in labels
    )


def under(labels: Iterable[tuple[float, str]], floor: float) -> list[str]:
    """The axis below, and its numbers."""
    found = [f'<line class="axis" x1="0" x2="100%" y1="{floor}" y2="{floor}"/>']
    for x, text in labels:
        at = f"{100 * x:.2f}%"
        found.append(
            f'<line class="axis" x1="{at}" x2="{at}" y1="{floor}" y2="{floor + 4}"/>'
            f'<text x="{at}" y="{floor + 18}" text-anchor="middle">{text}</text>'
        )
    return found


def path(places: Iterable[tuple[float, float]], more: str = "", kind: str = "line") -> str:
    """A curve, or an area, of fractions across and pixels down."""
    d = "L".join(f"{1000 * x:.1f} {y:.1f}" for x, y in places)
    return f'<path class="{kind}" d="M{d}"{more}/>'


def stretched(paths: Sequence[str]) -> str:
    """Paths whose 1000 units across are the width of the plot."""
    return (
        '<svg class="stretched" viewBox="0 0 1000 1" preserveAspectRatio="none" width="100%" '
        f'height="1">{"".join(paths)}</svg>'
    )


def mark(look: Look, x: str, y: float, *, hollow: bool = False) -> str:
    """The marker of a run."""
    kind = ' class="hollow"' if hollow else ""
    return f'<use href="#m{MARKERS.index(look.marker)}" x="{x}" y="{y:.1f}"{kind}/>'


def of_run(run: int, look: Look, inside: str) -> str:
    """What belongs to a run, in its colour."""
    return f'<g class="run" data-run="{run}" style="color: {run_css(look)}">{inside}</g>'


def clipped(text: str, most: int) -> str:
    """A text of so many letters at most, escaped."""
    return escape(text if len(text) <= most else f"{text[: max(1, most - 1)]}…")


def plot(
    title: str,
    height: float,
    parts: Sequence[str],
    stops: Sequence[Stop],
    *,
    by_x: bool = False,
    left: float | None = None,
    below: float = 24,
) -> str:
    """The drawing of a chart.

    Args:
        title: what it shows, for who does not see it; empty if another drawing says so.
        height: pixels.
        parts: what is drawn.
        stops: what can be read at its places.
        by_x: whether the nearest stop is the nearest across.
        left: pixels for the labels of rows; those of numbers by default.
        below: pixels for what is below.
    """
    told = ""
    if stops:
        rounded = [(round(x, 4), round(y, 1), text) for x, y, text in stops]
        kept = json.dumps(rounded, ensure_ascii=False, separators=(",", ":"))
        told = f' tabindex="0" data-by="{"x" if by_x else "xy"}" data-stops=\'{escape(kept)}\''
    role = f'role="img" aria-label="{escape(title)}"' if title else 'aria-hidden="true"'
    place = f"--below: {below:.0f}px" + (f"; --left: {left:.0f}px" if left is not None else "")
    head = f'<svg class="plot" height="{height:.1f}" style="{place}" {role}{told}>'
    return f"{head}{''.join(parts)}</svg>"


def framed(svg: str, above: str, below: str, left: float | None = None) -> str:
    """A plot with the names of its axes."""
    place = f' style="--left: {left:.0f}px"' if left is not None else ""
    head = f'<p class="y">{escape(above)}</p>' if above else ""
    return f'<div class="chart"{place}>{head}{svg}<p class="x">{escape(below)}</p></div>'
