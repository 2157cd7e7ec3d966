"""The experiment of the VIRTUAL paper (Table 2): multi-task accuracy on five random splits.

Networks have two hidden layers of 100 and dropout of 0.3 before every layer (0.2 on the sensors).
Every client keeps a quarter of its samples for testing. Of VIRTUAL and Local it is the clients'
own models that are tried, of FedAvg and Global the one model, on the test samples of every client:
the mean over tasks, and pooled. VIRTUAL's KL terms have weight 0.001, and the server's own outputs
have a likelihood of weight 1: as the paper states them, the KL terms outweigh so few samples.
"""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedbayes.config.config import Config
from fedbayes.contracts import RoundContext
from fedbayes.core.messages import decode_file
from fedbayes.core.tensors import unpack
from fedbayes.likelihoods import evaluate, total
from fedbayes.reports.palette import looks
from fedbayes.runs.simulation import Simulation
from fedbayes_papers.experiment import (
    Experiment,
    Request,
    Results,
    Row,
    fingerprint,
    mean_and_std,
    opened,
)
from fedbayes_papers.finding import Claim, Finding, Part, Scale, markdown

PAPER = {
    "mnist": {"Global": 0.968, "Local": 0.951, "FedAvg": 0.968, "VIRTUAL": 0.967},
    "permuted-mnist": {"Global": 0.919, "Local": 0.950, "FedAvg": 0.905, "VIRTUAL": 0.949},
    "vehicle": {"Global": 0.926, "Local": 0.960, "FedAvg": 0.916, "VIRTUAL": 0.960},
    "femnist": {"Global": 0.44, "Local": 0.51, "FedAvg": 0.45, "VIRTUAL": 0.56},
    "har": {"Global": 0.797, "Local": 0.940, "FedAvg": 0.944, "VIRTUAL": 0.944},
}
"""Its Table 2."""
METHODS = tuple(PAPER["mnist"])
CLIENTS = {"mnist": 10, "permuted-mnist": 10, "digits": 5, "vehicle": 23, "femnist": 10, "har": 30}
NATURAL = ("vehicle", "femnist", "har")
"""Data whose clients are sensors, writers and people; the others are divided at random."""


@dataclass(frozen=True)
class Training:
    """What the search of `virtual-search` is over."""

    dropout: float
    """Before every layer."""
    epochs: int
    """Of a refinement; every method makes as many passes over each client's data."""


def published(dataset: str, scale: Scale) -> Training:
    """That of the paper's Table 2; at small scale with fewer epochs."""
    epochs = 20 if scale == "small" else 200 if dataset in NATURAL else 100
    return Training(0.2 if dataset == "vehicle" else 0.3, epochs)


def settings(
    method: str, dataset: str, seed: int, scale: Scale, chosen: Training | None = None
) -> Row:
    """Keys of the config of one method on one split; trained as published by default."""
    small = scale == "small"
    chosen = chosen or published(dataset, scale)
    clients = CLIENTS[dataset]
    data: dict[str, Any] = {"name": dataset, "test": 0.25}
    if dataset not in NATURAL:
        data |= {"partition": "iid", "clients": clients}
        if small and dataset != "digits":
            data["limit"] = 30_000
    else:
        data["partition"] = "natural"
        if dataset == "femnist":
            data |= {"clients": clients, "min_samples": 225}  # 300 of a writer, less the test part
    batch = 64 if small else {"femnist": 64, "har": 16}.get(dataset, 256)
    refinements = 3
    rounds, training = 1, {"epochs": refinements * chosen.epochs}
    table: Row = {"name": method.lower()}
    extra: dict[str, Any] = {}
    match method:
        case "VIRTUAL":
            rounds, training = refinements * clients, {"epochs": chosen.epochs}
            extra = {"clients_per_round": 1, "sampling": "cyclic"}
            table |= {"samples": 2 if small else 20, "kl_weight": 1e-3, "server_likelihood": 1.0}
            table["damping"] = 1.0
        case "FedAvg":
            rounds, training = refinements * chosen.epochs, {"epochs": 1}
    return {
        "seed": seed,
        "rounds": rounds,
        "method": table,
        "data": data,
        "model": {
            "name": "mlp",
            "hidden": [100, 100],
            "dropout": chosen.dropout,
        },
        "training": {"optimizer": "adam", "lr": 1e-3, "batch_size": batch, **training},
        "evaluate_every": 0,
        **extra,
    }


def accuracies(simulation: Simulation, method: str) -> Row:
    """Mean over tasks and pooled; of VIRTUAL also under the final posterior, where a client's
    model is otherwise the one right after its own last refinement, and of its server's network
    alone.
    """
    evaluated = simulation.evaluate(simulation.method.model(simulation.server, simulation.run))
    clients = evaluated.clients if method == "FedAvg" else simulation.progress.clients
    correct, tested = clients.sums["correct"], clients.sums["count"]
    row = {
        "accuracy": float((correct / tested).mean()),
        "pooled": float(correct.sum() / tested.sum()),
    }
    if method != "VIRTUAL":
        return row
    shares = final_accuracies(simulation)
    tests = simulation.data.test_sizes()
    final = {
        "final": float(shares.mean()),
        "final_pooled": float((shares * tests).sum() / tests.sum()),
    }
    return row | final | {"server": evaluated.metrics["accuracy"]}


def final_accuracies(simulation: Simulation) -> npt.NDArray[np.float64]:
    """Of each client, the accuracy on its test samples of its own network beside the server's as
    it is at last, after the refinements of all others.
    """
    method, run, kind = simulation.method, simulation.run, simulation.likelihood
    found = []
    for client in range(simulation.clients):
        at = RoundContext(run, simulation.progress.round + 1, client)
        message = method.message(simulation.server, at)
        own: Any = unpack(method.client_state, decode_file(simulation.states[client]))
        model = method.personal_model(message, None, own, run)
        assert model is not None  # clients under VIRTUAL keep one
        terms = evaluate(kind, method.draws(model, run), simulation.data.test(client))
        scores = total(terms)
        found.append(kind.metrics(scores)["accuracy"])
    return np.array(found)


def table2(request: Request) -> Finding:
    """Table 2: Global, Local, FedAvg and VIRTUAL."""
    out, scale = request.out, request.scale
    results = Results(out / "results.jsonl")
    keys: list[Row] = [
        {"scale": scale, "dataset": name, "method": method, "seed": seed}
        for name in request.datasets
        for seed in request.repeats(5 if name in NATURAL else 3, 5)
        for method in METHODS
    ]
    chosen = [settings(k["method"], k["dataset"], k["seed"], scale) for k in keys]
    # Measurements under other settings do not count.
    keys = [{**key, "settings": fingerprint(own)} for key, own in zip(keys, chosen, strict=True)]
    for key in results.missing(keys):
        name = f"{scale}-{key['dataset']}-{key['method'].lower()}-seed{key['seed']}"
        own = chosen[keys.index(key)]
        results.add({**key, **_measured(request, out / "runs" / name, own, key["method"])})
    found = results.table(keys)
    note = (
        "Mean ± std over splits; the paper's in parentheses. By task: mean over clients. "
        "VIRTUAL: each client right after its own last refinement; final posterior: all of them "
        "after the last one's. Server: VIRTUAL's server network alone, pooled."
    )
    draw(found, out / "figure.png")
    seeds = found.groupby(["dataset", "method"])["seed"].nunique().min()
    parts = [
        Part(
            table=markdown(summarize(found[found["dataset"] == name])),
            claims=tuple(_claims(found, name)),
            dataset=name,
        )
        for name in request.datasets
    ]
    return request.found(parts, int(seeds), note)


def _measured(request: Request, place: Path, own: Row, method: str) -> Row:
    """What the run in this folder came to, run now where it is not yet at its end."""
    config = Config.published(**own)
    with opened(place, config) as simulation:
        for step in simulation:
            request.watch(f"{place.name}, round {step.number} of {config.rounds}")
        return accuracies(simulation, method)


SEARCHED = tuple(Training(dropout, epochs) for dropout, epochs in product((0.3, 0.1), (10, 20)))
"""What every method is tried with."""
FEWER = 6_000
"""Training images of the search at small scale."""
CHOSEN_ON = 100
"""The seed of the federation that settings are chosen on."""


def search(request: Request) -> Finding:
    """Table 2 once more with the same search for every method, since how Global is trained decides
    what VIRTUAL is ahead by. Settings are chosen on a quarter of the clients' training samples,
    under another seed, where nobody reads the official test part; accuracy is on this.
    """
    results, seeds = Results(request.out / "results.jsonl"), request.repeats(3, 5)
    parts = []
    for dataset in request.datasets:
        found: dict[str, list[float]] = {}
        lines = []
        for method in METHODS:
            tried = [
                (_searched(request, results, dataset, method, CHOSEN_ON, training), training)
                for training in SEARCHED
            ]
            held_out, best = max(tried, key=lambda pair: pair[0])
            found[method] = [
                _searched(request, results, dataset, method, seed, best) for seed in seeds
            ]
            lines.append(
                {
                    "dataset": dataset,
                    "method": method,
                    "dropout": f"{best.dropout}",
                    "epochs": f"3 × {best.epochs}",
                    "held out": f"{held_out:.3f}",
                    "of all tried": f"{min(pair[0] for pair in tried):.3f} to {held_out:.3f}",
                    "by task": mean_and_std(found[method]),
                }
            )
        table = markdown(pd.DataFrame(lines))
        parts.append(Part(table=table, claims=_search_claims(found), dataset=dataset))
    note = (
        "Mean ± std over splits of the mean over tasks, on the official test part. Held out: the "
        "same on a quarter of the training samples of another split, by which dropout and epochs "
        "were chosen for each method."
    )
    return request.found(parts, len(seeds), note)


def _search_claims(found: dict[str, list[float]]) -> tuple[Claim, ...]:
    """What is left of VIRTUAL's lead if all methods have the same search."""
    gain = np.subtract(found["VIRTUAL"], found["Global"])
    measured = f"{gain.mean():+.3f}, in {(gain > 0).sum()} of {len(gain)} splits"
    return (
        Claim(
            text="VIRTUAL is ahead of Global where both have the same search",
            seen=bool((gain > 0).all()),
            measured=measured,
        ),
        Claim(
            text="it is so by .02 or more",
            seen=bool(gain.mean() >= AHEAD),
            measured=measured,
            cause=POOLED,
        ),
    )


def _searched(
    request: Request,
    results: Results,
    dataset: str,
    method: str,
    seed: int,
    training: Training,
) -> float:
    """Mean over tasks on what settings are chosen on, or on the official test part."""
    own = settings(method, dataset, seed, request.scale, training)
    choosing = seed == CHOSEN_ON
    if dataset != "digits":  # which have no official test part
        own["data"] |= {"official_test": "unread"} if choosing else {"test": "official"}
    if "limit" in own["data"]:
        own["data"] |= {"limit": FEWER} | ({} if choosing else {"limit_test": FEWER // 3})
    key = {"dataset": dataset, "method": method, "seed": seed, "settings": fingerprint(own)}
    if results.missing([key]):
        name = f"{dataset}-{method.lower()}-seed{seed}-{key['settings']}"
        results.add({**key, **_measured(request, request.out / "runs" / name, own, method)})
    return float(results.table([key])["accuracy"].iloc[0])


def summarize(table: pd.DataFrame) -> pd.DataFrame:
    """Lines by task and pooled for each data set, the paper's values in parentheses."""
    lines = []
    for dataset, group in table.groupby("dataset", sort=False):
        for kind, key in (("by task", "accuracy"), ("pooled", "pooled")):
            line = {"dataset": str(dataset), "": kind}
            for method, own in group.groupby("method", sort=False):
                line[str(method)] = mean_and_std(own[key].tolist())
                if dataset in PAPER and key == "accuracy":
                    line[str(method)] += f" ({PAPER[str(dataset)][str(method)]:.3f})"
            if key == "pooled":
                line["server"] = mean_and_std(group["server"].dropna().tolist())
            final = group["final" if key == "accuracy" else "final_pooled"].dropna().tolist()
            line["VIRTUAL, final posterior"] = mean_and_std(final)
            lines.append(line)
    return pd.DataFrame(lines).fillna("")


def _claims(table: pd.DataFrame, dataset: str) -> list[Claim]:
    """VIRTUAL among the best; with permuted pixels, ahead of one model for all."""
    own = table[table["dataset"] == dataset]
    found = {str(m): np.array(group["accuracy"], float) for m, group in own.groupby("method")}
    mean = {method: float(values.mean()) for method, values in found.items()}
    best = max(mean, key=lambda method: mean[method])
    virtual = mean["VIRTUAL"]
    spread = max(_std(found["VIRTUAL"]), _std(found[best]))
    server = float(own["server"].mean())
    claims = [
        Claim(
            text=f"{dataset}: VIRTUAL is at or within one std of the best",
            seen=virtual >= mean[best] - spread,
            measured=f"{virtual:.3f} against {best} {mean[best]:.3f}, std {spread:.3f}; its "
            f"server's network alone {server:.3f}",
            cause=ONE_TASK if dataset == "mnist" else "",
        )
    ]
    if dataset == "permuted-mnist":
        gain = virtual - mean["Global"]
        text = f"{dataset}: VIRTUAL is ahead of Global by .02 or more"
        claims.append(Claim(text=text, seen=gain >= AHEAD, measured=f"{gain:+.3f}", cause=POOLED))
    return claims


AHEAD = 0.02
"""Of Global, where tasks differ; the paper has .03."""
POOLED = (
    "how the one model for all is trained decides: with dropout, and as many passes over the data "
    "as the others, it is closer behind than in the paper"
)
"""Why VIRTUAL is ahead of Global by less than in the paper."""
ONE_TASK = (
    "all clients have the same task: the server's network alone is level with the best, and a "
    "client's own beside it, fitted to a tenth of the data, takes away from it"
)
"""Why VIRTUAL is behind a pooled model on MNIST."""


def _std(values: npt.NDArray[np.float64]) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def draw(table: pd.DataFrame, path: Path) -> None:
    """Each method on each data set, with deviations over splits."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(table["dataset"]))
    figure = Figure(figsize=(2.4 + 2.2 * len(names), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    styles = looks([method.lower() for method in METHODS])
    for place, (method, look) in enumerate(zip(METHODS, styles, strict=True)):
        own = table[table["method"] == method].groupby("dataset", sort=False)["accuracy"]
        stats = own.agg(["mean", "std"]).fillna(0.0).loc[names]
        x = [index + 0.2 * (place - 1.5) for index in range(len(names))]
        axes.errorbar(
            x,
            stats["mean"],
            yerr=stats["std"],
            fmt=look.marker,
            capsize=3,
            color=look.colour(),
            label=method,
        )
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("accuracy, mean over tasks")
    axes.set_ylim(max(0.0, table["accuracy"].min() - 0.1), 1.0)
    axes.legend(fontsize="small", ncols=4)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=150)


EXPERIMENTS = (
    Experiment(
        "virtual-table2",
        "two layers of 100: Global, Local, FedAvg, VIRTUAL; mean over tasks",
        tuple(PAPER),
        table2,
    ),
    Experiment(
        "virtual-search",
        "Table 2 on permuted pixels, dropout and epochs chosen for each method alike",
        ("permuted-mnist",),
        search,
    ),
)
"""All of it."""
