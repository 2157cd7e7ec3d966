"""Categories of a table's column: what they are called, and in which order they come."""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

TRUTHS = {"true": True, "false": False}
"""What text says that is a truth value, in small letters."""

_NUMBER = re.compile(r"[+-]?(?!0[0-9])([0-9]+\.?[0-9]*|\.[0-9]+)")
"""A number as tables have it: neither a code with leading zeros nor one such as 1E5."""

_DATE = re.compile(
    r"(\d{4}([-/.])\d{1,2}\2\d{1,2}|\d{1,2}([-/.])\d{1,2}\3(\d{4}|\d{2}))"
    r"([T ]+\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?( ?([+-]\d{2}:?\d{2}|Z))?)?"
)


def normal(text: object) -> str:
    """A name as text in Unicode's form NFC, in which `ü` is always one character."""
    return unicodedata.normalize("NFC", str(text))


def are_dates(names: Iterable[str]) -> bool:
    """Whether all texts are written as dates are, as in 2020-12-31 or 31.12.2020 10:15."""
    names = list(names)
    return bool(names) and all(_DATE.fullmatch(name.strip()) for name in names)


def name_of(value: object) -> str:
    """A cell as the name of a category: whole numbers without a point, so that 1, 1.0 and `"1"` are
    one, and text in Unicode's form NFC without the blanks around it.
    """
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return normal(value).strip()


def truth_as_number(name: str) -> str:
    """The name of a truth value as 1 or 0; others as they are."""
    truth = TRUTHS.get(name.lower())
    return name if truth is None else str(int(truth))


def alike(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Names that differ in upper and lower case alone, each group in rising order."""
    found = defaultdict(set)
    for name in names:
        found[name.casefold()].add(name)
    return [tuple(sorted(group)) for group in found.values() if len(group) > 1]


def as_if_read(text: str) -> str:
    """Text of a number or truth value as one that was read is called; other text as it is."""
    if (truth := TRUTHS.get(text.lower())) is not None:
        return name_of(truth)
    try:
        return str(int(text))
    except ValueError:
        pass
    try:
        return name_of(float(text))
    except (ValueError, OverflowError):
        return text


def codes(column: Any) -> Any:
    """A column of a file's cells as categories that do not depend on its other cells.

    1.0 and 1.50 are 1 and 1.5, as for `name_of`; 01 is a code, and stays as it is. A column of
    truth values alone is one of these, however they are written.
    """
    texts = {value: name_of(value) for value in column.dropna().unique().tolist()}
    if texts and all(text.lower() in TRUTHS for text in texts.values()):
        return column.map({v: TRUTHS[text.lower()] for v, text in texts.items()}).astype(object)
    names = {v: as_if_read(t) if _NUMBER.fullmatch(t) else t for v, t in texts.items()}
    return column.map(names).astype(object)


def identifiers(column: Any) -> Any:
    """A column of a file's cells as names: numbers if all are, unless one is a code such as 01, and
    truth values if all are.
    """
    import pandas as pd

    column = column.infer_objects()
    texts = [value.strip() for value in column.dropna().unique() if isinstance(value, str)]
    if not texts or any(re.match(r"[+-]?0[0-9]", text) for text in texts):
        return column
    if all(text.lower() in TRUTHS for text in texts):
        return codes(column)
    try:
        return pd.to_numeric(without_blanks(column))
    except (TypeError, ValueError):
        return column


def places(names: Sequence[str], categories: Sequence[str]) -> list[int]:
    """The place of each name among the categories, -1 where it is none of them.

    One file may hold as text what another has as numbers or truth values: `01` and 1, or `true` and
    True. Such are one, unless the categories tell them apart.
    """
    exact = {normal(category): place for place, category in enumerate(categories)}
    read: dict[str, int] = {}
    for place, category in enumerate(categories):
        name = as_if_read(category)
        read[name] = -1 if name in read else place
    return [
        exact[name] if name in exact else exact.get(as_if_read(name), read.get(name, -1))
        for name in map(normal, names)
    ]


def spelled_apart(tables: Mapping[str, Iterable[str]]) -> tuple[tuple[str, str], ...]:
    """Two tables, each with a category of it, that write one number or truth value otherwise, as in
    `01` and `1`, where neither has both; nothing if all are written alike.

    Args:
        tables: the categories of each, by its name.
    """
    seen: dict[str, dict[frozenset[str], str]] = defaultdict(dict)  # whose a spelling is first
    for table, categories in tables.items():
        found: dict[str, set[str]] = defaultdict(set)
        for category in categories:
            found[as_if_read(category)].add(category)
        for value, spellings in found.items():
            own = frozenset(spellings)
            for others, other in seen[value].items():
                if not (own <= others or others <= own):
                    return (other, min(others - own)), (table, min(own - others))
            seen[value].setdefault(own, table)
    return ()


def without_blanks(column: Any) -> Any:
    """A column whose cells that are blank text are empty; what is no text stays as it is."""
    if column.dtype.kind in "iufbM":
        return column
    texts = column.astype(object)
    blank = texts.map(lambda value: isinstance(value, str) and not value.strip())
    return texts.mask(blank.astype(bool), None) if blank.any() else column


def ordered(names: Iterable[str]) -> tuple[str, ...]:
    """Categories in rising order: as numbers if all are, else as text."""
    found = sorted(names)
    try:
        return tuple(sorted(found, key=float))
    except ValueError:
        return tuple(found)
