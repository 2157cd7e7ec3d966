"""Decoded data sets on disk, read as memory maps.

A data set is decoded once into a folder of plain `.npy` arrays and one JSON file. The folder
is written under a temporary name and renamed when complete, so a killed process leaves no partial
data set. Of two processes that decode at the same time, the first one wins.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs

from fedbayes.core.targets import Target
from fedbayes.data.dataset import Dataset
from fedbayes.data.tables.columns import Column
from fedbayes.data.tokens import Tokens
from fedbayes.errors import DataError, told_as

ENVIRONMENT = "FEDBAYES_CACHE"
_FORMAT = 10
_ARRAYS = ("x", "y", "groups", "mean", "std")
_LISTS = ("names", "center", "scale")
_ABANDONED = 24 * 3600


def cache_folder() -> Path:
    """Where decoded data sets are kept: FEDBAYES_CACHE, or the user's cache folder."""
    return Path(os.environ.get(ENVIRONMENT) or platformdirs.user_cache_dir("fedbayes"))


def writing(folder: Path) -> AbstractContextManager[None]:
    """Where decoded data cannot be written, errors name the folder and the way out."""
    after = f". Free some space, or set another folder in {ENVIRONMENT}"
    return told_as(DataError, f"cannot write decoded data to {folder}", OSError, after=after)


def fingerprint(files: Iterable[Path], *options: object) -> str:
    """A short name for the state of these files (name, size, time) and options."""
    digest = sha256(repr((_FORMAT, options)).encode())
    for file in files:
        with told_as(DataError, f"cannot read {file}", OSError):
            status = file.stat()
        digest.update(f"|{file.resolve()}|{status.st_size}|{status.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def cached(name: str, key: str, build: Callable[[], Dataset]) -> Dataset:
    """The data set kept under this name and key, built and kept first if it is not there.

    Args:
        name: Name of the data set, which the folder bears.
        key: Fingerprint of its source.
        build: Decodes the source.

    Raises:
        DataError: The cache folder cannot be written, or `build` says so.
    """
    place = cache_folder() / f"{name}-{key}"
    kept = _open(place)
    if kept is not None:
        return kept
    built = build()
    with writing(place.parent):
        _keep(built, place)
    kept = _open(place)
    return built if kept is None else kept


def _open(place: Path) -> Dataset | None:
    """The data set in this folder; None if it is absent or damaged."""
    try:
        content: dict[str, Any] = json.loads((place / "dataset.json").read_text("utf-8"))
        stored = content.pop("arrays")
        for name in ("group_names", "features", "notes"):
            content[name] = tuple(content[name])
        content["columns"] = tuple(
            Column(**{**column, "categories": tuple(column["categories"])})
            for column in content["columns"]
        )
        target = content["target"]
        content["target"] = Target(target["kind"], *(tuple(target[name]) for name in _LISTS))
        for name in _ARRAYS:
            file = place / f"{name}.npy"
            content[name] = np.load(file, mmap_mode="r") if name in stored else None
        content["tokens"] = Tokens(**content["tokens"]) if content["tokens"] else None
        return Dataset(**content)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(dataset: Dataset, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    _sweep(place.parent)
    beside = Path(tempfile.mkdtemp(prefix=".new-", dir=place.parent))
    try:
        plain = {field.name: getattr(dataset, field.name) for field in fields(dataset)}
        arrays = {name: plain.pop(name) for name in _ARRAYS}
        for name, array in arrays.items():
            if array is not None:
                np.save(beside / f"{name}.npy", array, allow_pickle=False)
        plain["target"] = asdict(dataset.target)
        plain["tokens"] = asdict(dataset.tokens) if dataset.tokens is not None else None
        plain["columns"] = [asdict(column) for column in dataset.columns]
        plain["arrays"] = [name for name, array in arrays.items() if array is not None]
        (beside / "dataset.json").write_text(json.dumps(plain), "utf-8")
        if place.exists() and _open(place) is None:
            shutil.rmtree(place, ignore_errors=True)
        try:
            beside.rename(place)
        except OSError:
            if not place.exists():
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what decodes that were killed left behind."""
    for leftover in folder.glob(".new-*"):
        try:
            if time.time() - leftover.stat().st_mtime > _ABANDONED:
                shutil.rmtree(leftover, ignore_errors=True)
        except FileNotFoundError:
            continue
