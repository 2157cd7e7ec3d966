"""The format of MNIST's own files, IDX: arrays of bytes behind their sizes, gzipped or not."""

import gzip
import math
from pathlib import Path

import numpy as np

from fedbayes.core.wording import size
from fedbayes.data.dataset import Array, Dataset, build_dataset
from fedbayes.data.sources.files import reading
from fedbayes.errors import DataError

_FILES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
_BYTES = 8
"""The code of their type."""


def idx_files(folder: Path) -> list[Path]:
    """Images and labels of the training part and of the test part, at any depth; empty if one is
    missing.
    """
    found = []
    for name in _FILES:
        # Some archives have a dot in place of the last dash but one.
        patterns = (f"{name}-ubyte", f"{name.replace('-idx', '.idx')}-ubyte")
        there = (f for p in patterns for end in ("", ".gz") for f in sorted(folder.rglob(p + end)))
        found.append(next((file for file in there if file.is_file()), None))
    files = [file for file in found if file is not None]
    return files if len(files) == len(_FILES) else []


def read_idx(name: str, classes: tuple[str, ...], files: list[Path]) -> Dataset:
    """Read grey images and their labels.

    Raises:
        DataError: a file is damaged or of another format, or they do not fit together.
    """
    train, train_labels, test, test_labels = (
        _read(file, axes) for file, axes in zip(files, (3, 1, 3, 1), strict=True)
    )
    for x, y, file in ((train, train_labels, files[0]), (test, test_labels, files[2])):
        if len(x) != len(y):
            raise DataError(f"{file} has {len(x):,} images, but {len(y):,} labels")
    if train.shape[1:] != test.shape[1:]:
        raise DataError(
            f"{name}: images are {size(train.shape[1:])} in {files[0]} and {size(test.shape[1:])} "
            f"in {files[2]}"
        )
    y = np.concatenate([train_labels, test_labels]).astype(np.int64)
    if len(y) and y.max() >= len(classes):
        raise DataError(f"{name}: label {y.max()} is outside of its {len(classes)} classes")
    x = np.concatenate([train, test])[:, None]
    return build_dataset(name, x, y, classes, official_train=len(train), scale=255.0)


def _read(file: Path, axes: int) -> Array:
    """An array of bytes with so many axes."""
    with reading(file), (gzip.open if file.suffix == ".gz" else open)(file, "rb") as opened:
        content = opened.read()
        start = 4 + 4 * axes
        if content[:4] != bytes((0, 0, _BYTES, axes)) or len(content) < start:
            raise ValueError(f"it is not an IDX file of bytes with {axes} axes")
        shape = [int(n) for n in np.frombuffer(content, ">u4", axes, 4)]
        if math.prod(shape) != len(content) - start:
            raise ValueError(
                f"it has {len(content) - start:,} bytes for an array of {size(tuple(shape))}"
            )
        return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
