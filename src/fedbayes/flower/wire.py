"""What goes into a Flower message and what comes out of it: tasks, replies, complaints, sizes.

Flower carries the bytes that we encoded, as an array of bytes, and nothing of its own but a small
envelope. Whatever comes from a node is read without trust.
"""

import logging
import platform
from dataclasses import dataclass
from importlib.metadata import version
from typing import TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fedbayes.errors import EngineError, MessageError
from fedbayes.federation.client_runtime import ClientResult, Task
from fedbayes.federation.stages.checks import figures

HELLO = "query.hello"
"""Type of the message that asks a node which client it is."""
PROGRAMS = ("fedbayes", "flwr", "torch", "python")
"""What a node says the versions of."""
LONGEST_VERSION = 40
"""Characters of a version."""
TRAIN = "train.round"
"""Type of the message that carries a task."""
LONGEST_REQUEST = 2**29
"""Bytes of a node's request to our SuperLink. Flower cuts messages into pieces of 5 MiB, so their
length has no limit, but masked updates not."""
LONGEST_TICKET = 200
"""Bytes of a ticket for a private state."""


def link_size(message: Message) -> int:
    """Bytes that Flower moves for a message: all the objects that it is cut into."""
    return sum(len(item.deflate()) for item in get_all_nested_objects(message).values())


def bytes_record(data: bytes) -> ArrayRecord:
    """Bytes as Flower carries them best: it cuts an array into pieces, moves them side by side, and
    stores equal ones once.
    """
    return ArrayRecord({"bytes": Array("uint8", (len(data),), "fedbayes", data)})


Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)


def _record(content: RecordDict, name: str, kind: type[Record]) -> Record:
    """A record of a message. Flower's own views, `content.array_records` and others, are cycles,
    which would keep a large message until Python collects them.

    Raises:
        KeyError: there is none of this kind.
    """
    record = content[name]
    if not isinstance(record, kind):
        raise KeyError(name)
    return record


def _bytes_of(content: RecordDict, name: str) -> bytes:
    return _record(content, name, ArrayRecord)["bytes"].data


def one_line(words: object) -> str:
    """What a node said, as one line of at most 500 printable characters."""
    return "".join(c if c.isprintable() else " " for c in str(words)[:500])


@dataclass(frozen=True)
class Hello:
    """Who a node says it is."""

    client: int
    versions: dict[str, str]
    """Of `PROGRAMS`, as far as it says them."""


def own_versions() -> dict[str, str]:
    """What this process runs on, by the names of `PROGRAMS`."""
    return {
        name: platform.python_version() if name == "python" else version(name) for name in PROGRAMS
    }


def write_question(trouble: str) -> RecordDict:
    """The question to a node which client it is, with why it could not be placed before."""
    return RecordDict({"told": ConfigRecord({"text": trouble})} if trouble else {})


def note_question(content: RecordDict) -> None:
    """Write to a node's own log why the server could not place it."""
    if isinstance(told := content.get("told"), ConfigRecord):
        why = one_line(told.get("text"))
        logging.getLogger("flwr").error("the server gives this node no tasks: %s", why)


def write_hello(client: int) -> RecordDict:
    """A node's answer to which client it is, and on what it runs."""
    versions = ConfigRecord(dict(own_versions()))
    return RecordDict({"hello": ConfigRecord({"client": client}), "versions": versions})


def read_hello(reply: Message) -> Hello:
    """The client that a node says it is, and its versions.

    Raises:
        EngineError: it does not say so. The text is the node's.
    """
    if reply.has_error():
        raise EngineError(one_line(reply.error.reason or "no reason given"))
    try:
        raise_complaint(reply.content)
        client = _record(reply.content, "hello", ConfigRecord)["client"]
    except (KeyError, ValueError) as error:
        raise EngineError(str(error)) from None
    if type(client) is not int:
        raise EngineError(f"its number is {one_line(repr(client))}")
    told = reply.content.get("versions")
    told = told if isinstance(told, ConfigRecord) else ConfigRecord()
    versions = {name: told[name] for name in PROGRAMS if isinstance(told.get(name), str)}
    return Hello(client, {name: one_line(v)[:LONGEST_VERSION] for name, v in versions.items()})


def write_complaint(text: str) -> RecordDict:
    """What a node says instead of a reply."""
    return RecordDict({"error": ConfigRecord({"text": text})})


def raise_complaint(content: RecordDict, prefix: str = "") -> None:
    """Raise what a node says instead of a reply, if it does, as an EngineError."""
    if isinstance(said := content.get("error"), ConfigRecord):
        words = one_line(said.get("text"))
        raise EngineError(f"{prefix}{words}")


def write_task(task: Task) -> RecordDict:
    """A task as a message carries it."""
    about = ConfigRecord(
        {
            "client": task.client,
            "round": task.round,
            "ticket": task.state or b"",
            "constants": task.constants,
            "card": task.card,
            "evaluate": task.evaluate is not None,
            "measures": list(task.evaluate or ()),
            "temperature": task.temperature or 0.0,
            "calibrate": task.calibrate,
        }
    )
    return RecordDict({"message": bytes_record(task.message), "about": about})


def read_task(content: RecordDict) -> Task:
    """The inverse of `write_task`; its state is a ticket."""
    about = _record(content, "about", ConfigRecord)
    return Task(
        client=int(about["client"]),  # type: ignore[arg-type]
        round=int(about["round"]),  # type: ignore[arg-type]
        message=_bytes_of(content, "message"),
        state=bytes(about["ticket"]) or None,  # type: ignore[arg-type]
        constants=str(about["constants"]),
        card=str(about.get("card", "")),
        evaluate=tuple(map(str, about["measures"])) if about.get("evaluate") else None,  # type: ignore[arg-type]
        temperature=float(about.get("temperature", 0.0)) or None,  # type: ignore[arg-type]
        calibrate=bool(about.get("calibrate", False)),
    )


def write_reply(outcome: ClientResult) -> RecordDict:
    """What came of a task; its state is a ticket."""
    return RecordDict(
        {
            "report": bytes_record(outcome.report),
            "about": ConfigRecord({"ticket": outcome.state}),
            "metrics": MetricRecord(dict(outcome.info)),
            "scores": MetricRecord(dict(outcome.scores)),
        }
    )


def read_reply(content: RecordDict) -> ClientResult:
    """What a node said about its task; nothing is taken on trust.

    Raises:
        MessageError: it is not what a node says. The text says why.
        EngineError: the node could not do its work. The text is the node's.
    """
    raise_complaint(content, "its node says: ")
    try:
        report = _bytes_of(content, "report")
        ticket = _record(content, "about", ConfigRecord)["ticket"]
        metrics = _record(content, "metrics", MetricRecord)
        scores = _record(content, "scores", MetricRecord)
    except (KeyError, AttributeError, TypeError):
        raise MessageError("its reply lacks the report or what belongs to it") from None
    if not is_ticket(ticket):
        raise MessageError("its ticket is invalid")
    info, sums = figures(metrics, "metrics"), figures(scores, "scores")
    return ClientResult(report, bytes(ticket), info, sums)  # type: ignore[arg-type]


def is_ticket(value: object) -> bool:
    """Whether this can be a ticket for a private state, or none, which is empty."""
    return isinstance(value, bytes) and len(value) <= LONGEST_TICKET
