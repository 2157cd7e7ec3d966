"""Drawn weights and their gradients next to automatic differentiation of the plain formulas."""

from functools import partial

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from fedbayes.inference.gaussian import kl_terms, renyi_terms
from fedbayes.inference.reparametrized import reparametrized

LIKE = {"w": torch.zeros(3, 4), "b": torch.zeros(3), "scale": torch.zeros(())}


def normals(seed, *axes):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn((*axes, 16), generator=rng, dtype=torch.float64)


def positive(seed):
    return normals(seed).exp()


def leaf(seed):
    return normals(seed).requires_grad_()


def network(entries):
    return {"w": entries[:12].view(3, 4), "b": entries[12:15], "scale": entries[15]}


def fit(weights):
    """Some function of weights; it does without the bias."""
    return (weights["w"] * weights["scale"]).cos().sum() + weights["w"].square().sum()


def renyi(q, p, alpha=0.6):
    """1/(α(α − 1)) log ∫ q^α p^(1−α), by the normal with the product's natural parameters."""
    weights = alpha / q.variance, (1 - alpha) / p.variance
    precision, shift = sum(weights), weights[0] * q.mean + weights[1] * p.mean
    log = 0.5 * (shift.square() / precision - precision.log())
    for share, one in ((alpha, q), (1 - alpha, p)):
        log = log - share * (one.mean.square() / (2 * one.variance) + one.scale.log())
    return log / (alpha * (alpha - 1))


DIVERGENCES = {
    "kl": (kl_terms, kl_divergence),
    "renyi": (partial(renyi_terms, alpha=0.6), renyi),
}


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("rested", [False, True])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_values_and_gradients_are_those_of_the_plain_formulas(kind, rested, samples):
    terms, known = DIVERGENCES[kind]
    mean, log, noise = leaf(0), leaf(1), normals(2, samples)
    precision, centre, rest = positive(3), normals(4), positive(5) if rested else None
    drawn, apart = reparametrized(LIKE, mean, log, noise, terms, precision, centre, rest=rest)
    std = (log.exp() + (rest if rested else 0)).rsqrt()
    plain = [network(mean + std * each) for each in noise]
    wanted = known(Normal(mean, std), Normal(centre, precision.rsqrt())).sum()
    torch.testing.assert_close(drawn, plain)
    torch.testing.assert_close(apart, wanted)
    energies = [
        sum(map(fit, weights)) / samples + 0.3 * divergence
        for weights, divergence in ((drawn, apart), (plain, wanted))
    ]
    found, expected = (torch.autograd.grad(energy, (mean, log)) for energy in energies)
    torch.testing.assert_close(found, expected)


def test_problems_of_clients_can_be_mapped():
    given = [normals(0), normals(1), normals(2, 2), positive(3), normals(4), positive(5)]
    other = [normals(10), normals(11), normals(12, 2), positive(13), normals(14), positive(15)]

    def energy(mean, log, noise, precision, centre, rest):
        drawn, apart = reparametrized(
            LIKE, mean, log, noise, kl_terms, precision, centre, rest=rest
        )
        return sum(map(fit, drawn)) + apart

    stacked = map(torch.stack, zip(given, other, strict=True))
    slope = torch.func.grad_and_value(energy, argnums=(0, 1))
    mapped = torch.func.vmap(slope)(*stacked)
    torch.testing.assert_close(mapped[1], torch.stack([energy(*given), energy(*other)]))
    for row, problem in enumerate((given, other)):
        gradients, _ = slope(*problem)
        for found, wanted in zip(mapped[0], gradients, strict=True):
            torch.testing.assert_close(found[row], wanted)


def test_nothing_that_is_given_changes_and_gradients_are_not_taken_twice():
    mean, log, noise, fixed = leaf(0), leaf(1), normals(2, 1), [positive(3), normals(4)]
    kept = [each.clone() for each in (noise, *fixed)]
    drawn, apart = reparametrized(LIKE, mean, log, noise, kl_terms, *fixed)
    energy = fit(drawn[0]) + apart
    torch.autograd.grad(energy, (mean, log), retain_graph=True)
    torch.testing.assert_close([noise, *fixed], kept, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="inplace"):
        torch.autograd.grad(energy, (mean, log))


def test_draws_have_the_posteriors_moments():
    mean, log, noise = normals(0), normals(1), normals(2, 20_000)
    fixed = positive(3), normals(4)
    drawn, _ = reparametrized(LIKE, mean, log, noise, kl_terms, *fixed, rest=positive(5))
    std = network((log.exp() + positive(5)).rsqrt())
    for name, m in network(mean).items():
        found = torch.stack([weights[name] for weights in drawn])
        assert ((found.mean(0) - m).abs() < 5 * std[name] / 20_000**0.5).all()
        torch.testing.assert_close(found.std(0), std[name], rtol=0.03, atol=0)
