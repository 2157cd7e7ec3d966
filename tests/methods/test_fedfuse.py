"""FedFuse: the average, the ensemble learnt on drawn inputs, and the way between the two."""

import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import nn
from torch.nn import functional

from fedbayes import Config, Simulation
from fedbayes.contracts import Report, ReportList, RoundContext
from fedbayes.core.targets import Target
from fedbayes.errors import ConfigError, MessageError, ModelError
from fedbayes.fusion.combining import combine
from fedbayes.fusion.rounds import draws_of_round, module_with
from fedbayes.likelihoods import build_likelihood
from fedbayes.methods import fedfuse
from fedbayes.methods.fedfuse import FedFuse
from fedbayes.models import Network
from fedbayes.models.networks import MLP
from fedbayes.models.resize import with_weights
from tests.helpers.places import at, network, run_of, samples


def reports(models, weights, counts=None):
    """Of clients with these networks, samples, and samples of each class."""
    found = ReportList()
    for client, (model, weight) in enumerate(zip(models, weights, strict=True)):
        tensors = dict(model)
        if counts is not None:
            tensors["counts"] = torch.tensor(counts[client])
        found.add(client, Report(tensors, float(weight)))
    return found


def updated(method, net, models, weights, counts=None, **run):
    run = run_of(net, **run)
    start = method.init(run)
    return method.update(start, reports(models, weights, counts), at(run))


def test_clients_who_are_one_stay_where_they_are():
    """Their ensemble says what their average says, so there is nothing to be learnt."""
    net = network((5,))
    method = FedFuse(steps=20, drawn=64, class_shares=False)
    models = [net.initial] * 3
    server, info = updated(method, net, models, [4, 1, 7])
    assert info["divergence"] <= info["divergence_of_average"] < 1e-8
    for name, tensor in net.initial.items():
        torch.testing.assert_close(server.weights[name], tensor, atol=2e-3, rtol=0)


def test_the_mean_of_linear_logits_is_the_mean_of_weights():
    """With equal shares of every class, a linear network's teacher is almost linear.

    Its best network is near the average up to a shift of all logits, which the loss does not see.
    """
    net = network(())
    models = [
        {
            name: t + torch.randn(t.shape, generator=torch.Generator().manual_seed(client)) * 0.1
            for name, t in net.initial.items()
        }
        for client in range(2)
    ]
    method = FedFuse(steps=400, drawn=512, seek=0.0, server_lr=0.01, keep=0.0)
    server, info = updated(method, net, models, [30, 30], [[10, 10, 10], [10, 10, 10]])
    average = combine(models, [0.5, 0.5])
    assert info["divergence_of_average"] < 1e-3
    for name, tensor in average.items():
        learnt = server.weights[name]
        torch.testing.assert_close(
            learnt - learnt.mean(0), tensor - tensor.mean(0), atol=6e-2, rtol=0
        )


def permuted(net, seed):
    """The same function with its hidden units in another order."""
    order = torch.randperm(16, generator=torch.Generator().manual_seed(seed))
    names = list(net.initial)
    first, bias, second = names[0], names[1], names[2]
    return {
        **net.initial,
        first: net.initial[first][order],
        bias: net.initial[bias][order],
        second: net.initial[second][:, order],
    }


def test_what_averaging_mixes_up_is_learnt_again():
    """Permuted copies of one network have an average that says something else."""
    net = network((16,), seed=3)
    models = [permuted(net, seed) for seed in range(3)]
    method = FedFuse(steps=300, drawn=512, class_shares=False, server_lr=0.01, keep=0.25)
    server, info = updated(method, net, models, [1, 1, 1])
    assert info["divergence"] < 0.1 * info["divergence_of_average"]
    # What goes out lies on the line from the average to what was learnt.
    learnt, _ = updated(method.model_copy(update={"keep": 0.0}), net, models, [1, 1, 1])
    average = combine(models, [1 / 3] * 3)
    for name, tensor in server.weights.items():
        expected = 0.25 * average[name] + 0.75 * learnt.weights[name]
        torch.testing.assert_close(tensor, expected, atol=1e-5, rtol=0)


def test_inputs_are_the_same_in_a_round_and_others_in_the_next():
    net = network((5,))
    method, run = FedFuse(), run_of(net)
    one, again, other = (
        draws_of_round(method.inputs, at(run, round=number)).batch(0, 8) for number in (1, 1, 2)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_frozen_weights_stay_frozen():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = MLP(4, (5,), 3)
    frozen = next(iter(dict(module.named_parameters())))
    module.get_parameter(frozen).requires_grad_(False)
    net = Network(module, shape=(4,))
    moved = {name: t + 0.3 for name, t in net.initial.items()}
    method = FedFuse(steps=5, drawn=64, class_shares=False)
    server, _ = updated(method, net, [net.initial, moved], [1, 1])
    assert frozen not in server.weights
    built = module_with(server.weights, run_of(net))
    assert torch.equal(built.get_parameter(frozen), net.constants[frozen])


def test_clients_count_their_classes():
    net = network((5,))
    run, method = run_of(net), FedFuse()
    data = samples(n=20)
    problem = method.problem(net.initial, None, data, at(run))
    assert problem.given["counts"].tolist() == [int((data.y == k).sum()) for k in range(3)]


def test_real_numbers_are_learnt_too():
    """The mixture of the clients' means."""
    net = network((8,), classes=1)
    target = Target("real", ("y",), center=(0.0,), scale=(1.0,))
    likelihood = build_likelihood("gaussian", target, noise=1.0)
    other = with_weights(net.module, {n: 1.5 * t for n, t in net.initial.items()})
    models = [net.initial, dict(other.state_dict())]
    method = FedFuse(steps=300, drawn=512, class_shares=False, server_lr=0.01, keep=0.0)
    server, info = updated(method, net, models, [1, 1], likelihood=likelihood)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(5))
    mean = sum(net(model, x) for model in models) / 2
    far = (net(combine(models, [0.5, 0.5]), x) - mean).square().mean()
    assert (net(server.weights, x) - mean).square().mean() < 0.2 * far
    assert info["divergence"] < info["divergence_of_average"]


def test_refusals():
    net = network((5,))
    run = run_of(net)
    permuted = replace(run, preprocessing=replace(run.preprocessing, permuted=True))
    with pytest.raises(ConfigError, match="its own"):
        FedFuse().check(permuted)
    with pytest.raises(ConfigError, match="gives photographs"):
        FedFuse(inputs="leaves").check(run)
    named = MLP(4, (5,), 3)
    named.register_parameter("counts", torch.nn.Parameter(torch.zeros(3)))
    clash = run_of(Network(named, shape=(4,)))
    with pytest.raises(ModelError, match="has a weight of that name"):
        FedFuse().check(clash)
    FedFuse(class_shares=False).check(clash)


def test_real_rows_at_the_server_are_encoded_as_the_clients_are(tmp_path):
    """A table with categories and gaps, of which some rows without labels lie at the server."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame(
        {
            "age": np.where(rng.random(120) < 0.2, np.nan, rng.normal(60, 10, 120)),
            "sex": rng.choice(["f", "m"], 120),
            "died": rng.choice(["no", "yes"], 120),
        }
    )
    table.to_csv(tmp_path / "patients.csv", index=False)
    table.drop(columns="died").head(70).to_csv(tmp_path / "server.csv", index=False)
    config = Config.create(
        data={"path": tmp_path / "patients.csv", "label": "died", "clients": 2},
        model={"hidden": [4]},
        method={"name": "fedfuse", "steps": 3, "drawn": 64, "inputs": f"{tmp_path / 'server.csv'}"},
        rounds=1,
    )
    with Simulation(config) as simulation:
        seen = simulation.run.preprocessing
        drawn = draws_of_round(simulation.method.inputs, RoundContext(simulation.run, 1)).batch(
            0, 64
        )
        rows = seen.apply(table.drop(columns="died").head(70))
        assert all(torch.isclose(row, rows, atol=1e-5).all(1).any() for row in drawn)
        assert len(list(simulation)) == 1


@pytest.mark.parametrize("kept", ["calibration", "validation", "none"])
def test_each_client_sends_the_temperature_of_rows_that_it_does_not_train_on(kept, monkeypatch):
    """Against the minimum that SciPy finds of −log p and a normal prior of log T."""
    seen, teach = [], fedfuse.teacher_of
    monkeypatch.setattr(fedfuse, "teacher_of", lambda *a: seen.append(a) or teach(*a))
    config = Config.create(
        method={"name": "fedfuse", "steps": 2, "drawn": 64},
        rounds=1,
        data={"clients": 3, "limit": 600, "validation": 0.3 if kept == "validation" else 0},
        calibration="temperature" if kept == "calibration" else "none",
    )
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        with Simulation(config) as simulation:
            runtime = simulation.runtime
            list(simulation)
            rows = [
                runtime.parts(client)[1] if kept == "calibration" else runtime.data.test(client)
                for client in range(3)
            ]
    told = any("no client has rows to fit a temperature" in str(n.message) for n in noted)
    assert told == (kept == "none")
    networks, _, _, found, *_ = seen[0]
    if kept == "none":
        assert found == [None] * 3
        return
    for module, (x, y), warmth in zip(networks.values(), rows, found, strict=True):
        with torch.no_grad():
            f = module(x).double()

        def loss(log, f=f, y=y):
            return float(functional.cross_entropy(f / np.exp(log), y, reduction="sum")) + 2 * log**2

        best = minimize_scalar(loss, bounds=(-3, 3), method="bounded", options={"xatol": 1e-8})
        assert warmth == pytest.approx(np.exp(best.x), rel=1e-4)


@pytest.mark.parametrize("mirrored", [True, False])
def test_a_photograph_counts_with_its_mirror_image(mirrored, monkeypatch):
    taught, learn = [], fedfuse.distill
    monkeypatch.setattr(fedfuse, "distill", lambda _, t, *a: taught.append(t) or learn(_, t, *a))
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 3))
    weight = module[1].weight.data.reshape(3, 3, 8, 8)
    weight += 0.5 * weight.flip(-1)
    net = Network(module, shape=(3, 8, 8))
    method = FedFuse(steps=5, drawn=64, seek=0.0, mirrored=mirrored)
    _, info = updated(method, net, [net.initial] * 2, [30, 30], [[10, 10, 10], [10, 10, 10]])
    assert info["mirrored"] == mirrored
    x = torch.randn(5, 3, 8, 8)
    both = taught[0](x).softmax(1), taught[0](x.flip(-1)).softmax(1)
    assert torch.allclose(*both, atol=1e-6) == mirrored


@pytest.mark.parametrize("warmth", [-1.0, 1e-9, 1e9])
def test_a_temperature_that_no_client_fits_is_rejected(warmth):
    net = network((5,))
    method, run = FedFuse(class_shares=False), run_of(net)
    report = Report({**net.initial, fedfuse.TEMPERATURE: torch.tensor(warmth)}, 3.0)
    with pytest.raises(MessageError, match="its temperature is"):
        method.accept(method.init(run), report, run)
