"""Coverage of conformal sets and intervals over seeds, on data whose distribution is known.

python benchmarks/conformal_coverage.py [--seeds 20] [--level 0.9]
"""

import argparse

import numpy as np
import torch

from fedbayes.likelihoods import build_likelihood
from fedbayes.likelihoods.conformal import count, scores, threshold
from fedbayes.targets import Target

ROWS = (40, 80, 120, 200, 400)
"""Held-out rows that each of five clients counts."""
TESTED = 20_000
"""Rows that coverage is measured on, of each client."""


def classes(rng, n, client):
    """A model that is too sure, and more wrong at one end of the clients than at the other."""
    f = 2 * rng.normal(size=(n, 3))
    odds = np.exp(0.4 * f + (client - 2) * np.array([1, 0, -1]) / 2)
    p = odds / odds.sum(1, keepdims=True)
    y = (rng.random((n, 1)) > p.cumsum(1)).sum(1).clip(0, 2)
    return torch.tensor(f, dtype=torch.float32)[None], torch.tensor(y)


def numbers(rng, n, client):
    """Noise of another form and width than the model's, which grows from client to client."""
    f = rng.normal(size=(n, 1))
    y = 100 + 20 * (f + (1 + client / 2) * rng.uniform(-1, 1, (n, 1)))
    return torch.tensor(f, dtype=torch.float32)[None], torch.tensor(y, dtype=torch.float32)


def coverage(likelihood, sample, score, level, seed):
    """Shares of test rows that are inside: under the common threshold, and each client's own."""
    rng = np.random.default_rng(seed)
    counts, tests = [], []
    for client, rows in enumerate(ROWS):
        f, y = sample(rng, rows, client)
        counts.append(count(scores(likelihood, f, y, score, level)))
        tests.append(sample(rng, TESTED, client))

    def inside(found, f, y):
        if score == "probability":
            return float(found.sets(likelihood, f).gather(1, y[:, None]).double().mean())
        low, high = found.interval(likelihood, f)
        return float(((low <= y) & (y <= high)).double().mean())

    common = threshold(torch.stack(counts).sum(0), likelihood, score, level)
    marginal = [inside(common, f, y) for f, y in tests]
    own = [
        inside(threshold(one, likelihood, score, level), f, y)
        for one, (f, y) in zip(counts, tests, strict=True)
    ]
    return marginal, own


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--level", type=float, default=0.9)
    given = parser.parse_args()
    real = build_likelihood("gaussian", Target("real", ("y",), (100.0,), (20.0,)), noise=1.0)
    kinds = build_likelihood("categorical", Target("class", ("a", "b", "c")))
    share = np.array(ROWS) / sum(ROWS)
    for name, likelihood, sample, score in (
        ("classes, `probability`", kinds, classes, "probability"),
        ("numbers, `quantile`", real, numbers, "quantile"),
        ("numbers, `residual`", real, numbers, "residual"),
    ):
        found = [
            coverage(likelihood, sample, score, given.level, seed) for seed in range(given.seeds)
        ]
        common, own = (np.array(part) for part in zip(*found, strict=True))
        mixed = common @ share
        clients = common.mean(0)
        print(
            f"| {name}, all clients' rows | {mixed.mean():.3f} ± {mixed.std(ddof=1):.3f}; "
            f"single clients {clients.min():.2f} to {clients.max():.2f} |"
        )
        print(
            f"| {name}, each client's own threshold | {own.mean():.3f}; single clients "
            f"{own.mean(0).min():.3f} to {own.mean(0).max():.3f} |"
        )


if __name__ == "__main__":
    main()
