"""A progress bar on a terminal; in the log of a command, now and then a line."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

FIRST, EVERY = 4.0, 30.0
"""Seconds until the first line in a log, and from one to the next."""


class ProgressLines:
    """Prints what is going on for those who read a log: quick steps say nothing.

    Args:
        console: where to print.
    """

    def __init__(self, console: "Console") -> None:
        self._console, self._due = console, monotonic() + FIRST

    def __call__(self, text: str) -> None:
        """Print a line, if it is time for one."""
        if (now := monotonic()) >= self._due:
            self._due = now + EVERY
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress(description: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A progress bar on Rich's console; yields a function that advances it.

    A command line makes that console standard error; within a live display the bar stands below it.
    Without a terminal, a command prints lines, and a Python program nothing.

    Args:
        description: What is being done.
        total: Number of steps, or None when it is not known.
    """
    import rich

    console = rich.get_console()
    if not console.is_terminal:
        yield _lines(console, description, total) if console.stderr else lambda steps: None
        return
    from rich.progress import Progress

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda steps: bar.advance(task, steps)


def _lines(console: "Console", description: str, total: int | None) -> Callable[[int], None]:
    """Return a function that counts steps and prints how far they are."""
    say, begin, done = ProgressLines(console), monotonic(), 0

    def advance(steps: int) -> None:
        nonlocal done
        done += steps
        if total is None:
            say(f"{description}: {done:,}")
        else:
            left = (monotonic() - begin) * (total - done) / max(done, 1)
            say(f"{description}: {done:,} of {total:,}, {left:.0f} s left")

    return advance
