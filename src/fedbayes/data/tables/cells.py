"""Cells of a table's columns as numbers."""

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from fedbayes.core.categories import TRUTHS, name_of, places, without_blanks
from fedbayes.core.wording import place
from fedbayes.data.dataset import CHUNK, Array
from fedbayes.data.tables.columns import UNSEEN, Column
from fedbayes.errors import CellError

_NUMERIC = ("boolean", "integer", "floating", "mixed-integer-float", "decimal", "empty")
"""Kinds of objects, as pandas calls them, that are numbers."""
ISO_DATE = r"\d{4}-\d{2}-\d{2}([T ]\d|$)"
"""How text of dates begins that are recognized as such."""
_ONCE_NUMBER = re.compile(r"[0-9]+\.0")
"""A whole number as programs write it that keep empty cells in a column of fractions."""


def code(frame: Any, columns: Sequence[Column], where: str) -> Array:
    """A table in its stored form: see `fedbayes.data.tables.columns`. Other columns are ignored;
    `where` is for messages.

    Returns:
        float32 [N, C]; NaN where a cell is empty, `UNSEEN` where it is none of the categories.

    Raises:
        CellError: a cell is not of its column's kind, or infinite; names column and row.
    """
    coded = np.empty((len(frame), sum(len(column.codes) for column in columns)), np.float32)
    at = 0
    for column in columns:
        width = len(column.codes)
        coded[:, at : at + width] = _CODERS[column.kind](frame[column.name], column, where)
        at += width
    return coded


def is_numeric(column: Any) -> bool:
    """Whether a column of a table has only numbers, or no values."""
    import pandas as pd

    kind = pd.api.types.infer_dtype(column, skipna=True)
    return column.dtype.kind in "iufb" or kind in _NUMERIC


def as_numbers(column: Any, name: str, where: str, way: str, *, texts: bool = False) -> Any:
    """A column of a table as numbers; missing values stay missing.

    Args:
        column: The column.
        name: Its name.
        where: Name of the file, for messages.
        way: The way out, for messages.
        texts: Whether text that is a number counts as one, and blanks as an empty cell; and, where
            no cell is a number, text that says true or false, as readers of CSV files have it.

    Raises:
        CellError: A cell is not a number; the message names the first such row.
    """
    import pandas as pd

    if column.dtype.kind in "iufb":
        return column
    if not is_numeric(column):
        if texts and hasattr(column.dropna(), "str"):
            column = without_blanks(column)
            if not _has_numbers(column):
                column = _with_truths(column, name, where)
            try:
                return pd.to_numeric(column)
            except (TypeError, ValueError):
                pass
        raise no_number(column, name, where, way)
    return pd.to_numeric(column)


def no_number(column: Any, name: str, where: str, way: str) -> CellError:
    """The error for a column with cells that are not numbers, as for `as_numbers`."""
    import pandas as pd

    wrong = there = column.notna().to_numpy(bool)
    with suppress(TypeError):  # of lists and the like
        found = there & pd.to_numeric(column, errors="coerce").isna().to_numpy(bool)
        wrong = found if found.any() else there
    row = int(wrong.argmax())
    file, number, span = place(where, row)
    count = int(wrong[span].sum())
    cells = "1 cell that is not a number" if count == 1 else f"{count:,} cells that are not numbers"
    first = "" if count == 1 else "first "
    return CellError(
        f"{file}: column '{name}' has {cells} ({first}{cell(column, row)} in row {number}). {way}",
        name,
        row,
    )


def cell(column: Any, row: int) -> str:
    """A cell as text of a message."""
    value = column.iloc[row]
    if np.isscalar(value) or hasattr(value, "year"):
        return f"'{str(value)[:40]}'"
    return "several values"


def values(column: Any, name: str, where: str) -> tuple[Array, list[str]]:
    """A column as indices [N], -1 where a cell is empty or blank, into its distinct values as text.

    Whole numbers are written without a point, so that 1 and 1.0 are one value.

    Raises:
        CellError: A cell is a list or the like; names the row.
    """
    index, distinct = _factorized(column, name, where)
    texts = [name_of(value) for value in distinct]
    names = list(dict.fromkeys(text for text in texts if text))
    place = {text: k for k, text in enumerate(names)} | {"": -1}
    table = np.array([*(place[text] for text in texts), -1], np.int64)
    return table[index], names


def _factorized(column: Any, name: str, where: str) -> tuple[Array, list[object]]:
    """A column as indices [N], -1 where a cell is empty, into its distinct values."""
    import pandas as pd

    try:
        index, distinct = pd.factorize(column)
    except TypeError:  # lists and the like have no hash
        there = column.notna().to_numpy(bool)
        kinds = [not np.isscalar(value) and not hasattr(value, "year") for value in column]
        row = int((there & np.array(kinds)).argmax())
        file, number, _ = place(where, row)
        raise CellError(
            f"{file}: column '{name}' has a cell with several values in row {number}. Leave "
            f"it out with data.drop={name}",
            name,
            row,
        ) from None
    return np.asarray(index), np.asarray(distinct, object).tolist()


def _numbers(column: Any, wanted: Column, where: str) -> Array:
    way = "Correct it; leave the cell empty if the value is missing"
    found = as_numbers(column, wanted.name, where, way, texts=True)
    with np.errstate(over="ignore"):
        numbers = np.asarray(found.to_numpy(np.float32, na_value=np.nan))
    infinite = np.isinf(numbers)
    if infinite.any():
        row = int(infinite.argmax())
        file, number, span = place(where, row)
        raise CellError(
            f"{file}: column '{wanted.name}' is infinite, or too large for float32, in row "
            f"{number} ({int(infinite[span].sum()):,} such rows). Replace it, or leave the cell "
            "empty",
            wanted.name,
            row,
        )
    return numbers.reshape(-1, 1)


def _truths(column: Any, wanted: Column, where: str) -> Array:
    """Numbers, or true and false as text, as in a CSV file."""
    if column.dtype.kind not in "iufb" and not is_numeric(column):
        column = _with_truths(column, wanted.name, where)
    return _numbers(column, wanted, where)


def _with_truths(column: Any, name: str, where: str) -> Any:
    """A column in which text that says true or false is a truth value."""
    import pandas as pd

    index, distinct = _factorized(column, name, where)
    told = [TRUTHS.get(v.strip().lower(), v) if isinstance(v, str) else v for v in distinct]
    return pd.Series(np.array([*told, None], object)[index], index=column.index)


def _has_numbers(column: Any) -> bool:
    """Whether some cell of a column is a number, and no truth value."""
    import pandas as pd

    others = column[~column.map(lambda value: isinstance(value, bool | np.bool_)).astype(bool)]
    try:
        return bool(pd.to_numeric(others, errors="coerce").notna().any())
    except TypeError:  # lists and the like
        return True


def _categories(column: Any, wanted: Column, where: str) -> Array:
    index, names = values(column, wanted.name, where)
    table = [UNSEEN if k < 0 else k for k in places(names, wanted.categories)]
    return np.array([*table, np.nan], np.float32)[index].reshape(-1, 1)


def _dates(column: Any, wanted: Column, where: str) -> Array:
    """Days since 1970 in UTC."""
    return dates(column, wanted.name, wanted.date_format, where).reshape(-1, 1)


def dates(column: Any, name: str, date_format: str, where: str) -> Array:
    """Dates as days since 1970 in UTC, float64 [N], with NaN where a cell is empty.

    Raises:
        CellError: A cell is no date, or not written so; names the row.
    """
    import pandas as pd

    if column.dtype.kind == "M":
        return _days(pd.to_datetime(column, utc=True))
    # Numbers as text: a year, or 20200331, and never a time since some day. Each value once.
    index, distinct = _factorized(column, name, where)
    texts = pd.Series([_dated(value) for value in distinct], dtype=object)
    form = date_format or "ISO8601"
    times = pd.to_datetime(texts, utc=True, errors="coerce", format=form)
    if date_format:  # 2020-03-31 has one meaning everywhere
        iso = texts.map(str).str.match(ISO_DATE) & times.isna()
        times[iso] = pd.to_datetime(texts[iso], utc=True, errors="coerce", format="ISO8601")
    found = _days(times)
    bad = np.isnan(found) & (texts != "").to_numpy(bool)
    if date_format:  # 010203 as a number is 10203, which may be read as another day
        numbers = np.array([_is_number(value) for value in distinct], bool)
        bad |= numbers & (times.dt.strftime(date_format) != texts).to_numpy(bool)
    wrong = np.append(bad, False)[index]
    if wrong.any():
        row = int(wrong.argmax())
        file, number, span = place(where, row)
        how = f"written as {date_format}" if date_format else "written as 2020-03-31"
        raise CellError(
            f"{file}: column '{name}' has text that is not a date {how} ({cell(column, row)} in "
            f"row {number}; {int(wrong[span].sum()):,} such rows). Correct it, or set "
            "data.date_format, as in %d.%m.%Y",
            name,
            row,
        )
    return np.append(found, np.nan)[index]


def _days(times: Any) -> Array:
    """Times in UTC as days since 1970, float64, NaN where there is none."""
    import pandas as pd

    days = (times - pd.Timestamp(0, tz="UTC")) / pd.Timedelta(days=1)
    return np.asarray(days.to_numpy(np.float64, na_value=np.nan))


def _dated(value: object) -> object:
    """A date as it is, all else as text, without the .0 of whole numbers next to empty cells."""
    if hasattr(value, "year"):
        return value
    return name_of(value).removesuffix(".0") if _is_number(value) else name_of(value)


def _is_number(value: object) -> bool:
    """Whether a cell is a number, or text of one that was: 20200331.0."""
    if isinstance(value, str):
        return _ONCE_NUMBER.fullmatch(value.strip()) is not None
    return not hasattr(value, "year")


def _hashed(column: Any, wanted: Column, where: str) -> Array:
    """Words hashed into so many numbers with signs, rows of length 1 (Weinberger et al. 2009)."""
    from sklearn.feature_extraction.text import HashingVectorizer

    index, names = values(column, wanted.name, where)
    found = np.full((len(index), wanted.width), np.nan, np.float32)
    if not names:
        return found
    hashing = HashingVectorizer(n_features=wanted.width, dtype=np.float32)
    hashed = hashing.transform(names)
    for start in range(0, len(index), CHUNK):
        part = index[start : start + CHUNK]
        there = np.flatnonzero(part >= 0)
        found[start + there] = hashed[part[there]].toarray()
    return found


_CODERS = {
    "number": _numbers,
    "boolean": _truths,
    "date": _dates,
    "category": _categories,
    "text": _hashed,
}
"""Columns as float32 [N, width], by their kind."""
