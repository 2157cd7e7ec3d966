"""The runs of a grid, sequentially or in parallel processes."""

from collections.abc import Sequence
from concurrent.futures import Future, as_completed
from functools import partial
from typing import Protocol, TypeVar

from joblib import cpu_count

from fedbayes.config.given import refuse_objects
from fedbayes.core.portable import require_portable
from fedbayes.errors import ConfigError, warn
from fedbayes.federation.engines.workers import DiedError, Process, ProcessPool, affordable
from fedbayes.workflows.experiments.grid import CellT, Grid, GridJob, Told
from fedbayes.workflows.experiments.grid_worker import in_words

_Seen = TypeVar("_Seen", contravariant=True)


class Watch(Protocol[_Seen]):
    """Receives the progress of a grid, from any thread."""

    def begun(self, cell: _Seen) -> None:
        """A run begins, or goes on."""

    def advanced(self, cell: _Seen, number: int, rounds: int) -> None:
        """A round is complete."""

    def ended(self, cell: _Seen, trouble: str) -> None:
        """A run has ended, or failed."""


def run_grid(
    grid: Grid[CellT], watch: Watch[CellT], *, jobs: int = 1, track: Sequence[str] = ()
) -> dict[CellT, str]:
    """Run what has not been run yet. A run that fails leaves the others as they are.

    Args:
        grid: the runs.
        watch: called with the progress.
        jobs: runs at a time, each in a process of its own if there are several.
        track: names of trackers.

    Returns:
        What was wrong with the runs that failed.

    Raises:
        ConfigError: jobs are not at least 1; or bits = 'portable' is not possible here.
        RunError: the folder holds runs with other settings.
        KeyboardInterrupt: it was stopped; the same call goes on.
    """
    todo = {cell: grid.jobs[cell] for cell in grid.missing}
    threads = max((job.config.threads for job in todo.values()), default=1)
    if any(job.config.bits == "portable" for job in todo.values()):
        require_portable()  # before the first run, since a run that fails does not stop the others
    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}. Give 1 or more")
    if jobs > 1:
        for job in todo.values():
            refuse_objects(job.config.model_dump(mode="json"), "A process of its own (jobs)")
        jobs = min(affordable(jobs, threads), max(len(todo), 1))
    if jobs > 1:
        return _side_by_side(todo, watch, track, jobs, threads)
    return _one_by_one(todo, watch, track)


def _one_by_one(
    todo: dict[CellT, GridJob], watch: Watch[CellT], track: Sequence[str]
) -> dict[CellT, str]:
    troubles = {}
    for cell, job in todo.items():
        watch.begun(cell)
        trouble = ""
        try:
            job.run(track, partial(watch.advanced, cell))
        except Exception as error:
            trouble = troubles[cell] = in_words(error)
        watch.ended(cell, trouble)
    return troubles


class _Process(Process):
    """A process that does jobs of a grid."""

    def run(self, job: GridJob, track: Sequence[str], told: Told) -> str:
        """Do a job; what was wrong, or nothing."""
        self.tell({"job": job.packed(), "track": [*track]})
        while True:
            words, _ = self.hear()
            if "note" in words:
                warn(words["note"])
            elif "round" in words:
                told(words["round"], words["rounds"])
            else:
                return str(words["trouble"])


def _side_by_side(
    todo: dict[CellT, GridJob], watch: Watch[CellT], track: Sequence[str], jobs: int, threads: int
) -> dict[CellT, str]:
    module, cores = "fedbayes.workflows.experiments.grid_worker", max(threads, cpu_count() // jobs)
    fresh = partial(_Process, module, threads, cores)
    pool = ProcessPool([fresh() for _ in range(jobs)], "fedbayes-grid")

    def work(cell: CellT) -> str:
        process = pool.idle.get()
        try:
            watch.begun(cell)
            try:
                trouble = process.run(todo[cell], track, partial(watch.advanced, cell))
            except DiedError:
                if pool.closed:
                    return ""
                trouble = (
                    f"its process ended with {process.last_words()}. Out of memory? Try fewer "
                    "--jobs; run the same command again to resume"
                )
                process = pool.replace(process, fresh)
            watch.ended(cell, trouble)
            return trouble
        finally:
            pool.idle.put(process)

    try:
        asked: dict[Future[str], CellT] = {pool.threads.submit(work, cell): cell for cell in todo}
        found = {asked[done]: done.result() for done in as_completed(asked)}
    finally:
        pool.close()
    return {cell: trouble for cell, trouble in found.items() if trouble}
