"""Rows to be predicted, read piece by piece: files may be larger than memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol

from fedbayes.core.files import open_npz
from fedbayes.core.wording import listed
from fedbayes.data.intake import Narrowing
from fedbayes.data.source_settings import TABLES, SourceSettings
from fedbayes.data.sources.conventions import (
    WORDS,
    ConventionDecision,
    ConventionEvidence,
    Layout,
    Numbers,
    decide,
    layout,
)
from fedbayes.data.sources.files import named_cells, reading
from fedbayes.data.sources.own import plain_array
from fedbayes.data.sources.rows import decoded, holds_pictures
from fedbayes.data.sources.tables import read_table, refuse_twice
from fedbayes.data.sources.unpacking import as_text, check_texts
from fedbayes.data.tables.columns import Column
from fedbayes.data.tables.columns import reading as reading_as
from fedbayes.errors import ColumnError, DataError, did_you_mean

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
    settings: SourceSettings = field(default_factory=SourceSettings)
    """How the training's files were read: their encoding and header."""
    decimal: str = ""
    """What separated decimals there, for files that can be read in two ways."""

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
            raise DataError(f"file or folder not found: {self.path}. Give the rows to predict")
        if not name.endswith(FORMATS):
            raise DataError(
                f"{self.path} has no format that can be read. Give a file that ends in "
                f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
            )
        if not self.path.is_file():
            raise DataError(f"{self.path} is not a file. Give a file of rows to predict")
        read = next((reader for suffix, reader in _READERS.items() if name.endswith(suffix)), _csv)
        if self.sheet is not None and not name.endswith(".xlsx"):
            raise DataError(f"{self.path} has no sheets, so --sheet has no effect. Leave it out")
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

    path = rows.path
    found = layout(path, rows.settings)
    if not any(found.names):
        raise DataError(f"{path} is empty. Its first line must have the column names")
    refuse_twice(list(found.names), path)
    rows.notes += found.notes
    columns = found.columns
    wanted = wanted_columns(rows.table, columns, rows.where)
    kept = [name for name in columns if name not in wanted]
    # What is no quantity is text, whatever it looks like: in another piece it may not.
    quantities = [c.name for c in rows.table if c.kind in ("number", "boolean")]
    texts = [name for name in wanted if name not in quantities]
    numbers = Numbers.of(rows.settings)
    decision, evidence = _decided(rows, found, numbers, columns)
    commas = [name for name in quantities if decision.of(name) == ","]
    total = path.stat().st_size
    told: dict[str, str] = {}
    with _opened(path, found.encoding) as (file, text):
        pieces = _pieces(rows, found, text, dict.fromkeys([*kept, *texts, *commas], str), wanted)
        while (frame := _next(pieces, path)) is not None:
            chosen = frame[wanted].copy()
            for name in quantities:
                if chosen[name].dtype.kind not in "iufb":
                    read, example = numbers.read(_as_texts(chosen[name]), decision.of(name))
                    chosen[name] = _as_numbers(read)
                    if example:
                        told.setdefault(name, example)
            for column in rows.table:
                if column.kind == "category" and decision.file == ",":
                    chosen[column.name] = _with_points(chosen[column.name], column, numbers)
            rows.share = file.tell() / max(total, 1)
            yield chosen, frame[kept].reset_index(drop=True)
    if shown := [name for name in commas if name in evidence and evidence[name].example]:
        rows.notes.append(f"{path} is read with decimal commas in {listed(shown)}")
    if told:
        name, cell = next(iter(told.items()))
        rows.notes.append(
            f"{path} is read with thousands separators in {listed(told)} ({cell!r} in '{name}')"
        )


def _pieces(
    rows: Rows, found: Layout, text: IO[str], types: dict[str, Any], wanted: Sequence[str]
) -> Any:
    """A CSV file in DataFrames of so many rows."""
    import pandas as pd

    # Of one column, a blank line is a row with an empty cell, but for those above the names.
    header, single = found.header - 1, len(found.columns) == 1
    if single:
        with _opened(rows.path, found.encoding) as (_, lines):
            there = (k for k, line in enumerate(lines) if line.strip("\r\n"))
            header = next(islice(there, header, None))
    return pd.read_csv(
        text,
        sep=found.delimiter,
        header=header,
        skip_blank_lines=not single,
        names=found.columns,
        index_col=False,
        dtype=types,
        keep_default_na=False,
        na_values={name: list(_MISSING) for name in wanted},
        low_memory=False,
        chunksize=rows.size,
    )


def _decided(
    rows: Rows, found: Layout, numbers: Numbers, columns: list[str]
) -> tuple[ConventionDecision, dict[str, ConventionEvidence]]:
    """How the numbers of a CSV file are read: by its first rows if they say so, else by all."""
    free = {name for name in columns if name not in {c.name for c in rows.table}}
    free |= {column.name for column in rows.table if column.kind not in ("number", "boolean")}
    empty = {*_MISSING, *rows.settings.na_values}
    evidence: dict[str, ConventionEvidence] = {}
    with _opened(rows.path, found.encoding) as (_, text):
        pieces = _pieces(rows, found, text, dict.fromkeys(columns, str), [])
        while (frame := _next(pieces, rows.path)) is not None:
            for name in columns:
                cells = [cell for cell in frame[name].unique() if str(cell).strip() not in empty]
                seen = numbers.look(cells)
                evidence[name] = evidence[name].join(seen) if name in evidence else seen
            certain = {one.certain for one in evidence.values()} - {""}
            if certain and all(one.certain or not one.unclear for one in evidence.values()):
                break
    where = str(rows.path)
    there = {name: one for name, one in evidence.items() if any(one.fits.values())}
    decision = decide(there, numbers, found.delimiter, where, hint=rows.decimal, free=free)
    unclear = [name for name, one in there.items() if one.unclear and name not in free]
    if unclear and rows.decimal and not any(one.certain for one in there.values()):
        rows.notes.append(
            f"{where} can be read in two ways ({there[unclear[0]].example!r} in "
            f"'{unclear[0]}'); its decimals are {WORDS[decision.file]}, as in training"
        )
    return decision, evidence


def _as_texts(column: Any) -> Any:
    """Cells of a piece as text, in which some may be numbers."""
    return column.map(str, na_action="ignore")


def _as_numbers(column: Any) -> Any:
    """Texts as numbers if all are; else as they are, so that the first that is none is named."""
    import pandas as pd

    try:
        return pd.to_numeric(column)
    except (TypeError, ValueError):
        return column


def _with_points(cells: Any, column: Column, numbers: Numbers) -> Any:
    """Categories in which numbers with decimal commas, as in 0,5, have a point."""
    known = cells.str.strip().isin(column.categories)
    return cells.mask(~known, numbers.read(cells, ",", grouped=False)[0])


def _next(pieces: Any, path: Path) -> Any:
    """The next piece of a CSV file; None at its end."""
    with named_cells(path):
        return next(pieces, None)


@contextmanager
def _opened(path: Path, encoding: str) -> Iterator[tuple[IO[bytes], IO[str]]]:
    """A CSV file, as it lies on the disk and as text."""
    with path.open("rb") as file, as_text(path, file, encoding) as text:
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

    given = {"sheet": rows.sheet, "header_rows": rows.settings.header_rows}
    settings = SourceSettings(**reading_as(rows.table), **given)
    frame = read_table(rows.path, settings, rows.notes)
    wanted = wanted_columns(rows.table, list(frame.columns), rows.where)
    # Read as numbers, ids would lose their leading zeros.
    sheet = 0 if rows.sheet is None else rows.sheet
    first = rows.settings.header_rows - 1
    cells = pd.read_excel(rows.path, sheet_name=sheet, header=first, dtype=object, na_filter=False)
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
        raise DataError(f"{path} has no array 'x' with the samples. It has {listed(arrays)}")
    x = arrays.pop("x")
    if x.ndim < 2 or x.dtype.kind not in "iufb":
        raise DataError(
            f"{path}: x must be numbers of at least two dimensions, the first of which counts "
            "samples"
        )
    x = Narrowing().add(x)
    if rows.table:
        names = [name for column in rows.table for name in column.features]
        rows.notes.append(
            f"{path} has no feature names; the order of the model's features is assumed: "
            f"{listed(names, 3)}"
        )
    aligned = {name: one for name, one in arrays.items() if one.shape == (len(x),)}
    if left := [name for name in arrays if name not in aligned]:
        rows.notes.append(
            f"{path}: {listed(left)} left out: columns need one value per sample, [{len(x)}]"
        )
    kept = pd.DataFrame(aligned, index=pd.RangeIndex(len(x)))
    for start in range(0, len(x), rows.size):
        part = slice(start, start + rows.size)
        rows.share = min(start + rows.size, len(x)) / len(x)
        yield x[part], kept.iloc[part].reset_index(drop=True)


_READERS = {".parquet": _parquet, ".xlsx": _excel, ".npz": _arrays}
"""How files are read, by the ends of their names; all others are CSV."""


def wanted_columns(table: Sequence[Column], columns: Sequence[str], where: str) -> list[str]:
    """Names of the columns that the model reads, in its order, among those that there are; `where`
    is for messages.

    Raises:
        ColumnError: one is absent.
        DataError: the model has no names of columns.
    """
    if not table:
        raise DataError(
            f"{where} is a table, but this model was trained on arrays and has no feature names. "
            "Give its samples as an array x [n, ...] in a .npz file"
        )
    names = [column.name for column in table]
    for name in names:
        if name not in columns:
            like = did_you_mean(name, columns)
            raise ColumnError(f"{where} has no column '{name}'{like}", name, "features", like)
    return names
