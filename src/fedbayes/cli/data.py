"""`data`: data sets, tables and partitions."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fedbayes.cli.app import Console, app
from fedbayes.cli.commands import Application, Commands
from fedbayes.cli.options import DataDir, DataPartition, Setting, completes, overrides
from fedbayes.core.files import json_text
from fedbayes.errors import ConfigError, RunError, told_as

if TYPE_CHECKING:
    from fedbayes.data.tables.check import TableCheck

data_app = Application(
    help="Inspect data sets, tables and partitions.", no_args_is_help=True, cls=Commands
)
app.add_typer(data_app, name="data")


@data_app.command("list")
def data_list(
    data_dir: DataDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """List the built-in data sets and their sources, and those of installed packages."""
    from dataclasses import asdict

    from fedbayes.core.lazy import offers
    from fedbayes.data import catalogue

    entries = catalogue(data_dir)
    offered = offers("data", [entry.name for entry in entries])
    if as_json:
        own = [asdict(entry) | {"package": "fedbayes"} for entry in entries]
        print(json_text([*own, *(offer._asdict() for offer in offered)], indent=2))
        return
    table = Table("", "samples", "shape", "target", "here", show_header=True, pad_edge=False)
    for entry in entries:
        groups = f"; {entry.groups}" if entry.groups else ""
        table.add_row(
            f"[bold]{entry.name}[/bold]  {entry.what}{groups}\n[dim]{entry.source}",
            f"{entry.samples:,}",
            "×".join(map(str, entry.shape)),
            f"{entry.classes} classes" if entry.classes else "real",
            "yes" if entry.available else "no",
        )
    for offer in offered:
        name, place, package = map(escape, offer)
        table.add_row(f"[bold]{name}[/bold]  of {package}\n[dim]{place}", "", "", "", "yes")
    Console().print(table)


@data_app.command("show")
def data_show(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Data set. Leave it out with --set data.path.",
            autocompletion=completes("data.name"),
        ),
    ] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    partition: DataPartition = None,
    alpha: Annotated[
        float | None, typer.Option(help="Dirichlet concentration; small values are more skewed.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the partition.")] = None,
    data_dir: DataDir = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="PNG, SVG or PDF to write.")
    ] = None,
    settings: Setting = None,
) -> None:
    """Partition a data set and plot the class shares, or the targets, of each client."""
    from fedbayes.config.config import Config

    given = overrides(
        settings,
        dataset=name,
        clients=clients,
        partition=partition,
        alpha=alpha,
        data_dir=data_dir,
        seed=seed,
    )
    config = Config.load(None, given)
    # PyTorch is imported from here on, so that a wrong setting is reported at once.
    from fedbayes.core.files import writable
    from fedbayes.core.wording import describe
    from fedbayes.data import choose_scheme, plot_partition
    from fedbayes.data.plot import PICTURES
    from fedbayes.runs.build import build_data

    if out is not None:
        writable(out, "the picture", PICTURES)
    data = build_data(config)
    scheme = choose_scheme(data.dataset, config.data)
    title = f"{data.dataset.name}, {scheme}, {data.clients:,} clients"
    path = out or Path(f"{data.dataset.name.replace(':', '.')}-{scheme}.png")
    with told_as(RunError, f"cannot write {path}", OSError):
        plot_partition(data, path, title)
    sizes, tests = data.train_sizes(), data.test_sizes()
    about = ""
    if not data.classes:
        about = f"target {describe(data.target)}"
        numbers = zip(data.target.center, data.target.scale, strict=False)
        spread = ", ".join(f"{center:.4g} ± {scale:.4g}" for center, scale in numbers)
        about += f" (training rows: {spread})\n" if spread else "\n"
    if config.data.label_noise:
        about += (
            f"label noise: {data.wrong_labels:,} training labels "
            f"({data.wrong_labels / sizes.sum():.1%}) are of a class other than in the data\n"
        )
    if len(data.owners) < data.clients:
        about += (
            f"these are the {len(data.owners):,} of {data.clients:,} clients that are read before "
            "the first round (data.test_clients)\n"
        )
    Console().print(
        f"{title}: {sizes.sum():,} training samples ({sizes.min():,} to {sizes.max():,} a client), "
        f"{tests.sum():,} test samples ({tests.min():,} to {tests.max():,} a client)\n"
        f"{about}picture: {path}",
        highlight=False,
        soft_wrap=True,
    )


@data_app.command("check")
def data_check(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Table or folder; of several tables each is one client's. Leave it out with "
            "--set data.query.",
            exists=True,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="PNG, SVG or PDF to write.")
    ] = None,
    schema: Annotated[
        Path | None,
        typer.Option(
            help="Run folder, Flower project or model file. The command checks the table for its "
            "columns."
        ),
    ] = None,
    settings: Setting = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Print how each column of a table is read; exit status 1 if one is rejected."""
    from fedbayes.config.config import Config

    first, *others = files or (None,)
    more = json_text([str(path) for path in others]) if others else None
    config = Config.load(None, overrides(settings, file=first, more=more))
    if config.data.generator is not None:
        raise ConfigError(
            "a generator returns arrays, which have no columns. Use fedbayes data show"
        )
    if config.data.name != "own":
        raise ConfigError("the table is missing. Run fedbayes data check FILE")
    from fedbayes.core.files import writable
    from fedbayes.data.plot import PICTURES
    from fedbayes.data.tables.check import check_table
    from fedbayes.data.tables.check_plot import plot_check

    if out is not None:
        writable(out, "the picture", PICTURES)
    if schema is None:
        check = check_table(config.data, config.target_kinds)
    else:
        from fedbayes.workflows.serve.table_check import check_like

        check = check_like(config, schema)
    if out is not None:
        with told_as(RunError, f"cannot write {out}", OSError):
            plot_check(check, out, config.data.date_format or "")
    if as_json:
        print(json_text(check.dump(), indent=2))
    else:
        _show_check(check, out)
    raise typer.Exit(1 if check.refused else 0)


def _show_check(check: "TableCheck", picture: Path | None) -> None:
    table = Table("column", "taken as", "missing", "values", "features", pad_edge=False)
    for look in check.columns:
        kind = "[red]not usable[/red]" if look.refused else escape(look.kind)
        if look.role != "feature":
            kind = f"{look.role}: {kind}" if kind else look.role
        between = " … " if look.kind in ("number", "date", "boolean") else ", "
        few = "" if len(look.values) >= look.distinct or between == " … " else " …"
        seen = f"{look.distinct:,}: {escape(between.join(look.values))}{few}"
        table.add_row(
            f"[bold]{escape(look.name)}[/bold]",
            kind,
            f"{look.missing:,}" if look.missing else "",
            seen,
            f"{look.width:,}" if look.width else "",
        )
    console = Console()
    console.print(table)
    said = [*check.refused, *check.notes]
    said += [f"{look.name}: {look.hint}" for look in check.columns if look.hint]
    said.append(
        f"{check.rows:,} rows; "
        + (
            f"{len(check.refused)} of {len(check.columns)} columns are not usable"
            if check.refused
            else f"{check.width:,} features for the network"
        )
    )
    said += [f"picture: {picture}"] if picture else []
    console.print("\n".join(said), highlight=False, markup=False, soft_wrap=True)


@data_app.command("summarize")
def data_summarize(
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write: .json.")],
    file: Annotated[
        Path | None,
        typer.Argument(
            help="Table of the client. Leave it out with --set data.query.", exists=True
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file of the federation, which sets how tables are read."),
    ] = None,
    min_rows: Annotated[
        int, typer.Option(min=1, help="Smallest number of rows; sums of fewer rows raise an error.")
    ] = 10,
    min_count: Annotated[
        int,
        typer.Option(min=1, help="Smallest number of rows of a category; rarer ones are left out."),
    ] = 1,
    settings: Setting = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written too.")] = False,
) -> None:
    """Compute sums and counts of a client's columns, for data.summaries."""
    from fedbayes.config.config import Config

    settled = Config.load(config, overrides(settings, file=file))
    from fedbayes.workflows.serve.table_summary import SummaryJob

    done = SummaryJob(settled, out, min_rows, min_count).run()
    if as_json:
        print(json_text(done))
        return
    Console().print(
        f"wrote {out}: sums and counts of {done['rows']:,} rows and {len(done['columns']):,} "
        "columns. It contains no single row",
        highlight=False,
        soft_wrap=True,
    )
