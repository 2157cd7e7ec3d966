"""What each client holds, as tensors ready for a network."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from fedbayes.core import seeds
from fedbayes.core.brief import Brief
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples
from fedbayes.core.wording import listed
from fedbayes.data.dataset import CHUNK, Array, Dataset, Rows, standardized
from fedbayes.data.label_noise import with_label_noise
from fedbayes.data.partition import Partition
from fedbayes.data.schemes import Division
from fedbayes.data.tables.columns import Column
from fedbayes.data.tables.fitting import fitted, raw, unlike_training
from fedbayes.errors import DataError, warn


class FederatedData(Brief):
    """A data set divided among S clients.

    Samples are gathered when they are asked for; nothing is kept but the pool, so the cost is
    that of the rows in question, whatever the number of clients. Images are standardized by
    the statistics of the data set, features of a table by those of the clients' training rows,
    and a missing value becomes the mean of its feature over these rows. Targets stay in their own
    unit; center and scale of a real one are of the same rows.

    Examples:
        >>> from fedbayes.data import DataSettings, FederatedData, load_dataset, partition
        >>> settings = DataSettings(name="digits", clients=5)
        >>> dataset = load_dataset(settings)
        >>> data = FederatedData(dataset, partition(dataset, settings, seed=0), seed=0)
        >>> data.clients, tuple(data.train(0).x.shape[1:])
        (5, (1, 8, 8))
    """

    def __init__(
        self,
        dataset: Dataset,
        partition: Partition,
        seed: int,
        statistics: tuple[Array, Array] | None = None,
        *,
        target: Target | None = None,
        columns: tuple[Column, ...] | None = None,
        label: str = "",
        label_noise: float = 0.0,
        label_noise_kind: str = "uniform",
        owner: int = 0,
    ) -> None:
        """Put a data set and its partition together.

        Args:
            dataset: The pool of samples.
            partition: Who holds which rows of it.
            seed: Seed of the run or trial; the clients' pixel orders come from it.
            statistics: Mean and deviation to standardize by, instead of the data's own: where
                these samples are one of several parts that lie apart.
            target: What is to be predicted, with the center and scale of these parts likewise.
            columns: How the columns of a table are encoded likewise; none: as plain numbers.
            label: Name of the column of classes, if it has one.
            label_noise: Share of the training labels that are replaced by other classes.
            label_noise_kind: By which; see `DataSettings`.
            owner: The client whose data they all are, where clients bring their own.

        Raises:
            ConfigError: Labels are to be replaced, and the target has no classes.
            DataError: The partition is not one of this data set, or all training rows have one and
                the same target.
        """
        for rows in (partition.train, partition.test):
            if len(rows) and rows.max() >= dataset.samples:
                raise DataError(
                    f"the partition contains row {rows.max()}, but {dataset.name} has only "
                    f"{dataset.samples} samples. Use the partition of this data set"
                )
        dataset, self.wrong_labels = with_label_noise(
            dataset, partition.train, label_noise, seed, kind=label_noise_kind, owner=owner
        )
        self.dataset = dataset
        self.partition = partition
        self.seed = seed
        _refuse_empty(dataset, partition)
        self.target = self._own_target() if target is None else target
        self._may_miss = dataset.x.dtype.kind == "f"
        self.preprocessing = fitted(
            dataset,
            np.sort(partition.train),
            self.target,
            statistics=statistics,
            columns=columns,
            label=label,
        )
        self.mean, self.std = self.preprocessing.statistics
        rows = np.concatenate([partition.train, partition.test])
        for odd in unlike_training(dataset, rows, self.preprocessing):
            warn(odd.told(dataset.name, numbered=False))

    def _shows(self) -> dict[str, object]:
        target = self.target
        return {
            "name": self.dataset.name,
            "clients": self.clients,
            "shape": self.shape,
            "target": target.kind,
            "test_samples": self.test_total,
        }

    def keep(self, features: Array, ids: tuple[float, ...] = ()) -> None:
        """Leave features unchanged, without standardization.

        Args:
            features: Whether each feature, or channel, is left so [C].
            ids: As `Preprocessing.ids`.
        """
        seen = self.preprocessing
        mean, std = np.where(features, 0.0, seen.mean), np.where(features, 1.0, seen.std)
        self.preprocessing = replace(
            seen, mean=tuple(mean.tolist()), std=tuple(std.tolist()), ids=ids
        )
        self.mean, self.std = self.preprocessing.statistics

    @property
    def clients(self) -> int:
        """Number of clients S."""
        return self.partition.clients

    @property
    def division(self) -> Partition | None:
        """The rows of each client as a run stores them; None without a pool."""
        return self.partition

    @property
    def names(self) -> Sequence[str]:
        """Names of the clients [S]."""
        return self.partition.names

    def number(self, client: int) -> int:
        """The number that splits of a client's rows depend on, as `Partition.numbers`."""
        return self.partition.numbers[client] if self.partition.numbers else client

    @property
    def owners(self) -> Rows:
        """The clients that `train_sizes`, `test_sizes` and `counts` are of, and whose test samples
        make the union, rising: all of them, as long as their samples are in one pool.
        """
        return np.arange(self.clients)

    def test_range(self, client: int) -> tuple[int, int]:
        """Where in the union of all test samples those of a client are."""
        place = int(np.searchsorted(self.owners, client))
        if place == len(self.owners) or self.owners[place] != client:
            return 0, 0
        start, stop = self.partition.test_offsets[place : place + 2]
        return int(start), int(stop)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample, as a network sees it."""
        return self.preprocessing.shape

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the K classes; none if the target has no classes."""
        return self.dataset.classes

    @property
    def test_total(self) -> int:
        """Number of test samples of all clients."""
        return len(self.partition.test)

    def train(self, client: int) -> Samples:
        """Training samples of a client: x float32 [n, ...]; y int64 [n] for classes, else float32
        [n, T].
        """
        return self._of_client(self.partition.train, self.partition.train_offsets, client)

    def train_each(self, clients: Sequence[int]) -> list[Samples]:
        """As `train` of each client, gathered at once where nothing depends on the client."""
        if self.dataset.permuted or type(self).train is not FederatedData.train:
            return [self.train(client) for client in clients]
        offsets = self.partition.train_offsets
        own = [self.partition.train[offsets[c] : offsets[c + 1]] for c in clients]
        every = self._standardized(np.concatenate(own))
        parts = (torch.split(tensor, [len(rows) for rows in own]) for tensor in every)
        # In memory of their own, so that nobody's samples keep those of others alive.
        return [Samples(x.clone(), y.clone()) for x, y in zip(*parts, strict=True)]

    def test(self, client: int) -> Samples:
        """Test samples of a client, possibly none, of the same types."""
        return self._of_client(self.partition.test, self.partition.test_offsets, client)

    def all_train(self) -> Samples:
        """Training samples of all clients, client by client."""
        rows = self.partition.train
        return self._gather(rows, self.partition.train_offsets, 0, len(rows))

    def test_union(self, start: int, stop: int) -> Samples:
        """Samples `start` to `stop` of all clients' test samples, client by client."""
        start, stop, _ = slice(start, stop).indices(self.test_total)
        return self._gather(self.partition.test, self.partition.test_offsets, start, stop)

    def raw_test(self, start: int, stop: int, *, permute: bool = True) -> torch.Tensor:
        """The same samples as the source has them, uint8 or float32 [n, ...], rows of a table
        encoded; where clients see pixels in an order of their own, in that order if `permute`.
        """
        start, stop, _ = slice(start, stop).indices(self.test_total)
        rows = self.partition.test[start:stop]
        x = torch.from_numpy(np.array(raw(self.dataset, rows, self.preprocessing)))
        if permute and self.dataset.permuted:
            self._permute(x.flatten(1).numpy(), self.partition.test_offsets, start, stop)
        return x

    def test_labels(self) -> Array:
        """Targets of all clients' test samples, client by client, as in `Dataset.y`."""
        return np.asarray(self.dataset.y[self.partition.test])

    def train_sizes(self) -> Rows:
        """Number of training samples of each of the owners."""
        return np.diff(self.partition.train_offsets)

    def test_sizes(self) -> Rows:
        """Number of test samples of each of the owners."""
        return np.diff(self.partition.test_offsets)

    def counts(self) -> Rows:
        """Number of training samples of each of the owners and of each class [S, K], by the labels
        that it trains on; K is 0 without classes.
        """
        if not self.classes:
            return np.zeros((len(self.owners), 0), np.int64)
        train = Division(self.partition.train, self.partition.train_offsets, self.partition.names)
        return train.counts(self.dataset.y, len(self.classes))

    def _own_target(self) -> Target:
        """What is to be predicted, with center and scale of the clients' training rows."""
        target, rows = self.dataset.target, np.sort(self.partition.train)
        if target.kind in ("real", "count"):
            y = self.dataset.y[rows]
            for name, column in zip(target.names, y.T, strict=True):
                if (column == column[0]).all():
                    raise DataError(
                        f"{self.dataset.name}: the target '{name}' is {column[0]:g} in all "
                        f"{len(rows):,} training rows, so there is nothing to learn. Set "
                        "data.label to another column"
                    )
        return standardized(target, self.dataset.y, rows)

    def _of_client(self, rows: Rows, offsets: Rows, client: int) -> Samples:
        return self._gather(rows, offsets, int(offsets[client]), int(offsets[client + 1]))

    def _gather(self, all_rows: Rows, offsets: Rows, start: int, stop: int) -> Samples:
        """Entries `start` to `stop` of ragged rows, standardized."""
        samples = self._standardized(all_rows[start:stop])
        if self.dataset.permuted:
            self._permute(samples.x.flatten(1).numpy(), offsets, start, stop)
        return samples

    def _standardized(self, rows: Rows) -> Samples:
        x = torch.from_numpy(raw(self.dataset, rows, self.preprocessing)).to(
            torch.float32, copy=True
        )
        self.preprocessing.standardize_(x, may_miss=self._may_miss)
        return Samples(x, torch.from_numpy(np.asarray(self.dataset.y[rows])))

    def _permute(self, x: Array, offsets: Rows, start: int, stop: int) -> None:
        """Put the pixels of x [n, pixels] in the order of the client of each row, in place."""
        first = int(np.searchsorted(offsets, start, side="right")) - 1
        last = int(np.searchsorted(offsets, stop, side="left"))
        for client in range(first, last):
            begin = max(int(offsets[client]), start) - start
            end = min(int(offsets[client + 1]), stop) - start
            if begin < end:
                x[begin:end] = x[begin:end][:, pixel_order(self.seed, client, self.shape)]


def _refuse_empty(dataset: Dataset, partition: Partition) -> None:
    """See that every client has a value to train on, which is more than NaN."""
    if dataset.x.dtype.kind != "f":
        return
    there = np.zeros(len(partition.train), bool)
    for start in range(0, len(there), CHUNK):
        part = np.asarray(dataset.x[partition.train[start : start + CHUNK]])
        there[start : start + CHUNK] = ~np.isnan(part.reshape(len(part), -1)).all(1)
    if there.all():
        return
    offsets = partition.train_offsets
    values = np.diff(np.concatenate([[0], there.cumsum()])[offsets])
    empty = np.flatnonzero((values == 0) & (np.diff(offsets) > 0)).tolist()
    if empty:
        names = listed(f"'{partition.names[client]}'" for client in empty)
        raise DataError(
            f"{dataset.name}: the training samples of client {names} have only missing values. "
            "Leave these clients out (data.exclude), or correct their data"
        )


def pixel_order(seed: int, client: int, shape: tuple[int, ...]) -> Rows:
    """The order in which a client sees its pixels, if each has its own [pixels]."""
    rng = seeds.numpy_rng(seed, "pixels", client=client)
    return rng.permutation(int(np.prod(shape)))
