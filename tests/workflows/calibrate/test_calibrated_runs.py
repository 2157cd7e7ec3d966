"""Runs that calibrate their global model: against SciPy on the rows that clients held out, and
against metrics of what `predict` gives.
"""

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_softmax

import fedbayes
from fedbayes import Config, Simulation
from fedbayes.cli import main
from fedbayes.core.messages import encode
from fedbayes.core.metrics import calibrate
from fedbayes.core.targets import Target
from fedbayes.errors import EngineError, MessageError
from fedbayes.estimators import FederatedClassifier, FederatedRegressor
from fedbayes.federation.client_runtime import (
    MOST_CALIBRATING,
    ClientRuntime,
    Task,
    calibrating,
)
from fedbayes.likelihoods.multilabel import Multilabel
from fedbayes.likelihoods.temperature import (
    POINTS,
    TemperatureSums,
    at_temperature,
    temperature_sums,
)
from fedbayes.models import read_model
from fedbayes.reports.gather import gather
from fedbayes.reports.page import render
from fedbayes.runs.build import stored_data, stored_run
from fedbayes.runs.calibration import _read
from fedbayes.runs.chance import below_chance, warning
from fedbayes.runs.outcome import outcome_rows
from fedbayes.storage.card import Card
from fedbayes.storage.formatting import words
from fedbayes.workflows.calibrate.calibration import trust
from fedbayes.workflows.calibrate.temperature import calibrate_temperature
from fedbayes.workflows.serve.export import export

SETTINGS = {
    "rounds": 3,
    "data": {"clients": 4, "limit": 800},
    "model": {"hidden": [16]},
    "training": {"optimizer": "sgd", "lr": 0.1, "epochs": 2},
}


def best(loss):
    """The temperature of the least loss of a logarithm of 1 / T."""
    found = minimize_scalar(loss, bounds=(-4, 4), method="bounded", options={"xatol": 1e-10})
    return math.exp(-found.x)


def quality(p, truth):
    """NLL, ECE and accuracy of probabilities of classes."""
    right = torch.from_numpy(p.argmax(axis=1) == truth)
    ece = calibrate(torch.from_numpy(p.max(axis=1)), right).error
    return -np.log(p[np.arange(len(p)), truth]).mean(), ece, float(right.double().mean())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fedbayes.run(**SETTINGS, folder=tmp_path_factory.mktemp("calibrated") / "run")


@pytest.fixture(scope="module")
def held_out(run):
    """Of each client, its training rows less those that a method sees: what it held out."""
    seen = {}
    with Simulation(run.config.model_copy(update={"rounds": 1})) as simulation:
        own = type(simulation.method).local

        def local(self, message, state, samples, at):
            seen[at.client] = samples
            return own(self, message, state, samples, at)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(simulation.method), "local", local)
            list(simulation)
        found = {}
        for client in range(4):
            every, kept = simulation.data.train(client), seen[client]
            rows = {row.tobytes() for row in kept.x.numpy()}
            out = torch.tensor([row.tobytes() not in rows for row in every.x.numpy()])
            assert int(out.sum()) == len(every.y) - len(kept.y) == round(0.1 * len(every.y))
            found[client] = every.x[out], every.y[out]
    return found


def test_the_temperature_is_that_of_the_rows_that_clients_held_out(run, held_out):
    data = stored_data(run.config, run.folder)
    kept = stored_run(run.folder, run.config, data.preprocessing)
    x, y = (torch.cat([part[at] for part in held_out.values()]) for at in (0, 1))
    with torch.no_grad():
        logits = run.config.build_method().draws(run.model, kept)(x)[0].double().numpy()

    def loss(t):
        return -log_softmax(math.exp(t) * logits, axis=1)[np.arange(len(y)), y.numpy()].sum()

    plain = best(loss)
    expected = best(lambda t: loss(t) + 2 * t**2)
    assert plain < expected < 1
    assert run.summary["temperature"] == pytest.approx(expected, rel=1e-5)
    assert run.summary["calibration"]["rows"] == len(y)
    assert run.summary["calibration"]["clients"] == 4
    # 3 sums of each point, and two counts, with a short header.
    least = 4 * 8 * (3 * POINTS + 2)
    assert least < run.summary["calibration"]["bytes_up"] < 1.1 * least


def test_metrics_are_those_of_what_is_predicted(run):
    data = stored_data(run.config, run.folder)
    x, truth = data.raw_test(0, data.test_total), data.test_labels()
    told = run.summary["metrics"]
    for table, p in (
        ("global", run.trained().expectation(x)),
        ("global_uncalibrated", run.trained(temperature=False).expectation(x)),
    ):
        nll, ece, accuracy = quality(p.double().numpy(), truth)
        assert told[table]["nll"] == pytest.approx(nll, rel=1e-4)
        assert told[table]["ece"] == pytest.approx(ece, abs=1e-5)
        assert told[table]["accuracy"] == pytest.approx(accuracy)
    assert told["global"]["nll"] < told["global_uncalibrated"]["nll"]
    assert told["global"]["accuracy"] == told["global_uncalibrated"]["accuracy"]
    assert run.summary["global_nll"] == told["global"]["nll"]
    assert run.summary["global_ece"] == told["global"]["ece"]
    # Rounds are told as they were.
    assert run.metrics[-1]["global_nll"] == told["global_uncalibrated"]["nll"]
    torch.testing.assert_close(run.predictor()(x).exp(), run.trained().expectation(x))
    # Each client's rows, and how clients differ.
    name = run.folder.client_names()[1]
    rows = slice(*data.test_range(1))
    nll, _, _ = quality(run.trained().expectation(x[rows]).double().numpy(), truth[rows])
    assert run.summary["per_client"]["global"][name]["nll"] == pytest.approx(nll, rel=1e-4)
    each = [own["nll"] for own in run.summary["per_client"]["global"].values()]
    assert told["global_mean"]["nll"] == pytest.approx(np.mean(each))
    trusted = trust(run.folder.path)
    assert trusted.metrics["nll"] == pytest.approx(told["global"]["nll"], rel=1e-6)
    assert trusted.calibration.error == pytest.approx(told["global"]["ece"], abs=1e-6)


def test_files_are_at_the_temperature(run, tmp_path, recwarn):
    data = stored_data(run.config, run.folder)
    x = data.raw_test(0, 50)
    wanted, cool = run.trained().expectation(x), run.summary["temperature"]
    own = fedbayes.load(run.folder.model_file)
    assert own.temperature == cool
    torch.testing.assert_close(own.expectation(x), wanted)
    for name in ("model.safetensors", "model.pt2"):
        export(run.folder.path, tmp_path / name)
        torch.testing.assert_close(fedbayes.load(tmp_path / name).expectation(x), wanted)
    program = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(program(x.float()).softmax(dim=1), wanted)
    kept = Card.load(read_model(run.folder.model_file)[1], "the model")
    assert (kept.temperature, kept.of_fused("average").temperature) == (cool, None)
    card = json.loads((tmp_path / "model.pt2.card.json").read_text())
    assert card["metrics"]["nll"] == pytest.approx(run.summary["global_nll"], rel=1e-5)
    assert card["calibration"]["temperature"] == cool
    assert f"at the temperature {cool:.4g}" in card["outputs"]


def test_without_calibration_clients_train_on_all_rows(run):
    sizes = {}
    config = Config.create(**SETTINGS | {"rounds": 1}, calibration="none")
    with Simulation(config) as simulation:
        own = type(simulation.method).local

        def local(self, message, state, samples, at):
            sizes[at.client] = len(samples.y)
            return own(self, message, state, samples, at)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(simulation.method), "local", local)
            list(simulation)
        assert [sizes[c] for c in range(4)] == simulation.data.train_sizes().tolist()
        summary = simulation.summary()
    assert summary["temperature"] is None
    assert "calibration" not in summary
    assert "global_uncalibrated" not in summary["metrics"]
    assert "calibration" not in outcome_rows(summary)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"data": {"name": "diabetes", "clients": 2}},
            "the likelihood gaussian has no temperature",
        ),
        ({"method": {"name": "local"}}, "clients with enough rows fit their own"),
        ({"method": {"name": "fedper"}}, "fedper has no global model"),
        ({"privacy": {"noise": 1.0}, "aggregation": {"clip": 1.0}}, "sums would have no noise"),
        ({"data": {"clients": 12, "limit": 60, "partition": "iid"}}, "no row was counted"),
    ],
)
def test_where_there_is_no_temperature(changes, why, tmp_path, recwarn):
    done = fedbayes.run(**{**SETTINGS, "rounds": 1, **changes}, folder=tmp_path / "run")
    assert done.summary["temperature"] is None
    assert why in done.summary["calibration"]["reason"]
    assert why in outcome_rows(done.summary)["calibration"]
    assert "global_uncalibrated" not in done.summary["metrics"]
    if "limit" not in changes.get("data", {}):  # nothing is held out for nothing
        with Simulation(done.config) as simulation:
            assert simulation.runtime.held_out == (0.1 if "own" in why else 0)


def test_a_run_that_was_stopped_ends_with_the_same_temperature(run, tmp_path):
    with Simulation(run.config, tmp_path / "run") as simulation:
        for step in simulation:
            simulation.stop = step.number == 2
    stopped = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert stopped["temperature"] is None
    assert stopped["calibration"] == {"reason": "the run was interrupted"}
    done = fedbayes.resume(tmp_path / "run")
    for entry in ("temperature", "metrics", "per_client", "calibration"):
        assert done.summary[entry] == run.summary[entry]
    # Killed after its last round, before its end: what is missing is made up for.
    done.folder.summary_file.unlink()
    again = fedbayes.resume(tmp_path / "run")
    assert again.summary["temperature"] == run.summary["temperature"]
    assert again.folder.model_file.read_bytes() == run.folder.model_file.read_bytes()


def test_engines_agree(run, tmp_path):
    there = fedbayes.run(**SETTINGS, engine="workers", workers=1, folder=tmp_path / "run")
    for entry in ("temperature", "metrics", "calibration"):
        assert there.summary[entry] == run.summary[entry]


def test_the_best_round_has_a_temperature_of_its_own(tmp_path):
    settings = {**SETTINGS, "rounds": 6, "training": {"lr": 1.0, "epochs": 3}, "seed": 5}
    done = fedbayes.run(**settings, keep_checkpoints="best", folder=tmp_path / "run")
    summary = done.summary
    assert summary["model_round"] == summary["best_round"] < summary["rounds"]
    data = stored_data(done.config, done.folder)
    x, truth = data.raw_test(0, data.test_total), data.test_labels()
    nll, ece, accuracy = quality(done.trained().expectation(x).double().numpy(), truth)
    assert done.trained().temperature == summary["best_temperature"] != summary["temperature"]
    assert summary["best_global_nll"] == pytest.approx(nll, rel=1e-4)
    assert summary["best_metrics"]["global"]["ece"] == pytest.approx(ece, abs=1e-5)
    assert summary["best_global_accuracy"] == pytest.approx(accuracy)
    plain = done.trained(temperature=False).expectation(x).double().numpy()
    before = summary["best_metrics"]["global_uncalibrated"]["nll"]
    assert before == pytest.approx(quality(plain, truth)[0], rel=1e-4)
    assert f"temperature {summary['best_temperature']:.4f}" in outcome_rows(summary)["calibration"]


def test_calibrating_again_replaces_it(run, tmp_path, capsys, monkeypatch):
    with Simulation(run.config, tmp_path / "run") as simulation:
        list(simulation)
    place = tmp_path / "run"
    monkeypatch.setattr("sys.argv", ["fedbayes", "calibrate", str(place)])
    with pytest.raises(SystemExit):
        main()
    told = " ".join(capsys.readouterr().out.split())
    assert "NLL before calibration" in told
    found = calibrate_temperature(place)
    assert found.replaced == (run.summary["temperature"],) != (found.temperature,)
    assert fedbayes.load(place).temperature == found.temperature
    monkeypatch.setattr("sys.argv", ["fedbayes", "calibrate", str(place), "--temperature"])
    with pytest.raises(SystemExit):
        main()
    told = " ".join(capsys.readouterr().out.split())
    assert f"replaces the temperature {run.summary['temperature']:.4f}" in told
    found.path.unlink()
    assert fedbayes.load(place).temperature == run.summary["temperature"]


def test_reports_tell_both(run):
    (record,) = gather([run.folder.path])
    told = run.summary["metrics"]
    assert record.last("global_nll") == told["global"]["nll"]
    assert record.last("global_uncalibrated_nll") == told["global_uncalibrated"]["nll"]
    assert record.calibration.error == pytest.approx(told["global"]["ece"], abs=1e-6)
    assert record.between["metrics"]["global_mean"] == told["global_mean"]
    page = render([record])
    assert "NLL before calibration" in page
    assert ", before calibration; lower is better" in page
    row = outcome_rows(run.summary)["calibration"]
    assert f"NLL {told['global']['nll']:.4f}, before calibration" in row
    assert words("global_uncalibrated_nll") == "global NLL before calibration"


def test_labels_have_a_temperature():
    target = Target("labels", ("a", "b", "c"))
    likelihood, rng = Multilabel(target=target), torch.Generator().manual_seed(0)
    draws = 3 * torch.randn(4, 300, 3, generator=rng).double()
    y = torch.bernoulli(torch.sigmoid(draws.mean(dim=0) / 2), generator=rng)
    p = expit(draws.numpy()).mean(axis=0)
    logits = np.log(p) - np.log1p(-p)

    def loss(t):
        scaled = math.exp(t) * logits
        return (np.logaddexp(0, scaled) - y.numpy() * scaled).sum()

    owner = torch.arange(300) % 3
    parts = (owner == client for client in range(3))
    one, two, three = (temperature_sums(likelihood, draws[:, own], y[own]) for own in parts)
    sums = one + two + three
    assert sums.rows == 300
    assert sums.temperature() == pytest.approx(best(loss), rel=1e-5)
    cold = at_temperature(likelihood, draws, sums.temperature())
    assert float(likelihood.terms(cold, y)["nll"].sum()) == pytest.approx(
        loss(-math.log(sums.temperature()))
    )
    draws[0, 0, 1] = torch.nan
    odd = temperature_sums(likelihood, draws, y)
    assert (odd.rows, odd.left_out) == (299, 1)


def test_a_run_of_labels(tmp_path, recwarn):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(800, 4))
    y = x[:, :2] + rng.normal(size=(800, 2)) > 0
    table = pd.DataFrame(x, columns=list("abcd")).assign(
        one=y[:, 0].astype(int), two=y[:, 1].astype(int)
    )
    table.to_csv(tmp_path / "rows.csv", index=False)
    done = fedbayes.run(
        rounds=4,
        data={"path": str(tmp_path / "rows.csv"), "label": ["one", "two"], "clients": 3},
        task={"likelihood": "multilabel"},
        training={"lr": 0.5, "epochs": 4},
        folder=tmp_path / "run",
    )
    assert done.summary["temperature"] > 0
    data = stored_data(done.config, done.folder)
    p, truth = (
        done.trained().expectation(data.raw_test(0, data.test_total)).double().numpy(),
        data.test_labels(),
    )
    nll = -(truth * np.log(p) + (1 - truth) * np.log1p(-p)).sum(axis=1).mean()
    assert done.summary["metrics"]["global"]["nll"] == pytest.approx(nll, rel=1e-4)
    frame = done.predict_frame(table)
    whole = done.trained().expectation(table).numpy()
    assert np.allclose(frame[["p_one", "p_two"]], whole)
    assert trust(done.folder.path).metrics["nll"] == pytest.approx(nll, rel=1e-4)
    assert calibrate_temperature(done.folder.path).before.nll > 0


def test_sums_of_strangers_are_checked():
    good = TemperatureSums.nothing().tensors()
    assert _read(encode(good), 10.0).rows == 0
    for bad, words_ in (
        ({}, "no sums"),
        ({"sums": good["sums"]}, "no sums"),
        ({**good, "sums": good["sums"][:2]}, "sums"),
        ({**good, "sums": good["sums"].float()}, "sums"),
        ({**good, "sums": good["sums"] + torch.inf}, "sums"),
        ({**good, "sums": good["sums"] - 1}, "sums"),
        ({**good, "counts": torch.tensor([-1, 0])}, "sums"),
        ({**good, "counts": torch.tensor([11, 0])}, r"the limit is 10 \(aggregation.max_weight\)"),
        ({**good, "sums": torch.zeros(3, 100 * POINTS)}, "the limit is"),
    ):
        with pytest.raises(MessageError, match=words_):
            _read(encode(bad), 10.0)
    with pytest.raises(MessageError):
        _read(b"nothing", 10.0)


def test_who_holds_out_nothing_sends_no_sums(run):
    settings = {**SETTINGS, "rounds": 1, "calibration": "none"}
    with Simulation(Config.create(**settings)) as simulation:
        constants = simulation.network.constants_digest
        task = Task(0, 1, encode(run.model), None, constants, evaluate=(), calibrate=True)
        with pytest.raises(EngineError, match="hold out no samples"):
            simulation.runtime.tried(task)
        assert simulation.runtime.tried(replace(task, calibrate=False)).scores["count"] > 0


def test_of_many_clients_some_hold_out(run):
    kept = stored_run(run.folder, run.config, run.preprocessing)
    many = replace(kept, clients=5 * MOST_CALIBRATING)
    chosen = calibrating(many)
    assert len(set(chosen)) == MOST_CALIBRATING
    assert max(chosen) > 4 * MOST_CALIBRATING
    assert chosen == calibrating(many) != calibrating(replace(many, seed=1))
    assert list(calibrating(kept)) == [0, 1, 2, 3]


def test_what_is_worse_than_a_guess():
    classes = Target("class", ("a", "b", "c", "d"))
    for nll, accuracy, said in (
        (math.log(4) + 0.01, 0.9, "its NLL is"),
        (math.inf, 0.9, "its NLL is"),
        (1.0, 0.24, "its accuracy is 0.2400, for a uniform guess it is 0.2500"),
        (math.log(4), 0.25, ""),
        (math.nan, math.nan, ""),
    ):
        found = below_chance({"nll": nll, "accuracy": accuracy}, classes)
        assert found.startswith(said) if said else not found
    labels = Target("labels", ("a", "b"))
    assert below_chance({"nll": 1.4}, labels)
    assert not below_chance({"nll": 1.38}, labels)
    real = Target("real", ("y",), (0.0,), (1.0,))
    assert "R²" in below_chance({"r2": -0.1, "nll": 5.0}, real)
    assert not below_chance({"r2": 0.1, "nll": 5.0}, real)
    survival = Target("survival", ("time", "event"))
    assert "C-index" in below_chance({"c_index": 0.4}, survival)
    bad = {"nll": 2.0, "accuracy": 0.5}
    assert warning({"metrics": {"global": bad}}, classes).startswith("the global model is worse")
    assert "clients' own" in warning({"metrics": {"global": {}, "local": bad}}, classes)
    assert not warning({"metrics": {"global": {}, "local": {}}}, classes)
    # The saved model counts.
    saved = {"best_metrics": {"global": {"nll": 1.0}}}
    assert not warning({"metrics": {"global": bad}, **saved}, classes)


def test_a_summary_warns_of_a_model_that_is_worse_than_a_guess(tmp_path, recwarn):
    with Simulation(Config.create(**SETTINGS | {"rounds": 1})) as simulation:
        list(simulation)
        summary = simulation.summary()
    assert "warning" not in summary
    done = fedbayes.run(
        **SETTINGS | {"training": {"lr": 20.0}, "rounds": 1}, folder=tmp_path / "run"
    )
    if done.summary["metrics"]["global"]["nll"] > math.log(10):
        assert "worse than a guess" in outcome_rows(done.summary)["warning"]
        assert any("worse than a guess" in note for note in gather([done.folder.path])[0].notes)
    else:
        pytest.fail("the example is not bad enough")


def test_a_classifier_predicts_at_its_temperature():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 5))
    y = (x[:, 0] + rng.normal(size=600) > 0).astype(int)
    settings = {"rounds": 4, "training": {"lr": 0.5, "epochs": 4}, "random_state": 0}
    model = FederatedClassifier(**settings).fit(x, y)
    assert model.temperature_ > 0
    p = model.predict_proba(x)
    model._federation.temperature = None
    plain = model.predict_proba(x) ** (1 / model.temperature_)
    assert np.allclose(p, plain / plain.sum(axis=1, keepdims=True))
    none = FederatedClassifier(**settings, settings={"calibration": "none"}).fit(x, y)
    assert none.temperature_ is None
    FederatedRegressor(rounds=1, random_state=0).fit(x, x[:, 0]).predict(x)


def test_clients_elsewhere_send_their_sums(run, tmp_path, monkeypatch):
    pytest.importorskip("flwr")
    there = fedbayes.run(
        **SETTINGS, engine="flower-simulation", evaluate_at="clients", folder=tmp_path / "run"
    )
    assert there.summary["temperature"] == pytest.approx(run.summary["temperature"], rel=1e-9)
    nll = there.summary["metrics"]["global"]["nll"]
    assert nll == pytest.approx(run.summary["metrics"]["global"]["nll"], rel=1e-6)
    own = ClientRuntime.tried

    def broken(self, task):
        if task.calibrate:
            raise MessageError("it cannot")
        return own(self, task)

    monkeypatch.setattr(ClientRuntime, "tried", broken)
    without = fedbayes.run(
        **SETTINGS | {"rounds": 1}, engine="flower-simulation", folder=tmp_path / "other"
    )
    assert without.summary["temperature"] is None
    assert "no client sent sums" in outcome_rows(without.summary)["calibration"]
