"""Which node is which client: nodes are discovered, asked, and registered.

A node says which client it is, and its key has to agree. A key that was admitted as `client-2` is
that of client 2; any other admitted key is bound to the first number that its node says. Without
admitted keys (a trial without TLS) every connection has a key of its own, and nothing is bound.
"""

import hashlib
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from flwr.app import Message
from flwr.proto.node_pb2 import NodeInfo

from fedbayes.errors import EngineError, MessageError, warn
from fedbayes.flower.poller import Poller
from fedbayes.flower.wire import HELLO, Hello, one_line, own_versions, read_hello, write_question

DISCOVER_EVERY = 2.0
"""Seconds between two looks at which nodes are connected."""
ASK_AGAIN = 30.0
"""Seconds after which a node that could not be placed is asked again which client it is."""
_NUMBERED = re.compile(r"(?:.* )?client-(0|[1-9][0-9]{0,8})", re.DOTALL)
"""The name of a key that was admitted for one client; `admit` writes it."""


@dataclass(frozen=True)
class Identity:
    """What the SuperLink, and not the node, says of a node."""

    since: str
    """When it connected."""
    name: str = ""
    """That its key was admitted under; empty where nodes need no admitted key."""
    key: bytes = b""
    """SHA-256 of its public key."""

    @classmethod
    def of(cls, node: NodeInfo) -> "Identity":
        """The identity of a node of a grid."""
        key = hashlib.sha256(node.public_key).digest()
        return cls(node.last_activated_at, one_line(node.name)[:100], key)

    @property
    def number(self) -> int | None:
        """The one client that its key was admitted for; None if there is no such."""
        found = _NUMBERED.fullmatch(self.name)
        return int(found[1]) if found else None


class Roster:
    """The nodes of a grid, and the clients that they are.

    Args:
        poller: the way to the nodes.
        clients: how many there are.
        timeout: seconds that a node has for its answer.
        compare: whether to warn of nodes that run on other versions than this process, or are not
            who they say they are.
    """

    def __init__(
        self, poller: Poller, clients: int, timeout: float, *, compare: bool = True
    ) -> None:
        self._poller, self._timeout = poller, timeout
        self.clients = clients
        """How many there are."""
        self._compared = compare
        self.keys: dict[int, bytes] = {}
        """SHA-256 of the admitted key that each client came with first."""
        self.changed: frozenset[int] = frozenset()
        """Clients that may come with another key than before."""
        self._warned: set[tuple[int, int]] = set()
        self.reset()

    def reset(self) -> None:
        """Forget all nodes: the grid that they were on is gone. Keys stay what they were."""
        self.nodes: dict[int, int] = {}  # client: the node where it is
        self.hellos: dict[int, Hello] = {}  # what a node said of itself
        self.asked: dict[str, int] = {}  # id of a hello under way: node
        self._met: dict[int, Identity] = {}  # node that was asked
        self._told: dict[int, str] = {}  # node: why it was no client when it was asked last
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
            present = {node.node_id: Identity.of(node) for node in grid.get_nodes()}
        gone = [node for node, was in self._met.items() if present.get(node) != was]
        for node in gone:
            self.drop(node)
        for node in present.keys() - self._met.keys():
            question = write_question(self._told.get(node, ""))
            hello = Message(question, node, HELLO, ttl=self._timeout)
            if message_id := self._poller.push(hello):  # or else it is asked at the next look
                self._met[node] = present[node]
                self.asked[message_id] = node
        self._poller.look(self.asked)
        for message_id, node in list(self.asked.items()):
            if (reply := self._poller.reply(message_id)) is not None:
                del self.asked[message_id]
                self._register(node, reply)
        return gone

    def ask_again(self) -> None:
        """Ask the nodes that could not be placed once more; they may have been fixed since."""
        self._asked_again = time.monotonic()
        under_way = set(self.asked.values())
        self._told = {n: why for n, why in self._unplaced.items() if n not in under_way}
        for node in self._told:
            self._met.pop(node, None)

    def drop(self, node: int) -> None:
        """Forget a node that went away, with the answer that may come of it yet."""
        self._met.pop(node, None)
        self.asked = {number: asked for number, asked in self.asked.items() if asked != node}
        self._unplaced.pop(node, None)
        self.hellos.pop(node, None)
        self.ask_again()  # one of them may have come in its place
        self.nodes = {client: n for client, n in self.nodes.items() if n != node}

    def unplaced(self) -> str:
        """What is known of nodes without a place, to be put behind a sentence."""
        said = "".join(f"; node {node} says: {why}" for node, why in self.troubles().items())
        if silent := len(set(self.asked.copy().values())):  # another thread may ask this
            said += (
                f"; {silent} connected node{'s have' if silent > 1 else ' has'} not said yet which "
                "client it is, and may be loading or busy with an earlier run"
            )
        return said

    def troubles(self) -> dict[int, str]:
        """Nodes that are no client, and why."""
        return dict(self._unplaced)

    def _compare(self, hello: Hello) -> None:
        """Note where a client's node runs on other versions than the server."""
        own = own_versions()
        other = [f"{n} {v} (here {own[n]})" for n, v in hello.versions.items() if v != own[n]]
        if other and self._compared:
            warn(
                f"the node of client {hello.client} has {', '.join(other)}; its numbers may "
                "differ by rounding"
            )

    def recognize(self, keys: Mapping[int, bytes]) -> None:
        """Bind clients to the keys that they came with earlier, as a checkpoint has them."""
        self.keys = {client: key for client, key in keys.items() if client not in self.changed}

    def _require_key(self, client: int, node: int) -> None:
        """See that a node's key is that of the client that it says it is; bind a first one."""
        who = self._met.get(node, Identity(""))
        try:
            if who.number not in (None, client):
                raise EngineError(
                    f"its key was registered for {who.name}, but it says that it is client {client}"
                )
            if client in self.nodes:
                raise EngineError(
                    f"client {client} is already node {self._named(self.nodes[client])}. If that "
                    "is wrong, stop the run, and register each key for its client: fedbayes "
                    "federate register KEY --client NUMBER"
                )
            if self.keys.get(client, who.key) != who.key:
                raise EngineError(
                    f"client {client} had another key before. If its key was changed on purpose, "
                    f"resume with: fedbayes federate resume RUN --new-key {client}"
                )
        except EngineError as error:
            if self._compared and (client, node) not in self._warned:
                self._warned.add((client, node))
                told = f"node {self._named(node)} says that it is client {client}: {error}"
                warn(told)
            raise
        if who.name:
            self.keys[client] = who.key

    def _named(self, node: int) -> str:
        """A node, with the name that its key was admitted under."""
        name = self._met.get(node, Identity("")).name
        return f"{node} ({name})" if name else str(node)

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
            self._require_key(client, node)
            self.nodes[client] = node
            self._compare(hello)
        except (EngineError, MessageError) as error:
            self._unplaced[node] = str(error)
