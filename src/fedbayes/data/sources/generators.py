"""Samples of one client at a time, by a function of the user's own: for federations of any size."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedbayes.core import seeds
from fedbayes.core.lazy import own, own_code
from fedbayes.core.targets import Target
from fedbayes.core.wording import describe, size
from fedbayes.data.dataset import Array, Dataset, Rows, build_dataset
from fedbayes.data.holdout import DEFAULT_FRACTION, held_out
from fedbayes.data.intake import Narrowing, arrange, numbers, plain
from fedbayes.data.settings import DataSettings
from fedbayes.data.sources.labels import as_target, read_target
from fedbayes.errors import DataError, told_as

_FEW_CLASSES, _PER_CLASS = 1000, 100
"""Up to so many classes, or so many for each that occurs, labels are believed to be classes."""
_FORM = "a pair (x, y) of NumPy arrays or tensors: samples [n, ...] and their targets [n] or [n, T]"


@dataclass(frozen=True)
class GeneratedSamples:
    """Samples of a client as its function gave them, checked."""

    x: Array
    """uint8 pictures [n, C, H, W] or float32 [n, ...]."""
    y: Array
    """Targets as they came, [n] or [n, T]."""


@dataclass(frozen=True)
class GeneratorPool:
    """The clients of a generator that are looked at before the first round."""

    dataset: Dataset
    """Their samples: those to train on, then those to test on, each client by client."""
    clients: Rows
    """Which they are, rising [P]."""
    train_sizes: Rows
    """Number of their training samples [P]."""
    test_sizes: Rows
    """Number of their test samples [P]."""


@dataclass
class Generator:
    """A function of the user's own, called as `function(client, seed, **arguments)`.

    Whatever it gives is checked against what the first client had. The samples asked for last are
    kept, up to `cache` MiB of the settings.

    Args:
        settings: with its name, arguments and bounds.
        seed: of the run, which it is given.

    Raises:
        DataError: there is no such function.
    """

    settings: DataSettings
    seed: int
    function: Any = field(init=False)
    calls: int = field(init=False, default=0)
    """How often the function was called."""
    _first: tuple[int, GeneratedSamples] | None = field(init=False, default=None)
    _kept: "OrderedDict[int, GeneratedSamples]" = field(init=False, default_factory=OrderedDict)
    _bytes: int = field(init=False, default=0)
    _arranged: str = field(init=False, default="")
    _narrowing: Narrowing = field(init=False, default_factory=Narrowing)

    def __post_init__(self) -> None:
        """Find the function."""
        after = (
            ". Give package.module:function, of a module that Python can import (such as one in "
            "the current folder)"
        )
        lost = f"cannot find data.generator {self.name!r}"
        with told_as(DataError, lost, ImportError, after=after):
            self.function = own(self.name)
        if not callable(self.function):
            raise DataError(f"data.generator {self.name!r} is not a function")

    @property
    def name(self) -> str:
        """`package.module:function`."""
        return str(self.settings.generator)

    def who(self, client: int) -> str:
        """A client, for messages."""
        return f"{self.name}, client {client}"

    def drawn(self, client: int) -> GeneratedSamples:
        """All samples of a client.

        Raises:
            DataError: the function fails, or gives what is no samples, or others than the first
                client had; names the client and the function.
        """
        if client in self._kept:
            self._kept.move_to_end(client)
            return self._kept[client]
        found = self.called(client)
        self._kept[client] = found
        self._bytes += found.x.nbytes + found.y.nbytes
        while self._bytes > self.settings.cache << 20 and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.x.nbytes + oldest.y.nbytes
        return found

    def called(self, client: int) -> GeneratedSamples:
        """As `drawn`, from the function itself."""
        who, arguments = self.who(client), self.settings.arguments
        self.calls += 1
        with own_code(DataError, f"{who}: the function failed", self.name):
            given = self.function(client, self.seed, **arguments)
        if not isinstance(given, tuple | list) or len(given) != 2:
            raise DataError(f"{who}: it returned a {type(given).__name__}. Return {_FORM}")
        x, note = arrange(numbers(given[0], who), self.settings.channels, who)
        self._arranged = self._arranged or note
        found = GeneratedSamples(self._narrowing.add(x), _targets(_array(given[1], "y", who), who))
        self._check(found, client)
        return found

    def _check(self, found: GeneratedSamples, client: int) -> None:
        """See that samples are like those of the first client, which all is inferred from."""
        x, y, who = found.x, found.y, self.who(client)
        if len(x) != len(y):
            raise DataError(f"{who}: {len(x):,} samples and {len(y):,} targets")
        if not len(x):
            raise DataError(f"{who}: it returned no samples. Every client needs at least one")
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            row, *place = np.argwhere(~np.isfinite(x))[0].tolist()
            value = "NaN" if np.isnan(x[row, *place]) else "infinite"
            raise DataError(
                f"{who}: x is {value} in sample {row} at {tuple(place)}. Samples must be finite"
            )
        if self._first is None:
            self._first = client, found
        like, first = self._first
        for what, one, other in (("x", x, first.x), ("y", y, first.y)):
            if one.shape[1:] != other.shape[1:]:
                raise DataError(
                    f"{who}: {what} of a sample has the shape {size(one.shape[1:])}, and of "
                    f"client {like} {size(other.shape[1:])}. All clients need the same shape"
                )
            if one.dtype != other.dtype:
                raise DataError(
                    f"{who}: {what} contains {_kind(one)}, and that of client {like} "
                    f"{_kind(other)}. All clients need the same type"
                )

    def split(self, client: int) -> tuple[Rows, Rows]:
        """The rows of a client's samples that it trains on, and those that it is tested on.

        Raises:
            DataError: too few are left to train on.
        """
        rows = len(self.drawn(client).y)
        if self.settings.test == "clients":
            every, none = np.arange(rows), np.arange(0)
            train, test = (every, none) if client < self.clients else (none, every)
        else:
            tested = int(held_out(np.array([rows]), self.fraction)[0])
            order = seeds.numpy_rng(self.seed, "holdout", client=client).permutation(rows)
            train, test = np.sort(order[tested:]), np.sort(order[:tested])
        least = self.settings.min_samples
        if client < self.clients and len(train) < least:
            raise DataError(
                f"{self.who(client)}: of its {rows} samples {len(train)} are left for training, "
                f"fewer than data.min_samples = {least}. Return more samples, or set a smaller "
                "number"
            )
        return train, test

    @property
    def clients(self) -> int:
        """Number of clients S."""
        return self.settings.clients or 1

    @property
    def fraction(self) -> float:
        """Part of a client's samples that it is tested on."""
        test = self.settings.test
        return test if isinstance(test, float) else DEFAULT_FRACTION

    def pool(self, kinds: Sequence[str] = ()) -> tuple[GeneratorPool, tuple[str, ...]]:
        """Look at some clients, drawn from the seed: what all of them are taken for.

        Args:
            kinds: kinds of target of which it is to be one; none: the targets decide.

        Returns:
            Them, and what a user should know of how their targets were read.

        Raises:
            DataError: as for `drawn`; or a client has other samples when it is asked again.
        """
        clients = self._chosen()
        found = [self.drawn(client) for client in clients.tolist()]
        self._require_same(int(clients[0]), found[0])
        notes = [self._arranged] if self._arranged else []
        notes += self._narrowing.notes((), self.name)
        y, target = self._target(clients, [one.y for one in found], kinds, notes)
        starts = np.cumsum([0, *(len(one.y) for one in found)])[:-1]
        parts = [self.split(client) for client in clients.tolist()]
        train, test = (
            np.concatenate([start + part[side] for start, part in zip(starts, parts, strict=True)])
            for side in (0, 1)
        )
        order = np.concatenate([train, test]).astype(np.int64)
        x = np.concatenate([one.x for one in found])[order]
        owner = np.repeat(np.arange(len(clients)), [len(one.y) for one in found])[order]
        dataset = build_dataset(
            self.name,
            x,
            y[order],
            target,
            official_train=len(train) if len(test) else None,
            groups=clients[owner],
            scale=self.settings.scale or (255.0 if x.dtype == np.uint8 else 1.0),
            notes=tuple(notes),
        )
        sizes = [np.array([len(part[side]) for part in parts]) for side in (0, 1)]
        return GeneratorPool(dataset, clients, *sizes), tuple(notes)

    def _chosen(self) -> Rows:
        """The clients that are looked at, rising; those that are never trained on come last."""
        count = min(self.settings.test_clients, self.clients)
        rng = seeds.numpy_rng(self.seed, "looked at")
        clients = np.sort(rng.choice(self.clients, count, replace=False, shuffle=False))
        if self.settings.test != "clients":
            return clients
        others = self.clients + np.arange(self.settings.test_clients)
        return np.concatenate([clients, others])

    def _require_same(self, client: int, before: GeneratedSamples) -> None:
        """See that the function gives a client the same samples whenever it is asked."""
        again = self.called(client)
        if not (np.array_equal(before.x, again.x) and np.array_equal(before.y, again.y)):
            raise DataError(
                f"{self.who(client)}: it returned other samples at the second call, so a run "
                "could not be resumed or repeated. Let only (client, seed) decide, as in rng = "
                "numpy.random.default_rng([seed, client])"
            )

    def _target(
        self, clients: Rows, each: Sequence[Array], kinds: Sequence[str], notes: list[str]
    ) -> tuple[Array, Target]:
        """What is to be predicted, and targets as that, of each client after another."""
        y = np.concatenate(each)
        classes, whole = self.settings.classes, y.dtype.kind == "i" and y.shape[1] == 1
        if classes or "class" in kinds or (whole and not kinds):
            target = Target("class", tuple(classes or self._counted(y)))
            whose = map(self.who, clients.tolist())
            read = [self._classes(one, target, who) for one, who in zip(each, whose, strict=True)]
            return np.concatenate(read), target
        import pandas as pd

        labels = self.settings.label
        names = labels if len(labels) == y.shape[1] else [f"y{at}" for at in range(y.shape[1])]
        wanted = kinds or (("real",) if y.shape[1] == 1 else ("labels", "real"))
        return read_target(pd.DataFrame(y, columns=[*names]), (), wanted, self.name, notes)

    def targets(self, client: int, y: Array, target: Target) -> Array:
        """Targets of a client: int64 [n] of classes, else float32 [n, T].

        Raises:
            DataError: one is not of the kind, or outside of the classes.
        """
        if target.kind == "class":
            return self._classes(y, target, self.who(client))
        return as_target(y.astype(np.float64), target, self.who(client))

    def _counted(self, y: Array) -> list[str]:
        """Names of classes from 0 to the largest label."""
        count, seen = int(y.max(initial=0)) + 1, len(np.unique(y))
        if count > max(_FEW_CLASSES, _PER_CLASS * seen):
            raise DataError(
                f"{self.name}: the largest label is {count - 1}, and only {seen:,} of the "
                f"{count:,} classes from 0 occur. Number them from 0 without gaps, or list all in "
                "data.classes"
            )
        return [str(number) for number in range(count)]

    def _classes(self, y: Array, target: Target, who: str) -> Rows:
        if y.shape[1] != 1 or y.dtype.kind != "i":
            raise DataError(
                f"{who}: y is {_kind(y)} [n, {y.shape[1]}]. Classes must be whole numbers from 0, "
                "[n]"
            )
        if (y < 0).any():
            row = int((y < 0)[:, 0].argmax())
            raise DataError(
                f"{who}: the label {y[row, 0]} of sample {row} is negative. Classes must be whole "
                "numbers from 0"
            )
        odd = y >= target.classes
        if odd.any():
            row = int(odd[:, 0].argmax())
            raise DataError(
                f"{who}: the label {y[row, 0]} of sample {row} is not in 0 to "
                f"{target.classes - 1} ({describe(target)}). List all classes in data.classes if "
                "the clients that are read first (data.test_clients) lack some"
            )
        return y[:, 0].astype(np.int64)


def _array(values: Any, what: str, who: str) -> Array:
    """NumPy's own array of an array or tensor."""
    wrong, after = f"{who}: {what} is not an array of numbers", f". Return {_FORM}"
    with told_as(DataError, wrong, ValueError, TypeError, RuntimeError, after=after):
        found = np.asarray(plain(values))
    if found.dtype.kind not in "iufb":
        raise DataError(f"{who}: {what} is of type {found.dtype}, not numbers")
    return found


def _targets(y: Array, who: str) -> Array:
    """Targets [n, T]: whole numbers as int64, others as float64."""
    if y.ndim not in (1, 2):
        raise DataError(f"{who}: y is {size(y.shape)}. Return [n] or [n, T]")
    columns = y.shape[1] if y.ndim == 2 else 1
    table = y.reshape(len(y), columns).astype(np.float64 if y.dtype.kind == "f" else np.int64)
    if table.dtype.kind == "f" and not np.isfinite(table).all():
        row = int((~np.isfinite(table)).any(1).argmax())
        raise DataError(f"{who}: y is not finite in sample {row}. Every sample needs a target")
    return table


def _kind(values: Array) -> str:
    return {"i": "whole numbers", "u": "integers of 8 bits"}.get(values.dtype.kind, "real numbers")
