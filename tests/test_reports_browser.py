"""The page of a report in a real browser: widths, themes, paper, keys, network."""

import base64
import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedbayes
from fedbayes.reports import gather
from fedbayes.reports.charts import telling
from fedbayes.reports.figures import FIGURES, charts
from fedbayes.reports.page import render
from fedbayes.reports.palette import DARK, LIGHT
from fedbayes.runs.simulation import Simulation
from tests.command_line import command

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="there is no chromium with chromedriver here"
    ),
]

# Every piece of text: where it is, what it stands in, its colour and what is behind it.
TEXTS = """
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const colour = text => {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = text;
  canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
};
const over = (front, share, back) => back.map((c, i) => front[i] * share + c * (1 - share));
const behind = element => {
  if (!element) return [255, 255, 255];
  const found = colour(getComputedStyle(element).backgroundColor);
  return found[3] === 255 ? found.slice(0, 3)
    : over(found, found[3] / 255, behind(element.parentElement));
};
const visible = element =>
  element.getClientRects().length && getComputedStyle(element).visibility !== "hidden";
const scrolls = e => ["auto", "scroll"].includes(getComputedStyle(e).overflowX);
const edges = r => [r.left, r.right, r.top, r.bottom];
const found = [];
for (const element of document.querySelectorAll("body *")) {
  if (["SCRIPT", "STYLE"].includes(element.tagName) || !visible(element)) continue;
  const svg = element.closest("svg"), style = getComputedStyle(element);
  let opacity = 1, scrolled = false;
  for (let e = element; e; e = e.parentElement) {
    opacity *= getComputedStyle(e).opacity;
    scrolled ||= scrolls(e);
  }
  const one = { text: element.textContent.trim().slice(0, 40), scrolled, opacity, fits: true };
  if (element.tagName === "TD" && style.display === "block") {
    const label = getComputedStyle(element, "::before");
    if (label.content !== "none") found.push({
      ...one, text: label.content, rect: null, behind: behind(element),
      fits: element.scrollWidth <= element.clientWidth + 1, colour: colour(label.color).slice(0, 3),
    });
  }
  if (![...element.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
  const range = document.createRange();
  range.selectNodeContents(element);
  const rect = (svg ? element : range).getBoundingClientRect();
  const host = element.closest(".card, td, th, li") || document.querySelector("main");
  let ground = behind(svg ? svg.parentElement : element);
  const before = svg && element.previousElementSibling;
  if (before && before.tagName === "rect") {
    const cell = before.getBoundingClientRect(), under = getComputedStyle(before);
    const x = (rect.left + rect.right) / 2, y = (rect.top + rect.bottom) / 2;
    if (x > cell.left && x < cell.right && y > cell.top && y < cell.bottom)
      ground = over(colour(under.fill), +under.fillOpacity, ground);
  }
  found.push({
    ...one, rect: edges(rect), box: edges(host.getBoundingClientRect()), behind: ground,
    colour: colour(svg ? style.fill : style.color).slice(0, 3),
  });
}
return found;
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Eight runs: few clients and 200, a long name, one without a global model, one broken off."""
    folder = tmp_path_factory.mktemp("runs")
    common = {"model": {"hidden": [16]}, "rounds": 3}
    digits = {"name": "digits", "clients": 6}
    many = {"name": "digits", "clients": 200, "partition": "iid"}
    settings = {
        "three": {"data": {**digits, "clients": 3}},
        "two hundred": {"data": many, "cohort": 50},
        "b<i>": {"data": digits, "method": {"name": "fedsparse", "server_lr": 0.01}},
        "alone": {"data": digits, "method": {"name": "local"}},
        "a-run-whose-name-a-script-made-of-all-its-settings-lr-0.05-epochs-1-seed-0": {
            "data": digits
        },
        "prox": {"data": digits, "method": {"name": "fedprox"}},
        "virtual": {"data": {**digits, "clients": 2}, "method": {"name": "virtual", "samples": 2}},
    }
    for name, own in settings.items():
        fedbayes.run(**common, **own, folder=folder / name)
    with Simulation(fedbayes.Config.create(**common, data=digits), folder / "broken") as simulation:
        next(iter(simulation))
        simulation.checkpoint()
    return [folder / name for name in (*settings, "broken")]


@pytest.fixture(scope="module")
def wards(tmp_path_factory):
    """A run on a table of one's own, whose classes and clients have names of all lengths."""
    folder = tmp_path_factory.mktemp("wards")
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 300)
    x = rng.normal(size=(300, 4)) + y[:, None]
    table = pd.DataFrame(x, columns=list("abcd"))
    names = ["fracture", "inflammation of the upper respiratory tract", "no finding"]
    table["diagnosis"] = [names[label] for label in y]
    places = ["St. Mary's", "Hospital of the Holy Spirit, Ward 7", "Universitätsklinikum_Nordwest"]
    table["place"] = [places[n] for n in rng.integers(0, 3, 300)]
    table.to_csv(folder / "wards.csv", index=False)
    data = {"path": str(folder / "wards.csv"), "label": "diagnosis", "group": "place"}
    fedbayes.run(data={**data, "partition": "natural"}, rounds=3, folder=folder / "wards")
    return folder


@pytest.fixture(scope="module")
def pages(runs, wards, tmp_path_factory):
    """The page of three clients, of 200, of all runs, and of a table that is there, then gone."""
    folder = tmp_path_factory.mktemp("pages")
    chosen = {"three": runs[:1], "many": runs[1:2], "all": runs, "wards": [wards / "wards"]}
    for name, folders in chosen.items():
        assert command("report", *folders, "-o", folder / f"{name}.html") == 0
    (wards / "wards.csv").unlink()
    assert command("report", wards / "wards", "-o", folder / "gone.html") == 0
    return {name: folder / f"{name}.html" for name in (*chosen, "gone")}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "disable-quic",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
        f"user-data-dir={tmp_path_factory.mktemp('profile')}",
        "window-size=1280,900",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


def show(browser, page, width=1280, theme="light", media="screen"):
    """Open a page in a window of this width, with the theme of the system."""
    wanted = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": wanted})
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
    )
    browser.get(page.as_uri())


def keep_picture(browser, name):
    """A picture of the whole page, if someone wants to look."""
    folder = os.environ.get("FEDBAYES_SCREENSHOTS")
    if folder:
        shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
        Path(folder, f"{name}.png").write_bytes(base64.b64decode(shot["data"]))


def luminance(parts):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted(luminance([c / 255 for c in colour]) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def check_texts(browser, width):
    """Nothing is cut off, and all of it can be read (WCAG: 4.5:1)."""
    document = "document.documentElement"
    assert browser.execute_script(f"return {document}.scrollWidth <= {document}.clientWidth")
    texts = browser.execute_script(TEXTS)
    assert len(texts) > 50
    for one in texts:
        assert one["fits"], one
        assert one["opacity"] == 1, one
        assert contrast(one["colour"], one["behind"]) >= 4.5, one
        if one["rect"] is None:
            continue
        left, right, top, bottom = one["rect"]
        box = one["box"]
        assert left >= box[0] - 1, one
        assert right <= box[1] + 1, one
        assert top >= box[2] - 1, one
        assert bottom <= box[3] + 1, one
        if not one["scrolled"]:
            assert left >= -1, one
            assert right <= width + 1, one


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 768, 1280, 1920])
@pytest.mark.parametrize("name", ["three", "many", "all", "wards", "gone"])
def test_nothing_is_cut_off_at_any_width(name, width, theme, pages, browser):
    show(browser, pages[name], width, theme)
    keep_picture(browser, f"{name}-{width}-{theme}")
    paper = LIGHT.paper if theme == "light" else DARK.paper
    rgb = ", ".join(str(int(paper[i : i + 2], 16)) for i in (1, 3, 5))
    assert f"rgb({rgb})" in browser.execute_script(
        "return getComputedStyle(document.body).background"
    )
    browser.execute_script("document.querySelectorAll('details').forEach(one => one.open = true)")
    browser.execute_script("return new Promise(done => setTimeout(done, 100))")
    check_texts(browser, width)
    # A table that is wider than its box says so.
    for box in browser.execute_script(
        "return [...document.querySelectorAll('.scroll')].map(b => ["
        "b.scrollWidth > b.clientWidth + 1,"
        "getComputedStyle(b.nextElementSibling).display !== 'none'])"
    ):
        assert box[0] == box[1]
    # Charts are drawn in the size that they have, so that their text keeps its own.
    for drawn, wide in browser.execute_script(
        "return [...document.querySelectorAll('.chart svg')].map("
        "s => [s.viewBox.baseVal.width, s.clientWidth])"
    ):
        assert drawn == pytest.approx(wide, rel=0.02)


@pytest.mark.parametrize(
    ("name", "width"), [(name, 703) for name in ("three", "many", "gone")] + [("all", 1032)]
)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_on_paper(name, width, theme, pages, browser):
    """Black on white, without controls, all tables whole, no card larger than a page."""
    show(browser, pages[name], width, theme, media="print")
    browser.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    check_texts(browser, width)
    ink, paper = browser.execute_script(
        "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]"
    )
    assert (ink, paper) == ("rgb(0, 0, 0)", "rgb(255, 255, 255)")
    shown = "return getComputedStyle(document.querySelector('{}')).display !== 'none'"
    assert not browser.execute_script(shown.format("#theme"))
    assert all(
        browser.execute_script(
            "return [...document.querySelectorAll('.scroll')].map("
            "b => b.scrollWidth <= b.clientWidth)"
        )
    )
    assert browser.execute_script("return !document.querySelector('details:not([open])')")
    page = 1032 if width == 703 else 703  # of A4 without its margins, in pixels
    for inside, height in browser.execute_script(
        "return [...document.querySelectorAll('.card:not(#clients, .tables), .lists > div')].map("
        "c => [getComputedStyle(c).breakInside, c.offsetHeight])"
    ):
        assert inside == "avoid"
        assert height <= page
    browser.execute_script("window.dispatchEvent(new Event('afterprint'))")
    assert browser.execute_script("return document.documentElement.dataset.theme") == theme
    # As it comes out of the printer: chromium tells the page that it prints.
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
    assert base64.b64decode(printed["data"]).startswith(b"%PDF")


def test_every_chart_is_drawn_and_nothing_is_asked_for(runs, pages, browser):
    from selenium.webdriver.common.by import By

    show(browser, pages["all"])
    browser.get_log("performance")
    browser.get_log("browser")
    show(browser, pages["all"])
    records = gather(runs)
    expected = [c for figure in FIGURES for c in FIGURES[figure](records) if telling(c)]
    cards = browser.find_elements(By.CSS_SELECTOR, "[data-chart]")
    assert len(cards) == len(expected)
    for card in cards:
        drawn = card.find_element(By.CSS_SELECTOR, ".chart > svg")
        assert drawn.rect["height"] > 50
        assert drawn.find_elements(By.CSS_SELECTOR, "path, rect")
    # A run can be hidden; its curve goes, and so do the charts of it alone.
    curves = "[data-chart='0'] svg path[fill='none']"
    before = len(browser.find_elements(By.CSS_SELECTOR, curves))
    visible = "return [...document.querySelectorAll('.card')].filter(c => c.offsetHeight).length"
    shown = browser.execute_script(visible)
    browser.find_elements(By.CSS_SELECTOR, "#legend button")[0].click()
    assert len(browser.find_elements(By.CSS_SELECTOR, curves)) == before - 1
    assert browser.execute_script(visible) == shown - 3, "split, confusion matrix, reliability"
    assert browser.get_log("browser") == []
    for line in browser.get_log("performance"):
        event = json.loads(line["message"])["message"]
        if event["method"] == "Network.requestWillBeSent":
            url = event["params"]["request"]["url"]
            assert url.startswith(("file:", "data:")), url


def test_the_table_sorts(runs, tmp_path, browser):
    from selenium.webdriver.common.by import By

    records = gather(runs)
    lines = [{**line, "global_nll": math.inf} for line in records[0].metrics]
    page = tmp_path / "page.html"
    page.write_text(render([replace(records[0], metrics=lines), *records[1:]]))
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
    assert order()[-2] == "three", "its likelihood is zero"
    heads = browser.find_elements(By.CSS_SELECTOR, "#runs th")
    next(h for h in heads if h.text == "clients").click()
    assert order()[-1] == "two hundred", "as numbers, not as text"
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

    show(browser, pages["many"])
    (record,) = gather(runs[1:2])
    index = next(
        index
        for index, chart in enumerate(
            c for f in FIGURES for c in FIGURES[f]([record]) if telling(c)
        )
        if chart.key == "clients"
    )
    svg = browser.find_element(By.CSS_SELECTOR, f"[data-chart='{index}'] .chart > svg")
    tip = browser.find_element(By.ID, "tip")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", svg)
    marks = svg.find_elements(By.CSS_SELECTOR, "path")
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
    assert f"{200 - 24} of 200 clients are not listed" in render([record])
    assert charts("clients", [record])
