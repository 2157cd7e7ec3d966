"""PFNM and GPI-FNM as methods of the engine."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedbayes
from fedbayes import Config, Simulation
from fedbayes.contracts import Known, Report, RoundContext
from fedbayes.core.messages import dense
from fedbayes.errors import ConfigError, ModelError
from fedbayes.federation.client_runtime import Task
from fedbayes.federation.engines.sequential import Sequential
from fedbayes.federation.stages.checks import encode_report, read_report
from fedbayes.matching import Dense, MatchingSettings, match_networks
from fedbayes.methods.matching import GpiFnm, Pfnm
from fedbayes.models import dense_layers, relu_network
from fedbayes.runs.cohorts import sample_cohort
from fedbayes.testing import Tampering

PAPER = {"optimizer": "amsgrad", "lr": 0.01, "weight_decay": 1e-5}
"""How clients train in Table 1 of the paper."""


def config(**changes):
    settings = {
        "rounds": 2,
        "data": {"name": "digits", "clients": 4, "limit": 600},
        "model": {"hidden": [12, 9]},
        "training": {"epochs": 10, "optimizer": "adam", "lr": 0.01},
        "method": {"name": "gpi-fnm"},
        **changes,
    }
    return Config.published(**settings)


def test_a_client_starts_from_its_own_columns(tmp_path):
    """w_sj = Σ_i A_ij θ_i; its size stays, while the global one is free."""
    with Simulation(config(), tmp_path) as simulation:
        method = simulation.method
        here = simulation.runtime.at(Task(0, 1, b"", None))
        assert method.message(simulation.server, here) == {}, "a newcomer starts from its own"
        own = here.own_network().initial
        start = method.problem({}, method.join(here), simulation.data.train(0), here).start
        assert all(torch.equal(start[name], tensor) for name, tensor in own.items())
        assert not torch.equal(own["1.weight"], simulation.network.initial["1.weight"])
        step = next(iter(simulation))
        layers = dense_layers(method.model(step.server, simulation.run), "m")
        sizes = [len(layer.weight) for layer in layers[:-1]]
        assert sizes == [step.metrics["update"][f"neurons_{i}"] for i in (1, 2)]
        assert 12 <= sizes[0] <= 48
        for client in range(4):
            sent = dense(method.message(step.server, RoundContext(simulation.run, 2, client)))
            places = [step.server.places[f"{client}/{depth}"] for depth in (0, 1)]
            assert [len(own) for own in places] == [12, 9]
            chosen = [torch.zeros(12, sizes[0]), torch.zeros(9, sizes[1])]
            for matrix, own in zip(chosen, places, strict=True):
                matrix[torch.arange(len(own)), own] = 1.0
            one, two, three = layers
            torch.testing.assert_close(sent["0.weight"], chosen[0] @ one.weight)
            torch.testing.assert_close(sent["0.bias"], chosen[0] @ one.bias)
            torch.testing.assert_close(sent["1.weight"], chosen[1] @ two.weight @ chosen[0].T)
            torch.testing.assert_close(sent["2.weight"], three.weight @ chosen[1].T)
            torch.testing.assert_close(sent["2.bias"], three.bias)


def test_one_round_is_one_shot_fusion(tmp_path):
    """The engine's first round fuses what `fedbayes.fuse` fuses."""
    parameters = {"epsilon": 0.2, "sigma0": 2.0, "gamma": 2.0, "iterations": 0, "alternations": 0}
    run = fedbayes.run(config(rounds=1, method={"name": "gpi-fnm", **parameters}), tmp_path)
    server = run.server()
    models = [
        {
            f"{depth}.{kind}": server.latest[f"{client}/{depth}.{kind}"]
            for depth in range(3)
            for kind in ("weight", "bias")
        }
        for client in range(4)
    ]
    counts = [server.latest[f"{client}/counts"].tolist() for client in range(4)]
    fusion = fedbayes.fuse(models, counts=counts, **parameters)
    for one, two in zip(fusion.layers, dense_layers(run.model, "m"), strict=True):
        torch.testing.assert_close(one.weight, two.weight)
        torch.testing.assert_close(one.bias, two.bias)
    x = torch.randint(17, (5, 64))
    seen = run.preprocessing.apply(x)
    expected = torch.log_softmax(relu_network(fusion.layers, seen), dim=-1)
    torch.testing.assert_close(run.predictor()(x), expected)


def test_rounds_help(tmp_path):
    run = fedbayes.run(config(rounds=5, method={"name": "pfnm"}), tmp_path)
    accuracies = [line["global_accuracy"] for line in run.metrics]
    assert accuracies[-1] > accuracies[0]
    assert accuracies[-1] > 0.7


def test_a_round_begins_where_the_last_one_ended(tmp_path):
    """Passes go on from the places that every client had, and only lower the objective."""
    method, drawn = GpiFnm(), np.random.default_rng(0)
    networks = [
        Dense(
            [drawn.normal(0, 1, (7, 5)), drawn.normal(0, 1, (6, 7)), drawn.normal(0, 1, (3, 6))],
            [drawn.normal(0, 1, n) for n in (7, 6, 3)],
        )
        for _ in range(4)
    ]
    settings = MatchingSettings(alternations=12)
    cold = match_networks(networks, settings)
    places = [[layer.assignments[s] for layer in cold.layers] for s in range(4)]
    warm = match_networks(networks, settings, start=places)
    assert warm.objective[0] == pytest.approx(cold.objective[-1])
    # Names of global neurons mean nothing, nor do those that nobody has.
    others = [[10 + 3 * own for own in client] for client in places]
    assert match_networks(networks, settings, start=others).objective == warm.objective
    random = [[drawn.permutation(9)[:n] for n in (7, 6)] for _ in range(4)]
    values = match_networks(networks, settings, start=random).objective
    assert all(after <= before for before, after in itertools.pairwise(values))
    with pytest.raises(ValueError, match="alternations"):
        match_networks(networks, MatchingSettings(), start=places)
    assert method.warm
    run = fedbayes.run(
        config(rounds=3, cohort=3, method={"name": "gpi-fnm", "form": "wide"}), tmp_path
    )
    seen, flags = set(), [line["update"]["warm"] for line in run.metrics]
    for number, flag in enumerate(flags, start=1):
        cohort = set(sample_cohort(0, number, 4, 3))
        assert flag == float(bool(seen) and cohort <= seen)
        seen |= cohort


@pytest.mark.parametrize(
    ("model", "mean"),
    [({}, 0.0), ({"init": "normal"}, 0.1), ({"init": "xavier", "init_bias": -0.3}, -0.3)],
)
def test_the_mean_of_biases_is_where_they_start(model, mean):
    with Simulation(config(model={"hidden": [5, 4], **model})) as simulation:
        run = simulation.run
    assert GpiFnm().settled(run).bias_mean == pytest.approx(mean)
    assert GpiFnm(bias_mean=0.7).settled(run).bias_mean == 0.7
    wide, published = GpiFnm(form="wide").settled(run), GpiFnm(form="published").settled(run)
    assert (wide.sigma0, wide.gamma, wide.epsilon, wide.alternations) == (10.0, 45.0, 1.0, 12)
    assert published == MatchingSettings(bias_mean=wide.bias_mean)
    form = GpiFnm().recommended(Known(run, 600, 150))["method.form"]
    assert form == ("wide" if mean else "published")
    assert Pfnm().settled(run) == published.model_copy(update={"epsilon": 0.0})
    assert GpiFnm(form="wide", gamma=2.0).settled(run) == wide.model_copy(update={"gamma": 2.0})


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize("training", [{}, PAPER])
def test_many_rounds_on_mnist(training, tmp_path):
    """With the defaults, and trained as in the paper: at least .94 from the second round on."""
    run = fedbayes.run(
        folder=tmp_path,
        rounds=8,
        method={"name": "gpi-fnm"},
        data={"name": "mnist", "clients": 15, "partition": "dirichlet", "alpha": 0.4},
        model={"hidden": [100, 100], "init": "normal" if training else "default"},
        training={"epochs": 10, **training},
    )
    assert min(line["global_accuracy"] for line in run.metrics[1:]) >= 0.94


def test_absent_clients_are_matched_by_their_last_report(tmp_path):
    run = fedbayes.run(config(rounds=3, cohort=2), tmp_path)
    taken = {int(name.partition("/")[0]) for name in run.server().places}
    seen = set()
    for line in run.metrics:
        assert line["cohort"] == 2
    for number in range(1, 4):
        seen |= set(sample_cohort(0, number, 4, 2))
    assert taken == seen


def test_bytes_fall_with_the_own_columns(tmp_path):
    """Down goes a client's own network and no more; the first time nothing."""
    run = fedbayes.run(config(), tmp_path)
    weights = 4 * (64 * 12 + 12 + 12 * 9 + 9 + 9 * 10 + 10)
    first, second = run.metrics
    assert first["bytes_down"] < 4 * 40
    assert 4 * weights < second["bytes_down"] < 4 * (weights + 1000)


def test_negative_counts_are_refused_by_name(tmp_path, monkeypatch):
    honest = GpiFnm.report

    def report(self, solved, problem, client, at):
        report, state, info = honest(self, solved, problem, client, at)
        if at.client == 1:
            report.tensors["counts"] -= 1000
        return report, state, info

    monkeypatch.setattr(GpiFnm, "report", report)
    config = {"data": {"name": "digits", "clients": 3}, "method": {"name": "gpi-fnm"}}
    ended = fedbayes.run(**config, rounds=1, training={"epochs": 1})
    assert ended.metrics[0]["refused"] == {"1": "its counts of classes are negative"}


def test_a_client_whose_data_grow_counts_as_it_was_and_is_not_refused():
    """Its counts of classes are lowered with its weight: neither can grow."""
    settings = Config.published(
        data={"name": "digits", "clients": 3, "limit": 300},
        model={"name": "mlp", "init": "normal", "hidden": [8]},
        method={"name": "pfnm"},
        rounds=2,
        training={"epochs": 1},
    )
    counts = []

    def tamper(task, outcome):
        if task.client != 1 or task.round == 1:
            return outcome
        report = read_report(outcome.report)
        counts.append(report.tensors["counts"])
        more = {**report.tensors, "counts": 2 * report.tensors["counts"]}
        return replace(outcome, report=encode_report(Report(more, 2 * report.weight)))

    with Simulation(settings) as simulation:
        simulation._engine = Tampering(Sequential(simulation.runtime), tamper)
        lines = [step.metrics for step in simulation]
        latest = simulation.server.latest["1/counts"]
    assert [line["refused"] for line in lines] == [{}, {}]
    assert "is used" in lines[1]["troubles"]["1"]
    assert torch.equal(latest, counts[0])


def test_class_shares_may_stay_at_home(tmp_path):
    run = fedbayes.run(config(method={"name": "gpi-fnm", "class_shares": False}), tmp_path)
    assert not any(name.endswith("counts") for name in run.server().latest)


def test_only_fully_connected_networks(tmp_path):
    with pytest.raises(ModelError, match="no linear layer"):
        fedbayes.run(
            method={"name": "pfnm"},
            model={"name": "lenet5"},
            data={"path": str(_images(tmp_path)), "partition": "iid", "clients": 2},
        )
    with pytest.raises(ModelError, match="at least two"):
        fedbayes.run(config(model={"hidden": []}), tmp_path / "flat")
    with pytest.raises(ConfigError, match="epsilon"):
        config(method={"name": "pfnm", "epsilon": 0.5})


def _images(folder):
    rng = np.random.default_rng(0)
    path = folder / "images.npz"
    x, y = rng.random((40, 1, 16, 16), dtype=np.float32), np.arange(40) % 2
    np.savez(path, x=x, y=y)
    return path


def test_metrics_hold_the_sizes(tmp_path):
    fedbayes.run(config(rounds=1), tmp_path)
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert {"neurons_1", "neurons_2", "objective"} <= line["update"].keys()
