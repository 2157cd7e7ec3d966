"""Memory that is free, but that the C library keeps for the process."""

import ctypes
import gc
from functools import cache
from typing import Any


@cache
def _trim() -> Any:
    """`malloc_trim` of glibc; None with another C library."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


_LARGE = 2**26
"""Bytes after which it is worth the call."""


def give_back(freed: int) -> None:
    """Collect cycles, and return freed memory to the system, where the C library can.

    After hundreds of pieces of a few megabytes, as Flower cuts messages into, glibc may keep as
    much as a message takes; and answers of httpx are cycles.

    Args:
        freed: bytes that were let go; after few, nothing is done.
    """
    if freed < _LARGE:
        return
    gc.collect()
    if trim := _trim():
        trim(0)
