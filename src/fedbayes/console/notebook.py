"""What a notebook shows of a run: one output, drawn again in place while the run goes on.

Needs nothing but IPython, which every notebook has; Rich's own live display wants widgets. Light to
import (no PyTorch).
"""

import math
import time
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

LEAST_WAIT = 0.2
"""Seconds between two drawings, so that a thousand short rounds send few messages."""
MOST_LINES = 5
"""Lines of trouble that are shown; of more, the last ones."""
MOST_POINTS = 200
"""Points of a curve; of more rounds, as many evenly spaced ones."""
_WIDTH, _HEIGHT = 260, 48


class Panel:
    """One output of a notebook; `picture` makes its HTML and its plain text."""

    def __init__(self, picture: Callable[[], tuple[str, str]]) -> None:
        self._picture = picture
        self._handle: Any = None
        self._drawn = -math.inf

    def draw(self, *, at_once: bool = False) -> None:
        """Draw it again, unless that was a moment ago and it need not be at once."""
        now = time.monotonic()
        if not at_once and now - self._drawn < LEAST_WAIT:
            return
        from IPython.display import display

        self._drawn = now
        html, text = self._picture()
        bundle = {"text/html": html, "text/plain": text}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(bundle, raw=True)


def panel(
    title: str,
    parts: Sequence[str],
    share: float,
    curve: Sequence[float],
    lines: Sequence[str],
) -> tuple[str, str]:
    """A run that goes on, as HTML and as plain text.

    Args:
        title: what is run.
        parts: how far it is, in a few words each.
        share: the part of it that is done, 0 to 1.
        curve: the headline metric of the rounds so far.
        lines: what went wrong, a line each.
    """
    told = list(lines[-MOST_LINES:])
    if len(lines) > len(told):
        told.insert(0, f"… {len(lines) - len(told):,} earlier lines")
    trouble = "".join(f"<div>{escape(line)}</div>" for line in told)
    html = (
        f'<div style="font-family: sans-serif; font-size: 0.9em"><div>{escape(title)}</div>'
        f'<progress value="{share:.4f}" max="1" style="width: {_WIDTH}px"></progress>'
        f"<div>{' &nbsp; '.join(map(escape, parts))}</div>{sparkline(curve)}{trouble}</div>"
    )
    return html, "\n".join([title, "  ".join(parts), *told])


def sparkline(values: Sequence[float]) -> str:
    """A curve without axes as SVG, in the colour of the text; empty below two finite values."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) > MOST_POINTS:
        step = (len(finite) - 1) / (MOST_POINTS - 1)
        finite = [finite[round(place * step)] for place in range(MOST_POINTS)]
    if len(finite) < 2:
        return ""
    low, high = min(finite), max(finite)
    across, up = (_WIDTH - 4) / (len(finite) - 1), (_HEIGHT - 4) / ((high - low) or 1.0)
    points = " ".join(
        f"{2 + across * place:.1f},{_HEIGHT - 2 - up * (value - low):.1f}"
        for place, value in enumerate(finite)
    )
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="from {finite[0]:.4g} to {finite[-1]:.4g}"><polyline points="{points}" '
        'fill="none" stroke="currentColor" stroke-width="1.5"/></svg>'
    )
