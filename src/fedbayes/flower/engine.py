"""The engine `flower`: the cohort's tasks as Flower messages, over whatever a grid reaches."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedbayes.core.memory import give_back
from fedbayes.core.tensors import Tensors
from fedbayes.errors import EngineError, MessageError
from fedbayes.federation.client_runtime import (
    ClientFailure,
    ClientResult,
    ClientRuntime,
    Evaluation,
    Task,
)
from fedbayes.federation.engines import NOT_CONNECTED, AtWork
from fedbayes.flower.fetching import longest_reply
from fedbayes.flower.pace import pause
from fedbayes.flower.poller import LinkError, Poller
from fedbayes.flower.roster import Roster
from fedbayes.flower.wire import TRAIN, link_size, one_line, read_reply, write_task

TRIES = 5
"""How often a task is sent in a round whose messages or nodes get lost."""
SOONEST = 0.05
"""Seconds between two looks at the grid, at least."""
GATHER = 0.25
"""Share of a round's time that clients have to connect, where the round needs no more of it."""
GRACE = 60.0
"""Seconds after a round for which Flower still hands out its messages."""
_TOGETHER = 64
"""Tasks that are sent at once."""
_PARCEL = 2**27
"""Bytes of their messages together."""

_LOST = (
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
)
"""Errors of Flower that say that a message or its receiver is lost; the task is sent again."""


@dataclass
class PendingTask:
    """A task that has not been answered yet."""

    task: Task
    message_id: str = ""
    """Of the Flower message under way; empty if there is none."""
    node: int = 0
    """Where it was sent last."""
    sent: int = 0
    """How often it was sent."""
    link_down: int = 0
    """Bytes that the link carried towards the client."""
    trouble: str = ""
    """What went wrong last; empty if nothing did."""

    def lose(self, trouble: str) -> None:
        """Note that its message is lost, so that it is sent again."""
        self.message_id, self.trouble = "", trouble


class Flower:
    """Clients behind a Flower grid.

    A client reports, is rejected, or is lost for the round; no fault of a client ends the run.
    If the SuperLink is lost, a new connection is tried until the round's time is over, and what
    was not answered is sent again.

    Args:
        connect: opens a grid; is called again when that one has broken. It may raise
            `EngineError`.
        runtime: the server's own side, which evaluates global models on the server's test samples;
            None where there are none to evaluate.
        clients: how many there are.
        timeout: seconds that a round waits for its reports.
        poll: seconds between two looks at the grid, at most.
        closing: is called at the end.
    """

    def __init__(
        self,
        connect: Callable[[], Grid],
        runtime: ClientRuntime | None,
        *,
        clients: int,
        timeout: float,
        poll: float = 0.5,
        closing: Callable[[], None] = lambda: None,
    ) -> None:
        self.poller = Poller(connect)
        self.roster = Roster(self.poller, clients, timeout)
        self.timeout, self.poll = timeout, poll
        self._runtime, self._closing = runtime, closing
        self._pending: dict[int, PendingTask] = {}
        self._answered = 0

    def train(self, tasks: Iterable[Task]) -> Iterator[ClientResult | ClientFailure]:
        """Send the tasks and wait; what came of each, in the order of the tasks."""
        return self._ask(tasks)

    def _ask(
        self, tasks: Iterable[Task], gather: float = 1.0
    ) -> Iterator[ClientResult | ClientFailure]:
        """As `train`; `gather` is the share of the time that clients have to connect."""
        self._pending = pending = {task.client: PendingTask(task) for task in tasks}
        order = list(pending)
        cohort = len(order)
        done: dict[int, ClientResult | ClientFailure] = {}
        began = since = time.monotonic()
        deadline = began + self.timeout
        self.begin()
        while order:
            open_before = len(pending)
            try:
                for node in self.roster.discover():
                    _lose_node(node, pending)
                self._push(pending, deadline)
                self._pull(pending, done)
            except LinkError as error:
                if not self.poller.was_connected:
                    raise
                if time.monotonic() >= deadline:
                    raise EngineError(f"the SuperLink was lost: {error}") from None
                self.start_over()
                _lose_all(pending, f"the SuperLink was lost: {error}")
            self._give_up(pending, done, time.monotonic() - began, gather)
            self._answered = cohort - len(pending)
            while order and order[0] in done:
                yield done.pop(order.pop(0))
            if len(pending) < open_before:
                since = time.monotonic()
            if order:
                time.sleep(pause(time.monotonic() - since, min(SOONEST, self.poll), self.poll))
        self._answered = 0

    def deliver(self, copies: Iterable[Task]) -> dict[int, str]:
        """Hand clients copies of the last global model; those that got none, each with why."""
        copies = list(copies)
        outcomes = zip(copies, self._ask(copies), strict=True)
        return {task.client: o.reason for task, o in outcomes if isinstance(o, ClientFailure)}

    def tried(self, tasks: Iterable[Task]) -> Iterator[ClientResult | ClientFailure]:
        """Have clients try a global model on their own test samples; what each says of it. A client
        that is away does not delay the run as much as one whose update is awaited.
        """
        return self._ask(tasks, GATHER)

    def at_work(self) -> AtWork:
        """Who works on a task, and whose node is away."""
        pending = self._pending.copy()
        working = tuple(client for client, each in pending.items() if each.message_id)
        awaited = {c: each.trouble for c, each in pending.items() if not each.message_id}
        return AtWork(working, self._answered, self.away(awaited))

    def away(self, awaited: Mapping[int, str]) -> dict[int, str]:
        """Clients whose node is not connected, and what is known of that.

        Args:
            awaited: clients that the round waits for, and what went wrong with them.
        """
        here, strangers = self.roster.nodes.copy(), self.roster.unplaced()
        return {
            client: f"{awaited[client] or NOT_CONNECTED}; the round waits for it{strangers}"
            if client in awaited
            else NOT_CONNECTED
            for client in range(self.roster.clients)
            if client not in here
        }

    @property
    def keys(self) -> Mapping[int, bytes]:
        """SHA-256 of the admitted key that each client came with first."""
        return self.roster.keys

    def recognize(self, keys: Mapping[int, bytes]) -> None:
        """Take clients' tasks to nodes with these keys alone."""
        self.roster.recognize(keys)

    def evaluate(self, evaluations: Iterable[Evaluation]) -> Iterator[Tensors]:
        """Run the evaluations on the server's own test samples."""
        assert self._runtime is not None
        return map(self._runtime.evaluate, evaluations)

    def close(self) -> None:
        """Leave the grid."""
        self._closing()

    def begin(self) -> None:
        """Forget what was under way in the round before, and ask nodes without a place again."""
        self.poller.forget_all_but(self.roster.asked)
        self.roster.ask_again()

    def start_over(self) -> None:
        """Drop a broken grid and who was on it."""
        self.poller.reset()
        self.roster.reset()

    def _push(self, pending: dict[int, PendingTask], deadline: float) -> None:
        """Send every task that is not under way and whose client is there, several at once."""
        nodes = self.roster.nodes
        waiting = [e for client, e in pending.items() if not e.message_id and client in nodes]
        for some in _parcels(waiting):
            # Well after the round nobody waits for it; it is not worth the client's time.
            ttl = max(0.0, deadline - time.monotonic()) + GRACE
            messages = []
            for each in some:
                each.node = nodes[each.task.client]
                content, group = write_task(each.task), str(each.task.round)
                messages.append(Message(content, each.node, TRAIN, ttl=ttl, group_id=group))
            for each, message, number in zip(
                some, messages, self.poller.push_all(messages), strict=True
            ):
                each.message_id = number
                if number:
                    each.sent += 1
                    each.link_down += link_size(message)
            give_back(sum(each.link_down for each in some))

    def _pull(
        self, pending: dict[int, PendingTask], done: dict[int, ClientResult | ClientFailure]
    ) -> None:
        """Move what has been answered from what is pending to what is done."""
        under_way = [each for each in pending.values() if each.message_id]
        most = max((each.task.most for each in under_way), default=0)
        self.poller.look([each.message_id for each in under_way], most)
        for client, each in list(pending.items()):
            reply = self.poller.reply(each.message_id) if each.message_id else None
            if reply is None:
                continue
            code = reply.error.code if isinstance(reply, Message) and reply.has_error() else None
            if code in _LOST and each.sent < TRIES:
                if code == ErrorCode.NODE_UNAVAILABLE:
                    self.roster.drop(each.node)
                    _lose_node(each.node, pending)
                else:
                    each.lose("its message was lost on the way")
                continue
            done[client] = outcome = _settle(reply, pending.pop(client))
            give_back(outcome.link_up)

    def _give_up(
        self,
        pending: dict[int, PendingTask],
        done: dict[int, ClientResult | ClientFailure],
        waited: float,
        gather: float,
    ) -> None:
        """Move what was waited for long enough to what is done."""
        for client, each in list(pending.items()):
            limit = self.timeout if each.message_id else gather * self.timeout
            if waited >= limit:
                done[client] = self._given_up(pending.pop(client), limit)

    def _given_up(self, pending: PendingTask, limit: float) -> ClientFailure:
        """What is said of a task that was not answered in time."""
        if pending.message_id:
            trouble = "it is connected, but has not answered completely"
        else:
            trouble = pending.trouble or f"client {pending.task.client} is not connected"
            trouble += self.roster.unplaced()
        return ClientFailure(f"no report within {limit:g} s: {trouble}", pending.link_down)


def _parcels(waiting: list[PendingTask]) -> Iterator[list[PendingTask]]:
    """Tasks that are sent at once: as many as `_TOGETHER` and `_PARCEL` allow, one at least."""
    parcel: list[PendingTask] = []
    size = 0
    for each in waiting:
        size += len(each.task.message)
        if parcel and (len(parcel) == _TOGETHER or size > _PARCEL):
            yield parcel
            parcel, size = [], len(each.task.message)
        parcel.append(each)
    if parcel:
        yield parcel


def _lose_all(pending: dict[int, PendingTask], trouble: str) -> None:
    """Have all tasks sent again."""
    for each in pending.values():
        each.lose(trouble)


def _lose_node(node: int, pending: dict[int, PendingTask]) -> None:
    """Have the tasks that are under way at a node sent again: it went away."""
    for each in pending.values():
        if each.message_id and each.node == node:
            each.lose("its node disconnected during its work")


def _settle(reply: Message | MessageError, pending: PendingTask) -> ClientResult | ClientFailure:
    """What came of a task."""
    down, up = pending.link_down, 0
    try:
        if isinstance(reply, MessageError):
            raise reply
        if reply.has_error():
            reason = one_line(reply.error.reason or "no reason given")
            return ClientFailure(f"its node failed: {reason}", down)
        up = link_size(reply)
        if up > (most := longest_reply(pending.task.most)):
            raise MessageError(f"its reply has {up:,} bytes; the limit is {most:,}")
        return replace(
            read_reply(reply.content), link_down=down, link_up=up, trouble=pending.trouble
        )
    except MessageError as error:
        return ClientFailure(str(error), down, up, refused=True)
    except EngineError as error:
        return ClientFailure(str(error), down, up)
