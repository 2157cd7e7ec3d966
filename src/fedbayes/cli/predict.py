"""`predict`, `conformal`: what a model says of new rows, and how often that is to be true."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import rich
import typer
from rich.markup import escape

from fedbayes.cli.app import Console, app
from fedbayes.cli.options import RunFolder, Setting, shares
from fedbayes.core.files import json_text, require_files
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
        str,
        typer.Argument(
            help="Rows to predict: .csv, .csv.gz, .parquet, .xlsx, .npz; a picture or a folder of "
            "pictures; or with --query the URL of a database, as in sqlite:///patients.db."
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="File to write: .csv, .csv.gz or .parquet.")
    ] = Path("predictions.csv"),
    query: Annotated[
        str | None, typer.Option(help="SQL query whose rows are predicted; INPUTS is a database.")
    ] = None,
    sheet: Annotated[
        str | None, typer.Option(help="Sheet of an .xlsx. Default: its only one.")
    ] = None,
    client: Annotated[
        str | None,
        typer.Option(help="A client's own model in place of the global one; name or number."),
    ] = None,
    level: Annotated[
        float | None,
        typer.Option(help="Probability that a number is between low and high. Default: 0.9."),
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(
            help="Sets and intervals by the threshold of this client, of conformal --per-client; "
            "of survival by its hazards."
        ),
    ] = None,
    times: Annotated[
        list[str] | None,
        typer.Option(help="Survival: times of which the probabilities are told, as in 365,730."),
    ] = None,
    threshold: Annotated[
        str | None,
        typer.Option(
            help="Two classes: from which probability on the second one is predicted. A number; "
            "cost:C, if a miss costs C false alarms; or youden, by the test rows of the run. "
            "Default: 0.5."
        ),
    ] = None,
    no_conformal: Annotated[
        bool,
        typer.Option("--no-conformal", help="The model's own intervals, though it is calibrated."),
    ] = False,
    no_temperature: Annotated[
        bool,
        typer.Option(
            "--no-temperature", help="The model's own probabilities, though it has a temperature."
        ),
    ] = False,
    keep_inputs: Annotated[
        bool, typer.Option("--keep-inputs", help="Write the columns that the model reads too.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Write over the output if it is there.")
    ] = False,
    safe_csv: Annotated[
        bool,
        typer.Option(
            "--safe-csv", help="Quote text in the CSV that a spreadsheet would take for a formula."
        ),
    ] = False,
    rows: Annotated[int, typer.Option("--chunk", help="Rows that are read at a time.")] = 10_000,
    settings: Setting = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was written as JSON.")
    ] = False,
) -> None:
    """Predict new rows or pictures: probabilities, or means and intervals, beside their ids."""
    require_files(models, folders=True)
    if "://" not in inputs:
        require_files([Path(inputs)], folders=True)
    if out.exists() and not overwrite:
        raise RunError(f"{out} is there already; name another file, or add --overwrite")
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from fedbayes.workflows.serve.decision import decide
    from fedbayes.workflows.serve.evaluation_set import named_by
    from fedbayes.workflows.serve.prediction import predict_file
    from fedbayes.workflows.serve.trained_models import load

    trusted = named_by(settings or [])
    if idle := [entry for entry in settings or [] if not named_by([entry])]:
        raise RunError(
            f"--set {idle[0]} has no effect: predict only takes the names of code that a model "
            "file names too, as task.likelihood=package.module:Class"
        )
    model = load(
        *models,
        client=client,
        site=site,
        conformal=not no_conformal,
        temperature=not no_temperature,
        trusted=trusted,
    )
    if times:
        model = model.foretelling(_numbers(times))
    elif site is not None and model.target.kind == "survival":
        raise RunError("--site chooses hazards, and log-risks need none; give --times too")
    decision = None if threshold is None else decide(model, models, threshold)
    if decision is not None:
        model = replace(model, threshold=decision.threshold)
    columns = (TextColumn("predicting"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    console = rich.get_console()
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("", total=None)
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
            watch=lambda share: progress.update(task, total=1.0, completed=share),
        )
    for note in done.notes:
        warnings.warn(note, FedbayesWarning, stacklevel=2)
    if as_json:
        print(
            json_text(
                {
                    "path": str(done.path),
                    "rows": done.rows,
                    "columns": done.columns,
                    "level": done.level,
                    "temperature": model.temperature,
                    "threshold": model.threshold,
                    "missing": done.missing,
                    "broken": done.broken,
                }
            )
        )
        return
    cool = f", at a temperature of {model.temperature:.4g}" if model.temperature else ""
    how = "" if decision is None else f"\npredicted: {decision.told}"
    Console().print(
        f"wrote {done.path}: {done.rows:,} rows, with {', '.join(done.columns)}{cool}{how}",
        highlight=False,
        soft_wrap=True,
    )


def _numbers(given: list[str]) -> list[float]:
    """Times that are given as in `365,730`.

    Raises:
        RunError: one is no number.
    """
    found = []
    for text in ",".join(given).split(","):
        try:
            found.append(float(text))
        except ValueError:
            raise RunError(f"--times has {text!r}, which is no number; as in 365,730") from None
    return found


@app.command()
def hazards(
    folder: Annotated[Path, typer.Argument(help="Run folder, of the likelihood cox.", exists=True)],
    per_client: Annotated[
        bool, typer.Option("--per-client", help="Hazards of each client's rows alone too.")
    ] = False,
    personal: Annotated[
        bool, typer.Option("--personal", help="Of every client's own model, each by its own rows.")
    ] = False,
    rows: Annotated[
        str, typer.Option(help="Of which rows of each client: train, or test.")
    ] = "train",
    coarsen: Annotated[
        float, typer.Option(help="Round times up to multiples of this. 0: as they are.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Baseline hazards of a network of survival, from clients' sums; predict --times uses them."""
    from dataclasses import asdict

    from rich.table import Table

    from fedbayes.workflows.calibrate.hazards import estimate_hazards

    found = estimate_hazards(
        folder,
        per_client=per_client,
        personal=personal,
        rows=rows,  # type: ignore[arg-type]
        coarsen=coarsen,
    )
    if as_json:
        print(json_text(asdict(found) | {"path": str(found.path)}))
        return
    table = Table("test rows of", "rows", "events", "expected", "events / expected", pad_edge=False)
    for name, one in [("all", found.all), *found.clients.items()]:
        ratio = f"{one.observed / one.expected:.2f}" if one.expected else "-"
        cells = (f"{one.rows:,}", f"{one.observed:,}", f"{one.expected:,.1f}", ratio)
        table.add_row(escape(name), *cells)
    Console().print(table)
    Console().print(
        f"wrote {found.path}: {found.events:,} events at {found.times:,} times, of {found.rows:,} "
        f"rows, up to {found.last:g}",
        highlight=False,
        soft_wrap=True,
    )


@app.command()
def conformal(
    folder: RunFolder,
    level: Annotated[
        float, typer.Option(help="Promised share of sets or intervals that hold the truth.")
    ] = 0.9,
    score: Annotated[
        str,
        typer.Option(
            help="What is counted. probability: of the true class. adaptive: of the classes that "
            "are likelier (APS); adaptive-random: with a random share of its own. "
            "quantile: how far numbers are outside of the model's interval. residual: how far "
            "from its mean. auto: by the likelihood."
        ),
    ] = "auto",
    per_client: Annotated[
        bool, typer.Option("--per-client", help="A threshold for each client too.")
    ] = False,
    personal: Annotated[
        bool, typer.Option("--personal", help="Of every client's own model, each by its own rows.")
    ] = False,
    share: Annotated[
        float, typer.Option(help="Part of each client's test rows that is counted.")
    ] = 0.5,
    malicious: Annotated[
        int,
        typer.Option(
            min=0, help="Clients to leave out: those whose scores differ most within the classes."
        ),
    ] = 0,
    prior: Annotated[
        str | None,
        typer.Option(
            help="Shares of the classes among new rows (label shift), as in ill=0.2,healthy=0.8.",
            metavar="CLASS=SHARE,…",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the coverage as JSON.")] = False,
) -> None:
    """Sets and intervals with a promise of coverage, from clients' counts; predict uses them."""
    from dataclasses import asdict

    from rich.table import Table

    from fedbayes.likelihoods.conformal import OF_CLASSES
    from fedbayes.storage.formatting import number
    from fedbayes.workflows.calibrate.conformal import calibrate_conformal

    found = calibrate_conformal(
        folder,
        level,
        score=score,
        per_client=per_client,
        personal=personal,
        share=share,
        malicious=malicious,
        prior=None if prior is None else shares("--prior", prior),
    )
    if as_json:
        print(json_text(asdict(found) | {"path": str(found.path)}))
        return
    size = "classes in a set" if found.score in OF_CLASSES else "width, median"
    table = Table("rows of", "counted", "tested", "inside", size, pad_edge=False)
    for name, one in [("all", found.all), *found.clients.items()]:
        shown = ["  ".join(map(number, values)) for values in (one.coverage, one.size)]
        table.add_row(escape(name), f"{one.counted:,}", f"{one.tested:,}", *shown)
    Console().print(table)
    if short := [name for name, one in found.clients.items() if not one.bounded]:
        warnings.warn(
            f"too few rows for a level of {100 * level:g}%, so that sets hold all classes and "
            f"intervals are endless: {', '.join(short[:5])}{' …' if short[5:] else ''}",
            FedbayesWarning,
            stacklevel=2,
        )
    if found.left_out:
        text = f"left out as malicious: {', '.join(found.left_out)}"
        Console().print(text, markup=False, highlight=False, soft_wrap=True)
    Console().print(f"wrote {found.path}", highlight=False, soft_wrap=True)
