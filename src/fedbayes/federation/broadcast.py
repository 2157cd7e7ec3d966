"""What the server sends in a round."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedbayes.contracts import AnyMethod, At, Run
from fedbayes.federation.checks import longest_report
from fedbayes.federation.client_runtime import Task
from fedbayes.federation.passage import Link, Passage
from fedbayes.federation.settings import AS_IT_IS, Compression
from fedbayes.messages import Message, encode, payload


@dataclass
class Broadcast:
    """The messages of one round, encoded once while they consist of the very same tensors."""

    run: Run
    method: AnyMethod
    server: Any
    """The server's state before the round."""
    number: int
    """The round, from 1."""
    compression: Compression = AS_IT_IS
    """In how many bytes numbers are sent."""
    sent: dict[int, int] = field(default_factory=dict)
    """Encoded bytes that were sent to each client."""
    spared: dict[int, int] = field(default_factory=dict)
    """Bytes by which compression made that less, for each client."""
    _expected: dict[int, Message] = field(default_factory=dict)
    _passages: dict[int, Passage] = field(default_factory=dict)
    _message: Message = field(default_factory=dict)
    _data: bytes = b""
    _spared: int = 0
    _passage: Passage | None = None

    def tasks(self, cohort: list[int], states: Mapping[int, bytes]) -> Iterator[Task]:
        """The task of each client of the cohort, with its private state if it has one."""
        constants = self.run.network.constants_digest
        for client in cohort:
            message = self.message(client)
            expected = self._expected[client] = self.method.expected(message, self.run)
            data = self._encoded(message)
            self.sent[client], self.spared[client] = len(data), self._spared
            if self._passage is not None:
                at = At(self.run, self.number, client)
                self._passages[client] = replace(self._passage, at=at)
            state = states.get(client)
            yield Task(client, self.number, data, state, constants, longest_report(expected))

    def message(self, client: int) -> Message:
        """What a client is sent."""
        return self.method.message(self.server, At(self.run, self.number, client))

    def expected(self, client: int) -> Message:
        """The pattern of a proper answer; asked for once, then forgotten."""
        return self._expected.pop(client)

    def passage(self, client: int) -> Passage | None:
        """The way of a client's report, where messages are compressed; asked for once."""
        return self._passages.pop(client, None)

    def _encoded(self, message: Message) -> bytes:
        same = message.keys() == self._message.keys() and all(
            item is self._message[name] for name, item in message.items()
        )
        if not same or not self._data:
            link = Link(self.compression, self.method, self.run)
            sent = link.sent(message)
            self._message, self._data = message, encode(sent)
            self._spared = payload(message) - payload(sent)
            if self.compression.active:
                self._passage = link.passage(message, At(self.run, self.number))
        return self._data
