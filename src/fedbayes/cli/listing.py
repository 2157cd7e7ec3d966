"""`methods`, `settings`, `version`: lists."""

from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedbayes.cli.app import app
from fedbayes.cli.options import complete_key, completes
from fedbayes.core.files import json_text
from fedbayes.core.lazy import offers
from fedbayes.errors import ConfigError, warn
from fedbayes.version import __version__

if TYPE_CHECKING:
    from fedbayes.config.listing import Listed
    from fedbayes.config.settings import SettingRow

AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON.")]


@app.command()
def methods(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Method; prints its paper and parameters.", autocompletion=completes("method.name")
        ),
    ] = None,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Print which features of a round each method supports.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the methods, or print the paper and parameters of one method."""
    from fedbayes.config.listing import built_in, listed

    chosen = built_in()
    if name is None:
        chosen = chosen | _installed(chosen)
    elif name in chosen:
        chosen = {name: chosen[name]}
    else:
        from fedbayes.config.config import find_method

        chosen = {name: listed(find_method(name))}
    if as_json:
        listing: list[dict[str, Any]] = [
            {
                "name": key,
                "package": one.package,
                "summary": one.summary,
                "paper": one.paper,
                "parameters": {
                    row.key.removeprefix("method."): {
                        "default": row.default,
                        "description": row.description,
                    }
                    for row in one.parameters
                },
                "refusals": one.refusals,
            }
            for key, one in chosen.items()
        ]
        print(json_text(listing, indent=2))
        return
    console = Console(highlight=False)
    if matrix:
        _print_matrix(console, chosen)
        return
    if name is None:
        table = Table("method", "", box=None, pad_edge=False, show_header=False)
        for key, one in chosen.items():
            table.add_row(f"[bold]{escape(key)}", escape(one.summary) + _package(one))
        console.print(table)
        console.print("\nPaper and parameters of one: fedbayes methods NAME")
        return
    told = chosen[name]
    console.print(f"[bold]{escape(name)}[/bold]: {escape(told.summary)}", markup=True)
    if told.paper:
        console.print(told.paper, style="dim")
    console.print("" if told.parameters else "It has no parameters.")
    _print(console, told.parameters)


def _print_matrix(console: Console, chosen: "dict[str, Listed]") -> None:
    """Methods by features; every "no" has a number, and below is the reason."""
    reasons: dict[str, int] = {}
    features = list(next(iter(chosen.values())).refusals)
    table = Table(box=None, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for feature in features:
        table.add_column(feature)
    for name, one in chosen.items():
        cells = [
            f"no ({reasons.setdefault(why, len(reasons) + 1)})" if why else "yes"
            for why in one.refusals.values()
        ]
        table.add_row(escape(name) + _package(one), *cells)
    console.print(table)
    for why, number in reasons.items():
        console.print(f"({number}) {escape(why)}", soft_wrap=True)


def _installed(known: "dict[str, Listed]") -> "dict[str, Listed]":
    """The methods of other packages by name; one that cannot be loaded is a warning."""
    from fedbayes.config.config import find_method
    from fedbayes.config.listing import listed

    found = {}
    for offer in offers("methods", known):
        try:
            found[offer.name] = listed(find_method(offer.name))._replace(package=offer.package)
        except ConfigError as error:
            warn(f"the method {offer.name} of {offer.package} is left out: {error}")
    return found


def _package(one: "Listed") -> str:
    """The package of a method that is not built in, for the end of a cell."""
    return "" if one.package == "fedbayes" else f" [dim]({escape(one.package)})[/dim]"


@app.command()
def settings(
    key: Annotated[
        str | None,
        typer.Argument(
            help="Setting or table: training.lr, training, method.fedprox, task.gaussian.",
            autocompletion=complete_key,
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            "-m",
            help="Method whose parameters are listed.",
            autocompletion=completes("method.name"),
        ),
    ] = "fedavg",
    as_json: AsJson = False,
    as_schema: Annotated[
        bool, typer.Option("--schema", help="Print a JSON schema of the config, for editors.")
    ] = False,
) -> None:
    """List the settings: type, default and meaning."""
    from fedbayes.config import config
    from fedbayes.config.settings import find
    from fedbayes.errors import did_you_mean
    from fedbayes.likelihoods import LIKELIHOODS
    from fedbayes.methods import METHODS

    if as_schema:
        from fedbayes.config.schema import schema

        print(json_text(schema(), indent=2))
        return
    table, _, rest = (key or "").partition(".")
    named, _, parameter = rest.partition(".")
    if own := ":" in rest:
        module, _, last = rest.partition(":")
        last, _, parameter = last.partition(".")
        named = f"{module}:{last}"
    if table == "method" and (own or named in METHODS):
        method, key = named, f"method.{parameter}" if parameter else "method"
    likelihood = "auto"
    if table == "task" and (own or named in LIKELIHOODS):
        likelihood, key = named, f"task.{parameter}" if parameter else "task"
    known = config.settings(None if table not in ("", "method") else method, likelihood)
    found = find(known, key) if key else known
    if not found and key:
        what, names = {"task": ("likelihood", LIKELIHOODS)}.get(table, (table, METHODS))
        if table in ("method", "task") and (close := did_you_mean(rest, names)):
            raise ConfigError(f"unknown setting {key}: {rest!r} is not a {what}{close}")
        raise ConfigError(config.no_setting(key, known, method, likelihood))
    if as_json:
        from dataclasses import asdict

        print(json_text([asdict(row) for row in found], indent=2))
        return
    _print(Console(highlight=False), found)


def _print(console: Console, rows: Sequence["SettingRow"]) -> None:
    """Key, default and type on a line, the meaning below it."""
    for row in rows:
        default = row.default_text
        value = f"= {escape(default)}" if row.default is not None else default
        kind = f"{row.type}; only where {row.only}" if row.only else row.type
        console.print(f"[bold]{row.key}[/bold] {value}  [dim]({escape(kind)})", markup=True)
        about = fill(
            row.description, console.width, initial_indent="    ", subsequent_indent="    "
        )
        console.print(about)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)
