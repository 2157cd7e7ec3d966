"""Clients' seconds and spells from files."""

import csv
import io
import math
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from fedbayes.data.wording import listed
from fedbayes.errors import ConfigError, quoted
from fedbayes.federation.timing.availability import Times
from fedbayes.files import read_text


def read_seconds(path: Path, names: Sequence[str]) -> Times:
    """Seconds of every client, float64 [S].

    Args:
        path: a CSV file of columns `client` and `seconds`.
        names: of the clients.

    Raises:
        ConfigError: the file cannot be read, or a row is wrong or lacks; says which.
    """
    found: dict[int, float] = {}
    for line, client, (seconds,) in _rows("clock.file", path, names, ("seconds",)):
        if client in found:
            raise ConfigError(f"{path}, line {line}: client {quoted(names[client])} comes twice")
        if not seconds > 0:
            raise ConfigError(f"{path}, line {line}: seconds are {seconds:g}; they are above 0")
        found[client] = seconds
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
    for line, client, (start, stop) in _rows("clock.spells", path, names, ("start", "stop")):
        if not 0 <= start < stop <= period:
            raise ConfigError(
                f"{path}, line {line}: a spell from {start:g} to {stop:g}; it begins before it "
                f"ends, in [0, {period:g}] (clock.period)"
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
    key: str, path: Path, names: Sequence[str], columns: tuple[str, ...]
) -> Iterator[tuple[int, int, list[float]]]:
    """Line, client and numbers of each row."""
    try:
        reader = csv.DictReader(io.StringIO(read_text(path)))
        known = {name: client for client, name in enumerate(names)}
        missing = {"client", *columns} - set(reader.fieldnames or ())
        if missing:
            raise ConfigError(f"{key} = {path} has no column {listed(sorted(missing))}")
        for row in reader:
            line = reader.line_num
            if (name := row["client"]) not in known:
                raise ConfigError(
                    f"{path}, line {line}: no client is called {quoted(str(name))}; there are "
                    f"{listed(names, 5)}"
                )
            yield line, known[name], [_number(path, line, c, row[c]) for c in columns]
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(f"cannot read {key} = {path}: {error}") from None


def _number(path: Path, line: int, column: str, text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{path}, line {line}: {column} is {quoted(str(text))}, and no number")
    return value


def _require_all(key: str, path: Path, names: Sequence[str], found: Collection[int]) -> None:
    missing = [name for client, name in enumerate(names) if client not in found]
    if missing:
        raise ConfigError(f"{key} = {path} says nothing of client {listed(missing, 5)}")
