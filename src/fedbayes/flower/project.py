"""The Flower app that nodes get: a few lines, our config, and what samples look like."""

from pathlib import Path
from typing import Any

from fedbayes.config.config import Config
from fedbayes.core.files import write_beside
from fedbayes.data import FederatedData, Preprocessing
from fedbayes.errors import ConfigError, DataError, RunError, told_as

_PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "{description}"
# Every machine has fedbayes already: a package of that name from elsewhere might be a stranger's.
dependencies = []

[tool.flwr.app]
publisher = "fedbayes"

[tool.flwr.app.components]
serverapp = "federation:server"
clientapp = "federation:client"
"""
_CONFIG = """\

[tool.flwr.app.config]
# Where the ServerApp keeps its run folder; a run that is there already is resumed.
folder = "{folder}"
# Settings next to config.toml, as in: flwr run . --run-config 'set="rounds=5 training.lr=0.05"'
set = ""
"""

_APP = '''\
"""A federation of fedbayes. Its settings are in config.toml, next to this file."""

from pathlib import Path

from fedbayes.flower.apps import node_app, server_app

HERE = Path(__file__).parent
server = server_app(HERE)
client = node_app(HERE)
'''


def pyproject(name: str, description: str) -> str:
    """What Flower is to know of an app whose parts are in `federation.py`."""
    return _PYPROJECT.format(name=name, description=description)


def read_schema(file: Path) -> Preprocessing:
    """What the network sees of a sample in a federation, from the project's `schema.json`.

    Raises:
        ConfigError: the file cannot be read.
    """
    with told_as(ConfigError, f"cannot read {file}", OSError, DataError):
        return Preprocessing.load(file.read_bytes())


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
    return {
        **_app(config, name, folder, data.clients),
        "schema.json": data.preprocessing.public().dump(),
    }


def hello_files() -> dict[str, bytes]:
    """The files of a Flower app that asks nodes who they are, and has no work for them."""
    return _app(Config.create(engine="flower"), "hello", "")


def _app(config: Config, name: str, folder: str, clients: int | None = None) -> dict[str, bytes]:
    # Where data lie is each machine's own affair; how many clients there are, nodes must know.
    hidden: dict[str, Any] = {"dir": None, "clients": clients}
    if not folder:
        hidden |= {"database": None, "summaries": ()}
        if config.data.path is not None:
            hidden |= {"path": Path(config.data.path.name), "more": ()}
    settings = config.model_copy(update={"data": config.data.model_copy(update=hidden)})
    about = pyproject(name, "A federation of fedbayes") + _CONFIG.format(folder=folder)
    return {
        "pyproject.toml": about.encode(),
        "federation.py": _APP.encode(),
        "config.toml": settings.dump().encode(),
    }


def write_project(folder: Path, config: Config, data: FederatedData) -> None:
    """Write a project for `flwr run`.

    Raises:
        RunError: the folder is not empty, or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"{folder} already exists. Choose another folder")
    kept = (c if c.isascii() and c.isalnum() else "-" for c in folder.resolve().name.lower())
    name = "".join(kept).strip("-")
    if not name[:1].isalpha():
        name = f"federation-{name}".strip("-")
    run_folder = str(folder.resolve() / "run")
    files = app_files(config, data, name=name, folder=run_folder)
    with told_as(RunError, f"cannot write {folder}", OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            write_beside(folder / path, content)
