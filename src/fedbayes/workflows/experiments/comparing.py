"""Methods side by side, from names to tables: for the command line and for Python."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbayes.config.given import whole
from fedbayes.console.display import console_for
from fedbayes.core.brief import grid, line
from fedbayes.errors import ConfigError
from fedbayes.start import either
from fedbayes.storage.inventory import dotted
from fedbayes.workflows.experiments.comparison import Compared, compared, content, failed, notes
from fedbayes.workflows.experiments.comparison_files import write_comparison
from fedbayes.workflows.experiments.comparison_table import cells, text, title
from fedbayes.workflows.experiments.grid_display import GridDisplay
from fedbayes.workflows.experiments.grid_jobs import run_grid
from fedbayes.workflows.experiments.method_grid import MethodGrid, RunResult, conclude
from fedbayes.workflows.experiments.ood_inputs import AUTO
from fedbayes.workflows.experiments.tuning import tuned_methods
from fedbayes.workflows.experiments.variants import Methods, Variant, given_variants

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console


@dataclass(frozen=True, repr=False)
class Comparison:
    """What methods came to.

    Examples:
        >>> import fedbayes
        >>> from fedbayes.workflows.experiments.comparing import Comparison
        >>> settings = {"rounds": 1, "model": {"hidden": [8]}, "data": {"clients": 2, "limit": 200}}
        >>> found = fedbayes.compare(["fedavg"], seeds=2, out="one", **settings)
        >>> found.summary["methods"][0]["seeds"]
        (0, 1)
    """

    grid: MethodGrid
    """The runs."""
    outcomes: Sequence[RunResult]
    """Of each run."""
    tables: Sequence[Compared]
    """Of each config."""
    notes: Sequence[str]
    """What is to be known of the tables."""
    files: Sequence[Path]
    """That were written."""

    @property
    def summary(self) -> dict[str, Any]:
        """All of it, as `comparison.json` has it."""
        return content(self.grid, self.tables, self.notes)

    @property
    def failed(self) -> bool:
        """Whether a run failed."""
        return failed(self.tables)

    def __repr__(self) -> str:
        labels = ", ".join(dict.fromkeys(label for one in self.tables for label in one.labels))
        names = ", ".join(one.task for one in self.tables)
        seeds = max((len(one.seeds) for one in self.tables), default=0)
        return line(
            "Comparison",
            {"methods": labels, "data": names, "seeds": seeds, "folder": self.grid.folder},
        )

    def __str__(self) -> str:
        return text(self.tables, self.notes)

    def _repr_html_(self) -> str:
        """What a notebook shows: the tables, and what is to be known of them."""
        notes = "".join(f"<div>{escape(note)}</div>" for note in self.notes)
        tables = (grid(title(one), cells(one)) for one in self.tables)
        return f"<div>{''.join(tables)}{notes}</div>"

    def frame(self) -> "pd.DataFrame":
        """Metrics of all runs, by config, method and seed; NaN where a method has none."""
        import pandas as pd

        ended = [one for one in self.outcomes if one.summary]
        places = [(o.cell.task, o.cell.label, o.cell.seed) for o in ended]
        index = pd.MultiIndex.from_tuples(places, names=["task", "method", "seed"])
        return pd.DataFrame([dict(o.values) for o in ended], index, dtype=float)


def compare(
    methods: Methods | None = None,
    folder: Path | str | None = None,
    *,
    out: Path | str | None = None,
    configs: Sequence[Path | str] = (),
    seeds: int | Sequence[int] = 5,
    jobs: int = 1,
    foreign: str | None = None,
    ood: str | None = None,
    tuned: Path | str | None = None,
    track: Sequence[str] = (),
    progress: bool | None = None,
    **settings: Any,
) -> Comparison:
    """Compare methods over several seeds; the same call resumes an interrupted comparison.

    Args:
        methods: as for `fedbayes compare --methods`: between commas, each with settings of its own
            behind colons if need be; or a TOML file; or a list of such names, classes and
            instances of methods; or a dict of these by label. The method of each config if None.
        folder: of the runs and the tables, `compared` if None. Runs that ended there are kept.
        out: the same by the name that it has on the command line.
        configs: TOML files with settings, a table for each.
        seeds: how many, from each config's own on, or which: `seeds=[0, 3]`.
        jobs: number of parallel runs, each in its own process.
        foreign: former name of `ood`.
        ood: out-of-distribution inputs, on which models should be uncertain; `auto` if None.
        tuned: `tuned.json` of `fedbayes.tune`, whose methods and settings are compared.
        track: names of trackers.
        progress: whether it is shown; None: in IPython and in notebooks alone.
        **settings: keys of the config, as for `fedbayes.run`, for all runs.

    Raises:
        FedbayesError: something is wrong with the settings, the folder holds runs with others, or
            no run came to an end.

    Examples:
        >>> import fedbayes, tempfile
        >>> found = fedbayes.compare(["fedavg", "fedprox"], seeds=1, rounds=1, data="digits",
        ...                          out=tempfile.mkdtemp())
        >>> found.failed
        False
    """
    place = either(folder=folder, out=out)
    inputs = either(foreign=foreign, ood=ood)
    given = (pair for pair in dotted(whole(settings)) if pair[1] not in ({}, None))
    overrides = [f"{key}={json.dumps(value, default=str)}" for key, value in given]
    named, chosen, base = named_methods(
        None if methods is None else given_variants(methods),
        None if tuned is None else Path(tuned),
        alone=not configs,
    )
    grid = MethodGrid(
        Path("compared" if place is None else place),
        named,
        list(map(Path, configs)),
        seeds,
        [*base, *overrides],
        AUTO if inputs is None else str(inputs),
        chosen,
    )
    return run_and_compare(grid, console_for(progress), jobs, track)


def named_methods(
    methods: list[Variant] | None, tuned: Path | None, *, alone: bool
) -> tuple[list[Variant] | None, str, list[str]]:
    """The methods of a comparison, how their settings were chosen, in words, and other settings.

    Args:
        methods: those that are named, if any are.
        tuned: the file of a search, whose methods are meant.
        alone: whether there are no configs, so that other settings are those of the search, too.

    Raises:
        ConfigError: there are both, or the file is none.
    """
    if tuned is None:
        return methods, "", []
    if methods is not None:
        raise ConfigError("--tuned already gives the methods. Leave --methods out")
    found, chosen, given = tuned_methods(tuned)
    return found, chosen, given if alone else []


def run_and_compare(
    grid: MethodGrid, console: "Console | None", jobs: int = 1, track: Sequence[str] = ()
) -> Comparison:
    """Run what has not been run yet, and write the tables of all.

    Args:
        grid: the runs.
        console: where it is shown; None shows nothing.
        jobs: runs at a time.
        track: names of trackers.

    Raises:
        RunError: no run came to an end.
        KeyboardInterrupt: it was stopped; the same call goes on.
    """
    with GridDisplay(grid, console) as display:
        troubles = run_grid(grid, display, jobs=jobs, track=track)
    outcomes = conclude(grid, troubles)
    tables = compared(grid, outcomes)
    said = notes(grid, tables)
    files = write_comparison(grid, outcomes, tables, said, content(grid, tables, said))
    return Comparison(grid, outcomes, tables, said, files)
