"""Whole jobs on tables whose targets are no classes, from a file to metrics in the file's unit."""

import json

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file
from sklearn.datasets import load_diabetes
from sklearn.linear_model import Ridge
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error
from sklearn.model_selection import cross_val_predict

import fedbayes
from fedbayes import Config, Simulation
from fedbayes.cli import main
from fedbayes.errors import ConfigError
from fedbayes.methods import METHODS
from tests.helpers.cases import cases

pytestmark = pytest.mark.filterwarnings("ignore::fedbayes.errors.FedbayesWarning")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Diabetes with a site, and targets of other kinds."""
    frame = load_diabetes(as_frame=True, scaled=False).frame
    rng = np.random.default_rng(0)
    frame["site"] = rng.choice(["north", "south", "east", "west"], len(frame))
    frame["visits"] = rng.poisson(np.exp(0.02 * frame["bmi"]))
    frame["high"] = (frame["target"] > 140).astype(int)
    frame["died"] = rng.integers(0, 2, len(frame))
    frame["old"] = (frame["age"] > 50).astype(int)
    path = tmp_path_factory.mktemp("tables") / "diabetes.csv"
    frame.to_csv(path, index=False)
    return path


def columns(table, *targets):
    """The table with these targets alone, beside it."""
    others = {"target", "visits", "high", "old", "died"} - set(targets)
    path = table.with_name(f"{'-'.join(targets)}.csv")
    pd.read_csv(table).drop(columns=sorted(others)).to_csv(path, index=False)
    return path


def settings(table, *targets):
    path = columns(table, *targets)
    return {"data": {"path": path, "label": list(targets), "group": "site"}}


@pytest.mark.parametrize("method", cases(["fedavg", "fedsparse", "virtual"], slow=["virtual"]))
def test_a_table_trains_from_the_command_line(table, tmp_path, method, monkeypatch):
    path = columns(table, "target")
    arguments = ["run", "-m", method, "--rounds", "10", "-o", str(tmp_path / "run")]
    for key, value in (("path", path), ("label", "target"), ("group", "site")):
        arguments += ["-s", f"data.{key}={value}"]
    monkeypatch.setattr("sys.argv", ["fedbayes", *arguments, "-s", "task.likelihood=gaussian"])
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["global_accuracy"] is None
    assert summary["likelihood"] == "gaussian"
    assert {"rmse", "mae", "nll"} <= summary["metrics"]["global"].keys()
    assert {"rmse", "mae", "nll"} <= summary["metrics"]["local"].keys()
    frame = pd.read_csv(path)
    inputs = frame.drop(columns=["target", "site"]).to_numpy()
    ridge = cross_val_predict(Ridge(1.0), (inputs - inputs.mean(0)) / inputs.std(0), frame.target)
    pooled, spread = root_mean_squared_error(frame.target, ridge), frame.target.std()
    assert 53 < pooled < 56  # in the unit of the file
    whose = "local" if method == "virtual" else "global"
    assert summary["headline"] == f"{whose}_rmse"
    # Better than the mean of all targets would be, by at least a third of what the ridge gains.
    assert summary["metrics"][whose]["rmse"] < spread - (spread - pooled) / 3


def test_metrics_are_those_of_a_forward_pass_by_hand(table, tmp_path):
    config = Config.create(rounds=3, model={"hidden": [16]}, **settings(table, "target"))
    with Simulation(config, tmp_path) as simulation:
        for _ in simulation:
            pass
        data, summary = simulation.data, simulation.summary()
        rows = data.partition.test
    frame = pd.read_csv(config.data.path)
    raw = frame.drop(columns=["target", "site"]).to_numpy()
    trained = data.partition.train
    x = (raw[rows] - raw[trained].mean(0)) / raw[trained].std(0)
    truth = frame.target.to_numpy()
    center, scale = truth[trained].mean(), truth[trained].std()
    weights = load_file(tmp_path / "model.safetensors")
    first, last = sorted(n.removesuffix(".weight") for n in weights if n.endswith(".weight"))
    hidden = np.maximum(x @ weights[f"{first}.weight"].T + weights[f"{first}.bias"], 0)
    z = (hidden @ weights[f"{last}.weight"].T + weights[f"{last}.bias"])[:, 0]
    (log_std,) = (w for n, w in weights.items() if n.endswith("log_std"))
    predicted, std = center + scale * z, scale * np.exp(7 * np.tanh(log_std[0] / 7))
    wanted = {
        "rmse": root_mean_squared_error(truth[rows], predicted),
        "mae": mean_absolute_error(truth[rows], predicted),
        "r2": r2_score(truth[rows], predicted),
        "nll": np.mean(
            0.5 * ((truth[rows] - predicted) / std) ** 2 + np.log(std) + 0.5 * np.log(2 * np.pi)
        ),
    }
    found = summary["metrics"]["global"]
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-4)


TASKS = {
    "gaussian": ("target",),
    "student-t": ("target",),
    "quantile": ("target",),
    "poisson": ("visits",),
    "multilabel": ("high", "old"),
    "bernoulli": ("high",),
    "categorical": ("high",),
    "cox": ("target", "died"),
}


CLOSE = ("student-t", "bernoulli", "poisson")
"""Left to the slow tests, for they differ little from others: Student's t from the Gaussian, the
Bernoulli from the multilabel of which it is one column, rates from means."""


@pytest.mark.parametrize(
    "likelihood",
    cases(TASKS, slow=(*CLOSE, "quantile", "multilabel", "cox")),
)
@pytest.mark.parametrize("method", cases(METHODS, slow=("fedfuse", "combined")))
def test_every_method_takes_every_likelihood(table, method, likelihood):
    chosen, task = {"name": method}, {"likelihood": likelihood}
    if method in ("pfnm", "gpi-fnm") and likelihood in ("gaussian", "student-t"):
        task["noise"] = "each"
    if (method, likelihood) == ("fedfuse", "cox"):
        pytest.skip("refused: see test_cox.py")
    if method == "virtual":
        chosen |= {"samples": 2, "predictions": 2}
    if method == "fedfuse":
        chosen |= {"steps": 5, "drawn": 64}
    config = Config.create(
        rounds=2,
        model={"hidden": [4]},
        method=chosen,
        task=task,
        **settings(table, *TASKS[likelihood]),
    )
    if method == "gaussian-head" and likelihood not in ("bernoulli", "categorical"):
        with pytest.raises(ConfigError, match="gaussian-head predicts classes"):
            Simulation(config)
        return
    if method in ("fedlap", "fedep", "fedlpa", "dsvgd") and likelihood in ("quantile", "cox"):
        with pytest.raises(ConfigError, match="no distribution, so it has no Fisher matrix for"):
            Simulation(config)
        return
    with Simulation(config) as simulation:
        lines = [step.metrics["metrics"] for step in simulation]
    last = lines[-1]
    whose = ("global", "local")
    if not simulation.method.models.has_global:
        whose = ("local",)
    elif method in ("fedpa", "qfedavg", "fedpm", "fens", "predbayes", "qlsd", "gaussian-head"):
        whose = ("global",)  # no networks of clients
    # Beside them those of what differs between clients, such as `global_worst`.
    assert {table.partition("_")[0] for table in last} == set(whose)
    for metrics in last.values():
        assert np.isfinite(list(metrics.values())).all()


@pytest.mark.parametrize(
    ("likelihood", "noise", "shares", "text"),
    [("gaussian", "learnt", "auto", "task.noise"), ("gaussian", "each", True, "class_shares")],
)
def test_matching_says_at_the_start_what_it_cannot(table, likelihood, noise, shares, text):
    config = Config.create(
        method={"name": "pfnm", "class_shares": shares},
        task={"likelihood": likelihood, "noise": noise},
        **settings(table, "target"),
    )
    with pytest.raises(ConfigError, match=text):
        Simulation(config)


def test_the_unit_of_the_target_changes_nothing_but_the_unit(table, tmp_path):
    path = columns(table, "target")
    frame = pd.read_csv(path)
    frame["target"] = 1000 * frame["target"] - 5e4
    frame.to_csv(tmp_path / "scaled.csv", index=False)
    found = []
    for file in (path, tmp_path / "scaled.csv"):
        run = fedbayes.run(
            rounds=3,
            model={"hidden": [8]},
            data={"path": file, "label": "target", "group": "site"},
        )
        found.append(run.summary["metrics"]["global"])
    one, two = found
    assert two["rmse"] == pytest.approx(1000 * one["rmse"], rel=1e-3)
    assert two["nll"] == pytest.approx(one["nll"] + np.log(1000), rel=1e-4)
    assert two["r2"] == pytest.approx(one["r2"], abs=1e-3)
