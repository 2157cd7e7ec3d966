"""From raw samples to what a network sees: a part of every model, and stored with it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError, model_validator
from torch import Tensor, nn

from fedbayes.core.brief import Brief
from fedbayes.core.targets import Target
from fedbayes.core.wording import listed
from fedbayes.data.dataset import Array, Rows
from fedbayes.data.tables.cells import code
from fedbayes.data.tables.columns import Column, features_of
from fedbayes.data.tables.encoding import Unknown, encode, unknown
from fedbayes.data.tokens import Tokens
from fedbayes.errors import DataError, told_as, warn


@dataclass(frozen=True, repr=False)
class Preprocessing(Brief):
    """What a model was trained to see of a sample: `(x / scale - mean) / std`, 0 where x is
    missing, which is the mean.

    Tables and images are alike, but that a table has a mean for every feature and an image one
    for every channel.

    Examples:
        >>> from fedbayes.core.targets import Target
        >>> from fedbayes.data import Preprocessing
        >>> seen = Preprocessing((2,), 1.0, (1.0, 0.0), (2.0, 1.0), Target("class", ("no", "yes")))
        >>> seen.classes
        ('no', 'yes')
        >>> Preprocessing.load(seen.dump()) == seen
        True
    """

    shape: tuple[int, ...]
    """Shape of one sample, such as (30,) or (1, 28, 28)."""
    scale: float
    """What a raw sample is divided by before all else: 255 for images of 8 bits."""
    mean: tuple[float, ...]
    """Of each feature or channel, float32; also what a missing value becomes."""
    std: tuple[float, ...]
    """Standard deviation likewise."""
    target: Target
    """What is predicted: its names are in the order of the model's outputs. Center and scale of a
    real target are of the training rows."""
    features: tuple[str, ...] = ()
    """Names of the features of a table, in the order of the model's inputs."""
    label: str = ""
    """Name of the column of classes, if it has one."""
    permuted: bool = False
    """Whether each client sees its pixels in a fixed order of its own."""
    dataset: str = ""
    """Name of the data set that the statistics are of."""
    digest: str = ""
    """Digest of its content; empty if it is not known."""
    samples: int = 0
    """Number of its samples."""
    columns: tuple[Column, ...] = ()
    """Columns of a table that are no plain numbers alone: how they are encoded as the features,
    by the training rows. None: each feature is a column of numbers."""
    tokens: Tokens | None = None
    """How texts become samples, if they do."""
    bounds: tuple[float, float] | None = None
    """Smallest and largest value of a raw image, where it is known; see `raw_range`."""
    ids: tuple[float, ...] = ()
    """The largest id of each feature that a network uses as such, -1 of the others; empty without
    ids. They are not standardized."""
    decimal: str = ""
    """What separated decimals in the CSV files of a table: a point or comma; empty where nothing
    said so."""

    def __post_init__(self) -> None:
        """See that the parts fit together."""
        if not self.shape or not len(self.mean) == len(self.std) == self.shape[0]:
            raise ValueError("mean and std do not fit the shape of a sample")
        if self.columns and features_of(self.columns) != self.features:
            raise ValueError("columns do not fit the features")

    @model_validator(mode="before")
    @classmethod
    def _of_classes(cls, values: Any) -> Any:
        """Files of older versions name classes alone."""
        if isinstance(values, dict) and "classes" in values:
            values = {name: value for name, value in values.items() if name != "classes"} | {
                "target": {"kind": "class", "names": values["classes"]}
            }
        return values

    @property
    def raw_range(self) -> tuple[float, float] | None:
        """Smallest and largest value of a raw image, as (0, 255) of those of 8 bits; None where it
        is not known, and of tables.
        """
        if self.bounds is None and len(self.shape) == 3 and self.scale > 1:
            return 0.0, self.scale
        return self.bounds

    @property
    def table(self) -> tuple[Column, ...]:
        """The columns of a table that samples are read from, by name; none if it has no names."""
        if self.tokens is not None:
            return (Column(self.tokens.column, "text"),)
        return self.columns or tuple(Column(name) for name in self.features)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the K classes, in the order of the model's outputs; empty without classes."""
        return self.target.names if self.target.kind == "class" else ()

    @classmethod
    def load(cls, data: bytes | str) -> "Preprocessing":
        """The inverse of `dump`.

        Raises:
            DataError: it is invalid.
        """
        with told_as(DataError, "invalid preprocessing of a model", ValidationError):
            return TypeAdapter(cls).validate_json(data)

    def dump(self) -> bytes:
        """As JSON."""
        return TypeAdapter(Preprocessing).dump_json(self, indent=2) + b"\n"

    def public(self) -> "Preprocessing":
        """The same without the name, digest and number of samples of its data. What nodes get, so
        that those that bring their own data agree.
        """
        return replace(self, dataset="", digest="", samples=0)

    @property
    def statistics(self) -> tuple[Array, Array]:
        """Mean and standard deviation, float32 [C]."""
        return np.array(self.mean, np.float32), np.array(self.std, np.float32)

    @cached_property
    def _offset_and_factor(self) -> tuple[Tensor, Tensor]:
        """What raw samples [n, C, ...] are lessened and divided by."""
        one, two = (
            torch.from_numpy(values * self.scale).reshape(-1, *(1,) * (len(self.shape) - 1))
            for values in self.statistics
        )
        return one, two

    def standardize_(self, x: Tensor, *, may_miss: bool) -> Tensor:
        """Standardize raw samples [n, ...], float32, in place.

        Args:
            x: the samples.
            may_miss: whether NaN may be among them.
        """
        offset, factor = (one.to(x.device) for one in self._offset_and_factor)
        x.sub_(offset).div_(factor)
        if may_miss:
            # Zero is the mean of the training rows, once standardized.
            x.nan_to_num_(nan=0.0)
        return x

    def apply(self, x: Any, *, foreign: bool = False) -> Tensor:
        """What the network sees of raw samples, float32 [n, ...].

        Args:
            x: a tensor or array [n, ...] of samples as the data set has them, NaN for missing
                values; for tables also a pandas DataFrame of raw columns (`table`), which are
                taken by name and encoded; an array is of encoded rows (`features`).
            foreign: whether they are of another kind, so that images may be out of range.

        Raises:
            DataError: columns are missing or hold other things than in training, the shape is
                another, values are infinite, or those of images out of range. The message names
                column and row.
        """
        raw = self.raw(x)
        if raw.dtype.is_floating_point:
            if torch.isinf(raw).any():
                raise DataError("the samples have infinite values. Use NaN for missing values")
            if self.scale > 1 and raw.numel() and 0 < float(raw.nan_to_num().abs().max()) <= 1:
                warn(
                    "all values are between -1 and 1, but raw samples of this model have values "
                    f"up to {self.scale:g}. Give unscaled samples"
                )
        if not foreign:
            self._check_range(raw)
        return self.standardize_(raw.to(torch.float32, copy=True), may_miss=True)

    def _check_range(self, raw: Tensor) -> None:
        """See that images are raw, or raise a DataError."""
        if self.raw_range is None or not raw.numel():
            return
        low, high = _slack(*self.raw_range)
        if bool(((raw < low) | (raw > high)).any()):
            values = raw.nan_to_num() if raw.dtype.is_floating_point else raw
            least, most = (f"{bound:g}" for bound in self.raw_range)
            raise DataError(
                f"values of images are from {float(values.min()):g} to {float(values.max()):g}, "
                f"but in training they were from {least} to {most}. Give raw images: the model "
                "standardizes them itself"
            )

    def raw(self, x: Any) -> Tensor:
        """Raw samples [n, ...] of the model's shape, as `apply` and exported programs take them;
        arguments and errors as for `apply`.
        """
        if self.tokens is not None and _are_texts(x):
            x = self.tokens.encode(list(x), "the list")
        elif hasattr(x, "columns"):
            x, odd = self.encode(x)
            for one in odd:
                warn(one.told())
        try:
            raw = x.detach() if isinstance(x, Tensor) else torch.from_numpy(np.array(x))
        except TypeError as error:
            raise DataError(f"invalid samples, not numbers: {error}") from None
        except ValueError as error:  # lists of several lengths
            raise DataError(f"the samples have different shapes: {error}") from None
        if raw.dtype == torch.bool or raw.dtype.is_complex:
            raw = raw.to(torch.float32)
        if raw.dtype == torch.uint8 and self.bounds == (0.0, 1.0) and self.scale == 1:  # pixels
            raw = raw / 255
        shape = tuple(raw.shape[1:])
        # A flat sample, or one without its only channel, can mean one thing alone.
        if raw.ndim > 1 and shape in (self.shape, (math.prod(self.shape),), _flat_grey(self.shape)):
            return raw.reshape(-1, *self.shape)
        if len(shape) == 3 and (shape[2], *shape[:2]) == self.shape:  # channels last
            return raw.movedim(-1, 1)
        raise DataError(
            f"the samples have shape {tuple(raw.shape)}; this model expects "
            f"({', '.join(map(str, ('n', *self.shape)))})"
            f"{', or a DataFrame with its features as columns' if self.features else ''}"
        )

    def encode(self, frame: Any, where: str = "the table") -> tuple[Array, list[Unknown]]:
        """Rows of a DataFrame of raw columns as `features`, and what training rows did not have.

        Args:
            frame: the columns of `table` by name, in any order, and any others.
            where: what it is, for messages.

        Returns:
            float32 [n, D], NaN where a quantity is missing; and the columns with cells of unknown
            categories, or that are empty as none was in training.

        Raises:
            DataError: a column is missing or holds other things; names column and row.
        """
        if self.tokens is not None:
            return self._texts(frame, self.tokens, where), []
        if not self.features:
            raise DataError("this model has no feature names. Give its samples as an array")
        # As in reading a CSV file, blanks around a name do not count.
        wanted = [column.name for column in self.table]
        own = set(wanted)
        frame = frame.rename(columns=lambda n: str(n) if str(n) in own else str(n).strip())
        absent = [name for name in wanted if name not in frame.columns]
        if absent:
            raise DataError(f"{where} has no column {', '.join(map(repr, absent))}")
        frame = frame[wanted]
        if frame.shape[1] != len(wanted):
            raise DataError(f"{where} has two columns with the same name")
        coded = code(frame, self.table, where)
        return encode(coded, self.table), unknown(coded, self.columns)

    def _texts(self, frame: Any, tokens: Tokens, where: str) -> Array:
        """Tokens of a column of a DataFrame, float32 [n, length]."""
        found = [column for column in frame.columns if str(column).strip() == tokens.column]
        if len(found) != 1:
            count = f"{len(found)} columns" if found else "no column"
            raise DataError(f"{where} has {count} '{tokens.column}', the column with the texts")
        ids: Array = tokens.encode(list(frame[found[0]]), where)
        return ids.astype(np.float32)

    def module(self, order: Rows | None = None, *, checked: bool = True) -> nn.Module:
        """The same as a module, for programs that take raw samples.

        Args:
            order: pixels in the order of a client [pixels], where it has one of its own.
            checked: whether it raises an error for images with values outside of the raw range.
        """
        return _Standardize(*self._offset_and_factor, order, self.raw_range if checked else None)

    def example(self, count: int, rng: torch.Generator) -> Tensor:
        """Random raw samples of about the right size, float32 [n, ...]."""
        offset, factor = self._offset_and_factor
        noise = torch.randn(count, *self.shape, generator=rng)
        raw = noise.mul_(factor).add_(offset)
        for feature, most in enumerate(self.ids):
            if most >= 0:
                shape = raw[:, feature].shape
                raw[:, feature] = torch.randint(int(most) + 1, shape, generator=rng).float()
        return raw if self.raw_range is None else raw.clamp_(*self.raw_range)

    def other_units(self, raw: Tensor) -> str:
        """A message if numbers of raw rows seem to be in other units than in training; else "".

        More than half of a number's values are more than 10 standard deviations from the training
        mean; or all are more than 2 from it, and differ by less than a tenth of one. Fewer than 20
        rows tell nothing.

        Args:
            raw: rows [n, C] of a table, NaN for missing values; of more than 1,000 the first.
        """
        raw = raw[:1000]
        if len(np.unique(raw.numpy(), axis=0)) < 20:
            return ""
        offset, factor = self._offset_and_factor
        x = (raw.float() - offset) / factor
        spread = x.nan_to_num(-math.inf).amax(0) - x.nan_to_num(math.inf).amin(0)
        odd = ((x.abs() > 10).float().mean(0) > 0.5) | ((spread < 0.1) & (x.nanmean(0).abs() > 2))
        odd &= (offset != 0) | (factor != 1)  # standardized at all
        names = self.features or tuple(f"feature {place + 1}" for place in range(len(odd)))
        known = {one.name for one in self.table if one.kind == "number"} or set(names)
        told = [n for n, is_odd in zip(names, odd.tolist(), strict=True) if is_odd and n in known]
        if not told:
            return ""
        return (
            f"values of {listed(map(repr, told), 3)} are far from those of the training rows. "
            "Check that they are in the same units"
        )

    def restored(self, x: Tensor) -> Tensor:
        """Raw samples of which a network sees these, float32 [n, ...]; the inverse of `apply`."""
        offset, factor = (one.to(x.device) for one in self._offset_and_factor)
        raw = x * factor + offset
        return raw if self.raw_range is None else raw.clamp_(*self.raw_range)

    def same_inputs(self, other: "Preprocessing") -> bool:
        """Whether networks see the same of a sample under both."""
        names = ("shape", "scale", "mean", "std", "features", "columns", "permuted", "tokens")
        return all(getattr(self, name) == getattr(other, name) for name in names)


def _are_texts(x: Any) -> bool:
    """Whether samples are texts, in a list or array."""
    return len(x) > 0 and not isinstance(x, Tensor | str) and isinstance(x[0], str)


def _flat_grey(shape: Sequence[int]) -> tuple[int, ...] | None:
    """Shape of an image of one channel, without the channel; None for others."""
    return tuple(shape[1:]) if len(shape) == 3 and shape[0] == 1 else None


def _slack(low: float, high: float) -> tuple[float, float]:
    """Bounds that allow for resized pictures, which may be a little outside."""
    slack = 0.02 * (high - low)
    return low - slack, high + slack


class _Standardize(nn.Module):
    """Raw samples [n, C, ...] of any type to what a network sees, float32."""

    offset: Tensor
    factor: Tensor
    order: Tensor | None

    def __init__(
        self,
        offset: Tensor,
        factor: Tensor,
        order: Rows | None,
        bounds: tuple[float, float] | None,
    ) -> None:
        super().__init__()
        self._bounds = bounds
        self.register_buffer("offset", offset.clone())
        self.register_buffer("factor", factor.clone())
        self.register_buffer("order", None if order is None else torch.as_tensor(order))

    def forward(self, x: Tensor) -> Tensor:
        """Standardized, 0 for NaN, and in the client's order of pixels."""
        if self._bounds is not None:
            low, high = self._bounds
            least, most = _slack(low, high)
            odd = ((x < least) | (x > most)).any()
            torch._assert_async(  # which exported programs keep
                ~odd,
                f"values are outside of {low:g} to {high:g}. Give raw images: this program "
                "standardizes them itself",
            )
        # A cast would tie an exported program to the type of its example.
        x = torch.zeros_like(x, dtype=torch.float32).copy_(x)
        x = (x - self.offset) / self.factor
        x = torch.where(torch.isnan(x), 0.0, x)
        return x if self.order is None else x.flatten(1)[:, self.order].reshape(x.shape)
