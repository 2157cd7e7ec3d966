"""Human activity recognition with smartphones (Anguita et al., 2013): 561 features."""

from pathlib import Path
from typing import Any

import numpy as np

from fedbayes.data.dataset import Array, Dataset, Rows, build_dataset
from fedbayes.data.progress import progress
from fedbayes.data.sources.files import PARTS, index_names, reading
from fedbayes.data.sources.hub import open_hub, open_parquet, quiet
from fedbayes.errors import DataError

ACTIVITIES = (
    "WALKING",
    "WALKING_UPSTAIRS",
    "WALKING_DOWNSTAIRS",
    "SITTING",
    "STANDING",
    "LAYING",
)
HUB = "flwrlabs/ucihar"
_LABELS = ("target", "label", "labels", "activity", "y", "activity_label", "activity_id")
_SUBJECTS = ("subject_id", "subject", "subjects", "user", "user_id")


def text_files(folder: Path) -> list[Path]:
    """The six text files of the UCI archive, at any depth; empty if one is missing."""
    names = [f"{kind}_{part}.txt" for part in PARTS for kind in ("X", "y", "subject")]
    found = [next(iter(sorted(folder.rglob(name))), None) for name in names]
    files = [file for file in found if file is not None]
    return files if len(files) == len(names) else []


def read_text(name: str, files: list[Path]) -> Dataset:
    """Read the six text files of the UCI archive, as `text_files` lists them.

    Its split separates subjects, so it is not used: every subject is a client.
    """
    arrays: list[Array] = []
    with progress(f"reading {name}", len(files)) as advance:
        for file in files:
            with reading(file):
                arrays.append(np.loadtxt(file, np.float32, ndmin=2))
            advance(1)
    x, y, subject = (np.concatenate([arrays[kind], arrays[kind + 3]]) for kind in range(3))
    return _build(name, x, y.reshape(-1).astype(np.int64) - 1, subject.reshape(-1), ())


def read_parquet(name: str, files: dict[str, list[Path]] | None) -> Dataset:
    """Read Parquet files in the layout of the hub, or the hub where there are none.

    The columns of the label and the subject are found by their usual names; all other columns
    of numbers are features. Labels are names of the activities, or count from 0 or 1.
    """
    tables = open_hub(name, HUB) if files is None else open_parquet(files)
    where = HUB if files is None else ", ".join(str(f) for part in files.values() for f in part)
    with quiet(), reading(where):
        frames = [_frame(table) for table in tables.values()]
    import pandas as pd

    frame = pd.concat(frames, ignore_index=True)
    label, subject = _pick(frame, _LABELS, where), _pick(frame, _SUBJECTS, where)
    rest = frame.drop(columns=[c for c in (*_LABELS, *_SUBJECTS) if c in frame.columns])
    features = rest.select_dtypes("number")
    if features.empty:
        raise DataError(f"{where} has no number columns besides label and subject")
    names = tuple(str(column) for column in features.columns)
    x = features.to_numpy(np.float32)
    return _build(name, x, _activity(frame[label].to_numpy()), frame[subject].to_numpy(), names)


def _frame(table: Any) -> Any:
    import pandas as pd

    return pd.concat(
        [batch.to_pandas() for batch in table.with_format("arrow").iter(batch_size=1000)]
    )


def _pick(frame: Any, names: tuple[str, ...], where: str) -> str:
    for name in names:
        if name in frame.columns:
            return name
    raise DataError(f"{where} has none of the columns {', '.join(names)}")


def _activity(values: Array) -> Rows:
    """Indices of activities given as names, or as numbers from 0 or 1."""
    if values.dtype.kind in "iuf":
        return values.astype(np.int64) - int(values.max() == len(ACTIVITIES))
    index = {name: position for position, name in enumerate(ACTIVITIES)}
    words = [str(value).strip().upper().replace(" ", "_") for value in values]
    return np.array([index.get(word, -1) for word in words], np.int64)


def _build(name: str, x: Array, y: Rows, subject: Array, features: tuple[str, ...]) -> Dataset:
    if len(y) and (y.min() < 0 or y.max() >= len(ACTIVITIES)):
        raise DataError(f"{name}: invalid label. Labels are {', '.join(ACTIVITIES)}")
    groups, names = index_names(subject)
    return build_dataset(
        name,
        x,
        y,
        ACTIVITIES,
        groups=groups,
        group_names=tuple(f"subject {subject}" for subject in names),
        features=features,
    )
