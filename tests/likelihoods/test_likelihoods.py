"""Likelihoods against scipy, scikit-learn, brute force over draws, and what must always hold."""

import io
import itertools
import math
import pickle
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from scipy.integrate import quad
from scipy.optimize import brentq
from sklearn import metrics as sk
from torch import nn
from torch.nn import functional

from fedbayes.core.metrics import uncertainty
from fedbayes.core.targets import Target
from fedbayes.errors import ConfigError, ModelError
from fedbayes.likelihoods import (
    LIKELIHOODS,
    Classes,
    Numeric,
    Parametric,
    build_likelihood,
    complete_likelihood,
    default_likelihood,
)
from fedbayes.likelihoods.answers import answers
from fedbayes.likelihoods.conformal import Conformal
from tests import ROOT

REAL = Target("real", ("price", "area"), (250.0, -3.0), (40.0, 0.5))
ONE = Target("real", ("price",), (250.0,), (40.0,))
COUNT = Target("count", ("bikes", "cars"))
CASES = {
    "categorical": (Target("class", ("a", "b", "c")), {}),
    "bernoulli": (Target("class", ("no", "yes")), {}),
    "multilabel": (Target("labels", ("red", "round", "ripe")), {}),
    "gaussian": (REAL, {}),
    "gaussian each": (REAL, {"noise": "each"}),
    "gaussian given": (REAL, {"noise": 0.3}),
    "poisson": (COUNT, {}),
    "poisson center": (replace(COUNT, center=(5.0, 200.0)), {}),
    "student-t": (REAL, {}),
    "student-t given": (ONE, {"noise": 0.5, "df": 7}),
    "quantile": (REAL, {}),
    "quantile one": (ONE, {"levels": 0.9, "noise": 0.2}),
    "cox": (Target("survival", ("days", "died")), {}),
}
APART = [case for case in CASES if case != "cox"]
"""Those whose samples are independent given outputs."""
NUMERIC = [case for case, (target, _) in CASES.items() if target.kind in ("real", "count")]
PARAMETRIC = [case for case in NUMERIC if not case.startswith("quantile")]


def make(case):
    target, chosen = CASES[case]
    return build_likelihood(case.split()[0], target, **chosen)


def width(likelihood):
    head = likelihood.head()
    f = torch.zeros(1, likelihood.outputs)
    return (f if head is None else head(f)).shape[1]


def targets(target, n, seed=0):
    rng = torch.Generator().manual_seed(seed)
    if target.kind == "class":
        return torch.randint(target.classes, (n,), generator=rng)
    if target.kind == "labels":
        return (torch.rand(n, target.columns, generator=rng) < 0.4).float()
    if target.kind == "count":
        rate = torch.tensor(target.center or 4.0)
        return torch.poisson(rate.expand(n, target.columns), generator=rng)
    z = torch.randn(n, target.columns, generator=rng)
    if target.kind == "survival":
        return torch.stack([(3 * z[:, 0].abs()).round(), (z[:, 1] > 0).float()], dim=1)
    return torch.tensor(target.center) + torch.tensor(target.scale) * z


def outputs(likelihood, *shape, seed=1, dtype=torch.float64):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, width(likelihood), generator=rng, dtype=dtype)


def scores(terms):
    return {name: float(term.sum()) for name, term in terms.items()}


def scipy_distribution(likelihood, f):
    """The distribution of each column as the documentation states it, written anew."""
    target, columns = likelihood.target, likelihood.target.columns
    f = f.numpy()
    if target.kind == "count":
        return scipy.stats.poisson(np.array(target.center or 1.0) * np.exp(20 * np.tanh(f / 20)))
    noise = likelihood.noise
    std = np.exp(7 * np.tanh(f[..., columns:] / 7)) if isinstance(noise, str) else noise
    location = np.array(target.center) + np.array(target.scale) * f[..., :columns]
    scale = np.broadcast_to(np.array(target.scale) * std, location.shape)
    if likelihood.name == "gaussian":
        return scipy.stats.norm(location, scale)
    return scipy.stats.t(likelihood.df, location, scale)


# ---- densities


@pytest.mark.parametrize("case", PARAMETRIC)
def test_log_density_is_scipys(case):
    likelihood = make(case)
    f, y = outputs(likelihood, 4, 6), targets(likelihood.target, 6).double()
    each = scipy_distribution(likelihood, f)
    log = each.logpmf if likelihood.target.kind == "count" else each.logpdf
    expected = log(y.numpy()).sum(axis=-1)
    np.testing.assert_allclose(likelihood.log_prob(f, y), expected, rtol=1e-10)


def test_class_probabilities_are_scipys():
    likelihood = make("categorical")
    f, y = outputs(likelihood, 4, 6), targets(likelihood.target, 6)
    expected = scipy.special.log_softmax(f.numpy(), axis=-1)[:, np.arange(6), y]
    np.testing.assert_allclose(likelihood.log_prob(f, y), expected, rtol=1e-12)


def test_one_logit_is_two_of_which_one_is_zero():
    one, two = make("bernoulli"), build_likelihood("categorical", CASES["bernoulli"][0])
    f, y = outputs(one, 4, 6), targets(one.target, 6)
    both = torch.cat([torch.zeros_like(f), f], dim=-1)
    torch.testing.assert_close(one.log_prob(f, y), two.log_prob(both, y))
    torch.testing.assert_close(one.log_probabilities(f), two.log_probabilities(both))
    torch.testing.assert_close(one.nll(f[0], y), two.nll(both[0], y))
    assert scores(one.terms(f, y)) == pytest.approx(scores(two.terms(both, y)))


def test_labels_are_independent_coins():
    likelihood = make("multilabel")
    f, y = outputs(likelihood, 4, 6), targets(likelihood.target, 6)
    expected = scipy.stats.bernoulli(scipy.special.expit(f.numpy())).logpmf(y.numpy()).sum(axis=-1)
    np.testing.assert_allclose(likelihood.log_prob(f, y.double()), expected, rtol=1e-10)


def test_pinball_is_an_asymmetric_laplace_density():
    """scipy's has κ² = τ / (1 − τ) and scale s / √(τ (1 − τ))."""
    likelihood = make("quantile")
    f, y = outputs(likelihood, 4, 6), targets(likelihood.target, 6).double()
    expected = np.zeros((4, 6))
    for column in range(2):
        center, scale = REAL.center[column], REAL.scale[column]
        for place, level in enumerate(likelihood.levels):
            q = center + scale * f[..., 3 * column + place].numpy()
            density = scipy.stats.laplace_asymmetric(
                math.sqrt(level / (1 - level)), q, scale / math.sqrt(level * (1 - level))
            )
            expected += density.logpdf(y[:, column].numpy()) / 3
    np.testing.assert_allclose(likelihood.log_prob(f, y), expected, rtol=1e-10)


@pytest.mark.parametrize("case", ["gaussian", "gaussian given", "student-t", "quantile one"])
def test_densities_integrate_to_one(case):
    name = case.split()[0]
    likelihood = build_likelihood(name, ONE, **CASES[case][1])
    f = outputs(likelihood, 1)
    middle = 250 + 40 * float(f[0, 0])

    def density(y):
        return float(likelihood.log_prob(f, torch.tensor([[y]], dtype=torch.float64)).exp())

    total = sum(
        quad(lambda z: 40 * density(middle + 40 * z), *ends)[0]
        for ends in ((-np.inf, 0), (0, np.inf))
    )
    assert total == pytest.approx(1, abs=1e-6)


def test_probabilities_sum_to_one():
    count = build_likelihood("poisson", Target("count", ("n",), (6.0,)))
    f = outputs(count, 3, 1).expand(-1, 400, -1)
    whole = torch.arange(400, dtype=torch.float64)[:, None]
    assert count.log_prob(f, whole).exp().sum(dim=-1).tolist() == pytest.approx([1] * 3)
    for case in ("categorical", "bernoulli"):
        likelihood = make(case)
        classes = torch.arange(likelihood.target.classes)
        same = outputs(likelihood, 1).expand(len(classes), -1)
        total = likelihood.log_prob(same, classes).exp().sum()
        assert float(total) == pytest.approx(1)
    labels = make("multilabel")
    every = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * 3)
    assert float(
        labels.log_prob(outputs(labels, 1).expand(8, -1), every).exp().sum()
    ) == pytest.approx(1)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_differences(case):
    likelihood = make(case)
    y = targets(likelihood.target, 5)
    y = y.double() if y.is_floating_point() else y
    f = outputs(likelihood, 5).requires_grad_()
    assert torch.autograd.gradcheck(lambda f: likelihood.log_prob(f, y), f)


@pytest.mark.parametrize("case", CASES)
def test_vmap_is_a_loop(case):
    likelihood = make(case)
    f = outputs(likelihood, 4, 6, dtype=torch.float32)
    y = torch.stack([targets(likelihood.target, 6, seed) for seed in range(4)])
    looped = torch.stack([likelihood.log_prob(a, b) for a, b in zip(f, y, strict=True)])
    torch.testing.assert_close(torch.vmap(likelihood.log_prob)(f, y), looped)
    gradients = torch.vmap(torch.func.grad(likelihood.nll))(f, y)
    for gradient, a, b in zip(gradients, f, y, strict=True):
        a = a.clone().requires_grad_()
        torch.testing.assert_close(gradient, torch.autograd.grad(likelihood.nll(a, b), a)[0])
    # One target for all draws needs no vmap.
    looped = torch.stack([likelihood.log_prob(a, y[0]) for a in f])
    torch.testing.assert_close(likelihood.log_prob(f, y[0]), looped)


def test_training_on_classes_is_cross_entropy_bit_for_bit():
    likelihood = make("categorical")
    f, y = outputs(likelihood, 50, dtype=torch.float32), targets(likelihood.target, 50)
    mine, theirs = (f.clone().requires_grad_() for _ in range(2))
    likelihood.nll(mine, y).backward()
    functional.cross_entropy(theirs, y).backward()
    assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("case", CASES)
def test_the_loss_is_the_mean_over_samples(case):
    likelihood = make(case)
    f, y = outputs(likelihood, 6), targets(likelihood.target, 6)
    y = y.double() if y.is_floating_point() else y
    torch.testing.assert_close(likelihood.nll(f, y), -likelihood.log_prob(f, y).sum() / 6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("start", [-1e4, 1e4])
def test_a_bad_start_overflows_nothing(case, start):
    likelihood = make(case)
    f = torch.full((6, width(likelihood)), start, requires_grad=True)
    loss = likelihood.nll(f, targets(likelihood.target, 6))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(f.grad).all()


# ---- scores


@pytest.mark.parametrize("case", APART)
def test_nll_is_of_the_mean_density(case):
    likelihood = make(case)
    f, y = outputs(likelihood, 5, 7), targets(likelihood.target, 7)
    y = y.double() if y.is_floating_point() else y
    expected = -np.log(np.mean(np.exp(likelihood.log_prob(f, y).numpy()), axis=0))
    terms = likelihood.terms(f, y)
    np.testing.assert_allclose(terms["nll"], expected, rtol=1e-10)
    assert terms["count"].tolist() == [1] * 7
    assert {term.dtype for term in terms.values()} == {torch.float64}
    assert {term.shape for term in terms.values()} == {(7,)}
    assert likelihood.metric in likelihood.metrics(scores(terms))


@settings(deadline=None, max_examples=40)
@given(
    case=st.sampled_from(sorted(APART)),
    seed=st.integers(0, 2**31),
    n=st.integers(2, 12),
    draws=st.integers(1, 4),
    spread=st.floats(0.01, 20),
    data=st.data(),
)
def test_what_always_holds_of_scores(case, seed, n, draws, spread, data):
    """Scores of parts add to those of the whole; the mixture is no worse than its draws."""
    likelihood = make(case)
    y = targets(likelihood.target, n, seed)
    f = spread * outputs(likelihood, draws, n, seed=seed + 1, dtype=torch.float32)
    cut = data.draw(st.integers(1, n - 1))
    whole = scores(likelihood.terms(f, y))
    parts = [scores(likelihood.terms(f[:, s], y[s])) for s in (slice(cut), slice(cut, None))]
    added = {name: parts[0][name] + parts[1][name] for name in whole}
    assert whole == pytest.approx(added, rel=1e-9)
    assert likelihood.metrics(whole) == pytest.approx(likelihood.metrics(added), rel=1e-6)
    single = [scores(likelihood.terms(draw[None], y))["nll"] for draw in f]
    assert whole["nll"] <= np.mean(single) + 1e-6 * abs(np.mean(single))


@pytest.mark.parametrize("case", ["categorical", "bernoulli"])
def test_metrics_of_classes_are_scikit_learns(case):
    likelihood = make(case)
    f, y = outputs(likelihood, 3, 40), targets(likelihood.target, 40)
    probabilities = likelihood.mean(f).numpy()
    assert likelihood.metrics(scores(likelihood.terms(f, y))) == pytest.approx(
        {
            "accuracy": sk.accuracy_score(y, probabilities.argmax(axis=1)),
            "nll": sk.log_loss(y, probabilities),
        }
    )


def test_scores_of_one_network_are_those_of_its_log_softmax():
    likelihood = make("categorical")
    f, y = outputs(likelihood, 200, dtype=torch.float32), targets(likelihood.target, 200)
    nll = functional.nll_loss(functional.log_softmax(f, dim=-1), y, reduction="none")
    found = scores(likelihood.terms(f[None], y))
    assert found["correct"] == int((f.argmax(dim=-1) == y).sum())
    assert found["nll"] == float(nll.sum(dtype=torch.float64))


def test_metrics_of_labels_are_scikit_learns():
    likelihood = make("multilabel")
    f, y = outputs(likelihood, 3, 40), targets(likelihood.target, 40)
    predicted = (likelihood.mean(f) > 0.5).numpy()
    found = likelihood.metrics(scores(likelihood.terms(f, y)))
    assert found["label_accuracy"] == pytest.approx(1 - sk.hamming_loss(y, predicted))
    assert found["exact_match"] == pytest.approx(sk.accuracy_score(y, predicted))
    assert found["f1"] == pytest.approx(sk.f1_score(y, predicted, average="micro"))


@pytest.mark.parametrize("case", PARAMETRIC)
def test_metrics_of_numbers_are_scikit_learns(case):
    likelihood = make(case)
    f, y = 0.3 * outputs(likelihood, 3, 40), targets(likelihood.target, 40)
    mean = likelihood.mean(f).numpy()
    found = likelihood.metrics(scores(likelihood.terms(f, y)))
    assert found["rmse"] == pytest.approx(sk.root_mean_squared_error(y, mean))
    assert found["mae"] == pytest.approx(sk.mean_absolute_error(y, mean))
    assert found["r2"] == pytest.approx(sk.r2_score(y, mean))
    if likelihood.target.kind == "count":
        deviances = [sk.mean_poisson_deviance(a, b) for a, b in zip(y.T, mean.T, strict=True)]
        assert found["deviance"] == pytest.approx(np.mean(deviances))
    if likelihood.target.columns > 1:
        for name, a, b in zip(likelihood.target.names, y.T, mean.T, strict=True):
            assert found[f"rmse/{name}"] == pytest.approx(sk.root_mean_squared_error(a, b))


def test_metrics_of_quantiles_are_scikit_learns():
    likelihood = make("quantile")
    f, y = outputs(likelihood, 3, 40), targets(likelihood.target, 40)
    mine = np.sort(likelihood.quantiles(f).mean(dim=0).numpy(), axis=-1)
    found = likelihood.metrics(scores(likelihood.terms(f, y)))
    losses = [
        sk.mean_pinball_loss(y, mine[..., place], alpha=level)
        for place, level in enumerate(likelihood.levels)
    ]
    assert found["pinball"] == pytest.approx(np.mean(losses))
    inside = (mine[..., 0] <= y.numpy()) & (y.numpy() <= mine[..., -1])
    assert found["coverage"] == pytest.approx(inside.mean())


def test_variance_explained_far_from_zero_loses_no_digits():
    far = Target("real", ("time",), (1e9,), (2.0,))
    likelihood = build_likelihood("gaussian", far, noise=1.0)
    f = outputs(likelihood, 1, 50)
    y = targets(ONE, 50).double() / 40 + 1e9
    found = likelihood.metrics(scores(likelihood.terms(f, y)))
    assert found["r2"] == pytest.approx(sk.r2_score(y - 1e9, likelihood.mean(f) - 1e9), rel=1e-6)


def test_a_target_that_is_not_a_number_is_not_predicted():
    likelihood = make("gaussian given")
    y = targets(REAL, 4)
    y[2, 1] = math.nan
    assert likelihood.terms(outputs(likelihood, 2, 4), y)["nll"].isinf().tolist() == [
        False,
        False,
        True,
        False,
    ]


def test_variance_explained_of_a_constant_and_of_one_sample():
    likelihood = build_likelihood("gaussian", ONE, noise=1.0)
    y = torch.full((4, 1), 290.0)
    f = torch.ones(1, 4, 1)
    assert likelihood.metrics(scores(likelihood.terms(f, y)))["r2"] == 1
    assert likelihood.metrics(scores(likelihood.terms(2 * f, y)))["r2"] == 0
    assert math.isnan(likelihood.metrics(scores(likelihood.terms(f[:, :1], y[:1])))["r2"])
    # Sums leave a little of the variance of equal targets, on either side of zero.
    for count in range(2, 40):
        y = torch.full((count, 1), -1.321)
        told = likelihood.metrics(scores(likelihood.terms(torch.ones(1, count, 1), y)))
        assert told["r2"] == 0


@pytest.mark.parametrize("case", CASES)
def test_metrics_of_nothing_are_nan(case):
    likelihood = make(case)
    f, y = outputs(likelihood, 2, 0), targets(likelihood.target, 0)
    found = likelihood.metrics(scores(likelihood.terms(f, y)))
    assert math.isnan(found[likelihood.metric])
    assert math.isnan(found["nll"])


@pytest.mark.parametrize("case", APART)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_outputs_that_are_not_finite_are_wrong(case, value):
    likelihood = make(case)
    f, y = outputs(likelihood, 2, 5, dtype=torch.float32), targets(likelihood.target, 5)
    clean = likelihood.terms(f, y)
    f[1, 3] = value
    terms = likelihood.terms(f, y)
    assert terms["nll"][3] == math.inf
    for name in ("correct", "label_accuracy", "exact_match"):
        assert name not in terms or terms[name][3] == 0
    assert not any(term.isnan().any() for term in terms.values())
    others = torch.tensor([0, 1, 2, 4])
    for name in terms:
        assert torch.equal(terms[name][others], clean[name][others])
    assert likelihood.metrics(scores(terms))["nll"] == math.inf


def test_a_class_that_is_ruled_out_leaves_a_prediction():
    likelihood = build_likelihood("categorical", Target("class", tuple("abc")))
    f = torch.zeros(2, 3, 3)
    f[:, 0, 1] = f[0, 1, 2] = -math.inf
    f[0, 2] = math.nan
    found = answers(likelihood, f, conformal=Conformal(0.9, "probability", (1.0,), 99))
    probability = np.stack([found[f"p_{name}"] for name in "abc"], axis=1)
    assert probability[:2] == pytest.approx(np.array([[1 / 2, 0, 1 / 2], [5 / 12, 5 / 12, 1 / 6]]))
    assert np.isnan(probability[2]).all()
    assert found["predicted"].tolist() == ["a", "a", ""]
    assert found["set"].tolist() == [("a", "c"), ("a", "b"), ("a", "b", "c")]
    assert np.isfinite(found["entropy"][:2]).all()


@settings(deadline=None, max_examples=30)
@given(
    case=st.sampled_from(["gaussian", "gaussian given", "student-t given", "quantile"]),
    factor=st.floats(1e-3, 1e3),
    shift=st.floats(-100, 100),
)
def test_another_unit_of_the_target_shifts_nll_by_its_logarithm(case, factor, shift):
    likelihood = make(case)
    target = likelihood.target
    other = replace(
        target,
        center=tuple(factor * c + shift for c in target.center),
        scale=tuple(factor * s for s in target.scale),
    )
    changed = likelihood.model_copy(update={"target": other})
    f, y = outputs(likelihood, 3, 20), targets(target, 20).double()
    before = likelihood.metrics(scores(likelihood.terms(f, y)))
    after = changed.metrics(scores(changed.terms(f, factor * y + shift)))
    assert after["nll"] == pytest.approx(
        before["nll"] + target.columns * math.log(factor), abs=1e-6
    )
    headline = likelihood.metric
    assert after[headline] == pytest.approx(factor * before[headline], rel=1e-6)
    if "r2" in before:
        assert after["r2"] == pytest.approx(before["r2"], abs=1e-6)


# ---- means, stds, intervals


@pytest.mark.parametrize("case", PARAMETRIC)
def test_moments_of_a_mixture(case):
    """E y and E y² of every draw, averaged: another way than the law of total variance."""
    likelihood = make(case)
    f = 0.3 * outputs(likelihood, 5, 7)
    each = scipy_distribution(likelihood, f)
    mean = each.mean().mean(axis=0)
    second = (each.var() + each.mean() ** 2).mean(axis=0)
    np.testing.assert_allclose(likelihood.mean(f), mean, rtol=1e-9)
    std = likelihood.std(f)
    np.testing.assert_allclose(std.total, np.sqrt(second - mean**2), rtol=1e-6)
    np.testing.assert_allclose(std.between, each.mean().std(axis=0), rtol=1e-9)
    assert likelihood.std(f[:1]).between.abs().max() == 0


@pytest.mark.parametrize("case", ["gaussian", "student-t", "student-t given", "gaussian given"])
def test_intervals_of_mixtures_are_roots_of_their_distribution(case):
    likelihood = make(case)
    f = outputs(likelihood, 4, 3)
    low, high = likelihood.interval(f, 0.9)
    each = scipy_distribution(likelihood, f)
    for sample in range(3):
        for column in range(likelihood.target.columns):
            for p, found in ((0.05, low), (0.95, high)):

                def excess(y, p=p, sample=sample, column=column):
                    points = np.zeros((1, 3, likelihood.target.columns)) + y
                    return each.cdf(points)[:, sample, column].mean() - p

                root = brentq(excess, -1e6, 1e6, xtol=1e-11, rtol=1e-14)
                assert float(found[sample, column]) == pytest.approx(root, rel=1e-9)


@pytest.mark.parametrize("case", PARAMETRIC)
def test_the_interval_of_one_draw_is_exact(case):
    likelihood = make(case)
    f = outputs(likelihood, 1, 4)
    low, high = likelihood.interval(f, 0.8)
    each = scipy_distribution(likelihood, f[0])
    np.testing.assert_allclose(low, each.ppf(0.1), rtol=1e-9)
    np.testing.assert_allclose(high, each.ppf(0.9), rtol=1e-9)


@pytest.mark.parametrize("case", ["poisson", "poisson center"])
def test_intervals_of_counts_are_the_least_that_reach(case):
    likelihood = make(case)
    f = 0.5 * outputs(likelihood, 6, 5)
    low, high = likelihood.interval(f, 0.9)
    counts = np.arange(5000)[:, None, None, None]
    reached = scipy_distribution(likelihood, f).cdf(counts).mean(axis=1)
    np.testing.assert_array_equal(low, (reached < 0.05).sum(axis=0))
    np.testing.assert_array_equal(high, (reached < 0.95).sum(axis=0))


def test_intervals_of_quantiles_are_outputs():
    likelihood = build_likelihood("quantile", ONE, levels=(0.1, 0.25, 0.5, 0.75, 0.9))
    f = torch.tensor([[[1.0, 0.0, 2.0, 3.0, 4.0]], [[3.0, 2.0, 4.0, 5.0, 6.0]]])
    # Of the means 2, 1, 3, 4, 5 the first two cross.
    low, high = likelihood.interval(f, 0.8)
    assert (low.item(), high.item()) == (250 + 40 * 1, 250 + 40 * 5)
    low, high = likelihood.interval(f, 0.5)
    assert (low.item(), high.item()) == (250 + 40 * 2, 250 + 40 * 4)
    assert likelihood.mean(f).tolist() == [[250 + 40 * 3]]
    without_median = build_likelihood("quantile", ONE, levels=(0.25, 0.4, 0.7))
    assert without_median.mean(f[:1, :, 2:]).tolist() == [[250 + 40 * 3]]
    with pytest.raises(ConfigError, match=r"level 0.05, but task\.levels are 0.1, 0.25"):
        likelihood.interval(f, 0.9)


@pytest.mark.parametrize("case", NUMERIC)
@pytest.mark.parametrize("level", [0.0, 1.0, 90.0])
def test_levels_of_intervals_are_probabilities(case, level):
    likelihood = make(case)
    with pytest.raises(ConfigError, match="above 0 and below 1"):
        likelihood.interval(outputs(likelihood, 1, 2), level)


@pytest.mark.parametrize("level", [0.1, 0.5, 0.9])
def test_the_best_constant_is_the_quantile_of_the_sample(level):
    likelihood = build_likelihood("quantile", ONE, levels=level)
    y = targets(ONE, 401)
    constants = torch.linspace(-3, 3, 1201)
    losses = -likelihood.log_prob(constants[:, None, None].expand(-1, 401, 1), y).sum(dim=-1)
    best = 250 + 40 * float(constants[losses.argmin()])
    assert best == pytest.approx(np.quantile(y.numpy(), level), abs=0.2)


@pytest.mark.parametrize("case", ["categorical", "bernoulli"])
def test_uncertainty_of_classes(case):
    likelihood = make(case)
    f = outputs(likelihood, 4, 6)
    found = likelihood.uncertainty(f)
    both = f if case == "categorical" else torch.cat([torch.zeros_like(f), f], dim=-1)
    expected = uncertainty(torch.log_softmax(both, dim=-1))
    torch.testing.assert_close(found.entropy, expected.entropy)
    torch.testing.assert_close(found.information, expected.information)
    mean = torch.softmax(both, dim=-1).mean(dim=0)
    torch.testing.assert_close(likelihood.mean(f), mean)
    torch.testing.assert_close(likelihood.log_probabilities(f), mean.log())


def test_capabilities():
    for case in CASES:
        likelihood = make(case)
        kind = likelihood.target.kind
        assert isinstance(likelihood, Classes) == (kind == "class")
        assert isinstance(likelihood, Numeric) == (kind in ("real", "count"))
        assert isinstance(likelihood, Parametric) == (case in PARAMETRIC)


# ---- the head


class Net(nn.Module):
    """Inputs of width 3 to the predictive mean in the unit of the target."""

    def __init__(self, likelihood):
        super().__init__()
        head = likelihood.head()
        self.body = nn.Sequential(nn.Linear(3, likelihood.outputs), *([head] if head else []))
        self.likelihood = likelihood

    def forward(self, x):
        return self.likelihood.mean(self.body(x)[None])


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_heads_fit(case):
    likelihood = make(case)
    net = Net(likelihood)
    x = torch.randn(7, 3)
    f = net.body(x)
    y = targets(likelihood.target, 7)
    assert likelihood.log_prob(f, y).shape == (7,)
    learnt = case in ("gaussian", "student-t")
    assert (likelihood.head() is not None) == learnt
    if learnt:
        assert [(n, p.shape) for n, p in likelihood.head().named_parameters()] == [
            ("log_std", (likelihood.target.columns,))
        ]
        start = likelihood.std(likelihood.head()(torch.zeros(1, 1, likelihood.outputs))).total
        noise = math.sqrt(2) if case == "student-t" else 1.0  # of four degrees of freedom
        torch.testing.assert_close(start[0], noise * torch.tensor(likelihood.target.scale))


def test_learnt_noise_works_as_a_function_and_in_files():
    likelihood = make("gaussian")
    net = nn.Sequential(nn.Linear(3, likelihood.outputs), likelihood.head())
    x, y = torch.randn(7, 3), targets(REAL, 7)
    weights = load(save(net.state_dict()))
    weights["1.log_std"] = torch.tensor([-1.0, 0.5])
    f = torch.func.functional_call(net, weights, (x,))
    assert f[:, 2:].tolist() == [[-1.0, 0.5]] * 7
    stacked = {name: torch.stack([w, w + 1]) for name, w in weights.items()}

    def loss(weights):
        return likelihood.nll(torch.func.functional_call(net, weights, (x,)), y)

    both = torch.vmap(torch.func.grad(loss))(stacked)
    for place in range(2):
        own = torch.func.grad(loss)({name: w[place] for name, w in stacked.items()})
        for name in own:
            torch.testing.assert_close(both[name][place], own[name])
        assert own["1.log_std"].abs().min() > 0


@pytest.mark.parametrize("case", ["gaussian", "student-t", "poisson center", "categorical"])
def test_predictions_export(case):
    """The network with its head and the mean in the target's unit, as a program, any batch."""
    net = Net(make(case)).eval()
    x = torch.randn(4, 3)
    batch = torch.export.Dim("batch")
    program = torch.export.export(net, (x,), dynamic_shapes=({0: batch},))
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    more = torch.randn(9, 3)
    found = torch.export.load(buffer).module()(more)
    torch.testing.assert_close(found, net(more))


def test_learnt_noise_exports_to_onnx(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    net = nn.Sequential(nn.Linear(3, 2), make("gaussian").head()).eval()
    nn.init.normal_(net[1].log_std)
    file = str(tmp_path / "net.onnx")
    torch.onnx.export(
        net,
        (torch.randn(4, 3),),
        file,
        dynamo=True,
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        verbose=False,
    )
    session = onnxruntime.InferenceSession(file)
    x = torch.randn(9, 3)
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(found, net(x).detach(), rtol=1e-5, atol=1e-6)


def test_learnt_noise_finds_the_std_of_the_residuals():
    """The optimum of log σ is the root mean squared residual."""
    likelihood = build_likelihood("gaussian", ONE)
    head = likelihood.head()
    y = targets(ONE, 500)
    f = torch.zeros(500, 1)
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=50)

    def closure():
        optimizer.zero_grad()
        loss = likelihood.nll(head(f), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    residual = float((y - 250).square().mean().sqrt())
    assert likelihood.std(head(f)[None]).total[0].item() == pytest.approx(residual, rel=1e-4)


# ---- names and errors


def test_names_are_known_without_pytorch():
    code = (
        "import sys; from fedbayes.likelihoods import LIKELIHOODS, default_likelihood; "
        "print(*LIKELIHOODS, 'gaussian' in LIKELIHOODS, len(LIKELIHOODS)); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == ["True", "8"]


@pytest.mark.parametrize("case", CASES)
def test_a_likelihood_goes_to_other_processes_and_into_schemas(case):
    likelihood = make(case)
    assert pickle.loads(pickle.dumps(likelihood)) == likelihood
    assert hash(likelihood) == hash(make(case))
    settings = type(likelihood).model_json_schema()["properties"]
    assert settings.keys() == {"target", *likelihood.model_dump()}


def test_every_likelihood_says_what_it_is():
    for name, kind in LIKELIHOODS.items():
        assert kind.name == name
        assert kind.summary
        assert set(kind.kinds) <= {"class", "labels", "real", "count", "survival"}
    assert {case.split()[0] for case in CASES} == set(LIKELIHOODS)


def test_auto_is_by_the_kind_of_the_target():
    for case, expected in [
        ("categorical", "categorical"),
        ("bernoulli", "categorical"),
        ("multilabel", "multilabel"),
        ("gaussian", "gaussian"),
        ("poisson", "poisson"),
        ("cox", "cox"),
    ]:
        target = CASES[case][0]
        assert default_likelihood(target) == expected
        assert build_likelihood("auto", target).name == expected


def test_settings_are_completed_before_there_is_a_target():
    assert complete_likelihood("gaussian") == {"noise": "learnt"}
    assert complete_likelihood("student-t", noise=2) == {"noise": 2.0, "df": 4.0}
    assert complete_likelihood("quantile", levels="0.1, 0.9") == {"levels": [0.1, 0.9], "noise": 1}
    assert complete_likelihood("auto") == {}
    with pytest.raises(ConfigError, match=r"task\.df is a setting of student-t\. Set"):
        complete_likelihood("auto", df=4)
    with pytest.raises(ConfigError, match=r"task\.dof is not a setting of .*any likelihood"):
        complete_likelihood("auto", dof=4)
    assert make("quantile").model_dump(mode="json").keys() == {"levels", "noise"}


@pytest.mark.parametrize(
    ("name", "target", "chosen", "words"),
    [
        ("gausian", ONE, {}, "'gausian' (did you mean 'gaussian'?). Choose auto, categorical"),
        ("gaussian", ONE, {"noize": 1}, "task.noize is not a setting of"),
        ("poisson", COUNT, {"noise": 1}, "task.noise is not a setting of"),
        ("gaussian", ONE, {"noise": -1}, "task.noise is -1; input should be greater than 0"),
        ("gaussian", ONE, {"noise": "loud"}, "or input should be 'learnt' or 'each'"),
        ("student-t", ONE, {"df": 2}, "task.df is 2; input should be greater than 2"),
        ("quantile", ONE, {"levels": (0.5, 1.0)}, "levels must be above 0 and below 1"),
        ("quantile", ONE, {"levels": (0.5, 0.1)}, "levels must increase"),
        ("gaussian", COUNT, {}, "with real targets, but this target is of kind count. Choose pois"),
        ("poisson", ONE, {}, "Choose gaussian or student-t or quantile"),
        ("multilabel", CASES["categorical"][0], {}, "Choose categorical or bernoulli"),
        ("bernoulli", CASES["categorical"][0], {}, "the target has 3. Choose categorical"),
        ("gaussian", Target("real", ("price",)), {}, "needs center and scale of the target"),
        ("nowhere:Thing", ONE, {}, "cannot find the likelihood 'nowhere:Thing'"),
        ("math:sqrt", ONE, {}, "is not a class derived from fedbayes.likelihoods.Likelihood"),
    ],
)
def test_what_cannot_be_is_refused(name, target, chosen, words):
    with pytest.raises(ConfigError) as caught:
        build_likelihood(name, target, **chosen)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_outputs_and_targets_of_other_widths_are_refused():
    likelihood = build_likelihood("gaussian", ONE)
    with pytest.raises(ModelError, match=r"has 1 outputs.* gaussian needs 2\. If.*task.noise=1"):
        likelihood.log_prob(torch.zeros(4, 1), torch.zeros(4, 1))
    with pytest.raises(ModelError, match=r"shape \(4,\), expected \(4, 1\)"):
        likelihood.log_prob(torch.zeros(4, 2), torch.zeros(4))


def test_the_page_tells_every_likelihood_setting_and_metric():

    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    parts = dict(re.findall(r"^### (\S+)\n(.*?)(?=^##)", page, re.M | re.S))
    assert set(LIKELIHOODS) <= parts.keys()
    for case in CASES:
        likelihood = make(case)
        told = parts[likelihood.name]
        for setting in likelihood.model_dump():
            assert f"| `{setting}` |" in told
        if not likelihood.model_dump():
            assert "No settings" in told
        found = likelihood.metrics(
            scores(likelihood.terms(outputs(likelihood, 2, 3), targets(likelihood.target, 3)))
        )
        told += parts["categorical"] * (likelihood.name == "bernoulli")
        told += parts["gaussian"] * (likelihood.name in ("student-t", "poisson"))
        for metric in found:
            assert f"`{metric.split('/')[0]}" in told


def expected_difference(likelihood, f, g):
    """E[log p(y | f) − log p(y | g)] under p(y | f) of one sample, by sums over a grid of y."""
    target, step = likelihood.target, 1.0
    if target.kind == "class":
        y = torch.arange(target.classes)
    elif target.kind == "real":
        step = 0.05
        y = (target.center[0] + torch.arange(-5000, 5000, step).double())[:, None]
    else:
        sides = [range(2 if target.kind == "labels" else 60)] * target.columns
        y = torch.tensor(list(itertools.product(*sides))).double()
    one, other = (likelihood.log_prob(h.expand(len(y), -1), y) for h in (f, g))
    return step * float((one.exp() * (one - other)).sum())


@pytest.mark.parametrize(
    ("name", "target", "chosen"),
    [
        ("categorical", CASES["categorical"][0], {}),
        ("bernoulli", CASES["bernoulli"][0], {}),
        ("multilabel", CASES["multilabel"][0], {}),
        ("gaussian", ONE, {"noise": "each"}),
        ("gaussian", ONE, {"noise": 0.3}),
        ("student-t", ONE, {"noise": "each"}),
        ("student-t", ONE, {"noise": 0.5, "df": 7}),
        ("poisson", COUNT, {}),
        ("quantile", ONE, {"levels": 0.9, "noise": 0.4}),
    ],
)
def test_divergence_is_the_expected_difference_of_log_densities(name, target, chosen):
    likelihood = build_likelihood(name, target, **chosen)
    for seed in range(3):
        f, g = 0.7 * outputs(likelihood, 2, seed=seed)
        wanted = expected_difference(likelihood, f, g)
        found = float(likelihood.divergence(f[None], g[None])[0])
        assert found == pytest.approx(wanted, rel=5e-3, abs=2e-4)


def test_divergence_of_several_columns_and_levels_adds_and_averages():
    both, likelihood = make("gaussian each"), make("quantile")
    f, g = outputs(both, 2, 5)
    one = build_likelihood("gaussian", ONE, noise="each")
    parts = [one.divergence(f[:, [c, c + 2]], g[:, [c, c + 2]]) for c in range(2)]
    torch.testing.assert_close(both.divergence(f, g), parts[0] + parts[1])
    f, g = outputs(likelihood, 2, 5)
    levels = likelihood.levels
    single = [build_likelihood("quantile", ONE, levels=level) for level in levels]
    parts = [
        single[i].divergence(f[:, [c * 3 + i]], g[:, [c * 3 + i]])
        for c in range(2)
        for i in range(len(levels))
    ]
    torch.testing.assert_close(likelihood.divergence(f, g), sum(parts) / len(levels))


@pytest.mark.parametrize("case", [case for case in APART if not case.startswith("quantile")])
def test_pooled_outputs_are_nearest_to_the_mixture(case):
    """No direction lowers Σ_s w_s KL(p_s ‖ p_f), and elsewhere it is higher."""
    likelihood = make(case)
    draws = 0.7 * outputs(likelihood, 4, 6)
    weights = torch.tensor([0.1, 0.4, 0.5, 0.0], dtype=torch.float64)

    def distance(f):
        each = torch.stack([likelihood.divergence(draw, f) for draw in draws])
        return (weights @ each).sum()

    f = likelihood.pooled(draws, weights)
    if case.startswith("student"):
        means, variances = likelihood.moments(draws)
        w = weights[:, None, None]
        mean = (w * means).sum(0)
        torch.testing.assert_close(likelihood.moments(f)[0], mean)
        if isinstance(likelihood.noise, str):
            whole = (w * (variances + means.square())).sum(0) - mean.square()
            torch.testing.assert_close(likelihood.moments(f)[1], whole)
        return
    f = f.requires_grad_()
    value = distance(f)
    (slope,) = torch.autograd.grad(value, f)
    assert float(slope.abs().max()) < 1e-4
    for seed in range(5):
        other = f.detach() + 0.1 * outputs(likelihood, 6, seed=seed)
        assert distance(other) > value.detach()


def test_pooled_quantiles_are_the_combined_ones():
    likelihood = make("quantile")
    draws = outputs(likelihood, 4, 6)
    pooled = likelihood.pooled(draws, torch.full((4,), 0.25))
    torch.testing.assert_close(likelihood.quantiles(pooled), likelihood.combined(draws))


def test_likelihoods_of_ones_own_need_not_say():
    bare = type("Bare", (type(make("gaussian")),), {"name": "bare", "pooled": Numeric.pooled})
    with pytest.raises(ConfigError, match="bare cannot combine predictions"):
        bare(target=REAL).pooled(torch.zeros(2, 3, 4), torch.full((2,), 0.5))
