"""`posterior`, `sums`: what a client computes beside its model, and sends."""

from pathlib import Path
from typing import Annotated

import rich
import typer

from fedbayes.cli.app import Console, app
from fedbayes.cli.options import Json, Mean, Setting, Std, numbers, overrides
from fedbayes.core.files import json_text, require_files


@app.command()
def posterior(
    model: Annotated[
        Path, typer.Argument(help="The client's model: .safetensors, .pt.", exists=True)
    ],
    data: Annotated[
        Path,
        typer.Option(
            help="Its own samples: a table, NPZ or folder, read as data.path in a config is.",
            exists=True,
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="File to write: .safetensors, with the weights.")
    ],
    network: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Network of a file that does not say it: a built-in name or "
            "package.module:factory. Default: fully connected, by the shapes.",
        ),
    ] = None,
    mean: Mean = None,
    std: Std = None,
    draws: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Targets to draw for each sample. Default: all classes if there are at most 20, "
            "else 1.",
        ),
    ] = None,
    largest: Annotated[
        int, typer.Option(min=1, help="Inputs or outputs of a layer up to which it has factors.")
    ] = 5000,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    settings: Setting = None,
    as_json: Json = False,
) -> None:
    """What a client's own data say of its model, to be sent with it to whoever fuses models."""
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
    )
    with rich.get_console().status("reading") as status:
        done = job.run(lambda count, total: status.update(f"{count:,} of {total:,} samples"))
    if as_json:
        print(json_text({"path": str(out), **done}))
        return
    Console().print(
        f"wrote {out}: {done['parameters']:,} weights, the diagonal of their Fisher matrix, and "
        f"factors of {len(done['layers'])} layers, of {done['samples']:,} samples; "
        f"{done['bytes'] / 1e6:,.1f} MB",
        highlight=False,
        soft_wrap=True,
    )


@app.command()
def sums(
    data: Annotated[
        Path,
        typer.Option(help="The client's own rows: read as data.path in a config is.", exists=True),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write: .json.")],
    model: Annotated[
        Path | None,
        typer.Argument(
            help="The client's model, whose features are summed, in its order. Default: all "
            "columns but label, group, split and drop of the settings."
        ),
    ] = None,
    category: Annotated[
        list[str] | None,
        typer.Option(help="Feature of which it is told how many rows have each value."),
    ] = None,
    min_rows: Annotated[
        int, typer.Option(min=1, help="Refuse sums of fewer rows: those of one are the row.")
    ] = 10,
    settings: Setting = None,
    as_json: Json = False,
) -> None:
    """Sums of a client's rows, for fuse --sums: no row, but means, variances and correlations."""
    from fedbayes.workflows.fuse.client_sums import SumsJob

    done = SumsJob(data, out, model, settings or [], category or [], min_rows).run()
    if as_json:
        print(json_text({"path": str(out), **done}))
        return
    Console().print(
        f"wrote {out}: sums of {done['rows']:,} rows of {len(done['features']):,} features, which "
        "tell their means, variances and correlations, and no row",
        highlight=False,
        soft_wrap=True,
    )
