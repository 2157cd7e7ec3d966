"""Conformal sets under label shift with a malicious client: coverage and size over seeds.

    python benchmarks/conformal_shift.py [--seeds 20] [--level 0.9] [--rows 500]

Five clients have three classes in shares of their own (Dirichlet 1), which score alike within a
class and unlike between classes. New rows have shares of classes (0.1, 0.2, 0.7). One of the five
clients lies about its scores. In one round clients send their counts of scores by class, the server
leaves out the client that is furthest from the others, and finds the threshold for the new shares.
Sets are compared with those of an oracle: the threshold of the pooled rows of the honest clients,
with the same shares. The plain threshold counts everybody, and knows of no shift.
"""

import argparse

import numpy as np
import torch

from fedbayes.core.targets import Target
from fedbayes.likelihoods import build_likelihood
from fedbayes.likelihoods.conformal import count, scores, threshold
from fedbayes.likelihoods.conformal_shift import count_by_class, outlying, shifted_threshold

TARGET = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
SIGNAL = np.array([4.0, 2.5, 1.5])
"""How well each class is told from the others."""
TESTED = 50_000
CLIENTS = 5


def rows_of(rng, n, shares):
    """Outputs [1, n, 3] and classes [n]."""
    y = rng.choice(3, n, p=shares)
    f = rng.normal(size=(n, 3))
    f[np.arange(n), y] += SIGNAL[y]
    return torch.tensor(f, dtype=torch.float32)[None], torch.tensor(y)


def lies(rng, kind, found):
    """The scores that the malicious client sends in place of its own."""
    if kind == "too small":
        return torch.zeros_like(found)
    if kind == "too large":
        return torch.full_like(found, 50.0)
    if kind == "twice":
        return 2 * found
    return torch.tensor(rng.uniform(0, 5, found.shape))


def measured(kind, level, rows, seed):
    """Coverage and size of sets by the robust, the plain and the oracle's threshold."""
    likelihood = build_likelihood("auto", Target("class", ("a", "b", "c")))
    rng = np.random.default_rng(seed)
    counts, plain = [], []
    for client in range(CLIENTS):
        f, y = rows_of(rng, rows, rng.dirichlet(np.ones(3)))
        found = scores(likelihood, f, y, "probability", level)
        if client == 0:
            found = lies(rng, kind, found)
        counts.append(count_by_class(found, y, 3))
        plain.append(count(found))
    odd = outlying(counts, 1)
    kept = torch.stack([one for client, one in enumerate(counts) if client not in odd]).sum(0)
    honest = torch.stack(counts[1:]).sum(0)
    test = rows_of(rng, TESTED, TARGET.numpy())
    found = {}
    for name, one in {
        "robust": shifted_threshold(kept, TARGET, likelihood, "probability", level),
        "oracle": shifted_threshold(honest, TARGET, likelihood, "probability", level),
        "plain": threshold(torch.stack(plain).sum(0), likelihood, "probability", level),
    }.items():
        sets = one.sets(likelihood, test[0])
        inside = sets.gather(1, test[1][:, None]).double().mean()
        found[name] = float(inside), float(sets.sum(1).double().mean())
    return found, odd == [0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--level", type=float, default=0.9)
    parser.add_argument("--rows", type=int, default=500, help="that each client counts")
    asked = parser.parse_args()
    print("| scores of the liar | found | coverage | size by oracle's | plain coverage |")
    print("|---|--:|--:|--:|--:|")
    for kind in ("too small", "too large", "twice", "random"):
        every = [measured(kind, asked.level, asked.rows, seed) for seed in range(asked.seeds)]
        robust = np.array([one["robust"] for one, _ in every])
        oracle = np.array([one["oracle"] for one, _ in every])
        plain = np.array([one["plain"] for one, _ in every])
        caught = sum(found for _, found in every)
        print(
            f"| {kind} | {caught} of {len(every)} "
            f"| {robust[:, 0].mean():.4f} ± {robust[:, 0].std(ddof=1):.4f} "
            f"| {(robust[:, 1] / oracle[:, 1]).mean():.3f} "
            f"| {plain[:, 0].mean():.4f} ± {plain[:, 0].std(ddof=1):.4f} |"
        )


if __name__ == "__main__":
    main()
