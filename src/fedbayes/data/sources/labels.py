"""Labels as targets, and groups as clients."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedbayes.core.categories import alike, normal, places
from fedbayes.core.targets import Target
from fedbayes.core.wording import listed, place, spans
from fedbayes.data.dataset import Array, Rows
from fedbayes.data.sources.files import index_names
from fedbayes.data.tables.cells import as_numbers, is_numeric
from fedbayes.data.tables.precision import lost
from fedbayes.errors import DataError

MOST_CLASSES = 1000
FEW_CLASSES = 20
"""So many different values may be classes, however few rows there are of each."""
NUMBERED_CLASSES = 10
"""So many different numbers are classes without a word, as are digits."""
ROWS_OF_CLASS = 5
"""Rows that each of more values has on average, if they are classes."""

MOST_COUNT = 2**24
"""Largest count: whole numbers above it are not exact in float32."""


def read_target(
    labels: Any,
    classes: tuple[str, ...],
    kinds: Sequence[str],
    where: str,
    notes: list[str],
) -> tuple[Array, Target]:
    """The kind of the labels, and the labels: int64 [N] for classes, else float32 [N, T].

    Where it is left to the labels, one column is of classes if it can be, and else a real
    target; several are labels if they hold 0 and 1 alone, and else a real target.

    Args:
        labels: A table of the columns of labels [N, T].
        classes: Names of all classes, if they are named: then it is classes.
        kinds: Kinds of target of which it is to be one; none: the labels decide.
        where: The file, for messages.
        notes: Takes up what a user should know.

    Raises:
        DataError: A label is missing or is not of this kind; names the row.
    """
    columns = tuple(str(name) for name in labels.columns)
    _refuse_missing(labels, where)
    if kinds and "class" not in kinds and classes:
        raise DataError(
            f"{where}: data.classes lists classes, but task.likelihood needs "
            f"{' or '.join(kinds)}. Leave data.classes out, or choose another task.likelihood"
        )
    if len(columns) == 1 and (not kinds or "class" in kinds):
        found = _as_classes(labels[columns[0]], classes, kinds, where, notes)
        if not isinstance(found, str):
            return found
        if set(kinds) <= {"class"} and (kinds or not is_numeric(labels[columns[0]])):
            raise DataError(found)
    elif classes or set(kinds) == {"class"}:
        raise DataError(
            f"{where}: label lists {len(columns)} columns ({listed(columns)}), but classes need "
            "one. Set data.label to one column, or choose another task.likelihood"
        )
    way = "Encode it as numbers, or set data.label to another column"
    table = np.stack(
        [
            np.asarray(as_numbers(labels[name], name, where, way, texts=True), np.float64)
            for name in columns
        ],
        1,
    )
    natural = "labels" if len(columns) > 1 and bool(np.isin(table, (0, 1)).all()) else "real"
    kind = natural if not kinds or natural in kinds else next(k for k in kinds if k != "class")
    if not kinds:
        if natural == "labels" and (table.sum(1) == 1).all():
            raise DataError(
                f"{where}: exactly one of {listed(columns)} is 1 in every row, as for classes. "
                "Give one column with the class, or set task.likelihood to multilabel"
            )
        notes.append(_choice(natural, table, columns, where))
    return _READERS[kind](table, columns, where, notes)


def _refuse_missing(labels: Any, where: str) -> None:
    missing = labels.isna().to_numpy().any(1)
    if missing.any():
        found = [
            f"{file}: {int(here.sum()):,} of {len(here):,} rows have no label, first row "
            f"{int(here.argmax()) + 1:,}"
            for file, span in spans(where, len(missing))
            if (here := missing[span]).any()
        ]
        more = " files" if len(found) > 3 else ""
        raise DataError(f"{listed(found, 3, '; ')}{more}. Leave them out")


def _choice(kind: str, table: Array, columns: tuple[str, ...], where: str) -> str:
    """What to say of the kind of target that the labels were taken for."""
    if kind == "labels":
        return (
            f"{where}: {listed(columns)} have only 0 and 1, so they are read as labels that do "
            "not exclude each other. Set task.likelihood to read them otherwise"
        )
    if len(columns) > 1:
        return f"{where}: {listed(columns)} are a real target of {len(columns)} columns"
    values = len(np.unique(table))
    return (
        f"{where}: '{columns[0]}' has {values:,} different values in {len(table):,} rows, so it "
        "is read as a real target. If these are classes, list all of them in data.classes"
    )


def _as_labels(
    table: Array, columns: tuple[str, ...], where: str, notes: list[str]
) -> tuple[Array, Target]:
    _refuse_odd(~np.isin(table, (0, 1)), table, columns, where, "neither 0 nor 1")
    y = table.astype(np.float32)
    notes += [
        f"{where}: '{name}' is {column[0]:g} in every row, so there is nothing to learn"
        for name, column in zip(columns, y.T, strict=True)
        if len(y) > 1 and (column == column[0]).all()
    ]
    return y, Target("labels", columns)


def _as_counts(
    table: Array, columns: tuple[str, ...], where: str, notes: list[str]
) -> tuple[Array, Target]:
    with np.errstate(invalid="ignore"):
        odd = ~((table >= 0) & (table == np.rint(table)) & (table <= MOST_COUNT))
    _refuse_odd(odd, table, columns, where, f"not a whole number from 0 to {MOST_COUNT:,}")
    return table.astype(np.float32), Target("count", columns)


def _as_real(
    table: Array, columns: tuple[str, ...], where: str, notes: list[str]
) -> tuple[Array, Target]:
    with np.errstate(over="ignore"):
        y = table.astype(np.float32)
    _refuse_odd(~np.isfinite(y), table, columns, where, "infinite, or too large for float32")
    notes += lost(table, columns, where)
    return y, Target("real", columns)


def _as_survival(
    table: Array, columns: tuple[str, ...], where: str, notes: list[str]
) -> tuple[Array, Target]:
    if len(columns) != 2:
        raise DataError(
            f"{where}: label lists {len(columns)} columns ({listed(columns)}), but survival needs "
            'two, the time and whether an event happened: label = ["time", "event"]'
        )
    _refuse_odd_times(table, columns, where)
    if not table[:, 1].any():
        raise DataError(f"{where}: '{columns[1]}' is 0 in every row, so there is nothing to learn")
    y, _ = _as_real(table, columns, where, [])
    merged = len(np.unique(table[:, 0])) - len(np.unique(y[:, 0]))
    if merged:
        notes.append(
            f"{where}: {merged:,} times in '{columns[0]}' equal others in float32. Give them in a "
            "coarser unit, or subtract a constant"
        )
    return y, Target("survival", columns)


def _refuse_odd_times(table: Array, columns: tuple[str, ...], where: str) -> None:
    odd = np.zeros(table.shape, bool)
    odd[:, 1] = ~np.isin(table[:, 1], (0, 1))
    _refuse_odd(odd, table, columns, where, "neither 1 (event) nor 0 (censored)")
    odd[:, 1], odd[:, 0] = False, ~(table[:, 0] >= 0)
    _refuse_odd(odd, table, columns, where, "not a time of 0 or more")


def as_target(table: Array, target: Target, where: str) -> Array:
    """Numbers float64 [n, T] as a target without classes that is known already, float32.

    It reads some rows of many, so unlike `read_target` it makes no notes on all rows.

    Raises:
        DataError: one is not of this kind; names the row.
    """
    if target.kind == "survival":
        _refuse_odd_times(table, target.names, where)
    reader = _as_real if target.kind == "survival" else _READERS[target.kind]
    return reader(table, target.names, where, [])[0]


_READERS = {
    "labels": _as_labels,
    "count": _as_counts,
    "real": _as_real,
    "survival": _as_survival,
}
"""Readers of targets without classes by kind: numbers float64 [N, T] to float32 and a target."""


def _refuse_odd(
    odd: Array, table: Array, columns: tuple[str, ...], where: str, reason: str
) -> None:
    """Refuse a target with values that are not of its kind; names the first one's row."""
    if not odd.any():
        return
    row, column = (int(at) for at in np.argwhere(odd)[0])
    file, number, span = place(where, row)
    raise DataError(
        f"{file}: '{columns[column]}' is {table[row, column]:g} in row {number} "
        f"({int(odd[span].any(1).sum()):,} such rows), which is {reason}. Correct it, or choose "
        "another task.likelihood"
    )


def _as_classes(
    labels: Any, classes: tuple[str, ...], kinds: Sequence[str], where: str, notes: list[str]
) -> tuple[Rows, Target] | str:
    """Labels as class indices [N], and the classes; or why they are invalid."""
    said: list[str] = []
    values = _plain(labels.to_numpy(), "class", where, said)
    y, names = index_names(values)
    if not classes and (reason := _quantity(values, names, where)):
        return reason
    notes += said
    if not classes:
        notes += _alone(y, names, where)
        if not kinds and values.dtype.kind in "iuf" and len(names) > NUMBERED_CLASSES:
            notes.append(
                f"{where}: the label has {len(names):,} different values in {len(values):,} rows, "
                f"such as {listed(names[:3])}, which are read as classes. If they are counts or "
                "measurements, set task.likelihood to poisson or gaussian"
            )
        return y, Target("class", names)
    known = np.array(places(names, classes), np.int64)
    unknown = [name for name, at in zip(names, known, strict=True) if at < 0]
    if unknown:
        raise DataError(
            f"{where}: unknown class {listed(unknown)}. The classes are {listed(classes, 100)}"
        )
    return known[y], Target("class", classes)


def _alone(y: Array, names: tuple[str, ...], where: str) -> list[str]:
    """A note on classes of one row, where there are many rows of each on average."""
    alone = np.bincount(y) == 1
    if not alone.any() or len(y) < ROWS_OF_CLASS * len(names):
        return []
    rows = np.flatnonzero(alone[y])
    found = [f"1 row of {place(where, row)[0]} has class '{names[y[row]]}'" for row in rows[:4]]
    more = f" and {len(rows) - 3:,} more" if len(rows) > 3 else ""
    return [f"{', '.join(found[:3])}{more}, which no other row has: is it a typo?"]


def group_indices(
    groups: Array | None, where: str, notes: list[str]
) -> tuple[Rows | None, tuple[str, ...]]:
    """Groups as indices [N], and their names in rising order. A DataError if a row has no group."""
    if groups is None:
        return None, ()
    import pandas as pd

    absent = int(pd.isna(groups).sum())
    if absent:
        raise DataError(
            f"{where}: {absent:,} of {len(groups):,} rows have no group. Give each row one"
        )
    return index_names(_plain(groups, "group", where, notes))


def _quantity(values: Array, names: tuple[str, ...], where: str) -> str:
    """Why labels are no classes: they have many different values, with few rows of each."""
    numbers = values.dtype.kind in "iuf"
    fractions = values.dtype.kind == "f" and bool((values != np.rint(values)).any())
    scarce = len(values) < ROWS_OF_CLASS * len(names)
    many = len(names) > FEW_CLASSES and (fractions or scarce)
    alone = len(names) == len(values) > ROWS_OF_CLASS
    if not (many or alone or len(names) > MOST_CLASSES):
        return ""
    kind = (
        "a quantity" if fractions else "a quantity or an identifier" if numbers else "identifiers"
    )
    if not numbers and (odd := _odd_texts(values)):
        file, number, span = place(where, odd[0])
        first, odd, values = values[odd[0]], [k for k in odd if k < span.stop], values[span]
        return (
            f"{file}: the label is a number in {len(values) - len(odd):,} of {len(values):,} "
            f"rows, but '{first}' in row {number} is not. Correct it, or leave "
            "such rows out"
        )
    return (
        f"{where}: the label has {len(names):,} different values in {len(values):,} rows, such as "
        f"{listed(names[:3])}: {kind}, not classes. Set data.label to another column; or divide "
        "it into a few ranges; or, if these are classes, list all of them in data.classes"
    )


def _odd_texts(values: Array) -> list[int]:
    """Rows of the texts that are no numbers, where most are; none where most are not."""
    import pandas as pd

    odd = np.flatnonzero(np.isnan(pd.to_numeric(pd.Series(values), errors="coerce")))
    return [int(row) for row in odd] if 2 * len(odd) < len(values) else []


def _plain(values: Any, kind: str, where: str, notes: list[str]) -> Array:
    """Values that sort: numbers as they are, all else as text without white space around it."""
    array = np.asarray(values)
    if array.dtype.kind in "iuf":
        return array
    texts = array.astype(np.str_)
    distinct, index = np.unique(texts, return_inverse=True)
    stripped = [text.strip() for text in distinct.tolist()]
    bare = np.array([normal(text) for text in stripped], np.str_)[index].reshape(texts.shape)
    cut = [t for t, s in zip(distinct.tolist(), stripped, strict=True) if t != s]
    if cut:
        names = listed((f"'{text}' is read as '{text.strip()}'" for text in cut), 3)
        notes.append(f"{where}: white space around the name of a {kind} is removed: {names}")
    notes += [
        f"{where}: {listed(names)} differ only in upper and lower case, and are {len(names)} "
        f"{'classes' if kind == 'class' else 'groups'}"
        for names in alike(bare.tolist())
    ]
    return bare
