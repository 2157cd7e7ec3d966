"""FedNova and FedBN beside FedAvg, on data that they are made for: three seeds of each.

    python benchmarks/baselines.py

Unequal steps, where no model suits all: a linear regression of eight clients with 20 to 640
samples, whose slopes differ with their sizes. Pooled training shows what could be reached. Unequal
steps, where one model suits all: digits by Dirichlet shares. Shifted features: digits as eight
devices see them, each with a contrast, a brightness and a gamma of its own.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import fedbayes

SEEDS = range(3)
DEVICES = 8


def unequal_clients(file: Path) -> None:
    """Write a regression whose slopes go with the size of the client, for `data.path`."""
    rng = np.random.default_rng(0)
    sizes = [20, 20, 40, 40, 80, 160, 320, 640]
    group = np.repeat(np.arange(len(sizes)), sizes)
    x = rng.normal(size=(len(group), 5))
    slopes = np.linspace(-1, 1, len(sizes))[:, None] * rng.normal(1, 0.3, (1, 5))
    y = (x * slopes[group]).sum(axis=1) + 0.3 * rng.normal(size=len(group))
    np.savez(file, x=x.astype(np.float32), y=y.astype(np.float32), groups=group)


def shifted_digits(file: Path) -> None:
    """Write digits as devices see them, one group each, for `data.path`."""
    from sklearn.datasets import load_digits

    rng = np.random.default_rng(0)
    images, labels = load_digits(return_X_y=True)
    order = rng.permutation(len(labels))
    device = np.empty(len(labels), dtype=np.int64)
    device[order] = np.arange(len(labels)) % DEVICES
    contrast = rng.uniform(0.2, 1.5, DEVICES)
    brightness, gamma = rng.uniform(-1, 1, DEVICES), rng.uniform(0.3, 3.0, DEVICES)
    seen = (images / 16) ** gamma[device, None]
    seen = contrast[device, None] * seen + brightness[device, None]
    np.savez(file, x=seen.astype(np.float32), y=labels, groups=device)


def show(title: str, methods: list[str], metrics: dict[str, str], **settings: Any) -> None:
    """Mean and standard deviation over the seeds of some metrics, as in `global rmse`."""
    print(f"\n{title}\n\n| method | {' | '.join(metrics.values())} |\n|---|{'---|' * len(metrics)}")
    for name in methods:
        runs = [fedbayes.run(method={"name": name}, seed=seed, **settings) for seed in SEEDS]
        cells = []
        for shown in metrics:
            whose, metric = shown.split()
            found = [run.summary["metrics"].get(whose) for run in runs]
            values = [each[metric] for each in found if each]
            cells.append(
                f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}" if values else ""
            )
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """The three comparisons."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        unequal_clients(folder / "slopes.npz")
        show(
            "Unequal steps, where no model suits all",
            ["fedavg", "fednova", "global"],
            {"global rmse": "rmse of the global model", "global r2": "its R²"},
            rounds=40,
            data={"path": str(folder / "slopes.npz")},
            task={"likelihood": "gaussian", "noise": 1.0},
            training={"epochs": 5, "batch_size": 10, "lr": 0.002},
            model={"hidden": []},
        )
        show(
            "Unequal steps, where one model suits all",
            ["fedavg", "fednova"],
            {"global accuracy": "accuracy of the global model", "global nll": "its nll (nats)"},
            rounds=20,
            data={"name": "digits", "clients": 10, "partition": "dirichlet", "alpha": 0.2},
            training={"epochs": 5, "batch_size": 16, "lr": 0.05},
            model={"hidden": [32]},
        )
        shifted_digits(folder / "devices.npz")
        show(
            "Shifted features",
            ["fedavg", "local", "fedbn"],
            {"local accuracy": "clients' own models", "global accuracy": "the global model"},
            rounds=20,
            data={"path": str(folder / "devices.npz"), "samples_per_client": 60},
            training={"epochs": 2, "batch_size": 16, "lr": 0.05},
            model={"hidden": [64], "norm": "batch"},
        )


if __name__ == "__main__":
    main()
