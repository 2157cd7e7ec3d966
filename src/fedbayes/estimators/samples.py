"""Arrays in memory as clients' data."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedbayes.config.config import Config
from fedbayes.core.targets import Target
from fedbayes.data import Dataset, FederatedData, Partition
from fedbayes.data.dataset import Array, Rows, build_dataset
from fedbayes.data.schemes import Division, divide, group_by_client
from fedbayes.errors import DataError

NAME = "the samples of fit"


def owners(clients: Any, rows: int) -> tuple[Array, Rows]:
    """The client of each row.

    Args:
        clients: an id for each row, numbers or words.
        rows: how many there are.

    Returns:
        The different ids in rising order [S], and the index of each row's [n].

    Raises:
        ValueError: there is not one id for each row.
    """
    import pandas as pd

    ids = np.asarray(clients)
    if ids.ndim == 2 and ids.shape[1] == 1:
        ids = ids[:, 0]
    if ids.ndim != 1 or len(ids) != rows:
        raise ValueError(f"clients has shape {ids.shape}. Give one id for each of {rows} rows")
    if (absent := pd.isna(ids)).any():
        raise ValueError(f"clients has no id in row {int(absent.argmax())}. Give each row an id")
    if ids.dtype == object:
        if len({isinstance(name, str) for name in ids}) > 1:
            raise ValueError("clients has both text and numbers. Give ids of one type")
        ids = ids.astype(np.str_) if isinstance(ids[0], str) else np.array(ids.tolist())
    distinct, index = np.unique(ids, return_inverse=True)
    return distinct, index.astype(np.int64)


def in_samples(x: Array, shape: Sequence[int] | None) -> Array:
    """Rows [n, D] as samples float32 [n, ...], of a shape if one is given.

    Raises:
        DataError: a row is no sample of this shape, or a value is too large for float32.
    """
    with np.errstate(over="ignore"):
        samples = x.astype(np.float32)
    if (lost := np.isinf(samples)).any():
        row, column = np.argwhere(lost)[0]
        raise DataError(
            f"X is {x[row, column]:g} in row {row}, column {column}, too large for float32"
        )
    if shape is None:
        return samples
    if int(np.prod(shape)) != x.shape[1] or any(size < 1 for size in shape):
        raise DataError(
            f"shape is {tuple(shape)}, {int(np.prod(shape))} values in a sample, and X has "
            f"{x.shape[1]} columns"
        )
    return samples.reshape(-1, *shape)


def gathered(
    x: Array,
    y: Array,
    target: Target,
    config: Config,
    *,
    features: Sequence[str] = (),
    whose: tuple[Array, Rows] | None = None,
) -> FederatedData:
    """Samples divided among clients, all of them to train on.

    Args:
        x: samples [n, ...], float32.
        y: what is to be predicted, as in `Dataset.y`.
        target: what that is.
        config: says how to divide them, where it is not known whose they are.
        features: names of the columns, if x has any.
        whose: ids of the clients and the client of each row, as `owners` gives them.

    Raises:
        DataError: they cannot be divided so, or the target is the same everywhere.
    """
    dataset = build_dataset(NAME, x, y, target, features=tuple(features))
    division = _division(dataset, config) if whose is None else _given(*whose)
    none = np.zeros(0, np.int64)
    partition = Partition(
        division.rows, division.offsets, none, np.zeros_like(division.offsets), division.names
    )
    return FederatedData(dataset, partition, config.seed)


def _given(ids: Array, owner: Rows) -> Division:
    names = tuple(str(name) for name in ids)
    return group_by_client(np.arange(len(owner)), owner, names)


def _division(dataset: Dataset, config: Config) -> Division:
    division = divide(dataset, np.arange(dataset.samples), config.data, 1, config.seed)
    sizes = np.diff(division.offsets)
    if not sizes.all():
        raise DataError(
            f"client {division.names[int(sizes.argmin())]} would have no rows of "
            f"{dataset.samples}. Use fewer n_clients, or another partition"
        )
    return division
