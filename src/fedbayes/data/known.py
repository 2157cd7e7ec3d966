"""The built-in data sets: what each is, where its files are, and how they are read."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from fedbayes.core.targets import Target
from fedbayes.core.wording import listed
from fedbayes.data.dataset import Dataset, build_dataset
from fedbayes.data.names import CIFAR10, CIFAR100, CLOTHES, DIGITS, LETTERS
from fedbayes.data.source_settings import SourceSettings
from fedbayes.data.sources import einstein, har, idx, leaf
from fedbayes.data.sources.files import PARTS, parts_by_name
from fedbayes.data.sources.images import ImageLayout, read_images
from fedbayes.errors import DataError


@dataclass(frozen=True)
class Entry:
    """What a user may want to know of a data set before taking it."""

    name: str
    """Name for the configuration."""
    what: str
    """What it holds, in a line for lists of data sets."""
    samples: int
    """Number of samples of the whole."""
    shape: tuple[int, ...]
    """Shape of one sample."""
    classes: int
    """Number of classes; 0 if the target is real."""
    groups: str
    """Its natural clients; empty if there are none."""
    source: str
    """Where to get it."""
    available: bool = False
    """Whether it can be read without the network, from the data folder."""


Find = Callable[[Path], list[Path]]
"""The files of a set in its folder; empty if they are not there."""

Read = Callable[[Path | None, SourceSettings], Dataset]
"""Reads a set from its folder, or from the hub if that is None."""


@dataclass(frozen=True)
class KnownSource:
    """A built-in data set and how to read it."""

    entry: Entry
    folder: str
    """Its folder in the data folder; empty if it needs none."""
    find: Find
    """Looks for its files."""
    read: Read
    """Reads the files that were found into a data set."""
    on_hub: bool = True
    """Whether the Hugging Face hub has it."""


def _read_digits(folder: Path | None, settings: SourceSettings) -> Dataset:
    from sklearn.datasets import load_digits

    content = load_digits()
    x = content.images.astype(np.uint8)[:, None]
    return build_dataset("digits", x, content.target, DIGITS, scale=16.0)


def _read_diabetes(folder: Path | None, settings: SourceSettings) -> Dataset:
    from sklearn.datasets import load_diabetes

    content = load_diabetes(scaled=False)
    x = content.data.astype(np.float32)
    target = Target("real", ("progression",))
    names = tuple(content.feature_names)
    return build_dataset("diabetes", x, content.target, target, features=names)


def _find_parquet(folder: Path) -> list[Path]:
    return [file for part in parts_by_name(folder, ".parquet").values() for file in part]


def _read_parquet(
    name: str, layout: ImageLayout, hub: str, folder: Path | None, settings: SourceSettings
) -> Dataset:
    files = None if folder is None else parts_by_name(folder, ".parquet")
    if files is not None and layout.group is None and len(files) < len(PARTS):
        raise DataError(
            f"{folder} needs train and test Parquet files, but has only {listed(files)}"
        )
    return read_images(name, layout, files, hub)


def _find_parquet_or_idx(folder: Path) -> list[Path]:
    return _find_parquet(folder) or idx.idx_files(folder)


def _read_parquet_or_idx(
    name: str, layout: ImageLayout, hub: str, folder: Path | None, settings: SourceSettings
) -> Dataset:
    if folder is not None and not _find_parquet(folder):
        return idx.read_idx(name, layout.classes, idx.idx_files(folder))
    return _read_parquet(name, layout, hub, folder, settings)


def _find_leaf(folder: Path) -> list[Path]:
    return [file for part in leaf.leaf_files(folder).values() for file in part]


def _read_femnist(folder: Path | None, settings: SourceSettings) -> Dataset:
    if folder is not None and not _find_parquet(folder):
        files = leaf.leaf_files(folder)
        return leaf.read_leaf("femnist", files, classes=DIGITS + LETTERS, picture=(1, 28, 28))
    layout = ImageLayout("image", "character", DIGITS + LETTERS, group="writer_id")
    return _read_parquet("femnist", layout, "flwrlabs/femnist", folder, settings)


def _read_har(folder: Path | None, settings: SourceSettings) -> Dataset:
    files = har.text_files(folder) if folder is not None else []
    if files:
        return har.read_text("har", files)
    return har.read_parquet("har", None if folder is None else parts_by_name(folder, ".parquet"))


def _read_vehicle(folder: Path | None, settings: SourceSettings) -> Dataset:
    return leaf.read_leaf("vehicle", leaf.leaf_files(folder or Path()))


def _find_sheet(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.xlsx"))[:1]


def _read_einstein(folder: Path | None, settings: SourceSettings) -> Dataset:
    (file,) = _find_sheet(folder or Path())
    return einstein.read_einstein("einstein", file, settings.drops_incomplete)


def _images(
    name: str,
    what: str,
    samples: int,
    shape: tuple[int, ...],
    layout: ImageLayout,
    hub: str,
    folder: str = "",
) -> KnownSource:
    """A set of pictures on the hub, without natural clients."""
    source = f"https://huggingface.co/datasets/{hub}"
    folder = folder or name
    grey = layout.channels == 1
    return KnownSource(
        Entry(name, what, samples, shape, len(layout.classes), "", source),
        folder=folder,
        find=_find_parquet_or_idx if grey else _find_parquet,
        read=partial(_read_parquet_or_idx if grey else _read_parquet, folder, layout, hub),
    )


_MNIST = ImageLayout("image", "label", DIGITS)
_FASHION = ImageLayout("image", "label", CLOTHES)
_CIFAR10 = ImageLayout("img", "label", CIFAR10, channels=3)
_CIFAR100 = ImageLayout("img", "fine_label", CIFAR100, channels=3)


_SETS = (
    KnownSource(
        Entry(
            "digits",
            "handwritten digits, 8 x 8 pixels, 17 grey levels",
            1797,
            (1, 8, 8),
            10,
            "",
            "scikit-learn, which includes it",
        ),
        folder="",
        find=lambda folder: [],
        read=_read_digits,
    ),
    KnownSource(
        Entry(
            "diabetes",
            "progression of diabetes after a year, from ten baseline measurements",
            442,
            (10,),
            0,
            "",
            "scikit-learn, which includes it",
        ),
        folder="",
        find=lambda folder: [],
        read=_read_diabetes,
    ),
    _images("mnist", "handwritten digits", 70_000, (1, 28, 28), _MNIST, "ylecun/mnist"),
    _images(
        "permuted-mnist",
        "handwritten digits with a different pixel order at each client",
        70_000,
        (1, 28, 28),
        _MNIST,
        "ylecun/mnist",
        folder="mnist",
    ),
    _images(
        "fashion-mnist",
        "pieces of clothing",
        70_000,
        (1, 28, 28),
        _FASHION,
        "zalando-datasets/fashion_mnist",
    ),
    _images("cifar10", "colour photographs", 60_000, (3, 32, 32), _CIFAR10, "uoft-cs/cifar10"),
    _images("cifar100", "colour photographs", 60_000, (3, 32, 32), _CIFAR100, "uoft-cs/cifar100"),
    KnownSource(
        Entry(
            "femnist",
            "handwritten digits and letters by writer",
            814_277,
            (1, 28, 28),
            62,
            "3,597 writers",
            "https://huggingface.co/datasets/flwrlabs/femnist, or LEAF's JSON files",
        ),
        folder="femnist",
        find=lambda folder: _find_parquet(folder) or _find_leaf(folder),
        read=_read_femnist,
    ),
    KnownSource(
        Entry(
            "har",
            "human activities by smartphone sensors",
            10_299,
            (561,),
            6,
            "30 subjects",
            "https://huggingface.co/datasets/flwrlabs/ucihar, or "
            "https://archive.ics.uci.edu/dataset/240",
        ),
        folder="har",
        find=lambda folder: har.text_files(folder) or _find_parquet(folder),
        read=_read_har,
    ),
    KnownSource(
        Entry(
            "vehicle",
            "vehicles by acoustic and seismic sensors (VSN)",
            68_532,
            (100,),
            2,
            "23 sensors",
            "event.zip of the University of Massachusetts (Duarte and Hu, 2004), as LEAF JSON",
        ),
        folder="vehicle",
        find=_find_leaf,
        read=_read_vehicle,
        on_hub=False,
    ),
    KnownSource(
        Entry(
            "einstein",
            "COVID-19 by age and blood count",
            5_644,
            (15,),
            2,
            "",
            "https://www.kaggle.com/datasets/einsteindata4u/covid19",
        ),
        folder="einstein",
        find=_find_sheet,
        read=_read_einstein,
        on_hub=False,
    ),
)

KNOWN = {known.entry.name: known for known in _SETS}
"""The built-in data sets by name."""
