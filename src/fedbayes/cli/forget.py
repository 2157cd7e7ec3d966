"""`forget`: a run without a client that withdraws."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import rich
import typer

from fedbayes.cli.app import Console, app
from fedbayes.cli.options import RunFolder, Track
from fedbayes.cli.run import run_to_end
from fedbayes.storage.activity import Notify

if TYPE_CHECKING:
    from fedbayes.runs.simulation import Simulation


@app.command()
def forget(
    folder: RunFolder,
    client: Annotated[str, typer.Option("--client", help="The client: its name, or its number.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the new run.")],
    rounds: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Rounds without the client. Default: 10 if its factor is removed in closed "
            "form, else the rounds of the run since the state from which training restarts.",
        ),
    ] = None,
    track: Track = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary of the new run only as JSON.")
    ] = False,
) -> None:
    """Remove a client from a run: a new run without it, and a list of what cannot be removed."""

    def start(notify: Notify) -> "Simulation":
        from fedbayes.runs.simulation import Simulation
        from fedbayes.runs.tracking import check
        from fedbayes.workflows.clients.forgetting import begin

        check(track or ())
        begin(folder, client, out, rounds, notify=notify)
        return Simulation(None, out, notify=notify)

    run_to_end(start, track, as_json)
    from fedbayes.workflows.clients.forgetting import forgotten

    console = rich.get_console() if as_json else Console()
    for line in forgotten(out).lines():
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"delete the old run with: rm -r {shlex.quote(str(folder))}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
