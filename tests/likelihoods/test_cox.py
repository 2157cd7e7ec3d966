"""Networks of survival: the partial likelihood and the C-index against other programs."""

import json
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedbayes
from fedbayes import Config, Simulation
from fedbayes.biostatistics.design import Design
from fedbayes.biostatistics.risk_sets import tell_own_likelihood
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples
from fedbayes.errors import ConfigError, DataError, FedbayesWarning, MessageError
from fedbayes.federation.stages.checks import check_scores
from fedbayes.likelihoods import build_likelihood, evaluate, total
from fedbayes.reports.gather import gather
from fedbayes.runs.build import stored_data
from tests.helpers.command_line import command
from tests.helpers.regressions import rossi, settings_of

lifelines = pytest.importorskip("lifelines")

from lifelines.utils import concordance_index  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::fedbayes.errors.FedbayesWarning")
TARGET = Target("survival", ("week", "arrest"))


def make(ties="efron"):
    return build_likelihood("cox", TARGET, ties=ties)


@pytest.mark.parametrize("ties", ["efron", "breslow"])
def test_loss_and_gradient_are_those_of_the_regression_by_sums(ties):
    rng = np.random.default_rng(0)
    n = 200
    x = rng.normal(size=(n, 3))
    time, event = rng.integers(1, 20, n).astype(float), rng.integers(0, 2, n).astype(float)
    beta = rng.normal(size=3)
    none = np.zeros(n)
    design = Design(x, event, none + 1, none, time, np.zeros(n, np.int64))
    numbers = {"at": beta, "center": np.zeros(3), "scale": np.ones(3)}
    found = tell_own_likelihood(design, numbers, ties).numbers
    weights = torch.tensor(beta, requires_grad=True)
    y = torch.tensor(np.stack([time, event], axis=1))
    loss = n * make(ties).nll((torch.tensor(x) @ weights)[:, None], y)
    loss.backward()
    assert -loss.item() == pytest.approx(found["loglik"][0], rel=1e-12)
    np.testing.assert_allclose(-weights.grad, found["gradient"], rtol=1e-9, atol=1e-10)


ROWS = st.lists(
    st.tuples(st.integers(0, 5), st.booleans(), st.integers(-2, 2)), min_size=1, max_size=30
)


@settings(deadline=None, max_examples=150)
@given(rows=ROWS, ties=st.sampled_from(["efron", "breslow"]))
def test_what_holds_of_any_rows(rows, ties):
    """The C-index is that of lifelines, all ties included; the likelihood is that of its sum by
    hand; a constant changes nothing; shares are not negative.
    """
    time, event, risk = (np.array(column, float) for column in zip(*rows, strict=True))
    y, f = torch.tensor(np.stack([time, event], 1)), torch.tensor(risk)[:, None]
    likelihood = make(ties)
    terms = likelihood.terms(f[None], y)
    metrics = likelihood.metrics(total(terms))
    try:
        expected = concordance_index(time, -risk, event)
    except ZeroDivisionError:  # no pair is comparable
        expected = np.nan
    assert metrics["c_index"] == pytest.approx(expected, nan_ok=True)
    nll = 0.0
    for t in np.unique(time[event > 0]):
        now = (time == t) & (event > 0)
        at_risk, tied = np.exp(risk[time >= t]).sum(), np.exp(risk[now]).sum()
        passed = np.arange(now.sum()) / now.sum() if ties == "efron" else np.zeros(now.sum())
        nll += np.log(at_risk - passed * tied).sum() - risk[now].sum()
    assert float(terms["nll"].sum()) == pytest.approx(nll, abs=1e-9)
    assert (terms["nll"] >= -1e-9).all()
    assert (terms["nll"][event == 0] == 0).all()
    shifted = likelihood.terms(f[None] + 100, y)
    for name, values in terms.items():
        torch.testing.assert_close(shifted[name], values, atol=1e-9, rtol=1e-9)


def test_many_pairs_are_counted_piece_by_piece():
    rng = np.random.default_rng(0)
    n = 5000
    time, event, risk = rng.integers(0, 99, n), rng.integers(0, 2, n), rng.normal(size=n).round(1)
    y = torch.tensor(np.stack([time, event], 1)).float()
    terms = make().terms(torch.tensor(risk)[None, :, None], y)
    assert make().metrics(total(terms))["c_index"] == pytest.approx(
        concordance_index(time, -risk, event), rel=1e-12
    )


def test_draws_predict_by_their_mean_log_risk():
    f = torch.randn(4, 20, 1, dtype=torch.float64)
    y = torch.stack([torch.arange(20.0), torch.ones(20)], dim=1)
    moved = f + torch.randn(4, 1, 1, dtype=torch.float64)
    for name, values in make().terms(f.mean(dim=0)[None], y).items():
        torch.testing.assert_close(make().terms(moved, y)[name], values)


@pytest.mark.slow
@pytest.mark.parametrize("ties", ["efron", "breslow"])
def test_a_linear_network_becomes_the_regression(tmp_path, ties):
    """One client, full batches: coefficients of lifelines, in units of the columns' deviations."""
    frame = rossi(tmp_path, sites=1)
    given = {"task": {"likelihood": "cox", "ties": ties}, "model": {"hidden": []}, "rounds": 20}
    given["training"] = {"batch_size": 1000, "epochs": 50, "lr": 0.5}
    run = fedbayes.run(**settings_of(tmp_path, **given), folder=tmp_path / "run")
    rows = stored_data(run.config, run.folder).partition.train_rows(0)
    table = frame.drop(columns="site").iloc[rows]
    if ties == "efron":
        fit = lifelines.CoxPHFitter().fit(table, "week", "arrest").params_
    else:
        from statsmodels.duration.hazard_regression import PHReg

        features = table.drop(columns=["week", "arrest"])
        model = PHReg(table.week, features, status=table.arrest, ties="breslow")
        fit = pd.Series(model.fit().params, index=features.columns)
    weights = {n: t for n, t in run.folder.model().items() if n.endswith("weight")}
    (weight,) = weights.values()
    names = list(fit.index)
    expected = (fit * table[names].std(ddof=0)).to_numpy()
    np.testing.assert_allclose(weight[0].numpy(), expected, atol=2e-4)


def test_metrics_are_of_pairs_within_clients(tmp_path):
    rossi(tmp_path)
    config = Config.create(**settings_of(tmp_path))
    with Simulation(config, tmp_path / "run") as simulation:
        for _ in simulation:
            pass
        data, found = simulation.data, simulation.summary()["metrics"]
    counted = {"right": 0.0, "pairs": 0}
    predict = fedbayes.load(tmp_path / "run").expectation
    start = 0
    for client, size in enumerate(data.test_sizes().tolist()):
        y = data.test(client).y.numpy()
        risk = predict(data.raw_test(start, start + size))[:, 0].numpy()
        start += size
        index = concordance_index(y[:, 0], -risk, y[:, 1])
        earlier = (y[:, None, 0] < y[None, :, 0]) | (
            (y[:, None, 0] == y[None, :, 0]) & (y[None, :, 1] == 0)
        )
        pairs = int((earlier & (y[:, None, 1] == 1)).sum())
        counted["right"] += index * pairs
        counted["pairs"] += pairs
    expected = counted["right"] / counted["pairs"]
    assert found["global"]["c_index"] == pytest.approx(expected, abs=2e-3)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["headline"] == "global_c_index"


@pytest.mark.slow
def test_workers_compute_the_same(tmp_path):
    rossi(tmp_path)
    lines = []
    for engine in ("sequential", "workers"):
        config = Config.create(**settings_of(tmp_path, engine=engine, workers=2))
        with Simulation(config) as simulation:
            lines.append([step.metrics["metrics"] for step in simulation])
    assert lines[0] == lines[1]


def test_predictions_are_log_risks(tmp_path, capsys):
    rossi(tmp_path)
    fedbayes.run(**settings_of(tmp_path), folder=tmp_path / "run")
    out = tmp_path / "out.csv"
    assert command("predict", tmp_path / "run", tmp_path / "rossi.csv", "-o", out) == 0
    table = pd.read_csv(out)
    assert {"week", "arrest", "site", "risk"} == set(table.columns)
    x = pd.read_csv(tmp_path / "rossi.csv")
    wanted = fedbayes.load(tmp_path / "run").expectation(x)[:, 0]
    np.testing.assert_allclose(table["risk"], wanted, rtol=1e-4, atol=1e-5)
    for arguments, text in (
        (("predict", tmp_path / "run", tmp_path / "rossi.csv", "--level", 0.9), "no intervals"),
        (("conformal", tmp_path / "run"), "the likelihood cox"),
    ):
        assert command(*arguments) != 0
        assert text in capsys.readouterr().err


def test_files_are_evaluated_as_the_run_was(tmp_path, capsys):
    rossi(tmp_path)
    run = fedbayes.run(**settings_of(tmp_path), folder=tmp_path / "run")
    files = [tmp_path / "model.safetensors", tmp_path / "model.pt2"]
    for file in files:
        assert command("export", tmp_path / "run", "-o", file) == 0
    card = json.loads((tmp_path / "model.pt2.card.json").read_text())
    capsys.readouterr()
    assert command("evaluate", *files, "--run", tmp_path / "run", "--json") == 0
    expected = run.summary["metrics"]["global"]
    for found in json.loads(capsys.readouterr().out)[:2]:
        assert {n: found[n] for n in expected} == pytest.approx(expected, rel=1e-5)
    assert str(round(expected["c_index"], 3))[:4] in json.dumps(card)


def test_notes_say_what_is_at_risk(tmp_path):
    rossi(tmp_path)

    def said(**more):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            Simulation(Config.create(**settings_of(tmp_path, **more))).close()
        return [str(one.message) for one in found if "risk sets" in str(one.message)]

    (note,) = said()
    assert "a batch of 32 rows" in note
    assert said(training={"batch_size": 500}) == []
    (note,) = said(training={"batch_size": 500}, method={"name": "global"})
    assert "of several clients" in note


@pytest.mark.parametrize(
    ("change", "label", "text"),
    [
        ({}, ["week"], "label lists 1 columns"),
        ({}, ["arrest", "week"], "'week' is .* neither 1 .event. nor 0"),
        ({"week": -1}, ["week", "arrest"], "'week' is -1 in row 1 .* not a time"),
        ({"week": np.inf}, ["week", "arrest"], "'week' is inf in row 1"),
        ({"arrest": 2}, ["week", "arrest"], "'arrest' is 2 in row 1"),
        ({"arrest": np.nan}, ["week", "arrest"], "have no label"),
    ],
)
def test_labels_that_are_no_times_of_events_are_refused(tmp_path, change, label, text):
    frame = rossi(tmp_path).astype({"week": float, "arrest": float})
    for column, value in change.items():
        frame.loc[0, column] = value
    frame.to_csv(tmp_path / "rossi.csv", index=False)
    config = settings_of(tmp_path)
    config["data"]["label"] = label
    with pytest.raises(DataError, match=text):
        Simulation(Config.create(**config))


def test_what_needs_a_distribution_is_refused(tmp_path):
    rossi(tmp_path)
    with pytest.raises(
        ConfigError, match="fedfuse needs predictions of single inputs, but the likelihood cox"
    ):
        Simulation(Config.create(**settings_of(tmp_path, method={"name": "fedfuse"})))
    for wrong in (lambda f: make().pooled(f, torch.ones(2) / 2), lambda f: make().divergence(f, f)):
        with pytest.raises(ConfigError, match="log-risks are relative"):
            wrong(torch.zeros(2, 3, 1))
    with pytest.raises(DataError, match="two columns, time and event"):
        Target("survival", ("week",))


def test_scores_of_no_pairs_are_refused():
    y = torch.tensor([[1.0, 1.0], [2.0, 0.0], [3.0, 1.0]])
    honest = total(evaluate(make(), lambda x: x[None], Samples(torch.randn(3, 1), y)))
    check_scores(honest, make())
    for lie in ({"comparable": 4.0}, {"concordant": 3.0}, {"concordant": -1.0}):
        with pytest.raises(MessageError):
            check_scores(honest | lie, make())


def test_times_that_float32_cannot_tell_apart_are_said(tmp_path):
    frame = rossi(tmp_path)
    frame["week"] = 1e9 + frame["week"]
    frame.to_csv(tmp_path / "rossi.csv", index=False)
    with pytest.warns(FedbayesWarning, match="times in 'week' equal others"):
        Simulation(Config.create(**settings_of(tmp_path)))


def test_a_report_leaves_out_clients_without_pairs_and_says_so(tmp_path):
    rng = np.random.default_rng(0)
    rows = pd.DataFrame({"a": rng.normal(size=60), "time": rng.exponential(size=60)})
    rows["event"], rows["site"] = 1, np.arange(60) // 15
    rows.loc[rows["site"] == 3, "event"] = 0  # nobody's end is known: there is nothing to rank
    rows.to_csv(tmp_path / "t.csv", index=False)
    data = {"path": str(tmp_path / "t.csv"), "label": ["time", "event"], "group": "site"}
    config = {"rounds": 1, "data": data, "task": {"likelihood": "cox"}, "training": {"lr": 1e-3}}
    fedbayes.run(Config.create(**config), tmp_path / "run")
    record = gather([tmp_path / "run"])[0]
    assert len(record.values) == 3
    assert any("1 of 4 clients are not in the chart of clients" in note for note in record.notes)
    assert command("report", tmp_path / "run", "-o", tmp_path / "r.html") == 0
