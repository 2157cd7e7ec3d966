"""The Flower app that nodes get: a few lines, our config, and what samples look like."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import TypeAdapter, ValidationError

from fedbayes.data import FederatedData
from fedbayes.errors import ConfigError, RunError
from fedbayes.runs.config import Config
from fedbayes.runs.folder import write_beside
from fedbayes.targets import Target

_PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "A federation of fedbayes"
# Every machine has fedbayes already: a package of that name from elsewhere might be a stranger's.
dependencies = []

[tool.flwr.app]
publisher = "fedbayes"

[tool.flwr.app.components]
serverapp = "federation:server"
clientapp = "federation:client"

[tool.flwr.app.config]
# Where the ServerApp keeps its run folder; a run that is there already is resumed.
folder = "{folder}"
# Settings beside config.toml, as in: flwr run . --run-config 'set="rounds=5 training.lr=0.05"'
set = ""
"""

_APP = '''\
"""A federation of fedbayes. Its settings are in config.toml, beside this file."""

from pathlib import Path

from fedbayes.flower.apps import node_app, server_app

HERE = Path(__file__).parent
server = server_app(HERE)
client = node_app(HERE)
'''


@dataclass(frozen=True)
class Schema:
    """What samples look like, so that clients that bring their own data agree."""

    shape: tuple[int, ...]
    """Of one sample."""
    target: Target
    """What is to be predicted; of a real target also center and scale."""
    scale: float
    """What a sample is divided by before all else."""
    mean: tuple[float, ...]
    """What is then subtracted, per channel or feature."""
    std: tuple[float, ...]
    """What it is then divided by."""
    features: tuple[str, ...]
    """Names of a table's features."""

    @classmethod
    def of(cls, data: FederatedData) -> Self:
        """The schema of the server's data."""
        return cls(
            data.shape,
            data.target,
            float(data.dataset.scale),
            tuple(np.asarray(data.mean, float).tolist()),
            tuple(np.asarray(data.std, float).tolist()),
            data.dataset.features,
        )

    @classmethod
    def read(cls, file: Path) -> Self:
        """The schema in a JSON file."""
        try:
            return TypeAdapter(cls).validate_json(file.read_bytes())
        except ValidationError as error:
            reason = error.errors()[0]
            place = ".".join(map(str, reason["loc"]))
            raise ConfigError(f"cannot read {file}: {place} {reason['msg']}") from None
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error}") from None

    def dump(self) -> bytes:
        """As JSON."""
        return TypeAdapter(Schema).dump_json(self, indent=2) + b"\n"


def app_files(
    config: Config, data: FederatedData, *, name: str = "federation", folder: str = ""
) -> dict[str, bytes]:
    """The files of a Flower app that runs a config, by path.

    Args:
        config: the settings.
        data: what the server has of the data; nodes get its schema, not its samples.
        name: name of the project.
        folder: where the ServerApp keeps its run folder; empty if no ServerApp reads the files.
    """
    # Where data lie is each machine's own affair.
    hidden: dict[str, Any] = {"dir": None}
    if config.data.path is not None and not folder:
        hidden["path"] = Path(config.data.path.name)
    settings = config.model_copy(update={"data": config.data.model_copy(update=hidden)})
    pyproject = _PYPROJECT.format(name=name, folder=folder)
    return {
        "pyproject.toml": pyproject.encode(),
        "federation.py": _APP.encode(),
        "config.toml": settings.dump().encode(),
        "schema.json": Schema.of(data).dump(),
    }


def write_project(folder: Path, config: Config, data: FederatedData) -> None:
    """Write a project for `flwr run`.

    Raises:
        RunError: the folder is not empty, or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"{folder} is there already; choose another folder")
    kept = (c if c.isascii() and c.isalnum() else "-" for c in folder.resolve().name.lower())
    name = "".join(kept).strip("-")
    if not name[:1].isalpha():
        name = f"federation-{name}".strip("-")
    run_folder = str(folder.resolve() / "run")
    files = app_files(config, data, name=name, folder=run_folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            write_beside(folder / path, content)
    except OSError as error:
        raise RunError(f"cannot write {folder}: {error}") from None
