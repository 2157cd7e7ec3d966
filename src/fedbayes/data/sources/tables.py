"""The user's own tables: CSV and Parquet files as columns of numbers."""

import csv
import gzip
import warnings
from collections import Counter
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from fedbayes.data.dataset import Array
from fedbayes.data.sources.files import reading
from fedbayes.data.wording import listed
from fedbayes.errors import DataError

DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_HEAD = 1 << 16
_DECIMAL_COMMA = r"\s*[+-]?(\d+|\d*,\d+)([eE][+-]?\d+)?\s*"
_NUMERIC = ("boolean", "integer", "floating", "mixed-integer-float", "decimal", "empty")
"""Kinds of objects, as pandas calls them, that are numbers."""
UNNAMED = "Unnamed: 0"
"""What pandas calls a first column without a name."""


def read_tables(files: dict[str, list[Path]], notes: list[str]) -> tuple[Any, int]:
    """The rows of all files as one frame, and how many of them are of the training part.

    Args:
        files: CSV or Parquet files by part.
        notes: Takes up what a user should know.

    Raises:
        DataError: A file is damaged or empty, or lacks a column that the first one has.
    """
    import pandas as pd

    first = files["train"][0]
    frames: list[Any] = []
    trained = 0
    for part, paths in files.items():
        for file in paths:
            frame = _read_table(file, notes)
            columns = frames[0].columns if frames else frame.columns
            absent = [column for column in columns if column not in frame.columns]
            if absent:
                raise DataError(f"{file} has no column '{absent[0]}', which {first} has")
            extra = [column for column in frame.columns if column not in columns]
            if extra:
                notes.append(f"{file}: {listed(extra)} left out, since {first} has no such column")
            frames.append(frame[columns])
            trained += len(frame) if part == "train" else 0
    return pd.concat(frames, ignore_index=True), trained


def _read_table(file: Path, notes: list[str]) -> Any:
    import pandas as pd

    with reading(file):
        table = file.suffix.lower() == ".parquet"
        frame = pd.read_parquet(file) if table else _read_csv(file, notes)
        frame.columns = pd.Index([str(column).strip() for column in frame.columns])
    if frame.empty:
        raise DataError(f"{file} has no rows")
    return frame


def _read_csv(file: Path, notes: list[str]) -> Any:
    import pandas as pd

    delimiter, names = layout(file)
    if not any(names):
        raise DataError(f"{file} is empty: its first line must name the columns")
    twice = [name for name, count in Counter(filter(None, names)).items() if count > 1]
    if twice:
        raise DataError(f"{file} has two columns '{twice[0]}'; give each column a name of its own")
    try:
        with warnings.catch_warnings(action="error", category=pd.errors.ParserWarning):
            # All at once, since a column read in pieces may come as numbers here, as text there.
            frame = pd.read_csv(
                file, sep=delimiter, index_col=False, low_memory=False, encoding="utf-8-sig"
            )
    except pd.errors.ParserWarning:
        raise DataError(
            f"{file} has more values in a row than its first line has names; name every column"
        ) from None
    commas = [] if delimiter == "," else mend_decimal_commas(frame)
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
            first = stream.readline()
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


def mend_decimal_commas(frame: Any) -> list[str]:
    """Read columns of text such as 1,5 as numbers, in place; their names."""
    import pandas as pd

    mended = []
    for column in frame.columns:
        if pd.api.types.infer_dtype(frame[column], skipna=True) != "string":
            continue
        if frame[column].dropna().str.fullmatch(_DECIMAL_COMMA).all():
            frame[column] = pd.to_numeric(frame[column].str.replace(",", ".", regex=False))
            mended.append(str(column))
    return mended


def numbers(frame: Any, features: tuple[str, ...], where: str, notes: list[str]) -> Array:
    """The feature columns as float32 [N, D], missing values as NaN.

    Args:
        frame: The table.
        features: Names of the columns to take, in this order.
        where: Name of the file, for messages.
        notes: Takes up what a user should know.

    Raises:
        DataError: There are no such columns, or one holds what is no number.
    """
    if not features:
        raise DataError(f"{where} has no columns beside label, group, split and those to drop")
    chosen = frame[list(features)]
    way = "encode it as numbers, or leave it out with drop"
    chosen = chosen.assign(
        **{name: as_numbers(chosen[name], name, where, way) for name in features}
    )
    empty = chosen.columns[chosen.isna().all()].tolist()
    if empty:
        notes.append(
            f"{where}: {listed(empty)} {'has' if len(empty) == 1 else 'have'} no value in any row "
            "and can tell a model nothing; leave such columns out with drop"
        )
    return np.asarray(chosen.to_numpy(np.float32, na_value=np.nan))


def is_numeric(column: Any) -> bool:
    """Whether a column of a table holds numbers alone, or nothing."""
    import pandas as pd

    kind = pd.api.types.infer_dtype(column, skipna=True)
    return column.dtype.kind in "iufb" or kind in _NUMERIC


def as_numbers(column: Any, name: str, where: str, way: str) -> Any:
    """A column of a table as numbers, missing values as they are.

    Args:
        column: The column.
        name: Its name.
        where: Name of the file, for messages.
        way: The way out, for messages.

    Raises:
        DataError: It holds what is no number; the message names the first such row.
    """
    import pandas as pd

    if column.dtype.kind in "iufb":
        return column
    if not is_numeric(column):
        raise DataError(f"{_no_number(column, name, where)}; {way}")
    return pd.to_numeric(column)


def _no_number(column: Any, name: str, where: str) -> str:
    """What is wrong with a column that holds something else than numbers."""
    import pandas as pd

    there = column.dropna()
    try:
        wrong = there[pd.to_numeric(there, errors="coerce").isna()]
    except TypeError:
        wrong = there
    row = (wrong if len(wrong) else there).index[0]
    cell = column[row]
    cell = (
        f"'{str(cell)[:40]}'" if np.isscalar(cell) or hasattr(cell, "year") else "no single value"
    )
    return (
        f"{where}: column '{name}' holds what is no number ({cell} in row {row + 1:,}, of "
        f"{len(wrong) or len(there):,} such rows)"
    )


def has_row_numbers(frame: Any) -> bool:
    """Whether the first column has no name and a different whole number in every row."""
    column = frame[frame.columns[0]]
    return frame.columns[0] == UNNAMED and column.dtype.kind in "iu" and bool(column.is_unique)
