"""Which node is which client: nodes are discovered, asked, and registered."""

import math
import time
import warnings

from flwr.app import Message, RecordDict

from fedbayes.errors import EngineError, FedbayesWarning, MessageError
from fedbayes.flower.poller import Poller
from fedbayes.flower.wire import HELLO, Hello, own_versions, read_hello

DISCOVER_EVERY = 2.0
"""Seconds between two looks at which nodes are connected."""
ASK_AGAIN = 30.0
"""Seconds after which a node that could not be placed is asked again which client it is."""


class Roster:
    """The nodes of a grid, and the clients that they are.

    Args:
        poller: the way to the nodes.
        clients: how many there are.
        timeout: seconds that a node has for its answer.
        compare: whether to warn of nodes that run on other versions than this process.
    """

    def __init__(
        self, poller: Poller, clients: int, timeout: float, *, compare: bool = True
    ) -> None:
        self._poller, self._timeout = poller, timeout
        self.clients = clients
        """How many there are."""
        self._compared = compare
        self.reset()

    def reset(self) -> None:
        """Forget all nodes: the grid that they were on is gone."""
        self.nodes: dict[int, int] = {}  # client: the node where it is
        self.hellos: dict[int, Hello] = {}  # what a node said of itself
        self.asked: dict[str, int] = {}  # id of a hello under way: node
        self._since: dict[int, str] = {}  # node that was asked: when it connected
        self._unplaced: dict[int, str] = {}  # node that is no client of ours: why
        self._discovered = self._asked_again = -math.inf

    def discover(self) -> list[int]:
        """See which nodes are there, and ask new ones which client they are.

        Returns:
            Nodes that went away, or went and came back.
        """
        if time.monotonic() - self._discovered < DISCOVER_EVERY and not self.asked:
            return []
        self._discovered = time.monotonic()
        if self._discovered - self._asked_again > ASK_AGAIN:
            self.ask_again()
        with self._poller.reach() as grid:
            present = {node.node_id: node.last_activated_at for node in grid.get_nodes()}
        gone = [node for node, since in self._since.items() if present.get(node) != since]
        for node in gone:
            self.drop(node)
        for node in present.keys() - self._since.keys():
            hello = Message(RecordDict(), node, HELLO, ttl=self._timeout)
            if message_id := self._poller.push(hello):  # or else it is asked at the next look
                self._since[node] = present[node]
                self.asked[message_id] = node
        self._poller.look(self.asked)
        for message_id, node in list(self.asked.items()):
            if (reply := self._poller.reply(message_id)) is not None:
                del self.asked[message_id]
                self._register(node, reply)
        return gone

    def ask_again(self) -> None:
        """Ask the nodes that could not be placed once more; they may have been mended since."""
        self._asked_again = time.monotonic()
        for node in self._unplaced:
            self._since.pop(node, None)

    def drop(self, node: int) -> None:
        """Forget a node that went away."""
        self._since.pop(node, None)
        self._unplaced.pop(node, None)
        self.hellos.pop(node, None)
        self.ask_again()  # one of them may have come in its place
        self.nodes = {client: n for client, n in self.nodes.items() if n != node}

    def unplaced(self) -> str:
        """What nodes say that could not be placed, to be put behind a sentence."""
        return "".join(f"; node {node} says: {why}" for node, why in self.troubles().items())

    def troubles(self) -> dict[int, str]:
        """Nodes that are no client, and why."""
        return dict(self._unplaced)

    def _compare(self, hello: Hello) -> None:
        """Note where a client's node runs on other versions than the server."""
        own = own_versions()
        other = [f"{n} {v} (here {own[n]})" for n, v in hello.versions.items() if v != own[n]]
        if other and self._compared:
            warnings.warn(
                f"the node of client {hello.client} has {', '.join(other)}; its numbers may differ "
                "from those of the same versions",
                FedbayesWarning,
                stacklevel=2,
            )

    def _register(self, node: int, reply: Message | MessageError) -> None:
        """Note which client a node says that it is. Who came first keeps the place."""
        self._unplaced.pop(node, None)
        self.hellos.pop(node, None)
        try:
            if isinstance(reply, MessageError):
                raise reply
            self.hellos[node] = hello = read_hello(reply)
            client = hello.client
            if not 0 <= client < self.clients:
                raise EngineError(f"it is client {client}, of clients 0 to {self.clients - 1}")
            if client in self.nodes:
                raise EngineError(f"client {client} is node {self.nodes[client]} already")
            self.nodes[client] = node
            self._compare(hello)
        except (EngineError, MessageError) as error:
            self._unplaced[node] = str(error)
