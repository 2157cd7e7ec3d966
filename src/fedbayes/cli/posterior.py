"""`posterior`, `sums`: statistics that a client computes and sends with its model."""

from pathlib import Path
from typing import Annotated

import rich
import typer

from fedbayes.cli.app import Console, app
from fedbayes.cli.options import Json, Mean, Setting, Std, numbers, overrides
from fedbayes.core.files import json_text, require_files
from fedbayes.core.wording import size
from fedbayes.errors import ConfigError


@app.command()
def posterior(
    model: Annotated[
        Path, typer.Argument(help="Model file of the client: .safetensors, .pt.", exists=True)
    ],
    data: Annotated[
        Path,
        typer.Option(
            help="Samples of the client: a table, NPZ file or folder, read as data.path.",
            exists=True,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="File to write: .safetensors. It includes the weights."),
    ],
    network: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Network of a file that does not describe it: a built-in name or "
            "package.module:factory. Default: fully connected, by the shapes of the weights.",
        ),
    ] = None,
    mean: Mean = None,
    std: Std = None,
    draws: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of targets to sample for each input. Default: all classes if there are at "
            "most 20, else 1.",
        ),
    ] = None,
    largest: Annotated[
        int,
        typer.Option(
            min=1, help="Largest number of inputs or outputs of a layer with Kronecker factors."
        ),
    ] = 5000,
    temperature: Annotated[
        Path | None,
        typer.Option(
            help="Rows of the client that the model did not train on, to fit a temperature to. "
            "fuse needs it to weigh overconfident clients.",
            exists=True,
        ),
    ] = None,
    head: Annotated[
        bool,
        typer.Option(
            "--head",
            help="Add sums of the last layer's inputs by class, for fuse --method gaussian-head.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the sampled targets.")] = 0,
    settings: Setting = None,
    as_json: Json = False,
) -> None:
    """Compute a client's posterior statistics (Fisher, Kronecker) for fuse."""
    require_files([model])
    from fedbayes.fusion.posterior_settings import CurvatureSettings
    from fedbayes.workflows.fuse.posterior_files import PosteriorJob

    job = PosteriorJob(
        model,
        data,
        out,
        overrides(settings, model=network),
        numbers("--mean", mean),
        numbers("--std", std),
        CurvatureSettings(draws=draws, largest=largest),
        seed,
        temperature,
        head,
    )
    with rich.get_console().status("reading") as status:
        done = job.run(lambda count, total: status.update(f"{count:,} of {total:,} samples"))
    if as_json:
        print(json_text({"path": str(out), **done}))
        return
    layers = len(done["layers"])
    Console().print(
        f"wrote {out}: {done['parameters']:,} weights, the diagonal of their Fisher matrix, and "
        f"factors of {layers} layer{'s' if layers != 1 else ''}, of {done['samples']:,} samples; "
        f"{done['bytes'] / 1e6:,.1f} MB"
        + (f"; temperature {done['temperature']:.3f}" if done["temperature"] is not None else "")
        + (f"; sums of {done['features']:,} features by class" if head else ""),
        highlight=False,
        soft_wrap=True,
    )


@app.command()
def sums(
    data: Annotated[
        Path,
        typer.Option(help="Rows of the client, read as data.path.", exists=True),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write: .json.")],
    model: Annotated[
        Path | None,
        typer.Argument(
            help="Model file of the client, which names the features. Default: all columns except "
            "label, group, split and drop of the settings."
        ),
    ] = None,
    category: Annotated[
        list[str] | None,
        typer.Option(help="Feature to count by value, as a category. Repeat it for several."),
    ] = None,
    min_rows: Annotated[
        int,
        typer.Option(
            min=1,
            help="Smallest number of samples; sums of fewer raise an error. Of texts, also the "
            "smallest number that have a token or a pair of tokens; rarer ones are left out.",
        ),
    ] = 10,
    epsilon: Annotated[
        float | None,
        typer.Option(help="Noise on counts of texts: ε of differential privacy for one text."),
    ] = None,
    temperature: Annotated[
        bool,
        typer.Option(
            "--temperature",
            help="Sums of the model's predictions of rows that it did not train on, for fedbayes "
            "calibrate --sums.",
        ),
    ] = False,
    settings: Setting = None,
    as_json: Json = False,
) -> None:
    """Compute sums over a client's data for fuse --sums: of rows means and correlations, of images
    and signals the mean and spectra, of texts counts of tokens and pairs. With --temperature, sums
    of a model's predictions for calibrate --sums.
    """
    given = settings or []
    if temperature:
        _predictions(model, data, out, given, min_rows, as_json, category, epsilon)
        return
    from fedbayes.workflows.fuse.client_sums import SumsJob

    done = SumsJob(data, out, model, given, category or [], min_rows, epsilon).run()
    if as_json:
        print(json_text({"path": str(out), **done}))
        return
    told = (
        f"sums of {done['rows']:,} rows of {len(done['features']):,} features. They contain means, "
        "variances and correlations, but no single row"
    )
    if "shape" in done:
        told = (
            f"the mean and spectra of {done['rows']:,} samples of {size(done['shape'])}. They "
            "contain no single sample, and are safer the more samples they are of"
        )
    if "tokens" in done:
        told = (
            f"counts of {done['tokens']:,} tokens and {done['pairs']:,} pairs of tokens in "
            f"{done['rows']:,} texts. They contain no whole text"
        )
    if "delta" in done:
        told += f". Noise: ({done['epsilon']:g}, {done['delta']:.1g})-differential privacy"
    Console().print(
        f"wrote {out}: {told}",
        highlight=False,
        soft_wrap=True,
    )


def _predictions(
    model: Path | None,
    data: Path,
    out: Path,
    given: list[str],
    least: int,
    as_json: bool,
    category: list[str] | None,
    epsilon: float | None,
) -> None:
    """Sums of a model's predictions."""
    if model is None:
        raise ConfigError("--temperature needs a model: fedbayes sums MODEL --temperature …")
    for option, value in (("--category", category), ("--epsilon", epsilon)):
        if value is not None:
            raise ConfigError(f"{option} has no effect with --temperature. Leave it out")
    from fedbayes.workflows.calibrate.temperature_files import write_temperature_sums

    sums = write_temperature_sums(model, data, out, given, least=least)
    if as_json:
        print(json_text({"path": str(out), "rows": sums.rows, "left_out": sums.left_out}))
        return
    left = f". {sums.left_out:,} rows have no prediction, and are left out" if sums.left_out else ""
    Console().print(
        f"wrote {out}: {sums.numbers:,} sums of the predictions of {sums.rows:,} rows. They "
        f"contain no single row{left}",
        highlight=False,
        soft_wrap=True,
    )
