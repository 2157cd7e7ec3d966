"""ε against formulas, brute force and other accountants."""

import math
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import norm

pytest.importorskip("dp_accounting")

from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant

from fedbayes.federation.privacy.accounting import ADD_REMOVE, REPLACE, Spent, epsilons

DELTA = 1e-5
EVERYBODY = (0, 1, 2)


def closed_form(mu, delta=DELTA):
    """Balle and Wang 2018, Theorem 8."""

    def excess(eps):
        tail = norm.logcdf(-mu / 2 - eps / mu)
        return norm.cdf(mu / 2 - eps / mu) - math.exp(eps + tail) - delta

    return brentq(excess, 0, 1e4) if excess(0) > 0 else 0.0


@pytest.mark.parametrize(("noise", "times"), [(1.0, 1), (8.0, 100), (0.1, 2)])
def test_rounds_of_one_client_are_one_gaussian_mechanism(noise, times):
    spent = [Spent(noise, members=(4,))] * times
    found = epsilons(spent, DELTA)
    assert found[REPLACE] == pytest.approx(closed_form(2 * math.sqrt(times) / noise), rel=1e-6)
    assert found[ADD_REMOVE] == pytest.approx(closed_form(math.sqrt(times) / noise), rel=1e-6)


def test_rounds_count_with_the_noise_that_they_had():
    """Two rounds at z = 0.1 and one at 10 are no three at 10."""
    spent = [Spent(0.1, members=EVERYBODY)] * 2 + [Spent(10.0, members=EVERYBODY)]
    mu = math.sqrt(2 * 20**2 + 0.2**2)
    assert epsilons(spent, DELTA)[REPLACE] == pytest.approx(closed_form(mu), rel=1e-6)
    assert epsilons(spent, DELTA)[REPLACE] > 500


def test_a_round_without_noise_leaves_nothing():
    spent = [Spent(1.0, members=EVERYBODY), Spent(0.0, members=EVERYBODY)]
    assert set(epsilons(spent, DELTA).values()) == {math.inf}
    assert set(epsilons([], DELTA).values()) == {0.0}


def test_the_client_that_was_in_most_rounds_counts():
    spent = [Spent(2.0, members=(0, 1)), Spent(2.0, members=(1, 2)), Spent(1.0, members=(0,))]
    mu = 2 * math.sqrt(1 / 4 + 1)  # client 0
    assert epsilons(spent, DELTA)[REPLACE] == pytest.approx(closed_form(mu), rel=1e-6)


def sampled_epsilon(rate, noise, delta=DELTA):
    """Of one sampled round, by integrals of the hockey-stick divergence."""

    def density(x, centre):
        return (1 - rate) * norm.pdf(x, 0, noise) + rate * norm.pdf(x, centre, noise)

    def divergence(eps, upper, lower):
        return quad(
            lambda x: max(0.0, density(x, upper) - math.exp(eps) * density(x, lower)),
            -12 * noise - 1,
            12 * noise + 1,
            limit=400,
        )[0]

    def solved(upper, lower):
        return brentq(lambda eps: divergence(eps, upper, lower) - delta, 0, 50)

    return {ADD_REMOVE: max(solved(1, 0), solved(0, 1)), REPLACE: solved(1, -1)}


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "noise"), [(0.1, 1.0)])
def test_a_sampled_round_is_the_integral_of_its_densities(rate, noise):
    found, exact = epsilons([Spent(noise, rate=rate)], DELTA), sampled_epsilon(rate, noise)
    for kind, value in exact.items():
        assert value * (1 - 1e-3) <= found[kind] <= value * 1.01


@settings(max_examples=12, deadline=None)
@given(
    st.floats(0.01, 0.9),
    st.floats(0.5, 4),
    st.floats(0, math.pi),
    st.floats(0, 1),
    st.floats(0.05, 2),
)
def test_changes_in_opposite_directions_are_the_worst_of_all_pairs(rate, noise, angle, length, eps):
    """The pair that the accountant takes for replace-one under sampling, against any other: by
    integrals over the plane in which both changes lie."""
    axis = np.linspace(-8 * noise - 1, 8 * noise + 1, 401)
    step = (axis[1] - axis[0]) ** 2
    x, y = np.meshgrid(axis, axis)

    def density(a, b):
        def peak(a, b):
            return norm.pdf(x, a, noise) * norm.pdf(y, b, noise)

        return (1 - rate) * peak(0, 0) + rate * peak(a, b)

    def divergence(p, q):
        return np.maximum(0, p - math.exp(eps) * q).sum() * step

    first = density(1, 0)
    other = density(length * math.cos(angle), length * math.sin(angle))
    worst = divergence(first, density(-1, 0))
    assert divergence(first, other) <= worst + 1e-6
    assert divergence(other, first) <= worst + 1e-6


def test_sampling_costs_less_than_none_and_no_more_than_renyi_divergences_say():
    rounds = [Spent(1.0, rate=0.05)] * 60
    found = epsilons(rounds, DELTA)
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(PoissonSampledDpEvent(0.05, GaussianDpEvent(1.0)), 60)
    assert 0.5 * accountant.get_epsilon(DELTA) < found[ADD_REMOVE] < accountant.get_epsilon(DELTA)
    assert found[ADD_REMOVE] < found[REPLACE] < closed_form(2 * math.sqrt(60)) / 3


@pytest.mark.slow
def test_all_kinds_of_rounds_add_up():
    known, sampled = [Spent(2.0, members=(3,))] * 4, [Spent(1.0, rate=0.1)] * 20
    both = epsilons(known + sampled, DELTA)
    for kind, total in both.items():
        assert max(epsilons(part, DELTA)[kind] for part in (known, sampled)) < total
        assert total < epsilons(known + [Spent(1.0, members=(3,))] * 20, DELTA)[kind]
    assert epsilons([Spent(1.0, rate=1.0)] * 3, DELTA) == epsilons(
        [Spent(1.0, members=(0,))] * 3, DELTA
    )


def test_little_noise_takes_no_time_and_is_no_less_than_it_is():
    found = epsilons([Spent(0.01, rate=0.5)] * 100, DELTA)
    assert 1e4 < found[ADD_REMOVE] < found[REPLACE] < math.inf


def test_noisy_counts_are_paid_for():
    """Andrew et al. 2021, Theorem 1: z_Δ of the changes, 2 σ_b of the counts, together z."""
    z, sigma = 1.0, 5.0
    split = (z**-2 - (2 * sigma) ** -2) ** -0.5
    found = epsilons([Spent(split, count_noise=2 * sigma, members=(0,))] * 3, DELTA)
    whole = epsilons([Spent(z, members=(0,))] * 3, DELTA)
    for kind, value in whole.items():
        assert found[kind] == pytest.approx(value, rel=1e-9)


def prefix_root(rounds):
    """The lower triangular root of the matrix of prefix sums, by solving for its entries."""
    whole, root = np.tril(np.ones((rounds, rounds))), np.zeros((rounds, rounds))
    for i in range(rounds):
        root[i, i] = 1.0
        for j in reversed(range(i)):
            inner = sum(root[i, k] * root[k, j] for k in range(j + 1, i))
            root[i, j] = (whole[i, j] - inner) / (root[i, i] + root[j, j])
    return root


@pytest.mark.parametrize("bands", [0, 3])
def test_correlated_noise_costs_what_brute_force_over_all_changes_finds(bands):
    """Every sign of what a client adds in each of its rounds; and every place of its rounds."""
    rounds, z = 7, 1.5
    root = prefix_root(rounds)
    if bands:
        root = np.tril(root) - np.tril(root, -bands)
    worst = 0.0
    for pattern in combinations(range(rounds), 3):
        spent = [
            Spent(
                z,
                members=(5,) if t in pattern else (6,),
                correlated=True,
                begins=t == 0,
                bands=bands,
            )
            for t in range(rounds)
        ]
        mine = max(
            np.linalg.norm(root[:, pattern] @ signs) for signs in product((-1.0, 1.0), repeat=3)
        )
        rest = [t for t in range(rounds) if t not in pattern]
        other = np.linalg.norm(root[:, rest].sum(1))
        worst = max(mine, other)
        assert epsilons(spent, DELTA)[REPLACE] == pytest.approx(
            closed_form(2 * worst / z), rel=1e-6
        )


def test_a_sequence_that_begins_anew_is_added():
    one = [Spent(2.0, members=(0,), correlated=True, begins=t == 0) for t in range(4)]
    again = one + one
    mu = np.linalg.norm(prefix_root(4).sum(1)) / 2.0
    assert epsilons(again, DELTA)[ADD_REMOVE] == pytest.approx(
        closed_form(math.sqrt(2) * mu), rel=1e-6
    )
    # Another multiplier within a sequence, by its columns.
    mixed = [Spent(z, members=(0,), correlated=True, begins=t == 0) for t, z in enumerate((1, 3))]
    mu = np.linalg.norm(prefix_root(2) @ [1, 1 / 3])
    assert epsilons(mixed, DELTA)[ADD_REMOVE] == pytest.approx(closed_form(mu), rel=1e-6)
