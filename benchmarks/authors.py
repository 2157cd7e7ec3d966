"""Programs of the authors of four methods next to ours: same rows, clients, network and budget.

    python benchmarks/authors.py --pfedbayes DIR --ivon-admm DIR --fedgvi DIR --fedlpa DIR

DIR is a checkout of the program that `SOURCES` names; leave out those that you do not have. Each
runs as published, in a process of its own, with the protocol in the docstring of its function
`..._theirs`. What cannot run here is replaced from outside: a graphics card, downloads and log
files. FEDBAYES_DATA must have MNIST.

A seed draws the division among clients and the start. Both sides train on the same rows, and each
starts from its own initialization. `ours` has our recommended settings where `ours, equal` has the
authors'. Scores go to the folder `--out`, a file for each program, variant and seed, and are not
computed again. p is that of a paired t-test over seeds against the authors' program.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import random
import sys
import tempfile
import types
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from torch import nn

from fedbayes import Config
from fedbayes.contracts import RoundContext
from fedbayes.contracts.returned import answered
from fedbayes.core.files import write_beside
from fedbayes.core.tensors import part
from fedbayes.data import DataSettings, FederatedData, Partition, load_dataset
from fedbayes.data.dataset import build_dataset
from fedbayes.runs.build import build_federation
from fedbayes.runs.personal import keeps_own

SOURCES = {
    "pfedbayes": "github.com/AllenBeau/pFedBayes",
    "ivon-admm": "github.com/team-approx-bayes/bayes-admm",
    "fedgvi": "github.com/Terje-M/FedGVI",
    "fedlpa": "github.com/lebronlambert/FedLPA_NeurIPS2024",
}


@dataclass
class Task:
    """What clients of a seed hold: rows of `x` and `y` by client."""

    seed: int
    x: torch.Tensor
    y: torch.Tensor
    train: list
    test: list


def mnist():
    """All images of MNIST [70000, 28, 28] from 0 to 1, first those for training; and labels."""
    data = load_dataset(DataSettings(name="mnist"))
    return torch.from_numpy(np.array(data.x[:, 0])) / 255, torch.from_numpy(np.array(data.y))


def shares(rows, clients):
    """The test rows that each of several clients is scored on."""
    return np.array_split(np.asarray(rows), clients)


class Absent(types.ModuleType):
    """A module that a program imports, and that this protocol does not use."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def absent(*names):
    """Import these as `Absent`."""
    for name in names:
        module = sys.modules[name] = Absent(name)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)


TORCHVISION = (
    "torchvision",
    *(
        f"torchvision.{kind}"
        for kind in (
            "transforms",
            "datasets",
            "datasets.vision",
            "datasets.utils",
            "utils",
            "models",
        )
    ),
)


def torchvision(rows):
    """Images of MNIST where programs expect those of torchvision: some training rows, all tests."""
    pixels, labels = mnist()  # first: readers of data sets look for torchvision
    absent(*TORCHVISION)
    pixels, tests = (pixels * 255).round().byte(), np.arange(60000, 70000)

    class Images:
        def __init__(self, root, train=True, *_, **__):
            chosen = rows if train else tests
            self.data, self.targets = pixels[chosen].clone(), labels[chosen].clone()

    class Chain(list):
        def __call__(self, image):
            for step in self:
                image = step(image)
            return image

    class ToTensor:
        def __call__(self, image):
            return torch.from_numpy(np.array(image))[None] / 255

    sys.modules["torchvision.datasets"].MNIST = Images
    sys.modules["torchvision.transforms"].Compose = Chain
    sys.modules["torchvision.transforms"].ToTensor = ToTensor


def some_rows(seed):
    """The 6,000 training images of a seed."""
    return np.random.default_rng([seed, 2]).permutation(60000)[:6000]


def run(folder, script, options):
    """Run a script of a program; the names that it leaves."""
    os.chdir(folder)
    sys.argv = [script, *(f"--{name}={value}" for name, value in options.items())]
    names = {"__name__": "__main__", "__file__": script}
    exec(compile(Path(script).read_text(), script, "exec"), names)
    return names


# pFedBayes


def pfedbayes_split(folder, seed):
    """Five digits for each of ten clients: 1,000 rows to train with and 4,000 to test on."""
    x, y = mnist()
    rng = np.random.default_rng([seed, 1])
    parts = [rng.permutation(np.flatnonzero(y == label)) for label in range(10)]
    train, test = [], []
    for client in range(10):
        own = [parts[(5 * client + j) % 10][client // 2 * 1000 :][:1000] for j in range(5)]
        own = rng.permutation(np.concatenate(own))
        train.append(own[:1000])
        test.append(own[1000:])
    return Task(seed, (x - 0.5) / 0.5, y, train, test)


def pfedbayes_theirs(folder, task, noise=None):
    """The README's settings, but 10 rounds of 800: ζ = 10, ρ = −2.5, Adam .001, batches of 100."""
    sys.path.insert(0, str(folder))
    absent("h5py")  # of log files
    from FLAlgorithms.servers import serverpFedbayes as program
    from FLAlgorithms.trainmodel.models import pBNN

    names = [f"{client}" for client in range(10)]
    given = [{}, {}]
    for held, rows in zip(given, (task.train, task.test), strict=True):
        for name, own in zip(names, rows, strict=True):
            held[name] = {"x": task.x[own], "y": task.y[own]}
    program.read_data = lambda dataset: (names, [], *given)
    torch.manual_seed(task.seed)
    if noise is not None:
        pBNN.sample_epsilons = lambda self, shapes: [noise * torch.randn(s) for s in shapes]
    net = pBNN(784, 100, 10, weight_scale=0.1, rho_offset=-2.5, zeta=10)
    server = program.pFedBayes(
        "Mnist", "pFedBayes", (net, "pbnn"), 100, 0.001, 1.0, 15, ROUNDS["pfedbayes"], 20, "SGD",
        10, 0, torch.device("cpu"), 0.001,
    )  # fmt: skip
    server.evaluate_bayes = lambda: None
    server.save_results = server.save_model = lambda name: None
    server.train()
    server.send_parameters()
    own, shared = [], []
    for user, rows in zip(server.users, task.test, strict=True):
        for found, net in ((own, user.personal_model), (shared, user.model)):
            with torch.no_grad():
                draw = net.transform_gaussian_samples(
                    net.mus, net.rhos, net.sample_epsilons(net.layer_param_shapes)
                )
                found.append(net.net(task.x[rows].flatten(1), draw).log_softmax(1))
    y = task.y[np.concatenate(task.test)]
    return scored("global", torch.cat(shared), y) | scored("local", torch.cat(own), y)


# Bayesian ADMM


def bayes_admm(folder, seed):
    """Their modules, with MNIST from here, and the generators at the start of a seed."""
    x, y = mnist()
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
        absent(*TORCHVISION)
    import data_generators

    x, y = x.flatten(1).numpy(), y.numpy()
    parts = [(x[a:b], y[a:b]) for a, b in ((0, 50000), (50000, 60000), (60000, 70000))]
    data_generators.gzip = types.SimpleNamespace(open=lambda *_: io.BytesIO())
    data_generators.pickle = types.SimpleNamespace(load=lambda *_, **__: parts)
    np.random.seed(seed)  # noqa: NPY002 - theirs
    torch.manual_seed(seed)
    return data_generators


def bayes_admm_split(folder, seed, clients=10):
    """Their division for MNIST: 600 rows of two digits for each client."""
    program = bayes_admm(folder, seed)
    found = program.FederatedHeterogenousMNISTDataGenerator(num_clients=clients, seed=seed)
    train = [found.client_indices_list[k] for k in range(clients)]
    return Task(seed, *mnist(), train, shares(np.arange(60000, 70000), clients))


def bayes_admm_theirs(folder, task, method="fedivon", rounds=20, fresh=False, rested=False):
    """Their settings for MNIST, but 10 clients of 100 and 20 rounds of 100, unless `--whole`."""
    bayes_admm(folder, task.seed)
    import train
    import yaml
    from local_client_worker import worker

    given = yaml.safe_load((folder / f"configs/mnist_heterog/{method}.yaml").read_text())
    given |= {"use_cuda": False, "num_clients": len(task.train), "num_comm_rounds": rounds}
    options = train.parser.parse_args([])
    vars(options).update(given)
    found, test = [], worker.test
    if fresh:  # they give each client the same random numbers in each round
        seeds = itertools.count(1000 * task.seed)
        worker.seed = property(lambda _: next(seeds), lambda *_: None)
    if rested:  # they go on with the momentum of the round before, at other weights
        go_on = worker.train

        def start(self, *given, **others):
            self.optimiser.current_step = 0
            for group in self.optimiser.param_groups:
                group["momentum"] = torch.zeros_like(group["momentum"])
            go_on(self, *given, **others)

        worker.train = start

    def at_the_mean(self, loader=None):
        if loader is None:  # of a client alone
            return np.nan, np.nan
        found.append(test(self, loader))
        print(f"round {len(found)}:", *found[-1], file=sys.stderr)
        return found[-1]

    worker.test = at_the_mean
    worker.test_bayes = lambda *_: (np.nan, np.nan)  # a posterior that the server has not
    train.run_experiment(options, task.seed)
    accuracy, nll = found[-1]
    return {"global accuracy": accuracy / 100, "global NLL": float(nll)}


def sigmoids(outputs):
    """Their network."""
    layers = [nn.Linear(784, 200), nn.Sigmoid(), nn.Linear(200, 100), nn.Sigmoid()]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(100, outputs))


# FedGVI


def fedgvi(folder):
    """Their logistic regressions, as a class."""
    if str(folder / "code") not in sys.path:
        sys.path.insert(0, str(folder / "code"))
        absent(*TORCHVISION, "torchaudio")
    from fedgvi_experiments.logistic_regression.LogRegExp import LogReg

    torch.set_default_dtype(torch.float32)  # their import sets float64
    return LogReg()


CONTAMINATED = {"contaminate": True, "type": "adversarial1", "epsilon": 0.05}


def fedgvi_split(folder, seed):
    """Their second synthetic data: 200 rows, and 11 of a class where there is the other one."""
    program = fedgvi(folder)
    given, clean = program.data_init("synthetic_4", CONTAMINATED, augment=True, test_split=0.0)
    rows = {"x": torch.arange(len(given["y"])), "y": given["y"]}
    train = [own["x"].numpy() for own in program.split_client_train_sets(rows, 5, False, seed)]
    x, y = (torch.cat([given[name], clean[name]]) for name in "xy")
    tests = shares(np.arange(len(rows["x"]), len(x)), 5)
    return Task(seed, x.float(), y.long(), train, tests)


def fedgvi_theirs(folder, task, loss, divergence="KLD"):
    """Their notebook, but 8 rounds of 20 with Adam at .02 for .01; 500 steps with all rows."""
    program = fedgvi(folder)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(task.seed)
    n = sum(map(len, task.train))  # their data depend on the type of numbers: take the same ones
    given, clean = (
        {"x": task.x[rows].double(), "y": task.y[rows].double()}
        for rows in (slice(n), slice(n, None))
    )
    program.data_init = lambda *_: (given, clean)
    found = program.run(
        5, "synthetic_4", True, 0.0, CONTAMINATED, server_iterations=ROUNDS["fedgvi"],
        optim_epochs=500, lr=0.02, monte_carlo_samples=100, client_loss=loss,
        client_loss_param=0.7, client_div=divergence, client_div_param=1.5, seed=task.seed,
    )["q"]  # fmt: skip
    torch.set_default_dtype(torch.float32)
    mean, variance = (found[name].detach().float() for name in ("loc", "var"))
    return posterior(task, mean, variance.sqrt())


def posterior(task, mean, std):
    """Means and standard deviations of the weights of a logistic regression, and its scores."""
    rows = np.concatenate(task.test)
    x = task.x[rows]
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    logits = (x @ mean)[:, None] + (x.square() @ std.square()).sqrt()[:, None] * torch.tensor(nodes)
    p = logits.sigmoid().double() @ torch.tensor(weights / weights.sum())
    logs = torch.stack([1 - p, p], dim=1).clamp_min(1e-12).log()
    found = {f"mean {k}": float(m) for k, m in enumerate(mean)}
    found |= {f"SD {k}": float(s) for k, s in enumerate(std)}
    return scored("global", logs, task.y[rows]) | found


class Logistic(nn.Module):
    """One logit of class 1."""

    def __init__(self, shape):
        super().__init__()
        self.weight = nn.Parameter(0.01 * torch.randn(*shape))

    def forward(self, x):
        return torch.stack([torch.zeros(len(x)).to(x), x @ self.weight], dim=1)


def weights(task, model):
    """The posterior of our `Logistic`."""
    return posterior(task, *(part(model, name)["weight"] for name in ("mean", "std")))


# FedLPA


def fedlpa(folder, seed):
    """Their helpers, with MNIST from here, and the generators at the start of a seed."""
    torchvision(some_rows(seed))
    sys.path.insert(0, str(folder))
    import utils
    from torchvision.transforms import ToTensor

    # An `if` for an `elif` gives MNIST the loader of another data set.
    plain = utils.MNIST_truncated
    utils.Generated = lambda *_, transform, **given: plain(*_, transform=ToTensor(), **given)
    np.random.seed(seed)  # noqa: NPY002 - theirs
    torch.manual_seed(seed)
    random.seed(seed)
    return utils


LABELS = "noniid-#label2"


def fedlpa_split(folder, seed):
    """Their division among ten clients: two digits each, some 600 rows."""
    program, rows = fedlpa(folder, seed), some_rows(seed)
    found = program.partition_data("mnist", "", "", LABELS, 10)[4]
    train = [rows[found[client]] for client in range(10)]
    return Task(seed, *mnist(), train, shares(np.arange(60000, 70000), 10))


def fedlpa_theirs(folder, task):
    """Their scripts' settings for 20 passes, of which they have 10 to 200."""
    with tempfile.TemporaryDirectory() as out:
        options = {
            "model": "simple-cnn", "dataset": "mnist", "alg": "our", "lr": 0.01, "batch-size": 64,
            "epochs": 20, "n_parties": 10, "rho": 0.9, "comm_round": 1, "partition": LABELS,
            "device": "cpu", "datadir": out, "logdir": out, "modeldir": out, "noise": 0,
            "init_seed": task.seed, "coor": 0.999,
        }  # fmt: skip
        found = run(folder, "experiments_our.py", options)
    return {"global accuracy": found["best_acc"]}


class Cnn(nn.Sequential):
    """Their network, of 44,000 weights; for CIFAR-10 of 62,000."""

    def __init__(self, outputs, channels=1, positions=16):
        super().__init__(
            nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(16 * positions, 120), nn.ReLU(),
            nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, outputs),
        )  # fmt: skip


# Ours


def scored(who, logs, y):
    """Accuracy and NLL of log-probabilities."""
    nll = -logs.gather(1, y[:, None]).mean()
    return {
        f"{who} accuracy": float((logs.argmax(1) == y).double().mean()),
        f"{who} NLL": float(nll),
    }


def ours(settings, folder, task, means=False, scores=None):
    """Train a method on the clients of a task; scores of its global and its clients' own models.

    `means`: predict at the means of weights, as the authors do. `scores`: instead of these scores,
    a function of the task and the global model.
    """
    data = {"name": "mnist", "clients": len(task.train)}
    config = Config.create(**settings, data=data, seed=task.seed, calibration="none")
    x = task.x[:, None].numpy() if task.x.ndim == 3 else task.x.numpy()
    plain = np.zeros(x.shape[1], np.float32), np.ones(x.shape[1], np.float32)
    names = tuple(map(str, range(int(task.y.max()) + 1)))
    dataset = build_dataset("mnist", x, task.y.numpy(), names, statistics=plain)
    rows = {}
    for kind, held in (("train", task.train), ("test", task.test)):
        rows[kind] = np.concatenate([np.sort(own) for own in held])
        rows[f"{kind}_offsets"] = np.cumsum([0, *map(len, held)])
    clients = tuple(f"client{k}" for k in range(len(task.train)))
    data = FederatedData(dataset, Partition(**rows, names=clients), task.seed, plain)
    config, runtime = build_federation(config, data, choosing=True)
    method, run = runtime.method, runtime.run
    server = method.init(run)
    states = [method.join(RoundContext(run, 1, k)) for k in range(data.clients)]
    samples = [data.train(k) for k in range(data.clients)]

    def predict(model, inputs):
        with torch.no_grad():
            if means:  # as the authors do
                return run.network(part(model, "mean"), inputs).log_softmax(1)
            draws = method.draws(model, run)
            return torch.cat(
                [run.likelihood.log_probabilities(draws(b)) for b in inputs.split(1000)]
            )

    tests = [data.test(k) for k in range(data.clients)]
    y = torch.cat([rows.y for rows in tests])

    def scores_of(models):
        logs = [predict(model, rows.x) for model, rows in zip(models, tests, strict=True)]
        return torch.cat(logs), y

    for number in range(1, run.rounds + 1):
        reports = method.reports.reduction()
        for k, own in enumerate(samples):
            at = RoundContext(run, number, k)
            found = method.local(method.message(server, at), states[k], own, at)
            report, states[k], _ = answered(method, found)
            reports.add(k, report)
        server, _ = method.update(server, reports, RoundContext(run, number))
        if means:
            found = scored("global", *scores_of([method.model(server, run)] * data.clients))
            print(f"round {number}:", *found.values(), file=sys.stderr)

    shared = method.model(server, run)
    if scores is not None:
        return scores(task, shared)
    found = scored("global", *scores_of([shared] * data.clients))
    if keeps_own(method):
        message = method.message(server, RoundContext(run, run.rounds))
        own = [method.personal_model(message, None, state, run) for state in states]
        found |= scored("local", *scores_of(own))
    return found


ROUNDS = {"pfedbayes": 10, "fedgvi": 8}
SPLIT = {
    "pfedbayes": pfedbayes_split,
    "ivon-admm": bayes_admm_split,
    "ivon-admm, whole": partial(bayes_admm_split, clients=100),
    **dict.fromkeys(("fedgvi", "fedgvi, log"), fedgvi_split),
    "fedlpa": fedlpa_split,
}
PFEDBAYES = {
    "rounds": ROUNDS["pfedbayes"],
    "method": {"name": "pfedbayes"},
    "model": {"hidden": [100]},
    "training": {"optimizer": "adam", "lr": 0.001, "steps": 100, "batch_size": 100},
}
ADMM = {
    "rounds": 20,
    "model": {"name": "authors:sigmoids"},
    "training": {"epochs": 10, "batch_size": 64},
}
EQUAL = {
    "name": "ivon-admm", "rho": 5.0, "dual_step": 0.1, "kl_weight": 0.01, "prior_std": 10.0,
    "damping": False, "rate": 2e-4, "start_std": 60**-0.5,
}  # fmt: skip
"""Of h0 = 0.005: a precision of 0.005 · 600 rows / (0.01 ρ)."""


def admm(training, **method):
    return ADMM | {"training": ADMM["training"] | training, "method": method}


COSINE = {"lr": 0.02, "schedule": "cosine"}


def gvi(**method):
    return {
        "rounds": ROUNDS["fedgvi"],
        "model": {"name": "authors:Logistic"},
        "training": {"optimizer": "adam", "lr": 0.02, "steps": 500, "batch_size": 1000},
        "method": {
            "name": "fedgvi",
            "samples": 4,
            "kl_weight": 1.0,
            "damping": 1.0,
            "prior_std": 1.0,
            "start_std": 1.0,
        }
        | method,
    }


BETA = {"data_loss": "beta", "beta": 1.7, "divergence": "renyi", "alpha": 1.5, "kl_weight": 1 / 1.7}
"""Their loss is 1.7 times ours."""
FEDLPA = {
    "rounds": 1,
    "method": {"name": "fedlpa"},
    "model": {"name": "authors:Cnn"},
    "training": {"epochs": 20, "batch_size": 64, "lr": 0.01, "momentum": 0.9},
}
VARIANTS = {
    "pfedbayes": {
        "theirs": pfedbayes_theirs,
        "theirs, full noise": partial(pfedbayes_theirs, noise=1.0),
        "ours": partial(ours, PFEDBAYES),
        "ours, equal": partial(
            ours, PFEDBAYES | {"method": {"name": "pfedbayes", "zeta": 5.0, "start_std": 0.0789}}
        ),
    },
    "ivon-admm": {
        "theirs": bayes_admm_theirs,
        "ours, equal": partial(ours, admm(COSINE, **EQUAL), means=True),
        "ours, whole step": partial(ours, admm(COSINE, **EQUAL | {"dual_step": 1.0}), means=True),
        "ours": partial(ours, admm({}, name="ivon-admm")),
        "theirs, fresh noise": partial(bayes_admm_theirs, fresh=True),
        "theirs, rested": partial(bayes_admm_theirs, rested=True),
        "theirs, fedavg": partial(bayes_admm_theirs, method="fedavg"),
        "ours, fedavg": partial(ours, admm({"optimizer": "adam", "lr": 0.001}, name="fedavg")),
    },
    "ivon-admm, whole": {
        "theirs": partial(bayes_admm_theirs, rounds=100),
        "ours, equal": partial(ours, admm(COSINE, **EQUAL) | {"rounds": 100}, means=True),
        "theirs, fedavg": partial(bayes_admm_theirs, method="fedavg", rounds=100),
    },
    "fedgvi": {
        "theirs": partial(fedgvi_theirs, loss="density_power", divergence="AR"),
        "ours": partial(ours, gvi(**BETA), scores=weights),
    },
    "fedgvi, log": {
        "theirs": partial(fedgvi_theirs, loss="nll"),
        "ours": partial(ours, gvi(data_loss="log"), scores=weights),
    },
    "fedlpa": {
        "theirs": fedlpa_theirs,
        "ours": partial(ours, FEDLPA),
        "ours, equal": partial(
            ours, FEDLPA | {"method": {"name": "fedlpa", "damping": 0.001**0.5, "prior_std": 0.5}}
        ),
        "ours, undamped": partial(
            ours, FEDLPA | {"method": {"name": "fedlpa", "damping": 0.0, "prior_std": 0.5}}
        ),
    },
}


def measured(name, variant, folder, seed, file):
    """Write the scores of a variant."""
    torch.set_num_threads(1)
    with Path(os.devnull).open("w") as quiet, contextlib.redirect_stdout(quiet):
        task = SPLIT[name](folder, seed)
        found = VARIANTS[name][variant](folder, task)
    write_beside(file, json.dumps(found, indent=1).encode())


def report(name, every):
    """The table of a program: mean and SD over seeds, and the paired test against `theirs`."""
    metrics = list(next(iter(every.values()))[0])
    lines = [f"\n## {name}\n", "| | seeds | " + " | ".join(metrics) + " |"]
    lines.append("|---|--:|" + "--:|" * len(metrics))
    for variant, scores in every.items():
        cells = []
        for metric in metrics:
            values = [one.get(metric, np.nan) for one in scores]
            cells.append(f"{np.mean(values):.4f} ± {np.std(values, ddof=len(values) > 1):.4f}")
            others = [one.get(metric, np.nan) for one in every.get("theirs", [])]
            if variant != "theirs" and len(others) == len(values) > 1:
                cells[-1] += f" (p = {stats.ttest_rel(values, others).pvalue:.2g})"
        lines.append(f"| {variant} | {len(scores)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, source in SOURCES.items():
        parser.add_argument(f"--{name}", type=Path, help=f"checkout of {source}")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", help="default: all")
    parser.add_argument("--out", type=Path, default=Path("authors"))
    parser.add_argument(
        "--whole", action="store_true", help="only whole protocols, which take hours: ivon-admm"
    )
    given = parser.parse_args(argv)
    folders = {name: vars(given)[name.replace("-", "_")] for name in SOURCES}
    if not any(folders.values()):
        parser.error("give the folder of at least one program, such as --fedlpa FedLPA")
    for name, folder in folders.items():
        if folder and not folder.is_dir():
            parser.error(f"--{name} {folder} is no folder; clone {SOURCES[name]} there")
    given.out.mkdir(parents=True, exist_ok=True)
    for name in SPLIT:
        folder, every = folders[name.partition(",")[0]], {}
        if folder is None or name.endswith("whole") != given.whole:
            continue
        for seed in given.seeds:
            for variant in given.variants or VARIANTS[name]:
                file = given.out / f"{name}-{variant}-{seed}.json".replace(", ", "-")
                if not file.exists():
                    work = name, variant, folder.resolve(), seed, file
                    process = get_context("spawn").Process(target=measured, args=work)
                    process.start()
                    process.join()
                    if process.exitcode:
                        sys.exit(f"{name}, {variant}, seed {seed}: failed")
                every.setdefault(variant, []).append(json.loads(file.read_text()))
        print(report(name, every))


if __name__ == "__main__":
    main()
