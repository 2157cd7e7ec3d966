"""`fuse`: models that were trained apart, made one."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import rich
import typer

from fedbayes.cli.app import Console, app
from fedbayes.cli.options import FusionCommand, Json, Mean, Std, numbers
from fedbayes.core.files import json_text, require_files
from fedbayes.errors import ConfigError

if TYPE_CHECKING:
    from fedbayes.models import ModelSettings

_NETWORKS, _FUNCTION = "Networks of the files", "Settings of function"
_SELECT, _REPORTS = "Settings by validation", "Reports"
"""Groups of options in the help."""

Models = Annotated[
    list[Path],
    typer.Argument(help="Model files: .safetensors, .pt; or LoRA adapters: folders of PEFT."),
]
Out = Annotated[
    Path,
    typer.Option("--out", "-o", help="Fused model to write: a file; of LoRA adapters a folder."),
]
Method = Annotated[
    str | None, typer.Option("--method", "-m", help="Fusion method, of those below.")
]
Counts = Annotated[
    Path | None,
    typer.Option(help="JSON file: number of training samples of each class for each model."),
]
FusionSeed = Annotated[int, typer.Option(help="Seed of inputs, or of the order of models.")]
FusionSetting = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        help="A setting of the method, such as precision=0.1, or of the network, such as "
        "model.hidden=[32].",
        metavar="KEY=VALUE",
    ),
]
NetworkOf = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Network of files that do not describe it, as in a config. Change its settings with "
        "--set model.KEY=VALUE.",
        rich_help_panel=_NETWORKS,
    ),
]
Like = Annotated[
    Path | None,
    typer.Option(
        help="Model whose network the fused one has. Default: the first.", rich_help_panel=_NETWORKS
    ),
]
Shape = Annotated[
    str | None,
    typer.Option(
        help="Shape of one input, as 3,32,32.", metavar="N,N,N", rich_help_panel=_NETWORKS
    ),
]
Classes = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of outputs. Default: from --counts.",
        rich_help_panel=_NETWORKS,
        metavar="N",
    ),
]
InputsOf = Annotated[
    str | None,
    typer.Option(
        help="Source of the synthetic inputs: leaves (photographs), strokes (writing), noise, "
        "tones (sound), gaussian (tables), texts (from the base network), your own "
        "module:function, or real samples: a folder, NPZ, Parquet or CSV file, for texts also "
        "FILE.csv:COLUMN. "
        "Default: by the shape.",
        rich_help_panel=_FUNCTION,
    ),
]
Sums = Annotated[
    list[Path] | None,
    typer.Option(
        help="JSON file of fedbayes sums, for inputs like the clients'. Repeat it for each client.",
        rich_help_panel=_FUNCTION,
    ),
]
Width = Annotated[
    str | None,
    typer.Option(
        help="Width of the fused network relative to one model. free: the smallest width within "
        "--bound of the ensemble. Default: 1.",
        rich_help_panel=_FUNCTION,
    ),
]
Bound = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="KL divergence to the ensemble, in nats. Default: 0.05.",
        rich_help_panel=_FUNCTION,
        metavar="NUMBER",
    ),
]
Frontier = Annotated[
    str | None,
    typer.Option(
        help="More widths to try, such as 0.5,1,2. See --picture.",
        metavar="X,X,X",
        rich_help_panel=_FUNCTION,
    ),
]
Test = Annotated[
    Path | None,
    typer.Option(help="NPZ with raw x and y to score networks on.", rich_help_panel=_REPORTS),
]
TemperatureData = Annotated[
    Path | None,
    typer.Option(
        help="NPZ with raw x and y that no model trained on, to fit the temperature of each "
        "model. Default: the temperatures in the files.",
        rich_help_panel=_FUNCTION,
    ),
]
Minutes = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Minutes of training end to end. 0: only least squares.",
        rich_help_panel=_FUNCTION,
        metavar="NUMBER",
    ),
]
PosteriorKind = Annotated[
    str | None,
    typer.Option(
        help="Calibrate uncertainty by a Laplace approximation on the synthetic inputs: "
        "last-layer, or kronecker (all dense layers and convolutions; a prediction takes a "
        "forward and a backward pass per class). Needs --counts, and a .pt2 file as output.",
        rich_help_panel=_FUNCTION,
    ),
]
State = Annotated[
    Path | None,
    typer.Option(
        help="File with the state of training end to end, to resume it.", rich_help_panel=_FUNCTION
    ),
]
ShowInputs = Annotated[
    Path | None,
    typer.Option(help="PNG, SVG or PDF file of some of the inputs.", rich_help_panel=_FUNCTION),
]
Select = Annotated[
    Path | None,
    typer.Option(
        help="NPZ with x and y: choose settings on it by a grid. x is raw if all models are "
        "files of fedbayes with the same standardization, else standardized as in training.",
        rich_help_panel=_SELECT,
    ),
]
Grid = Annotated[
    list[str] | None,
    typer.Option(
        help="Values for --select, as in gamma=1,10.", metavar="KEY=V1,V2", rich_help_panel=_SELECT
    ),
]
MaxNeurons = Annotated[
    int | None,
    typer.Option(
        min=1, help="Largest layer that --select may choose.", rich_help_panel=_SELECT, metavar="N"
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(help="JSON or HTML file for the full report.", rich_help_panel=_REPORTS),
]
Picture = Annotated[
    Path | None,
    typer.Option(
        help="PNG, SVG or PDF file of shared neurons, or of sizes and divergences.",
        rich_help_panel=_REPORTS,
    ),
]


@app.command(cls=FusionCommand)
def fuse(
    context: typer.Context,
    models: Models,
    out: Out,
    method: Method = None,
    counts: Counts = None,
    seed: FusionSeed = 0,
    settings: FusionSetting = None,
    model: NetworkOf = None,
    like: Like = None,
    shape: Shape = None,
    classes: Classes = None,
    mean: Mean = None,
    std: Std = None,
    inputs: InputsOf = None,
    sums: Sums = None,
    width: Width = None,
    bound: Bound = None,
    frontier: Frontier = None,
    test: Test = None,
    temperature_data: TemperatureData = None,
    minutes: Minutes = None,
    posterior: PosteriorKind = None,
    state: State = None,
    show_inputs: ShowInputs = None,
    select: Select = None,
    grid: Grid = None,
    max_neurons: MaxNeurons = None,
    report: Report = None,
    picture: Picture = None,
    as_json: Json = False,
) -> None:
    """Fuse models that were trained apart into one, in one go."""
    require_files(models, folders=True)
    require_files([counts, like, test, temperature_data, select, *(sums or [])])
    from fedbayes.data.progress import ProgressLines
    from fedbayes.workflows.fuse.fusing import read_grid
    from fedbayes.workflows.fuse.job import FusionJob
    from fedbayes.workflows.serve.model_files import ModelFiles

    own, of_model = _settings(context.meta.get(FusionCommand.GIVEN, {}), settings or [])
    job = FusionJob(
        models,
        out,
        method=method,
        settings=own,
        counts=counts,
        seed=seed,
        model=_network(model, of_model),
        shape=_shape(shape),
        classes=classes,
        mean=numbers("--mean", mean),
        std=numbers("--std", std),
        like=like,
        inputs=inputs,
        sums=sums or (),
        width=_width(width),
        bound=bound,
        frontier=() if frontier is None else _numbers("--frontier", frontier, float),
        test=test,
        temperature_data=temperature_data,
        minutes=minutes,
        posterior=posterior,
        state=state,
        show_inputs=show_inputs,
        select=select,
        grid=read_grid(grid or []),
        max_neurons=max_neurons,
        report=report,
        picture=picture,
        files=ModelFiles([model] if model and ":" in model else []),
    )
    console = rich.get_console()
    try:
        with console.status("reading") as status:
            say: Callable[[str], None]
            say = status.update if console.is_terminal else ProgressLines(console)
            fused = job.run(
                say,
                lambda at: say(
                    f"training end to end: {at.share:.0%}, KL divergence to the teacher "
                    f"{at.divergence:.3g} nats, "
                    f"{at.left:.0f} s left"
                ),
            )
    except KeyboardInterrupt:
        said = f"stopped before {out} was written"
        if state is not None and state.exists():
            said += "; the same command resumes it"
        elif state is None and job.resumable:
            said += "; with --state FILE, training end to end can be resumed"
        console.print(said, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None
    if as_json:
        print(json_text(fused.summary))
        return
    for note in fused.notes:
        console.print(note, highlight=False, soft_wrap=True, markup=False)
    for table in fused.tables:
        Console().print(table)
    Console().print(fused.told, highlight=False, soft_wrap=True)
    if fused.hint:
        console.print(fused.hint, highlight=False, soft_wrap=True)


def _settings(options: dict[str, Any], entries: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Settings of the method, of options and of `--set`; and what `--set` says of the network."""
    from fedbayes.config.given import assign

    found: dict[str, Any] = {}
    of_model = [entry for entry in entries if entry.strip().startswith("model.")]
    for entry in entries:
        if entry not in of_model:
            assign(found, entry)
    table = found.pop("function", {})
    if not isinstance(table, dict):
        raise ConfigError(
            f"function = {table!r}: it is a table. Set its keys, such as function.draws"
        )
    if twice := sorted(table.keys() & found.keys()):
        raise ConfigError(
            f"--set {twice[0]} and --set function.{twice[0]} are the same setting. Give one of them"
        )
    found = {**table, **found}
    for name in options.keys() & found.keys():
        raise ConfigError(
            f"--{name.replace('_', '-')} and --set {name} are the same setting. Give one of them"
        )
    return {**options, **found}, of_model


def _network(name: str | None, settings: list[str]) -> "ModelSettings | None":
    """The network that is named."""
    from fedbayes.config.config import Config

    of_network = [] if name is None else [f"model.name={name}"]
    return Config.load(None, [*of_network, *settings]).model if name or settings else None


def _shape(text: str | None) -> tuple[int, ...] | None:
    """Lengths of an input."""
    lengths = None if text is None else _numbers("--shape", text, int)
    if lengths is not None and min(lengths) < 1:
        raise ConfigError(f"--shape {text}: all lengths are 1 or more")
    return lengths


def _width(text: str | None) -> float | Literal["free"] | None:
    """A width."""
    if text is None or text == "free":
        return text  # type: ignore[return-value]
    found = _numbers("--width", text, float)
    if len(found) > 1:
        raise ConfigError(f"--width {text}: give one number. Several numbers need --frontier")
    return float(found[0])


def _numbers(option: str, text: str, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    """Numbers with commas between them."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} {text}: give numbers with commas, as 3,32,32") from None
