"""Flower apps that run any method from our config."""

import logging
import shlex
from collections.abc import Callable
from datetime import datetime
from functools import cache, partial
from pathlib import Path

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from platformdirs import user_data_path
from rich.console import Console

from fedbayes.config.config import Config
from fedbayes.core.devices import choose_device, repeatable
from fedbayes.core.portable import use_threads
from fedbayes.errors import ConfigError, EngineError, told_as
from fedbayes.federation.client_runtime import ClientRuntime
from fedbayes.federation.engine_table import ENGINES
from fedbayes.federation.stages import secure
from fedbayes.flower.asynchronous import AsynchronousFlower
from fedbayes.flower.engine import Flower
from fedbayes.flower.node import Node, app_of, once
from fedbayes.flower.node_config import check_node_config
from fedbayes.flower.own_data import own_data
from fedbayes.flower.project import read_schema
from fedbayes.flower.secagg import SecureFlower
from fedbayes.flower.secagg_node import secure_answer
from fedbayes.runs.build import build_data, build_runtime
from fedbayes.runs.outcome import outcome
from fedbayes.runs.simulation import Simulation
from fedbayes.start import drive
from fedbayes.storage.folder import RunFolder
from fedbayes.storage.state_store import StateStore


def client_app(node: Callable[[Context], Node]) -> ClientApp:
    """The ClientApp of nodes that are found from their contexts."""
    return app_of(node, secure_answer(node))


def state_store(config: Config, folder: Path) -> StateStore:
    """The private states of a node in this folder."""
    late = config.asynchronous.buffer is not None
    return StateStore(folder, config.checkpoint_every, config.keep_checkpoints != "last", late)


def node_app(project: Path) -> ClientApp:
    """The ClientApp of a SuperNode, by the folder with `config.toml` and `schema.json`."""
    return client_app(once(lambda context: find_node(project, context)))


def find_node(project: Path, context: Context) -> Node:
    """The client of a SuperNode, whose node config says who it is and what it has:

    client: which client it is, from 0.
    data: a file or folder with its samples; without it, the client's part of the data set that
        the config names, which must then be on this machine.
    sheet: of an Excel file with several; else the one that the config names.
    query, database: instead of data, a SQL query that gives the samples, and the URL of its
        database; else FEDBAYES_DATABASE.
    data-dir: folder with data sets; else FEDBAYES_DATA.
    state: folder for its private states.
    weights: the file that `model.weights` names, where it lies elsewhere on this machine.
    min-count: of biostatistics alone, see `fedbayes.flower.sums`.
    secure: whether it reports under secure aggregation alone.

    Raises:
        ConfigError: it does not say who it is, or says what cannot be.
    """
    given = context.node_config
    client = check_node_config(given)
    config = _config(project, context)
    if given.get("secure") and not config.secure.enabled:
        raise ConfigError(
            "this node needs secure aggregation (secure in its node config), but the federation "
            "has secure.enabled = false"
        )
    if "data-dir" in given:
        where = Path(str(given["data-dir"])).expanduser().absolute()
        config = config.model_copy(update={"data": config.data.model_copy(update={"dir": where})})
    config = _with_weights(config, given.get("weights"))
    use_threads(config.threads)
    states = given.get("state") or user_data_path("fedbayes") / "nodes" / str(client)

    def runtime() -> ClientRuntime:
        repeatable(choose_device(config.device), config.deterministic)
        if not {"data", "query"} & given.keys():
            return build_runtime(config, build_data(config))
        wanted = read_schema(project / "schema.json")
        path = Path(str(given["data"])) if "data" in given else None
        names = ("query", "database", "sheet")
        place = {name: str(given[name]) for name in names if name in given}
        if config.data.clients is None:
            raise ConfigError(
                "a node with its own data needs the number of clients. Set data.clients"
            )
        mine = own_data(config, path, wanted, client=client, **place)
        return build_runtime(config, mine, clients=config.data.clients)

    # Where the process stays for other messages, its data are read once.
    store = state_store(config, Path(str(states)).expanduser())
    return Node(client, cache(runtime), store, lambda run: plan_of(config, run.cohort))


def _with_weights(config: Config, given: object) -> Config:
    """The settings with the weights to start from where they are on this machine."""
    if config.model.weights is None:
        return config
    place = Path(str(given)).expanduser().absolute() if given else config.model.weights
    if not place.is_file():
        raise ConfigError(
            f"model.weights is {place}, which is not on this machine. Give it with --node-config "
            "'weights=\"/path/to/file\"'"
        )
    return config.model_copy(update={"model": config.model.model_copy(update={"weights": place})})


def server_app(project: Path) -> ServerApp:
    """The ServerApp of a project: it runs or resumes the run in the folder of the run config.

    Args:
        project: the folder with `config.toml`.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        logging.getLogger("flwr").setLevel(logging.WARNING)
        own = f"runs/federation-{datetime.now():%Y%m%d-%H%M%S}"
        folder = Path(str(context.run_config.get("folder") or own)).expanduser()
        settings = _config(project, context)
        there = (folder / "config.toml").exists()
        if there:
            _same(settings, folder)
        config = None if there else settings
        console = Console(no_color=True, width=120)
        drive(
            lambda notify: Simulation(
                config, folder, engine=lambda run: on_grid(run, _once(grid)), notify=notify
            ),
            console,
            conclude=lambda simulation: console.print(outcome(simulation.summary())),
        )

    return app


def on_grid(
    simulation: Simulation,
    connect: Callable[[], Grid],
    closing: Callable[[], None] = lambda: None,
) -> Flower:
    """The engine of a simulation whose clients are behind a grid."""
    config, runtime = simulation.config, simulation.runtime
    if simulation.method.reports.pooled:
        raise ConfigError(
            f"{simulation.method.name} needs all data in one place, which a federation does not "
            "have"
        )
    return flower(config, simulation.cohort)(
        connect,
        runtime,
        clients=simulation.clients,
        timeout=config.round_timeout,
        closing=closing,
    )


def flower(config: Config, cohort: int) -> Callable[..., Flower]:
    """What makes the engine that a config asks for, for cohorts of this size."""
    plan = plan_of(config, cohort)
    if config.asynchronous.active and not ENGINES[config.engine].clocked:
        return AsynchronousFlower
    if plan is None:
        return Flower
    return partial(SecureFlower, plan, apart=ENGINES[config.engine].states == "remote")


def plan_of(config: Config, cohort: int) -> secure.Plan | None:
    """The numbers of secure aggregation in cohorts of this size; None without it."""
    return secure.plan(
        config.secure,
        config.build_method(),
        config.aggregation,
        cohort,
        private=bool(config.privacy.noise),
    )


def _once(grid: Grid) -> Callable[[], Grid]:
    """A grid that is there once; Flower started this ServerApp for it."""
    grids = [grid]

    def connect() -> Grid:
        if not grids:
            raise EngineError("the SuperLink ended this run; start it again with `flwr run`")
        return grids.pop()

    return connect


def _config(project: Path, context: Context) -> Config:
    """The settings of a project, changed by the key `set` of the run config."""
    given = str(context.run_config.get("set") or "")
    with told_as(ConfigError, f"set = {given!r} in the run config", ValueError):
        overrides = shlex.split(given)
    # Server and nodes train by the same values: nobody chooses here.
    return Config.stored(project / "config.toml", [*overrides, "engine=flower"]).closed()


def _same(config: Config, folder: Path) -> None:
    """See that a run to resume has these settings, by which the nodes train."""
    found = RunFolder(folder).config().closed()
    before, now = found.model_dump(), config.as_found(found).closed().model_dump()
    for settings in (before, now):
        settings["data"].pop("dir")
        settings["model"].pop("weights")
    if before != now:
        raise ConfigError(
            f"{folder} has a run with other settings than this project. Set another folder in the "
            "run config, or restore the settings"
        )
