"""Real tables in several hands: each client alone, in federation, and all data in one place.

    python benchmarks/real_jobs.py                       # the table of docs/benchmarks/index.md
    python benchmarks/real_jobs.py --data breast digits --seeds 3

Breast cancer (scikit-learn) in 5 hospitals and digits at 10 clients are divided by Dirichlet
shares of the classes, diabetes (scikit-learn) in 4 sites and COVID-19 blood counts in 5 hospitals
at random, vehicles by the 23 sensors, of 100 training samples each, and once more at 10 clients by
shares of the classes, of 300 each. A quarter of every client's rows is for testing. All train one
hidden layer of 16 by Adam for 20 passes over the data (digits once more for 100): Local and pooled
in one go, FedAvg and VIRTUAL (one network for all, KL terms of weight 0.01) in as many rounds of
one. Settings were chosen on
seed 100, which is in no table. A seed is another division of the data and another start; all
methods see the same ones.

What is told is AUROC (of digits the mean over classes), or RMSE of diabetes, on each client's own
test rows: Local by its own model, FedAvg, VIRTUAL and pooled by the one model. A client whose test
rows are of one class alone has no AUROC; how many is told. Measurements go to `--out` and are not
made again. Vehicles and blood counts need FEDBAYES_DATA.
"""

import argparse
import math
import warnings
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

import fedbayes
from fedbayes.errors import DataError
from fedbayes_papers.experiment import Results, fingerprint, mean_and_std

HERE = Path(__file__).parent / ".real_jobs"
METHODS = ("Local", "FedAvg", "VIRTUAL", "pooled")
DATA = {
    "breast": ("auroc", "breast cancer, 5 hospitals"),
    "diabetes": ("rmse", "diabetes, 4 sites"),
    "digits": ("auroc", "digits, 10 clients"),
    "digits-long": ("auroc", "digits, 10 clients, 100 passes"),
    "vehicle": ("auroc", "vehicles, 23 sensors"),
    "vehicle-classes": ("auroc", "vehicles, 10 clients"),
    "einstein": ("auroc", "COVID-19 blood counts, 5 hospitals"),
}
DIGITS = {"auroc": 3, "rmse": 1}


def data_settings(name, out):
    match name:
        case "breast":
            return {
                "path": str(out / "breast_cancer.csv"),
                "label": ["diagnosis"],
                "clients": 5,
                "partition": "dirichlet",
                "alpha": 1.0,
                "min_samples": 20,
            }
        case "diabetes":
            return {"name": name, "clients": 4}
        case "digits" | "digits-long":
            return {"name": "digits", "clients": 10, "partition": "dirichlet", "min_samples": 20}
        case "vehicle":
            return {"name": name, "partition": "natural", "samples_per_client": 100}
        case "vehicle-classes":
            return {"name": "vehicle", "samples_per_client": 300}
    return {"name": name, "clients": 5, "partition": "iid"}


def write_breast_cancer(out):
    """The table of scikit-learn as a hospital would have it."""
    found = load_breast_cancer(as_frame=True)
    table = found.data.assign(diagnosis=found.target.map({0: "malignant", 1: "benign"}))
    table.to_csv(out / "breast_cancer.csv", index=False)


def settings(name, method, seed, out):
    """Keys of the config of one run."""
    passes = 100 if name == "digits-long" else 20
    rounds, epochs = (1, passes) if method in ("Local", "pooled") else (passes, 1)
    tables = {
        "Local": {"name": "local"},
        "FedAvg": {"name": "fedavg"},
        "VIRTUAL": {
            "name": "virtual",
            "lateral": False,
            "samples": 1,
            "predictions": 10,
            "kl_weight": 0.01,
        },
        "pooled": {"name": "global"},
    }
    return {
        "seed": seed,
        "rounds": rounds,
        "metrics": [DATA[name][0]],
        "evaluate_every": 0,
        "checkpoint_every": rounds,
        "data": data_settings(name, out),
        "model": {"name": "mlp", "hidden": [16]},
        "training": {"optimizer": "adam", "lr": 5e-3, "batch_size": 32, "epochs": epochs},
        "method": tables[method],
    }


def measure(name, method, seed, out):
    """The metric of each client."""
    summary = fedbayes.run(**settings(name, method, seed, out)).summary
    whose = "local" if method == "Local" else "global"
    metric = DATA[name][0]
    return {"clients": [own[metric] for own in summary["per_client"][whose].values()]}


def row_of(name, found):
    """A line of the table: of each method mean over clients and worst client, over seeds."""
    metric = DATA[name][0]
    sign = 1 if metric == "auroc" else -1
    each, cells, undefined = {}, [], 0
    for method in METHODS:
        own = sorted((row for row in found if row["method"] == method), key=lambda r: r["seed"])
        values = [np.array([v for v in row["clients"] if v is not None]) for row in own]
        # The same of every method: all are tried on the same rows.
        undefined = sum(v is None for row in own for v in row["clients"])
        each[method] = np.array([v.mean() for v in values])
        worst = [float((v * sign).min() * sign) for v in values]
        digits = DIGITS[metric]
        cells += [f"{mean_and_std(each[method], digits)} ({mean_and_std(worst, digits)})"]
    gaps, verdicts = [], []
    pooled = each["pooled"]
    for method in ("FedAvg", "VIRTUAL"):
        gap = sign * (pooled - each[method])
        gaps.append(f"{mean_and_std(gap, DIGITS[metric])}")
        within = gap.mean() <= pooled.std(ddof=1) if len(pooled) > 1 else math.nan
        verdicts.append("yes" if within else "no")
    line = [
        DATA[name][1],
        metric.upper(),
        str(len(pooled)),
        *cells,
        " / ".join(gaps),
        " / ".join(verdicts),
    ]
    return "| " + " | ".join(line) + " |", f"{undefined} of {len(own) * len(own[0]['clients'])}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="measure nothing: what is there")
    parser.add_argument("--out", type=Path, default=HERE)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    given.out.mkdir(parents=True, exist_ok=True)
    write_breast_cancer(given.out)
    results = Results(given.out / "results.jsonl")
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    lines, notes = [], []
    for name in given.data:
        keys = []
        for seed in seeds:
            for method in METHODS:
                own = settings(name, method, seed, Path("out"))
                keys.append(
                    {"data": name, "method": method, "seed": seed, "settings": fingerprint(own)}
                )
        try:
            for key in results.missing(keys) if not given.table else ():
                results.add({**key, **measure(name, key["method"], key["seed"], given.out)})
                print(f"{name} {key['method']} seed {key['seed']}", flush=True)
        except DataError as error:
            notes.append(f"left out: {name}: {error}")
            continue
        found = results.table(keys).to_dict("records")
        told = [row["seed"] for row in found]
        whole = [row for row in found if told.count(row["seed"]) == len(METHODS)]
        if not whole:
            notes.append(f"{DATA[name][1]}: not measured")
            continue
        line, undefined = row_of(name, whole)
        lines.append(line)
        if not undefined.startswith("0 "):
            notes.append(
                f"{DATA[name][1]}: {undefined} sets of test rows (a client's, under a seed) are of "
                "one class alone; these have no AUROC and enter no mean"
            )
    heads = ["data", "metric", "seeds", *METHODS, "pooled better by", "within one deviation"]
    print("| " + " | ".join(heads) + " |")
    print("|" + "---|" * len(heads))
    print("\n".join(lines))
    print("\n".join(f"\n{note}." for note in notes))


if __name__ == "__main__":
    main()
