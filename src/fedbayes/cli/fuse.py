"""`fuse`: models that were trained apart, made one."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import rich
import typer
from rich.markup import escape

from fedbayes.cli.app import Console, app
from fedbayes.cli.options import FusionCommand, Json, Mean, Setting, Std, numbers
from fedbayes.core.files import json_text, require_files
from fedbayes.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from fedbayes.models import ModelSettings
    from fedbayes.workflows.fuse.client_models import Seen
    from fedbayes.workflows.fuse.fusion_report import FusionResult
    from fedbayes.workflows.serve.model_files import ModelFiles


@app.command(cls=FusionCommand)
def fuse(
    models: Annotated[list[Path], typer.Argument(help="Model files: .safetensors, .pt.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Fused model to write.")],
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            "-m",
            help="function (what networks say, any kind of them), match (matched units of networks "
            "of one graph), gpi-fnm or pfnm (of fully connected ones), regmean, fisher or kfac "
            "(averages by files of fedbayes posterior), permute (average of units in one order), "
            "combined, or average. Default: function, where what goes into the networks is known "
            "from their files or --shape; else gpi-fnm.",
        ),
    ] = None,
    counts: Annotated[
        Path | None, typer.Option(help="JSON: samples of each class that each model saw.")
    ] = None,
    sigma: float | None = None,
    sigma0: float | None = None,
    gamma: float | None = None,
    epsilon: float | None = None,
    popularity_cap: str | None = None,
    popularity_weight: float | None = None,
    new_atoms: str | None = None,
    iterations: int | None = None,
    bias_mean: float | None = None,
    alternations: int | None = None,
    starts: int | None = None,
    start_gamma: float | None = None,
    alpha: str | None = None,
    c: Annotated[float | None, typer.Option("--c")] = None,
    normalized: Annotated[bool | None, typer.Option("--normalized")] = None,
    seed: Annotated[int, typer.Option(help="Seed of inputs, or of the order of models.")] = 0,
    network: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Network of files that do not say theirs, as in a config; its settings with "
            "--set model.KEY=VALUE, those of a fusion in function space with function.KEY=VALUE.",
        ),
    ] = None,
    like: Annotated[
        Path | None, typer.Option(help="Model whose network the fused one has; the first.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Shape of one input, as 3,32,32.", metavar="N,N,N")
    ] = None,
    classes: Annotated[
        int | None, typer.Option(min=1, help="Number of outputs. Default: as --counts says.")
    ] = None,
    mean: Mean = None,
    std: Std = None,
    inputs: Annotated[
        str | None,
        typer.Option(
            help="What inputs look like: leaves (photographs), strokes (writing), noise, gaussian "
            "(tables), module:function of your own, or a folder, NPZ, Parquet or CSV file of "
            "real ones. Default: by the shape."
        ),
    ] = None,
    sums: Annotated[
        list[Path] | None,
        typer.Option(
            help="JSON of fedbayes sums, for gaussian inputs; once for each client that sent some."
        ),
    ] = None,
    width: Annotated[
        str | None,
        typer.Option(
            help="Of the fused network, in that of one model; free: the least that is within "
            "--bound of the models together. Default: 1."
        ),
    ] = None,
    bound: Annotated[
        float | None, typer.Option(min=0, help="Nats from the models together. Default: 0.05.")
    ] = None,
    frontier: Annotated[
        str | None,
        typer.Option(help="Widths to try beside, as 0.5,1,2; see --picture.", metavar="X,X,X"),
    ] = None,
    test: Annotated[
        Path | None, typer.Option(help="NPZ with raw x and y to score networks on.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0, help="For training end to end; 0: least squares alone."),
    ] = None,
    posterior: Annotated[
        str | None,
        typer.Option(
            help="Predictions know how sure they are, by a Laplace approximation on the drawn "
            "inputs: last-layer, or kronecker (all dense layers and convolutions; a prediction "
            "goes there and back for each class); needs --counts, and a .pt2 to write."
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(help="File that training end to end is kept in, and goes on from."),
    ] = None,
    show_inputs: Annotated[
        Path | None, typer.Option(help="PNG, SVG or PDF file of some of the inputs.")
    ] = None,
    settings_given: Setting = None,
    held_out: Annotated[
        Path | None,
        typer.Option(
            "--select",
            help="NPZ with x and y: choose settings on it by a grid. x is raw if all models are "
            "files of fedbayes with the same standardization, else as the networks see it.",
        ),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(help="Values for --select, as in gamma=1,10.", metavar="KEY=V1,V2"),
    ] = None,
    max_neurons: Annotated[
        int | None, typer.Option(min=1, help="Largest layer that --select may choose.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="JSON file for the full report, or an HTML page of it.")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(help="PNG, SVG or PDF file: shared neurons, or sizes and likeness."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Fuse models that were trained apart into one, in one go."""
    require_files([*models, counts, like, test, held_out, *(sums or [])])
    from fedbayes.workflows.fuse.fusing import FusionJob, read_grid, summary, trial_table
    from fedbayes.workflows.fuse.fusion_method import FusionInputs
    from fedbayes.workflows.serve.model_files import ModelFiles

    of_function = {
        "--model": network,
        "--like": like,
        "--shape": shape,
        "--classes": classes,
        "--mean": mean,
        "--std": std,
        "--inputs": inputs,
        "--sums": sums,
        "--width": width,
        "--bound": bound,
        "--frontier": frontier,
        "--test": test,
        "--minutes": minutes,
        "--posterior": posterior,
        "--state": state,
        "--show-inputs": show_inputs,
        "--set": settings_given,
    }
    given = {
        "sigma": sigma,
        "sigma0": sigma0,
        "gamma": gamma,
        "epsilon": epsilon,
        "popularity_cap": popularity_cap,
        "popularity_weight": popularity_weight,
        "new_atoms": new_atoms,
        "iterations": iterations,
        "bias_mean": bias_mean,
        "alternations": alternations,
        "starts": starts,
        "start_gamma": start_gamma,
        "alpha": alpha,
        "c": c,
        "normalized": normalized,
    }
    of_matching = {
        **{f"--{name.replace('_', '-')}": value for name, value in given.items()},
        "--select": held_out,
        "--grid": grid,
        "--max-neurons": max_neurons,
    }
    files = ModelFiles([network] if network and ":" in network else [])
    reports = {"--report": report, "--picture": picture}
    choice = FusionInputs(of_function, of_matching, reports).choose(method, models, out, files)
    if choice.way == "function":
        _fuse_functions(
            models,
            out,
            files=files,
            network=(network, settings_given or []),
            like=like,
            seen=(shape, classes, mean, std),
            inputs=inputs or "auto",
            sums=sums or [],
            counts=counts,
            widths=(width, bound, frontier),
            test=test,
            minutes=minutes,
            posterior=posterior,
            seed=seed,
            report=report,
            picture=picture,
            show_inputs=show_inputs,
            state=state,
            as_json=as_json,
        )
        return
    if choice.way == "average":
        _average(
            models,
            out,
            files=files,
            method=choice.method,
            network=(network, settings_given or []),
            seen=(shape, classes, mean, std),
            counts=counts,
            as_json=as_json,
        )
        return
    settings = {name: value for name, value in given.items() if value is not None}
    if choice.way == "graph":
        _match(
            models,
            out,
            files=files,
            network=(network, settings_given or []),
            seen=(shape, classes, mean, std),
            settings=settings,
            counts=counts,
            seed=seed,
            report=report,
            picture=picture,
            as_json=as_json,
        )
        return
    job = FusionJob(
        models,
        out,
        files=files,
        method=choice.method,
        settings=settings,
        counts=counts,
        held_out=held_out,
        grid=read_grid(grid or []),
        max_neurons=max_neurons,
        seed=seed,
        report=report,
        picture=picture,
    )
    console = rich.get_console()
    with console.status("reading") as status:
        fusion, trials = job.run(status.update)
    if trials and not as_json:
        Console().print(trial_table(trials, fusion))
    if as_json:
        print(json_text(summary(fusion)))
        return
    sizes = ", ".join(map(str, fusion.sizes))
    written = ", ".join(str(path) for path in (out, report, picture) if path is not None)
    Console().print(
        f"{fusion.method}: {len(models)} models to one with hidden layers of {sizes}, "
        f"{fusion.parameters:,} parameters, in {fusion.seconds:.2f} s\nwrote {written}",
        highlight=False,
        soft_wrap=True,
    )
    if len(fusion.sizes) > 1 and fusion.matching and not (trials or alternations):
        console.print(
            "deep networks match better up and down, and with other settings: try --alternations "
            "12 --epsilon 1 --sigma0 10 --gamma 30, or --select",
            highlight=False,
            soft_wrap=True,
        )


def _match(
    models: list[Path],
    out: Path,
    *,
    files: "ModelFiles",
    network: tuple[str | None, list[str]],
    seen: tuple[str | None, int | None, str | None, str | None],
    settings: dict[str, Any],
    counts: Path | None,
    seed: int,
    report: Path | None,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Match networks of one graph, and tell of it."""
    from fedbayes.workflows.fuse.graph_fusing import GraphFusionJob, sizes, summary

    job = GraphFusionJob(
        models,
        out,
        settings,
        files=files,
        network=_network(*network),
        seen=_seen(*seen),
        counts=counts,
        seed=seed,
        report=report,
        picture=picture,
    )
    console = rich.get_console()
    with console.status("reading") as status:
        matching = job.run(status.update)
    if as_json:
        print(json_text(summary(matching)))
        return
    for note in matching.notes:
        console.print(note, highlight=False, soft_wrap=True, markup=False)
    written = ", ".join(str(path) for path in (out, report, picture) if path is not None)
    Console().print(
        f"match: {len(models)} models to one with units of {sizes(matching)}, "
        f"{matching.parameters:,} parameters, in {matching.seconds:.2f} s\nwrote {written}",
        highlight=False,
        soft_wrap=True,
    )
    if len(matching.groups) > 1 and not settings.get("alternations"):
        console.print(
            "how many units are shared is a matter of settings: try --alternations 4 too, or more "
            "units by --epsilon 1 --sigma0 10 --gamma 30",
            highlight=False,
            soft_wrap=True,
        )


def _average(
    models: list[Path],
    out: Path,
    *,
    files: "ModelFiles",
    method: str,
    network: tuple[str | None, list[str]],
    seen: tuple[str | None, int | None, str | None, str | None],
    counts: Path | None,
    as_json: bool,
) -> None:
    """Average networks of one graph, and tell of it."""
    from typing import cast

    from fedbayes.workflows.fuse.averaging import AveragingJob, AveragingMethod

    job = AveragingJob(
        models,
        out,
        cast(AveragingMethod, method),
        files=files,
        network=_network(*network),
        seen=_seen(*seen),
        counts=counts,
    )
    with rich.get_console().status("reading") as status:
        told = job.run(status.update)
    if as_json:
        print(json_text(told))
        return
    for name, reason in told.get("untouched", {}).items():
        rich.get_console().print(f"{name} keeps its order: {reason}", highlight=False, markup=False)
    spread = ""
    if "spread_after" in told:
        spread = (
            f"; their spread fell from {told['spread_before']:.4g} to {told['spread_after']:.4g}"
        )
    Console().print(
        f"{method}: {len(models)} models to one of {told['parameters']:,} parameters in "
        f"{told['seconds']:.1f} s{spread}\nwrote {out}",
        highlight=False,
        soft_wrap=True,
    )


def _network(name: str | None, settings: list[str]) -> "ModelSettings | None":
    """The network that is named.

    Raises:
        ConfigError: it is none, or other settings than the model's are given.
    """
    from fedbayes.config.config import Config

    foreign = [entry for entry in settings if not entry.strip().startswith("model.")]
    if foreign:
        raise ConfigError(
            f"--set {foreign[0]}: a fusion has settings of the model (model.KEY), and in function "
            "space its own (function.KEY)"
        )
    of_network = [] if name is None else [f"model.name={name}"]
    return Config.load(None, [*of_network, *settings]).model if name or settings else None


def _seen(shape: str | None, classes: int | None, mean: str | None, std: str | None) -> "Seen":
    """What is said of inputs and outputs.

    Raises:
        ConfigError: it is not in numbers, or a length is none.
    """
    from fedbayes.workflows.fuse.client_models import Seen

    lengths = None if shape is None else _numbers("--shape", shape, int)
    if lengths is not None and min(lengths) < 1:
        raise ConfigError(f"--shape {shape}: all lengths are 1 or more")
    return Seen(
        lengths,
        numbers("--mean", mean),
        numbers("--std", std),
        classes,
    )


def _fuse_functions(
    models: list[Path],
    out: Path,
    *,
    files: "ModelFiles",
    network: tuple[str | None, list[str]],
    like: Path | None,
    seen: tuple[str | None, int | None, str | None, str | None],
    inputs: str,
    sums: list[Path],
    counts: Path | None,
    widths: tuple[str | None, float | None, str | None],
    test: Path | None,
    minutes: float | None,
    posterior: str | None,
    seed: int,
    report: Path | None,
    picture: Path | None,
    show_inputs: Path | None,
    state: Path | None,
    as_json: bool,
) -> None:
    """Fuse in function space, and tell of it."""
    from fedbayes.workflows.fuse.function_settings import function_settings
    from fedbayes.workflows.fuse.fusion_report import summary
    from fedbayes.workflows.fuse.network_fusing import BOUND, NetworkFusionJob

    width, bound, frontier = widths
    name, settings = network
    own = [entry for entry in settings if entry.strip().startswith("function.")]
    of_model = [entry for entry in settings if entry not in own]
    if state is not None and minutes == 0:
        raise ConfigError("--state has no effect with --minutes 0: there is no training to keep")
    if bound is not None and width != "free":
        raise ConfigError("--bound has no effect but on --width free")
    job = NetworkFusionJob(
        models,
        out,
        files=files,
        network=_network(name, of_model),
        seen=_seen(*seen),
        like=like,
        inputs=inputs,
        sums=sums,
        counts=counts,
        width=None if width == "free" else _one("--width", width or "1"),
        bound=BOUND if bound is None else bound,
        frontier=() if frontier is None else _numbers("--frontier", frontier, float),
        test=test,
        settings=function_settings(own, minutes, posterior),
        seed=seed,
        report=report,
        picture=picture,
        show_inputs=show_inputs,
        state=state,
    )
    console = rich.get_console()
    with console.status("reading") as status:
        outcome = job.run(
            status.update,
            lambda at: status.update(
                f"training end to end: {at.share:.0%}, {at.divergence:.3g} nats from the teacher, "
                f"{at.left:.0f} s left"
            ),
        )
    if as_json:
        print(json_text(summary(outcome)))
        return
    for note in (*outcome.told, *outcome.fusion.notes):
        console.print(note, highlight=False, soft_wrap=True, markup=False)
    written = [path for path in (out, report, picture, show_inputs) if path is not None]
    _tell(outcome, len(models), written)


def _tell(outcome: "FusionResult", models: int, written: list[Path]) -> None:
    """What came out, in words."""
    from rich.table import Table

    fusion, prior = outcome.fusion, outcome.prior
    table = Table("network", "parameters", "nats from the teacher", pad_edge=False)
    classes = not math.isnan(fusion.likeness.agreement)
    if classes:
        table.add_column("same class as the teacher\n(synthetic inputs)")
    rows = [
        *((name, "", likeness) for name, likeness in fusion.clients.items()),
        ("fused, least squares", "", fusion.solved),
        ("fused", f"{fusion.parameters:,}", fusion.likeness),
    ]
    if fusion.distilled is None:
        del rows[-2]
    for name, size, likeness in rows:
        share = [f"{likeness.agreement:.3f}"] if classes else []
        table.add_row(escape(name), size, f"{likeness.divergence:.3f}", *share)
    Console().print(table)
    if outcome.marks:
        Console().print(_frontier(outcome))
    Console().print(
        f"function: {models} models to one of {fusion.parameters:,} parameters in "
        f"{sum(fusion.seconds.values()):.1f} s, on drawn inputs ({prior.name}: {prior.assumes})\n"
        f"wrote {', '.join(map(str, written))}{chr(10) * bool(outcome.expects)}{outcome.expects}",
        highlight=False,
        soft_wrap=True,
    )


def _frontier(outcome: "FusionResult") -> "Table":
    """Sizes and what they are worth."""
    from rich.table import Table

    from fedbayes.storage.formatting import number, words

    metrics = list(outcome.marks[0].metrics)
    table = Table("", "parameters", "multiplications", "nats", *map(words, metrics), pad_edge=False)
    for mark in outcome.marks:
        table.add_row(
            escape(mark.name),
            f"{mark.parameters:,}",
            f"{mark.multiplications:,}",
            f"{mark.likeness.divergence:.3f}",
            *(number(mark.metrics.get(name)) for name in metrics),
            style="bold" if mark.width == outcome.width else None,
        )
    return table


def _one(option: str, text: str) -> float:
    """A number.

    Raises:
        ConfigError: it is none, or there are several.
    """
    found = _numbers(option, text, float)
    if len(found) > 1:
        raise ConfigError(f"{option} {text}: give one number; several are for --frontier")
    return float(found[0])


def _numbers(option: str, text: str, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    """Numbers with commas between them.

    Raises:
        ConfigError: they are none.
    """
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} {text}: give numbers with commas, as 3,32,32") from None
