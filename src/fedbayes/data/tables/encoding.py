"""Coded rows of a table as the rows that a network is given: see `fedbayes.data.tables.columns`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedbayes.core.categories import places
from fedbayes.data.dataset import CHUNK, Array, Rows
from fedbayes.data.tables.columns import UNSEEN, Column, plain


def encode(coded: Array, columns: Sequence[Column]) -> Array:
    """What networks are given of coded rows, before it is standardized.

    Args:
        coded: rows [n, C], by these columns.
        columns: theirs.

    Returns:
        float32 [n, W]: quantities with NaN where a cell is empty, all else without. A category
        that is none of the column's is 0 in all its features.
    """
    if plain(columns):
        return coded
    parts, at = [], 0
    for column in columns:
        span = coded[:, at : at + len(column.codes)]
        at += span.shape[1]
        if column.kind == "category":
            parts.append(span == np.arange(len(column.categories), dtype=np.float32))
        else:
            parts.append(span if column.measured else np.nan_to_num(span))
        if column.gaps:
            parts.append(np.isnan(span[:, :1]))
    return np.concatenate(parts, axis=1, dtype=np.float32)


def recode(coded: Array, have: Sequence[Column], wanted: Sequence[Column]) -> Array:
    """Rows coded by some columns as if they had been by others of the same names and kinds.

    Args:
        coded: rows [n, C] by the columns `have`.
        have: columns with categories of their own.
        wanted: columns with those that count; others become `UNSEEN`.
    """
    if all(one.categories == other.categories for one, other in zip(have, wanted, strict=True)):
        return coded
    coded, at = np.array(coded, np.float32), 0
    for column, target in zip(have, wanted, strict=True):
        if column.kind == "category" and column.categories:
            found = places(column.categories, target.categories)
            table = np.array([UNSEEN if k < 0 else k for k in found], np.float32)
            there = coded[:, at] >= 0
            coded[there, at] = table[coded[there, at].astype(np.int64)]
        at += len(column.codes)
    return coded


def fit(columns: Sequence[Column], coded: Array, rows: Rows) -> tuple[Column, ...]:
    """The columns with the categories and gaps that some rows have: a set and a count of each.

    Args:
        columns: of the whole table; `gaps` says where empty cells are to be told apart.
        coded: the table [N, C].
        rows: those that count [n].
    """
    seen = [np.zeros(len(column.categories), np.int64) for column in columns]
    empty = np.zeros(len(columns), np.int64)
    for start in range(0, len(rows), CHUNK):
        part, at = coded[rows[start : start + CHUNK]], 0
        for index, column in enumerate(columns):
            span = part[:, at]
            at += len(column.codes)
            missing = np.isnan(span)
            empty[index] += missing.sum()
            if column.kind == "category":
                codes = span[~missing].astype(np.int64)
                seen[index] += np.bincount(codes, minlength=len(column.categories))
    return tuple(
        replace(
            column,
            categories=tuple(np.array(column.categories, object)[counts > 0]),
            gaps=column.gaps and bool(missing),
        )
        for column, counts, missing in zip(columns, seen, empty, strict=True)
    )


def spread(values: Array, columns: Sequence[Column], other: float) -> Array:
    """Numbers of coded columns [C] as those of encoded ones [W]: `other` if a feature is not a
    number.
    """
    found, at = [], 0
    for column in columns:
        names = column.features
        own = [float(values[at])] if column.measured else []
        found += own + [other] * (len(names) - len(own))
        at += len(column.codes)
    return np.array(found, np.float32)


@dataclass(frozen=True)
class Unknown:
    """Cells of a column that are as none of the training rows' was."""

    column: Column
    empty: bool
    """Whether they are empty; else of a category that is not among the column's."""
    rows: int
    """How many."""
    first: int
    """The row of the first of them, from 0."""

    def told(self, where: str = "", *, numbered: bool = True) -> str:
        """A message about them, and about the values used instead.

        Args:
            where: what the rows are of.
            numbered: whether rows are in an order that a user knows.
        """
        first = f" (first in row {self.first + 1:,})" if numbered else ""
        rows = f"in {self.rows:,} {'row' if self.rows == 1 else 'rows'}{first}"
        column = f"{where}{': ' if where else ''}column '{self.column.name}'"
        if self.empty and self.column.measured:  # training rows may have been, under "impute"
            return (
                f"{column} is empty {rows}, and the model has no feature for gaps; the mean is "
                "used, 0 without standardization"
            )
        what = "is empty" if self.empty else "has a category"
        return (
            f"{column} {what}, unlike all training rows, {rows}; all features of the column are "
            "set to 0"
        )


def unknown(coded: Array, columns: Sequence[Column]) -> list[Unknown]:
    """Cells that are as none of the training rows' was.

    Args:
        coded: rows [n, C] by these columns.
        columns: as the training rows have them.
    """
    found, at = [], 0
    for column in columns:
        cells = coded[:, at]
        at += len(column.codes)
        kinds = [(True, np.isnan(cells))] if not column.gaps else []
        kinds += [(False, cells == UNSEEN)] if column.kind == "category" else []
        found += [
            Unknown(column, empty, int(odd.sum()), int(odd.argmax()))
            for empty, odd in kinds
            if odd.any()
        ]
    return found
