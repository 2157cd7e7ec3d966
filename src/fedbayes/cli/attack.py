"""`attack`: a config under attack."""

from pathlib import Path
from typing import Annotated

import rich
import typer
from rich.console import Console

from fedbayes.cli.app import app
from fedbayes.cli.options import (
    ConfigFile,
    FederationOptions,
    Jobs,
    Seeds,
    Setting,
    SettingsCommand,
    overrides,
)
from fedbayes.core.files import json_text


@app.command(cls=SettingsCommand)
def attack(
    config: ConfigFile = None,
    kinds: Annotated[
        str | None,
        typer.Option(
            help="Attacks between commas, with settings after a colon: huge,backdoor:scale=5. "
            "Default: all built-in attacks."
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods, such as fedavg,fedprox:proximal=0.1. Default: that of the config."
        ),
    ] = None,
    rules: Annotated[
        str | None,
        typer.Option(
            help="Aggregation rules, such as median,mean:clip=1. Default: "
            "mean,median,trimmed-mean,krum."
        ),
    ] = None,
    malicious: Annotated[
        int | None,
        typer.Option(min=1, help="Number of malicious clients. Default: that of the config, 1."),
    ] = None,
    seeds: Seeds = 1,
    jobs: Jobs = 1,
    *,
    options: FederationOptions,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the runs.")] = Path(
        "attacked"
    ),
    plot: Annotated[Path | None, typer.Option(help="PNG, SVG or PDF file for a heat map.")] = None,
    report: Annotated[Path | None, typer.Option(help="Markdown file for the table.")] = None,
    settings: Setting = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all outcomes as JSON.")] = False,
) -> None:
    """Measure the effect of malicious clients by attack, method and aggregation rule."""
    given = overrides(settings, **vars(options), malicious=malicious)
    console = rich.get_console()
    with console.status("loading PyTorch"):
        from fedbayes.core.files import writable, write_beside
        from fedbayes.data.plot import PICTURES
        from fedbayes.federation.attacks import ATTACKS
        from fedbayes.workflows.experiments.attack_grid import RULES, AttackGrid
        from fedbayes.workflows.experiments.attack_table import AttackTable

        if plot is not None:
            writable(plot, "the picture", PICTURES)
        if report is not None:
            writable(report, "the table")
        grid = AttackGrid(
            out,
            _listed(kinds) or [*ATTACKS],
            _listed(methods),
            _listed(rules) or RULES,
            config,
            given,
            seeds,
        )
    try:
        table = AttackTable(grid.run(console, jobs))
    except KeyboardInterrupt:
        console.print("stopped; run the same command again to resume", highlight=False)
        raise typer.Exit(130) from None
    if plot is not None:
        table.plot(plot)
    if report is not None:
        write_beside(report, table.markdown().encode())
    if as_json:
        print(json_text(table.json()))
        return
    Console().print(table.rich())
    for note in table.notes:
        Console().print(note, markup=False, highlight=False, soft_wrap=True)
    written = ", ".join(str(path) for path in (out, plot, report) if path is not None)
    Console().print(f"wrote {written}", markup=False, highlight=False, soft_wrap=True)


def _listed(text: str | None) -> list[str]:
    """The parts between commas."""
    from fedbayes.workflows.experiments.variants import parts

    return [part.strip() for part in parts(text or "", ",") if part.strip()]
