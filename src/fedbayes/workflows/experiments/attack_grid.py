"""One config under attack: every attack on every method under every rule of aggregation.

    METHOD/RULE/ATTACK/    the run folders; ATTACK is none for the honest run

Runs that have ended are not run again, so the same call goes on where it was broken off, and a call
with more attacks, methods or rules adds to what is there.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedbayes.config.config import Config
from fedbayes.core.brief import Brief
from fedbayes.errors import ConfigError, FedbayesError, RunError
from fedbayes.federation.attacks import ATTACKS, find_attack
from fedbayes.federation.attacks.settings import AttackSettings
from fedbayes.likelihoods import Likelihood, find_likelihood
from fedbayes.runs.simulation import Simulation
from fedbayes.start import complete
from fedbayes.storage.best_tracker import flat
from fedbayes.storage.folder import NO_UPDATE, Metrics, RunFolder
from fedbayes.storage.inventory import Inventory
from fedbayes.workflows.experiments.variants import folder_name, named

HONEST = "none"
"""The attack of the runs that others are compared with."""
RULES = ("mean", "median", "trimmed-mean", "krum")
"""The rules of aggregation that are tried unless others are named."""
_REPORTS = {"trimmed-mean": (2, 1), "krum": (2, 3)}
"""Reports that a rule needs: so many for each hostile one, and so many more."""
_REASONS = 3
"""Of reports that did not count, the most that are told of a run."""


@dataclass(frozen=True)
class Cell:
    """One run of the grid: a method under a rule, attacked or honest.

    Each is a name, and settings of its table behind colons: `fedprox:proximal=0.1`,
    `mean:clip=1`, `backdoor:scale=5`.
    """

    method: str
    rule: str
    attack: str

    def place(self, folder: Path) -> Path:
        """Its run folder."""
        return folder.joinpath(*(folder_name(t) for t in (self.method, self.rule, self.attack)))


@dataclass(frozen=True, repr=False)
class Outcome(Brief):
    """What came of the run of a cell."""

    cell: Cell
    headline: str = ""
    """Name of the metric that the method is for, such as `global_accuracy`; empty if there is no
    such run."""
    value: float | None = None
    """Of that metric at the end; None if there is no such run."""
    higher_is_better: bool = True
    """Whether a higher value is a better one."""
    success: float | None = None
    """Share of the test samples that the attack aims at in which it succeeds; None if at none."""
    hostile: list[int] = field(default_factory=list)
    """Clients that attacked."""
    refused: dict[str, int] = field(default_factory=dict)
    """Clients of whom reports were refused, and how many."""
    trouble: str = ""
    """Why there is no such run, or it ended before its time."""


class AttackGrid(Brief):
    """The runs of a config under attack, in one folder.

    Args:
        folder: where the run folders are.
        attacks: what is tried beside the honest run; as in `Cell`.
        methods: likewise; the config's own if None.
        rules: likewise.
        config: TOML file with the settings of all.
        overrides: changes of them, as `key=value`.

    Raises:
        ConfigError: a name is unknown, or something is wrong with the settings.
        RunError: the folder is itself that of a run.
    """

    def __init__(
        self,
        folder: Path,
        attacks: Sequence[str] = tuple(ATTACKS),
        methods: Sequence[str] | None = None,
        rules: Sequence[str] = RULES,
        config: Path | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        """Where the run folders are."""
        RunFolder(folder).require_vacant()
        self._file, self._overrides = config, list(overrides)
        base = Config.load(config, overrides)
        methods = methods or [base.method["name"]]
        kinds = [HONEST, *(kind for kind in attacks if kind != HONEST)]
        self.cells = [
            Cell(method, rule, kind) for method in methods for rule in rules for kind in kinds
        ]
        """Every run, in the order in which they are run."""
        for names, what in ((methods, "method"), (rules, "rule"), (kinds, "attack")):
            if len(set(names)) < len(names):
                raise ConfigError(f"a {what} is named twice in {', '.join(names)}; it counts once")
        for kind in kinds:
            if ":" in (name := named(kind)[0]):
                find_attack(name)  # a mistake is told before the honest runs
        self._configs = {cell: self._config(cell) for cell in self.cells}

    def _shows(self) -> dict[str, object]:
        return {"cells": len(self.cells), "folder": self.folder}

    def _config(self, cell: Cell) -> Config:
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

    def run(self, watch: Callable[[str], object] = lambda _: None) -> list[Outcome]:
        """Run what has not been run yet.

        Args:
            watch: is told which run is under way.

        Returns:
            What came of each cell, in their order.

        Raises:
            RunError: the folder holds runs with other settings, or no run came to anything, or no
                attacked one began.
        """
        missing = [cell for cell in self.cells if not self._ended(cell)]
        troubles: dict[Cell, str] = {}
        for number, cell in enumerate(missing, 1):
            watch(f"{number} of {len(missing)}: {cell.method}, {cell.rule}, {cell.attack}")
            try:
                self._run(cell)
            except FedbayesError as error:  # the method does not take the rule, or the run ended
                troubles[cell] = str(error)
        outcomes = [self._outcome(cell, troubles.get(cell, "")) for cell in self.cells]
        if all(outcome.value is None for outcome in outcomes):
            raise RunError(outcomes[0].trouble)
        attacked = [outcome for outcome in outcomes if outcome.cell.attack != HONEST]
        if attacked and not any(self._began(outcome.cell) for outcome in attacked):
            raise RunError(f"no run was attacked: {attacked[0].trouble}")
        return outcomes

    def _began(self, cell: Cell) -> bool:
        return RunFolder(cell.place(self.folder)).config_file.exists()

    def _ended(self, cell: Cell) -> bool:
        run = RunFolder(cell.place(self.folder))
        if not run.config_file.exists():
            return False
        stored = Config.stored(run.config_file)
        asked = self._configs[cell].as_found(stored).reopened()
        if changed := Inventory(stored.reopened().dump()).changes(asked.dump()):
            raise RunError(
                f"{run.path} holds a run with other settings; choose another folder "
                f"({'; '.join(changed.values())})"
            )
        return run.summary_file.exists() and run.summary()["stopped_reason"] != "interrupted"

    def _run(self, cell: Cell) -> None:
        place = cell.place(self.folder)
        config = None if RunFolder(place).config_file.exists() else self._configs[cell]
        others = [other.place(self.folder) for other in self.cells if other != cell]
        complete(
            lambda notify: Simulation(config, place, notify=notify, beside=others), progress=False
        )

    def _outcome(self, cell: Cell, trouble: str) -> Outcome:
        """What the run folder tells; of a run that broke off, its last round."""
        run = RunFolder(cell.place(self.folder))
        if not run.summary_file.exists():
            lines = run.metrics() if run.config_file.exists() else []
            last = flat(lines[-1]) if lines else {}
            honest = RunFolder(replace(cell, attack=HONEST).place(self.folder))
            if not last or not honest.summary_file.exists():
                return Outcome(cell, trouble=trouble)
            summary = honest.summary()
            headline = summary["headline"]
            refused = Counter(client for line in lines for client in line["refused"])
            if (division := run.partition()) is None:
                raise RunError(f"{run.path} has no partition.npz: restore it, or remove the folder")
            names = tuple(division.names)
            return Outcome(
                cell,
                headline,
                last.get(headline),
                self._likelihood(cell, summary).higher_is_better,
                success=last.get("attack_success"),
                refused={names[int(client)]: count for client, count in refused.items()},
                trouble=trouble,
            )
        summary = run.summary()
        headline = summary["headline"]
        value = flat(summary).get(headline)
        if summary["stopped_reason"] == NO_UPDATE:
            reasons = list(dict.fromkeys(entry["reason"] for entry in summary["losses"]))
            trouble = "; ".join([NO_UPDATE, *reasons[:_REASONS]])
        elif value is None and not trouble:
            off = summary.get("privacy", {}).get("client_metrics") == "off"
            trouble = f"the run has no {headline}" + ": privacy.metrics is off" * off
        return Outcome(
            cell,
            headline,
            value,
            self._likelihood(cell, summary).higher_is_better,
            success=summary.get("attack_success"),
            hostile=summary.get("attack", {}).get("clients", []),
            refused=summary.get("refused_clients", {}),
            trouble=trouble,
        )

    def _likelihood(self, cell: Cell, summary: Metrics) -> type[Likelihood]:
        """That of the runs of a cell, which the summary of one names."""
        task = self._configs[cell].task["likelihood"]
        return find_likelihood(task if ":" in task else summary["likelihood"])


def _of_attack(kind: str, setting: str) -> str:
    """A setting of an attack as one of the config: fields of a user's own class are arguments."""
    own = ":" in kind and setting.partition("=")[0] not in ("clients", "start")
    return f"attack.arguments.{setting}" if own else f"attack.{setting}"
