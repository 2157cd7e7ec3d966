"""Wrong training labels: FedAvg, PVI and FedGVI on MNIST at 10 and at 3 clients.

    python benchmarks/label_noise.py               # the table of docs/benchmarks/index.md
    python benchmarks/label_noise.py --choose      # the choice of settings, on validation data
    python benchmarks/label_noise.py --jobs 0      # measure nothing: what is there

A tenth of the training labels is replaced by other classes (`data.label_noise = 0.1`); clients get
images at random, and all of them are in every round. The network has one hidden layer of 200, as
in the paper (Mildner et al. 2025), with its prior (deviation 1) and start (deviation 0.03), its
batch of 256, its generalized cross-entropy with δ = 0.8 and its Rényi divergence with α = 2.5.
Each method has 12 rounds of 10 passes over each client's data, FedAvg by SGD in batches of 64, the
others by Adam. The paper has 25 rounds of up to 2,500 passes, so what is compared are methods at
the same, smaller budget; `--rounds` and `--passes` give another, for which settings are chosen
anew.

Learning rates, and the weight of the divergence for PVI and FedGVI, are chosen by `--choose`: each
client of 10 keeps a sixth of its training images for validation, with their labels as they are,
under seed 100, which is in no table. Test images have no part in it. The grid is what was left of
a larger one on 20,000 of these images (rates 0.003 and 0.01, weights 1 to 0.001, FedAvg at 0.05 and
0.2), and smaller rates beside it. The settings with the best accuracy are `CHOSEN`, and serve both
numbers of clients. A seed of the table is another division of the images, other wrong labels and
another start; all methods see the same ones. Measurements go to `--out` and are not made again.
FEDBAYES_DATA must have MNIST.
"""

import argparse
import warnings
from pathlib import Path

import numpy as np
from joblib import Parallel, delayed

import fedbayes
from fedbayes.data import DataSettings, load_dataset
from fedbayes_papers.experiment import Results, fingerprint, mean_and_std

HERE = Path(__file__).parent / ".label_noise"
CLIENTS = (10, 3)
PUBLISHED = {"FedAvg": (96.6, 96.3), "PVI": (95.6, 96.7), "FedGVI": (97.5, 98.1)}
BUDGET = {"rounds": 12, "passes": 10}
HELD_OUT = 1 / 6
"""Share of each client's training images that settings are chosen on."""

PVI = [(0.003, 0.01), (0.003, 0.001), (0.001, 1.0), (0.001, 0.1), (0.001, 0.01)]
FEDGVI = [(0.01, 0.001), (0.003, 0.001), (0.001, 0.01), (0.001, 0.001)]
"""Learning rates and weights of the divergence that a method is tried with."""


def words(lr, weight):
    return f"learning rate {lr}, kl_weight {weight}"


CANDIDATES = {
    "FedAvg": {f"learning rate {lr}": (lr, {"name": "fedavg"}) for lr in (0.01, 0.02, 0.05)},
    "PVI": {words(lr, w): (lr, {"name": "pvi", "kl_weight": w}) for lr, w in PVI},
    "FedGVI": {
        words(lr, w): (lr, {"name": "fedgvi", "divergence": "renyi", "kl_weight": w})
        for lr, w in FEDGVI
    },
}
"""Learning rate and `[method]` of the runs that `--choose` compares, by name."""
CHOSEN = {
    "FedAvg": "learning rate 0.02",
    "PVI": words(0.001, 0.1),
    "FedGVI": words(0.003, 0.001),
}
"""Those that were best."""


def settings(method, candidate, clients, seed, data):
    """Keys of the config of one run."""
    lr, table = CANDIDATES[method][candidate]
    optimizer = "sgd" if method == "FedAvg" else "adam"
    return {
        "seed": seed,
        "rounds": BUDGET["rounds"],
        "evaluate_every": 0,
        "checkpoint_every": BUDGET["rounds"],
        "engine": "sequential",
        "data": {"clients": clients, "partition": "iid", "label_noise": 0.1, **data},
        "model": {"name": "mlp", "hidden": [200]},
        "training": {
            "optimizer": optimizer,
            "lr": lr,
            "batch_size": 256 if optimizer == "adam" else 64,
            "epochs": BUDGET["passes"],
        },
        "method": table,
    }


def training_images(out):
    """The training part of MNIST as a file of its own, so that no test image is at hand."""
    path = out / "mnist_train.npz"
    if not path.exists():
        mnist = load_dataset(DataSettings(name="mnist"))
        count = mnist.official_train
        np.savez(path, x=np.asarray(mnist.x[:count]), y=np.asarray(mnist.y[:count]))
    return path


def row_of(key, told):
    """The measurements of one run."""
    warnings.simplefilter("ignore")
    summary = fedbayes.run(**told).summary
    names = ("global_accuracy", "global_nll", "global_ece", "seconds")
    return key | {name: summary[name] for name in names}


def measured(results, keys, out, jobs):
    """The measurements of these keys, after those that are missing (none is made with 0 jobs)."""
    todo = []
    for key in results.missing(keys) if jobs else ():
        data = {"name": "mnist"}
        if key["what"] == "choose":
            data = {"path": str(training_images(out)), "test": HELD_OUT}
        told = settings(key["method"], key["candidate"], key["clients"], key["seed"], data)
        todo.append(delayed(row_of)(key, told))
    for row in Parallel(jobs or 1, return_as="generator_unordered")(todo):
        results.add(row)
        print(" ".join(map(str, row.values())), flush=True)
    return results.table(keys).to_dict("records")


def key_of(what, method, candidate, clients, seed):
    images = {"test": HELD_OUT} if what == "choose" else {"name": "mnist"}
    own = fingerprint(settings(method, candidate, clients, seed, images))
    return {
        "what": what,
        "method": method,
        "candidate": candidate,
        "clients": clients,
        "seed": seed,
        "settings": own,
    }


def choose(results, out, jobs):
    """Print the validation accuracy of every candidate."""
    keys = [
        key_of("choose", method, candidate, 10, 100)
        for method, candidates in CANDIDATES.items()
        for candidate in candidates
    ]
    print("| method | settings | validation accuracy |\n|---|---|---|")
    for row in measured(results, keys, out, jobs):
        print(f"| {row['method']} | {row['candidate']} | {row['global_accuracy']:.2%} |")


def compare(results, out, seeds, jobs):
    """Print the table of methods and numbers of clients."""
    keys = [
        key_of("compare", method, CHOSEN[method], clients, seed)
        for seed in range(seeds)
        for clients in CLIENTS
        for method in CANDIDATES
    ]
    rows = measured(results, keys, out, jobs)
    print("| clients | method | seeds | accuracy, % | published | NLL | ECE |")
    print("|" + "---|" * 7)
    for place, clients in enumerate(CLIENTS):
        for method in CANDIDATES:
            own = [r for r in rows if (r["clients"], r["method"]) == (clients, method)]
            if not own:
                continue
            cells = [mean_and_std([100 * r["global_accuracy"] for r in own], 2)]
            cells += [str(PUBLISHED[method][place])]
            cells += [mean_and_std([r[n] for r in own]) for n in ("global_nll", "global_ece")]
            print(f"| {clients} | {method} | {len(own)} | " + " | ".join(cells) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--choose", action="store_true", help="settings, on validation data")
    parser.add_argument("--seeds", type=int, default=3)
    for name, value in BUDGET.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once; 0 prints what is there")
    parser.add_argument("--out", type=Path, default=HERE)
    given = parser.parse_args()
    BUDGET.update(rounds=given.rounds, passes=given.passes)
    given.out.mkdir(parents=True, exist_ok=True)
    results = Results(given.out / "results.jsonl")
    if given.choose:
        choose(results, given.out, given.jobs)
    else:
        compare(results, given.out, given.seeds, given.jobs)


if __name__ == "__main__":
    main()
