"""Differential privacy: sensitivity, noise, and the accounting against a closed form."""

import builtins
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedbayes
from fedbayes.contracts import Federation, Report
from fedbayes.errors import ConfigError, ModelError
from fedbayes.inference.privacy import epsilon
from fedbayes.methods.private import ClippedSum, PrivateFedAvg
from fedbayes.models import Network
from tests.methods.places import FEDERATION, network


def closed_form(noise, steps, delta):
    """Rényi divergence of Gaussians is α / (2 z²) a step; converted as Canonne et al. (2020)."""
    best = math.inf
    for alpha in np.concatenate([np.arange(1.01, 11, 0.1), np.arange(11, 64)]):
        divergence = alpha * steps / (2 * noise**2)
        found = (
            divergence
            + math.log((alpha - 1) / alpha)
            - (math.log(delta) + math.log(alpha)) / (alpha - 1)
        )
        best = min(best, found)
    return best


@pytest.mark.parametrize(("noise", "steps"), [(1.0, 1), (2.0, 10), (5.0, 100), (0.8, 3)])
def test_epsilon_without_sampling(noise, steps):
    assert epsilon(noise, 1.0, steps, 1e-5) == pytest.approx(
        closed_form(noise, steps, 1e-5), rel=0.02
    )


def test_sampling_amplifies_and_rounds_add():
    assert epsilon(1.0, 0.1, 50, 1e-5) < 0.3 * epsilon(1.0, 1.0, 50, 1e-5)
    assert epsilon(1.0, 0.1, 50, 1e-5) < epsilon(1.0, 0.1, 100, 1e-5)
    assert epsilon(1.0, 0.1, 0, 1e-5) == 0.0


@given(st.integers(0, 10**6), st.floats(0.01, 10))
def test_one_client_changes_the_sum_by_the_norm_at_most(seed, norm):
    stream = torch.Generator().manual_seed(seed)
    shapes = {"a": (3, 2), "b": (4,)}
    centre = {n: torch.randn(s, generator=stream) for n, s in shapes.items()}
    scale = 10 ** float(torch.rand((), generator=stream) * 6 - 3)
    reports = [
        Report(
            {n: centre[n] + scale * torch.randn(s, generator=stream) for n, s in shapes.items()},
            weight=1.0 + client,
        )
        for client in range(4)
    ]
    whole, without = ClippedSum(centre=centre, norm=norm), ClippedSum(centre=centre, norm=norm)
    for client, report in enumerate(reports):
        whole.add(client, report)
        if client != 2:
            without.add(client, report)
    difference = torch.cat([(whole.tensors[n] - without.tensors[n]).flatten() for n in shapes])
    assert float(difference.norm()) <= norm * (1 + 1e-9)


def test_small_changes_are_summed_as_they_are():
    centre = {"a": torch.ones(5)}
    total = ClippedSum(centre=centre, norm=10.0)
    for client, step in enumerate((0.5, -0.25)):
        total.add(client, Report({"a": torch.ones(5) + step}, weight=7.0))
    assert torch.equal(total.tensors["a"], torch.full((5,), 0.25, dtype=torch.float64))
    assert total.clipped == 0


def test_noise_on_the_weights():
    """Deviation z C / B of every weight, whatever the number of reports."""
    net = network(hidden=(200,), inputs=50)
    method = PrivateFedAvg(clip=0.5, noise_multiplier=3.0)
    server = method.init(net, Federation(clients=100, cohort=10, rounds=5, classes=3, seed=1))

    def moved(method):
        reports = method.reports(server)
        for client in range(4):
            reports.add(client, Report(dict(server.weights)))
        after, _ = method.update(server, reports)
        return torch.cat([(after.weights[n] - w).flatten() for n, w in server.weights.items()])

    noise = moved(method)
    assert float(noise.std()) == pytest.approx(3.0 * 0.5 / 10, rel=0.02)
    assert abs(float(noise.mean())) < 4 * 0.15 / len(noise) ** 0.5
    assert torch.equal(noise, moved(method))
    secret = PrivateFedAvg(clip=0.5, noise_multiplier=3.0, noise="secret")
    assert not torch.equal(moved(secret), moved(secret))


def test_a_cycle_has_no_amplification():
    """In a fixed cycle a client takes part in every tenth sum, for certain."""
    method = PrivateFedAvg()
    start = Federation(clients=100, cohort=10, rounds=50, classes=3, seed=1, cyclic=True)
    server = method.init(network(), start)
    for _ in range(20):
        reports = method.reports(server)
        reports.add(0, Report(dict(server.weights)))
        server, info = method.update(server, reports)
    assert info["epsilon"] == pytest.approx(epsilon(1.0, 1.0, 2, 1e-5))


def test_buffers_are_refused():
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    with pytest.raises(ModelError, match="running_mean"):
        PrivateFedAvg().init(Network(module), FEDERATION)


def test_a_run_tells_epsilon(tmp_path):
    run = fedbayes.run(
        rounds=5,
        cohort=0.5,
        data={"name": "digits", "clients": 20, "partition": "iid"},
        method={"name": "dp-fedavg", "noise_multiplier": 1.2, "clip": 2.0, "delta": 1e-3},
        folder=tmp_path / "run",
    )
    assert run.summary["epsilon"] == pytest.approx(epsilon(1.2, 0.5, 5, 1e-3))
    assert run.summary["delta"] == 1e-3
    spent = [line["epsilon"] for line in run.metrics]
    assert spent == sorted(spent)
    assert 0 < spent[0] < spent[-1]


def test_without_opacus_nothing_starts(tmp_path, monkeypatch):
    real = builtins.__import__

    def missing(name, *rest, **more):
        if name.startswith("opacus"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r"fedbayes\[privacy\]"):
        fedbayes.run(rounds=1, method={"name": "dp-fedavg"}, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
