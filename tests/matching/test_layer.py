"""Matching of one layer: kept products equal fresh ones, no sweep raises the objective."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbayes.matching import Objective, layer
from tests.helpers.brute import data_terms, posterior_mean, random_problem, relative_costs
from tests.helpers.dense_networks import match, process


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
    problem = random_problem(rng, clients=5, width=90, sizes=[7, 5, 8, 6, 7])
    _, precisions, _, prior = problem
    precisions[:, :50] = precisions[:, :1]
    precisions[:, 50:85] = 1.5
    precisions[2, 85:] = 0.0
    prior[:85] = 0.7
    objective = Objective(0.4, 1.3, 3, 1.0)
    table = layer._Layer(*problem, objective)
    for client in [0, 1, 2, 3, 4, *rng.integers(0, 5, 12).tolist()]:
        table.visit(client)
        for other in range(5):
            if costs := relative_costs(table, other, problem, objective):
                np.testing.assert_allclose(*costs, rtol=1e-8, atol=1e-7)
