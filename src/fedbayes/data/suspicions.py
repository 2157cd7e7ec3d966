"""What in a table looks as if a model would learn from it, or be scored by it, wrongly."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedbayes.core.wording import listed

RARE = 0.1
"""Share of rows below which a class is called rare."""
_APART = 5.0
"""Standard deviations of the others' rows beyond which a client's mean suggests another unit."""
_ENOUGH = 5
"""Values of a client that are not so far off by chance."""
_CLIENTS = 20
"""Clients whose counts are printed, at most."""
_NUMBERS = frozenset((-1, -9, -99, -999, -9999, 99, 999, 9999, 99999))
_WORDS = frozenset(
    ("?", "-", "--", ".", "unknown", "unk", "missing", "not available", "none", "nil", "-999")
)
"""What often stands for a missing value."""


def suspicions(
    frame: Any,
    features: Sequence[str],
    label: str | None,
    group: str | None,
    *,
    repeats: bool = True,
) -> list[str]:
    """Notes about columns that repeat the label, repeated rows, stand-ins for missing values, other
    units at a client, and classes that are rare or absent at a client.

    Args:
        frame: the table.
        features: names of the columns that a network sees.
        label: the column of classes; None where the target has none.
        group: the column of clients, if there is one.
        repeats: whether repeated rows are looked for.
    """
    notes = [] if label is None else _copies(frame, features, label)
    notes += _repeated(frame, features, label) if repeats else []
    notes += [note for name in features if (note := _stand_in(frame[name], name))]
    if group is not None:
        notes += [note for name in features for note in _units(frame[name], name, frame[group])]
    return notes + ([] if label is None else _classes(frame, label, group))


def _copies(frame: Any, features: Sequence[str], label: str) -> list[str]:
    """Features with one value for each class, which say the label."""
    classes = frame[label].nunique()
    found = []
    for name in features:
        column = frame[name]
        if classes < 2 or column.nunique() != classes:
            continue
        if len(frame[[name, label]].dropna().drop_duplicates()) == classes:
            found.append(name)
    return [
        f"{name}: its values determine '{label}', so a model would use no other column. Leave it "
        "out with data.drop if it is not known before the label"
        for name in found
    ]


def _repeated(frame: Any, features: Sequence[str], label: str | None) -> list[str]:
    """Rows that are there more than once, whatever numbers them."""
    columns = [name for name in features if not _numbers_rows(frame[name])]
    if not columns:
        return []
    columns = [*columns, *([label] if label is not None else [])]
    rows = int(frame[columns].duplicated().sum())
    # Rows of few coarse columns are alike by chance: as many pairs, were columns independent.
    pairs = len(frame) * (len(frame) - 1) / 2
    counts = [frame[name].value_counts(dropna=False) for name in columns]
    alike = [float((count * (count - 1)).sum()) / 2 / pairs for count in counts]
    if rows <= pairs * float(np.prod(alike)):
        return []
    return [
        f"{rows:,} of {len(frame):,} rows repeat another row: a repeated row may be in the "
        "training and the test part, and scores are then too good. Remove them first"
    ]


def _numbers_rows(column: Any) -> bool:
    return bool(column.dtype.kind in "iuO" and column.nunique() == len(column))


def _stand_in(column: Any, name: str) -> str:
    """What to say of a value that may stand for a missing one; empty if there is none."""
    there = column.dropna()
    if there.dtype.kind in "iuf":
        values, counts = np.unique(there.to_numpy(), return_counts=True)
        for end, rest in ((0, values[1:]), (-1, values[:-1])):
            odd = len(rest) > 1 and values[end] in _NUMBERS and counts[end] > 1
            if odd and abs(values[end] - rest[end]) > rest[-1] - rest[0]:
                return _said(name, f"{values[end]:g}", int(counts[end]), len(column))
        return ""
    words = there.astype(str).str.strip()
    found = words[words.str.lower().isin(_WORDS)]
    return _said(name, found.iloc[0], len(found), len(column)) if len(found) else ""


def _said(name: str, value: str, rows: int, count: int) -> str:
    return (
        f"{name}: {value!r} occurs in {rows:,} of {count:,} rows. If it means a missing value, "
        "list it in data.na_values"
    )


def _units(column: Any, name: str, clients: Any) -> list[str]:
    """Clients whose numbers lie far outside those of all others."""
    if column.dtype.kind not in "iuf" or column.nunique() <= 2:
        return []
    middle = column.mean()
    each = (column - middle).groupby(clients.astype("string").str.strip())
    count, mean = each.count(), each.mean().fillna(0)
    squares = count * (each.var(ddof=0).fillna(0) + mean**2)
    rest = count.sum() - count
    with np.errstate(divide="ignore", invalid="ignore"):
        others = ((count * mean).sum() - count * mean) / rest
        std = np.sqrt(((squares.sum() - squares) / rest - others**2).clip(lower=0))
    gap = (mean - others).abs()
    apart = (count >= _ENOUGH) & (std > 1e-6 * gap) & (gap > _APART * std)
    return [
        f"{name}: its mean is {middle + mean[client]:.4g} at {client}, and "
        f"{middle + others[client]:.4g} at the other clients, with a standard deviation of "
        f"{std[client]:.4g}. Check that its unit is the same"
        for client in mean.index[apart][:_CLIENTS]
    ]


def _classes(frame: Any, label: str, group: str | None) -> list[str]:
    """How many rows each class has, in all and at each client."""
    counts = frame[label].astype("string").str.strip().value_counts()
    if len(counts) < 2:
        return []
    total = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    notes = [f"rows of each class of '{label}': {total}"]
    share = counts.min() / counts.sum()
    if share < RARE and len(counts) * share < 0.5:
        notes.append(
            f"'{counts.idxmin()}' has {share:.1%} of the rows, so accuracy is not informative. "
            "See balanced accuracy and AUROC, training.class_weights=balanced, and predict "
            "--threshold"
        )
    if group is None:
        return notes
    labels = frame[label].astype("string").str.strip()
    table = labels.groupby(frame[group].astype("string").str.strip()).value_counts()
    each = table.unstack(fill_value=0).reindex(columns=counts.index)
    shown = [
        f"{client} {'/'.join(f'{count:,}' for count in row)}"
        for client, row in zip(each.index[:_CLIENTS], each.to_numpy(), strict=False)
    ]
    more = f"; and {len(each) - _CLIENTS:,} more" if len(each) > _CLIENTS else ""
    notes.append(f"{'/'.join(map(str, counts.index))} by client: {'; '.join(shown)}{more}")
    single = [str(client) for client, row in each.iterrows() if (row > 0).sum() == 1]
    if single:
        notes.append(
            f"{len(single):,} of {len(each):,} clients have rows of one class only: "
            f"{listed(single, 5)}. A model trained on one of them alone always predicts that "
            "class"
        )
    return notes
