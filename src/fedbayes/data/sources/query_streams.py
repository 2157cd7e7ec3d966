"""Rows of a SQL query to be predicted, piece by piece."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedbayes.data.source_settings import holds_password
from fedbayes.data.sources.files import reading
from fedbayes.data.sources.sql import PASSWORD, WHERE, column_names, connected
from fedbayes.data.sources.streams import Piece, wanted_columns
from fedbayes.data.tables.columns import Column
from fedbayes.errors import DataError


@dataclass
class QueryRows:
    """The rows of a query, in the order in which the database gives them, in pieces."""

    database: str
    """Its URL, without a password."""
    query: str
    table: Sequence[Column]
    """Columns that the model reads; none if its samples have no names."""
    size: int = 10_000
    """Rows of a piece."""
    share: float | None = None
    """It is not known how many rows there are."""
    notes: list[str] = field(default_factory=list)
    """What a user should know."""

    @property
    def where(self) -> str:
        """What messages call the rows."""
        return WHERE

    def __iter__(self) -> Iterator[Piece]:
        """The pieces. The query runs in a transaction that is rolled back.

        Raises:
            DataError: the database cannot be reached, the query fails, or gives no rows; no message
                holds a password.
            ColumnError: it gives no column that the model reads.
        """
        if holds_password(self.database):  # said without the URL
            raise DataError(
                "the URL of the database contains a password, which other programs on this "
                f"machine could see. Leave it out, and set {PASSWORD}"
            )
        done = 0
        with connected(self.database, "the URL", "the query") as (connection, text):
            found = connection.execution_options(stream_results=True).execute(text(self.query))
            if not found.returns_rows:
                raise DataError(
                    f"{WHERE} returns no rows, because it is not a SELECT. Nothing was changed"
                )
            names = column_names(found.keys())
            wanted = wanted_columns(self.table, names, WHERE)
            for rows in found.partitions(self.size):
                with reading(WHERE):
                    x, kept = _split(rows, names, wanted)
                yield Piece(x, kept, done)
                done += len(rows)
        if not done:
            raise DataError(f"{WHERE} returns no rows to predict")


def _split(rows: Sequence[Any], names: list[str], wanted: list[str]) -> tuple[Any, Any]:
    """What the model reads of some rows, and all else as text, alike in every piece."""
    import pandas as pd

    plain = [tuple(row) for row in rows]
    frame = pd.DataFrame.from_records(plain, columns=names, coerce_float=True)
    raw = pd.DataFrame(plain, columns=names, dtype=object)
    kept = raw[[name for name in names if name not in wanted]]
    texts = {
        name: pd.array([None if value is None else str(value) for value in kept[name]], "string")
        for name in kept.columns
    }
    return frame[wanted], pd.DataFrame(texts, index=pd.RangeIndex(len(plain)))
