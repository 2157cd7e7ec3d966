"""Runs to their end: started or gone on with from Python, driven from anywhere.

Light to import (no PyTorch), so that a command shows something before it loads anything.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fedbayes.console.display import Display, console_for
from fedbayes.core.signals import ENDS, ended_by
from fedbayes.storage.activity import Notify

if TYPE_CHECKING:
    from fedbayes.config.config import Config
    from fedbayes.reports.result import Result
    from fedbayes.runs.simulation import Simulation, Step

Listener = Callable[["Simulation", "Step"], None]
"""Is told of every round as soon as it is complete."""


def run(
    config: "Config | Path | str | None" = None,
    folder: Path | str | None = None,
    *,
    out: Path | str | None = None,
    listener: Listener | None = None,
    track: Sequence[str] = (),
    progress: bool | None = None,
    **settings: Any,
) -> "Result":
    """Run a federation to its end.

        fedbayes.run(method="fedprox", data="digits", model="lenet5", rounds=5, lr=0.05)
        fedbayes.run(data=frame, label="outcome", group="hospital", out="runs/mine")

    Args:
        config: the settings, or the TOML file that has them; or give them as keyword arguments.
        folder: the run folder, which must not hold a run; a temporary one if None.
        out: the same by the name that it has on the command line.
        listener: is called after every round with the simulation and the round.
        track: names of trackers that log the rounds; see `fedbayes.runs.tracking`.
        progress: whether the rounds are shown as they go; None: in IPython and in notebooks alone.
        **settings: keys of the config, where there is no `config`; tables are dicts. A name may
            stand for a table (`method="fedprox"`, `data="mine.csv"`), and so may a Python object:
            a class or instance of a method, a `torch.nn.Module` or its class as the model, a
            DataFrame as the data. Keys of a table that options of the command line set have these
            names too: `clients`, `partition`, `alpha`, `label`, `group`, `lr`, `epochs`,
            `batch_size`, `optimizer`, `likelihood` and `device`.

    Raises:
        FedbayesError: a setting, the data or the network will not do; or no round had an update.

    Examples:
        >>> import fedbayes
        >>> settings = {"rounds": 1, "model": {"hidden": [8]}, "data": {"clients": 2, "limit": 200}}
        >>> result = fedbayes.run(method="fedprox", **settings)
        >>> result.summary["rounds"], result.summary["stopped_reason"]
        (1, 'completed')
    """
    from fedbayes.config.config import Config
    from fedbayes.runs.simulation import Simulation
    from fedbayes.runs.tracking import check

    place = either(folder=folder, out=out)
    check(track)
    settled = Config.given(config, settings)
    return complete(
        lambda notify: Simulation(settled, place, notify=notify), listener, track, progress
    )


def resume(
    folder: Path | str,
    *,
    rounds: int | None = None,
    listener: Listener | None = None,
    track: Sequence[str] = (),
    progress: bool | None = None,
    **objects: Any,
) -> "Result":
    """Resume a run from its last complete round; the end is as if it had never stopped.

        fedbayes.resume("runs/mine", rounds=40)
        fedbayes.resume("runs/mine", model=net)

    Args:
        folder: the run folder.
        rounds: how many rounds the run is to have in all, also after it has ended; None: as before.
        listener: as for `run`.
        track: as for `run`.
        progress: as for `run`.
        **objects: the Python objects that `run` was given and no module has, by the same names:
            `model=net` for a network that was built already, `method=Mine` for a class of a
            notebook. Settings stay as they were.

    Raises:
        FedbayesError: the folder holds no run, an object is lacking, or as for `run`.

    Examples:
        >>> import fedbayes
        >>> settings = {"rounds": 1, "model": {"hidden": [8]}, "data": {"clients": 2, "limit": 200}}
        >>> result = fedbayes.run(out="resumed", **settings)
        >>> fedbayes.resume("resumed", rounds=2).summary["rounds"]
        2
    """
    from fedbayes.runs.simulation import Simulation
    from fedbayes.storage.folder import RunFolder

    RunFolder(Path(folder)).give_objects(objects)
    return complete(
        lambda notify: Simulation(None, folder, notify=notify, rounds=rounds),
        listener,
        track,
        progress,
    )


def either(**places: Path | str | None) -> Path | str | None:
    """What one of two arguments says; None where neither does.

    Raises:
        ConfigError: both do.
    """
    from fedbayes.errors import ConfigError

    given = [name for name, place in places.items() if place is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are one argument; give one of them")
    return places[given[0]] if given else None


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
