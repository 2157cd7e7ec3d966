"""Coverage of conformal sets and intervals over seeds, on data whose distribution is known; with
--digits of sets of the handwritten digits, from runs.

python benchmarks/conformal_coverage.py [--digits] [--seeds 20] [--level 0.9]
"""

import argparse
import tempfile
import warnings

import numpy as np
import torch

import fedbayes
from fedbayes.core.targets import Target
from fedbayes.likelihoods import build_likelihood
from fedbayes.likelihoods.conformal import count, scores, threshold
from fedbayes.workflows.calibrate.conformal import calibrate_conformal

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


def digits(seeds, level):
    """Five clients with other shares of the digits each, who keep most of their rows to test on; a
    model that is trained for a few rounds.
    """
    data = {"clients": 5, "partition": "dirichlet", "test": 0.75}
    found = {}
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            run = fedbayes.run(folder=f"{folder}/run", data=data, rounds=3, seed=seed)
            found.setdefault("accuracy", []).append(run.summary["global_accuracy"])
            for score in ("probability", "adaptive", "adaptive-random"):
                for own in (False, True):
                    told = calibrate_conformal(f"{folder}/run", level, score=score, per_client=own)
                    one = [client.coverage[0] for client in told.clients.values()]
                    row = (told.all.coverage[0], np.min(one), np.max(one), told.all.size[0])
                    found.setdefault((score, own), []).append(row)
    print(f"accuracy {np.mean(found.pop('accuracy')):.3f}")
    for (score, own), rows in found.items():
        mean, std = np.mean(rows, 0), np.std(rows, 0, ddof=1)
        print(
            f"| `{score}`, {'own' if own else 'common'} thresholds | {mean[0]:.3f} ± {std[0]:.3f} "
            f"| {mean[1]:.2f} to {mean[2]:.2f} | {mean[3]:.2f} |"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--level", type=float, default=0.9)
    parser.add_argument("--digits", action="store_true")
    given = parser.parse_args()
    if given.digits:
        with warnings.catch_warnings(action="ignore"):
            return digits(given.seeds, given.level)
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
