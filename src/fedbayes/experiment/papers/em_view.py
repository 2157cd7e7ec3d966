"""The experiments of the EM paper: FedSparse and its rivals, bytes on the wire as the measure.

All methods of a comparison see the same clients, the same cohorts and the same start. As in the
paper's appendix A, the server of every method takes Adam's steps along the difference of
weights. The Dirichlet concentration is not printed there; 1 gives FedAvg its accuracies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedbayes.experiment.config import Config
from fedbayes.experiment.papers.experiment import (
    Experiment,
    Row,
    Scale,
    Watch,
    begun,
    markdown,
    mean_and_deviation,
    opened,
)
from fedbayes.experiment.record import Metrics, RunFolder, write_beside

METHODS: dict[str, Row] = {
    "FedAvg": {
        "name": "fedadam",
        "weighting": "uniform",
        "server_lr": 1e-3,
        "beta2": 0.999,
        "eps": 1e-8,
    },
    "FedDrop": {
        "name": "feddrop",
        "conv_rate": 0.1,
        "dense_rate": 0.5,
        "server_optimizer": "adam",
    },
    "FedL1": {"name": "fedl1", "l1": 2e-3},
    "FedSparse, low": {"name": "fedsparse", "l0": "low"},
    "FedSparse, mid": {"name": "fedsparse", "l0": "mid"},
    "FedSparse, high": {"name": "fedsparse", "l0": "high"},
    "FedSparse, high, faster": {
        "name": "fedsparse",
        "l0": "high",
        "gate_lr": 1.2e-3,
        "output_gates": False,
    },
    "SCAFFOLD": {"name": "scaffold", "server_optimizer": "adam"},
    "SCAFFOLD, FedSparse": {"name": "scaffold-fedsparse", "l0": "mid"},
    "SCAFFOLD, damped": {"name": "scaffold", "server_optimizer": "adam", "damping": 0.1},
    "SCAFFOLD, FedSparse, damped": {"name": "scaffold-fedsparse", "l0": "mid", "damping": 0.1},
    "Laplace": {"name": "laplace"},
    "mixture, K = 3": {"name": "mixture", "components": 3},
}
"""As the tables call them. `faster`: thresholds 1.2 times as fast, and no output is gated."""

COLOURS = {
    "FedAvg": "#000000",
    "FedDrop": "#E69F00",
    "FedL1": "#009E73",
    "FedSparse, low": "#56B4E9",
    "FedSparse, mid": "#0072B2",
    "FedSparse, high": "#CC79A7",
    "FedSparse, high, faster": "#AA4499",
    "SCAFFOLD": "#D55E00",
    "SCAFFOLD, FedSparse": "#F0E442",
    "SCAFFOLD, damped": "#D55E00",
    "SCAFFOLD, FedSparse, damped": "#F0E442",
    "Laplace": "#999999",
    "mixture, K = 3": "#882255",
}

TOLD = 10
"""Rounds between two words of where a run is."""
SETTLED = 20
"""Last rounds, over which the bytes of a round are averaged once the sparsity has settled."""


@dataclass(frozen=True)
class Comparison:
    """Methods on one federation."""

    federation: str
    """Name of the federation; comparisons on the same one share their runs."""
    settings: Row
    """Keys of the config that all share."""
    rounds: dict[str, int]
    """By method."""
    seeds: int

    def config(self, method: str, seed: int) -> Config:
        """The run of one method."""
        return Config.create(
            **self.settings,
            method=METHODS[method],
            seed=seed,
            rounds=self.rounds[method],
            engine="workers",
        )


def compare(
    comparison: Comparison, folder: Path, dataset: str, watch: Watch
) -> dict[str, list[list[Metrics]]]:
    """The metrics of each round, of each seed, of each method; runs what is missing."""
    found: dict[str, list[list[Metrics]]] = {}
    for method, rounds in comparison.rounds.items():
        for seed in range(comparison.seeds):
            slug = method.replace(", ", "-").replace(" = ", "").replace(" ", "").lower()
            place = (
                folder / "runs" / f"{dataset}-{comparison.federation}-{slug}-{rounds}-seed{seed}"
            )
            config = comparison.config(method, seed)
            if not (begun(place, config) and (place / "summary.json").exists()):
                with opened(place, config) as simulation:
                    for step in simulation:
                        if step.number % TOLD == 0:
                            watch(f"{dataset}, {method}, round {step.number} of {rounds}")
            found.setdefault(method, []).append(RunFolder(place).metrics())
    return found


def bytes_of(line: Metrics) -> int:
    """What passed in a round, both ways."""
    return int(line["bytes_down"] + line["bytes_up"])


def figures(metrics: Sequence[Metrics], until: int) -> dict[str, float]:
    """What a run had come to by a round: accuracies, total bytes, settled bytes, sparsity."""
    lines = [line for line in metrics if line["round"] <= until]
    tried = [line for line in lines if "global_accuracy" in line]
    return {
        "global": tried[-1]["global_accuracy"],
        "local": lines[-1]["local_accuracy"],
        "bytes": float(sum(map(bytes_of, lines))),
        "settled": float(np.mean([bytes_of(line) for line in lines[-SETTLED:]])),
        "sparsity": lines[-1]["sparsity"],
    }


def accuracy_at(metrics: Sequence[Metrics], budget: float) -> float:
    """Global accuracy when so many bytes had passed, interpolated between evaluations."""
    spent = np.cumsum([bytes_of(line) for line in metrics])
    tried = [i for i, line in enumerate(metrics) if "global_accuracy" in line]
    values = [metrics[i]["global_accuracy"] for i in tried]
    return float(np.interp(budget, spent[tried], values))


def tabulate(found: dict[str, list[list[Metrics]]], until: int) -> pd.DataFrame:
    """A line per method: where it stood at a round, and against FedAvg at equal bytes."""
    reference = found["FedAvg"]
    base = [figures(metrics, until) for metrics in reference]
    lines = []
    for method, seeds in found.items():
        reached = [m for m in seeds if m[-1]["round"] >= until]
        if not reached:
            continue
        own = [figures(metrics, until) for metrics in reached]
        equal = [
            accuracy_at(metrics, values["bytes"])
            for metrics, values in zip(reference, own, strict=False)
        ]
        lines.append(
            {
                "method": method,
                "global": mean_and_deviation([v["global"] for v in own]),
                "local": mean_and_deviation([v["local"] for v in own]),
                "GB": mean_and_deviation([v["bytes"] / 1e9 for v in own]),
                "bytes a round, settled, to FedAvg's": mean_and_deviation(
                    [v["settled"] / b["settled"] for v, b in zip(own, base, strict=False)]
                ),
                "sparsity": mean_and_deviation([v["sparsity"] for v in own]),
                "FedAvg's global at as many bytes": mean_and_deviation(equal),
            }
        )
    return pd.DataFrame(lines)


def draw(found: dict[str, list[list[Metrics]]], path: Path, title: str) -> None:
    """Accuracy over bytes, sparsity and the clients' gates over rounds; mean over seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2)
    kinds: list[tuple[Any, str, str, bool]] = [
        (panels[0, 0], "global_accuracy", "global accuracy", True),
        (panels[0, 1], "local_accuracy", "local accuracy", True),
        (panels[1, 0], "sparsity", "sparsity of the global model", False),
        (panels[1, 1], "gate_shift_mean", "mean |π − θ|", False),
    ]
    for axes, key, label, by_bytes in kinds:
        for method, seeds in found.items():
            lines = [[line for line in metrics if key in line] for metrics in seeds]
            if not all(lines):
                continue
            y = np.mean([[line[key] for line in own] for own in lines], axis=0)
            if by_bytes:
                places = {line["round"] for line in lines[0]}
                spent = [np.cumsum([bytes_of(line) for line in metrics]) for metrics in seeds]
                x = np.mean(spent, axis=0)[[r - 1 for r in sorted(places)]] / 1e9
            else:
                x = np.array([line["round"] for line in lines[0]])
            axes.plot(x, y, label=method, color=COLOURS[method], linewidth=1.3)
        axes.set_xlabel("GB sent, both ways" if by_bytes else "round")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    panels[1, 1].set_yscale("symlog", linthresh=1e-3)
    panels[0, 0].legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def _finish(
    out: Path, dataset: str, found: dict[str, list[list[Metrics]]], title: str
) -> list[str]:
    """Figure and tables of one data set: at the rounds that some method ended at."""
    ends = sorted({seeds[0][-1]["round"] for seeds in found.values()})
    draw(found, out / f"figure-{dataset}.png", f"{title}, {dataset}")
    return [
        f"**{dataset}, after {until} rounds**\n\n{markdown(tabulate(found, until))}"
        for until in ends
    ]


def _run(
    name: str, title: str, comparisons: dict[str, Comparison], folder: Path, watch: Watch
) -> str:
    out = folder / name
    out.mkdir(parents=True, exist_ok=True)
    parts = []
    for dataset, comparison in comparisons.items():
        found = compare(comparison, folder / "em-view", dataset, watch)
        parts += _finish(out, dataset, found, title)
    note = (
        f"Bytes are of encoded messages, both ways; settled: mean of the last {SETTLED} rounds. "
        "Global: on the union of the clients' test sets. Local: mean over clients of the model "
        "each last reported, on its own."
    )
    text = "\n\n".join([*parts, note])
    write_beside(out / "table.md", (text + "\n").encode())
    return text


def _images(dataset: str) -> Row:
    """100 clients split as Hsu et al., 10 a round (appendix A); digits stand in, smaller."""
    small = dataset == "digits"
    return {
        "cohort": 5 if small else 10,
        "evaluate_every": 10,
        "checkpoint_every": 10,
        "precision": "float32" if small else "bf16",
        "data": {
            "name": dataset,
            "clients": 20 if small else 100,
            "partition": "dirichlet-equal",
            "alpha": 1.0,
        },
        "model": {"hidden": [100]} if small else {"name": "lenet5"},
        "training": {
            "optimizer": "sgd",
            "lr": 0.05,
            "epochs": 1,
            "batch_size": 20 if small else 64,
        },
    }


def table1(folder: Path, scale: Scale, datasets: Sequence[str], watch: Watch) -> str:
    """Table 1: CIFAR-10, LeNet-5; small is one seed and 300 rounds of the cheaper rows."""
    rows = ["FedAvg", "FedDrop", "FedL1", "FedSparse, low", "FedSparse, mid", "FedSparse, high"]
    rows.append("FedSparse, high, faster")
    comparisons = {}
    for dataset in datasets:
        rounds = dict.fromkeys(rows, 1000 if scale == "paper" else 300)
        if dataset == "digits":
            rounds = dict.fromkeys(rows, 40)
        elif scale == "small":
            rounds |= {"FedAvg": 1000, "FedSparse, mid": 1000}
        seeds = 3 if scale == "paper" else 1
        comparisons[dataset] = Comparison("mixed", _images(dataset), rounds, seeds)
    return _run("fedsparse-table1", "FedSparse (Table 1)", comparisons, folder, watch)


def priors(folder: Path, scale: Scale, datasets: Sequence[str], watch: Watch) -> str:
    """Other priors of appendix J and SCAFFOLD on the federation of Table 1.

    Control variates are damped, as the paper had to do on networks; undamped ones diverge.
    """
    rows = ["FedAvg", "SCAFFOLD, damped", "SCAFFOLD, FedSparse, damped", "Laplace"]
    rows.append("mixture, K = 3")
    comparisons = {}
    for dataset in datasets:
        many = 1000 if scale == "paper" else 300
        rounds = dict.fromkeys(rows, 40 if dataset == "digits" else many)
        if dataset != "digits":
            rounds["FedAvg"] = 1000
        seeds = 3 if scale == "paper" else 1
        comparisons[dataset] = Comparison("mixed", _images(dataset), rounds, seeds)
    return _run("em-priors", "Priors of the EM view", comparisons, folder, watch)


def figure8(folder: Path, scale: Scale, datasets: Sequence[str], watch: Watch) -> str:
    """Fig. 8: logistic regression, 100 clients of one class each; SCAFFOLD with FedSparse."""
    comparisons = {}
    for dataset in datasets:
        settings = {
            "cohort": 10,
            "evaluate_every": 5,
            "checkpoint_every": 20,
            "data": {
                "name": dataset,
                "clients": 20 if dataset == "digits" else 100,
                "partition": "shards",
                "shards_per_client": 1,
            },
            "model": {"hidden": []},
            "training": {"optimizer": "sgd", "lr": 0.05, "epochs": 1, "batch_size": 64},
        }
        rows = ["FedAvg", "SCAFFOLD", "FedSparse, mid", "SCAFFOLD, FedSparse"]
        rounds = dict.fromkeys(rows, 40 if dataset == "digits" else 400)
        seeds = 3 if scale == "paper" else 1
        comparisons[dataset] = Comparison("one-class", settings, rounds, seeds)
    return _run("fedsparse-fig8", "SCAFFOLD and FedSparse (Fig. 8)", comparisons, folder, watch)


EXPERIMENTS = (
    Experiment(
        "fedsparse-table1",
        "LeNet-5 on 100 clients: FedAvg, FedDrop, FedL1, FedSparse; accuracy over bytes",
        ("cifar10",),
        table1,
    ),
    Experiment(
        "fedsparse-fig8", "SCAFFOLD and FedSparse, clients of one class", ("mnist",), figure8
    ),
    Experiment(
        "em-priors", "SCAFFOLD, Laplace and mixture on the clients of Table 1", ("cifar10",), priors
    ),
)
"""In the order of the paper."""
