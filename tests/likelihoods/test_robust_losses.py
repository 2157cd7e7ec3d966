"""Losses that outliers move less, against integrals and limits."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from fedbayes.core.targets import Target
from fedbayes.errors import ConfigError
from fedbayes.inference.settings import LocalTraining
from fedbayes.likelihoods import build_likelihood
from fedbayes.likelihoods.robust import (
    density_power,
    generalized_cross_entropy,
)
from fedbayes.methods.fedgvi import _loss_of_likelihood

reals = st.floats(-4, 4)
CLASSES = build_likelihood("categorical", Target("class", ("a", "b", "c")))


def gaussian(scale=(1.0,), noise="each", center=None):
    names = tuple(f"y{n}" for n in range(len(scale)))
    target = Target("real", names, center=center or (0.0,) * len(scale), scale=scale)
    return build_likelihood("gaussian", target, noise=noise)


def double(*values):
    return torch.tensor([values], dtype=torch.float64)


@settings(deadline=None, max_examples=50)
@given(st.lists(reals, min_size=3, max_size=3), st.integers(0, 2), st.floats(0.05, 1))
def test_cross_entropy_is_as_zhang_and_sabuncu_define_it(logits, label, delta):
    f, y = double(*logits), torch.tensor([label])
    p = np.exp(logits) / np.exp(logits).sum()
    found = float(generalized_cross_entropy(CLASSES, f, y, delta))
    assert found == pytest.approx((1 - p[label] ** delta) / delta, rel=1e-9, abs=1e-12)
    assert 0 <= found <= 1 / delta


@settings(deadline=None, max_examples=30)
@given(st.lists(reals, min_size=3, max_size=3), st.integers(0, 2))
def test_both_tend_to_the_negative_log_likelihood(logits, label):
    f, y = double(*logits), torch.tensor([label])
    wanted = float(CLASSES.nll(f, y))
    assert float(generalized_cross_entropy(CLASSES, f, y, 1e-10)) == pytest.approx(wanted, rel=1e-5)
    assert float(density_power(CLASSES, f, y, 1 + 1e-10)) == pytest.approx(wanted, rel=1e-5)
    real, target = gaussian((2.0,)), double(logits[0])
    scaled = float(real.nll(double(*logits[1:]), target)) - np.log(2.0)
    near = float(density_power(real, double(*logits[1:]), target, 1 + 1e-10))
    assert near == pytest.approx(scaled, rel=1e-5, abs=1e-5)


@settings(deadline=None, max_examples=30)
@given(reals, st.floats(-1, 1), reals, st.floats(1.05, 3), st.floats(0.2, 5))
def test_of_gaussian_noise_it_is_the_integral(location, log_std, z, beta, scale):
    likelihood = gaussian((scale,), center=(1.5,))
    f, y = double(location, log_std), double(1.5 + scale * z)
    std = float(np.exp(7 * np.tanh(log_std / 7)))
    density = norm(location, std).pdf
    whole, _ = quad(lambda u: density(u) ** beta, location - 12 * std, location + 12 * std)
    b = beta - 1
    wanted = (1 - density(z) ** b) / b + (whole - 1) / beta
    assert float(density_power(likelihood, f, y, beta)) == pytest.approx(wanted, rel=1e-6, abs=1e-8)
    unit = quad(
        lambda u: float(likelihood.log_prob(f, double(u)).exp()) ** beta,
        *(1.5 + scale * (location + side * 12 * std) for side in (-1, 1)),
    )[0]
    assert float(likelihood.log_power(f, beta)) == pytest.approx(np.log(unit), rel=1e-6, abs=1e-6)


def test_of_several_columns_it_is_of_their_joint_density():
    both, beta = gaussian((1.0, 3.0)), 1.7
    f, y = double(0.3, -0.2, 0.1, -0.4), double(1.0, 2.0)
    one, two = gaussian((1.0,)), gaussian((3.0,))
    joint = float(one.log_power(f[:, [0, 2]], beta) + two.log_power(f[:, [1, 3]], beta))
    assert float(both.log_power(f, beta)) == pytest.approx(joint)
    log = one.log_prob(f[:, [0, 2]], y[:, :1]) + two.log_prob(f[:, [1, 3]], y[:, 1:]) + np.log(3)
    unit = joint + (beta - 1) * np.log(3)
    wanted = (1 - np.exp(0.7 * float(log))) / 0.7 + (np.exp(unit) - 1) / 1.7
    assert float(density_power(both, f, y, beta)) == pytest.approx(wanted)


def test_labels_are_all_their_combinations():
    target = Target("labels", ("a", "b"))
    likelihood, f = build_likelihood("multilabel", target), double(0.7, -1.2)
    every = [double(a, b) for a in (0.0, 1.0) for b in (0.0, 1.0)]
    whole = sum(float(likelihood.log_prob(f, y).exp()) ** 1.6 for y in every)
    assert float(likelihood.log_power(f, 1.6).exp()) == pytest.approx(whole)


@settings(deadline=None, max_examples=30)
@given(st.lists(reals, min_size=3, max_size=3), st.lists(reals, min_size=3, max_size=3))
def test_the_truth_is_expected_to_lose_least(truth, other):
    """The density-power loss is a proper score."""
    p = torch.softmax(double(*truth), dim=-1)[0]
    y = torch.arange(3)

    def expected(f):
        return float((p * density_power(CLASSES, f.expand(3, -1), y, 1.5)).sum())

    assert expected(double(*truth)) <= expected(double(*other)) + 1e-12


def test_the_truth_is_expected_to_lose_least_under_gaussian_noise():
    likelihood = gaussian()
    grid = torch.linspace(-12, 12, 4001, dtype=torch.float64)[:, None]
    weights = torch.from_numpy(norm(0.4, 1.3).pdf(grid[:, 0].numpy())) * 24 / 4000

    def expected(location, std):
        log_std = 7 * np.arctanh(np.log(std) / 7)
        f = double(location, log_std).expand(4001, -1)
        return float((weights * density_power(likelihood, f, grid, 1.4)).sum())

    best = expected(0.4, 1.3)
    assert all(best < expected(0.4 + a, 1.3 + b) for a in (-0.1, 0, 0.1) for b in (-0.1, 0.1))


def test_an_outlier_pulls_no_more_the_farther_it_is():
    likelihood, pulls = gaussian(noise=1.0), []
    for far in (2.0, 6.0, 12.0):
        f = double(0.0).requires_grad_()
        density_power(likelihood, f, double(far), 1.5).sum().backward()
        pulls.append(abs(float(f.grad)))
    assert pulls[0] > pulls[1] > pulls[2]
    assert pulls[2] < 1e-10


def test_likelihoods_without_them_are_refused():
    student = build_likelihood("student-t", Target("real", ("y",), (0.0,), (1.0,)))
    for loss, why in (
        ("beta", "no closed form for the likelihood student-t"),
        ("gce", "probabilities of classes"),
    ):
        with pytest.raises(ConfigError, match=why):
            _loss_of_likelihood(SimpleNamespace(data_loss=loss), run_with(student))
    with pytest.raises(ConfigError, match="log_power"):
        student.log_power(double(0.0, 0.0), 1.5)
    _loss_of_likelihood(SimpleNamespace(data_loss="beta"), run_with(gaussian()))
    _loss_of_likelihood(SimpleNamespace(data_loss="gce"), run_with(CLASSES))


def run_with(likelihood):
    return SimpleNamespace(likelihood=likelihood, training=LocalTraining())
