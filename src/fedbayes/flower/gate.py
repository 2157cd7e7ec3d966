"""How long strangers may keep a hub waiting, and how many connections one address may have.

A request is read before anybody asks whose it is. One whose head or body never ends would hold a
connection for good, and a machine has only so many of them.
"""

import asyncio
import socket
from collections import Counter
from ipaddress import ip_address
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_SECONDS = 20.0
"""Seconds in which a connection has to have sent the head of a request."""
BODY_SECONDS = 60.0
"""Seconds that may pass between two parts of a body."""
HANDSHAKE_SECONDS = 20.0
"""Seconds that TLS may take to begin."""
MOST_OUTSIDE, MOST_HERE = 64, 512
"""Connections of one address at once, and of this machine, where a proxy may be."""
_Address = tuple[Any, ...]


class _Connection(socket.socket):
    """A connection that is counted until it is closed."""

    gate: "Gate | None" = None
    place = ""

    def close(self) -> None:
        """Close it, once."""
        gate, self.gate = self.gate, None
        if gate is not None:
            gate.open[self.place] -= 1
        super().close()

    def detach(self) -> int:
        """Give the descriptor away; from then on nobody counts it."""
        gate, self.gate = self.gate, None
        if gate is not None:
            gate.open[self.place] -= 1
        return super().detach()


class Gate(socket.socket):
    """A socket that listens, and takes so many connections of one address.

    Args:
        listening: a socket that listens, whose place this takes.
        outside: connections of another machine's address.
        here: of this machine's.
    """

    def __init__(
        self, listening: socket.socket, outside: int = MOST_OUTSIDE, here: int = MOST_HERE
    ) -> None:
        family, kind, protocol = listening.family, listening.type, listening.proto
        super().__init__(family, kind, protocol, fileno=listening.detach())
        self.most = {False: outside, True: here}
        self.open: Counter[str] = Counter()

    def accept(self) -> tuple[socket.socket, _Address]:
        """The next connection.

        Raises:
            ConnectionAbortedError: its address has too many; it is closed.
        """
        accepted, address = super().accept()
        family, kind, protocol = accepted.family, accepted.type, accepted.proto
        connection = _Connection(family, kind, protocol, fileno=accepted.detach())
        connection.settimeout(self.gettimeout())
        place = _place(str(address[0]))
        if self.open[place] >= self.most[ip_address(place).is_loopback]:
            connection.close()
            raise ConnectionAbortedError(f"{place} has too many connections")
        self.open[place] += 1
        self.open += Counter()  # forget addresses without any
        connection.gate, connection.place = self, place
        return connection, address


def _place(address: str) -> str:
    """An address; of IPv6 the network, of which one machine has all addresses."""
    found = ip_address(address.partition("%")[0])
    mapped = getattr(found, "ipv4_mapped", None)
    if mapped is not None:
        return str(mapped)
    if found.version == 4 or found.is_loopback:
        return str(found)
    return str(ip_address(int(found) >> 64 << 64))


class Punctual(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's HTTP, which ends connections that keep it waiting."""

    head_seconds, body_seconds = HEAD_SECONDS, BODY_SECONDS

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request."""
        super().connection_made(transport)
        now = self.loop.time()
        self._waits, self._since, self._last = True, now, now
        self._look()

    def data_received(self, data: bytes) -> None:
        """Take up what comes."""
        now, before = self.loop.time(), self.cycle
        self._last = now
        if not self._waits and not self._busy():
            self._waits, self._since = True, now  # the first bytes of another request
        super().data_received(data)
        if self.cycle is not before:
            self._waits = False

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._timer.cancel()
        super().connection_lost(exc)

    def _busy(self) -> bool:
        """Whether a request is answered now, or its body comes."""
        return self.cycle is not None and not self.cycle.response_complete

    def _look(self) -> None:
        """End the connection if its request is late, or look again."""
        now, late = self.loop.time(), False
        if self._waits:
            late = now - self._since > self.head_seconds
        elif self._busy() and self.cycle.more_body:
            late = now - self._last > self.body_seconds
        if late:
            self.transport.abort()  # an orderly end would wait for the other side again
            return
        each = min(self.head_seconds, self.body_seconds) / 4
        self._timer = self.loop.call_later(each, self._look)


def shorten_handshakes() -> None:
    """Have TLS begin soon in this process, or not at all."""
    asyncio.constants.SSL_HANDSHAKE_TIMEOUT = HANDSHAKE_SECONDS  # type: ignore[attr-defined]


def many_connections() -> None:
    """Allow this process as many connections as the system lets it have."""
    try:
        import resource
    except ImportError:  # Windows
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
