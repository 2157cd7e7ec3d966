"""What would be done with every column of a table."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedbayes.core.wording import describe, listed
from fedbayes.data.source_settings import SourceSettings
from fedbayes.data.sources.labels import group_indices, read_target
from fedbayes.data.sources.own import files_of, unread
from fedbayes.data.sources.rows import choose_features, holds_pictures, testing_rows
from fedbayes.data.sources.sql import WHERE, read_query
from fedbayes.data.sources.tables import is_table, read_tables
from fedbayes.data.suspicions import suspicions
from fedbayes.data.tables.cells import code, values
from fedbayes.data.tables.kinds import judge
from fedbayes.errors import DataError

SHOWN = 5
"""Values of a column that are shown."""
_NUMBERED = 0.9
"""Share of rows with different whole numbers from which they may be row numbers."""


@dataclass(frozen=True)
class ColumnReport:
    """What a column of a table is, and what becomes of it."""

    name: str
    role: Literal["feature", "label", "group", "split", "left out"]
    kind: str
    """Of a feature its kind; of a label what it is read as; empty if it is rejected."""
    missing: int
    """Rows in which its cell is empty or blank."""
    distinct: int
    """Different values."""
    values: tuple[str, ...]
    """The most frequent ones of categories, labels and groups; the least and largest of others."""
    width: int
    """Features that a network sees of it."""
    refused: str = ""
    """Why it cannot be used, and the way out."""
    hint: str = ""
    """What to think about."""


@dataclass(frozen=True)
class TableCheck:
    """What would be done with a table."""

    file: str
    rows: int
    columns: tuple[ColumnReport, ...]
    notes: tuple[str, ...]
    """What a run would say."""
    frame: Any
    """The table itself."""

    @property
    def width(self) -> int:
        """Features that a network would see of a row."""
        return sum(look.width for look in self.columns)

    @property
    def refused(self) -> tuple[str, ...]:
        """Why a run would not begin; empty if it would."""
        return tuple(look.refused for look in self.columns if look.refused)

    def dump(self) -> dict[str, Any]:
        """For JSON."""
        columns = [asdict(look) for look in self.columns]
        return {
            "file": self.file,
            "rows": self.rows,
            "width": self.width,
            "usable": not self.refused,
            "columns": columns,
            "notes": list(self.notes),
        }


def check_table(settings: SourceSettings, kinds: Sequence[str] = ()) -> TableCheck:
    """Say what would be done with every column of the user's own table.

    Args:
        settings: The table, and how it is read.
        kinds: Kinds of target of which that is to be one; none: the labels decide.

    Raises:
        DataError: It cannot be read at all, is no table, or a setting names a column that it does
            not have, but for the label.
    """
    notes: list[str] = []
    trained = None
    if settings.query is not None:
        frame, where = read_query(settings), WHERE
    else:
        files = files_of(settings)
        where = str(files["train"][0])
        if not is_table(files["train"][0]):
            raise DataError(f"{where} is not a table, so it has no columns to check")
        notes += unread(settings.path or Path(), files)
        frame, before, where = read_tables(files, settings, notes)
        trained, settings = before if "test" in files else None, settings.of_table
    features = choose_features(frame, settings, where, notes, labelled=False)
    absent = [name for name in settings.label if name not in frame.columns]
    looks = []
    for name in map(str, frame.columns):
        if name in settings.label:
            looks.append(_label(frame, name, settings, kinds, where))
        elif name in features:
            looks.append(_feature(frame[name], name, settings, where))
        elif name == settings.split:
            looks.append(_split(frame, trained, settings, where, notes))
        else:
            looks.append(_other(frame[name], name, settings, where))
    looks += [_absent(name, frame, settings, where) for name in absent]
    plain = [look.name for look in looks if look.kind and look.kind != "pictures"]
    classes = [look.name for look in looks if look.kind.startswith("the classes")]
    seen = [look.name for look in looks if look.role == "feature" and look.name in plain]
    group = settings.group if isinstance(settings.group, str) else None
    repeats = all(look.kind for look in looks)  # else rows may differ in what is not seen
    label = classes[0] if len(classes) == 1 else None
    notes += suspicions(frame, seen, label, group, repeats=repeats)
    return TableCheck(where, len(frame), tuple(looks), tuple(notes), frame)


def _feature(column: Any, name: str, settings: SourceSettings, where: str) -> ColumnReport:
    if holds_pictures(column):
        return ColumnReport(
            name, "feature", "pictures", int(column.isna().sum()), len(column), (), 0
        )
    verdict = judge(column, name, settings, where)
    if verdict.column is None:
        look = _plain(column, name, where)
        return replace(look, missing=verdict.missing, refused=verdict.refused)
    look, kind = _plain(column, name, where), verdict.column.kind
    hint = ""
    if look.distinct == 1 and not verdict.missing:
        hint = (
            "it has the same value in every row, so it cannot help a model. Leave it out with "
            "data.drop"
        )
    elif not look.distinct:
        hint = "it has no values. Leave it out with data.drop"
    elif kind == "number" and _whole(column) and look.distinct > max(1, _NUMBERED * len(column)):
        rows = "every row" if look.distinct == len(column) else "almost every row"
        hint = (
            f"it has a different whole number in {rows}. If it numbers rows or persons, leave it "
            "out with data.drop"
        )
    elif kind == "number" and look.distinct <= SHOWN and _whole(column) and look.distinct > 2:
        hint = "it has few different whole numbers. If they are codes, list it in data.categorical"
    if verdict.column.measured:
        coded = column.to_numpy()  # in full: float32 makes long numbers equal
        if column.dtype.kind not in "iuf":
            coded = code(column.to_frame(name), [verdict.column], where)[:, 0]
        ends = [column.iloc[find(coded)] for find in (np.nanargmin, np.nanargmax) if look.distinct]
        look = replace(look, values=tuple(_short(end) for end in ends))
    width = len(verdict.column.features)
    return replace(look, kind=kind, missing=verdict.missing, width=width, hint=hint)


def _short(value: Any) -> str:
    """A number to six digits, a whole one to its last digit, or a date."""
    if not isinstance(value, float):
        return str(value)[:40]
    whole = value.is_integer() and abs(value) < 1e16
    return f"{value:.0f}" if whole else f"{value:.6g}"


def _whole(column: Any) -> bool:
    if column.dtype.kind not in "iuf":
        return False
    there = column.dropna().to_numpy()
    return bool((there == np.rint(there)).all())


def _plain(column: Any, name: str, where: str) -> ColumnReport:
    """A column as it is, before anything becomes of it."""
    try:
        index, names = values(column, name, where)
    except DataError:
        return ColumnReport(name, "feature", "", int(column.isna().sum()), 0, (), 0)
    counts = np.bincount(index[index >= 0], minlength=len(names))
    often = tuple(names[k][:40] for k in np.argsort(-counts, kind="stable")[:SHOWN])
    return ColumnReport(name, "feature", "", int((index < 0).sum()), len(names), often, 0)


def _label(
    frame: Any, name: str, settings: SourceSettings, kinds: Sequence[str], where: str
) -> ColumnReport:
    look = replace(_plain(frame[name], name, where), role="label")
    labels = [label for label in settings.label if label in frame.columns]
    try:
        _, target = read_target(frame[labels], settings.classes, kinds, where, [])
    except DataError as error:
        # Several labels are read together: the first one says why not.
        return replace(look, refused=str(error) if name == labels[0] else "")
    if target.kind == "class" and len(target.names) < 2:
        only = f"{where}: column '{name}' has only the class '{target.names[0]}'"
        return replace(
            look, refused=f"{only}, and at least two are needed. List all classes in data.classes"
        )
    return replace(look, kind=describe(target))


def _absent(name: str, frame: Any, settings: SourceSettings, where: str) -> ColumnReport:
    text = (
        f"{where} has no column '{name}'. Choose the column to predict with --set "
        f"data.label=NAME: {listed(frame.columns, 100)}"
    )
    return ColumnReport(name, "label", "", 0, 0, (), 0, text)


def _other(column: Any, name: str, settings: SourceSettings, where: str) -> ColumnReport:
    look = _plain(column, name, where)
    if name == settings.group:
        try:
            group_indices(column.to_numpy(), where, [])
        except DataError as error:
            return replace(look, role="group", refused=str(error))
        return replace(look, role="group", kind=f"{look.distinct:,} clients")
    return replace(look, role="left out")


def _split(
    frame: Any, trained: int | None, settings: SourceSettings, where: str, notes: list[str]
) -> ColumnReport:
    name = str(settings.split)
    look = replace(_plain(frame[name], name, where), role="split")
    try:
        testing_rows(frame, trained, settings, where, notes)
    except DataError as error:
        return replace(look, refused=str(error))
    return look
