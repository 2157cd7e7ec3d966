"""Robust averaging against SciPy, brute force, and clients that lie."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import trim_mean

from fedbayes.contracts import Gathered, Report
from fedbayes.experiment.config import Config
from fedbayes.experiment.run import Simulation
from fedbayes.federation.checks import decode_report, encode_report
from fedbayes.federation.engines import Sequential
from fedbayes.inference.robust import krum, median, trimmed_mean
from fedbayes.methods.robust import Robust
from fedbayes.testing import Tampering
from tests.methods.places import FEDERATION, network

POINTS = st.integers(0, 10**6).map(
    lambda seed: np.random.default_rng(seed).normal(size=(3 + seed % 9, 4))
)


@given(POINTS, st.floats(0, 0.49))
def test_trimmed_mean_and_median(points, share):
    found = trimmed_mean(torch.from_numpy(points), share)
    np.testing.assert_allclose(found, trim_mean(points, share, axis=0))
    np.testing.assert_allclose(median(torch.from_numpy(points)), np.median(points, axis=0))


@given(POINTS, st.integers(0, 2))
@settings(max_examples=40)
def test_krum_by_brute_force(points, hostile):
    near = max(1, len(points) - hostile - 2)
    scores = []
    for i, own in enumerate(points):
        others = sorted(((own - p) ** 2).sum() for j, p in enumerate(points) if j != i)
        scores.append(sum(others[:near]))
    found = krum(torch.from_numpy(points), hostile, 2).tolist()
    assert found == np.argsort(scores, kind="stable")[:2].tolist()


def test_changes_are_clipped():
    net = network()
    method = Robust(rule="mean", clip=1.0)
    server = method.init(net, FEDERATION)
    reports = Gathered()
    for client, step in enumerate((1e-3, 100.0)):
        tensors = {n: w + step for n, w in server.weights.items()}
        reports.add(client, Report(tensors))
    after, info = method.update(server, reports)
    moved = torch.cat([(after.weights[n] - w).flatten() for n, w in server.weights.items()])
    size = len(moved)
    expected = (1e-3 + 1 / size**0.5) / 2
    torch.testing.assert_close(moved, torch.full((size,), expected), rtol=1e-4, atol=1e-7)
    assert info["clipped"] == 0.5


def lie(task, outcome):
    """Two of ten clients report weights that are large and finite."""
    if task.client not in (1, 4):
        return outcome
    report = decode_report(outcome.report, EXPECTED)
    big = {name: 50.0 * torch.ones_like(tensor) for name, tensor in report.tensors.items()}
    return replace(outcome, report=encode_report(Report(big)))


EXPECTED = {}


@pytest.mark.parametrize("rule", ["mean", "median", "trimmed-mean", "krum", "multi-krum"])
def test_liars_spoil_the_mean_alone(rule, tmp_path):
    config = Config.create(
        rounds=6,
        data={"name": "digits", "clients": 10, "partition": "iid"},
        model={"hidden": [16]},
        training={"epochs": 5},
        method={"name": "robust", "rule": rule, "hostile": 2, "trim": 0.25},
    )
    with Simulation(config, tmp_path) as simulation:
        EXPECTED.update(simulation.party.network.initial)
        simulation._engine = Tampering(Sequential(simulation.party), lie)
        accuracy = [step.metrics["global_accuracy"] for step in simulation][-1]
        EXPECTED.clear()
    assert accuracy < 0.3 if rule == "mean" else accuracy > 0.8
