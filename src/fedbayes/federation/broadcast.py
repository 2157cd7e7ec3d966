"""What the server sends in a round."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from fedbayes.contracts import AnyMethod, Federation, Report, RoundContext
from fedbayes.core.messages import Message, encode, payload
from fedbayes.federation.client_runtime import Task
from fedbayes.federation.clock.clock import Lengths
from fedbayes.federation.settings import AS_IT_IS, Compression
from fedbayes.federation.stages.checks import encode_report, longest_report
from fedbayes.federation.stages.report_codec import Compressor, ReportCodec


@dataclass
class ServerMessages:
    """The messages of one round, encoded once while they consist of the very same tensors."""

    run: Federation
    method: AnyMethod
    server: Any
    """The server's state before the round."""
    number: int
    """The round, from 1."""
    compression: Compression = AS_IT_IS
    """In how many bytes numbers are sent."""
    sent: dict[int, int] = field(default_factory=dict)
    """Encoded bytes that were sent to each client."""
    saved: dict[int, int] = field(default_factory=dict)
    """Bytes by which compression made that less, for each client."""
    _expected: dict[int, Message] = field(default_factory=dict)
    _codecs: dict[int, ReportCodec | None] = field(default_factory=dict)
    _message: Message = field(default_factory=dict)
    _data: bytes = b""
    _pattern: Message = field(default_factory=dict)
    _longest: int = 0
    _saved: int = 0
    _codec: ReportCodec | None = None
    _reports: dict[bool, int] = field(default_factory=dict)
    """Encoded bytes of an answer to the message, by whether its weight is said."""

    def tasks(self, cohort: list[int], states: Mapping[int, bytes]) -> Iterator[Task]:
        """The task of each client of the cohort, with its private state if it has one."""
        constants = self.run.network.constants_digest
        for client in cohort:
            message = self.message(client)
            data = self._encoded(message)
            self._expected[client] = self._pattern
            self.sent[client], self.saved[client] = len(data), self._saved
            self._codecs[client] = self._codec_of(client)
            state = states.get(client)
            yield Task(client, self.number, data, state, constants, self._longest)

    def length(self, client: int) -> tuple[int, int]:
        """Encoded bytes of what a client is sent, and by how many compression made them less."""
        return len(self._encoded(self.message(client))), self._saved

    def lengths(self, client: int, weight: float) -> Lengths:
        """Of what a client is sent, and of a report of this weight that is as its pattern says:
        names, shapes and masks are all that its length depends on.
        """
        message = self.message(client)
        down, said = len(self._encoded(message)), weight != 1.0
        if said not in self._reports:
            report = Report(dict(self._pattern), weight)
            way = self._codec_of(client)
            data = encode_report(report) if way is None else way.write(report, {}).data
            self._reports[said] = len(data)
        return Lengths(down, self._reports[said])

    def message(self, client: int) -> Message:
        """What a client is sent."""
        return self.method.message(self.server, RoundContext(self.run, self.number, client))

    def expected(self, client: int) -> Message:
        """The pattern of a proper answer; asked for once, then forgotten."""
        if client not in self._expected:  # the client began in an earlier round
            return self.method.expected(self.message(client), self.run)
        return self._expected.pop(client)

    def codec(self, client: int) -> ReportCodec | None:
        """The way of a client's report, where messages are compressed; asked for once."""
        if client not in self._codecs:  # the client began in an earlier round
            self._encoded(self.message(client))
            return self._codec_of(client)
        return self._codecs.pop(client)

    def _codec_of(self, client: int) -> ReportCodec | None:
        if self._codec is None:
            return None
        return replace(self._codec, at=RoundContext(self.run, self.number, client))

    def _encoded(self, message: Message) -> bytes:
        same = message.keys() == self._message.keys() and all(
            item is self._message[name] for name, item in message.items()
        )
        if not same or not self._data:
            link = Compressor(self.compression, self.method, self.run)
            sent = link.sent(message)
            self._message, self._data = message, encode(sent)
            self._pattern = self.method.expected(message, self.run)
            self._longest = longest_report(self._pattern)
            self._reports.clear()
            self._saved = payload(message) - payload(sent)
            if self.compression.active:
                self._codec = link.codec(message, RoundContext(self.run, self.number))
        return self._data

    def forget(self) -> None:
        """Let go of the encoded message, which nobody is sent again."""
        self._data = b""

    def of(self, client: int) -> Self:
        """What a client had: this, unless it began in an earlier round (`VersionedMessages`)."""
        return self

    def answered(self, client: int) -> None:
        """Nothing is let go of when a client has answered."""


class Sent(Protocol):
    """What the clients of a round have from the server."""

    def tasks(self, cohort: list[int], states: Mapping[int, bytes]) -> Iterator[Task]:
        """The task of each client of the cohort."""

    def of(self, client: int) -> ServerMessages:
        """What a client had."""

    def answered(self, client: int) -> None:
        """Note that a client's answer is here."""
