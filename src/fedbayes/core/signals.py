"""Signals that end a command: all of them as Ctrl-C does, so that nothing half-written stays."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

ENDS = (signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
"""Signals that ask a process to end, besides SIGINT: from a supervisor, or since its terminal is
gone."""


@contextmanager
def ended_by(ask: Callable[[int], object], numbers: Sequence[int] = ENDS) -> Iterator[None]:
    """Call a function where one of these signals comes; one that is ignored stays so (`nohup`).

    Args:
        ask: gets the number; it may raise.
        numbers: of the signals. Outside of the main thread they stay what they are.
    """

    def come(number: int, frame: FrameType | None) -> None:
        if number in ENDS[1:]:
            _speak_no_more()
        ask(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        heard = [n for n in numbers if signal.getsignal(n) not in (signal.SIG_IGN, None)]
        before = {number: signal.signal(number, come) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt(number: int) -> None:
    """End as Ctrl-C does: raises a KeyboardInterrupt."""
    raise KeyboardInterrupt


def _speak_no_more() -> None:
    """Send what is printed nowhere: the terminal is gone, and writing to it raises an error."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None and not stream.closed and os.isatty(stream.fileno()):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
