"""One config under attack: every attack on every method under every rule of aggregation.

    METHOD/RULE/ATTACK/          runs under all seeds, as `seed_runs` has them
    METHOD/RULE/ATTACK/seed-0/   a run folder; ATTACK is none for the honest run

Runs that have ended are not run again. So the same call resumes after an interruption, and a call
with more attacks, methods, rules or seeds adds to what is there.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product, starmap
from pathlib import Path
from statistics import fmean

from rich.console import Console

from fedbayes.config.config import Config
from fedbayes.core.brief import Brief
from fedbayes.errors import ConfigError, RunError
from fedbayes.federation.attacks import ATTACKS, find_attack
from fedbayes.federation.attacks.settings import AttackSettings
from fedbayes.likelihoods import find_likelihood
from fedbayes.storage.best_tracker import flat
from fedbayes.storage.folder import NO_UPDATE, RunFolder
from fedbayes.workflows.experiments.grid import Grid, GridJob
from fedbayes.workflows.experiments.grid_display import GridDisplay
from fedbayes.workflows.experiments.grid_jobs import run_grid
from fedbayes.workflows.experiments.seed_runs import SeedRuns, sample_std
from fedbayes.workflows.experiments.variants import folder_name, named

HONEST = "none"
"""The attack of the runs that others are compared with."""
RULES = ("mean", "median", "trimmed-mean", "krum")
"""The rules of aggregation that are tried unless others are named."""
_REPORTS = {"trimmed-mean": (2, 1), "krum": (2, 3)}
"""Reports that a rule needs: a number for each malicious one, and a number more."""
_REASONS = 3
"""Largest number of rejected reports to list for a run."""


@dataclass(frozen=True)
class AttackCell:
    """A place in the grid: a method under a rule, attacked or honest.

    Each is a name, and settings of its table behind colons: `fedprox:proximal=0.1`,
    `mean:clip=1`, `backdoor:scale=5`.
    """

    method: str
    rule: str
    attack: str

    def __str__(self) -> str:
        return f"{self.method}, {self.rule}, {self.attack}"

    @property
    def honest(self) -> "AttackCell":
        """The one that it is compared with."""
        return replace(self, attack=HONEST)


@dataclass(frozen=True)
class AttackedRun:
    """The result of a run, attacked or honest."""

    seed: int
    value: float | None = None
    """Of the headline metric at the end; None if there is no such run."""
    success: float | None = None
    """Share of the test samples that the attack aims at in which it succeeds; None if at none."""
    hostile: list[int] = field(default_factory=list)
    """Clients that attacked."""
    refused: dict[str, int] = field(default_factory=dict)
    """Clients whose reports were rejected, and the number of these."""
    trouble: str = ""
    """Why there is no such run, or it ended before its time."""


@dataclass(repr=False)
class AttackResult(Brief):
    """The results of the runs of a cell."""

    cell: AttackCell
    runs: list[AttackedRun]
    """By seed."""
    headline: str = ""
    """Name of the metric that the method is for, such as `global_accuracy`; empty if there is no
    such run."""
    higher_is_better: bool = True
    """Whether a higher value is a better one."""
    values: list[float | None] = field(init=False)
    """The headline metric of each run."""
    value: float | None = field(init=False)
    """Its mean; None if a run has none."""
    std: float | None = field(init=False)
    """Its standard deviation over the seeds; None of a single run."""
    success: float | None = field(init=False)
    """Mean share in which the attack succeeds; None if a run has none."""
    success_std: float | None = field(init=False)
    """Its standard deviation over the seeds; None of a single run."""
    trouble: str = field(init=False)
    """Why runs are missing, or ended before their time."""

    def __post_init__(self) -> None:
        self.values, successes = [r.value for r in self.runs], [r.success for r in self.runs]
        self.value, self.std = _mean(self.values), sample_std(self.values)
        self.success, self.success_std = _mean(successes), sample_std(successes)
        self.trouble = "; ".join(dict.fromkeys(run.trouble for run in self.runs if run.trouble))


class AttackGrid(Grid[tuple[AttackCell, int]]):
    """The runs of a config under attack, in one folder.

    Args:
        folder: where the run folders are.
        attacks: attacks to run in addition to the honest run; as in `AttackCell`.
        methods: likewise; the config's own if None.
        rules: likewise.
        config: TOML file with the settings of all.
        overrides: changes of them, as `key=value`.
        seeds: how many, from the config's own on, or which.

    Raises:
        ConfigError: a name is unknown, or something is wrong with the settings.
        RunError: the folder holds runs with other settings, or is itself that of a run.

    Examples:
        >>> from pathlib import Path
        >>> from fedbayes.workflows.experiments.attack_grid import AttackGrid
        >>> grid = AttackGrid(Path("attacked"), attacks=["sign-flip"], rules=["mean", "median"])
        >>> len(grid.jobs)
        4
    """

    def __init__(
        self,
        folder: Path,
        attacks: Sequence[str] = tuple(ATTACKS),
        methods: Sequence[str] | None = None,
        rules: Sequence[str] = RULES,
        config: Path | None = None,
        overrides: Sequence[str] = (),
        seeds: int | Sequence[int] = 1,
    ) -> None:
        self.folder = folder
        """Where the run folders are."""
        RunFolder(folder).require_vacant()
        self._file, self._overrides = config, list(overrides)
        base = Config.load(config, overrides)
        methods = methods or [base.method["name"]]
        kinds = [HONEST, *(kind for kind in attacks if kind != HONEST)]
        for names, what in ((methods, "method"), (rules, "rule"), (kinds, "attack")):
            if len(set(names)) < len(names):
                raise ConfigError(f"a {what} is listed twice in {', '.join(names)}. List it once")
        for kind in kinds:
            if ":" in (name := named(kind)[0]):
                find_attack(name)  # a mistake is told before the honest runs
        self.jobs = {}
        self.members: dict[AttackCell, SeedRuns] = {}
        """The runs of each method, rule and attack."""
        for cell in starmap(AttackCell, product(methods, rules, kinds)):
            place = folder.joinpath(*map(folder_name, (cell.method, cell.rule, cell.attack)))
            self.members[cell] = SeedRuns(self._config(cell), seeds, place)
        for seed in next(iter(self.members.values())).seeds:
            beside = [member.place(seed) for member in self.members.values()]
            for cell, member in self.members.items():
                self.jobs[cell, seed] = GridJob(f"{cell}, seed {seed}", member, seed, beside)

    def _shows(self) -> dict[str, object]:
        return {"runs": len(self.jobs), "folder": self.folder}

    def _config(self, cell: AttackCell) -> Config:
        """The settings of a cell."""
        method, parameters = named(cell.method)
        rule, aggregation = named(cell.rule)
        kind, attack = named(cell.attack)
        given = [*self._overrides, f"method.name={method}"]
        given += [f"method.{setting}" for setting in parameters]
        given += [
            f"aggregation.rule={rule}",
            *(f"aggregation.{setting}" for setting in aggregation),
        ]
        given += [f"attack.kind={kind}", *(_of_attack(kind, setting) for setting in attack)]
        config = Config.load(self._file, given)
        if rule in _REPORTS:
            hostile = config.aggregation.hostile
            if "hostile" not in config.aggregation.model_fields_set:
                hostile = config.attack.clients
            times, more = _REPORTS[rule]
            needed = max(times * hostile + more, config.min_reports)
            given += [f"aggregation.hostile={hostile}", f"min_reports={needed}"]
            config = Config.load(self._file, given)
        return config.model_copy(update={"attack": AttackSettings()}) if kind == HONEST else config

    def run(self, console: Console | None = None, jobs: int = 1) -> list[AttackResult]:
        """Run what has not been run yet.

        Args:
            console: where it is shown; None shows nothing.
            jobs: runs at a time, each in a process of its own if there are several.

        Returns:
            What came of each method, rule and attack, in their order.

        Raises:
            RunError: the folder holds runs with other settings, or no run came to anything, or no
                attacked one began.
            KeyboardInterrupt: it was stopped; the same call goes on.
        """
        with GridDisplay(self, console) as display:
            troubles = run_grid(self, display, jobs=jobs)
        outcomes = [self._outcome(cell, troubles) for cell in self.members]
        if all(value is None for outcome in outcomes for value in outcome.values):
            raise RunError(outcomes[0].trouble)
        attacked = [outcome for outcome in outcomes if outcome.cell.attack != HONEST]
        places = (self.place(cell) for cell in self.jobs if cell[0].attack != HONEST)
        if attacked and not any(RunFolder(place).config_file.exists() for place in places):
            raise RunError(f"no run was attacked: {attacked[0].trouble}")
        return outcomes

    def _outcome(
        self, cell: AttackCell, troubles: Mapping[tuple[AttackCell, int], str]
    ) -> AttackResult:
        """What the run folders of a cell tell."""
        runs = {seed: RunFolder(self.place((cell, seed))) for seed in self.members[cell].seeds}
        folders = [*runs.values(), *(RunFolder(self.place((cell.honest, seed))) for seed in runs)]
        summaries = (folder.summary() for folder in folders if folder.summary_file.exists())
        first = next(summaries, {"headline": ""})
        found = [
            _told(run, seed, first["headline"], troubles.get((cell, seed), ""))
            for seed, run in runs.items()
        ]
        if not first["headline"]:
            return AttackResult(cell, found)
        task = next(iter(self.members[cell].configs.values())).task["likelihood"]
        likelihood = find_likelihood(task if ":" in task else first["likelihood"])
        return AttackResult(cell, found, first["headline"], likelihood.higher_is_better)


def _told(run: RunFolder, seed: int, headline: str, trouble: str) -> AttackedRun:
    """The result in a run folder; of an interrupted run, its last round."""
    if run.summary_file.exists():
        summary = run.summary()
        value = flat(summary).get(headline)
        if summary["stopped_reason"] == NO_UPDATE:
            reasons = list(dict.fromkeys(entry["reason"] for entry in summary["losses"]))
            trouble = "; ".join([NO_UPDATE, *reasons[:_REASONS]])
        elif value is None and not trouble:
            off = summary.get("privacy", {}).get("client_metrics") == "off"
            trouble = f"the run has no {headline}" + ": privacy.metrics is off" * off
        return AttackedRun(
            seed,
            value,
            summary.get("attack_success"),
            summary.get("attack", {}).get("clients", []),
            summary.get("refused_clients", {}),
            trouble,
        )
    lines = run.metrics() if run.config_file.exists() else []
    if not lines:
        return AttackedRun(seed, trouble=trouble)
    if (division := run.partition()) is None:
        raise RunError(f"{run.path} has no partition.npz: restore it, or remove the folder")
    refused = Counter(division.names[int(client)] for line in lines for client in line["refused"])
    last = flat(lines[-1])
    return AttackedRun(
        seed,
        last.get(headline),
        last.get("attack_success"),
        refused=dict(refused),
        trouble=trouble,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean, which is NaN if a value is; None if one is lacking."""
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def _of_attack(kind: str, setting: str) -> str:
    """A setting of an attack as one of the config: fields of a user's own class are arguments."""
    own = ":" in kind and setting.partition("=")[0] not in ("clients", "start")
    return f"attack.arguments.{setting}" if own else f"attack.{setting}"
