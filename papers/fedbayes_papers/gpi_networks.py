"""What the GPI-FNM paper's experiments measure: networks of clients, fused by each method.

Networks are trained as the paper's Table 1 says. Settings of the matching are chosen, for every
federation and method anew, on a fifth of the official test images, drawn by seed; accuracy is
measured on the others. No matched layer may be larger than four of the clients' layers. The
alternating rows take no such data: their settings are constants of this file. Nor does fusion in
function space, with its defaults, which are not the paper's: one network as large as a client's.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from fedbayes.config.config import Config
from fedbayes.core import seeds
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples
from fedbayes.data import FederatedData
from fedbayes.fusion import Layers, coordinate_average
from fedbayes.fusion.class_counts import RESTART
from fedbayes.fusion.frozen import frozen
from fedbayes.fusion.function import fuse_functions
from fedbayes.fusion.teacher import ALIKE, SOFTNESS, SOFTNESS_OF_CHAIN
from fedbayes.likelihoods import Predictor, evaluate, total
from fedbayes.likelihoods.categorical import Categorical
from fedbayes.matching import MatchingSettings
from fedbayes.models import dense_layers, relu_network
from fedbayes.runs.build import stored_data
from fedbayes.workflows.fuse.client_models import Seen, read_silos
from fedbayes.workflows.fuse.fusing import select
from fedbayes.workflows.fuse.network_fusing import drawn
from fedbayes.workflows.serve.model_evaluation import ensemble
from fedbayes.workflows.serve.model_files import read_models
from fedbayes_papers.experiment import Request, Results, Row, fingerprint, finished

WIDTH = 100
HELD_OUT = 0.2
"""Share of the test samples that settings are chosen on."""
TRAINING = {
    "digits": {"lr": 0.01, "weight_decay": 1e-5},
    "mnist": {"lr": 0.01, "weight_decay": 1e-5},
    "cifar10": {"lr": 0.001, "weight_decay": 1e-4},
}
PARTITIONS = {"iid": "homogeneous", "dirichlet": "heterogeneous"}
FUNCTION_SPACE = "function space"
NO_COUNTS = "function space, weights alone"
ALTERNATING: dict[str, Any] = {
    "sigma0": 10.0,
    "gamma": 30.0,
    "epsilon": 1.0,
    "alternations": 12,
    "bias_mean": 0.1,
}
"""Settings of the alternating rows, the same for every federation: no data are needed."""
SMALL: dict[str, Any] = {
    "sigma0": 0.6,
    "gamma": 1.0,
    "epsilon": 0.0,
    "alternations": 15,
    "starts": 4,
    "start_gamma": 8.0,
    "bias_mean": 0.1,
}
"""Those for few neurons."""
DEEP: dict[str, tuple[float, ...]] = {
    "sigma": (1.0, 3.0),
    "sigma0": (3.0, 10.0),
    "gamma": (8.0, 30.0),
    "epsilon": (0.0, 0.3, 1.0),
}
"""Grid of the deep networks."""
SPREADS: dict[str, Row] = {"cifar10": {"sigma": (1.5, 2.0), "sigma0": (1.0, 3.0)}}
"""Values of σ and σ0 by data set, in place of a grid's. The 3,072 weights of a neuron on CIFAR-10
stay near their random start: with σ = 1, or with σ0 = 10, most neurons find no partner."""


@dataclass(frozen=True)
class FusionCase:
    """Who trained what on which data."""

    dataset: str
    partition: str
    clients: int
    layers: int
    seed: int

    @property
    def name(self) -> str:
        """A name for folders."""
        return f"{self.dataset}-{self.partition}-S{self.clients}-L{self.layers}-seed{self.seed}"

    def config(self, method: Row, rounds: int = 1, epochs: int = 10) -> Config:
        """A run with the paper's Table 1."""
        return Config.published(
            seed=self.seed,
            rounds=rounds,
            data={
                "name": self.dataset,
                "clients": self.clients,
                "partition": self.partition,
                "alpha": 0.4,
            },
            model={"name": "mlp", "hidden": [WIDTH] * self.layers, "init": "normal"},
            training={
                "optimizer": "amsgrad",
                "epochs": epochs,
                "batch_size": 32,
                **TRAINING[self.dataset],
            },
            method=method,
        )


@dataclass(frozen=True)
class Silos:
    """Trained networks with the data to choose on and the data to report on."""

    models: dict[str, Layers]
    counts: npt.NDArray[np.float64]
    held_out: Samples
    test: Samples
    target: Target

    def accuracy(self, predict: Predictor) -> float:
        """Share of the test samples that are predicted rightly."""
        return accuracy(predict, self.test, self.target)

    def fuse(self, method: str, most: int | None, grid: Row, settings: Row) -> Row:
        """Fuse with settings chosen on the held-out samples; accuracy is on the others."""
        fusion, _ = select(
            self.models,
            self.held_out,
            method=method,
            settings=settings,
            grid=grid,
            max_neurons=most,
            counts=self.counts,
        )
        assert isinstance(fusion.settings, MatchingSettings)
        chosen = fusion.settings
        return {
            "accuracy": self.accuracy(partial(relu_network, fusion.layers)),
            "sizes": fusion.sizes,
            "chosen": {
                key: getattr(chosen, key) for key in ("sigma", "sigma0", "gamma", "epsilon")
            },
        }


def accuracy(predict: Predictor, samples: Samples, target: Target) -> float:
    """Share of the samples that are predicted rightly, by logits or log-probabilities."""
    likelihood = Categorical(target=target)
    scores = total(evaluate(likelihood, lambda x: predict(x)[None], samples))
    return likelihood.metrics(scores)["accuracy"]


def split(data: FederatedData, seed: int) -> tuple[Samples, Samples]:
    """Test samples to choose settings on, and those to report."""
    x, y = data.test_union(0, data.test_total)
    order = torch.from_numpy(seeds.numpy_rng(seed, "held out").permutation(len(y)))
    count = round(HELD_OUT * len(y))
    chosen, rest = order[:count], order[count:]
    return Samples(x[chosen], y[chosen]), Samples(x[rest], y[rest])


def trained(folder: Path, federation: FusionCase) -> Silos:
    """Networks that each client trained on its own data alone; trained now, or read again."""
    data, files = alone(folder, federation)
    return Silos(
        dict(read_models(files)),
        data.counts().astype(float),
        *split(data, federation.seed),
        data.target,
    )


def alone(folder: Path, federation: FusionCase) -> tuple[FederatedData, list[Path]]:
    """The data, and the file of each client's own network."""
    config = federation.config({"name": "local"})
    run = finished(folder / "locals" / federation.name, config)
    files = sorted((run.path / "clients").glob("*.safetensors"))
    return stored_data(config, run), files


def fused_functions(folder: Path, federation: FusionCase, counted: bool) -> Row:
    """Fusion in function space, as large as one client's network, with its defaults.

    Args:
        folder: of the networks.
        federation: who trained them.
        counted: whether the server knows the clients' counts of classes.
    """
    data, files = alone(folder, federation)
    silos = read_silos(files, None, Seen())
    _, inputs = drawn(silos, "auto", seed=federation.seed)
    fusion = fuse_functions(
        silos.networks,
        silos.like,
        inputs,
        counts=data.counts() if counted else None,
        likelihood=silos.likelihood,
    )
    _, test = split(data, federation.seed)
    return {
        "accuracy": accuracy(frozen(fusion.module), test, data.target),
        "sizes": [WIDTH] * federation.layers,
        "divergence": fusion.likeness.divergence,
        "seconds": sum(fusion.seconds.values()),
    }


def measure(folder: Path, federation: FusionCase, method: str, grid: Row) -> Row:
    """One method on one federation, after one round."""
    if method == "FedAvg":
        config = federation.config({"name": "fedavg"})
        run = finished(folder / "fedavg" / federation.name, config)
        data = stored_data(config, run)
        _, test = split(data, federation.seed)
        predict = partial(relu_network, dense_layers(run.model(), "FedAvg"))
        return {"accuracy": accuracy(predict, test, data.target)}
    if method in (FUNCTION_SPACE, NO_COUNTS):
        return fused_functions(folder, federation, counted=method == FUNCTION_SPACE)
    silos = trained(folder, federation)
    models = list(silos.models.values())
    most = 4 * WIDTH
    match method:
        case "locals":
            alone = [silos.accuracy(partial(relu_network, layers)) for layers in models]
            return {"accuracy": float(np.mean(alone))}
        case "average":
            average = coordinate_average(models)
            assert average is not None
            return {"accuracy": silos.accuracy(partial(relu_network, average))}
        case "ensemble":
            equal = torch.ones(len(models), silos.counts.shape[1])
            return {
                "accuracy": silos.accuracy(
                    ensemble([partial(relu_network, m) for m in models], equal)
                )
            }
        case "PFNM":
            return silos.fuse("pfnm", most, grid, {"bias_mean": 0.1})
        case "GPI-FNM":
            return silos.fuse("gpi-fnm", most, grid, {"bias_mean": 0.1})
        case "GPI-FNM, alternating":
            return silos.fuse("gpi-fnm", None, {}, ALTERNATING)
        case _:
            return silos.fuse("gpi-fnm", None, {}, SMALL)


def fill(
    request: Request, federations: Sequence[FusionCase], methods: Sequence[str], grid: Row
) -> pd.DataFrame:
    """All measurements of these federations and methods, those that are missing made."""
    results = Results(request.out / "results.jsonl")
    pairs = list(itertools.product(federations, methods))
    keys = [
        {**vars(federation), "method": method, "settings": _settings(federation, method, grid)}
        for federation, method in pairs
    ]
    for key in (missing := results.missing(keys)):
        left = len(missing) - missing.index(key)
        method = key["method"]
        federation, _ = pairs[keys.index(key)]
        request.watch(f"{federation.name}, {method} ({left} to go)")
        own = grid_of(federation, method, grid)
        results.add({**key, **measure(request.folder, federation, method, own)})
    return results.table(keys)


def grid_of(federation: FusionCase, method: str, grid: Row) -> Row:
    """What is tried of a method on this data."""
    own = {**grid, **SPREADS.get(federation.dataset, {})}
    return {name: own[name] for name in own if (method, name) != ("PFNM", "epsilon")}  # it is 0


def _settings(federation: FusionCase, method: str, grid: Row) -> str:
    """Tells apart what is measured under other settings of a method."""
    match method:
        case "PFNM" | "GPI-FNM":
            return fingerprint(grid_of(federation, method, grid))
        case "GPI-FNM, alternating":
            return fingerprint(ALTERNATING)
        case "GPI-FNM, alternating, small":
            return fingerprint(SMALL)
        case _ if method in (FUNCTION_SPACE, NO_COUNTS):
            return fingerprint([SOFTNESS, SOFTNESS_OF_CHAIN, RESTART, ALIKE])
    return ""
