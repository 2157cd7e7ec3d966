"""What one layer's sweeps do, step by step, against the objective written out."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbayes.errors import ModelError
from fedbayes.matching import Objective, layer
from tests.helpers.brute import data_terms, random_problem, relative_costs
from tests.helpers.dense_networks import match, process


def table_of(rng, clients=5, popularity_cap=3, **problem):
    """A layer with every client visited once, and what it was made of."""
    atoms, precisions, mean, prior = random_problem(rng, clients=clients, **problem)
    objective = Objective(0.4, float(rng.choice([0.3, 3.0, 30.0])), popularity_cap)
    table = layer._Layer(atoms, precisions, mean, prior, objective)
    for client in range(clients):
        table.visit(client)
    return table, atoms, precisions, mean, prior, objective


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_new_places_are_taken_if_and_only_if_they_lower_the_objective(seed):
    """Places at random, good and bad, against the difference of objectives from scratch."""
    rng = np.random.default_rng(seed)
    table, atoms, precisions, mean, prior, objective = table_of(rng, near=1.0)

    def value(assignments):
        data = data_terms(assignments, atoms, precisions, mean, prior, objective.epsilon)
        compact = np.unique(np.concatenate(assignments), return_inverse=True)[1]
        sizes = np.cumsum([len(places) for places in assignments])[:-1]
        return data + process(np.split(compact, sizes), objective, len(atoms))

    for client in range(len(atoms)):
        old = table.places[client]
        others = table.members.copy()
        others[old] -= 1
        rows = np.flatnonzero(others)
        costs = table._costs(client, rows, others[rows], old)
        columns = np.full(len(old), len(rows))
        joining = rng.integers(0, min(len(old), len(rows)) + 1)
        atoms_that_join = rng.permutation(len(old))[:joining]
        columns[atoms_that_join] = rng.permutation(len(rows))[:joining]
        fresh = len(table.members) + np.arange(len(old))
        places = np.where(columns < len(rows), np.append(rows, -1)[columns], fresh)
        difference = value([*table.places[:client], places, *table.places[client + 1 :]]) - value(
            table.places
        )
        if abs(difference) > 1e-6:
            assert table._better(client, costs, rows, others, old, columns) == (difference < 0)


@pytest.mark.parametrize("seed", range(6))
def test_without_growth_all_atoms_join_in_the_best_of_all_orders(seed):
    """However unlike they are; a client against the objective of every order."""
    rng = np.random.default_rng(seed)
    atoms, precisions, mean, prior = random_problem(rng, clients=2, sizes=[4, 4], width=6)
    objective = Objective(0.4, 1e9, None)
    result = match(atoms, precisions, mean, prior, objective, growing=False)
    assert result.size == 4
    assert result.members.tolist() == [2] * 4
    one, two = result.assignments
    every = {
        order: data_terms([one, np.array(order)], atoms, precisions, mean, prior, 0.4)
        for order in permutations(range(4))
    }
    assert every[tuple(two)] == pytest.approx(min(every.values()))
    apart = match(atoms, precisions, mean, prior, objective)
    assert apart.size > 4, "with growth they would not"


def test_without_growth_clients_have_as_many_atoms():
    atoms, precisions, mean, prior = random_problem(
        np.random.default_rng(0), clients=2, sizes=[4, 5]
    )
    with pytest.raises(ModelError, match="different numbers of atoms"):
        match(atoms, precisions, mean, prior, Objective(), growing=False)


def test_atoms_that_do_not_belong_together_are_parted():
    """From a start in which clients' opposite atoms are one."""
    atoms = [np.full((1, 8), 3.0), np.full((1, 8), -3.0), np.full((1, 8), 3.0)]
    together = [np.array([0])] * 3
    result = match(atoms, np.ones((3, 8)), np.zeros(8), np.ones(8), Objective(), start=together)
    one, two, three = (int(places[0]) for places in result.assignments)
    assert one == three != two
    assert result.members.tolist() == [2, 1]


@pytest.mark.parametrize("seed", range(4))
def test_growing_keeps_what_is_known_of_each_row(seed):
    """Costs from kept products stay the cost matrix while rows are added."""
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, clients=4, width=70, sizes=[4, 3, 4, 2])
    _, precisions, _, prior = problem
    precisions[:, :60] = precisions[:, :1]
    prior[:60] = 0.7
    objective = Objective(0.2, 2.0)
    table = layer._Layer(*problem, objective)
    for step, client in enumerate([0, 1, 2, 3, 1, 0, 3, 2, 2, 1, 3, 0]):
        table.visit(client)
        if step % 3 == 2:
            table._reserve(len(table.members) + 1)
        costs = relative_costs(table, (client + 1) % 4, problem, objective)
        if costs is not None:
            np.testing.assert_allclose(*costs, rtol=1e-8, atol=1e-7)
