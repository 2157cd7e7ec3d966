"""The one place where colours are: those of methods, of the two themes, and the markers.

A method has the same colour and marker on every page, in every figure and in every notebook
(`METHODS`). A method of the user's own gets them from its name, so that they stay the same too.
Runs of one method have its colour in several shades, and other markers.

Every two colours of a theme differ by 20 or more in CIELAB, for full colour vision and with
protanopia, deuteranopia and tritanopia (Machado, Oliveira and Fernandes, 2009); each has a contrast
of 3:1 or more with the paper (`tests/reports/test_palette.py`). Methods of one colour differ in
markers.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32


@dataclass(frozen=True)
class Theme:
    """Colours on one kind of paper, as #rrggbb."""

    paper: str
    ink: str
    faint: str
    """Axes and secondary text."""
    hues: tuple[str, ...]
    """Colours of methods, as `METHODS` counts them."""
    heat: str
    """Full cells of a heat map; emptier ones are mixed with the paper."""


BLUE, ORANGE, GREEN, PINK, BROWN, INDIGO, WINE, GREY = range(8)

LIGHT = Theme(
    paper="#ffffff",
    ink="#1a1d21",
    faint="#5c6570",
    hues=(
        *("#2a75fd", "#dd7200", "#0ea562", "#da61c9"),
        *("#784700", "#1b1ed9", "#7b0c2c", "#6c6e75"),
    ),
    heat="#08306b",
)
DARK = Theme(
    paper="#16191e",
    ink="#e8eaed",
    faint="#9aa4b0",
    hues=(
        *("#2471ff", "#cd7116", "#29e97e", "#a44b97"),
        *("#ffc307", "#b8c0ff", "#c72945", "#b19e9e"),
    ),
    heat="#ffe08a",
)

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
"""In Matplotlib's names."""

METHODS: dict[str, tuple[int, str]] = {
    "fedavg": (BLUE, "o"),
    "fedavgm": (BLUE, "v"),
    "fedadam": (BLUE, "P"),
    "fedyogi": (BLUE, "X"),
    "reptile": (BLUE, "<"),
    "pvi": (ORANGE, "^"),
    "scaffold": (ORANGE, "s"),
    "gpi-fnm": (ORANGE, "D"),
    "fedpa": (ORANGE, "X"),
    "virtual": (GREEN, "o"),
    "mixture": (GREEN, "D"),
    "pfedbayes": (GREEN, "s"),
    "fedfuse": (GREEN, "^"),
    "fedl1": (GREEN, "v"),
    "fedsparse": (PINK, "o"),
    "fedlap": (PINK, "D"),
    "pfnm": (PINK, "s"),
    "laplace": (PINK, "^"),
    "fedgvi": (BROWN, "o"),
    "fedbe": (BROWN, "s"),
    "fedbe-sums": (BROWN, "^"),
    "feddrop": (BROWN, "D"),
    "fedprox": (INDIGO, "s"),
    "fedep": (INDIGO, "o"),
    "function": (INDIGO, "D"),
    "ivon-admm": (WINE, "o"),
    "combined": (WINE, "s"),
    "scaffold-fedsparse": (WINE, "^"),
    "feddyn": (BLUE, "s"),
    "fednova": (BLUE, "^"),
    "qfedavg": (BLUE, "D"),
    "moon": (ORANGE, "o"),
    "ditto": (ORANGE, "v"),
    "apfl": (ORANGE, "P"),
    "pfedme": (ORANGE, "<"),
    "perfedavg": (GREEN, "P"),
    "fedper": (GREEN, "X"),
    "fedrep": (GREEN, "<"),
    "fedbn": (PINK, "v"),
    "hierarchical": (PINK, "P"),
    "fedpm": (PINK, "X"),
    "fald": (BROWN, "v"),
    "fedivon": (BROWN, "P"),
    "fens": (BROWN, "X"),
    "fedlpa": (BROWN, "<"),
    "predbayes": (PINK, "<"),
    "qlsd": (INDIGO, "<"),
    "dsvgd": (INDIGO, "v"),
    "gaussian-head": (INDIGO, "^"),
    "local": (GREY, "v"),
    "global": (WINE, "D"),
    "ensemble": (GREY, "o"),
    "average": (GREY, "X"),
    "member": (GREY, "P"),
}
"""Colour and marker of every method, and of what fusion compares: `function` is fusion in function
space, `member` the network of one client."""

SHADES = (0.0, 0.45, 0.75)
"""How much ink is in the colour of the first, second and third run of a method; then again."""


@dataclass(frozen=True)
class Look:
    """How a run, or a method, is drawn."""

    hue: int
    """Its place in `Theme.hues`."""
    marker: str
    shade: int = 0
    """Its place in `SHADES`."""

    def colour(self, theme: Theme = LIGHT) -> str:
        """The colour on the paper of a theme, as #rrggbb."""
        return mixed(theme.ink, theme.hues[self.hue], SHADES[self.shade])


def looks(methods: Sequence[str]) -> list[Look]:
    """The looks of runs, distinct also for several runs of one method.

    Args:
        methods: of the runs, in order; names of built-in methods, or any others.
    """
    found, before = [], Counter[str]()
    for method in methods:
        number = before[method]
        before[method] += 1
        hashed = crc32(method.encode())
        hue, marker = METHODS.get(method, (hashed % 8, MARKERS[hashed // 8 % 8]))
        place = MARKERS.index(marker) + number
        found.append(Look(hue, MARKERS[place % len(MARKERS)], number % len(SHADES)))
    return found


def mixed(one: str, other: str, share: float) -> str:
    """A colour between two, `share` of it the first."""
    parts = ((int(one[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a * share + b * (1 - share)):02x}" for a, b in parts)


def luminance(colour: str) -> float:
    """Relative luminance of a colour (WCAG 2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def heat(share: float, theme: Theme) -> tuple[str, str]:
    """A cell of a heat map: its colour, and black or white for text in it.

    Of any grey one of them has a contrast of 4.5:1 or more.

    Args:
        share: 0 to 1; its root is how strong the cell is, so that small shares are seen.
        theme: the paper.
    """
    colour = mixed(theme.heat, theme.paper, share**0.5)
    return colour, "#000000" if luminance(colour) > 0.179 else "#ffffff"


def heat_css(share: float) -> tuple[str, str]:
    """The same for a page that has both themes, as two values of CSS."""
    (one, on_one), (other, on_other) = heat(share, LIGHT), heat(share, DARK)
    return f"light-dark({one}, {other})", f"light-dark({on_one}, {on_other})"


def run_css(look: Look) -> str:
    """The colour of a run for a page that has both themes."""
    return f"light-dark({look.colour(LIGHT)}, {look.colour(DARK)})"


def theme_css() -> str:
    """The colours of pages as variables of CSS."""
    pairs = {
        "paper": (LIGHT.paper, DARK.paper),
        "ink": (LIGHT.ink, DARK.ink),
        "faint": (LIGHT.faint, DARK.faint),
        "heat": (LIGHT.heat, DARK.heat),
        "accent": (LIGHT.hues[BLUE], DARK.hues[BLUE]),
        "warn": (LIGHT.hues[ORANGE], DARK.hues[ORANGE]),
        "good": (LIGHT.hues[GREEN], DARK.hues[GREEN]),
    }
    return " ".join(f"--{name}: light-dark({a}, {b});" for name, (a, b) in pairs.items())
