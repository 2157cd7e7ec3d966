"""One pool of labelled samples, wherever it came from."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from fedbayes.core.brief import Brief
from fedbayes.core.targets import Target
from fedbayes.data.tables.columns import Column
from fedbayes.data.tokens import Tokens
from fedbayes.errors import DataError

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]

CHUNK = 4096
"""Samples taken at a time when a whole pool is read."""


@dataclass(frozen=True, repr=False)
class Dataset(Brief):
    """A pool of N labelled samples of one shape.

    The samples are stored as the source has them; what a network sees is
    `(x / scale - mean) / std`.

    Examples:
        >>> from fedbayes.data import DataSettings, load_dataset
        >>> from fedbayes.data import Dataset
        >>> data = load_dataset(DataSettings(name="digits"))
        >>> data.shape, len(data.classes)
        ((1, 8, 8), 10)
    """

    name: str
    """Name of the data set."""
    x: Array
    """Samples [N, ...]: uint8 images in the order C, H, W, or float32, where NaN is a missing
    value. Usually a read-only memory map."""
    y: Array
    """Class indices, int64 [N]; of targets without classes their T columns in their own unit,
    float32 [N, T]."""
    target: Target
    """What is to be predicted. Center and scale of a real target are of the training part."""
    official_train: int | None
    """Rows before this one are the official training part and the others the official test
    part; None when the source has no such split, or it does not suit a federation."""
    groups: Rows | None
    """Natural client (writer, subject, sensor) of each row, int64 [N], or None. A row of the
    test part that belongs to no client has -1."""
    group_names: tuple[str, ...]
    """Names of the natural clients."""
    mean: Array
    """Mean per channel of an image, or per feature, of the training part, float32."""
    std: Array
    """Standard deviation likewise; 1 where a channel or feature is constant."""
    scale: float
    """What x is divided by before all else: 255 for images of 8 bits."""
    digest: str
    """SHA-256, in hex, of all that a model sees of these data: the same wherever they lie."""
    features: tuple[str, ...] = ()
    """Names of the features of a table, coded as they are stored."""
    columns: tuple[Column, ...] = ()
    """Columns of the user's own table, of which x are the codes, with the categories of all rows
    (`fedbayes.data.tables.columns`); none elsewhere."""
    permuted: bool = False
    """Whether each client sees its pixels in a fixed order of its own."""
    notes: tuple[str, ...] = ()
    """What a user should know of how the data were read, such as rows that were left out."""
    fixed: bool = False
    """Whether mean and std are given, by a pretrained network for one, and not of the data."""
    tokens: Tokens | None = None
    """How texts became x, if they did."""
    decimal: str = ""
    """What separates decimals in the CSV files of a table: a point or comma; empty where no cell
    says so, or files differ."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the K classes; none if the target has no classes."""
        return self.target.names if self.target.kind == "class" else ()

    @property
    def strata(self) -> Rows:
        """The class of each row, int64 [N]; 0 for all if the target has no classes."""
        return self.y if self.classes else np.zeros(self.samples, np.int64)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample, such as (1, 28, 28) or (100,)."""
        return tuple(self.x.shape[1:])

    @property
    def samples(self) -> int:
        """Number of samples N."""
        return len(self.y)


def build_dataset(
    name: str,
    x: Array,
    y: Array,
    target: Target | tuple[str, ...],
    *,
    official_train: int | None = None,
    groups: Rows | None = None,
    group_names: tuple[str, ...] = (),
    scale: float = 1.0,
    features: tuple[str, ...] = (),
    columns: tuple[Column, ...] = (),
    notes: tuple[str, ...] = (),
    statistics: tuple[Array, Array] | None = None,
    tokens: Tokens | None = None,
    decimal: str = "",
) -> Dataset:
    """A data set of these arrays, checked, with the statistics that standardize it.

    Args:
        name: Name of the data set, for messages.
        x: Samples [N, ...], uint8 or float32.
        y: Class indices [N], or the columns [N, T] of a target without classes.
        target: What is to be predicted; names alone are those of the classes [K].
        official_train: Length of the official training part, if there is one.
        groups: Index into `group_names` of each row [N], if there are natural clients.
        group_names: Names of the natural clients.
        scale: Divisor of x.
        features: Names of the columns of a table.
        columns: Columns of a table of which x are the codes, and features their names.
        notes: What a user should know of how the data were read.
        statistics: Mean and std of each channel or feature, where they are not the data's own.
        tokens: How texts became x, if they did.
        decimal: What separates decimals in its CSV files, if that is known.

    Raises:
        DataError: There are no samples, too few classes, or infinite values.

    Examples:
        >>> import numpy as np
        >>> from fedbayes.data.dataset import build_dataset
        >>> x = np.arange(8.0, dtype=np.float32).reshape(4, 2)
        >>> data = build_dataset("mine", x, np.array([0, 1, 0, 1]), ("no", "yes"))
        >>> data.samples, data.classes
        (4, ('no', 'yes'))
    """
    if isinstance(target, tuple):
        target = Target("class", target)
    if len(x) != len(y) or (groups is not None and len(groups) != len(y)):
        raise DataError(f"{name}: {len(x):,} samples do not match {len(y):,} labels")
    _check_arrays(name, x, target, official_train, features)
    facts: dict[str, Any] = {"classes": target.names}
    if tokens is not None:
        facts["tokens"] = [tokens.digest, tokens.length]
    if statistics is not None:
        facts["statistics"] = [values.tolist() for values in statistics]
    if target.kind == "class":
        y = np.asarray(y, np.int64)
    else:
        y = np.asarray(y, np.float32).reshape(len(x), target.columns)
        del facts["classes"]
        facts |= {"kind": target.kind, "names": target.names}
    if any(column.kind not in ("number", "boolean") for column in columns):
        facts["columns"] = [(column.name, column.kind, column.categories) for column in columns]
    facts |= {"features": features, "group_names": group_names}
    facts |= {"official_train": official_train, "scale": scale}
    groups = None if groups is None else np.asarray(groups, np.int64)
    training = np.arange(official_train or len(x))
    mean, std = moments(x, training, scale) if statistics is None else statistics
    if len(mean) != x.shape[1]:
        raise DataError(
            f"{name}: its images have {x.shape[1]} channels, and the processor expects {len(mean)}"
        )
    return Dataset(
        name=name,
        x=x,
        y=y,
        target=standardized(target, y, training),
        official_train=official_train,
        groups=groups,
        group_names=group_names,
        mean=mean,
        std=std,
        scale=scale,
        digest=_digest((x, y, groups), facts),
        features=features,
        columns=columns,
        notes=notes,
        fixed=statistics is not None,
        tokens=tokens,
        decimal=decimal,
    )


def _check_arrays(
    name: str, x: Array, target: Target, official_train: int | None, features: tuple[str, ...]
) -> None:
    """See that there are samples, finite ones, in all parts, and something to tell apart."""
    classes = target.names
    if len(x) == 0:
        raise DataError(f"{name}: it has no samples")
    if target.kind == "class" and len(classes) < 2:
        only = f"and there is only '{classes[0]}'" if classes else "and there is none"
        raise DataError(f"{name}: at least two classes are needed, {only}")
    if official_train is not None and not 0 < official_train < len(x):
        raise DataError(f"{name}: its official training or test part is empty")
    if x.dtype.kind == "f" and (bad := np.isinf(x)).any():
        row, *place = np.argwhere(bad)[0].tolist()
        position = ", ".join(map(str, place))
        where = f"column '{features[place[0]]}'" if features else f"position {position}"
        raise DataError(
            f"{name}: sample {row} has an infinite value at {where}. Replace it, or leave it "
            "empty to impute it"
        )


def _digest(arrays: Sequence[Array | None], facts: dict[str, Any]) -> str:
    """SHA-256 of arrays, their types and shapes included, and of facts about them."""
    digest = sha256(json.dumps(facts, sort_keys=True).encode())
    for array in arrays:
        if array is None:
            digest.update(b"|none|")
            continue
        digest.update(f"|{array.dtype.str}{array.shape}|".encode())
        for start in range(0, len(array), CHUNK):
            part = np.ascontiguousarray(array[start : start + CHUNK])
            digest.update(part.reshape(-1).data)
    return digest.hexdigest()


def moments(x: Array, rows: Rows, scale: float) -> tuple[Array, Array]:
    """Mean and standard deviation of x / scale over some rows, missing values left out.

    Args:
        x: Samples [N, ...]; the first axis of a sample is its channel or feature.
        rows: Rows to use [n].
        scale: Divisor of x.

    Returns:
        Mean and std, float32, one per channel or feature. A channel that is constant or never
        observed has std 1, so that standardizing leaves it finite.
    """
    count, mean, squares = deviations(x, rows)
    std = np.sqrt(squares / np.maximum(count, 1))
    std[std <= 1e-7 * np.abs(mean)] = scale
    return (mean / scale).astype(np.float32), (std / scale).astype(np.float32)


def deviations(x: Array, rows: Rows) -> tuple[Array, Array, Array]:
    """Count, mean and sum of squared deviations from it, of the observed values in some rows.

    Args:
        x: Samples [N, ...]; the first axis of a sample is its channel or feature.
        rows: Rows to use [n].

    Returns:
        float64, one of each per channel or feature.
    """
    count, total = _sums(x, rows, np.zeros(x.shape[1]), power=1)
    mean = total / np.maximum(count, 1)
    _, squares = _sums(x, rows, mean, power=2)
    return count, mean, squares


def standardized(target: Target, y: Array, rows: Rows) -> Target:
    """A real target with center and scale of some rows, counts with center; others as they are.

    Args:
        target: What is to be predicted.
        y: The target of all samples [N, T].
        rows: Rows to use [n].

    Returns:
        Mean and standard deviation of each column, computed in float64. The scale of a column
        that is constant is 1, as in `moments`; counts that are all 0 have no center.
    """
    if target.kind not in ("real", "count"):
        return target
    values = y[rows].astype(np.float64)
    center, scale = values.mean(0), values.std(0)
    if target.kind == "count":
        return replace(target, center=tuple(center.tolist()) if center.all() else ())
    scale[scale <= 1e-7 * np.abs(center)] = 1.0
    return replace(target, center=tuple(center.tolist()), scale=tuple(scale.tolist()))


def _sums(x: Array, rows: Rows, centre: Array, power: int) -> tuple[Array, Array]:
    """Count and sum of (x - centre)**power over what was observed, per channel."""
    axes = (0, *range(2, x.ndim))
    centre = centre.reshape(1, -1, *(1,) * (x.ndim - 2))
    count, total = np.zeros(x.shape[1]), np.zeros(x.shape[1])
    for start in range(0, len(rows), CHUNK):
        part = (x[rows[start : start + CHUNK]].astype(np.float64) - centre) ** power
        observed = ~np.isnan(part)
        count += observed.sum(axes)
        total += np.where(observed, part, 0.0).sum(axes)
    return count, total
