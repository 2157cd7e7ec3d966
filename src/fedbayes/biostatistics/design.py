"""A client's table as numbers, and the sums by which its columns are centered and scaled."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedbayes.biostatistics.columns import Coding, Term, outcomes, texts
from fedbayes.biostatistics.exchange import Array, Exchange, Packet
from fedbayes.errors import DataError, EngineError

if TYPE_CHECKING:
    import pandas as pd

_LARGEST = 500.0
"""Offset of counts: exp(500) is 1e217."""
_FAR = 1e75
"""A product of four numbers so far from 0 is none of float64."""


@dataclass(frozen=True)
class Design:
    """The rows of a client that count, coded; n rows, p columns."""

    x: Array
    """Features [n, p], without an intercept."""
    y: Array
    """The outcome, or whether the event happened [n]."""
    weights: Array
    """How many rows each stands for [n]."""
    offset: Array
    """Added to the linear predictor [n]."""
    time: Array
    """Survival times [n]; zeros without."""
    group: npt.NDArray[np.int64]
    """Index of the level of `strata` or `by`, int [n]; zeros without."""
    entry: Array | None = None
    """Times from which on rows are observed [n]."""

    def scaled(self, center: Array, scale: Array) -> Array:
        """Features centered and scaled [n, p]."""
        return (self.x - center) / scale

    @property
    def happened(self) -> npt.NDArray[np.bool_]:
        """Whether the event happened in a row that counts [n]."""
        return np.asarray((self.y > 0) & (self.weights > 0))

    @cached_property
    def order(self) -> npt.NDArray[np.intp]:
        """Rows by rising time."""
        return np.argsort(self.time, kind="stable")


def design(frame: "pd.DataFrame", coding: Coding) -> Design:
    """Code a client's table.

    Raises:
        EngineError: it does not fit the coding, so it has changed since that was settled.
        DataError: an outcome, a weight or a time is negative where it cannot be.
    """
    wanted = coding.wanted
    rows = frame.dropna(subset=list(wanted.used)) if wanted.used else frame
    if len(rows) < len(frame) and not wanted.drop_missing:
        raise EngineError("values are missing that were present before")
    count = len(rows)
    blocks = [_block(rows, term) for term in coding.terms]
    y = np.zeros(count)
    if wanted.binary:
        y = np.asarray(outcomes(rows[wanted.binary]) == coding.happened, np.float64)
    elif wanted.outcome:
        y = _numbers(rows, wanted.outcome)
        if wanted.counts and (y < 0).any():
            raise DataError(
                f"the outcome '{wanted.outcome}' is negative in {int((y < 0).sum()):,} rows, and "
                "counts are 0 or more"
            )
    column = wanted.weights or wanted.sample_weight
    weights = _numbers(rows, column) if column else np.ones(count)
    if (weights < 0).any():
        raise DataError(f"column '{column}' has negative weights")
    time = _times(rows, coding)
    offset = _numbers(rows, wanted.offset) if wanted.offset else np.zeros(count)
    if wanted.exposure:
        exposure = _numbers(rows, wanted.exposure)
        if (exposure <= 0).any():
            raise DataError(
                f"the exposure '{wanted.exposure}' is 0 or negative in "
                f"{int((exposure <= 0).sum()):,} rows, and has no logarithm"
            )
        offset = offset + np.log(exposure)
    if wanted.counts and (offset > _LARGEST).any():
        raise DataError(
            f"the offset is above {_LARGEST:g} in {int((offset > _LARGEST).sum()):,} rows, and "
            "expected counts are multiplied by its exponential. Use its logarithm if it is an "
            "exposure"
        )
    return Design(
        x=np.concatenate([np.zeros((count, 0)), *blocks], axis=1),
        y=y,
        weights=weights,
        offset=offset,
        time=time,
        group=_groups(rows, coding),
        entry=_entries(rows, coding, time),
    )


def _numbers(rows: "pd.DataFrame", column: str) -> Array:
    values = np.asarray(rows[column].astype(np.float64), np.float64)
    far = np.abs(values) > _FAR
    if far.any():
        raise DataError(
            f"column '{column}' is {values[far][0]:g} in a row, too large for sums of squares "
            f"({int(far.sum()):,} rows beyond {_FAR:g}). Give it in another unit, or correct it"
        )
    return values


def _block(rows: "pd.DataFrame", term: Term) -> Array:
    """The columns of a term [n, 1 or levels - 1]."""
    if not term.levels:
        return _numbers(rows, term.column)[:, None]
    values = texts(rows[term.column])
    if not values.isin(term.levels).all():
        raise EngineError(f"column '{term.column}' has a new category")
    columns = [(values == level).to_numpy(np.float64) for level in term.levels[1:]]
    return np.stack(columns, axis=1)


def _times(rows: "pd.DataFrame", coding: Coding) -> Array:
    wanted = coding.wanted
    if not wanted.time:
        return np.zeros(len(rows))
    time = _numbers(rows, wanted.time)
    if (time < 0).any():
        raise DataError(
            f"the time '{wanted.time}' is negative in {int((time < 0).sum()):,} rows. Times must "
            "count from the start of the observation"
        )
    if wanted.coarsen:
        time = np.ceil(time / wanted.coarsen - 1e-9) * wanted.coarsen
    return time


def _entries(rows: "pd.DataFrame", coding: Coding, time: Array) -> Array | None:
    wanted = coding.wanted
    if not wanted.entry:
        return None
    entry = _numbers(rows, wanted.entry)
    if wanted.coarsen:  # down, as times go up: who is observed in part of a step is so in all
        entry = np.floor(entry / wanted.coarsen + 1e-9) * wanted.coarsen
    if (late := entry >= time).any():
        raise DataError(
            f"the entry time '{wanted.entry}' is not before '{wanted.time}' in "
            f"{int(late.sum()):,} rows, which are then never observed. Correct them, or leave "
            "them out"
        )
    return entry


def _groups(rows: "pd.DataFrame", coding: Coding) -> npt.NDArray[np.int64]:
    column = coding.wanted.strata or coding.wanted.by
    if not column:
        return np.zeros(len(rows), np.int64)
    values = texts(rows[column])
    places = {level: i for i, level in enumerate(coding.groups)}
    return np.asarray(values.map(places), np.int64)


@dataclass(frozen=True)
class ColumnMoments:
    """What is known of the columns of all clients together."""

    total: float
    """Rows, by weight."""
    mean: Array
    """Of each feature [p]."""
    scale: Array
    """Standard deviation of each feature, by the number of rows [p]."""
    y_sum: float
    y_scale: float
    """Sum and standard deviation of the outcome."""
    y_mean: float
    xy: Array
    """Sum of feature times outcome [p]."""
    exposure: float
    """Sum of exp(offset), where the outcome is a count."""
    offset: float
    """Sum of the offsets."""

    @property
    def transform(self) -> Array:
        """From coefficients of scaled columns, the intercept first, to those of the columns
        [p + 1, p + 1].
        """
        matrix: Array = np.diag(np.concatenate([[1.0], 1 / self.scale]))
        matrix[0, 1:] = -self.mean / self.scale
        return matrix


def tell_moments(data: Design, center: Array, counts: bool) -> Packet:
    """A client's answer: sums and squares of columns around a center, [p + 1], the outcome last.

    Args:
        data: its rows.
        center: of each column.
        counts: whether the outcome is a count, so that exp(offset) matters.
    """
    columns = np.concatenate([data.x, data.y[:, None]], axis=1)
    away = columns - center
    weights = data.weights
    exposure = weights @ np.exp(data.offset) if counts else 0.0
    return Packet(
        numbers={
            "total": np.array([weights.sum()]),
            "sum": weights @ away,
            "squares": weights @ away**2,
            "xy": (weights * data.y) @ data.x,
            "offset": np.array([exposure, weights @ data.offset]),
        }
    )


def moments(exchange: Exchange, coding: Coding) -> ColumnMoments:
    """Mean and deviation of every column, in two rounds: the second is around the mean.

    Raises:
        DataError: a column is the same in all rows.
    """
    names, told = coding.names, {"coding": coding.model_dump()}
    p = len(names)
    shapes = {"total": (1,), "sum": (p + 1,), "squares": (p + 1,), "xy": (p,), "offset": (2,)}
    first = exchange.sum("moments", told, {"center": np.zeros(p + 1)}, shapes)
    total = float(first["total"][0])
    if total <= 0:
        raise DataError("the weights of all rows are 0")
    mean = first["sum"] / total
    second = exchange.sum("moments", told, {"center": mean}, shapes)
    scale = np.sqrt(second["squares"] / total)
    flat = scale <= 1e-13 * np.abs(mean)
    constant = [name for name, same in zip(names, flat[:p], strict=True) if same]
    if constant:
        raise DataError(
            f"'{constant[0]}' is the same in all rows and explains nothing; leave it out "
            f"(--drop {constant[0].partition('=')[0]})"
        )
    return ColumnMoments(
        total=total,
        mean=mean[:p],
        scale=scale[:p],
        y_sum=float(first["sum"][p]),
        y_mean=float(mean[p]),
        y_scale=0.0 if flat[p] else float(scale[p]),
        xy=first["xy"],
        exposure=float(first["offset"][0]),
        offset=float(first["offset"][1]),
    )
