"""Columns of a table, and the features that a network sees of them.

A table is stored *coded*: a column of numbers as it is, a date as days since 1970, a category as
its place among the categories, a text as so many hashed numbers; NaN where a cell is empty. A
network sees it *encoded*: a category is a feature for each, 0 or 1, and an empty cell has a feature
of its own where the training rows had some.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from fedbayes.core.wording import listed
from fedbayes.errors import DataError

Kind = Literal["number", "boolean", "date", "category", "text"]

UNSEEN = -1.0
"""Code of a category that is not among a column's."""


@dataclass(frozen=True)
class Column:
    """A column of a table and how it is encoded."""

    name: str
    kind: Kind = "number"
    categories: tuple[str, ...] = ()
    """Of a category: its values as text, in the order of their features."""
    gaps: bool = False
    """Whether empty cells have a feature of their own: training rows had some."""
    width: int = 1
    """Of a text: numbers that its words are hashed into."""
    date_format: str = ""
    """Of a date that is text: how it is written, as for `strptime`; ISO 8601 if empty."""

    def __post_init__(self) -> None:
        """See that the parts fit together."""
        if len(set(self.categories)) < len(self.categories) or self.width < 1:
            raise ValueError(
                f"the column '{self.name}' has two categories with the same name, or no width"
            )

    @property
    def measured(self) -> bool:
        """Whether it is a quantity, which is standardized; an empty cell becomes its mean."""
        return self.kind in ("number", "boolean", "date")

    @property
    def codes(self) -> tuple[str, ...]:
        """Names of its coded columns."""
        if self.kind != "text":
            return (self.name,)
        return tuple(f"{self.name}#{index}" for index in range(self.width))

    @property
    def features(self) -> tuple[str, ...]:
        """Names of its encoded columns, as in `age`, `sex=m` and `age (missing)`."""
        names = self.codes
        if self.kind == "category":
            names = tuple(f"{self.name}={category}" for category in self.categories)
        return (*names, f"{self.name} (missing)") if self.gaps else names


def plain(columns: Iterable[Column]) -> bool:
    """Whether the columns are only numbers, which networks see unchanged."""
    return all(column.kind in ("number", "boolean") and not column.gaps for column in columns)


def features_of(columns: Iterable[Column]) -> tuple[str, ...]:
    """Names of all encoded columns. Raises a DataError if two would have the same one."""
    names = tuple(name for column in columns for name in column.features)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"two features would have the name '{twice}'. Rename one of the columns")
    return names


def flags(columns: Iterable[Column]) -> list[str]:
    """Names of the features that are 0 or 1: of categories and of empty cells."""
    found: list[str] = []
    for column in columns:
        names = column.features
        found += names if column.kind == "category" else names[len(column.codes) :]
    return found


def described(columns: Iterable[Column]) -> str:
    """Names of columns, with their kind if it is not a number."""
    return listed(
        f"{column.name} ({column.kind})"
        if column.kind in ("date", "category", "text")
        else column.name
        for column in columns
    )


def reading(columns: Iterable[Column]) -> dict[str, Any]:
    """The settings of `[data]` by which a table is read as these columns, whatever it holds."""
    columns = tuple(columns)

    def named(*kinds: Kind) -> tuple[str, ...]:
        return tuple(column.name for column in columns if column.kind in kinds)

    widths = [column.width for column in columns if column.kind == "text"]
    return {
        "features": tuple(column.name for column in columns),
        "drop": (),
        "numeric": named("number", "boolean"),
        "categorical": named("category"),
        "dates": named("date"),
        "text": named("text"),
        "text_width": max(widths, default=64),
        "date_format": next((c.date_format for c in columns if c.date_format), None),
    }
