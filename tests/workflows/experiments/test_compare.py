"""Methods side by side: the runs, what goes on and what is refused, and the tables."""

import csv
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from scipy.stats import ttest_rel

import fedbayes
from fedbayes import run
from fedbayes.cli import main
from fedbayes.config.config import Config
from fedbayes.errors import ConfigError, RunError
from fedbayes.federation import client_runtime
from fedbayes.reports.charts import filled
from fedbayes.reports.comparison import means
from fedbayes.reports.palette import LIGHT, looks
from fedbayes.runs import simulation as simulation_module
from fedbayes.runs.simulation import Simulation
from fedbayes.storage.folder import RunFolder
from fedbayes.workflows.experiments import grid_display
from fedbayes.workflows.experiments.attack_grid import AttackGrid
from fedbayes.workflows.experiments.comparison import (
    Compared,
    ComparisonRow,
    Figure,
    _judge,
    _weighted_apart,
    compared,
    content,
    failed,
    notes,
    paired,
)
from fedbayes.workflows.experiments.comparison_files import write_comparison
from fedbayes.workflows.experiments.comparison_table import latex, markdown, means_csv, runs_csv
from fedbayes.workflows.experiments.grid_display import GridDisplay
from fedbayes.workflows.experiments.grid_jobs import run_grid
from fedbayes.workflows.experiments.method_grid import MethodGrid, conclude, seconds_of
from fedbayes.workflows.experiments.variants import Variant, variants
from tests.helpers.cases import cases

SMALL = ["data.limit=300", "data.clients=4", "model.hidden=[8]", "rounds=2", "cohort=0.5"]


class Seen:
    """Notes what a grid tells."""

    def __init__(self):
        self.begins, self.rounds, self.ends = [], [], []

    def begun(self, cell):
        self.begins.append(cell)

    def advanced(self, cell, number, rounds):
        self.rounds.append((cell, number, rounds))

    def ended(self, cell, trouble):
        self.ends.append((cell, trouble))


def grid(folder, methods="fedavg,local", overrides=SMALL, **more):
    return MethodGrid(folder, variants(methods), **{"seeds": 2, "overrides": overrides, **more})


def test_a_folder_of_a_run_is_none_for_others(tmp_path):
    """Two kinds of things in one folder, and a report would be of both."""
    place = tmp_path / "run"
    place.mkdir()
    for name, words in (("config.toml", "has a run"), ("seeds.toml", "runs of several seeds")):
        (place / name).write_text("")
        with pytest.raises(RunError, match=words):
            grid(place)
        with pytest.raises(RunError, match=words):
            AttackGrid(place)
        (place / name).unlink()
    (place / "model.safetensors").write_bytes(b"")
    with pytest.raises(RunError, match=r"files of another run, model\.safetensors"):
        grid(place)


def finish(runs, **more):
    seen = Seen()
    outcomes = conclude(runs, run_grid(runs, seen, **more))
    return outcomes, compared(runs, outcomes), seen


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    runs = grid(tmp_path_factory.mktemp("compared"), "fedavg,pvi:damping=0.5,local,global")
    return runs, *finish(runs)


def test_a_cell_is_the_run_that_its_settings_say(ended, tmp_path):
    runs, outcomes, _, _ = ended
    config = Config.load(None, [*SMALL, "seed=1", "method.name=pvi", "method.damping=0.5"])
    alone = run(config, tmp_path / "alone").summary
    (found,) = [o for o in outcomes if (o.cell.label, o.cell.seed) == ("pvi:damping=0.5", 1)]
    assert found.values["global_accuracy"] == alone["global_accuracy"]
    assert found.values["global_nll"] == alone["metrics"]["global"]["nll"]
    assert found.values["bytes"] == alone["bytes_down"] + alone["bytes_up"]
    assert found.values["global_brier"] == alone["metrics"]["global"]["brier"]
    assert runs.place(found.cell) == runs.folder / "digits" / "pvi_damping=0.5" / "seed-1"


def test_one_seed_means_one_partition_cohort_and_start(ended):
    runs, outcomes, _, _ = ended
    for seed in (0, 1):
        cells = [o.cell for o in outcomes if o.cell.seed == seed]
        files = {RunFolder(runs.place(c)).partition_file.read_bytes() for c in cells}
        assert len(files) == 1
        starts, cohorts = [], set()
        for cell in cells:
            with Simulation(None, runs.place(cell)) as simulation:
                starts.append(simulation.network.initial)
                if not simulation.method.reports.pooled:
                    cohorts.add(tuple(tuple(simulation.cohort_of(n)) for n in (1, 2)))
        assert len(cohorts) == 1
        for other in starts[1:]:
            assert all((starts[0][name] == tensor).all() for name, tensor in other.items())
    assert runs.partitions_differ("digits") == []
    other = {RunFolder(runs.place(o.cell)).partition_file.read_bytes() for o in outcomes}
    assert len(other) == 2  # and another seed another one


def test_means_and_deviations_are_those_of_the_runs(ended):
    runs, outcomes, tables, _ = ended
    told = content(runs, tables, notes(runs, tables))
    assert [entry["method"] for entry in told["methods"]] == [
        *("fedavg", "pvi:damping=0.5", "local", "global")
    ]
    for entry in told["methods"]:
        for name in ("global_accuracy", "local_accuracy", "global_nll", "bytes", "ood_auroc"):
            values = [o.values.get(name) for o in outcomes if o.cell.label == entry["method"]]
            if None in values:
                assert entry[name] is None
                continue
            assert entry[name]["values"] == tuple(values)
            assert entry[name]["mean"] == pytest.approx(np.mean(values))
            assert entry[name]["std"] == pytest.approx(np.std(values, ddof=1))
    by_name = {entry["method"]: entry for entry in told["methods"]}
    assert by_name["local"]["global_accuracy"] is None
    assert by_name["local"]["error_auroc"] is None
    assert by_name["local"]["bytes"]["mean"] == 0
    assert by_name["fedavg"]["error_auroc_information"] is None
    assert by_name["pvi:damping=0.5"]["error_auroc_information"]["mean"] > 0
    json.dumps(told, allow_nan=False)


def test_the_best_and_what_is_not_told_apart_from_it(ended):
    _, _, (table,), _ = ended
    having = [row for row in table.rows if "global_nll" in row.figures]
    best = min(having, key=lambda row: row.figures["global_nll"].mean)
    for row in having:
        figure, first = row.figures["global_nll"], best.figures["global_nll"]
        assert figure.best == (row is best)
        if row is not best:
            p = ttest_rel(figure.values, first.values).pvalue
            assert figure.p == pytest.approx(p)
            assert figure.near == (p >= 0.05)


def test_the_best_has_ended_with_every_seed_where_one_has():
    figures = {
        "failed": {"global_accuracy": Figure(0.9, None, (0.9, None))},
        "whole": {"global_accuracy": Figure(0.8, 0.1, (0.87, 0.73))},
        "other": {"global_accuracy": Figure(0.7, 0.1, (0.77, 0.63))},
    }
    _judge(figures, "global_accuracy", higher=True)
    assert [label for label, one in figures.items() if one["global_accuracy"].best] == ["whole"]
    del figures["whole"], figures["other"]
    figures["as well"] = {"global_accuracy": Figure(0.8, None, (None, 0.8))}
    _judge(figures, "global_accuracy", higher=True)
    assert [label for label, one in figures.items() if one["global_accuracy"].best] == ["failed"]


def test_figures_that_are_printed_alike_are_all_the_best():
    """The table has four digits, so readers cannot see which one won; if all tie, none did."""
    cases = (
        ((0.95004, 0.9500), []),
        ((0.95004, 0.9400), ["one", "two"]),
        ((0.9502, 0.9500), ["two"]),
    )
    for others, best in cases:
        means = {"one": 0.95001, "two": others[0], "three": others[1]}
        figures = {
            label: {"global_accuracy": Figure(mean, 0.1, (mean - 0.1, mean + 0.1))}
            for label, mean in means.items()
        }
        _judge(figures, "global_accuracy", higher=True)
        found = {label: own["global_accuracy"] for label, own in figures.items()}
        assert [label for label, one in found.items() if one.best] == best
        assert not any(one.near for label, one in found.items() if label in best)
        assert best or not any(one.near for one in found.values())


def test_methods_that_weigh_clients_otherwise_are_told(tmp_path):
    alike = grid(tmp_path, "fedavg,scaffold,pvi,local")
    assert _weighted_apart(alike) == []
    other = grid(tmp_path, "fedavg,scaffold:weighting=uniform,laplace,pvi")
    (line,) = _weighted_apart(other)
    assert "clients have equal weights under scaffold:weighting=uniform" in line
    assert "by samples under fedavg, laplace." in line
    robust = grid(
        tmp_path, "fedavg,scaffold:weighting=uniform", [*SMALL, "aggregation.rule=median"]
    )
    assert _weighted_apart(robust) == []


def test_seconds_are_without_what_the_first_round_imports():
    def lines(*seconds):
        return [{"seconds": one} for one in seconds]

    assert seconds_of(lines(9.0, 1.0, 3.0, 2.0)) == 2.0 + 6.0
    assert seconds_of(lines(0.5, 1.0, 2.0)) == 3.5
    assert seconds_of(lines(4.0)) == 4.0


def test_seconds_of_a_round_are_without_evaluations(monkeypatch):
    """By clocks that stand still but in evaluations of the global model and of clients' own."""
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    for module in (simulation_module, client_runtime):
        monkeypatch.setattr(module, "time", clock)

    def slow(function):
        def called(*given, **more):
            now[0] += 100.0
            return function(*given, **more)

        return called

    monkeypatch.setattr(client_runtime, "scored", slow(client_runtime.scored))
    with Simulation(Config.load(None, SMALL)) as simulation:
        evaluator = simulation._evaluator
        monkeypatch.setattr(evaluator, "after_round", slow(evaluator.after_round))
        lines = [step.metrics for step in simulation]
    assert now[0] >= 600.0
    assert [line["seconds"] for line in lines] == [0.0, 0.0]
    assert simulation.summary()["seconds"] == 0.0


def test_paired_tests():
    rng = np.random.default_rng(0)
    one, other = rng.normal(size=(2, 6))
    assert paired(one, other) == pytest.approx(ttest_rel(one, other).pvalue)
    missing = [*one[:5], None]
    assert paired(missing, other) == pytest.approx(ttest_rel(one[:5], other[:5]).pvalue)
    assert paired([1.0], [2.0]) is None
    assert paired([1.0, 2.0], [1.0, 2.0]) == 1
    assert paired([1.0, 2.0], [2.0, 3.0]) == 0
    with warnings.catch_warnings():  # gaps that differ by rounding alone
        warnings.simplefilter("error")
        assert paired([0.9, 0.8, 0.7], [0.8, 0.7, 0.6]) == pytest.approx(0, abs=1e-12)


def test_tables_have_empty_cells_and_never_zeros_for_what_is_not_there(ended):
    runs, outcomes, tables, _ = ended
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO(means_csv(tables)))}
    assert rows["local"]["global_accuracy"] == rows["local"]["ood_auroc_std"] == ""
    (local,) = [row for row in tables[0].rows if row.variant.label == "local"]
    mean = local.figures["local_accuracy"].mean
    assert float(rows["local"]["local_accuracy"]) == mean
    text = markdown(tables, notes(runs, tables))
    cells = next(line for line in text.splitlines() if line.startswith("| `local`")).split(" | ")
    assert cells[1] == "–"
    assert cells[2].strip("*≈").startswith(f"{mean:.4f} ± ")
    runs_found = list(csv.DictReader(io.StringIO(runs_csv(outcomes))))
    assert len(runs_found) == 8
    assert {row["trouble"] for row in runs_found} == {""}


def test_all_files_are_written(ended):
    runs, outcomes, tables, _ = ended
    said = notes(runs, tables)
    assert sum(line.startswith("Methods choose settings") for line in said) == 1
    files = write_comparison(runs, outcomes, tables, said, content(runs, tables, said))
    assert {file.suffix for file in files} == {".txt", ".md", ".tex", ".csv", ".json", ".html"}
    page = (runs.folder / "comparison.html").read_text()
    assert page.count("data-chart=") == 6
    for label, name in {"fedavg": "fedavg", "pvi:damping=0.5": "pvi", "local": "local"}.items():
        (look,) = looks([name])
        (button,) = re.findall(rf"<button[^>]*>(?:(?!</button>).)*{label}</button>", page)
        assert f"light-dark({look.colour(LIGHT)}," in button, "settings change no colour"
    assert "http://" not in page.replace("http://www.w3.org", "")
    paper = (runs.folder / "comparison.tex").read_text()
    assert paper.count("&") == 5 * (len(tables[0].columns))
    assert paper.count(r"\begin{tabular}") == paper.count(r"\end{tabular}") == 1
    assert "±" not in paper.partition("booktabs}\n")[2].partition(r"\begin")[2]
    assert "all methods have the same partition" in (runs.folder / "comparison.txt").read_text()


def test_what_has_ended_is_not_run_again_and_more_is_added(ended):
    runs, _, _, seen = ended
    assert len(seen.begins) == len(seen.ends) == 8
    assert [cell.seed for cell in seen.begins] == [0] * 4 + [1] * 4
    assert not runs.left_out
    before = {p: p.stat().st_mtime_ns for p in runs.folder.rglob("model.safetensors")}
    more = grid(runs.folder, "fedavg,fedprox", seeds=3)
    _, (table,), seen = finish(more)
    assert {(c.label, c.seed) for c in seen.begins} == {
        *((("fedavg", 2)), ("fedprox", 0), ("fedprox", 1), ("fedprox", 2))
    }
    assert all(path.stat().st_mtime_ns == then for path, then in before.items())
    assert table.seeds == (0, 1, 2)
    told = [
        line
        for line in notes(more, [table])
        if line.startswith("Not requested, so not in these tables")
    ]
    assert [re.search(r"digits/(\S+), seed (.*)\.", line).groups() for line in told] == [
        (name, "0, 1") for name in ("global", "local", "pvi_damping=0.5")
    ]
    again = grid(runs.folder, "fedavg", foreign="inverted")
    _, (table,), seen = finish(again)  # tried on others, not trained again
    assert not seen.rounds
    assert "inverted" in table.foreign
    with pytest.raises(RunError, match=r"with other settings: training\.lr was"):
        grid(runs.folder, "fedavg", [*SMALL, "training.lr=0.3"])


def test_one_failure_leaves_the_others(tmp_path):
    runs = grid(tmp_path, "fedavg,pfnm", [*SMALL, "aggregation.rule=median"])
    outcomes, tables, seen = finish(runs)
    assert failed(tables)
    assert [bool(trouble) for _, trouble in seen.ends] == [False, True, False, True]
    assert tables[0].labels == ["fedavg", "pfnm (0 of 2 seeds)"]
    told = content(runs, tables, notes(runs, tables))
    fine, other = told["methods"]
    assert fine["global_accuracy"]["mean"] > 0
    assert other["global_accuracy"] is None
    assert "its updates are not averaged" in other["troubles"]["0"]
    assert told["notes"][-1].startswith("digits, pfnm, seed 0, 1: aggregation.rule")
    assert any(row["trouble"] for row in csv.DictReader(io.StringIO(runs_csv(outcomes))))


def test_when_all_fail_it_is_an_error_and_nothing_is_written(tmp_path, capsys, monkeypatch):
    settings = [f"--set={entry}" for entry in [*SMALL, "aggregation.rule=median"]]
    asked = ["compare", "--methods", "pfnm,gpi-fnm", "--seeds", "1", *settings, "--json"]
    monkeypatch.setattr("sys.argv", ["fedbayes", *asked, "-o", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as stop:
        main()
    said = capsys.readouterr()
    assert stop.value.code == 2
    assert said.out == ""
    assert "no run came to an end. pfnm: aggregation.rule" in said.err
    assert not list(tmp_path.rglob("comparison.*"))


def test_the_command_prints_json_and_says_by_its_status_that_a_run_failed(
    tmp_path, capsys, monkeypatch
):
    def call(methods):
        settings = [f"--set={entry}" for entry in [*SMALL, "aggregation.rule=median"]]
        asked = ["compare", "--methods", methods, "--seeds", "1", *settings, "--json"]
        monkeypatch.setattr("sys.argv", ["fedbayes", *asked, "-o", str(tmp_path)])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code, json.loads(capsys.readouterr().out)

    status, told = call("fedavg,pfnm")
    assert status == 1
    assert told["methods"][0]["global_accuracy"]["std"] is None
    assert (tmp_path / "comparison.html").exists()
    assert call("fedavg")[0] == 0


def test_configs_side_by_side(tmp_path):
    files = []
    for name, alpha in (("even", 100.0), ("odd", 0.1)):
        file = tmp_path / f"{name}.toml"
        file.write_text(f'[data]\nalpha = {alpha}\n[method]\nname = "fedprox"\nproximal = 2.0\n')
        files.append(file)
    runs = MethodGrid(tmp_path / "out", None, files, 1, SMALL, "none")
    assert [cell.label for cell in runs.cells] == ["fedprox"] * 2
    assert runs.settings["odd", "fedprox"].method["proximal"] == 2
    _, tables, _ = finish(runs)
    assert [table.task for table in tables] == ["even", "odd"]
    assert "ood_auroc" not in tables[0].columns
    assert "**odd, 1 seed**" in markdown(tables, [])
    with pytest.raises(ConfigError, match="two configs have the name even"):
        MethodGrid(tmp_path / "out", None, [files[0], files[0]], 1, SMALL)
    with pytest.raises(ConfigError, match="is started with fedbayes federate"):
        grid(tmp_path / "other", overrides=[*SMALL, "engine=flower"])


def test_a_metric_that_is_asked_for_has_one_column(tmp_path):
    """Trials tell it of every model."""
    _, (table,), _ = finish(grid(tmp_path, "fedavg", [*SMALL, "metrics=error_auroc,f1"], seeds=1))
    assert [name for name in table.columns if "error" in name] == ["error_auroc"]
    assert "global_f1" in table.columns
    (row,) = table.rows
    assert row.figures["error_auroc"].mean == row.figures["global_error_auroc"].mean


def test_rejected_updates_are_told(tmp_path):
    bound = "aggregation.max_change=1.01"  # whoever is above the median
    runs = grid(tmp_path, "fedavg", [*SMALL, "cohort=1.0", bound])
    outcomes, tables, _ = finish(runs)
    files = sorted(tmp_path.rglob("metrics.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    rejected = sum(len(line["refused"]) for line in lines)
    assert len(files) == len(outcomes) == 2
    assert rejected > 0
    told = f"digits: updates were rejected, by method and over all seeds: fedavg {rejected}."
    assert any(note.startswith(told) for note in notes(runs, tables))


def test_numbers_have_their_own_columns(tmp_path):
    runs = grid(tmp_path, "fedavg,local", ["data.name=diabetes", "rounds=1", "data.clients=3"])
    _, (table,), _ = finish(runs)
    assert table.columns[:4] == ("global_rmse", "local_rmse", "global_nll", "global_crps")
    assert "ood_auroc" not in table.columns  # the standard deviation is the same for all inputs
    assert "error_auroc" not in table.columns
    figure = table.rows[0].figures["global_rmse"]
    assert figure.best is False  # only one method has it, so there is nothing to be best of


@pytest.mark.slow
def test_processes_give_the_same_bits(ended, tmp_path):
    _, outcomes, _, _ = ended
    side = grid(tmp_path, "fedavg,local")
    found, _, seen = finish(side, jobs=2)
    assert len(seen.rounds) == 8
    before = {o.cell: o.values for o in outcomes}
    for one in found:
        for name, value in before[one.cell].items():
            assert name == "seconds" or one.values[name] == value


@pytest.mark.slow
def test_a_comparison_that_was_killed_goes_on(tmp_path):
    settings = [f"--set={entry}" for entry in [*SMALL, "rounds=40"]]
    asked = ["compare", "--methods", "fedavg,local", "--seeds", "2", "-j", "2", *settings]
    command = [sys.executable, "-m", "fedbayes.cli", *asked, "-o", str(tmp_path)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not list(tmp_path.rglob("round-*")) and not list(tmp_path.rglob("metrics.jsonl")):
        assert time.monotonic() < deadline
        assert first.poll() is None
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    more = grid(tmp_path, "fedavg,local", [*SMALL, "rounds=40"])
    while True:  # the processes end by themselves, and give the folders free
        try:
            found, _, seen = finish(more)
            break
        except RunError:
            time.sleep(0.2)
    if any(trouble for _, trouble in seen.ends):  # one still held its folder
        time.sleep(3)
        found, _, seen = finish(grid(tmp_path, "fedavg,local", [*SMALL, "rounds=40"]))
    assert {trouble for _, trouble in seen.ends} <= {""}
    whole = Config.load(None, [*SMALL, "rounds=40", "seed=1"])
    alone = run(whole, tmp_path / "alone").summary
    (same,) = [o for o in found if (o.cell.label, o.cell.seed) == ("fedavg", 1)]
    assert same.values["global_nll"] == alone["metrics"]["global"]["nll"]


def test_a_metric_that_is_not_finite_under_a_seed_has_no_mean_and_says_so(ended):
    runs, outcomes, _, _ = ended
    own = [o for o in outcomes if o.cell.label in ("fedavg", "pvi:damping=0.5")]
    diverged = replace(own[0], values=own[0].values | {"global_nll": math.inf})
    (table,) = compared(runs, [diverged, *own[1:]])
    assert "global_nll" not in table.rows[0].figures
    assert table.rows[1].figures["global_nll"].best is False
    said = notes(runs, [table])
    (line,) = [line for line in said if line.startswith("digits, fedavg: NLL has no mean")]
    assert line.endswith("with seed 0.")
    assert content(runs, [table], said)["methods"][0]["global_nll"] is None
    alone = [replace(o, values=o.values | {"global_nll": math.inf}) for o in own]
    (table,) = compared(runs, alone)
    assert "global_nll" not in table.columns
    said = notes(runs, [table])
    assert sum("NLL has no mean: it is not finite with seed 0, 1." in s for s in said) == 2


def test_from_python(tmp_path):
    given = {"data": {"limit": 300, "clients": 3}, "model": {"hidden": [8]}, "rounds": 1}
    found = fedbayes.compare(["fedavg", "local"], tmp_path, seeds=2, **given)
    assert not found.failed
    frame = found.frame()
    mean = frame["global_accuracy"].xs("fedavg", level="method").mean()
    assert found.summary["methods"][0]["global_accuracy"]["mean"] == pytest.approx(mean)
    assert frame.xs("local", level="method")["global_accuracy"].isna().all()
    alone = fedbayes.run(seed=1, folder=tmp_path / "alone", **given).summary
    assert frame.loc["digits", "fedavg", 1]["global_accuracy"] == alone["global_accuracy"]
    with pytest.raises(ConfigError, match="--method and --methods"):
        fedbayes.compare("fedavg", tmp_path, method={"name": "pvi"})


@pytest.mark.slow
def test_seeds_may_be_named(tmp_path):
    given = {"data": {"limit": 300, "clients": 3}, "model": {"hidden": [8]}, "rounds": 1}
    found = fedbayes.compare("fedavg", tmp_path, seeds=[3, 0], **given)
    assert found.summary["methods"][0]["seeds"] == (3, 0)
    alone = fedbayes.run(seed=3, folder=tmp_path / "alone", **given).summary
    frame = found.frame()
    assert frame.loc["digits", "fedavg", 3]["global_accuracy"] == alone["global_accuracy"]
    with pytest.raises(ConfigError, match="jobs is 0"):
        fedbayes.compare("fedavg", tmp_path, jobs=0, **given)


@pytest.mark.slow
def test_where_the_best_is_kept_all_figures_are_of_that_model(tmp_path):
    """Also where its round is not the last, whose summary has other figures."""
    overrides = [*SMALL, "rounds=6", "training.lr=0.9", "keep_checkpoints=best", "metrics=auroc"]
    runs = grid(tmp_path, "fedavg", overrides, seeds=6)
    outcomes, tables, _ = finish(runs)
    assert "global_auroc" in tables[0].columns
    assert any("optimistic" in line for line in notes(runs, tables))
    earlier = [o for o in outcomes if o.summary["model_round"] < 6]
    assert earlier
    for outcome in earlier:
        line = outcome.lines[outcome.summary["model_round"] - 1]
        for name in ("accuracy", "nll", "ece"):
            assert outcome.values[f"global_{name}"] == outcome.summary[f"best_global_{name}"]
        before = outcome.values.get("global_uncalibrated_nll") or outcome.values["global_nll"]
        assert before == line["global_nll"]
        assert outcome.values["global_brier"] == outcome.trial.metrics["brier"]
        assert outcome.summary["best_global_accuracy"] == outcome.values["global_accuracy"]


def test_what_methods_have_the_same_is_what_they_have_the_same(tmp_path):
    for methods, same in {
        "fedavg,fedprox": "partition, cohorts and initialization of the network.",
        "fedavg,half=fedavg:cohort=1": "partition and initialization of the network.",
        "fedavg:cohort=1.0,one=fedavg:cohort=1": "partition and initialization of the network.",
        "fedavg,init=fedavg:model.init=xavier": "partition and cohorts.",
        "fedavg,both=fedavg:cohort=1:model.hidden=[4]": "partition.",
    }.items():
        assert notes(grid(tmp_path, methods), [])[0].endswith(f"the same {same}")


def test_labels_are_text_in_every_form():
    """Whatever is in them: no cell more, no command, no unfinished comment."""
    label = "a^b_{x}$|~\\c&%#"
    row = ComparisonRow(Variant(label, "fedavg"), (0,), {"bytes": Figure(1e6, None, (1e6,))})
    table = Compared("digits", (0,), "accuracy", ("bytes",), (row,), "")
    *_, last = markdown([table], []).strip().splitlines()
    assert len(re.split(r"(?<!\\)\|", last)) == 4
    row = replace(row, variant=Variant("`a``b`", "fedavg"))
    assert "| ``` `a``b` ``` | 1.0 MB |" in markdown([replace(table, rows=(row,))], [])
    tex = latex([table], ["its process ended and said: one\n\\two\nthree"])
    body = [line for line in tex.splitlines() if not line.startswith("%")]
    assert body[0].startswith(r"\begin{tabular}")
    written = r"a\textasciicircum{}b\_\{x\}\$|\textasciitilde{}\textbackslash{}c\&\%\#"
    assert rf"{written} & 1.0 MB \\" in body


def test_another_file_of_foreign_inputs_is_tried_anew(tmp_path):
    rng, file = np.random.default_rng(0), tmp_path / "ood.npz"
    found = []
    for scale in (1.0, 100.0):
        np.savez(file, x=(scale * rng.random((50, 1, 8, 8))).astype(np.float32))
        runs = grid(tmp_path / "runs", "fedavg", foreign=str(file), seeds=1)
        assert len(runs.missing) == 1
        outcomes, _, _ = finish(runs)
        found.append(outcomes[0].values["ood_auroc"])
        again = grid(tmp_path / "runs", "fedavg", foreign=str(file), seeds=1)
        assert not again.missing
    assert found[0] != found[1]


@pytest.mark.parametrize("jobs", cases([1, 2], slow=[2]))
def test_a_table_is_of_runs_on_the_same_data(jobs, tmp_path):
    """Where a file of rows is another by now, runs on it have no place beside those before."""
    rng, file = np.random.default_rng(0), tmp_path / "rows.npz"
    x = rng.normal(size=(80, 3)).astype(np.float32)
    settings = [f"data.path={file}", "data.clients=2", "model.hidden=[4]", "rounds=1"]
    settings += ["data.partition=iid"]

    def asked(methods):
        return grid(tmp_path / "runs", methods, settings, foreign="none", seeds=1)

    np.savez(file, x=x, y=(x[:, 0] > 0).astype(np.int64))
    first = asked("fedavg")
    assert not run_grid(first, Seen())
    before = file.read_bytes()
    np.savez(file, x=x, y=(x[:, 1] > 0).astype(np.int64))
    runs = asked("fedavg,fedprox,scaffold")
    troubles = run_grid(runs, Seen(), jobs=jobs)
    assert {cell.label for cell in troubles} == {"fedprox", "scaffold"}
    for words in troubles.values():
        assert "the data have changed since" in words
        assert "in another folder" in words
    assert not runs.place(runs.cells[1]).exists()
    file.write_bytes(before)
    assert not run_grid(asked("fedavg,fedprox"), Seen(), jobs=jobs)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["--methods", "fedavgg"], "did you mean 'fedavg'"),
        (["model.safetensors"], "fedbayes evaluate"),
        (["--methods", "fedavg", "--method", "fedprox"], "--method and --methods"),
        (["--methods", "fedavg", "--ood", "strange"], "--ood strange is unknown"),
        (["--methods", "fedavg", "--set", "data.clents=2"], "did you mean 'data.clients'"),
        (["nothing.toml"], "Path 'nothing.toml' does not exist"),
    ],
)
def test_mistakes_are_told_before_anything_is_run(asked, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model.safetensors"
    model.touch()
    monkeypatch.setattr("sys.argv", ["fedbayes", "compare", *asked])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == [model]


def test_the_display_tells_what_is_left(ended, monkeypatch):
    """With a clock of its own: the rate is that of the rounds after the first."""
    runs, outcomes, _, _ = ended
    now = [0.0]
    monkeypatch.setattr(grid_display.time, "monotonic", lambda: now[0])
    file = io.StringIO()
    one, other = outcomes[0].cell, outcomes[1].cell
    monkeypatch.setitem(runs.__dict__, "missing", [one, other])
    with GridDisplay(runs, Console(file=file, width=200)) as display:
        display.begun(one)
        now[0] = 50.0  # starting took long
        display.advanced(one, 1, 2)
        now[0] = 60.0
        display.advanced(one, 2, 2)
        display.ended(one, "")
        display.begun(other)
        display.ended(other, "it broke")
    first, second, third = file.getvalue().splitlines()
    assert first == "6 of 8 runs had already ended, and are reused"
    value = outcomes[0].values["global_accuracy"]
    assert second == (
        f"1 of 2: fedavg, seed 0: global accuracy {value:.4f}, in 1:00, about 0:20 left"
    )
    assert third == "2 of 2: pvi:damping=0.5, seed 0: failed: it broke"


def test_a_trial_of_an_earlier_model_is_not_believed(tmp_path):
    finish(grid(tmp_path, "fedavg", seeds=1))
    (place,) = [file.parent for file in tmp_path.rglob("trial.json")]
    before = json.loads((place / "trial.json").read_text())
    text = (place / "config.toml").read_text()
    (place / "config.toml").write_text(text.replace("rounds = 2", "rounds = 3"))
    fedbayes.resume(place)
    longer = grid(tmp_path, "fedavg", [*SMALL, "rounds=3"], seeds=1)
    assert "error_auroc" not in longer.outcome(longer.cells[0]).values
    assert len(longer.missing) == 1
    (outcome,), _, _ = finish(longer)
    now = json.loads((place / "trial.json").read_text())
    assert now["model"] != before["model"]
    assert outcome.values["error_auroc"] == now["metrics"]["error_auroc"]


def test_curves_are_means_over_the_same_rounds():
    gap, whole = ([1, 2, 3], [1.0, math.nan, 5.0]), ([1, 2, 3], [1.0, 1.0, 1.0])
    chart = means("nll", "NLL over rounds", "round", "NLL", {0: [whole, gap]}, "")
    (curve,) = chart.curves
    assert (curve.x, curve.y) == ([1, 3], [1, 3])
    spread = np.std([1.0, 5.0], ddof=1)
    assert curve.low == pytest.approx([1, 3 - spread])
    assert curve.high == pytest.approx([1, 3 + spread])
    assert not filled(means("nll", "NLL", "round", "NLL", {0: [([1], [math.nan])]}, ""))
