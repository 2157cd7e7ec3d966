"""What sums of others' rows can be: nobody can check them, so they are believed within bounds.

A sum is of so many rows, and finite in float32, as networks compute. Of three clients or more none
may move by itself what all rows are standardized by further than honest tables do.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedbayes.errors import DataError, quoted

LARGEST = float(np.finfo(np.float32).max)
"""Largest number that is finite in float32."""
MOST_ROWS = 2**31 - 1
"""Rows that one client can have."""
MOST_CATEGORIES = 1000
"""Categories of a column."""
LONGEST_CATEGORY = 1000
"""Characters of the name of one."""
MOST_TIMES_ROWS = 1000
"""Rows of one client, as a multiple of the median client's."""
MOST_SHIFT = 3.0
"""How far one client may move the mean of all rows, in standard deviations of the others' rows."""
MOST_SPREAD = 10.0
"""By what factor one client may widen the standard deviation of all rows."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class PlausibleMoments:
    """Of the columns of a table."""

    count: Array
    """Rows that have a value [D]."""
    mean: Array
    """Of these rows [D]."""
    squares: Array
    """Sum of their squared deviations from the mean [D]."""

    def __add__(self, other: "PlausibleMoments") -> "PlausibleMoments":
        """Those of the rows of both (Chan, Golub and LeVeque 1983)."""
        count, apart = self.count + other.count, other.mean - self.mean
        share = other.count / np.maximum(count, 1)
        squares = self.squares + other.squares + apart * apart * self.count * share
        return PlausibleMoments(count, self.mean + apart * share, squares)

    @property
    def flags(self) -> NDArray[np.bool_]:
        """Which columns can be of rows that are 0 or 1 alone [D]: their mean says all of them."""
        spread = self.count * self.mean * (1 - self.mean)
        return np.asarray(np.abs(self.squares - spread) <= 1e-5 * self.count)

    @property
    def std(self) -> Array:
        """Standard deviation of each column [D]."""
        return np.asarray(np.sqrt(self.squares / np.maximum(self.count, 1)))


def check_categories(counts: Mapping[str, int], column: str, where: str) -> None:
    """See that categories are not too many, nor their names too long, or raise a DataError."""
    if len(counts) > MOST_CATEGORIES:
        raise DataError(
            f"{where}: the column '{column}' has {len(counts):,} categories, and the limit is "
            f"{MOST_CATEGORIES:,}. Combine rare categories, or drop the column"
        )
    longest = max(counts, key=len, default="")
    if len(longest) > LONGEST_CATEGORY:
        raise DataError(
            f"{where}: a category of the column '{column}' has {len(longest):,} characters: "
            f"{quoted(longest)}. The limit is {LONGEST_CATEGORY:,}"
        )


def check_rows(rows: Mapping[str, int], most: float = MOST_ROWS) -> None:
    """See that clients have plausible numbers of rows, or raise a DataError that names one."""
    limit = "(aggregation.max_weight)" if most < MOST_ROWS else "of a client"
    middle = float(np.median(list(rows.values())))
    for name, count in rows.items():
        if not 0 <= count <= most:
            raise DataError(f"{name} has {count:,} rows, and the limit is {most:,.0f} {limit}")
        if len(rows) > 2 and count > MOST_TIMES_ROWS * middle > 0:
            raise DataError(
                f"{name} has {count:,} rows, and the median client has {middle:,.0f}; the limit "
                f"is {MOST_TIMES_ROWS:,} times the median. Leave it out, or summarize small "
                "clients' tables together"
            )


def check_moments(clients: Mapping[str, PlausibleMoments], columns: Sequence[str]) -> None:
    """Check that no single client decides the standardization of all rows.

    A client is compared with the rows of all others: it may move the mean by `MOST_SHIFT` of their
    standard deviations, and widen that `MOST_SPREAD`-fold. Of two clients nobody knows which is
    wrong. A column of zeros and ones is not compared, since its mean cannot be far off, nor is one
    that is constant within every other client.

    Args:
        clients: by name.
        columns: names of the columns [D].

    Raises:
        DataError: one does. Names the client and the column.
    """
    if len(clients) < 3 or not len(columns):
        return
    each = list(clients.values())
    nothing = PlausibleMoments(*np.zeros((3, len(columns))))
    before, after = [nothing], [nothing]
    for one, other in zip(each[:-1], reversed(each[1:]), strict=True):
        before.append(before[-1] + one)
        after.append(other + after[-1])
    varied = np.array([one.squares > 0 for one in each])
    measured = ~np.all([one.flags for one in each], axis=0)
    worst, said = 1.0, ""
    for at, (name, one) in enumerate(clients.items()):
        others = before[at] + after[-1 - at]
        whole, std = others + one, others.std
        elsewhere = varied.sum(axis=0) > varied[at]
        compared = measured & elsewhere & (std > 0) & (one.count > 0)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            shift = np.where(compared, np.abs(whole.mean - others.mean) / std, 0.0)
            spread = np.where(compared, whole.std / std, 0.0)
        found = np.maximum(shift / MOST_SHIFT, spread / MOST_SPREAD)
        if (place := int(found.argmax())) >= 0 and found[place] > worst:
            worst = float(found[place])
            said = (
                f"{name}: the column '{columns[place]}' has mean {one.mean[place]:g} and standard "
                f"deviation {one.std[place]:g} over {one.count[place]:,.0f} rows, and the other "
                f"clients' {others.mean[place]:g} and {std[place]:g}; it would dominate the "
                "standardization of this column for all clients. Check that its unit is the same "
                "(fedbayes data check lists odd values), drop the column, or leave that client "
                "out"
            )
    if said:
        raise DataError(said)


def check_count(value: float, what: str, where: str) -> None:
    """See that a number of rows is one, or raise a DataError."""
    if not (math.isfinite(value) and 0 <= value <= MOST_ROWS and float(value).is_integer()):
        raise DataError(f"{where}: {what} is {value:g}, which is not a number of rows")
