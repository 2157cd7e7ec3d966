"""The page that follows runs, in a real browser: it grows in place, and all stays as it was put."""

import json
import re
from types import SimpleNamespace

import pytest

from fedbayes import Simulation
from fedbayes.reports import follow
from fedbayes.storage import heartbeat
from tests.helpers.pages import check_texts, keep_picture, show
from tests.helpers.watched import served, small, until

pytestmark = [pytest.mark.xdist_group("browser"), pytest.mark.slow]

# Every frame that is painted: how many charts it has, and how far down the page it is.
FRAMES = """
window.frames_seen = [];
const look = () => {
  const drawn = document.querySelectorAll(".plot[data-stops]").length;
  window.frames_seen.push([drawn, Math.round(scrollY)]);
  requestAnimationFrame(look);
};
look();
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT", 0.1)
    monkeypatch.setattr(follow, "LOOK", 0.1)
    monkeypatch.setattr(follow, "QUICK", 0.1)
    monkeypatch.setattr(follow, "DEEP", 0.1)


def look(browser, server, width=1280, theme="light"):
    show(browser, SimpleNamespace(as_uri=lambda: server.url), width, theme)


def ask(browser, code, *arguments):
    return browser.execute_script(f"return {code}", *arguments)


def points(browser):
    """How many points the first curve has that is drawn."""
    return ask(
        browser,
        """(charts => charts.length
          ? new Set(charts[0].rows.slice(1).map(row => row[1])).size : 0)(
          JSON.parse(document.getElementById("charts").textContent))""",
    )


def test_a_page_grows_in_place_and_keeps_what_was_done_to_it(browser, tmp_path):
    names = ("one", "two")
    runs = [tmp_path / name for name in names]
    config = small(rounds=12, attack={"kind": "nan", "clients": 1})
    with (
        Simulation(config, runs[0]) as first,
        Simulation(config.model_copy(update={"seed": 1}), runs[1]) as second,
        served(*runs) as server,
    ):
        steps = [iter(first), iter(second)]
        for one in steps:
            next(one)
            next(one)
        until(lambda: re.search(r'"one", 2.0.*"two", 2.0', server.follower.page()))
        look(browser, server)
        until(lambda: ask(browser, "document.querySelectorAll('.plot[data-stops]').length") >= 5)
        ask(
            browser,
            """(() => {
            window.stayed = true;
            document.getElementById("theme").click();
            document.querySelectorAll("#legend button")[1].click();
            const heads = [...document.querySelectorAll("#runs th")];
            heads.find(h => h.textContent === "run").click();
            heads.find(h => h.textContent === "run").click();
            document.querySelector("details").open = !document.querySelector("details").open;
            })()""",
        )
        browser.execute_script("return new Promise(done => setTimeout(done, 100))")  # it is drawn
        browser.execute_script(
            "document.querySelector('.plot[data-stops]').focus({ preventScroll: true });"
            "scrollTo(0, 400)"
        )
        asked = """(() => ({
            stayed: window.stayed,
            theme: document.documentElement.dataset.theme,
            button: document.getElementById("theme").textContent.trim(),
            shown: [...document.querySelectorAll("#legend button")].map(b => b.ariaPressed),
            curves: [...document.querySelectorAll(".plot[data-stops]")[0].querySelectorAll(
              ".run")].filter(one => one.getBoundingClientRect().width).length,
            rows: [...document.querySelectorAll("#runs tbody tr")].map(r => r.cells[0].textContent),
            open: document.querySelector("details").open,
            focus: document.activeElement === document.querySelector(".plot[data-stops]"),
            down: Math.round(scrollY),
        }))()"""
        before = ask(browser, asked)
        assert before["rows"] == ["two", "one"]
        assert before["theme"] == "dark"
        assert before["button"] == "light"
        assert before["shown"] == ["true", "false"]
        assert before["curves"] == 1
        assert before["focus"]
        assert before["down"] == 400
        browser.get_log("browser")
        charts = ask(browser, "document.querySelectorAll('.plot[data-stops]').length")
        browser.execute_script(FRAMES)
        for done in range(3, 7):
            for one in steps:
                next(one)
            until(lambda done=done: points(browser) == done)
        assert ask(browser, asked) == before
        seen = ask(browser, "window.frames_seen")
        assert len(seen) > 10
        assert min(number for number, _ in seen) >= charts, "no frame without the charts"
        # A line that comes above moves the page by its height, so that what is read stays.
        assert all(abs(down - 400) < 60 for _, down in seen)
        table = ask(browser, "document.getElementById('troubles').textContent")
        assert "report rejected" in table
        assert browser.get_log("browser") == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_every_state_of_a_run_can_be_read(width, theme, browser, tmp_path):
    folder = tmp_path / "a-run-whose-name-a-script-made-of-all-its-settings-lr-0.05-epochs-1-seed-0"

    def live():
        return ask(browser, "document.getElementById('live').textContent")

    with served(folder) as server:
        look(browser, server, width, theme)
        until(lambda: "there is no" in live())
        with Simulation(small(rounds=3), folder) as simulation:
            steps = iter(simulation)
            next(steps)
            until(lambda: "round 1 of 3" in live() and points(browser) == 1)
            widths = ask(
                browser,
                "[...document.querySelectorAll('#live .progress')].map(b => b.ariaValueNow)",
            )
            assert widths == ["1", "4"]
            browser.execute_script(
                "document.querySelectorAll('details').forEach(d => d.open = true)"
            )
            keep_picture(browser, f"watch-{width}-{theme}")
            check_texts(browser, width)
        until(lambda: "no process is running it" in live())
        check_texts(browser, width)
        with Simulation(None, folder) as simulation:
            list(simulation)
        until(lambda: "ended after 3 of 3 rounds: completed" in live() and points(browser) == 3)
        check_texts(browser, width)
        assert ask(browser, "document.querySelectorAll('#live .lost').length") == 0


def test_a_page_outlives_its_server_and_finds_it_again(browser, tmp_path):
    with Simulation(small(rounds=9), tmp_path / "r") as simulation:
        steps = iter(simulation)
        next(steps)
        with served(tmp_path / "r") as server:
            look(browser, server)
            until(lambda: points(browser) == 1)
            port = server.server_address[1]
        lost = "document.querySelector('#live .lost')"
        until(lambda: ask(browser, f"{lost} !== null"))
        assert "The server does not answer" in ask(browser, f"{lost}.textContent")
        assert ask(browser, "document.querySelectorAll('.plot[data-stops]').length") >= 3
        next(steps)
        with served(tmp_path / "r", port=port):
            until(lambda: points(browser) == 2 and ask(browser, f"{lost} === null"))


def test_a_page_asks_for_nothing_but_itself(browser, tmp_path):
    with served(tmp_path / "r") as server:
        browser.get("about:blank")
        browser.get_log("performance")
        with Simulation(small(rounds=2), tmp_path / "r") as simulation:
            look(browser, server)
            list(simulation)
            until(lambda: points(browser) == 2)
        asked = set()
        for line in browser.get_log("performance"):
            event = json.loads(line["message"])["message"]
            if event["method"] == "Network.requestWillBeSent":
                asked.add(event["params"]["request"]["url"])
        ours = {url for url in asked if not url.startswith("data:")}
        assert ours == {server.url, f"{server.url}state"}


def test_the_tip_under_the_pointer_and_a_selection_stay(browser, tmp_path):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    with (
        Simulation(small(rounds=9), tmp_path / "r") as simulation,
        served(tmp_path / "r") as server,
    ):
        steps = iter(simulation)
        next(steps)
        next(steps)
        look(browser, server)
        until(lambda: points(browser) == 2)
        svg = browser.find_element(By.CSS_SELECTOR, ".plot[data-stops]")
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", svg)
        ActionChains(browser).move_to_element_with_offset(svg, 60, 0).perform()
        assert ask(browser, "tip.style.display") == "block"
        next(steps)
        until(lambda: points(browser) == 3)
        assert ask(browser, "tip.style.display") == "block"
        assert ask(browser, "tip.textContent").startswith("round ")
        ActionChains(browser).move_by_offset(0, -400).perform()
        browser.execute_script("getSelection().selectAllChildren(document.querySelector('h1'))")
        next(steps)
        version = ask(browser, "version")
        until(lambda: server.follower.state()["version"] != version)
        browser.execute_script("return new Promise(done => setTimeout(done, 2500))")
        assert ask(browser, "getSelection().toString()").strip() == "fedavg on digits"
        assert points(browser) == 3
        browser.execute_script("getSelection().removeAllRanges()")
        until(lambda: points(browser) == 4)
