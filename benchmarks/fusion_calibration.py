"""How far the probabilities of a fused network can be trusted, as it is, with a temperature, and
with a posterior of its last layer or of all.

    python benchmarks/fusion_calibration.py --cases digits cancer --seeds 3 --epochs 10

Five clients train alone (method `local`, Dirichlet shares of the classes), their networks are fused
by class shares on drawn inputs (for the breast cancer table by the sums of all rows), and each way
is tried on the clients' test samples: accuracy, negative log-likelihood, expected calibration
error. Beside them stand the nats from the teacher on held-out draws, the multiplications of a
prediction, and the prior precisions of posteriors (seeds apart).
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_breast_cancer

from fedbayes import Config, Simulation
from fedbayes.fusion.calibration import calibrate
from fedbayes.fusion.draws import CHUNK, CachedInputs
from fedbayes.fusion.function import HeldOut, fuse_functions, teacher_of
from fedbayes.fusion.settings import DistillationSettings, FunctionSettings
from fedbayes.fusion.teacher import frozen
from fedbayes.inputs import Inputs, build_prior, sums_of
from fedbayes.workflows.fuse.client_models import Seen, read_silos
from fedbayes.workflows.fuse.frontier import SizeTradeoff, multiplications

ALPHA = {"digits": 0.3, "cancer": 0.5}


def trained(case, seed, epochs, folder):
    """The clients' networks, their counts, the test samples, and sums of the rows of a table."""
    data = {"clients": 5, "partition": "dirichlet", "alpha": ALPHA[case]}
    if case == "cancer":
        table = load_breast_cancer(as_frame=True).frame.rename(columns={"target": "label"})
        table.to_csv(folder / "cancer.csv", index=False)
        data |= {"path": str(folder / "cancer.csv")}
    training = {"epochs": epochs}
    method = {"name": "local"}
    config = Config.published(data=data, training=training, method=method, rounds=1, seed=seed)
    with Simulation(config, folder / "run") as simulation:
        for _ in simulation:
            pass
        own = simulation.data
        sums = sums_of(own.dataset.x) if case == "cancer" else None
        counts, test = own.counts(), own.test_union(0, own.test_total)
    silos = read_silos(sorted((folder / "run" / "clients").glob("*")), None, Seen())
    return silos, counts, test, sums


def one(case, seed, epochs, minutes):
    """Metrics and nats of each way, and the precision."""
    with tempfile.TemporaryDirectory() as folder:
        silos, counts, test, sums = trained(case, seed, epochs, Path(folder))
    seen = silos.preprocessing
    unit = seen.scale if sums is not None else 1.0  # rows are in their own units
    prior = build_prior("auto", seen.shape, sums=sums)
    inputs = Inputs(prior, torch.tensor(seen.mean) * unit, torch.tensor(seen.std) * unit, seed)
    timed = DistillationSettings(steps=10**9, minutes=minutes) if minutes else None
    settings = FunctionSettings(distillation=timed)
    fusion = fuse_functions(
        silos.networks,
        silos.like,
        inputs,
        counts=counts,
        likelihood=silos.likelihood,
        settings=settings,
    )
    teacher, samples = teacher_of(silos.networks, counts, silos.likelihood)
    draws = CachedInputs(inputs)
    held_out = HeldOut(teacher, draws)
    found = {
        of: calibrate(
            fusion.module,
            teacher,
            draws,
            settings.draws // CHUNK,
            round(sum(samples)),
            lambda network: held_out.likeness(held_out.outputs(network)).divergence,
            of,
        )
        for of in ("last-layer", "kronecker")
    }
    scale, last = SizeTradeoff(teacher, draws, test), found["last-layer"]
    ways = {
        "as it is": (fusion.module, fusion.likeness.divergence, ""),
        "temperature": (last.cooled, last.divergence_cooled, ""),
    }
    for of, one in found.items():
        ways[of] = one.module, one.divergence, f"{one.gaussian.precision:.1g}"
    measured = {
        way: (
            [*scale.metrics(frozen(network)).values(), nats],
            multiplications(network, scale.example),
            precision,
        )
        for way, (network, nats, precision) in ways.items()
    }
    cost = sum(multiplications(network, scale.example) for network in silos.networks.values())
    return {"ensemble": ([*scale.metrics(teacher).values(), 0.0], cost, ""), **measured}


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=list(ALPHA), choices=list(ALPHA))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=0.0, help="of training end to end")
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(
        "case", "predictions", "accuracy", "NLL", "ECE", "nats", "multiplications", "precision"
    )
    for case in given.cases:
        rows = [one(case, seed, given.epochs, given.minutes) for seed in range(given.seeds)]
        for way in rows[0]:
            *metrics, nats = map(statistics.fmean, zip(*(row[way][0] for row in rows), strict=True))
            cost = f"{max(row[way][1] for row in rows):,}"
            precisions = " ".join(row[way][2] for row in rows)
            shown = [f"{value:.3f}" for value in metrics]
            table.add_row(case, way, *shown, f"{nats:.4f}", cost, precisions)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
