"""What a network is to see of a data set, by the rows that it trains on."""

import numpy as np

from fedbayes.core.targets import Target
from fedbayes.core.wording import listed
from fedbayes.data.dataset import CHUNK, Array, Dataset, Rows, moments
from fedbayes.data.preprocessing import Preprocessing
from fedbayes.data.tables.columns import Column, features_of, plain
from fedbayes.data.tables.encoding import Unknown, encode, fit, recode, spread, unknown
from fedbayes.errors import warn


def fitted(
    dataset: Dataset,
    rows: Rows,
    target: Target,
    *,
    statistics: tuple[Array, Array] | None = None,
    columns: tuple[Column, ...] | None = None,
    label: str = "",
) -> Preprocessing:
    """The encoding of samples for a network, from sums, counts and categories over rows.

    Args:
        dataset: the samples.
        rows: those that are trained on [n], rising.
        target: what is to be predicted.
        statistics: mean and deviation of each feature, where they are of other rows.
        columns: how the columns of a table are encoded likewise; none: as plain numbers.
        label: name of the column of classes, if it has one.
    """
    if statistics is None:
        columns = fit(dataset.columns, dataset.x, rows)
        columns = () if plain(columns) else columns
        statistics = _statistics(dataset, rows, columns)
        _tell_empty(dataset, rows)
    features = features_of(columns or ()) or dataset.features
    mean, std = (np.asarray(numbers, np.float32) for numbers in statistics)
    return Preprocessing(
        shape=(len(features),) if columns else dataset.shape,
        scale=float(dataset.scale),
        mean=tuple(mean.tolist()),
        std=tuple(std.tolist()),
        target=target,
        features=features,
        columns=columns or (),
        label=label,
        permuted=dataset.permuted,
        dataset=dataset.name,
        digest=dataset.digest,
        samples=dataset.samples,
        tokens=dataset.tokens,
        decimal=dataset.decimal,
    )


def _statistics(dataset: Dataset, rows: Rows, columns: tuple[Column, ...]) -> tuple[Array, Array]:
    """Mean and deviation: of images by their training part, of a table's features by the rows."""
    if len(dataset.shape) > 1 or dataset.fixed:
        return dataset.mean, dataset.std
    mean, std = moments(dataset.x, rows, dataset.scale)
    if not columns:
        return mean, std
    return spread(mean, columns, 0.0), spread(std, columns, 1.0)


def _tell_empty(dataset: Dataset, rows: Rows) -> None:
    """Say of which features no training row has a value: a network sees nothing of them."""
    if dataset.x.dtype.kind != "f" or len(dataset.shape) != 1:
        return
    empty = np.ones(dataset.shape, bool)
    for start in range(0, len(rows), CHUNK):
        empty &= np.isnan(dataset.x[rows[start : start + CHUNK]]).all(0)
        if not empty.any():
            return
    names = [column.name for column in dataset.columns] or dataset.features
    which = [f"'{names[k]}'" if names else f"feature {k}" for k in np.flatnonzero(empty)]
    warn(
        f"{dataset.name}: no training row has a value of {listed(which)}. Leave it out with "
        "data.drop" + (" with data.drop" if names else "")
    )


def raw(dataset: Dataset, rows: Rows | slice, seen: Preprocessing) -> Array:
    """Samples as a model takes them before they are standardized [n, ...]: rows of a table encoded.

    Args:
        dataset: the samples.
        rows: those that are wanted.
        seen: what the model sees, of columns like the data set's.
    """
    x = np.asarray(dataset.x)[rows]
    if not seen.columns or not dataset.columns:
        return x
    return encode(recode(x, dataset.columns, seen.columns), seen.columns)


def unlike_training(dataset: Dataset, rows: Rows | slice, seen: Preprocessing) -> list[Unknown]:
    """Cells of a table as none of the training rows had: see `raw`."""
    if not seen.columns or not dataset.columns:
        return []
    x = np.asarray(dataset.x)[rows]
    return unknown(recode(x, dataset.columns, seen.columns), seen.columns)
