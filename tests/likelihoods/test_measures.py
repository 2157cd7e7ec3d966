"""Metrics by name, against scikit-learn on pooled predictions and closed forms."""

import json
import math
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import settings as checked
from hypothesis import strategies as st
from scipy.stats import norm, poisson
from sklearn import metrics as sk

import fedbayes
from fedbayes.config.config import Config
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples
from fedbayes.errors import ConfigError, FedbayesWarning, MessageError
from fedbayes.federation.client_runtime import ClientResult
from fedbayes.federation.stages.checks import check_scores
from fedbayes.likelihoods import build_likelihood, evaluate, scored
from fedbayes.likelihoods.measures import (
    MEASURES,
    default_measures,
    fitting,
    measured,
    own_metrics,
    predictions,
)
from fedbayes.runs.simulation import Simulation
from fedbayes.storage.client_spread import ClientSpread
from fedbayes.storage.scores import ClientScores
from tests.helpers.command_line import command

TWO = build_likelihood("bernoulli", Target("class", ("no", "yes")))
FOUR = build_likelihood("categorical", Target("class", tuple("abcd")))
LABELS = build_likelihood("multilabel", Target("labels", tuple("xyz")))
REAL = build_likelihood("gaussian", Target("real", ("a",), (1.0,), (2.0,)), noise=0.5)


def of(likelihood, names, draws, y):
    return measured(names, predictions(likelihood, names, draws, y))


def some(likelihood, n, seed=0, draws=3):
    rng = torch.Generator().manual_seed(seed)
    f = 2 * torch.randn(draws, n, likelihood.outputs, generator=rng)
    if likelihood.target.kind == "labels":
        return f, (torch.rand(n, likelihood.outputs, generator=rng) > 0.5).float()
    return f, torch.randint(likelihood.target.classes, (n,), generator=rng)


def test_two_classes_as_scikit_learn_has_them():
    names = (*default_measures(TWO), "sensitivity@0.3", "specificity@0.9", "f1@0.3")
    names += ("balanced_accuracy@0.3",)
    f, y = some(TWO, 200)
    p = torch.sigmoid(f[..., 0].double()).mean(0).numpy()
    t = y.numpy()
    expected = {
        "auroc": sk.roc_auc_score(t, p),
        "average_precision": sk.average_precision_score(t, p),
        "sensitivity": sk.recall_score(t, p > 0.5),
        "specificity": sk.recall_score(1 - t, ~(p > 0.5)),
        "f1": sk.f1_score(t, p > 0.5),
        "balanced_accuracy": sk.balanced_accuracy_score(t, p > 0.5),
        "brier": sk.brier_score_loss(t, p),
        "sensitivity@0.3": sk.recall_score(t, p > 0.3),
        "specificity@0.9": sk.recall_score(1 - t, ~(p > 0.9)),
        "f1@0.3": sk.f1_score(t, p > 0.3),
        "balanced_accuracy@0.3": sk.balanced_accuracy_score(t, p > 0.3),
    }
    assert of(TWO, names, f, y) == pytest.approx(expected, rel=1e-12)


def test_several_classes_as_scikit_learn_has_them():
    f, y = some(FOUR, 300)
    p = f.double().softmax(-1).mean(0).numpy()
    t = y.numpy()
    one_hot = np.eye(4)[t]
    expected = {
        "auroc": sk.roc_auc_score(t, p, multi_class="ovr", average="macro"),
        "f1": sk.f1_score(t, p.argmax(1), average="macro"),
        "balanced_accuracy": sk.balanced_accuracy_score(t, p.argmax(1)),
        "brier": ((p - one_hot) ** 2).sum(1).mean(),
        "average_precision": sk.average_precision_score(one_hot, p, average="macro"),
    }
    names = (*default_measures(FOUR), "average_precision")
    assert of(FOUR, names, f, y) == pytest.approx(expected, rel=1e-9)


def test_classes_that_a_client_lacks_enter_no_mean():
    f, y = some(FOUR, 60)
    kept = y < 3
    p = f.double().softmax(-1).mean(0).numpy()[kept]
    t = y.numpy()[kept]
    each = [sk.roc_auc_score(t == k, p[:, k]) for k in range(3)]
    found = of(FOUR, ("auroc", "balanced_accuracy"), f[:, kept], y[kept])
    recalls = sk.recall_score(t, p.argmax(1), labels=[0, 1, 2], average=None)
    assert found["auroc"] == pytest.approx(np.mean(each))
    assert found["balanced_accuracy"] == pytest.approx(np.mean(recalls))


def test_labels_as_scikit_learn_has_them():
    f, y = some(LABELS, 200)
    p = torch.sigmoid(f.double()).mean(0).numpy()
    t = y.numpy()
    expected = {
        "auroc": sk.roc_auc_score(t, p, average="macro"),
        "average_precision": sk.average_precision_score(t, p, average="macro"),
        "brier": ((p - t) ** 2).mean(),
        "f1@0.3": sk.f1_score(t, p > 0.3, average="micro"),
    }
    assert of(LABELS, (*default_measures(LABELS), "f1@0.3"), f, y) == pytest.approx(expected)


def test_f1_of_a_single_label_is_not_its_accuracy():
    likelihood = build_likelihood("multilabel", Target("labels", ("rain",)))
    f, y = some(likelihood, 100)
    p, t = torch.sigmoid(f.double()).mean(0).numpy(), y.numpy()
    found = of(likelihood, ("f1@0.3",), f, y)
    assert found == pytest.approx({"f1@0.3": sk.f1_score(t[:, 0], p[:, 0] > 0.3)})
    assert math.isnan(MEASURES["f1"].value(np.zeros((5, 1)), np.zeros((5, 1)), 0.5))
    terms = likelihood.terms(torch.full((1, 5, 1), -2.0), torch.zeros(5, 1))
    told = likelihood.metrics({name: float(each.sum()) for name, each in terms.items()})
    assert told["label_accuracy"] == 1.0
    assert math.isnan(told["f1"])


def test_crps_of_a_gaussian_and_of_a_mixture():
    rng = torch.Generator().manual_seed(1)
    f, y = torch.randn(1, 300, 1, generator=rng), 3 * torch.randn(300, 1, generator=rng)
    mean, std = (part.numpy() for part in REAL.own_unit(f[0].double()))
    z = (y.numpy() - mean) / std
    exact = std * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / math.sqrt(math.pi))
    found = REAL.crps(f, y)  # Gneiting & Raftery 2007, Eq. 21
    assert found.numpy() == pytest.approx(exact[:, 0], abs=1e-3)
    # Of a mixture, by its distribution function on a grid.
    f = torch.randn(8, 5, 1, generator=rng)
    mean, std = (part.numpy()[..., 0] for part in REAL.own_unit(f.double()))
    grid = np.linspace(-40, 40, 400_001)
    for sample in range(5):
        cdf = norm.cdf(grid[:, None], mean[:, sample], std[:, sample]).mean(axis=1)
        exact = np.trapezoid((cdf - (grid >= float(y[sample, 0]))) ** 2, grid)
        assert float(REAL.crps(f, y[:5])[sample]) == pytest.approx(exact, rel=5e-3)


def test_crps_of_counts_by_their_sum():
    likelihood = build_likelihood("poisson", Target("count", ("a",), (3.0,)))
    f, y = torch.tensor([[[0.0], [0.5]]]), torch.tensor([[2.0], [9.0]])
    k = np.arange(200)
    for sample in range(2):
        rate = 3 * math.exp(20 * math.tanh(float(f[0, sample, 0]) / 20))
        exact = ((poisson.cdf(k, rate) - (k >= float(y[sample, 0]))) ** 2).sum()
        assert float(likelihood.crps(f, y)[sample]) == pytest.approx(exact, rel=0.01)


def test_ranks_are_not_lost_where_probabilities_are_near_one():
    # In float32 both would be 1.
    f = torch.tensor([[[20.0], [22.0], [24.0]]])
    assert of(TWO, ("auroc",), f, torch.tensor([0, 1, 1])) == {"auroc": 1.0}


def test_what_is_undefined_is_nan_and_warns_of_nothing():
    names = (*default_measures(TWO), "f1@0.9")
    f, _ = some(TWO, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        negative = of(TWO, names, f - 50, torch.zeros(5, dtype=torch.int64))
        positive = of(TWO, names, f, torch.ones(5, dtype=torch.int64))
        none = measured(names, {})
        lost = of(TWO, names, torch.full_like(f, math.nan), torch.ones(5, dtype=torch.int64))
        of(FOUR, default_measures(FOUR), *some(FOUR, 2))
    undefined = {name for name, value in negative.items() if math.isnan(value)}
    wanted = {"auroc", "average_precision", "sensitivity", "balanced_accuracy", "f1", "f1@0.9"}
    assert undefined == wanted
    assert negative["specificity"] == 1.0
    undefined = {name for name, value in positive.items() if math.isnan(value)}
    assert undefined == {"auroc", "average_precision", "specificity", "balanced_accuracy"}
    assert all(math.isnan(value) for value in (*none.values(), *lost.values()))


@checked(deadline=None)  # the machine may be busy
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(0, 1000))
def test_pieces_come_to_what_the_whole_does(sizes, seed):
    # Whatever the pieces, metrics are of all rows; those that are means over rows add.
    n = sum(sizes)
    f, y = some(TWO, n, seed, draws=1)
    names = ("auroc", "brier")
    samples = Samples(f[0], y)
    whole = evaluate(TWO, lambda x: x[None], samples, measures=names)
    cut = evaluate(TWO, lambda x: x[None], samples, batch_size=sizes[0], measures=names)
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    parts = [
        scored(TWO, lambda x: x[None], Samples(a, b), names)
        for a, b in zip(f[0].split(sizes), y.split(sizes), strict=True)
    ]
    total = scored(TWO, lambda x: x[None], samples, names)
    for name in ("count", "correct", "nll"):
        assert sum(part[name] for part in parts) == pytest.approx(total[name])
    brier = sum(part["count"] * part["metric/brier"] for part in parts) / n
    assert brier == pytest.approx(total["metric/brier"])


@pytest.mark.parametrize(
    ("likelihood", "names", "text"),
    [
        (TWO, ("rmse",), "metrics lists rmse, which is for real numbers or counts"),
        (FOUR, ("sensitivity",), "sensitivity, which is for two classes, and there are 4"),
        (FOUR, ("f1@0.3",), "f1@0.3, which is for two classes"),
        (REAL, ("auroc",), "has crps, rmse, mae, r2, nll"),
        (REAL, ("pinball",), "available for other likelihoods"),
        (build_likelihood("quantile", REAL.target), ("crps",), "with a distribution"),
    ],
)
def test_metrics_of_other_targets_are_refused(likelihood, names, text):
    with pytest.raises(ConfigError, match=text):
        fitting(names, likelihood)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["aurocc"], "did you mean 'auroc'"),
        (["auroc@0.3"], r"auroc has no threshold\. sensitivity, specificity, f1"),
        (["f1@1.5"], "a probability above 0 and below 1"),
        (["f1@x"], "a probability"),
        (["auto", "f1"], "'auto' and others"),
        (["f1", "f1"], "twice"),
        ([f"f1@0.{n}" for n in range(10, 30)], "the limit is 16"),
    ],
)
def test_names_that_are_none_are_refused(names, text):
    with pytest.raises(ConfigError, match=text):
        Config.create(metrics=names)


@pytest.mark.parametrize("likelihood", [TWO, FOUR, LABELS, REAL])
def test_what_a_likelihood_tells_is_not_told_twice(likelihood):
    own = own_metrics(likelihood)
    assert own <= MEASURES.keys()
    assert fitting(sorted(own), likelihood) == ()
    assert not own & set(default_measures(likelihood))


def test_what_clients_say_of_metrics_is_looked_at():
    f, y = some(TWO, 20)
    scores = scored(TWO, lambda x: f, Samples(f[0], y), ("auroc", "brier"))
    check_scores(scores, TWO, ("auroc", "brier"))
    check_scores({**scores, "metric/auroc": math.nan}, TWO, ("auroc", "brier"))
    for lie in (1.1, -0.1, math.inf, -math.inf):
        with pytest.raises(MessageError, match="its auroc is"):
            check_scores({**scores, "metric/auroc": lie}, TWO, ("auroc", "brier"))
    with pytest.raises(MessageError, match="metric/brier"):
        check_scores(scores, TWO, ("auroc",))
    with pytest.raises(MessageError, match="metric/f1"):
        check_scores(scores, TWO, ("auroc", "brier", "f1"))


def test_metrics_pass_the_wire():
    wire = pytest.importorskip("fedbayes.flower.wire")
    f, y = some(TWO, 20)
    scores = scored(TWO, lambda x: f, Samples(f[0], y * 0), ("auroc", "brier"))
    assert math.isnan(scores["metric/auroc"])
    sent = wire.write_reply(ClientResult(b"report", b"ticket", {}, scores))
    came = wire.read_reply(sent).scores
    assert came == pytest.approx(scores, nan_ok=True)
    check_scores(came, TWO, ("auroc", "brier"))


def test_an_undefined_metric_enters_no_mean_and_forgets_what_was():
    f, y = some(TWO, 20)
    one = scored(TWO, lambda x: f, Samples(f[0], y), ("auroc",))
    undefined = {**one, "metric/auroc": math.nan}
    clients = ClientScores().after({0: one, 2: one})
    assert clients.means(TWO)["auroc"] == pytest.approx(one["metric/auroc"])
    clients = clients.after({2: undefined})
    assert math.isnan(clients.each(TWO)[2]["auroc"])
    assert clients.means(TWO)["auroc"] == pytest.approx(one["metric/auroc"])
    told = ClientSpread(clients.each(TWO), TWO)
    assert told.undefined() == {"auroc": [2]}
    assert told.columns(range(3))["auroc"] == [one["metric/auroc"], None, None]
    assert "auroc" not in clients.after({0: undefined}).means(TWO)
    assert "auroc" not in told.spread()


def test_worst_client_and_spread():
    each = {0: {"auroc": 0.9, "brier": 0.1}, 1: {"auroc": 0.5, "brier": 0.4}, 4: {"auroc": 0.7}}
    told = ClientSpread(each, TWO)
    assert told.worst() == {"auroc": 0.5, "brier": 0.4}
    assert told.worst_client("auroc") == told.worst_client("brier") == 1
    assert told.mean() == pytest.approx({"auroc": 0.7, "brier": 0.25})
    assert told.spread() == pytest.approx({"auroc": 0.2, "brier": np.std([0.1, 0.4], ddof=1)})


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Patients of three sites; at the last one nobody has it."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 3))
    ill = x @ [1.5, -1, 0] + rng.normal(size=240) > 0
    site = np.array(["north", "south", "west"])[np.arange(240) % 3]
    ill[site == "west"] = False
    path = tmp_path_factory.mktemp("table") / "patients.csv"
    frame = pd.DataFrame(x, columns=list("abc"))
    frame.assign(ill=np.where(ill, "yes", "no"), site=site).to_csv(path, index=False)
    return path


ASKED = ("auroc", "sensitivity@0.3", "brier")


def settings(table, **changes):
    return {
        "rounds": 2,
        "metrics": list(ASKED),
        "data": {"path": table, "label": "ill", "group": "site"},
        "model": {"hidden": [4]},
        "calibration": "none",
        **changes,
    }


@pytest.fixture(scope="module")
def asked(table, tmp_path_factory):
    return fedbayes.run(**settings(table), folder=tmp_path_factory.mktemp("runs") / "asked")


def test_a_run_tells_metrics_of_its_predictions(asked):
    with Simulation(None, asked.folder.path) as simulation:
        data = simulation.data
    sizes, names = data.test_sizes(), data.partition.names
    x, y = data.raw_test(0, data.test_total), data.test_labels()
    p = asked.predictor()(x)[:, 1].exp().numpy()
    expected = {
        "auroc": sk.roc_auc_score(y, p),
        "sensitivity@0.3": sk.recall_score(y, p > 0.3),
        "brier": sk.brier_score_loss(y, p),
    }
    summary = asked.summary
    for name, value in expected.items():
        assert summary["metrics"]["global"][name] == pytest.approx(value, rel=1e-5)
    parts = np.split(np.arange(len(y)), np.cumsum(sizes)[:-1])
    found = summary["per_client"]["global"]
    for client, rows in zip(names, parts, strict=True):
        if client == "west":
            assert found[client]["auroc"] is found[client]["sensitivity@0.3"] is None
        else:
            assert found[client]["auroc"] == pytest.approx(sk.roc_auc_score(y[rows], p[rows]))
        assert found[client]["brier"] == pytest.approx(np.mean((p[rows] - y[rows]) ** 2), rel=1e-5)
    values = [found[client]["auroc"] for client in ("north", "south")]
    metrics = summary["metrics"]
    assert metrics["global_worst"]["auroc"] == min(values)
    assert metrics["global_mean"]["auroc"] == pytest.approx(np.mean(values))
    assert metrics["global_spread"]["auroc"] == pytest.approx(np.std(values, ddof=1))
    west = {"auroc": ["west"], "sensitivity@0.3": ["west"]}
    assert summary["undefined"] == {"global": west, "local": west}
    assert summary["positive_class"] == "yes"
    own = summary["per_client"]["local"]
    assert own["west"]["auroc"] is None
    values = [own[client]["auroc"] for client in ("north", "south")]
    assert metrics["local"]["auroc"] == pytest.approx(np.mean(values))
    assert [set(ASKED) <= set(line["metrics"]["global"]) for line in asked.metrics] == [True] * 2
    json.loads(asked.folder.summary_file.read_text(), parse_constant=pytest.fail)


def timeless(run):
    return [{k: v for k, v in line.items() if k != "seconds"} for line in run.metrics]


@pytest.mark.slow
def test_engines_and_resumes_tell_the_same(asked, table, tmp_path):
    workers = fedbayes.run(**settings(table, engine="workers"), folder=tmp_path / "workers")
    assert timeless(workers) == timeless(asked)
    with Simulation(Config.create(**settings(table)), tmp_path / "cut") as simulation:
        next(iter(simulation))
    resumed = fedbayes.resume(tmp_path / "cut")
    assert timeless(resumed) == timeless(asked)
    assert resumed.summary["per_client"] == asked.summary["per_client"]


def test_auto_is_of_the_global_model_after_the_last_round(table, tmp_path):
    run = fedbayes.run(**settings(table, metrics="auto"), folder=tmp_path / "run")
    first, last = run.metrics
    suiting = set(default_measures(TWO))
    assert not suiting & set(first["metrics"]["global"])
    assert "by_client" not in first
    assert suiting <= set(last["metrics"]["global"])
    assert not suiting & set(last["metrics"]["local"])
    none = fedbayes.run(**settings(table, metrics=[]), folder=tmp_path / "none")
    plain = timeless(none)
    assert "per_client" not in none.summary
    assert plain[0] == timeless(run)[0]
    assert set(plain[1]["metrics"]) == {"global", "local"}


def test_auto_stops_at_a_number_of_clients(table, tmp_path, monkeypatch):
    monkeypatch.setattr("fedbayes.runs.evaluator.MOST_UNASKED", 2)
    run = fedbayes.run(**settings(table, metrics="auto"), folder=tmp_path / "run")
    assert "auroc" in run.summary["metrics"]["global"]
    assert set(run.summary["per_client"]["global"]["north"]) == {"accuracy", "nll"}


def test_models_without_a_global_one_and_pooled_ones_tell_them(table, tmp_path):
    local = fedbayes.run(**settings(table, method={"name": "local"}), folder=tmp_path / "local")
    assert set(local.summary["per_client"]) == {"local"}
    assert 0 < local.summary["metrics"]["local_worst"]["auroc"] <= 1
    pooled = fedbayes.run(**settings(table, method={"name": "global"}), folder=tmp_path / "pooled")
    told = pooled.summary["per_client"]
    assert told["global"] == told["local"]


def test_what_cannot_be_told_is_refused_or_said(table):
    with pytest.raises(ConfigError, match="metrics lists rmse"):
        fedbayes.run(**settings(table, metrics=["rmse"]))
    private = {"aggregation": {"clip": 1.0}, "privacy": {"noise": 1.0, "repeatable": True}}
    with pytest.warns(FedbayesWarning, match="only of the global model.*privacy.metrics is off"):
        run = fedbayes.run(**settings(table, **private, rounds=1))
    assert "auroc" in run.summary["metrics"]["global"]
    assert set(run.summary["per_client"]) == {"global"}


def test_files_are_tried_by_metrics(asked, capsys):
    model, folder = str(asked.folder.model_file), str(asked.folder.path)
    assert command("evaluate", model, "--run", folder, "--metrics", "auroc,brier", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    expected = asked.summary["metrics"]["global"]
    for name in ("auroc", "brier"):
        assert found[name] == pytest.approx(expected[name], rel=1e-6)
    each = asked.summary["per_client"]["global"]
    assert found["clients"]["north"]["auroc"] == pytest.approx(each["north"]["auroc"])
    assert found["clients"]["west"]["auroc"] is None
    assert command("calibrate", folder, "--metrics", "sensitivity@0.3,auroc", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sensitivity@0.3"] == pytest.approx(expected["sensitivity@0.3"])
    assert command("evaluate", model, "--run", folder) == 0
    shown = capsys.readouterr().out
    assert "worst client" in shown
    assert "positive: yes" in shown
    assert "undefined, and excluded from means: west" in " ".join(shown.split())
    assert command("evaluate", model, "--run", folder, "--metrics", "crps") != 0
    assert "crps, which is for real numbers" in capsys.readouterr().err


def test_a_report_lists_metrics_of_clients(asked, tmp_path):
    page = tmp_path / "page.html"
    assert command("report", str(asked.folder.path), "-o", str(page)) == 0
    text = page.read_text()
    assert "Metrics of the global model over clients" in text
    worst = asked.summary["metrics"]["global_worst"]["auroc"]
    assert f"{worst:.3f} (" in text
    assert "Global AUROC over rounds" in text


def test_the_display_names_the_worst_client(asked, capsys, table, tmp_path):
    config = tmp_path / "config.toml"
    config.write_text(asked.config.dump())
    assert command("run", str(config), "-o", str(tmp_path / "again")) == 0
    shown = capsys.readouterr()
    assert "AUROC" in shown.err
    assert "(worst " in shown.err
    assert "worst client" in shown.out


def test_f1_is_the_mean_of_the_classes_that_there_are():
    y, p = np.array([0, 0, 1, 1]), np.eye(3)[[0, 0, 1, 2]]
    alone = [sk.f1_score(y == k, p.argmax(1) == k) for k in (0, 1)]
    assert MEASURES["f1"].value(y, p, 0.5) == pytest.approx(np.mean(alone))
