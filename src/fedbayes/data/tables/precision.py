"""What quantities lose as they become float32."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fedbayes.data.dataset import Array
from fedbayes.data.tables.cells import as_numbers, dates
from fedbayes.data.tables.columns import Column

MOST = 1e-3
"""Part of a quantity's standard deviation that may be lost in silence."""


def lost(table: Array, names: Sequence[str], where: str) -> list[str]:
    """A note on each column of numbers of which float32 keeps too little.

    Args:
        table: float64 [N, C]; NaN where a cell is empty.
        names: of the columns.
        where: what the table is, for the notes.
    """
    return [
        note
        for name, values in zip(names, table.T, strict=True)
        for note in _of(values, name, where)
    ]


def lost_of_rows(frame: Any, columns: Sequence[Column], x: Array, where: str) -> list[str]:
    """The same of a user's own table.

    Args:
        frame: the table.
        columns: what was made of it.
        x: its coded columns, float32 [N, C].
        where: what it is, for the notes.
    """
    notes: list[str] = []
    at = 0
    for column in columns:
        values, at = x[:, at], at + len(column.codes)
        if column.kind in ("number", "date") and _suspicious(values):
            notes += _of(_double(frame[column.name], column, where), column.name, where)
    return notes


def _of(values: Array, name: str, where: str) -> Iterator[str]:
    there = values[np.isfinite(values)]
    if not len(there):
        return
    with np.errstate(over="ignore"):
        error, std = float(np.abs(there.astype(np.float32) - there).max()), float(there.std())
    if std > 0 and error > MOST * std:
        yield (
            f"{where}: '{name}' has a rounding error of {error:.2g} in float32, and a standard "
            f"deviation of {std:.2g}. Subtract a constant from it"
        )


def _suspicious(values: Array) -> bool:
    """Whether float32 may have lost much: its steps are long relative to the remaining spread."""
    there = values[np.isfinite(values)]
    if not len(there):
        return False
    step = float(np.spacing(np.abs(there).max()))
    return step > MOST * float(there.std(dtype=np.float64))


def _double(column: Any, wanted: Column, where: str) -> Array:
    """A column before it became float32."""
    if wanted.kind == "date":
        return dates(column, wanted.name, wanted.date_format, where)
    found = as_numbers(column, wanted.name, where, "", texts=True)
    return np.asarray(found.to_numpy(np.float64, na_value=np.nan))
