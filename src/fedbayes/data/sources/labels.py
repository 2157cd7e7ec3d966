"""Labels as classes, and groups as clients."""

from collections import defaultdict
from typing import Any

import numpy as np

from fedbayes.data.dataset import Array, Rows
from fedbayes.data.sources.files import index_names
from fedbayes.data.wording import listed
from fedbayes.errors import DataError

MOST_CLASSES = 1000
FEW_CLASSES = 20
"""So many different values may be classes, however few rows there are of each."""
ROWS_OF_CLASS = 5
"""Rows that each of more values has on average, if they are classes."""


def class_indices(
    labels: Any, classes: tuple[str, ...], where: str, notes: list[str]
) -> tuple[Rows, tuple[str, ...]]:
    """Labels as class indices [N], and the names of the classes.

    Args:
        labels: A column of labels [N].
        classes: Names of all classes, in the order of the indices; if empty, the classes are the
            different labels, in rising order.
        where: The file and column, for messages.
        notes: Takes up what a user should know.

    Raises:
        DataError: A label is missing, is none of the classes, or is a quantity or an identifier.
    """
    if labels.isna().any():
        raise DataError(
            f"{where}: {int(labels.isna().sum()):,} of {len(labels):,} rows have no label; "
            "leave them out"
        )
    values = _plain(labels.to_numpy(), "class", where, notes)
    y, names = index_names(values)
    if not classes:
        _refuse_quantity(values, names, where)
        return y, names
    unknown = [name for name in names if name not in classes]
    if unknown:
        raise DataError(
            f"{where}: there is no class {listed(unknown)}; there are {listed(classes, 100)}"
        )
    return np.array([classes.index(name) for name in names], np.int64)[y], classes


def group_indices(
    groups: Array | None, where: str, notes: list[str]
) -> tuple[Rows | None, tuple[str, ...]]:
    """Groups as indices [N], and their names in rising order.

    Raises:
        DataError: A row has no group.
    """
    if groups is None:
        return None, ()
    import pandas as pd

    absent = int(pd.isna(groups).sum())
    if absent:
        raise DataError(
            f"{where}: {absent:,} of {len(groups):,} rows have no group; name one for each"
        )
    return index_names(_plain(groups, "group", where, notes))


def _refuse_quantity(values: Array, names: tuple[str, ...], where: str) -> None:
    """Refuse labels that are no classes: of many different values, with few rows of each."""
    numbers = values.dtype.kind in "iuf"
    fractions = values.dtype.kind == "f" and bool((values != np.rint(values)).any())
    scarce = len(values) < ROWS_OF_CLASS * len(names)
    many = len(names) > FEW_CLASSES and (fractions or scarce)
    alone = len(names) == len(values) > ROWS_OF_CLASS
    if not (many or alone or len(names) > MOST_CLASSES):
        return
    kind = (
        "a quantity" if fractions else "a quantity or an identifier" if numbers else "identifiers"
    )
    raise DataError(
        f"{where}: the label has {len(names):,} different values in {len(values):,} rows, such as "
        f"{listed(names[:3])}: {kind}, not classes. Set label to another column; or make a column "
        "of a few ranges of it; or, if these really are classes, name them all with classes"
    )


def _plain(values: Any, kind: str, where: str, notes: list[str]) -> Array:
    """Values that sort: numbers as they are, all else as text without white space around it."""
    array = np.asarray(values)
    if array.dtype.kind in "iuf":
        return array
    texts = array.astype(np.str_)
    bare = np.char.strip(texts)
    cut = np.unique(texts[texts != bare]).tolist()
    if cut:
        names = listed((f"'{text}' is read as '{text.strip()}'" for text in cut), 3)
        notes.append(f"{where}: white space around the name of a {kind} is left out: {names}")
    alike = defaultdict(list)
    for name in np.unique(bare).tolist():
        alike[name.casefold()].append(name)
    notes += [
        f"{where}: {listed(names)} differ in upper and lower case alone, and are "
        f"{len(names)} {'classes' if kind == 'class' else 'groups'}"
        for names in alike.values()
        if len(names) > 1
    ]
    return bare
