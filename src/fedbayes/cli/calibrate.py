"""`calibrate`: how well calibrated a run is, and its temperature, conformal sets and hazards."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from fedbayes.cli.app import Console, app
from fedbayes.cli.options import Metrics, named, shares
from fedbayes.core.files import json_text
from fedbayes.errors import RunError, warn
from fedbayes.storage.formatting import number, words

METHODS = ("temperature", "conformal", "hazards")
"""What `calibrate --method` estimates, in the order in which it does."""


@app.command()
def calibrate(
    model: Annotated[
        Path, typer.Argument(help="Run folder; with --sums a model file.", exists=True)
    ],
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            "-m",
            help="Calibration to compute, or several between commas: temperature (probabilities), "
            "conformal (prediction sets and intervals), hazards (survival). "
            "Default: measure the calibration only.",
        ),
    ] = None,
    personal: Annotated[
        bool,
        typer.Option("--personal", help="Use each client's own model, on that client's rows."),
    ] = False,
    client: Annotated[
        str | None,
        typer.Option(help="Measure the own model of this client only, by name or number."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="PNG, SVG or PDF file for a reliability diagram.")
    ] = None,
    metrics: Metrics = "auto",
    share: Annotated[
        float | None,
        typer.Option(
            help="temperature, conformal: share of each client's test rows that are used. "
            "Default: 0.5."
        ),
    ] = None,
    level: Annotated[
        float | None,
        typer.Option(help="conformal: coverage of the sets or intervals. Default: 0.9."),
    ] = None,
    score: Annotated[
        str | None,
        typer.Option(
            help="conformal: the score. probability: of the true class. adaptive: of all classes "
            "that are at least as probable (APS). adaptive-random: the same, randomized. "
            "quantile: distance to the model's interval. residual: distance to its mean. "
            "Default: auto, by the likelihood."
        ),
    ] = None,
    per_client: Annotated[
        bool,
        typer.Option(
            "--per-client", help="conformal, hazards: compute the result for each client too."
        ),
    ] = False,
    malicious: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="conformal: clients to leave out, those whose scores differ most within the "
            "classes. Default: none.",
        ),
    ] = None,
    prior: Annotated[
        str | None,
        typer.Option(
            metavar="CLASS=SHARE,…",
            help="conformal: shares of the classes among new rows (label shift), as in "
            "ill=0.2,healthy=0.8.",
        ),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(help="hazards: rows of each client to use, train or test. Default: train."),
    ] = None,
    coarsen: Annotated[
        float | None,
        typer.Option(help="hazards: round times up to multiples of this. Default: 0, exact times."),
    ] = None,
    sums: Annotated[
        list[Path] | None,
        typer.Option(
            help="JSON file of fedbayes sums --temperature, to fit the temperature of a model "
            "file. Repeat it for each client."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="With --sums: calibrated model file to write."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure how well calibrated a run is, or calibrate it with --method; or calibrate a model
    file with --sums.

    `predict` and `export` use the calibration from then on.
    """
    chosen = _chosen(method)
    new = None if prior is None else shares("--prior", prior)
    of_conformal = {"level": level, "score": score, "malicious": malicious, "prior": new}
    of_hazards = {"rows": rows, "coarsen": coarsen}
    if sums or out is not None or model.is_file():
        of_runs: dict[str, object] = {"method": method, "personal": personal or None}
        of_runs |= {"client": client, "plot": plot, "share": share, **of_conformal, **of_hazards}
        of_runs |= {"metrics": None if metrics == "auto" else metrics}
        of_runs |= {"per_client": per_client or None}
        _model_file(model, sums or [], out, as_json, **of_runs)
        return
    _refuse(chosen, (), client=client, plot=plot, metrics=None if metrics == "auto" else metrics)
    _refuse(chosen, ("temperature", "conformal"), share=share)
    _refuse(chosen, ("conformal",), **of_conformal)
    _refuse(chosen, ("conformal", "hazards"), per_client=per_client or None)
    _refuse(chosen, ("hazards",), **of_hazards)
    if not chosen:
        _measure(model, personal, client, plot, metrics, as_json)
        return
    both = {"personal": personal, "per_client": per_client}
    shared = {} if share is None else {"share": share}
    steps: dict[str, Callable[[], dict[str, Any]]] = {
        "temperature": lambda: _temperature(model, as_json, personal=personal, **shared),
        "conformal": lambda: _conformal(model, as_json, **both, **shared, **_given(of_conformal)),
        "hazards": lambda: _hazards(model, as_json, **both, **_given(of_hazards)),
    }
    found = {name: steps[name]() for name in METHODS if name in chosen}
    if as_json:
        print(json_text(found if len(found) > 1 else found[chosen[0]]))


def _model_file(
    model: Path, sums: list[Path], out: Path | None, as_json: bool, **of_runs: object
) -> None:
    """Write a model file with the temperature of the clients' sums."""
    from fedbayes.workflows.calibrate.temperature_files import calibrate_model, refuse_folder

    refuse_folder(model)
    if not sums:
        raise RunError(
            f"{model} is a model file, which is calibrated by its clients' sums: fedbayes sums "
            f"{model} --data FILE --temperature -o sums.json, then fedbayes calibrate {model} "
            "--sums sums.json -o OUT"
        )
    for name in _given(of_runs):
        raise RunError(f"--{name.replace('_', '-')} has no effect with --sums. Leave it out")
    if out is None:
        raise RunError("--sums needs --out, the calibrated model file to write")
    from dataclasses import asdict

    found = calibrate_model(model, sums, out)
    if as_json:
        print(json_text(asdict(found) | {"path": str(found.path)}))
        return
    clients = f"{found.clients:,} client{'s' if found.clients != 1 else ''}"
    former = "" if found.replaced is None else f" instead of {found.replaced:.4f}"
    Console().print(
        f"wrote {out}: temperature {found.temperature:.4f}{former}, from {found.rows:,} rows of "
        f"{clients}. predict and evaluate apply it; elsewhere, divide the logits by it",
        highlight=False,
        soft_wrap=True,
    )


def _chosen(method: str | None) -> list[str]:
    """The methods that are named."""
    chosen = [] if method is None else named(method)
    for name in chosen:
        if name not in METHODS:
            raise RunError(f"--method {name}: choose {', '.join(METHODS)}")
    return chosen


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _refuse(chosen: list[str], methods: tuple[str, ...], **options: object) -> None:
    """See that options have an effect with these methods of calibration; None: not given."""
    for name in _given(options):
        option = f"--{name.replace('_', '-')}"
        if not methods and chosen:
            raise RunError(
                f"{option} has no effect with --method {','.join(chosen)}. Leave out one of them"
            )
        if methods and not set(methods) & set(chosen):
            raise RunError(f"{option} has no effect. Add --method {' or '.join(methods)}")


def _measure(
    folder: Path,
    personal: bool,
    client: str | None,
    picture: Path | None,
    metrics: str,
    as_json: bool,
) -> None:
    """Measure the calibration of a run."""
    from fedbayes.core.files import writable
    from fedbayes.data.plot import PICTURES
    from fedbayes.workflows.calibrate.calibration import plot, summary, trust

    if personal and client is not None:
        raise RunError("--personal uses all clients, --client one client. Give only one of them")
    if picture is not None:
        writable(picture, "the plot", PICTURES)
    found = trust(folder, personal=personal, client=client, metrics=named(metrics))
    told = summary(found)
    if found.temperature is not None:
        before = summary(trust(folder, personal=personal, client=client, temperature=False))
        told |= {f"{name}_before_calibration": before[name] for name in ("nll", "ece")}
        told["temperature"] = found.temperature
    if picture is not None:
        plot(found, picture)
    if as_json:
        print(json_text(dict(told)))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in told.items():
        table.add_row(escape(_NAMES.get(name) or _spelled(name)), number(value))
    Console().print(table)
    if picture is not None:
        Console().print(f"wrote {picture}", highlight=False, soft_wrap=True)


def _temperature(folder: Path, as_json: bool, **options: Any) -> dict[str, Any]:
    """Fit a temperature, and print it."""
    from dataclasses import asdict

    from fedbayes.workflows.calibrate.temperature import calibrate_temperature

    found = calibrate_temperature(folder, **options)
    result = asdict(found) | {"path": str(found.path)}
    if as_json:
        return result
    counted = f"{found.counted:,} rows of the clients, {found.numbers:,} sums per client"
    Console().print(f"temperature {found.temperature:.4f}, from {counted}", highlight=False)
    if found.before is not None and found.after is not None:
        table = Table(f"on {found.tested:,} other rows", "before", "after", pad_edge=False)
        for name in ("nll", "ece", "accuracy"):
            pair = (getattr(found.before, name), getattr(found.after, name))
            table.add_row(_NAMES.get(name, name), *map(number, pair))
        Console().print(table)
    if found.left_out:
        Console().print(
            f"{found.left_out:,} rows are left out: they have no prediction, or the true class has "
            "probability 0",
            highlight=False,
            soft_wrap=True,
        )
    Console().print(f"wrote {found.path}; predict uses it", highlight=False, soft_wrap=True)
    if found.replaced:
        what = (
            f"clients' own temperatures, {min(found.replaced):.4f} to {max(found.replaced):.4f}"
            if options["personal"]
            else f"the temperature {found.replaced[0]:.4f} of the end of the run"
        )
        Console().print(
            f"it replaces {what}. predict and export use the new one; summary.json and reports "
            "keep the old one",
            highlight=False,
            soft_wrap=True,
        )
    return result


def _conformal(folder: Path, as_json: bool, **options: Any) -> dict[str, Any]:
    """Compute a conformal threshold from clients' counts, and print the coverage."""
    from dataclasses import asdict

    from fedbayes.likelihoods.conformal import OF_CLASSES
    from fedbayes.workflows.calibrate.conformal import calibrate_conformal

    found = calibrate_conformal(folder, **options)
    result = asdict(found) | {"path": str(found.path)}
    if as_json:
        return result
    size = "classes in a set" if found.score in OF_CLASSES else "width, median"
    table = Table("rows of", "counted", "tested", "inside", size, pad_edge=False)
    for name, one in [("all", found.all), *found.clients.items()]:
        shown = ["  ".join(map(number, values)) for values in (one.coverage, one.size)]
        table.add_row(escape(name), f"{one.counted:,}", f"{one.tested:,}", *shown)
    Console().print(table)
    if short := [name for name, one in found.clients.items() if not one.bounded]:
        warn(
            f"too few rows for a level of {100 * found.level:g}%: sets contain all classes and "
            f"intervals are infinite for {', '.join(short[:5])}{' …' if short[5:] else ''}"
        )
    if found.left_out:
        text = f"left out as malicious: {', '.join(found.left_out)}"
        Console().print(text, markup=False, highlight=False, soft_wrap=True)
    Console().print(f"wrote {found.path}", highlight=False, soft_wrap=True)
    return result


def _hazards(folder: Path, as_json: bool, **options: Any) -> dict[str, Any]:
    """Estimate baseline hazards from clients' sums, and print how well they fit."""
    from dataclasses import asdict

    from fedbayes.workflows.calibrate.hazards import estimate_hazards

    found = estimate_hazards(folder, **options)
    result = asdict(found) | {"path": str(found.path)}
    if as_json:
        return result
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
    return result


def _spelled(name: str) -> str:
    """A metric of calibration in words, as in `std/age` to `standard deviation, median: age`."""
    kind, _, column = name.partition("/")
    for start, form in _SPELLED.items():
        if kind.startswith(start):
            level = kind.removeprefix(start)
            said = form.format(f"{100 * float(level):g}%" if level else "")
            return said + (f": {column}" if column else "")
    return words(name)


_SPELLED = {
    "coverage_error": "mean distance from the level, of all levels",
    "coverage_": "inside the {} interval",
    "width_": "width of the {} interval, median",
    "accuracy_at_": "accuracy of the top {} by confidence",
    "std_between": "standard deviation between draws, median",
    "std": "standard deviation, median",
}
"""Metrics whose names begin so, in words."""
_NAMES = {
    "nll": "negative log-likelihood",
    "auroc": "AUROC, area under the ROC curve",
    "crps": "continuous ranked probability score",
    "ece": "expected calibration error",
    "aurc": "area under risk over coverage",
    "error_auroc": "AUROC of the entropy for detecting errors",
    "not_predicted": "rows left out: prediction is not a number",
    "entropy_right": "entropy where right",
    "entropy_wrong": "entropy where wrong",
    "information_right": "mutual information where right",
    "information_wrong": "mutual information where wrong",
}
