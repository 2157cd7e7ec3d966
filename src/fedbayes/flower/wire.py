"""What goes into a Flower message and what comes out of it: tasks, replies, complaints, sizes.

Flower carries the bytes that we encoded, as an array of bytes, and nothing of its own but a small
envelope. Whatever comes from a node is read without trust.
"""

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fedbayes.errors import EngineError, MessageError
from fedbayes.federation.checks import LONGEST_NAME, MOST_METRICS
from fedbayes.federation.client_runtime import Outcome, Task

HELLO = "query.hello"
"""Type of the message that asks a node which client it is."""
TRAIN = "train.round"
"""Type of the message that carries a task."""
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


def _bytes_of(record: ArrayRecord) -> bytes:
    return record["bytes"].data


def one_line(words: object) -> str:
    """What a node said, as one line of at most 500 printable characters."""
    return "".join(c if c.isprintable() else " " for c in str(words)[:500])


def write_hello(client: int) -> RecordDict:
    """A node's answer to which client it is."""
    return RecordDict({"hello": ConfigRecord({"client": client})})


def read_hello(reply: Message) -> int:
    """The client that a node says it is.

    Raises:
        EngineError: it does not say so. The text is the node's.
    """
    if reply.has_error():
        raise EngineError(one_line(reply.error.reason or "no reason given"))
    try:
        raise_complaint(reply.content)
        client = reply.content.config_records["hello"]["client"]
    except (KeyError, ValueError) as error:
        raise EngineError(str(error)) from None
    if type(client) is not int:
        raise EngineError(f"its number is {one_line(repr(client))}")
    return client


def write_complaint(text: str) -> RecordDict:
    """What a node says in place of a reply."""
    return RecordDict({"error": ConfigRecord({"text": text})})


def raise_complaint(content: RecordDict, prefix: str = "") -> None:
    """Raise what a node says in place of a reply, if it does.

    Raises:
        EngineError: the node's own words, behind the prefix.
    """
    if "error" in content.config_records:
        words = one_line(content.config_records["error"].get("text"))
        raise EngineError(f"{prefix}{words}")


def write_task(task: Task) -> RecordDict:
    """A task as a message carries it."""
    about = ConfigRecord(
        {
            "client": task.client,
            "round": task.round,
            "ticket": task.state or b"",
            "constants": task.constants,
        }
    )
    return RecordDict({"message": bytes_record(task.message), "about": about})


def read_task(content: RecordDict) -> Task:
    """The inverse of `write_task`; its state is a ticket."""
    about = content.config_records["about"]
    return Task(
        client=int(about["client"]),  # type: ignore[arg-type]
        round=int(about["round"]),  # type: ignore[arg-type]
        message=_bytes_of(content.array_records["message"]),
        state=bytes(about["ticket"]) or None,  # type: ignore[arg-type]
        constants=str(about["constants"]),
    )


def write_reply(outcome: Outcome) -> RecordDict:
    """What came of a task; its state is a ticket."""
    return RecordDict(
        {
            "report": bytes_record(outcome.report),
            "about": ConfigRecord({"ticket": outcome.state}),
            "metrics": MetricRecord(dict(outcome.info)),
            "scores": MetricRecord(dict(outcome.scores)),
        }
    )


def read_reply(content: RecordDict) -> Outcome:
    """What a node said about its task; nothing is taken on trust.

    Raises:
        MessageError: it is not what a node says. The text says why.
        EngineError: the node could not do its work. The text is the node's.
    """
    raise_complaint(content, "its node says: ")
    try:
        report = _bytes_of(content.array_records["report"])
        ticket = content.config_records["about"]["ticket"]
        metrics = content.metric_records["metrics"]
        scores = content.metric_records["scores"]
    except (KeyError, AttributeError, TypeError):
        raise MessageError("its reply lacks the report or what belongs to it") from None
    if not is_ticket(ticket):
        raise MessageError("its ticket is invalid")
    info, sums = _numbers(metrics, "metrics"), _numbers(scores, "scores")
    return Outcome(report, bytes(ticket), info, sums)  # type: ignore[arg-type]


def is_ticket(value: object) -> bool:
    """Whether this can be a ticket for a private state, or none, which is empty."""
    return isinstance(value, bytes) and len(value) <= LONGEST_TICKET


def _numbers(record: MetricRecord, what: str) -> dict[str, float]:
    """The metrics or scores of a record.

    Raises:
        MessageError: they are too many, their names are too long, or they are not numbers.
    """
    if len(record) > MOST_METRICS:
        raise MessageError(f"its {what} are too many: {len(record)}, at most {MOST_METRICS}")
    numbers: dict[str, float] = {}
    for name, value in record.items():
        if not isinstance(value, int | float) or len(name) > LONGEST_NAME:
            raise MessageError(f"invalid {what}: not numbers, or names too long")
        numbers[name] = float(value)
    return numbers
