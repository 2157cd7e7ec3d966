"""What a column of the user's own table is taken for."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedbayes.core.categories import alike, are_dates, ordered
from fedbayes.core.plausible import MOST_CATEGORIES
from fedbayes.core.wording import listed, place, spans
from fedbayes.data.dataset import Array
from fedbayes.data.source_settings import SourceSettings
from fedbayes.data.tables.cells import (
    ISO_DATE,
    as_numbers,
    code,
    dates,
    is_numeric,
    no_number,
    values,
)
from fedbayes.data.tables.columns import Column, Kind
from fedbayes.errors import CellError, DataError

_CORRECT = (
    "Correct it, leave the cell empty if the value is missing, or read the column as another kind"
)
ROWS_OF_CATEGORY = 2
"""Rows that each text has on average, if they are categories without a word."""
FEW = 5
"""So many different texts may be categories, however few rows there are of each."""
_COMMA_NUMBER = re.compile(r"\s*[+-]?\d+,\d+\s*")


@dataclass(frozen=True)
class KindGuess:
    """What becomes of a column: how it is encoded, or why it is not."""

    column: Column | None
    gaps: tuple[int, ...]
    """Rows in which its cell is empty, of each file."""
    refused: str = ""
    """Why it cannot be used, and the way out."""
    row: int | None = None
    """The first row because of which it is rejected."""

    @property
    def missing(self) -> int:
        """Rows in which its cell is empty."""
        return sum(self.gaps)


def judge(column: Any, name: str, settings: SourceSettings, where: str) -> KindGuess:
    """Decide the kind of a column of a table, by the settings or by its cells; `where` is for
    messages.

    Numbers, booleans and dates are what they are. Text is of dates if all of it is written as in
    ISO 8601, of categories if it has few different values, and otherwise not usable: free text and
    identifiers are taken if they are named in `text` or `categorical`, and so is what is partly
    numbers.
    """
    named: dict[Kind, Sequence[str]] = {
        "number": settings.numeric,
        "date": settings.dates,
        "category": settings.categorical,
        "text": settings.text,
    }
    kind = next((kind for kind, names in named.items() if name in names), None)
    try:
        found = _as_named(column, name, kind, settings, where) if kind else None
        found = found or _by_cells(column, name, settings, where)
        if found.kind == "number":
            code(column.to_frame(name), [found], where)  # an infinite one has no code
    except DataError as error:
        row = error.row if isinstance(error, CellError) else None
        return KindGuess(None, (int(column.isna().sum()),), str(error), row)
    missing = _missing(column, name, where)
    empty = tuple(int(np.count_nonzero(missing[span])) for _, span in spans(where, len(missing)))
    indicated = settings.tells_missing and any(empty)
    gaps = indicated or (found.kind == "category" and any(empty))
    return KindGuess(
        Column(found.name, found.kind, found.categories, gaps, found.width, found.date_format),
        empty,
    )


def _missing(column: Any, name: str, where: str) -> Array:
    """Whether each cell is empty or blank [N]."""
    if column.dtype.kind in "iufbM":
        return np.asarray(column.isna())
    index, _ = values(column, name, where)
    return index < 0


def _as_named(
    column: Any, name: str, kind: Kind, settings: SourceSettings, where: str
) -> Column | None:
    """A column of the kind that a setting says."""
    if kind == "category":
        _, names = values(column, name, where)
        return _category(name, names, where, MOST_CATEGORIES)
    if kind == "text":
        return Column(name, "text", width=settings.text_width)
    if kind == "date":
        date_format = settings.date_format or ""
        if date_format and _only_iso(column, name, date_format, where):
            date_format = ""
        dates(column, name, date_format, where)
        return Column(name, "date", date_format=date_format)
    as_numbers(column, name, where, _CORRECT, texts=True)
    return Column(name)


def _by_cells(column: Any, name: str, settings: SourceSettings, where: str) -> Column:
    import pandas as pd

    dtype = column.dtype.kind
    kind = pd.api.types.infer_dtype(column, skipna=True)
    if dtype == "b" or kind == "boolean":
        return Column(name, "boolean")
    if is_numeric(column):
        return Column(name)
    if dtype == "M" or kind in ("datetime", "datetime64", "date"):
        return Column(name, "date")
    if kind == "bytes":
        raise DataError(
            f"{where}: column '{name}' contains bytes. Leave it out with data.drop={name}"
        )
    _, names = values(column, name, where)
    if isinstance(column.dtype, pd.CategoricalDtype):  # the file itself says so
        return _category(name, names, where, MOST_CATEGORIES)
    numbers = pd.to_numeric(pd.Series(names, dtype=object), errors="coerce").notna()
    if len(names) and numbers.any() and not (numbers.all() and kind == "string"):
        odd = next((n for n, one in zip(names, numbers, strict=True) if not one), names[0])
        raise no_number(
            column,
            name,
            where,
            f"Correct it; or set data.na_values={odd[:40]} if the value is missing, "
            f"data.categorical={name} if these are categories, or data.drop={name}",
        )
    if {text.casefold() for text in names} == {"train", "test"}:
        raise DataError(
            f"{where}: column '{name}' has the values train and test, as a split has. Set "
            f"data.split={name} or data.drop={name}, or data.categorical={name} if it is a "
            "feature"
        )
    if len(names) and not numbers.any() and _are_dates(names):
        return Column(name, "date")
    if not numbers.any() and are_dates(names):
        raise DataError(
            f"{where}: column '{name}' has dates such as {names[0]!r}. Set data.dates={name} and "
            f"their format: {_date_formats(names)}. Or set data.categorical={name} or "
            f"data.drop={name}"
        )
    rows = int(column.notna().sum())
    if (word := _only_word(names)) and settings.decimal == "auto":
        raise DataError(
            f"{where}: column '{name}' has numbers with decimal commas, such as "
            f"{next(text for text in names if text != word)!r}, and {word!r}, which is not a "
            f"number. Set data.na_values={word} if the value is missing; or "
            f"data.categorical={name} or data.drop={name}"
        )
    return _category(name, names, where, settings.max_categories, rows)


def _only_iso(column: Any, name: str, date_format: str, where: str) -> bool:
    """Whether cells are dates as in 2020-03-31, and none as the date format says."""
    import pandas as pd

    if column.dtype.kind in "iufbM":
        return False
    texts = pd.Series(values(column, name, where)[1], dtype="str")
    if not texts.str.match(ISO_DATE).any():
        return False
    return bool(pd.to_datetime(texts, utc=True, errors="coerce", format=date_format).isna().all())


def _only_word(names: Sequence[str]) -> str:
    """The one text among numbers with decimal commas; empty if there is none or there are more."""
    words = [text for text in names if not _COMMA_NUMBER.fullmatch(text)]
    return words[0] if len(words) == 1 and len(names) > FEW else ""


def _are_dates(names: Sequence[str]) -> bool:
    """Whether all texts are dates as in 2020-03-31, with or without a time."""
    import pandas as pd

    texts = pd.Series(names, dtype="str")
    if not texts.str.match(ISO_DATE).all():
        return False
    try:
        return not np.isnan(dates(texts, "", "", "")).any()
    except DataError:
        return False


def _date_formats(names: Sequence[str]) -> str:
    """How dates are written, in words, by the forms that fit all of them."""
    import pandas as pd

    separator = next(char for char in names[0] if not char.isdigit())
    orders = [separator.join(order) for order in _ORDERS]
    times = ["", " %H:%M", " %H:%M:%S"]
    texts = pd.Series(names, dtype="str").str.strip()
    fitting = [
        form
        for form in (order + time for order in orders for time in times)
        if pd.to_datetime(texts, format=form, errors="coerce").notna().all()
    ]
    return " or ".join(f"data.date_format={form}" for form in fitting or ["%d.%m.%Y"])


_ORDERS = (
    *(("%d", "%m", "%Y"), ("%m", "%d", "%Y"), ("%d", "%m", "%y"), ("%m", "%d", "%y")),
    ("%Y", "%m", "%d"),
)
"""In which order dates have day, month and year."""


def _category(name: str, names: Sequence[str], where: str, most: int, rows: int = 0) -> Column:
    """A column of categories; `rows` to see whether there are enough of each."""
    scarce = rows and len(names) > FEW and len(names) * ROWS_OF_CATEGORY > rows
    if len(names) > most or scarce:
        ways = (
            "Leave it out with data.drop, or hash its words with data.text"
            if most == MOST_CATEGORIES
            else "Leave it out with data.drop, as names and identifiers of patients. Or list it "
            "in data.categorical (categories), data.numeric (numbers stored as text) or "
            "data.text (free text)"
        )
        raise DataError(
            f"{where}: column '{name}' has {len(names):,} different "
            f"texts{f' in {rows:,} rows' if rows else ''}, such as "
            f"{listed(map(repr, names[:3]))}: "
            f"too many for categories. {ways}"
        )
    return Column(name, "category", ordered(names))


def choose_columns(
    frame: Any,
    features: Sequence[str],
    settings: SourceSettings,
    where: str,
    notes: list[str],
    clients: Any = None,
) -> tuple[Column, ...]:
    """The encoding of the columns of a table that are features.

    Args:
        frame: The table.
        features: Names of the columns, in this order.
        settings: How it is read.
        where: Name of the file, for messages.
        notes: Takes up what a user should know.
        clients: The column with the client of each row, if there is one.

    Raises:
        DataError: There are none, or some cannot be used; says why of each.
    """
    if not features:
        raise DataError(f"{where} has no columns besides label, group, split and data.drop")
    verdicts = [judge(frame[name], name, settings, where) for name in features]
    refused = [_whose(verdict, clients, where) for verdict in verdicts if verdict.refused]
    if refused:
        shown = refused[:10]
        more = f"\nand {len(refused) - 10:,} more columns" if len(refused) > 10 else ""
        raise DataError("\n".join(shown) + more)
    columns = tuple(verdict.column for verdict in verdicts if verdict.column is not None)
    empty = [v.column.name for v in verdicts if v.column and v.missing == len(frame)]
    if empty:
        notes.append(
            f"{where}: {listed(empty)} {'has' if len(empty) == 1 else 'have'} no values, so a "
            "model cannot use them. Leave such columns out with data.drop"
        )
    notes += _told(columns, settings, where)
    gaps = {v.column.name: v.gaps for v in verdicts if v.column and v.column.gaps}
    notes += [_empty(gaps, len(frame), where)] if gaps else []
    return columns


def _empty(gaps: dict[str, tuple[int, ...]], rows: int, where: str) -> str:
    """How many cells of which columns are empty in which files: of each, up to three are named."""
    said: list[str] = []
    for k, (file, span) in enumerate(spans(where, rows)):
        size = span.stop - span.start
        names = [name for name, counts in gaps.items() if counts[k]]
        if not names:
            continue
        counts = [gaps[name][k] for name in names]
        parts = [f"all {n:,}" if n == size else f"{n:,} of {size:,}" for n in counts]
        of = [f"{part} of {name}" for part, name in zip(parts, names, strict=True)]
        if not said:
            are = "is" if counts[0] == 1 else "are"
            of[0] = f"{parts[0]} cells of {names[0]} {are} empty"
        said.append(f"{file}: {listed(of, 3)}{' columns' if len(names) > 3 else ''}")
    return (
        f"{listed(said, 3, '; ')}{' files' if len(said) > 3 else ''}. Numbers are replaced by the "
        "mean (data.standardize = 'off': by 0), and a feature marks the gaps (data.missing = "
        "'impute': no feature)"
    )


def _whose(verdict: KindGuess, clients: Any, where: str) -> str:
    """Why a column is rejected, and whose row is the first because of which it is."""
    if verdict.row is None or clients is None:
        return verdict.refused
    row, client = verdict.row, clients.iloc[verdict.row]
    return f"{verdict.refused} (row {place(where, row)[1]} belongs to client '{client}')"


def _told(columns: Sequence[Column], settings: SourceSettings, where: str) -> list[str]:
    """What to say of columns that are no numbers and were not named, and of empty cells."""
    asked = {*settings.categorical, *settings.dates, *settings.text, *settings.numeric}
    found = {
        "categories": [
            f"{column.name} ({len(column.categories)})"
            for column in columns
            if column.kind == "category" and column.name not in asked
        ],
        "dates, in days": [c.name for c in columns if c.kind == "date" and c.name not in asked],
    }
    read = [f"{listed(names)} as {word}" for word, names in found.items() if names]
    told = []
    if read:
        told.append(
            f"{where}: {' and '.join(read)}. Change this with data.numeric, data.categorical, "
            "data.dates, data.text or data.drop"
        )
    told += [
        f"{where}: categories of '{column.name}' differ only in upper and lower case: "
        f"{' and '.join(same)}"
        for column in columns
        for same in alike(column.categories)
    ]
    return told
