"""The engine `flower-simulation`: Flower's own simulation, with the clients in this process.

Flower's simulation keeps its nodes' messages in a link state and gives them to a backend. The
one it ships is Ray; ours calls the ClientApp directly, one message at a time, so that nothing
else must be installed and the numbers are those of the sequential engine.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from copy import copy
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.app.message import make_message
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

from fedbayes.config.config import Config
from fedbayes.errors import EngineError
from fedbayes.federation.client_runtime import ClientRuntime
from fedbayes.flower.apps import client_app, flower, plan_of, state_store
from fedbayes.flower.engine import Flower
from fedbayes.flower.node import Node


class _Stop(threading.Event):
    """Flower's event that ends a simulation, which can be woken to look for messages."""

    def __init__(self) -> None:
        super().__init__()
        self.awake = threading.Event()

    def set(self) -> None:
        super().set()
        self.awake.set()

    def wait(self, timeout: float | None = None) -> bool:
        self.awake.wait(timeout)
        self.awake.clear()
        return self.is_set()


class _Grid(InMemoryGrid):
    """Flower's grid, whose messages are on their way at once."""

    def __init__(self, factory: LinkStateFactory, stop: _Stop) -> None:
        super().__init__(factory)
        self._stop = stop

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        taken = super().push_messages(messages)
        self._stop.awake.set()
        return taken


class _InProcess(Backend):
    """Runs the ClientApp in the thread that asks, one message at a time, until the stop."""

    num_workers = 1

    def __init__(self, stop: threading.Event) -> None:
        super().__init__({})
        self._app: ClientApp | None = None
        self._stop = stop
        self.at_work = threading.Lock()

    def build(self, app_fn: Callable[[], ClientApp]) -> None:
        self._app = app_fn()

    def is_worker_idle(self) -> bool:
        return True

    def terminate(self) -> None:
        self._app = None

    def process_message(self, message: Message, context: Context) -> tuple[Message, Context]:
        """Answer a message of the node's own, as over a network: the server counts the bytes of
        what it sent while Flower's mods take entries out of what they got.
        """
        with self.at_work:
            if self._app is None or self._stop.is_set():
                raise EngineError("the simulation has ended")
            return self._app(_own(message), context), context


def _own(message: Message) -> Message:
    """The same message, with records and metadata of its own."""
    records: dict[str, Any] = dict(message.content)
    own = RecordDict({name: type(record)(dict(record)) for name, record in records.items()})
    return make_message(copy(message.metadata), own)  # Flower writes into it


def simulated(config: Config, runtime: ClientRuntime, clients: int, folder: Path) -> Flower:
    """Flower's simulation of `clients` nodes.

    Args:
        config: the settings of the run.
        runtime: the clients.
        clients: how many there are.
        folder: where each node keeps its private state, in a folder of its own.
    """

    def node(context: Context) -> Node:
        client = int(context.node_config[PARTITION_ID_KEY])
        store = state_store(config, folder / str(client))
        return Node(client, lambda: runtime, store, lambda run: plan_of(config, run.cohort))

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
    stop = _Stop()
    grid, backend = _Grid(factory, stop), _InProcess(stop)
    grid.set_run(run)
    nodes = vce_api._register_nodes(clients, factory)
    thread = threading.Thread(
        target=vce_api.run_api,
        args=(
            lambda: app,
            lambda: backend,
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
        with backend.at_work:  # Flower's threads notice within a second: nobody waits for them
            return

    return grid, close


def start(simulation: Any) -> Flower:
    """The engine for a `Simulation`."""
    folder = simulation.folder.path.resolve() / "nodes"
    return simulated(simulation.config, simulation.runtime, simulation.clients, folder)
