"""The experiments of the GPI-FNM paper (section 5), on MNIST and CIFAR-10.

Networks are trained as its Table 1 says. Settings of the matching are chosen, for every
federation and method anew, on a fifth of the official test images, drawn by seed; accuracy is
measured on the others. No matched layer may be larger than four of the clients' layers. The
alternating rows take no such data: their settings are constants of this file. Nor does fusion in
function space, with its defaults, which are not the paper's: one network as large as a client's.
"""

import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from fedbayes import seeds
from fedbayes.data import FederatedData
from fedbayes.fusion import Layers, coordinate_average
from fedbayes.fusion.function import fuse_functions
from fedbayes.fusion.teacher import SOFTNESS, frozen
from fedbayes.likelihoods import Predictor, evaluate, total
from fedbayes.likelihoods.categorical import Categorical
from fedbayes.matching import MatchingSettings
from fedbayes.methods.matching import WIDE
from fedbayes.models import dense_layers, relu_network
from fedbayes.papers.experiment import (
    Experiment,
    Request,
    Results,
    Row,
    begun,
    fingerprint,
    finished,
    mean_and_std,
    opened,
)
from fedbayes.papers.finding import Claim, Finding, Part, Scale, markdown
from fedbayes.runs.build import stored_data
from fedbayes.runs.config import Config
from fedbayes.runs.folder import RunFolder
from fedbayes.targets import Target
from fedbayes.tensors import Samples
from fedbayes.tools.fusing import select
from fedbayes.tools.model_evaluation import ensemble
from fedbayes.tools.model_files import read_models
from fedbayes.tools.network_fusing import drawn
from fedbayes.tools.silos import Seen, read_silos

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
STYLES = {
    "GPI-FNM": ("#0072B2", "o", "-"),
    "PFNM": ("#D55E00", "s", "--"),
    "FedAvg": ("#009E73", "^", "-."),
    "locals": ("#555555", "v", ":"),
    "ensemble": ("#CC79A7", "D", ":"),
    "average": ("#999999", "x", ":"),
    FUNCTION_SPACE: ("#882255", "*", "-"),
    NO_COUNTS: ("#000000", "*", "--"),
    "GPI-FNM, alternating": ("#56B4E9", "P", "-"),
    "GPI-FNM, alternating, small": ("#E69F00", "X", "-"),
}
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

TOP_DOWN = (
    "matched from the top down, a layer is matched by its outgoing weights before what flows "
    "into it is known; alternating over the layers mends it"
)
"""Why deep networks fall behind their parts."""

AT_CHANCE = "the deepest networks are at chance however they are matched from the top down"
"""Why GPI-FNM is not ahead of PFNM everywhere."""
STAYS = (
    "the many weights of a neuron stay near its random start, so that neurons trained apart find "
    "no partners like them"
)
"""Why matched networks fall to their parts with many clients on CIFAR-10."""
ONE_START = f"{STAYS}; FedAvg's clients have one start"
"""Why they fall behind FedAvg there."""
APART = (
    f"{STAYS}, and with every layer less of the clients' functions is left, alternating or not; "
    "FedAvg's clients have one start"
)
"""Why deep ones fall behind everything there."""
NO_DATA = (
    "settings of GPI-FNM are chosen on held-out samples, those of the alternating sweep see no "
    "data and are the same for all"
)
"""Why alternating is not ahead in one round."""

SPREADS: dict[str, Row] = {"cifar10": {"sigma": (1.5, 2.0), "sigma0": (1.0, 3.0)}}
"""Values of σ and σ0 by data set, in place of a grid's. The 3,072 weights of a neuron on CIFAR-10
stay near their random start: with σ = 1, or with σ0 = 10, most neurons find no partner."""


@dataclass(frozen=True)
class Federation:
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
        return Config.create(
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


def trained(folder: Path, federation: Federation) -> Silos:
    """Networks that each client trained on its own data alone; trained now, or read again."""
    data, files = alone(folder, federation)
    return Silos(
        dict(read_models(files)),
        data.counts().astype(float),
        *split(data, federation.seed),
        data.target,
    )


def alone(folder: Path, federation: Federation) -> tuple[FederatedData, list[Path]]:
    """The data, and the file of each client's own network."""
    config = federation.config({"name": "local"})
    run = finished(folder / "locals" / federation.name, config)
    files = sorted((run.path / "clients").glob("*.safetensors"))
    return stored_data(config, run), files


def fused_functions(folder: Path, federation: Federation, counted: bool) -> Row:
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


def measure(folder: Path, federation: Federation, method: str, grid: Row) -> Row:
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
    request: Request, federations: Sequence[Federation], methods: Sequence[str], grid: Row
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
        own = _grid(federation, method, grid)
        results.add({**key, **measure(request.folder, federation, method, own)})
    return results.table(keys)


def _grid(federation: Federation, method: str, grid: Row) -> Row:
    """What is tried of a method on this data."""
    own = {**grid, **SPREADS.get(federation.dataset, {})}
    return {name: own[name] for name in own if (method, name) != ("PFNM", "epsilon")}  # it is 0


def _settings(federation: Federation, method: str, grid: Row) -> str:
    """Tells apart what is measured under other settings of a method."""
    match method:
        case "PFNM" | "GPI-FNM":
            return fingerprint(_grid(federation, method, grid))
        case "GPI-FNM, alternating":
            return fingerprint(ALTERNATING)
        case "GPI-FNM, alternating, small":
            return fingerprint(SMALL)
        case _ if method == FUNCTION_SPACE:
            return fingerprint(SOFTNESS)
    return ""


def panels(
    table: pd.DataFrame, x: str, label: str, path: Path, title: str, value: str = "accuracy"
) -> None:
    """A panel for each data set and partition: mean over seeds of each method, with deviations."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    kinds = list(dict.fromkeys(zip(table["dataset"], table["partition"], strict=True)))
    figure = Figure(figsize=(4.2 * len(kinds), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(1, len(kinds), squeeze=False)[0]
    for axes, (dataset, partition) in zip(grid, kinds, strict=True):
        chosen = table[(table["dataset"] == dataset) & (table["partition"] == partition)]
        for method, own in chosen.groupby("method", sort=False):
            colour, marker, line = STYLES[str(method)]
            stats = own.groupby(x)[value].agg(["mean", "std"]).fillna(0.0)
            axes.errorbar(
                stats.index,
                stats["mean"],
                yerr=stats["std"],
                label=str(method),
                color=colour,
                marker=marker,
                linestyle=line,
                capsize=2,
                markersize=5,
            )
        axes.set_title(f"{dataset}, {PARTITIONS[partition]}")
        axes.set_xlabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    grid[0].set_ylabel("test accuracy")
    handles, names = grid[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def summarize(table: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """A line for each combination of `by`, accuracies and sizes of the methods in columns."""
    lines = []
    for key, group in table.groupby(list(by), sort=False):
        line = dict(zip(by, key, strict=True))
        for method, own in group.groupby("method", sort=False):
            text = mean_and_std(own["accuracy"].tolist())
            sizes = [max(sizes) for sizes in own.get("sizes", []) if isinstance(sizes, list)]
            line[str(method)] = f"{text} ({np.mean(sizes):.0f})" if sizes else text
        lines.append(line)
    return pd.DataFrame(lines).fillna("–")


def ahead(
    table: pd.DataFrame, by: Sequence[str], better: str, worse: str, cause: str = ""
) -> Claim:
    """Whether one method's mean is above another's in every setting; why not, if that is known."""
    means = table.groupby([*by, "method"])["accuracy"].mean().unstack()
    gain = (means[better] - means[worse]).dropna()
    return Claim(
        text=f"{better} is ahead of {worse} in every setting",
        seen=bool((gain > 0).all()),
        measured=f"in {int((gain > 0).sum())} of {len(gain)}, by {gain.min():+.3f} to "
        f"{gain.max():+.3f}, mean {gain.mean():+.3f}",
        cause=cause,
    )


Claims = Callable[[pd.DataFrame], Sequence[Claim]]
"""Claims of the paper on the measurements of one data set."""


def _found(
    request: Request,
    table: pd.DataFrame,
    by: Sequence[str],
    claims: Claims,
    note: Callable[[pd.DataFrame], str] = lambda _: "",
) -> Finding:
    parts = []
    for dataset, own in table.groupby("dataset", sort=False):
        parts.append(
            Part(
                table=markdown(summarize(own, by)),
                claims=tuple(claims(own)),
                dataset=str(dataset),
                note=note(own),
            )
        )
    seeds = table.groupby([*by, "method"])["seed"].nunique().min()
    general = (
        "Mean ± std over seeds; in parentheses the mean size of the largest layer. The paper "
        "shows curves alone."
    )
    return request.found(parts, int(seeds), general)


def one_shot(request: Request) -> Finding:
    """The figures of one federation: MNIST, 10 clients, Dirichlet 0.4, one and two layers."""
    federations = [
        Federation(name, "dirichlet", 10, layers, seed)
        for name in request.datasets
        for layers in (1, 2)
        for seed in request.repeats(3, 10)
    ]
    methods = ["locals", "average", "ensemble", "PFNM", "GPI-FNM"]
    methods += ["GPI-FNM, alternating", "GPI-FNM, alternating, small"]
    out = request.out
    grid = {
        "sigma": (1.0, 3.0),
        "sigma0": (1.0, 3.0, 10.0),
        "gamma": (1.0, 8.0, 30.0),
        "epsilon": (0.0, 0.1, 0.3, 1.0),
    }
    table = fill(request, federations, methods, grid)
    by = ("dataset", "layers")
    panels(table, "layers", "hidden layers", out / "figure.png", "One round, 10 clients")

    def claims(own: pd.DataFrame) -> list[Claim]:
        return [
            ahead(own, by, "GPI-FNM", "PFNM"),
            ahead(own, by, "GPI-FNM, alternating", "GPI-FNM", NO_DATA),
            ahead(own, by, "GPI-FNM, alternating", "ensemble", _one_network(own)),
        ]

    return _found(request, table, by, claims)


def figure2(request: Request) -> Finding:
    """Fig. 2: one hidden layer, one round, more and more clients."""
    federations = [
        Federation(name, partition, clients, 1, seed)
        for name in request.datasets
        for partition in PARTITIONS
        for clients in _clients(name, request.scale)
        for seed in request.repeats(3, 10)
    ]
    epsilons: tuple[float, ...] = (0.0, 0.1, 0.3, 1.0)
    if not request.small:
        epsilons = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5)
    grid = {"sigma0": (1.0, 3.0), "gamma": (1.0, 8.0), "epsilon": epsilons}
    out = request.out
    methods = ["GPI-FNM", "PFNM", "FedAvg", "locals"]
    table = fill(request, federations, [*methods, FUNCTION_SPACE, NO_COUNTS], grid)
    panels(table, "clients", "clients", out / "figure.png", "One hidden layer, one round (Fig. 2)")
    by = ("dataset", "partition", "clients")

    def claims(own: pd.DataFrame) -> list[Claim]:
        far = own["dataset"].iloc[0] in SPREADS
        return [
            ahead(own, by, "GPI-FNM", "PFNM", _choice(own)),
            ahead(own, by, "GPI-FNM", "FedAvg", ONE_START if far else ""),
            ahead(own, by, "GPI-FNM", "locals", STAYS if far else ""),
            *(
                ahead(own, by, ours, other, _smaller(own) if other == "GPI-FNM" else "")
                for ours in (FUNCTION_SPACE, NO_COUNTS)
                for other in ("GPI-FNM", "FedAvg")
            ),
        ]

    return _found(request, table, by, claims)


def _choice(table: pd.DataFrame) -> str:
    """How often GPI-FNM chose to be PFNM, and what the KL term brought where it did not."""
    by = ["dataset", "partition", "clients", "seed"]
    ours, theirs = (table[table["method"] == name].set_index(by) for name in ("GPI-FNM", "PFNM"))
    without = ours["chosen"].map(lambda chosen: chosen["epsilon"] == 0)
    gain = (ours["accuracy"] - theirs["accuracy"])[~without]
    text = (
        "without its KL term (ε = 0) GPI-FNM is PFNM, and that is what the samples that settings "
        f"are chosen on prefer in {int(without.sum())} of {len(without)} federations"
    )
    return (
        f"{text}; in the others it is ahead by {gain.mean():.4f} on average" if len(gain) else text
    )


def _neurons(table: pd.DataFrame, method: str) -> float:
    """Size of a method's largest layer, mean over what was measured."""
    return float(table[table["method"] == method]["sizes"].map(max).mean())


def _one_network(table: pd.DataFrame) -> str:
    """What alternating has in place of the ensemble."""
    neurons = _neurons(table, "GPI-FNM, alternating")
    return f"it is one network, of {neurons:.0f} neurons in its largest layer for ten times {WIDTH}"


def _smaller(table: pd.DataFrame) -> str:
    """What GPI-FNM has that fusion in function space has not."""
    neurons = _neurons(table, "GPI-FNM")
    if neurons <= WIDTH:
        return ""
    return (
        f"GPI-FNM has {neurons:.0f} neurons in the mean and settings that are chosen on held-out "
        f"samples; in function space there are {WIDTH}, and no data"
    )


def _clients(dataset: str, scale: Scale) -> tuple[int, ...]:
    """Numbers of clients of Fig. 2."""
    if scale == "paper":
        return (5, 10, 15, 20, 25, 30)
    return (5, 10, 20) if dataset == "cifar10" else (5, 10, 20, 30)


def figure3(request: Request) -> Finding:
    """Fig. 3: one round, 10 clients, one to six hidden layers."""
    depths = (1, 2, 4, 6) if request.small else (1, 2, 3, 4, 5, 6)
    federations = [
        Federation(name, partition, 10, layers, seed)
        for name in request.datasets
        for partition in PARTITIONS
        for layers in depths
        for seed in request.repeats(3, 10)
    ]
    out = request.out
    methods = ["GPI-FNM", "GPI-FNM, alternating", "PFNM", "FedAvg", "locals"]
    table = fill(request, federations, methods, DEEP)
    panels(table, "layers", "hidden layers", out / "figure.png", "One round, 10 clients (Fig. 3)")
    by = ("dataset", "partition", "layers")

    def claims(own: pd.DataFrame) -> list[Claim]:
        far = own["dataset"].iloc[0] in SPREADS
        return [
            ahead(own, by, "GPI-FNM", "PFNM", AT_CHANCE),
            ahead(own, by, "GPI-FNM", "FedAvg", APART if far else TOP_DOWN),
            ahead(own, by, "GPI-FNM", "locals", APART if far else TOP_DOWN),
        ]

    return _found(request, table, by, claims)


def figure4(request: Request) -> Finding:
    """Fig. 4: two hidden layers, 15 clients, accuracy over rounds.

    Both matching methods are tried with their preset `wide`, and as published: top down, with what
    the held-out samples prefer for PFNM after a first round of seed 0, the KL term beside it.
    What is best on these samples in the last round of seed 0 is measured for all seeds.
    """
    out = request.out
    results, keys = Results(out / "results.jsonl"), list[Row]()
    for name, partition in itertools.product(request.datasets, PARTITIONS):
        rounds = 8 if request.small else 15 if partition == "iid" else 30
        first, *others = (
            Federation(name, partition, 15, 2, seed) for seed in request.repeats(3, 10)
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
            ahead(own, by, "GPI-FNM", "PFNM", _sizes(own)),
            ahead(own, by, "GPI-FNM", "FedAvg", ONE_START if far else ""),
        ]

    return _found(request, found, by, claims, _choices)


def _sizes(found: pd.DataFrame) -> str:
    """What the KL term brings where both methods have the same search: neurons."""
    last = found[found["round"] == found["round"].max()]
    ours, theirs = (_neurons(last, method) for method in ("GPI-FNM", "PFNM"))
    if theirs <= ours:
        return ""
    return (
        "chosen by the same search PFNM is as good where it has neurons enough: its largest layer "
        f"has {theirs:.0f} in the last round, GPI-FNM's {ours:.0f}"
    )


ROUNDS = {"GPI-FNM": "gpi-fnm", "PFNM": "pfnm", "FedAvg": "fedavg"}
"""Methods of Fig. 4 and their names."""
KL_WEIGHTS = (0.3, 1.0)
"""What Fig. 4 tries of ε, as published."""


def _choices(found: pd.DataFrame) -> str:
    """Which settings Fig. 4 took, in words."""
    texts = []
    for (name, partition, method), own in found.groupby(["dataset", "partition", "method"]):
        table = dict(own["chosen"].iloc[0])
        if method != "FedAvg":
            values = ", ".join(f"{k} = {v}" for k, v in table.items() if k != "name")
            texts.append(f"{method} on {name}, {PARTITIONS[str(partition)]}: {values}")
    return f"Chosen were: {'; '.join(texts)}."


def _candidates(request: Request, federation: Federation, method: str) -> list[Row]:
    """Settings of a method that Fig. 4 tries."""
    if method == "FedAvg":
        return [{"name": "fedavg"}]
    chosen = _settled(request, federation)
    published = {"preset": "published", "bias_mean": 0.1, "alternations": 0, **chosen}
    weights = (0.0,) if method == "PFNM" else KL_WEIGHTS
    candidates: list[Row] = [{"preset": "wide"}]
    candidates += [{**published, "epsilon": weight} for weight in weights]
    return [{"name": ROUNDS[method], **candidate} for candidate in candidates]


def _settled(request: Request, federation: Federation) -> Row:
    """σ, σ0 and γ of the methods as published: PFNM's after one round, on held-out samples."""
    settings = Results(request.out / "settings.jsonl")
    asked = {"dataset": federation.dataset, "partition": federation.partition, "method": "PFNM"}
    if settings.missing([asked]):
        request.watch(f"{federation.name}, PFNM, settings")
        silos = trained(request.folder, federation)
        grid = _grid(federation, "PFNM", DEEP)
        found = silos.fuse("pfnm", 5 * WIDTH, grid, {"bias_mean": 0.1})
        settings.add({**asked, "chosen": found["chosen"]})
    chosen: Row = settings.table([asked])["chosen"].iloc[0]
    return {name: chosen[name] for name in ("sigma", "sigma0", "gamma")}


def _measured(
    request: Request,
    results: Results,
    federation: Federation,
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
        "settings": fingerprint([rounds, table, WIDE if table.get("preset") == "wide" else {}]),
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


DATASETS = ("mnist", "cifar10")
EXPERIMENTS = (
    Experiment(
        "gpi-fnm-one-shot",
        "10 clients, one and two hidden layers, one round",
        DATASETS[:1],
        one_shot,
    ),
    Experiment("gpi-fnm-fig2", "5 to 30 clients, one hidden layer, one round", DATASETS, figure2),
    Experiment("gpi-fnm-fig3", "one to six hidden layers, one round", DATASETS, figure3),
    Experiment("gpi-fnm-fig4", "15 clients, two hidden layers, many rounds", DATASETS, figure4),
)
"""In the order of the paper."""
