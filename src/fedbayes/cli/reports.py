"""`report`, `plot`: pages and figures of runs."""

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import rich
import typer

from fedbayes.cli.app import Console, app
from fedbayes.errors import RunError, warn

if TYPE_CHECKING:
    from fedbayes.reports.serve import PageServer

Runs = Annotated[list[Path], typer.Argument(help="Run folders, also of several seeds.")]


@app.command()
def report(
    folders: Runs,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="HTML file to write. Default: report.html.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the page and update it while the runs train.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="With --watch: the port. Default: a free port."),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="With --watch: the network interface. Default: 127.0.0.1 (this machine only)."
        ),
    ] = None,
    show: Annotated[
        bool, typer.Option("--open", help="With --watch: open the page in a browser.")
    ] = False,
) -> None:
    """Write an HTML report of one run, or a comparison of several runs."""
    if watch:
        if out is not None:
            raise RunError(
                "--out has no effect with --watch, which writes no file. Leave out one of them"
            )
        _watch(folders, host, port, show=show)
        return
    given = {"--port": port is not None, "--host": host is not None, "--open": show}
    if alone := [name for name, is_given in given.items() if is_given]:
        raise RunError(f"{', '.join(alone)} has no effect. Add --watch")
    from fedbayes.reports import write_page
    from fedbayes.reports.follow import runs_in

    out = out or Path("report.html")
    with rich.get_console().status("") as status:
        notes = write_page([run for one in folders for run in runs_in(one)], out, status.update)
    _say(notes)
    Console().print(f"wrote {out}", highlight=False, soft_wrap=True)


def _say(notes: list[str]) -> None:
    for note in notes:
        warn(note)


def _watch(folders: list[Path], host: str | None, port: int | None, *, show: bool) -> None:
    """Serve the page until Ctrl-C."""
    console = rich.get_console()
    with console.status("loading PyTorch") as status:
        from fedbayes.reports import serve

        status.update("reading")

        def told(server: "PageServer") -> None:
            status.stop()
            Console().print(f"watch at {server.url}", highlight=False, soft_wrap=True)
            if not server.is_local:
                console.print(
                    "[yellow]note:[/yellow] everyone who can reach this machine can see the page "
                    "with the clients' names and metrics",
                    highlight=False,
                    markup=True,
                    soft_wrap=True,
                )
            console.print("press Ctrl-C to stop; the runs are not affected", highlight=False)
            if show:
                webbrowser.open(server.url)

        serve.watch(folders, told, host=host or serve.LOOPBACK, port=port or 0)


@app.command()
def plot(
    folders: Runs,
    figure: Annotated[
        str,
        typer.Option(
            "--figure",
            "-f",
            help="Figure: headline (accuracy, rmse, …), metrics (others), bytes, clock, "
            "local, nll, loss, sparsity, size, seconds, privacy, clients, split, confusion, "
            "predictions, coverage, reliability, selective, or any metric of metrics.jsonl.",
        ),
    ] = "headline",
    out: Annotated[Path, typer.Option("--out", "-o", help="PNG, SVG or PDF file.")] = Path(
        "figure.png"
    ),
) -> None:
    """Plot one figure of one run or several runs."""
    from fedbayes.reports import plot
    from fedbayes.reports.follow import runs_in

    with rich.get_console().status("") as status:
        notes = plot([run for one in folders for run in runs_in(one)], figure, out, status.update)
    _say(notes)
    Console().print(f"wrote {out}", highlight=False, soft_wrap=True)
