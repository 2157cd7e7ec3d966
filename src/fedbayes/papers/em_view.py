"""The experiments of the EM paper: FedSparse and its rivals, bytes on the wire as the measure.

All methods of a comparison see the same clients, the same cohorts and the same start. As in the
paper's appendix A, the server of every method takes Adam's steps along the difference of
weights. The Dirichlet concentration is not printed there; 1 gives FedAvg its accuracies.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedbayes.papers.experiment import (
    Experiment,
    Request,
    Row,
    Watch,
    begun,
    mean_and_std,
    opened,
)
from fedbayes.papers.finding import Claim, Finding, Part, markdown
from fedbayes.reports.palette import MARKERS
from fedbayes.runs.config import Config
from fedbayes.runs.folder import Metrics, RunFolder
from fedbayes.runs.standing import flat

ALL_GATED: Row = {"output_gates": True}
"""The paper's groups are of all layers, the last one too; by default it has none."""

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
"""As the tables call them. `logits`: gates on one scale (`method.scale`), and no output is gated;
its λ0 was chosen by the sparsity that it comes to, in one run. `bounded`: no variate is longer than
the cohort's median. `cured`: the server takes Adam's steps too, and under the Laplace prior clients
vote on the output rows of their own classes alone; clients here are of one size."""

COLOURS = {
    "FedAvg": "#000000",
    "FedDrop": "#E69F00",
    "FedL1": "#009E73",
    "FedSparse, low": "#56B4E9",
    "FedSparse, mid": "#0072B2",
    "FedSparse, high": "#CC79A7",
    "FedSparse, logits": "#AA4499",
    "FedSparse, mid, unpruned": "#D55E00",
    "SCAFFOLD": "#D55E00",
    "SCAFFOLD, FedSparse": "#882255",
    "SCAFFOLD, damped": "#D55E00",
    "SCAFFOLD, bounded": "#332288",
    "Laplace": "#999999",
    "Laplace, cured": "#009E73",
    "mixture, K = 3": "#882255",
    "mixture, cured": "#CC79A7",
}

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

ROUNDS = {"digits": 40, "cifar10": 1000, "cifar100": 6000, "femnist": 6000}
"""The paper's number of rounds."""
SMALL_ROUNDS = 120
"""At small scale: sparsity settles within 50."""
PRIORS_ROUNDS = 50
"""At small scale, of the methods beside FedAvg in the comparison of priors."""

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
        return Config.create(
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

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.5 * columns, 3.8 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, panels, strict=True):
        for place, (method, seeds) in enumerate(found.items()):
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
                color=COLOURS[method],
                linewidth=1.3,
                linestyle=STYLES[place % len(STYLES)],
                marker=MARKERS[place % len(MARKERS)],
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


Claims = Callable[[Compared], list[Claim]]
"""Claims of the paper on the runs of one data set."""
Table = Callable[[Compared], pd.DataFrame]
"""What of the runs is shown: a line for each method."""


def _ends(compared: Compared) -> pd.DataFrame:
    """Where each method stood at last."""
    return tabulate(compared.found, compared.until, compared.dataset)


def _over_rounds(key: str) -> Table:
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


def _over_bytes(compared: Compared) -> pd.DataFrame:
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


def _run(
    request: Request,
    title: str,
    comparisons: dict[str, Comparison],
    claims: Claims,
    panels: Sequence[Panel] = (*ACCURACIES, SPARSITY, SHIFTS[0]),
    table: Table = _ends,
) -> Finding:
    """Run what is missing; a figure, a table and the claims of each data set."""
    parts = []
    for dataset, comparison in comparisons.items():
        found = compare(comparison, request.folder / FOLDER, dataset, request.watch)
        draw(found, request.out / f"figure-{dataset}.png", f"{title}, {dataset}", panels)
        compared = Compared(dataset, found, min(comparison.rounds.values()))
        parts.append(
            Part(
                heading=f"{dataset}, after {compared.until} rounds",
                table=markdown(table(compared)),
                claims=tuple(claims(compared)),
                dataset=dataset,
            )
        )
    return request.found(
        parts,
        min(c.seeds for c in comparisons.values()),
        NOTES.get(table, "Mean ± std over seeds."),
    )


NOTES: dict[Table, str] = {
    _ends: f"Bytes are of encoded messages, both ways; settled: mean of the last {SETTLED} rounds. "
    "Global: on the union of the clients' test sets, mean of the last two evaluations. Local: mean "
    "over clients of the model each last reported, on its own. In parentheses the paper's, after "
    "all of its rounds.",
    _over_bytes: "Global accuracy when so many bytes had passed: each evaluation averaged with its "
    "neighbours, and interpolated between them.",
}
"""What is to be known of a table."""


SPARSE = ("FedSparse, low", "FedSparse, mid", "FedSparse, high")

UNGOVERNED = (
    "on the paper's scale λ0 does not govern: a gate starts .0046 from its threshold and one step "
    "of the server is .0044, so that the first rounds decide; in logits it does (fedsparse-l0)"
)
"""Why FedSparse's sparsity is not the paper's."""
YOUNG = (
    "it is not the draws of the gates, without which clients come to the same (fedsparse-local); "
    "the sparser networks are behind globally too, as long as all of them still learn"
)
"""Why the best local models are others'."""
NO_UNITS = "the paper gates weights; gates here are of units, and the one layer has but its outputs"
"""Why nothing is pruned in a logistic regression."""
EARLY = (
    "FedDrop's messages are short from the first round on; FedSparse's are once it has pruned, and "
    "until then it falls behind in accuracy"
)
"""Why FedSparse is not ahead of federated dropout at small budgets."""
AT_ONCE = "it prunes before the global model is first evaluated"
"""Why it cannot be told how FedSparse learns until then."""
NOT_YET = "its lasso has left nothing out yet (fedsparse-fig4)"
"""Why FedL1 has not yet lost more than sparser models."""
NEAR = 0.05
"""Of the paper's sparsity, or of none."""
LEVEL = 0.03
"""Of FedAvg's accuracy."""


def _tables_claims(compared: Compared) -> list[Claim]:
    """More sparsity, fewer bytes; at equal bytes ahead of FedAvg; the best local models."""
    bytes_ = {method: compared.level(method, "bytes") for method in compared.found}
    ordered = [bytes_[method] for method in ("FedAvg", *SPARSE)]
    gains = []
    for method in SPARSE:
        equal = [accuracy_at(metrics, bytes_[method]) for metrics in compared.found["FedAvg"]]
        gains.append(compared.level(method, "global") - float(np.mean(equal)))
    local = {method: compared.level(method, "local") for method in compared.found}
    best = max(local, key=lambda method: local[method])
    claims = [
        Claim(
            text="bytes fall from FedAvg over low and mid to high",
            seen=ordered == sorted(ordered, reverse=True),
            measured=", ".join(f"{value / ordered[0]:.2f}" for value in ordered),
        ),
        *(
            Claim(
                text=f"at as many bytes the global model of {method} is ahead of FedAvg's",
                seen=gain > 0,
                measured=f"{gain:+.3f}",
            )
            for method, gain in zip(SPARSE, gains, strict=True)
        ),
        Claim(
            text="the best local models are FedSparse's",
            seen=best in SPARSE,
            measured=f"{best} {local[best]:.3f}, FedAvg {local['FedAvg']:.3f}, "
            + ", ".join(f"{local[method]:.3f}" for method in SPARSE)
            + " for low, mid, high",
            cause=YOUNG,
        ),
    ]
    paper = PAPER.get(compared.dataset)
    if paper is not None:
        wanted = [paper[method][3] for method in SPARSE]
        own = [compared.level(method, "sparsity") for method in SPARSE]
        pairs = [f"{one:.2f} ({other:.2f})" for one, other in zip(own, wanted, strict=True)]
        claims.append(
            Claim(
                text=f"low, mid and high prune what they do in the paper, within {NEAR}",
                seen=bool(np.abs(np.subtract(own, wanted)).max() <= NEAR),
                measured=", ".join(pairs),
                cause=UNGOVERNED,
            )
        )
    return claims


def _budget_claims(compared: Compared) -> list[Claim]:
    """Small budgets are the sparse models', larger ones federated dropout's (section 5)."""
    sparse = SPARSE[1:]
    largest = min(compared.level(method, "bytes") for method in (*sparse, "FedDrop"))

    def level(method: str, budget: float) -> float:
        return float(np.mean(compared.at_bytes(method, budget)))

    def told(methods: Sequence[str], budget: float) -> str:
        return ", ".join(f"{method} {level(method, budget):.3f}" for method in methods)

    small, others = largest / 2, ("FedAvg", "FedDrop", "FedL1")
    claims = []
    for method in sparse:
        ahead = all(level(method, small) > level(other, small) for other in others)
        claims.append(
            Claim(
                text=f"{method} is ahead of all others at a small budget",
                seen=ahead,
                measured=f"{told((method, *others), small)} at {small / 1e9:.1f} GB",
                cause=EARLY if level("FedDrop", small) > level(method, small) else "",
            )
        )
    drop = level("FedDrop", largest)
    claims.append(
        Claim(
            text="at a larger budget FedDrop is ahead of them",
            seen=all(drop > level(method, largest) for method in sparse),
            measured=f"{told(('FedDrop', *sparse), largest)} at {largest / 1e9:.1f} GB",
        )
    )
    return claims


def _rounds_claims(compared: Compared) -> list[Claim]:
    """Gates do not slow learning before they prune; the lasso costs accuracy (appendix D)."""

    def mean(method: str, key: str, number: int) -> float:
        return float(np.mean(compared.curve(method, key, number)))

    first, told, behind = compared.marks[0], [], []
    for method in (m for m in compared.found if m.startswith("FedSparse")):
        whole = [n for n in compared.marks if mean(method, "sparsity", n) < NEAR]
        if not whole:
            told.append(f"{method} has lost {mean(method, 'sparsity', first):.2f} by round {first}")
            continue
        own, plain = (mean(m, "global_accuracy", whole[-1]) for m in (method, "FedAvg"))
        told.append(f"{method} {own:.3f} in round {whole[-1]}, FedAvg {plain:.3f}")
        if method in SPARSE:  # the others are not the paper's
            behind.append(plain - own)
    last = {method: compared.level(method, "global") for method in compared.found}
    rest = {method: value for method, value in last.items() if method != "FedL1"}
    worst = min(rest, key=lambda method: rest[method])
    return [
        Claim(
            text=f"until it prunes FedSparse learns like FedAvg, within {LEVEL}",
            seen=bool(behind) and max(behind) <= LEVEL,
            measured="; ".join(told),
            cause="" if behind else AT_ONCE,
        ),
        Claim(
            text="FedL1 is worse than all others",
            seen=last["FedL1"] < rest[worst],
            measured=f"{last['FedL1']:.3f} after {compared.until} rounds, {worst} "
            f"{rest[worst]:.3f}",
            cause=NOT_YET,
        ),
    ]


def _settles_claim(compared: Compared) -> list[Claim]:
    """FedSparse is as sparse as it will be before round 100, FedL1 much later (appendix B)."""
    claims = []
    for method in SPARSE:
        when = compared.rounds_until(method, 0.95)
        text = f"{method} has its final sparsity before round 100"
        claims.append(Claim(text=text, seen=when < 100, measured=f"95 % of it in round {when:.0f}"))
    late = compared.level("FedL1", "sparsity")
    claims.append(
        Claim(
            text="FedL1 gets sparse much later",
            seen=late < compared.level("FedSparse, low", "sparsity") / 2,
            measured=f"{late:.3f} after {compared.until} rounds",
        )
    )
    return claims


def _shift_claim(compared: Compared) -> list[Claim]:
    """Clients and server soon agree on the gates (appendix C)."""
    claims = []
    for method in SPARSE:
        late = compared.late(method, "gate_shift_mean")
        largest = compared.late(method, "gate_shift_max")
        claims.append(
            Claim(
                text=f"{method}: the mean distance of the clients' gates from the server's becomes "
                "almost zero",
                seen=late < 0.01,
                measured=f"{late:.4f} in the last {SETTLED} rounds, the largest {largest:.3f}",
            )
        )
    return claims


def _pruning_claim(compared: Compared) -> list[Claim]:
    """Pruning at the server does no harm (appendix D)."""
    claims = []
    for key in ("global", "local"):
        pruned = compared.level("FedSparse, mid", key)
        whole = compared.level("FedSparse, mid, unpruned", key)
        claims.append(
            Claim(
                text=f"pruning at the server does not harm the {key} accuracy",
                seen=pruned > whole - 0.01,
                measured=f"{pruned:.3f} with, {whole:.3f} without",
            )
        )
    return claims


def _scaffold_claims(compared: Compared) -> list[Claim]:
    """SCAFFOLD helps the global model of a convex problem, alone and with FedSparse."""
    claims = []
    for better, worse, key in (
        ("SCAFFOLD", "FedAvg", "global"),
        ("FedAvg", "SCAFFOLD", "local"),
        ("SCAFFOLD, FedSparse", "FedSparse, mid", "global"),
    ):
        high, low = compared.level(better, key), compared.level(worse, key)
        text = f"{better} has a better {key} accuracy than {worse}"
        claims.append(Claim(text=text, seen=high > low, measured=f"{high:.3f} against {low:.3f}"))
    both = compared.level("SCAFFOLD, FedSparse", "sparsity")
    alone = compared.level("FedSparse, mid", "sparsity")
    text = "FedSparse prunes with SCAFFOLD too (the paper: 35 % with, 47 % without)"
    measured = f"{both:.0%} with, {alone:.0%} without"
    claims.append(Claim(text=text, seen=both > 0.1, measured=measured, cause=NO_UNITS))
    return claims


def _priors_claims(compared: Compared) -> list[Claim]:
    """On deep networks damped control variates bring nothing (appendix E); what other priors lose
    against FedAvg, and what they do not once they are cured.
    """
    plain = compared.level("FedAvg", "global")
    damped = compared.level("SCAFFOLD, damped", "global")
    bounded = compared.level("SCAFFOLD, bounded", "global")
    claims = [
        Claim(
            text="on a deep network damped SCAFFOLD brings no benefit",
            seen=damped <= plain + 0.01,
            measured=f"{damped:.3f}, FedAvg {plain:.3f}",
        ),
        Claim(
            text="undamped SCAFFOLD trains where no variate is longer than the median",
            seen=bounded >= plain - LEVEL,
            measured=f"{bounded:.3f}, FedAvg {plain:.3f}",
        ),
    ]
    third = float(np.mean(compared.at_bytes("FedAvg", compared.level("FedAvg", "bytes") / 3)))
    thirds = (
        "each of its components sees a third of the updates; after a third of the rounds FedAvg "
        f"has {third:.3f}"
    )
    for method, cured, cause in (
        ("Laplace", "Laplace, cured", ""),
        ("mixture, K = 3", "mixture, cured", thirds),
    ):
        own, now = compared.level(method, "global"), compared.level(cured, "global")
        claims.append(
            Claim(
                text=f"{cured}: within {LEVEL} of FedAvg at as many updates",
                seen=now >= plain - LEVEL,
                measured=f"{now:.3f}, as published {own:.3f}, FedAvg {plain:.3f}",
                cause=cause,
            )
        )
    return claims


def _federation(dataset: str) -> Row:
    """The clients of appendix A; digits stand in, smaller.

    CIFAR-10: 100 clients split as Hsu et al. CIFAR-100: 500 clients, by Dirichlet shares (the
    paper's split is Pachinko's, over coarse and fine labels). FEMNIST: the writers.
    """
    small = dataset == "digits"
    data: Row = {"name": dataset, "partition": "dirichlet-equal", "alpha": 1.0, "clients": 100}
    match dataset:
        case "digits":
            data["clients"] = 20
        case "cifar100":
            data["clients"] = 500
        case "femnist":
            data = {"name": dataset, "partition": "natural"}
    model: Row = {"name": "resnet20"} if dataset == "cifar100" else {"name": "lenet5"}
    return {
        "cohort": 5 if small else 10,
        "evaluate_every": 10,
        "checkpoint_every": 10,
        "precision": "float32" if small else "bf16",
        "data": data,
        "model": {"hidden": [100]} if small else model,
        "training": {
            "optimizer": "sgd",
            "lr": 0.05,
            "epochs": 1,
            "batch_size": 64 if dataset == "cifar10" else 20,
        },
    }


CHANGES: dict[str, Row] = {
    "cifar100": {
        "FedDrop": {"dense_rate": 0.0},
        **{method: {"output_gates": False} for method in SPARSE},
    },
    "femnist": {"FedDrop": {"conv_rate": 0.2, "dense_rate": 0.4}, "FedL1": {"l1": 1e-3}},
}
"""What appendix A has otherwise than on CIFAR-10."""


def comparison_of(request: Request, dataset: str, rows: Sequence[str]) -> Comparison:
    """Methods on the federation of a data set."""
    small = request.small and dataset != "digits"
    rounds = dict.fromkeys(rows, SMALL_ROUNDS if small else ROUNDS[dataset])
    seeds = len(request.repeats(3, 3))
    changes = CHANGES.get(dataset, {})
    return Comparison("mixed", _federation(dataset), rounds, seeds, changes)


ROWS = ("FedAvg", "FedDrop", "FedL1", *SPARSE)


def _table(name: str, title: str, home: str) -> Experiment:
    """Tables 1 to 3: all methods on one data set."""

    def run(request: Request) -> Finding:
        comparisons = {}
        for dataset in request.datasets:
            rows = (*ROWS, "FedSparse, logits") if dataset in ("cifar10", "digits") else ROWS
            comparisons[dataset] = comparison_of(request, dataset, rows)
        return _run(request, f"FedSparse ({title})", comparisons, _tables_claims)

    what = f"{title}: FedAvg, FedDrop, FedL1, FedSparse; accuracy, bytes, sparsity"
    return Experiment(name, what, (home,), run)


def _figure(
    name: str,
    title: str,
    rows: Sequence[str],
    panels: Sequence[Panel],
    claims: Claims,
    table: Table,
    datasets: tuple[str, ...] = ("cifar10", "cifar100", "femnist"),
) -> Experiment:
    """A figure from runs of the tables."""

    def run(request: Request) -> Finding:
        comparisons = {d: comparison_of(request, d, rows) for d in request.datasets}
        return _run(request, title, comparisons, claims, panels, table)

    return Experiment(name, title, datasets, run)


PRIORS = (
    "FedAvg",
    "SCAFFOLD, damped",
    "SCAFFOLD, bounded",
    "Laplace",
    "Laplace, cured",
    "mixture, K = 3",
    "mixture, cured",
)


def priors(request: Request) -> Finding:
    """Other priors of appendix J and SCAFFOLD on the federation of Table 1.

    Control variates are damped, as the paper had to do on networks, or bounded; without either
    they diverge. FedAvg's runs are those of Table 1, which go on for longer.
    """
    comparisons = {}
    for dataset in request.datasets:
        own = comparison_of(request, dataset, PRIORS)
        if request.small and dataset != "digits":
            own = replace(own, rounds=own.rounds | dict.fromkeys(PRIORS[1:], PRIORS_ROUNDS))
        comparisons[dataset] = own
    panels = (*OVER_ROUNDS, *ACCURACIES)
    return _run(request, "Priors of the EM view", comparisons, _priors_claims, panels)


def figure8(request: Request) -> Finding:
    """Fig. 8: logistic regression, 100 clients of one class each; SCAFFOLD with FedSparse."""
    comparisons = {}
    for dataset in request.datasets:
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
        seeds = len(request.repeats(3, 3))
        comparisons[dataset] = Comparison("one-class", settings, rounds, seeds)
    return _run(request, "SCAFFOLD and FedSparse (Fig. 8)", comparisons, _scaffold_claims)


EXPERIMENTS = (
    _table("fedsparse-table1", "Table 1, LeNet-5 on 100 clients", "cifar10"),
    _table("fedsparse-table2", "Table 2, ResNet-20 on 500 clients", "cifar100"),
    _table("fedsparse-table3", "Table 3, LeNet-5 on writers", "femnist"),
    _figure(
        "fedsparse-fig3",
        "Fig. 3: accuracy over bytes",
        ROWS,
        ACCURACIES,
        _budget_claims,
        _over_bytes,
    ),
    _figure(
        "fedsparse-fig4",
        "Fig. 4: sparsity over rounds",
        ("FedAvg", "FedL1", *SPARSE),
        (SPARSITY,),
        _settles_claim,
        _over_rounds(SPARSITY.key),
    ),
    _figure(
        "fedsparse-fig5",
        "Fig. 5: clients' gates against the server's",
        ("FedAvg", *SPARSE),
        SHIFTS,
        _shift_claim,
        _over_rounds(SHIFTS[0].key),
    ),
    _figure(
        "fedsparse-fig6",
        "Fig. 6: accuracy over rounds",
        (*ROWS, "FedSparse, logits"),
        OVER_ROUNDS,
        _rounds_claims,
        _over_rounds("global_accuracy"),
    ),
    _figure(
        "fedsparse-fig7",
        "Fig. 7: FedSparse with and without pruning at the server",
        ("FedAvg", "FedSparse, mid", "FedSparse, mid, unpruned"),
        OVER_ROUNDS,
        _pruning_claim,
        _ends,
        ("cifar10",),
    ),
    Experiment(
        "fedsparse-fig8",
        "Fig. 8: SCAFFOLD and FedSparse, clients of one class",
        ("mnist",),
        figure8,
    ),
    Experiment(
        "em-priors", "SCAFFOLD, Laplace and mixture on the clients of Table 1", ("cifar10",), priors
    ),
)
"""In the order of the paper."""
