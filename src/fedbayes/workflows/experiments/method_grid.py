"""Methods side by side: configs, methods and seeds, a run of each.

    CONFIG/METHOD/          runs of a method under all seeds, as `seed_runs` has them
    CONFIG/METHOD/seed-0/   a run folder

CONFIG is the name of the file with the settings, or of the data set where there is none. Runs that
have ended are not run again. So the same call resumes after an interruption, and a call with more
methods, seeds, configs or rounds adds to what is there.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedbayes.config.config import Config
from fedbayes.core.brief import Brief
from fedbayes.core.files import digest, read_bytes
from fedbayes.errors import ConfigError, RunError
from fedbayes.federation.engine_table import ENGINES
from fedbayes.likelihoods import find_likelihood
from fedbayes.storage.best_tracker import flat
from fedbayes.storage.folder import RunFolder
from fedbayes.storage.metrics_file import Metrics
from fedbayes.workflows.experiments.grid import Grid, GridJob
from fedbayes.workflows.experiments.ood_inputs import (
    AUTO,
    check_foreign,
    foreign_file,
)
from fedbayes.workflows.experiments.seed_runs import SeedRuns, seed_metrics
from fedbayes.workflows.experiments.uncertainty import UncertaintyReport, standing_trial
from fedbayes.workflows.experiments.variants import Variant, folder_name, own_settings, settled


@dataclass(frozen=True)
class GridCell:
    """One run of the grid."""

    task: str
    """Name of the config."""
    label: str
    """Of the method."""
    seed: int


@dataclass(frozen=True, repr=False)
class RunResult(Brief):
    """The result of a run."""

    cell: GridCell
    summary: Metrics = field(default_factory=dict)
    """Of the run; empty where there is none that has ended."""
    values: dict[str, float | None] = field(default_factory=dict)
    """Metrics by name: those of the summary, `bytes` both ways, and those of the trial."""
    trial: UncertaintyReport | None = None
    lines: tuple[Metrics, ...] = ()
    """Its rounds, metrics by name."""
    higher_is_better: bool = True
    """Of the headline metric."""
    trouble: str = ""
    """Why there is no such run."""


class MethodGrid(Grid[GridCell]):
    """The runs of some methods on some configs under some seeds, in one folder.

    Args:
        folder: where they are.
        methods: as `variants` gives them; the method of each config if None.
        configs: TOML files with settings; none for the defaults.
        seeds: how many, from each config's own on, or which.
        overrides: changes of all settings, as `key=value`; those of `method.*` are for the methods
            that have such a parameter.
        foreign: what tells whether models know what they do not know, as `foreign_inputs` takes it.
        tuned: how the methods' settings were chosen, in words; empty if they were not.

    Raises:
        ConfigError: something is wrong with the settings, or a name is given twice.
        RunError: the folder holds runs with other settings, or is itself that of a run.
    """

    def __init__(
        self,
        folder: Path,
        methods: Sequence[Variant] | None = None,
        configs: Sequence[Path] = (),
        seeds: int | Sequence[int] = 5,
        overrides: Sequence[str] = (),
        foreign: str = AUTO,
        tuned: str = "",
    ) -> None:
        self.folder, self.foreign, self.tuned = folder, foreign, tuned
        check_foreign(foreign)
        RunFolder(folder).require_vacant()
        for path in configs:
            if path.suffix.lower() != ".toml":
                raise ConfigError(
                    f"{path} is not a config (.toml). Compare model files with fedbayes evaluate, "
                    "and finished runs with fedbayes report"
                )
        if methods is not None and any(map(_names, overrides)):
            raise ConfigError(
                "--method and --methods exclude each other. List all methods in --methods"
            )
        self.notes: list[str] = []
        """What the user should know of the settings."""
        self.members: dict[tuple[str, str], SeedRuns] = {}
        """The runs of each config and method."""
        self.methods: dict[str, Variant] = {}
        """By label."""
        self.settings: dict[tuple[str, str], Config] = {}
        for config in configs or (None,):
            self._add(config, methods, seeds, overrides)
        self.tasks = list(dict.fromkeys(task for task, _ in self.members))
        """Names of the configs."""
        every = [
            (number, key) for key, runs in self.members.items() for number in range(len(runs.seeds))
        ]
        every.sort(key=lambda pair: pair[0])  # a broken-off comparison has all methods
        cells = [GridCell(*key, self.members[key].seeds[number]) for number, key in every]
        self.jobs = {cell: self._job(cell) for cell in cells}

    def _shows(self) -> dict[str, object]:
        return {"methods": [*self.methods], "tasks": self.tasks, "folder": self.folder}

    def _add(
        self,
        config: Path | None,
        methods: Sequence[Variant] | None,
        seeds: int | Sequence[int],
        overrides: Sequence[str],
    ) -> None:
        first = Config.load(config, [o for o in overrides if not _of_method(o)])
        if methods is None:
            name = str(first.method["name"])
            methods = [Variant(name, name)]
        found, rest, notes = own_settings(methods, [o for o in overrides if not _names(o)])
        self.notes += [note for note in notes if note not in self.notes]
        base = Config.load(config, rest)
        task = folder_name(config.stem if config is not None else _data_name(base))
        if any(task == known for known, _ in self.members):
            raise ConfigError(f"two configs have the name {task}. Rename a file")
        if not ENGINES[base.engine].start:
            raise ConfigError(
                f"engine = {base.engine!r} is started with {ENGINES[base.engine].launcher}, one "
                "run at a time. Compare with another engine"
            )
        for variant in found:
            self.methods.setdefault(variant.label, variant)
            settings = settled(base, variant)
            self.settings[task, variant.label] = settings
            place = self.folder / task / folder_name(variant.label)
            self.members[task, variant.label] = SeedRuns(settings, seeds, place)

    def _job(self, cell: GridCell) -> GridJob:
        own = [member for (task, _), member in self.members.items() if task == cell.task]
        task = f"{cell.task}, " if len(self.tasks) > 1 else ""
        return GridJob(
            f"{task}{cell.label}, seed {cell.seed}",
            self.members[cell.task, cell.label],
            cell.seed,
            [member.place(cell.seed) for member in own],
            self.foreign,
        )

    def headline(self, cell: GridCell) -> tuple[str, float | None]:
        """Name and value of the metric that the method of a run that has ended is for."""
        outcome = self.outcome(cell)
        name = outcome.summary["headline"]
        return name, outcome.values.get(name)

    def done(self, cell: GridCell) -> bool:
        """Whether a run has ended and its model was tried."""
        return super().done(cell) and self._trial(cell) is not None

    def _trial(self, cell: GridCell) -> UncertaintyReport | None:
        return standing_trial(RunFolder(self.place(cell)), self.foreign, self._foreign_file)

    @cached_property
    def _foreign_file(self) -> str:
        return foreign_file(self.foreign)

    @property
    def left_out(self) -> list[Path]:
        """Folders of runs that are there and that this comparison does not name."""
        named = {self.place(cell) for cell in self.cells}
        runs = sorted(path.parent for path in self.folder.glob("*/*/seed-*/config.toml"))
        return [place for place in runs if place not in named]

    def outcome(self, cell: GridCell, trouble: str = "") -> RunResult:
        """What the folder of a cell tells: of the model that it keeps, where that is global.

        Args:
            cell: whose.
            trouble: why it has not ended, if it is known.
        """
        folder = RunFolder(self.place(cell))
        if trouble or not self.members[cell.task, cell.label].ended(cell.seed):
            return RunResult(cell, trouble=trouble or "it has not been run")
        summary, lines = folder.summary(), tuple(flat(line) for line in folder.metrics())
        values: dict[str, float | None] = dict(seed_metrics(summary))
        if (kept := summary.get("model_round", summary["rounds"])) != summary["rounds"]:
            line = next((line for line in lines if line["round"] == kept), {})
            of_models = [name for name in values if name.startswith(("global_", "local_"))]
            values |= {name: line.get(name) for name in of_models}
            values |= flat({"metrics": summary.get("best_metrics", {})})
        values["seconds"] = seconds_of(lines)
        values["bytes"] = summary["bytes_down"] + summary["bytes_up"]
        values["parameters"] = summary["model_parameters"]
        trial = self._trial(cell)
        for name, value in (trial.metrics if trial is not None else {}).items():
            key = name if "_" in name or name == "aurc" else f"global_{name}"
            if values.get(key) is None:
                values[key] = value
        task = self.settings[cell.task, cell.label].task["likelihood"]
        likelihood = find_likelihood(task if ":" in task else summary["likelihood"])
        return RunResult(
            cell,
            summary,
            values,
            trial,
            lines,
            likelihood.higher_is_better,
        )

    def partitions_differ(self, task: str) -> list[int]:
        """Seeds under which not all methods of a config have the same partition, of those that ran.

        Their settings of data are the same, so there are none unless a folder was tampered with.
        """
        odd = []
        for seed in {cell.seed for cell in self.cells}:
            files = [
                RunFolder(self.place(cell)).partition_file
                for cell in self.cells
                if (cell.task, cell.seed) == (task, seed)
            ]
            if len({digest(read_bytes(file)) for file in files if file.exists()}) > 1:
                odd.append(seed)
        return sorted(odd)


def conclude(grid: MethodGrid, troubles: Mapping[GridCell, str]) -> list[RunResult]:
    """What came of all runs, once no more are under way; `seeds.json` of those methods whose runs
    have all ended.

    Raises:
        RunError: there is none that has ended.
    """
    found = [grid.outcome(cell, troubles.get(cell, "")) for cell in grid.cells]
    if not any(outcome.summary for outcome in found):
        why: dict[str, list[str]] = {}
        for outcome in found:
            why.setdefault(outcome.trouble, []).append(outcome.cell.label)
        raise RunError(
            "no run came to an end. "
            + "; ".join(f"{', '.join(dict.fromkeys(who))}: {text}" for text, who in why.items())
        )
    for key, member in grid.members.items():
        if all(o.summary for o in found if (o.cell.task, o.cell.label) == key):
            member.conclude()
    return found


def seconds_of(lines: Sequence[Metrics]) -> float:
    """Seconds of all rounds. The first one, in which code is imported, counts as the median of the
    others where it took longer.

    Args:
        lines: of the rounds.
    """
    first, *others = (float(line["seconds"]) for line in lines)
    return (min(first, statistics.median(others)) if others else first) + sum(others)


def _of_method(override: str) -> bool:
    return override.strip().startswith("method.") and not _names(override)


def _names(override: str) -> bool:
    """Whether a change names the method of a config."""
    return override.partition("=")[0].strip() == "method.name"


def _data_name(config: Config) -> str:
    data: Any = config.data
    return Path(data.path).stem if data.path is not None else str(data.name)
