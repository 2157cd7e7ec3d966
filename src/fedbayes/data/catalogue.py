"""Where a data set is looked for, and how it is loaded."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedbayes.data.cache import cached, fingerprint
from fedbayes.data.dataset import CHUNK, Dataset
from fedbayes.data.known import KNOWN, Entry, KnownSource
from fedbayes.data.settings import DataSettings
from fedbayes.data.sources import own
from fedbayes.data.sources.factories import read_factory
from fedbayes.data.sources.files import DROPPED
from fedbayes.data.sources.pictures import framing
from fedbayes.data.tokens import Tokens
from fedbayes.errors import DataError

ENVIRONMENT = "FEDBAYES_DATA"


def load_dataset(settings: DataSettings, kinds: Sequence[str] = ()) -> Dataset:
    """Load a data set, decoding it the first time.

    It is looked for in the data folder (`settings.dir`, or FEDBAYES_DATA) and then on the
    Hugging Face hub. The samples are a read-only memory map of the decoded copy in the cache.

    Args:
        settings: Which data, and where.
        kinds: Kinds of target of which that of own data is to be one, as a likelihood takes them;
            none: the labels decide.

    Raises:
        DataError: It is neither here nor there, or damaged; the message says where it was
            looked for, and where to get it.

    Examples:
        >>> from fedbayes.data import DataSettings, load_dataset
        >>> load_dataset(DataSettings(name="digits")).samples
        1797
    """
    dataset = _load(settings, kinds)
    return replace(dataset, notes=(*dataset.notes, *_without_gaps(dataset, settings)))


def _load(settings: DataSettings, kinds: Sequence[str]) -> Dataset:
    """As `load_dataset`, without what is to be said of settings that have no effect."""
    if settings.generator is not None:
        raise DataError(
            f"{settings.generator} gives the samples of one client at a time, so they are never "
            "all in one place. Give a data set, a file, or your own factory"
        )
    if settings.of_factory:
        return read_factory(settings, kinds)
    if settings.query is not None:
        return own.read_own_query(settings, kinds)
    if settings.path is not None:
        files = own.files_of(settings)
        flat = [file for part in files.values() for file in part]
        key = fingerprint(flat, settings.reading, *kinds, *_pretrained(settings))
        read = cached(settings.name, key, lambda: own.read_own(files, settings, kinds))
        # Not kept with it: the key is of the files that are read.
        return replace(read, notes=(*own.unread(settings.path, files), *read.notes))
    permuted = settings.name == "permuted-mnist"
    known = KNOWN["mnist" if permuted else settings.name]
    root = data_folder(settings.dir)
    place = root / known.folder if root is not None and known.folder else None
    files_found = known.find(place) if place is not None and place.is_dir() else []
    if known.folder and not files_found and not known.on_hub:
        raise DataError(_absent(known, place))
    key = fingerprint(files_found, settings.reading)
    folder = place if files_found else None
    try:
        dataset = cached(known.entry.name, key, lambda: known.read(folder, settings))
    except DataError as error:
        if place is None or folder is not None:
            raise
        raise DataError(f"{error}. fedbayes searched {place} first") from error
    if permuted:
        return replace(dataset, name=settings.name, permuted=True)
    return dataset


def _without_gaps(dataset: Dataset, settings: DataSettings) -> list[str]:
    """That it does not matter what becomes of missing values, where it is said and none is."""
    if settings.missing == "default" or any(DROPPED in note for note in dataset.notes):
        return []
    x = dataset.x
    starts = range(0, len(x), CHUNK) if x.dtype.kind == "f" else ()
    if any(np.isnan(x[start : start + CHUNK]).any() for start in starts):
        return []
    return [f"{dataset.name}: no value is missing, so data.missing has no effect"]


def _pretrained(settings: DataSettings) -> tuple[object, ...]:
    """What decoded data depend on of a pretrained network, besides its name."""
    if settings.processor is None:
        return ()
    if settings.tokens is not None:
        return (Tokens.of(settings.tokens, settings.processor, settings.max_tokens),)
    return (framing(settings),)


def catalogue(folder: Path | None = None) -> list[Entry]:
    """The built-in data sets.

    Args:
        folder: Data folder to look for them in; else FEDBAYES_DATA.
    """
    root = data_folder(folder)
    return [
        replace(
            known.entry,
            available=not known.folder
            or (
                root is not None
                and (root / known.folder).is_dir()
                and bool(known.find(root / known.folder))
            ),
        )
        for known in KNOWN.values()
    ]


def data_folder(folder: Path | None) -> Path | None:
    """The folder with local data, given or in FEDBAYES_DATA; None without either.

    Raises:
        DataError: It is named, but is no folder.
    """
    named = folder or (Path(os.environ[ENVIRONMENT]) if os.environ.get(ENVIRONMENT) else None)
    if named is not None and not named.is_dir():
        raise DataError(f"folder not found: {named}. Correct data.dir or {ENVIRONMENT}")
    return named


def _absent(known: KnownSource, folder: Path | None) -> str:
    looked = f"not in {folder}" if folder else f"neither data.dir nor {ENVIRONMENT} is set"
    return (
        f"{known.entry.name}: {looked}, and it is not on the Hugging Face hub. Get it from "
        f"{known.entry.source}, put it into a folder '{known.folder}', and set data.dir or "
        f"{ENVIRONMENT} to the parent folder"
    )
