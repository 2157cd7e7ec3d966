"""FedPA: what a client answers, and rounds that end at the pooled mean of a linear regression."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from fedbayes import Config, Simulation
from fedbayes.contracts import Stateless, Sum
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples
from fedbayes.errors import ConfigError, FedbayesWarning
from fedbayes.inference.sampling import sampled
from fedbayes.likelihoods import build_likelihood
from fedbayes.methods.fedavg import FedAvg
from fedbayes.methods.fedpa import FedPa
from fedbayes.models import Network
from tests.helpers.places import at, network, run_of, samples

SOLVED = {"lr": 0.05, "steps": 20, "batch_size": 4}


def answered(method, net, **more):
    """A client's report, and its samples gathered once more."""
    run = run_of(net, **{**SOLVED, **more})
    here, data = at(run), samples(n=12)
    message = method.message(method.init(run), here)
    report, _, info = method.local(message, Stateless(), data, here)
    problem, loss = method.problem(message, Stateless(), data, here), method.loss(run)
    every = max(1, (20 - int(20 * method.burn_in)) // method.samples)
    _, found = sampled(
        problem,
        lambda stated: here.solve(stated, loss, data),
        list(net.initial),
        burn_in=int(20 * method.burn_in),
        every=every,
        averaged=True,
    )
    return report, found, info


@pytest.mark.parametrize("count", [3, 4, 10])
def test_an_answer_is_the_weights_less_the_corrected_drift(count):
    """By the inverse of a dense covariance, from the last so many samples."""
    net = network((5,))
    method = FedPa(burn_in_rounds=0, samples=count, burn_in=0.4, shrinkage=2.0)
    report, found, info = answered(method, net)
    x = np.concatenate([t.flatten(1).double().numpy() for t in found.values()], axis=1)[-count:]
    start = np.concatenate([t.double().numpy().ravel() for t in net.initial.values()])
    level = 1 / (1 + (count - 1) * 2.0)
    covariance = level * np.eye(len(start)) + (1 - level) * np.cov(x.T)
    expected = start - np.linalg.solve(covariance, start - x.mean(0))
    answer = np.concatenate([report.tensors[name].numpy().ravel() for name in net.initial])
    np.testing.assert_allclose(answer, expected, atol=1e-5)
    assert info["posterior_samples"] == count


def test_the_first_rounds_and_clients_of_one_step_are_averaged():
    net = network((5,))
    run, data = run_of(net, **SOLVED), samples(n=12)
    wanted = {}
    for method in (FedAvg(), FedPa(burn_in_rounds=1)):
        here = at(run)
        message = method.message(method.init(run), here)
        report, _, _ = method.local(message, Stateless(), data, here)
        for name, tensor in report.tensors.items():
            assert torch.equal(wanted.setdefault(name, tensor), tensor)
    single = run_of(net, **{**SOLVED, "steps": 1})
    report, _, info = FedPa(burn_in_rounds=0).local(net.initial, Stateless(), data, at(single))
    other, _, _ = FedAvg().local(net.initial, Stateless(), data, at(single))
    assert info["posterior_samples"] == 1
    for name, tensor in other.tensors.items():
        assert torch.equal(report.tensors[name], tensor)


def test_without_shrinkage_towards_samples_it_is_averaging_of_means():
    net = network((5,))
    method = FedPa(burn_in_rounds=0, samples=2, burn_in=0.0, shrinkage=0.0)
    report, found, _ = answered(method, net)
    for name, drawn in found.items():
        torch.testing.assert_close(report.tensors[name], drawn[-2:].mean(0), atol=1e-6, rtol=1e-5)


def test_a_client_that_diverges_is_refused_and_the_others_count():
    """Client 1 has inputs of another size, by which its steps overflow."""
    config = Config.published(
        rounds=1,
        data={"name": "digits", "clients": 3, "limit": 90},
        model={"hidden": 4},
        training={"epochs": 5, "batch_size": 4},
        method={"name": "fedpa", "burn_in_rounds": 0},
    )
    with Simulation(config) as simulation:
        data, whole = simulation.runtime.data, simulation.runtime.data.train
        data.train = lambda client: (
            whole(client)._replace(x=whole(client).x * 1e30) if client == 1 else whole(client)
        )
        (step,) = simulation
    assert list(step.metrics["refused"]) == ["1"]
    assert "NaN" in step.metrics["refused"]["1"]
    assert not step.metrics["skipped"]


def regressions():
    """Clients whose rows and slopes differ: their own solutions, and that of the pool."""
    rng = torch.Generator().manual_seed(0)
    scales = [torch.tensor([1.5, 0.7]), torch.tensor([0.7, 1.5])]
    clients = []
    for slopes, scale in zip(([[1.0], [2.0]], [[-1.0], [0.0]]), scales, strict=True):
        x = torch.randn(40, 2, generator=rng) * scale
        clients.append(Samples(x, x @ torch.tensor(slopes) + torch.randn(40, 1, generator=rng)))
    x, y = torch.cat([c.x for c in clients]).double(), torch.cat([c.y for c in clients]).double()
    return clients, torch.linalg.lstsq(x, y).solution.flatten()


def ended(method, rounds):
    """Mean weights of the last rounds of a run on the regressions."""
    clients, pooled = regressions()
    net = Network(nn.Sequential(nn.Linear(2, 1, bias=False)), shape=(2,))
    target = Target("real", ("y",), center=(0.0,), scale=(1.0,))
    likelihood = build_likelihood("gaussian", target, noise=1.0)
    settings = {"lr": 0.1, "steps": 180, "batch_size": 40}
    run = run_of(net, clients=2, cohort=2, rounds=rounds, likelihood=likelihood, **settings)
    server, tail = method.init(run), []
    for number in range(1, rounds + 1):
        reports = Sum()
        for client, data in enumerate(clients):
            here = at(run, client=client, round=number)
            message = method.message(server, here)
            report, _, _ = method.local(message, Stateless(), data, here)
            reports.add(client, report)
        server, _ = method.update(server, reports, at(run, round=number))
        tail.append(server.weights["0.weight"].flatten().double())
    return torch.stack(tail[-5:]).mean(0), pooled


def test_linear_regression_ends_at_the_pooled_mean_where_averaging_does_not():
    """Langevin samples of each client's posterior, and plain steps of the server."""
    averaged, pooled = ended(FedAvg(weighting="uniform"), 3)
    assert float((averaged - pooled).norm()) > 0.5
    method = FedPa(
        burn_in_rounds=0,
        sampler="langevin",
        samples=150,
        burn_in=0.15,
        shrinkage=100.0,
        weighting="uniform",
        server_lr=0.012,
    )
    found, _ = ended(method, 10)
    assert float((found - pooled).norm()) < 0.12


def test_refusals_and_remarks():
    net = network((5,))
    with pytest.raises(ConfigError, match=r"Leave training\.patience out"):
        FedPa().check(run_of(net, patience=2))
    with pytest.raises(ConfigError, match="Langevin"):
        FedPa(sampler="langevin").check(run_of(net, optimizer="adam"))
    FedPa().check(run_of(net, optimizer="adam"))
    assert "all 5 rounds" in FedPa().remarks(run_of(net))[0]
    assert FedPa(burn_in_rounds=4).remarks(run_of(net)) == []


def test_clients_with_too_few_steps_for_samples_are_counted_before_the_first_round():
    config = {
        "rounds": 2,
        "data": {"name": "digits", "clients": 4, "partition": "counts", "test_counts": [1] * 10}
        | {"class_counts": [[2] * 10, [2] * 10, [2] * 10, [6] * 10]},
        "training": {"batch_size": 20},
        "method": {"name": "fedpa", "burn_in_rounds": 1},
    }
    with pytest.warns(FedbayesWarning, match="3 of 4 clients use federated averaging"):
        Simulation(Config.published(**config)).close()
    config["training"]["epochs"] = 4
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*federated averaging")
        Simulation(Config.published(**config)).close()
