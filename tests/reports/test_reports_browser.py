"""The pages of runs, comparisons and fusions in a real browser.

Widths, themes, paper, keys, network. FEDBAYES_SCREENSHOTS names a folder for pictures of them.
"""

import base64
import json
import math
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import fedbayes
from fedbayes.reports import gather
from fedbayes.reports.charts import telling
from fedbayes.reports.figures import FIGURES
from fedbayes.reports.page import render
from fedbayes.runs.simulation import Simulation
from tests.helpers.cases import cases
from tests.helpers.command_line import command
from tests.helpers.pages import WIDTHS, check_texts, keep_picture, look, paper_of, show

pytestmark = pytest.mark.xdist_group("browser")

QUICK = {"optimizer": "sgd", "lr": 0.05, "epochs": 1}
ALONE = ("regression", "hundred")
"""Runs that are on no page with others."""
LONG = "a-run-whose-name-a-script-made-of-all-its-settings-lr-0.05-epochs-1-seed-0"


@pytest.fixture(scope="session")
def runs(browser, tmp_path_factory):
    """Runs of all kinds: of ten and a hundred clients, with a long name, broken off."""
    folder = tmp_path_factory.mktemp("runs")
    common = {"model": {"hidden": [8]}, "rounds": 3, "training": QUICK}
    digits = {"name": "digits", "clients": 10}
    settings = {
        "ten": {"data": digits},
        "hundred": {"data": {**digits, "clients": 100, "partition": "iid"}, "cohort": 20},
        "b<i>": {"data": digits, "method": {"name": "fedsparse", "server_lr": 0.01}},
        "alone": {"data": {**digits, "clients": 3}, "method": {"name": "local"}},
        LONG: {"data": digits},
        "regression": {"data": {"name": "diabetes"}},
    }
    for name, own in settings.items():
        fedbayes.run(**common, **own, folder=folder / name)
    config = fedbayes.Config.create(**common, data=digits)
    with Simulation(config, folder / "broken") as simulation:
        next(iter(simulation))
        simulation.checkpoint()
    return {name: folder / name for name in (*settings, "broken")}


@pytest.fixture(scope="session")
def tables(browser, tmp_path_factory):
    """Runs on tables of one's own: names of all lengths, and times of events."""
    folder = tmp_path_factory.mktemp("wards")
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 300)
    x = rng.normal(size=(300, 4)) + y[:, None]
    table = pd.DataFrame(x, columns=list("abcd"))
    names = ["fracture", "inflammation of the upper respiratory tract", "no finding"]
    places = ["St. Mary's", "Hospital of the Holy Spirit, Ward 7", "Universitätsklinikum_Nordwest"]
    table["diagnosis"] = [names[label] for label in y]
    table["place"] = [places[n] for n in rng.integers(0, 3, 300)]
    table["days"] = rng.exponential(np.exp(x[:, 0])).round(3) + 0.01
    table["died"] = rng.integers(0, 2, 300)
    table.drop(columns=["days", "died"]).to_csv(folder / "wards.csv", index=False)
    table.drop(columns="diagnosis").to_csv(folder / "survival.csv", index=False)
    common = {"rounds": 2, "model": {"hidden": [8]}, "training": QUICK | {"batch_size": 500}}
    shared = {"group": "place", "partition": "natural"}
    fedbayes.run(
        **common,
        data={"path": str(folder / "wards.csv"), "label": "diagnosis", **shared},
        folder=folder / "wards",
    )
    fedbayes.run(
        **common,
        data={"path": str(folder / "survival.csv"), "label": ["days", "died"], **shared},
        task={"likelihood": "cox"},
        folder=folder / "survival",
    )
    return folder


PAGES = ("ten", "hundred", "all", "regression", "survival", "wards", "gone", "compared", "fused")
DARK = ("ten", "all", "survival", "compared", "fused")
SHOWN = [*((name, "light") for name in PAGES), *((name, "dark") for name in DARK)]
"""Pages that have all kinds of parts, which are looked at in the dark too."""


@pytest.fixture(scope="session")
def pages(runs, tables, tmp_path_factory):
    """The pages by name, as the commands write them."""
    folder = tmp_path_factory.mktemp("pages")
    several = [runs[name] for name in runs if name not in ALONE]
    chosen = {
        "ten": [runs["ten"]],
        "hundred": [runs["hundred"]],
        "all": several,
        "regression": [runs["regression"]],
        "survival": [tables / "survival"],
        "wards": [tables / "wards"],
    }
    for name, folders in chosen.items():
        assert command("report", *folders, "-o", folder / f"{name}.html") == 0
    (tables / "wards.csv").unlink()
    assert command("report", tables / "wards", "-o", folder / "gone.html") == 0
    changes = ("model.hidden=[8]", "data.clients=3", "training.epochs=1")
    small = ("--rounds", "2", "--seeds", "2", *(t for c in changes for t in ("--set", c)))
    methods = f"fedavg,pvi,{LONG[:40]}=fedprox,local"
    assert command("compare", "--methods", methods, *small, "-o", folder / "compared") == 0
    (folder / "compared" / "comparison.html").rename(folder / "compared.html")
    rng = np.random.default_rng(0)
    np.savez(folder / "t.npz", x=rng.uniform(0, 16, (40, 1, 8, 8)), y=rng.integers(10, size=40))
    clients = sorted((runs["alone"] / "clients").glob("*.safetensors"))
    options = ("--method", "function", "--minutes", "0", "--frontier", "1,2")
    options += ("--test", folder / "t.npz", "--report", folder / "fused.html")
    assert command("fuse", *clients, "-o", folder / "g.safetensors", *options) == 0
    return {name: folder / f"{name}.html" for name in PAGES}


def unfold(browser):
    browser.execute_script("document.querySelectorAll('details').forEach(one => one.open = true)")
    browser.execute_script("return new Promise(done => setTimeout(done, 60))")


@pytest.mark.parametrize(
    ("name", "theme"),
    cases(SHOWN, slow={*SHOWN} - {("all", "light")}),
)
def test_pages_can_be_read_at_any_width(name, theme, pages, browser):
    show(browser, pages[name], WIDTHS[0], theme)
    unfold(browser)
    for width in WIDTHS if theme == "light" else WIDTHS[::2]:
        look(browser, width, theme)
        browser.execute_script("return new Promise(done => setTimeout(done, 60))")
        keep_picture(browser, f"{name}-{width}-{theme}")
        background = browser.execute_script("return getComputedStyle(document.body).background")
        assert paper_of(theme) in background
        check_texts(browser, width)
        # A table that is wider than its box says so.
        for over, said in browser.execute_script(
            "return [...document.querySelectorAll('.scroll')].map(b => ["
            "b.scrollWidth > b.clientWidth + 1,"
            "getComputedStyle(b.nextElementSibling).display !== 'none'])"
        ):
            assert over == said
        # Cards fill their rows: none leaves a gap at its right.
        for right, end in browser.execute_script(
            """return [...document.querySelectorAll('.cards')].flatMap(row => {
              const cards = [...row.children].filter(c => c.offsetHeight);
              const box = row.getBoundingClientRect(), r = c => c.getBoundingClientRect();
              return cards.filter((c, i) => !cards[i + 1] || r(cards[i + 1]).top > r(c).top + 5)
                .map(c => [r(c).right, box.right]);
            })"""
        ):
            assert right == pytest.approx(end, abs=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_on_paper(name, pages, browser):
    """Black on white, without controls, all tables whole, no card larger than a page."""
    upright = name not in ("all", "compared", "fused")
    width, height = (703, 1032) if upright else (1032, 703)  # of A4 without its margins
    show(browser, pages[name], width, "dark")
    look(browser, width, "dark", media="print")
    browser.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    keep_picture(browser, f"{name}-print")
    check_texts(browser, width)
    ink, paper = browser.execute_script(
        "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]"
    )
    assert (ink, paper) == ("rgb(0, 0, 0)", "rgb(255, 255, 255)")
    assert not browser.execute_script(
        "return [...document.querySelectorAll('#theme, .save, .hint')].some(b => b.offsetHeight)"
    )
    assert all(
        browser.execute_script(
            "return [...document.querySelectorAll('.scroll')].map("
            "b => b.scrollWidth <= b.clientWidth)"
        )
    )
    assert browser.execute_script("return !document.querySelector('details:not([open])')")
    for inside, tall in browser.execute_script(
        "return [...document.querySelectorAll('.card:not(.tables)')].map("
        "c => [getComputedStyle(c).breakInside, c.offsetHeight])"
    ):
        assert inside == "avoid"
        assert tall <= height
    browser.execute_script("window.dispatchEvent(new Event('afterprint'))")
    assert browser.execute_script("return document.documentElement.dataset.theme") == "dark"
    # As it comes out of the printer.
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
    assert base64.b64decode(printed["data"]).startswith(b"%PDF")


@pytest.mark.parametrize(
    ("name", "theme"),
    [
        ("ten", "light"),
        ("all", "dark"),
        ("survival", "dark"),
        ("compared", "dark"),
        ("fused", "dark"),
    ],
)
def test_without_a_script_there_is_all_but_the_tips(name, theme, pages, tmp_path, browser):
    """Tables, charts and themes need none."""
    text = pages[name].read_text()
    bare = tmp_path / "bare.html"
    bare.write_text(re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL))
    assert "addEventListener" not in bare.read_text()
    show(browser, bare, 390, theme)
    background = browser.execute_script("return getComputedStyle(document.body).background")
    assert paper_of(theme) in background
    check_texts(browser, 390)
    drawn = browser.execute_script(
        "return [...document.querySelectorAll('[data-chart]')].map("
        "c => [c.querySelector('.plot').getBoundingClientRect().height,"
        "c.querySelectorAll('.plot path, .plot rect, .plot use').length])"
    )
    assert len(drawn) == text.count("data-chart=")
    assert all(height > 20 and parts for height, parts in drawn)
    assert not browser.execute_script("return document.getElementById('theme').offsetHeight")


def test_every_chart_is_drawn_and_nothing_is_asked_for(runs, pages, browser):
    from selenium.webdriver.common.by import By

    browser.get("about:blank")
    browser.get_log("performance")
    browser.get_log("browser")
    show(browser, pages["all"])
    records = gather([runs[name] for name in runs if name not in ALONE])
    expected = [c for figure in FIGURES for c in FIGURES[figure](records) if telling(c)]
    cards = browser.find_elements(By.CSS_SELECTOR, "[data-chart]")
    assert len(cards) == len(expected)
    # A run can be hidden; its curve goes, and so do the charts of it alone, and comes again.
    curves = (
        "return [...document.querySelectorAll('[data-chart=\"0\"] .run')].filter("
        "c => c.getBoundingClientRect().width).length"
    )
    visible = "return [...document.querySelectorAll('.card')].filter(c => c.offsetHeight).length"
    before = browser.execute_script(curves), browser.execute_script(visible)
    button = browser.find_elements(By.CSS_SELECTOR, "#legend button")[1]
    button.click()
    assert browser.execute_script(curves) == before[0] - 1
    gone = sum(getattr(chart, "runs", None) == [1] for chart in expected)
    assert gone == 2, "confusion matrix, reliability"
    assert browser.execute_script(visible) == before[1] - gone
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    assert (browser.execute_script(curves), browser.execute_script(visible)) == before
    assert browser.get_log("browser") == []
    for line in browser.get_log("performance"):
        event = json.loads(line["message"])["message"]
        if event["method"] == "Network.requestWillBeSent":
            url = event["params"]["request"]["url"]
            assert url.startswith(("file:", "data:", "about:")), url


def test_a_chart_is_saved_as_a_table(runs, pages, browser):
    from selenium.webdriver.common.by import By

    show(browser, pages["ten"])
    browser.execute_script(
        "URL.createObjectURL = blob => { window.saved = blob.text(); return '#'; }"
    )
    browser.find_element(By.CSS_SELECTOR, "[data-chart='0'] .save").click()
    text = browser.execute_script("return window.saved")
    (record,) = gather([runs["ten"]])
    lines = [f"ten,{line['round']},{line['global_accuracy']}" for line in record.metrics]
    assert text.splitlines() == ["run,round,global accuracy", *lines]


def test_the_table_sorts(runs, tmp_path, browser):
    from selenium.webdriver.common.by import By

    records = gather([runs[name] for name in ("ten", "hundred", "b<i>", "alone", "broken")])
    lines = [{**line, "global_nll": math.inf} for line in records[0].metrics]
    page = tmp_path / "page.html"
    page.write_text(render([replace(records[0], metrics=lines, final={}), *records[1:]]))
    show(browser, page, 1920)

    def order():
        rows = browser.find_elements(By.CSS_SELECTOR, "#runs tbody tr")
        return [row.find_element(By.TAG_NAME, "td").text for row in rows]

    head = next(
        h
        for h in browser.find_elements(By.CSS_SELECTOR, "#runs th")
        if h.text.startswith("global accuracy")
    )
    known = [r for r in records if r.last("global_accuracy") is not None]
    ranked = [r.label for r in sorted(known, key=lambda r: r.last("global_accuracy"))]
    head.find_element(By.TAG_NAME, "button").click()
    assert order() == [*ranked, "alone"], "a figure that there is none of comes last"
    head.find_element(By.TAG_NAME, "button").send_keys("\n")
    down = order()
    assert down[-1] == "alone"
    values = {record.label: record.last("global_accuracy") for record in known}
    assert [values[name] for name in down[:-1]] == sorted(values.values(), reverse=True)
    # Infinity is larger than all else, and what is not a number comes last too.
    nll = next(h for h in browser.find_elements(By.CSS_SELECTOR, "#runs th") if h.text == "NLL")
    nll.click()
    assert order()[-2] == "ten", "its likelihood is zero"
    heads = browser.find_elements(By.CSS_SELECTOR, "#runs th")
    next(h for h in heads if h.text == "clients").click()
    assert order()[-1] == "hundred", "as numbers, not as text"
    browser.execute_script(
        "document.querySelector('#runs tbody tr').cells[arguments[0]].dataset.value = 'nan'",
        head.get_property("cellIndex"),
    )
    odd = order()[0]
    for _ in range(2):
        head.click()
        assert odd in order()[-2:]


def test_pointer_and_keys_name_clients(runs, pages, browser):
    """What the pointer gets to know, the arrow keys do too."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    show(browser, pages["hundred"])
    (record,) = gather([runs["hundred"]])
    svg = browser.find_element(By.CSS_SELECTOR, ".strip .plot")
    tip = browser.find_element(By.ID, "tip")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", svg)
    marks = svg.find_elements(By.CSS_SELECTOR, ".run use")
    ActionChains(browser).move_to_element(marks[0]).perform()
    lowest = min(record.values.values())
    name, _, value = tip.text.partition(": ")
    assert record.values[name] == pytest.approx(float(value), abs=1e-3)
    assert float(value) == pytest.approx(lowest, abs=1e-3)
    ActionChains(browser).move_by_offset(0, 300).perform()
    assert not tip.is_displayed()
    browser.execute_script("arguments[0].focus({focusVisible: true})", svg)
    seen = []
    ActionChains(browser).send_keys(Keys.HOME).perform()
    for _ in range(3):
        seen.append(tip.text)
        ActionChains(browser).send_keys(Keys.ARROW_RIGHT).perform()
    ranked = sorted(record.values.values())[:3]
    assert [float(text.rpartition(": ")[2]) for text in seen] == pytest.approx(ranked, abs=1e-3)
    assert len(set(seen)) == 3
    assert f"{100 - 24} of 100 clients are not listed" in render([record])
