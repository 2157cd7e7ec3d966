"""Methods side by side: means and standard deviations over seeds, and significant differences."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeGuard

import numpy as np
from rich.filesize import decimal

from fedbayes.config.config import Config
from fedbayes.core.brief import Brief
from fedbayes.core.wording import listed
from fedbayes.likelihoods.measures import better
from fedbayes.storage.formatting import number, words
from fedbayes.workflows.experiments.method_grid import MethodGrid, RunResult
from fedbayes.workflows.experiments.variants import Variant

LEVEL = 0.05
"""Probability of a paired t-test below which a method differs from the best."""
SHOWN = ("nll", "ece", "brier", "crps")
"""Metrics of the global model in the table, behind the headline."""
BEHIND = ("error_auroc", "ood_auroc", "bytes", "seconds")
MORE = ("error_auroc_information", "ood_auroc_information", "aurc", "accuracy_at_80")
"""Metrics that are in the files, and in no table for people."""
_LOWER = ("bytes", "seconds", "aurc", "global_ece")


@dataclass(frozen=True, repr=False)
class Figure(Brief):
    """A metric of a method over seeds."""

    mean: float
    std: float | None
    """Of a sample: the sum of squares over one less than their number; None of a single seed."""
    values: tuple[float | None, ...]
    """Of each seed of the comparison; None where the run failed."""
    p: float | None = None
    """Of a paired t-test against the best method; None of that, and where there are not two seeds
    of both."""
    best: bool = False
    """Whether its mean is the best of the methods, and is printed otherwise than theirs."""
    near: bool = False
    """Whether it is not told apart from the best, at `LEVEL`."""


@dataclass(frozen=True, repr=False)
class ComparisonRow(Brief):
    """A method on a config."""

    variant: Variant
    seeds: tuple[int, ...]
    """That its means are over."""
    figures: Mapping[str, Figure]
    """By metric; those that it has not are absent."""
    troubles: Mapping[int, str] = field(default_factory=dict)
    """Why runs failed, by seed."""
    warned: Mapping[int, str] = field(default_factory=dict)
    """What summaries warn of, by seed."""
    held_out: bool = False
    """Whether clients held out training rows to calibrate by."""
    lost: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Metrics of the table without a mean, and the seeds under which they are no finite number;
    where no method has a mean, there is no column either."""
    rejected: int = 0
    """Updates that runs rejected, over all seeds."""


@dataclass(frozen=True, repr=False)
class Compared(Brief):
    """The methods on one config."""

    task: str
    seeds: tuple[int, ...]
    metric: str
    """The headline of the likelihood, such as accuracy."""
    columns: tuple[str, ...]
    """Names of the metrics of the table, those that some method has."""
    rows: tuple[ComparisonRow, ...]
    foreign: str
    """Description of the OOD inputs; empty if there are none."""

    @property
    def labels(self) -> list[str]:
        """The methods, with the number of their seeds where some failed."""
        every = len(self.seeds)
        return [
            row.variant.label
            + (f" ({len(row.seeds)} of {every} seeds)" if len(row.seeds) < every else "")
            for row in self.rows
        ]


def compared(grid: MethodGrid, outcomes: Sequence[RunResult]) -> list[Compared]:
    """The table of each config.

    Args:
        grid: the runs.
        outcomes: as `conclude` gives them.
    """
    return [_compared(grid, task, outcomes) for task in grid.tasks]


def _compared(grid: MethodGrid, task: str, outcomes: Sequence[RunResult]) -> Compared:
    own = [outcome for outcome in outcomes if outcome.cell.task == task]
    labels = list(dict.fromkeys(outcome.cell.label for outcome in own))
    seeds = tuple(dict.fromkeys(outcome.cell.seed for outcome in own))
    ended = [outcome for outcome in own if outcome.summary]
    metric = ended[0].summary["headline"].partition("_")[2] if ended else "accuracy"
    names = list(dict.fromkeys(name for outcome in ended for name in outcome.values))
    asked = [m for (own, _), config in grid.settings.items() if own == task for m in config.metrics]
    of_models = [f"global_{name}" for name in (*SHOWN, *asked) if name not in BEHIND]
    first = dict.fromkeys([f"global_{metric}", f"local_{metric}", *of_models, *BEHIND])
    higher = ended[0].higher_is_better if ended else True
    figures = {
        label: _figures([o for o in own if o.cell.label == label], names) for label in labels
    }
    for name in names:
        _judge(figures, name, _direction(name, metric, higher))
    rows = [
        ComparisonRow(
            grid.methods[label],
            tuple(o.cell.seed for o in own if o.cell.label == label and o.summary),
            figures[label],
            {o.cell.seed: o.trouble for o in own if o.cell.label == label and o.trouble},
            _warned([o for o in ended if o.cell.label == label]),
            any(_held_out(o) for o in ended if o.cell.label == label),
            _lost([o for o in ended if o.cell.label == label], list(first)),
            sum(
                sum(o.summary.get("refused_clients", {}).values())
                for o in ended
                if o.cell.label == label
            ),
        )
        for label in labels
    ]
    foreign = {o.trial.foreign for o in ended if o.trial is not None} - {""}
    shown = [name for name in first if any(name in found for found in figures.values())]
    return Compared(task, seeds, metric, tuple(shown), tuple(rows), min(foreign, default=""))


def _direction(name: str, metric: str, higher: bool) -> bool | None:
    """Whether a higher value is a better one; None where neither is, or it is not known."""
    if name in _LOWER:
        return False
    if name.startswith(("error_auroc", "ood_auroc", "accuracy_at")):
        return True
    whose, _, plain = name.partition("_")
    if whose not in ("global", "local"):
        return None
    return higher if plain == metric else better(plain)


def _finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _warned(ended: Sequence[RunResult]) -> dict[int, str]:
    """What summaries warn of, by seed."""
    return {o.cell.seed: o.summary["warning"] for o in ended if "warning" in o.summary}


def _held_out(outcome: RunResult) -> bool:
    return bool(outcome.summary.get("calibration", {}).get("rows"))


def _lost(ended: Sequence[RunResult], names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Metrics that a method has under some seeds, and under which they are no finite number."""
    found = {}
    for name in names:
        odd = tuple(o.cell.seed for o in ended if not _finite(o.values.get(name)))
        if odd and any(o.values.get(name) is not None for o in ended):
            found[name] = odd
    return found


def _figures(own: Sequence[RunResult], names: Sequence[str]) -> dict[str, Figure]:
    """Metrics of a method that all of its runs that ended have."""
    found = {}
    for name in names:
        values = tuple(outcome.values.get(name) for outcome in own)
        known = [value for value in values if _finite(value)]
        if known and len(known) == sum(bool(outcome.summary) for outcome in own):
            std = statistics.stdev(known) if len(known) > 1 else None
            found[name] = Figure(statistics.fmean(known), std, values)
    return found


def _judge(figures: Mapping[str, dict[str, Figure]], name: str, higher: bool | None) -> None:
    """Mark the best mean of a metric, and what is not told apart from it.

    A method with failed runs is best only where all have some, as its other seeds may be easier.
    """
    having = {label: found[name] for label, found in figures.items() if name in found}
    if higher is None or len(having) < 2:
        return
    whole = {label: one for label, one in having.items() if None not in one.values} or having
    best = (max if higher else min)(whole, key=lambda label: whole[label].mean)
    shown = {label: printed(name, one.mean) for label, one in having.items()}
    tied = {label for label in whole if shown[label] == shown[best]}  # as they are printed
    won = len(tied) < len(having)
    for label, one in having.items():
        p = None if label == best else paired(one.values, having[best].values)
        near = won and label not in tied and p is not None and p >= LEVEL
        first = won and label in tied
        figures[label][name] = Figure(one.mean, one.std, one.values, p, first, near)


def printed(name: str, value: float) -> str:
    """A figure as tables have it."""
    if name == "bytes":
        return decimal(round(value))
    return f"{value:.1f}" if name == "seconds" else number(value)


def paired(one: Sequence[float | None], other: Sequence[float | None]) -> float | None:
    """The probability of differences at least so large between two methods that differ by chance
    alone, by a t-test of the seeds that both have; None below two.
    """
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    if len(pairs) < 2:
        return None
    gaps = np.array([a - b for a, b in pairs])
    if (gaps == gaps[0]).all():  # no deviation to compare with
        return 1.0 if gaps[0] == 0 else 0.0
    from scipy.special import stdtr  # ttest_rel warns of gaps that differ by rounding alone

    t = gaps.mean() / (gaps.std(ddof=1) / np.sqrt(len(gaps)))
    return float(2 * stdtr(len(gaps) - 1, -abs(t)))


def _same(grid: MethodGrid) -> str:
    """What all methods have the same of under one seed."""
    first = {task: grid.settings[task, label] for task, label in reversed(grid.settings)}

    def alike(*names: str) -> bool:
        return all(
            repr(getattr(config, name)) == repr(getattr(first[task], name))  # 1.0 is no cohort of 1
            for (task, _), config in grid.settings.items()
            for name in names
        )

    cohorts = alike("cohort", "sampling", "asynchronous", "clock")
    start = " and initialization of the network" if alike("model") else ""
    joint = ", cohorts" if start else " and cohorts"
    return f"all methods have the same partition{joint if cohorts else ''}{start}"


def notes(grid: MethodGrid, tables: Sequence[Compared]) -> list[str]:
    """What is to be known of the tables, a sentence each; runs that failed last."""
    rows = [(table, row) for table in tables for row in table.rows]
    several = any(len(table.seeds) > 1 for table in tables)
    best = "* best mean of the column"
    if any(figure.near for _, row in rows for figure in row.figures.values()):
        best += (
            f"; ≈ not significantly different from it (paired t-test over seeds, p ≥ {LEVEL:g}, "
            "not corrected for multiple tests)"
        )
    tried = [table for table in tables if "ood_auroc" in table.columns]
    foreign = dict.fromkeys(table.foreign for table in tried if table.foreign)
    odd = {table.task: grid.partitions_differ(table.task) for table in tables}
    same = _same(grid)
    return [
        f"Mean ± standard deviation over seeds. With the same seed {same}."
        if several
        else f"With one seed, the best may be best by chance. In this comparison {same}.",
        *(
            [_KEPT_BEST]
            if any(config.keep_checkpoints == "best" for config in grid.settings.values())
            else []
        ),
        *([grid.tuned] if grid.tuned else []),
        *_weighted_apart(grid),
        *([_CHOSEN] if any(config.training.open for config in grid.settings.values()) else []),
        *([f"{best}."] if any(f.best for _, row in rows for f in row.figures.values()) else []),
        *(f"Out of distribution: {what}." for what in foreign),
        *(
            f"{task}: partitions differ with seed {listed(map(str, seeds))}."
            for task, seeds in odd.items()
            if seeds
        ),
        *(
            f"{table.task}, {row.variant.label}: {heading(name)} has no mean: it is not finite "
            f"with seed {listed(map(str, row.lost[name]))}."
            for table, row in rows
            for name in row.lost
        ),
        *([_CALIBRATED] if any(_BEFORE in row.figures for _, row in rows) else []),
        *(line for table in tables if (line := _unlike(table))),
        *(line for table in tables if (line := _rejected(table))),
        *(
            f"{table.task}, {line}"
            for table, row in rows
            for line in _by_reason(row.variant.label, row.warned)
        ),
        *_left_out(grid),
        *(
            f"{table.task}, {line}"
            for table, row in rows
            for line in _by_reason(row.variant.label, row.troubles)
        ),
    ]


def _unlike(table: Compared) -> str:
    """That some methods hold out rows to calibrate by, and others train on all; else empty."""
    whole = [row.variant.label for row in table.rows if row.seeds and not row.held_out]
    if not whole or len(whole) == len(table.rows):
        return ""
    return (
        f"{table.task}: {listed(whole)} without a temperature, trained on all training rows; "
        "clients of the others held out a tenth to calibrate by. With calibration = 'none' "
        "all train on all rows."
    )


def _rejected(table: Compared) -> str:
    """Which methods lost updates to the checks of a round; empty without any."""
    counts = [f"{row.variant.label} {row.rejected}" for row in table.rows if row.rejected]
    if not counts:
        return ""
    return (
        f"{table.task}: updates were rejected, by method and over all seeds: {listed(counts)}. "
        "metrics.jsonl of a run says which and why."
    )


_BEFORE = "global_uncalibrated_nll"
_CALIBRATED = (
    "NLL, ECE and Brier are those of global models at the temperature fitted on held-out rows at "
    "the end of the run. comparison.json also has them before calibration."
)
_CHOSEN = (
    "Methods choose settings at auto, such as learning rates: see settings_chosen in the "
    "summary.json of a run."
)
_KEPT_BEST = (
    "keep_checkpoints = 'best': metrics of a global model are from the best round of each run. "
    "Test samples chose this round, so the metrics are optimistic."
)


def _weighted_apart(grid: MethodGrid) -> list[str]:
    """Which methods of a config weigh clients otherwise than others do."""
    found = []
    for task in grid.tasks:
        weighed: dict[str, list[str]] = {}
        for (own, label), config in grid.settings.items():
            if own == task and (way := _weighting(config)):
                weighed.setdefault(way, []).append(label)
        if len(weighed) > 1:
            alike, by_size = (listed(weighed[way]) for way in ("uniform", "samples"))
            found.append(
                f"{task}: clients have equal weights under {alike}, and weights by samples under "
                f"{by_size}. These are different objectives: set method.weighting for all of "
                "them."
            )
    return found


def _weighting(config: Config) -> str:
    """How a method that averages weighs clients; empty where it does not average."""
    way = str(config.closed().method.get("weighting", ""))
    alike = config.privacy.noise or config.aggregation.rule != "mean"
    return "uniform" if way and alike else way


def _left_out(grid: MethodGrid) -> list[str]:
    """What stands in the folder and not in the tables."""
    by_method: dict[str, list[str]] = {}
    for place in grid.left_out:
        own = place.parent.relative_to(grid.folder)
        by_method.setdefault(str(own), []).append(place.name.removeprefix("seed-"))
    return [
        f"Not requested, so not in these tables: {own}, seed {listed(seeds)}."
        for own, seeds in by_method.items()
    ]


def _by_reason(label: str, reasons: Mapping[int, str]) -> list[str]:
    """Why runs of a method failed, or what is to be known of them, each reason once."""
    why: dict[str, list[str]] = {}
    for seed, text in reasons.items():
        why.setdefault(text, []).append(str(seed))
    return [f"{label}, seed {listed(seeds)}: {text}" for text, seeds in why.items()]


def failed(tables: Sequence[Compared]) -> bool:
    """Whether a run failed."""
    return any(row.troubles for table in tables for row in table.rows)


def content(grid: MethodGrid, tables: Sequence[Compared], said: Sequence[str]) -> dict[str, Any]:
    """All of it, as JSON has it: null where a method has no such metric."""
    return {
        "methods": [_entry(grid, table, row) for table in tables for row in table.rows],
        "tasks": {
            table.task: {"seeds": table.seeds, "metric": table.metric, "foreign": table.foreign}
            for table in tables
        },
        "level": LEVEL,
        "notes": list(said),
        "folder": str(grid.folder),
    }


def _entry(grid: MethodGrid, table: Compared, row: ComparisonRow) -> dict[str, Any]:
    names = dict.fromkeys([*table.columns, *MORE, *row.figures])
    figures = {name: asdict(row.figures[name]) if name in row.figures else None for name in names}
    return {
        "task": table.task,
        "method": row.variant.label,
        "name": row.variant.method,
        "settings": list(row.variant.settings),
        "seeds": row.seeds,
        **figures,
        "troubles": {str(seed): text for seed, text in row.troubles.items()},
        "folder": str(grid.members[table.task, row.variant.label].folder),
    }


def heading(name: str) -> str:
    """A metric over a column."""
    return _HEADS.get(name) or words(name)


_HEADS = {
    "global_nll": "NLL",
    "global_ece": "ECE",
    "global_brier": "Brier",
    "global_crps": "CRPS",
    "error_auroc": "AUROC errors",
    "ood_auroc": "AUROC OOD",
    "error_auroc_information": "AUROC errors, mutual information",
    "ood_auroc_information": "AUROC OOD, mutual information",
    "aurc": "area under risk-coverage",
    "accuracy_at_80": "accuracy of the most confident 80 %",
}
