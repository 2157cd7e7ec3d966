"""Clipping, robust rules and central differential privacy, against NumPy and formulas."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm, trim_mean

from fedbayes import Config, Simulation, resume, run
from fedbayes.contracts import Report, Weights
from fedbayes.contracts.changes import changes_of
from fedbayes.errors import ConfigError
from fedbayes.federation.aggregation import (
    Aggregation,
    Private,
    clipped,
    epsilon,
    fold,
    noise_rng,
)
from fedbayes.federation.fold import Way
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
    reduction = folding(aggregation, len(found))
    for client, report in enumerate(found):
        # Weights are the clients' own claims and count for nothing here.
        reduction.add(client, Report(report, 10.0**client))
    assert reduction.clients == len(found)
    return reduction.reduced().mean()


def folding(aggregation, cohort):
    """A fold of FedAvg's reports whose server is at the centre."""
    real = {name: t for name, t in CENTRE.items() if t.is_floating_point()}
    network = SimpleNamespace(initial=CENTRE, split=lambda: (real, {}))
    run = SimpleNamespace(network=network)
    return fold(aggregation, FedAvg(), Weights(CENTRE), run, cohort, noise_of(1))


def noise_of(number, key=b"k" * 32):
    return lambda digest: noise_rng(key, number, digest)


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
    reduction = folding(aggregation, 2)
    for client, weight in enumerate((1.0, 3.0)):
        reduction.add(client, Report(found[client], weight))
    mean = (stacked(found, "b") * [[0.25], [0.75]]).sum(0)
    np.testing.assert_allclose(reduction.reduced().mean()["b"], mean, rtol=1e-6)


class Attacked(FedAvg):
    """FedAvg of which one client sends a huge model, with a huge weight."""

    name = "attacked"
    summary = "one client is hostile"
    hostile: int = 1

    def local(self, message, client, data, site):
        report, client_state, info = super().local(message, client, data, site)
        if site.client < self.hostile:
            huge = {name: torch.full_like(t, 3.0) for name, t in report.tensors.items()}
            report = Report(huge, 1e9)
        return report, client_state, info


def test_robust_rules_withstand_what_ruins_the_mean():
    common = {"rounds": 5, "data": DATA, "min_reports": 7}
    attacked = {"name": "tests.test_aggregation:Attacked"}
    ruined = run(method=attacked, **common)
    calm = run(method={**attacked, "hostile": 0}, **common)
    assert ruined.summary["global_accuracy"] < 0.3
    for rule in ("median", "trimmed-mean", "krum"):
        held = run(method=attacked, aggregation={"rule": rule, "hostile": 1}, **common)
        assert held.summary["global_accuracy"] > calm.summary["global_accuracy"] - 0.15, rule


def test_noise_has_the_deviation_that_is_claimed():
    big = {"a": torch.zeros(40_000)}
    way = Way(lambda r: {"weights": changes_of(r, big, "unknown")}, lambda t: t.whole(big))
    private = Private(way, clip=2.0, noise=1.5, cohort=10, rng=noise_of(1))
    for client in range(6):  # of 10: the divisor tells nobody how many reported
        private.add(client, Report({"a": torch.full((40_000,), 1.0)}, 1e9))
    mean = private.reduced().mean()["a"].double()
    change = 2.0 / math.sqrt(40_000)
    assert float(mean.mean()) == pytest.approx(6 * change / 10, abs=4 * 0.3 / 200)
    assert float(mean.std()) == pytest.approx(1.5 * 2.0 / 10, rel=0.02)
    assert torch.equal(private.reduced().mean()["a"], private.reduced().mean()["a"])


def test_noise_differs_by_round_by_key_and_by_what_it_goes_on():
    def draw(key, number, digest):
        return noise_rng(key, number, digest).standard_normal()

    drawn = {
        draw(key, number, digest)
        for key in (b"1", b"2")
        for number in (1, 2)
        for digest in (b"x", b"y")
    }
    assert len(drawn) == 8


@pytest.mark.parametrize(("noise", "times"), [(1.0, 1), (8.0, 100)])
def test_epsilon_is_that_of_the_exact_formula(noise, times):
    """Balle and Wang 2018, Theorem 8; a client that is replaced moves the sum by 2 C."""
    pytest.importorskip("dp_accounting")
    mu = 2 * math.sqrt(times) / noise

    def delta(eps):
        tail = norm.logcdf(-mu / 2 - eps / mu)
        return norm.cdf(mu / 2 - eps / mu) - math.exp(eps + tail)

    exact = brentq(lambda eps: delta(eps) - 1e-5, 0, 200)
    assert epsilon(noise, 1e-5, times) == pytest.approx(exact, rel=1e-6)


def test_epsilon_agrees_with_the_accountant_and_takes_no_time_with_little_noise():
    pytest.importorskip("dp_accounting")
    from dp_accounting import GaussianDpEvent, NeighboringRelation
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(NeighboringRelation.REPLACE_ONE)
    accountant.compose(GaussianDpEvent(2.0), 20)
    assert epsilon(2.0, 1e-5, 20) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)
    assert 1e4 < epsilon(0.01, 1e-5, 100) < math.inf


def test_noise_is_refused_where_it_would_go_on_running_statistics():
    with pytest.raises(ConfigError, match=r"running statistics too .*running_mean.*GroupNorm"):
        run(
            rounds=1,
            data={"name": "digits", "clients": 3},
            model={"name": "tests.toy_models:normalized"},
            aggregation={"clip": 1.0, "noise": 1.0},
        )


def test_a_private_run_resumes_to_the_same_model_and_tells_epsilon(tmp_path):
    pytest.importorskip("dp_accounting")
    private = {"clip": 1.0, "noise": 1.0}
    config = Config.create(rounds=4, cohort=3, data=DATA, aggregation=private, seed=5)
    whole = run(config, tmp_path / "whole")
    counts = np.zeros(7)
    with Simulation(config, tmp_path / "cut") as simulation:
        (tmp_path / "cut" / "noise.key").write_bytes(
            (tmp_path / "whole" / "noise.key").read_bytes()
        )
        steps = iter(simulation)
        next(steps), next(steps)
        for number in range(1, 5):
            counts[simulation.cohort_of(number)] += 1
    resumed = resume(tmp_path / "cut")
    for name, weights in whole.model.items():
        assert torch.equal(resumed.model[name], weights)
    assert whole.summary["epsilon"] == epsilon(1.0, 1e-5, int(counts.max()))
    assert (tmp_path / "whole" / "noise.key").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"aggregation": {"noise": 1.0}}, "needs aggregation.clip"),
        ({"aggregation": {"noise": 1.0, "clip": 1.0, "rule": "median"}}, "needs aggregation.clip"),
        ({"aggregation": {"noise": 1.0, "clip": 1.0}, "checkpoint_every": 2}, "checkpoint_every"),
        ({"aggregation": {"rule": "krum", "hostile": 1}}, "min_reports of at least 5"),
        ({"aggregation": {"rule": "trimmed-mean", "hostile": 1}}, "min_reports of at least 3"),
        ({"aggregation": {"rule": "median"}, "method": {"name": "pfnm"}}, "whose reports add"),
        ({"aggregation": {"clip": 1.0}, "method": {"name": "global"}}, "whose reports add"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        Simulation(Config.create(**settings))
