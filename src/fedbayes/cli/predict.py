"""`predict`, `conformal`: what a model says of new rows, and how often that is to be true."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import click
import rich
import typer

from fedbayes.cli.app import Console, app
from fedbayes.cli.commands import Command
from fedbayes.cli.options import Setting
from fedbayes.core.files import json_text, require_files
from fedbayes.errors import RunError, warn


class _Predict(Command):
    """`predict RUN` lacks its inputs, where Click says that it lacks the run."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; the error of a missing one names the right one."""
        try:
            return super().parse_args(ctx, args)
        except click.MissingParameter as error:
            if error.param is None or error.param.name != "models" or not args:
                raise
            raise click.UsageError("Missing argument 'INPUTS', the rows to predict.", ctx) from None


@app.command(cls=_Predict)
def predict(
    models: Annotated[
        list[Path],
        typer.Argument(
            help="Run folder, or model file with its card (.safetensors, .pt, .pt2). Several "
            "models "
            "form an ensemble.",
            metavar="RUN|MODEL...",
        ),
    ],
    inputs: Annotated[
        str,
        typer.Argument(
            help="Rows to predict: .csv, .csv.gz, .parquet, .xlsx or .npz; an image or a folder of "
            "images; or with --query the URL of a database, such as sqlite:///patients.db."
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="File to write: .csv, .csv.gz or .parquet.")
    ] = Path("predictions.csv"),
    query: Annotated[
        str | None,
        typer.Option(help="SQL query that returns the rows to predict; INPUTS is a database."),
    ] = None,
    sheet: Annotated[
        str | None, typer.Option(help="Sheet of an .xlsx file. Default: its only sheet.")
    ] = None,
    client: Annotated[
        str | None,
        typer.Option(
            help="Use the own model of this client, by name or number, instead of the global model."
        ),
    ] = None,
    adapt: Annotated[
        Path | None,
        typer.Option(
            help="Labeled rows of a new client: adapt the model of the run to them, for methods "
            "with personal models."
        ),
    ] = None,
    level: Annotated[
        float | None,
        typer.Option(help="Probability of the interval from low to high. Default: 0.9."),
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(
            help="Use the conformal threshold or the hazards of this client, computed by "
            "calibrate --per-client."
        ),
    ] = None,
    times: Annotated[
        list[str] | None,
        typer.Option(
            help="Survival: times at which to predict the survival probability, as in 365,730."
        ),
    ] = None,
    threshold: Annotated[
        str | None,
        typer.Option(
            help="Two classes: smallest probability at which the second class is predicted. A "
            "number; cost:C, if a miss costs as much as C false alarms; or youden, from the test "
            "rows of the run. Default: 0.5."
        ),
    ] = None,
    no_conformal: Annotated[
        bool,
        typer.Option("--no-conformal", help="Ignore the conformal calibration."),
    ] = False,
    no_temperature: Annotated[
        bool,
        typer.Option("--no-temperature", help="Ignore the temperature."),
    ] = False,
    keep_inputs: Annotated[
        bool, typer.Option("--keep-inputs", help="Also write the columns that the model reads.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Overwrite an existing output file.")
    ] = False,
    safe_csv: Annotated[
        bool,
        typer.Option(
            "--safe-csv",
            help="Quote text in the CSV file that a spreadsheet would read as a formula.",
        ),
    ] = False,
    rows: Annotated[
        int, typer.Option("--chunk", help="Number of rows to read at a time.")
    ] = 10_000,
    settings: Setting = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was written as JSON.")
    ] = False,
) -> None:
    """Predict new rows or images: probabilities, or means and intervals."""
    local = [] if "://" in inputs else [Path(inputs)]
    require_files([*models, *local, adapt], folders=True)
    if out.exists() and not overwrite:
        raise RunError(f"{out} exists already. Give another file, or add --overwrite")
    from fedbayes.workflows.serve.decision import decide
    from fedbayes.workflows.serve.evaluation_set import named_by
    from fedbayes.workflows.serve.prediction import predict_file
    from fedbayes.workflows.serve.trained_models import load

    trusted = named_by(settings or [])
    if idle := [entry for entry in settings or [] if not named_by([entry])]:
        raise RunError(
            f"--set {idle[0]} has no effect. Give only the names of your own code that the model "
            "file needs, as in task.likelihood=package.module:Class"
        )
    model = load(
        *models,
        client=client,
        site=site,
        conformal=not no_conformal,
        temperature=not no_temperature,
        trusted=trusted,
        adapt=adapt,
    )
    if times:
        model = model.foretelling(_numbers(times))
    elif site is not None and model.target.kind == "survival":
        raise RunError("--site has no effect without --times. Add --times")
    decision = None if threshold is None else decide(model, models, threshold)
    if decision is not None:
        model = replace(model, threshold=decision.threshold)
    with _progress() as watch:
        done = predict_file(
            model,
            inputs,
            out,
            query=query,
            sheet=sheet,
            level=level,
            keep_inputs=keep_inputs,
            overwrite=overwrite,
            safe_csv=safe_csv,
            rows=rows,
            watch=watch,
        )
    for note in done.notes:
        warn(note)
    if as_json:
        written = {"path": str(done.path), "rows": done.rows, "columns": done.columns}
        chosen = {name: getattr(model, name) for name in ("temperature", "threshold")}
        faults = {"missing": done.missing, "broken": done.broken}
        print(json_text({**written, "level": done.level, **chosen, **faults}))
        return
    cool = f", at a temperature of {model.temperature:.4g}" if model.temperature else ""
    how = "" if decision is None else f"\npredicted: {decision.told}"
    Console().print(
        f"wrote {done.path}: {done.rows:,} rows, with {', '.join(done.columns)}{cool}{how}",
        highlight=False,
        soft_wrap=True,
    )


@contextmanager
def _progress() -> Iterator[Callable[[float], None]]:
    """A bar in a terminal, moved by the share of the rows that is done."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("predicting"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    console = rich.get_console()
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("", total=None)
        yield lambda share: progress.update(task, total=1.0, completed=share)


def _numbers(given: list[str]) -> list[float]:
    """Times that are given as in `365,730`."""
    found = []
    for text in ",".join(given).split(","):
        try:
            found.append(float(text))
        except ValueError:
            raise RunError(
                f"--times has {text!r}, which is not a number. Write numbers as in 365,730"
            ) from None
    return found
