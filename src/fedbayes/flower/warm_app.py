"""A process that keeps a run's ClientApp loaded, with its data, and answers one message at a time.

    python -m fedbayes.flower.warm_app DESCRIPTOR SECONDS

`warm.py` starts it, and is at the other end of the socket with the number DESCRIPTOR. The socket
carries bytes: first the run and its app, then requests, in the parts that `warm.py` defines.

The process ends in three cases:

- It had nothing to do for SECONDS seconds.
- The socket is closed, as it also is when the node is killed.
- An app raised an error, since the state that it left is unknown.

It holds nothing that a next process would lack. The node keeps the context, with all that an app
leaves for later messages, and private states are files.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from logging import ERROR
from multiprocessing.connection import Connection
from queue import SimpleQueue

from flwr.app import Context, Error, Message
from flwr.app.message import remove_content_from_message
from flwr.cli.install import install_from_fab
from flwr.clientapp.client_app import ClientApp, LoadClientAppError
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.common.constant import ErrorCode
from flwr.common.serde import context_from_proto, context_to_proto, message_to_proto
from flwr.proto.fab_pb2 import Fab
from flwr.proto.message_pb2 import Context as ContextProto
from flwr.proto.run_pb2 import Run
from flwr.supercore import log
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from fedbayes.flower.joining import Joining
from fedbayes.flower.warm import TAKEN, Answer, Request

_GLANCE = 0.5
"""Seconds that are waited at least while there is work."""


class Inbox:
    """Requests as they come; they are read at once, so that the end of the node is noticed.

    Args:
        pipe: the socket.
        idle: seconds without work after which the process ends.
    """

    def __init__(self, pipe: Connection, idle: float) -> None:
        self._pipe, self._idle = pipe, idle
        self._requests: SimpleQueue[Request] = SimpleQueue()
        self._lock = threading.Lock()
        self._open = 0
        self._rested = time.monotonic()
        threading.Thread(target=self._listen, daemon=True).start()

    def next(self) -> Request:
        """The next request, when it is there."""
        return self._requests.get()

    def rest(self) -> None:
        """Note that a request is dealt with."""
        with self._lock:
            self._open -= 1
            self._rested = time.monotonic()

    def _listen(self) -> None:
        """Read what comes. What ends the socket, or the time without work, ends the process."""
        try:
            while True:
                while not self._pipe.poll(self._patience()):
                    if self._patience() == 0.0:
                        os._exit(0)
                with self._lock:
                    self._open += 1
                self._requests.put(Request.receive(self._pipe))
        except (EOFError, OSError):
            os._exit(1)

    def _patience(self) -> float:
        """Seconds until the process may end; while there is work, until it is asked again."""
        with self._lock:
            if self._open:
                return max(_GLANCE, self._idle)
            return max(0.0, self._rested + self._idle - time.monotonic())


@dataclass(frozen=True)
class LoadedApp:
    """The ClientApp of a run."""

    app: Callable[[Message, Context], Message]

    def answer(self, request: Request) -> tuple[Message, Context, bool]:
        """What the app says to a request, the context that it leaves, and whether it is sound."""
        joining = Joining()
        contents = {name: joining.set_aside(name, content) for name, content in request.contents}
        request.contents.clear()  # what is joined is not needed in pieces, and may be gigabytes
        found = inflate_object_from_contents(request.message, contents)
        assert isinstance(found, Message)
        message = joining.joined(found)
        message.metadata.__dict__["_message_id"] = request.message
        context = context_from_proto(ContextProto.FromString(request.context))
        try:
            return self.app(message, context), context, True
        except Exception as error:
            log(ERROR, "ClientApp raised an exception", exc_info=error)
            return failure(error, message), context, False


def load(run: Run, fab: Fab) -> ClientApp:
    """Unpack and import a run's app, as Flower does."""
    install_from_fab(fab.content, skip_prompt=True)
    load_app = get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
    return load_app(run.fab_id, run.fab_version, fab.hash_str)


def failure(error: Exception, message: Message) -> Message:
    """The answer of an app that raised, in the words that Flower has for it."""
    if isinstance(error, LoadClientAppError):
        code, reason = ErrorCode.LOAD_CLIENT_APP_EXCEPTION, "the ClientApp cannot be loaded"
    else:
        code, reason = ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(error)}:<'{error}'>"
    return Message(Error(code=code, reason=reason), reply_to=message)


def written(message: Message, context: Context, *, sound: bool) -> Answer:
    """An answer as the node takes it."""
    message.metadata.__dict__["_message_id"] = message.object_id
    with no_object_id_recompute():
        return Answer(
            message_to_proto(remove_content_from_message(message)).SerializeToString(),
            get_object_tree(message).SerializeToString(),
            context_to_proto(context).SerializeToString(),
            [(name, item.deflate()) for name, item in get_all_nested_objects(message).items()],
            sound,
        )


def main() -> None:
    """Answer until there is nothing more to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the node
    descriptor, idle = int(sys.argv[1]), float(sys.argv[2])
    os.set_inheritable(descriptor, False)
    pipe = Connection(descriptor)
    run, fab = Run.FromString(pipe.recv_bytes()), Fab.FromString(pipe.recv_bytes())
    inbox = Inbox(pipe, idle)
    loaded: LoadedApp | None = None
    while True:
        request = inbox.next()
        pipe.send_bytes(TAKEN)
        if loaded is None:
            loaded = LoadedApp(_loading(run, fab))
        message, context, sound = loaded.answer(request)
        written(message, context, sound=sound).send(pipe)
        if not sound:
            return
        del request, message, context
        inbox.rest()


def _loading(run: Run, fab: Fab) -> Callable[[Message, Context], Message]:
    """The app of a run, which raises what goes wrong with loading when it is asked first."""
    try:
        return load(run, fab)
    except Exception as error:
        found = error

        def fail(message: Message, context: Context) -> Message:
            raise found

        return fail


if __name__ == "__main__":
    main()
