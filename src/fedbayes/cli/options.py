"""Options that several commands have, and what becomes of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print the summary as JSON alone on stdout.")]
Setting = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="Any setting, as in training.lr=0.05.", metavar="KEY=VALUE"),
]
Track = Annotated[
    list[str] | None, typer.Option("--track", help="Tell rounds to tensorboard or mlflow too.")
]
DataDir = Annotated[Path | None, typer.Option(help="Folder with data sets (FEDBAYES_DATA).")]


def overrides(shortcuts: Mapping[str, object]) -> list[str]:
    """The options that were given, as `key=value`."""
    return [f"{key}={value}" for key, value in shortcuts.items() if value is not None]
