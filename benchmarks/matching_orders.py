"""Whether what matching finds depends on the order of the clients, with either form of its prior.

    python benchmarks/matching_orders.py [--orders 8] [--seeds 3] [--gammas 1 0.02 0.001]

Clients train networks of one hidden layer apart, on parts of MNIST drawn by Dirichlet distributions
of several concentrations. The same networks are then fused in several orders: that of the clients
and that of the sweeps change together. Of each: accuracy on the test images, mean over seeds and
orders; its standard deviation over orders, the mean over seeds; the same of the number of neurons.
The start in the first pass, from the largest client, is the same in every order. Without the term
2 log k new neurons are cheaper, so gamma, their mass, has to be smaller for as many neurons.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

import fedbayes
from fedbayes.runs.build import stored_data, stored_run
from fedbayes.runs.personal import own_models
from fedbayes.storage.folder import RunFolder


def trained(given, alpha, seed, folder):
    """The clients' networks, their counts of classes, and what predicts the test images."""
    fedbayes.run(
        folder=folder,
        seed=seed,
        rounds=1,
        data={
            "name": "mnist",
            "clients": given.clients,
            "partition": "dirichlet",
            "alpha": alpha,
            "limit": given.limit,
        },
        model={"hidden": [50], "init": "normal"},
        training={"optimizer": "amsgrad", "lr": 0.01, "epochs": 10},
        method={"name": "local", "start": "own"},
        calibration="none",
    )
    stored = RunFolder(folder)
    config = stored.config()
    data = stored_data(config, stored)
    run = stored_run(stored, config, data.preprocessing)
    models = [dict(weights) for _, weights in own_models(stored, config.build_method(), run)]
    test = data.test_union(0, data.test_total)

    def accuracy(weights):
        with torch.no_grad():
            return float((run.network(weights, test.x).argmax(-1) == test.y).double().mean())

    return models, np.asarray(data.counts()), accuracy


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--clients", type=int, default=10)
    options.add_argument("--limit", type=int, default=6000, help="training images in all")
    options.add_argument("--orders", type=int, default=8)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--gammas", type=float, nargs="*", default=[1.0, 0.02, 1e-3, 1e-5])
    options.add_argument("--alphas", type=float, nargs="*", default=[0.1, 0.4, 1.0, 100.0])
    given = options.parse_args()
    print("| alpha | new_atoms | gamma | accuracy | over orders | neurons | over orders |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for alpha in given.alphas:
        found = {("paper", 1.0): [], **{("exchangeable", g): [] for g in given.gammas}}
        for seed in range(given.seeds):
            with tempfile.TemporaryDirectory() as folder:
                models, counts, accuracy = trained(given, alpha, seed, Path(folder) / "run")
            rng = np.random.default_rng(seed)
            orders = [rng.permutation(given.clients) for _ in range(given.orders)]
            for (form, gamma), rows in found.items():
                row = []
                for number, order in enumerate(orders):
                    fused = fedbayes.fuse(
                        [models[s] for s in order],
                        counts=counts[order],
                        seed=number,
                        new_atoms=form,
                        gamma=gamma,
                        bias_mean=0.1,
                    )
                    row.append((accuracy(fused.weights), fused.sizes[0]))
                rows.append(row)
        for (form, gamma), rows in found.items():
            values = np.array(rows)
            (right, size), (of_right, of_size) = values.mean((0, 1)), values.std(1, ddof=1).mean(0)
            print(
                f"| {alpha:g} | {form} | {gamma:g} | {right:.3f} | {of_right:.4f} | {size:.0f} | "
                f"{of_size:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
