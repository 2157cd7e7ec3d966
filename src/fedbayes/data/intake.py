"""Arrays, tensors and tables of any source as samples: their shape decides, and not their type."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from fedbayes.core.categories import normal
from fedbayes.core.wording import listed, size
from fedbayes.data.dataset import Array
from fedbayes.data.tables.cells import as_numbers, is_numeric, no_number
from fedbayes.data.tables.precision import MOST
from fedbayes.errors import DataError, told_as

Channels = Literal["auto", "first", "last", "absent"]
"""Where the channels of a sample are: in its first axis, its last one, or in none."""
SMALLEST = 8
"""Sides of the smallest samples that are taken for an image without a channel."""
_FEW = (1, 3, 4)
"""Channels of grey images, colour images, and those with opacity."""
_EXACT = ("float32", "float16", "int8", "uint8", "int16", "uint16", "bool")
"""Types whose numbers float32 holds exactly."""


def numbers(values: Any, who: str) -> Array:
    """NumPy's array of an array, tensor, list or table of numbers.

    Args:
        values: The numbers. In a table of pandas, or one that becomes such a table, missing ones
            become NaN, whatever the types of its columns.
        who: Whose they are, for messages.

    Raises:
        DataError: They are no numbers, or not all of one shape.
    """
    if hasattr(values, "to_pandas"):
        values = values.to_pandas()
    if hasattr(values, "iloc"):
        return _of_table(values if hasattr(values, "columns") else values.to_frame(), who)
    wrong = f"{who}: samples are not all numbers of one shape"
    with told_as(DataError, wrong, ValueError, TypeError, RuntimeError):
        found = np.asarray(plain(values))
    if found.dtype.kind not in "iufb":
        raise DataError(f"{who}: samples are of type {found.dtype}, not numbers")
    return found


def plain(values: Any) -> Any:
    """Tensors, or a list of them, as arrays; other values unchanged."""
    if hasattr(values, "detach"):
        return values.detach().cpu().numpy()
    if isinstance(values, list | tuple) and len(values) and hasattr(values[0], "detach"):
        return np.stack([one.detach().cpu().numpy() for one in values])
    return values


def _of_table(frame: Any, who: str) -> Array:
    """A table as float64 [n, D]."""
    table = np.empty(frame.shape)
    for place, name in enumerate(frame.columns):
        column = frame.iloc[:, place]
        if not is_numeric(column):
            way = (
                "encode it as numbers, leave the column out, or give the clients' tables as files "
                "(data.path), whose columns may be categories and dates"
            )
            raise no_number(column, str(name), who, way)
        values = as_numbers(column, str(name), who, "")
        table[:, place] = values.to_numpy(np.float64, na_value=np.nan)
    return table


def names_of(values: Any, who: str) -> tuple[str, ...]:
    """Names of the columns of a table; none of other samples.

    Raises:
        DataError: Two are the same.
    """
    names = tuple(normal(name).strip() for name in getattr(values, "columns", ()))
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise DataError(f"{who}: two columns have the name '{twice}'. Rename one of them")
    return names


def channels_of(shape: Sequence[int]) -> Channels:
    """The axis of the channels of a sample, by its shape.

    [H, W] of at least 8 by 8 is an image without a channel if one side is at most a third longer
    than the other: others are signals or sequences. In [H, W, C] channels are
    last if there are 1, 3 or 4 of them there and not in front, or fewer than the two equal sides in
    front of them. All else is as networks want it.
    """
    if len(shape) == 2 and min(shape) >= SMALLEST and 3 * max(shape) <= 4 * min(shape):
        return "absent"
    if len(shape) == 3:
        first, second, last = shape
        if (last in _FEW and first not in _FEW) or SMALLEST <= first == second > last:
            return "last"
    return "first"


def arrange(x: Array, channels: Channels, where: str) -> tuple[Array, str]:
    """Samples with their channels, if they have some, in the first axis.

    Args:
        x: Samples [n, ...].
        channels: Where they are now; `auto`: the shape decides.
        where: The source, for messages.

    Returns:
        The samples, and what to say of how they were arranged; empty if they are as they were.

    Raises:
        DataError: Samples have no such axis.
    """
    if x.ndim < 2:
        raise DataError(f"{where}: samples are single numbers. Each needs at least one dimension")
    shape = x.shape[1:]
    found = channels_of(shape) if channels == "auto" else channels
    if found == "first":
        return x, ""
    wanted = 3 if found == "last" else 2
    if len(shape) != wanted:
        raise DataError(
            f"{where}: data.channels is '{found}', which needs samples of {wanted} axes, and a "
            f"sample is {size(shape)}. Leave it out"
        )
    if found == "last":
        x = np.ascontiguousarray(np.moveaxis(x, -1, 1))
        how = f"images with channels last, and reordered to {size(x.shape[1:])}"
    else:
        x = x[:, None]
        how = "images without a channel, and given one"
    if channels != "auto":
        return x, ""
    return x, (
        f"{where}: samples of {size(shape)} are read as {how}; data.channels = 'first' leaves "
        "them unchanged"
    )


class Narrowing:
    """Samples as float32, and what that loses of each feature, or of each channel."""

    def __init__(self) -> None:
        self._count: Array | None = None
        self._mean = self._squares = self._error = np.zeros(0)

    def add(self, x: Array) -> Array:
        """Samples [n, ...] as float32; 8-bit images [n, C, H, W] unchanged."""
        if x.dtype == np.uint8 and x.ndim == 4:
            return x
        with np.errstate(over="ignore"):
            narrow = x.astype(np.float32)
        if x.dtype.name not in _EXACT and len(x):
            self._note(x.astype(np.float64), narrow)
        return narrow

    def _note(self, x: Array, narrow: Array) -> None:
        """Add up count, mean and squares of features (Chan, Golub and LeVeque 1983)."""
        axes = (0, *range(2, x.ndim))
        there = np.isfinite(x) & np.isfinite(narrow)
        clean = np.where(there, x, 0.0)
        count = there.sum(axes).astype(np.float64)
        mean = clean.sum(axes) / np.maximum(count, 1)
        away = np.where(there, x - mean.reshape(1, -1, *(1,) * (x.ndim - 2)), 0.0)
        error = np.abs(np.where(there, narrow - clean, 0.0)).max(axes, initial=0.0)
        if self._count is None or len(self._count) != len(count):
            self._count, self._mean, self._error = count, mean, error
            self._squares = (away**2).sum(axes)
            return
        total = self._count + count
        gap = mean - self._mean
        self._squares += (away**2).sum(axes) + gap**2 * self._count * count / np.maximum(total, 1)
        self._mean = self._mean + gap * count / np.maximum(total, 1)
        self._error = np.maximum(self._error, error)
        self._count = total

    def notes(self, names: Sequence[str], where: str) -> list[str]:
        """Notes on features for which float32 is too coarse.

        Args:
            names: Of the features; none: they are numbered.
            where: The source.
        """
        if self._count is None:
            return []
        std = np.sqrt(self._squares / np.maximum(self._count, 1))
        bad = np.flatnonzero((std > 0) & (self._error > MOST * std)).tolist()
        if not bad:
            return []
        which = [f"'{names[k]}'" if len(names) == len(std) else f"feature {k}" for k in bad]
        return [
            f"{where}: {listed(which)} {'is' if len(bad) == 1 else 'are'} rounded to "
            f"{self._error[bad[0]]:.2g} in float32, with a standard deviation of "
            f"{std[bad[0]]:.2g}. Subtract a constant"
        ]
