"""Runs to their end: started or gone on with from Python, driven from anywhere.

Light to import (no PyTorch), so that a command shows something before it loads anything.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fedbayes.runs.activity import Notify
from fedbayes.runs.display import Display, console_for
from fedbayes.signals import ENDS, ended_by

if TYPE_CHECKING:
    from fedbayes.reports.result import Result
    from fedbayes.runs.config import Config
    from fedbayes.runs.simulation import Simulation, Step

Listener = Callable[["Simulation", "Step"], None]
"""Is told of every round as soon as it is complete."""


def run(
    config: "Config | Path | str | None" = None,
    folder: Path | str | None = None,
    *,
    listener: Listener | None = None,
    track: Sequence[str] = (),
    progress: bool | None = None,
    **settings: Any,
) -> "Result":
    """Run a config to its end.

    Args:
        config: the settings, or the TOML file that has them; or give them as keyword arguments:
            `run(rounds=5, method={"name": "fedprox", "proximal": 0.1})`.
        folder: the run folder, which must not hold a run; a temporary one if None.
        listener: is called after every round with the simulation and the round.
        track: names of trackers that log the rounds; see `fedbayes.runs.tracking`.
        progress: whether the rounds are shown as they go; None: in IPython and in notebooks alone.
        **settings: keys of the config, where there is no `config`.

    Raises:
        FedbayesError: a setting, the data or the network will not do; or no round had an update.
    """
    from fedbayes.runs.config import Config
    from fedbayes.runs.simulation import Simulation
    from fedbayes.runs.tracking import check

    check(track)
    settled = Config.given(config, settings)
    return complete(
        lambda notify: Simulation(settled, folder, notify=notify), listener, track, progress
    )


def resume(
    folder: Path | str,
    *,
    listener: Listener | None = None,
    track: Sequence[str] = (),
    progress: bool | None = None,
) -> "Result":
    """Go on with a run from its last complete round; the end is as if it had never stopped.

    Args:
        folder: the run folder.
        listener: as for `run`.
        track: as for `run`.
        progress: as for `run`.
    """
    from fedbayes.runs.simulation import Simulation

    return complete(
        lambda notify: Simulation(None, folder, notify=notify), listener, track, progress
    )


def complete(
    start: Callable[[Notify], "Simulation"],
    listener: Listener | None = None,
    track: Sequence[str] = (),
    progress: bool | None = None,
    title: str = "",
) -> "Result":
    """Run a simulation to its end, and have what came of it.

    Args:
        start: makes the simulation.
        listener: as for `run`.
        track: as for `run`.
        progress: as for `run`.
        title: what is shown before the method's name.
    """
    from fedbayes.reports.result import Result

    simulation = drive(start, console_for(progress), listener=listener, track=track, title=title)
    return Result(simulation.folder.path, simulation.temporary)


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
    """Let Ctrl-C (and SIGTERM, SIGHUP) end the run after the round under way, a second one at
    once.
    """

    def ask(number: int) -> None:
        if simulation.stop:
            raise KeyboardInterrupt
        simulation.stop = True
        console.print("stopping after this round; Ctrl-C again stops at once", highlight=False)

    with ended_by(ask, (signal.SIGINT, *ENDS)):
        yield
