"""`run`, `resume`, `reproduce`: commands that train."""

import shlex
from collections.abc import Callable
from datetime import datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import rich
import typer
from rich.markdown import Markdown
from rich.table import Table

from fedbayes.cli.app import Console, app
from fedbayes.cli.options import (
    Json,
    MoreRounds,
    RunFolder,
    RunOptions,
    Setting,
    SettingsCommand,
    Track,
    overrides,
)
from fedbayes.core.files import SEEDS_FILE, json_text
from fedbayes.errors import RunError
from fedbayes.storage.activity import Notify

if TYPE_CHECKING:
    from fedbayes.config.config import Config
    from fedbayes.runs.simulation import Simulation
    from fedbayes.workflows.experiments.seed_runs import SeedRuns


@app.command(cls=SettingsCommand)
def run(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="TOML file with settings, or tables to train on. Each of several tables is a "
            "client.",
            exists=True,
        ),
    ] = None,
    *,
    options: RunOptions,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of runs with consecutive seeds; prints mean and standard deviation."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Run folder.")] = None,
    track: Track = None,
    settings: Setting = None,
    as_json: Json = False,
) -> None:
    """Train a federation. Without options it trains on digits with FedAvg."""
    given = overrides(settings, **vars(options))

    def settle() -> tuple["Config", Path]:
        from fedbayes.config.config import Config

        settled = Config.load_any(files or (), given)
        return settled, out or new_folder(settled.data.name, settled.method["name"])

    # A wrong setting is reported before PyTorch is imported.
    def start(notify: Notify) -> "Simulation":
        settled, place = settle()
        from fedbayes.runs.simulation import Simulation
        from fedbayes.runs.tracking import check

        check(track or ())
        return Simulation(settled, place, notify=notify)

    def start_seeds() -> "SeedRuns":
        settled, place = settle()
        from fedbayes.runs.tracking import check
        from fedbayes.workflows.experiments.seed_runs import SeedRuns

        check(track or ())
        return SeedRuns(settled, seeds or 1, place)

    if seeds is None:
        run_to_end(start, track, as_json)
    else:
        run_seeds_to_end(start_seeds, track, as_json)


@app.command()
def resume(
    folder: RunFolder,
    rounds: MoreRounds = None,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Resume an interrupted run, or add rounds to a finished run."""

    def start(notify: Notify) -> "Simulation":
        from fedbayes.runs.simulation import Simulation

        return Simulation(None, folder, notify=notify, rounds=rounds)

    def start_seeds() -> "SeedRuns":
        from fedbayes.workflows.experiments.seed_runs import SeedRuns

        return SeedRuns.stored(folder, rounds)

    if (folder / SEEDS_FILE).exists():
        run_seeds_to_end(start_seeds, track, as_json)
    else:
        run_to_end(start, track, as_json)


def new_folder(dataset: str, method: str) -> Path:
    """A folder under `runs` that does not exist yet."""
    name = f"{dataset}-{method.rpartition(':')[2]}-{datetime.now():%Y%m%d-%H%M%S}"
    folder, count = Path("runs") / name, 1
    while folder.exists():
        count += 1
        folder = Path("runs") / f"{name}-{count}"
    return folder


def run_to_end(
    start: Callable[[Notify], "Simulation"],
    track: list[str] | None,
    as_json: bool,
) -> None:
    """Run to the end with a display, and print the result.

    Args:
        start: makes the simulation; the display stands before, since it may load a lot.
        track: names of trackers.
        as_json: whether the summary is printed as JSON alone.
    """

    def conclude(simulation: "Simulation") -> None:
        from fedbayes.runs.outcome import outcome

        summary = simulation.summary()
        if as_json:
            print(json_text(summary))
        else:
            Console().print(outcome(summary))

    simulation = _watch(start, track, conclude)
    if not simulation.over:
        _stopped(f"resume with: {simulation.folder.resume_command}")


def run_seeds_to_end(
    start: Callable[[], "SeedRuns"], track: list[str] | None, as_json: bool
) -> None:
    """As `run_to_end`, for runs of several seeds, sequentially."""
    from fedbayes.console.display import Display
    from fedbayes.runs.outcome import outcome_of_seeds

    with Display(rich.get_console(), "loading PyTorch"):
        repeated = start()
    again = f"fedbayes resume {shlex.quote(str(repeated.folder))}"
    for seed in repeated.missing:
        begin = partial(repeated.open, seed)
        with repeated.naming(seed):
            simulation = _watch(begin, track, title=f"seed {seed}: ", again=again)
        if not simulation.over:
            _stopped(f"resume with: {again}")
    table = repeated.conclude()
    if as_json:
        print(json_text(table))
    else:
        Console().print(outcome_of_seeds(table))
        Console().print(f"in {repeated.folder}", markup=False, highlight=False, soft_wrap=True)


def _watch(
    start: Callable[[Notify], "Simulation"],
    track: list[str] | None,
    conclude: Callable[["Simulation"], None] = lambda simulation: None,
    *,
    title: str = "",
    again: str = "",
) -> "Simulation":
    """Show a run as it goes to its end, and let Ctrl-C end it."""
    from fedbayes.start import drive

    def begin(notify: Notify) -> "Simulation":
        nonlocal again
        simulation = start(notify)
        again = again or simulation.folder.resume_command
        return simulation

    def end(simulation: "Simulation") -> None:
        if not simulation.progress.round:
            raise RunError(f"stopped before the first round; start with {again}")
        conclude(simulation)

    console = rich.get_console()
    try:
        return drive(
            begin,
            console,
            track=track or (),
            busy="loading PyTorch",
            title=title,
            graceful=True,
            conclude=end,
        )
    except KeyboardInterrupt:
        _stopped(f"stopped; resume with: {again}" if again else "stopped before the run began")


def _stopped(words: str) -> NoReturn:
    """Leave as one leaves who was interrupted."""
    rich.get_console().print(words, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(130)


@app.command()
def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(help="Experiment. Without it, the command lists all experiments."),
    ] = None,
    scale: Annotated[
        str, typer.Option(help="small (minutes to hours), or paper (the scale of the paper).")
    ] = "small",
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            "--dataset",
            "-d",
            help="Data set of the experiment, or digits (small, built in). Repeat it for several.",
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of seeds. A verdict needs three.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for results.")] = Path(
        "reproduced"
    ),
) -> None:
    """Reproduce a table or figure of a paper, or resume an interrupted experiment.

    Without a name, list all experiments, their data sets and the verdicts on their claims.
    """
    from fedbayes.core.lazy import installed

    if not (place := installed("experiments", "papers")):
        raise RunError(
            "the experiments of the papers are not installed. Run pip install 'fedbayes[papers]'"
        )
    papers = import_module(place)
    if name in (None, "list"):
        table = Table("experiment", "verdict", "", pad_edge=False)
        for line in papers.lines(out):
            about = f"{line.what}\n[dim]{', '.join(line.datasets)}"
            causes = line.finding.causes if line.finding else ()
            table.add_row(f"[bold]{line.name}", "\n".join((line.verdict, *causes)), about)
        Console().print(table)
        return
    if scale not in ("small", "paper"):
        raise RunError(f"--scale {scale}: choose small or paper")
    console = rich.get_console()
    try:
        with console.status("") as status:
            watch = status.update if console.is_terminal else console.print
            finding = papers.reproduce(
                name,
                out,
                scale=scale,
                datasets=dataset,
                seeds=seeds,
                watch=watch,
            )
    except KeyboardInterrupt:
        console.print("stopped; run the same command again to resume", highlight=False)
        raise typer.Exit(130) from None
    shown = Console()
    shown.print(Markdown(str(finding)) if shown.is_terminal else str(finding), soft_wrap=True)
    said = f"verdict: {finding.verdict}; wrote {out / name}"
    console.print(said, highlight=False, soft_wrap=True)
