"""Conformal thresholds under label shift and with a malicious client."""

import json

import numpy as np
import pytest
import torch

import fedbayes
from fedbayes.core.targets import Target
from fedbayes.errors import ConfigError
from fedbayes.likelihoods import build_likelihood
from fedbayes.likelihoods.conformal import GRID, count, threshold
from fedbayes.likelihoods.conformal_shift import (
    checked_prior,
    count_by_class,
    outlying,
    shifted_threshold,
)
from fedbayes.workflows.calibrate.conformal import calibrate_conformal
from tests.helpers.command_line import command

CLASSES = build_likelihood("auto", Target("class", ("a", "b", "c")))


def drawn(rng, n, classes=3):
    y = torch.tensor(rng.integers(classes, size=n))
    return torch.tensor(rng.gamma(1.0 + y.numpy())).reshape(n, 1), y


@pytest.mark.parametrize("rows", [1, 8, 9, 10, 57, 199])
def test_of_one_class_it_is_the_threshold_of_split_conformal_prediction(rows):
    found, _ = drawn(np.random.default_rng(rows), rows)
    counts = count(found)
    wanted = threshold(counts, CLASSES, "probability", 0.9)
    one = torch.ones(1, dtype=torch.float64)
    assert shifted_threshold(counts, one, CLASSES, "probability", 0.9) == wanted


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_least_that_holds_the_level(seed):
    """By its definition, at every end of a bin."""
    rng = np.random.default_rng(seed)
    found, y = drawn(rng, 300)
    prior = torch.tensor(rng.dirichlet(np.ones(3)))
    counts = count_by_class(found, y, 3)
    end = shifted_threshold(counts, prior, CLASSES, "probability", 0.8).threshold[0]

    def mass(at):
        inside = [(found[y == k] <= at).sum() / ((y == k).sum() + 1) for k in range(3)]
        return float(sum(q * share for q, share in zip(prior, inside, strict=True)))

    place = GRID.tolist().index(end)
    assert mass(end) >= 0.8 - 1e-9
    assert mass(GRID[place - 1]) < 0.8


def test_a_class_that_nobody_counted_leaves_sets_whole():
    found, y = drawn(np.random.default_rng(0), 200, classes=2)
    counts = count_by_class(found, y, 3)
    prior = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    assert shifted_threshold(counts, prior, CLASSES, "probability", 0.9).threshold == (None,)
    assert shifted_threshold(counts, prior, CLASSES, "probability", 0.7).threshold != (None,)


def test_coverage_is_held_under_shift():
    """Mean coverage over draws of the counted rows, against its guarantee and a little more."""
    rng, prior = np.random.default_rng(1), np.array([0.1, 0.1, 0.8])
    covered = []
    for _ in range(60):
        found, y = drawn(rng, 240)
        counts = count_by_class(found, y, 3)
        end = shifted_threshold(counts, torch.tensor(prior), CLASSES, "probability", 0.9)
        new = rng.gamma(1.0 + rng.choice(3, 4000, p=prior))
        covered.append((new <= end.threshold[0]).mean())
    error = np.std(covered) / len(covered) ** 0.5
    assert 0.9 - 3 * error < np.mean(covered) < 0.92


@pytest.mark.parametrize("lie", [0.0, 30.0, None])
def test_a_liar_is_found_whatever_the_shares_of_classes_are(lie):
    for seed in range(8):
        rng = np.random.default_rng(seed)
        counts = []
        for client in range(5):
            y = torch.tensor(rng.choice(3, 200, p=rng.dirichlet(np.ones(3))))
            found = torch.tensor(rng.gamma(1.0 + y.numpy())).reshape(-1, 1)
            if client == 3:
                found = 2.5 * found if lie is None else torch.full_like(found, lie)
            counts.append(count_by_class(found, y, 3))
        assert outlying(counts, 1) == [3]
        assert outlying(counts[::-1], 1) == [1]
        assert outlying(counts, 0) == []
    with pytest.raises(ConfigError, match=r"be honest\. Give at most 2"):
        outlying(counts, 3)


def test_shares_of_classes():
    assert checked_prior({"b": 0.25, "a": 0.75}, ("a", "b", "c")).tolist() == [0.75, 0.25, 0.0]
    with pytest.raises(ConfigError, match=r"sum to 0\.5"):
        checked_prior({"a": 0.5}, ("a", "b"))
    with pytest.raises(ConfigError, match="class 'z'"):
        checked_prior({"z": 1.0}, ("a", "b"))


def test_of_a_run(tmp_path, capsys):
    run = fedbayes.run(rounds=2, clients=5, partition="iid", out=tmp_path / "a")
    plain = calibrate_conformal(run.folder)
    assert calibrate_conformal(run.folder, malicious=0).all == plain.all
    found = calibrate_conformal(run.folder, malicious=1)
    assert len(found.left_out) == 1
    assert found.all.counted == plain.all.counted - plain.clients[found.left_out[0]].counted
    only = ("calibrate", run.folder, "-m", "conformal", "--prior", "1=0.5,7=0.5", "--json")
    assert command(*only) == 0
    told = json.loads(capsys.readouterr().out)
    assert 0.5 < told["all"]["coverage"][0] <= 1
    assert command("calibrate", run.folder, "-m", "conformal", "--prior", "1:0.5") == 2
    assert "give it as a=0.2,b=0.8" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"its rows\. Leave"):
        calibrate_conformal(run.folder, personal=True, malicious=1)
