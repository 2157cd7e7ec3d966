"""Runs of the EM paper's methods on one federation: compared, tabulated, drawn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedbayes.config.config import Config
from fedbayes.reports.palette import looks
from fedbayes.storage.best_tracker import flat
from fedbayes.storage.folder import RunFolder
from fedbayes.storage.metrics_file import Metrics
from fedbayes_papers.experiment import Row, Watch, begun, mean_and_std, opened

ALL_GATED: Row = {"output_gates": True}
"""The paper's groups are of all layers, the last one too; by default it has none."""

_METHODS: dict[str, Row] = {
    "FedAvg": {
        "name": "fedadam",
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
    "FedL1": {"name": "fedl1", "l1": 2e-3, "output_groups": True},
    "FedSparse, low": {"name": "fedsparse", "l0": "low", **ALL_GATED},
    "FedSparse, mid": {"name": "fedsparse", "l0": "mid", **ALL_GATED},
    "FedSparse, high": {"name": "fedsparse", "l0": "high", **ALL_GATED},
    "FedSparse, logits": {"name": "fedsparse", "l0": 7e-6, "scale": "logits"},
    "FedSparse, mid, unpruned": {"name": "fedsparse", "l0": "mid", "prune": False, **ALL_GATED},
    "SCAFFOLD": {"name": "scaffold", "server_optimizer": "adam"},
    "SCAFFOLD, FedSparse": {"name": "scaffold-fedsparse", "l0": "mid", **ALL_GATED},
    "SCAFFOLD, damped": {"name": "scaffold", "server_optimizer": "adam", "damping": 0.1},
    "SCAFFOLD, bounded": {"name": "scaffold", "server_optimizer": "adam", "variate_bound": 1.0},
    "Laplace": {"name": "laplace"},
    "Laplace, cured": {"name": "laplace", "class_rows": True, "server_optimizer": "adam"},
    "mixture, K = 3": {"name": "mixture", "components": 3},
    "mixture, cured": {"name": "mixture", "components": 3, "server_optimizer": "adam"},
}
METHODS = {label: {"weighting": "uniform", **method} for label, method in _METHODS.items()}
"""As the tables call them; the paper's clients weigh alike. `logits`: gates on one scale
(`method.scale`), and no output is gated; its λ0 was chosen by the sparsity that it comes to, in one
run. `bounded`: no variate is longer than the cohort's median. `cured`: the server takes Adam's
steps too, and under the Laplace prior clients vote on the output rows of their own classes alone;
clients here are of one size."""

SPARSE = ("FedSparse, low", "FedSparse, mid", "FedSparse, high")

STYLES = ("-", "--", "-.", ":")

PAPER: dict[str, dict[str, tuple[float, float, float, float]]] = {
    "cifar10": {
        "FedAvg": (0.697, 0.862, 65, 0.0),
        "FedDrop": (0.699, 0.849, 34, 0.0),
        "FedL1": (0.621, 0.825, 36, 0.618),
        "FedSparse, low": (0.689, 0.869, 52, 0.214),
        "FedSparse, mid": (0.689, 0.876, 35, 0.468),
        "FedSparse, high": (0.684, 0.869, 23, 0.665),
    },
    "cifar100": {
        "FedAvg": (0.406, 0.615, 124, 0.0),
        "FedDrop": (0.361, 0.578, 112, 0.0),
        "FedL1": (0.236, 0.458, 118, 0.080),
        "FedSparse, low": (0.405, 0.618, 121, 0.016),
        "FedSparse, mid": (0.317, 0.548, 58, 0.538),
        "FedSparse, high": (0.238, 0.485, 43, 0.669),
    },
    "femnist": {
        "FedAvg": (0.858, 0.908, 272, 0.0),
        "FedDrop": (0.847, 0.876, 168, 0.0),
        "FedL1": (0.820, 0.859, 187, 0.455),
        "FedSparse, low": (0.854, 0.908, 270, 0.010),
        "FedSparse, mid": (0.851, 0.906, 148, 0.456),
        "FedSparse, high": (0.841, 0.896, 102, 0.628),
    },
}
"""Its Tables 1 to 3, after all rounds: global and local accuracy, GB, sparsity."""

FOLDER = "em-view"
"""Of the runs that comparisons share, in the folder for results."""
SHOWN_EVERY = 10
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
    """Rounds of each method, by its name."""
    seeds: int
    changes: Row = field(default_factory=dict)
    """Parameters by method that are not those of `METHODS`."""

    def place(self, method: str, dataset: str, seed: int) -> Path:
        """Where the run of one method is, in the folder of all comparisons."""
        slug = method.replace(", ", "-").replace(" = ", "").replace(" ", "").lower()
        name = f"{dataset}-{self.federation}-{slug}-{self.rounds[method]}-seed{seed}"
        return Path("runs", name)

    def config(self, method: str, seed: int) -> Config:
        """The run of one method."""
        return Config.published(
            **self.settings,
            method=METHODS[method] | self.changes.get(method, {}),
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
            place = folder / comparison.place(method, dataset, seed)
            config = comparison.config(method, seed)
            if not (begun(place, config) and (place / "summary.json").exists()):
                with opened(place, config) as simulation:
                    for step in simulation:
                        if step.number % SHOWN_EVERY == 0:
                            watch(f"{dataset}, {method}, round {step.number} of {rounds}")
            found.setdefault(method, []).append([flat(line) for line in RunFolder(place).metrics()])
    return found


def bytes_of(line: Metrics) -> int:
    """What passed in a round, both ways."""
    return int(line["bytes_down"] + line["bytes_up"])


def evaluated(metrics: Sequence[Metrics]) -> tuple[list[int], npt.NDArray[np.float64]]:
    """Where in the lines the global model was evaluated, and its accuracies.

    Each is the mean of an evaluation and its neighbours, since cohorts of ten clients move
    the global model by points from one evaluation to the next.
    """
    tried = [i for i, line in enumerate(metrics) if "global_accuracy" in line]
    values = np.array([metrics[i]["global_accuracy"] for i in tried])
    return tried, np.array([values[max(0, i - 1) : i + 2].mean() for i in range(len(values))])


def metrics_at(metrics: Sequence[Metrics], until: int) -> dict[str, float]:
    """What a run had come to by a round: accuracies, total bytes, settled bytes, sparsity."""
    lines = [line for line in metrics if line["round"] <= until]
    return {
        "global": float(evaluated(lines)[1][-1]),
        "local": lines[-1]["local_accuracy"],
        "bytes": float(sum(map(bytes_of, lines))),
        "settled": float(np.mean([bytes_of(line) for line in lines[-SETTLED:]])),
        "sparsity": lines[-1]["sparsity"],
    }


def accuracy_at(metrics: Sequence[Metrics], budget: float) -> float:
    """Global accuracy when so many bytes had passed, interpolated between evaluations."""
    spent = np.cumsum([bytes_of(line) for line in metrics])
    tried, values = evaluated(metrics)
    return float(np.interp(budget, spent[tried], values))


def tabulate(found: dict[str, list[list[Metrics]]], until: int, dataset: str = "") -> pd.DataFrame:
    """A line per method: where it stood at a round, and against FedAvg at equal bytes.

    The paper's values, in parentheses, are those after all of its rounds; its bytes are in ratio
    to FedAvg's.
    """
    paper = PAPER.get(dataset, {})
    reference = found["FedAvg"]
    base = [metrics_at(metrics, until) for metrics in reference]
    lines = []
    for method, seeds in found.items():
        own = [metrics_at(metrics, until) for metrics in seeds]
        equal = [
            values["global"] if method == "FedAvg" else accuracy_at(metrics, values["bytes"])
            for metrics, values in zip(reference, own, strict=False)
        ]
        there: tuple[str, ...] = ("", "", "", "")
        if method in paper:
            accuracy, local, gigabytes, sparse = paper[method]
            ratio = gigabytes / paper["FedAvg"][2]
            there = tuple(f" ({value:.3f})" for value in (accuracy, local, ratio, sparse))
        lines.append(
            {
                "method": method,
                "global": mean_and_std([v["global"] for v in own]) + there[0],
                "local": mean_and_std([v["local"] for v in own]) + there[1],
                "GB": mean_and_std([v["bytes"] / 1e9 for v in own]),
                "bytes to FedAvg's": mean_and_std(
                    [v["bytes"] / b["bytes"] for v, b in zip(own, base, strict=False)]
                )
                + there[2],
                "a settled round's bytes to FedAvg's": mean_and_std(
                    [v["settled"] / b["settled"] for v, b in zip(own, base, strict=False)]
                ),
                "sparsity": mean_and_std([v["sparsity"] for v in own]) + there[3],
                "FedAvg's global at as many bytes": mean_and_std(equal),
            }
        )
    return pd.DataFrame(lines)


@dataclass(frozen=True)
class Panel:
    """One quantity of the metrics over bytes or over rounds."""

    key: str
    label: str
    by_bytes: bool
    logarithmic: bool = False


ACCURACIES = (
    Panel("global_accuracy", "global accuracy", by_bytes=True),
    Panel("local_accuracy", "local accuracy", by_bytes=True),
)
SPARSITY = Panel("sparsity", "sparsity of the global model", by_bytes=False)
SHIFTS = (
    Panel("gate_shift_mean", "mean |π − θ|", by_bytes=False, logarithmic=True),
    Panel("gate_shift_max", "largest |π − θ|", by_bytes=False),
)
OVER_ROUNDS = (
    Panel("global_accuracy", "global accuracy", by_bytes=False),
    Panel("local_accuracy", "local accuracy", by_bytes=False),
)


def draw(
    found: dict[str, list[list[Metrics]]], path: Path, title: str, panels: Sequence[Panel]
) -> None:
    """Quantities over bytes or rounds; mean over seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    styles = looks([_method(label) for label in found])
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.5 * columns, 3.8 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, panels, strict=True):
        for place, (method, seeds) in enumerate(found.items()):
            look = styles[place]
            lines = [[line for line in metrics if panel.key in line] for metrics in seeds]
            if not all(lines):
                continue
            y = np.mean([[line[panel.key] for line in own] for own in lines], axis=0)
            if panel.by_bytes:
                places = {line["round"] for line in lines[0]}
                spent = [np.cumsum([bytes_of(line) for line in metrics]) for metrics in seeds]
                x = np.mean(spent, axis=0)[[r - 1 for r in sorted(places)]] / 1e9
            else:
                x = np.array([line["round"] for line in lines[0]])
            # Told apart without colours too; markers at other rounds, so that none hides another.
            axes.plot(
                x,
                y,
                label=method,
                color=look.colour(),
                linewidth=1.3,
                linestyle=STYLES[place % len(STYLES)],
                marker=look.marker,
                markersize=5,
                markevery=(place * max(1, len(x) // 60), max(1, len(x) // 8)),
            )
        axes.set_xlabel("GB sent, both ways" if panel.by_bytes else "round")
        axes.set_ylabel(panel.label)
        axes.grid(alpha=0.3)
        if panel.logarithmic:
            axes.set_yscale("symlog", linthresh=1e-3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="x-small")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def _method(label: str) -> str:
    """The method that a label of this experiment is of, as `METHODS` names it."""
    name = label.partition(",")[0].lower()
    return "scaffold-fedsparse" if label == "SCAFFOLD, FedSparse" else name


@dataclass(frozen=True)
class Compared:
    """What the runs of one data set came to by a round that all have reached."""

    dataset: str
    found: dict[str, list[list[Metrics]]]
    """The metrics of each round, of each seed, of each method."""
    until: int

    def level(self, method: str, key: str) -> float:
        """A metric of a method, mean over seeds."""
        runs = self.found[method]
        return float(np.mean([metrics_at(metrics, self.until)[key] for metrics in runs]))

    def rounds_until(self, method: str, share: float) -> float:
        """The first round with this share of the last sparsity, mean over seeds."""
        reached = []
        for metrics in self.found[method]:
            wanted = share * metrics[-1]["sparsity"]
            reached.append(next(m["round"] for m in metrics if m["sparsity"] >= wanted))
        return float(np.mean(reached))

    def late(self, method: str, key: str) -> float:
        """A quantity of the last rounds, mean over these and over seeds."""
        runs = self.found[method]
        return float(np.mean([[m[key] for m in metrics[-SETTLED:]] for metrics in runs]))

    def curve(self, method: str, key: str, number: int) -> list[float]:
        """A quantity of a round, of each seed."""
        runs = self.found[method]
        return [next(m[key] for m in metrics if m["round"] == number) for metrics in runs]

    def at_bytes(self, method: str, budget: float) -> list[float]:
        """Global accuracy when so many bytes had passed, of each seed; none if fewer passed."""
        if budget > self.level(method, "bytes"):
            return []
        return [accuracy_at(metrics, budget) for metrics in self.found[method]]

    @property
    def marks(self) -> list[int]:
        """Rounds that the global models were evaluated in: the first, the last, some between."""
        known = [m["round"] for m in self.found["FedAvg"][0] if "global_accuracy" in m]
        known = [number for number in known if number <= self.until]
        shares = (0, 1 / 4, 1 / 2, 3 / 4, 1)
        return sorted({known[round(share * (len(known) - 1))] for share in shares})


Table = Callable[[Compared], pd.DataFrame]
"""What of the runs is shown: a line for each method."""


def ends(compared: Compared) -> pd.DataFrame:
    """Where each method stood at last."""
    return tabulate(compared.found, compared.until, compared.dataset)


def over_rounds(key: str) -> Table:
    """A quantity by round, of the methods that have it."""

    def table(compared: Compared) -> pd.DataFrame:
        having = [m for m, runs in compared.found.items() if all(key in r[-1] for r in runs)]
        marks = compared.marks
        lines = []
        for method in having:
            cells = {f"round {n}": mean_and_std(compared.curve(method, key, n)) for n in marks}
            lines.append({"method": method, **cells})
        return pd.DataFrame(lines)

    return table


BUDGETS = (0.05, 0.1, 0.2, 0.4, 1.0)
"""In FedAvg's bytes of all rounds."""


def over_bytes(compared: Compared) -> pd.DataFrame:
    """Global accuracy by bytes, in shares of FedAvg's."""
    whole, lines = compared.level("FedAvg", "bytes"), []
    for method in compared.found:
        found = {b: compared.at_bytes(method, b * whole) for b in BUDGETS}
        cells = {
            f"{share:g} of FedAvg's bytes": mean_and_std(values) if values else ""
            for share, values in found.items()
        }
        lines.append({"method": method, **cells})
    return pd.DataFrame(lines)


NOTES: dict[Table, str] = {
    ends: f"Bytes are of encoded messages, both ways; settled: mean of the last {SETTLED} rounds. "
    "Global: on the union of the clients' test sets, mean of the last two evaluations. Local: mean "
    "over clients of the model each last reported, on its own. In parentheses the paper's, after "
    "all of its rounds.",
    over_bytes: "Global accuracy when so many bytes had passed: each evaluation averaged with its "
    "neighbours, and interpolated between them.",
}
"""What is to be known of a table."""
