"""The way to the grid: messages are pushed, answers looked for side by side, breaks noticed."""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import httpx
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore.run import RunNotRunningException

from fedbayes.errors import EngineError, MessageError
from fedbayes.flower.fetching import fetch, longest_reply
from fedbayes.flower.wire import one_line

MOMENT = 0.5
"""Seconds that an answer may take to arrive before others are looked for."""
LOOKS = 16
"""Answers that are looked for side by side."""


class LinkError(EngineError):
    """The connection to the SuperLink broke."""


class _Look(threading.Thread):
    """One look whether a message is answered, on a thread of its own."""

    # Flower knows of a reply before it is uploaded, and may wait for its rest for hours.

    def __init__(self, grid: Grid, message_id: str, most: int) -> None:
        super().__init__(daemon=True)
        self._grid, self._id, self._most = grid, message_id, most
        self._found: Message | MessageError | httpx.HTTPError | RunNotRunningException | None = None
        self.start()

    def run(self) -> None:
        """Ask the grid once for the reply, and keep it or what went wrong."""
        try:
            self._found = fetch(self._grid, self._id, self._most)
        except (httpx.HTTPError, RunNotRunningException, MessageError) as error:
            self._found = error
        except Exception as error:  # whatever Flower's reader raises on a stranger's bytes
            self._found = MessageError(f"its reply cannot be read: {one_line(error)}")

    def result(self) -> Message | MessageError | None:
        """The answer, if there is one, or why it cannot be read."""
        if isinstance(self._found, (httpx.HTTPError, RunNotRunningException)):
            raise self._found
        return self._found


class Poller:
    """A grid that is opened when it is needed, and again after it has broken.

    Args:
        connect: opens a grid. It may raise `EngineError`.
    """

    def __init__(self, connect: Callable[[], Grid]) -> None:
        self._connect = connect
        self._grid: Grid | None = None
        self._looks: dict[str, _Look] = {}  # by id of the message
        self.was_connected = False
        """Whether a grid was ever open."""

    @contextmanager
    def reach(self) -> Iterator[Grid]:
        """The grid; its errors become `LinkError`."""
        try:
            if self._grid is None:
                self._grid = self._connect()
                self.was_connected = True
            yield self._grid
        except (httpx.HTTPError, RunNotRunningException) as error:
            raise LinkError(str(error) or type(error).__name__) from None

    def push(self, message: Message) -> str:
        """Send a message; its id, or nothing if Flower did not take it."""
        return self.push_all([message])[0]

    def push_all(self, messages: Sequence[Message]) -> list[str]:
        """Send messages at once, equal parts of them once; their ids, or nothing for those that
        Flower did not take.
        """
        with self.reach() as grid:
            taken = set(grid.push_messages(list(messages)))
        numbers = [message.metadata.message_id for message in messages]
        return [number if number in taken else "" for number in numbers]

    def look(self, messages: Iterable[str], carried: int = 0) -> None:
        """Look for the answers to these messages, several side by side, each for a moment.

        Args:
            messages: their ids.
            carried: bytes that an answer carries at most. A longer one is rejected, over a network
                before it is fetched.
        """
        most = longest_reply(carried)
        new = [m for m in messages if m not in self._looks]
        for first in range(0, len(new), LOOKS):
            some = new[first : first + LOOKS]
            with self.reach() as grid:
                self._looks |= {message_id: _Look(grid, message_id, most) for message_id in some}
            end = time.monotonic() + MOMENT
            for message_id in some:
                self._looks[message_id].join(max(0.0, end - time.monotonic()))

    def reply(self, message_id: str) -> Message | MessageError | None:
        """What a look has found: the answer, or why it cannot be read; None if it has not ended."""
        if self._looks[message_id].is_alive():
            return None
        with self.reach():
            return self._looks.pop(message_id).result()

    def forget_all_but(self, messages: Collection[str]) -> None:
        """Wait no more for answers to other messages than these."""
        self._looks = {m: look for m, look in self._looks.items() if m in messages}

    def reset(self) -> None:
        """Drop a broken grid, and what was looked for in it."""
        self._grid = None
        self._looks = {}
