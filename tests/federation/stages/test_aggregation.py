"""Clipping and robust rules, against NumPy and SciPy."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import trim_mean

from fedbayes import Config, Simulation, run
from fedbayes.contracts import About, Report, Weights
from fedbayes.contracts.changes import clipped
from fedbayes.errors import ConfigError
from fedbayes.federation.stages.aggregation import (
    Aggregation,
    fold,
)
from fedbayes.methods.fedavg import FedAvg

CENTRE = {"a": torch.zeros(4, 3), "b": torch.ones(5), "steps": torch.tensor(3)}
DATA = {"name": "digits", "clients": 7, "partition": "iid"}


def reports(count, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [
        {
            "a": torch.randn(4, 3, generator=rng),
            "b": torch.randn(5, generator=rng),
            "steps": torch.tensor(7),
        }
        for _ in range(count)
    ]


def middle(rule, found, **settings):
    aggregation = Aggregation(rule=rule, **settings)
    reduction = folding(aggregation)
    for client, report in enumerate(found):
        # Weights are the clients' own claims and count for nothing here.
        reduction.add(client, Report(report, 10.0**client))
    assert reduction.clients == len(found)
    return reduction.reduced().mean()


def folding(aggregation):
    """A fold of FedAvg's reports whose server is at the centre."""
    network = SimpleNamespace(initial=CENTRE, buffers=())
    run = SimpleNamespace(network=network)
    return fold(aggregation, FedAvg(), Weights(CENTRE), run)


def stacked(found, name):
    return np.stack([report[name].double().numpy() for report in found])


@pytest.mark.parametrize("count", [4, 7])
def test_median_and_trimmed_mean_are_those_of_numpy_and_scipy(count):
    found = reports(count)
    median, trimmed = middle("median", found), middle("trimmed-mean", found, hostile=1)
    for name in ("a", "b"):
        np.testing.assert_allclose(median[name], np.median(stacked(found, name), 0), rtol=1e-6)
        mean = trim_mean(stacked(found, name), 1.01 / count, axis=0)
        np.testing.assert_allclose(trimmed[name], mean, rtol=1e-6)
        assert median[name].dtype == torch.float32
    assert median["steps"] == 7


def test_krum_is_its_definition():
    found = reports(8)
    found[2] = {name: t + 100 for name, t in found[2].items()}
    flat = np.concatenate([stacked(found, n).reshape(8, -1) for n in ("a", "b")], 1)
    scores = []
    for one in range(8):
        distances = sorted(
            ((flat[one] - flat[other]) ** 2).sum() for other in range(8) if other != one
        )
        scores.append(sum(distances[: 8 - 2 - 2]))
    chosen = np.argsort(scores)[: 8 - 2]
    assert 2 not in chosen
    krum = middle("krum", found, hostile=2)
    for name in ("a", "b"):
        np.testing.assert_allclose(krum[name], stacked(found, name)[chosen].mean(0), rtol=1e-5)


@pytest.mark.parametrize("clip", [0.5, 1e6])
def test_clipping_bounds_the_norm_of_every_part(clip):
    rng = np.random.default_rng(0)
    parts = {
        "weights": {"a": rng.normal(size=(4, 3)), "b": rng.normal(size=5)},
        "control": {"control/a": 100 * rng.normal(size=(4, 3))},
    }
    changes = {
        part: {n: torch.from_numpy(x) for n, x in tensors.items()}
        for part, tensors in parts.items()
    }
    changes["counters"] = {"steps": torch.tensor(7.0)}
    bounded = clipped(changes, clip)
    assert bounded["counters"]["steps"] == 7
    for part, tensors in parts.items():
        length = np.linalg.norm(np.concatenate([x.ravel() for x in tensors.values()]))
        for name, x in tensors.items():
            np.testing.assert_allclose(bounded[part][name], x * min(1, clip / length), rtol=1e-12)


def test_a_clipped_mean_keeps_the_weights():
    found = reports(2)
    aggregation = Aggregation(clip=1e6)
    reduction = folding(aggregation)
    for client, weight in enumerate((1.0, 3.0)):
        reduction.add(client, Report(found[client], weight))
    mean = (stacked(found, "b") * [[0.25], [0.75]]).sum(0)
    np.testing.assert_allclose(reduction.reduced().mean()["b"], mean, rtol=1e-6)


class Attacked(FedAvg):
    """FedAvg of which one client sends a huge model, with a huge weight."""

    name = "attacked"
    about = About("one client is hostile")
    hostile: int = 1

    def local(self, message, client, data, site):
        report, client_state, info = super().local(message, client, data, site)
        if site.client < self.hostile:
            huge = {name: torch.full_like(t, 3.0) for name, t in report.tensors.items()}
            report = Report(huge, 1e6)
        return report, client_state, info


@pytest.mark.slow
def test_robust_rules_withstand_what_ruins_the_mean():
    common = {"rounds": 5, "data": DATA, "min_reports": 7}
    attacked = {"name": "tests.federation.stages.test_aggregation:Attacked"}
    ruined = run(method=attacked, aggregation={"max_change": 0}, **common)
    calm = run(method={**attacked, "hostile": 0}, **common)
    assert ruined.summary["global_accuracy"] < 0.3
    for rule in ("median", "trimmed-mean", "krum"):
        rules = {"rule": rule, "hostile": 1, "max_change": 0}
        held = run(method=attacked, aggregation=rules, **common)
        assert held.summary["global_accuracy"] > calm.summary["global_accuracy"] - 0.15, rule


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"aggregation": {"noise": 1.0}}, "did you mean 'privacy.noise'"),
        ({"aggregation": {"delta": 1e-6}}, "did you mean 'privacy.delta'"),
        ({"aggregation": {"rule": "krum", "hostile": 1}}, "min_reports of at least 5"),
        ({"aggregation": {"rule": "trimmed-mean", "hostile": 1}}, "min_reports of at least 3"),
        (
            {"aggregation": {"rule": "median"}, "method": {"name": "pfnm"}},
            "its updates are not averaged",
        ),
        (
            {"aggregation": {"clip": 1.0}, "method": {"name": "global"}},
            "not work with global: it pools all data",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        Simulation(Config.create(**settings))
