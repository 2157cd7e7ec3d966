"""The apps of a node's runs, each in a process of its own that stays for the next messages.

Flower starts a process for every message: Python, PyTorch, the data, all of it again. Here that of
a run stays: until it had nothing to do for a while, until others need its place, or until the node
ends, however that ends.
"""

import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Timer

from fedbayes.core.memory import give_back
from fedbayes.errors import EngineError

KEPT = 2
"""Runs whose processes are kept at most; of more, the one goes that was asked longest ago."""
TAKEN = b"taken"
"""What an app's process says once it has read a request: what happens then is the app's fault."""
SOUND = b"sound"
"""How an answer begins after which the process goes on."""
_TRIES = 2
"""Processes that a request is given to before any has taken it: one may just end when it comes."""
_GLANCE = 0.5
"""Seconds between two looks whether a process that works is still there."""

Contents = list[tuple[str, bytes]]
"""The objects that Flower cuts a message into, by their digests."""


class AppDied(EngineError):
    """The process of an app ended, or was ended, before it answered."""


@dataclass(frozen=True)
class Request:
    """A message to an app."""

    message: str
    """Its id."""
    context: bytes
    """The context of its run, as Flower's protobuf has it."""
    contents: Contents

    def send(self, pipe: Connection) -> None:
        """Write it to a process."""
        pipe.send_bytes(self.message.encode())
        pipe.send_bytes(self.context)
        _send(pipe, self.contents)

    @staticmethod
    def receive(pipe: Connection) -> "Request":
        """Read what `send` wrote."""
        return Request(pipe.recv_bytes().decode(), pipe.recv_bytes(), _receive(pipe))


@dataclass(frozen=True)
class Answer:
    """What an app says to a message, in Flower's protobuf."""

    message: bytes
    """Without its content."""
    tree: bytes
    """Of which objects the content consists."""
    context: bytes
    """What the app leaves for the run's next message."""
    contents: Contents
    sound: bool
    """Whether its process can be asked again."""

    def send(self, pipe: Connection) -> None:
        """Write it to the node."""
        pipe.send_bytes(SOUND if self.sound else b"")
        for part in (self.message, self.tree, self.context):
            pipe.send_bytes(part)
        _send(pipe, self.contents)

    @staticmethod
    def receive(pipe: Connection) -> "Answer":
        """Read what `send` wrote."""
        sound = pipe.recv_bytes() == SOUND
        message, tree, context = (pipe.recv_bytes() for _ in range(3))
        return Answer(message, tree, context, _receive(pipe), sound)


class PersistentApp:
    """A process that has the app of one run.

    Args:
        run: the run, as Flower's protobuf has it.
        fab: its app, likewise.
        idle: seconds without work after which it ends by itself.
    """

    def __init__(self, run: bytes, fab: bytes, idle: float) -> None:
        self._pipe, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-P", "-m", "fedbayes.flower.warm_app"]
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(idle)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._first = [run, fab]

    def ask(self, request: Request, seconds: float) -> Answer | None:
        """The app's answer; None if the process ended before it took the request.

        Args:
            request: the message.
            seconds: after which the process is ended, since nobody waits any more.

        Raises:
            AppDied: it ended, or was ended, while it worked.
        """
        end = Timer(seconds, self.process.kill)
        end.daemon = True
        end.start()
        taken = False
        try:
            while self._first:
                self._pipe.send_bytes(self._first[0])
                del self._first[0]
            request.send(self._pipe)
            taken = self._next() == TAKEN
            length = sum(len(content) for _, content in request.contents)
            request.contents.clear()  # the process has them
            give_back(length)
            self._wait()
            return Answer.receive(self._pipe)
        except (EOFError, OSError):
            self.close()
            if not taken and end.is_alive():
                return None
            why = f"exit status {self.process.returncode}"
            if not end.is_alive():
                why = f"it was stopped: its answer is no longer needed after {seconds:.0f} s"
            raise AppDied(f"the app's process ended while it worked ({why})") from None
        finally:
            end.cancel()

    def _next(self) -> bytes:
        self._wait()
        return self._pipe.recv_bytes()

    def _wait(self) -> None:
        """Wait for something to read, or the end of the process, whose own may hold the socket."""
        while not self._pipe.poll(_GLANCE):
            if self.process.poll() is not None and not self._pipe.poll():
                raise EOFError

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_GLANCE)
        self.process.kill()
        self.process.wait()


class WarmApps:
    """The processes of a node's runs.

    Args:
        idle: seconds without work after which one ends; 0: after every message, as Flower's do.
    """

    def __init__(self, idle: float) -> None:
        self._idle = idle
        self._apps: dict[int, PersistentApp] = {}  # by run; who was asked last is last

    def ask(self, run_id: int, run: bytes, fab: bytes, request: Request, seconds: float) -> Answer:
        """A run's answer to a message, for which nobody waits after these seconds; the run and
        its app are as Flower's protobuf has them.

        Raises:
            AppDied: there is none.
        """
        for _ in range(_TRIES):
            app = self._apps.pop(run_id, None) or self._started(run, fab)
            try:
                answer = app.ask(request, seconds)
            except BaseException:
                app.close()
                raise
            if answer is None:
                continue
            if answer.sound and self._idle:
                self._apps[run_id] = app
            else:
                app.close()
            return answer
        raise AppDied("the app's process ended before it took the message; its own log says why")

    def reap(self) -> None:
        """Forget processes that ended by themselves."""
        for run_id, app in list(self._apps.items()):
            if app.process.poll() is not None:
                self._apps.pop(run_id).close()

    def close(self) -> None:
        """End all of them."""
        while self._apps:
            self._apps.popitem()[1].close()

    def _started(self, run: bytes, fab: bytes) -> PersistentApp:
        """A new process, for which another makes room."""
        while len(self._apps) >= KEPT:
            self._apps.pop(next(iter(self._apps))).close()
        return PersistentApp(run, fab, self._idle)


def _send(pipe: Connection, contents: Contents) -> None:
    pipe.send_bytes(str(len(contents)).encode())
    for name, content in contents:
        pipe.send_bytes(name.encode())
        pipe.send_bytes(content)


def _receive(pipe: Connection) -> Contents:
    return [(pipe.recv_bytes().decode(), pipe.recv_bytes()) for _ in range(int(pipe.recv_bytes()))]
