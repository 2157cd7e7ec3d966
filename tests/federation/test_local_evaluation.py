"""Clients' own models are evaluated as seldom as is asked, and told of in these rounds alone."""

import warnings

import pytest
import torch

import fedbayes
from fedbayes import Config, Simulation
from fedbayes.errors import ConfigError, FedbayesWarning
from fedbayes.federation import client_runtime
from fedbayes.reports.gather import gather
from fedbayes.storage.scores import ClientScores

ROUNDS = 7


def settings(**changes):
    base = {
        "seed": 1,
        "rounds": ROUNDS,
        "data": {"name": "digits", "clients": 4, "limit": 400},
        "model": {"hidden": [8]},
        "metrics": ["f1"],
    }
    return Config.create(**base | changes)


@pytest.fixture(scope="module")
def always():
    return fedbayes.run(settings())


@pytest.mark.parametrize(
    "engine", ["sequential", pytest.param("workers", marks=pytest.mark.slow), "flower-simulation"]
)
def test_every_third_round_and_the_last_tell_what_they_always_told(engine, always, tmp_path):
    if engine == "flower-simulation":
        pytest.importorskip("flwr")
    seldom = fedbayes.run(settings(evaluate_local_every=3, engine=engine), tmp_path / "run")
    for line, wanted in zip(seldom.metrics, always.metrics, strict=True):
        told = line["round"] in (3, 6, 7)
        assert line["local_accuracy"] == (wanted["local_accuracy"] if told else None)
        assert line["local_clients"] == (4 if told else 0)
        assert ("local" in line["metrics"]) == ("local" in line["by_client"]) == told
        assert line["metrics"]["global"] == wanted["metrics"]["global"]
        if told:
            assert line["metrics"] == wanted["metrics"]
            assert line["by_client"] == wanted["by_client"]
    assert all(torch.equal(seldom.model[n], t) for n, t in always.model.items())
    assert seldom.summary["metrics"] == always.summary["metrics"]
    assert seldom.summary["per_client"] == always.summary["per_client"]
    assert gather([tmp_path / "run"])  # a report has gaps in its curves


def test_nothing_is_evaluated_in_between(monkeypatch):
    counted, scored = [], client_runtime.scored
    monkeypatch.setattr(client_runtime, "scored", lambda *args: counted.append(1) or scored(*args))
    fedbayes.run(settings(evaluate_local_every=0))
    assert len(counted) == 4


def test_of_a_part_of_the_clients_in_the_last_round_these_alone_have_metrics():
    ended = fedbayes.run(settings(evaluate_local_every=0, cohort=2))
    *others, last = ended.metrics
    assert all(line["local_clients"] == 0 for line in others)
    assert last["local_clients"] == 2
    known = [v for v in last["by_client"]["local"]["accuracy"] if v is not None]
    assert ended.summary["local_accuracy"] == pytest.approx(sum(known) / 2)


def test_waiting_counts_evaluations():
    changes = {"method": {"name": "local"}, "training": {"lr": 1e-9}, "rounds": 20}
    ended = fedbayes.run(settings(**changes, evaluate_local_every=3, stop_after=2))
    assert ended.summary["rounds"] == 9  # the first at 3 is the best, 6 and 9 are no better
    with pytest.raises(ConfigError, match="set evaluate_local_every to 1 or more"):
        Simulation(settings(**changes, evaluate_local_every=0, stop_after=2))


def test_an_interrupted_run_may_be_evaluated_more_seldom(always, tmp_path):
    with Simulation(settings(), tmp_path / "run") as simulation:
        for step in simulation:
            simulation.stop = step.number == 4
    config = tmp_path / "run" / "config.toml"
    text = config.read_text()
    assert "evaluate_local_every = 1" in text
    config.write_text(text.replace("evaluate_local_every = 1", "evaluate_local_every = 0"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedbayesWarning)
        again = fedbayes.resume(tmp_path / "run")
    assert [line["local_clients"] for line in again.metrics] == [4, 4, 4, 4, 0, 0, 4]
    assert again.summary["local_accuracy"] == always.summary["local_accuracy"]


def test_where_there_are_no_clients_models_it_is_said():
    with pytest.warns(FedbayesWarning, match="evaluate_local_every has no effect: global"):
        fedbayes.run(settings(method={"name": "global"}, evaluate_local_every=3))


def test_a_client_that_tells_nothing_keeps_all_that_it_told():
    first = {"count": 4.0, "correct": 2.0, "nll": 2.0, "metric/auroc": 0.5}
    scores = ClientScores().after({0: first, 1: first | {"metric/auroc": 0.9}})
    again = scores.after({0: {}, 1: {}, 2: {}})
    for name, told in scores.sums.items():
        assert torch.equal(again.sums[name], told)
    assert again.after({1: first}).sums["metric/auroc"].tolist() == [0.5, 0.5]


def test_that_a_run_which_stops_early_may_end_unevaluated_is_said():
    with pytest.warns(FedbayesWarning, match="and so none at all: evaluate_local_every is 0"):
        Simulation(settings(evaluate_local_every=0, stop_after=1)).close()
