"""The engine `flower-simulation`: Flower's own simulation, with the clients in this process.

Flower's simulation keeps its nodes' messages in a link state and gives them to a backend. The
one it ships is Ray; ours calls the ClientApp directly, one message at a time, so that nothing
else must be installed and the numbers are those of the sequential engine.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import PARTITION_ID_KEY, SUPERLINK_NODE_ID
from flwr.proto.task_pb2 import Task as FlowerTask
from flwr.server.superlink.fleet.vce import vce_api
from flwr.server.superlink.fleet.vce.backend import Backend
from flwr.server.superlink.fleet.vce.metrics import VceMetrics
from flwr.server.superlink.linkstate import InMemoryLinkState, LinkStateFactory
from flwr.server.superlink.linkstate.in_memory_linkstate import RunRecord
from flwr.serverapp import Grid
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid import InMemoryGrid

from fedbayes.federation.client_runtime import ClientRuntime
from fedbayes.flower.apps import client_app, flower, state_store
from fedbayes.flower.engine import Flower
from fedbayes.flower.node import Node
from fedbayes.runs.config import Config


class _InProcess(Backend):
    """Runs the ClientApp in the thread that asks, one message at a time."""

    num_workers = 1

    def __init__(self) -> None:
        super().__init__({})
        self._app: ClientApp | None = None

    def build(self, app_fn: Callable[[], ClientApp]) -> None:
        self._app = app_fn()

    def is_worker_idle(self) -> bool:
        return True

    def terminate(self) -> None:
        self._app = None

    def process_message(self, message: Message, context: Context) -> tuple[Message, Context]:
        assert self._app is not None
        return self._app(message, context), context


def simulated(config: Config, runtime: ClientRuntime, clients: int, folder: Path) -> Flower:
    """Flower's simulation of so many nodes.

    Args:
        config: the settings of the run.
        runtime: the clients.
        clients: how many there are.
        folder: where each node keeps its private state, in a folder of its own.
    """

    def node(context: Context) -> Node:
        client = int(context.node_config[PARTITION_ID_KEY])
        return Node(client, lambda: runtime, state_store(config, folder / str(client)))

    grid, close = simulated_grid(client_app(node), clients)
    return flower(config, config.cohort_size(clients))(
        lambda: grid,
        runtime,
        clients=clients,
        timeout=config.round_timeout,
        poll=0.02,
        closing=close,
    )


def simulated_grid(app: ClientApp, clients: int) -> tuple[Grid, Callable[[], None]]:
    """A grid of nodes in this process, and what ends it.

    Args:
        app: answers for every node; the partition id in its context is the client.
        clients: how many nodes there are.
    """
    logging.getLogger("flwr").setLevel(logging.WARNING)
    factory = LinkStateFactory(
        FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory()
    )
    state = factory.state()
    assert isinstance(state, InMemoryLinkState)
    run = Run.create_empty(run_id=1)
    run.primary_task_id = 1
    run.federation_id = NOOP_FEDERATION_ID
    state.run_ids[run.run_id] = RunRecord(run=run)
    state.task_store[run.primary_task_id] = FlowerTask(task_id=1, run_id=run.run_id)
    TaskIdentity.task_id, TaskIdentity.run_id = 1, run.run_id
    TaskIdentity.node_id = SUPERLINK_NODE_ID
    grid = InMemoryGrid(factory)
    grid.set_run(run)
    nodes = vce_api._register_nodes(clients, factory)
    stop = threading.Event()
    thread = threading.Thread(
        target=vce_api.run_api,
        args=(
            lambda: app,
            _InProcess,
            nodes,
            factory,
            vce_api._register_node_info_stores(nodes, run),
            stop,
            VceMetrics(),
        ),
        name="fedbayes-flower-simulation",
        daemon=True,
    )
    thread.start()

    def close() -> None:
        stop.set()
        thread.join()

    return grid, close


def start(simulation: Any) -> Flower:
    """The engine for a `Simulation`."""
    folder = simulation.folder.path.resolve() / "nodes"
    return simulated(simulation.config, simulation.runtime, simulation.clients, folder)
