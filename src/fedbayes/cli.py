"""The command line. No logic: every command calls the package and prints.

Imports that take long are made inside the commands, so that help is instant.
"""

import json
import sys
from collections.abc import Mapping
from datetime import datetime
from errno import ENOSPC
from importlib.metadata import version as package_version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from click import Context
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from fedbayes.errors import FedbayesError, RunError

if TYPE_CHECKING:
    from fedbayes.experiment.run import Simulation

app = typer.Typer(
    help="Probabilistic federated learning on PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="The data sets, and how they are divided.", no_args_is_help=True)
app.add_typer(data_app, name="data")


class _Federate(TyperGroup):
    """`federate CONFIG` is `federate run CONFIG`."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *self.get_help_option_names(ctx)):
            args = ["run", *args]
        return super().parse_args(ctx, args)


federate_app = typer.Typer(
    help="Run a federation over a network, on Flower.", no_args_is_help=True, cls=_Federate
)
app.add_typer(federate_app, name="federate")

Json = Annotated[bool, typer.Option("--json", help="Print the summary as JSON alone on stdout.")]
Setting = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="Any setting, as in training.lr=0.05.", metavar="KEY=VALUE"),
]
Track = Annotated[
    list[str] | None, typer.Option("--track", help="Tell rounds to tensorboard or mlflow too.")
]
DataDir = Annotated[Path | None, typer.Option(help="Folder with data sets (FEDBAYES_DATA).")]


@app.command()
def run(
    config: Annotated[Path | None, typer.Argument(help="TOML file with settings.")] = None,
    method: Annotated[str | None, typer.Option("--method", "-m", help="Method.")] = None,
    dataset: Annotated[str | None, typer.Option("--dataset", "-d", help="Data set.")] = None,
    model: Annotated[str | None, typer.Option(help="Network.")] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    cohort: Annotated[str | None, typer.Option(help="Clients in a round: 10, or 0.1.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    partition: Annotated[str | None, typer.Option(help="How data are divided.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Dirichlet concentration.")] = None,
    engine: Annotated[
        str | None, typer.Option(help="sequential, workers or flower-simulation.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes of engine workers.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all randomness.")] = None,
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Run folder.")] = None,
    track: Track = None,
    settings: Setting = None,
    as_json: Json = False,
) -> None:
    """Run a federation; the defaults learn digits with FedAvg."""
    from fedbayes.experiment.config import Config
    from fedbayes.experiment.run import Simulation
    from fedbayes.experiment.tracking import check

    check(track or ())
    shortcuts = {
        "method.name": method,
        "data.name": dataset,
        "model.name": model,
        "data.clients": clients,
        "cohort": cohort,
        "rounds": rounds,
        "data.partition": partition,
        "data.alpha": alpha,
        "engine": engine,
        "workers": workers,
        "seed": seed,
        "data.dir": data_dir,
    }
    settled = Config.load(config, [*_overrides(shortcuts), *(settings or [])])
    place = out or _new_folder(settled.data.name, settled.method["name"])
    _drive(Simulation(settled, place), track, as_json)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="Run folder.")],
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Go on with a run that was interrupted or killed."""
    from fedbayes.experiment.run import Simulation

    _drive(Simulation(None, folder), track, as_json)


def _overrides(shortcuts: Mapping[str, object]) -> list[str]:
    """The options that were given, as `key=value`."""
    return [f"{key}={value}" for key, value in shortcuts.items() if value is not None]


def _new_folder(dataset: str, method: str) -> Path:
    """A folder under `runs` that does not exist yet."""
    name = f"{dataset}-{method.rpartition(':')[2]}-{datetime.now():%Y%m%d-%H%M%S}"
    folder, count = Path("runs") / name, 1
    while folder.exists():
        count += 1
        folder = Path("runs") / f"{name}-{count}"
    return folder


def _drive(simulation: "Simulation", track: list[str] | None, as_json: bool) -> None:
    """Run to the end with a display, and say what came of it."""
    from fedbayes.experiment.display import display, outcome, stop_after_round
    from fedbayes.experiment.tracking import tracking

    console = Console(stderr=True)
    path = simulation.folder.path
    federate = " federate" if simulation.config.engine == "flower" else ""
    again = f"fedbayes{federate} resume {path}"
    try:
        with (
            simulation,
            stop_after_round(simulation, console),
            tracking(track or (), simulation) as tell,
            display(simulation, console) as listener,
        ):
            for step in simulation:
                listener(simulation, step)
                tell(step.metrics)
            if not simulation.progress.round:
                raise RunError(f"stopped before the first round; start with {again}")
            summary = simulation.summary()
    except KeyboardInterrupt:
        console.print(f"stopped; go on with: {again}", markup=False, highlight=False)
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(summary))
    else:
        Console().print(outcome(summary))
    if summary["stopped_reason"] == "interrupted":
        console.print(f"go on with: {again}", markup=False, highlight=False)
        raise typer.Exit(130)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="One method alone.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """List the methods with their parameters and papers."""
    from fedbayes.experiment.config import find_method
    from fedbayes.methods import METHODS

    chosen = {name: find_method(name)} if name else METHODS
    listing: list[dict[str, Any]] = [
        {
            "name": key,
            "summary": method.summary,
            "paper": method.paper,
            "parameters": {
                field: {"default": info.default, "description": info.description or ""}
                for field, info in method.model_fields.items()
            },
        }
        for key, method in chosen.items()
    ]
    if as_json:
        print(json.dumps(listing, indent=2))
        return
    table = Table("method", "parameter", "default", "", show_lines=False, pad_edge=False)
    for entry in listing:
        about = f"{entry['summary']}\n[dim]{entry['paper']}" if entry["paper"] else entry["summary"]
        table.add_section()
        table.add_row(f"[bold]{entry['name']}", "", "", about)
        for field, info in entry["parameters"].items():
            table.add_row("", field, str(info["default"]), info["description"])
    Console().print(table)


@app.command()
def evaluate(
    model: Annotated[Path, typer.Argument(help="Model file: .safetensors, .pt.")],
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(help="Models that it was fused from, to compare it with."),
    ] = None,
    dataset: Annotated[str | None, typer.Option("--dataset", "-d", help="Data set.")] = None,
    counts: Annotated[
        Path | None, typer.Option(help="JSON: samples of each class that each input saw.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="Run folder: use the test sets of its clients.")
    ] = None,
    data_dir: DataDir = None,
    settings: Setting = None,
    as_json: Json = False,
) -> None:
    """Try a fully connected model on a test set, beside its inputs, average and ensembles."""
    from dataclasses import asdict

    from fedbayes.experiment.build import build_data, stored_data
    from fedbayes.experiment.compare import compare
    from fedbayes.experiment.config import Config
    from fedbayes.experiment.record import RunFolder
    from fedbayes.experiment.silos import read_counts, read_models

    files = inputs or []
    if counts is not None and not files:
        raise RunError("--counts weights the ensemble of the inputs; name them after the model")
    if run is not None:
        folder = RunFolder(run)
        data = stored_data(folder.config(), folder)
    else:
        shortcuts = {"data.name": dataset, "data.dir": data_dir, "data.partition": "iid"}
        config = Config.load(None, [*_overrides(shortcuts), *(settings or [])])
        data = build_data(config)
        if data.dataset.official_train is None:
            Console(stderr=True).print(
                f"{data.dataset.name} has no official test part: some of its samples, drawn with "
                f"seed {config.seed}, are used, on which the models may have been trained. With "
                "--run they are tried on the test sets of a run.",
                highlight=False,
                soft_wrap=True,
            )
    scores = compare(
        read_models([model, *files]),
        data,
        inputs=[str(file) for file in files],
        counts=read_counts(counts, files) if counts is not None else None,
    )
    if as_json:
        print(json.dumps([asdict(score) for score in scores]))
        return
    table = Table("model", "accuracy", "nll", "parameters", pad_edge=False)
    for score in scores:
        row = (f"{score.accuracy:.4f}", f"{score.nll:.4f}", f"{score.parameters:,}")
        table.add_row(score.name, *row)
    Console().print(table)


@app.command()
def fuse(
    models: Annotated[list[Path], typer.Argument(help="Model files: .safetensors, .pt.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Fused model to write.")],
    method: Annotated[
        str, typer.Option("--method", "-m", help="gpi-fnm, pfnm, combined, or average.")
    ] = "gpi-fnm",
    counts: Annotated[
        Path | None, typer.Option(help="JSON: samples of each class that each model saw.")
    ] = None,
    sigma: Annotated[
        float | None, typer.Option(help="Deviation of a model's weights from the fused. [1]")
    ] = None,
    sigma0: Annotated[
        float | None, typer.Option(help="Deviation of fused weights from their mean. [1]")
    ] = None,
    gamma: Annotated[
        float | None, typer.Option(help="Mass of the process: more of it, more neurons. [1]")
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Weight of the KL term of gpi-fnm. [0.3]")
    ] = None,
    popularity_cap: Annotated[
        str | None, typer.Option(help="Members above it count no more; or none. [10]")
    ] = None,
    popularity_weight: Annotated[
        float | None, typer.Option(help="Factor of the log-odds of joining. [2]")
    ] = None,
    iterations: Annotated[int | None, typer.Option(help="Sweeps over the models. [5]")] = None,
    bias_mean: Annotated[
        float | None, typer.Option(help="Value that hidden biases were initialized to. [0]")
    ] = None,
    alternations: Annotated[
        int | None, typer.Option(help="Passes up and down deep networks at most. [0]")
    ] = None,
    starts: Annotated[int | None, typer.Option(help="Matchings to alternate from. [1]")] = None,
    start_gamma: Annotated[
        float | None, typer.Option(help="gamma of those matchings, if another.")
    ] = None,
    alpha: Annotated[
        str | None, typer.Option(help="Factors of combined: mean, linear, or exp. [exp]")
    ] = None,
    c: Annotated[
        float | None, typer.Option("--c", help="Constant of linear c + r and exp(c r). [0.001]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the order of models.")] = 0,
    held_out: Annotated[
        Path | None,
        typer.Option("--select", help="NPZ with x and y: choose settings on it by a grid."),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(help="Values for --select, as in gamma=1,10.", metavar="KEY=V1,V2"),
    ] = None,
    max_neurons: Annotated[
        int | None, typer.Option(min=1, help="Largest layer that --select may choose.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="JSON file for the full report.")] = None,
    picture: Annotated[Path | None, typer.Option(help="PNG file for who shares what.")] = None,
    as_json: Json = False,
) -> None:
    """Fuse fully connected models that were trained apart into one, in one go."""
    from fedbayes.experiment.fusing import FusionJob, read_grid, summary, trial_table

    given = {
        "sigma": sigma,
        "sigma0": sigma0,
        "gamma": gamma,
        "epsilon": epsilon,
        "popularity_cap": popularity_cap,
        "popularity_weight": popularity_weight,
        "iterations": iterations,
        "bias_mean": bias_mean,
        "alternations": alternations,
        "starts": starts,
        "start_gamma": start_gamma,
        "alpha": alpha,
        "c": c,
    }
    job = FusionJob(
        models,
        out,
        method=method,
        settings={name: value for name, value in given.items() if value is not None},
        counts=counts,
        held_out=held_out,
        grid=read_grid(grid or []),
        max_neurons=max_neurons,
        seed=seed,
        report=report,
        picture=picture,
    )
    console = Console(stderr=True)
    with console.status("reading") as status:
        fusion, trials = job.run(status.update)
    if trials and not as_json:
        Console().print(trial_table(trials, fusion))
    if as_json:
        print(json.dumps(summary(fusion)))
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


@app.command()
def calibrate(
    folder: Annotated[Path, typer.Argument(help="Run folder.")],
    personal: Annotated[
        bool, typer.Option("--personal", help="Every client's own model on its own test set.")
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(help="PNG file for a reliability diagram.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """How far a run's predictions can be trusted: calibration, and uncertainty if it has any."""
    from fedbayes.experiment.calibration import plot, summary, trust
    from fedbayes.experiment.silos import writable

    if picture is not None:
        writable(picture, "the picture")
    found = trust(folder, personal=personal)
    figures = summary(found)
    if picture is not None:
        plot(found, picture)
    if as_json:
        print(json.dumps(figures))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in figures.items():
        table.add_row(_FIGURES.get(name, name), f"{value:.4f}")
    Console().print(table)
    if picture is not None:
        Console().print(f"wrote {picture}", highlight=False, soft_wrap=True)


_FIGURES = {
    "accuracy": "accuracy",
    "nll": "negative log-likelihood",
    "ece": "expected calibration error",
    "entropy_right": "entropy where right",
    "entropy_wrong": "entropy where wrong",
    "information_right": "mutual information where right",
    "information_wrong": "mutual information where wrong",
}


Runs = Annotated[list[Path], typer.Argument(help="Run folders.")]


@app.command()
def report(
    folders: Runs,
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path(
        "report.html"
    ),
) -> None:
    """One HTML page of a run, or of several side by side; needs no network."""
    from fedbayes.experiment.reports import write_page

    with Console(stderr=True).status("") as status:
        write_page(folders, out, status.update)
    Console().print(f"wrote {out}", highlight=False, soft_wrap=True)


@app.command()
def plot(
    folders: Runs,
    figure: Annotated[
        str,
        typer.Option(
            "--figure",
            "-f",
            help="accuracy, bytes, local, sparsity, size, clients, split, confusion, or any "
            "figure of metrics.jsonl.",
        ),
    ] = "accuracy",
    out: Annotated[Path, typer.Option("--out", "-o", help="PNG, SVG or PDF file.")] = Path(
        "figure.png"
    ),
) -> None:
    """Draw a single figure of one run or several, for a paper."""
    from fedbayes.experiment.reports import plot

    with Console(stderr=True).status("") as status:
        plot(folders, figure, out, status.update)
    Console().print(f"wrote {out}", highlight=False, soft_wrap=True)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="Run folder.")],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            help="File: .safetensors or .pt for weights, .pt2 for a program of torch.export.",
        ),
    ] = Path("model.safetensors"),
    compact: Annotated[
        bool, typer.Option("--compact", help="Cut units that are all zero out of the tensors.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Write the global model of a run for use elsewhere, physically smaller if asked."""
    from fedbayes.experiment.export import export

    done = export(folder, out, small=compact)
    if as_json:
        print(
            json.dumps(
                {
                    "path": str(done.path),
                    "parameters": done.parameters,
                    "kept": done.kept,
                    "difference": done.difference,
                }
            )
        )
        return
    text = f"wrote {done.path}: {done.kept:,} of {done.parameters:,} parameters"
    if compact:
        text += f", outputs the same to {done.difference:.1g}"
    Console().print(text, highlight=False, soft_wrap=True)


@app.command()
def reproduce(
    name: Annotated[str | None, typer.Argument(help="Experiment; none, or list: all.")] = None,
    scale: Annotated[
        str, typer.Option(help="small (minutes to some hours) or paper (its scale).")
    ] = "small",
    dataset: Annotated[
        list[str] | None, typer.Option("--dataset", "-d", help="Some of its data sets alone.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for results.")] = Path(
        "reproduced"
    ),
) -> None:
    """Measure a table or figure of a paper; go on where the last try stopped."""
    from fedbayes.experiment.papers import EXPERIMENTS, reproduce

    if name in (None, "list"):
        table = Table("experiment", "data", "", pad_edge=False)
        for experiment in EXPERIMENTS.values():
            table.add_row(
                f"[bold]{experiment.name}", ", ".join(experiment.datasets), experiment.what
            )
        Console().print(table)
        return
    if scale not in ("small", "paper"):
        raise RunError(f"--scale {scale}: choose small or paper")
    console = Console(stderr=True)
    try:
        with console.status("") as status:
            watch = status.update if console.is_terminal else console.print
            text = reproduce(name, out, scale=scale, datasets=dataset, watch=watch)  # type: ignore[arg-type]
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on", highlight=False)
        raise typer.Exit(130) from None
    print(text)
    console.print(f"wrote {out / name}", highlight=False, soft_wrap=True)


Link = Annotated[str, typer.Option("--superlink", help="HOST:PORT of the SuperLink.")]
Certificates = Annotated[
    Path | None,
    typer.Option("--root-certificates", help="PEM file of the CA of the SuperLink's certificate."),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="No TLS: for trials on one machine.")]
Secret = Annotated[
    Path | None,
    typer.Option("--superexec-secret", help="File given to --superexec-auth-secret-file."),
]


@federate_app.command("run")
def federate(
    config: Annotated[Path | None, typer.Argument(help="TOML file with settings.")] = None,
    superlink: Link = "127.0.0.1:8000",
    root_certificates: Certificates = None,
    insecure: Insecure = False,
    superexec_secret: Secret = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Run folder.")] = None,
    track: Track = None,
    settings: Setting = None,
    as_json: Json = False,
) -> None:
    """Run a config on the nodes of a SuperLink."""
    from fedbayes.experiment.config import Config
    from fedbayes.experiment.flower import federation, superlink_at
    from fedbayes.experiment.tracking import check

    check(track or ())
    link = superlink_at(superlink, root_certificates, insecure, superexec_secret)
    settled = Config.load(config, [*(settings or []), "engine=flower"])
    folder = out or _new_folder(settled.data.name, settled.method["name"])
    _drive(federation(link, settled, folder), track, as_json)


@federate_app.command("resume")
def federate_resume(
    folder: Annotated[Path, typer.Argument(help="Run folder.")],
    superlink: Link = "127.0.0.1:8000",
    root_certificates: Certificates = None,
    insecure: Insecure = False,
    superexec_secret: Secret = None,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Go on with a federation that was interrupted or killed."""
    from fedbayes.experiment.flower import federation, superlink_at

    link = superlink_at(superlink, root_certificates, insecure, superexec_secret)
    _drive(federation(link, None, folder), track, as_json)


@federate_app.command("init")
def federate_init(
    folder: Annotated[Path, typer.Argument(help="Folder to write.")],
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
    settings: Setting = None,
) -> None:
    """Write a Flower project for `flwr run`."""
    from fedbayes.experiment.build import build_data
    from fedbayes.experiment.config import Config
    from fedbayes.experiment.flower import require_flower

    require_flower()
    from fedbayes.experiment.flower.project import write_project

    settled = Config.load(config, [*(settings or []), "engine=flower"])
    write_project(folder, settled, build_data(settled))
    Console().print(
        f"wrote {folder}; run it on a SuperLink with: flwr run {folder} NAME, where NAME is a "
        "connection in Flower's config",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


@federate_app.command("keys")
def federate_keys(
    folder: Annotated[Path, typer.Argument(help="Folder to write.")],
    host: Annotated[
        list[str], typer.Option("--host", help="Name or address that nodes reach the SuperLink by.")
    ],
    clients: Annotated[int, typer.Option(min=0, help="Number of clients.")] = 3,
) -> None:
    """Make a CA, a certificate for the SuperLink, and a key for every client."""
    from fedbayes.experiment.flower import require_flower

    require_flower()
    from fedbayes.experiment.flower.keys import make_keys

    for file in make_keys(folder, host, clients):
        Console().print(f"wrote {file}", highlight=False, soft_wrap=True)


@federate_app.command("admit")
def federate_admit(
    keys: Annotated[list[Path], typer.Argument(help="Public keys of clients: client-0.pub …")],
    superlink: Link = "127.0.0.1:8000",
    root_certificates: Certificates = None,
    insecure: Insecure = False,
) -> None:
    """Let the clients with these keys in, at a SuperLink with --enable-supernode-auth."""
    from fedbayes.experiment.flower import superlink_at

    link = superlink_at(superlink, root_certificates, insecure)
    from fedbayes.experiment.flower.keys import read_public_key

    for file in keys:
        node = link.admit(read_public_key(file), file.stem)
        Console().print(f"{file} is node {node}", highlight=False, soft_wrap=True)


@data_app.command("list")
def data_list(
    data_dir: DataDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """List the built-in data sets and where they come from."""
    from dataclasses import asdict

    from fedbayes.data import catalogue

    entries = catalogue(data_dir)
    if as_json:
        print(json.dumps([asdict(entry) for entry in entries], indent=2))
        return
    table = Table("", "samples", "shape", "classes", "here", show_header=True, pad_edge=False)
    for entry in entries:
        groups = f"; {entry.groups}" if entry.groups else ""
        table.add_row(
            f"[bold]{entry.name}[/bold]  {entry.what}{groups}\n[dim]{entry.source}",
            f"{entry.samples:,}",
            "×".join(map(str, entry.shape)),
            str(entry.classes),
            "yes" if entry.available else "no",
        )
    Console().print(table)


@data_app.command("show")
def data_show(
    name: Annotated[str | None, typer.Argument(help="Data set; none with --set data.path.")] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    partition: Annotated[str | None, typer.Option(help="How data are divided.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Dirichlet concentration.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the division.")] = None,
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="PNG file to write.")] = None,
    settings: Setting = None,
) -> None:
    """Divide a data set and draw the class shares of each client to a PNG."""
    from fedbayes.data import plot_partition
    from fedbayes.experiment.build import build_data
    from fedbayes.experiment.config import Config

    shortcuts = {
        "data.name": name,
        "data.clients": clients,
        "data.partition": partition,
        "data.alpha": alpha,
        "data.dir": data_dir,
        "seed": seed,
    }
    config = Config.load(None, [*_overrides(shortcuts), *(settings or [])])
    data = build_data(config)
    title = f"{data.dataset.name}, {config.data.partition}, {data.clients} clients"
    path = out or Path(f"{data.dataset.name}-{config.data.partition}.png")
    try:
        plot_partition(data, path, title)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error}") from None
    sizes, tests = data.train_sizes(), data.test_sizes()
    Console().print(
        f"{title}: {sizes.sum():,} training samples ({sizes.min():,} to {sizes.max():,} a client), "
        f"{tests.sum():,} test samples ({tests.min():,} to {tests.max():,} a client)\n"
        f"picture: {path}",
        highlight=False,
        soft_wrap=True,
    )


@app.command()
def version() -> None:
    """Print the version."""
    print(package_version("fedbayes"))


def main() -> None:
    """Run the command line; a user's error becomes one plain message and exit status 2."""
    # So that `package.module:name` finds the user's own module, as with `python -m`.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        app()
    except FedbayesError as error:
        _fail(str(error))
    except OSError as error:
        if error.filename is None and error.errno != ENOSPC:
            raise
        _fail(f"{error.filename or 'the run folder'}: {error.strerror}")


def _fail(message: str) -> NoReturn:
    text = f"[red]error:[/red] {escape(message)}"
    Console(stderr=True).print(text, highlight=False, soft_wrap=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
