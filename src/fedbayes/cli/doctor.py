"""`doctor`: what this machine is for a run."""

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fedbayes.cli.app import Console, app
from fedbayes.core.files import json_text


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Print what this machine is, what runs use of it, and what would be faster or is missing."""
    from dataclasses import asdict

    console = Console()
    with console.status("looking at the machine and what is installed"):
        from fedbayes.workflows.doctor import examine

        found = examine()
    if as_json:
        print(json_text(asdict(found)))
        return
    for title, rows in (("machine", found.machine), ("a run without options", found.chosen)):
        table = Table(title, "", box=None, pad_edge=False)
        for name, value in rows.items():
            shown = f"{int(value) / 2**30:,.1f} GiB" if " free" in name else str(value)
            table.add_row(name, escape(shown))
        console.print(table)
    for title, sentences in (("faster", found.faster), ("warnings", found.warnings)):
        if sentences:
            console.print(f"\n{title}", style="bold")
        for sentence in sentences:
            console.print(f"- {sentence}", markup=False, highlight=False, soft_wrap=True)
    table = Table("extra", "for", "", box=None, pad_edge=False)
    for extra in found.extras:
        state = f"broken: {extra.trouble}" if extra.trouble else "installed"
        if extra.missing:
            state = f"missing: {', '.join(extra.missing)}"
        table.add_row(extra.name, extra.purpose, escape(state))
    console.print()
    console.print(table)
    if missing := [extra.name for extra in found.extras if extra.missing]:
        console.print(f"pip install 'fedbayes[{','.join(missing)}]'", markup=False, soft_wrap=True)
    if found.plugins:
        table = Table("of other packages", "name", "package", "", box=None, pad_edge=False)
        for one in found.plugins:
            state = one.trouble or "installed"
            table.add_row(one.kind, *map(escape, (one.name, one.package, state)))
        console.print()
        console.print(table)
