"""Figs. 2, 3 and 5 of the Combined Learning paper: two hosts, convex and non-convex combinations.

Hosts have COVID-19 tests, and train to convergence before each of 30 rounds; the paper's
collection is not public in that form, so its counts of samples are scaled to what the Einstein
sheet holds (81 positive patients with a full blood count), and the network has 1,892 parameters
(the paper's 1,873).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedbayes.config.config import Config
from fedbayes.fusion.combining import combine
from fedbayes.fusion.frozen import frozen
from fedbayes.likelihoods import evaluate, total
from fedbayes.models.resize import with_weights
from fedbayes.runs.build import stored_data
from fedbayes.storage.best_tracker import flat
from fedbayes.storage.folder import RunFolder
from fedbayes.storage.metrics_file import Metrics
from fedbayes.workflows.fuse.client_models import Seen, read_silos
from fedbayes_papers.experiment import (
    Experiment,
    Request,
    Row,
    finished,
    mean_and_std,
)
from fedbayes_papers.finding import Claim, Finding, Part, markdown

RULES: dict[str, Row] = {
    "mean": {"alpha": "mean"},
    "linear, c = 1": {"alpha": "linear", "c": 1.0},
    "exp, c = 0.001": {"alpha": "exp", "c": 1e-3},
    "exp, c = 1": {"alpha": "exp", "c": 1.0},
}


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

FASTER = 0.03
"""Learning rate thirty times the one that hosts have."""
TRIED = {
    f"hosts learn at a rate of {FASTER:g}": None,
    "hosts go on from their own models": "common",
    "hosts go on from their own models, separate starts": "own",
}
"""What could make the mean unlearn; of hosts that hear nothing of each other, their start."""

ROUNDS = 30
DECAY = 0.03
"""Fall below the best round that counts as decay."""
CHANCE = 0.6
"""Accuracy below which a model of two classes has unlearnt."""


def patients(
    split: str,
    rule: str | None,
    seed: int,
    dataset: str,
    method: Row | None = None,
    **training: Any,
) -> Config:
    """Two hosts under a rule or another method, or all patients in one place."""
    chosen = SPLITS[split]
    spare = [0] * (10 - 2) if dataset == "digits" else []
    if method is None:
        method = {"name": "combined", **RULES[rule]} if rule else {"name": "global"}
    return Config.published(
        seed=seed,
        rounds=1 if method["name"] == "global" else ROUNDS,
        method=method,
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
            **training,
        },
    )


def accuracies(metrics: Sequence[Metrics], rounds: int) -> list[float]:
    """Accuracy of the combined model by round; after an early end it stays what it was."""
    found = [line["global_accuracy"] for line in metrics]
    return found + [found[-1]] * (rounds - len(found))


@dataclass(frozen=True)
class Curves:
    """Runs of two hosts under one rule, a line for each seed."""

    split: str
    rule: str
    found: list[list[Metrics]]
    """The metrics of each round."""
    ends: list[str]
    """Why the rounds ended."""
    centre: list[float]
    """Accuracy of a model trained on all data."""

    @property
    def accuracies(self) -> np.ndarray:
        """Accuracy of the combined model, [seeds, rounds]."""
        return np.array([accuracies(metrics, ROUNDS) for metrics in self.found])

    @property
    def mean(self) -> np.ndarray:
        """Over seeds."""
        return np.asarray(self.accuracies.mean(axis=0))

    @property
    def overflowed(self) -> int:
        """How many were ended before their weights would have overflowed."""
        return sum(end.startswith("overflow") for end in self.ends)


def followed(request: Request, split: str, rule: str) -> Curves:
    """Measure what is missing of one rule on one split."""
    runs = request.folder / "combined" / "runs"
    (dataset,) = request.datasets
    curves = Curves(split, rule, [], [], [])
    for seed in request.repeats(5, 20):
        place = f"{dataset}-{split}-seed{seed}"
        request.watch(f"{request.experiment}, {place}, {rule}")
        alone = finished(runs / f"{place}-all", patients(split, None, seed, dataset)).metrics()
        curves.centre.append(flat(alone[-1])["global_accuracy"])
        slug = rule.replace(", ", "-").replace(" = ", "")
        run = finished(runs / f"{place}-{slug}", patients(split, rule, seed, dataset))
        curves.found.append([flat(line) for line in run.metrics()])
        curves.ends.append(run.summary()["stopped_reason"])
    return curves


def covid(name: str, title: str, rule: str, splits: Sequence[str]) -> Experiment:
    """The experiment of one rule on some of the splits, beside the mean."""

    def run(request: Request) -> Finding:
        curves = [followed(request, split, rule) for split in splits]
        parts = []
        if rule == "mean":
            tried = {split: _tried(request, split) for split in splits}
            claims = [_unlearns(own, tried[own.split]) for own in curves]
            lines = [_line(own) for own in curves]
            own = [
                {"split": one.split, "under the mean": _last(one), **tried[one.split]}
                for one in curves
            ]
            heading = f"What could make it unlearn: the mean after {ROUNDS} rounds"
            parts.append(Part(table=markdown(pd.DataFrame(own).map(_told)), heading=heading))
        else:
            means = [followed(request, split, "mean") for split in splits]
            judge = _improves if rule == "linear, c = 1" else _stays
            claims = [judge(own, mean) for own, mean in zip(curves, means, strict=True)]
            lines = [_line(one) for pair in zip(curves, means, strict=True) for one in pair]
        parts.insert(0, Part(table=markdown(pd.DataFrame(lines)), claims=tuple(claims)))
        _draw_patients(curves, title, request.out / "figure.png")
        return request.found(parts, len(curves[0].found), _NOTE)

    return Experiment(name, f"{title}; two hosts, COVID-19 tests", ("einstein",), run)


def _tried(request: Request, split: str) -> dict[str, list[float]]:
    """Accuracy of the mean after the last round, where something could make it unlearn."""
    runs = request.folder / "combined" / "runs"
    (dataset,) = request.datasets
    found: dict[str, list[float]] = {}
    for seed in request.repeats(5, 20):
        place = f"{dataset}-{split}-seed{seed}"
        for what, start in TRIED.items():
            request.watch(f"{request.experiment}, {place}, {what}")
            if start is None:
                config = patients(split, "mean", seed, dataset, lr=FASTER)
                run = finished(runs / f"{place}-mean-faster", config)
                accuracy = flat(run.metrics()[-1])["global_accuracy"]
            else:
                config = patients(split, None, seed, dataset, {"name": "local", "start": start})
                accuracy = _mean_of(finished(runs / f"{place}-{start}", config), config)
            found.setdefault(what, []).append(accuracy)
    return found


def _mean_of(run: RunFolder, config: Config) -> float:
    """Accuracy of the mean of models that clients trained apart."""
    silos = read_silos(sorted((run.path / "clients").glob("*.safetensors")), config.model, Seen())
    states = [dict(network.state_dict()) for network in silos.networks.values()]
    network = frozen(with_weights(silos.like, combine(states, [1 / len(states)] * len(states))))
    data = stored_data(config, run)
    test = data.test_union(0, data.test_total)
    terms = evaluate(silos.likelihood, lambda x: network(x)[None], test)
    return silos.likelihood.metrics(total(terms))["accuracy"]


_NOTE = (
    "Mean ± std over seeds, on a balanced test set. Negative and positive: accuracy on the "
    "patients of each class after the last round. All data: a model trained in one place. "
    "Amplification: of inputs by the last model at most; a run is ended before it passes 30."
)


def _line(curves: Curves) -> Row:
    curve, split, rule = curves.accuracies, curves.split, curves.rule
    best = curves.mean.argmax()
    by_class = np.array([m[-1]["class_accuracy"][:2] for m in curves.found], dtype=float)
    return {
        "split": split,
        "rule": rule,
        "round 1": mean_and_std(curve[:, 0].tolist()),
        "best round": f"{mean_and_std(curve[:, best].tolist())} (round {best + 1})",
        "last round": mean_and_std(_last(curves)),
        "negative": mean_and_std(by_class[:, 0].tolist()),
        "positive": mean_and_std(by_class[:, 1].tolist()),
        "orders of amplification": f"{_orders(curves.found):.1f}",
        "ended by overflow": f"{curves.overflowed} of {len(curves.ends)}",
        "paper": SPLITS[split].paper.get(rule, ""),
        "all data (paper)": f"{mean_and_std(curves.centre)} ({SPLITS[split].centralized:.3f})",
    }


def _last(curves: Curves) -> list[float]:
    """Accuracy after the last round, of each seed."""
    found: list[float] = curves.accuracies[:, -1].tolist()
    return found


def _told(value: str | list[float]) -> str:
    """As a table has it."""
    return value if isinstance(value, str) else mean_and_std(value)


def _orders(found: Sequence[Sequence[Metrics]]) -> float:
    """By how many orders of magnitude the last models can amplify inputs; mean over seeds."""
    return float(
        np.mean([[m["amplification"] for m in own if "amplification" in m][-1] for own in found])
    )


def _unlearns(curves: Curves, tried: dict[str, list[float]]) -> Claim:
    """Fig. 2, of the mean over seeds, and what does not make it so either."""
    others = ", ".join(f"{what} {np.mean(found):.3f}" for what, found in tried.items())
    unlearnt = [what for what, found in tried.items() if np.mean(found) < CHANCE]
    return Claim(
        text=f"{curves.split}: under the mean the model unlearns, down to chance",
        seen=bool(curves.mean[-1] < CHANCE),
        measured=f"it ends at {curves.mean[-1]:.3f}",
        cause=f"it takes more than averaging: {', '.join(unlearnt)} ({others})"
        if unlearnt
        else f"averaging does not do it, and none of what was tried makes it: {others}",
    )


def _improves(curves: Curves, mean: Curves) -> Claim:
    """Fig. 3: of the mean over seeds, and what it began with."""
    accuracy, centre, first = curves.mean, float(np.mean(curves.centre)), float(mean.mean[0])
    causes = []
    if accuracy[0] >= centre:
        causes.append(
            f"the first round is at the accuracy of all data ({centre:.3f}; the mean {first:.3f})"
        )
    if curves.overflowed:
        causes.append(
            f"{curves.overflowed} of {len(curves.ends)} runs were ended before they would have "
            "overflowed, after which a network gives all patients one class"
        )
    return Claim(
        text=f"{curves.split}: the linear rule improves over the first rounds, then decays",
        seen=bool(
            accuracy[:6].max() > accuracy[0] + 0.01 and accuracy[-1] < accuracy.max() - DECAY
        ),
        measured=f"{accuracy[0]:.3f}, at most {accuracy.max():.3f}, at last {accuracy[-1]:.3f}",
        cause="; ".join(causes),
    )


def _stays(curves: Curves, mean: Curves) -> Claim:
    """Fig. 5, of the mean over seeds; whether it is the rule, or two hosts of such data."""
    accuracy, centre = curves.mean, float(np.mean(curves.centre))
    last = float(mean.mean[-1])
    causes = []
    if last < centre:
        causes.append(
            f"the mean of two hosts of such data is behind by {centre - last:.3f} too, "
            f"at {last:.3f}"
        )
    if last > accuracy[-1]:
        causes.append(GROWTH)
    return Claim(
        text=f"{curves.split}: under the exponential rule accuracy stays stable for {ROUNDS} "
        "rounds, near the model of all data",
        seen=bool(accuracy[-1] > accuracy.max() - DECAY and accuracy[-1] > centre - DECAY),
        measured=f"at most {accuracy.max():.3f}, at last {accuracy[-1]:.3f}, all data {centre:.3f}",
        cause="; ".join(causes),
    )


def _draw_patients(curves: Sequence[Curves], title: str, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(curves), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    for axes, own in zip(panels, curves, strict=True):
        rounds = np.arange(1, ROUNDS + 1)
        mean, std = own.mean, own.accuracies.std(axis=0, ddof=int(len(own.found) > 1))
        axes.fill_between(rounds, mean - std, mean + std, color="#56B4E9", alpha=0.3)
        axes.plot(rounds, mean, color="#0072B2", label=own.rule)
        axes.axhline(np.mean(own.centre), color="#D55E00", linestyle="--", label="all data")
        axes.set(title=own.split, xlabel="round", ylim=(0.4, 1.0))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("accuracy")
    panels[0].legend(fontsize="small")
    figure.suptitle(title)
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
)
"""In the order of the paper."""
