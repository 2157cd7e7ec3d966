"""`metrics.jsonl`: a line of figures for every round."""

import hashlib
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedbayes.core.files import digest, json_text, parse_json, read_bytes, write_beside
from fedbayes.errors import RunError, told_as
from fedbayes.storage.best_tracker import TABLES
from fedbayes.storage.checkpoints import Checkpoints
from fedbayes.storage.private_states import START_AGAIN
from fedbayes.storage.sums_file import SumsFile

Metrics = dict[str, Any]
"""A line of `metrics.jsonl`."""


class MetricsFile:
    """The lines of one run, compared with what the newest checkpoint and the end say of them.

    Args:
        path: of the file.
        checkpoints: of the run.
        sums: digests of what the run left at its end.
    """

    def __init__(self, path: Path, checkpoints: Checkpoints, sums: SumsFile) -> None:
        self.path, self._checkpoints, self._sums = path, checkpoints, sums
        self._hash = hashlib.sha256()
        self.size = 0
        """Bytes that this process knows of."""

    @property
    def digest(self) -> str:
        """Digest of these bytes."""
        return self._hash.hexdigest()

    def add(self, metrics: Metrics) -> None:
        """Append the line of a round .

        Raises:
            RunError: somebody else has written to it.
        """
        line = (json_text(metrics) + "\n").encode()
        with self.path.open("ab") as file:
            if file.tell() != self.size:
                raise RunError(
                    f"{self.path} was changed during the run: it has {file.tell():,} "
                    f"bytes, but {self.size:,} were written"
                )
            file.write(line)
        self._hash.update(line)
        self.size += len(line)

    def read(self) -> list[Metrics]:
        """The lines of all rounds; a last line that was cut off by a kill is left out.

        Raises:
            RunError: a line is damaged, or is not what it was when the newest checkpoint was
                written.
        """
        return [line for line, _ in self._read()]

    def _read(self) -> Iterator[tuple[Metrics, bytes]]:
        """The lines of all rounds, and as they are written."""
        known, sums = self._checkpoints.inventory(), None  # first: the file may grow meanwhile
        with suppress(RunError):  # the summary names damaged files
            sums = self._sums.read()
        try:
            data = read_bytes(self.path)
        except FileNotFoundError:
            data = b""
        except OSError as error:
            raise RunError(f"cannot read {self.path}: {error.strerror}") from None
        for number, line in enumerate(data.split(b"\n")[:-1], start=1):
            damaged = f"{self.path}, line {number} is damaged"
            with told_as(RunError, damaged, ValueError, after=f"; {START_AGAIN}"):
                found = _line(line, number)
            yield found, line + b"\n"
        if known is None or not known.lines_digest:
            return
        if len(data) < known.lines or digest(data[: known.lines]) != known.lines_digest:
            raise RunError(
                f"{self.path} is damaged: its lines do not match "
                f"{self._checkpoints.newest_name}; {START_AGAIN}"
            )
        self._sums.compare(self.path, data, sums)

    def drop_after(self, number: int) -> None:
        """Forget the lines of rounds that did not complete: those after the newest checkpoint."""
        kept = b"".join(text for line, text in self._read() if line["round"] <= number)
        write_beside(self.path, kept)
        self._hash, self.size = hashlib.sha256(kept), len(kept)


def table(text: str | bytes) -> Metrics:
    """A table in JSON."""
    table: Metrics = parse_json(text)
    if not isinstance(table, dict):
        raise ValueError("it is not a table")
    return table


def _line(text: bytes, number: int) -> Metrics:
    """The line of a round, its tables of figures being tables."""
    line = table(text)
    if type(found := line.get("round")) is not int or found != number:
        raise ValueError(f"it does not belong to round {number}")
    tables = [line.get(name, {}) for name in TABLES]
    if isinstance(whose := line.get("metrics", {}), dict):
        tables += whose.values()
    if not all(isinstance(table, dict) for table in tables):
        raise ValueError("it has no table of metrics")
    undefined(tables)
    return line


def undefined(tables: Iterable[object]) -> None:
    """Have NaN again where a figure is null, in tables of figures."""
    for table in tables:
        if isinstance(table, dict):
            table |= {name: math.nan for name, value in table.items() if value is None}
