"""Accuracy against ε at δ = 1e-5: MNIST among 1,000 clients, a coin for each in every round.

    python benchmarks/privacy.py                     # the table of docs/benchmarks/features.md
    python benchmarks/privacy.py --methods fedavg --epsilons 8 2

60 samples a client, IID; 200 clients to expect in a round; a network of 25,450 weights. The noise
multiplier is found for the ε (replace-one) that is asked for. Bounds are about the medians of a run
without noise, which is not in ε. Accuracy is of the global model on MNIST's test samples after the
last round; ε = ∞ is without noise and bounds. Needs MNIST.
"""

import argparse
import time
import warnings

from scipy.optimize import brentq

CLIENTS, COHORT, DELTA = 1_000, 200, 1e-5
METHODS = {
    "fedavg": {"method": {"name": "fedavg"}, "clip": 0.6},
    "fedsparse": {"method": {"name": "fedsparse"}, "clip": 0.9, "clips": {"gates": 0.6}},
    "virtual": {
        "method": {
            "name": "virtual",
            "lateral": False,
            "samples": 1,
            "predictions": 5,
            "prior_std": 0.05,
            "kl_weight": 0.01,
        },
        "clip": 4.0,
        "clips": {"precision": 1.0},
    },
}


def multiplier(epsilon, rounds):
    """The noise multiplier z of so many rounds at this ε."""
    from fedbayes.federation.privacy.accounting import REPLACE, Spent, epsilons

    def excess(z):
        return epsilons([Spent(z, rate=COHORT / CLIENTS)] * rounds, DELTA)[REPLACE] - epsilon

    return round(brentq(excess, 0.6, 12, xtol=0.01) + 0.01, 2)


def accuracy(chosen, noise, rounds):
    """The global accuracy after a run, and ε by kind of neighbours."""
    from fedbayes import run

    result = run(
        rounds=rounds,
        cohort=COHORT,
        sampling="poisson",
        evaluate_every=0,
        data={"name": "mnist", "clients": CLIENTS, "partition": "iid"},
        model={"name": "mlp", "hidden": [32]},
        training={"lr": 0.1, "epochs": 2, "batch_size": 20},
        method=chosen["method"],
        aggregation={"clip": chosen["clip"]} if noise else {},
        privacy={"noise": noise, "delta": DELTA, "clips": chosen.get("clips", {})} if noise else {},
    )
    return result.summary["global_accuracy"], result.summary.get("privacy", {}).get("epsilon")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=[8.0, 4.0, 2.0, 1.0])
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    noises = {epsilon: multiplier(epsilon, given.rounds) for epsilon in given.epsilons}
    print("| method | ε (replace-one) | ε (add-or-remove) | z | accuracy |")
    print("|---|---|---|---|---|")
    began = time.perf_counter()
    for name in given.methods:
        plain, _ = accuracy(METHODS[name], 0.0, given.rounds)
        print(f"| `{name}` | ∞ | ∞ | 0 | {plain:.3f} |", flush=True)
        for noise in noises.values():
            found, spent = accuracy(METHODS[name], noise, given.rounds)
            replaced, removed = spent["replace-one"], spent["add-or-remove"]
            print(
                f"| `{name}` | {replaced:.2f} | {removed:.2f} | {noise:g} | {found:.3f} |",
                flush=True,
            )
    print(f"\n{given.rounds} rounds each; {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
