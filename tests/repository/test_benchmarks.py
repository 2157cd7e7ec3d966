"""Benchmarks and examples, which no other test runs, fit the package that is here."""

import ast
import importlib
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pkgutil import resolve_name

import numpy as np
import pandas as pd
import pytest
import torch
from benchmarks import authors, bounds, frameworks, history
from benchmarks.fusion_networks import Augmentation
from benchmarks.fusion_partitions import halves, labels, uneven

from fedbayes import Config
from fedbayes.workflows.experiments.variants import settled, variants
from tests import ROOT

PROGRAMS = sorted([*ROOT.glob("benchmarks/*.py"), *ROOT.glob("examples/**/*.py")])


def imported(tree: ast.AST) -> Iterator[str]:
    """What a program takes from this project, as `module:name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (f"{alias.name}:" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}:{alias.name}" for alias in node.names)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_and_what_it_imports_from_the_project_exist(program):
    ours = [
        name
        for name in imported(ast.parse(program.read_text()))
        if name.split(":")[0].split(".")[0] in ("fedbayes", "tests", "benchmarks")
    ]
    for name in ours:
        module, _, inner = name.partition(":")
        try:  # a module of a package, or a name in a module
            importlib.import_module(f"{module}.{inner}" if inner else module)
        except ModuleNotFoundError:
            resolve_name(name)
    if program.parent.name == "benchmarks":
        importlib.import_module(f"benchmarks.{program.stem}")


@pytest.mark.parametrize("file", sorted(ROOT.glob("benchmarks/*.toml")), ids=lambda path: path.stem)
def test_a_config_or_a_list_of_methods_is_one(file):
    if "data" in tomllib.loads(file.read_text()):
        Config.load(file)
    else:
        for variant in variants(str(file)):
            settled(Config(), variant)


def test_authors_are_compared_seed_by_seed(capsys):
    """t = mean/(SD/√3) of differences 1, 2, 3; the t distribution with 2 degrees in closed form."""
    theirs = [{"accuracy": a} for a in (1.0, 5.0, 3.0)]
    ours = [{"accuracy": a, "NLL": 0.5} for a in (2.0, 7.0, 6.0)]
    *_, first, second = authors.report("x", {"theirs": theirs, "ours": ours}).splitlines()
    assert first == "| theirs | 3 | 3.0000 ± 2.0000 |"
    t = 2 * 3**0.5
    assert second == f"| ours | 3 | 5.0000 ± 2.6458 (p = {1 - t / (t * t + 2) ** 0.5:.2g}) |"
    for given in ([], ["--fedlpa", "nowhere"]):
        with pytest.raises(SystemExit):
            authors.main(given)
    assert "clone github.com/lebronlambert" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "sides"),
    [
        ("tiny", ["ours-sequential", "ours-workers"]),
        pytest.param("mlp", ["ours-sequential"], marks=pytest.mark.data),
        pytest.param("lenet5", ["ours-sequential"], marks=pytest.mark.data),
    ],
)
def test_ours_runs_a_workload_of_the_frameworks(tmp_path, workload, sides):
    case = frameworks.CASES[workload]
    limit = {} if workload == "tiny" else {"limit": 400}
    case = {**case, "data": {**case["data"], **limit, "clients": 10}, "cohort": 4}
    work, file = frameworks.prepare(workload, case, tmp_path)
    starts = [frameworks.command(side, file, tmp_path, {}) for side in sides]
    turns = [frameworks.turn(start, work, seconds=0.1, patience=120) for start in starts]
    assert len({turn["bits"] for turn in turns}) == 1
    first = turns[0]
    assert first["loss"] < frameworks.loss(work, work.initial())  # it learned
    parameters = sum(value.size for value in work.initial())
    assert 1 < int(first["sent"]) / (2 * 4 * 4 * parameters) < 1.3  # float32, 4 clients, both ways
    assert min(first[key] for key in ("a second", "processor", "memory", "start")) > 0


@pytest.mark.slow
def test_the_check_of_a_gpu_runs_without_one():
    checks = ["likelihoods", "engines", "estimators", "memory"]
    program = [sys.executable, ROOT / "benchmarks/gpu_check.py", "--device", "cpu", "--only"]
    found = subprocess.run([*program, *checks], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
    assert "FAIL" not in found.stdout
    assert found.stdout.endswith("go\n")


@pytest.mark.slow
def test_where_bayes_pays_finds_the_slopes_that_clients_differ_in(tmp_path, capsys):
    from benchmarks import where_bayes_pays

    rng, rows = np.random.default_rng(0), []
    for client in range(12):
        x, slopes = rng.normal(size=(60, 2)), 3 * rng.normal(size=2)
        label = np.where(rng.random(60) < 1 / (1 + np.exp(-x @ slopes)), "yes", "no")
        rows.append(pd.DataFrame(x, columns=["a", "b"]).assign(label=label, group=f"c{client}"))
    file, out = tmp_path / "clients.csv", tmp_path / "out"
    pd.concat(rows).to_csv(file, index=False)
    given = ["--seeds", "0", "--budget", "2", "--data", str(file), "--out", str(out)]
    where_bayes_pays.main(given)
    told = capsys.readouterr().out
    found = json.loads((out / "clients-0-2.json").read_text())
    nll = {
        name: {who: one and one["nll"] for who, one in own["scores"].items()}
        for name, own in found.items()
    }
    ours = nll["hierarchical"]
    assert ours["took part"] < nll["fedavg"]["took part"] - 0.1
    assert ours["new, 20 rows"] < nll["fedavg"]["new, 20 rows"] - 0.1
    assert ours["new, 20 rows"] < ours["new, 5 rows"] < ours["new, 0 rows"]
    assert nll["local"]["new, 0 rows"] is None
    where_bayes_pays.main(given)
    assert capsys.readouterr().out == told


def test_the_history_reads_the_ratios_that_benchmarks_print():
    rounds = "mnist-mlp      float32  plain    40.1 ms  workers    20.3 ms  ratio 0.51 (aim 0.60)\n"
    assert history.parsed("round_speed.py", rounds) == {"round: mnist-mlp float32": 0.51}
    steps = "step of one sample / FedAvg step:\n  PVI, Rényi: 2.73, 1.20 (aim 2.2)\n"
    assert history.parsed("step_speed.py", steps) == {
        "step: step of one sample / FedAvg step: PVI, Rényi": 2.73
    }
    line = (
        "MNIST, 10 clients of 100: 0.12 s (aim 0.2 s), 255 global atoms; plain 0.20 s, ratio 0.59"
    )
    assert history.parsed("matching_speed.py", line) == {"matching: MNIST, 10 clients of 100": 0.59}


@pytest.mark.parametrize(("divide", "each"), [(halves, 5), *((labels(n), n) for n in (1, 2, 3))])
def test_clients_of_the_fusion_benchmark_have_so_many_classes(divide, each):
    """Every row has an owner, and owners of a class have as many of its rows, up to one."""
    clients = 2 if divide is halves else 10
    y = np.random.default_rng(0).integers(0, 10, 2000)
    owner = divide(y, clients, np.random.default_rng(1))
    counts = np.array([np.bincount(y[owner == client], minlength=10) for client in range(clients)])
    assert counts.sum() == len(y)
    assert ((counts > 0).sum(1) == each).all()
    for column in counts.T:
        assert np.ptp(column[column > 0]) <= 1


def test_uneven_clients_have_dirichlet_shares_of_every_class():
    """Mean shares are 1/n, and of the concentrations 1 to 5 in some order for each class."""
    y, n = np.repeat(np.arange(400), 200), 4
    owner = uneven(y, n, np.random.default_rng(1))
    shares = np.array([np.bincount(own, minlength=n) for own in owner.reshape(400, 200)]) / 200
    np.testing.assert_allclose(shares.mean(0), 1 / n, atol=0.02)
    a = np.linspace(1, 5, n)
    second = (a * (a + 1)).mean() / (a.sum() * (a.sum() + 1))
    np.testing.assert_allclose((shares**2).mean(0), second, atol=0.015)


def test_augmented_images_are_shifted_or_reflected():
    layer, x = Augmentation(), torch.rand(20, 2, 6, 5) + 1
    assert layer.eval()(x) is x
    padded = torch.nn.functional.pad(x, [4] * 4)
    seen = set()
    for number, found in enumerate(layer.train()(x)):
        ways = {
            (row, column, flipped)
            for row in range(9)
            for column in range(9)
            for flipped in (False, True)
            if torch.equal(
                found.flip(2) if flipped else found,
                padded[number, :, row : row + 6, column : column + 5],
            )
        }
        assert len(ways) == 1, "none of the shifts, or several"
        seen |= ways
    assert len({flipped for *_, flipped in seen}) == 2
    assert len(seen) > 10


def test_what_reports_need_has_a_line_or_a_reason_for_every_method(monkeypatch, capsys):
    """Of three clients the longest change is at least the median; others have a reason."""
    monkeypatch.setattr(bounds.bounds, "Bounds", bounds.bounds.Bounds)
    monkeypatch.setattr(bounds, "DATA", {"digits": {"name": "digits", "limit": 200, "clients": 3}})
    unequal = {"partition": "benchmarks.bounds:unequal"}
    monkeypatch.setattr(bounds, "PARTITIONS", {"unequal sizes": unequal})
    bounds.needs(["scaffold", "fedpm", "global"], 1, None)
    _, _, line, *rest = capsys.readouterr().out.splitlines()
    name, reports, need, first, later, _, _ = line.strip("| ").split(" | ")
    assert (name, reports, first, later) == ("`scaffold`", "3", need, "0.0")
    assert float(need) >= 1
    assert rest[-2:] == [
        "- `fedpm`: it sends no real numbers",
        "- `global`: it pools all data, and sends nothing",
    ]
