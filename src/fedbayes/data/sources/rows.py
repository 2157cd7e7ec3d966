"""Rows of the user's own table: which columns are features, and which say label, group and part."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np

from fedbayes.core.wording import listed, size
from fedbayes.data.dataset import Array
from fedbayes.data.source_settings import KINDS, SourceSettings
from fedbayes.data.sources.files import reading
from fedbayes.data.sources.images import decode_pictures
from fedbayes.data.sources.pictures import Framing, framing
from fedbayes.data.sources.tables import UNNAMED, has_row_numbers
from fedbayes.data.tables.cells import code
from fedbayes.data.tables.columns import Column, features_of, plain
from fedbayes.data.tables.kinds import choose_columns
from fedbayes.data.tables.precision import lost_of_rows
from fedbayes.data.tokens import Tokens
from fedbayes.errors import ColumnError, DataError, did_you_mean

SEVERAL = ("features", "drop", *KINDS)
"""Settings that name several columns."""


class TableRows(NamedTuple):
    """What a table holds."""

    x: Array
    """Its features, coded by their columns, or pictures."""
    labels: Any
    """A table of the columns of labels."""
    groups: Array | None
    """Client of each row."""
    testing: Array | None
    """Which rows are of the test part; None without one."""
    columns: tuple[Column, ...] = ()
    """None of pictures and tokens."""
    tokens: Tokens | None = None
    """How texts became x, if they did."""
    framed: Framing | None = None
    """How pictures became x, if they did."""


def read_rows(
    frame: Any, trained: int | None, settings: SourceSettings, where: str, notes: list[str]
) -> TableRows:
    """Take a table apart.

    Args:
        frame: The table.
        trained: How many of its rows, the first ones, come from files of a training part, where
            there are some of a test part.
        settings: Which columns are what.
        where: Name of the file, for messages.
        notes: Takes up what a user should know.

    Raises:
        ColumnError: A column that a setting names is not there.
        DataError: A column cannot be used; names it, and the row.
    """
    features = choose_features(frame, settings, where, notes)
    testing = testing_rows(frame, trained, settings, where, notes)
    clients = None if settings.group is None else frame[settings.group]
    columns: tuple[Column, ...] = ()
    tokens, framed = None, None
    if settings.tokens is not None:
        tokens = Tokens.of(settings.tokens, str(settings.processor), settings.max_tokens)
        x = tokens.encode(list(frame[settings.tokens]), where, notes)
        if others := [name for name in features if name != settings.tokens]:
            notes.append(f"{where}: x is only '{settings.tokens}'; left out: {listed(others)}")
    elif len(features) == 1 and holds_pictures(frame[features[0]]):
        framed = framing(settings)
        x = decoded(frame[features[0]], where, framed)
    else:
        for column in features:
            if holds_pictures(frame[column]):
                raise DataError(
                    f"{where}: column '{column}' contains pictures, and no other column can be "
                    f"combined with them. Set data.features = ['{column}']"
                )
        columns = choose_columns(frame, features, settings, where, notes, clients)
        features_of(columns)
        if settings.scale is not None and not plain(columns):
            raise DataError(
                f"{where} has columns that are not numbers, or missing values, so data.scale has "
                "no effect. Leave it out: numbers are standardized"
            )
        x = code(frame, columns, where)
        notes += lost_of_rows(frame, columns, x, where)
    groups = None if clients is None else clients.to_numpy()
    labels = frame[list(settings.label)]
    return TableRows(x, labels, groups, testing, columns, tokens, framed)


def testing_rows(
    frame: Any, trained: int | None, settings: SourceSettings, where: str, notes: list[str]
) -> Array | None:
    """Which rows are of the test part [N]; None without one; as for `read_rows`.

    Raises:
        DataError: The column that is to say so does not, or there are files of a test part too.
    """
    if settings.split is None:
        return None if trained is None else np.arange(len(frame)) >= trained
    if trained is not None:
        raise DataError(
            f"{where}: there are test files, so data.split has no effect. Leave it out, or give "
            "one file"
        )
    testing = _testing(frame[settings.split], settings.split, where)
    if testing.all():
        raise DataError(
            f"{where}: column '{settings.split}' puts every row into the test part, so there are "
            "no training rows. Leave data.split out to let clients test on their own rows"
        )
    if testing.any():
        return testing
    notes.append(
        f"{where}: column '{settings.split}' puts no row into the test part, so clients test on "
        "their own rows"
    )
    return None


def choose_features(
    frame: Any, settings: SourceSettings, where: str, notes: list[str], *, labelled: bool = True
) -> tuple[str, ...]:
    """Names of the columns to use as features; `labelled`: the table must have the columns of
    labels. Notes on them are added to `notes`.

    Raises:
        ColumnError: A column that a setting names is not there.
    """
    asked = [("label", column) for column in settings.label if labelled]
    asked += [("group", settings.group)] if settings.group is not None else []
    asked += [("split", settings.split)] if settings.split is not None else []
    left_out = {column for _, column in asked} | {*settings.drop, *settings.label}
    asked += [("features", column) for column in settings.features]
    asked += [("drop", column) for column in settings.drop if not settings.features]
    asked += [("tokens", settings.tokens)] if settings.tokens is not None else []
    asked += [(kind, column) for kind in KINDS for column in getattr(settings, kind)]
    for setting, column in asked:
        if column not in frame.columns:
            like = did_you_mean(column, frame.columns)
            raise ColumnError(
                f"{where} has no column '{column}'{like}. Set data.{setting} to "
                f"{'some' if setting in SEVERAL else 'one'} of {listed(frame.columns, 100)}",
                column,
                setting,
                like,
            )
    if not settings.features and UNNAMED not in left_out and has_row_numbers(frame):
        left_out.add(UNNAMED)
        notes.append(
            f"{where}: the first column has no name and numbers the rows, so it is left out"
        )
    return settings.features or tuple(c for c in frame.columns if c not in left_out)


def holds_pictures(column: Any) -> bool:
    """Whether a column holds pictures as the Hugging Face hub stores them."""
    first = column.iloc[0] if len(column) else None
    return isinstance(first, dict) and "bytes" in first


def decoded(column: Any, where: str, frame: Framing = Framing()) -> Array:  # noqa: B008
    """Pictures uint8 [N, C, H, W]; grey ones only if the first one is grey."""
    from PIL import Image

    if frame != Framing():
        return _framed(column, where, frame)
    pictures = [cell["bytes"] if isinstance(cell, dict) else None for cell in column]
    with reading(where), Image.open(BytesIO(pictures[0] or b"")) as first:
        channels = 1 if first.mode in ("1", "L", "I", "I;16") else 3
    with ThreadPoolExecutor() as pool:
        return decode_pictures(pictures, channels, pool, where)


def _framed(column: Any, where: str, frame: Framing) -> Array:
    """Pictures of any size, resized [N, C, H, W]."""

    def one(row: int) -> Array:
        place = f"{where}, row {row + 1:,}"
        cell = column.iloc[row]
        image = frame.open((cell["bytes"] if isinstance(cell, dict) else b"") or b"", place)
        return frame.array(image, place)

    first = one(0)
    frame = replace(frame, channels=len(first))
    with ThreadPoolExecutor() as pool:
        arrays = list(pool.map(one, range(len(column))))
    for row, array in enumerate(arrays):
        if array.shape != first.shape:
            raise DataError(
                f"{where}: the picture of row {row + 1:,} is {size(array.shape)} (channels, "
                f"height, width), and that of row 1 {size(first.shape)}. Set data.size"
            )
    return np.stack(arrays)


def _testing(column: Any, name: str, where: str) -> Array:
    """Which rows a split column puts into the test part [N]."""
    if column.isna().any():
        raise DataError(
            f"{where}: {int(column.isna().sum()):,} of {len(column):,} rows have no value in "
            f"column '{name}'. Write train or test in each"
        )
    words = column.astype(str).str.strip().str.lower().to_numpy()
    odd = ~np.isin(words, ["train", "test"])
    if odd.any():
        raise DataError(f"{where}: '{words[odd][0]}' in column '{name}' is neither train nor test")
    return np.asarray(words == "test")
