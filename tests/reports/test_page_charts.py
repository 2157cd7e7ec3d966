"""Charts of pages: what is drawn stands where its axes say."""

import json
import re
from html import unescape

import numpy as np
import pytest

from fedbayes.reports.charts import ChartCurve, ChartGroup, Heat, Lines, Spread, table
from fedbayes.reports.marks import ChartAxis, powers, short, ticks
from fedbayes.reports.palette import looks
from fedbayes.reports.svg import draw

LOOKS = looks(["fedavg", "pvi"])
TEXT = re.compile(r'<text x="([-\d.]+)%?" y="([\d.]+)" text-anchor="(\w+)">([^<]+)</text>')


def stops(markup):
    (found,) = re.findall(r"data-stops='([^']*)'", markup)
    return json.loads(unescape(found))


def scale(markup, anchor, place):
    """From what is written at an axis to values: percent, or pixels (text is 4 below its line)."""
    marks = [
        (float(found[place]) - 4 * place, float(found[3].replace(" k", "e3").replace(" M", "e6")))
        for found in TEXT.findall(markup)
        if found[2] == anchor
    ]
    return np.polynomial.Polynomial.fit(*np.array(marks).T, 1)


@pytest.mark.parametrize(
    "values", [[0.41, 0.83, 0.86], [-3.0, 12.5, 7.0], [2e4, 5e4, 9e4], [5, 5, 5]]
)
def test_points_stand_where_the_axes_say(values):
    chart = Lines("k", "t", "seconds", "y", [ChartCurve(1, [2.0, 5.0, 11.0], values)])
    markup = draw(chart, ["a", "b"], LOOKS)
    across, up = scale(markup, "middle", 0), scale(markup, "end", 1)
    drawn = re.findall(r'<use href="#m\d" x="([\d.]+)%" y="([-\d.]+)"/>', markup)
    assert [across(float(x)) for x, _ in drawn] == pytest.approx([2, 5, 11], rel=2e-3)
    assert [up(float(y)) for _, y in drawn] == pytest.approx(values, rel=5e-3)
    assert all(0 <= float(x) <= 100 and 0 <= float(y) <= 220 for x, y in drawn)
    path = re.search(r'class="line" d="M([^"]+)"', markup)[1]
    assert [float(at.split()[0]) / 10 for at in path.split("L")] == pytest.approx(
        [float(x) for x, _ in drawn], abs=0.01
    )
    told = stops(markup)
    assert [100 * x for x, _, _ in told] == pytest.approx([float(x) for x, _ in drawn], abs=0.02)
    assert [run for _, _, [[run, _]] in told] == [1, 1, 1]
    assert told[0][2][0][1].startswith("b: ")


def test_a_round_tells_of_all_runs():
    curves = [
        ChartCurve(0, [1, 2], [0.5, 0.6]),
        ChartCurve(1, [2], [0.7]),
        ChartCurve(0, [2], [0.1], dashed=True),
    ]
    chart = Lines("local", "t", "round", "accuracy", curves, dashed="global")
    first, second = stops(draw(chart, ["a", "b"], LOOKS))
    assert first[2] == [[-1, "round 1"], [0, "a: 0.5000"]]
    assert second[2][1:] == [[0, "a: 0.6000"], [1, "b: 0.7000"], [0, "a (global): 0.1000"]]
    heads, rows = table(chart, ["a", "b"])
    assert heads == ["run", "round", "accuracy"]
    assert rows[-1] == ["a (global)", 2, 0.1]


def test_rounds_are_whole_numbers():
    for rounds in ([1], [1, 2], [1, 2, 3], list(range(1, 201))):
        chart = Lines("k", "t", "round", "y", [ChartCurve(0, rounds, [0.5] * len(rounds))])
        written = [found[3] for found in TEXT.findall(draw(chart, ["a"], LOOKS))]
        below = [text for text in written if float(text) >= 1]
        assert below
        assert all(float(text) == int(float(text)) for text in below)


@pytest.mark.parametrize("seed", range(20))
def test_ticks_are_few_and_reach_both_ends(seed):
    rng = np.random.default_rng(seed)
    low = rng.normal() * 10 ** rng.uniform(-6, 9)
    high = low + abs(rng.normal()) * 10 ** rng.uniform(-4, 6)
    found = ticks(low, high, 5)
    assert 2 <= len(found) <= 9
    assert found[0] <= low + 1e-6 * (high - low)
    assert found[-1] >= high - 1e-6 * (high - low)
    assert np.ptp(np.diff(found)) <= 1e-6 * (found[1] - found[0]) + 1e-11 * abs(low)


@pytest.mark.parametrize("values", [[0.0, 0.0], [1.0, 1.0 + 1e-15], [1e-300, 2e-300], [-5.0, -5.0]])
def test_an_axis_of_equal_values_is_none_of_division_by_zero(values):
    for log in (False, min(values) > 1e-200):
        axis = ChartAxis(values, log, 5, True)
        assert all(0 <= axis(value) <= 1 for value in values)
        assert axis.ticks


def test_logarithmic_axes():
    assert powers(0.9, 120) == [1, 2, 5, 10, 20, 50, 100]
    axis = ChartAxis([1.0, 100.0, 10.0], True, 5, True)
    assert axis(10.0) == pytest.approx((axis(1.0) + axis(100.0)) / 2)
    assert short(12345.0) == "12.35 k"


def test_clients_are_dots_between_their_values():
    chart = Spread("clients", "t", "accuracy", [ChartGroup(0, ["x<y", "z"], [0.25, 0.75])])
    markup = draw(chart, ["a"], LOOKS)
    assert "lowest: x&lt;y 0.2500, highest: z 0.7500" in markup
    across = scale(markup, "middle", 0)
    drawn = [float(x) for x in re.findall(r'<use href="#m\d" x="([\d.]+)%"', markup)]
    assert [across(x) for x in drawn] == pytest.approx([0.25, 0.75], abs=2e-3)


def test_what_names_begin_with_alike_is_told_once():
    counts = [[3, 0, 1], [0, 2, 9]]

    def shown(names):
        chart = Heat("split", "t", [0], "class", ["0", "1"], "client", names, counts, "column")
        return draw(chart, ["a"], LOOKS)

    page = shown(["client-0", "client-1", "client-2"])
    assert [text for *_, text in TEXT.findall(page) if text.startswith("client")] == []
    assert '<p class="x">client</p>' in page
    assert "client client-1\n2 samples, 100.0%" in json.dumps(stops(page)).replace("\\n", "\n")
    assert '<p class="x">client: ward north …</p>' in shown(
        ["ward north 1", "ward north 2", "ward north 3"]
    )
    assert '<p class="x">client</p>' in shown(["Anna", "Andreas", "Anke"])
    assert len(stops(page)) == 4, "empty cells say nothing"
