"""`run`, `resume`, `reproduce`: what trains."""

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import rich
import typer
from rich.console import Console
from rich.table import Table

from fedbayes.cli.app import app
from fedbayes.cli.options import DataDir, Json, Setting, Track, overrides
from fedbayes.errors import RunError
from fedbayes.experiment.activity import Notify

if TYPE_CHECKING:
    from fedbayes.experiment.run import Simulation


@app.command()
def run(
    config: Annotated[Path | None, typer.Argument(help="TOML file with settings.")] = None,
    method: Annotated[str | None, typer.Option("--method", "-m", help="Method.")] = None,
    dataset: Annotated[str | None, typer.Option("--dataset", "-d", help="Data set.")] = None,
    model: Annotated[str | None, typer.Option(help="Network.")] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    cohort: Annotated[str | None, typer.Option(help="Clients in a round: 10, or 0.1.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    partition: Annotated[str | None, typer.Option(help="How data are divided.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Dirichlet concentration.")] = None,
    engine: Annotated[
        str | None, typer.Option(help="sequential, workers or flower-simulation.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes of engine workers.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all randomness.")] = None,
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Run folder.")] = None,
    track: Track = None,
    settings: Setting = None,
    as_json: Json = False,
) -> None:
    """Run a federation; the defaults learn digits with FedAvg."""
    shortcuts = {
        "method.name": method,
        "data.name": dataset,
        "model.name": model,
        "data.clients": clients,
        "cohort": cohort,
        "rounds": rounds,
        "data.partition": partition,
        "data.alpha": alpha,
        "engine": engine,
        "workers": workers,
        "seed": seed,
        "data.dir": data_dir,
    }

    def start(notify: Notify) -> "Simulation":
        from fedbayes.experiment.config import Config
        from fedbayes.experiment.run import Simulation

        settled = Config.load(config, [*overrides(shortcuts), *(settings or [])])
        place = out or new_folder(settled.data.name, settled.method["name"])
        return Simulation(settled, place, notify=notify)

    drive(start, track, as_json)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="Run folder.")],
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Go on with a run that was interrupted or killed."""

    def start(notify: Notify) -> "Simulation":
        from fedbayes.experiment.run import Simulation

        return Simulation(None, folder, notify=notify)

    drive(start, track, as_json)


def new_folder(dataset: str, method: str) -> Path:
    """A folder under `runs` that does not exist yet."""
    name = f"{dataset}-{method.rpartition(':')[2]}-{datetime.now():%Y%m%d-%H%M%S}"
    folder, count = Path("runs") / name, 1
    while folder.exists():
        count += 1
        folder = Path("runs") / f"{name}-{count}"
    return folder


def drive(start: Callable[[Notify], "Simulation"], track: list[str] | None, as_json: bool) -> None:
    """Run to the end with a display, and say what came of it.

    Args:
        start: makes the simulation; the display stands before, since it may load a lot.
        track: names of trackers.
        as_json: whether the summary is printed as JSON alone.
    """
    from fedbayes.experiment.display import Display, outcome, stop_after_round

    console, again = rich.get_console(), ""
    try:
        with Display(console, "loading PyTorch") as display:
            from fedbayes.experiment.tracking import check, tracking

            check(track or ())
            simulation = start(display.notify)
            path = simulation.folder.path
            federate = " federate" if simulation.config.engine == "flower" else ""
            again = f"fedbayes{federate} resume {path}"
            with (
                simulation,
                stop_after_round(simulation, console),
                tracking(track or (), simulation) as tell,
            ):
                display.begin(simulation)
                for step in simulation:
                    display.show(simulation, step)
                    tell(step.metrics)
                if not simulation.progress.round:
                    raise RunError(f"stopped before the first round; start with {again}")
                summary = simulation.summary()
    except KeyboardInterrupt:
        words = f"stopped; go on with: {again}" if again else "stopped before the run began"
        console.print(words, markup=False, highlight=False)
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(summary))
    else:
        Console().print(outcome(summary))
    if summary["stopped_reason"] == "interrupted":
        console.print(f"go on with: {again}", markup=False, highlight=False)
        raise typer.Exit(130)


@app.command()
def reproduce(
    name: Annotated[str | None, typer.Argument(help="Experiment; none, or list: all.")] = None,
    scale: Annotated[
        str, typer.Option(help="small (minutes to some hours) or paper (its scale).")
    ] = "small",
    dataset: Annotated[
        list[str] | None, typer.Option("--dataset", "-d", help="Some of its data sets alone.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for results.")] = Path(
        "reproduced"
    ),
) -> None:
    """Measure a table or figure of a paper; go on where the last try stopped."""
    from fedbayes.experiment.papers import EXPERIMENTS, reproduce

    if name in (None, "list"):
        table = Table("experiment", "data", "", pad_edge=False)
        for experiment in EXPERIMENTS.values():
            table.add_row(
                f"[bold]{experiment.name}", ", ".join(experiment.datasets), experiment.what
            )
        Console().print(table)
        return
    if scale not in ("small", "paper"):
        raise RunError(f"--scale {scale}: choose small or paper")
    console = rich.get_console()
    try:
        with console.status("") as status:
            watch = status.update if console.is_terminal else console.print
            text = reproduce(name, out, scale=scale, datasets=dataset, watch=watch)  # type: ignore[arg-type]
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on", highlight=False)
        raise typer.Exit(130) from None
    print(text)
    console.print(f"wrote {out / name}", highlight=False, soft_wrap=True)
