"""`report`, `plot`: runs for people to look at."""

from pathlib import Path
from typing import Annotated

import rich
import typer

from fedbayes.cli.app import Console, app

Runs = Annotated[list[Path], typer.Argument(help="Run folders.")]


@app.command()
def report(
    folders: Runs,
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path(
        "report.html"
    ),
) -> None:
    """One HTML page of a run, or of several side by side; needs no network."""
    from fedbayes.reports import write_page

    with rich.get_console().status("") as status:
        write_page(folders, out, status.update)
    Console().print(f"wrote {out}", highlight=False, soft_wrap=True)


@app.command()
def plot(
    folders: Runs,
    figure: Annotated[
        str,
        typer.Option(
            "--figure",
            "-f",
            help="headline (accuracy, rmse, …), metrics (the others of numbers), bytes, local, "
            "nll, loss, sparsity, size, clients, split, confusion, predictions, coverage, "
            "reliability, or any metric of metrics.jsonl.",
        ),
    ] = "headline",
    out: Annotated[Path, typer.Option("--out", "-o", help="PNG, SVG or PDF file.")] = Path(
        "figure.png"
    ),
) -> None:
    """Draw a single figure of one run or several, for a paper."""
    from fedbayes.reports import plot

    with rich.get_console().status("") as status:
        plot(folders, figure, out, status.update)
    Console().print(f"wrote {out}", highlight=False, soft_wrap=True)
