"""What governs FedSparse's sparsity, and whether gates that are drawn cost local accuracy."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd

from fedbayes.config.config import Config
from fedbayes.contracts import RoundContext
from fedbayes.core.messages import dense
from fedbayes.methods.fedsparse import FedSparse
from fedbayes.reports.palette import MARKERS
from fedbayes.runs.simulation import Simulation
from fedbayes.storage.folder import RunFolder
from fedbayes_papers.em_claims import YOUNG, floor_of
from fedbayes_papers.em_runs import FOLDER, SPARSE, compare
from fedbayes_papers.em_view import comparison_of
from fedbayes_papers.experiment import (
    Experiment,
    Request,
    Results,
    Row,
    fingerprint,
    mean_and_std,
    opened,
)
from fedbayes_papers.finding import Claim, Finding, Part, markdown

PRICES = {"logits": (0.0, 1e-6, 1e-5, 1e-4, 4e-4, 1e-3, 1e-2), "paper": (0.0, 1e-6, 1e-4, 1e-2)}
"""λ0 by scale: none, and four decades."""
WANTED = 0.665
"""Sparsity of `high` in the paper's Table 1."""
COMPARED = ("FedAvg", *SPARSE)
"""Whose clients' own models are compared."""
CLOSE = 0.01
"""Of FedAvg's accuracy."""
ROUNDS = 150
FEDAVG: Row = {
    "name": "fedadam",
    "weighting": "uniform",
    "server_lr": 1e-2,
    "beta2": 0.999,
    "eps": 1e-8,
}


def _config(dataset: str, method: Row, seed: int) -> Config:
    """Ten clients, five a round, one hidden layer of 100."""
    limit = {} if dataset == "digits" else {"limit": 3000}
    data = {"name": dataset, "clients": 10, "partition": "dirichlet-equal", "alpha": 1.0, **limit}
    return Config.published(
        data=data,
        model={"hidden": [100]},
        method=method,
        cohort=5,
        rounds=ROUNDS,
        evaluate_every=10,
        seed=seed,
        training={"optimizer": "sgd", "lr": 0.05, "epochs": 1, "batch_size": 20},
    )


def _key(dataset: str, scale: str, price: float, seed: int) -> Row:
    settings = _config(dataset, {"name": "fedavg"}, seed).model_dump(mode="json")
    place = fingerprint({"config": settings, "server_lr": FEDAVG["server_lr"]})
    return {"dataset": dataset, "scale": scale, "price": price, "seed": seed, "settings": place}


def _method(key: Row) -> Row:
    if key["scale"] == "none":
        return FEDAVG
    return {
        "name": "fedsparse",
        "weighting": "uniform",
        "l0": key["price"],
        "scale": key["scale"],
        "server_lr": FEDAVG["server_lr"],
    }


def _measured(key: Row) -> Row:
    """One run: where it ended, and when half of what is pruned was."""
    config = _config(key["dataset"], _method(key), key["seed"])
    with TemporaryDirectory() as place, Simulation(config, Path(place)) as simulation:
        for _ in simulation:
            pass
        summary = simulation.summary()
        lines = RunFolder(Path(place)).metrics()
        found: Row = {
            "sparsity": summary["sparsity"],
            "curve": [line["sparsity"] for line in lines[9::10]],
            "global": summary["global_accuracy"],
            "local": summary["local_accuracy"],
        }
        if key["scale"] != "none":
            found |= _local(simulation)
    return {**key, **found}


def _local(simulation: Simulation) -> Row:
    """Accuracy of all clients' models after one more E-step, mean over clients: as they report
    them, with gates drawn, and with those that are likelier open than not.
    """
    method, run, data = simulation.method, simulation.run, simulation.data
    right: dict[str, list[float]] = {}
    for client in range(data.clients):
        at = RoundContext(run, simulation.progress.round + 1, client)
        test = data.test(client)
        if not len(test.y):
            continue
        message = method.message(simulation.server, at)
        samples, state = data.train(client), method.join(at)
        problem = method.problem(message, state, samples, at)
        solved = at.solve(problem, method.loss(run), samples)
        models = {"drawn": dense(method.report(solved, problem, state, at)[0].tensors)}
        if isinstance(method, FedSparse):
            models["likely"] = method.likely(solved, problem, at)
        for name, weights in models.items():
            own = {n: weights[n] for n in run.network.initial}
            outputs = run.network(own, test.x)
            right.setdefault(name, []).append(float((outputs.argmax(-1) == test.y).float().mean()))
    return {name: float(np.mean(values)) for name, values in right.items()}


def governed(request: Request) -> Finding:
    """Sparsity and accuracies over λ0, on both scales of gates."""
    results = Results(request.out / "results.jsonl")
    seeds, parts = request.repeats(3, 3), []
    for dataset in request.datasets:
        keys = [
            _key(dataset, scale, price, seed)
            for scale, prices in {"none": (0.0,), **PRICES}.items()
            for price in prices
            for seed in seeds
        ]
        missing = results.missing(keys)
        for place, key in enumerate(missing, start=1):
            results.add(_measured(key))
            request.watch(f"{dataset}, run {place} of {len(missing)}")
        table = results.table(keys)
        _draw(table, request.out / f"figure-{dataset}.png")
        shown = markdown(_rows(table))
        parts.append(
            Part(heading=dataset, table=shown, claims=_claims(table, dataset), dataset=dataset)
        )
    note = (
        f"After {ROUNDS} rounds, ten clients, five a round; one hidden layer of 100, outputs not "
        "gated. Drawn and likely: mean over all clients of their own model after the last round, "
        "with gates drawn as they are reported, and with those likelier open than not."
    )
    return request.found(parts, len(seeds), note)


def _rows(table: pd.DataFrame) -> pd.DataFrame:
    """A line for each scale and λ0."""
    lines = []
    for (scale, price), group in table.groupby(["scale", "price"], sort=True):
        gated = scale != "none"
        lines.append(
            {
                "scale": scale if gated else "FedAvg",
                "λ0": f"{price:g}" if gated else "",
                "sparsity": mean_and_std(group["sparsity"].tolist()),
                "half of it by round": f"{np.mean([_half(c) for c in group['curve']]):.0f}"
                if gated and group["sparsity"].min() > CLOSE
                else "",
                "global": mean_and_std(group["global"].tolist()),
                "local": mean_and_std(group["local"].tolist()),
                "drawn": mean_and_std(group["drawn"].tolist()) if gated else "",
                "likely": mean_and_std(group["likely"].tolist()) if gated else "",
            }
        )
    return pd.DataFrame(lines)


def _half(curve: Sequence[float]) -> int:
    """The round by which half of the last sparsity was reached, to tens."""
    return 10 * (1 + int(np.argmax(np.asarray(curve) >= curve[-1] / 2)))


def _claims(table: pd.DataFrame, dataset: str) -> tuple[Claim, ...]:
    mean = table.groupby(["scale", "price"])[["sparsity", "global", "drawn", "likely"]].mean()
    average = float(table.loc[table["scale"] == "none", "global"].mean())
    without = table[(table["scale"] == "paper") & (table["price"] == 0)]["sparsity"].mean()
    own = mean.loc["logits"].sort_index()
    levels = own["sparsity"].to_numpy()
    learns = own["global"].to_numpy() >= floor_of(dataset, average)
    useful = np.where(learns, levels, 0.0)  # of models that predict
    sparse = own[(own["sparsity"] > WANTED) & (own.index > 0)]
    best = float(sparse["global"].max()) if len(sparse) else float("nan")
    gap = own["likely"] - own["drawn"]
    steps = ", ".join(f"{level:.2f}" for level in levels)
    papers = ", ".join(f"{level:.2f}" for level in mean.loc["paper"].sort_index()["sparsity"])
    return (
        Claim(
            text="in logits sparsity grows with λ0 over four decades",
            seen=bool((np.diff(levels) >= -CLOSE).all() and useful.max() - levels[1] > 0.5),
            measured=f"{steps}; on the paper's scale {papers}",
        ),
        Claim(
            text="in logits λ0 = 0 prunes almost nothing",
            seen=bool(levels[0] < 0.05 and learns[0]),
            measured=f"{levels[0]:.3f}; on the paper's scale {without:.3f}",
        ),
        Claim(
            text=f"both sides of a sparsity of {WANTED} are reached",
            seen=bool(levels.min() < WANTED < useful.max()),
            measured=steps,
        ),
        Claim(
            text=f"above a sparsity of {WANTED} accuracy is within {CLOSE} of FedAvg's",
            seen=bool(best >= max(average - CLOSE, floor_of(dataset, average))),
            measured=f"{best:.3f}, FedAvg {average:.3f}",
        ),
        Claim(
            text="drawing gates costs clients' own models accuracy",
            seen=bool(gap.mean() > 0),
            measured=", ".join(f"{value:+.3f}" for value in gap) + " without, by λ0",
        ),
    )


def _draw(table: pd.DataFrame, path: Path) -> None:
    """Sparsity over λ0, and over rounds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    over_price, over_rounds = figure.subplots(1, 2)
    styles: dict[str, dict[str, Any]] = {
        "logits": {"color": "#0072B2", "marker": MARKERS[0]},
        "paper": {"color": "#D55E00", "marker": MARKERS[1], "linestyle": "--"},
    }
    for scale, style in styles.items():
        own = table[(table["scale"] == scale) & (table["price"] > 0)]
        groups = own.groupby("price")["sparsity"]
        over_price.errorbar(
            groups.mean().index, groups.mean(), groups.std().fillna(0), label=scale, **style
        )
        for price, group in own.groupby("price"):
            curve = np.mean(group["curve"].tolist(), axis=0)
            rounds = 10 * np.arange(1, len(curve) + 1)
            style = {**styles[scale], "marker": None}
            over_rounds.plot(rounds, curve, linewidth=1, **style)
            over_rounds.annotate(f"{price:g}", (rounds[-1], curve[-1]), fontsize="xx-small")
    over_price.axhline(WANTED, color="0.6", linewidth=0.8)
    over_price.set(xscale="log", xlabel="λ0", ylabel="sparsity")
    over_rounds.set(xlabel="round", ylabel="sparsity, by λ0")
    over_price.legend(title="scale", fontsize="x-small")
    figure.savefig(path, dpi=150)


def own_models(request: Request) -> Finding:
    """Clients' own models at the end of the runs of Table 1, with gates drawn and without."""
    results = Results(request.out / "results.jsonl")
    parts = []
    for dataset in request.datasets:
        comparison = comparison_of(request, dataset, COMPARED)
        folder = request.folder / FOLDER
        compare(comparison, folder, dataset, request.watch)
        keys: list[Row] = []
        for method in COMPARED:
            for seed in range(comparison.seeds):
                config = comparison.config(method, seed)
                settings = fingerprint(config.model_dump(mode="json"))
                key = {"dataset": dataset, "method": method, "seed": seed, "settings": settings}
                keys.append(key)
                if results.missing([key]):
                    request.watch(f"{dataset}, {method}, clients' own models")
                    with opened(folder / comparison.place(method, dataset, seed), config) as ended:
                        results.add({**key, **_local(ended)})
        table = results.table(keys)
        lines = []
        for name, own in table.groupby("method", sort=False):
            likely = "" if name == "FedAvg" else mean_and_std(own["likely"].tolist())
            drawn = mean_and_std(own["drawn"].tolist())
            lines.append({"method": str(name), "drawn": drawn, "likely": likely})
        heading = f"{dataset}, after {comparison.rounds['FedAvg']} rounds"
        text = markdown(pd.DataFrame(lines))
        claims = _own_claims(table)
        parts.append(Part(heading=heading, table=text, claims=claims, dataset=dataset))
    note = (
        "Mean over all clients of the accuracy of their own model after one more E-step, on their "
        "own test samples. Drawn: as they report it; likely: gates open that are likelier open "
        "than not. FedAvg's models have no gates."
    )
    return request.found(parts, len(request.repeats(3, 3)), note)


def _own_claims(table: pd.DataFrame) -> tuple[Claim, ...]:
    """The best local models are FedSparse's: as they are reported, and without the draws."""
    of = {str(name): own for name, own in table.groupby("method")}
    average = float(of["FedAvg"]["drawn"].mean())
    claims = []
    for column, how in (("drawn", "gates drawn"), ("likely", "gates likelier open than not")):
        own = [float(of[method][column].mean()) for method in SPARSE]
        levels = ", ".join(f"{value:.3f}" for value in own)
        claims.append(
            Claim(
                text=f"the best local models are FedSparse's, {how}",
                seen=max(own) > average,
                measured=f"{levels} for low, mid, high; FedAvg {average:.3f}",
                cause=YOUNG,
            )
        )
    return tuple(claims)


EXPERIMENTS = (
    Experiment(
        "fedsparse-local",
        "clients' own models in Table 1, with gates drawn and without",
        ("cifar10",),
        own_models,
    ),
    Experiment(
        "fedsparse-l0",
        "FedSparse's sparsity over λ0, with thresholds as in the paper and in logits",
        ("digits",),
        governed,
    ),
)
"""In the order of the page of results."""
