"""The runs of a grid, sequentially or in parallel processes."""

import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Protocol, TypeVar

from fedbayes.config.given import refuse_objects
from fedbayes.core.portable import require_portable
from fedbayes.errors import ConfigError, FedbayesWarning
from fedbayes.federation.engines.workers import affordable, environment
from fedbayes.workflows.experiments.grid import CellT, Grid, GridJob, Told
from fedbayes.workflows.experiments.grid_worker import in_words

_SAID = 500
"""Number of last characters of a process's output to report if it dies."""

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


class _Process:
    """A worker process, started when there is work, and again if it died."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._process: subprocess.Popen[str] | None = None
        self.closed = False
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process)

    def run(self, job: GridJob, track: Sequence[str], told: Told) -> str:
        """Do a job; what was wrong, or nothing, as where it was closed meanwhile."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                # -P: modules are found where this process finds them, in the same order.
                [sys.executable, "-P", "-m", "fedbayes.workflows.experiments.grid_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                env=environment(self._threads),
                text=True,
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps({"job": job.packed(), "track": [*track]}) + "\n")
            process.stdin.flush()
        for line in process.stdout:
            words = json.loads(line)
            if "note" in words:
                warnings.warn(words["note"], FedbayesWarning, stacklevel=2)
            elif "round" in words:
                told(words["round"], words["rounds"])
            else:
                return str(words["trouble"])
        if self.closed:
            return ""
        status = process.wait()
        self._said.seek(0)
        words = self._said.read().decode(errors="replace").strip()[-_SAID:]
        return (
            f"its process ended with exit status {status}"
            + (f" and said: {words}" if words else "")
            + ". Out of memory? Try fewer --jobs; run the same command again to resume"
        )

    def close(self) -> None:
        """End the process."""
        self.closed = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                with suppress(OSError):
                    assert stream is not None
                    stream.close()
        self._said.close()


def _side_by_side(
    todo: dict[CellT, GridJob], watch: Watch[CellT], track: Sequence[str], jobs: int, threads: int
) -> dict[CellT, str]:
    processes = [_Process(threads) for _ in range(jobs)]
    idle: SimpleQueue[_Process] = SimpleQueue()
    for process in processes:
        idle.put(process)

    def work(cell: CellT) -> str:
        process = idle.get()
        try:
            watch.begun(cell)
            trouble = process.run(todo[cell], track, partial(watch.advanced, cell))
            if not process.closed:
                watch.ended(cell, trouble)
            return trouble
        finally:
            idle.put(process)

    pool = ThreadPoolExecutor(jobs, thread_name_prefix="fedbayes-grid")
    try:
        asked: dict[Future[str], CellT] = {pool.submit(work, cell): cell for cell in todo}
        found = {asked[done]: done.result() for done in as_completed(asked)}
    finally:
        # What is under way ends with its process; no further cell is begun.
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.close()
        pool.shutdown(wait=True)
    return {cell: trouble for cell, trouble in found.items() if trouble}
