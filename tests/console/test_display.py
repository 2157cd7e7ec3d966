"""What a run shows while it goes: compared with the numbers of the run."""

import io
import math
import os
import pty
import re
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import rich
from rich.console import Console

import fedbayes
from fedbayes import Config, Simulation
from fedbayes.console import display as shown
from fedbayes.console.display import Display
from fedbayes.console.notebook import Panel, sparkline
from fedbayes.errors import RunError
from fedbayes.federation.client_runtime import ClientRuntime
from fedbayes.federation.engines import AtWork
from fedbayes.federation.engines.sequential import Sequential
from fedbayes.methods.fedavg import FedAvg
from fedbayes.storage import pace as pace_of
from fedbayes.storage.activity import EVALUATING, TRAINING, Activity
from fedbayes.storage.formatting import clock
from fedbayes.storage.heartbeat import Work
from fedbayes.storage.pace import Pace

SMALL = {"data": {"clients": 4, "partition": "iid"}, "model": {"hidden": [8]}}


@pytest.fixture(autouse=True)
def no_round_is_long(monkeypatch):
    """However slow the machine that tests run on."""
    monkeypatch.setattr(pace_of, "LONG", math.inf)


def small(**changes):
    return Config.published(**{"rounds": 3, **SMALL} | changes)


def lines_of(console):
    """What was drawn, a line for each state of the live line, without control sequences."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    return [line for line in re.split(r"[\r\n]+", text) if line]


def run_on(console, config, folder=None):
    with (
        Display(console) as display,
        Simulation(config, folder, notify=display.notify) as simulation,
    ):
        display.begin(simulation)
        for step in simulation:
            display.show(simulation, step)
    return simulation


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sequential", "workers", "flower-simulation"])
def test_every_client_is_heard_of_on_every_engine(engine):
    if engine == "flower-simulation":
        pytest.importorskip("flwr")
    heard = []
    config = small(rounds=2, engine=engine, cohort=3)
    with Simulation(config, notify=heard.append) as simulation:
        list(simulation)
    assert [busy.what for busy in heard[:3]] == [
        "loading digits",
        "building the network",
        f"starting {engine}",
    ]
    assert heard[3:] == [
        busy
        for number in (1, 2)
        for busy in [
            *(Activity(TRAINING, number, done, 3) for done in range(4)),
            Activity(EVALUATING, number, 3, 3),
        ]
    ]


@pytest.mark.slow
def test_off_a_terminal_a_long_round_says_how_far_it_is(monkeypatch):
    monkeypatch.setattr(shown, "QUIET", 0.2)
    monkeypatch.setattr(shown, "_TICK", 0.02)
    real = ClientRuntime.train

    def slow(self, task):
        time.sleep(0.3)
        return real(self, task)

    monkeypatch.setattr(ClientRuntime, "train", slow)
    console = Console(file=io.StringIO(), width=60)
    simulation = run_on(console, small(rounds=2))
    printed = console.file.getvalue().splitlines()
    pattern = r"round 2/2: (\d) of 4 clients, \d:\d\d elapsed, about \d:\d\d left"
    told = [int(match[1]) for match in map(re.compile(pattern).fullmatch, printed) if match]
    assert len(told) >= 2
    assert told == sorted(told)
    assert told[-1] >= 2
    last = simulation.folder.metrics()[-1]
    assert (
        f"global {last['global_accuracy']:.4f}  local {last['local_accuracy']:.4f}" in printed[-1]
    )


def test_a_quick_start_is_silent_and_a_slow_one_is_not(monkeypatch):
    monkeypatch.setattr(shown, "_TICK", 0.02)
    for quiet, expected in ((5.0, []), (0.1, ["loading all of it (0:00)"])):
        monkeypatch.setattr(shown, "QUIET_START", quiet)
        console = Console(file=io.StringIO())
        with Display(console) as display:
            display.notify(Activity("loading all of it"))
            time.sleep(0.4)
        assert console.file.getvalue().splitlines() == expected


@pytest.mark.parametrize(
    ("width", "there", "absent"),
    [
        (30, [r"round 3/3"], ["local", "down"]),
        (60, [r"round 3/3", r"0:0\d", r"global 0\.\d{4}"], ["down"]),
        (80, [r"round 3/3", r"0:0\d", r"global 0\.\d{4}  local 0\.\d{4}"], []),
        (120, [r"round 3/3", r"━", r"global 0\.\d{4}  local 0\.\d{4}  down .* up "], []),
    ],
)
def test_the_line_fits_and_the_round_outlives_the_accuracies(width, there, absent):
    console = Console(file=io.StringIO(), width=width, force_terminal=True)
    simulation = run_on(console, small(rounds=3))
    lines = [line for line in lines_of(console) if line.startswith("round")]
    assert max(map(len, lines)) <= width
    # A line that had wrapped would have left a piece behind that begins with something else.
    header = "fedavg on digits"
    spinner = re.compile(r"\S (starting|loading|building)")
    for line in lines_of(console):
        known = ("round", header, "published settings")
        assert line.startswith(known) or spinner.match(line), line
    for pattern in there:
        assert re.search(pattern, lines[-1]), lines[-1]
    for word in absent:
        assert word not in lines[-1]
    last = simulation.folder.metrics()[-1]
    if width >= 80:
        assert f"global {last['global_accuracy']:.4f}" in lines[-1]
        assert f"local {last['local_accuracy']:.4f}" in lines[-1]


def test_the_longest_of_rounds_keep_their_time_at_60_columns():
    console = Console(width=60, force_terminal=True, file=io.StringIO())
    simulation = SimpleNamespace(
        config=SimpleNamespace(rounds=1000, metrics=[]),
        progress=SimpleNamespace(bytes_down=10**12, bytes_up=10**12),
        method=FedAvg(),
        likelihood=SimpleNamespace(metric="accuracy"),
    )
    pace = Pace(1000, 0.0)
    pace.round_ended(3600.0)
    metrics = {"global_accuracy": 0.5, "local_accuracy": 0.5}
    busy = Activity(TRAINING, 2, 7, 100)
    with console.capture() as captured:
        console.print(shown._row(60, simulation, metrics, busy, pace, 4000.0))
    (line,) = captured.get().splitlines()
    line = re.sub(r"\x1b\[[0-9;]*m", "", line)
    assert "round    2/1000" in line
    assert "1:06:40, " in line
    assert "  7/100 clients" in line
    assert "global" not in line


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_long_round_has_a_bar_of_its_clients_and_names_who_is_away(width, monkeypatch):
    monkeypatch.setattr(pace_of, "LONG", 5.0)
    console = Console(width=width, force_terminal=True, file=io.StringIO())
    pace = Pace(9, 0.0)
    pace.heard(30.0)
    busy = Activity(TRAINING, 1, 100, 500)
    work = Work(tuple("abcde"), 40, {"Ward 7": "not connected"}, 1, 100)
    assert not pace.is_long(4.0)
    assert pace.is_long(30.0)
    with console.capture() as captured:
        console.print(shown._clients_row(width, 9, busy, work, pace, 30.0))
    (line,) = captured.get().splitlines()
    line = re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip()
    # A fifth of them in half a minute: two minutes for the others.
    assert line.startswith("clients    ━━━━╸━" if width > 80 else "clients    ━╸━")
    assert len(line) <= width
    if width == 120:
        told = "2:00 left in the round  away: Ward 7  at work: a, b, c and 37 more"
        assert line.endswith(told)
    elif width >= 60:
        assert "2:00 left in the round  away: " in line


def test_clients_that_answered_out_of_turn_are_counted_where_rounds_wait(monkeypatch):
    """The first client of the round is the last to answer, which the cohort's order would hide."""
    monkeypatch.setattr(shown, "QUIET", 0.1)
    monkeypatch.setattr(shown, "_TICK", 0.02)
    console = Console(file=io.StringIO(), width=80)
    answered = threading.Event()

    class Late(Sequential):
        count = 0

        def train(self, tasks):
            first, *others = tasks
            outcomes = []
            for outcome in super().train(others):
                outcomes.append(outcome)
                self.count += 1
            answered.wait(60)
            yield from super().train([first])
            yield from outcomes

        def at_work(self):
            return AtWork(super().at_work().working, self.count, {0: "not connected"})

    def end():
        while "3 of 4 clients" not in console.file.getvalue():
            time.sleep(0.02)
        answered.set()

    threading.Thread(target=end, daemon=True).start()
    with (
        Display(console) as display,
        Simulation(
            small(rounds=1), engine=lambda run: Late(run.runtime), notify=display.notify
        ) as simulation,
    ):
        display.begin(simulation)
        for step in simulation:
            display.show(simulation, step)
    pattern = r"round 1/1: 3 of 4 clients, .* elapsed, about .* left; away: client-0"
    assert re.search(pattern, console.file.getvalue())


@pytest.mark.parametrize(
    ("method", "shown"), [("local", ["local"]), ("fedavg", ["global", "local"])]
)
def test_the_headline_comes_first_and_no_model_no_metric(method, shown):
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    run_on(console, small(rounds=1, method={"name": method}))
    assert re.findall(r"(global|local) 0", lines_of(console)[-1]) == shown


@pytest.mark.parametrize(
    ("engine", "divided"), [("flower", "each with its own data"), ("sequential", "iid")]
)
def test_a_federation_of_nodes_names_no_partition_of_the_servers_table(engine, divided, tmp_path):
    table = tmp_path / "reference.csv"
    table.write_text("x,label\n" + "".join(f"{i},{'ab'[i % 2]}\n" for i in range(40)))
    config = small(data={"path": str(table), "clients": 4, "partition": "iid"})
    console = Console(file=io.StringIO(), width=100)
    with Display(console) as display, Simulation(config) as simulation:
        simulation.config = config.model_copy(update={"engine": engine})
        display.begin(simulation)
    assert f"on own: 4 clients ({divided}), 4 in a round" in console.file.getvalue()


def test_a_resumed_run_shows_where_it_is(tmp_path):
    run = fedbayes.run(small(rounds=2), tmp_path)
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with Display(console) as display, Simulation(None, tmp_path) as simulation:
        display.begin(simulation)
    last = lines_of(console)[-1]
    assert last.startswith("round 2/2")
    assert f"global {run.summary['global_accuracy']:.4f}" in last


def test_time_left_comes_of_clients_first_and_then_of_rounds():
    pace = Pace(10, 100.0)
    assert pace.left(103.0, Activity(TRAINING, 1, 0, 4)) is None
    pace.heard(110.0)
    # One of four clients in 10 s: 30 s for the others, then nine rounds of 40 s.
    assert pace.left(110.0, Activity(TRAINING, 1, 1, 4)) == pytest.approx(30 + 9 * 40)
    assert pace.left(114.0, Activity(TRAINING, 1, 1, 4)) == pytest.approx(26 + 9 * 40)
    pace.round_ended(140.0)
    pace.round_ended(150.0)
    pace.round_ended(160.0)  # 40, 10 and 10 s: the first does not count for the others
    assert pace.left(160.0, Activity(TRAINING, 3)) == pytest.approx(7 * 10)
    assert pace.left(164.0, Activity(TRAINING, 4, 0, 4)) == pytest.approx(6 + 6 * 10)
    pace.heard(165.0)
    assert pace.left(165.0, Activity(TRAINING, 4, 1, 4)) == pytest.approx(15 + 6 * 10)
    assert pace.left(180.0, Activity(EVALUATING, 4, 4, 4)) == pytest.approx(6 * 10)
    assert pace.elapsed(180.0) == 80
    assert [clock(41), clock(310), clock(3723)] == ["0:41", "5:10", "1:02:03"]


@pytest.mark.parametrize(
    ("progress", "ipython", "expected"),
    [
        (None, None, False),
        (None, lambda: None, False),
        (None, object, True),
        (True, None, True),
        (False, object, False),
    ],
)
def test_python_shows_rounds_when_asked_and_where_someone_looks(
    progress, ipython, expected, monkeypatch, capsys, tmp_path
):
    if ipython is not None:
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=ipython))
    run = fedbayes.run(small(rounds=2), tmp_path, progress=progress)
    again = fedbayes.resume(tmp_path, progress=progress)
    printed = capsys.readouterr()
    text = printed.out + printed.err
    accuracies = [f"global {line['global_accuracy']:.4f}" for line in run.metrics]
    assert all(accuracy in text for accuracy in accuracies) == expected
    assert bool(text) == expected
    assert again.summary["rounds"] == 2


@pytest.fixture
def outputs(monkeypatch):
    """What a notebook shows: a list of outputs, each of them all that it showed, old to new."""
    found = []

    def display(bundle, raw, display_id):
        assert raw
        assert display_id
        found.append([bundle])
        return SimpleNamespace(update=lambda bundle, raw: found[-1].append(bundle))

    shell = SimpleNamespace(get_ipython=object)
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    console = Console(force_jupyter=True)
    monkeypatch.setattr(rich, "get_console", lambda: console)
    return found


def test_a_notebook_has_one_output_that_follows_the_run(outputs, monkeypatch, capsys):
    monkeypatch.setattr("fedbayes.console.notebook.LEAST_WAIT", 0.0)
    run = fedbayes.run(small(rounds=3))
    assert capsys.readouterr() == ("", "")
    (drawn,) = outputs
    texts = [bundle["text/plain"] for bundle in drawn]
    assert texts[0].startswith("starting")
    assert any("loading digits" in text for text in texts)
    rounds = [int(number) for text in texts for number in re.findall(r"round (\d)/3", text)]
    assert rounds == sorted(rounds)
    assert set(rounds) >= {1, 2, 3}
    last = drawn[-1]
    accuracy = f"global {run.summary['global_accuracy']:.4f}"
    assert accuracy in last["text/plain"]
    assert accuracy in last["text/html"]
    assert '<progress value="1.0000"' in last["text/html"]
    # The curve has a point for each round, and lower is drawn lower.
    points = re.search(r'points="([^"]*)"', last["text/html"])[1].split()
    heights = [-float(point.split(",")[1]) for point in points]
    values = [line["global_accuracy"] for line in run.metrics]
    assert np.argsort(heights).tolist() == np.argsort(values).tolist()


def test_a_thousand_rounds_do_not_flood_a_notebook(outputs, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("fedbayes.console.notebook.time.monotonic", lambda: now[0])
    panel = Panel(lambda: ("<p>", "p"))
    for _ in range(1000):
        now[0] += 0.01
        panel.draw()
    (drawn,) = outputs
    assert len(drawn) <= 10 / 0.2 + 1
    panel.draw(at_once=True)
    assert len(drawn) >= 10 / 0.2 - 1


def test_a_notebook_names_who_is_away(outputs, monkeypatch):
    monkeypatch.setattr("fedbayes.console.notebook.LEAST_WAIT", 0.0)

    class Away(Sequential):
        def at_work(self):
            return AtWork((), 0, {1: "not connected"})

    with (
        Display(rich.get_console()) as display,
        Simulation(
            small(rounds=1), engine=lambda run: Away(run.runtime), notify=display.notify
        ) as simulation,
    ):
        display.begin(simulation)
        for step in simulation:
            display.show(simulation, step)
    (drawn,) = outputs
    assert "away: client-1" in drawn[-2]["text/plain"]


def test_a_notebook_is_told_what_went_wrong(outputs):
    with pytest.raises(RunError, match="5 consecutive rounds all updates were"):
        fedbayes.run(small(rounds=9, training={"lr": 1e30, "epochs": 3}))
    (drawn,) = outputs
    told = drawn[-1]["text/plain"].splitlines()[2:]
    # Five rounds of four reports refused and no update, and why it ended: five lines of them.
    assert told[0] == "… 22 earlier lines"
    assert len(told) == 6
    assert told[1].startswith("round 5: report of client 1 rejected: ")
    assert told[-2] == "round 5: too few valid updates: the global model is unchanged"
    assert told[-1].startswith("interrupted: ")
    assert sparkline([math.nan, 1.0]) == ""


def test_what_is_shown_changes_no_number(tmp_path):
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    run_on(console, small(), tmp_path / "shown")
    fedbayes.run(small(), tmp_path / "silent", progress=False)
    one, two = (tmp_path / name / "model.safetensors" for name in ("shown", "silent"))
    assert one.read_bytes() == two.read_bytes()


def test_a_terminal_shows_something_before_pytorch_is_loaded(tmp_path):
    """The command under a real pseudo-terminal."""
    ours, theirs = pty.openpty()
    arguments = ["run", "--rounds", "2", "--clients", "4", "-o", str(tmp_path / "r")]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    running = subprocess.Popen(
        [sys.executable, "-m", "fedbayes.cli", *arguments],
        stdout=theirs,
        stderr=theirs,
        env=environment,
        close_fds=True,
    )
    os.close(theirs)
    printed = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # the other end was closed
            break
        if not piece:
            break
        printed += piece
    os.close(ours)
    assert running.wait() == 0
    text = printed.decode()
    # A config is not checked without the method's module, which imports PyTorch.
    stages = ["loading PyTorch", "fedavg on digits", "round 2/2", "folder"]
    places = [text.index(stage) for stage in stages]
    assert places == sorted(places)


def test_the_commands_and_the_display_do_without_pytorch():
    code = (
        "import sys, fedbayes.cli, fedbayes.console.display; "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
