"""`tune`: settings of methods, chosen on validation rows."""

from pathlib import Path
from typing import Annotated

import rich
import typer
from rich.table import Table

from fedbayes.cli.app import Console, app
from fedbayes.cli.options import (
    ExperimentOptions,
    Jobs,
    SettingsCommand,
    Track,
    complete_setting,
    overrides,
)
from fedbayes.core.files import json_text
from fedbayes.errors import warn


@app.command(cls=SettingsCommand)
def tune(
    config: Annotated[
        Path | None, typer.Argument(help="TOML file with settings.", exists=True)
    ] = None,
    methods: Annotated[
        str, typer.Option(help="Methods between commas, or all, as in `fedbayes compare`.")
    ] = "fedavg",
    budget: Annotated[
        int | None, typer.Option(min=1, help="Runs of each method. Default: 10.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Minutes of training of each method, instead of --budget."),
    ] = None,
    search: Annotated[
        str, typer.Option(help="random, or halving: many short runs, of which the best continue.")
    ] = "random",
    validation: Annotated[
        float, typer.Option(help="Share of each client's training rows used for validation.")
    ] = 0.2,
    jobs: Jobs = 1,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for runs, configs and the plot.")
    ] = Path("tuned"),
    *,
    options: ExperimentOptions,
    track: Track = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            "-s",
            help="A setting, or a range of one: training.lr=0.01..1, or a list of values, "
            "method.proximal=[0.01,1].",
            metavar="KEY=VALUE",
            autocompletion=complete_setting,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the chosen settings only as JSON on stdout.")
    ] = False,
) -> None:
    """Choose settings on clients' validation rows, with the same budget for every method."""
    given = overrides(settings, **vars(options))
    console = rich.get_console()
    with console.status("loading PyTorch"):
        from fedbayes.workflows.experiments.tuning import TuneSearch
        from fedbayes.workflows.experiments.variants import variants

        found = TuneSearch(out, variants(methods), config, given, share=validation)
    for note in found.notes:
        warn(note)
    try:
        made = found.run(
            console,
            budget=budget,
            minutes=minutes,
            search=search,  # type: ignore[arg-type]
            jobs=jobs,
            track=track or (),
        )
    except KeyboardInterrupt:
        console.print("stopped; run the same command again to resume", highlight=False)
        raise typer.Exit(130) from None
    if as_json:
        print(json_text(made.summary))
        return
    head, *rows = made.cells()
    table = Table(*head, pad_edge=False, box=None)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    names = ", ".join(file.name for file in made.files)
    for line in (
        f"budget of each method: {made.budget}, evaluated on {made.share:.0%} of the training rows",
        f"wrote into {out}: {names}",
        f"compare them on the test rows: fedbayes compare --tuned {out / 'tuned.json'}",
    ):
        Console().print(line, markup=False, highlight=False, soft_wrap=True)
