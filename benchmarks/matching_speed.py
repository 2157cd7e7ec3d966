"""Time of matching: a layer of 10 and of 30 networks, and 10 clients of 1,000 atoms.

    python benchmarks/matching_speed.py

The first two are networks of 100 neurons trained apart on MNIST (784 inputs, 10 outputs, as many
heterogeneous clients), sigma = sigma0 = gamma = 1, five sweeps. They are trained once into
`benchmarks/.matching` (a minute each). The third is 10 clients of 1,000 noisy permuted atoms of
795 coordinates drawn from 1,500 shared ones, of a size that about 6,500 global atoms come out.
Each is timed beside the plain way: the same visits with a whole cost matrix computed every time,
and SciPy's assignment on all of it. Then how time grows with clients and with neurons, on atoms
of the third kind. Needs MNIST.
"""

import sys
import time
from pathlib import Path

import numpy as np
from scipy.optimize import linear_sum_assignment

from fedbayes.errors import FedbayesError
from fedbayes.matching import Objective, cost_matrix, match_layer
from fedbayes_papers.gpi_networks import FusionCase, trained

FOLDER = Path(__file__).parent / ".matching"
SWEEPS = 5


def plain(atoms, precisions, mean, prior, objective):
    """The same algorithm with nothing kept: a full cost matrix at every visit."""
    clients, width = precisions.shape
    places = [None] * clients
    rng = np.random.default_rng(0)
    order = list(range(clients))
    order += [s for _ in range(SWEEPS) for s in rng.permutation(clients)]
    v = [(own - mean) * q for own, q in zip(atoms, precisions, strict=True)]
    sums, totals = np.zeros((0, width)), np.zeros((0, width))
    members = np.zeros(0, dtype=np.int64)
    for client in order:
        if places[client] is not None:
            own = places[client]
            sums[own] -= v[client]
            totals[own] -= precisions[client]
            members[own] -= 1
            kept = members > 0
            index = np.cumsum(kept) - 1
            places = [p if p is None else index[p] for p in places]
            sums, totals, members = sums[kept], totals[kept], members[kept]
        costs = cost_matrix(
            atoms[client],
            precisions[client],
            sums,
            totals,
            members,
            clients,
            prior_mean=mean,
            prior_precision=prior,
            objective=objective,
        )
        _, columns = linear_sum_assignment(costs)
        new = columns >= len(members)
        count = int(new.sum())
        columns[new] = len(members) + np.arange(count)
        sums = np.vstack([sums, np.zeros((count, width))])
        totals = np.vstack([totals, np.zeros((count, width))])
        members = np.concatenate([members, np.zeros(count, dtype=np.int64)])
        sums[columns] += v[client]
        totals[columns] += precisions[client]
        members[columns] += 1
        places[client] = columns
    return len(members)


def trained_atoms(clients):
    """[incoming, bias, outgoing] of every neuron, with precisions by class share."""
    silos = trained(FOLDER, FusionCase("mnist", "dirichlet", clients, 1, 0))
    atoms = [
        np.hstack(
            [
                first.weight.double().numpy(),
                first.bias.double().numpy()[:, None],
                last.weight.double().numpy().T,
            ]
        )
        for first, last in silos.models.values()
    ]
    precisions = np.ones((clients, 795))
    precisions[:, 785:] = silos.counts / silos.counts.sum(0)
    mean = np.zeros(795)
    mean[784] = 0.1
    return atoms, precisions, mean, np.ones(795)


def noisy_atoms(clients, neurons, sigma=0.3, scale=0.97):
    """Noisy permuted atoms of 795 coordinates; half as many again are shared."""
    rng = np.random.default_rng(0)
    shared = rng.normal(0, scale, (3 * neurons // 2, 795))
    atoms = [
        shared[rng.permutation(len(shared))[:neurons]] + rng.normal(0, sigma, (neurons, 795))
        for _ in range(clients)
    ]
    return atoms, np.full((clients, 795), sigma**-2), np.zeros(795), np.ones(795)


def ours(atoms, precisions, mean, prior, objective):
    return match_layer(
        atoms,
        precisions,
        prior_mean=mean,
        prior_precision=prior,
        objective=objective,
        iterations=SWEEPS,
    ).size


def best(work, repeats):
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - begin)
    return min(times), result


def compare(name, problem, objective, target, repeats):
    seconds, size = best(lambda: ours(*problem, objective), repeats)
    other, plain_size = best(lambda: plain(*problem, objective), max(1, repeats // 2))
    print(
        f"{name}: {seconds:.2f} s (aim {target} s), {size} global atoms; plain {other:.2f} s, "
        f"{plain_size} global atoms; ratio {seconds / other:.2f}",
        flush=True,
    )
    return seconds <= target


def main():
    objective = Objective()
    met = [
        compare(f"MNIST, {clients} clients of 100", trained_atoms(clients), objective, target, 5)
        for clients, target in ((10, 0.2), (30, 0.6))
    ]
    met.append(compare("10 clients of 1,000", noisy_atoms(10, 1000), objective, 60, 1))
    print("time relative to 10 clients of 100 atoms")
    base = best(lambda: ours(*noisy_atoms(10, 100), objective), 3)[0]
    for clients, neurons in ((20, 100), (40, 100), (10, 200), (10, 400)):
        problem = noisy_atoms(clients, neurons)
        seconds, size = best(lambda problem=problem: ours(*problem, objective), 3)
        print(f"  {clients} clients of {neurons}: {seconds / base:.1f}, {size} global atoms")
    sys.exit(0 if all(met) else 1)


if __name__ == "__main__":
    try:
        main()
    except FedbayesError as error:
        sys.exit(f"error: {error}")
