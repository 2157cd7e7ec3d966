"""The user's own tables: CSV, Parquet and Excel files as frames."""

import csv
import gzip
import warnings
from collections import Counter
from collections.abc import Collection, Iterable
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from fedbayes.categories import codes, identifiers
from fedbayes.data.cells import cell, is_numeric, no_number
from fedbayes.data.source_settings import SourceSettings
from fedbayes.data.sources.files import reading
from fedbayes.data.sources.unpacking import AT_LEAST, check_unpacked
from fedbayes.data.wording import listed
from fedbayes.errors import CellError, DataError, did_you_mean

TABLES = (".parquet", ".csv", ".csv.gz", ".xlsx")
"""Suffixes of tables."""
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_HEAD = 1 << 16
DECIMAL_COMMA = r"\s*[+-]?(\d+|\d*,\d+)([eE][+-]?\d+)?\s*"
"""A number whose decimals, if it has any, are after a comma."""
UNNAMED = "Unnamed: 0"
"""What pandas calls a first column without a name."""


def is_table(file: Path) -> bool:
    """Whether a file is a table, by its name."""
    return file.name.lower().endswith(TABLES)


def read_tables(
    files: dict[str, list[Path]], settings: SourceSettings, notes: list[str]
) -> tuple[Any, int]:
    """The rows of all files as one frame, and how many of them are of the training part.

    Args:
        files: Tables by part.
        settings: How they are read.
        notes: Takes up what a user should know.

    Raises:
        DataError: A file is damaged or empty, or lacks a column that the first one has, or has
            other things in it.
    """
    import pandas as pd

    first = files["train"][0]
    frames: list[Any] = []
    trained = 0
    for part, paths in files.items():
        for file in paths:
            frame = read_table(file, settings, notes)
            columns = frames[0].columns if frames else frame.columns
            absent = [column for column in columns if column not in frame.columns]
            if absent:
                raise DataError(f"{file} has no column '{absent[0]}', which {first} has")
            extra = [column for column in frame.columns if column not in columns]
            if extra:
                notes.append(f"{file}: {listed(extra)} left out, since {first} has no such column")
            if frames:
                _compare(frame, frames[0], settings, file, first)
            frames.append(frame[columns])
            trained += len(frame) if part == "train" else 0
    return pd.concat(frames, ignore_index=True), trained


def _compare(frame: Any, other: Any, settings: SourceSettings, file: Path, first: Path) -> None:
    """See that columns of a file hold what those of the first one do.

    Raises:
        CellError: One does not; names the row.
    """
    chosen = {*settings.categorical, *settings.text, *settings.drop}
    chosen |= {settings.group or "", settings.split or ""}
    for name in other.columns:
        here, there = family(frame[name]), family(other[name])
        if str(name) in chosen or not here or not there or here == there:
            continue
        way = f"it holds {there} in {first}; " + (
            "mend it, or save both as .parquet, in which 01 is not read as 1"
            if str(name) in settings.label
            else "mend it, or name it in categorical or drop"
        )
        if there == "numbers" and here == "text":
            raise no_number(frame[name], str(name), str(file), way)
        row = int(np.asarray(frame[name].notna()).argmax())
        what = f"{file}: column '{name}' holds {here} ({cell(frame[name], row)} in row {row + 1:,})"
        raise CellError(f"{what}; {way}", str(name), row)


def family(column: Any) -> str:
    """What sort of thing the cells of a column are: numbers, dates or text; empty if none are."""
    import pandas as pd

    kind = pd.api.types.infer_dtype(column, skipna=True)
    if kind == "empty" or column.isna().all():
        return ""
    if is_numeric(column):
        return "numbers"
    return "dates" if column.dtype.kind == "M" or kind.startswith("date") else "text"


def read_table(file: Path, settings: SourceSettings, notes: list[str]) -> Any:
    """A table as a frame, with the names of columns stripped of blanks.

    Args:
        file: A CSV, Parquet or Excel file.
        settings: The sheet to take, and which columns are text, whatever they look like.
        notes: Takes up what a user should know.

    Raises:
        DataError: It is damaged or empty.
    """
    import pandas as pd

    name, texts = file.name.lower(), _texts(settings)
    if settings.sheet is not None and not name.endswith(".xlsx"):
        raise DataError(f"{file} has no sheets, so sheet has no effect; leave it out")
    with reading(file):
        check_unpacked(file)
        if name.endswith(".parquet"):
            frame = pd.read_parquet(file)
        elif name.endswith(".xlsx"):
            frame = _read_excel(file, settings.sheet, texts)
        else:
            frame = _read_csv(file, texts, {*settings.categorical, *settings.label}, notes)
        frame.columns = pd.Index([str(column).strip() for column in frame.columns])
        if not name.endswith(".parquet"):  # which has types, so that 01 is text, and 1 a number
            for column in frame.columns.intersection([*settings.categorical]):
                frame[column] = codes(frame[column])
            named = frame.columns.isin([*settings.label, settings.group])
            for column in frame.columns[named]:
                frame[column] = identifiers(frame[column])
    if frame.empty:
        raise DataError(f"{file} has no rows")
    refuse_twice(list(frame.columns), file)
    return frame


def _texts(settings: SourceSettings) -> frozenset[str]:
    """Columns that are read as text: 01 is none once it is read as a number, which depends on what
    else is in the column.
    """
    single = filter(None, (settings.group, settings.tokens))
    several = (*settings.label, *settings.categorical, *settings.text, *settings.dates)
    return frozenset((*several, *single))


def _read_excel(file: Path, sheet: str | None, texts: Collection[str]) -> Any:
    """A sheet of an Excel file; cells of columns of these names as they are."""
    import pandas as pd

    with pd.ExcelFile(file, engine="openpyxl") as book:
        names = [str(name) for name in book.sheet_names]
        if sheet is None and len(names) > 1:
            raise DataError(f"{file} has the sheets {listed(names)}; choose one with sheet")
        if sheet is not None and sheet not in names:
            raise DataError(
                f"{file} has no sheet '{sheet}'{did_you_mean(sheet, names)}; it has {listed(names)}"
            )
        chosen = sheet or names[0]
        head = pd.read_excel(book, sheet_name=chosen, header=None, nrows=1)
        header = head.iloc[0].dropna().tolist() if len(head) else []
        refuse_twice([str(name).strip() for name in header], file)
        as_is = [name for name in header if str(name).strip() in texts]
        return pd.read_excel(book, sheet_name=chosen, dtype=dict.fromkeys(as_is, object))


def refuse_twice(names: list[str], file: Path) -> None:
    """See that no two columns have one name.

    Raises:
        DataError: Two have.
    """
    twice = [name for name, count in Counter(filter(None, names)).items() if count > 1]
    if twice:
        raise DataError(f"{file} has two columns '{twice[0]}'; give each column a name of its own")


def _read_csv(
    file: Path, texts: Collection[str], categories: Collection[str], notes: list[str]
) -> Any:
    """A CSV file; columns of these names as text, in which those of categories and labels may be
    numbers.
    """
    import pandas as pd

    delimiter, names = layout(file)
    if not any(names):
        raise DataError(f"{file} is empty: its first line must name the columns")
    refuse_twice(names, file)
    try:
        with warnings.catch_warnings(action="error", category=pd.errors.ParserWarning):
            # All at once, since a column read in pieces may come as numbers here, as text there.
            read: Any = partial(
                pd.read_csv,
                file,
                sep=delimiter,
                index_col=False,
                low_memory=False,
                encoding="utf-8-sig",
            )
            header = read(nrows=0).columns
            frame = read(dtype={name: str for name in header if name.strip() in texts})
    except pd.errors.ParserWarning:
        raise DataError(
            f"{file} has more values in a row than its first line has names; name every column"
        ) from None
    coded = [name for name in header if name.strip() in categories]
    mended = [name for name in header if name in coded or name.strip() not in texts]
    commas = [] if delimiter == "," else mend_decimal_commas(frame, mended, coded)
    if delimiter != ",":
        numbers = f", and numbers with decimal commas in {listed(commas)}" if commas else ""
        notes.append(f"{file} is read with {DELIMITERS[delimiter]} between columns{numbers}")
    return frame


def layout(file: Path) -> tuple[str, list[str]]:
    """The delimiter of a CSV file, and the names in its first line.

    It is the first one of comma, semicolon, tab and bar by which all rows at the beginning have
    as many fields as the first line, and more than one; a comma if there is none.
    """
    try:
        opened = gzip.open if file.suffix.lower() == ".gz" else open
        with opened(file, "rt", encoding="utf-8-sig", newline="") as stream:
            first = stream.readline(AT_LEAST)
            rest = stream.read(_HEAD)
    except UnicodeDecodeError:
        raise DataError(f"{file} is no UTF-8 text; save it as UTF-8") from None
    whole = len(rest) < _HEAD
    head = first + rest
    rows: dict[str, list[list[str]]] = {}
    for delimiter in DELIMITERS:
        found = [row for row in csv.reader(StringIO(head, newline=""), delimiter=delimiter) if row]
        # The last row may be cut off.
        rows[delimiter] = found if whole or len(found) < 2 else found[:-1]
    for delimiter, found in rows.items():
        widths = {len(row) for row in found}
        if len(widths) == 1 and max(widths) > 1:
            return delimiter, [name.strip() for name in found[0]]
    return ",", [name.strip() for name in rows[","][0]] if rows[","] else []


def mend_decimal_commas(
    frame: Any, columns: Iterable[str], texts: Collection[str] = ()
) -> list[str]:
    """Read columns of text such as 1,5 as numbers, in place; their names.

    Args:
        frame: the table.
        columns: those that may be such.
        texts: of these the ones that stay text, such as 1.5.
    """
    import pandas as pd

    mended = []
    for column in columns:
        if pd.api.types.infer_dtype(frame[column], skipna=True) != "string":
            continue
        there = frame[column].dropna()
        if there.str.fullmatch(DECIMAL_COMMA).all():
            points = frame[column].str.replace(",", ".", regex=False)
            frame[column] = points if column in texts else pd.to_numeric(points)
            if column not in texts or there.str.contains(",", regex=False).any():
                mended.append(str(column))
    return mended


def has_row_numbers(frame: Any) -> bool:
    """Whether the first column has no name and a different whole number in every row."""
    column = frame[frame.columns[0]]
    return frame.columns[0] == UNNAMED and column.dtype.kind in "iu" and bool(column.is_unique)
