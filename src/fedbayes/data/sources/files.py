"""Finding the files of a data set, and labels as class indices."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fedbayes.core.fields import changed
from fedbayes.data.dataset import Array, Rows
from fedbayes.data.source_settings import SourceSettings
from fedbayes.errors import DataError

PARTS = ("train", "test")
DROPPED = "are left out, because they have missing values"
"""The note on such rows."""


def parts_by_name(folder: Path, suffix: str | tuple[str, ...]) -> dict[str, list[Path]]:
    """The train and test files of a folder, at any depth, by their names or folders.

    `train.parquet`, `train-00000-of-00002.parquet`, `data/train-...` and `train/all.parquet`
    are all of the training part. Parts without a file are left out, and so are hidden files.

    Args:
        folder: The folder.
        suffix: How their names end, in lower case; of several, one of them.
    """
    found: dict[str, list[Path]] = {}
    for file in sorted(f for f in folder.rglob("*") if f.name.lower().endswith(suffix)):
        words = tuple(reversed(file.relative_to(folder).parts))
        if any(word.startswith(".") for word in words) or not file.is_file():
            continue
        for word in words:
            part = next((part for part in PARTS if word.lower().startswith(part)), None)
            if part is not None:
                found.setdefault(part, []).append(file)
                break
    return {part: found[part] for part in PARTS if part in found}


@contextmanager
def reading(file: Path | str) -> Iterator[None]:
    """Turn whatever a library raises about a damaged file into a DataError that names it."""
    try:
        yield
    except DataError:
        raise
    except MemoryError as error:
        raise DataError(f"{file} does not fit into memory") from error
    except Exception as error:
        # The libraries that parse files raise errors of a dozen unrelated classes.
        reason = str(error).strip().splitlines()
        raise DataError(
            f"cannot read {file}: {reason[0] if reason else type(error).__name__}. It is damaged "
            "or has another format. Get it again"
        ) from error


@contextmanager
def named_cells(file: Path) -> Iterator[None]:
    """See that no row of a CSV file that pandas reads has more cells than there are names."""
    import pandas as pd

    try:
        with warnings.catch_warnings(action="error", category=pd.errors.ParserWarning):
            yield
    except pd.errors.ParserWarning:
        raise DataError(
            f"{file} has a row with more values than its first line has names. Give every column "
            "a name"
        ) from None


def refuse_idle(settings: SourceSettings, names: Iterable[str], why: str) -> None:
    """See that settings of these names, which have no effect, are not set, or raise a DataError."""
    for name in names:
        if changed(settings, name):
            raise DataError(f"{why}, so data.{name} has no effect. Leave it out")


def incomplete(where: object, rows: int, kept: int) -> list[str]:
    """What to say of rows that are left out for a missing value. A DataError if none is left."""
    if not kept:
        raise DataError(
            f"{where}: every row has a missing value, so no row is left. Set data.missing = "
            "'impute', or leave out columns that are mostly empty"
        )
    if kept == rows:
        return []
    return [
        f"{where}: {rows - kept:,} of {rows:,} rows {DROPPED}; data.missing = 'impute' keeps them"
    ]


def index_names(values: Sequence[object] | Array) -> tuple[Rows, tuple[str, ...]]:
    """Distinct values as indices [N] and their names, in rising order."""
    distinct, index = np.unique(np.asarray(values), return_inverse=True)
    return index.reshape(-1).astype(np.int64), tuple(_name(value) for value in distinct.tolist())


def _name(value: object) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
