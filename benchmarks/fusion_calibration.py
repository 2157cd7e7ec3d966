"""How far the probabilities of a fused network can be trusted, as it is, with a temperature, and
with a posterior of its last layer or of all.

    python benchmarks/fusion_calibration.py --cases digits cancer --seeds 0 1 2 --epochs 10

Clients (five) train alone (method `local`, Dirichlet shares of the classes), their networks are
fused by class shares on drawn inputs (for the breast cancer table by the sums of all rows), and
each way is tried on the clients' test samples: accuracy, negative log-likelihood, expected
calibration error (seeds apart). Beside them stand the nats from the teacher on held-out draws, the
multiplications of a prediction, and the prior precisions of posteriors (seeds apart).

With `--temperatures` clients hold out a tenth of their training rows, and fit temperatures to them.
The teacher is then pooled (`Teacher.pooled`); the line before it is the teacher as it is learned.
`--plain` leaves out the posteriors, `--without-counts` the counts of classes in their files.
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
from fedbayes.fusion.frozen import frozen
from fedbayes.fusion.function import HeldOut, fuse_functions, teacher_of
from fedbayes.fusion.settings import DistillationSettings, FunctionSettings
from fedbayes.fusion.temperature import TemperatureScaled
from fedbayes.inputs import Inputs, build_prior, sums_of
from fedbayes.workflows.fuse.client_models import Seen, read_silos
from fedbayes.workflows.fuse.frontier import SizeTradeoff, multiplications
from fedbayes.workflows.fuse.posterior_files import sent_counts, sent_temperatures
from fedbayes.workflows.serve.model_files import ModelFiles

ALPHA = {"digits": 0.3, "cancer": 0.5, "mnist": 0.3}


def trained(case, seed, given, folder):
    """The clients' networks, their counts, temperatures, test samples, and sums of a table."""
    data = {"clients": given.clients, "partition": "dirichlet", "alpha": given.alpha or ALPHA[case]}
    if case == "mnist":
        data |= {"name": "mnist", "limit": 10_000}
    if case == "cancer":
        table = load_breast_cancer(as_frame=True).frame.rename(columns={"target": "label"})
        table.to_csv(folder / "cancer.csv", index=False)
        data |= {"path": str(folder / "cancer.csv")}
    config = Config.published(
        data=data,
        training={"epochs": given.epochs},
        method={"name": "local"},
        calibration="temperature" if given.temperatures else "none",
        rounds=1,
        seed=seed,
    )
    with Simulation(config, folder / "run") as simulation:
        for _ in simulation:
            pass
        own = simulation.data
        sums = sums_of(own.dataset.x) if case == "cancer" else None
        test = own.test_union(0, own.test_total)
    paths, files = sorted((folder / "run" / "clients").glob("*")), ModelFiles()
    silos = read_silos(paths, None, Seen(), files=files)
    return silos, sent_counts(paths, files), sent_temperatures(paths, files), test, sums


def one(case, seed, given):
    """Metrics and nats of each way, and the precision."""
    with tempfile.TemporaryDirectory() as folder:
        silos, counts, temperatures, test, sums = trained(case, seed, given, Path(folder))
    if given.without_counts:
        counts = None
    seen = silos.preprocessing
    unit = seen.scale if sums is not None else 1.0  # rows are in their own units
    prior = build_prior("auto", seen.shape, sums=sums)
    inputs = Inputs(prior, torch.tensor(seen.mean) * unit, torch.tensor(seen.std) * unit, seed)
    steps = 10**9 if given.minutes else 6000
    timed = DistillationSettings(steps=steps, minutes=given.minutes or None)
    settings = FunctionSettings(distillation=timed if given.minutes or given.plain else None)
    fusion = fuse_functions(
        silos.networks,
        silos.like,
        inputs,
        counts=counts,
        temperatures=temperatures,
        likelihood=silos.likelihood,
        settings=settings,
    )
    teacher, samples = teacher_of(silos.networks, counts, silos.likelihood, temperatures)
    draws, pooled = CachedInputs(inputs), teacher.pooled()
    held_out = HeldOut(pooled, draws)
    scale = SizeTradeoff(HeldOut(teacher, draws), test)
    cost = sum(multiplications(network, scale.example) for network in silos.networks.values())
    ways = {"ensemble": (teacher, 0.0, cost, "")}
    if given.temperatures:
        ways["ensemble, pooled"] = pooled, 0.0, cost, ""
    small = multiplications(fusion.module, scale.example)
    ways["as it is"] = fusion.module, fusion.likeness.divergence, small, ""
    if given.plain:
        cooled = TemperatureScaled(fusion.module, fusion.temperature).eval()
        ways["temperature"] = cooled, held_out.divergence(cooled), small, ""
        return measured(ways, scale)
    for of in ("last-layer", "kronecker"):
        one = calibrate(
            fusion.module,
            pooled,
            draws,
            settings.draws // CHUNK,
            round(sum(samples)),
            held_out.divergence,
            of,
        )
        ways.setdefault("temperature", (one.cooled, one.divergence_cooled, small, ""))
        many = multiplications(one.module, scale.example)
        ways[of] = one.module, one.divergence, many, f"{one.gaussian.precision:.1g}"
    return measured(ways, scale)


def measured(ways, scale):
    """Metrics of each way."""
    return {
        way: ([*scale.metrics(as_function(one)).values(), nats], cost, precision)
        for way, (one, nats, cost, precision) in ways.items()
    }


def as_function(one):
    """A network or a teacher, of inputs to outputs."""
    return frozen(one) if isinstance(one, torch.nn.Module) else one


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=["digits", "cancer"], choices=list(ALPHA))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--alpha", type=float, help="of the Dirichlet shares")
    parser.add_argument("--temperatures", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--without-counts", action="store_true")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=0.0, help="of training end to end")
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(
        "case", "predictions", "accuracy", "NLL", "ECE", "nats", "multiplications", "precision"
    )
    for case in given.cases:
        rows = [one(case, seed, given) for seed in given.seeds]
        for way in rows[0]:
            *metrics, nats = map(statistics.fmean, zip(*(row[way][0] for row in rows), strict=True))
            cost = f"{max(row[way][1] for row in rows):,}"
            precisions = " ".join(row[way][2] for row in rows)
            shown = [f"{value:.3f}" for value in metrics]
            shown[2] += f" ({' '.join(f'{row[way][0][2]:.3f}' for row in rows)})"
            table.add_row(case, way, *shown, f"{nats:.4f}", cost, precisions)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
