"""Preferences of clients of one class against the whitening that defines their comparison."""

import numpy as np
import pytest
import torch
from scipy.linalg import inv, sqrtm

from fedbayes.fusion.uncompared import RIDGE, SPREAD, Evidence, whitening

THETA = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)


def evidence(preferred, held=(True,) * 4, theta=THETA):
    return Evidence.of(preferred, whitening(preferred, torch.as_tensor(held)), theta)


@pytest.fixture(scope="module")
def preferences():
    """Mostly what the networks have in common, each on a scale of its own."""
    rng = torch.Generator().manual_seed(0)
    common, own = torch.randn(3000, 1, generator=rng), torch.randn(3000, 4, generator=rng)
    return (common + 0.3 * own) * torch.tensor([1.0, 3, 10, 100]) + torch.tensor([5.0, 0, -7, 50])


def test_the_weights_are_those_of_the_symmetric_whitening_of_correlations(preferences):
    found = evidence(preferences)
    o = preferences.double().numpy()
    wanted = SPREAD * inv(sqrtm(np.corrcoef(o.T) + RIDGE * np.eye(4))) / o.std(0, ddof=1)
    np.testing.assert_allclose(found.weights.numpy(), wanted, rtol=1e-5, atol=1e-7)
    white = np.cov((o @ found.weights.numpy().T).T)
    np.testing.assert_allclose(white, SPREAD**2 * np.eye(4), atol=0.05)


def test_classes_are_as_frequent_as_given_on_the_inputs(preferences):
    found = evidence(preferences)
    log = found.log_probabilities(preferences)
    assert log.dtype == preferences.dtype
    torch.testing.assert_close(log.exp().mean(0).double(), THETA, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(log.exp().sum(1), torch.ones(len(log)))


def test_scales_and_levels_of_networks_do_not_count(preferences):
    one = evidence(preferences).log_probabilities(preferences)
    other = preferences * torch.tensor([9.0, 0.1, 2, 1]) + torch.tensor([0.0, 3, 1, -20])
    found = evidence(other).log_probabilities(other)
    torch.testing.assert_close(found, one, rtol=1e-3, atol=1e-3)


def test_a_class_that_nobody_has_does_not_count_as_evidence(preferences):
    """The others are compared as if it were not there, and it has its frequency everywhere."""
    held = torch.tensor((True, True, False, True))
    whole = evidence(preferences, held)
    rest = evidence(preferences[:, held], held[held], THETA[held] / THETA[held].sum())
    torch.testing.assert_close(whole.weights[held][:, held], rest.weights)
    assert not whole.weights[2].any()
    assert not whole.weights[:, 2].any()
    p = whole.log_probabilities(preferences).exp().mean(0)
    torch.testing.assert_close(p.double(), THETA, rtol=1e-4, atol=1e-5)


def test_equal_and_constant_preferences_are_finite(preferences):
    x = preferences.clone()
    x[:, 1] = x[:, 0]
    x[:, 2] = 4.0
    found = evidence(x)
    moved = x + 3.0 * torch.eye(4)[2]
    for inputs in (x, moved):
        assert torch.isfinite(found.log_probabilities(inputs)).all()
    torch.testing.assert_close(found.log_probabilities(moved), found.log_probabilities(x))
