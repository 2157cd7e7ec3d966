"""Drive a run to its end.

Light to import (no PyTorch), so that a command shows something before it loads anything.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from fedbayes.console.display import Display
from fedbayes.core.signals import ENDS, ended_by
from fedbayes.storage.activity import Notify

if TYPE_CHECKING:
    from fedbayes.runs.simulation import Simulation, Step

Listener = Callable[["Simulation", "Step"], None]
"""Is called after every round, with the simulation and the round."""


def either(**places: Path | str | None) -> Path | str | None:
    """What one of two arguments says; None where neither does. Raises a ConfigError if both do."""
    from fedbayes.errors import ConfigError

    given = [name for name, place in places.items() if place is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are the same argument. Give one of them")
    return places[given[0]] if given else None


def drive(
    start: Callable[[Notify], "Simulation"],
    console: Console | None,
    *,
    listener: Listener | None = None,
    track: Sequence[str] = (),
    busy: str = "starting",
    title: str = "",
    graceful: bool = False,
    conclude: Callable[["Simulation"], None] = lambda simulation: None,
) -> "Simulation":
    """Run a simulation until its last round or until it is stopped: shown, tracked, and closed.

    Args:
        start: makes the simulation; the display stands before, since it may load a lot.
        console: where the run is shown; None shows nothing.
        listener: is called after every round with the simulation and the round.
        track: names of trackers that log the rounds.
        busy: what is shown until the simulation says what it is busy with.
        title: what is shown before the method's name.
        graceful: whether Ctrl-C and SIGTERM end the run after the round under way, a second one at
            once. For the main thread, and where there is a console.
        conclude: is called with the closed simulation, before a run without an update is an error.

    Raises:
        RunError: the run is over, and no round had an update.
        KeyboardInterrupt: it was stopped at once.
    """
    with Display(console, busy, title=title) as display, ExitStack() as stack:
        simulation = stack.enter_context(start(display.notify))
        from fedbayes.runs.tracking import tracking

        if graceful and console is not None:
            stack.enter_context(_stop_after_round(simulation, console))
        log = stack.enter_context(tracking(track, simulation))
        display.begin(simulation)
        for step in simulation:
            display.show(simulation, step)
            log(step.metrics)
            if listener is not None:
                listener(simulation, step)
    conclude(simulation)
    simulation.require_an_update()
    return simulation


@contextmanager
def _stop_after_round(simulation: "Simulation", console: Console) -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP end the run after this round, a second one at once."""

    def ask(number: int) -> None:
        if simulation.stop:
            raise KeyboardInterrupt
        simulation.stop = True
        console.print("stopping after this round; Ctrl-C again stops at once", highlight=False)

    with ended_by(ask, (signal.SIGINT, *ENDS)):
        yield
