"""Grids of runs, and a run of one: how it is done, here or in another process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from fedbayes.config.config import Config
from fedbayes.core.brief import Brief
from fedbayes.core.files import parse_toml
from fedbayes.runs.simulation import Simulation, Step
from fedbayes.runs.tracking import check
from fedbayes.start import drive
from fedbayes.storage.activity import Notify
from fedbayes.storage.best_tracker import flat
from fedbayes.storage.folder import RunFolder
from fedbayes.workflows.experiments.ood_inputs import foreign_inputs
from fedbayes.workflows.experiments.seed_runs import SeedRuns
from fedbayes.workflows.experiments.uncertainty import try_model

CellT = TypeVar("CellT")
Told = Callable[[int, int], object]
"""Called after a round with its number, and the number of rounds."""


@dataclass(frozen=True)
class GridJob:
    """One run of a grid."""

    name: str
    """For people."""
    member: SeedRuns
    """The runs that it is of."""
    seed: int
    """Which of them."""
    beside: Sequence[Path] = ()
    """Run folders of those that it is compared with, under the same seed; its own may be there."""
    foreign: str | None = None
    """Inputs on which its model is tried, as `foreign_inputs` takes them; None: it is not tried."""

    @property
    def config(self) -> Config:
        """The settings."""
        return self.member.configs[self.seed]

    def packed(self) -> dict[str, Any]:
        """It as JSON, for another process."""
        return {
            "name": self.name,
            "settings": self.config.dump(),
            "seeds": self.member.seeds,
            "folder": str(self.member.folder),
            "seed": self.seed,
            "beside": [str(place) for place in self.beside],
            "foreign": self.foreign,
        }

    @classmethod
    def unpacked(cls, words: dict[str, Any]) -> Self:
        """The job that `packed` gave."""
        settings = Config.create(**parse_toml(words["settings"]))
        member = SeedRuns(settings, words["seeds"], words["folder"])
        beside = list(map(Path, words["beside"]))
        return cls(words["name"], member, words["seed"], beside, words["foreign"])

    def run(self, track: Sequence[str], told: Told) -> None:
        """Start or resume it, and evaluate its model.

        Args:
            track: names of trackers.
            told: called after every round.

        Raises:
            FedbayesError: the run fails; the message says why.
        """
        check(track)

        def begin(notify: Notify) -> Simulation:
            simulation = self.member.open(self.seed, notify, self.beside)
            try:
                if self.foreign is not None:
                    foreign_inputs(simulation.data, simulation.config.data, self.foreign)
            except BaseException:
                simulation.close()
                raise
            return simulation

        def listen(simulation: Simulation, step: Step) -> None:
            told(step.number, simulation.config.rounds)

        if not self.member.ended(self.seed):
            drive(begin, None, listener=listen, track=track)
        if self.foreign is not None:
            self.member.refuse_untrained(self.seed)
            try_model(self.member.place(self.seed), self.foreign)


class Grid(Brief, Generic[CellT]):
    """Runs in one folder, each known by its cell."""

    jobs: dict[CellT, GridJob]
    """Every run, in the order in which they are run."""

    @property
    def cells(self) -> list[CellT]:
        """Every run's."""
        return list(self.jobs)

    def place(self, cell: CellT) -> Path:
        """The run folder of a cell."""
        job = self.jobs[cell]
        return job.member.place(job.seed)

    @cached_property
    def missing(self) -> list[CellT]:
        """What is left to be run or tried, as it was when first asked.

        Raises:
            RunError: a run is there with other settings.
        """
        return [cell for cell in self.jobs if not self.done(cell)]

    def done(self, cell: CellT) -> bool:
        """Whether nothing of a cell is left to be run or tried."""
        job = self.jobs[cell]
        return job.member.ended(job.seed)

    def headline(self, cell: CellT) -> tuple[str, float | None]:
        """Name and value of the metric that the method of a run that has ended is for."""
        summary = RunFolder(self.place(cell)).summary()
        return summary["headline"], flat(summary).get(summary["headline"])
