"""SCAFFOLD: control variates against gradients counted by hand."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

import fedbayes
from fedbayes import Config, Simulation
from fedbayes.contracts import Clips
from fedbayes.contracts.changes import norm
from fedbayes.core.messages import decode, decode_file, dense
from fedbayes.core.tensors import part, unpack
from fedbayes.errors import ConfigError
from fedbayes.inference.controls import (
    corrected,
    distribution_of,
    mean_gradient,
    no_norms,
    usual,
)
from fedbayes.inference.solve import batches
from fedbayes.methods.fedsparse import ScaffoldFedSparse
from fedbayes.methods.scaffold import Control, Scaffold
from fedbayes.testing import assert_identical
from tests.helpers.places import at, network, run_of, samples


def gradient(weights, x, y):
    leaves = [t.clone().requires_grad_() for t in weights]
    functional.cross_entropy(x @ leaves[0].T + leaves[1], y).backward()
    return [leaf.grad for leaf in leaves]


def setting(option, **training):
    net = network(dtype=torch.double)
    method = Scaffold(control=option, damping=0.7)
    server = method.init(run_of(net))
    rng = torch.Generator().manual_seed(0)

    def random():
        return {n: torch.randn(w.shape, generator=rng).double() for n, w in server.weights.items()}

    server = type(server)(**{**vars(server), "control": random()})
    place = at(net, batch_size=5, epochs=2, lr=0.1, **training)
    return method, server, Control(random()), place, samples(dtype=torch.double)


def test_the_new_variate_is_the_mean_gradient_on_the_way():
    method, server, own, place, data = setting("path")
    report, after, _ = method.local(method.message(server, place), own, data, place)
    names = ["1.weight", "1.bias"]
    weights = [server.weights[n].clone() for n in names]
    add = [0.7 * (server.control[n] - own.control[n]) for n in names]
    total = [torch.zeros_like(w) for w in weights]
    sizes = place.run.training.batch_sizes(len(data.y))
    steps = list(batches(data, sizes, 6, place.rng("batches")))
    for batch in steps:
        found = gradient(weights, batch.x, batch.y)
        total = [t + g for t, g in zip(total, found, strict=True)]
        weights = [w - 0.1 * (g + a) for w, g, a in zip(weights, found, add, strict=True)]
    for index, name in enumerate(names):
        torch.testing.assert_close(report.tensors[name], weights[index])
        torch.testing.assert_close(after.control[name], total[index] / len(steps))
        change = after.control[name] - own.control[name]
        torch.testing.assert_close(report.tensors["control/" + name], change)


def test_the_other_option_is_the_gradient_at_the_servers_weights():
    method, server, own, place, data = setting("gradient", momentum=0.9)
    _, after, _ = method.local(method.message(server, place), own, data, place)
    names = ["1.weight", "1.bias"]
    found = gradient([server.weights[n] for n in names], data.x, data.y)
    for name, expected in zip(names, found, strict=True):
        torch.testing.assert_close(after.control[name], expected)


def test_the_gradient_at_the_servers_weights_moves_no_running_statistics():
    """In the first round variates are zero, so that clients train as without any."""
    ends = []
    for method in (
        {"name": "scaffold", "control": "gradient"},
        {"name": "reptile", "weighting": "uniform"},
    ):
        config = fedbayes.Config.published(
            rounds=1,
            data={"name": "digits", "clients": 2, "limit": 60},
            model={"name": "tests.helpers.toy_models:normalized"},
            training={"lr": 0.05, "batch_size": 8},
            method=method,
        )
        with Simulation(config) as simulation:
            list(simulation)
            ends.append(simulation.method.model(simulation.server, simulation.run))
    assert any("running_var" in name for name in ends[0])
    assert_identical(*ends)


def test_a_linear_term_adds_to_every_gradient():
    weights = {"a": torch.randn(3, requires_grad=True)}
    loss = corrected(lambda w, *_: w["a"].square().sum())
    loss(weights, samples(), {"correction": {"a": torch.tensor([1.0, 2.0, 3.0])}}, {}).backward()
    expected = 2 * weights["a"].detach() + torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(weights["a"].grad, expected)


def test_the_gradient_over_pieces_is_that_of_the_whole():
    net, data = network(dtype=torch.double), samples(13, dtype=torch.double)

    def objective(weights, batch, given, noise):
        return functional.cross_entropy(net(weights, batch.x), batch.y)

    pieces = mean_gradient(net.initial, objective, data, [4, 4, 4, 1], ["1.bias"])
    whole = mean_gradient(net.initial, objective, data, [13], ["1.bias"])
    torch.testing.assert_close(pieces["1.bias"], whole["1.bias"])


@pytest.mark.parametrize("method", ["scaffold", "scaffold-fedsparse"])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_variates_of_the_clients_sum_to_the_servers(method, weighting, tmp_path):
    """With a part of the clients in each round; those never heard have variates of zero. By
    samples, the weight of all clients is taken for their number times the mean of the reports.
    """
    config = fedbayes.Config.published(
        rounds=5,
        cohort=3,
        data={"name": "digits", "clients": 12, "partition": "dirichlet", "alpha": 0.5},
        model={"hidden": [8]},
        method={"name": method, "weighting": weighting},
    )
    heard = []
    with Simulation(config, tmp_path) as simulation:
        sizes = [len(simulation.data.train(client).y) for client in range(12)]
        for step in simulation:
            heard += [sizes[client] for client in simulation.cohort_of(step.number)]
        assert len(set(sizes)) > 6
        known = sorted(simulation.states)
        states = [unpack(Control, dense(decode(simulation.states[c]))) for c in known]
        assert 3 < len(states) <= 12
        weights = [sizes[c] if weighting == "samples" else 1 for c in known]
        total = 12 * (sum(heard) / len(heard) if weighting == "samples" else 1)
        for name, c in simulation.server.control.items():
            summed = sum(n * s.control[name] for n, s in zip(weights, states, strict=True))
            left = simulation.server.weights[name] != 0  # of units that are pruned nobody speaks
            torch.testing.assert_close(c[left], (summed / total)[left], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_without_correction_it_is_fedavg(weighting):
    shared = {
        "rounds": 3,
        "model": {"hidden": [8]},
        "data": {"name": "digits", "clients": 4},
        "training": {"lr": 0.2},
    }
    own = {"weighting": weighting}
    one = fedbayes.run(method={"name": "scaffold", "damping": 0.0, **own}, **shared)
    two = fedbayes.run(method={"name": "fedavg", **own}, **shared)
    for name, tensor in two.model.items():
        torch.testing.assert_close(one.model[name], tensor, rtol=1e-4, atol=1e-5)
    assert one.summary["bytes_up"] > 1.9 * two.summary["bytes_up"]
    assert one.summary["bytes_down"] > 1.9 * two.summary["bytes_down"]


@pytest.mark.slow
def test_clients_that_drift_apart_reach_the_common_optimum():
    """Full batches on a convex problem, weighted by samples: FedAvg stops beside the optimum of
    all data, SCAFFOLD at it.
    """
    shared = {
        "rounds": 60,
        "data": {"name": "digits", "clients": 5, "partition": "shards", "limit": 300},
        "model": {"hidden": []},
        "training": {"lr": 0.2, "steps": 20, "batch_size": 300, "weight_decay": 0.01},
    }
    losses = {}
    for name in ("fedavg", "scaffold"):
        with Simulation(fedbayes.Config.published(method={"name": name}, **shared)) as s:
            for step in s:
                model = step.server.weights
            slopes = []
            for client in range(5):
                data = s.data.train(client)
                found = gradient([model["1.weight"], model["1.bias"]], data.x.flatten(1), data.y)
                slopes.append(len(data.y) * (found[0] + 0.01 * model["1.weight"]))
            losses[name] = float(torch.stack(slopes).sum(dim=0).norm()) / 300
    assert losses["scaffold"] < 0.1 * losses["fedavg"]


@pytest.mark.parametrize("training", [{"optimizer": "adam"}, {"momentum": 0.5}])
@pytest.mark.parametrize("name", ["scaffold", "scaffold-fedsparse"])
def test_other_optimizers_are_refused(name, training, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"training.optimizer = 'sgd'"):
        fedbayes.run(method={"name": name}, training=training, rounds=1, folder=folder)
    assert not folder.exists()


def test_under_clipping_the_servers_variate_remains_the_mean_of_the_clients():
    config = Config.published(
        rounds=3,
        data={"name": "digits", "clients": 4, "limit": 400},
        model={"hidden": [16]},
        aggregation={"clip": 0.2},
        method={"name": "scaffold", "weighting": "uniform"},
    )
    with Simulation(config) as simulation:
        for step in simulation:
            assert not step.metrics["refused"]
        states = [unpack(Control, decode_file(simulation.states[c])) for c in range(4)]
        server = simulation.server.control
    for name, control in server.items():
        assert control.any()
        mean = torch.stack([state.control[name] for state in states]).mean(0)
        torch.testing.assert_close(mean, control, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["scaffold", "scaffold-fedsparse"])
def test_clipping_is_for_clients_that_weigh_alike(method):
    """The server clips weight times change, and a client does not know what it weighs."""
    with pytest.raises(ConfigError, match=r"know what the server adds .*but aggregation.clip"):
        fedbayes.run(method={"name": method}, aggregation={"clip": 0.2}, rounds=1)


@pytest.mark.parametrize("method", [Scaffold(), ScaffoldFedSparse()])
def test_what_a_clipped_client_keeps_is_what_it_sent(method):
    run = replace(run_of(network([5]), lr=0.5), clips=Clips(0.05))
    place = at(run)
    message = method.message(method.init(run), place)
    report, after, _ = method.local(message, method.join(place), samples(), place)
    sent = part(dense(report.tensors), "control")
    assert norm(t.double() for t in sent.values()) == pytest.approx(0.05, rel=1e-5)
    for name, change in sent.items():
        torch.testing.assert_close(after.control[name], change)


@given(st.lists(st.floats(1e-5, 1e5), min_size=1, max_size=9), st.floats(0.1, 1))
def test_the_median_is_read_from_what_adds(norms, factor):
    """Of the mean of distributions (a multiple of it too), and of their coordinate-wise median, of
    which PyTorch has the lower one of two, so that of norms the upper one.
    """
    each = torch.stack([distribution_of(norm) for norm in norms])
    low, high = sorted(norms)[(len(norms) - 1) // 2], sorted(norms)[len(norms) // 2]
    for summed, middle in (
        (each.mean(0), low),
        (factor * each.mean(0), low),
        (each.median(0).values, high),
    ):
        assert middle * (1 - 1e-9) <= usual(summed) <= middle * 2**0.25 * (1 + 1e-9)
    assert usual(no_norms()) == math.inf


@pytest.mark.parametrize(
    ("name", "ratio"),
    [("scaffold", None), ("scaffold", 0.5), ("scaffold", 1e6), ("scaffold-fedsparse", 0.5)],
)
def test_no_variate_is_longer_than_the_bound(name, ratio):
    """Norms of what clients keep, recomputed from their states round by round."""
    config = Config.published(
        rounds=4,
        data={"name": "digits", "clients": 5, "limit": 400, "partition": "shards"},
        model={"hidden": [16]},
        method={"name": name, **({"variate_bound": ratio} if ratio else {})},
    )
    before = math.inf
    with Simulation(config) as simulation:
        for step in simulation:
            assert not step.metrics["refused"]
            states = [unpack(Control, decode_file(simulation.states[c])) for c in range(5)]
            norms = [norm(c.double() for c in s.control.values()) for s in states]
            said = step.metrics["reported"]
            if ratio is None:
                assert "variate_norm" not in said
                continue
            assert max(norms) <= ratio * before * (1 + 1e-5)
            if ratio == 0.5 and step.metrics["round"] > 1:
                assert said["variates_shortened"] > 0
            before = usual(simulation.server.norms)
        for tensor, control in simulation.server.control.items():
            sizes = [len(simulation.data.train(client).y) for client in range(5)]
            shares = [size / sum(sizes) for size in sizes]
            mean = sum(p * s.control[tensor] for p, s in zip(shares, states, strict=True))
            left = simulation.server.weights[tensor] != 0
            assert left.any()
            torch.testing.assert_close(mean[left], control[left], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["scaffold", "scaffold-fedsparse"])
def test_without_effect_a_bound_changes_nothing(name):
    shared = {"rounds": 3, "model": {"hidden": [8]}, "data": {"name": "digits", "clients": 4}}
    one = fedbayes.run(method={"name": name}, **shared)
    two = fedbayes.run(method={"name": name, "variate_bound": 1e9}, **shared)
    for name, tensor in one.model.items():
        assert torch.equal(two.model[name], tensor)


@pytest.mark.parametrize("method", ["scaffold", "scaffold-fedsparse"])
def test_a_variate_that_explodes_is_named(method, tmp_path):
    """One client of five with samples ten times as large."""
    config = Config.published(
        rounds=1,
        data={"name": "digits", "clients": 5, "limit": 400, "partition": "iid"},
        model={"hidden": [16]},
        method={"name": method},
        aggregation={"max_change": 0},  # which would reject it
    )
    with Simulation(config, tmp_path) as simulation:
        train = simulation.data.train

        def larger(client):
            found = train(client)
            return found._replace(x=found.x * (10 if client == 3 else 1))

        simulation.runtime.data.train = larger
        (step,) = list(simulation)
    (name,) = step.metrics["outliers"]
    assert name == "3"
    assert "'control'" in step.metrics["outliers"]["3"]
