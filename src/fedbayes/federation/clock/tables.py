"""Clients' seconds, rates and spells from files."""

import csv
import io
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from fedbayes.core.files import read_text
from fedbayes.core.wording import listed
from fedbayes.errors import ConfigError, quoted, told_as
from fedbayes.federation.clock.availability import Times
from fedbayes.federation.clock.rates import rate

LONGEST = 1e15
"""Seconds of a client: with more, a clock cannot tell seconds apart."""


def read_seconds(path: Path, names: Sequence[str]) -> Times:
    """Seconds of every client, float64 [S].

    Args:
        path: a CSV file of columns `client` and `seconds`.
        names: of the clients.

    Raises:
        ConfigError: the file cannot be read, or a row is wrong or lacks; says which.
    """
    return _by_client(path, names, "seconds", _seconds)


def read_rates(path: Path, names: Sequence[str], column: str) -> Times:
    """Bytes a second of every client, float64 [S].

    Args:
        path: a CSV file of the column `client` and one of rates, as numbers or as `20 MB/s`.
        names: of the clients.
        column: `download` or `upload`.

    Raises:
        ConfigError: the file cannot be read, or a row is wrong or lacks; says which.
    """
    return _by_client(path, names, column, rate)


def _seconds(text: str) -> float:
    """A time above 0."""
    if (seconds := _number(text)) <= 0:
        raise ValueError("a time must be above 0")
    return seconds


def _by_client(
    path: Path, names: Sequence[str], column: str, read: Callable[[str], float]
) -> Times:
    """A number of every client, float64 [S]."""
    found: dict[int, float] = {}
    for line, client, (value,) in _rows("clock.file", path, names, {column: read}):
        if client in found:
            raise ConfigError(f"{path}, line {line}: client {quoted(names[client])} occurs twice")
        found[client] = value
    _require_all("clock.file", path, names, found)
    return np.array([found[client] for client in range(len(names))])


def read_spells(path: Path, names: Sequence[str], period: float) -> dict[int, Times]:
    """Spells of every client, float64 [n, 2] of starts and stops, ascending.

    Args:
        path: a CSV file of columns `client`, `start` and `stop`.
        names: of the clients.
        period: seconds; spells are in [0, period].

    Raises:
        ConfigError: the file cannot be read, or a row is wrong or lacks; says which.
    """
    found: dict[int, list[tuple[float, float]]] = {}
    columns = {"start": _number, "stop": _number}
    for line, client, (start, stop) in _rows("clock.spells", path, names, columns):
        if not 0 <= start < stop <= period:
            raise ConfigError(
                f"{path}, line {line}: a spell from {start:g} to {stop:g}. It must begin before "
                f"it ends, in [0, {period:g}] (clock.period)"
            )
        found.setdefault(client, []).append((start, stop))
    _require_all("clock.spells", path, names, found)
    spells: dict[int, Times] = {}
    for client, pieces in found.items():
        pieces.sort()
        for (_, stop), (start, _) in pairwise(pieces):
            if start < stop:
                raise ConfigError(
                    f"{path}: spells of client {quoted(names[client])} overlap at {start:g}"
                )
        spells[client] = np.array(pieces)
    return spells


def _rows(
    key: str, path: Path, names: Sequence[str], columns: Mapping[str, Callable[[str], float]]
) -> Iterator[tuple[int, int, list[float]]]:
    """Line, client and numbers of each row, each as its column is read."""
    with told_as(ConfigError, f"cannot read {key} = {path}", OSError, ValueError, csv.Error):
        text = io.StringIO(read_text(path).removeprefix("\ufeff"))  # as spreadsheets begin theirs
        reader = csv.DictReader(text, skipinitialspace=True)
        known = {name: client for client, name in enumerate(names)}
        header = list(reader.fieldnames or ())
        wanted = ("client", *columns)
        if missing := sorted(set(wanted) - set(header)):
            raise ConfigError(f"{key} = {path} has no column {listed(missing)}")
        if twice := [column for column in wanted if header.count(column) > 1]:
            raise ConfigError(f"{key} = {path} has the column {twice[0]} twice")
        for row in reader:
            line = reader.line_num
            if (name := row["client"]) not in known:
                raise ConfigError(
                    f"{path}, line {line}: unknown client {quoted(str(name))}. The clients are "
                    f"{listed(names, 5)}"
                )
            if None in row:
                raise ConfigError(f"{path}, line {line}: it has more cells than there are columns")
            yield line, known[name], [_read(path, line, c, row[c], columns[c]) for c in columns]


def _read(
    path: Path, line: int, column: str, text: str | None, read: Callable[[str], float]
) -> float:
    """The number in a cell."""
    if not text or text.isspace():
        raise ConfigError(f"{path}, line {line}: {column} is missing")
    try:
        return read(text)
    except ValueError as error:
        raise ConfigError(f"{path}, line {line}: {column} is {quoted(text)}; {error}") from None


def _number(text: str) -> float:
    """A number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not abs(value) <= LONGEST:  # nor is NaN
        raise ValueError(f"it must be a number, and at most {LONGEST:g}")
    return value


def _require_all(key: str, path: Path, names: Sequence[str], found: Collection[int]) -> None:
    missing = [name for client, name in enumerate(names) if client not in found]
    if missing:
        raise ConfigError(f"{key} = {path} has no row for client {listed(missing, 5)}")
