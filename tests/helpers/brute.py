"""The objective of matching written out from the paper, one neuron at a time."""

import numpy as np
from scipy.stats import bernoulli, poisson

from fedbayes.matching import cost_matrix


def posterior_mean(members, precisions, mean, prior):
    """Eq. 5 for one global atom; members and their precisions are lists of vectors."""
    total = prior + sum(precisions)
    return (prior * mean + sum(q * w for w, q in zip(members, precisions, strict=True))) / total


def atom_terms(members, precisions, mean, prior, epsilon):
    """Twice the terms of one global atom in Eq. 8: Eq. 18 without constants, and ε Eq. 10.

    The squares of the observations alone are left out: they do not depend on the matching.
    """
    theta = posterior_mean(members, precisions, mean, prior)
    map_term = (prior * (theta - mean) ** 2).sum()
    kl = 0.0
    for w, q in zip(members, precisions, strict=True):
        map_term += (q * ((w - theta) ** 2 - (w - mean) ** 2)).sum()
        kl += (q * (theta - mean) ** 2).sum()
    return map_term + epsilon * kl


def data_terms(assignments, atoms, precisions, mean, prior, epsilon):
    """The sum of `atom_terms` over all global atoms."""
    owners = {}
    for client, places in enumerate(assignments):
        for atom, place in enumerate(places):
            owners.setdefault(int(place), []).append((client, atom))
    return sum(
        atom_terms(
            [atoms[s][j] for s, j in members],
            [precisions[s] for s, _ in members],
            mean,
            prior,
            epsilon,
        )
        for members in owners.values()
    )


def last_customer(places, others, clients, gamma):
    """−2 log p(A^s given the rest), client s the last customer of the Indian buffet."""
    log_p = sum(bernoulli.logpmf(int(i in set(places)), n / clients) for i, n in enumerate(others))
    new = sum(place >= len(others) for place in places)
    return -2 * (log_p + poisson.logpmf(new, gamma / clients))


def relative_costs(table, other, problem, objective):
    """A client's costs beside those of new atoms, as a layer keeps them and from scratch; None
    where it was not visited yet.

    Args:
        table: the layer, after some visits.
        other: the client.
        problem: atoms, precisions, prior mean and prior precision.
        objective: of the matching.
    """
    atoms, precisions, mean, prior = problem
    places = table.places[other]
    if places is None:
        return None
    members = table.members.copy()
    members[places] -= 1
    rows = np.flatnonzero(members)
    sums, totals = (np.zeros((len(table.members), len(mean))) for _ in range(2))
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
        len(atoms),
        prior_mean=mean,
        prior_precision=prior,
        objective=objective,
    )
    kept = table._costs(other, rows, members[rows], places)
    return kept, wanted[:, : len(rows)] - wanted[:, len(rows), None]


def random_problem(rng, clients=4, width=6, equal=False, sizes=None, near=0.0):
    """Atoms, precisions, prior mean and prior precision of a small federation."""
    sizes = sizes or rng.integers(1, 5, clients)
    base = rng.normal(0, 1, (max(sizes) + 2, width))
    atoms = [
        near * base[rng.permutation(len(base))[:n]] + rng.normal(0, 0.5 if near else 1, (n, width))
        for n in sizes
    ]
    if equal:
        precisions = np.full((clients, width), rng.uniform(0.5, 3))
    else:
        precisions = rng.uniform(0.1, 3, (clients, width))
    return atoms, precisions, rng.normal(0, 0.3, width), rng.uniform(0.3, 2, width)
