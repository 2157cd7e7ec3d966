"""Networks that were trained apart, fused in function space: accuracy on test samples.

    python benchmarks/fusion.py breast-cancer mnist-mlp --seeds 3 --results fusion.jsonl --keep runs

Each case trains its clients alone (method `local`) and fuses their networks by their counts of
classes, without data. Measured are the mean of the clients' own networks, their ensembles (as the
fusion's teacher adds them up, by class-share logits, by the mean of probabilities), their average
and, where they share a start, what posteriors make of it (`regmean`, `fisher`, `kfac`), and the
fused networks after least squares and after training end to end. Every setting of the fusion is
the default of `fedbayes fuse`; none was chosen by test samples.

With `--validation 20000` clients share that many of the training samples, and everything is
judged by 5,000 others: so settings can be compared without a test sample.

Measurements are appended to `--results`, each as it comes; what stands there under the same
settings is not measured again. The clients' runs are kept in `--keep`, so that a changed fusion
needs no new training. Needs MNIST, FashionMNIST, CIFAR-10 and the vehicle sensors (FEDBAYES_DATA,
or the hub), as far as a case is of them.
"""

import argparse
import contextlib
import statistics
import time
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from sklearn.datasets import load_breast_cancer

from fedbayes import Config
from fedbayes.config.given import assign
from fedbayes.core.metrics import calibrate
from fedbayes.data.federated import FederatedData
from fedbayes.fusion.class_counts import CORRELATED, RESTART, class_shares
from fedbayes.fusion.combining import Merging, combine
from fedbayes.fusion.curvature import posterior
from fedbayes.fusion.cycles import c2m3
from fedbayes.fusion.distillation import LESSONS
from fedbayes.fusion.frozen import frozen
from fedbayes.fusion.function import fuse_functions, teacher_of
from fedbayes.fusion.norm_matching import FEWEST, SHIFT, SIZE, STEPS, WEIGHT
from fedbayes.fusion.permutation import permuted
from fedbayes.fusion.posterior_settings import CurvatureSettings
from fedbayes.fusion.posteriors import fisher, kfac, regmean
from fedbayes.fusion.settings import AlignedSettings
from fedbayes.fusion.teacher import ALIKE, SOFTNESS, SOFTNESS_OF_CHAIN, Teacher
from fedbayes.fusion.temperature import TemperatureScaled
from fedbayes.fusion.uncompared import RIDGE, SPREAD
from fedbayes.inputs import add_sums, sums_of, write_sums
from fedbayes.likelihoods import evaluate, temperature, total
from fedbayes.models.resize import with_weights
from fedbayes.runs.build import build_runtime, stored_data
from fedbayes.workflows.fuse.client_models import Seen, read_silos
from fedbayes.workflows.fuse.function_settings import function_settings
from fedbayes.workflows.fuse.network_fusing import drawn
from fedbayes.workflows.fuse.posterior_files import sent_temperatures
from fedbayes.workflows.serve.model_files import ModelFiles
from fedbayes_papers.experiment import Results, fingerprint, finished, mean_and_std
from fedbayes_papers.finding import markdown

SGD = {"optimizer": "sgd", "momentum": 0.9}
LENET = {**SGD, "weight_decay": 5e-4, "batch_size": 32, "lr": 0.02}
GPI_FNM = {"optimizer": "amsgrad", "lr": 0.01, "weight_decay": 1e-5, "epochs": 10}
"""Of the GPI-FNM paper, on MNIST."""
FEDFISHER = {**SGD, "lr": 0.01, "batch_size": 64, "epochs": 30}
JUDGES = 5000
"""Training samples that no client has, for `--validation`."""
TEACHER = [SOFTNESS, SOFTNESS_OF_CHAIN, RESTART, SPREAD, RIDGE, ALIKE, CORRELATED]
"""Constants that results depend on."""
INPUTS = [STEPS, SIZE, WEIGHT, FEWEST, SHIFT, LESSONS]
"""Those of the inputs of fused networks, and of their order."""
POSTERIORS = {"regmean": regmean, "fisher": fisher, "kfac": kfac}


def images(name, clients, alpha, model, training, start="own", kept=0.0, **more):
    """Settings of a run on images, divided by Dirichlet shares.

    Each client keeps the share `kept` of its rows for a temperature.
    """
    data = {"name": name, "clients": clients, "partition": "dirichlet", "alpha": alpha}
    return {
        "data": data | {"validation": kept},
        "model": model if isinstance(model, dict) else {"name": model},
        "training": training,
        "method": {"name": "local", "start": start},
        **more,
    }


def fedfisher(alpha, start="common", **more):
    """FedFisher's Table 2: its network, optimizer, batches and epochs; no augmentation.

    Here each client keeps a tenth of its rows for a temperature.
    """
    network = "fusion_networks:fedfisher_cnn"
    return images("cifar10", 5, alpha, network, FEDFISHER, start, kept=0.1, **more)


def fashion(alpha):
    """The same of FashionMNIST, with LeNets; pieces of clothing are no pen strokes."""
    config = images("fashion-mnist", 5, alpha, "lenet5", FEDFISHER, "common")
    return Case(config, prior="leaves", baselines=SHARED)


def one_shot(alpha, published):
    """The protocol of DENSE and FuseFL on MNIST: five clients, Dirichlet shares, one start.

    FuseFL trains a ResNet-18 for 200 epochs. Here it is a LeNet for five, and each client keeps a
    tenth of its rows for a temperature.
    """
    config = images("mnist", 5, alpha, "lenet5", {**LENET, "epochs": 5}, "common", kept=0.1)
    return Case(config, baselines=(*ALIGNED, *SHARED), published=published)


def fedlpa(labels, **data):
    """FedLPA's protocol on MNIST: ten clients of so many classes, one start, ten epochs.

    Here clients keep a tenth of their rows for a temperature.
    """
    data = {"name": "mnist", "clients": 10, "partition": f"fusion_partitions:{labels}", **data}
    return Case(
        {
            "data": data,
            "model": {"name": "fusion_networks:fedlpa_cnn"},
            "training": {**SGD, "lr": 0.01, "batch_size": 64, "epochs": 10},
            "method": {"name": "local", "start": "common"},
        },
        baselines=("fedlpa",),
        whole=True,
    )


def residual(model, **more):
    """Residual networks from a shared start, on 10,000 images.

    Each client keeps a tenth of its rows for a temperature.
    """
    training = {"optimizer": "adam", "lr": 1e-3, "batch_size": 64, "epochs": 20}
    config = images("cifar10", 5, 0.5, model, training, "common", kept=0.1, **more)
    return Case(config | {"data": config["data"] | {"limit": 10000}}, baselines=("permute",))


def halves():
    """ZipIt's first protocol: two ResNet-20 of five classes of CIFAR-10 each, separate starts.

    Theirs are four times as wide, train longer and predict embeddings of class names. Here each
    client keeps a tenth of its rows for a temperature.
    """
    data = {"name": "cifar10", "clients": 2, "validation": 0.1}
    return {
        "data": data | {"partition": "fusion_partitions:halves"},
        "model": {"name": "fusion_networks:resnet20"},
        "training": {**SGD, "lr": 0.05, "weight_decay": 5e-4, "batch_size": 64, "epochs": 1}
        | {"schedule": "cosine"},
        "method": {"name": "local"},
        "rounds": 15,
        "evaluate_local_every": 15,
    }


def apart(name, epochs):
    """The same protocol with LeNets, of which many can be trained."""
    data = {"name": name, "clients": 2, "partition": "fusion_partitions:halves", "validation": 0.1}
    training = {**LENET, "epochs": epochs}
    return Case({"data": data, "model": {"name": "lenet5"}, "training": training})


def vgg(clients, epochs, published):
    """Neuron interpolation's protocol: VGG-11 on CIFAR-10, uneven shares of all classes.

    Theirs are four times as wide and train 125 to 200 epochs on augmented images. As there, each
    client keeps a tenth of its rows, here for a temperature.
    """
    data = {"name": "cifar10", "clients": clients, "validation": 0.1}
    config = {
        "data": data | {"partition": "fusion_partitions:uneven"},
        "model": {"name": "fusion_networks:vgg11"},
        "training": {"optimizer": "adam", "lr": 1e-3, "batch_size": 64, "epochs": 1}
        | {"schedule": "cosine"},
        "method": {"name": "local"},
        "rounds": epochs,
        "evaluate_local_every": epochs,
    }
    return Case(config, baselines=("permute",), published={"neuron interpolation": published})


@dataclass(frozen=True)
class Case:
    """Clients that train alone, and how their networks are fused."""

    config: dict
    widths: tuple[float, ...] = (1.0,)
    sums: bool = False
    """Whether to fuse with the clients' sums, too."""
    baselines: tuple[str, ...] = field(default=())
    prior: str = "auto"
    """Of inputs."""
    published: dict = field(default_factory=dict)
    """Accuracies in papers, by method."""
    whole: bool = False
    """Whether clients keep no rows for a temperature with `--validation`."""
    validated: bool = False
    """Whether it is judged by training samples that no client has."""

    def validation(self, samples):
        """The same, with so many training samples among the clients."""
        data = self.config["data"] | {"limit": samples}
        if self.whole:
            data.pop("validation", None)
        return replace(self, config=self.config | {"data": data}, validated=True)

    def fusions(self):
        """Fused networks by name: their width, and whether clients send sums."""
        return {
            f"width {width:g}{', sums' if sums else ''}": (width, sums)
            for width in self.widths
            for sums in ((False, True) if self.sums else (False,))
        }

    def rows(self):
        """What is measured, by name."""
        plain = ["locals", "ensemble", "class-share logits", "mean of probabilities", "average"]
        ways = ("least squares", "end to end")
        fused = [f"{way}, {name}" for name in self.fusions() for way in ways]
        return [*plain, *fused, *self.baselines]


COLUMNS = {"divergence": 3, "ece": 3, "ece_by_sums": 3, "seconds": 1, "parameters": 0}
"""Further columns of tables, and their decimals."""
SHARED = ("regmean", "fisher", "kfac")
ALIGNED = ("permute", "c2m3", "c2m3, repaired")
CASES = {
    "breast-cancer": Case(
        {
            "data": {"path": "breast-cancer.csv", "label": ["benign"], "clients": 5}
            | {"partition": "dirichlet", "alpha": 0.5},
            "model": {"name": "mlp", "hidden": [32]},
            "training": {**SGD, "lr": 0.05, "batch_size": 16, "epochs": 50},
            "calibration": "temperature",
        },
        sums=True,
    ),
    "vehicle": Case(
        {
            "data": {"name": "vehicle", "partition": "natural"},
            "model": {"name": "mlp", "hidden": [100, 100]},
            "training": {**SGD, "lr": 0.02, "batch_size": 16, "epochs": 20},
            "calibration": "temperature",
        },
        sums=True,
    ),
    "mnist-mlp": Case(
        images("mnist", 10, 0.4, {"name": "mlp", "hidden": [100, 100], "init": "normal"}, GPI_FNM),
        widths=(1.0, 1.5),
    ),
    "mnist-lenet": Case(images("mnist", 10, 0.5, "lenet5", {**LENET, "epochs": 4})),
    "cifar10-lenet": Case(
        images("cifar10", 10, 0.5, "lenet5", {**LENET, "epochs": 10}, kept=0.1),
        widths=(1.0, 2.0),
    ),
    "one-shot-0.1": one_shot(0.1, {"ensemble": 0.868, "DENSE": 0.666}),
    "one-shot-0.3": one_shot(0.3, {"ensemble": 0.968, "DENSE": 0.765}),
    "one-shot-0.5": one_shot(0.5, {"ensemble": 0.972, "DENSE": 0.958}),
    "fedfisher-0.05": Case(fedfisher(0.05), baselines=SHARED, whole=True),
    "fedfisher-0.1": Case(fedfisher(0.1, precision="bf16"), baselines=SHARED, whole=True),
    "fedfisher-0.2": Case(fedfisher(0.2, precision="bf16"), baselines=SHARED, whole=True),
    "fedfisher-0.1-apart": Case(fedfisher(0.1, "own", precision="bf16"), whole=True),
    "fashion-0.05": fashion(0.05),
    "fashion-0.1": fashion(0.1),
    "fashion-0.2": fashion(0.2),
    "zipit": Case(
        halves(),
        baselines=ALIGNED,
        published={"Git Re-Basin": 0.462, "permute": 0.584, "ZipIt, all layers": 0.791}
        | {"ZipIt, 13 of 20 layers": 0.838, "ensemble": 0.874},
    ),
    "cifar10-halves": apart("cifar10", 10),
    "mnist-halves": apart("mnist", 3),
    "vgg-2": vgg(2, 4, 0.845),
    "vgg-4": vgg(4, 6, 0.789),
    "vgg-8": vgg(8, 8, 0.696),
    "fedlpa-1": fedlpa("one_label", validation=0.1),
    "fedlpa-2": fedlpa("two_labels", validation=0.1),
    "fedlpa-3": fedlpa("three_labels", validation=0.1),
    "resnet20-small": residual("resnet20", precision="bf16"),
    "resnet18-small": residual(
        {"name": "fusion_networks:resnet18", "arguments": {"width": 16, "blocks": 1}}
    ),
}


class Clients:
    """The networks of one case and seed, trained now or read again."""

    def __init__(self, name, seed, folder, case):
        given = {"rounds": 1, "method": {"name": "local"}} | case.config | {"seed": seed}
        data = dict(given["data"])
        if "path" in data:
            data["path"] = str(folder / data["path"])
            write_breast_cancer(Path(data["path"]))
        self.given = given | {"data": data, "threads": torch.get_num_threads()}
        config = Config.published(**self.given)
        begin = time.perf_counter()
        run = finished(folder / f"{name}-seed{seed}", config)
        self.seconds = time.perf_counter() - begin
        self.seed, self.folder, self.prior = seed, run.path, case.prior
        self.data = stored_data(config, run)
        runtime = build_runtime(config, self.data, quiet=True)
        aside = (
            self.data.test if data.get("validation") else lambda client: runtime.parts(client)[1]
        )
        self.kept = [aside(client) for client in range(self.data.clients)]
        paths, files = sorted((run.path / "clients").glob("*.safetensors")), ModelFiles()
        self.silos = read_silos(paths, config.model, Seen(), files=files)
        self.temperatures = sent_temperatures(paths, files)
        self.counts = self.data.counts()
        self.networks = self.silos.networks
        if case.validated:
            self.data = judged_by_others(self.data, seed)
        elif data.get("validation"):  # the run was judged by the rows that clients keep
            pool = self.data.dataset
            self.data = judged_by(self.data, np.arange(pool.official_train, len(pool.y)), seed)
        self.test = self.data.test_union(0, self.data.test_total)
        self.share = (self.counts.sum(1) / self.counts.sum()).tolist()

    @torch.no_grad()
    def metrics(self, function):
        """On all clients' test samples."""
        likelihood = self.silos.likelihood
        terms = evaluate(likelihood, lambda x: function(x)[None], self.test)
        ece = calibrate(terms["confidence"], terms["correct"].bool()).error
        return {**likelihood.metrics(total(terms)), "ece": ece}

    def accuracy(self, function):
        """On the same."""
        return self.metrics(function)["accuracy"]

    def of(self, weights):
        """Accuracy of the network with these weights."""
        return self.accuracy(frozen(with_weights(self.silos.like, weights)))

    def states(self):
        """Weights of all clients."""
        return [dict(network.state_dict()) for network in self.networks.values()]

    def measured(self, what):
        """Anything but a fusion in function space."""
        match what:
            case "locals":
                each = [self.accuracy(frozen(n)) for n in self.networks.values()]
                return {"accuracy": statistics.fmean(each)}
            case "ensemble":
                _, inputs = drawn(self.silos, self.prior, (), self.seed)
                kind = self.silos.likelihood
                warmth = self.temperatures
                teacher, _ = teacher_of(self.networks, self.counts, kind, warmth, inputs, True)
                return {"accuracy": self.accuracy(teacher)}
            case "class-share logits":
                teacher = Teacher(list(self.networks.values()), class_shares(self.counts))
                return {"accuracy": self.accuracy(teacher)}
            case "mean of probabilities":
                return {"accuracy": self.accuracy(Teacher(list(self.networks.values())))}
        posteriors = self.posteriors if what in POSTERIORS else None
        begin = time.perf_counter()
        match what:
            case "fedlpa":
                config = Config.published(**self.given | {"method": {"name": what}})
                run = finished(self.folder.with_name(f"{self.folder.name}-{what}"), config)
                weights = run.model()
            case "average":
                weights = combine(self.states(), self.share)
            case _ if what in ALIGNED:
                method, _, repair = what.partition(", ")
                _, inputs = drawn(self.silos, self.prior, (), self.seed)
                merging = Merging(
                    self.states(), self.share, self.silos.like, self.silos.example(), None,
                    partial(inputs.batch, 0),
                )  # fmt: skip
                settings = AlignedSettings(repair=1024 if repair else None)
                weights = {"permute": permuted, "c2m3": c2m3}[method](merging, settings).weights
            case _:
                weights = POSTERIORS[what](posteriors)
        return {"accuracy": self.of(weights), "seconds": time.perf_counter() - begin}

    @cached_property
    def posteriors(self):
        """That clients send; one target is drawn for each sample."""
        settings = CurvatureSettings(draws=1)
        return [
            posterior(network, self.silos.likelihood, self.data.train(client), settings)
            for client, network in enumerate(self.networks.values())
        ]

    @cached_property
    def unlabelled(self):
        """A file of the training samples that neither clients nor judges have, without labels."""
        own, pool = self.data.partition, self.data.dataset
        taken = np.concatenate([own.train, own.test])
        path = self.folder / "unlabelled.npz"
        np.savez(path, x=pool.x[np.setdiff1d(np.arange(pool.official_train or 0), taken)])
        return path

    @cached_property
    def sums(self):
        """A file with the sums of all clients' rows, in their own units."""
        seen = self.silos.preprocessing
        mean, std = (
            torch.tensor(v, dtype=torch.float64) * seen.scale for v in (seen.mean, seen.std)
        )
        rows = [self.data.train(client).x for client in range(len(self.networks))]
        path = self.folder / "sums.json"
        write_sums(add_sums([sums_of((x * std + mean).numpy()) for x in rows]), path)
        return path

    def calibrated(self, network):
        """The ECE at the temperature of the sums of all clients' kept rows, if there are any."""
        function, kind = frozen(network), self.silos.likelihood
        sums = temperature.TemperatureSums.nothing()
        for rows in self.kept:
            sums += temperature.sums_of(kind, lambda x: function(x)[None], rows)
        if not sums.rows:
            return {}
        scaled = TemperatureScaled(network, sums.with_prior().temperature()).eval()
        return {"ece_by_sums": self.metrics(frozen(scaled))["ece"]}

    def fused(self, width, sums, settings, unlabelled):
        """A fusion in function space."""
        prior = str(self.unlabelled) if unlabelled else self.prior
        _, inputs = drawn(self.silos, prior, [self.sums] if sums else None, self.seed)
        fusion = fuse_functions(
            self.networks,
            self.silos.like,
            inputs,
            counts=self.counts,
            temperatures=self.temperatures,
            likelihood=self.silos.likelihood,
            widths=width,
            settings=settings,
        )
        cooled = TemperatureScaled(fusion.module, fusion.temperature).eval()
        found = self.metrics(frozen(cooled))
        return {
            "accuracy": found["accuracy"],
            "nll": found["nll"],
            "ece": found["ece"],
            **self.calibrated(fusion.module),
            "divergence": fusion.likeness.divergence,
            "agreement": fusion.likeness.agreement,
            "seconds": sum(fusion.seconds.values()),
            "parameters": fusion.parameters,
        }


def judged_by_others(data, seed):
    """Clients' data, with training samples that nobody has for their test samples."""
    own, pool = data.partition, data.dataset
    others = np.setdiff1d(np.arange(pool.official_train or 0), own.train)
    if len(others) < JUDGES:
        raise SystemExit(f"--validation: there are no {JUDGES:,} training samples beside these")
    others = np.random.default_rng(seed).choice(others, JUDGES, replace=False)
    return judged_by(data, np.sort(others), seed)


def judged_by(data, rows, seed):
    """Clients' data, with these rows of the pool as test samples, all of the first client."""
    offsets = np.full(len(data.partition.test_offsets), len(rows))
    offsets[0] = 0
    judges = replace(data.partition, test=rows, test_offsets=offsets)
    return FederatedData(data.dataset, judges, seed, data.preprocessing.statistics)


def write_breast_cancer(path):
    """The breast cancer table of scikit-learn, as a file."""
    content = load_breast_cancer(as_frame=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    content.data.assign(benign=content.target).to_csv(path, index=False)


def measure(name, seed, results, folder, settings, rows, validation=None, unlabelled=False):
    """All of one case and seed that is missing; rows with one of these words, if there are any."""
    case = CASES[name]
    if validation is not None:
        name, case = f"{name}-validation", case.validation(validation)
    fusion = settings.model_dump(mode="json", exclude_defaults=True)
    trained, taught = fingerprint(case.config), fingerprint([case.config, TEACHER])
    depends = [TEACHER, INPUTS, fusion, *(["unlabelled"] if unlabelled else [])]
    fused = fingerprint([case.config, *depends])
    keys = [
        {"case": name, "seed": seed, "what": what}
        | {"settings": fused if ", width" in what else taught if what == "ensemble" else trained}
        for what in case.rows()
        if settings.distillation is not None or not what.startswith("end to end")
        if not rows or any(word in what for word in rows)
    ]
    clients = None
    for key in results.missing(keys):
        clients = clients or Clients(name, seed, folder, case)
        way, _, kind = key["what"].partition(", ")
        if kind in case.fusions():
            chosen = settings
            if way == "least squares":
                chosen = settings.model_copy(update={"distillation": None})
            found = clients.fused(*case.fusions()[kind], chosen, unlabelled)
        else:
            found = clients.measured(key["what"])
        results.add({**key, **found})
        print(name, seed, key["what"], {k: round(v, 4) for k, v in found.items()}, flush=True)
    return keys


def table(rows):
    """Of one case: means and deviations over seeds."""
    ensemble = rows[rows["what"] == "ensemble"].set_index("seed")["accuracy"]
    lines = []
    order = CASES[rows["case"].iloc[0].removesuffix("-validation")].rows()
    for what, own in sorted(rows.groupby("what"), key=lambda group: order.index(group[0])):
        share = own["accuracy"] / own["seed"].map(ensemble)
        line = {"what": what, "seeds": str(len(own)), "accuracy": mean_and_std(own["accuracy"])}
        line["of the ensemble"] = f"{share.mean():.3f}"
        for column, digits in COLUMNS.items():
            values = own[column].dropna() if column in own else []
            line[column] = f"{statistics.fmean(values):,.{digits}f}" if len(values) else ""
        lines.append(line)
    case = CASES[rows["case"].iloc[0].removesuffix("-validation")]
    lines += [
        {"what": f"published: {k}", "accuracy": f"{v:.3f}"} for k, v in case.published.items()
    ]
    return markdown(pd.DataFrame(lines).fillna(""))


def main():
    """Measure what is missing, and print a table for each case."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="+", choices=list(CASES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=Path("fusion.jsonl"))
    parser.add_argument("--keep", type=Path, default=Path("fusion-runs"))
    parser.add_argument("--minutes", type=float, help="of training end to end; 0: none")
    parser.add_argument(
        "--set", nargs="*", default=[], help="as fedbayes fuse has it: function.augment=false"
    )
    parser.add_argument("--rows", nargs="*", help="words: measure what has one in its name")
    parser.add_argument(
        "--validation", type=int, metavar="SAMPLES", help="of training; judge by the others"
    )
    parser.add_argument(
        "--unlabelled",
        action="store_true",
        help="fuse on training samples that nobody has, in place of the prior (with --validation)",
    )
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    if given.unlabelled and given.validation is None:
        parser.error("--unlabelled takes training samples that are left over: give --validation")
    torch.set_num_threads(given.threads)
    chosen: dict[str, dict] = {}
    for entry in given.set:
        assign(chosen, entry)
    settings = function_settings(chosen.get("function", {}), given.minutes)
    results = Results(given.results)
    keys = {}
    with contextlib.suppress(KeyboardInterrupt):
        for name in given.cases:
            keys[name] = []
            for seed in range(given.seeds):
                folder = given.keep.absolute()
                keys[name] += measure(
                    name,
                    seed,
                    results,
                    folder,
                    settings,
                    given.rows,
                    given.validation,
                    given.unlabelled,
                )
    for name, wanted in keys.items():
        print(f"\n{name}\n\n{table(results.table(wanted))}")


if __name__ == "__main__":
    main()
