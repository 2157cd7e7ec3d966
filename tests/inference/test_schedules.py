"""Learning rates over rounds, at the clients and at the server."""

import math

import pytest
import torch

import fedbayes
from fedbayes import Config, Simulation
from fedbayes.errors import ConfigError, FedbayesWarning
from fedbayes.inference import optimizers
from fedbayes.inference.schedules import factor
from fedbayes.testing import assert_identical

SHARED = {
    "rounds": 4,
    "data": {"name": "digits", "clients": 3, "limit": 90},
    "model": {"hidden": 4},
}


def falling(round, rounds):
    return 1 - (round - 1) / rounds


def ending(round, rounds):
    return float(rounds - round)


def broken(round, rounds):
    return 1 / (3 - round)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("constant", [1, 1, 1, 1]),
        ("exponential", [1, 0.5, 0.25, 0.125]),
        ("step", [1, 1, 0.5, 0.5]),
        ("cosine", [(1 + math.cos(math.pi * t / 4)) / 2 for t in range(4)]),
        (f"{__name__}:falling", [1, 0.75, 0.5, 0.25]),
    ],
)
def test_factors(name, wanted):
    assert [factor(name, 0.5, 2, number, 4) for number in (1, 2, 3, 4)] == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("linear", "expected|must be one of constant, exponential, step, cosine, or package"),
        ("nowhere:schedule", "cannot find the schedule 'nowhere:schedule'"),
        (f"{__name__}:ending", "returns 0 in round 4 of 4"),
        (f"{__name__}:broken", "fails in round 3 of 4: ZeroDivisionError"),
    ],
)
@pytest.mark.parametrize("whose", ["training", "method"])
def test_schedules_that_give_no_rate_are_refused_before_the_first_round(
    place, words, whose, tmp_path
):
    own = {"training": {"schedule": place}}
    if whose == "method":
        own = {"method": {"name": "reptile", "server_schedule": place}}
    with pytest.raises(ConfigError, match=words):
        fedbayes.run(folder=tmp_path / "run", **SHARED, **own)
    assert not (tmp_path / "run").exists()


def test_an_own_schedule_is_the_clients_and_is_stored(tmp_path):
    """Halved in round 2 by a function, and by `step`."""
    ends = []
    for number, schedule in enumerate(({"schedule": "cosine"}, {"schedule": f"{__name__}:half"})):
        result = fedbayes.run(folder=tmp_path / str(number), training=schedule, **SHARED)
        ends.append(result.model)
        assert Config.stored(tmp_path / str(number) / "config.toml").training.schedule
    assert_identical(*ends)


def half(round, rounds):
    return 0.5 * (1 + math.cos(math.pi * (round - 1) / max(rounds, 1)))


METHODS = [
    {"name": "reptile"},
    {"name": "fedavgm"},
    {"name": "fedadam"},
    {"name": "fedadam", "bias_correction": False},
    {"name": "fedyogi"},
    {"name": "fedyogi", "bias_correction": True},
    {"name": "scaffold", "server_optimizer": "adam"},
    {"name": "feddrop", "server_optimizer": "yogi"},
    {"name": "fedl1"},
    {"name": "fedpa", "server_optimizer": "adam"},
    {"name": "mixture"},
    {"name": "mixture", "server_optimizer": "adam"},
    {"name": "laplace", "m_step": "sign", "server_lr": 1e-3},
    {"name": "laplace", "server_optimizer": "adam"},
    {"name": "fedsparse", "prune": False},
    {"name": "scaffold-fedsparse", "prune": False},
]


@pytest.mark.filterwarnings("ignore::fedbayes.errors.FedbayesWarning")
@pytest.mark.parametrize("method", METHODS, ids=lambda m: " ".join(map(str, m.values())))
def test_the_servers_steps_follow_its_schedule(method):
    """A run whose schedule halves the rate after round 1 moves half as far in round 2 as one that
    goes on: from the same state, along the same reports.
    """
    moved = {}
    for schedule in ("constant", "step"):
        own = {"server_schedule": schedule, "server_decay_every": 1, "server_decay": 0.5}
        with Simulation(Config.create(method=method | own, **SHARED)) as simulation:
            steps = iter(simulation)
            before = simulation.method.model(next(steps).server, simulation.run)
            after = simulation.method.model(next(steps).server, simulation.run)
            trained = simulation.run.network.split()[0]
            names = [n for n in before if n.rpartition("/")[2] in trained]
            moved[schedule] = {n: after[n] - before[n] for n in names}
    assert any(t.any() for t in moved["constant"].values())
    for name, whole in moved["constant"].items():
        torch.testing.assert_close(moved["step"][name], whole / 2, rtol=1e-3, atol=1e-6)


def test_a_schedule_of_a_rate_that_is_not_used_is_told():
    method = {"name": "laplace", "server_schedule": "cosine"}
    with pytest.warns(FedbayesWarning, match="method.server_schedule has no effect"):
        Simulation(Config.create(method=method, **SHARED)).close()
    method = {"name": "reptile", "server_schedule": "step"}
    with pytest.warns(FedbayesWarning, match=r"first step is after round 10 \(method.server_decay"):
        Simulation(Config.create(method=method, **SHARED)).close()
    method = {"name": "reptile", "server_decay": 0.5}
    with pytest.warns(FedbayesWarning, match="method.server_decay has no effect"):
        Simulation(Config.create(method=method, **SHARED)).close()


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("kind", ["adam", "yogi"])
def test_moments_are_those_of_the_papers(kind, corrected):
    """Reddi et al. 2021, Algorithm 2, number by number: m of 0 and v of τ² at the start, and no
    bias correction; or with the correction of Kingma and Ba 2015.
    """
    lr, first, second, floor = 0.1, 0.9, 0.99, 1e-3
    w, m, v = 1.0, 0.0, 0.0 if corrected and kind == "adam" else floor**2
    weights, state = {"w": torch.tensor([w], dtype=torch.float64)}, {}

    def build(leaves):
        own = {"lr": lr, "betas": (first, second), "eps": floor}
        return optimizers.adaptive(kind, leaves, bias_correction=corrected, **own)

    for t, slope in enumerate((0.3, -0.2, 0.05, 0.0, 1.4), start=1):
        m = first * m + (1 - first) * slope
        if kind == "adam":
            v = second * v + (1 - second) * slope**2
        else:
            v = v - (1 - second) * math.copysign(1, v - slope**2) * slope**2
        seen = (m / (1 - first**t), v / (1 - second**t)) if corrected else (m, v)
        w -= lr * seen[0] / (math.sqrt(seen[1]) + floor)
        slopes = {"w": torch.tensor([slope], dtype=torch.float64)}
        weights, state = optimizers.step(build, weights, slopes, state)
        assert float(weights["w"]) == pytest.approx(w, rel=1e-12)
