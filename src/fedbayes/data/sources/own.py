"""The user's own data: tables in Parquet or CSV, arrays in NPZ, LEAF JSON."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbayes.core.files import open_npz
from fedbayes.core.wording import listed, size
from fedbayes.data.dataset import Array, Dataset, build_dataset
from fedbayes.data.intake import Narrowing, arrange
from fedbayes.data.source_settings import TABLES, WRITTEN, SourceSettings
from fedbayes.data.sources import folders
from fedbayes.data.sources.files import PARTS, incomplete, parts_by_name, reading, refuse_idle
from fedbayes.data.sources.labels import group_indices, read_target
from fedbayes.data.sources.leaf import leaf_files, read_users
from fedbayes.data.sources.pictures import framing
from fedbayes.data.sources.rows import SEVERAL, TableRows, read_rows
from fedbayes.data.sources.sql import WHERE, read_query
from fedbayes.data.sources.tables import client_files, is_table, read_tables
from fedbayes.errors import DataError, did_you_mean

SUFFIXES = (*TABLES, ".npz")
_OF_COLUMNS = (
    *("label", "group", "split", "tokens"),
    *SEVERAL,
    *("date_format", "sheet", "max_categories"),
    *WRITTEN,
)
"""Settings that are for tables alone."""
ARRAYS = tuple(f"{name}{part}" for part in ("", "_test") for name in ("x", "y", "groups"))
"""What is read of an NPZ file."""


def own_files(path: Path) -> dict[str, list[Path]]:
    """The files behind a path, by part: one file, or a folder with train and test files.

    Raises:
        DataError: There is nothing of a known format, or train and test files are of several.
    """
    if path.is_file():
        if path.name.lower().endswith((*SUFFIXES, ".json")):
            return {"train": [path]}
    elif path.is_dir():
        parts = parts_by_name(path, SUFFIXES)
        if "train" in parts:
            _refuse_mixed(path, parts)
            return parts
        if pictures := folders.picture_files(path):
            return {"train": pictures}
        files = leaf_files(path)
        if files:
            return files
    else:
        raise DataError(f"file or folder not found: {path}. Correct data.path")
    raise DataError(
        f"{path} cannot be read as data. Give a {', '.join(SUFFIXES)} or LEAF .json file; a "
        "folder with files train and optionally test; or a folder of pictures with one folder "
        "per class"
    )


def _refuse_mixed(folder: Path, parts: dict[str, list[Path]]) -> None:
    """See that all files are of one format."""
    first, *others = [file for paths in parts.values() for file in paths]
    suffix = next(one for one in SUFFIXES if first.name.lower().endswith(one))
    odd = next((file for file in others if not file.name.lower().endswith(suffix)), None)
    if odd is not None:
        one, other = (file.relative_to(folder) for file in (first, odd))
        raise DataError(
            f"{folder} has {one} and {other}, but train and test files need the same format. Save "
            "them in one format, or move the other files elsewhere"
        )


def unread(path: Path, files: dict[str, list[Path]]) -> list[str]:
    """Notes on files in a folder that look like data and are not read.

    Args:
        path: The folder; a file has no notes.
        files: What is read of it, as `own_files` gives it.
    """
    if not path.is_dir():
        return []
    read = [file for paths in files.values() for file in paths]
    named = (place for place in path.iterdir() if place.is_dir() and _of_a_part(place))
    # Not all that lies below: it may be another run, or a cache.
    places = {path, *named, *(file.parent for file in read)}
    beside = {file for place in places for file in place.iterdir() if file.is_file()}
    left = [
        str(file.relative_to(path))
        for file in sorted(beside - set(read))
        if not file.name.startswith(".")
        and (
            file.name.lower().endswith((*SUFFIXES, ".json"))
            or _of_a_part(file)
            or (file.parent != path and _of_a_part(file.parent))
        )
    ]
    if not left:
        return []
    names = listed((file.relative_to(path) for file in read), 3)
    return [f"{path}: {listed(left)} {'is' if len(left) == 1 else 'are'} not read, next to {names}"]


def _of_a_part(place: Path) -> bool:
    """Whether a file or folder is named as one of the training or test part."""
    return place.name.lower().startswith(PARTS)


def files_of(settings: SourceSettings) -> dict[str, list[Path]]:
    """The files that settings name, by part, as `own_files` gives those behind a path.

    Raises:
        DataError: There is nothing of a known format.
        ConfigError: Several files are a client each, and a setting names a column of clients too.
    """
    assert settings.path is not None
    if not settings.more:
        return own_files(settings.path)
    paths = (settings.path, *settings.more)
    return {"train": [*client_files(paths, settings.group).values()]}


def has_columns(path: Path) -> bool:
    """Whether what is behind a path are tables, whose columns have names.

    Raises:
        DataError: There is nothing of a known format.
    """
    return is_table(own_files(path)["train"][0])


def read_own(
    files: dict[str, list[Path]], settings: SourceSettings, kinds: Sequence[str] = ()
) -> Dataset:
    """Read the user's own data.

    Args:
        files: Files by part, of one format, as `own_files` gives them.
        settings: Which columns are the label, the group and the split, and what more there is to
            know of them.
        kinds: Kinds of target of which it is to be one; none: the labels decide.

    Raises:
        DataError: A file is damaged, a column is missing or holds what is no number; the
            message names the file and column.
    """
    suffix = files["train"][0].suffix.lower()
    if suffix != ".npz":
        refuse_idle(settings, ("channels",), f"{files['train'][0]} has no arrays")
    if is_table(files["train"][0]):
        return _read_tables(files, settings, kinds)
    refuse_idle(settings, _OF_COLUMNS, f"{files['train'][0]} has no columns")
    if suffix in folders.SUFFIXES:
        assert settings.path is not None
        return folders.read_folders(settings.path, files["train"], settings, kinds)
    read = _read_users if suffix == ".json" else _read_arrays
    return read(files, settings, kinds)


def _read_tables(
    files: dict[str, list[Path]], settings: SourceSettings, kinds: Sequence[str]
) -> Dataset:
    notes: list[str] = []
    frame, before, where = read_tables(files, settings, notes)
    trained = before if "test" in files else None
    return _of_frame(frame, trained, settings.of_table, kinds, where, notes)


def read_own_query(settings: SourceSettings, kinds: Sequence[str] = ()) -> Dataset:
    """Rows that a SQL query gives, as `read_own`.

    Raises:
        DataError: The query fails, or as for `read_own`.
    """
    return _of_frame(read_query(settings), None, settings, kinds, WHERE, [])


def _of_frame(
    frame: Any,
    trained: int | None,
    settings: SourceSettings,
    kinds: Sequence[str],
    where: str,
    notes: list[str],
) -> Dataset:
    rows = read_rows(frame, trained, settings, where, notes)
    return _assemble(rows, settings, kinds, where, notes, frame.attrs.get("decimal", ""))


def _read_arrays(
    files: dict[str, list[Path]], settings: SourceSettings, kinds: Sequence[str]
) -> Dataset:
    where = str(files["train"][0])
    arrays: dict[str, Array] = {}
    for part, paths in files.items():
        if len(paths) > 1:
            raise DataError(f"{paths[0].parent} has several {part} files. Give only one .npz file")
        with reading(paths[0]), open_npz(paths[0]) as file:
            ending = "_test" if part == "test" else ""
            arrays |= {f"{name}{ending}": plain_array(file, name, paths[0]) for name in file.files}
    for name in ("x", "y"):
        if name not in arrays:
            raise DataError(
                f"{where} has no array '{name}'. Give x [N, ...], y [N], and optionally groups "
                "[N] and x_test, y_test, groups_test"
            )
        if (f"{name}_test" in arrays) != ("x_test" in arrays):
            raise DataError(f"{where} needs x_test and y_test together")
    notes = [
        f"{where}: the array '{name}' is not read{did_you_mean(name, ARRAYS)}"
        for name in arrays
        if name not in ARRAYS
    ]
    tested = len(arrays["x_test"]) if "x_test" in arrays else 0
    testing = np.arange(len(arrays["x"]) + tested) >= len(arrays["x"])
    x, y, groups = (_joined(arrays, name, where) for name in ("x", "y", "groups"))
    if x is None or x.ndim < 2 or x.dtype.kind not in "iufb":
        raise DataError(
            f"{where}: x must be numbers of at least two dimensions, the first of which counts "
            "samples"
        )
    import pandas as pd

    y = np.atleast_1d(np.asarray(y))
    if not len(x) and not len(y):
        raise DataError(f"{where} has no samples")
    if y.ndim > 2 and y.size != len(y):
        raise DataError(
            f"{where}: y has {size(y.shape[1:])} values for each sample. Give y [N], or y [N, T] "
            "with a column for each target"
        )
    y = y.reshape(len(y), int(np.prod(y.shape[1:])))
    names = ["y"] if y.shape[1] == 1 else [f"y{column}" for column in range(y.shape[1])]
    labels = pd.DataFrame(y, columns=names)
    parted = testing if "x_test" in arrays else None
    x, note = arrange(x, settings.channels, where)
    narrowing = Narrowing()
    x = narrowing.add(x)
    notes += [*([note] if note else []), *narrowing.notes((), where)]
    return _assemble(TableRows(x, labels, groups, parted), settings, kinds, where, notes)


def plain_array(file: Any, name: str, where: Path) -> Array:
    """An array of an NPZ file.

    Raises:
        DataError: It holds objects, which would have to be unpickled.
    """
    try:
        return np.asarray(file[name])
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        raise DataError(
            f"{where}: the array '{name}' is of dtype object, which could run code when "
            f"unpickled. Save it with a plain type, as in {name} = {name}.astype(str) for names, "
            "or .astype(float) for numbers"
        ) from None


def _joined(arrays: dict[str, Array], name: str, where: str) -> Array | None:
    if name not in arrays:
        return None
    both = [arrays[key] for key in (name, f"{name}_test") if key in arrays]
    if len({array.shape[1:] for array in both}) > 1:
        sizes = " and ".join(size(array.shape[1:]) for array in both)
        raise DataError(f"{where}: {name} and {name}_test differ in shape: {sizes}")
    if len({array.dtype.kind in "US" for array in both}) > 1:
        one, other = (array.dtype for array in both)
        raise DataError(
            f"{where}: {name} is of type {one} and {name}_test of type {other}: one is text, the "
            "other is not. Save both with the same type"
        )
    return np.concatenate(both)


def _read_users(
    files: dict[str, list[Path]], settings: SourceSettings, kinds: Sequence[str]
) -> Dataset:
    notes: list[str] = []
    x, y, users, trained = read_users(settings.name, files, notes)
    import pandas as pd

    testing = None if trained is None else np.arange(len(x)) >= trained
    where = str(files["train"][0])
    rows = TableRows(x, pd.DataFrame({"y": y}), users, testing)
    return _assemble(rows, settings, kinds, where, notes)


def _assemble(
    rows: TableRows,
    settings: SourceSettings,
    kinds: Sequence[str],
    where: str,
    notes: list[str],
    decimal: str = "",
) -> Dataset:
    """The data set of these samples, those to train on first."""
    x, labels, groups, testing, columns, tokens, framed = rows
    if framed is None:
        refuse_idle(settings, ("size",), f"{where} has no picture files")
    statistics, scale = None, 255.0 if x.dtype == np.uint8 else 1.0
    if tokens is not None:
        statistics = tokens.statistics
    elif framed is not None:
        statistics, scale = framed.statistics, framed.scale
    elif settings.processor is not None:
        statistics, scale = _of_arrays(x, settings, where, notes)
    sizes = [len(x), len(labels), *([] if groups is None else [len(groups)])]
    if len(set(sizes)) > 1:
        raise DataError(
            f"{where}: samples, labels and groups differ in number: {sizes[0]:,} samples, "
            f"{sizes[1]:,} labels" + (f", {sizes[2]:,} groups" if groups is not None else "")
        )
    y, target = read_target(labels, settings.classes, kinds, where, notes)
    if target.kind == "class" and len(target.names) == 1:
        raise DataError(
            f"{where}: all rows are of the class {target.names[0]!r}. If there are others, set "
            "data.classes to all of them"
        )
    group_index, group_names = group_indices(groups, where, notes)
    parted, testing = testing is not None, np.zeros(len(x), bool) if testing is None else testing
    order = np.argsort(testing, kind="stable")
    if settings.drops_incomplete and x.dtype.kind == "f":
        order = order[~np.isnan(x[order].reshape(len(x), -1)).any(1)]
        notes += incomplete(where, len(x), len(order))
    trained = int((~testing[order]).sum())
    return build_dataset(
        settings.name,
        x[order],
        y[order],
        target,
        official_train=trained if parted else None,
        groups=None if group_index is None else group_index[order],
        group_names=group_names,
        scale=settings.scale or scale,
        features=tuple(name for column in columns for name in column.codes),
        columns=columns,
        notes=tuple(notes),
        statistics=statistics,
        tokens=tokens,
        decimal=decimal,
    )


def _of_arrays(
    x: Array, settings: SourceSettings, where: str, notes: list[str]
) -> tuple[tuple[Array, Array] | None, float]:
    """Statistics and scale of pixels of 8 bits by the processor."""
    if x.ndim == 4 and x.dtype == np.uint8:
        framed = framing(settings)
        if framed.statistics is None or len(framed.mean) == x.shape[1]:
            return framed.statistics, framed.scale
    notes.append(
        f"{where}: x is standardized by its own mean and std, not the pretrained network's, "
        "because it does not have 8-bit pixels with the same number of channels"
    )
    return None, 255.0 if x.dtype == np.uint8 else 1.0
