"""Image sets in the Parquet layout of the Hugging Face hub: bytes of a picture, and a label."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from fedbayes.core.wording import listed, size
from fedbayes.data.dataset import Array, Dataset, Rows, build_dataset
from fedbayes.data.progress import progress
from fedbayes.data.sources.files import index_names, reading
from fedbayes.data.sources.hub import open_hub, open_parquet, quiet
from fedbayes.errors import DataError

BATCH = 512


@dataclass(frozen=True)
class ImageLayout:
    """Where the pictures and labels are in a Parquet image set, and what they must be."""

    image: str
    """Column of the pictures."""
    label: str
    """Column of the classes."""
    classes: tuple[str, ...]
    """Names of the classes, in the order of the labels."""
    channels: int = 1
    """1 for grey, 3 for colour."""
    group: str | None = None
    """Column of the natural client."""


@dataclass(frozen=True)
class _Part:
    x: Array
    y: Rows
    groups: Array | None


def read_images(
    name: str, layout: ImageLayout, files: dict[str, list[Path]] | None, hub: str
) -> Dataset:
    """Decode an image set from local Parquet files, or from the hub where there are none.

    Args:
        name: Name of the data set.
        layout: Its columns and classes.
        files: Files of the train and test parts; None for the hub.
        hub: Its name on the hub.

    Raises:
        DataError: A file is damaged, a column is missing, or the hub cannot be reached.
    """
    tables = open_hub(name, hub) if files is None else open_parquet(files)
    parts = []
    for part, table in tables.items():
        where = hub if files is None else ", ".join(map(str, files[part]))
        with quiet(), reading(where):
            parts.append(_read_part(f"{name} {part}", table, layout, where))
    shapes = {part.x.shape[1:] for part in parts}
    if len(shapes) > 1:
        sizes = listed(map(size, sorted(shapes)))
        raise DataError(f"{name}: its parts have pictures of different sizes: {sizes}")
    official = len(parts[0].y) if len(parts) > 1 else None
    y = np.concatenate([part.y for part in parts])
    if len(y) and (y.min() < 0 or y.max() >= len(layout.classes)):
        raise DataError(f"{name}: a label is outside of its {len(layout.classes)} classes")
    groups: Rows | None = None
    group_names: tuple[str, ...] = ()
    if layout.group is not None:
        groups, group_names = index_names(
            np.concatenate([part.groups for part in parts if part.groups is not None])
        )
    return build_dataset(
        name,
        parts[0].x if len(parts) == 1 else np.concatenate([part.x for part in parts]),
        y,
        layout.classes,
        official_train=official,
        groups=groups,
        group_names=group_names,
        scale=255.0,
    )


def _read_part(description: str, table: Any, layout: ImageLayout, where: str) -> _Part:
    columns = [layout.image, layout.label, *([layout.group] if layout.group else [])]
    missing = set(columns) - set(table.column_names or columns)
    if missing:
        raise DataError(
            f"{where} has no column '{min(missing)}'; its columns are {listed(table.column_names)}"
        )
    x, y, groups = [], [], []
    total = getattr(table, "num_rows", None)
    with ThreadPoolExecutor() as pool, progress(f"decoding {description}", total) as advance:
        for batch in _batches(table, columns):
            pictures = batch[layout.image].combine_chunks().field("bytes").to_pylist()
            x.append(decode_pictures(pictures, layout.channels, pool, where))
            y.append(_labels(batch[layout.label], layout.classes))
            if layout.group:
                groups.append(np.asarray(batch[layout.group].to_pylist()))
            advance(len(pictures))
    if not x:
        raise DataError(f"{where} has no rows")
    return _Part(np.concatenate(x), np.concatenate(y), np.concatenate(groups) if groups else None)


def _batches(table: Any, columns: list[str]) -> Iterator[Any]:
    return iter(table.select_columns(columns).with_format("arrow").iter(batch_size=BATCH))


def _labels(column: Any, classes: tuple[str, ...]) -> Rows:
    """Class indices of a column of indices or of class names."""
    values = column.to_numpy()
    if values.dtype.kind in "iu":
        return np.asarray(values, np.int64)
    index = {name: position for position, name in enumerate(classes)}
    return np.array([index.get(str(value), -1) for value in values], np.int64)


def decode_pictures(
    pictures: list[bytes | None], channels: int, pool: ThreadPoolExecutor, where: str
) -> Array:
    """Encoded pictures (PNG, JPEG, ...) of one size as an array uint8 [n, C, H, W]."""
    decoded = list(pool.map(_decode, pictures, [channels] * len(pictures)))
    odd = next((index for index, one in enumerate(decoded) if one is None), None)
    if odd is not None:
        raise DataError(f"cannot read {where}: it contains a damaged picture. Get it again")
    shapes = {one.shape for one in decoded if one is not None}
    if len(shapes) > 1:
        sizes = listed(map(size, sorted(shapes)))
        raise DataError(f"{where} has pictures of different sizes: {sizes}")
    stacked = np.stack([one for one in decoded if one is not None])
    return (
        stacked[:, None] if channels == 1 else np.ascontiguousarray(stacked.transpose(0, 3, 1, 2))
    )


def _decode(picture: bytes | None, channels: int) -> Array | None:
    from PIL import Image

    mode = "L" if channels == 1 else "RGB"
    try:
        with Image.open(BytesIO(picture or b"")) as image:
            return np.asarray(image if image.mode == mode else image.convert(mode))
    except (OSError, ValueError, SyntaxError):
        return None
