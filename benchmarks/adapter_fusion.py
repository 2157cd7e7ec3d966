"""Fusion of LoRA adapters of a real network: every method of `fedbayes fuse`, and the ensemble.

Five clients with unlike shares of the classes train adapters of rank 8 on a table of texts, each
alone, without rounds. Their adapters become one, once with each method; scored on test rows.

    python benchmarks/adapter_fusion.py NETWORK TEXTS.csv UNLABELLED.txt runs/adapters

NETWORK is a folder of a pretrained network, TEXTS.csv has the columns `text` and `label`, and
UNLABELLED.txt has other texts, one a line. A run that is there is taken again.
"""

import json
import resource
import sys
import warnings
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import fedbayes
from fedbayes.core.pretrained import require
from fedbayes.errors import ModelError
from fedbayes.workflows.serve.evaluation_set import find_tests
from fedbayes.workflows.serve.model_evaluation import compare, open_models
from fedbayes.workflows.serve.model_files import read_counts

CLIENTS, ALPHA, LENGTH, EPOCHS, RANK = 5, 0.5, 24, 2, 8
WAYS: dict[str, dict[str, Any]] = {
    "average": {"method": "average"},
    "linear": {"method": "linear"},
    "cat": {"method": "cat"},
    "svd": {"method": "svd"},
    "ties": {"method": "ties"},
    "dare": {"method": "dare"},
    "regmean": {"method": "regmean"},
    "function, drawn tokens": {"inputs": "texts"},
    "function, texts of a file": {},
    "the same, end to end": {"minutes": 2.0},
}


def train(network: Path, texts: Path, place: Path) -> None:
    """Clients that train alone."""
    data = {"path": texts, "label": "label", "tokens": "text", "max_tokens": LENGTH, "test": 0.2}
    data |= {"clients": CLIENTS, "partition": "dirichlet", "alpha": ALPHA, "limit": 2000}
    model = {"name": "transformers", "pretrained": str(network), "trains": "lora"}
    training = {"lr": 2e-3, "optimizer": "adam", "epochs": EPOCHS, "batch_size": 32}
    fedbayes.run(
        method="local",
        rounds=1,
        data=data,
        model={**model, "lora_rank": RANK},
        training=training,
        calibration="none",
        out=place,
    )


def counts_of(texts: Path, place: Path) -> list[list[int]]:
    """Training rows of each client and class."""
    import pandas as pd

    labels = pd.read_csv(texts)["label"].astype(str).to_numpy()
    parts = np.load(place / "partition.npz")
    rows = np.split(parts["train"], parts["train_offsets"][1:-1])
    return [[int((labels[own] == name).sum()) for name in np.unique(labels)] for own in rows]


def main() -> None:
    """Print a table."""
    require("transformers", "this benchmark", ModelError)
    warnings.simplefilter("ignore")
    network, texts, unlabelled, place = map(Path, sys.argv[1:5])
    if not (place / "clients").is_dir():
        train(network, texts, place)
    clients = sorted((place / "clients").glob("*.safetensors"))
    counts = place / "counts.json"
    counts.write_text(json.dumps(counts_of(texts, place)))
    fused: dict[str, Path] = {}
    for name, chosen in WAYS.items():
        asked = chosen.get("method", "regmean") == "regmean"
        options = {**({"inputs": str(unlabelled)} if asked else {}), **chosen}
        fused[name] = place / f"fused-{len(fused)}.safetensors"
        begin = perf_counter()
        done: Any = fedbayes.fuse(clients, out=fused[name], counts=counts, **options)
        far = done.summary.get("divergence", {})
        print(f"{name} | {perf_counter() - begin:.0f} s | {list(far.values())}", flush=True)
    names = {str(path): name for name, path in fused.items()}
    tests = find_tests(clients[0], place, [])
    models = open_models([*fused.values(), *clients], tests)
    inputs = [str(path) for path in clients]
    for score in compare(models, tests, inputs=inputs, counts=read_counts(counts, clients)):
        accuracy, nll = score.metrics["accuracy"], score.metrics["nll"]
        print(f"{names.get(score.name, score.name)} | {accuracy:.3f} | {nll:.3f}", flush=True)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{memory:.1f} GB of memory at most")


if __name__ == "__main__":
    main()
