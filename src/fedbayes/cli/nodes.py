"""`federate nodes`: the nodes that are registered at a SuperLink."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedbayes.cli.federate import LinkOptions, federate_app
from fedbayes.cli.listing import AsJson
from fedbayes.core.files import json_text

if TYPE_CHECKING:
    from fedbayes.flower.registry import Registered


@federate_app.command("nodes")
def nodes(
    *,
    link: LinkOptions,
    ask: Annotated[
        int,
        typer.Option(
            min=0,
            help="Longest time in seconds to ask online nodes for their client. 0: do not ask.",
        ),
    ] = 60,
    as_json: AsJson = False,
) -> None:
    """List the nodes of a SuperLink: status, client and versions."""
    opened = link.open()
    from fedbayes.flower.registry import registered
    from fedbayes.flower.wire import own_versions

    rows, here = registered(opened, ask), own_versions()
    if as_json:
        print(json_text({"here": here, "nodes": [_plain(row) for row in rows]}, indent=2))
        return
    console = Console()
    if not rows:
        console.print(f"no node is registered at {link.superlink}", highlight=False)
        return
    table = Table("node", "name", "status", "last seen", "client", "versions", pad_edge=False)
    for row in rows:
        others = ", ".join(f"{n} {v}" for n, v in row.versions.items() if v != here[n])
        alike = "as here" if row.versions else ""
        about = "; ".join(filter(None, [others or alike, row.trouble]))
        table.add_row(
            str(row.node),
            escape(row.name) or "-",
            row.status,
            _ago(row),
            "-" if row.client is None else str(row.client),
            escape(about),
        )
    console.print(table)
    console.print(f"here: {', '.join(f'{n} {v}' for n, v in here.items())}", style="dim")


def _plain(row: "Registered") -> dict[str, Any]:
    """A row as JSON has it; times are ISO 8601."""
    return {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in vars(row).items()
    }


def _ago(row: "Registered") -> str:
    """When a node was seen last."""
    if row.last_seen is None:
        return "never"
    if row.status == "online":
        return "now"
    seconds = (datetime.now(UTC) - row.last_seen).total_seconds()
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
