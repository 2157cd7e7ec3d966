"""LEAF's JSON format: `users`, `num_samples`, and `user_data` with x and y of each user."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from fedbayes.core.categories import normal
from fedbayes.core.wording import listed, size
from fedbayes.data.dataset import Array, Dataset, build_dataset
from fedbayes.data.intake import Narrowing
from fedbayes.data.progress import progress
from fedbayes.data.sources.files import PARTS, index_names, parts_by_name, reading
from fedbayes.errors import DataError


def leaf_files(folder: Path) -> dict[str, list[Path]]:
    """The JSON files of a folder by part; all are of one part where none is named so."""
    parts = parts_by_name(folder, ".json")
    if set(parts) == set(PARTS):
        return parts
    every = sorted(folder.rglob("*.json"))
    return {"train": every} if every else {}


def read_leaf(
    name: str,
    files: dict[str, list[Path]],
    *,
    classes: tuple[str, ...] | None = None,
    picture: tuple[int, ...] | None = None,
) -> Dataset:
    """Read LEAF JSON files; every user is a natural client.

    The official split is kept where all users of the test part also train: LEAF can also
    split by user, which leaves clients with nothing to train on.

    Args:
        name: Name of the data set.
        files: Files of the train and test parts.
        classes: Names of the classes, if y holds indices into them; else the distinct values.
        picture: Shape (C, H, W) of samples that are pictures with values in [0, 1], which are
            stored in 8 bits.

    Raises:
        DataError: A file is damaged or of another format.
    """
    notes: list[str] = []
    x, y, users, official = read_users(name, files, notes)
    if classes is None:
        y, classes = index_names(y)
    elif len(y) and (y.min() < 0 or y.max() >= len(classes)):
        raise DataError(f"{name}: a label is outside of its {len(classes)} classes")
    groups, group_names = index_names(users)
    if picture is not None:
        if x.shape[1] != np.prod(picture):
            raise DataError(f"{name}: a picture has {x.shape[1]} values, not {size(picture)}")
        x = np.rint(np.clip(x, 0, 1) * 255).astype(np.uint8).reshape(-1, *picture)
    return build_dataset(
        name,
        x,
        y.astype(np.int64),
        classes,
        official_train=official,
        groups=groups,
        group_names=group_names,
        scale=255.0 if picture is not None else 1.0,
        notes=tuple(notes),
    )


def read_users(
    name: str, files: dict[str, list[Path]], notes: list[str]
) -> tuple[Array, Array, Array, int | None]:
    """Samples float32 [N, D], labels [N], users [N], and the length of the training part.

    That is None if there is no official split, or one by user, which is noted.

    Raises:
        DataError: A file is damaged or of another format.
    """
    parts = [_read_part(f"{name} {part}", paths, notes) for part, paths in files.items()]
    x, y, users = (np.concatenate([part[field] for part in parts]) for field in range(3))
    if len(parts) == 1:
        return x, y, users, None
    trained, tested = (set(part[2].tolist()) for part in parts)
    if tested <= trained:
        return x, y, users, len(parts[0][1])
    new = sorted(tested - trained)
    notes.append(
        f"{files['test'][0]}: {len(new):,} of {len(tested):,} users of the test part "
        f"({np.isin(parts[1][2], new).sum():,} samples) are not in the training part: "
        f"{listed(new)}; so the official split is not used: all {len(tested | trained):,} users "
        "train and are tested on their own samples. Give only the training files to leave the "
        "other users out"
    )
    return x, y, users, None


def _read_part(description: str, files: list[Path], notes: list[str]) -> tuple[Array, Array, Array]:
    """Samples float32 [N, D], labels [N] and user names [N] of some files."""
    x: list[Array] = []
    y: list[Array] = []
    users: list[str] = []
    narrowing = Narrowing()
    with progress(f"reading {description}", len(files)) as advance:
        for file in files:
            with reading(file):
                content = json.loads(file.read_text("utf-8"))
                for user, data in _user_data(content, file, notes).items():
                    x.append(narrowing.add(np.atleast_2d(np.asarray(data["x"], np.float64))))
                    y.append(np.asarray(data["y"], np.float64).reshape(-1))
                    users.extend([user] * len(y[-1]))
                    if x[-1].shape[0] != len(y[-1]):
                        raise DataError(f"{file}: x and y of user '{user}' differ in length")
            advance(1)
    notes += narrowing.notes((), str(files[0].parent))
    widths = {part.shape[1] for part in x}
    if len(widths) != 1:
        raise DataError(
            f"{files[0].parent}: samples differ in length: {listed(sorted(widths))} values"
        )
    return np.concatenate(x), np.concatenate(y), np.array(users)


def _user_data(content: Any, file: Path, notes: list[str]) -> dict[str, dict[str, Any]]:
    if not isinstance(content, dict) or not isinstance(content.get("user_data"), dict):
        raise DataError(f"{file} is not a LEAF file: it has no user_data")
    data = content["user_data"]
    users = content.get("users") or list(data)
    if empty := [str(user) for user in users if not data[user]["y"]]:
        notes.append(f"{file}: {listed(empty)} left out, because they have no samples")
    return {normal(user): data[user] for user in users if data[user]["y"]}
