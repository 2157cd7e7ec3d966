"""The Laplace prior and the mixture of Gaussians against FedAvg, on clients of few classes.

    python benchmarks/priors.py [--rounds 60] [--clients 30] [--alpha 0.1] [--seeds 3]

MNIST, an MLP of one hidden layer of 100, ten clients a round. Of each method accuracy of the global
model on the test images after the last round, and the mean of the last ten rounds, over seeds.
"""

import argparse

import numpy as np

import fedbayes

LAPLACE = {"name": "laplace"}
MIXTURE = {"name": "mixture", "components": 3}
METHODS = {
    "FedAvg": {"name": "fedavg"},
    "FedAvg, Adam": {"name": "fedadam", "server_lr": 0.005},
    "Laplace": LAPLACE,
    "Laplace, by samples": LAPLACE | {"weighting": "samples"},
    "Laplace, rows of classes": LAPLACE | {"class_rows": True},
    "Laplace, both": LAPLACE | {"weighting": "samples", "class_rows": True},
    "Laplace, Adam": LAPLACE | {"server_optimizer": "adam", "server_lr": 0.005},
    "Laplace, all three": LAPLACE
    | {
        "weighting": "samples",
        "class_rows": True,
        "server_optimizer": "adam",
        "server_lr": 0.005,
    },
    "mixture, by samples": MIXTURE | {"weighting": "samples"},
    "mixture": MIXTURE,
    "mixture, Adam": MIXTURE | {"server_optimizer": "adam", "server_lr": 0.005},
}


def accuracies(table, given, seed):
    """Accuracy of the global model in every round."""
    run = fedbayes.run(
        seed=seed,
        rounds=given.rounds,
        cohort=10,
        method=table,
        data={
            "name": "mnist",
            "clients": given.clients,
            "partition": "dirichlet",
            "alpha": given.alpha,
            "limit": given.limit,
            "limit_test": 2000,
        },
        training={"lr": 0.05, "batch_size": 20},
    )
    return [line["global_accuracy"] for line in run.metrics]


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=60)
    options.add_argument("--clients", type=int, default=30)
    options.add_argument("--alpha", type=float, default=0.1)
    options.add_argument("--limit", type=int, default=6000, help="training images in all")
    options.add_argument("--seeds", type=int, default=3)
    given = options.parse_args()
    print("| method | last round | last ten |")
    print("| --- | --- | --- |")
    for name, table in METHODS.items():
        found = np.array([accuracies(table, given, seed) for seed in range(given.seeds)])
        last, ten = found[:, -1], found[:, -10:].mean(1)
        print(
            f"| {name} | {last.mean():.3f} ± {last.std(ddof=1):.3f} | "
            f"{ten.mean():.3f} ± {ten.std(ddof=1):.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
