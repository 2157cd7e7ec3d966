"""Rows to be predicted, read piece by piece: files may be larger than memory."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from fedbayes.data.columns import Column
from fedbayes.data.columns import reading as reading_as
from fedbayes.data.source_settings import SourceSettings
from fedbayes.data.sources.files import reading
from fedbayes.data.sources.own import as_pictures, plain_array
from fedbayes.data.sources.rows import decoded, holds_pictures
from fedbayes.data.sources.tables import (
    DECIMAL_COMMA,
    DELIMITERS,
    TABLES,
    layout,
    mend_decimal_commas,
    read_table,
    refuse_twice,
)
from fedbayes.data.sources.unpacking import as_text, check_texts
from fedbayes.data.wording import listed
from fedbayes.errors import ColumnError, DataError, did_you_mean
from fedbayes.files import open_npz

FORMATS = (*TABLES, ".npz")
"""Suffixes of the files that can be read so."""
_MISSING = (
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"),
    *("<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
)
"""What stands for an empty cell in a column that the model reads, as pandas has it by default."""


@dataclass(frozen=True)
class Piece:
    """Some rows of a file."""

    x: Any
    """What the model reads of them: a DataFrame of its columns, or an array [n, ...]."""
    kept: Any
    """All other columns as they are in the file, a DataFrame."""
    start: int
    """Rows before them."""


class Pieces(Protocol):
    """Samples to be predicted, in pieces."""

    share: float | None
    """How much has been read, of 1; None where it is not known."""
    notes: list[str]
    """What a user should know."""

    @property
    def where(self) -> str:
        """What messages call them."""
        ...

    def __iter__(self) -> Iterator[Piece]:
        """The pieces, in order."""
        ...


@dataclass
class Rows:
    """The rows of a file, in pieces."""

    path: Path
    table: Sequence[Column]
    """Columns that the model reads; none if its samples have no names."""
    size: int = 10_000
    """Rows of a piece."""
    sheet: str | None = None
    """The sheet of an Excel file; None: its only one."""
    share: float | None = 0.0
    """How much has been read, of 1."""
    notes: list[str] = field(default_factory=list)
    """What a user should know."""

    @property
    def where(self) -> str:
        """What messages call the file."""
        return str(self.path)

    def __iter__(self) -> Iterator[Piece]:
        """The pieces, in the order of the file.

        Raises:
            DataError: it is absent, damaged, empty, or of another format.
            ColumnError: it has no column that the model reads.
        """
        name = self.path.name.lower()
        if not self.path.exists():
            raise DataError(f"there is no file or folder {self.path} to predict from")
        if not name.endswith(FORMATS):
            raise DataError(
                f"{self.path} cannot be predicted from: give a file that ends in "
                f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
            )
        if not self.path.is_file():
            raise DataError(f"{self.path} is no file, and cannot be predicted from; give one")
        read = next((reader for suffix, reader in _READERS.items() if name.endswith(suffix)), _csv)
        if self.sheet is not None and not name.endswith(".xlsx"):
            raise DataError(f"{self.path} has no sheets, so sheet has no effect; leave it out")
        done = 0
        with reading(self.path):
            for x, kept in read(self):
                if len(x):
                    yield Piece(x, kept, done)
                done += len(x)
        if not done:
            raise DataError(f"{self.path} has no rows to predict")


_Parts = Iterator[tuple[Any, Any]]
"""What the model reads, and what is kept."""


def _csv(rows: Rows) -> _Parts:
    import pandas as pd

    path = rows.path
    delimiter, names = layout(path)
    if not any(names):
        raise DataError(f"{path} is empty: its first line must name the columns")
    refuse_twice(names, path)
    if delimiter != ",":
        rows.notes.append(f"{path} is read with {DELIMITERS[delimiter]} between columns")
    columns = [name or f"Unnamed: {place}" for place, name in enumerate(names)]
    wanted = wanted_columns(rows.table, columns, rows.where)
    kept = [name for name in columns if name not in wanted]
    # What is no quantity is text, whatever it looks like: in another piece it may not.
    texts = [column.name for column in rows.table if column.kind not in ("number", "boolean")]
    total = path.stat().st_size
    # Of one column, a blank line is a row with an empty cell, but for those above the names.
    header = 0
    if single := len(columns) == 1:
        with _opened(path) as (_, text):
            header = next(k for k, line in enumerate(text) if line.strip("\r\n"))
    with _opened(path) as (file, text):
        pieces = pd.read_csv(
            text,
            sep=delimiter,
            header=header,
            skip_blank_lines=not single,
            names=columns,
            index_col=False,
            dtype=dict.fromkeys([*kept, *texts], str),
            keep_default_na=False,
            na_values={name: list(_MISSING) for name in wanted},
            low_memory=False,
            chunksize=rows.size,
        )
        while (frame := _next(pieces, path)) is not None:
            chosen = frame[wanted]
            if delimiter != ",":
                numbers = chosen[[name for name in wanted if name not in texts]].copy()
                mend_decimal_commas(numbers, numbers.columns)
                chosen = chosen.assign(**{name: numbers[name] for name in numbers.columns})
                chosen = chosen.assign(**_with_points(chosen, rows.table))
            rows.share = file.tell() / max(total, 1)
            yield chosen, frame[kept].reset_index(drop=True)


def _with_points(frame: Any, table: Sequence[Column]) -> dict[str, Any]:
    """Columns of categories in which numbers with decimal commas, as in 0,5, have a point.

    In another piece a column may hold other text, so that it is seen to cell by cell; what is a
    category as it is stays so.
    """
    found = {}
    for column in table:
        if column.kind == "category":
            cells = frame[column.name]
            mend = cells.str.fullmatch(DECIMAL_COMMA).eq(True)
            mend &= ~cells.str.strip().isin(column.categories)
            found[column.name] = cells.mask(mend, cells.str.replace(",", ".", regex=False))
    return found


def _next(pieces: Any, path: Path) -> Any:
    """The next piece of a CSV file; None at its end.

    Raises:
        DataError: a row has more values than there are columns.
    """
    import pandas as pd

    try:
        with warnings.catch_warnings(action="error", category=pd.errors.ParserWarning):
            return next(pieces, None)
    except pd.errors.ParserWarning:
        raise DataError(
            f"{path} has more values in a row than its first line has names; name every column"
        ) from None


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], IO[str]]]:
    """A CSV file, as it lies on the disk and as text."""
    with path.open("rb") as file, as_text(path, file) as text:
        yield file, text


def _parquet(rows: Rows) -> _Parts:
    import pandas as pd
    import pyarrow as pa
    from pyarrow import parquet

    path = rows.path
    check_texts(path)
    with parquet.ParquetFile(path) as file:
        columns = [name.strip() for name in file.schema_arrow.names]
        refuse_twice(columns, path)
        total, done = file.metadata.num_rows, 0
        pictured = _pictured(file.schema_arrow) if not rows.table else ""
        wanted = [pictured] if pictured else wanted_columns(rows.table, columns, rows.where)
        for batch in file.iter_batches(batch_size=rows.size):
            table = pa.Table.from_batches([batch]).rename_columns(columns)
            frame = table.select(wanted).to_pandas(ignore_metadata=True)
            kept = table.drop_columns(wanted).to_pandas(
                types_mapper=pd.ArrowDtype, ignore_metadata=True
            )
            done += len(frame)
            rows.share = done / max(total, 1)
            if pictured and len(frame) and holds_pictures(frame[pictured]):
                yield decoded(frame[pictured], str(path)), kept
            else:
                yield frame, kept


def _pictured(schema: Any) -> str:
    """The only column of pictures as the Hugging Face hub stores them; empty if there is none."""
    import pyarrow as pa

    found = [
        column.name
        for column in schema
        if pa.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0
    ]
    return found[0] if len(found) == 1 else ""


def _excel(rows: Rows) -> _Parts:
    """A sheet, which is read whole; what is kept becomes text."""
    import pandas as pd

    settings = SourceSettings(**reading_as(rows.table), sheet=rows.sheet)
    frame = read_table(rows.path, settings, rows.notes)
    wanted = wanted_columns(rows.table, list(frame.columns), rows.where)
    # Read as numbers, ids would lose their leading zeros.
    sheet = 0 if rows.sheet is None else rows.sheet
    cells = pd.read_excel(rows.path, sheet_name=sheet, dtype=object, na_filter=False)
    kept = cells.set_axis(frame.columns, axis=1).drop(columns=wanted).map(str)
    for start in range(0, len(frame), rows.size):
        part = slice(start, start + rows.size)
        rows.share = min(start + rows.size, len(frame)) / len(frame)
        yield frame[wanted].iloc[part], kept.iloc[part].reset_index(drop=True)


def _arrays(rows: Rows) -> _Parts:
    import pandas as pd

    path = rows.path
    with open_npz(path) as file:
        arrays = {name: plain_array(file, name, path) for name in file.files}
    if "x" not in arrays:
        raise DataError(f"{path} has no array 'x' with the samples; there are {listed(arrays)}")
    x = arrays.pop("x")
    if x.ndim < 2 or x.dtype.kind not in "iufb":
        raise DataError(
            f"{path}: x must hold numbers, a sample in each of its first dimension, and have at "
            "least two dimensions"
        )
    x = as_pictures(x)
    if rows.table:
        names = [name for column in rows.table for name in column.features]
        rows.notes.append(
            f"{path} has no names of features; they are taken to be in the order of the model's: "
            f"{listed(names, 3)}"
        )
    aligned = {name: one for name, one in arrays.items() if one.shape == (len(x),)}
    if left := [name for name in arrays if name not in aligned]:
        rows.notes.append(
            f"{path}: {listed(left)} left out: columns are of one value a sample, [{len(x)}]"
        )
    kept = pd.DataFrame(aligned, index=pd.RangeIndex(len(x)))
    for start in range(0, len(x), rows.size):
        part = slice(start, start + rows.size)
        rows.share = min(start + rows.size, len(x)) / len(x)
        yield x[part], kept.iloc[part].reset_index(drop=True)


_READERS = {".parquet": _parquet, ".xlsx": _excel, ".npz": _arrays}
"""How files are read, by the ends of their names; all others are CSV."""


def wanted_columns(table: Sequence[Column], columns: Sequence[str], where: str) -> list[str]:
    """Names of the columns that the model reads, in its order.

    Args:
        table: these columns.
        columns: names of those that there are.
        where: what has them, for messages.

    Raises:
        ColumnError: one is absent.
        DataError: the model has no names of columns.
    """
    if not table:
        raise DataError(
            f"{where} is a table, and the features of this model have no names: it was trained "
            "on arrays; give its samples as an array x [n, ...] in a .npz file"
        )
    names = [column.name for column in table]
    for name in names:
        if name not in columns:
            like = did_you_mean(name, columns)
            raise ColumnError(f"{where} has no column '{name}'{like}", name, "features", like)
    return names
