"""A worker process: clients behind a pipe.

    python -m fedbayes.federation.engines.worker

It reads frames from standard input and answers on standard output; see `write` for a frame.
The first frame says how to build the runtime; then each frame is a task or an evaluation. It ends
when its input does, so it never outlives the process that started it.
"""

import gc
import json
import os
import signal
import struct
import sys
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import IO

from fedbayes.core import seeds
from fedbayes.core.portable import use_threads
from fedbayes.core.signals import ENDS
from fedbayes.federation.client_runtime import ClientRuntime
from fedbayes.federation.engines.questions import Header, failure, handle

_PREFIX = struct.Struct("<I")


def write(stream: IO[bytes], header: Header, blobs: Sequence[bytes] = ()) -> None:
    """Write one frame: length of a JSON header, the header with the blobs' sizes, the blobs."""
    text = json.dumps({**header, "sizes": [len(blob) for blob in blobs]}).encode()
    stream.write(_PREFIX.pack(len(text)) + text)
    for blob in blobs:
        stream.write(blob)
    stream.flush()


def read(stream: IO[bytes]) -> tuple[Header, list[bytes]]:
    """Read one frame. Raises an EOFError if the stream ended before the frame did."""

    def exactly(count: int) -> bytes:
        data = stream.read(count)
        if len(data) != count:
            raise EOFError("the stream ended inside a frame")
        return data

    (length,) = _PREFIX.unpack(exactly(_PREFIX.size))
    header: Header = json.loads(exactly(length))
    return header, [exactly(size) for size in header["sizes"]]


def pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Where requests come from the parent, and where replies go: not what this process prints."""
    for number in (signal.SIGINT, *ENDS[1:]):  # Ctrl-C and a hang-up are for the parent
        signal.signal(number, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return sys.stdin.buffer, replies


def main() -> None:
    """Serve frames until the input ends."""
    requests, replies = pipes()
    header, blobs = read(requests)
    use_threads(header["threads"])
    runtime: ClientRuntime | None = None
    last = b""
    while True:
        try:
            if runtime is None:
                runtime = resolve_name(header["factory"])(header["argument"], header["device"])
                gc.freeze()  # what was imported stays: collections need not look at it again
                reply: Header = {}
                answer: list[bytes] = []
            else:
                if header["same"]:
                    blobs[0] = last
                last = blobs[0]
                reply, answer = handle(runtime, header, blobs)
        except Exception as error:
            reply, answer = failure(error), []
        try:
            write(replies, reply, answer)
            header, blobs = read(requests)
        except (EOFError, BrokenPipeError):
            os._exit(0)


if __name__ == "__main__":
    with seeds.kept():  # of which nobody else is in this process
        main()
