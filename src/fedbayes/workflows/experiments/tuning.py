"""Tune methods on clients' validation rows, with the same budget for each.

    METHOD/trial-000/         A run with the recommended settings.
    METHOD/trial-001/, …      Runs with settings drawn from the method's ranges.
    METHOD.toml               The config of a method with the settings that were best.
    tuned.json                Settings, validation metrics, budget, ranges and all runs.
    tuned.svg                 The metric of every run over each setting.

A share of each client's training rows takes the place of its test rows (`data.validation`), so no
test row is ever read. Trial 7 of a method has the same settings whatever the budget is. Runs that
have ended are not run again: the same call resumes the search, and a larger budget adds to it.

Random search and successive halving need nothing but draws and folders. Optuna's samplers would
keep their own state in a database next to the run folders, which a kill can leave out of date. With
a budget of some ten runs they draw most of these at random too. So there is no dependency.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedbayes.config.config import Config
from fedbayes.config.given import assign, whole
from fedbayes.config.settings import toml_value
from fedbayes.console.display import console_for
from fedbayes.core.brief import Brief, grid
from fedbayes.core.files import json_text, parse_json, parse_toml, read_text, write_beside
from fedbayes.errors import ConfigError, RunError, warn
from fedbayes.federation.engine_table import ENGINES
from fedbayes.likelihoods import Likelihood
from fedbayes.runs.build import build_data, build_federation
from fedbayes.start import either
from fedbayes.storage.best_tracker import flat
from fedbayes.storage.folder import RunFolder
from fedbayes.storage.formatting import number, words
from fedbayes.storage.inventory import dotted
from fedbayes.storage.metrics_file import Metrics
from fedbayes.workflows.experiments.grid import Grid, GridJob
from fedbayes.workflows.experiments.grid_display import GridDisplay
from fedbayes.workflows.experiments.grid_jobs import run_grid
from fedbayes.workflows.experiments.ranges import (
    Range,
    Ranges,
    declared_ranges,
    drawn,
    given_ranges,
)
from fedbayes.workflows.experiments.seed_runs import SeedRuns
from fedbayes.workflows.experiments.variants import (
    SHARED,
    Methods,
    Variant,
    changed_from_defaults,
    folder_name,
    given_variants,
    own_settings,
    settled,
)

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

VALIDATION = 0.2
"""Share of each client's training rows that methods are judged on, unless said otherwise."""
BUDGET = 10
"""Runs of each method, unless said otherwise."""
FEWER = 3
"""Successive halving keeps one trial of so many, and gives it so many times the rounds."""
TUNED_FILE = "tuned.json"

FORESEEN = 100
"""Trials of a budget in minutes whose settings are checked before the first run."""
IN_A_ROW = 20
"""Failed runs of a method, one after the other, that end its search by minutes."""

Search = Literal["random", "halving"]


@dataclass(frozen=True)
class TuneCell:
    """A run of the search."""

    label: str
    """Of the method."""
    number: int
    """Of the trial; 0 has the recommended settings."""


@dataclass(frozen=True)
class TuneTrial:
    """The result of a run of the search."""

    number: int
    settings: dict[str, Any]
    """Values of the settings that have ranges, by key."""
    validation: float | None = None
    """The headline metric of the validation rows; None where the run failed or diverged."""
    nll: float | None = None
    """Their negative log-likelihood, which decides between equal metrics."""
    rounds: int = 0
    planned: int = 0
    """Rounds that it was given; early stopping leaves some out."""
    seconds: float = 0.0
    """That its rounds took."""
    trouble: str = ""
    """Why there is no metric."""


@dataclass(frozen=True)
class TunedMethod:
    """A method, and the settings that were best for it."""

    label: str
    variant: Variant
    ranges: Ranges
    trials: tuple[TuneTrial, ...]
    best: TuneTrial
    metric: str
    """The headline metric, such as `global_accuracy`."""

    @property
    def importance(self) -> dict[str, float | None]:
        """Of each setting, the share of the metric's variance that it explains alone.

        That is the R² of a parabola in the setting (its logarithm, where it was searched so), or of
        the means of its values where it has choices; None of fewer than six runs.
        """
        told = [t for t in self.trials if t.validation is not None and math.isfinite(t.validation)]
        y = np.array([t.validation for t in told], float)
        return {
            key: _explained([t.settings[key] for t in told], y, span)
            for key, span in self.ranges.items()
        }

    def entry(self) -> dict[str, Any]:
        """Method, settings and metric, as JSON has them."""
        return {
            "method": self.label,
            "settings": self.best.settings,
            "validation": self.best.validation,
        }


def _explained(values: Sequence[Any], y: "np.ndarray[Any, Any]", span: Range) -> float | None:
    """The share of the variance of y that a setting explains."""
    if len(y) < 6 or y.std() == 0:
        return None
    if span.choices:
        groups = [y[[v == choice for v in values]] for choice in span.choices]
        found = sum(len(g) * (g.mean() - y.mean()) ** 2 for g in groups if len(g)) / len(y)
        return float(found / y.var())
    x = np.array(values, float)
    x = np.log(x) if span.logarithmic else x
    if x.std() == 0:
        return None
    fitted = np.polyval(np.polyfit((x - x.mean()) / x.std(), y, 2), (x - x.mean()) / x.std())
    return float(max(0.0, 1 - ((y - fitted) ** 2).mean() / y.var()))


@dataclass(frozen=True, repr=False)
class Tuning(Brief):
    """What a search came to."""

    folder: Path
    methods: tuple[TunedMethod, ...]
    budget: str
    """Of each method, in words."""
    share: float
    """Of the training rows that methods were judged on."""
    dataset: str
    files: tuple[Path, ...] = field(default=())

    def _shows(self) -> dict[str, object]:
        best = {one.label: one.best.validation for one in self.methods}
        return {"methods": best, "budget": self.budget, "folder": self.folder}

    @property
    def summary(self) -> dict[str, Any]:
        """The best settings of each method, with their validation metric."""
        return {"methods": [one.entry() for one in self.methods]}

    def cells(self) -> list[list[str]]:
        """A table: a row for each method, and a header."""
        metric = words(self.methods[0].metric.partition("_")[2])
        rows = [["method", f"validation {metric}", "runs", "settings"]]
        for one in self.methods:
            shown = ", ".join(f"{key}={toml_value(v)}" for key, v in one.best.settings.items())
            value = one.best.validation
            rows.append(
                [
                    one.label,
                    "–" if value is None else number(value),
                    str(len(one.trials)),
                    shown or "no ranges",
                ]
            )
        return rows

    def _repr_html_(self) -> str:
        """What a notebook shows: the table."""
        return grid(f"tuned on {self.dataset}", self.cells())

    def frame(self) -> "pd.DataFrame":
        """All runs: a row for each, with its settings and metrics."""
        import pandas as pd

        rows = [
            {"method": one.label, "trial": t.number, **t.settings}
            | {"validation": t.validation, "nll": t.nll, "rounds": t.rounds, "seconds": t.seconds}
            for one in self.methods
            for t in one.trials
        ]
        return pd.DataFrame(rows)


class TuneStage(Grid[TuneCell]):
    """Some trials of a search, for a number of rounds."""

    def __init__(self, jobs: Mapping[TuneCell, GridJob]) -> None:
        self.jobs = dict(jobs)


class TuneSearch:
    """The trials of some methods in one folder.

    Args:
        folder: where they are.
        methods: as `variants` gives them.
        config: a TOML file with settings; None for the defaults.
        overrides: changes of settings as `key=value`; a range or a list as the value is searched.
        ranges: more ranges, by key.
        share: of the training rows that methods are judged on.

    Raises:
        ConfigError: a setting or a range is invalid, or a method has nothing to search.
        RunError: the folder is that of a run.
    """

    def __init__(
        self,
        folder: Path,
        methods: Sequence[Variant],
        config: Path | None = None,
        overrides: Sequence[str] = (),
        ranges: Ranges | None = None,
        share: float = VALIDATION,
    ) -> None:
        if not 0 < share < 1:
            raise ConfigError(f"the validation share is {share:g}. Give a number between 0 and 1")
        self.folder, self.share = folder, share
        RunFolder(folder).require_vacant()
        searched, rest = given_ranges(overrides)
        searched |= ranges or {}
        for key, span in searched.items():
            if key.partition(".")[0] in (*SHARED, "rounds"):
                raise ConfigError(
                    f"{key} has the range {span}, but is the same in all trials. Give one value"
                )
        found, rest, self.notes = own_settings(methods, rest)
        base = Config.load(config, rest)
        fixed = {v.label: _fixed((*rest, *v.settings)) for v in found}
        # The file of results names the methods alone, so a method has what the config says of it.
        found = [replace(v, settings=(*_of_config(base, v.method), *v.settings)) for v in found]
        if not ENGINES[base.engine].start:
            raise ConfigError(
                f"engine = {base.engine!r} is started with {ENGINES[base.engine].launcher}, one "
                "run at a time. Tune with another engine"
            )
        if base.data.validation:
            raise ConfigError("--validation sets data.validation. Give --validation instead")
        told = base.model_dump(mode="json", exclude_defaults=True, exclude={"method"})
        self.given = tuple(f"{key}={toml_value(value)}" for key, value in dotted(told))
        """Settings of all methods that are not the defaults."""
        self.variants = {variant.label: variant for variant in found}
        self.open = {variant.label: settled(base, variant) for variant in found}
        """Settings of each method, without those that are searched."""
        judged = {label: _judged(one, share) for label, one in self.open.items()}
        data = build_data(next(iter(judged.values())))
        self.dataset = data.dataset.name
        self.closed: dict[str, Config] = {}
        """The same, judged on validation rows, with recommended values where none are set."""
        self.base: dict[str, Config] = {}
        """The same as settings of a new run."""
        self.ranges: dict[str, dict[str, Range]] = {}
        self.likelihood: Likelihood | None = None
        self.headlines: dict[str, str] = {}
        for label, one in judged.items():
            chosen, runtime = build_federation(one, data, quiet=True, choosing=True)
            self.closed[label] = chosen
            # Values that were chosen count whatever a trial's number of rounds is.
            self.base[label] = _with(one, chosen.settings_chosen)
            self.ranges[label] = declared_ranges(chosen, searched, fixed[label])
            self.likelihood = runtime.run.likelihood
            headline = runtime.method.models.headline
            self.headlines[label] = f"{headline}_{self.likelihood.metric}"
            if not self.ranges[label]:
                raise ConfigError(
                    f"{label} has no setting to search. Give a range, as in --set "
                    "training.lr=0.001..1"
                )
        for key in searched:
            if not any(key in own for own in self.ranges.values()):
                raise ConfigError(f"{key} has a range, but none of the methods has this setting")

    def settings(self, cell: TuneCell) -> dict[str, Any]:
        """Values of the settings that have ranges, by key."""
        spans, config = self.ranges[cell.label], self.closed[cell.label]
        values = drawn(spans, [config.seed, cell.number])
        if cell.number:
            return values
        known = dict(dotted(config.model_dump(mode="json")))
        # A range that a user gives may lack the recommended value.
        return {
            key: known[key] if spans[key].contains(known.get(key)) else values[key] for key in spans
        }

    def config(self, cell: TuneCell, rounds: int | None = None) -> Config:
        """The settings of a trial.

        Raises:
            ConfigError: they do not go together.
        """
        made = _with(self.base[cell.label], self.settings(cell))
        return made if rounds is None else made.model_copy(update={"rounds": rounds})

    def place(self, cell: TuneCell) -> Path:
        """The folder of a trial."""
        return self.folder / folder_name(cell.label) / f"trial-{cell.number:03d}"

    def stage(self, cells: Iterable[TuneCell], share: float = 1.0) -> TuneStage:
        """Trials as a grid.

        Args:
            cells: which.
            share: of the rounds that they have at least; a run that had more keeps them.
        """
        jobs = {}
        for cell in cells:
            rounds = max(self.rounds(cell.label, share), self._had(cell))
            self._require_evaluated(cell, self.rounds(cell.label, share))
            config = self.config(cell, rounds)
            member = SeedRuns(config, [config.seed], self.place(cell))
            jobs[cell] = GridJob(f"{cell.label}, trial {cell.number}", member, config.seed)
        return TuneStage(jobs)

    def rounds(self, label: str, share: float = 1.0) -> int:
        """A share of a method's rounds, one at least."""
        return max(1, math.ceil(share * self.closed[label].rounds - 1e-9))

    def _had(self, cell: TuneCell) -> int:
        """The number of rounds that the run of a trial is to have already; 0 if there is none."""
        file = RunFolder(self._run(cell)).config_file
        try:
            return int(parse_toml(read_text(file))["rounds"])
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, KeyError) as error:
            raise RunError(f"cannot read {file}: {error}") from None

    def _require_evaluated(self, cell: TuneCell, rounds: int) -> None:
        """See that a run that had more rounds was evaluated after these, or raise a RunError."""
        lines = RunFolder(self._run(cell)).metrics()
        if len(lines) > rounds and self.headlines[cell.label] not in flat(lines[rounds - 1]):
            raise RunError(
                f"{self.place(cell)} was not evaluated after round {rounds}, because it is of a "
                "search with other rounds. Choose another folder"
            )

    def _run(self, cell: TuneCell) -> Path:
        return self.place(cell) / f"seed-{self.closed[cell.label].seed}"

    def outcome(self, cell: TuneCell, share: float = 1.0, trouble: str = "") -> TuneTrial:
        """What a trial came to after a share of its rounds.

        Args:
            cell: which.
            share: of the rounds.
            trouble: why it failed, if it did.
        """
        folder, settings = RunFolder(self._run(cell)), self.settings(cell)
        rounds = self.rounds(cell.label, share)
        lines = folder.metrics()[:rounds]
        seconds = sum(float(one["seconds"]) for one in lines)
        if trouble or not folder.summary_file.exists():
            trouble = trouble or "it has not ended"
            return TuneTrial(cell.number, settings, None, None, 0, rounds, seconds, trouble)
        headline = self.headlines[cell.label]
        kept = flat(lines[-1])
        if self.base[cell.label].keep_checkpoints == "best":
            kept = self._best([flat(line) for line in lines], headline) or kept
        value, nll = (_finite(kept, name) for name in (headline, f"{headline[:6].rstrip('_')}_nll"))
        why = "" if value is not None else f"its {words(headline)} is not finite"
        return TuneTrial(cell.number, settings, value, nll, len(lines), rounds, seconds, why)

    def _best(self, lines: Sequence[Metrics], headline: str) -> Metrics | None:
        """The line of the first round with the best metric."""
        assert self.likelihood is not None
        known = [line for line in lines if _finite(line, headline) is not None]
        choose = max if self.likelihood.higher_is_better else min
        return choose(known, key=lambda line: float(line[headline]), default=None)

    def ranked(self, trials: Iterable[TuneTrial]) -> list[TuneTrial]:
        """Trials, the best first; of equal ones that of the least NLL, then of the least number."""
        assert self.likelihood is not None
        sign = -1.0 if self.likelihood.higher_is_better else 1.0

        def key(trial: TuneTrial) -> tuple[float, float, int]:
            value = math.inf if trial.validation is None else sign * trial.validation
            return value, math.inf if trial.nll is None else trial.nll, trial.number

        return sorted(trials, key=key)

    def run(
        self,
        console: "Console | None",
        *,
        budget: int | None = None,
        minutes: float | None = None,
        search: Search = "random",
        jobs: int = 1,
        track: Sequence[str] = (),
    ) -> Tuning:
        """Start or resume the search, and write its result.

        Args:
            console: where to show progress; None shows nothing.
            budget: runs of each method.
            minutes: of training of each method, instead of a number of runs.
            search: `random`; or `halving`, successive halving, which stops most runs early.
            jobs: runs at a time.
            track: names of trackers.

        Raises:
            ConfigError: the budget is none.
            RunError: no run came to an end.
            KeyboardInterrupt: it was stopped; the same call resumes it.
        """
        if budget is not None and minutes is not None:
            raise ConfigError("the budget is runs or minutes of each method. Give one of them")
        too_few = budget is not None and (not isinstance(budget, Integral) or budget < 1)
        if too_few or (minutes is not None and not minutes > 0):
            raise ConfigError(
                "the budget of each method must be a whole number of runs, 1 or more, or minutes "
                "above 0"
            )
        if search not in ("random", "halving"):
            raise ConfigError(f"search is {search!r}. Choose random or halving")
        if search == "halving" and minutes is not None:
            raise ConfigError("successive halving needs a budget in runs. Give --budget")
        count = BUDGET if budget is None else budget

        def go(cells: Sequence[TuneCell], share: float = 1.0) -> dict[TuneCell, TuneTrial]:
            stage = self.stage(cells, share)
            with GridDisplay(stage, console) as display:
                troubles = run_grid(stage, display, jobs=jobs, track=track)
            return {cell: self.outcome(cell, share, troubles.get(cell, "")) for cell in cells}

        if minutes is not None:
            found = self._in_time(go, minutes * 60, jobs)
            said = f"{minutes:g} minutes"
        elif search == "halving":
            found = self._halved(go, count)
            said = f"the rounds of {count} runs, by successive halving"
        else:
            found = go([TuneCell(label, n) for n in range(count) for label in self.variants])
            said = f"{count} run{'s' if count > 1 else ''}"
        return self._conclude(found, said)

    def _in_time(self, go: Any, seconds: float, jobs: int) -> dict[TuneCell, TuneTrial]:
        """Trials until each method has trained for so long; the last one is not cut short."""
        found: dict[TuneCell, TuneTrial] = {}
        number = dict.fromkeys(self.variants, 0)
        for cell in (TuneCell(n, k) for n in self.variants for k in range(FORESEEN)):
            self.config(cell)  # invalid values raise an error now, not after some minutes
        while True:
            spent = dict.fromkeys(self.variants, 0.0)
            for cell, trial in found.items():
                spent[cell.label] += trial.seconds
            last = {
                label: [t.trouble for c, t in found.items() if c.label == label][-IN_A_ROW:]
                for label in self.variants
            }
            # Runs that fail before their first round take no time.
            failed = {n for n, known in last.items() if len(known) == IN_A_ROW and all(known)}
            left = [n for n in self.variants if spent[n] < seconds and n not in failed]
            if not left:
                return found
            each = max(1, jobs // len(left))
            cells = [TuneCell(n, number[n] + more) for more in range(each) for n in left]
            for label in left:
                number[label] += each
            found |= go(cells)

    def _halved(self, go: Any, budget: int) -> dict[TuneCell, TuneTrial]:
        """Successive halving (Jamieson and Talwalkar 2016): a third go on, for 3 times as long."""
        plans = {label: halving(self.closed[label].rounds, budget) for label in self.variants}
        found: dict[TuneCell, TuneTrial] = {}
        alive = {n: [TuneCell(n, k) for k in range(p[0][0])] for n, p in plans.items()}
        for rung in range(max(map(len, plans.values()))):
            for label, plan in plans.items():
                if rung >= len(plan):
                    continue
                kept, rounds = plan[rung]
                if rung:
                    order = self.ranked(found[cell] for cell in alive[label])
                    alive[label] = [TuneCell(label, t.number) for t in order[:kept]]
                found |= go(alive[label], rounds / self.closed[label].rounds)
        return found

    def _conclude(self, found: Mapping[TuneCell, TuneTrial], budget: str) -> Tuning:
        methods = []
        for label, variant in self.variants.items():
            trials = [trial for cell, trial in found.items() if cell.label == label]
            most = max((t.planned for t in trials if t.validation is not None), default=0)
            full = [t for t in trials if t.planned == most and t.validation is not None]
            if not full:
                why = "; ".join(dict.fromkeys(t.trouble for t in trials))
                warn(f"{label} is left out, because none of its runs came to an end: {why}")
                continue
            best = self.ranked(full)[0]
            trials.sort(key=lambda trial: trial.number)
            methods.append(
                TunedMethod(
                    label, variant, self.ranges[label], tuple(trials), best, self.headlines[label]
                )
            )
        if not methods:
            raise RunError("no run came to an end. The reasons are above")
        made = Tuning(self.folder, tuple(methods), budget, self.share, self.dataset)
        return replace(made, files=tuple(self._write(made)))

    def _write(self, made: Tuning) -> list[Path]:
        """The files of a search."""
        from fedbayes.workflows.experiments.tuning_plot import plot_tuning

        files = []
        for one in made.methods:
            config = _with(self.open[one.label], one.best.settings)
            files.append(self.folder / f"{folder_name(one.label)}.toml")
            write_beside(files[-1], config.dump().encode())
        content = {
            **made.summary,
            "budget": made.budget,
            "validation_share": made.share,
            "dataset": made.dataset,
            "given": self.given,
            "ranges": {m.label: {k: str(r) for k, r in m.ranges.items()} for m in made.methods},
            "variants": {m.label: asdict(m.variant) for m in made.methods},
            "importance": {m.label: m.importance for m in made.methods},
            "trials": {m.label: [asdict(t) for t in m.trials] for m in made.methods},
        }
        files.append(self.folder / TUNED_FILE)
        write_beside(files[-1], (json_text(content, indent=2) + "\n").encode())
        files.append(self.folder / "tuned.svg")
        plot_tuning(made, files[-1])
        return files


def halving(rounds: int, budget: int) -> list[tuple[int, int]]:
    """Trials and rounds of each rung, so that all rounds together are at most those of the budget.

    Args:
        rounds: of a whole run.
        budget: whole runs.
    """
    lengths = [rounds]
    while len(lengths) < 3 and math.ceil(lengths[0] / FEWER) < lengths[0]:
        lengths.insert(0, math.ceil(lengths[0] / FEWER))

    def plan(first: int) -> list[tuple[int, int]]:
        return [(max(1, first // FEWER**k), r) for k, r in enumerate(lengths)]

    def cost(first: int) -> int:
        steps = zip(plan(first), [0, *lengths], strict=False)
        return sum(kept * (length - before) for (kept, length), before in steps)

    first = 1
    while cost(first + 1) <= budget * rounds:
        first += 1
    return plan(first)


def _judged(config: Config, share: float) -> Config:
    """A config whose clients are tested on validation rows, as rarely as its settings allow."""
    data = config.data.model_copy(update={"validation": share})
    often = config.stop_after is not None or config.keep_checkpoints == "best"
    seldom = {} if often else {"evaluate_local_every": 0}
    if not often and config.named_method().models.has_global:
        seldom["evaluate_every"] = 0
    return config.model_copy(update={"data": data, **seldom})


def _of_config(base: Config, method: str) -> list[str]:
    """Settings of a config's table `method` that a method takes over, as `key=value`."""
    own = changed_from_defaults(base.reopened().method)
    if base.method["name"] != method:
        own = {key: value for key, value in own.items() if key == "preset"}
    return [f"method.{key}={toml_value(value)}" for key, value in own.items()]


def _fixed(overrides: Iterable[str]) -> set[str]:
    """Keys of settings that have a value, and so are not searched."""
    pairs = (override.partition("=") for override in overrides)
    return {key.strip() for key, _, value in pairs if value.strip(" \"'") != "auto"}


def _with(config: Config, settings: Mapping[str, Any]) -> Config:
    """A config with other values of some settings."""
    values = config.model_dump()
    for key, value in settings.items():
        assign(values, f"{key}={toml_value(value)}")
    return Config.create(**values)


def _finite(line: Metrics, name: str) -> float | None:
    value = line.get(name)
    return None if value is None or not math.isfinite(value) else float(value)


def tune(
    methods: Methods,
    folder: Path | str | None = None,
    *,
    out: Path | str | None = None,
    budget: int | None = None,
    minutes: float | None = None,
    search: Search = "random",
    ranges: Mapping[str, tuple[float, float] | Sequence[Any]] | None = None,
    validation: float = VALIDATION,
    config: Path | str | None = None,
    jobs: int = 1,
    track: Sequence[str] = (),
    progress: bool | None = None,
    **settings: Any,
) -> Tuning:
    """Choose settings of methods on validation rows, with the same budget for each.

    Args:
        methods: as for `fedbayes.compare`.
        folder: for the runs and the results, `tuned` if None. The same call resumes the search.
        out: the same by the name that it has on the command line.
        budget: runs of each method; 10 if None.
        minutes: of training of each method, instead of a number of runs.
        search: `random`, or `halving` for successive halving.
        ranges: by key of a setting, a tuple `(low, high)`, or a list of values. They replace the
            ranges that methods declare.
        validation: share of each client's training rows that methods are judged on.
        config: a TOML file with settings.
        jobs: runs at a time, each in a process of its own if there are several.
        track: names of trackers.
        progress: whether it is shown; None: in IPython and in notebooks alone.
        **settings: keys of the config, as for `fedbayes.run`, for all runs.

    Raises:
        FedbayesError: a setting or range is invalid, the folder holds runs with others, or no run
            came to an end.

    Examples:
        >>> import fedbayes
        >>> small = {"model": {"hidden": [8]}, "clients": 2, "rounds": 1}
        >>> found = fedbayes.tune("fedavg,fedprox", budget=1, out="tuned", **small)
        >>> [one.label for one in found.methods]
        ['fedavg', 'fedprox']
    """
    place = either(folder=folder, out=out)
    given = (pair for pair in dotted(whole(settings)) if pair[1] not in ({}, None))
    found = TuneSearch(
        Path("tuned" if place is None else place),
        given_variants(methods),
        None if config is None else Path(config),
        [f"{key}={json.dumps(value, default=str)}" for key, value in given],
        {key: _range(key, span) for key, span in (ranges or {}).items()},
        validation,
    )
    return found.run(
        console_for(progress),
        budget=budget,
        minutes=minutes,
        search=search,
        jobs=jobs,
        track=track,
    )


def _range(key: str, span: Any) -> Range:
    """A range as Python gives it."""
    if isinstance(span, list) and span:
        return Range(choices=tuple(span))
    if isinstance(span, tuple) and len(span) == 2:
        found, _ = given_ranges([f"{key}={span[0]}..{span[1]}"])
        if key in found:
            return found[key]
    raise ConfigError(f"the range of {key} is {span!r}. Give (low, high), or a list of values")


def tuned_methods(file: Path) -> tuple[list[Variant], str, list[str]]:
    """The methods of a search with the settings that were best, a sentence on the search, and the
    settings that all methods had, as `key=value`.

    Args:
        file: its `tuned.json`, or its folder.

    Raises:
        ConfigError: it is no such file.
    """
    path = file / TUNED_FILE if file.is_dir() else file
    try:
        told = parse_json(read_text(path))
        found = []
        for entry in told["methods"]:
            before = told["variants"][entry["method"]]
            best = [f"{key}={toml_value(value)}" for key, value in entry["settings"].items()]
            own = [s for s in before["settings"] if s.partition("=")[0] not in entry["settings"]]
            found.append(Variant(before["label"], before["method"], (*own, *best)))
        spans = "; ".join(
            f"{label}: " + ", ".join(f"{key} {span}" for key, span in own.items())
            for label, own in told["ranges"].items()
        )
        return (
            found,
            f"Settings were chosen on validation rows of {told['dataset']}, with {told['budget']} "
            f"of each method, in the ranges {spans}.",
            [str(one) for one in told.get("given", ())],
        )
    except FileNotFoundError:
        raise ConfigError(f"not found: {path}. Create it with fedbayes tune") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a file of fedbayes tune: {error}") from None
