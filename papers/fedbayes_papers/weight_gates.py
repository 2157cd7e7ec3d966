"""Fig. 8 of the EM paper with a gate for every weight: are dead pixels all that is pruned?

Logistic regression has no units but its outputs, so the paper's sparsity takes gates of single
weights. A third of MNIST's pixels are hardly ever on, and their weights do nothing. Told apart
here are weights of such inputs and of live ones, and beside it stand runs in which the weights of
live inputs alone have gates.
"""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from fedbayes.config.config import Config
from fedbayes.contracts import RoundContext
from fedbayes.core.messages import encode
from fedbayes.core.tensors import Tensors
from fedbayes.data import DataSettings, load_dataset
from fedbayes.runs.simulation import Simulation
from fedbayes.storage.folder import RunFolder
from fedbayes_papers.em_runs import METHODS
from fedbayes_papers.experiment import Experiment, Request, Results, Row, fingerprint, mean_and_std
from fedbayes_papers.finding import Claim, Finding, Part, markdown

LIVE = 0.01
"""Share of the images in which a live input is on, at least."""
PAPERS = {"fedsparse": 0.47, "scaffold-fedsparse": 0.35}
"""Its sparsities (appendix E)."""
NEAR = 0.05
"""Of the paper's sparsity."""
READ_AT = (0.35, 0.47)
"""Sparsities at which it is told what went: the paper's."""
PRICES = {"paper": 5e-6, "logits": 0.01}
"""λ0 by scale: the paper's `mid`; and about ½ log(λ2/λ) = 6 for a weight, of the summed loss of
600 images, where λ0 is meant beside their mean loss."""
DEAR = 1e-3
"""λ0 above the pull to the server's gates, β log θ/(1 − θ) = 4.6e-4 for a gate at the start; tried
on the paper's scale."""
ROUNDS = {"small": 100, "paper": 400}
SHOWN_EVERY = 5
"""Rounds between two points of a curve."""


def lit(dataset: str) -> np.ndarray:
    """Which inputs are on in which images of a data set, bool [images, inputs]."""
    x = np.asarray(load_dataset(DataSettings(name=dataset)).x)
    return np.asarray(x.reshape(len(x), -1) > 0)


class LiveRegression(nn.Module):
    """Logistic regression in two pieces, of which gates of weights find one.

    It is `Linear` with the same start, but the weights of inputs that are not live are one flat
    vector: what has a single axis has no gates.

    Args:
        inputs: number of inputs.
        classes: number of outputs.
        live: which inputs are live.
    """

    live: Tensor
    others: Tensor

    def __init__(self, inputs: int, classes: int, live: Sequence[int]) -> None:
        super().__init__()
        whole = nn.Linear(inputs, classes)
        places = torch.zeros(inputs, dtype=torch.bool)
        places[list(live)] = True
        self.register_buffer("live", places.nonzero()[:, 0], persistent=False)
        self.register_buffer("others", (~places).nonzero()[:, 0], persistent=False)
        self.weight = nn.Parameter(whole.weight.detach()[:, self.live])
        self.rest = nn.Parameter(whole.weight.detach()[:, self.others].flatten())
        self.bias = whole.bias

    def forward(self, x: Tensor) -> Tensor:
        """[n, ...] to [n, classes]."""
        x = x.flatten(1)
        rest = self.rest.reshape(len(self.bias), -1)
        gated = nn.functional.linear(x[:, self.live], self.weight, self.bias)
        return gated + nn.functional.linear(x[:, self.others], rest)


def live_regression(shape: Sequence[int], classes: int, live: Sequence[int]) -> LiveRegression:
    """The network of a config's `[model]`."""
    return LiveRegression(prod(shape), classes, live)


def _config(key: Row, live: np.ndarray) -> Config:
    """As in `fedsparse-fig8`: 100 clients of one class each, ten a round."""
    dataset, method, rounds = key["dataset"], key["method"], key["rounds"]
    model: Row = {"hidden": []}
    if key["gated"] == "live":
        arguments = {"live": np.flatnonzero(live).tolist()}
        model = {"name": f"{__name__}:{live_regression.__name__}", "arguments": arguments}
    gates = {"gates": "weights", "output_gates": True, "l0": key["price"], "scale": key["scale"]}
    gates |= {"weighting": "uniform"}
    return Config.published(
        cohort=10,
        rounds=rounds,
        evaluate_every=rounds,
        seed=key["seed"],
        data={
            "name": dataset,
            "clients": 20 if dataset == "digits" else 100,
            "partition": "shards",
            "shards_per_client": 1,
        },
        model=model,
        training={"optimizer": "sgd", "lr": 0.05, "epochs": 1, "batch_size": 64},
        method=METHODS["FedAvg"] if method == "FedAvg" else {"name": method, **gates},
    )


def _keys(dataset: str, rounds: int, seeds: Sequence[int], live: np.ndarray) -> list[Row]:
    """What is measured: FedAvg, and FedSparse by scale, with SCAFFOLD, and on live inputs alone."""
    kinds: list[Row] = [{"method": "FedAvg", "scale": "", "price": 0.0, "gated": ""}]
    for scale, price in PRICES.items():
        own = {"scale": scale, "price": price}
        kinds += [{"method": method, **own, "gated": "all"} for method in PAPERS]
        kinds += [{"method": "fedsparse", **own, "gated": "live"}]
    kinds += [{"method": "fedsparse", "scale": "paper", "price": DEAR, "gated": "all"}]
    shared = {"dataset": dataset, "rounds": rounds}
    keys = [{**shared, **kind, "seed": seed} for kind in kinds for seed in seeds]
    return [{**key, "settings": _settings(key, live)} for key in keys]


def _settings(key: Row, live: np.ndarray) -> str:
    """What tells a measurement from one under other settings."""
    return fingerprint(_config(key, live).model_dump(mode="json"))


def _parted(weights: Tensors, live: np.ndarray) -> tuple[Tensor, Tensor]:
    """The weights of dead inputs and those of live ones."""
    if "rest" in weights:
        return weights["rest"], weights["weight"]
    places = torch.from_numpy(live)
    return weights["1.weight"][:, ~places], weights["1.weight"][:, places]


def _measured(key: Row, live: np.ndarray) -> Row:
    """One run: where it ended, and what was gone of the weights as it went on.

    `fell`: share of the live weights that were smaller before they went than at the start;
    `fell_kept`: of those that did not go, at the end.
    """
    curves: dict[str, list[float]] = {"dead": [], "live": []}
    with TemporaryDirectory() as place, Simulation(_config(key, live), Path(place)) as simulation:
        _, start = _parted(simulation.server.weights, live)
        last = now = start
        for step in simulation:
            dead, now = _parted(step.server.weights, live)
            last = torch.where(now == 0, last, now)
            if step.number % SHOWN_EVERY == 0:
                for kind, part in (("dead", dead), ("live", now)):
                    curves[kind].append(float((part == 0).double().mean()))
        at = RoundContext(simulation.run, simulation.run.rounds + 1)
        message = simulation.method.message(simulation.server, at)
        summary, lines = simulation.summary(), RunFolder(Path(place)).metrics()
    fell, gone = last.abs() < start.abs(), now == 0
    return {
        **key,
        **curves,
        "fell": float(fell[gone].double().mean()) if gone.any() else None,
        "fell_kept": float(fell[~gone].double().mean()) if not gone.all() else None,
        "global": summary["global_accuracy"],
        "local": summary["local_accuracy"],
        "bytes": sum(line["bytes_down"] + line["bytes_up"] for line in lines),
        "last": len(encode(message)),
    }


def figure8(request: Request) -> Finding:
    """Sparsity with gates of weights, told apart by what the weights read."""
    results = Results(request.out / "results.jsonl")
    seeds, parts = request.repeats(3, 3), []
    for dataset in request.datasets:
        live = lit(dataset).mean(axis=0) >= LIVE
        rounds = ROUNDS[request.scale]
        keys = _keys(dataset, rounds, seeds, live)
        missing = results.missing(keys)
        for place, key in enumerate(missing, start=1):
            results.add(_measured(key, live))
            request.watch(f"{dataset}, run {place} of {len(missing)}")
        table = results.table(keys)
        share = float(live.mean())
        table["sparsity"] = [_whole(row, share)[-1] for row in table.to_dict("records")]
        _draw(table, request.out / f"figure-{dataset}.png")
        heading = f"{dataset}, after {rounds} rounds; {1 - share:.1%} of the pixels dead"
        parts.append(
            Part(
                heading=heading,
                table=markdown(_rows(table)),
                claims=_claims(table, share, rounds),
                dataset=dataset,
            )
        )
    note = (
        f"A gate for every weight; dead: inputs that are on in fewer than {LIVE:.0%} of all "
        "images. Sparsity is of the weights. Bytes are of encoded messages, both ways, over all "
        "rounds; of a message: from the server after the last. Global: on the union of the "
        "clients' test sets. Local: mean over clients of the model each last reported, on its own."
    )
    return request.found(parts, len(seeds), note)


def _whole(row: Mapping[Any, Any], share: float) -> np.ndarray:
    """Sparsity over rounds.

    Args:
        row: a measurement.
        share: of the inputs that are live.
    """
    whole: np.ndarray = (1 - share) * np.asarray(row["dead"]) + share * np.asarray(row["live"])
    return whole


def _gone_at(row: Mapping[Any, Any], share: float, level: float) -> tuple[float, float] | None:
    """Shares of dead and of live weights that were gone as the sparsity passed a level."""
    whole = _whole(row, share)
    if whole[-1] < level:
        return None
    after = int(np.argmax(whole >= level))
    before = max(0, after - 1)
    place = np.interp(level, whole[[before, after]], [before, after])
    steps = np.arange(len(whole))
    of_dead, of_live = (float(np.interp(place, steps, row[kind])) for kind in ("dead", "live"))
    return of_dead, of_live


def _rows(table: pd.DataFrame) -> pd.DataFrame:
    """A line for each kind of run."""
    base = table[table["method"] == "FedAvg"].set_index("seed")
    ratios = {kind: table[kind] / table["seed"].map(base[kind]) for kind in ("bytes", "last")}
    table = table.assign(**ratios)
    lines = []
    for (method, scale, price, gated), group in table.groupby(
        ["method", "scale", "price", "gated"], sort=False
    ):
        lines.append(
            {
                "method": method,
                "scale": scale,
                "λ0": f"{price:g}" if scale else "",
                "gates on": gated and f"{gated} inputs",
                "sparsity": mean_and_std(group["sparsity"].tolist()) if scale else "",
                "of dead": mean_and_std([c[-1] for c in group["dead"]]) if scale else "",
                "of live": mean_and_std([c[-1] for c in group["live"]]) if scale else "",
                "global": mean_and_std(group["global"].tolist()),
                "local": mean_and_std(group["local"].tolist()),
                "bytes to FedAvg's": mean_and_std(group["bytes"].tolist()),
                "a message's": mean_and_std(group["last"].tolist()),
            }
        )
    return pd.DataFrame(lines)


SHRUNK = (
    "a gate of the paper's scale closes where training makes its weight smaller by T logit .99 = "
    ".0046, and few are"
)
"""Why less is pruned in the paper's setting."""
UNMOVED = (
    "training moves no weight of a dead pixel, and a gate that nothing uses is drawn open: the "
    "paper's λ0 are all below β log θ/(1 − θ) = 4.6e-4"
)
"""Why none of it is at dead pixels."""
SLOW = (
    "ten steps of Adamax move a gate by .4 logits at most, whatever λ0 is, and the round after "
    "begins at the server's again; weights move it by many"
)
"""Why λ0 has no say there."""
IDLE = (
    "a client of one class is right with its biases alone, so no gate is worth λ0 to it, on "
    "whatever pixel"
)
"""Why gates that are governed by λ0 spare no pixel."""


def _claims(table: pd.DataFrame, share: float, rounds: int) -> tuple[Claim, ...]:
    """The paper's sparsities, and what would follow if they were of dead pixels alone."""

    def runs(
        scale: str, gated: str = "all", method: str = "fedsparse", price: float | None = None
    ) -> pd.DataFrame:
        kind = (table["scale"] == scale) & (table["gated"] == gated) & (table["method"] == method)
        return table[kind & (table["price"] == (PRICES[scale] if price is None else price))]

    claims = []
    for method, wanted in PAPERS.items():
        found = {scale: runs(scale, method=method)["sparsity"].mean() for scale in PRICES}
        text = f"in the paper's setting {method} prunes {wanted:.0%}"
        measured = f"{found['paper']:.1%}; in logits with λ0 = {PRICES['logits']:g} "
        measured += f"{found['logits']:.1%} by round {rounds}"
        seen = abs(found["paper"] - wanted) < NEAR
        claims.append(Claim(text=text, seen=bool(seen), measured=measured, cause=SHRUNK))
    own = runs("paper")
    of_dead, of_live = (np.mean([c[-1] for c in own[kind]]) for kind in ("dead", "live"))
    claims.append(
        Claim(
            text="in the paper's setting what is pruned are weights of dead pixels",
            seen=bool(of_dead > 0.5 > 10 * of_live),
            measured=f"{of_dead:.1%} of dead pixels', {of_live:.1%} of live ones'; of these "
            f"{own['fell'].mean():.1%} had become smaller, of those that stayed "
            f"{own['fell_kept'].mean():.1%}",
            cause=UNMOVED,
        )
    )
    cheap, dear = own["sparsity"].mean(), runs("paper", price=DEAR)["sparsity"].mean()
    claims.append(
        Claim(
            text="on the paper's scale λ0 governs",
            seen=bool(dear > cheap + NEAR),
            measured=f"{cheap:.1%} with {PRICES['paper']:g}, {dear:.1%} with {DEAR:g}",
            cause=SLOW,
        )
    )
    passed = {}
    for level in READ_AT:
        there = [_gone_at(row, share, level) for row in runs("logits").to_dict("records")]
        if reached := [gone for gone in there if gone is not None]:
            passed[level] = np.mean(reached, axis=0)
    words = [
        f"at {level:.0%} {dead:.1%} of dead pixels' and {alive:.1%} of live ones'"
        for level, (dead, alive) in passed.items()
    ]
    claims.append(
        Claim(
            text="where λ0 governs, a sparsity of 35 to 47 % is dead pixels alone",
            seen=len(passed) == len(READ_AT) and all(alive < 0.1 for _, alive in passed.values()),
            measured="; ".join(words) or "no run came so far",
            cause=IDLE,
        )
    )
    lone = {scale: runs(scale, "live")["sparsity"].mean() for scale in PRICES}
    both = {scale: runs(scale)["sparsity"].mean() for scale in PRICES}
    claims.append(
        Claim(
            text="with gates on live inputs alone next to nothing is pruned",
            seen=all(value < 0.02 for value in lone.values()),
            measured="; ".join(
                f"{scale} {lone[scale]:.1%} of all weights, {both[scale]:.1%} with gates on all"
                for scale in PRICES
            ),
            cause="live pixels' weights are pruned whether others have gates or not",
        )
    )
    gated = runs("logits")["local"].mean()
    average = table[table["method"] == "FedAvg"]["local"].mean()
    claims.append(
        Claim(
            text="clients of one class lose nothing of their own accuracy by it",
            seen=bool(gated > average - 0.01),
            measured=f"{gated:.3f} in logits, FedAvg {average:.3f}",
        )
    )
    return tuple(claims)


def _draw(table: pd.DataFrame, path: Path) -> None:
    """What was gone over rounds, of dead and of live pixels; a panel for each scale."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(PRICES))
    colours = {"dead": "#D55E00", "live": "#0072B2"}
    dashes = {("fedsparse", "all"): "-", ("scaffold-fedsparse", "all"): "--"}
    dashes["fedsparse", "live"] = ":"
    for axes, (scale, price) in zip(panels, PRICES.items(), strict=True):
        shown = table[(table["scale"] == scale) & (table["price"] == price)]
        for (method, gated), dash in dashes.items():
            group = shown[(shown["method"] == method) & (shown["gated"] == gated)]
            for kind, colour in colours.items():
                if gated == "live" and kind == "dead":
                    continue
                curve = np.mean(group[kind].tolist(), axis=0)
                axes.plot(
                    SHOWN_EVERY * np.arange(1, len(curve) + 1),
                    curve,
                    color=colour,
                    linestyle=dash,
                    label=f"{kind} pixels, {method}" + (", gates there alone" * (gated == "live")),
                )
        axes.axhspan(*READ_AT, color="0.9", zorder=0)
        axes.set(xlabel="round", ylabel="share of weights pruned", title=f"{scale}, λ0 = {price:g}")
    panels[0].legend(fontsize="x-small")
    figure.savefig(path, dpi=150)


EXPERIMENTS = (
    Experiment(
        "fedsparse-fig8-weights",
        "Fig. 8 with gates of single weights: dead pixels and live ones",
        ("mnist",),
        figure8,
    ),
)
"""In the order of the page of results."""
