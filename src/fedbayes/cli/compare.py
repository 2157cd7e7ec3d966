"""`compare`: several methods on the same data."""

from pathlib import Path
from typing import Annotated

import rich
import typer

from fedbayes.cli.app import Console, app
from fedbayes.cli.options import (
    Jobs,
    RunOptions,
    Seeds,
    Setting,
    SettingsCommand,
    Track,
    overrides,
)
from fedbayes.core.files import json_text
from fedbayes.errors import warn


@app.command(cls=SettingsCommand)
def compare(
    configs: Annotated[
        list[Path] | None,
        typer.Argument(help="TOML files with settings, each compared separately.", exists=True),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods between commas, or all. A method can have settings "
            "(fedprox:proximal=0.1) and a label (big=fedavg:rounds=9). Or a TOML "
            "file with a table for each method. Default: the method of each config."
        ),
    ] = None,
    tuned: Annotated[
        Path | None,
        typer.Option(help="tuned.json of `fedbayes tune`: its methods, data and settings."),
    ] = None,
    seeds: Seeds = 5,
    jobs: Jobs = 1,
    foreign: Annotated[
        str,
        typer.Option(
            "--ood",
            help="Out-of-distribution inputs, on which models should be uncertain. Images: "
            "permuted, "
            "inverted or noise. Rows: wide, or a file (an Excel sheet as new.xlsx#May). Or the "
            "name of a data set, or none. auto: permuted for images, else wide.",
        ),
    ] = "auto",
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for runs and tables.")] = Path(
        "compared"
    ),
    *,
    options: RunOptions,
    track: Track = None,
    settings: Setting = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print only the comparison, as JSON.")
    ] = False,
) -> None:
    """Compare methods over several seeds, or resume an interrupted comparison."""
    given = overrides(settings, **vars(options))
    console = rich.get_console()
    with console.status("loading PyTorch"):
        from fedbayes.workflows.experiments.comparing import named_methods, run_and_compare
        from fedbayes.workflows.experiments.comparison_table import rich_tables
        from fedbayes.workflows.experiments.method_grid import MethodGrid
        from fedbayes.workflows.experiments.variants import variants

        named, chosen, base = named_methods(
            None if methods is None else variants(methods), tuned, alone=not configs
        )
        grid = MethodGrid(out, named, configs or (), seeds, [*base, *given], foreign, chosen)
    for note in grid.notes:
        warn(note)
    try:
        found = run_and_compare(grid, console, jobs, track or ())
    except KeyboardInterrupt:
        console.print("stopped; run the same command again to resume", highlight=False)
        raise typer.Exit(130) from None
    if as_json:
        print(json_text(found.summary))
    else:
        for table in found.tables:
            Console().print(*rich_tables(table, Console().width), sep="\n")
        for line in found.notes:
            Console().print(line, markup=False, highlight=False, soft_wrap=True)
        names = ", ".join(file.name for file in found.files)
        Console().print(f"wrote into {out}: {names}", markup=False, highlight=False, soft_wrap=True)
    if found.failed:
        raise typer.Exit(1)
