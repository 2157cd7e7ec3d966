"""The cost matrix against differences of the objective, found by brute force."""

import itertools
import math

import numpy as np
import pytest

from fedbayes.matching import Objective, assign, cost_matrix
from tests.helpers.brute import data_terms, last_customer, random_problem


def situation(seed, equal):
    """A client to be matched, and the other three matched at random."""
    rng = np.random.default_rng(seed)
    atoms, precisions, mean, prior = random_problem(rng, equal=equal, sizes=[3, 2, 3, 2])
    places = [rng.permutation(3)[:n] for n in (3, 2, 3)]
    used, flat = np.unique(np.concatenate(places), return_inverse=True)
    places = np.split(flat, [3, 5])
    sums, totals = np.zeros((len(used), 6)), np.zeros((len(used), 6))
    members = np.zeros(len(used), dtype=np.int64)
    for client, own in enumerate(places):
        for atom, place in enumerate(own):
            sums[place] += (atoms[client][atom] - mean) * precisions[client]
            totals[place] += precisions[client]
            members[place] += 1
    # An atom in which all others have a share would have been n = S − 1 at most.
    return atoms, precisions, mean, prior, places, sums, totals, members


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("epsilon", [0.0, 0.7])
@pytest.mark.parametrize("seed", range(4))
def test_costs_are_differences_of_the_objective(seed, epsilon, equal):
    atoms, precisions, mean, prior, places, sums, totals, members = situation(seed, equal)
    objective = Objective(epsilon=epsilon, gamma=1.7, popularity_cap=None)
    costs = cost_matrix(
        atoms[3],
        precisions[3],
        sums,
        totals,
        members,
        4,
        prior_mean=mean,
        prior_precision=prior,
        objective=objective,
    )
    count = len(members)
    assert costs.shape == (2, count + 2)

    def value(own, client_atoms):
        data = data_terms(
            [*places, own], [*atoms[:3], client_atoms], precisions, mean, prior, epsilon
        )
        return data + last_customer(own, members, 4, 1.7)

    empty = value([], atoms[3][:0])
    for atom in range(2):
        for place in range(count + 1):
            difference = value([place], atoms[3][[atom]]) - empty
            assert costs[atom, place] == pytest.approx(difference, abs=1e-9)
    # Both at once: the second new atom costs 2 log 2 more.
    for one, two in itertools.permutations(range(count + 2), 2):
        if one > count + 1 or ({one, two} & {count + 1} and count not in {one, two}):
            continue
        difference = value([one, two], atoms[3]) - empty
        assert costs[0, one] + costs[1, two] == pytest.approx(difference, abs=1e-9)


def test_popularity_is_capped_and_weighted():
    objective = Objective(popularity_cap=10, popularity_weight=1.0)
    costs = objective.joining(np.array([1, 9, 10, 11, 25]), 30)
    expected = -np.log(np.array([1 / 29, 9 / 21, 10 / 20, 10 / 20, 10 / 20]))
    np.testing.assert_allclose(costs, expected)
    paper = Objective(popularity_cap=None).joining(np.array([25]), 30)
    np.testing.assert_allclose(paper, -2 * np.log(25 / 5))


def test_equal_precisions_give_equation_11():
    """With one σ for all, the KL part of a match is Eq. 11 as printed."""
    rng = np.random.default_rng(0)
    sigma, sigma0 = 0.8, 1.3
    w, others = rng.normal(size=5), rng.normal(size=(3, 5))
    q, p0 = 1 / sigma**2, 1 / sigma0**2
    mean = np.zeros(5)
    arguments = (
        w[None],
        np.full(5, q),
        q * others.sum(0)[None],
        np.full((1, 5), 3 * q),
        np.array([3]),
        6,
    )
    settings = {"prior_mean": mean, "prior_precision": np.full(5, p0)}
    difference = cost_matrix(*arguments, **settings, objective=Objective(1.0)) - cost_matrix(
        *arguments, **settings, objective=Objective(0.0)
    )
    after = ((w + others.sum(0)) / sigma**3) ** 2 / (p0 + 4 * q) ** 2 * 4
    before = (others.sum(0) / sigma**3) ** 2 / (p0 + 3 * q) ** 2 * 3
    new = (w / sigma**3) ** 2 / (p0 + q) ** 2
    np.testing.assert_allclose(difference, [[(after - before).sum(), new.sum()]], rtol=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_assign_is_optimal(seed):
    """Against every way to give 4 atoms to 3 global ones or to new ones."""
    rng = np.random.default_rng(seed)
    costs = rng.normal(1.0, 2.0, (4, 3))

    def total(columns):
        joined = [c for c in columns if c < 3]
        if len(set(joined)) < len(joined):
            return np.inf
        new = len(columns) - len(joined)
        growth = 2 * np.log(np.arange(1, new + 1)).sum()
        return sum(costs[j, c] for j, c in enumerate(columns) if c < 3) + growth

    best = min(total(columns) for columns in itertools.product(range(4), repeat=4))
    assert total(assign(costs, Objective()).tolist()) == pytest.approx(best)


def sequences(columns, clients):
    """Clients in every order, and of each the atoms that it has: a column is an atom's owners."""
    for order in itertools.permutations(range(clients)):
        yield order, [{a for a, owners in enumerate(columns) if s in owners} for s in order]


@pytest.mark.parametrize("new_atoms", ["exchangeable", "paper"])
@pytest.mark.parametrize(
    ("columns", "varies"),
    [
        ([{0, 1, 2}, {0}, {1, 2}, {2}], True),
        ([{0, 1}, {0, 1}, {2}, {2}, {2}], False),
        ([{0}, {0}, {0}, {1}, {1, 2, 3}, {3}, {3}], True),
        ([{0, 1, 2, 3}], False),
    ],
)
def test_the_process_is_the_buffet_in_every_order(columns, varies, new_atoms):
    """The sequential scheme, client by client: the t-th takes an atom of m others with probability
    m/t, and new ones as a Poisson process of mass γ/t. Counted as labelled points (no k!) every
    order gives one and the same number, that of the objective; counted as how many there are, it
    varies with who is the first of those that share an atom with others.
    """
    clients = 1 + max(max(owners) for owners in columns)
    objective = Objective(gamma=1.3, popularity_cap=None, new_atoms=new_atoms)
    found = []
    for _, customers in sequences(columns, clients):
        log_p, seen = 0.0, dict.fromkeys(range(len(columns)), 0)
        for t, dishes in enumerate(customers, start=1):
            for atom, others in seen.items():
                if others:
                    log_p += np.log(others / t if atom in dishes else 1 - others / t)
            new = sum(not seen[atom] for atom in dishes)
            log_p += new * np.log(1.3 / t) - 1.3 / t
            log_p -= sum(np.log(range(1, new + 1))) if new_atoms == "paper" else 0.0
            for atom in dishes:
                seen[atom] += 1
        found.append(log_p)
    members = np.array([len(owners) for owners in columns])
    owners = np.array([next(iter(o)) for o in columns if len(o) == 1], dtype=np.int64)
    rest = 1.3 * sum(1 / t for t in range(1, clients + 1))
    if new_atoms == "exchangeable":
        value = -objective.process(members, owners, clients) / 2 - rest
        np.testing.assert_allclose(found, value)
        marginal = sum(
            np.log(1.3 * math.factorial(clients - m) * math.factorial(m - 1))
            - np.log(math.factorial(clients))
            for m in members
        )
        assert value == pytest.approx(marginal - rest)
    else:
        assert (np.ptp(found) > 0.1) == varies


@pytest.mark.parametrize("new_atoms", ["exchangeable", "paper"])
def test_assignments_of_least_cost_by_brute_force(new_atoms):
    objective = Objective(new_atoms=new_atoms)
    for seed in range(30):
        rng = np.random.default_rng(seed)
        costs = rng.normal(0, 2, (3, 4))
        best = math.inf
        for chosen in itertools.product(range(5), repeat=3):
            joined = [c for c in chosen if c < 4]
            if len(set(joined)) < len(joined):
                continue
            new = sum(c == 4 for c in chosen)
            extra = 2 * math.log(math.factorial(new)) if new_atoms == "paper" else 0.0
            best = min(best, extra + sum(costs[a, c] for a, c in enumerate(chosen) if c < 4))
        found = assign(costs, objective)
        new = int((found == 4).sum())
        extra = 2 * math.log(math.factorial(new)) if new_atoms == "paper" else 0.0
        value = extra + sum(costs[a, c] for a, c in enumerate(found) if c < 4)
        assert value == pytest.approx(best)
