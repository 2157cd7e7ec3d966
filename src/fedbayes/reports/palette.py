"""Colours, markers and dashes that tell runs apart, for those who do not see colours too.

The colours are those of Okabe and Ito (2008). Where one has less contrast than 3:1 with the
paper, it is made darker or lighter and keeps its hue; yellow, which has none on white, is out.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Theme:
    """Colours on one kind of paper, as #rrggbb."""

    paper: str
    ink: str
    faint: str
    """Axes and secondary text."""
    runs: tuple[str, ...]
    """Colours of the runs, in order; after the last the first comes again."""
    heat: str
    """Full cells of a heat map; emptier ones are mixed with the paper."""


LIGHT = Theme(
    paper="#ffffff",
    ink="#1a1d21",
    faint="#5c6570",
    runs=("#0072b2", "#d55e00", "#009371", "#b8568f", "#b07a00", "#2c8fc7", "#1a1d21"),
    heat="#08306b",
)
DARK = Theme(
    paper="#16191e",
    ink="#e8eaed",
    faint="#9aa4b0",
    runs=("#3f9fdc", "#f0803c", "#1fb98f", "#d88fb8", "#e69f00", "#8accf2", "#e8eaed"),
    heat="#ffe08a",
)

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
"""Of the runs, in Matplotlib's names. Their number and that of the colours have no common
divisor, so that a pair comes again only after all pairs."""
