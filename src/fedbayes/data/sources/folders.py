"""Folders of pictures: one for each class, with folders train and test or of clients above."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbayes.core.wording import listed, size
from fedbayes.data.dataset import Array, Dataset, build_dataset
from fedbayes.data.progress import progress
from fedbayes.data.source_settings import SourceSettings
from fedbayes.data.sources.labels import group_indices, read_target
from fedbayes.data.sources.pictures import Framing, framing
from fedbayes.data.sources.spool import spool
from fedbayes.errors import DataError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
PARTS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
BATCH = 256


@dataclass(frozen=True)
class Picture:
    """A file, and what the folders above it say of it."""

    file: Path
    kind: str
    """Its class."""
    client: str = ""
    part: str = ""
    """train, test, or nothing."""


def picture_files(folder: Path) -> list[Path]:
    """All pictures below a folder, hidden ones left out, in rising order."""
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith((".", "__")))
        found += [
            Path(place, file)
            for file in sorted(files)
            if Path(file).suffix.lower() in SUFFIXES and not file.startswith(".")
        ]
    return found


def sort_pictures(folder: Path, files: Sequence[Path]) -> list[Picture]:
    """Pictures by the folders above them: `CLASS`, `CLIENT/CLASS`, and `train` and `test` above
    either, or between the two.

    Raises:
        DataError: folders are not as deep for all, or there are others besides train and test.
    """
    if not files:
        raise DataError(f"{folder} contains no pictures ({', '.join(SUFFIXES)})")
    pictures = [_placed(folder, file) for file in files]
    parts = Counter(picture.part for picture in pictures)
    if parts[""] and len(parts) > 1:
        odd = next(picture.file for picture in pictures if not picture.part)
        raise DataError(
            f"{odd} is in neither train nor test, unlike others in {folder}. Rename its folder, "
            "or move it elsewhere"
        )
    if "test" in parts and "train" not in parts:
        raise DataError(f"{folder} has pictures in a folder test, but none in a folder train")
    deep = Counter(bool(picture.client) for picture in pictures)
    if len(deep) > 1:
        one, other = (next(p.file for p in pictures if bool(p.client) == is_) for is_ in deep)
        raise DataError(
            f"{one} and {other} are at different depths. Put all pictures into CLASS/, or all "
            "into CLIENT/CLASS/"
        )
    return sorted(pictures, key=lambda picture: picture.part == "test")


def _placed(folder: Path, file: Path) -> Picture:
    names = list(file.relative_to(folder).parts[:-1])
    part = ""
    for place in (0, 1):
        if len(names) > place + 1 and names[place].lower() in PARTS:
            part = PARTS[names.pop(place).lower()]
            break
    if len(names) not in (1, 2):
        where = "not in the folder of a class" if not names else "too deep"
        raise DataError(
            f"{file} is {where}. Put pictures into CLASS/ or CLIENT/CLASS/ (optionally inside "
            f"train/ and test/), below {folder}"
        )
    return Picture(file, names[-1], names[0] if len(names) == 2 else "", part)


def read_folders(
    folder: Path, files: Sequence[Path], settings: SourceSettings, kinds: Sequence[str] = ()
) -> Dataset:
    """Decode the pictures below a folder; memory for a few of them at a time is enough.

    Args:
        folder: the user's.
        files: the pictures below it.
        settings: size, crop and processor, names of classes.
        kinds: kinds of target of which it is to be one; none: classes.

    Raises:
        DataError: a picture is damaged or of another size (names it), or folders are not sorted as
            they should be.
    """
    import pandas as pd

    pictures = sort_pictures(folder, files)
    notes: list[str] = []
    labels = pd.DataFrame({"class": _numbered([picture.kind for picture in pictures])})
    y, target = read_target(labels, settings.classes, kinds or ("class",), str(folder), notes)
    clients = np.array([picture.client for picture in pictures]) if pictures[0].client else None
    groups, names = group_indices(clients, str(folder), notes)
    frame = framing(settings)
    tested = [picture.part for picture in pictures].count("test")
    x = spool(_decoded(pictures, frame), len(pictures))
    if names:
        notes.append(
            f"{folder}: pictures are in two levels of folders; the upper one is read as the "
            f"client: {listed(names, 3)}"
        )
    return build_dataset(
        settings.name,
        x,
        y,
        target,
        official_train=len(pictures) - tested if tested else None,
        groups=groups,
        group_names=names,
        scale=settings.scale or frame.scale,
        notes=tuple(notes),
        statistics=frame.statistics,
    )


def _numbered(names: list[str]) -> list[Any]:
    """Names of classes, as numbers where all are: 10 follows 9."""
    plain = all(name.isascii() and name.isdigit() and str(int(name)) == name for name in names)
    return [int(name) for name in names] if plain else list(names)


def _decoded(pictures: Sequence[Picture], frame: Framing) -> Iterator[Array]:
    """Batches of pictures uint8 [n, C, H, W]."""
    if not frame.channels:
        frame = _with_channels(pictures, frame)
    first: tuple[Path, tuple[int, ...]] | None = None
    with ThreadPoolExecutor() as pool, progress("decoding", len(pictures)) as advance:
        for start in range(0, len(pictures), BATCH):
            batch = [picture.file for picture in pictures[start : start + BATCH]]
            arrays = list(pool.map(lambda file: _one(file, frame), batch))
            for file, array in zip(batch, arrays, strict=True):
                first = first or (file, array.shape)
                if array.shape != first[1]:
                    raise DataError(
                        f"{file} is {size(array.shape)} (channels, height, width), and {first[0]} "
                        f"is {size(first[1])}. Set data.size to resize all pictures"
                    )
            yield np.stack(arrays)
            advance(len(batch))


def _one(file: Path, frame: Framing) -> Array:
    return frame.array(frame.open(file, str(file)), str(file))


def _with_channels(pictures: Sequence[Picture], frame: Framing) -> Framing:
    """With one channel if all pictures are grey, else three."""
    from dataclasses import replace

    from fedbayes.data.sources.pictures import GREY

    with ThreadPoolExecutor() as pool:
        modes = pool.map(lambda picture: _mode(picture.file), pictures)
        grey = all(mode in GREY for mode in modes)
    return replace(frame, channels=1 if grey else 3)


def _mode(file: Path) -> str:
    """The mode of a picture, of which only the head is read."""
    from PIL import Image

    try:
        with Image.open(file) as image:
            return str(image.mode)
    except Exception:  # Pillow raises of many classes
        return "L"
