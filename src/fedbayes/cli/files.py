"""`evaluate`, `export`: trained models."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from fedbayes.cli.app import Console, app
from fedbayes.cli.options import (
    DataDir,
    DataSet,
    Json,
    Mean,
    Metrics,
    RunFolder,
    Setting,
    Std,
    named,
    numbers,
    overrides,
)
from fedbayes.core.files import json_text, require_files, write_beside
from fedbayes.core.wording import listed
from fedbayes.errors import ModelError, RunError, warn
from fedbayes.storage.formatting import number, words

if TYPE_CHECKING:
    from fedbayes.workflows.serve.evaluation_set import EvaluationSet
    from fedbayes.workflows.serve.model_evaluation import Score


@app.command()
def evaluate(
    model: Annotated[
        Path,
        typer.Argument(help="Run folder, or model file: .safetensors, .pt, .ckpt, .pt2."),
    ],
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Models that it was fused from, for comparison; and other fused models. "
            "If all are clients' models, all of them make the ensemble."
        ),
    ] = None,
    dataset: DataSet = None,
    counts: Annotated[
        Path | None,
        typer.Option(help="JSON file: number of training samples of each class for each input."),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            help="Run folder whose clients' test samples are used; with other data, whose "
            "standardization is used."
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Network of files that do not describe it, as in a config. Change its settings "
            "with --set model.KEY=VALUE. Default: fully connected, by the shapes of the "
            "weights.",
        ),
    ] = None,
    mean: Mean = None,
    std: Std = None,
    metrics: Metrics = "auto",
    data_dir: DataDir = None,
    settings: Setting = None,
    report: Annotated[Path | None, typer.Option(help="HTML page that compares the models.")] = None,
    as_json: Json = False,
) -> None:
    """Evaluate a run or a model on test samples, or on new rows (--set data.path=FILE)."""
    files = inputs or []
    if run is None and (model / "config.toml").is_file():
        run, model = model, model / "model.safetensors"
    require_files([model, *files, counts])
    require_files([run], folders=True)
    if counts is not None and not files:
        raise RunError("--counts has no effect without inputs. Give the inputs after the model")
    paths = [model, *files]
    if len({str(path) for path in paths}) < len(paths):
        raise ModelError("a model is given twice. Give each model once")
    if report is not None and report.suffix.lower() not in (".html", ".htm"):
        raise RunError(f"--report writes an HTML page, and {report} is not one. Give FILE.html")
    from dataclasses import asdict

    from fedbayes.config.config import Config
    from fedbayes.workflows.fuse.posterior_files import sent_counts
    from fedbayes.workflows.serve.evaluation_set import card_of, find_tests
    from fedbayes.workflows.serve.model_evaluation import compare, open_models
    from fedbayes.workflows.serve.model_files import ModelFiles, read_counts

    given = overrides(settings, dataset=dataset, data_dir=data_dir, model=network)
    of_network = [entry for entry in given if entry.strip().startswith("model.")]
    chosen = Config.load(None, of_network).model if of_network else None
    tests = find_tests(
        model,
        run,
        [entry for entry in given if entry not in of_network],
        mean=numbers("--mean", mean),
        std=numbers("--std", std),
    )
    known = ModelFiles(tests.trusted)
    found = {path: card_of(path, known) for path in paths} if files else {}
    cards = {path: card for path, card in found.items() if card is not None}
    fused = {path for path, card in cards.items() if card.fused}
    if fused:  # they may be several, in any place; the others are what they were fused from
        files = [path for path in paths if path not in fused]
    elif files and all(path in cards and cards[path].client for path in paths):
        files = paths  # of clients alone, so the first belongs to the ensemble, too
    table = read_counts(counts, files) if counts is not None else None
    if counts is None and files:
        table = sent_counts(files, known)
    scores = compare(
        open_models(paths, tests, chosen),
        tests,
        inputs=[str(file) for file in files],
        counts=table,
        metrics=named(metrics),
    )
    if report is not None:
        from fedbayes.reports.models import render

        methods = {str(path): cards[path].method["name"].removeprefix("fuse ") for path in fused}
        rows = [{**asdict(s), "method": methods.get(s.name, "")} for s in scores]
        write_beside(report, render(rows, tests.what, scores[0].standardized).encode())
    if as_json:
        flat = [{"name": s.name, **s.metrics, **asdict(s)} for s in scores]
        print(json_text([{k: v for k, v in s.items() if k != "metrics"} for s in flat]))
        return
    # A file without a card may be a client's or fused, and fused models may be fused again: name
    # those that count as clients.
    unsure = len(files) > 1 and (len(fused) > 1 or not all(path in cards for path in files))
    _show(scores, tests, list(map(str, files)) if unsure else [])


def _show(scores: "Sequence[Score]", tests: "EvaluationSet", members: Sequence[str] = ()) -> None:
    """Print tables of models and metrics, and what else there is to tell."""
    from fedbayes.storage.client_spread import BALANCED, balanced_leads, one_class

    how = scores[0].standardized
    how = how if how.startswith("not") else f"standardized {how}"
    Console().print(f"{tests.what}, {how}", highlight=False, soft_wrap=True)
    if members:
        of = f"average and ensemble use {', '.join(_apart(list(members)))}"
        Console().print(of, highlight=False, soft_wrap=True)
    names = list(dict.fromkeys(name for score in scores for name in score.metrics))
    if any(balanced_leads(score.metrics) for score in scores):
        names.sort(key=lambda name: name != BALANCED)
    for score in scores:
        if one_class(score.metrics):
            warn(
                f"{score.name} predicts one class for all rows. Try training.class_weights, or "
                "predict --threshold"
            )
    shown = _apart([score.name for score in scores])
    cells = [
        ["model", *map(words, names), "parameters"],
        *(
            [name, *(number(s.metrics.get(metric)) for metric in names), f"{s.parameters:,}"]
            for name, s in zip(shown, scores, strict=True)
        ),
    ]
    Console().print(*_tables(cells, Console()), sep="\n")
    if tests.clients:
        _show_clients(shown, names[0], [_told(score, tests) for score in scores])
    for score in scores:
        if score.note:
            Console().print(f"{score.name}: {score.note}", highlight=False, soft_wrap=True)


def _told(score: "Score", tests: "EvaluationSet") -> dict[str, Any]:
    from fedbayes.storage.client_spread import as_summary

    return as_summary(score.metrics, score.clients, tests.likelihood)


def _show_clients(names: list[str], metric: str, told: list[dict[str, Any]]) -> None:
    """Print how metrics differ between clients: all of one model, or one of several models."""
    from fedbayes.runs.outcome import between_clients
    from fedbayes.storage.client_spread import rows

    if len(told) == 1:
        if (table := between_clients(told[0])) is not None:
            Console().print("", table)
        return
    found = [{row.metric: row for row in rows(one, "global")}.get(metric) for one in told]
    head = [f"{words(metric)} by client", "mean of clients", "spread", "worst client"]
    cells = [
        [name, number(row.mean), number(row.spread), f"{number(row.worst)} ({row.client})"]
        for name, row in zip(names, found, strict=True)
        if row is not None
    ]
    Console().print(*_tables([head, *cells], Console()), sep="\n")
    if lacking := sorted({client for row in found if row for client in row.undefined}):
        Console().print(f"undefined, and excluded from means: {listed(lacking, 5)}")
    Console().print("other metrics by client: --json")


def _apart(names: list[str]) -> list[str]:
    """Names of models without the folder that all files are in."""
    files = [name for name in names if os.sep in name]
    folder = os.path.commonpath([*map(os.path.dirname, files)]) + os.sep if len(files) > 1 else ""
    return [name.removeprefix(folder) for name in names]


def _tables(cells: list[list[str]], console: Console) -> list[Table]:
    """Tables of models and metrics; many metrics become rows, if all models fit as columns."""
    from fedbayes.workflows.experiments.comparison_table import folded

    if len(cells[0]) > _MOST_ACROSS:
        head, *rows = ([escape(text) for text in column] for column in zip(*cells, strict=True))
        table = Table(*head, pad_edge=False)
        for row in rows:
            table.add_row(*row)
        endless = console.options.update(max_width=10_000)
        if console.measure(table, options=endless).maximum <= console.width:
            return [table]
    return folded(cells, console.width)


_MOST_ACROSS = 6
"""Columns beyond which metrics stand one below the other, and models side by side."""


@app.command()
def export(
    folder: RunFolder,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            help="File: .safetensors or .pt for weights, .pt2 (torch.export) or .onnx for a "
            "program that takes raw samples.",
        ),
    ] = Path("model.safetensors"),
    compact: Annotated[
        bool, typer.Option("--compact", help="Remove units that are all zero from the tensors.")
    ] = False,
    client: Annotated[
        str | None,
        typer.Option("--client", help="Export the own network of this client, by name or number."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Write the model of a run as weights, or as a program for deployment."""
    from fedbayes.workflows.serve.export import export

    done = export(folder, out, small=compact, client=client)
    if as_json:
        print(
            json_text(
                {
                    "path": str(done.path),
                    "parameters": done.parameters,
                    "kept": done.kept,
                    "difference": done.difference,
                    "tried": done.tried,
                    "cards": list(map(str, done.cards)),
                }
            )
        )
        return
    text = f"wrote {done.path}: {done.kept:,} of {done.parameters:,} parameters"
    if done.tried:
        text += f", outputs the same to {done.difference:.1g} on {done.tried}"
    if done.cards:
        text += f"; its card is in {' and '.join(map(str, done.cards))}"
    if done.expects:
        text += f"\nit takes {done.expects}"
    Console().print(text, highlight=False, soft_wrap=True)
