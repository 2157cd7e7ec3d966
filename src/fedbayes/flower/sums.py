"""Biostatistics over nodes: questions go out as tasks, and sums come back as reports."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Context
from flwr.common.constant import PARTITION_ID_KEY
from flwr.serverapp import Grid

from fedbayes.biostatistics import Packet, TableClient
from fedbayes.biostatistics.exchange import SumsWanted
from fedbayes.biostatistics.limbs import Limbs
from fedbayes.errors import ConfigError, EngineError, FedbayesError, MessageError, told_as
from fedbayes.federation.client_runtime import ClientFailure, ClientResult, Task
from fedbayes.federation.settings import FEWEST
from fedbayes.federation.stages.secure import Vector
from fedbayes.flower.engine import Flower
from fedbayes.flower.project import pyproject
from fedbayes.flower.secagg import SecureFlower
from fedbayes.flower.simulated import simulated_grid
from fedbayes.flower.sums_node import SumsNode, answering, read_packet, write_packet
from fedbayes.flower.superlink import Submission, SuperLink

_ALL = "all together"
_APP = """\
\"\"\"Biostatistics on the tables of nodes: they answer questions with sums.\"\"\"

from flwr.serverapp import ServerApp

from fedbayes.flower.project import pyproject
from fedbayes.flower.sums_node import sums_app

server = ServerApp()
client = sums_app()
"""


class MaskedSums(SecureFlower):
    """Clients behind a Flower grid, of whose answers the server sees the sum, exactly.

    Args:
        connect, closing: as for `Flower`.
        clients: how many there are; all take part in every sum.
        timeout: seconds that a round may take.
        poll: seconds between two looks at the grid.

    Raises:
        ConfigError: they are too few for a sum to hide one.
    """

    def __init__(
        self,
        connect: Callable[[], Grid],
        *,
        clients: int,
        timeout: float,
        poll: float = 0.5,
        closing: Callable[[], None] = lambda: None,
    ) -> None:
        if clients < FEWEST:
            raise ConfigError(
                f"secure sums need at least {FEWEST} clients, got {clients}: with two, each would "
                "know the sums of the other"
            )
        self.limbs = Limbs(clients)
        self.shapes: Mapping[str, tuple[int, ...]] = {}
        """Of the arrays that are asked for."""
        super().__init__(
            self.limbs, connect, None, clients=clients, timeout=timeout, poll=poll, closing=closing
        )

    def entries(self, task: Task) -> int:
        """Length of the vector that a client answers with."""
        return self.limbs.entries(self.shapes)

    def read(self, mean: Vector, task: Task) -> bytes:
        """The sum of the clients' answers, as a packet."""
        return write_packet(Packet({}, self.limbs.read(mean * self.limbs.clients, self.shapes)))


class NodeCarrier:
    """The clients at the nodes of a grid, each of which must answer every question.

    Args:
        engine: the way to the nodes; of `MaskedSums` questions for sums are answered with one.
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
        message, engine = write_packet(question), self._engine
        tasks = [
            Task(client=client, round=self._round, message=message, state=None, most=most)
            for client in range(len(self._names))
        ]
        if isinstance(engine, MaskedSums) and isinstance(question, SumsWanted):
            engine.shapes = question.shapes
            return {_ALL: self._answers(engine.train(tasks))[self._names[0]]}
        return self._answers(Flower.train(engine, tasks))

    def _answers(self, outcomes: Iterable[ClientResult | ClientFailure]) -> dict[str, Packet]:
        answers = {}
        found = dict(zip(self.names, outcomes, strict=True))
        lost = {name: one for name, one in found.items() if isinstance(one, ClientFailure)}
        # Of a sum that did not open, who was in the way comes first.
        for name, one in sorted(lost.items(), key=lambda item: item[1].blocked_by_others):
            raise EngineError(
                f"client {name}: {one.reason}. An exact fit needs the sums of every client"
            )
        for name, outcome in found.items():
            assert not isinstance(outcome, ClientFailure)
            with told_as(MessageError, f"client {name}", MessageError):
                answers[name] = read_packet(outcome.report)
        return answers

    def close(self) -> None:
        """Leave the grid."""
        self._engine.close()


def _engine(
    connect: Callable[[], Grid],
    clients: int,
    timeout: float,
    closing: Callable[[], None],
    secure: bool,
    poll: float = 0.5,
) -> Flower:
    if secure:
        return MaskedSums(connect, clients=clients, timeout=timeout, poll=poll, closing=closing)
    return Flower(connect, None, clients=clients, timeout=timeout, poll=poll, closing=closing)


def simulated_nodes(
    tables: dict[str, Any], least: int, timeout: float, *, secure: bool = False
) -> NodeCarrier:
    """Clients of these tables as the nodes of Flower's simulation.

    Args:
        tables: DataFrames by client.
        least: fewest rows of which a client says anything.
        timeout: seconds that a round may take.
        secure: whether the server sees sums alone.

    Raises:
        ConfigError: there are too few clients for that.
    """
    clients = [TableClient(table, least) for table in tables.values()]

    def node(context: Context) -> SumsNode:
        number = int(context.node_config[PARTITION_ID_KEY])
        return SumsNode(number, lambda _: clients[number])

    grid, close = simulated_grid(answering(node), len(clients))
    try:
        engine = _engine(lambda: grid, len(clients), timeout, close, secure, poll=0.01)
    except FedbayesError:
        close()
        raise
    return NodeCarrier(engine, tuple(tables))


def linked_nodes(
    link: SuperLink, clients: int, timeout: float, *, secure: bool = False
) -> NodeCarrier:
    """Clients at the nodes of a SuperLink.

    Args:
        link: the SuperLink.
        clients: how many there are.
        timeout: seconds that a round may take.
        secure: whether the server sees sums alone.

    Raises:
        ConfigError: there are too few clients for that.
        EngineError: the SuperLink cannot be reached.
    """
    link.check()
    about = pyproject("sums", "Biostatistics of fedbayes")
    files = {"pyproject.toml": about.encode(), "federation.py": _APP.encode()}
    submission = Submission(link, files)

    def close() -> None:
        submission.close(completed=True)

    engine = _engine(submission.connect, clients, timeout, close, secure)
    return NodeCarrier(engine, tuple(map(str, range(clients))))
