"""Forgetting a client: how far from retraining without it, and how many rounds that saves.

    python benchmarks/forgetting.py                # the table of docs/howto/forget.md
    python benchmarks/forgetting.py --seeds 1      # a first look

PVI learns digits at ten clients with few classes each (Dirichlet, α = 0.1), 30 rounds with its
recommended settings. The client with most rows then withdraws. `fedbayes forget` divides its factor
out and refines; the same run without the client from the beginning (`data.exclude`) is the
alternative, and after 100 rounds the reference. Each state is compared with the reference of its
seed:

    accuracy   of the other clients' test rows
    KL         of the reference's predictions to the state's, in nats, mean over the same rows
    NLL        of the training rows of the client that withdrew
    attack     AUROC of telling its training rows from its test rows by their NLL (Yeom et al. 2018)

No setting is chosen here, and test rows choose nothing.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from sklearn.metrics import roc_auc_score

import fedbayes
from fedbayes import Config
from fedbayes.runs.build import stored_data, stored_run

ROUNDS, REFERENCE = 30, 100
REFINED, SCRATCH = (0, 1, 3, 10), (1, 3, 10, 30, 60)


def measured(result, number, rows):
    """Log-probabilities under the state after a round, of several sets of samples."""
    run = stored_run(result.folder, result.config, result.preprocessing)
    method = result.config.build_method()
    draw = method.draws(method.model(result.server(number), run), run)
    with torch.no_grad():
        outputs = [draw(x).log_softmax(-1) for x in rows]
    return [(o.logsumexp(0) - np.log(len(o))).double() for o in outputs]


def nll(log_p, y):
    return -log_p[torch.arange(len(y)), y]


def figures(state, reference, test, own):
    """The four measures of a state.

    Args:
        state: log-probabilities of the others' test rows, and of the client's training and test.
        reference: the same of the reference.
        test: targets of the others' test rows.
        own: targets of the client's training and test rows.
    """
    kl = (reference[0].exp() * (reference[0] - state[0])).sum(-1).mean()
    members, others = (nll(p, y) for p, y in zip(state[1:], own, strict=True))
    told = np.concatenate([-members, -others])
    truth = np.concatenate([np.ones(len(members)), np.zeros(len(others))])
    return {
        "accuracy": float((state[0].argmax(-1) == test).double().mean()),
        "KL": float(kl),
        "NLL": float(members.mean()),
        "attack": float(roc_auc_score(truth, told)),
    }


def one(seed, place):
    """The measures of all states of a seed, by name."""
    whole = fedbayes.run(method="pvi", rounds=ROUNDS, alpha=0.1, seed=seed, out=place / "whole")
    config, data = whole.config, stored_data(whole.config, whole.folder)
    client = int(data.train_sizes().argmax())
    name = data.names[client]
    own = data.train(client), data.test(client)
    every = {"keep_checkpoints": "all", "evaluate_every": 0, "evaluate_local_every": 0}
    values = {**config.model_dump(), **every}
    out = {**values["data"], "exclude": [name]}
    never = fedbayes.run(
        Config.create(**{**values, "data": out, "rounds": REFERENCE}), out=place / "never"
    )
    # The new run has the settings of the run, and keeps every state.
    kept = fedbayes.run(Config.create(**values), out=place / "kept")
    found = fedbayes.forget(kept, name, out=place / "found", rounds=max(REFINED))
    others = stored_data(never.config, never.folder).test_union(0, 10**9)
    rows = others.x, own[0].x, own[1].x
    reference = measured(never, REFERENCE, rows)
    states = {
        f"with the client, {ROUNDS} rounds": (whole, ROUNDS),
        **{f"forget, {n} rounds": (found, 1 + n) for n in REFINED},
        **{f"from the beginning, {n} rounds": (never, n) for n in SCRATCH},
        f"from the beginning, {REFERENCE} rounds": (never, REFERENCE),
    }
    return {
        key: figures(measured(*state, rows), reference, others.y, (own[0].y, own[1].y))
        for key, state in states.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    seeds = range(parser.parse_args().seeds)
    found = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as place:
            found.append(one(seed, Path(place)))
    print("| state | accuracy | KL | NLL of its rows | attack |")
    print("|---|---|---|---|---|")
    for state in found[0]:
        cells = []
        for name in ("accuracy", "KL", "NLL", "attack"):
            values = [each[state][name] for each in found]
            std = np.std(values, ddof=1) if len(values) > 1 else 0.0
            cells.append(f"{np.mean(values):.3f} ± {std:.3f}")
        print(f"| {state} | {' | '.join(cells)} |")
    for n in REFINED[1:]:
        saved = []
        for each in found:
            reached = each[f"forget, {n} rounds"]["KL"]
            needed = [
                m for m in SCRATCH if each[f"from the beginning, {m} rounds"]["KL"] <= reached
            ]
            saved.append(min(needed, default=REFERENCE) - n)
        print(
            f"{n} rounds of refinement: from the beginning takes {np.mean(saved):.0f} rounds more"
        )


if __name__ == "__main__":
    main()
