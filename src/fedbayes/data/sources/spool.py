"""Samples that come in batches, as one array that lies on disk and not in memory."""

import tempfile
from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np

from fedbayes.data.cache import cache_folder, writing
from fedbayes.data.dataset import Array


def spool(batches: Iterable[Array], total: int | None = None) -> Array:
    """Batches [n, ...] of one type and shape, one behind the other.

    Args:
        batches: they are asked for one by one.
        total: samples in all of them, if it is known.

    Returns:
        [N, ...], a map of a file without a name, which goes when the array does.

    Raises:
        DataError: there is no room on the disk.
    """
    iterator: Iterator[Array] = iter(batches)
    first = next(iterator, None)
    if first is None:
        return np.empty((0, 1), np.float32)
    folder = cache_folder()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            count = 0
            for batch in chain([first], iterator):
                file.write(np.ascontiguousarray(batch).data)
                count += len(batch)
            if not count:
                return np.empty((0, *first.shape[1:]), first.dtype)
            file.flush()
            assert total is None or total == count
            return np.memmap(file, first.dtype, "r", shape=(count, *first.shape[1:]))
