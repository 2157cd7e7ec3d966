"""Categories of a table's column: what they are called, and in which order they come."""

from collections.abc import Iterable
from typing import Any

import numpy as np


def name_of(value: object) -> str:
    """A cell as the name of a category: whole numbers without a point, so that 1, 1.0 and `"1"` are
    one, and text without the blanks around it.
    """
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value).strip()


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
