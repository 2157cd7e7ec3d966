"""Arrays are joined of their pieces once, where Flower holds three copies of a message.

Flower puts a message together of objects. It copies each piece of an array out of its object,
appends it to a buffer, and copies the buffer. So pieces are set aside, and Flower joins their
names instead: what it makes of them says which pieces an array has, and in which order.
"""

from collections.abc import Iterator

from flwr.app import Array, ArrayRecord, Message
from flwr.app.message.arraychunk import ArrayChunk
from flwr.supercore.constant import HEAD_BODY_DIVIDER
from flwr.supercore.inflatable.inflatable_object import (
    add_header_to_object_body,
    get_object_type_from_object_content,
)

_NAME = 64
"""Bytes of the name of an object, a digest in hexadecimal."""


class Joining:
    """The pieces of the arrays of one message."""

    def __init__(self) -> None:
        self._pieces: dict[str, memoryview] = {}

    def set_aside(self, name: str, content: bytes) -> bytes:
        """What Flower gets of an object: its name, if it is a piece of an array."""
        if get_object_type_from_object_content(content) != ArrayChunk.__qualname__:
            return content
        start = content.index(HEAD_BODY_DIVIDER) + len(HEAD_BODY_DIVIDER)
        self._pieces[name] = memoryview(content)[start:]
        own = memoryview(name.encode())
        return add_header_to_object_body(own, ArrayChunk(own))

    @property
    def lengths(self) -> dict[str, int]:
        """Bytes of each piece, by its name."""
        return {name: len(piece) for name, piece in self._pieces.items()}

    def joined(self, message: Message) -> Message:
        """The message that Flower made of the other objects, with its arrays' own bytes."""
        if message.has_content():
            for record in message.content.values():
                for array in record.values() if isinstance(record, ArrayRecord) else ():
                    array.data = b"".join(map(self._pieces.__getitem__, _names(array)))
        self._pieces.clear()
        return message


def _names(array: Array) -> Iterator[str]:
    """The names of an array's pieces."""
    for start in range(0, len(array.data), _NAME):
        yield array.data[start : start + _NAME].decode()
