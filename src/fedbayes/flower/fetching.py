"""A node's reply is fetched as far as it can be a proper one, and no further.

A SuperLink cuts a message into objects, says which ones there are, and gives each when it is asked.
It does not say how long they are; but the answer that carries one does, before it is read. Flower's
grid asks for all of them, whatever their length, and then joins arrays of pieces as often as the
array names them. So the client behind the grid is exchanged for one that counts.
The bound is the longest report that the method expects, and 128 KiB and a hundredth for what is
around it. Where a proxy leaves lengths out, or in Flower's simulation, one object is read first.
"""

import copy
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from flwr.app import Array, Message
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
)
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
    iterate_object_tree,
)
from flwr.superlink.grid import HttpGrid

from fedbayes.errors import MessageError
from fedbayes.flower.joining import Joining

ENVELOPE = 2**17
"""Bytes of a reply besides what it carries: metrics, scores, a ticket, words, Flower's own."""
_OBJECTS = 2**10
"""Objects that any reply may be cut into."""
_PIECE = 2**14
"""Bytes of a piece of an array; Flower's own are 5 MB long."""
_AROUND = 2**10
"""Bytes of an answer of the SuperLink around an object."""
_limit = threading.local()


def longest_reply(carried: int) -> int:
    """Bytes that a reply takes at most on the link, of which so many are what it carries."""
    return ENVELOPE + carried + carried // 100


def fetch(grid: Grid, message_id: str, most: int) -> Message | None:
    """The reply to a message, if it is there.

    Args:
        grid: where from. One over a network is asked for no more than is wanted; what another
            one has is in memory already.
        message_id: of the message.
        most: bytes of the longest proper reply (`longest_reply`).

    Raises:
        MessageError: it is longer.
    """
    if isinstance(grid, HttpGrid):
        grid, counting = copy.copy(grid), _Counting(grid._runtime_client, most)
        grid._client = counting  # type: ignore[assignment]
        found = next(iter(grid.pull_messages([message_id])), None)
        return found and counting.joining.joined(found)
    return next(iter(grid.pull_messages([message_id])), None)


class _Counting:
    """A client of the SuperLink for one reply, which it refuses once it is too long."""

    def __init__(self, client: Any, most: int) -> None:
        self._client, self._most, self._left = client, most, most
        self._joined: list[str] = []
        self.joining = Joining()
        self._lock = threading.Lock()
        _watch(client._client)

    def PullMessages(self, request: PullAppMessagesRequest) -> PullAppMessagesResponse:
        """Which objects there are."""
        objects = _OBJECTS + self._most // _PIECE
        with _refused_beyond(self._most, objects * 200):
            response: PullAppMessagesResponse = self._client.PullMessages(request)
        count = sum(map(_count, response.message_object_trees))
        if count > objects:
            raise MessageError(f"its reply has {count:,} objects; the limit is {objects:,}")
        return response

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:
        """One of them."""
        with _refused_beyond(self._most, max(0, self._left) + _AROUND):
            response: PullObjectResponse = self._client.PullObject(request)
        content = response.object_content
        with self._lock:
            self._left -= len(content)
            if self._left < 0:
                raise _too_long(self._most)
            if content:
                self._joined += _pieces(content)
                content = self.joining.set_aside(request.object_id, content)
        return PullObjectResponse(
            object_found=response.object_found,
            object_available=response.object_available,
            object_content=content,
        )

    def ConfirmMessageReceived(
        self, request: ConfirmMessageReceivedRequest
    ) -> ConfirmMessageReceivedResponse:
        """All were fetched; now Flower joins them."""
        lengths = self.joining.lengths
        if not lengths.keys() >= set(self._joined):  # of an array, say, which has pieces itself
            raise MessageError("its reply has an array that is not made of pieces")
        if sum(lengths[piece] for piece in self._joined) > self._most:
            raise _too_long(self._most)
        response: ConfirmMessageReceivedResponse = self._client.ConfirmMessageReceived(request)
        return response


def _pieces(content: bytes) -> list[str]:
    """The pieces that an array is joined of, as often as it names them; none of other objects."""
    kind, pieces, _ = get_object_head_values_from_object_content(content)
    if kind != Array.__qualname__:
        return []
    return [
        pieces[number] for number in json.loads(get_object_body(content, Array))["arraychunk_ids"]
    ]


def _count(tree: ObjectTree) -> int:
    return sum(1 for _ in iterate_object_tree(tree))


def _too_long(most: int) -> MessageError:
    return MessageError(f"its reply is longer than the limit of {most:,} bytes")


@contextmanager
def _refused_beyond(most: int, length: int) -> Iterator[None]:
    """Reject answers of more bytes to what this thread asks, before they are read."""
    _limit.value = (most, length)
    try:
        yield
    finally:
        _limit.value = None


def _look(response: httpx.Response) -> None:
    limit = getattr(_limit, "value", None)
    said = response.headers.get("content-length", "")
    if limit and said.isdigit() and int(said) > limit[1]:
        raise _too_long(limit[0])


def _watch(client: httpx.Client) -> None:
    """Have every answer looked at before it is read."""
    hooks = client.event_hooks
    if _look not in hooks["response"]:
        client.event_hooks = {**hooks, "response": [*hooks["response"], _look]}
