"""How names and shapes of data are written in messages."""

from collections.abc import Iterable, Sequence


def listed(names: Iterable[object], most: int = 10) -> str:
    """Names in a row; of many the first ones, and how many more there are."""
    words = [str(name) for name in names]
    more = f" and {len(words) - most:,} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def size(shape: Sequence[int]) -> str:
    """A shape, as in 3 x 32 x 32."""
    return " x ".join(str(int(length)) for length in shape) or "single values"
