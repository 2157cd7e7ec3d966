"""Categories of a table's column: what they are called, and in which order they come."""

from collections.abc import Iterable

import numpy as np


def name_of(value: object) -> str:
    """A cell as the name of a category: whole numbers without a point, so that 1, 1.0 and `"1"` are
    one, and text without the blanks around it.
    """
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value).strip()


def ordered(names: Iterable[str]) -> tuple[str, ...]:
    """Categories in rising order: as numbers if all are, else as text."""
    found = sorted(names)
    try:
        return tuple(sorted(found, key=float))
    except ValueError:
        return tuple(found)
