"""Real unlabelled samples instead of a prior: pictures in a folder, or NPZ, Parquet or CSV."""

from collections.abc import Sequence
from copy import copy
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from fedbayes.core.files import open_npz
from fedbayes.core.wording import listed, size
from fedbayes.data.dataset import Array
from fedbayes.data.intake import Narrowing, arrange
from fedbayes.data.progress import progress
from fedbayes.data.source_settings import SourceSettings
from fedbayes.data.sources.files import reading
from fedbayes.data.sources.own import SUFFIXES, own_files, plain_array
from fedbayes.data.sources.pictures import DEEP
from fedbayes.data.sources.rows import holds_pictures
from fedbayes.data.sources.tables import read_tables
from fedbayes.data.tables.cells import code
from fedbayes.data.tables.columns import Column
from fedbayes.data.tables.encoding import encode, unknown
from fedbayes.errors import DataError, did_you_mean
from fedbayes.inputs.prior import InputPrior

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""Suffixes of the files in a folder that are taken for pictures."""
MODES = {1: "L", 3: "RGB"}
"""Of pictures, by their channels."""
LABEL = "label"
"""A column of a table that is left out where it is one too many."""
ASIDE = 5
"""One of this number of samples is held out, to measure how far a network is from the ensemble."""
FEWEST = 20
"""Samples of which some are held out."""
MEMORY = 1 << 30
"""Bytes of pictures that are kept; of more, some are chosen at random."""


class RealSamples(InputPrior):
    """Samples that somebody has: each batch is drawn from them, without repetition if it can be.
    One in `ASIDE` is held out.

    Pictures of another size are cut to the shape of an input from their middle and scaled.

    Args:
        path: a folder of pictures; or a file, .npz (an array x, or the only one), .parquet or .csv;
            or a folder with a file named train of these kinds.
        shape: of one input.
        features: columns of a table to take, in this order; by default all but one called label.
        columns: those that are encoded as the features, where they are no plain numbers.

    Raises:
        DataError: there is nothing of a known format, it is damaged, or of another shape.
    """

    name = "samples"

    def __init__(
        self,
        path: Path,
        shape: tuple[int, ...],
        features: Sequence[str] = (),
        columns: Sequence[Column] = (),
    ) -> None:
        notes: list[str] = []
        self._take(_read(path, shape, tuple(features), tuple(columns), notes), path, notes)

    def _take(self, x: Array, path: Path, notes: list[str]) -> None:
        """Take samples, of which some are set aside."""
        super().__init__(x.shape[1:])
        self.mirrors = len(self.shape) == 3 and self.shape[0] > 1  # as photographs are
        self._x = x
        self._rows = self._aside = np.arange(len(self._x))
        if len(self._x) >= FEWEST:
            order = np.random.default_rng(0).permutation(len(self._x))
            self._aside, self._rows = np.split(order, [len(order) // ASIDE])
        else:
            notes.append(
                f"{path}: {len(self._x)} samples are too few for held-out ones, so divergences are "
                "measured on the inputs of the fit"
            )
        self.notes = tuple(notes)
        self.assumes = f"as {len(self._x):,} unlabelled samples of {path.name}"

    @property
    def held_out(self) -> "RealSamples":
        """Draws from those that are set aside."""
        other = copy(self)
        other._rows = self._aside
        return other

    def draw(self, count: int, rng: np.random.Generator) -> Tensor:
        """As `InputPrior.draw`, with repetition if there are too few samples."""
        rows = self._rows[rng.choice(len(self._rows), count, replace=count > len(self._rows))]
        x = torch.from_numpy(self._x[rows].astype(np.float32))
        return x / 255 if self._x.dtype == np.uint8 else x


def _read(
    path: Path,
    shape: tuple[int, ...],
    features: tuple[str, ...],
    columns: tuple[Column, ...],
    notes: list[str],
) -> Array:
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix.lower() in PICTURES and f.is_file())
        if files:
            return _pictures(files, shape, str(path), notes)
    found = own_files(path)["train"]
    name = found[0].name.lower()
    if not name.endswith(SUFFIXES):
        raise DataError(f"{path}: unknown format. Give {listed(SUFFIXES)}, or a folder of pictures")
    if name.endswith(".npz"):
        x = _array(found[0], shape)
    else:
        x = _table(found, shape, features, columns, notes)
    return _checked(x, shape, str(found[0]), notes)


def _array(file: Path, shape: tuple[int, ...]) -> Array:
    with reading(file), open_npz(file) as arrays:
        name = "x" if "x" in arrays.files or len(arrays.files) != 1 else arrays.files[0]
        if name not in arrays.files:
            raise DataError(
                f"{file} has no array x{did_you_mean('x', arrays.files)}. It has "
                f"{listed(arrays.files)}"
            )
        x = plain_array(arrays, name, file)
    if x.dtype.kind not in "iufb":
        raise DataError(f"{file}: {name} must be numbers, but has type {x.dtype}")
    if x.shape[1:] == shape:
        return x if x.dtype == np.uint8 and len(shape) == 3 else x.astype(np.float32)
    last = x.ndim == 4 and (x.shape[3], *x.shape[1:3]) == shape
    return Narrowing().add(arrange(x, "last" if last else "auto", str(file))[0])


def _table(
    files: list[Path],
    shape: tuple[int, ...],
    features: tuple[str, ...],
    columns: tuple[Column, ...],
    notes: list[str],
) -> Array:
    frame, *_ = read_tables({"train": files}, SourceSettings(), notes)
    where = str(files[0])
    for name in [column.name for column in columns] or features:
        if name not in frame.columns:
            raise DataError(
                f"{where} has no column '{name}'{did_you_mean(name, frame.columns)}. It has "
                f"{listed(frame.columns)}"
            )
    if columns:
        coded = code(frame, columns, where)
        notes += [one.told(where) for one in unknown(coded, columns)]
        return encode(coded, columns)
    pictured = [name for name in features or frame.columns if holds_pictures(frame[name])]
    if pictured:
        cells = frame[pictured[0]]
        pictures = [cell["bytes"] if isinstance(cell, dict) else None for cell in cells]
        return _pictures(pictures, shape, where, notes)
    names = features or tuple(frame.columns)
    if not features and len(names) == prod(shape) + 1 and LABEL in names:
        names = tuple(name for name in names if name != LABEL)
        notes.append(f"{where}: the column '{LABEL}' is left out")
    if len(names) != prod(shape):
        raise DataError(
            f"{where} has {len(names)} columns, but an input has {prod(shape)} values. Choose "
            f"columns of {listed(names)}"
        )
    return code(frame, [Column(name) for name in names], where).reshape(-1, *shape)


def _checked(x: Array, shape: tuple[int, ...], where: str, notes: list[str]) -> Array:
    """Samples of this shape, finite, images in [0, 1]."""
    if x.shape[1:] != shape or not len(x):
        raise DataError(
            f"{where} has {len(x):,} samples of {size(x.shape[1:])}, but an input is {size(shape)}"
        )
    if x.dtype == np.uint8:
        return x
    whole = np.isfinite(x).reshape(len(x), -1).all(1)
    if not whole.any():
        raise DataError(f"{where}: every sample has a value that is missing or infinite. Impute it")
    if not whole.all():
        notes.append(
            f"{where}: {int((~whole).sum()):,} of {len(x):,} samples are left out, because they "
            "have missing or infinite values"
        )
    x = x[whole]
    if len(shape) == 3 and (x.min() < 0 or x.max() > 1):
        raise DataError(
            f"{where}: values of images must be in [0, 1] or 8-bit integers, but these are from "
            f"{x.min():g} to {x.max():g}. Give unscaled images"
        )
    return x


def _pictures(
    pictures: Sequence[Path | bytes | None], shape: tuple[int, ...], where: str, notes: list[str]
) -> Array:
    """Pictures cut and scaled to one size, uint8 [n, C, H, W]."""
    if len(shape) != 3 or shape[0] not in MODES:
        raise DataError(f"{where} has pictures with 1 or 3 channels, but an input is {size(shape)}")
    most = max(1, MEMORY // prod(shape))
    if len(pictures) > most:
        chosen = np.sort(np.random.default_rng(0).choice(len(pictures), most, replace=False))
        notes.append(f"{where}: {most:,} of {len(pictures):,} pictures are used, chosen at random")
        pictures = [pictures[index] for index in chosen.tolist()]
    x = np.empty((len(pictures), *shape), np.uint8)
    with progress(f"reading {where}", len(pictures)) as advance:
        for index, picture in enumerate(pictures):
            x[index] = _fitted(picture, shape, where if isinstance(picture, bytes) else picture)
            advance(1)
    return x


def _fitted(picture: Path | bytes | None, shape: tuple[int, ...], where: Any) -> Array:
    channels, height, width = shape
    source = picture if isinstance(picture, Path) else BytesIO(picture or b"")
    with reading(where), Image.open(source) as image:
        if image.mode in DEEP:
            raise DataError(
                f"{where} has more than 8 bits per pixel (mode {image.mode}). Save it with 8 "
                "bits, or give the numbers as an array x in an .npz file"
            )
        upright = ImageOps.exif_transpose(image)
        fitted = ImageOps.fit(upright.convert(MODES[channels]), (width, height))
    array = np.asarray(fitted)
    return array[None] if channels == 1 else array.transpose(2, 0, 1)
