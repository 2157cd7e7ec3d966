"""What each client is tested on."""

import numpy as np

from fedbayes.data.dataset import Dataset, Rows
from fedbayes.data.schemes import Division, group_by_client

DEFAULT_FRACTION = 0.25
"""Part of a client's samples that it tests on, where there is no official test part."""


def own_fraction(
    division: Division, fraction: float, rng: np.random.Generator
) -> tuple[Division, Division]:
    """Split each client's rows at random into a training and a test part.

    A client with two rows or more has at least one on either side; a single row trains.

    Args:
        division: The rows of each client.
        fraction: Part of them to test on, in (0, 1).
        rng: Source of randomness.
    """
    client, sizes = division.client, np.diff(division.offsets)
    tested = held_out(sizes, fraction)
    order = np.lexsort((rng.random(len(client)), client))
    position = np.arange(len(client)) - division.offsets[client]
    test = position < tested[client]
    rows = division.rows[order]
    return (
        group_by_client(rows[~test], client[~test], division.names),
        group_by_client(rows[test], client[test], division.names),
    )


def held_out(sizes: Rows, fraction: float) -> Rows:
    """Number of test rows of clients with these numbers of rows [S]."""
    wanted = np.rint(sizes * fraction).astype(np.int64)
    return np.where(sizes < 2, 0, np.clip(wanted, 1, np.maximum(sizes - 1, 1)))


def rows_needed(train: int, fraction: float) -> int:
    """Smallest number of rows that leaves `train` to train on."""
    sizes = np.arange(train, int(train / (1 - fraction)) + 3)
    return int(sizes[(sizes - held_out(sizes, fraction)) >= train][0])


def deal_official(
    dataset: Dataset,
    train: Division,
    test_rows: Rows,
    natural: bool,
    rng: np.random.Generator,
) -> Division:
    """Deal the official test rows to the clients.

    Rows of a class go to the clients in proportion to their training counts of that class, by
    cumulative rounding over the clients in random order, so that every row is dealt once. A
    class that no client trains on is dealt in proportion to all their training rows, and so are
    all rows where the target has no classes. In a
    natural partition a row of a known group goes to that group's client, or is not used.

    Args:
        dataset: The pool.
        train: The training rows of the clients.
        test_rows: Rows of the official test part.
        natural: Whether the clients are the groups of the data set.
        rng: Source of randomness.
    """
    client = np.full(len(test_rows), -1)
    free = np.ones(len(test_rows), bool)
    if natural and dataset.groups is not None:
        group_of = {name: index for index, name in enumerate(train.names)}
        client_of = np.array([group_of.get(name, -1) for name in dataset.group_names])
        groups = dataset.groups[test_rows]
        free = groups < 0
        client[~free] = client_of[groups[~free]]
    strata = dataset.strata
    counts = train.counts(strata, len(dataset.classes) or 1)
    labels = strata[test_rows]
    for label in np.unique(labels[free]):
        places = rng.permutation(np.flatnonzero(free & (labels == label)))
        weights = counts[:, label] if counts[:, label].any() else counts.sum(1)
        order = rng.permutation(len(weights))
        ends = np.rint(np.cumsum(weights[order]) / weights.sum() * len(places))
        client[places] = order[np.searchsorted(ends, np.arange(len(places)), side="right")]
    dealt = client >= 0
    return group_by_client(test_rows[dealt], client[dealt], train.names)
