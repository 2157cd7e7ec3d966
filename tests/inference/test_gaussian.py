"""Natural parameters against means, variances and integrals on a grid."""

from functools import partial

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Normal, kl_divergence

from fedbayes.inference.gaussian import (
    NaturalGaussian,
    divergence,
    kl,
    renyi_terms,
    standard,
)

reals = st.floats(-5, 5)
positive = st.floats(0.05, 5)


def renyi(mean, precision, prior, alpha):
    terms = partial(renyi_terms, alpha=alpha)
    return divergence(terms, mean, precision, prior.precision, prior.mean)


def one(value):
    return {"w": torch.tensor([value, 2 * value], dtype=torch.float64)}


@settings(deadline=None, max_examples=50)
@given(reals, positive)
def test_means_and_variances_come_back(mean, variance):
    gaussian = NaturalGaussian.of(one(mean), one(variance))
    torch.testing.assert_close(gaussian.mean, one(mean))
    torch.testing.assert_close(gaussian.std["w"].square(), one(variance)["w"])


@settings(deadline=None, max_examples=50)
@given(reals, positive, reals, positive, st.floats(0.1, 3))
def test_densities_multiply_divide_and_have_powers(mean, variance, other_mean, other, exponent):
    x = torch.linspace(-3, 3, 5, dtype=torch.float64)[:, None]

    def log(gaussian):
        """The density up to a constant, whether it can be normalized or not."""
        return gaussian.shift["w"] * x - 0.5 * gaussian.precision["w"] * x.square()

    first, second = (
        NaturalGaussian.of(one(mean), one(variance)),
        NaturalGaussian.of(one(other_mean), one(other)),
    )
    exact = Normal(one(mean)["w"], one(variance)["w"].sqrt()).log_prob(x)
    torch.testing.assert_close(log(first) - log(first)[0], exact - exact[0])
    torch.testing.assert_close(log(first * second), log(first) + log(second))
    torch.testing.assert_close(log(first / second), log(first) - log(second))
    torch.testing.assert_close(log(first**exponent), exponent * log(first))


def test_the_standard_ones_std():
    like = {"w": torch.ones(2, 3, dtype=torch.float16)}
    for std in (1.0, 0.2):
        gaussian = standard(like, std) if std != 1.0 else standard(like)
        assert gaussian.mean["w"].tolist() == [[0.0] * 3] * 2
        torch.testing.assert_close(gaussian.std["w"], torch.full((2, 3), std, dtype=torch.float64))


@settings(deadline=None, max_examples=50)
@given(reals, positive, reals, positive)
def test_kl_is_that_of_torch_over_all_names(mean, variance, other_mean, other):
    m, v = {**one(mean), "b": torch.tensor([[0.3]]).double()}, {**one(variance), "b": one(1.0)["w"]}
    v["b"] = v["b"][:1, None]
    prior = NaturalGaussian.of(
        {**one(other_mean), "b": m["b"] + 1}, {**one(other), "b": 2 * v["b"]}
    )
    wanted = sum(
        kl_divergence(Normal(m[n], v[n].sqrt()), Normal(prior.mean[n], prior.std[n])).sum()
        for n in m
    )
    found = kl(m, {n: 1 / t for n, t in v.items()}, prior)
    assert found.shape == ()
    torch.testing.assert_close(found, wanted)


def test_another_type_is_for_both_parameters():
    gaussian = standard(one(1.0)).to("cpu", torch.float16)
    assert gaussian.precision["w"].dtype == gaussian.shift["w"].dtype == torch.float16


@settings(deadline=None, max_examples=40)
@given(reals, st.floats(0.5, 2), reals, st.floats(0.5, 2), st.floats(0.05, 1.25))
def test_renyi_is_the_integral(mean, variance, other_mean, other, alpha):
    """1/(α(α − 1)) log ∫ q^α p^(1−α), of two entries."""
    if alpha == 1 or alpha / variance + (1 - alpha) / other < 0.05:
        return
    prior = NaturalGaussian.of(one(other_mean), one(other))
    found = renyi(one(mean), {n: 1 / v for n, v in one(variance).items()}, prior, alpha)
    x = torch.linspace(-150, 150, 60_001, dtype=torch.float64)[:, None]
    q = Normal(one(mean)["w"], one(variance)["w"].sqrt()).log_prob(x)
    p = Normal(one(other_mean)["w"], one(other)["w"].sqrt()).log_prob(x)
    integral = torch.logsumexp(alpha * q + (1 - alpha) * p, dim=0) + np.log(300 / 60_000)
    torch.testing.assert_close(found, integral.sum() / (alpha * (alpha - 1)), rtol=1e-5, atol=1e-6)
    assert found > -1e-9


@settings(deadline=None, max_examples=30)
@given(reals, positive, reals, positive)
def test_renyi_tends_to_kl(mean, variance, other_mean, other):
    prior = NaturalGaussian.of(one(other_mean), one(other))
    precision = {n: 1 / v for n, v in one(variance).items()}
    wanted = kl(one(mean), precision, prior)
    for alpha in (1 - 1e-6, 1 + 1e-6):
        found = renyi(one(mean), precision, prior, alpha)
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


@settings(deadline=None, max_examples=30)
@given(
    st.integers(0, 1000),
    st.one_of(st.none(), st.floats(0.1, 0.9), st.floats(1.1, 4.0)),
)
def test_gradients_are_those_of_differences(seed, alpha):
    """Of both divergences, in means and log-precisions, also where Rényi's is infinite."""
    rng = torch.Generator().manual_seed(seed)
    mean, log_precision, log_other, shift = torch.randn(4, 6, generator=rng, dtype=torch.float64)
    prior = NaturalGaussian({"w": log_other.exp()}, {"w": shift})

    def apart(m, p):
        if alpha is None:
            return kl({"w": m}, {"w": p.exp()}, prior)
        return renyi({"w": m}, {"w": p.exp()}, prior, alpha)

    at = (mean.requires_grad_(), log_precision.requires_grad_())
    assert torch.autograd.gradcheck(apart, at, eps=1e-7, atol=1e-3, rtol=1e-4)


def test_renyi_leads_back_where_it_is_infinite():
    """Of order 3 a q that is three times as wide as the prior is out of bounds."""
    log_precision = torch.tensor([1 / 9]).double().log().requires_grad_()
    prior = standard({"w": torch.zeros(1)})
    value = renyi({"w": torch.zeros(1).double()}, {"w": log_precision.exp()}, prior, 3.0)
    (gradient,) = torch.autograd.grad(value, log_precision)
    assert torch.isfinite(value)
    assert float(gradient) < 0
