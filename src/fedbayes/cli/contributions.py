"""`contributions`: what each client adds to a model."""

from typing import Annotated

import rich
import typer

from fedbayes.cli.app import app
from fedbayes.cli.options import RunFolder
from fedbayes.core.files import json_text


@app.command()
def contributions(
    folder: RunFolder,
    orders: Annotated[
        int,
        typer.Option(min=2, help="Number of random orders of clients, if there are more than ten."),
    ] = 200,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the contributions only as JSON on stdout.")
    ] = False,
) -> None:
    """Measure what each client adds to a model: leave-one-out and Shapley values."""
    with rich.get_console().status("loading PyTorch") as status:
        from dataclasses import asdict

        from fedbayes.workflows.clients.contributions import contributions as measured

        found = measured(
            folder, orders, lambda done, every: status.update(f"{done:,} of {every:,} sets")
        )
    if as_json:
        print(json_text(asdict(found)))
        return
    print(found)
    print(f"wrote {folder / 'contributions.json'}, which fedbayes report shows")
