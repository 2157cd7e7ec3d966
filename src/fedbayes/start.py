"""Runs from Python: start one, go on with one, each to its end."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedbayes.runs.activity import Notify
from fedbayes.runs.config import Config
from fedbayes.runs.display import Display, console_for
from fedbayes.runs.result import Result
from fedbayes.runs.simulation import Simulation, Step
from fedbayes.runs.tracking import check, tracking

Listener = Callable[[Simulation, Step], None]
"""Is told of every round as soon as it is complete."""


def run(
    config: Config | None = None,
    folder: Path | str | None = None,
    *,
    listener: Listener | None = None,
    track: Sequence[str] = (),
    progress: bool | None = None,
    **settings: Any,
) -> Result:
    """Run a config to its end.

    Args:
        config: the settings, or give them as keyword arguments: `run(rounds=5,
            method={"name": "fedprox", "proximal": 0.1})`.
        folder: the run folder, which must not hold a run; a temporary one if None.
        listener: is called after every round with the simulation and the round.
        track: names of trackers that are told of the rounds; see `fedbayes.runs.tracking`.
        progress: whether the rounds are shown as they go; None: in IPython and in notebooks alone.
        **settings: keys of the config, where there is no `config`.

    Raises:
        FedbayesError: a setting, the data or the network will not do; or no round had an update.
    """
    check(track)
    settled = config or Config.create(**settings)
    return complete(
        lambda notify: Simulation(settled, folder, notify=notify), listener, track, progress
    )


def resume(
    folder: Path | str,
    *,
    listener: Listener | None = None,
    track: Sequence[str] = (),
    progress: bool | None = None,
) -> Result:
    """Go on with a run from its last complete round; the end is as if it had never stopped.

    Args:
        folder: the run folder.
        listener: as for `run`.
        track: as for `run`.
        progress: as for `run`.
    """
    return complete(
        lambda notify: Simulation(None, folder, notify=notify), listener, track, progress
    )


def complete(
    start: Callable[[Notify], Simulation],
    listener: Listener | None = None,
    track: Sequence[str] = (),
    progress: bool | None = None,
    title: str = "",
) -> Result:
    """Run a simulation to its end.

    Args:
        start: makes the simulation.
        listener: as for `run`.
        track: as for `run`.
        progress: as for `run`.
        title: what is shown before the method's name.
    """
    with (
        Display(console_for(progress), title=title) as display,
        start(display.notify) as simulation,
        tracking(track, simulation) as tell,
    ):
        display.begin(simulation)
        for step in simulation:
            display.show(simulation, step)
            tell(step.metrics)
            if listener is not None:
                listener(simulation, step)
        simulation.require_an_update()
    return Result(simulation.folder.path, simulation._temporary)
