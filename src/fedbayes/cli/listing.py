"""`methods`, `version`: what there is."""

import json
from importlib.metadata import version as package_version
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedbayes.cli.app import app


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="One method alone.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """List the methods with their parameters and papers."""
    from fedbayes.experiment.config import find_method
    from fedbayes.methods import METHODS

    chosen = {name: find_method(name)} if name else METHODS
    listing: list[dict[str, Any]] = [
        {
            "name": key,
            "summary": method.summary,
            "paper": method.paper,
            "parameters": {
                field: {"default": info.default, "description": info.description or ""}
                for field, info in method.model_fields.items()
            },
        }
        for key, method in chosen.items()
    ]
    if as_json:
        print(json.dumps(listing, indent=2))
        return
    table = Table("method", "parameter", "default", "", show_lines=False, pad_edge=False)
    for entry in listing:
        about = f"{entry['summary']}\n[dim]{entry['paper']}" if entry["paper"] else entry["summary"]
        table.add_section()
        table.add_row(f"[bold]{entry['name']}", "", "", about)
        for field, info in entry["parameters"].items():
            table.add_row("", field, str(info["default"]), info["description"])
    Console().print(table)


@app.command()
def version() -> None:
    """Print the version."""
    print(package_version("fedbayes"))
