"""A progress bar on the terminal, and nothing when nobody watches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(description: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A progress bar on Rich's console; yields a function that advances it.

    A command line makes that console standard error; within a live display the bar stands below it.

    Args:
        description: What is being done.
        total: Number of steps, or None when it is not known.
    """
    import rich

    console = rich.get_console()
    if not console.is_terminal:
        yield lambda steps: None
        return
    from rich.progress import Progress

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda steps: bar.advance(task, steps)
