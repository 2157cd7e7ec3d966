"""How names and shapes of data are written in messages."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Self

from fedbayes.core.targets import Target

_KINDS = {"labels": "labels", "real": "real", "count": "counts", "survival": "time and event"}


def listed(names: Iterable[object], most: int = 10, between: str = ", ") -> str:
    """Names in a row; of many the first ones, and how many more there are."""
    words = [str(name) for name in names]
    more = f" and {len(words) - most:,} more" if len(words) > most else ""
    return between.join(words[:most]) + more


class Files(str):
    """Files that are read as one table, by the name of the first, for `spans` and `place`."""

    rows: Mapping[str, int]
    """Number of rows by file, in their order."""

    @classmethod
    def of(cls, rows: Mapping[str, int]) -> Self:
        """Files with these numbers of rows."""
        found = cls(next(iter(rows)))
        found.rows = rows
        return found


def spans(where: str, rows: int) -> Iterator[tuple[str, slice]]:
    """Each file behind a table's name, and its rows among all of them.

    Args:
        where: The name; one file unless it is `Files`.
        rows: How many the table has.
    """
    start = 0
    for file, count in (where.rows if isinstance(where, Files) else {where: rows}).items():
        yield file, slice(start, start := start + count)


def place(where: str, row: int) -> tuple[str, str, slice]:
    """The file that a row of a table is in, its number in that file from 1, and the file's rows.

    >>> place(Files.of({"north.csv": 200, "south.csv": 160}), 203)
    ('south.csv', '4', slice(200, 360, None))
    """
    file, span = next((f, s) for f, s in spans(where, sys.maxsize) if row < s.stop)
    return file, f"{row - span.start + 1:,}", span


def describe(target: Target) -> str:
    """A description of the target, as in `the classes 0, 1` and `real: age`."""
    if target.kind == "class":
        return f"the classes {listed(target.names)}"
    return f"{_KINDS[target.kind]}: {listed(target.names)}"


def size(shape: Sequence[int]) -> str:
    """A shape, as in 3 x 32 x 32."""
    return " x ".join(str(int(length)) for length in shape) or "single values"
