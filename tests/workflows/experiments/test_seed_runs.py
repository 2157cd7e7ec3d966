"""Several seeds in one command: the same runs as one by one, and their mean and deviation."""

import json
import os
import shutil
import signal
import tomllib
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from typer.testing import CliRunner

import fedbayes
from fedbayes import Config, SeedRuns, Simulation
from fedbayes.cli import app
from fedbayes.errors import ConfigError, EngineError, RunError
from fedbayes.federation.client_runtime import ClientFailure, ClientRuntime
from fedbayes.storage.best_tracker import flat
from tests.helpers.command_line import command, fedbayes_cli

SMALL = {"rounds": 2, "data": {"clients": 4, "alpha": 0.3}, "model": {"hidden": [8]}}
ARGUMENTS = ["--clients", "4", "--alpha", "0.3", "--set", "model.hidden=[8]"]


def small(**changes):
    return Config.create(**{**SMALL, **changes})


def assert_table_is_of(table, summaries):
    """Mean and standard deviation as NumPy has them."""
    for name, metric in table["metrics"].items():
        values = np.array([flat(summary)[name] for summary in summaries], dtype=float)
        assert metric["values"] == values.tolist()
        assert metric["mean"] == pytest.approx(values.mean(), rel=1e-12)
        assert metric["std"] == pytest.approx(values.std(ddof=1), rel=1e-9, abs=1e-12)


@pytest.mark.slow
def test_one_command_gives_the_runs_that_single_commands_give(tmp_path):
    out = tmp_path / "out"
    done = fedbayes_cli(
        "run", *ARGUMENTS, "--rounds", 2, "--seed", 3, "--seeds", 3, "-o", out, "--json"
    )
    table = json.loads(done.stdout)
    assert table == json.loads((out / "seeds.json").read_text())
    assert table["seeds"] == [3, 4, 5]
    summaries = [fedbayes.Result(out / f"seed-{seed}").summary for seed in (3, 4, 5)]
    assert [summary["seed"] for summary in summaries] == [3, 4, 5]
    assert_table_is_of(table, summaries)
    names = {"global_accuracy", "local_accuracy", "global_nll", "bytes_down", "bytes_up", "seconds"}
    assert table["metrics"].keys() >= names
    alone = fedbayes.run(small(seed=4), tmp_path / "alone")
    for name in ("model.safetensors", "config.toml"):
        one, two = (folder / name for folder in (out / "seed-4", alone.folder.path))
        assert one.read_bytes() == two.read_bytes()
    for seed in (3, 4, 5):
        assert f"seed {seed}: fedavg on digits" in done.stderr


def test_from_python_with_named_seeds_and_what_is_shown_of_them():
    from rich.console import Console

    from fedbayes.runs.outcome import outcome_of_seeds

    done = fedbayes.run_seeds(small(seed=7), seeds=[0, 3])
    assert list(done.runs) == [0, 3]
    assert_table_is_of(done.summary, [run.summary for run in done.runs.values()])
    console = Console(width=80)
    with console.capture() as captured:
        console.print(outcome_of_seeds(done.summary))
    row = next(line for line in captured.get().splitlines() if "global accuracy" in line)
    accuracies = [run.summary["global_accuracy"] for run in done.runs.values()]
    assert row.split()[-2:] == [f"{np.mean(accuracies):.4f}", f"{np.std(accuracies, ddof=1):.4f}"]


def test_of_one_seed_there_is_no_deviation_and_of_no_metric_no_mean():
    done = fedbayes.run_seeds(small(method={"name": "local"}), seeds=1)
    assert done.summary["metrics"]["local_accuracy"]["std"] is None
    assert "global_accuracy" not in done.summary["metrics"]


def test_what_has_ended_is_not_run_again(tmp_path, monkeypatch):
    fedbayes.run_seeds(small(), seeds=2, folder=tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("seed-*/**/*")}
    ran = []
    real = ClientRuntime.train
    monkeypatch.setattr(
        ClientRuntime, "train", lambda self, task: ran.append(task) or real(self, task)
    )
    again = fedbayes.resume_seeds(tmp_path)
    assert not ran
    more = fedbayes.run_seeds(small(), seeds=3, folder=tmp_path)
    assert len(ran) == 2 * 4  # two rounds of the third seed
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert more.summary["seeds"] == [0, 1, 2]
    assert_table_is_of(more.summary, [run.summary for run in more.runs.values()])
    assert again.seeds == [0, 1]


def test_a_seed_that_fails_is_named_and_the_others_are_kept(tmp_path, monkeypatch):
    real = ClientRuntime.train

    def train(self, task):
        if Path(tmp_path / "seed-1").exists() and task.round == 2:
            raise EngineError("the disk is full")
        return real(self, task)

    with monkeypatch.context() as patch:
        patch.setattr(ClientRuntime, "train", train)
        with pytest.raises(EngineError, match="seed 1: the disk is full"):
            fedbayes.run_seeds(small(), seeds=3, folder=tmp_path)
    assert (tmp_path / "seed-0" / "summary.json").exists()
    assert not (tmp_path / "seeds.json").exists()
    done = fedbayes.resume_seeds(tmp_path)
    whole = fedbayes.run_seeds(small(), seeds=3)
    accuracies = [d.summary["metrics"]["global_accuracy"]["values"] for d in (done, whole)]
    assert accuracies[0] == accuracies[1]


def test_interrupted_it_goes_on_where_it_was(tmp_path, monkeypatch):
    """Ctrl-C in the second run, as the command line takes it."""
    out = tmp_path / "out"
    arguments = ["run", *ARGUMENTS, "--rounds", "4", "--seeds", "3", "-o", str(out)]
    real = ClientRuntime.train

    def train(self, task):
        if (out / "seed-1").exists() and (task.round, task.client) == (2, 0):
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, task)

    with monkeypatch.context() as patch:
        patch.setattr(ClientRuntime, "train", train)
        done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 130
    assert f"fedbayes resume {out}\n" in done.output
    assert fedbayes.Result(out / "seed-1").summary["rounds"] == 2
    assert not (out / "seed-2").exists()
    first = (out / "seed-0" / "summary.json").read_bytes()
    done = CliRunner().invoke(app, ["resume", str(out)])
    assert done.exit_code == 0
    assert "seed 0:" not in done.output
    assert "seed 1:" in done.output
    assert (out / "seed-0" / "summary.json").read_bytes() == first
    table = fedbayes.resume_seeds(out).summary
    summaries = [fedbayes.Result(out / f"seed-{seed}").summary for seed in range(3)]
    assert [summary["rounds"] for summary in summaries] == [4] * 3
    assert_table_is_of(table, summaries)
    whole = fedbayes.run_seeds(small(rounds=4), seeds=3)
    for seed, run in whole.runs.items():
        one, two = (f / "model.safetensors" for f in (run.folder.path, out / f"seed-{seed}"))
        assert one.read_bytes() == two.read_bytes()
    # The command again has nothing left to run.
    assert "seed 1:" not in CliRunner().invoke(app, arguments).output


def test_a_folder_with_something_else_is_refused(tmp_path):
    fedbayes.run_seeds(small(), seeds=1, folder=tmp_path / "seeds")
    for changed in (small(rounds=1, min_reports=2), small(rounds=3, min_reports=2)):
        with pytest.raises(RunError, match=r"seeds has runs with other settings:.*min_reports"):
            fedbayes.run_seeds(changed, seeds=1, folder=tmp_path / "seeds")
    with pytest.raises(
        RunError, match=r"other settings: clients_per_round was not set, and is now 1\. Restore"
    ):
        fedbayes.run_seeds(small(cohort=1), seeds=2, folder=tmp_path / "seeds")
    with pytest.raises(
        RunError, match=r"other settings: rounds was 2, and is now 1\. Restore the settings"
    ):
        fedbayes.run_seeds(small(rounds=1), seeds=1, folder=tmp_path / "seeds")
    with pytest.raises(RunError, match="already has runs of several seeds"):
        fedbayes.run(small(), tmp_path / "seeds")
    with pytest.raises(RunError, match="has runs of several seeds"):
        fedbayes.resume(tmp_path / "seeds")
    fedbayes.run(small(), tmp_path / "single")
    with pytest.raises(RunError, match="already has a single run"):
        fedbayes.run_seeds(small(), seeds=1, folder=tmp_path / "single")
    with pytest.raises(RunError, match="has no runs of several seeds"):
        fedbayes.resume_seeds(tmp_path / "single")
    fedbayes.run(small(stop_after=1), tmp_path / "mixed" / "seed-0")
    with pytest.raises(RunError, match=r"seed-0 has a run with other settings: stop_after was 1"):
        fedbayes.run_seeds(small(), seeds=1, folder=tmp_path / "mixed")


@pytest.mark.slow
@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("call", ["run", "resume"])
def test_runs_of_several_seeds_may_have_more_rounds(tmp_path, call, older):
    folder = tmp_path / "seeds"
    fedbayes.run_seeds(small(), seeds=2, folder=folder)
    notes = folder / "seeds.toml"
    if older:  # as before there was [privacy]
        table = tomllib.loads(notes.read_text())
        del table["privacy"]
        table["aggregation"] |= {"noise": 0.0, "delta": 1e-5}
        notes.write_text(tomli_w.dumps(table))
    if call == "resume":
        notes.write_text(notes.read_text().replace("rounds = 2", "rounds = 3"))
    more = (
        fedbayes.resume_seeds(folder)
        if call == "resume"
        else fedbayes.run_seeds(small(rounds=3), seeds=2, folder=folder)
    )
    whole = fedbayes.run_seeds(small(rounds=3), seeds=2)
    for seed, run in whole.runs.items():
        one, two = (f / "model.safetensors" for f in (run.folder.path, folder / f"seed-{seed}"))
        assert one.read_bytes() == two.read_bytes()
    assert more.summary["metrics"]["rounds"]["values"] == [3, 3]
    assert "rounds = 3" in notes.read_text()
    assert not fedbayes.resume_seeds(folder).missing


def test_weights_to_start_from_are_the_same_for_all_seeds(tmp_path):
    first = fedbayes.run(small(), tmp_path / "first").folder
    weights = tmp_path / "start.safetensors"
    weights.write_bytes(first.model_file.read_bytes())
    config = small(model={"hidden": [8], "weights": str(weights)})
    fedbayes.run_seeds(config, seeds=1, folder=tmp_path / "seeds")
    fedbayes.run_seeds(config, seeds=2, folder=tmp_path / "seeds")
    fedbayes.run(small(rounds=3), tmp_path / "second")
    weights.write_bytes((tmp_path / "second" / "model.safetensors").read_bytes())
    with pytest.raises(RunError, match=f"seed 2: {weights} has changed since"):
        fedbayes.run_seeds(config, seeds=3, folder=tmp_path / "seeds")
    weights.unlink()
    with pytest.raises(
        RunError, match=r"No such file.*from the copy .*seed-[01]/start.safetensors"
    ):
        fedbayes.run_seeds(config, seeds=3, folder=tmp_path / "seeds")
    assert not (tmp_path / "seeds" / "seed-2").exists()
    shutil.copy(tmp_path / "seeds" / "seed-1" / "start.safetensors", weights)  # as it says
    assert len(fedbayes.run_seeds(config, seeds=3, folder=tmp_path / "seeds").runs) == 3


def table_of(path, slope):
    """A table of two classes that a line parts; another slope leaves columns and clients alike."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 2))
    words = np.where(x @ [1.0, slope] > 0, "yes", "no")
    rows = [f"{a},{b},{word}" for (a, b), word in zip(x.tolist(), words, strict=True)]
    path.write_text("\n".join(["a,b,y", *rows]) + "\n")


def test_runs_of_one_mean_are_of_the_same_data(tmp_path):
    table = tmp_path / "rows.csv"
    table_of(table, 1.0)
    data = {"path": str(table), "label": ["y"], "clients": 2, "partition": "iid"}
    config = Config.create(data=data, model={"hidden": [4]}, rounds=1)
    fedbayes.run_seeds(config, seeds=1, folder=tmp_path / "seeds")
    first = table.read_bytes()
    table_of(table, -1.0)
    with pytest.raises(RunError, match=r"seed 1: the data have changed since .*seed-0 began"):
        fedbayes.run_seeds(config, seeds=2, folder=tmp_path / "seeds")
    assert not (tmp_path / "seeds" / "seed-1").exists()
    table.write_bytes(first)  # as it says
    assert len(fedbayes.run_seeds(config, seeds=2, folder=tmp_path / "seeds").runs) == 2


def test_a_wrong_config_leaves_no_folder(tmp_path):
    with pytest.raises(ConfigError, match="seed 0: clients_per_round is 99"):
        fedbayes.run_seeds(small(cohort=99), seeds=2, folder=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_killed_before_the_seeds_are_noted_the_same_call_goes_on(tmp_path):
    with Simulation(small(), tmp_path / "seed-0") as simulation:
        next(iter(simulation))
    done = fedbayes.run_seeds(small(), seeds=2, folder=tmp_path)
    assert [run.summary["rounds"] for run in done.runs.values()] == [2, 2]


def test_a_seed_without_an_update_enters_no_mean(tmp_path, monkeypatch, capsys):
    config, real = small(min_reports=4), ClientRuntime.train

    def train(self, task):
        return ClientFailure("gone") if task.client == 1 else real(self, task)

    with monkeypatch.context() as patch:
        patch.setattr(ClientRuntime, "train", train)
        with pytest.raises(RunError, match=r"seed 0: no round .*gone"):
            fedbayes.run_seeds(config, seeds=2, folder=tmp_path)
    for again in (
        lambda: fedbayes.run_seeds(config, seeds=2, folder=tmp_path),
        lambda: fedbayes.resume_seeds(tmp_path),
        SeedRuns(config, [0], tmp_path).conclude,
    ):
        with pytest.raises(RunError, match=r"seed 0: no round of .*seed-0 had an update"):
            again()
    assert command("resume", tmp_path) == 2
    assert "seed 0: no round" in capsys.readouterr().err
    assert not (tmp_path / "seed-1").exists()
    assert not (tmp_path / "seeds.json").exists()
    shutil.rmtree(tmp_path / "seed-0")  # the way out that the message names
    assert fedbayes.run_seeds(config, seeds=2, folder=tmp_path).summary["seeds"] == [0, 1]


def test_only_runs_that_have_ended_enter_a_mean(tmp_path):
    runs = SeedRuns(small(), 1, tmp_path)
    with runs.open(0) as simulation:
        for _ in simulation:
            simulation.stop = True
    assert fedbayes.Result(tmp_path / "seed-0").summary["stopped_reason"] == "interrupted"
    with pytest.raises(RunError, match="the run of seed 0 has not ended"):
        runs.conclude()


@pytest.mark.parametrize(
    "seeds",
    [np.int64(2), np.arange(3, 5), (3, 4), range(3, 5), iter([3, 4])],
    ids=lambda seeds: type(seeds).__name__,
)
def test_seeds_of_other_types_are_plain_integers(seeds, tmp_path):
    runs = SeedRuns(small(seed=3), seeds, tmp_path)
    assert runs.seeds == [3, 4]
    assert {type(seed) for seed in runs.seeds} == {int}
    runs._note()
    assert SeedRuns.stored(tmp_path).seeds == [3, 4]


@pytest.mark.parametrize(
    "seeds",
    [0, -1, [], [2, 2], [np.int64(2), 2], 2.0, "3", [1.0, 2.0], ["1"], True, None, {}, np.array(2)],
    ids=repr,
)
def test_what_are_no_seeds_is_refused_before_anything_is_written(seeds, tmp_path):
    with pytest.raises(
        ConfigError, match=r"seeds is .*\. Give a number of 1 or more, or a list of different seeds"
    ):
        fedbayes.run_seeds(small(), seeds=seeds, folder=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_summary_is_never_of_fewer_seeds_than_asked_for(tmp_path, monkeypatch):
    fedbayes.run_seeds(small(), seeds=2, folder=tmp_path)
    more = SeedRuns(small(), 3, tmp_path)
    with pytest.raises(RunError, match="the run of seed 2 has not ended"):
        _ = more.summary
    both = SeedRuns(small(), 2, tmp_path).summary
    assert both["seeds"] == [0, 1]
    # Nor of what somebody wrote into the file: the runs say what came of them.
    (tmp_path / "seeds.json").write_text('{"seeds": [0, 1], "metrics": {}}')
    assert SeedRuns(small(), 2, tmp_path).summary == both

    def train(self, task):
        raise EngineError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(ClientRuntime, "train", train)
        with pytest.raises(EngineError, match="seed 2: the disk"):
            fedbayes.run_seeds(small(), seeds=3, folder=tmp_path)
    assert not (tmp_path / "seeds.json").exists()
    assert fedbayes.resume_seeds(tmp_path).summary["seeds"] == [0, 1, 2]


@pytest.mark.slow
def test_a_note_on_what_all_seeds_share_is_printed_once(tmp_path):
    arguments = ["--partition", "iid", "--rounds", 1, "--seeds", 3, "-o", tmp_path / "out"]
    done = fedbayes_cli("run", *ARGUMENTS, *arguments)
    assert done.stderr.count("note: data.alpha has no effect") == 1


def test_metrics_that_are_undefined_have_no_mean_and_lose_nothing(tmp_path):
    rng = np.random.default_rng(0)
    rows = ["a,b,y", *(f"{a},{b},{a - b}" for a, b in rng.normal(size=(60, 2)))]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    out = tmp_path / "out"
    assert not command(
        *["run", "--set", f"data.path={tmp_path / 't.csv'}", "--set", "data.label=['y']"],
        *["--clients", 12, "--partition", "iid", "--rounds", 1, "--seeds", 2, "-o", out],
        *["--set", "task.likelihood=gaussian", "--json"],
    )
    table = json.loads((out / "seeds.json").read_text())
    assert table["metrics"]["local_r2"]["mean"] is None
    assert table["metrics"]["local_rmse"]["mean"] > 0
    text = (out / "seed-0" / "metrics.jsonl").read_text()
    line = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert line["metrics"]["local"]["r2"] is None
