"""Fig. 4 of the GPI-FNM paper: networks that are matched round after round."""

import itertools
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pandas as pd

from fedbayes.config.config import Config
from fedbayes.methods.matching import WIDE
from fedbayes.models import dense_layers, relu_network
from fedbayes.storage.folder import RunFolder
from fedbayes_papers.experiment import Request, Results, Row, begun, fingerprint, opened
from fedbayes_papers.finding import Claim, Finding
from fedbayes_papers.gpi_claims import ONE_START, ahead, finding_of, more_neurons, panels
from fedbayes_papers.gpi_networks import (
    DEEP,
    PARTITIONS,
    SPREADS,
    WIDTH,
    FusionCase,
    accuracy,
    grid_of,
    split,
    trained,
)

ROUNDS = {"GPI-FNM": "gpi-fnm", "PFNM": "pfnm", "FedAvg": "fedavg"}
"""Methods of Fig. 4 and their names."""
KL_WEIGHTS = (0.3, 1.0)
"""What Fig. 4 tries of ε, as published."""


def figure4(request: Request) -> Finding:
    """Fig. 4: two hidden layers, 15 clients, accuracy over rounds.

    Both matching methods are tried with their form `wide`, and as published: top down, with what
    the held-out samples prefer for PFNM after a first round of seed 0, the KL term beside it.
    What is best on these samples in the last round of seed 0 is measured for all seeds.
    """
    out = request.out
    results, keys = Results(out / "results.jsonl"), list[Row]()
    for name, partition in itertools.product(request.datasets, PARTITIONS):
        rounds = 8 if request.small else 15 if partition == "iid" else 30
        first, *others = (
            FusionCase(name, partition, 15, 2, seed) for seed in request.repeats(3, 10)
        )
        for method in ROUNDS:
            tried = [
                (candidate, _measured(request, results, first, method, candidate, rounds))
                for candidate in _candidates(request, first, method)
            ]
            best, key = max(tried, key=lambda pair: _held_out(results, pair[1], rounds))
            keys += [key]
            keys += [_measured(request, results, one, method, best, rounds) for one in others]
    found = results.table(keys).drop_duplicates([*keys[0], "round"])
    panels(found, "round", "round", out / "figure.png", "15 clients, two hidden layers (Fig. 4)")
    by = ("dataset", "partition", "round")

    def claims(own: pd.DataFrame) -> list[Claim]:
        far = own["dataset"].iloc[0] in SPREADS
        return [
            ahead(own, by, "GPI-FNM", "PFNM", more_neurons(own)),
            ahead(own, by, "GPI-FNM", "FedAvg", ONE_START if far else ""),
        ]

    return finding_of(request, found, by, claims, _choices)


def _choices(found: pd.DataFrame) -> str:
    """Which settings Fig. 4 took, in words."""
    texts = []
    for (name, partition, method), own in found.groupby(["dataset", "partition", "method"]):
        table = dict(own["chosen"].iloc[0])
        if method != "FedAvg":
            values = ", ".join(f"{k} = {v}" for k, v in table.items() if k != "name")
            texts.append(f"{method} on {name}, {PARTITIONS[str(partition)]}: {values}")
    return f"Chosen were: {'; '.join(texts)}."


def _candidates(request: Request, federation: FusionCase, method: str) -> list[Row]:
    """Settings of a method that Fig. 4 tries."""
    if method == "FedAvg":
        return [{"name": "fedavg"}]
    chosen = _settled(request, federation)
    published = {"form": "published", "bias_mean": 0.1, "alternations": 0, **chosen}
    weights = (0.0,) if method == "PFNM" else KL_WEIGHTS
    candidates: list[Row] = [{"form": "wide"}]
    candidates += [{**published, "epsilon": weight} for weight in weights]
    return [{"name": ROUNDS[method], **candidate} for candidate in candidates]


def _settled(request: Request, federation: FusionCase) -> Row:
    """σ, σ0 and γ of the methods as published: PFNM's after one round, on held-out samples."""
    settings = Results(request.out / "settings.jsonl")
    asked = {"dataset": federation.dataset, "partition": federation.partition, "method": "PFNM"}
    if settings.missing([asked]):
        request.watch(f"{federation.name}, PFNM, settings")
        silos = trained(request.folder, federation)
        grid = grid_of(federation, "PFNM", DEEP)
        found = silos.fuse("pfnm", 5 * WIDTH, grid, {"bias_mean": 0.1})
        settings.add({**asked, "chosen": found["chosen"]})
    chosen: Row = settings.table([asked])["chosen"].iloc[0]
    return {name: chosen[name] for name in ("sigma", "sigma0", "gamma")}


def _measured(
    request: Request,
    results: Results,
    federation: FusionCase,
    method: str,
    table: Row,
    rounds: int,
) -> Row:
    """Measure all rounds of a run that were not measured yet; the key of its results."""
    key = {
        "dataset": federation.dataset,
        "partition": federation.partition,
        "seed": federation.seed,
        "method": method,
        "settings": fingerprint([rounds, table, WIDE if table.get("form") == "wide" else {}]),
    }
    place = request.out / "runs" / f"{federation.name}-{table['name']}-{key['settings']}"
    config = federation.config(table, rounds)
    left = results.missing([{**key, "round": number} for number in range(1, rounds + 1)])
    for number, scores, sizes in _followed(place, config, rounds - len(left)):
        request.watch(f"{federation.name}, {method}, round {number} of {rounds}")
        results.add({**key, "round": number, **scores, "sizes": sizes, "chosen": table})
    return key


def _held_out(results: Results, key: Row, rounds: int) -> float:
    """Accuracy in the last round on the samples that settings are chosen on."""
    return float(results.table([{**key, "round": rounds}])["held_out"].iloc[0])


def _followed(
    place: Path, config: Config, measured: int
) -> Iterator[tuple[int, dict[str, float], list[int]]]:
    """The rounds of a run that are still to be measured: number, accuracy on the test samples and
    on those held out, sizes of hidden layers.

    A run that is ahead of its measurements (it was killed between the two) begins anew.
    """
    if measured == config.rounds:
        return
    if begun(place, config):
        progress = RunFolder(place).progress()
        if progress is not None and progress.round > measured:
            shutil.rmtree(place)
    with opened(place, config) as simulation:
        held_out, test = split(simulation.data, config.seed)
        target = simulation.data.target
        for step in simulation:
            model = simulation.method.model(step.server, simulation.run)
            layers = dense_layers(model, "the global model")
            predict = partial(relu_network, layers)
            scores = {
                "accuracy": accuracy(predict, test, target),
                "held_out": accuracy(predict, held_out, target),
            }
            yield step.number, scores, [len(layer.weight) for layer in layers[:-1]]
