"""The user's own data: tables in Parquet or CSV, arrays in NPZ, LEAF JSON."""

from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from fedbayes.data.dataset import Array, Dataset, Rows, build_dataset
from fedbayes.data.settings import DataSettings
from fedbayes.data.sources.files import index_names, parts_by_name, reading
from fedbayes.data.sources.images import decode_pictures
from fedbayes.data.sources.leaf import leaf_files, read_leaf
from fedbayes.errors import DataError

SUFFIXES = (".parquet", ".csv", ".npz")
MOST_CLASSES = 1000


def own_files(path: Path) -> dict[str, list[Path]]:
    """The files behind a path, by part: one file, or a folder with train and test files.

    Raises:
        DataError: There is nothing of a known format.
    """
    if path.is_file():
        if path.suffix.lower() in (*SUFFIXES, ".json"):
            return {"train": [path]}
    elif path.is_dir():
        for suffix in SUFFIXES:
            parts = parts_by_name(path, suffix)
            if "train" in parts:
                return parts
        files = leaf_files(path)
        if files:
            return files
    else:
        raise DataError(f"there is no file or folder {path}; mend path")
    raise DataError(
        f"{path} is no data that can be read: give a {', '.join(SUFFIXES)} or LEAF .json file, "
        "or a folder with files named train and, if wanted, test"
    )


def read_own(files: dict[str, list[Path]], settings: DataSettings) -> Dataset:
    """Read the user's own data.

    Args:
        files: Files by part, of one format, as `own_files` gives them.
        settings: Which columns are the label, the group and the split.

    Raises:
        DataError: A file is damaged, a column is missing or holds what is no number; the
            message names the file and column.
    """
    suffix = files["train"][0].suffix.lower()
    if suffix == ".json":
        return read_leaf(settings.name, files)
    if suffix == ".npz":
        return _read_arrays(files, settings)
    return _read_tables(files, settings)


def _read_tables(files: dict[str, list[Path]], settings: DataSettings) -> Dataset:
    import pandas as pd

    frames = {
        part: pd.concat([_read_table(file) for file in paths], ignore_index=True)
        for part, paths in files.items()
    }
    where = str(files["train"][0])
    train = frames["train"]
    for part, frame in frames.items():
        absent = set(train.columns) - set(frame.columns)
        if absent:
            raise DataError(f"{files[part][0]} has no column '{min(absent)}', which {where} has")
    frame = pd.concat([frame[train.columns] for frame in frames.values()], ignore_index=True)
    testing = np.arange(len(frame)) >= len(train)
    named = {"label": settings.label, "group": settings.group, "split": settings.split}
    for setting, column in named.items():
        if column is not None and column not in frame.columns:
            raise DataError(
                f"{where} has no column '{column}'; set {setting} to one of "
                f"{', '.join(map(str, frame.columns))}"
            )
    if settings.split is not None:
        testing = _testing(frame[settings.split], settings.split, where)
    left_out = {*(column for column in named.values() if column), *settings.drop}
    features = tuple(str(column) for column in frame.columns if column not in left_out)
    if len(features) == 1 and _holds_pictures(frame[features[0]]):
        x, features = _decoded(frame[features[0]], where), ()
    else:
        x = _numbers(frame, features, where)
    groups = None if settings.group is None else frame[settings.group].to_numpy()
    return _assemble(x, frame[settings.label], groups, testing, settings, where, features)


def _read_table(file: Path) -> Any:
    import pandas as pd

    with reading(file):
        return pd.read_parquet(file) if file.suffix.lower() == ".parquet" else pd.read_csv(file)


def _holds_pictures(column: Any) -> bool:
    """Whether a column holds pictures as the Hugging Face hub stores them."""
    first = column.iloc[0] if len(column) else None
    return isinstance(first, dict) and "bytes" in first


def _decoded(column: Any, where: str) -> Array:
    """Pictures uint8 [N, C, H, W]; grey ones only if the first one is grey."""
    from PIL import Image

    pictures = [cell["bytes"] if isinstance(cell, dict) else None for cell in column]
    with reading(where), Image.open(BytesIO(pictures[0] or b"")) as first:
        channels = 1 if first.mode in ("1", "L", "I", "I;16") else 3
    with ThreadPoolExecutor() as pool:
        return decode_pictures(pictures, channels, pool, where)


def _numbers(frame: Any, features: tuple[str, ...], where: str) -> Array:
    """The feature columns as float32 [N, D]."""
    if not features:
        raise DataError(f"{where} has no columns beside label, group and split")
    for column in features:
        if frame[column].dtype.kind not in "iufb":
            raise DataError(
                f"{where}: column '{column}' holds what is no number "
                f"({frame[column].dropna().iloc[:1].tolist()}); encode it as numbers, or leave it "
                "out with drop"
            )
    return np.asarray(frame[list(features)].to_numpy(np.float32, na_value=np.nan))


def _testing(column: Any, name: str, where: str) -> Array:
    """Which rows a split column puts into the test part [N]."""
    words = column.astype(str).str.strip().str.lower().to_numpy()
    odd = ~np.isin(words, ["train", "test"])
    if odd.any():
        raise DataError(f"{where}: '{words[odd][0]}' in column '{name}' is neither train nor test")
    return np.asarray(words == "test")


def _read_arrays(files: dict[str, list[Path]], settings: DataSettings) -> Dataset:
    where = str(files["train"][0])
    arrays: dict[str, Array] = {}
    for part, paths in files.items():
        if len(paths) > 1:
            raise DataError(f"{paths[0].parent} has several {part} files; one .npz is read")
        with reading(paths[0]), np.load(paths[0], allow_pickle=False) as file:
            ending = "_test" if part == "test" else ""
            arrays |= {f"{name}{ending}": file[name] for name in file.files}
    for name in ("x", "y"):
        if name not in arrays:
            raise DataError(
                f"{where} has no array '{name}'; give x [N, ...], y [N], and if wanted groups "
                "[N] and x_test, y_test, groups_test"
            )
        if (f"{name}_test" in arrays) != ("x_test" in arrays):
            raise DataError(f"{where} needs x_test and y_test together")
    tested = len(arrays["x_test"]) if "x_test" in arrays else 0
    testing = np.arange(len(arrays["x"]) + tested) >= len(arrays["x"])
    x, y, groups = (_joined(arrays, name, where) for name in ("x", "y", "groups"))
    if x is None or x.ndim < 2 or x.dtype.kind not in "iufb":
        raise DataError(f"{where}: x must hold numbers in at least two dimensions")
    import pandas as pd

    labels = pd.Series(np.asarray(y).reshape(-1))
    return _assemble(_pictures(x), labels, groups, testing, settings, where, ())


def _joined(arrays: dict[str, Array], name: str, where: str) -> Array | None:
    if name not in arrays:
        return None
    both = [arrays[key] for key in (name, f"{name}_test") if key in arrays]
    if len({array.shape[1:] for array in both}) > 1:
        raise DataError(f"{where}: {name} and {name}_test differ in shape")
    return np.concatenate(both)


def _pictures(x: Array) -> Array:
    """uint8 pictures [N, H, W(, C)] in the order C, H, W; all else as float32."""
    if x.dtype != np.uint8 or x.ndim not in (3, 4):
        return x.astype(np.float32)
    if x.ndim == 3:
        return x[:, None]
    last = x.shape[3] in (1, 3) and x.shape[1] not in (1, 3)
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2)) if last else x


def _assemble(
    x: Array,
    labels: Any,
    groups: Array | None,
    testing: Array,
    settings: DataSettings,
    where: str,
    features: tuple[str, ...],
) -> Dataset:
    """The data set of these samples, those to train on first."""
    if not len(x) == len(labels) == (len(labels) if groups is None else len(groups)):
        raise DataError(f"{where}: samples, labels and groups differ in number")
    if labels.isna().any():
        raise DataError(f"{where}: {int(labels.isna().sum())} rows have no label; leave them out")
    order = np.argsort(testing, kind="stable")
    if settings.drops_incomplete and x.dtype.kind == "f":
        order = order[~np.isnan(x[order].reshape(len(x), -1)).any(1)]
    y, classes = index_names(_plain(labels.to_numpy()))
    if settings.classes:
        y, classes = _among(y, classes, settings.classes, where), settings.classes
    if len(classes) > MOST_CLASSES:
        raise DataError(
            f"{where}: the label has {len(classes)} different values, which are no classes"
        )
    group_index, group_names = _group_index(groups, where)
    trained = int((~testing[order]).sum())
    return build_dataset(
        settings.name,
        x[order],
        y[order],
        classes,
        official_train=trained if testing[order].any() else None,
        groups=None if group_index is None else group_index[order],
        group_names=group_names,
        scale=255.0 if x.dtype == np.uint8 else 1.0,
        features=features,
    )


def _among(y: Rows, found: tuple[str, ...], classes: tuple[str, ...], where: str) -> Rows:
    """Indices of classes that were found as indices into those that are known [N]."""
    unknown = [name for name in found if name not in classes]
    if unknown:
        raise DataError(
            f"{where}: there is no class {', '.join(unknown)}; there are {', '.join(classes)}"
        )
    return np.array([classes.index(name) for name in found], np.int64)[y]


def _group_index(groups: Array | None, where: str) -> tuple[Rows | None, tuple[str, ...]]:
    if groups is None:
        return None, ()
    import pandas as pd

    if pd.isna(groups).any():
        raise DataError(f"{where}: some rows have no group; name one for each")
    return index_names(_plain(groups))


def _plain(values: Any) -> Array:
    """Values that sort: numbers as they are, all else as text."""
    array = np.asarray(values)
    return array.astype(np.str_) if array.dtype.kind not in "iufb" else array
