"""Charts as SVG for a page: drawn once, for any width and both themes, without a script.

What is to be read under the pointer is in `data-stops` for `page.js`:
fractions across, pixels down, and a text, or a text for each run.
"""

import math
from collections.abc import Sequence
from html import escape

from markupsafe import Markup

from fedbayes.reports.charts import Bin, Chart, Heat, Lines, Points, Reliability, Spread
from fedbayes.reports.marks import (
    LETTER,
    ChartAxis,
    Stop,
    clipped,
    framed,
    grid,
    heat_key,
    key,
    mark,
    of_run,
    path,
    plot,
    short,
    stretched,
    under,
)
from fedbayes.reports.palette import Look, heat_css
from fedbayes.storage.formatting import number

HEIGHT = 220
"""Pixels of a plot, without what is written around it."""
MARKS = 24
"""Markers on a curve at most."""
MOST_NAMED = 40
"""Columns of a heat map up to which each has its name."""
MOST_WRITTEN = 12
"""Rows of a heat map up to which counts stand in its cells."""


def draw(chart: Chart, names: Sequence[str], looks: Sequence[Look]) -> Markup:
    """A chart as the content of a card.

    Args:
        chart: what is shown.
        names: of the runs.
        looks: of the runs.
    """
    match chart:
        case Lines():
            return Markup(_lines(chart, names, looks))
        case Spread():
            return Markup(_spread(chart, names, looks))
        case Heat():
            return Markup(_heat(chart))
        case Points():
            return Markup(_points(chart, looks))
        case Reliability():
            return Markup(_reliability(chart, looks))


def _lines(chart: Lines, names: Sequence[str], looks: Sequence[Look]) -> str:
    curves = [curve for curve in chart.curves if curve.x]
    xs = [x for curve in curves for x in curve.x]
    ys = [y for c in curves for values in (c.y, c.low, c.high) for y in values]
    if chart.diagonal:
        xs, ys = [0.0, 1.0], [0.0, 1.0]
    rounds = chart.x_label == "round"
    across = ChartAxis(xs, chart.log_x, 6, chart.diagonal)
    if rounds:
        across.ticks = [at for at in across.ticks if at == int(at)]
    up = ChartAxis(ys, chart.log and min(ys) > 0, 5, True)

    def x(value: float) -> float:
        return 0.015 + 0.97 * across(value)

    def y(value: float) -> float:
        return HEIGHT * (1 - up(value))

    parts = [grid([(y(at), short(at)) for at in up.ticks])]
    parts += under([(x(at), short(at)) for at in across.ticks], HEIGHT)
    if chart.diagonal:
        parts.append(_diagonal())
    for curve in curves:
        look, places = (
            looks[curve.run],
            [(x(a), y(b)) for a, b in zip(curve.x, curve.y, strict=True)],
        )
        inside = [path(places, ' stroke-dasharray="6 4"' if curve.dashed else "")]
        if curve.low:
            ends = [(x(a), y(b)) for a, b in zip(curve.x, curve.high, strict=True)]
            ends += [(x(a), y(b)) for a, b in zip(curve.x[::-1], curve.low[::-1], strict=True)]
            inside.insert(0, path(ends, kind="band"))
        step = max(1, math.ceil(len(places) / MARKS))
        marks = [
            mark(look, f"{100 * a:.2f}%", b, hollow=curve.dashed)
            for i, (a, b) in enumerate(places)
            if i % step == 0 or i == len(places) - 1
        ]
        parts.append(of_run(curve.run, look, stretched(inside) + "".join(marks)))

    def told(curve_run: int, dashed: bool) -> str:
        return names[curve_run] + (f" ({chart.dashed})" if dashed else "")

    stops: list[Stop] = []
    if rounds:
        for at in sorted(set(xs)):
            here = [
                (c.run, f"{told(c.run, c.dashed)}: {number(c.y[c.x.index(at)])}")
                for c in curves
                if at in c.x
            ]
            stops.append((x(at), 40, [(-1, f"round {at:g}"), *here]))
    else:
        for c in curves:
            for a, b in zip(c.x, c.y, strict=True):
                text = f"{told(c.run, c.dashed)}: {number(b)}\n{chart.x_label} {number(a)}"
                stops.append((x(a), y(b), [(c.run, text)]))
    svg = plot(chart.title, HEIGHT, parts, stops, by_x=rounds)
    shown = "" if chart.title.lower().startswith(chart.y_label.lower()) else chart.y_label
    return framed(svg, shown, chart.x_label)


def _spread(chart: Spread, names: Sequence[str], looks: Sequence[Look]) -> str:
    across = ChartAxis([v for group in chart.groups for v in group.values], False, 6, True)
    rows, tall = [], max(44, min(150, 170 // len(chart.groups)))
    for group in chart.groups:
        look, order = (
            looks[group.run],
            sorted(range(len(group.values)), key=group.values.__getitem__),
        )
        ranked = [group.values[i] for i in order]
        first, last = (f"{group.names[i]} {number(group.values[i])}" for i in (order[0], order[-1]))
        ends = f"lowest: {first}, highest: {last}" if len(order) > 1 else first
        of = f"{names[group.run]}, " if len(names) > 1 else ""
        q1, q2, q3 = (_quantile(ranked, q) for q in (0.25, 0.5, 0.75))
        low, high = 100 * across(q1), 100 * across(q3)
        inside = (
            f'<rect class="box" x="{low:.2f}%" y="4" width="{max(0.2, high - low):.2f}%" '
            f'height="{tall - 8}" rx="3"/>'
        )
        stops: list[Stop] = []
        for i in order:
            value = group.values[i]
            place = (across(value), tall / 2 + ((i * 0.618034) % 1 - 0.5) * (tall - 20))
            inside += mark(look, f"{100 * place[0]:.2f}%", place[1])
            stops.append((*place, f"{of}{group.names[i]}: {number(value)}"))
        middle = 100 * across(q2)
        inside += (
            f'<line class="median" x1="{middle:.2f}%" x2="{middle:.2f}%" y1="2" y2="{tall - 2}"/>'
        )
        ruled = "".join(
            f'<line class="grid" x1="{100 * across(at):.2f}%" x2="{100 * across(at):.2f}%" y1="0" '
            f'y2="{tall}"/>'
            for at in across.ticks
        )
        svg = plot(
            f"{chart.title}: {of}{ends}", tall, [ruled, of_run(group.run, look, inside)], stops
        )
        head = f"{key(look)}<b>{escape(names[group.run])}</b>, " if len(names) > 1 else ""
        rows.append(
            f'<div class="strip" data-run="{group.run}"><p>{head}{escape(ends)}</p>{svg}</div>'
        )
    axis = plot("", 1, under([(across(at), short(at)) for at in across.ticks], 1), [])
    return (
        f'<div class="chart" style="--left: 8px">{"".join(rows)}{axis}'
        f'<p class="x">{escape(chart.x_label)}</p></div>'
    )


def _quantile(ranked: Sequence[float], q: float) -> float:
    at = (len(ranked) - 1) * q
    low = math.floor(at)
    return ranked[low] + (ranked[min(low + 1, len(ranked) - 1)] - ranked[low]) * (at - low)


def _heat(chart: Heat) -> str:
    rows, columns = len(chart.rows), len(chart.columns)
    tall = max(4.0, min(34.0, (420 if rows > MOST_NAMED else 300) / rows))
    height, wide = tall * rows, 100 / columns
    row_names, row_label = _without_prefix(chart.rows, chart.row_label)
    names, label = _without_prefix(chart.columns, chart.column_label)
    left = 26 + min(130.0, LETTER * max(map(len, row_names)) + 8)
    by = [sum(c) for c in (chart.counts if chart.by == "row" else zip(*chart.counts, strict=True))]
    digits = max(len(str(count)) for counts in chart.counts for count in counts)
    written = chart.by == "row" and rows <= MOST_WRITTEN
    room = _room(left + columns * (digits * 6.4 + 3) + 20)
    parts = [f'<rect class="empty" width="100%" height="{height:.1f}"/>']
    cells, stops = _heat_cells(chart, tall, wide, by, room if written else "")
    parts += cells
    every = math.ceil(13 / tall)
    for i, name in enumerate(row_names):
        if i % every == 0:
            said = clipped(name, int((left - 26) / LETTER))
            parts.append(
                f'<text x="-6" y="{tall * (i + 0.5) + 4:.1f}" text-anchor="end">{said}</text>'
            )
    parts.append(
        f'<text transform="translate({16 - left:.0f} {height / 2:.0f}) rotate(-90)" '
        f'text-anchor="middle">{escape(row_label)}</text>'
    )
    longest = max(map(len, names))
    upright = columns * (longest * LETTER + 6) > 190 and longest > 1
    below = 10 + (min(22, longest) * LETTER if upright else 12)
    parts += _column_names(names, wide, height, upright)
    parts.append(f'<rect class="frame" width="100%" height="{height:.1f}"/>')
    svg = plot(chart.title, height, parts, stops, left=left, below=below)
    whole = chart.row_label if chart.by == "row" else chart.column_label
    said = f"share of the {whole}'s samples" + ("; numbers are samples" if written else "")
    return framed(svg, "", label, left) + str(heat_key(said))


def _heat_cells(
    chart: Heat, tall: float, wide: float, by: Sequence[int], written: str
) -> tuple[list[str], list[Stop]]:
    """Cells of a table of counts, and the tooltip of each."""
    parts: list[str] = []
    stops: list[Stop] = []
    for i, counts in enumerate(chart.counts):
        for j, count in enumerate(counts):
            if not count:
                continue
            share = count / by[i if chart.by == "row" else j]
            fill, on = heat_css(round(share, 2) or 0.005)
            place = f'x="{wide * j:.3f}%" y="{tall * i:.1f}"'
            parts.append(
                f'<rect {place} width="{wide + 0.05:.3f}%" height="{tall + 0.3:.1f}" '
                f'style="fill: {fill}"/>'
            )
            middle = (wide * (j + 0.5) / 100, tall * (i + 0.5))
            if written:
                parts.append(
                    f'<text class="{written}" x="{100 * middle[0]:.2f}%" y="{middle[1] + 4:.1f}" '
                    f'text-anchor="middle" style="fill: {on}">{count}</text>'
                )
            text = (
                f"{chart.row_label} {chart.rows[i]}, {chart.column_label} {chart.columns[j]}\n"
                f"{count:,} samples, {share:.1%}"
            )
            stops.append((round(middle[0], 4), middle[1], text))
    return parts, stops


def _column_names(names: Sequence[str], wide: float, height: float, upright: bool) -> list[str]:
    """Names below columns of this width in per cent, of many some."""
    parts, columns = [], len(names)
    step = math.ceil(columns / MOST_NAMED)
    for j, name in enumerate(names):
        if j % step:
            continue
        at = f"{wide * (j + 0.5):.3f}%"
        thin = ' class="thin"' if (j // step) % math.ceil(columns / step / 14) else ""
        turn = f'<svg x="{at}" y="{height + 6:.1f}" overflow="visible">' if upright else ""
        text = (
            f'{turn}<text{thin} transform="rotate(-90) translate(0 4)" text-anchor="end">'
            f"{clipped(name, 22)}</text></svg>"
            if upright
            else f'<text{thin} x="{at}" y="{height + 16:.1f}" text-anchor="middle">'
            f"{escape(name)}</text>"
        )
        parts.append(text)
    return parts


def _without_prefix(names: Sequence[str], label: str) -> tuple[list[str], str]:
    """Names without what they begin with alike, which their axis tells instead."""
    first, last = min(names), max(names)
    same = 0
    while first != last and same < len(first) and first[same] == last[same]:
        same += 1
    prefix = first[:same]
    while prefix and prefix[-1].isalnum():
        prefix = prefix[:-1]
    if len(prefix) < 3:
        return list(names), label
    own = prefix.rstrip(" -_/.:") == label
    return [name[len(prefix) :] for name in names], label if own else f"{label}: {prefix}…"


def _room(pixels: float) -> str:
    """The class of text that a card of so many pixels has room for, and no narrower one."""
    return f"from{next((width for width in (340, 440, 540, 680, 900) if width >= pixels), 1200)}"


def _points(chart: Points, looks: Sequence[Look]) -> str:
    (run,) = chart.runs
    axis = ChartAxis([*chart.x, *chart.y], False, 5, True)
    places = [(axis(a), HEIGHT * (1 - axis(b))) for a, b in zip(chart.x, chart.y, strict=True)]
    dots = "".join(f"M{1000 * a:.1f} {b:.1f}h0" for a, b in places)
    labels = [(axis(at), short(at)) for at in axis.ticks]
    parts = [
        grid([(HEIGHT * (1 - at), text) for at, text in labels]),
        *under(labels, HEIGHT),
        _diagonal(),
        of_run(run, looks[run], stretched([f'<path class="dots" d="{dots}"/>'])),
    ]
    stops: list[Stop] = [
        (*place, f"{chart.x_label} {number(a)}\n{chart.y_label} {number(b)}")
        for place, a, b in zip(places, chart.x, chart.y, strict=True)
    ]
    return framed(plot(chart.title, HEIGHT, parts, stops), chart.y_label, chart.x_label)


def _reliability(chart: Reliability, looks: Sequence[Look]) -> str:
    (run,) = chart.runs
    look, ground, room = looks[run], HEIGHT + 84, 44
    shares = [(at / 5, f"{at / 5:g}") for at in range(6)]

    def y(value: float) -> float:
        return HEIGHT * (1 - value)

    curve = [(b.confidence, y(b.accuracy)) for b in chart.bins]
    gap = [*curve, *((b.confidence, y(b.confidence)) for b in reversed(chart.bins))]
    inside = stretched([path(gap, kind="band strong"), path(curve)])
    most = max(b.count for b in chart.bins)
    stops: list[Stop] = []
    for b in chart.bins:
        high = max(1.0, b.count / most * room)
        inside += (
            f'<rect class="bar" x="{100 * b.low + 0.1:.2f}%" y="{ground - high:.1f}" '
            f'width="{100 * (b.high - b.low) - 0.2:.2f}%" height="{high:.1f}"/>'
            f"{mark(look, f'{100 * b.confidence:.2f}%', y(b.accuracy))}"
            f"{_count(b, ground - high - 4)}"
        )
        stops.append(
            (
                b.confidence,
                y(b.accuracy),
                f"confidence {b.low:.2f} to {b.high:.2f}, mean {b.confidence:.3f}\n"
                f"accuracy {b.accuracy:.3f} of {b.count:,} samples",
            )
        )
    parts = [
        grid([(y(at), text) for at, text in shares]),
        *under(shares, ground),
        _diagonal(),
        f'<text transform="translate(-34 {ground - 26}) rotate(-90)" text-anchor="middle">'
        "samples</text>",
        of_run(run, look, inside),
    ]
    svg = plot(chart.title, ground, parts, stops, by_x=True)
    return framed(svg, "accuracy", "confidence")


def _count(b: Bin, y: float) -> str:
    """The number of samples over a bar: upright where it is narrow."""
    text, middle = f"{b.count:,}", f"{50 * (b.low + b.high):.2f}%"
    if (b.high - b.low) * 230 >= len(text) * LETTER:
        return f'<text x="{middle}" y="{y:.1f}" text-anchor="middle">{text}</text>'
    return (
        f'<svg x="{middle}" y="{y:.1f}" overflow="visible"><text transform="rotate(-90) '
        f'translate(0 4)">{text}</text></svg>'
    )


def _diagonal() -> str:
    return f'<line class="ideal" x1="0" y1="{HEIGHT}" x2="100%" y2="0"/>'
