"""Networks that were trained apart, fused in function space: accuracy on test samples.

    python benchmarks/fusion.py mnist-mlp mnist-lenet cifar10-lenet --seeds 3

Each case trains its clients alone (method `local`, separate starts unless the case says so), and
fuses their networks by class shares, without data. Printed are the mean of the clients' own
networks, their ensemble by class shares, their average, and the fused network after least squares
and after training end to end, with the seconds of both. Every setting is the default of `fedbayes
fuse`. Needs MNIST, CIFAR-10 (FEDBAYES_DATA, or the hub).
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from fedbayes import Config, Simulation
from fedbayes.fusion.function import FunctionSettings, fuse_functions, teacher_of
from fedbayes.fusion.settings import DistillationSettings
from fedbayes.fusion.teacher import frozen
from fedbayes.inputs import Inputs, build_prior
from fedbayes.likelihoods import evaluate, total
from fedbayes.tools.frontier import average
from fedbayes.tools.silos import Seen, read_silos

TRAINING = {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 5e-4, "batch_size": 32}
CASES = {
    "mnist-mlp": {
        "data": {"name": "mnist", "clients": 10, "partition": "dirichlet", "alpha": 0.4},
        "model": {"name": "mlp", "hidden": [100, 100]},
        "training": {**TRAINING, "lr": 0.02, "epochs": 10},
    },
    "mnist-lenet": {
        "data": {"name": "mnist", "clients": 10, "partition": "dirichlet", "alpha": 0.5},
        "model": {"name": "lenet5"},
        "training": {**TRAINING, "lr": 0.02, "epochs": 4},
    },
    "cifar10-lenet": {
        "data": {"name": "cifar10", "clients": 10, "partition": "dirichlet", "alpha": 0.5},
        "model": {"name": "lenet5"},
        "training": {**TRAINING, "lr": 0.02, "epochs": 10},
    },
}


def trained(case, seed, folder):
    """Train the clients alone; the run, and the class counts of each."""
    config = Config.create(
        **CASES[case],
        seed=seed,
        method={"name": "local"},
        rounds=1,
        threads=torch.get_num_threads(),
    )
    with Simulation(config, folder) as simulation:
        for _ in simulation:
            pass
        return simulation.data.counts(), simulation.data.test_union(0, simulation.data.test_total)


def one(case, seed, minutes, width):
    """The figures of one seed."""
    with tempfile.TemporaryDirectory() as folder:
        counts, test = trained(case, seed, Path(folder) / "run")
        silos = read_silos(sorted((Path(folder) / "run" / "clients").glob("*")), None, Seen())
    seen = silos.preprocessing
    prior = build_prior("auto", seen.shape)
    inputs = Inputs(prior, torch.tensor(seen.mean), torch.tensor(seen.std), seed)
    settings = FunctionSettings()
    if minutes is not None:
        chosen = DistillationSettings(steps=10**9, minutes=minutes) if minutes else None
        settings = settings.model_copy(update={"distillation": chosen})
    solved = []

    def accuracy(function):
        terms = evaluate(silos.likelihood, lambda x: function(x)[None], test)
        return silos.likelihood.metrics(total(terms))["accuracy"]

    teacher, _ = teacher_of(silos.networks, counts, silos.likelihood)
    with torch.no_grad():
        found = {
            "locals": statistics.fmean(accuracy(frozen(n)) for n in silos.networks.values()),
            "ensemble": accuracy(teacher),
            "average": accuracy(frozen(average(list(silos.networks.values())))),
        }
    common = {"counts": counts, "likelihood": silos.likelihood, "widths": width}
    alone = settings.model_copy(update={"distillation": None})
    fusions = [fuse_functions(silos.networks, silos.like, inputs, settings=alone, **common)]
    if settings.distillation is not None:
        fusions.append(
            fuse_functions(silos.networks, silos.like, inputs, settings=settings, **common)
        )
    with torch.no_grad():
        solved = [accuracy(frozen(fusion.module)) for fusion in fusions]
    found["least squares"], found["seconds"] = solved[0], fusions[0].seconds["least squares"]
    if len(fusions) > 1:
        found["end to end"] = solved[1]
        found["seconds in all"] = sum(fusions[1].seconds.values())
        found["of the ensemble"] = solved[1] / found["ensemble"]
    return found


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES), choices=[*CASES, []])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, help="of training end to end; 0: none")
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    table = None
    for case in given.cases:
        rows = [one(case, seed, given.minutes, given.width) for seed in range(given.seeds)]
        if table is None:
            table = Table("case", *rows[0], pad_edge=False)
        values = {name: [row[name] for row in rows] for name in rows[0]}
        table.add_row(
            case,
            *(
                f"{statistics.fmean(v):.3f}"
                + (f" ± {statistics.stdev(v):.3f}" if len(v) > 1 else "")
                for v in values.values()
            ),
        )
        print(
            case, {name: [round(v, 4) for v in each] for name, each in values.items()}, flush=True
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
