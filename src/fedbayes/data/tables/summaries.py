"""What a client says of its table, so that columns are encoded alike everywhere: counts and sums.

Of a quantity: how many rows have it, its mean and the sum of squared deviations from that, which
add over clients (Chan, Golub and LeVeque 1983). Of a category: which there are, and how many rows
have each. Of every column: its name and kind, and in how many rows it is empty. Of a text no more
than that.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from fedbayes.core.categories import ordered, spelled_apart
from fedbayes.core.files import parse_json, read_text, write_beside
from fedbayes.core.plausible import (
    LARGEST,
    MOST_ROWS,
    PlausibleMoments,
    check_categories,
    check_moments,
    check_rows,
)
from fedbayes.core.targets import Target
from fedbayes.core.wording import describe, listed
from fedbayes.data.dataset import Array, Dataset, Rows, deviations
from fedbayes.data.tables.columns import Column, Kind, described, features_of, plain
from fedbayes.data.tables.encoding import spread
from fedbayes.errors import DataError, told_as

Count = Annotated[int, Field(ge=0, le=2**53)]


class ColumnSummary(BaseModel):
    """Of one column."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    kind: Kind
    missing: Count
    """Rows in which it is empty."""
    categories: dict[str, Count] = {}
    """How many rows have each."""
    mean: FiniteFloat = 0.0
    """Of a quantity, over the rows that have it."""
    squares: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Sum of its squared deviations from the mean."""
    width: int = 1
    date_format: str = ""


Columns = tuple[ColumnSummary, ...]
File = TypeVar("File", bound=BaseModel)


class TableSummary(BaseModel):
    """Of a table. Summaries add: that of two tables is the summary of all their rows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["fedbayes-table-1"] = "fedbayes-table-1"
    rows: Annotated[int, Field(ge=1, le=2**53)]
    columns: tuple[ColumnSummary, ...]
    target: tuple[ColumnSummary, ...] = ()
    """Of what is predicted, if that is real numbers or counts; empty for classes."""

    @model_validator(mode="after")
    def _of_rows(self) -> "TableSummary":
        for column in (*self.columns, *self.target):
            there = self.rows - column.missing
            deviation = math.sqrt(column.squares / max(there, 1))
            if max(abs(column.mean), deviation) > LARGEST:
                raise ValueError(f"values of column '{column.name}' are too large for float32")
            if there < 0 or sum(column.categories.values()) > there:
                raise ValueError(
                    f"counts of column '{column.name}' do not add to {self.rows:,} rows"
                )
        return self

    def write(self, path: Path) -> None:
        """Write it as JSON, whole or not at all."""
        write_beside(path, self.model_dump_json(indent=2).encode() + b"\n")


def summarize(dataset: Dataset, rows: Rows, least: int = 1) -> TableSummary:
    """The summary of some rows of a table.

    Args:
        dataset: the table.
        rows: those that count [n].
        least: rows of which a category is at least; others are left out.

    Raises:
        DataError: it is no table.
    """
    if not dataset.columns:
        raise DataError(f"{dataset.name} is not a table, so it has no columns to summarize")
    count, mean, squares = deviations(dataset.x, rows)
    found, at = [], 0
    for column in dataset.columns:
        categories = {}
        if column.kind == "category":
            codes = np.asarray(dataset.x[rows, at])
            counts = np.bincount(
                codes[~np.isnan(codes)].astype(np.int64), minlength=len(column.categories)
            ).tolist()
            named = zip(column.categories, counts, strict=True)
            categories = {name: many for name, many in named if many >= max(least, 1)}
        found.append(
            ColumnSummary(
                name=column.name,
                kind=column.kind,
                missing=len(rows) - int(count[at]),
                categories=categories,
                mean=float(mean[at]) if column.measured else 0.0,
                squares=float(squares[at]) if column.measured else 0.0,
                width=column.width,
                date_format=column.date_format,
            )
        )
        at += len(column.codes)
    return TableSummary(rows=len(rows), columns=tuple(found), target=_of_target(dataset, rows))


def _of_target(dataset: Dataset, rows: Rows) -> tuple[ColumnSummary, ...]:
    if dataset.target.kind not in ("real", "count"):
        return ()
    _, mean, squares = deviations(dataset.y, rows)
    found = zip(dataset.target.names, mean.tolist(), squares.tolist(), strict=True)
    return tuple(
        ColumnSummary(name=name, kind="number", missing=0, mean=center, squares=around)
        for name, center, around in found
    )


def read_as(kind: type[File], path: Path, wrong: str) -> File:
    """What a client's JSON file holds, of this kind; `wrong` is the message on one that does not.

    Raises:
        DataError: there is no such file, or it holds something else.
    """
    unread = told_as(DataError, f"cannot read {path}", OSError)
    with unread, told_as(DataError, f"{path} {wrong}", ValueError):
        found = parse_json(read_text(path))
        if not isinstance(found, dict):
            raise ValueError("it is not a JSON object")
        return kind.model_validate(found)


def read_summary(path: Path) -> TableSummary:
    """Read a summary that a client sent.

    Raises:
        DataError: there is no such file, it holds no summary, or one that no rows have.
    """
    found = read_as(TableSummary, path, "is not a summary of a table")
    check_rows({str(path): found.rows})
    for column in found.columns:
        check_categories(column.categories, column.name, str(path))
    return found


def check_summaries(
    several: Sequence[TableSummary], names: Sequence[str], most: float = MOST_ROWS
) -> None:
    """See that no client's summary decides the encoding, or raise a DataError that names it."""
    check_rows({name: one.rows for name, one in zip(names, several, strict=True)}, most)
    for part in ("columns", "target"):
        first: Columns = getattr(several[0], part)
        measured = [column.name for column in first if column.kind not in ("category", "text")]
        found = {}
        for name, one in zip(names, several, strict=True):
            place = {column.name: column for column in getattr(one, part)}
            rows = [(one.rows - (c := place[n]).missing, c.mean, c.squares) for n in measured]
            found[name] = PlausibleMoments(*np.array(rows, np.float64).reshape(-1, 3).T)
        check_moments(found, measured)
    for column in several[0].columns:
        counts: Counter[str] = Counter()
        for one in several:
            counts += Counter(next(c for c in one.columns if c.name == column.name).categories)
        check_categories(counts, column.name, f"{listed(names)} together")


def add_summaries(several: Sequence[TableSummary], names: Sequence[str]) -> TableSummary:
    """The summary of the rows of all, one at least; `names` say where each is from, for messages.

    Raises:
        DataError: one is of other columns, or of other kinds, and names both; or one is of more
            rows than it can be.
    """
    check_rows({name: one.rows for name, one in zip(names, several, strict=True)})
    first, *others = several
    for other, name in zip(others, names[1:], strict=True):
        _compare(first.columns, other.columns, names[0], name)
        _compare(first.target, other.target, names[0], name)
    _refuse_spelled_apart(dict(zip(names, several, strict=True)))
    for other in others:
        columns, target = (
            tuple(_added(*pair, first.rows, other.rows) for pair in _paired(here, there))
            for here, there in ((first.columns, other.columns), (first.target, other.target))
        )
        first = TableSummary(rows=first.rows + other.rows, columns=columns, target=target)
    return first


def _paired(first: Columns, other: Columns) -> list[tuple[ColumnSummary, ColumnSummary]]:
    place = {column.name: column for column in other}
    return [(column, place[column.name]) for column in first]


def _compare(first: Columns, other: Columns, one: str, two: str) -> None:
    names = [{column.name for column in columns} for columns in (first, other)]
    for lacking, has, more in ((two, one, names[0] - names[1]), (one, two, names[1] - names[0])):
        if more:
            raise DataError(
                f"{lacking} has no column '{min(more)}', which {has} has. Give all clients the "
                "same columns, with data.features or data.drop"
            )
    for here, there in _paired(first, other):
        kinds = [column.kind.replace("boolean", "number") for column in (here, there)]
        if kinds[0] != kinds[1]:
            raise DataError(
                f"{two} has column '{here.name}' as {there.kind}, and {one} as {here.kind}. List "
                "it in data.numeric, data.categorical, data.dates or data.text for all clients; "
                "fedbayes data check then lists the rows that do not fit"
            )
        if here.width != there.width:
            raise DataError(
                f"{two} hashes column '{here.name}' into {there.width} numbers, and {one} into "
                f"{here.width}. Set the same data.text_width for all clients"
            )


def _refuse_spelled_apart(several: Mapping[str, TableSummary]) -> None:
    """See that a category is written alike by all, whose columns are the same."""
    found: dict[str, dict[str, Collection[str]]] = defaultdict(dict)
    for name, summary in several.items():
        for column in summary.columns:
            found[column.name][name] = column.categories
    for column_name, categories in found.items():
        if apart := spelled_apart(categories):
            (one, here), (two, there) = apart
            raise DataError(
                f"{one} has the category {here!r} of column '{column_name}', which in {two} is "
                f"{there!r}. Write it the same way at all clients, and list the column in "
                "data.categorical"
            )


def _added(one: ColumnSummary, two: ColumnSummary, rows: int, more: int) -> ColumnSummary:
    """Of the rows of both, of which there are so many."""
    first, second = rows - one.missing, more - two.missing
    apart = two.mean - one.mean
    share = second / max(first + second, 1)
    return one.model_copy(
        update={
            "missing": one.missing + two.missing,
            "categories": dict(Counter(one.categories) + Counter(two.categories)),
            "mean": one.mean + apart * share,
            "squares": one.squares + two.squares + apart * apart * first * share,
        }
    )


def fit_summary(
    summary: TableSummary, dataset: Dataset, indicate: bool, where: str
) -> tuple[tuple[Column, ...], tuple[Array, Array]]:
    """How columns are encoded by a summary instead of rows, with mean and deviation.

    Args:
        summary: of the clients' rows.
        dataset: a table with the same columns.
        indicate: whether empty cells of quantities and texts have a feature of their own.
        where: what the summary is of, for messages.

    Returns:
        The columns, none if they are plain numbers; mean and standard deviation of each feature.

    Raises:
        DataError: it is of other columns or kinds.
    """
    place = {column.name: column for column in summary.columns}
    wanted = [Column(c.name, c.kind, width=c.width) for c in summary.columns]
    kinds = [
        {(c.name, c.kind.replace("boolean", "number"), c.width) for c in columns}
        for columns in (wanted, dataset.columns)
    ]
    if kinds[0] != kinds[1]:
        raise DataError(
            f"{where} describe the columns {described(wanted)}, and {dataset.name} has "
            f"{described(dataset.columns)}. Choose the same columns with data.features, drop, "
            "numeric, categorical, dates and text"
        )
    columns = tuple(
        replace(
            column,
            categories=ordered(n for n, k in place[column.name].categories.items() if k),
            gaps=place[column.name].missing > 0 and (indicate or column.kind == "category"),
        )
        for column in dataset.columns
    )
    mean: list[float] = []
    std: list[float] = []
    for column in columns:
        own = place[column.name]
        mean += [own.mean / dataset.scale] * len(column.codes)
        std += [_deviation(own, summary.rows, dataset.scale) / dataset.scale] * len(column.codes)
    features_of(columns)
    numbers = (spread(np.array(mean), columns, 0.0), spread(np.array(std), columns, 1.0))
    return (() if plain(columns) else columns), numbers


def _deviation(column: ColumnSummary, rows: int, constant: float) -> float:
    """Standard deviation of a quantity; of one that is always the same what is given."""
    found = float(np.sqrt(column.squares / max(rows - column.missing, 1)))
    return constant if found <= 1e-7 * abs(column.mean) else found


def fit_target(summary: TableSummary, target: Target, where: str) -> Target:
    """What is predicted, with center and scale by a summary instead of rows; `where` is for
    messages.

    Raises:
        DataError: the summary is of another target, or it is the same in all rows.
    """
    names = target.names if target.kind in ("real", "count") else ()
    place = {column.name: column for column in summary.target}
    if set(names) != set(place):
        raise DataError(
            f"{where} describe the target {listed(place) or 'of classes'}, and this table has "
            f"{describe(target)}. Set the same data.label and task.likelihood"
        )
    center = tuple(place[name].mean for name in names)
    for name in names:
        if not place[name].squares:
            raise DataError(
                f"{where}: the target '{name}' is {place[name].mean:g} in all rows, so there is "
                "nothing to learn. Set data.label to another column"
            )
    if target.kind == "count":
        return replace(target, center=center if all(center) else ())
    if target.kind != "real":
        return target
    scale = tuple(_deviation(place[name], summary.rows, 1.0) for name in names)
    return replace(target, center=center, scale=scale)
