"""Fig. 6 of the Combined Learning paper: more and more hosts with sorted labels.

MNIST is sorted by label and dealt to 2 to 80 hosts; the network has 1.02 million parameters and is
trained for one epoch a round.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from fedbayes.config.config import Config
from fedbayes_papers.combined import GROWTH, ROUNDS, RULES, accuracies
from fedbayes_papers.experiment import Experiment, Request, finished, mean_and_std
from fedbayes_papers.finding import Claim, Finding, Part, Scale, markdown

COLOURS = dict(zip(RULES, ("#000000", "#D55E00", "#0072B2", "#009E73"), strict=True))
STYLES = dict(zip(RULES, ("-", "--", "-.", ":"), strict=True))


def hosts(count: int, rule: str, seed: int, scale: Scale, dataset: str) -> Config:
    """MNIST sorted by label, one stretch for every host, one epoch a round."""
    small = scale == "small"
    digits = dataset == "digits"
    limits = {"limit": 12_000, "limit_test": 2_000} if small and not digits else {}
    return Config.published(
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
    Experiment(
        "combined-fig6",
        "2 to 80 hosts with sorted labels, one epoch a round: mean and exp",
        ("mnist",),
        figure6,
    ),
)
