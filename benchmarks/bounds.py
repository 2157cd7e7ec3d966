"""The bounds of reports: how many honest ones they reject, and what one liar of ten can do.

    python benchmarks/bounds.py needs      # about ten minutes on one core
    python benchmarks/bounds.py damage     # about ten minutes

`needs` runs honest federations without a bound: on 600 digits among ten clients, and on two tables
among six. What a report needs is the norm of its change as a multiple of what `max_change` is a
multiple of (`fedbayes.federation.stages.bounds`), of the part that needs most. Below the table are
the methods and data that have no such number, with the reason. `damage` trains on
digits among ten clients, of which one lies in every round; bold is what loses more than the
target. Both print the tables of docs/benchmarks/features.md.
"""

import argparse
import sys
import tempfile
import warnings
from collections import defaultdict
from itertools import product
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

import fedbayes
from fedbayes.errors import FedbayesError
from fedbayes.federation.stages import bounds
from fedbayes.methods import METHODS
from fedbayes.workflows.experiments.attack_grid import AttackGrid

AVERAGED = [n for n, kind in METHODS.items() if not kind.reports.pooled and n != "local"]
DATA = {
    "digits": {"name": "digits", "limit": 600, "clients": 10},
    "breast cancer": {"path": "cancer.csv", "label": "diagnosis", "clients": 6},
    "diabetes": {"name": "diabetes", "clients": 6},
}
PARTITIONS = {
    "iid": {"partition": "iid"},
    "Dirichlet 0.1": {"partition": "dirichlet", "alpha": 0.1, "balance": True},
    "two classes": {"partition": "shards"},
    "unequal sizes": {"partition": f"{__name__}:unequal"},
}
NO_BOUND = 1e9
LIMITS = (5, 10)
OF_CLASSES = ("Dirichlet 0.1", "two classes")
LIES = ["sign-flip:scale=20", "stretch:scale=95", "stretch", "nan", "huge", "sign-flip"]
NEAR = (0.10, 0.03)
"""Accuracy that a lie may cost: by default, and under a robust rule."""


def unequal(y, clients, rng):
    """A partition whose largest client has twenty times the rows of its smallest."""
    sizes = np.geomspace(1, 20, clients)
    return rng.choice(clients, len(y), p=sizes / sizes.sum())


SEEN = []
"""The bounds of every round so far."""


class Recorded(bounds.Bounds):
    """Bounds that are kept, with the norms that they have seen."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        SEEN.append(self)

    def needs(self):
        """Of each report, by part, the multiple of the median that it needs; infinity: any is too
        small, since the median is 0.
        """

        def need(length, limit):
            if not length:
                return 0.0
            return NO_BOUND * length / limit if limit else float("inf")

        limits = self.limits()
        return [
            {p: need(length, limits[p]) for p, length in norms.items() if p != "counters"}
            for norms in self.norms.values()
        ]


def honest(method, data, rounds, cohort):
    """What the reports of an honest federation need: a list for each round."""
    SEEN.clear()
    fedbayes.run(
        progress=False,
        rounds=rounds,
        data=data,
        method={"name": method},
        model={"hidden": [32]},
        evaluate_every=0,
        calibration="none",
        checkpoint_every=rounds,
        aggregation={"max_change": NO_BOUND},
        **({"cohort": cohort} if cohort else {}),
    )
    return [each.needs() for each in SEEN]


def needs(methods, rounds, cohort):
    """Print what honest reports need, a line for each method, and what has no such need."""
    bounds.Bounds = Recorded
    reported, without, limits = 0, [], dict.fromkeys(LIMITS, 0)
    limited = [f"> {m}" for m in LIMITS]
    table(["method", "reports", *PARTITIONS, "round 1", "later", *limited], [])
    with tempfile.TemporaryDirectory() as folder:
        cancer = load_breast_cancer(as_frame=True).frame.rename(columns={"target": "diagnosis"})
        cancer.to_csv(Path(folder) / "cancer.csv", index=False)
        for method in methods:
            longest, first, later, found, reasons = defaultdict(float), 0.0, 0.0, [], {}
            if METHODS[method].reports.pooled:
                without.append(f"`{method}`: {METHODS[method].reports.refusals['noise']}")
                continue
            for (name, data), (partition, division) in product(DATA.items(), PARTITIONS.items()):
                if name == "diabetes" and partition in OF_CLASSES:
                    continue
                data = data | division
                if "path" in data:
                    data["path"] = str(Path(folder) / data["path"])
                try:
                    told = honest(method, data, rounds, cohort)
                except FedbayesError as error:
                    reasons[name] = f"{error}"
                    continue
                if not (parts := {part for reports in told for n in reports for part in n}):
                    reasons[name] = "it sends no real numbers"
                    continue
                for number, reports in enumerate(told):
                    most = max(max(need.values(), default=0.0) for need in reports)
                    first, later = (
                        (max(first, most), later) if not number else (first, max(later, most))
                    )
                    found += reports
                    longest[partition] = max(longest[partition], most)
                by_part = {p: max(n.get(p, 0.0) for r in told for n in r) for p in sorted(parts)}
                shown = ", ".join(f"{part} {need:.3g}" for part, need in by_part.items())
                print(f"{method}, {name}, {partition}: {shown}", file=sys.stderr, flush=True)
            if not found:
                without.append(f"`{method}`: {next(iter(reasons.values()))}")
                continue
            without += [f"`{method}`, {name}: {why}" for name, why in reasons.items()]
            rejected = [sum(max(n.values(), default=0.0) > m for n in found) for m in LIMITS]
            for m, count in zip(LIMITS, rejected, strict=True):
                limits[m] += count
            columns = [longest[p] for p in PARTITIONS] + [first, later]
            reported += len(found)
            row([f"`{method}`", len(found), *(f"{x:.1f}" for x in columns), *rejected])
    counts = ", ".join(f"{count} more than {m}" for m, count in limits.items())
    print(f"\nOf {reported:,} reports need: {counts}.\n")
    print("\n".join(f"- {each}" for each in without))


def table(head, lines):
    """Print a table of Markdown."""
    for line in (head, ["---", *["--:"] * (len(head) - 1)], *lines):
        row(line)


def row(cells):
    """Print a row of a table."""
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def damage(methods, rounds, rules):
    """Print the accuracy of each method with one liar of ten."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for method, rule in product(methods, rules):
            settings = [
                "data.name=digits",
                "data.limit=900",
                "data.clients=10",
                "data.partition=iid",
                f"rounds={rounds}",
                f"checkpoint_every={rounds}",
                "model.hidden=[32]",
                "evaluate_every=0",
                "calibration=none",
            ]
            try:
                grid = AttackGrid(Path(folder), LIES, [method], [rule], overrides=settings)
                found = grid.run()
            except FedbayesError as error:
                print(f"{method}, {rule}: {error!s:.150}", file=sys.stderr)
                continue
            values = [outcome.value for outcome in found]
            shown = ["-" if v is None else f"{v:.3f}" for v in values]
            for place, value in enumerate(values):
                if place and (value is None or value < values[0] - NEAR[rule != "mean"]):
                    shown[place] = f"**{shown[place]}**"
                    if found[place].trouble:
                        print(f"{method}, {rule}: {found[place].trouble:.150}", file=sys.stderr)
            lines.append([method, rule, *shown])
            print(*lines[-1], file=sys.stderr, flush=True)
    table(["method", "rule", "honest", *LIES], lines)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["needs", "damage"])
    parser.add_argument("--methods", nargs="*", help="needs: all; damage: those that average")
    parser.add_argument("--rounds", type=int, default=6, help="of needs; damage has twice as many")
    parser.add_argument("--cohort", type=int, help="needs: clients in a round; all by default")
    parser.add_argument("--rules", nargs="*", default=["mean", "trimmed-mean"], help="damage")
    given = parser.parse_args()
    if given.command == "needs":
        needs(given.methods or METHODS, given.rounds, given.cohort)
    else:
        damage(given.methods or AVERAGED, 2 * given.rounds, given.rules)
