"""`predict`: what a model says of new rows."""

import json
import warnings
from pathlib import Path
from typing import Annotated

import rich
import typer

from fedbayes.cli.app import Console, app
from fedbayes.cli.options import Setting
from fedbayes.errors import FedbayesWarning, RunError


@app.command()
def predict(
    models: Annotated[
        list[Path],
        typer.Argument(
            help="Run folder, or model file with its card (.safetensors, .pt, .pt2); several "
            "predict together.",
            metavar="RUN|MODEL...",
        ),
    ],
    inputs: Annotated[
        Path, typer.Argument(help="Rows to predict: .csv, .csv.gz, .parquet or .npz.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="File to write: .csv, .csv.gz or .parquet.")
    ] = Path("predictions.csv"),
    client: Annotated[
        str | None,
        typer.Option(help="A client's own model in place of the global one; name or number."),
    ] = None,
    level: Annotated[
        float | None,
        typer.Option(help="Probability that a number is between low and high. Default: 0.9."),
    ] = None,
    keep_inputs: Annotated[
        bool, typer.Option("--keep-inputs", help="Write the columns that the model reads too.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Write over the output if it is there.")
    ] = False,
    rows: Annotated[int, typer.Option("--chunk", help="Rows that are read at a time.")] = 10_000,
    settings: Setting = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was written as JSON.")
    ] = False,
) -> None:
    """Predict new rows: probabilities, or means and intervals, beside the ids of the rows."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from fedbayes.tools.evaluation_set import named_by
    from fedbayes.tools.prediction import predict_file
    from fedbayes.tools.trained_models import load

    trusted = named_by(settings or [])
    if idle := [entry for entry in settings or [] if not named_by([entry])]:
        raise RunError(
            f"--set {idle[0]} has no effect: predict only takes the names of code that a model "
            "file names too, as task.likelihood=package.module:Class"
        )
    model = load(*models, client=client, trusted=trusted)
    columns = (TextColumn("predicting"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    console = rich.get_console()
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("", total=1.0)
        done = predict_file(
            model,
            inputs,
            out,
            level=level,
            keep_inputs=keep_inputs,
            overwrite=overwrite,
            rows=rows,
            watch=lambda share: progress.update(task, completed=share),
        )
    for note in done.notes:
        warnings.warn(note, FedbayesWarning, stacklevel=2)
    if as_json:
        print(
            json.dumps(
                {
                    "path": str(done.path),
                    "rows": done.rows,
                    "columns": done.columns,
                    "level": done.level,
                    "missing": done.missing,
                    "broken": done.broken,
                }
            )
        )
        return
    Console().print(
        f"wrote {done.path}: {done.rows:,} rows, with {', '.join(done.columns)}",
        highlight=False,
        soft_wrap=True,
    )
