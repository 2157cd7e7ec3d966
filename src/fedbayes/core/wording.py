"""How names and shapes of data are written in messages."""

from collections.abc import Iterable, Sequence

from fedbayes.core.targets import Target

_KINDS = {"labels": "labels", "real": "real", "count": "counts", "survival": "time and event"}


def listed(names: Iterable[object], most: int = 10, between: str = ", ") -> str:
    """Names in a row; of many the first ones, and how many more there are."""
    words = [str(name) for name in names]
    more = f" and {len(words) - most:,} more" if len(words) > most else ""
    return between.join(words[:most]) + more


def describe(target: Target) -> str:
    """A description of the target, as in `the classes 0, 1` and `real: age`."""
    if target.kind == "class":
        return f"the classes {listed(target.names)}"
    return f"{_KINDS[target.kind]}: {listed(target.names)}"


def size(shape: Sequence[int]) -> str:
    """A shape, as in 3 x 32 x 32."""
    return " x ".join(str(int(length)) for length in shape) or "single values"
