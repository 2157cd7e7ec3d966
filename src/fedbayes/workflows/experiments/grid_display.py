"""How far a grid of runs is: live lines on a terminal, a plain line for each run elsewhere."""

import threading
import time
from types import TracebackType
from typing import Generic, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from fedbayes.storage.formatting import clock, number, words
from fedbayes.workflows.experiments.grid import CellT, Grid


class GridDisplay(Generic[CellT]):
    """Shows a grid while it goes.

    Args:
        grid: the runs.
        console: where; None shows nothing.
    """

    def __init__(self, grid: Grid[CellT], console: Console | None) -> None:
        self._grid, self._console = grid, console
        missing = grid.missing
        self._left = {cell: grid.jobs[cell].config.rounds for cell in missing}
        self._all, self._count, self._ended = sum(self._left.values()), len(missing), 0
        self._began: tuple[float, int] | None = None  # the first complete round, and rounds by then
        self._since: dict[CellT, float] = {}
        self._lock = threading.Lock()
        self._lines: dict[CellT, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[said]}", markup=False),
            console=console,
            transient=True,
            disable=console is None or not console.is_terminal,
        )
        self._whole = self._progress.add_task("runs", total=max(self._all, 1), said="")

    def __enter__(self) -> Self:
        there = len(self._grid.jobs) - self._count
        if there:
            self._say(f"{there} of {len(self._grid.jobs)} runs had already ended, and are reused")
        self._progress.start()
        self._update()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def begun(self, cell: CellT) -> None:
        """A run begins, or goes on."""
        with self._lock:
            self._since[cell] = time.monotonic()
            job = self._grid.jobs[cell]
            line = self._progress.add_task(job.name, total=job.config.rounds, said="starting")
            self._lines[cell] = line

    def advanced(self, cell: CellT, number: int, rounds: int) -> None:
        """A round is complete."""
        with self._lock:
            self._left[cell] = rounds - number
            if self._began is None:
                self._began = time.monotonic(), self._done
            said = f"round {number}/{rounds}"
            self._progress.update(self._lines[cell], completed=number, said=said)
            self._update()

    def ended(self, cell: CellT, trouble: str) -> None:
        """A run has ended, or failed."""
        with self._lock:
            self._left[cell] = 0
            self._ended += 1
            self._progress.remove_task(self._lines.pop(cell))
            took = clock(time.monotonic() - self._since[cell])
            left = f", about {left} left" if (left := self._time_left()) else ""
            what = f"failed: {trouble}" if trouble else f"{self._result(cell)}in {took}"
            place = f"{self._ended} of {self._count}"
            self._say(f"{place}: {self._grid.jobs[cell].name}: {what}{left}")
            self._update()

    def _result(self, cell: CellT) -> str:
        name, value = self._grid.headline(cell)
        return "" if value is None else f"{words(name)} {number(value)}, "

    def _say(self, text: str) -> None:
        if self._console is not None:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _time_left(self) -> str:
        """Reckoned from the rounds since the first one; empty at the start and at the end."""
        if self._began is None or self._done == self._all:
            return ""
        began, first = self._began
        if self._done == first:
            return ""
        left = self._all - self._done
        return clock((time.monotonic() - began) / (self._done - first) * left)

    @property
    def _done(self) -> int:
        """Rounds that are done, or will not be."""
        return self._all - sum(self._left.values())

    def _update(self) -> None:
        said = f"{self._ended}/{self._count} runs"
        if left := self._time_left():
            said += f", about {left} left"
        self._progress.update(self._whole, completed=self._done, said=said)
