"""What waits until a whole cohort was heard: bytes by client, in memory or in a file."""

import tempfile
from collections.abc import Iterator
from typing import IO

MEMORY = 256 * 2**20
"""Bytes that are kept in memory; what comes then goes to a file."""


class SpillBuffer:
    """Bytes by client, in the order that they came in.

    Those beyond `memory` bytes are in a temporary file without a name, that nobody else can open
    and that is gone with the process.
    """

    def __init__(self, memory: int = MEMORY) -> None:
        self._memory = memory
        self._near: dict[int, bytes] = {}
        self._far: dict[int, tuple[int, int]] = {}
        self._order: list[int] = []
        self._file: IO[bytes] | None = None

    def add(self, client: int, data: bytes) -> None:
        """Keep the bytes of a client."""
        self._order.append(client)
        if self._file is None and len(data) <= self._memory:
            self._memory -= len(data)
            self._near[client] = data
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._far[client] = (self._file.seek(0, 2), len(data))
        self._file.write(data)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        for client in self._order:
            yield client, self[client]

    def __getitem__(self, client: int) -> bytes:
        if client in self._near:
            return self._near[client]
        assert self._file is not None
        start, length = self._far[client]
        self._file.seek(start)
        return self._file.read(length)

    def close(self) -> None:
        """Let go of all."""
        self._near.clear()
        if self._file is not None:
            self._file.close()
