"""A progress bar on the terminal, and nothing when nobody watches."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(description: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on standard error while work goes on; yields a function that advances it.

    Args:
        description: What is being done.
        total: Number of steps, or None when it is not known.
    """
    if not sys.stderr.isatty():
        yield lambda steps: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda steps: bar.advance(task, steps)
