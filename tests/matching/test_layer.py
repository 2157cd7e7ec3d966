"""Matching of one layer: kept products equal fresh ones, no sweep raises the objective."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbayes.errors import ModelError
from fedbayes.matching import Objective, cost_matrix, layer, match_layer
from tests.matching.brute import data_terms, posterior_mean, random_problem


def process(assignments, objective, clients):
    """−2 log of the exchangeable process' terms, atom by atom."""
    members = np.bincount(np.concatenate(assignments))
    total = 0.0
    for n in members:
        total += -2 * np.log(objective.gamma / clients)
        for m in range(1, n):
            counted = min(m, objective.popularity_cap or m)
            total -= objective.popularity_weight * np.log(counted / (clients - counted))
    for own in assignments if objective.new_atoms == "paper" else ():
        alone = int((members[own] == 1).sum())
        total += 2 * np.log(np.arange(1, alone + 1)).sum()
    return total


def match(atoms, precisions, mean, prior, objective, **more):
    return match_layer(
        atoms, precisions, prior_mean=mean, prior_precision=prior, objective=objective, **more
    )


def canonical(result):
    """A matching as a set of sets of (client, atom)."""
    groups = {}
    for client, places in enumerate(result.assignments):
        for atom, place in enumerate(places):
            groups.setdefault(int(place), set()).add((client, atom))
    return {frozenset(group) for group in groups.values()}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    epsilon=st.sampled_from([0.0, 0.3, 2.0]),
    gamma=st.sampled_from([0.1, 1.0, 20.0]),
    cap=st.sampled_from([None, 1, 3]),
    near=st.sampled_from([0.0, 1.0]),
    new_atoms=st.sampled_from(["paper", "exchangeable"]),
)
def test_no_sweep_raises_the_objective(seed, epsilon, gamma, cap, near, new_atoms):
    rng = np.random.default_rng(seed)
    atoms, precisions, mean, prior = random_problem(rng, clients=6, near=near)
    objective = Objective(epsilon, gamma, cap, new_atoms=new_atoms)
    result = match(atoms, precisions, mean, prior, objective, iterations=6, rng=rng)
    steps = np.diff(result.objective)
    assert (steps <= 1e-9 * np.abs(result.objective[0])).all()
    # The last value is the objective of Eq. 8, written out.
    brute = data_terms(result.assignments, atoms, precisions, mean, prior, epsilon)
    brute += process(result.assignments, objective, 6)
    assert result.objective[-1] == pytest.approx(brute, rel=1e-9, abs=1e-7)
    for places, own in zip(result.assignments, atoms, strict=True):
        assert len(set(places.tolist())) == len(own)
    assert sorted(set(np.concatenate(result.assignments).tolist())) == list(range(result.size))
    # Eq. 5.
    for place in range(result.size):
        owners = [
            (s, j) for s, own in enumerate(result.assignments) for j in np.flatnonzero(own == place)
        ]
        theta = posterior_mean(
            [atoms[s][j] for s, j in owners], [precisions[s] for s, _ in owners], mean, prior
        )
        np.testing.assert_allclose(result.atoms[place], theta, rtol=1e-9, atol=1e-12)
        assert result.members[place] == len(owners)


@pytest.mark.parametrize("cache", [0, 2**30])
@pytest.mark.parametrize("seed", range(3))
def test_kept_costs_are_the_cost_matrix(seed, cache, monkeypatch):
    """After many visits, with wide and narrow coordinates, against costs from scratch."""
    monkeypatch.setattr(layer, "CACHE", cache)
    rng = np.random.default_rng(seed)
    atoms, precisions, mean, prior = random_problem(rng, clients=5, width=90, sizes=[7, 5, 8, 6, 7])
    precisions[:, :50] = precisions[:, :1]
    precisions[:, 50:85] = 1.5
    precisions[2, 85:] = 0.0
    prior[:85] = 0.7
    objective = Objective(0.4, 1.3, 3, 1.0)
    table = layer._Layer(atoms, precisions, mean, prior, objective)
    for client in [0, 1, 2, 3, 4, *rng.integers(0, 5, 12).tolist()]:
        table.visit(client)
        for other in range(5):
            places = table.places[other]
            if places is None:
                continue
            members = table.members.copy()
            members[places] -= 1
            rows = np.flatnonzero(members)
            sums, totals = np.zeros((len(table.members), 90)), np.zeros((len(table.members), 90))
            for s, own in enumerate(table.places):
                if own is not None and s != other:
                    sums[own] += (atoms[s] - mean) * precisions[s]
                    totals[own] += precisions[s]
            wanted = cost_matrix(
                atoms[other],
                precisions[other],
                sums[rows],
                totals[rows],
                members[rows],
                5,
                prior_mean=mean,
                prior_precision=prior,
                objective=objective,
            )
            found = table._costs(other, rows, members[rows], places)
            relative = wanted[:, : len(rows)] - wanted[:, len(rows), None]
            np.testing.assert_allclose(found, relative, rtol=1e-8, atol=1e-7)


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_neurons_does_not_matter(seed):
    rng = np.random.default_rng(seed)
    atoms, precisions, mean, prior = random_problem(rng, near=1.0, sizes=[5, 5, 4, 5])
    orders = [rng.permutation(len(own)) for own in atoms]
    shuffled = [own[order] for own, order in zip(atoms, orders, strict=True)]
    one = match(atoms, precisions, mean, prior, Objective(0.3))
    two = match(shuffled, precisions, mean, prior, Objective(0.3))
    back = {
        frozenset((client, int(orders[client][atom])) for client, atom in group)
        for group in canonical(two)
    }
    assert back == canonical(one)
    np.testing.assert_allclose(one.objective, two.objective, rtol=1e-10)


def test_shared_atoms_are_found():
    """Noisy permuted parts of one set of atoms come back as that set."""
    rng = np.random.default_rng(0)
    base = rng.normal(0, 1, (12, 60))
    choices = [rng.permutation(12)[:8] for _ in range(6)]
    atoms = [base[chosen] + rng.normal(0, 0.1, (8, 60)) for chosen in choices]
    result = match(
        atoms, np.full((6, 60), 1.0), np.zeros(60), np.full(60, 0.1), Objective(gamma=1.0)
    )
    truth = {}
    for client, chosen in enumerate(choices):
        for atom, name in enumerate(chosen):
            truth.setdefault(int(name), set()).add((client, atom))
    assert canonical(result) == {frozenset(group) for group in truth.values()}


def test_a_start_is_improved():
    rng = np.random.default_rng(3)
    atoms, precisions, mean, prior = random_problem(rng, near=1.0, sizes=[4, 4, 4, 4])
    objective = Objective(0.2)
    start = [np.arange(4) + 4 * client for client in range(4)]
    result = match(atoms, precisions, mean, prior, objective, start=start, iterations=4)
    brute = data_terms(start, atoms, precisions, mean, prior, 0.2) + process(start, objective, 4)
    assert result.objective[0] == pytest.approx(brute)
    assert result.objective[-1] < result.objective[0]


def test_bad_arrays_are_named():
    good = [np.ones((2, 3)), np.ones((1, 3))]
    q, mean, prior = np.ones((2, 3)), np.zeros(3), np.ones(3)
    cases = [
        ([], q, mean, prior, "no clients"),
        ([good[0], np.ones((1, 4))], q, mean, prior, "client 1"),
        ([good[0], np.full((1, 3), np.nan)], q, mean, prior, "NaN"),
        (good, np.ones((3, 3)), mean, prior, "precisions"),
        (good, -q, mean, prior, "at least 0"),
        (good, q, mean, 0 * prior, "above 0"),
    ]
    for atoms, precisions, m, p, words in cases:
        with pytest.raises(ModelError, match=words):
            match(atoms, precisions, m, p, Objective())
