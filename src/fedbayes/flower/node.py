"""A node's end of a round: what a ClientApp does with a message.

A client's private state stays with the client (`StateStore`); the server holds a ticket in its
place, which says which state of the client's is the current one. So a round whose report was lost
or refused leaves the client where it was, and a run can resume.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedbayes.contracts import Federation
from fedbayes.core import messages
from fedbayes.core.files import write_beside
from fedbayes.core.memory import give_back
from fedbayes.core.messages import SHORT_HEADER, decode
from fedbayes.core.seals import sealed
from fedbayes.errors import DataError, EngineError, FedbayesError
from fedbayes.federation.client_runtime import ClientResult, ClientRuntime, Task
from fedbayes.federation.stages.secure import Plan
from fedbayes.flower.wire import (
    HELLO,
    note_question,
    read_task,
    write_complaint,
    write_hello,
    write_reply,
)
from fedbayes.models.files import CARD
from fedbayes.storage.state_store import StateStore

COPY = "model.safetensors"
"""File in a node's folder with its copy of the last global model."""

Found = TypeVar("Found")


@dataclass(frozen=True)
class Node:
    """One client at its site, used by a ClientApp."""

    client: int
    runtime: Callable[[], ClientRuntime]
    """Its runtime, built when there is work."""
    states: StateStore
    plan: Callable[[Federation], Plan | None] = lambda run: None
    """The numbers of secure aggregation by the settings that it was given; None: there is none."""

    def answer(self, message: Message) -> Message:
        """Process a message and return the answer. What the user can fix is answered in plain
        words.
        """
        if message.metadata.message_type == HELLO:
            note_question(message.content)
            return Message(write_hello(self.client), reply_to=message)
        try:
            return Message(self.train(message.content), reply_to=message)
        except FedbayesError as error:
            return complaint(error, message)

    def train(self, content: RecordDict) -> RecordDict:
        """Carry out the task in a message; the reply.

        Raises:
            EngineError: it is another client's, or its report is wanted without masks.
        """
        task = read_task(content)
        if task.card:
            return write_reply(self.keep(task))
        self._require_own(task)
        runtime = self.runtime()
        if task.evaluate is not None:
            return write_reply(runtime.tried(task))
        if self.plan(runtime.run) is not None:
            raise EngineError(
                "it needs secure aggregation (secure.enabled), but the server requested its "
                "update without masks"
            )
        # Training takes several times the memory of a model: the bytes of this one are let go.
        received, length = runtime.received(task), len(task.message)
        task = replace(task, message=b"")
        del content["message"]
        give_back(length)
        return write_reply(self.work(task, runtime, received))

    def _require_own(self, task: Task) -> None:
        if task.client != self.client:
            raise EngineError(
                f"the node of client {self.client} got a task for client {task.client}"
            )

    def keep(self, task: Task) -> ClientResult:
        """Keep the copy of the last global model in a task, next to the private states.

        Raises:
            MessageError: it is no model.
        """
        model = decode(task.message, longest_header=SHORT_HEADER + len(task.message))
        self.states.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_beside(self.states.folder / COPY, sealed(model, {CARD: task.card}))
        return ClientResult(b"kept", task.state or b"", {}, {})

    def work(
        self, task: Task, runtime: ClientRuntime, received: messages.Message | None = None
    ) -> ClientResult:
        """Carry out a task whose state is a ticket, and have one in the outcome.

        Args:
            task: what to do.
            runtime: of the client.
            received: as for `ClientRuntime.train`.

        Raises:
            EngineError: it is another client's, or its state is not here.
        """
        self._require_own(task)
        ticket = task.state
        state = self.states.load(ticket, self.client) if ticket else None
        outcome = runtime.train(replace(task, state=state), received)
        if not outcome.state:
            return outcome
        kept = self.states.save(outcome.state, ticket, self.client, task.round)
        return replace(outcome, state=kept)


class Answers(Protocol):
    """A client at its site."""

    def answer(self, message: Message) -> Message:
        """Process a message and return the answer."""


def app_of(
    find: Callable[[Context], Answers], secure: Callable[[Message, Context], Message]
) -> ClientApp:
    """The ClientApp of clients that are found from their contexts; `secure` answers messages of
    secure aggregation.
    """
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        try:
            return find(context).answer(message)
        except FedbayesError as error:
            return complaint(error, message)

    app.query("hello")(answer)
    app.train("round")(answer)
    app.train()(secure)
    return app


def once(find: Callable[[Context], Found]) -> Callable[[Context], Found]:
    """What finds a client by its context, and the same one again while its settings are the same.

    An app that stays in its process from message to message so keeps what it read; an error is
    not kept.
    """
    kept: dict[str, Found] = {}

    def found(context: Context) -> Found:
        settings = [context.run_id, dict(context.node_config), dict(context.run_config)]
        key = json.dumps(settings, sort_keys=True)
        if key not in kept:
            kept.clear()
            kept[key] = find(context)
        return kept[key]

    return found


def complaint(error: FedbayesError, message: Message) -> Message:
    """The answer of a node that cannot do its work, in plain words.

    What is wrong with data may quote them, so it stays in the node's own log.
    """
    text = str(error)
    if isinstance(error, DataError):
        logging.getLogger("flwr").error("%s", error)
        text = "its data cannot be used; see its own log"
    return Message(write_complaint(text), reply_to=message)
