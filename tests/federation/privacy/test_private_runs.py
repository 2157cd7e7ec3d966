"""Whole runs under differential privacy: what they release, record and refuse."""

import json
import math
import shutil
import stat
import warnings
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

pytest.importorskip("dp_accounting")

from fedbayes import Config, Simulation, errors, resume, run
from fedbayes.contracts import About, Report
from fedbayes.errors import ConfigError, FedbayesWarning
from fedbayes.federation.privacy import keys
from fedbayes.federation.privacy.accounting import ADD_REMOVE, REPLACE, Spent, epsilons
from fedbayes.federation.privacy.matrix import strategy
from fedbayes.federation.privacy.settings import Privacy
from fedbayes.methods.fedavg import FedAvg
from fedbayes.storage.folder import RunFolder

DATA = {"name": "digits", "clients": 7, "partition": "iid"}
CLIP = {"clip": 1.0}


def settings(**more):
    return {
        "rounds": 3,
        "data": DATA,
        "aggregation": CLIP,
        "privacy": {"noise": 1.0},
        "evaluate_every": 0,
        "metrics": [],
        **more,
    }


class Absent(FedAvg):
    """FedAvg of which some clients have data that give no report."""

    name = "absent"
    about = About("some clients report NaN")
    failing: tuple[int, ...] = ()
    value: float | None = None

    def local(self, message, client, data, site):
        report, client_state, info = super().local(message, client, data, site)
        if site.client in self.failing:
            value = math.nan if self.value is None else self.value
            lie = {name: torch.full_like(t, value) for name, t in report.tensors.items()}
            report = Report(lie, report.weight)
        return report, client_state, info


def absent(*failing):
    return {"name": "tests.federation.privacy.test_private_runs:Absent", "failing": failing}


@pytest.mark.parametrize("failing", [(0,), (0, 1, 2)])
def test_a_round_is_released_with_noise_whoever_fails(failing):
    """One client whose data give NaN, where three reports were asked for: today no update, and so a
    model that tells of it with certainty. The state of the server tells nothing but noise."""
    common = settings(cohort=3, data={**DATA, "clients": 3}, rounds=2, min_reports=3)
    with pytest.warns(UserWarning, match="min_reports has no effect: with noise"):
        result = run(method=absent(*failing), **common)
    start = Simulation(Config.create(**common)).network.initial
    assert result.summary["skipped_rounds"] == 0
    assert result.summary["refused_reports"] == 2 * len(failing)
    moved = torch.cat([(result.model[n] - t).flatten() for n, t in start.items()])
    # Both rounds' noise, on top of what the others changed: far more than a change.
    assert float(moved.std()) == pytest.approx(math.sqrt(2) / 3, rel=0.1)
    assert result.summary["epsilon"] == epsilons([Spent(1.0, members=(0,))] * 2, 1e-5)[REPLACE]


def test_a_run_of_noise_alone_says_so(tmp_path):
    with pytest.warns(
        FedbayesWarning,
        match="3 of 3 rounds of .* had only noise: no update was accepted.*NaN.*21 times",
    ):
        result = run(method=absent(*range(7)), folder=tmp_path / "lost", **settings())
    assert result.summary["noise_rounds"] == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error", FedbayesWarning)
        good = run(method=absent(0), folder=tmp_path / "good", **settings())
    assert good.summary["noise_rounds"] == 0


def test_no_report_is_measured_by_others_and_none_moves_the_sum_by_more_than_the_bound():
    """Elsewhere 1e30 is refused by the median of the cohort, which would tell of the others."""
    common = settings(rounds=1, privacy={"noise": 1.0, "repeatable": True})
    with pytest.warns(UserWarning, match="repeatable"):
        honest, hostile = run(**common), run(method=absent(2) | {"value": 1e30}, **common)
    assert hostile.summary["refused_reports"] == 0
    changed = [hostile.model[n].double() - honest.model[n].double() for n in honest.model]
    distance = math.sqrt(sum(float(c.square().sum()) for c in changed))
    assert 0.5 / 7 < distance <= 2 / 7 * (1 + 1e-4)


def test_the_server_ends_with_the_same_noise_whether_a_client_fails_or_learns_nothing(tmp_path):
    """What a failing client leaves is bit for bit what one leaves that changes nothing."""

    def ended(*failing):
        common = settings(privacy={"noise": 1.0, "repeatable": True}, cohort=7)
        with pytest.warns(UserWarning, match="privacy.repeatable"):
            return run(method=absent(*failing), **common)

    failed, all_there = ended(2), ended()
    changed = [failed.model[n] - all_there.model[n] for n in failed.model]
    distance = math.sqrt(sum(float(c.double().square().sum()) for c in changed))
    assert 0 < distance <= 3 * 2 / 7  # three rounds in which six clients may follow the seventh


def test_epsilon_is_of_the_rounds_as_they_were_run(tmp_path):
    """Two rounds at z = 0.1, and one more at z = 10 whoever changed it: no ε of 1.33."""
    folder = tmp_path / "run"
    with Simulation(Config.create(**settings(privacy={"noise": 0.1})), folder) as simulation:
        steps = iter(simulation)
        next(steps), next(steps)
    record = RunFolder(folder).progress().privacy
    assert [s.noise for s in record.spent(2)] == [0.1, 0.1]
    with Simulation(None, folder) as simulation:
        config = simulation.config.model_copy(update={"privacy": Privacy(noise=10.0)})
        simulation.config = simulation.rounds.config = config
        list(simulation)
        summary = simulation.summary()
    spent = [Spent(z, members=(0,)) for z in (0.1, 0.1, 10.0)]
    assert summary["epsilon"] == pytest.approx(epsilons(spent, 1e-5)[REPLACE])
    assert summary["epsilon"] > 500


def test_rounds_without_noise_leave_no_epsilon(tmp_path):
    """The first round of two, or the last."""
    quiet, noisy = Privacy(), Privacy(noise=5.0)
    for before, after in ((quiet, noisy), (noisy, quiet)):
        config = Config.create(**settings(rounds=2, sampling="cyclic"))
        with Simulation(config) as simulation:
            steps = iter(simulation)
            for privacy in (before, after):
                changed = config.model_copy(update={"privacy": privacy})
                simulation.config = simulation.rounds.config = changed
                next(steps)
            summary = simulation.summary()
        assert summary["epsilon"] is None
        assert "ε is not valid" in summary["privacy"]["notes"][0]
        json.dumps(summary, allow_nan=False)


def test_the_secret_is_not_in_the_folder_and_is_gone_when_the_run_is_over(tmp_path):
    config = Config.create(**settings())
    with Simulation(config, tmp_path / "run") as simulation:
        steps = iter(simulation)
        next(steps)
        file = keys.key_file(simulation.progress.privacy.run)
        secret = file.read_bytes()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        for path in (tmp_path / "run").rglob("*"):
            if path.is_file():
                assert secret not in path.read_bytes()
                assert secret.hex().encode() not in path.read_bytes()
        list(steps)
    assert not file.exists()


def test_a_resumed_run_draws_other_noise_and_goes_on_without_its_secret(tmp_path):
    """A copy of the folder and a copy of the state, gone on with twice, are no two sums of the same
    noise; nor is a secret missed that is on another machine."""
    config = Config.create(**settings(rounds=2))
    with Simulation(config, tmp_path / "one") as simulation:
        next(iter(simulation))
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    one, two = resume(tmp_path / "one"), resume(tmp_path / "two")
    apart = torch.cat([(one.model[n] - two.model[n]).flatten() for n in one.model]).double()
    assert float(apart.std()) == pytest.approx(math.sqrt(2) / 7, rel=0.05)
    assert one.summary["epsilon"] == epsilons([Spent(1.0, members=(0,))] * 2, 1e-5)[REPLACE]


def test_a_run_that_can_be_repeated_says_so(tmp_path):
    config = Config.create(**settings(privacy={"noise": 1.0, "repeatable": True}))
    with pytest.warns(UserWarning, match="who knows the seed can remove it"):
        whole = run(config, tmp_path / "whole")
    with pytest.warns(UserWarning, match="who knows"), Simulation(config, tmp_path / "cut") as cut:
        next(iter(cut))
    resumed = resume(tmp_path / "cut")
    for name, weights in whole.model.items():
        assert torch.equal(resumed.model[name], weights)
    assert "the seed determines the noise, so anyone" in whole.summary["privacy"]["notes"][0]


def test_correlated_noise_goes_on_after_a_kill(tmp_path):
    """The noise of all rounds together is what the factor says: C times what it does to the weights
    is independent. Nothing is learnt, so that there is noise alone.
    """
    common = settings(
        rounds=4, privacy={"noise": 1.0, "mechanism": "matrix"}, method=absent(*range(7))
    )
    config = Config.create(**common)
    models = []
    with Simulation(config, tmp_path / "run") as simulation:
        models.append(simulation.network.initial)
        steps = iter(simulation)
        models += [dict(next(steps).server.weights), dict(next(steps).server.weights)]
    with Simulation(None, tmp_path / "run") as simulation:
        models += [dict(step.server.weights) for step in simulation]
        summary = simulation.summary()
    flat = [torch.cat([t.flatten().double() for _, t in sorted(m.items())]) for m in models]
    noise = 7 * np.stack([(b - a).numpy() for a, b in pairwise(flat)])
    np.testing.assert_allclose(np.cov(strategy(4) @ noise), np.eye(4), atol=0.1)
    spent = [Spent(1.0, members=(0,), correlated=True, begins=t == 0) for t in range(4)]
    assert summary["epsilon"] == epsilons(spent, 1e-5)[REPLACE]


def test_cohorts_by_coins_are_of_any_size_and_a_secret():
    """Seven clients, of whom one is to be expected: some rounds have none, some several."""
    config = Config.create(**settings(rounds=12, cohort=1, sampling="poisson"))
    with Simulation(config) as simulation:
        lines = [step.metrics for step in simulation]
        summary = simulation.summary()
        again = [len(simulation.cohort_of(number)) for number in range(1, 13)]
    sizes = [line["cohort"] for line in lines]
    assert sizes == again
    assert len(set(sizes)) > 1
    assert not any(line["skipped"] for line in lines)
    assert lines[0]["privacy"] == {"noise": 1.0, "clip": {"weights": 1.0}, "rate": 1 / 7}
    found = summary["privacy"]["epsilon"]
    assert found == epsilons([Spent(1.0, rate=1 / 7)] * 12, 1e-5)
    assert found[ADD_REMOVE] < found[REPLACE] == summary["epsilon"]
    # The seed does not give away who was drawn.
    with Simulation(config) as other:
        assert [other.cohort_of(n) for n in range(1, 41)] != [
            simulation.cohort_of(n) for n in range(1, 41)
        ]


def test_a_cohort_of_nobody_has_an_update_of_noise_alone():
    config = Config.create(**settings(rounds=2, cohort=1, sampling="poisson"))
    with Simulation(config) as simulation:
        simulation.cohort_of = lambda number: []
        start = simulation.network.initial
        lines = [step.metrics for step in simulation]
        moved = torch.cat([(simulation.server.weights[n] - t).flatten() for n, t in start.items()])
    assert [line["cohort"] for line in lines] == [0, 0]
    assert float(moved.std()) == pytest.approx(math.sqrt(2), rel=0.05)


def test_coins_without_noise_follow_the_seed():
    config = Config.create(**settings(privacy={}, sampling="poisson", cohort=3, rounds=4))
    with Simulation(config) as one, Simulation(config) as two:
        assert [one.cohort_of(n) for n in range(1, 9)] == [two.cohort_of(n) for n in range(1, 9)]
        simulation_lines = [step.metrics for step in one]
    assert len(simulation_lines) == 4
    assert "epsilon" not in one.summary()


def test_without_noise_a_cohort_of_nobody_has_no_update():
    config = Config.create(**settings(privacy={}, sampling="poisson", rounds=2, stop_refused=1))
    with Simulation(config) as simulation:
        cohorts = {1: [], 2: [3]}
        simulation.cohort_of = cohorts.get
        lines = [step.metrics for step in simulation]
    assert [line["skipped"] for line in lines] == [True, False]


@pytest.mark.parametrize("engine", ["sequential", pytest.param("workers", marks=pytest.mark.slow)])
def test_clients_send_no_figures_unless_they_are_asked_for(engine):
    quiet = run(**settings(engine=engine, rounds=1))
    assert quiet.summary["local_accuracy"] is None
    (line,) = RunFolder(quiet.folder.path).metrics()
    assert line["local_accuracy"] is None
    assert "loss" not in json.dumps(line)
    assert quiet.summary["privacy"]["client_metrics"] == "off"
    if engine == "sequential":
        open_ = run(**settings(privacy={"noise": 1.0, "metrics": "on"}, rounds=1))
        assert open_.summary["local_accuracy"] is not None
        assert "not covered" in open_.summary["privacy"]["notes"][0]


def test_a_client_that_sends_figures_all_the_same_is_not_heard():
    config = Config.create(**settings(rounds=1))
    with Simulation(config) as simulation:
        simulation.engine._runtime = replace(simulation.runtime, figures=True)
        (step,) = list(simulation)
    assert step.metrics["local_accuracy"] is None
    assert "loss" not in json.dumps(step.metrics)


@pytest.mark.parametrize(
    ("method", "parts"),
    [
        ("fedavg", {"weights"}),
        ("fedadam", {"weights"}),
        ("scaffold", {"weights", "control"}),
        ("fedsparse", {"weights", "gates"}),
        ("scaffold-fedsparse", {"weights", "gates", "control"}),
        ("feddrop", {"weights"}),
        ("fedl1", {"weights"}),
        ("virtual", {"precision", "shift"}),
    ],
)
def test_every_method_whose_reports_add_can_be_private(method, parts):
    """One round after another, also of nobody, and every part has its bound."""
    config = Config.create(
        **settings(
            rounds=2, cohort=2, sampling="poisson", method={"name": method}, evaluate_every=1
        )
    )
    with Simulation(config) as simulation:
        cohorts = {1: [], 2: [0, 3, 4]}
        simulation.cohort_of = cohorts.get
        lines = [step.metrics for step in simulation]
    assert set(lines[1]["privacy"]["clip"]) == parts
    assert 0 <= lines[1]["global_accuracy"] <= 1
    assert math.isfinite(lines[1]["global_nll"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"aggregation": {}}, "needs aggregation.clip"),
        (
            {"aggregation": {"clip": 1.0, "rule": "median"}},
            "'median' needs single updates, but privacy.noise",
        ),
        ({"checkpoint_every": 2}, "checkpoint_every = 1"),
        ({"method": {"name": "pfnm"}}, "not work with pfnm: its updates are not"),
        (
            {"method": {"name": "mixture"}},
            "privacy.noise does not work with mixture",
        ),
        (
            {"method": {"name": "global"}, "aggregation": {}},
            "privacy.noise does not work with global",
        ),
        ({"privacy": {"noise": 1.0, "mechanism": "matrix"}, "sampling": "poisson"}, "schedule"),
        ({"privacy": {"noise": 1.0, "clips": {"control": 1.0}}}, "lists 'control', .* weights"),
        ({"privacy": {"noise": 5.0, "quantile": 0.5}}, "too small for the counts"),
        (
            {"method": {"name": "virtual"}, "privacy": {"noise": 0.5, "quantile": 0.5}},
            "virtual needs clients.* but privacy.quantile changes",
        ),
        (
            {"method": {"name": "virtual"}, "stop_after": 2, "evaluate_every": 1},
            "stop_after = 2 needs test metrics .* but privacy.metrics = 'off' excludes them",
        ),
        (
            {"model": {"name": "tests.helpers.toy_models:normalized"}},
            "running statistics .*GroupNorm",
        ),
        (
            {
                "method": {"name": "global"},
                "sampling": "poisson",
                "aggregation": {},
                "privacy": {},
            },
            "global needs cohorts of a fixed size",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        Simulation(Config.create(**settings(**changes)))


@pytest.mark.parametrize(
    ("privacy", "words"),
    [
        ({"noise": 1e-160}, r"privacy.noise is 1e-160; give at least 1e-06"),
        ({"noise": 1.0, "quantile": 0.5, "count_noise": 1e-300}, "privacy.count_noise is 1e-300"),
        ({"noise": 1.0, "clips": {"weights": 0}}, "privacy.clips.weights is 0; .*greater than 0"),
    ],
)
def test_numbers_that_come_to_nothing_are_refused_by_name(privacy, words):
    with pytest.raises(ConfigError, match=words):
        Config.create(**settings(privacy=privacy))


def test_the_least_noise_has_an_epsilon():
    assert run(**settings(rounds=1, privacy={"noise": 1e-6})).summary["epsilon"] > 1e9


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stop_refused": 2}, "stop_refused has no effect"),
        ({"aggregation": {"clip": 1.0, "max_change": 7.0}}, "updates are not compared"),
        (
            {
                "engine": "flower-simulation",
                "secure": {"enabled": True},
                "privacy": {"noise": 1.0, "metrics": "on"},
            },
            "clients send no metrics",
        ),
        ({"method": "fedper", "privacy": {"noise": 1.0}}, "the run has no metrics: fedper has no"),
    ],
)
def test_settings_without_effect_are_told(changes, words, tmp_path):
    with pytest.warns(FedbayesWarning, match=words):
        simulation = Simulation(Config.create(**settings(**changes)), tmp_path)
    simulation.close()


def test_old_settings_are_pointed_to_their_place():
    with pytest.raises(ConfigError, match=r"aggregation.noise is not a setting.*'privacy.noise'"):
        Config.create(aggregation={"noise": 1.0})


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "cryptography" else 1)
    with pytest.raises(ConfigError, match=r"needs cryptography: pip install 'fedbayes\[privacy\]'"):
        Simulation(Config.create(**settings()))
    with pytest.raises(ConfigError, match="sampling = 'poisson' needs cryptography"):
        Simulation(Config.create(**settings(privacy={}, sampling="poisson")))
