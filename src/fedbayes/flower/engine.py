"""The Flower engine: the cohort's tasks as Flower messages, over whatever a grid reaches.

Both ends are here: `Flower` pushes tasks and takes replies, `answer` is what a node does with a
task. Flower carries the bytes that we encoded, as an array of bytes, and nothing of its own but
a small envelope. A client's private state stays with the client (`StateStore`); the server
holds a ticket in its place, which says which state of the client's is the current one. So a
round whose report was lost or refused leaves the client where it was, and a run can resume.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.run import RunNotRunningException

from fedbayes.errors import DataError, EngineError, FedbayesError, MessageError
from fedbayes.federation.client_runtime import ClientRuntime, Evaluation, NoReport, Outcome, Task
from fedbayes.federation.state_store import StateStore
from fedbayes.tensors import Tensors

HELLO = "query.hello"
"""Type of the message that asks a node which client it is."""
TRAIN = "train.round"
"""Type of the message that carries a task."""
MOST_METRICS = 64
"""Metrics that a report may carry."""
TRIES = 5
"""How often a task is sent in a round whose messages or nodes get lost."""
ROLL_CALL = 2.0
"""Seconds between two looks at which nodes are connected."""

ASK_AGAIN = 30.0
"""Seconds after which a node that could not be placed is asked again which client it is."""
MOMENT = 0.5
"""Seconds that an answer may take to arrive before others are looked for."""
LOOKS = 16
"""Answers that are looked for side by side."""
GRACE = 60.0
"""Seconds after a round for which Flower still hands out its messages."""


class LinkError(EngineError):
    """The connection to the SuperLink broke."""


def link_size(message: Message) -> int:
    """Bytes that Flower moves for a message: all the objects that it is cut into."""
    return sum(len(item.deflate()) for item in get_all_nested_objects(message).values())


def _bytes_record(data: bytes) -> ArrayRecord:
    # Flower cuts an array into pieces, moves them side by side, and stores equal ones once.
    return ArrayRecord({"bytes": Array("uint8", (len(data),), "fedbayes", data)})


def _bytes_of(record: ArrayRecord) -> bytes:
    return record["bytes"].data


@dataclass(frozen=True)
class Node:
    """One client where its data are: what a ClientApp works with."""

    client: int
    runtime: Callable[[], ClientRuntime]
    """Its runtime, built when there is work."""
    states: StateStore

    def answer(self, message: Message) -> Message:
        """Do what a message asks for. What the user can mend is answered in plain words."""
        if message.metadata.message_type == HELLO:
            hello = ConfigRecord({"client": self.client})
            return Message(RecordDict({"hello": hello}), reply_to=message)
        try:
            return Message(self._train(message.content), reply_to=message)
        except FedbayesError as error:
            return complaint(error, message)

    def _train(self, content: RecordDict) -> RecordDict:
        outcome = self.work(_read_task(content), self.runtime())
        return RecordDict(
            {
                "report": _bytes_record(outcome.report),
                "about": ConfigRecord(
                    {
                        "ticket": outcome.state,
                    }
                ),
                "metrics": MetricRecord(dict(outcome.info)),
                "scores": MetricRecord(dict(outcome.scores)),
            }
        )

    def work(self, task: Task, runtime: ClientRuntime) -> Outcome:
        """Carry out a task whose state is a ticket, and have one in the outcome.

        Raises:
            EngineError: it is another client's, or its state is not here.
        """
        if task.client != self.client:
            raise EngineError(
                f"a task for client {task.client} came to the node of client {self.client}"
            )
        ticket = task.state
        state = self.states.load(ticket, self.client) if ticket else None
        outcome = runtime.train(replace(task, state=state))
        if not outcome.state:
            return outcome
        kept = self.states.save(outcome.state, ticket, self.client, task.round)
        return replace(outcome, state=kept)


def complaint(error: FedbayesError, message: Message) -> Message:
    """The answer of a node that cannot do its work, in plain words.

    What is wrong with data may quote them, so it stays in the node's own log.
    """
    text = str(error)
    if isinstance(error, DataError):
        logging.getLogger("flwr").error("%s", error)
        text = "its data cannot be used; its own log says why"
    return Message(RecordDict({"error": ConfigRecord({"text": text})}), reply_to=message)


def _said(content: RecordDict) -> str:
    """A node's complaint."""
    return _line(content.config_records["error"].get("text"))


def _line(words: object) -> str:
    """What a node said, as one line of at most 500 printable characters."""
    return "".join(c if c.isprintable() else " " for c in str(words)[:500])


def _write_task(task: Task) -> RecordDict:
    about = ConfigRecord(
        {
            "client": task.client,
            "round": task.round,
            "ticket": task.state or b"",
            "constants": task.constants,
        }
    )
    return RecordDict({"message": _bytes_record(task.message), "about": about})


def _read_task(content: RecordDict) -> Task:
    about = content.config_records["about"]
    return Task(
        client=int(about["client"]),  # type: ignore[arg-type]
        round=int(about["round"]),  # type: ignore[arg-type]
        message=_bytes_of(content.array_records["message"]),
        state=bytes(about["ticket"]) or None,  # type: ignore[arg-type]
        constants=str(about["constants"]),
    )


def read_reply(content: RecordDict) -> Outcome:
    """What a node said about its task; nothing is taken on trust.

    Raises:
        MessageError: it is not what a node says. The text says why.
        EngineError: the node could not do its work. The text is the node's.
    """
    if "error" in content.config_records:
        raise EngineError(f"its node says: {_said(content)}")
    try:
        report = _bytes_of(content.array_records["report"])
        about = content.config_records["about"]
        ticket = about["ticket"]
        metrics = dict(content.metric_records["metrics"])
        scores = dict(content.metric_records["scores"])
    except (KeyError, AttributeError, TypeError):
        raise MessageError("its reply lacks the report or what belongs to it") from None
    if not isinstance(ticket, bytes) or len(ticket) > 200:
        raise MessageError("its ticket is none")
    info = {name: x for name, x in _numbers(metrics).items() if math.isfinite(x)}
    return Outcome(report, ticket, info, _numbers(scores))


def _numbers(record: Mapping[str, object]) -> dict[str, float]:
    """The metrics or scores of a record.

    Raises:
        MessageError: they are too many, or no numbers.
    """
    numbers: dict[str, float] = {}
    for name, value in record.items():
        if not isinstance(value, int | float) or len(name) > 100 or len(record) > MOST_METRICS:
            raise MessageError("its metrics are too many, or no numbers")
        numbers[name] = float(value)
    return numbers


@dataclass
class _Letter:
    """A task that has not been answered yet."""

    task: Task
    id: str = ""
    """Of the Flower message under way; empty if there is none."""
    node: int = 0
    sent: int = 0
    """How often it was sent."""
    link_down: int = 0
    """Bytes that the link carried towards the client."""
    trouble: str = ""


class _Pull(threading.Thread):
    """One look whether a message is answered, on a thread of its own.

    Flower knows of a reply before it is uploaded, and then waits for the rest of it, if need be
    for hours. So no client must be waited for where others are.
    """

    def __init__(self, grid: Grid, message_id: str) -> None:
        super().__init__(daemon=True)
        self._grid, self._id = grid, message_id
        self._found: Message | MessageError | httpx.HTTPError | RunNotRunningException | None = None
        self.start()

    def run(self) -> None:
        """Look."""
        try:
            self._found = next(iter(self._grid.pull_messages([self._id])), None)
        except (httpx.HTTPError, RunNotRunningException) as error:
            self._found = error
        except Exception as error:  # whatever Flower's reader raises on a stranger's bytes
            self._found = MessageError(f"its reply cannot be read: {_line(error)}")

    def result(self) -> Message | MessageError | None:
        """The answer, if there is one, or why it cannot be read.

        Raises:
            httpx.HTTPError: the connection broke.
            RunNotRunningException: the SuperLink does not know the run.
        """
        if isinstance(self._found, (httpx.HTTPError, RunNotRunningException)):
            raise self._found
        return self._found


class Flower:
    """Clients behind a Flower grid.

    A client reports, is refused, or is lost for the round; no fault of a client ends the run.
    If the SuperLink is lost, a new connection is tried until the round's time is over, and what
    was not answered is sent again.

    Args:
        connect: opens a grid; is called again when that one has broken. It may raise
            `EngineError`.
        runtime: the server's own side, which tries global models on the server's test samples.
        clients: how many there are.
        timeout: seconds that a round waits for its reports.
        poll: seconds between two looks at the grid.
        closing: is called at the end.
    """

    def __init__(
        self,
        connect: Callable[[], Grid],
        runtime: ClientRuntime,
        *,
        clients: int,
        timeout: float,
        poll: float = 0.5,
        closing: Callable[[], None] = lambda: None,
    ) -> None:
        self._connect, self._runtime, self._count = connect, runtime, clients
        self._timeout, self._poll, self._closing = timeout, poll, closing
        self._grid: Grid | None = None
        self._was_connected = False
        self._forget_nodes()

    def _forget_nodes(self) -> None:
        self._clients: dict[int, int] = {}  # client: the node where it is
        self._asked: dict[str, int] = {}  # id of a hello under way: node
        self._since: dict[int, str] = {}  # node that was asked: when it connected
        self._odd: dict[int, str] = {}  # node that is no client of ours: why
        self._pulls: dict[str, _Pull] = {}  # id of a message: the look for its answer
        self._called = self._asked_again = -math.inf

    def train(self, tasks: Iterable[Task]) -> Iterator[Outcome | NoReport]:
        """Send the tasks and wait; what came of each, in the order of the tasks."""
        letters = {task.client: _Letter(task) for task in tasks}
        order = list(letters)
        done: dict[int, Outcome | NoReport] = {}
        deadline = time.monotonic() + self._timeout
        self._pulls = {m: pull for m, pull in self._pulls.items() if m in self._asked}
        self._ask_again()
        while order:
            try:
                self._call_roll(letters)
                self._push(letters, deadline)
                self._pull(letters, done)
            except LinkError as error:
                if not self._was_connected:
                    raise
                if time.monotonic() >= deadline:
                    raise EngineError(f"the SuperLink was lost: {error}") from None
                self._start_over(letters, str(error))
            if time.monotonic() >= deadline:
                done |= {c: self._given_up(letter) for c, letter in letters.items()}
                letters.clear()
            while order and order[0] in done:
                yield done.pop(order.pop(0))
            if order:
                time.sleep(self._poll)

    def evaluate(self, evaluations: Iterable[Evaluation]) -> Iterator[Tensors]:
        """Run the evaluations on the server's own test samples."""
        return map(self._runtime.evaluate, evaluations)

    def close(self) -> None:
        """Leave the grid."""
        self._closing()

    def _start_over(self, letters: dict[int, _Letter], trouble: str) -> None:
        """Drop a broken grid; everything will be sent again."""
        self._grid = None
        self._forget_nodes()
        for letter in letters.values():
            letter.id, letter.trouble = "", f"the SuperLink was lost: {trouble}"

    @contextmanager
    def _reach(self) -> Iterator[Grid]:
        """The grid; its errors become `LinkError`."""
        try:
            if self._grid is None:
                self._grid = self._connect()
                self._was_connected = True
            yield self._grid
        except (httpx.HTTPError, RunNotRunningException) as error:
            raise LinkError(str(error) or type(error).__name__) from None

    def _call_roll(self, letters: dict[int, _Letter]) -> None:
        """See which nodes are there, and ask new ones which client they are."""
        if time.monotonic() - self._called < ROLL_CALL and not self._asked:
            return
        self._called = time.monotonic()
        if self._called - self._asked_again > ASK_AGAIN:
            self._ask_again()
        with self._reach() as grid:
            present = {node.node_id: node.last_activated_at for node in grid.get_nodes()}
            for node in [n for n, since in self._since.items() if present.get(n) != since]:
                self._drop(node, letters)
            for node in present.keys() - self._since.keys():
                self._since[node] = present[node]
                hello = Message(RecordDict(), node, HELLO, ttl=self._timeout)
                self._asked |= dict.fromkeys(filter(None, grid.push_messages([hello])), node)
        self._look(self._asked)
        for message_id, node in list(self._asked.items()):
            if (reply := self._reply(message_id)) is not None:
                del self._asked[message_id]
                self._introduce(node, reply)

    def _look(self, messages: Iterable[str]) -> None:
        """Look for the answers to these messages, several side by side, each for a moment."""
        new = [m for m in messages if m not in self._pulls]
        for first in range(0, len(new), LOOKS):
            some = new[first : first + LOOKS]
            with self._reach() as grid:
                self._pulls |= {message_id: _Pull(grid, message_id) for message_id in some}
            end = time.monotonic() + MOMENT
            for message_id in some:
                self._pulls[message_id].join(max(0.0, end - time.monotonic()))

    def _reply(self, message_id: str) -> Message | MessageError | None:
        """What a look has found: the answer, or why it cannot be read; None if it has not ended."""
        if self._pulls[message_id].is_alive():
            return None
        with self._reach():
            return self._pulls.pop(message_id).result()

    def _introduce(self, node: int, reply: Message | MessageError) -> None:
        """Note which client a node says that it is. Who came first keeps the place."""
        self._odd.pop(node, None)
        try:
            if isinstance(reply, MessageError):
                raise reply
            if reply.has_error():
                raise EngineError(_line(reply.error.reason or "no reason given"))
            if "error" in reply.content.config_records:
                raise EngineError(_said(reply.content))
            client = reply.content.config_records["hello"]["client"]
            if type(client) is not int:
                raise EngineError(f"its number is {_line(repr(client))}")
            if not 0 <= client < self._count:
                raise EngineError(f"it is client {client}, of clients 0 to {self._count - 1}")
            if client in self._clients:
                raise EngineError(f"client {client} is node {self._clients[client]} already")
            self._clients[client] = node
        except (KeyError, ValueError, EngineError, MessageError) as error:
            self._odd[node] = str(error)

    def _ask_again(self) -> None:
        """Ask the nodes that could not be placed once more; they may have been mended since."""
        self._asked_again = time.monotonic()
        for node in self._odd:
            self._since.pop(node, None)

    def _drop(self, node: int, letters: dict[int, _Letter]) -> None:
        """Forget a node that went away, or went and came back; its task will be sent again."""
        self._since.pop(node, None)
        self._odd.pop(node, None)
        self._ask_again()  # one of them may have come in its place
        self._clients = {c: n for c, n in self._clients.items() if n != node}
        for letter in letters.values():
            if letter.id and letter.node == node:
                letter.id, letter.trouble = "", "its node went away while it worked"

    def _push(self, letters: dict[int, _Letter], deadline: float) -> None:
        """Send every task that is not under way and whose client is there."""
        for client, letter in letters.items():
            if letter.id or client not in self._clients:
                continue
            letter.node = self._clients[client]
            # Well after the round nobody waits for it; it is not worth the client's time.
            ttl = max(0.0, deadline - time.monotonic()) + GRACE
            content, group = _write_task(letter.task), str(letter.task.round)
            message = Message(content, letter.node, TRAIN, ttl=ttl, group_id=group)
            with self._reach() as grid:
                letter.id = next(iter(filter(None, grid.push_messages([message]))), "")
            if letter.id:
                letter.sent += 1
                letter.link_down += link_size(message)

    def _pull(self, letters: dict[int, _Letter], done: dict[int, Outcome | NoReport]) -> None:
        """Move what has been answered from the letters to what is done."""
        self._look([letter.id for letter in letters.values() if letter.id])
        for client, letter in list(letters.items()):
            reply = self._reply(letter.id) if letter.id else None
            if reply is None:
                continue
            code = reply.error.code if isinstance(reply, Message) and reply.has_error() else None
            if code in _LOST and letter.sent < TRIES:
                letter.id, letter.trouble = "", "its message was lost on the way"
                if code == ErrorCode.NODE_UNAVAILABLE:
                    letter.trouble = "its node went away while it worked"
                    self._drop(letter.node, letters)
                continue
            done[client] = _settle(reply, letters.pop(client))

    def _given_up(self, letter: _Letter) -> NoReport:
        """What is said of a task that was not answered in time."""
        client = letter.task.client
        if letter.id:
            trouble = "it is connected, but has not answered, or not to the end"
        else:
            trouble = letter.trouble or f"client {client} is not connected"
            trouble += "".join(f"; node {node} says: {why}" for node, why in self._odd.items())
        return NoReport(f"no report within {self._timeout:g} s: {trouble}", letter.link_down)


_LOST = (
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
)
"""Errors of Flower that say that a message or its receiver is lost; the task is sent again."""


def _settle(reply: Message | MessageError, letter: _Letter) -> Outcome | NoReport:
    """What came of a task."""
    down, up = letter.link_down, 0
    try:
        if isinstance(reply, MessageError):
            raise reply
        if reply.has_error():
            reason = _line(reply.error.reason or "no reason given")
            return NoReport(f"its node failed: {reason}", down)
        up = link_size(reply)
        return replace(
            read_reply(reply.content), link_down=down, link_up=up, trouble=letter.trouble
        )
    except MessageError as error:
        return NoReport(str(error), down, up, refused=True)
    except EngineError as error:
        return NoReport(str(error), down, up)
