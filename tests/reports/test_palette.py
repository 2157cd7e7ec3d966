"""One colour per method: stable, told apart by everybody, and the same in pages and figures."""

import math
import re
from itertools import combinations

import numpy as np
import pytest

import fedbayes
from fedbayes.methods import METHODS as EVERY
from fedbayes.reports import gather
from fedbayes.reports.page import render
from fedbayes.reports.palette import DARK, LIGHT, METHODS, heat, looks, luminance

# Machado, Oliveira and Fernandes (2009), severity 1, for linear RGB.
SIGHT = {
    "full": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def linear(colour):
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = (
        t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116
        for t in xyz @ np.clip(rgb, 0, 1) / (0.9505, 1.0, 1.089)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def contrast(one, other):
    low, high = sorted(luminance(colour) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def test_luminance_is_that_of_wcag():
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", [LIGHT, DARK])
@pytest.mark.parametrize("sight", SIGHT)
def test_everybody_tells_the_colours_apart(theme, sight):
    seen = [lab(np.array(SIGHT[sight]) @ linear(colour)) for colour in theme.hues]
    assert min(math.dist(a, b) for a, b in combinations(seen, 2)) >= 20


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_colours_stand_out(theme):
    """WCAG: 3:1 for graphics, in all shades, and 4.5:1 for text."""
    shades = [look.colour(theme) for look in looks([*METHODS] * 3)]
    for colours, least in (((*shades, theme.heat), 3.0), ((theme.ink, theme.faint), 4.5)):
        for colour in colours:
            assert contrast(colour, theme.paper) >= least, colour
    for share in np.linspace(0, 1, 101):
        assert contrast(*heat(share, theme)) >= 4.5


def test_every_method_has_its_own_look():
    assert set(EVERY) <= set(METHODS)
    assert len(set(METHODS.values())) == len(METHODS)
    alone = {name: looks([name])[0] for name in EVERY}
    assert looks([*EVERY]) == [alone[name] for name in EVERY], "whatever else is shown"


def test_runs_of_one_method_share_a_colour_and_differ():
    found = looks(["pvi"] * 24)
    assert {look.hue for look in found} == {looks(["pvi"])[0].hue}
    assert len(set(found)) == 24
    assert looks(["fedavg", "pvi", "pvi"])[1:] == found[:2]


def test_a_method_of_ones_own_keeps_its_look():
    (one,) = looks(["mine.methods:Best"])
    assert looks(["fedavg", "mine.methods:Best"])[1] == one
    assert len({looks([f"package.module:Class{n}"])[0] for n in range(40)}) > 15


def test_pages_and_figures_have_the_same_colours(tmp_path):
    runs = [
        fedbayes.run(
            data={"name": "digits", "clients": 2},
            model={"hidden": [8]},
            rounds=1,
            method={"name": name},
            folder=tmp_path / name,
        )
        for name in ("fedavg", "fedprox")
    ]
    page = render(gather([tmp_path / "fedprox", tmp_path / "fedavg"]))
    figure = runs[1].plot("headline", runs[0])
    for place, name in enumerate(("fedprox", "fedavg")):
        (look,) = looks([name])
        colours = re.escape(f"light-dark({look.colour(LIGHT)}, {look.colour(DARK)})")
        assert re.search(f'class="run" data-run="{place}" style="color: {colours}"', page)
        line = figure.axes[0].get_lines()[place]
        assert (line.get_color(), line.get_marker()) == (look.colour(), look.marker)
