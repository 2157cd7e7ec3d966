"""Which client holds which rows of a pool, for training and for testing."""

import io
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedbayes.core import seeds
from fedbayes.core.brief import Brief
from fedbayes.core.files import NPZ_ERRORS, read_bytes
from fedbayes.core.wording import describe, listed
from fedbayes.data.dataset import Dataset, Rows
from fedbayes.data.holdout import DEFAULT_FRACTION, deal_official, own_fraction, rows_needed
from fedbayes.data.schemes import Division, choose_scheme, divide, group_by_client
from fedbayes.data.settings import DataSettings
from fedbayes.data.unassigned_rows import left_out
from fedbayes.errors import DataError, told_as, warn


@dataclass(frozen=True, repr=False)
class Partition(Brief):
    """Rows of S clients, as ragged arrays.

    Client s trains on rows `train[train_offsets[s]:train_offsets[s + 1]]` of the pool, in
    rising order, and is tested on those of `test` likewise. No row is used twice.

    Examples:
        >>> from fedbayes.data import DataSettings, Partition, load_dataset, partition
        >>> settings = DataSettings(name="digits", clients=5)
        >>> parts = partition(load_dataset(settings), settings, seed=0)
        >>> isinstance(parts, Partition), len(parts.train_offsets)
        (True, 6)
    """

    train: Rows
    """Training rows of all clients, client by client, int64."""
    train_offsets: Rows
    """Where each client's training rows begin, int64 [S + 1]."""
    test: Rows
    """Test rows of all clients, client by client, int64."""
    test_offsets: Rows
    """Where each client's test rows begin, int64 [S + 1]."""
    names: tuple[str, ...]
    """Names of the clients [S]."""
    numbers: tuple[int, ...] = ()
    """Their numbers before others were taken out [S]. Splits of their rows depend on these. Empty:
    nobody was."""

    @property
    def clients(self) -> int:
        """Number of clients S."""
        return len(self.names)

    def train_rows(self, client: int) -> Rows:
        """Rows that a client trains on."""
        return self.train[self.train_offsets[client] : self.train_offsets[client + 1]]

    def test_rows(self, client: int) -> Rows:
        """Rows that a client is tested on."""
        return self.test[self.test_offsets[client] : self.test_offsets[client + 1]]

    def without(self, names: Collection[str]) -> "Partition":
        """The partition of the other clients, each with the rows and the number that it has.

        Raises:
            DataError: There is no client of such a name, or none would be left.
        """
        if unknown := [name for name in names if name not in self.names]:
            raise DataError(
                f"data.exclude lists unknown clients: {listed(unknown)}. The clients are "
                f"{listed(self.names)}"
            )
        kept = [client for client, name in enumerate(self.names) if name not in names]
        if not kept:
            raise DataError("data.exclude lists every client. Keep at least one")
        rows: dict[str, Rows] = {}
        for part, every in (("train", self.train_rows), ("test", self.test_rows)):
            own = [every(client) for client in kept]
            rows[part] = np.concatenate(own)
            rows[f"{part}_offsets"] = np.cumsum([0, *map(len, own)], dtype=np.int64)
        numbers = tuple(self.numbers[client] if self.numbers else client for client in kept)
        return Partition(**rows, names=tuple(self.names[c] for c in kept), numbers=numbers)

    def dump(self) -> bytes:
        """As the content of an `.npz` file."""
        file = io.BytesIO()
        np.savez(
            file,
            train=self.train,
            train_offsets=self.train_offsets,
            test=self.test,
            test_offsets=self.test_offsets,
            names=np.array(self.names, dtype=np.str_),
            numbers=np.array(self.numbers, dtype=np.int64),
        )
        return file.getvalue()

    @classmethod
    def load(cls, path: Path, data: bytes | None = None) -> "Partition":
        """Read what `dump` gave.

        Args:
            path: The file.
            data: Its content, if it was read already.

        Raises:
            DataError: The file is absent, damaged, or no partition.
        """
        with told_as(DataError, f"cannot read the partition file {path}", OSError):
            data = read_bytes(path) if data is None else data
        damaged, after = f"the partition file {path} is damaged", ". Create it again"
        with (
            told_as(DataError, damaged, *NPZ_ERRORS, after=after),
            np.load(io.BytesIO(data), allow_pickle=False) as file,
        ):
            arrays = {name: file[name] for name in _RAGGED}
            names = tuple(str(name) for name in file["names"])
            numbers = tuple(int(n) for n in file["numbers"]) if "numbers" in file else ()
        if not _consistent(arrays, len(names)) or len(numbers) not in (0, len(names)):
            raise DataError(f"the partition file {path} is inconsistent. Create it again")
        return cls(**arrays, names=names, numbers=numbers)


_RAGGED = ("train", "train_offsets", "test", "test_offsets")


def partition(dataset: Dataset, settings: DataSettings, seed: int) -> Partition:
    """Divide the rows of a data set among clients.

    The same arguments give the same partition, whatever was drawn before. A
    `FedbayesWarning` names the rows that the data set or the partition leaves out without a limit.

    Args:
        dataset: The pool.
        settings: How to divide it.
        seed: Seed of the run or trial.

    Raises:
        DataError: The set cannot be divided so, or a client would have too few samples; the
            message names the client and the ways out.

    Examples:
        >>> from fedbayes.data import DataSettings, load_dataset, partition
        >>> settings = DataSettings(name="digits", clients=5)
        >>> partition(load_dataset(settings), settings, seed=0).clients
        5
    """
    fraction = _fraction(dataset, settings)
    scheme = choose_scheme(dataset, settings)
    rng = seeds.numpy_rng(seed, "pool")
    pool = _some(np.arange(_pool_size(dataset, settings, fraction)), settings.limit, rng)
    needed = (
        settings.min_samples if fraction is None else rows_needed(settings.min_samples, fraction)
    )
    division = divide(dataset, pool, settings, needed, seed)
    official = np.zeros(0, np.int64)
    if settings.test_counts is not None:
        left = np.setdiff1d(pool, division.rows)
        chosen = _of_each_class(dataset.strata, left, settings.test_counts, rng)
        dealt = seeds.numpy_rng(seed, "holdout")
        train, test = division, deal_official(dataset, division, chosen, False, dealt)
    elif fraction is not None:
        train, test = own_fraction(division, fraction, seeds.numpy_rng(seed, "holdout"))
    else:
        start = dataset.official_train or 0
        official = _some(np.arange(start, dataset.samples), settings.limit_test, rng)
        train, test = (
            division,
            deal_official(
                dataset,
                division,
                official,
                scheme == "natural",
                seeds.numpy_rng(seed, "holdout"),
            ),
        )
    notes = left_out(dataset, settings, pool, division, test, official, fraction)
    if settings.samples_per_client is not None:
        train = _cap(train, settings.samples_per_client, seeds.numpy_rng(seed, "cap"))
    _refuse_small(train, settings)
    if settings.partition == "default" and not (dataset.classes or scheme == "natural"):
        notes.append(
            f"{dataset.name} is divided at random (partition = '{scheme}'), because its target "
            f"has no classes ({describe(dataset.target)})"
        )
    for note in (*dataset.notes, *notes):
        warn(note)
    if settings.validation:
        train, test = own_fraction(
            train, settings.validation, seeds.numpy_rng(seed, "validation rows")
        )
        _refuse_small(train, settings)
    found = Partition(train.rows, train.offsets, test.rows, test.offsets, division.names)
    # Nothing was split yet, so the others count from 0.
    return replace(found.without(settings.exclude), numbers=()) if settings.exclude else found


def _fraction(dataset: Dataset, settings: DataSettings) -> float | None:
    """The part of its own samples that a client tests on; None if others are for testing."""
    if settings.test_counts is not None:
        return None
    if isinstance(settings.test, float):
        if settings.split is not None and dataset.official_train is not None:
            raise DataError(
                f"data.test = {settings.test} and data.split = '{settings.split}' exclude each "
                "other, because that column already chooses the test rows of "
                f"{dataset.samples - dataset.official_train:,}. Leave data.test out, or use "
                "data.drop instead of data.split"
            )
        return settings.test
    if dataset.official_train is not None:
        return None
    if settings.test == "official":
        raise DataError(
            f"{dataset.name} has no official test part for a federation. Set data.test to a "
            f"fraction such as {DEFAULT_FRACTION}"
        )
    return DEFAULT_FRACTION


def _pool_size(dataset: Dataset, settings: DataSettings, fraction: float | None) -> int:
    """The number of samples that are divided: the first of the data set."""
    unread = settings.official_test == "unread"
    if unread and (dataset.official_train is None or fraction is None):
        reason = (
            f"{dataset.name} has no official test part"
            if dataset.official_train is None
            else "the official part is used for testing. With a fraction as data.test, clients "
            "test on their own samples"
            if settings.test_counts is None
            else "test_counts already leaves that part out"
        )
        raise DataError(f"official_test = 'unread' has no effect here: {reason}")
    if dataset.official_train is not None and (fraction is None or unread):
        return dataset.official_train
    return dataset.samples


def _some(rows: Rows, limit: int | None, rng: np.random.Generator) -> Rows:
    if limit is None or limit >= len(rows):
        return rows
    return np.sort(rng.choice(rows, limit, replace=False))


def _of_each_class(y: Rows, rows: Rows, counts: tuple[int, ...], rng: np.random.Generator) -> Rows:
    """Rows drawn at random, so many of each class, rising."""
    labels = y[rows]
    drawn = [
        rng.choice(rows[labels == label], count, replace=False)
        for label, count in enumerate(counts)
    ]
    return np.sort(np.concatenate(drawn))


def _cap(division: Division, most: int, rng: np.random.Generator) -> Division:
    """At most so many rows of each client, chosen at random."""
    client = division.client
    order = np.lexsort((rng.random(len(client)), client))
    position = np.arange(len(client)) - division.offsets[client]
    kept = order[position < most]
    return group_by_client(division.rows[kept], client[kept], division.names)


def _refuse_small(train: Division, settings: DataSettings) -> None:
    least = min(settings.min_samples, settings.samples_per_client or settings.min_samples)
    sizes = np.diff(train.offsets)
    smallest = int(sizes.argmin())
    if sizes[smallest] >= least:
        return
    ways = "fewer clients, a larger alpha, balance = true, or a smaller min_samples"
    if len(sizes) == 1:
        ways = "more rows, or a smaller min_samples"
    raise DataError(
        f"client '{train.names[smallest]}' would have {sizes[smallest]} training samples, fewer "
        f"than min_samples = {settings.min_samples}; use {ways}"
    )


def _consistent(arrays: dict[str, Rows], clients: int) -> bool:
    for rows, offsets in (
        (arrays["train"], arrays["train_offsets"]),
        (arrays["test"], arrays["test_offsets"]),
    ):
        if rows.dtype != np.int64 or offsets.dtype != np.int64 or rows.ndim != 1:
            return False
        if offsets.shape != (clients + 1,) or offsets[0] != 0 or offsets[-1] != len(rows):
            return False
        if (np.diff(offsets) < 0).any() or (rows < 0).any():
            return False
    return True
