"""Runs from the command line, as a user would: killed, interrupted, resumed, mistaken."""

import io
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import fedbayes
from fedbayes import Config, Simulation
from fedbayes.core.messages import decode, dense
from fedbayes.errors import ConfigError, RunError
from fedbayes.federation.client_runtime import ClientFailure, ClientRuntime
from fedbayes.storage.folder import RunFolder
from fedbayes.testing import assert_identical
from fedbayes.workflows.calibrate.calibration import trust
from fedbayes.workflows.serve.export import export
from tests.helpers.cases import cases
from tests.helpers.command_line import command, fedbayes_cli, process
from tests.helpers.cut_off import cut_off_at_every_write

SUMMARY = {
    "method",
    "dataset",
    "model",
    "clients",
    "cohort",
    "rounds",
    "seed",
    "global_accuracy",
    "local_accuracy",
    "bytes_down",
    "bytes_up",
    "sparsity",
    "model_parameters",
    "seconds",
    "seconds_per_round",
    "stopped_reason",
}
SMALL = ["--clients", "4", "--partition", "iid", "--set", "model.hidden=[8]"]


def timeless(folder):
    return [
        {key: value for key, value in line.items() if key != "seconds"}
        for line in RunFolder(folder).metrics()
    ]


def assert_same_run(one, two):
    models = [[p.read_bytes() for p in f.glob("model.safetensors")] for f in (one, two)]
    assert models[0] == models[1]
    assert timeless(one) == timeless(two)
    last = max((one / "checkpoints").iterdir()).name
    states = [dense(decode((f / "checkpoints" / last).read_bytes())) for f in (one, two)]
    for state in states:
        del state["seconds"]
    assert_identical(*states)
    names = [sorted(p.name for p in (f / "clients").glob("*")) for f in (one, two)]
    assert names[0] == names[1]
    for name in names[0]:
        assert (one / "clients" / name).read_bytes() == (two / "clients" / name).read_bytes()


def test_json_is_alone_on_stdout(tmp_path):
    done = fedbayes_cli("run", *SMALL, "--rounds", 2, "-o", tmp_path / "r", "--json")
    summary = json.loads(done.stdout)
    assert summary.keys() >= SUMMARY
    assert summary["stopped_reason"] == "completed"
    assert summary["rounds"] == 2
    assert json.loads((tmp_path / "r" / "summary.json").read_text()) == summary
    lines = RunFolder(tmp_path / "r").metrics()
    assert [line["round"] for line in lines] == [1, 2]
    assert summary["bytes_up"] == sum(line["bytes_up"] for line in lines)
    assert "round 2/2" in done.stderr
    assert summary["seconds_per_round"] == statistics.median(line["seconds"] for line in lines)
    assert summary["seconds"] == pytest.approx(sum(line["seconds"] for line in lines))


def test_a_second_run_does_not_overwrite_the_first(tmp_path, capsys):
    assert command("run", *SMALL, "--rounds", 1, "-o", tmp_path / "r") == 0
    before = (tmp_path / "r" / "summary.json").read_bytes()
    assert command("run", *SMALL, "--rounds", 1, "-o", tmp_path / "r") == 2
    assert "already has a run" in capsys.readouterr().err
    assert (tmp_path / "r" / "summary.json").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "absent.toml"], "Path 'absent.toml' does not exist"),
        (["run", "--method", "fedavgg"], "did you mean 'fedavg'"),
        (["run", "--cohort", "99"], "there are 10 clients"),
        (["run", "--model", "cnn"], "use model 'mlp'"),
        (["resume", "absent"], "Directory 'absent' does not exist"),
        (["methods", "nonsense"], "unknown method"),
    ],
)
def test_mistakes_get_one_plain_message(tmp_path, arguments, words, capsys):
    if arguments[0] == "run":
        arguments = [*arguments, "-o", str(tmp_path / "r")]
    assert command(*arguments) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
    assert not (tmp_path / "r").exists()


OWN = """
from torch import nn
from fedbayes.contracts import About, PointEstimate, Weights

class Mine(PointEstimate[Weights]):
    name = "mine"
    about = About("averages")
    server_state = Weights

    def init(self, run):
        return Weights(run.network.initial)

    def update(self, server, reports, at):
        return Weights(reports.mean()), {}

def network(shape, classes, width):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width),
                         nn.ReLU(), nn.Linear(width, classes))
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sequential", "workers"])
def test_your_own_module_in_the_current_folder(tmp_path, engine, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    script = Path(sys.executable).with_name("fedbayes")
    method = ["--method", "own:Mine", "--model", "own:network", "--engine", engine]
    arguments = ["--set", "model.arguments={width=9}", "--rounds", "2", "--json"]
    done = subprocess.run(
        [script, "run", *method, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["method"] == "own:Mine"
    assert summary["model_parameters"] == 64 * 9 + 9 + 2 * 9 + 90 + 10, "without running means"


LONG = ["--rounds", "150", *SMALL, "--cohort", "2", "--method", "local"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sequential", "workers"])
def test_killed_at_random_moments_it_ends_the_same(tmp_path, engine):
    """Kill with SIGKILL again and again, resume each time, compare with an unbroken run."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    fedbayes_cli("run", *LONG, "--engine", engine, "-o", whole)
    rng, seen = random.Random(engine), []
    start = process("run", *LONG, "--engine", engine, "-o", broken)
    for _ in range(4):
        running = subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        before = len(RunFolder(broken).metrics())
        while len(RunFolder(broken).metrics()) == before and running.poll() is None:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.3))
        running.send_signal(signal.SIGKILL)
        running.wait()
        seen.append(len(RunFolder(broken).metrics()))
        start = process("resume", broken)
    assert 0 < seen[0] < 150, "the kills missed the run"
    fedbayes_cli(*start[3:])
    assert_same_run(whole, broken)


def test_killed_inside_a_round_at_every_write(tmp_path, monkeypatch):
    """Cut a run off at each write that it makes, one after the other, and resume."""

    config = Config.create(
        rounds=3, cohort=2, data={"clients": 4, "partition": "iid"}, method={"name": "local"}
    )
    cut_off_at_every_write(config, tmp_path, monkeypatch, assert_same_run, halves=True)


@pytest.mark.parametrize("signals", cases([1, 2], slow=[1]))
def test_interruption_says_how_to_go_on(tmp_path, signals):
    folder = tmp_path / "r"
    arguments = ["run", *SMALL, "--rounds", "100000", "-o", folder, "--json"]
    running = subprocess.Popen(
        process(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not (folder / "metrics.jsonl").exists() or len(RunFolder(folder).metrics()) < 2:
        time.sleep(0.05)
        assert running.poll() is None
    for _ in range(signals):
        running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert f"fedbayes resume {folder}" in err.replace("\n", "")
    if signals == 1:
        summary = json.loads(out)
        assert summary["stopped_reason"] == "interrupted"
        assert summary["rounds"] == len(RunFolder(folder).metrics())


@pytest.mark.parametrize("method", cases(["scaffold", "fedavg"], slow=["scaffold"]))
def test_private_states_are_looked_for_where_they_are(method, tmp_path):
    """Without any, a run goes on with every engine."""
    pytest.importorskip("flwr")
    first, other, alike = "sequential", "flower-simulation", "workers"
    for before, after in ((first, other), (other, first), (first, alike)):
        folder = tmp_path / f"{before}-{after}"
        settings = {"data": {"clients": 2, "limit": 60}, "model": {"hidden": 4}}
        config = Config.create(**settings, rounds=1, engine=before, method={"name": method})
        fedbayes.run(config, folder)
        file = folder / "config.toml"
        text = file.read_text().replace("rounds = 1\n", "rounds = 2\n")
        file.write_text(text.replace(f'engine = "{before}"', f'engine = "{after}"'))
        if method == "scaffold" and after != alike:
            with pytest.raises(RunError, match=f"2 clients of .* of engine '{before}' keeps"):
                fedbayes.resume(folder)
        else:
            assert fedbayes.resume(folder).summary["rounds"] == 2


def test_a_resume_of_a_complete_run_changes_nothing(tmp_path, capsys):
    assert command("run", *SMALL, "--rounds", 2, "-o", tmp_path / "r") == 0
    before = (tmp_path / "r" / "model.safetensors").read_bytes()
    capsys.readouterr()
    assert command("resume", tmp_path / "r", "--json") == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 2
    assert (tmp_path / "r" / "model.safetensors").read_bytes() == before


def test_damaged_checkpoints_are_told(tmp_path, capsys):
    def refused():
        assert command("resume", tmp_path / "r") == 2
        return capsys.readouterr().err

    assert command("run", *SMALL, "--rounds", 2, "-o", tmp_path / "r") == 0
    (checkpoint,) = (tmp_path / "r" / "checkpoints").iterdir()
    checkpoint.write_bytes(checkpoint.read_bytes()[:100])
    assert "is damaged" in refused()
    with (tmp_path / "r" / "metrics.jsonl").open("a") as file:
        file.write("{bad\n")
    checkpoint.unlink()
    assert "line 3 is damaged" in refused()
    (tmp_path / "r" / "partition.npz").write_bytes(b"PK")
    assert "partition.npz" in refused()


def small(**changes):
    return Config.create(
        **{"rounds": 3, "data": {"clients": 4, "partition": "iid"}, "model": {"hidden": [8]}}
        | changes
    )


def test_the_state_of_any_round_is_reachable(tmp_path):
    with Simulation(small(keep_checkpoints="all"), tmp_path) as simulation:
        seen = {step.number: step.server.weights for step in simulation}
    run = fedbayes.Result(tmp_path)
    for number, weights in seen.items():
        assert_identical(weights, run.server(number).weights)
    assert_identical(run.model, run.server().weights)
    with pytest.raises(RunError, match="no checkpoint of round 9"):
        run.server(9)


def test_only_the_last_checkpoint_is_kept_unless_asked(tmp_path):
    fedbayes.run(small(), tmp_path)
    assert RunFolder(tmp_path).rounds() == [3]


def test_rare_checkpoints_still_end_the_same(tmp_path):
    whole = fedbayes.run(small(method={"name": "local"}), tmp_path / "a")
    config = small(method={"name": "local"}, checkpoint_every=2)
    with Simulation(config, tmp_path / "b") as simulation:
        steps = iter(simulation)
        for _ in range(3):
            next(steps)
    assert RunFolder(tmp_path / "b").rounds() == [2]
    resumed = fedbayes.resume(tmp_path / "b")
    assert_same_run(whole.folder.path, resumed.folder.path)


def test_states_that_a_later_round_replaced_are_removed(tmp_path):
    """A kill may fall between a checkpoint and the removal of what it replaced."""
    config = small(method={"name": "local"}, rounds=4)
    whole = fedbayes.run(config, tmp_path / "whole").folder
    with Simulation(config, tmp_path / "broken") as simulation:
        steps = iter(simulation)
        next(steps)
        next(steps)
    stale = simulation.folder.clients / "0000000-0000001.safetensors"
    stale.write_bytes(b"stale")
    (simulation.folder.clients / "0000001-0000003.safetensors").write_bytes(b"too early")
    (simulation.folder.clients / ".0000001-0000003.safetensors.77").write_bytes(b"half")
    fedbayes.resume(tmp_path / "broken")
    assert_same_run(whole.path, tmp_path / "broken")


def test_relative_paths_are_stored_whole(tmp_path, monkeypatch):
    import numpy as np

    rng = np.random.default_rng(0)
    np.savez(tmp_path / "own.npz", x=rng.normal(size=(80, 4)), y=rng.integers(0, 2, 80))
    monkeypatch.chdir(tmp_path)
    with Simulation(small(data={"path": "own.npz", "clients": 2}), "run") as simulation:
        next(iter(simulation))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert fedbayes.resume(tmp_path / "run").summary["rounds"] == 3


def test_rare_evaluation(tmp_path):
    run = fedbayes.run(small(evaluate_every=2), tmp_path / "two")
    assert ["global_accuracy" in line for line in run.metrics] == [False, True, True]
    run = fedbayes.run(small(evaluate_every=0), tmp_path / "last")
    assert ["global_accuracy" in line for line in run.metrics] == [False, False, True]


def test_accuracies_are_what_they_are_said_to_be(tmp_path):
    """Global on the union of the test sets; local as the mean of each client's last model."""
    with Simulation(small(cohort=2, rounds=4), tmp_path) as simulation:
        reported = {}
        list(simulation)
        data, method, run = simulation.data, simulation.method, simulation.run
        predict = method.draws(method.model(simulation.server, run), run)
        right = total = 0
        for client in range(data.clients):
            samples = data.test(client)
            right += int((predict(samples.x)[0].argmax(1) == samples.y).sum())
            total += len(samples.y)
        assert simulation.summary()["global_accuracy"] == right / total
        # Train the cohorts again, by hand, and try what each client last reported.
        server = method.init(run)
        from fedbayes.contracts import Reports, RoundContext
        from fedbayes.core.messages import encode
        from fedbayes.federation.client_runtime import Task
        from fedbayes.federation.stages.checks import decode_report
        from fedbayes.runs.cohorts import sample_cohort

        for number in range(1, 5):
            reports = Reports.of(method).reduction()
            for client in sample_cohort(0, number, 4, 2):
                message = method.message(server, RoundContext(run, number, client))
                outcome = simulation.runtime.train(Task(client, number, encode(message), None))
                report = decode_report(outcome.report, message)
                reports.add(client, report)
                samples = data.test(client)
                guess = run.network(report.tensors, samples.x).argmax(1)
                reported[client] = float((guess == samples.y).double().mean())
            server, _ = method.update(server, reports, RoundContext(run, number))
        expected = sum(reported.values()) / len(reported)
        assert simulation.local_accuracy() == pytest.approx(expected, rel=1e-12)


def test_the_global_baseline_is_training_on_the_pooled_data(tmp_path):
    run = fedbayes.run(small(method={"name": "global"}), tmp_path)
    assert run.summary["bytes_down"] == run.summary["bytes_up"] == 0
    with Simulation(None, tmp_path) as simulation:
        predict = simulation.method.draws(run.model, simulation.run)
        shares = []
        for client in range(4):
            samples = simulation.data.test(client)
            shares.append(float((predict(samples.x)[0].argmax(1) == samples.y).double().mean()))
    assert run.summary["local_accuracy"] == pytest.approx(sum(shares) / 4)


def test_more_reports_than_a_round_can_have_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="min_reports = 99, but a round of this run has"):
        Simulation(small(min_reports=99), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    fedbayes.run(small(min_reports=2, method={"name": "global"}, rounds=1))  # one place, one report


def test_what_clients_say_is_printed_as_it_is_and_names_no_figure_of_ours(tmp_path, monkeypatch):
    from rich.console import Console

    from fedbayes.console.display import Display

    real = ClientRuntime.train

    def train(self, task):
        outcome = real(self, task)
        if task.client == 1:
            return ClientFailure("see [/data] and [bold]")
        return replace(
            outcome,
            info={
                **outcome.info,
                **dict.fromkeys(("global_accuracy", "stopped", "troubles", "link_up"), 1.0),
                "loss": 0.5,
            },
        )

    monkeypatch.setattr(ClientRuntime, "train", train)
    console = Console(file=io.StringIO(), width=200)
    config = small(rounds=2, evaluate_every=0)
    with Display(console) as display, Simulation(config, tmp_path / "run") as simulation:
        for step in simulation:
            display.show(simulation, step)
    assert "client 1 lost: see [/data] and [bold]" in console.file.getvalue()
    lines = simulation.folder.metrics()
    assert "global_accuracy" not in lines[0]
    assert not lines[0].keys() & {"stopped", "troubles", "link_up"}
    assert simulation.folder.summary()["troubles"] == []
    assert lines[-1]["global_accuracy"] < 1
    assert lines[0]["reported"]["loss"] == 0.5


def test_too_few_good_reports_leave_the_server_alone(tmp_path, monkeypatch):
    honest = ClientRuntime.train

    def train(self, task):
        return ClientFailure("gone") if task.client == 1 else honest(self, task)

    monkeypatch.setattr(ClientRuntime, "train", train)
    with Simulation(small(min_reports=4, rounds=1), tmp_path) as simulation:
        before = dict(simulation.server.weights)
        (step,) = list(simulation)
        assert step.metrics["skipped"]
        assert_identical(before, step.server.weights)


def test_bf16_runs_and_learns(tmp_path):
    run = fedbayes.run(small(precision="bf16", rounds=10), tmp_path)
    assert run.summary["global_accuracy"] > 0.5


def test_five_lines_of_python():
    run = fedbayes.run(method={"name": "fedprox", "proximal": 0.1}, rounds=2)
    assert run.summary["method"] == "fedprox"
    assert len(run.metrics) == 2
    assert os.path.isdir(run.folder.path)  # noqa: PTH112


def test_without_a_global_model_none_is_told(tmp_path, capsys):
    """`local` has no global model: its untrained start is neither evaluated nor saved."""
    from rich.console import Console

    from fedbayes.runs.outcome import outcome

    run = fedbayes.run(small(method={"name": "local"}), tmp_path)
    assert not run.folder.model_file.exists()
    assert all("global_accuracy" not in line for line in run.metrics)
    assert run.summary["headline"] == "local_accuracy"
    Console().print(outcome(run.summary))
    assert capsys.readouterr().out.startswith("local accuracy")
    Console().print(outcome({**run.summary, "headline": "global_accuracy"}))
    assert capsys.readouterr().out.startswith("global accuracy")


@pytest.mark.slow
def test_a_run_that_learnt_nothing_does_not_end_well(tmp_path):
    """Every report is NaN: the model is the untrained start, and nobody calls that completed."""
    arguments = ["run", *SMALL, "--rounds", 2, "-o", tmp_path / "r"]
    diverging = ["--set", "training.lr=1e30", "--set", "training.epochs=3"]
    done = fedbayes_cli(*arguments, *diverging, check=2)
    assert "no round of" in done.stderr
    assert "contains NaN or infinite values" in done.stderr
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["stopped_reason"] == (
        "no round had an update"
    )
    again = fedbayes_cli("resume", tmp_path / "r", check=2)
    assert "untrained start" in again.stderr
    for use in (
        lambda: fedbayes.Result(tmp_path / "r").predictor(),
        lambda: trust(tmp_path / "r"),
        lambda: export(tmp_path / "r", tmp_path / "m.pt2"),
    ):
        with pytest.raises(RunError, match="untrained start"):
            use()
