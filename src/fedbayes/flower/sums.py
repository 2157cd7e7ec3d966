"""Biostatistics over nodes: questions go out as tasks, and sums come back as reports."""

from typing import Any

from flwr.app import Context
from flwr.common.constant import PARTITION_ID_KEY

from fedbayes.biostatistics import Client, Packet
from fedbayes.errors import EngineError, MessageError
from fedbayes.federation.client_runtime import NoReport, Task
from fedbayes.flower.engine import Flower
from fedbayes.flower.simulated import simulated_grid
from fedbayes.flower.sums_node import SumsNode, answering, read_packet, write_packet
from fedbayes.flower.superlink import Submission, SuperLink

_APP = """\
\"\"\"Biostatistics on the tables of nodes: they answer questions with sums.\"\"\"

from flwr.serverapp import ServerApp

from fedbayes.flower.sums_node import sums_app

server = ServerApp()
client = sums_app()
"""

_PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "sums"
version = "1.0.0"
description = "Biostatistics of fedbayes"
# Every machine has fedbayes already: a package of that name from elsewhere might be a stranger's.
dependencies = []

[tool.flwr.app]
publisher = "fedbayes"

[tool.flwr.app.components]
serverapp = "federation:server"
clientapp = "federation:client"
"""


class NodeCarrier:
    """The clients at the nodes of a grid, each of which must answer every question.

    Args:
        engine: the way to the nodes.
        names: of the clients, by their numbers.
    """

    def __init__(self, engine: Flower, names: tuple[str, ...]) -> None:
        self._engine, self._names, self._round = engine, names, 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the clients, by their numbers."""
        return self._names

    def ask(self, question: Packet, most: int) -> dict[str, Packet]:
        """The answers of all clients, by name.

        Raises:
            EngineError: a client does not answer; the text names it.
            MessageError: its answer cannot be read.
        """
        self._round += 1
        message = write_packet(question)
        tasks = [
            Task(client=client, round=self._round, message=message, state=None, most=most)
            for client in range(len(self._names))
        ]
        answers = {}
        for name, outcome in zip(self.names, self._engine.train(tasks), strict=True):
            if isinstance(outcome, NoReport):
                raise EngineError(
                    f"client {name}: {outcome.reason}. An exact fit needs the sums of every client"
                )
            try:
                answers[name] = read_packet(outcome.report)
            except MessageError as error:
                raise MessageError(f"client {name}: {error}") from None
        return answers

    def close(self) -> None:
        """Leave the grid."""
        self._engine.close()


def simulated_nodes(tables: dict[str, Any], least: int, timeout: float) -> NodeCarrier:
    """Clients of these tables as the nodes of Flower's simulation.

    Args:
        tables: DataFrames by client.
        least: fewest rows of which a client says anything.
        timeout: seconds that a round may take.
    """
    clients = [Client(table, least) for table in tables.values()]

    def node(context: Context) -> SumsNode:
        number = int(context.node_config[PARTITION_ID_KEY])
        return SumsNode(number, lambda: clients[number])

    grid, close = simulated_grid(answering(node), len(clients))
    engine = Flower(
        lambda: grid, None, clients=len(clients), timeout=timeout, poll=0.01, closing=close
    )
    return NodeCarrier(engine, tuple(tables))


def linked_nodes(link: SuperLink, clients: int, timeout: float) -> NodeCarrier:
    """Clients at the nodes of a SuperLink.

    Args:
        link: the SuperLink.
        clients: how many there are.
        timeout: seconds that a round may take.

    Raises:
        EngineError: the SuperLink cannot be reached.
    """
    link.check()
    files = {"pyproject.toml": _PYPROJECT.encode(), "federation.py": _APP.encode()}
    submission = Submission(link, files)

    def close() -> None:
        submission.close(completed=True)

    engine = Flower(submission.connect, None, clients=clients, timeout=timeout, closing=close)
    return NodeCarrier(engine, tuple(map(str, range(clients))))
