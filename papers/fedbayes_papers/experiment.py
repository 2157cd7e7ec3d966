"""What an experiment is: a grid of measurements, kept as they come, a table and a figure."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pandas as pd

from fedbayes.config.config import Config
from fedbayes.core.files import write_beside
from fedbayes.errors import RunError
from fedbayes.runs.simulation import Simulation
from fedbayes.storage.folder import RunFolder
from fedbayes_papers.finding import Finding, Part, Scale

Watch = Callable[[str], None]
"""Is told what is being done."""

Row = dict[str, Any]
"""One measurement: what was measured (the keys), and what came out."""


def opened(folder: Path, config: Config) -> Simulation:
    """The run of this config in this folder, to begin or to go on."""
    return Simulation(None if begun(folder, config) else config, folder)


def finished(folder: Path, config: Config) -> RunFolder:
    """The same run at its end."""
    if not begun(folder, config) or not (folder / "summary.json").exists():
        with opened(folder, config) as simulation:
            for _ in simulation:
                pass
    return RunFolder(folder)


def begun(folder: Path, config: Config) -> bool:
    """Whether the run is there already.

    Raises:
        RunError: the folder holds a run with other settings.
    """
    if not (folder / "config.toml").exists():
        return False
    engines = {"engine", "workers", "ray"}
    stored = RunFolder(folder).config()
    asked = config.as_found(stored).reopened()
    if stored.reopened().model_dump(exclude=engines) != asked.model_dump(exclude=engines):
        raise RunError(f"{folder} holds a run with other settings; choose another folder")
    return True


class Results:
    """Measurements in a file of JSON lines, so that an experiment goes on where it stopped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        if path.exists():
            whole, end, cut = path.read_text().rpartition("\n")
            if cut:  # by a kill, as it was written
                write_beside(path, (whole + end).encode())
            try:
                self.rows = [json.loads(line) for line in whole.splitlines()]
            except ValueError as error:
                raise RunError(f"{path} is damaged ({error}); remove it to begin anew") from None

    def missing(self, keys: Sequence[Row]) -> list[Row]:
        """Those of the keys that were not measured yet."""
        return [key for key in keys if not any(key.items() <= row.items() for row in self.rows)]

    def add(self, row: Row) -> None:
        """Append a measurement to the file of results."""
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def table(self, keys: Sequence[Row]) -> pd.DataFrame:
        """The measurements of these keys."""
        return pd.DataFrame(
            [row for row in self.rows if any(key.items() <= row.items() for key in keys)]
        )


def fingerprint(settings: Any) -> str:
    """What tells measurements under these settings (of JSON's types) from those under others."""
    return f"{crc32(json.dumps(settings).encode()):08x}"


@dataclass(frozen=True)
class Request:
    """What is asked of an experiment."""

    experiment: str
    folder: Path
    """Of all experiments; they share what was trained."""
    scale: Scale
    datasets: Sequence[str]
    seeds: int | None = None
    """How many; the experiment's own number if None."""
    watch: Watch = lambda _: None

    @property
    def small(self) -> bool:
        """Whether it is to be done on two cores."""
        return self.scale == "small"

    @property
    def out(self) -> Path:
        """The experiment's own folder, made if it is missing."""
        place = self.folder / self.experiment
        place.mkdir(parents=True, exist_ok=True)
        return place

    def repeats(self, small: int, paper: int) -> range:
        """The seeds: as many as are asked for, else as many as belong to the scale."""
        return range(self.seeds or (small if self.small else paper))

    def found(self, parts: Sequence[Part], seeds: int, note: str) -> Finding:
        """What it came to."""
        return Finding(
            experiment=self.experiment,
            scale=self.scale,
            datasets=tuple(self.datasets),
            seeds=seeds,
            parts=tuple(parts),
            note=note,
        )


@dataclass(frozen=True)
class Experiment:
    """A table or a figure of a paper."""

    name: str
    """As on the command line."""
    what: str
    """What it measures, in one line."""
    datasets: tuple[str, ...]
    """The data that it is on; `digits`, which needs no download, is always possible too."""
    run: Callable[[Request], Finding]
    """Measure what is missing on some of the data sets, telling what is being done. Leaves
    `results.jsonl` or runs, and a figure."""


def mean_and_std(values: Sequence[float], digits: int = 3) -> str:
    """`0.951 ± 0.002`; no std for a single value."""
    found = np.asarray(values, dtype=float)
    text = f"{found.mean():.{digits}f}"
    return text if len(found) < 2 else f"{text} ± {found.std(ddof=1):.{digits}f}"
