"""The experiments of the Combined Learning paper: convex and non-convex linear combinations.

Figs. 2, 3 and 5 are on two hosts with COVID-19 tests, each trained to convergence before every
of 30 rounds; the paper's collection is not public in that form, so its counts of samples are
scaled to what the Einstein sheet holds (81 positive patients with a full blood count), and the
network has 1,892 parameters (the paper's 1,873). Fig. 6 is on MNIST, sorted by label and dealt
to 2 to 80 hosts, with a network of 1.02 million parameters and one epoch a round.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from fedbayes.papers.experiment import (
    Experiment,
    Request,
    Row,
    finished,
    mean_and_std,
)
from fedbayes.papers.finding import Claim, Finding, Part, Scale, markdown
from fedbayes.runs.config import Config
from fedbayes.runs.folder import Metrics
from fedbayes.runs.standing import flat

RULES: dict[str, Row] = {
    "mean": {"alpha": "mean"},
    "linear, c = 1": {"alpha": "linear", "c": 1.0},
    "exp, c = 0.001": {"alpha": "exp", "c": 1e-3},
    "exp, c = 1": {"alpha": "exp", "c": 1.0},
}
COLOURS = dict(zip(RULES, ("#000000", "#D55E00", "#0072B2", "#009E73"), strict=True))
STYLES = dict(zip(RULES, ("-", "--", "-.", ":"), strict=True))


@dataclass(frozen=True)
class Split:
    """How patients are divided between two hosts, by class: negative, positive."""

    hosts: tuple[tuple[int, int], tuple[int, int]]
    """Training samples of each host and class."""
    test: tuple[int, int]
    """Test samples of each class."""
    paper: dict[str, str]
    """What the paper says of each rule."""
    centralized: float
    """The paper's accuracy of a model trained on all data."""


SPLITS = {
    "balanced": Split(
        ((28, 28), (25, 25)),
        (28, 28),
        {
            "mean": "0.957, then down to 0.5",
            "linear, c = 1": "0.801, 0.978, 0.982, 0.987, 0.977, then down",
            "exp, c = 0.001": "0.888, 0.959, 0.963, 0.985, stable",
        },
        0.980,
    ),
    "unbalanced": Split(
        ((47, 23), (30, 17)),
        (41, 41),
        {
            "mean": "0.5 throughout",
            "linear, c = 1": "0.934, 0.971, 0.978, 0.984, 0.987, then down",
            "exp, c = 0.001": "0.5, 0.855, 0.977, 0.986, stable",
        },
        0.984,
    ),
    "skewed": Split(
        ((16, 32), (62, 8)),
        (41, 41),
        {"exp, c = 0.001": "0.760, 0.978, 0.978, 0.985, 0.985, stable"},
        0.984,
    ),
}
"""The paper's sections 2.1, 2.2 and 3.2.3, scaled by 0.1 (balanced) and 0.145."""

GROWTH = (
    "factors that sum to more than 1 amplify every layer in every round, until the optimizer's "
    "steps count for nothing beside such weights"
)
"""Why a non-convex rule falls behind."""

ROUNDS = 30
DECAY = 0.03
"""Fall below the best round that counts as decay."""


def patients(split: str, rule: str | None, seed: int, dataset: str) -> Config:
    """Two hosts under a rule, or all patients in one place."""
    chosen = SPLITS[split]
    spare = [0] * (10 - 2) if dataset == "digits" else []
    return Config.create(
        seed=seed,
        rounds=ROUNDS if rule else 1,
        method={"name": "combined", **RULES[rule]} if rule else {"name": "global"},
        data={
            "name": dataset,
            "partition": "counts",
            "class_counts": [[*host, *spare] for host in chosen.hosts],
            "test_counts": [*chosen.test, *spare],
        },
        model={"name": "mlp", "hidden": [35, 35]},
        training={
            "optimizer": "adam",
            "lr": 1e-3,
            "batch_size": 16,
            "epochs": 500,
            "patience": 10,
        },
    )


def hosts(count: int, rule: str, seed: int, scale: Scale, dataset: str) -> Config:
    """MNIST sorted by label, one stretch for every host, one epoch a round."""
    small = scale == "small"
    digits = dataset == "digits"
    limits = {"limit": 12_000, "limit_test": 2_000} if small and not digits else {}
    return Config.create(
        seed=seed,
        rounds=12 if small else ROUNDS,
        method={"name": "combined", **RULES[rule]},
        data={
            "name": dataset,
            "partition": "shards",
            "shards_per_client": 1,
            "clients": count,
            **limits,
        },
        model={"name": "mlp", "hidden": [50]} if digits else {"name": "cnn"},
        training={"optimizer": "adam", "lr": 1e-3, "batch_size": 32, "epochs": 1},
        checkpoint_every=5,
    )


def accuracies(metrics: Sequence[Metrics], rounds: int) -> list[float]:
    """Accuracy of the combined model by round; after an early end it stays what it was."""
    found = [line["global_accuracy"] for line in metrics]
    return found + [found[-1]] * (rounds - len(found))


def covid(name: str, title: str, rule: str, splits: Sequence[str]) -> Experiment:
    """The experiment of one rule on some of the splits."""

    def run(request: Request) -> Finding:
        runs = request.folder / "combined" / "runs"
        seeds = request.repeats(5, 20)
        lines, curves, centres, claims = [], {}, {}, []
        (dataset,) = request.datasets
        for split in splits:
            centre, found, ends = [], [], []
            for seed in seeds:
                place = f"{dataset}-{split}-seed{seed}"
                request.watch(f"{name}, {place}")
                config = patients(split, None, seed, dataset)
                alone = [flat(line) for line in finished(runs / f"{place}-all", config).metrics()]
                centre.append(alone[-1]["global_accuracy"])
                slug = rule.replace(", ", "-").replace(" = ", "")
                run = finished(runs / f"{place}-{slug}", patients(split, rule, seed, dataset))
                found.append([flat(line) for line in run.metrics()])
                ends.append(run.summary()["stopped_reason"])
            curve = np.array([accuracies(metrics, ROUNDS) for metrics in found])
            curves[split], centres[split] = curve, float(np.mean(centre))
            lines.append(_line(split, rule, curve, found, centre, ends))
            claims.append(_claim(split, rule, curve, centres[split]))
        _draw_patients(curves, centres, rule, title, request.out / "figure.png")
        part = Part(table=markdown(pd.DataFrame(lines)), claims=tuple(claims))
        return request.found([part], len(seeds), _NOTE)

    return Experiment(name, f"{title}; two hosts, COVID-19 tests", ("einstein",), run)


_NOTE = (
    "Mean ± std over seeds, on a balanced test set. Negative and positive: accuracy on the "
    "patients of each class after the last round. All data: a model trained in one place. "
    "Amplification: of inputs by the last model at most; a run is ended before it passes 30."
)


def _line(
    split: str,
    rule: str,
    curve: np.ndarray,
    found: Sequence[Sequence[Metrics]],
    centre: Sequence[float],
    ends: Sequence[str],
) -> Row:
    best = curve.mean(axis=0).argmax()
    by_class = np.array([metrics[-1]["class_accuracy"][:2] for metrics in found], dtype=float)
    overflowed = sum(end.startswith("overflow") for end in ends)
    return {
        "split": split,
        "rule": rule,
        "round 1": mean_and_std(curve[:, 0].tolist()),
        "best round": f"{mean_and_std(curve[:, best].tolist())} (round {best + 1})",
        "last round": mean_and_std(curve[:, -1].tolist()),
        "negative": mean_and_std(by_class[:, 0].tolist()),
        "positive": mean_and_std(by_class[:, 1].tolist()),
        "orders of amplification": f"{_orders(found):.1f}",
        "ended by overflow": f"{overflowed} of {len(ends)}",
        "paper": SPLITS[split].paper[rule],
        "all data (paper)": f"{mean_and_std(list(centre))} ({SPLITS[split].centralized:.3f})",
    }


def _orders(found: Sequence[Sequence[Metrics]]) -> float:
    """By how many orders of magnitude the last models can amplify inputs; mean over seeds."""
    return float(
        np.mean([[m["amplification"] for m in own if "amplification" in m][-1] for own in found])
    )


def _claim(split: str, rule: str, curve: np.ndarray, centre: float) -> Claim:
    """The paper's claim of a rule on a split, and whether the mean over seeds bears it out."""
    mean = curve.mean(axis=0)
    match rule:
        case "mean":
            return Claim(
                text=f"{split}: under the mean the model unlearns, down to chance",
                seen=bool(mean[-1] < 0.6),
                measured=f"it ends at {mean[-1]:.3f}",
            )
        case "linear, c = 1":
            return Claim(
                text=f"{split}: the linear rule improves over the first rounds, then decays",
                seen=bool(mean[:6].max() > mean[0] + 0.01 and mean[-1] < mean.max() - DECAY),
                measured=f"{mean[0]:.3f}, at most {mean.max():.3f}, at last {mean[-1]:.3f}",
            )
    return Claim(
        text=f"{split}: under the exponential rule accuracy stays stable for {ROUNDS} rounds, "
        "near the model of all data",
        seen=bool(mean[-1] > mean.max() - DECAY and mean[-1] > centre - DECAY),
        measured=f"at most {mean.max():.3f}, at last {mean[-1]:.3f}, all data {centre:.3f}",
    )


def _draw_patients(
    curves: dict[str, np.ndarray], centres: dict[str, float], rule: str, title: str, path: Path
) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(curves), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    for axes, (split, curve) in zip(panels, curves.items(), strict=True):
        rounds = np.arange(1, ROUNDS + 1)
        mean, std = curve.mean(axis=0), curve.std(axis=0, ddof=1)
        axes.fill_between(rounds, mean - std, mean + std, color="#56B4E9", alpha=0.3)
        axes.plot(rounds, mean, color="#0072B2", label=rule)
        axes.axhline(centres[split], color="#D55E00", linestyle="--", label="all data")
        axes.set(title=split, xlabel="round", ylim=(0.4, 1.0))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("accuracy")
    panels[0].legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def figure6(request: Request) -> Finding:
    """Fig. 6: the mean against the exponential rule; with two hosts, the other rules too."""
    runs = request.folder / "combined" / "runs"
    counts = (2, 5, 10) if request.small else (2, 5, 10, 20, 40, 80)
    seeds, scale = request.repeats(3, 3), request.scale
    (dataset,) = request.datasets
    curves: dict[int, dict[str, np.ndarray]] = {}
    lines = []
    for count in counts:
        for rule in RULES if count == 2 else ("mean", "exp, c = 1"):
            found, ends = [], []
            for seed in seeds:
                slug = rule.replace(", ", "-").replace(" = ", "")
                place = f"{dataset}-{scale}-H{count}-{slug}-seed{seed}"
                request.watch(f"combined-fig6, {place}")
                config = hosts(count, rule, seed, scale, dataset)
                run = finished(runs / place, config)
                found.append(accuracies(run.metrics(), config.rounds))
                ends.append(run.summary()["stopped_reason"])
            curve = np.array(found)
            curves.setdefault(count, {})[rule] = curve
            best = curve.mean(axis=0).argmax()
            overflowed = sum(end.startswith("overflow") for end in ends)
            lines.append(
                {
                    "hosts": count,
                    "rule": rule,
                    "round 1": mean_and_std(curve[:, 0].tolist()),
                    "best round": f"{mean_and_std(curve[:, best].tolist())} (round {best + 1})",
                    "last round": mean_and_std(curve[:, -1].tolist()),
                    "ended by overflow": f"{overflowed} of {len(ends)}",
                }
            )
    claims = []
    for count, rules in curves.items():
        mean = rules["mean"][:, -1]
        for rule, curve in rules.items():
            if rule != "mean":
                ahead = curve[:, -1] - mean
                claims.append(
                    Claim(
                        text=f"{count} hosts, {rule}: ahead of the mean after the last round",
                        seen=bool(ahead.mean() > 0 and 2 * (ahead > 0).sum() > len(ahead)),
                        measured=f"{ahead.mean():+.3f}, in {(ahead > 0).sum()} of {len(ahead)} "
                        "splits",
                        cause=GROWTH,
                    )
                )
    note = "The paper shows curves alone. Accuracy on the test set, mean ± std over seeds."
    _draw_hosts(curves, request.out / "figure.png")
    part = Part(table=markdown(pd.DataFrame(lines)), claims=tuple(claims))
    return request.found([part], len(seeds), note)


def _draw_hosts(curves: dict[int, dict[str, np.ndarray]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, len(curves))
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(4.0 * columns, 3.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).flat
    for axes, (count, rules) in zip(panels, curves.items(), strict=False):
        for rule, curve in rules.items():
            mean = curve.mean(axis=0)
            x = np.arange(1, len(mean) + 1)
            axes.plot(x, mean, STYLES[rule], color=COLOURS[rule], label=rule)
        axes.set(title=f"{count} hosts", xlabel="round", ylabel="accuracy")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


EXPERIMENTS = (
    covid("combined-fig2", "the mean", "mean", ("balanced", "unbalanced")),
    covid("combined-fig3", "factors 1 + r", "linear, c = 1", ("balanced", "unbalanced")),
    covid(
        "combined-fig5",
        "factors exp(0.001 r)",
        "exp, c = 0.001",
        ("balanced", "unbalanced", "skewed"),
    ),
    Experiment(
        "combined-fig6",
        "2 to 80 hosts with sorted labels, one epoch a round: mean and exp",
        ("mnist",),
        figure6,
    ),
)
"""In the order of the paper."""
