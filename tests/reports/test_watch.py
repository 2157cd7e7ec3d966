"""Runs that are followed while they go: what they tell, and the page that is served."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import fedbayes
from fedbayes import Simulation
from fedbayes.errors import RunError
from fedbayes.federation.attacks.engine import AdversarialEngine
from fedbayes.federation.client_runtime import ClientRuntime
from fedbayes.federation.engines import AtWork, at_work
from fedbayes.reports import follow, gather, now
from fedbayes.reports.figures import charts
from fedbayes.reports.follow import Follower
from fedbayes.reports.gather import rounds_of
from fedbayes.reports.page import render
from fedbayes.reports.serve import PageServer
from fedbayes.reports.troubles import troubles
from fedbayes.storage import heartbeat
from fedbayes.storage.activity import TRAINING, Activity
from fedbayes.storage.folder import RunFolder
from fedbayes.storage.heartbeat import ACTIVITY_FILE, Pulse, Work, read_pulse
from fedbayes.storage.pace import Pace
from fedbayes.workflows.experiments.seed_runs import SeedRuns
from tests.helpers.command_line import command
from tests.helpers.watched import followed, served, small, until
from tests.hostile.kills import forked

PRIVATE = {"privacy": {"noise": 1.0}, "aggregation": {"clip": 1.0}}


@pytest.fixture
def quick(monkeypatch):
    """Beats and looks that follow one another at once."""
    monkeypatch.setattr(heartbeat, "BEAT", 0.02)
    monkeypatch.setattr(follow, "LOOK", 0.02)
    monkeypatch.setattr(follow, "QUICK", 0.1)
    monkeypatch.setattr(follow, "DEEP", 0.1)


def get(server, path="/", host=None, method="GET"):
    """Status, headers and body of a request, as a browser or anybody else makes it."""
    link = http.client.HTTPConnection(*server.server_address[:2], timeout=60)
    try:
        link.putrequest(method, path, skip_host=host is not None)
        if host:
            link.putheader("Host", host)
        link.endheaders()
        answer = link.getresponse()
        return answer.status, dict(answer.headers), answer.read().decode()
    finally:
        link.close()


def drawn(page):
    """The numbers of the charts of a page."""
    (text,) = re.findall(r'<script id="charts" type="application/json">(.*?)</script>', page)
    return json.loads(text)


# What a run tells while it goes


def test_a_run_says_what_it_is_busy_with_and_takes_its_word_away(quick, monkeypatch, tmp_path):
    config, told = small(rounds=2), []
    real = ClientRuntime.train

    def train(self, task):
        def beat():
            pulse = read_pulse(tmp_path / "r")
            at = pulse and (pulse.round, pulse.work.working)
            return at == (task.round, (f"client-{task.client}",)) and pulse

        told.append((task, until(beat)))
        return real(self, task)

    monkeypatch.setattr(ClientRuntime, "train", train)
    with Simulation(config, tmp_path / "r") as simulation:
        list(simulation)
    assert [task.client for task, _ in told] == [0, 1, 2, 3] * 2
    for place, (_, pulse) in enumerate(told):
        assert (pulse.done, pulse.cohort, pulse.rounds) == (place % 4, 4, 2)
        assert (pulse.process, pulse.host) == (os.getpid(), socket.gethostname())
        assert abs(time.time() - pulse.written) < 600
        assert pulse.work.away_total == 0
    assert told[0][1].left is None
    assert told[-1][1].left > 0
    assert [pulse.elapsed for _, pulse in told] == sorted(pulse.elapsed for _, pulse in told)
    left = {path.name for path in (tmp_path / "r").iterdir()}
    assert ACTIVITY_FILE not in left
    assert not [name for name in left if name.startswith(".") and name != ".lock"]
    assert ACTIVITY_FILE not in (tmp_path / "r" / "SHA256SUMS").read_text()


def test_what_is_told_changes_no_number(quick, monkeypatch, tmp_path):
    fedbayes.run(small(), tmp_path / "told")
    monkeypatch.setattr(heartbeat.Heartbeat, "begin", lambda self, rounds, work: None)
    fedbayes.run(small(), tmp_path / "silent")
    files = [
        {p.name: p.read_bytes() for p in (tmp_path / name).iterdir() if p.suffix == ".safetensors"}
        for name in ("told", "silent")
    ]
    assert files[0] == files[1]
    assert files[0]


def in_the_way(file):
    """Put a folder in place of a file that another thread writes again and again."""
    file.unlink(missing_ok=True)
    with suppress(FileExistsError):
        file.mkdir()
        return True


def test_a_run_goes_on_where_its_word_cannot_be_written(quick, tmp_path):
    with Simulation(small(), tmp_path / "r") as simulation:
        until(lambda: read_pulse(tmp_path / "r"))
        until((tmp_path / "r" / ACTIVITY_FILE).exists)
        simulation._heartbeat._file = Path("/proc/none")  # of which the thread knows nothing
        until(lambda: in_the_way(tmp_path / "r" / ACTIVITY_FILE))
        assert len(list(simulation)) == 3
    assert (tmp_path / "r" / "summary.json").exists()


def test_a_simulation_that_nobody_holds_any_more_falls_silent(quick, tmp_path):
    simulation = Simulation(small(), tmp_path / "r")
    thread = simulation._heartbeat._thread
    simulation.folder.unlock()
    del simulation
    until(lambda: not thread.is_alive())


def test_a_word_that_a_kill_left_goes_with_the_next_one(tmp_path):
    child = forked(lambda: fedbayes.run(small(rounds=10_000), tmp_path / "r", progress=False))
    try:
        pulse = until(lambda: read_pulse(tmp_path / "r"))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert pulse.process == child
    (tmp_path / "r" / f".{ACTIVITY_FILE}.{child}").write_text("half")
    (record,) = gather([tmp_path / "r"])
    told = now.now(record, pulse, 1.0)
    assert told.state == "stopped"
    assert told.line == (
        f"process {child} stopped unexpectedly in {now._at(pulse)}; resume with: fedbayes resume "
        f"{tmp_path / 'r'}"
    )
    with Simulation(None, tmp_path / "r"):
        until(lambda: read_pulse(tmp_path / "r").process == os.getpid())
    assert not list((tmp_path / "r").glob(f"*{ACTIVITY_FILE}*"))


@pytest.mark.parametrize("text", ["", "{}", "[" * 10_000, '{"process": "x"}', "\xff", "null"])
def test_a_word_of_a_stranger_is_none(text, tmp_path):
    (tmp_path / ACTIVITY_FILE).write_text(text)
    assert read_pulse(tmp_path) is None


def test_who_is_in_a_round_by_secret_coins_is_not_told(quick, monkeypatch, tmp_path):
    pytest.importorskip("dp_accounting")
    pulses, real = [], ClientRuntime.train

    def train(self, task):
        beat = lambda: (p := read_pulse(tmp_path / "r")) and p.work.working_total and p  # noqa: E731
        pulses.append(until(beat))
        return real(self, task)

    monkeypatch.setattr(ClientRuntime, "train", train)
    config = small(rounds=4, cohort=2, sampling="poisson", **PRIVATE)
    fedbayes.run(config, tmp_path / "r")
    assert pulses
    assert {pulse.work.working for pulse in pulses} == {()}
    record = rounds_of(RunFolder(tmp_path / "r"), "r")
    told = dict(now.now(record, replace(pulses[0], process=os.getpid()), 0.0).details)
    assert told["at work"] == "1 clients with secret names"


# What engines tell


@pytest.mark.parametrize("secure", [False, True])
def test_flower_tells_who_is_at_work(secure, monkeypatch, tmp_path):
    pytest.importorskip("flwr")
    seen, real = [], ClientRuntime.train
    more = {"secure": {"enabled": True}} if secure else {}
    config = small(rounds=1, engine="flower-simulation", round_timeout=60, **more)
    with Simulation(config, tmp_path / "r") as simulation:

        def train(self, task, *given):
            # A node may begin before the server knows that it took its message.
            until(lambda: task.client in simulation.at_work().working)
            until(lambda: not simulation.at_work().away)
            seen.append(task.client)
            return real(self, task, *given)

        monkeypatch.setattr(ClientRuntime, "train", train)
        list(simulation)
        assert simulation.at_work() == AtWork()
    assert sorted(seen) == [0, 1, 2, 3]


@pytest.mark.slow
def test_workers_tell_who_is_at_work_and_who_has_answered(tmp_path):
    training = {"epochs": 30}  # so that no client is through between two looks
    config = small(rounds=1, engine="workers", workers=2, cohort=4, training=training)
    seen = []
    with Simulation(config, tmp_path / "r") as simulation:
        over = threading.Event()

        def look():
            while not over.wait(0.001):
                seen.append(simulation.at_work())

        watcher = threading.Thread(target=look)
        watcher.start()
        list(simulation)
        over.set()
        watcher.join()
        assert simulation.at_work() == AtWork()
    assert {client for one in seen for client in one.working} == {0, 1, 2, 3}
    assert max(len(one.working) for one in seen) <= 2
    assert max(one.answered for one in seen) >= 2


def test_an_engine_that_tells_nothing_is_no_less_an_engine(tmp_path):
    class Silent:
        def __init__(self, runtime):
            self.runtime = runtime

        def train(self, tasks):
            return map(self.runtime.train, tasks)

        def evaluate(self, evaluations):
            return map(self.runtime.evaluate, evaluations)

        def close(self):
            pass

    with Simulation(small(), tmp_path, engine=lambda run: Silent(run.runtime)) as simulation:
        list(simulation)
        assert simulation.at_work() == AtWork()
        lying = AdversarialEngine(simulation.engine, None, None, None, None)
        assert at_work(lying) == AtWork()


def test_clients_that_answered_before_their_turn_count_as_done():
    pace = Pace(5, 0.0)
    activity = Activity(TRAINING, 1, 1, 10)
    assert pace.noticed(activity, 0, 1.0) == activity
    seen = pace.noticed(activity, 6, 12.0)
    assert seen.done == 6
    # Six in 12 s: four more take 8, and the four rounds that follow 20 each.
    assert pace.left(12.0, seen) == pytest.approx(8 + 4 * 20)
    assert pace.left(14.0, pace.noticed(activity, 6, 14.0)) == pytest.approx(6 + 4 * 20)
    assert pace.noticed(replace(activity, done=7), 6, 15.0).done == 7


# What the page says


def test_a_run_is_followed_from_before_it_is_there_to_its_end(quick, tmp_path):
    folder = tmp_path / "r"
    with served(folder) as server:
        assert server.server_address[0] == "127.0.0.1"

        def state():
            status, _, text = get(server, "/state")
            assert status == 200
            (run,) = json.loads(text)["runs"]
            return run

        assert state() == {
            "label": "r",
            "state": "waiting",
            "line": f"there is no {folder} yet",
            "rounds": [0, 0],
            "clients": [0, 0],
            "details": [],
        }
        assert drawn(get(server)[2]) == []
        with Simulation(small(rounds=4), folder) as simulation:
            until(lambda: state()["state"] == "running")
            steps = iter(simulation)
            next(steps)
            next(steps)
            assert until(lambda: state()["rounds"] == [2, 4])
            line = until(lambda: (told := state()["line"]).startswith("round 2 of 4: ") and told)
            assert re.search(r", about \d:\d\d left$", line), line
            head, *rows = until(lambda: drawn(get(server)[2])[:1])[0]["rows"]
            assert head == ["run", "round", "global accuracy"]
            accuracies = [line["global_accuracy"] for line in simulation.folder.metrics()]
            assert rows == [["r", 1, accuracies[0]], ["r", 2, accuracies[1]]]
        assert until(lambda: state()["state"] == "stopped")
        assert "no process is running it after 2 of 4 rounds" in state()["line"]
        assert state()["line"].endswith(f"resume with: fedbayes resume {folder}")
        fedbayes.resume(folder)
        until(lambda: state()["state"] == "ended")
        assert state()["line"] == "ended after 4 of 4 rounds: completed"
        # In the end it is the report of what is on the disk.
        expected = json.loads(json.dumps(drawn(render(gather([folder])))))
        assert until(lambda: drawn(get(server)[2]) == expected)
        assert {"Heat", "Reliability", "Spread"} <= {chart["kind"] for chart in expected}


def test_seeds_are_followed_as_they_begin(quick, tmp_path):
    repeated = SeedRuns(small(rounds=1), 3, tmp_path / "seeds")
    with followed(tmp_path / "seeds") as follower:
        assert [run["state"] for run in follower.state()["runs"]] == ["waiting"]
        for done, seed in enumerate(repeated.missing, 1):
            with repeated.open(seed) as simulation:
                list(simulation)

            def states(done=done):
                told = [(run["label"], run["state"]) for run in follower.state()["runs"]]
                later = [(f"seed-{s}", "waiting") for s in range(done, 3)]
                return told == [(f"seed-{s}", "ended") for s in range(done)] + later

            until(states)
        assert until(
            lambda: (
                {row[0] for chart in drawn(follower.page())[:1] for row in chart["rows"][1:]}
                == {"seed-0", "seed-1", "seed-2"}
            )
        )
    (tmp_path / "others").mkdir()
    (tmp_path / "seeds" / "seed-0").rename(tmp_path / "others" / "a")
    with pytest.raises(RunError, match="Give the run folders in it"):
        Follower([tmp_path / "others"])
    with pytest.raises(RunError, match="given twice"):
        Follower([tmp_path / "r", tmp_path / "r"])


def test_another_server_never_has_the_version_of_a_page_that_is_old(quick, run):
    """Else a page that outlives its server would take the new one's page for its own."""
    seen = set()
    for _ in range(2):
        with followed(run) as follower:
            until(lambda follower=follower: "Heat" in follower.page())
            version = follower.state()["version"]
            assert version not in seen
            seen.add(version)


def test_what_is_damaged_is_told_and_the_page_stays(quick, tmp_path):
    fedbayes.run(small(), tmp_path / "r")
    with followed(tmp_path / "r") as follower:
        before = until(lambda: drawn(follower.page()))
        lines = (tmp_path / "r" / "metrics.jsonl").read_text()
        (tmp_path / "r" / "metrics.jsonl").write_text(lines.replace("0", "1"))

        def trouble():
            return dict(follower.state()["runs"][0]["details"]).get("trouble", "")

        assert until(lambda: "metrics.jsonl" in trouble())
        assert drawn(follower.page())[0] == before[0]
        (tmp_path / "r" / "metrics.jsonl").write_text(lines)
        assert until(lambda: not trouble())


def test_silence_is_told(tmp_path):
    fedbayes.run(small(rounds=2), tmp_path / "r")
    (record,) = gather([tmp_path / "r"])
    record = replace(record, ending="so far")
    options = ("--superlink", "ward:8000", "--root-certificates", "our CA.pem")
    RunFolder(tmp_path / "r").keep_connection(options)
    away = {"Ward 7": "not connected; the round waits for it", "B": "not connected"}
    work = Work((*"abcdefghi",), 30, away, 2)
    pulse = Pulse(1, "elsewhere", 0.0, TRAINING, 3, 9, 1, 40, 61.0, 125.0, work)
    told = now.now(record, pulse, 5.0)
    assert told.state == "running"
    assert told.line == "round 3 of 9: 1 of 40 clients have finished, 1:06 elapsed, about 2:00 left"
    assert dict(told.details) == {
        "at work": "a, b, c, d, e, f, g, h and 22 more",
        "away": "Ward 7: not connected; the round waits for it; B: not connected",
    }
    told = now.now(record, pulse, 75.0)
    assert told.state == "silent"
    assert told.line == (
        "no heartbeat for 1:15 of process 1 on elsewhere, in round 3 of 9; resume with: "
        "fedbayes "
        f"federate resume {tmp_path / 'r'} --superlink ward:8000 --root-certificates 'our CA.pem'"
    )


def test_troubles_are_those_of_the_lines(tmp_path):
    config = small(rounds=3, attack={"kind": "nan", "clients": 1, "start": 2})
    run = fedbayes.run(config, tmp_path / "r")
    (record,) = gather([tmp_path / "r"])
    counted = {}
    for line in run.metrics:
        for client, reason in line["refused"].items():
            counted.setdefault(f"client-{client}", []).append((line["round"], reason))
    assert counted
    assert {t.client: (t.what, t.times, t.last, t.reason) for t in troubles([record])} == {
        name: ("report rejected", len(found), *found[-1]) for name, found in counted.items()
    }
    page = render([record])
    assert "Troubles with clients" in page
    assert f"<td>{next(iter(counted))}</td><td>report rejected</td><td>2</td><td>3</td>" in page
    assert "Troubles with clients" not in render([replace(record, metrics=[])])


def test_privacy_spent_grows_to_what_the_summary_says(tmp_path):
    pytest.importorskip("dp_accounting")
    run = fedbayes.run(small(rounds=3, **PRIVATE), tmp_path / "r")
    (record,) = gather([tmp_path / "r"])
    (chart,) = charts("privacy", [record])
    epsilon = run.summary["privacy"]["epsilon"]
    for curve, kind in zip(chart.curves, ("replace-one", "add-or-remove"), strict=True):
        assert curve.x == [1, 2, 3]
        assert curve.y == sorted(curve.y)
        assert curve.y[-1] == pytest.approx(epsilon[kind])
    told = dict(now.now(record, None, 0.0).details)["privacy spent"]
    assert f"{epsilon['replace-one']:.3g} (replace-one)" in told
    assert told.endswith("at δ = 1e-05, after round 3")


# Who is answered


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fedbayes.run(small(), tmp_path_factory.mktemp("served") / "r").folder.path


def test_the_page_and_the_state_are_all_that_is_served(run):
    with served(run) as server:
        files = [str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()]
        assert files
        for path in (*files, f"../{run.name}/config.toml", "%2e%2e/x", "state/", "r"):
            status, _, text = get(server, f"/{path}")
            assert (status, text) == (404, "only / and /state exist\n"), path
        status, headers, page = get(server)
        assert status == 200
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        assert headers["Cache-Control"] == "no-store"
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", page), "it asks for nothing else"
        assert get(server, method="HEAD")[2] == ""
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert get(server, method=method)[0] == 501


@pytest.mark.parametrize(
    ("host", "answered"),
    [
        ("127.0.0.1", True),
        ("127.0.0.1:8000", True),  # another port: that of a tunnel
        ("localhost:1", True),
        ("LOCALHOST", True),
        ("localhost.", True),
        ("[::1]:80", True),
        ("evil.example", False),
        ("evil.example:8000", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False),
        ("192.168.0.7", False),
        ("", False),
        (":80", False),
        ("[", False),
    ],
)
def test_a_name_that_was_made_to_lead_here_is_not_answered(host, answered, run):
    with served(run) as server:
        for path in ("/", "/state"):
            status, _, text = get(server, path, host=host)
            assert status == (200 if answered else 403), text
            assert answered or "digits" not in text
    with followed(run) as follower:
        server = PageServer(follower, "0.0.0.0")
        try:
            assert not server.is_local
            assert server.is_us("192.168.0.7:80")
            assert server.is_us(socket.gethostname())
            assert server.is_us(host) or not answered
            assert not server.is_us("evil.example")
        finally:
            server.server_close()


def test_ports_and_options_that_will_not_do(run, tmp_path, capsys):
    with served(run) as server:
        port = server.server_address[1]
        assert command("report", run, "--watch", "--port", port) == 2
        assert f"port {port}: Address already in use. Choose another --port" in said(capsys)
    assert command("report", run, "--watch", "-o", tmp_path / "x.html") == 2
    assert "Leave out one of them" in said(capsys)
    assert command("report", run, "--port", 8000, "--open") == 2
    assert "--port, --open has no effect. Add --watch" in said(capsys)
    assert command("report", run, "--watch", "--host", "no.such.host.invalid") == 2
    assert "cannot serve at no.such.host.invalid" in said(capsys)
    assert not list(tmp_path.iterdir())


def said(capsys):
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_it(end, run):
    watching = subprocess.Popen(
        [sys.executable, "-m", "fedbayes.cli", "report", str(run), "--watch"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        url = watching.stdout.readline().split()[-1]
        host, port = re.fullmatch(r"http://(127\.0\.0\.1):(\d+)/", url).groups()
        link = http.client.HTTPConnection(host, int(port), timeout=60)
        link.request("GET", "/state")
        assert json.loads(link.getresponse().read())["runs"][0]["state"] == "ended"
        watching.send_signal(end)
        _, error = watching.communicate(timeout=120)
        assert watching.returncode == 0
        assert "Traceback" not in error
    finally:
        watching.kill()
        watching.wait()


def test_a_browser_is_opened_and_another_interface_is_warned_of(run, monkeypatch, capsys):
    opened, asked = [], []

    def watch(folders, told, **how):
        asked.append((folders, how))
        told(SimpleNamespace(url="http://10.0.0.1:8000/", is_local=False))

    monkeypatch.setattr("fedbayes.reports.serve.watch", watch)
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert command("report", run, "--watch", "--open", "--host", "10.0.0.1", "--port", 8000) == 0
    assert asked == [([run], {"host": "10.0.0.1", "port": 8000})]
    assert opened == ["http://10.0.0.1:8000/"]
    printed = capsys.readouterr()
    assert "watch at http://10.0.0.1:8000/" in printed.out
    assert "who can reach this machine can see the page" in " ".join(printed.err.split())
