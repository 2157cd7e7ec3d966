"""Ways to divide a pool of rows among clients."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedbayes.core import seeds
from fedbayes.core.brief import Brief
from fedbayes.core.lazy import called
from fedbayes.core.wording import describe
from fedbayes.data.dataset import Array, Dataset, Rows
from fedbayes.data.settings import DEFAULT_CLIENTS, PARTITION, DataSettings
from fedbayes.errors import DataError


@dataclass(frozen=True, repr=False)
class Division(Brief):
    """Rows of S clients: client s holds `rows[offsets[s]:offsets[s + 1]]`, rising."""

    rows: Rows
    """Rows of the pool, client by client, int64."""
    offsets: Rows
    """Where each client's rows begin, int64 [S + 1]."""
    names: tuple[str, ...]
    """Names of the clients [S]."""

    @property
    def client(self) -> Rows:
        """The client of each entry of `rows`."""
        return np.repeat(np.arange(len(self.names)), np.diff(self.offsets))

    def counts(self, y: Rows, classes: int) -> Rows:
        """Number of samples of each client and class [S, K]."""
        cells = self.client * classes + y[self.rows]
        return np.bincount(cells, minlength=len(self.names) * classes).reshape(-1, classes)


def group_by_client(rows: Rows, client: Rows, names: tuple[str, ...]) -> Division:
    """The division in which `client[i]` holds `rows[i]`."""
    order = np.lexsort((rows, client))
    sizes = np.bincount(client, minlength=len(names))
    return Division(rows[order], np.concatenate([[0], np.cumsum(sizes)]), names)


def choose_scheme(dataset: Dataset, settings: DataSettings) -> str:
    """The scheme that divides a data set: the requested one, or the default of this set."""
    if settings.partition != "default":
        return settings.partition
    if settings.generator is not None:
        return "natural"
    if (settings.name == "own" or settings.of_factory) and dataset.groups is not None:
        return "natural"
    return "dirichlet" if dataset.classes else "iid"


def divide(
    dataset: Dataset, pool: Rows, settings: DataSettings, needed: int, seed: int
) -> Division:
    """Divide the rows of a data set according to the settings.

    Args:
        dataset: The pool of samples.
        pool: The rows to divide.
        settings: Scheme, number of clients and the scheme's own settings.
        needed: Smallest number of rows of a client, which the Dirichlet scheme draws again
            for; natural groups with fewer are left out.
        seed: Seed of the run or trial.

    Raises:
        DataError: The rows cannot be divided so.
    """
    scheme = choose_scheme(dataset, settings)
    if scheme == "natural":
        return _natural(dataset, pool, settings, needed)
    own = ":" in scheme
    if scheme != "iid" and not dataset.classes and not own:
        ways = "'iid'" if dataset.groups is None else "'iid' or 'natural'"
        raise DataError(
            f"{dataset.name}: partition = '{scheme}' needs classes, but the target is "
            f"{describe(dataset.target)}. Set data.partition = {ways}"
        )
    clients = settings.clients or len(settings.class_counts or ()) or DEFAULT_CLIENTS
    if clients > len(pool):
        raise DataError(
            f"{dataset.name}: {len(pool)} samples are not enough for {clients} clients. Use fewer "
            "clients"
        )
    rng = seeds.numpy_rng(seed, "partition")
    if own:
        client = _own(scheme, dataset.y[pool], clients, rng)
    else:
        pool = rng.permutation(pool)
        labels = dataset.strata[pool]
        client = _SCHEMES[scheme](labels, clients, settings, needed, rng)
    held = client >= 0
    names = tuple(f"client-{index}" for index in range(clients))
    return group_by_client(pool[held], client[held], names)


def _own(place: str, y: Array, clients: int, rng: np.random.Generator) -> Rows:
    """The client of each row by a user's own function, which gets targets as the data have them."""
    found = np.asarray(called(place, "partition", PARTITION, y.copy(), clients, rng))
    if found.shape != (len(y),) or found.dtype.kind not in "iu":
        raise DataError(
            f"the partition {place!r} returned {found.dtype} of shape {found.shape}. Return an "
            f"integer for each of {len(y)} rows: the number of its client, or -1 for no client"
        )
    client = found.astype(np.int64)
    if len(odd := client[(client < -1) | (client >= clients)]):
        raise DataError(
            f"the partition {place!r} assigned a row to client {odd[0]}. data.clients is "
            f"{clients}, so clients are 0 to {clients - 1}; -1 means no client"
        )
    return client


def _iid(
    labels: Rows, clients: int, settings: DataSettings, needed: int, rng: np.random.Generator
) -> Rows:
    """Equal parts at random: the rows come shuffled, so they are dealt out in turn."""
    return np.arange(len(labels)) % clients


def _dirichlet(
    labels: Rows, clients: int, settings: DataSettings, needed: int, rng: np.random.Generator
) -> Rows:
    """Shares ~ Dir(alpha) of each class, as `DirichletPartitioner` of flwr-datasets draws."""
    rng = np.random.default_rng(int(rng.integers(2**63)))
    rows = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    for _ in range(_DRAWS):
        client, sizes = np.full(len(labels), -1), np.zeros(clients, np.int64)
        for own in rows:
            shares = rng.dirichlet(np.full(clients, settings.alpha))
            if settings.balance:
                shares[sizes > len(labels) / clients] = 0.0
                if not (total := shares.cumsum()[-1]) > 0:
                    break
                shares = shares / total
            ends = (shares.cumsum() * len(own)).astype(np.int64)[:-1]
            client[own] = np.searchsorted(ends, np.arange(len(own)), side="right")
            sizes += np.bincount(client[own], minlength=clients)
        else:
            if sizes.min() >= needed:
                return client
    raise DataError(
        f"no sampled Dirichlet partition with alpha = {settings.alpha} gave each of {clients} "
        f"clients {needed} of {len(labels)} samples. Use fewer clients, a larger alpha, balance = "
        "true, or a smaller min_samples"
    )


_DRAWS = 11
"""How often Dirichlet shares are drawn until each client has enough rows."""


def _shards(
    labels: Rows, clients: int, settings: DataSettings, needed: int, rng: np.random.Generator
) -> Rows:
    """Shards of the rows sorted by class, as `ShardPartitioner` of flwr-datasets draws."""
    each = settings.shards_per_client
    if clients * each > len(labels):
        raise DataError(
            f"{len(labels)} samples cannot be divided into {clients} x {each} shards. Use fewer "
            "clients or fewer shards_per_client"
        )
    rng = np.random.default_rng(int(rng.integers(2**63)))
    size = len(labels) // (clients * each)
    shards = rng.permutation(len(labels) // size)
    owner = np.full(len(shards), -1)
    owner[shards[: clients * each]] = np.repeat(np.arange(clients), each)
    client = np.full(len(labels), -1)
    order = np.argsort(labels, kind="stable")[: len(shards) * size]
    client[order] = np.repeat(owner, size)
    return client


def _dirichlet_equal(
    labels: Rows, clients: int, settings: DataSettings, needed: int, rng: np.random.Generator
) -> Rows:
    """A class mix ~ Dir(alpha * prior) and equally many rows per client (Hsu et al., 2019)."""
    # When a class runs out, the mix is renormalized over those that remain.
    classes = int(labels.max()) + 1
    left = np.bincount(labels, minlength=classes)
    size = len(labels) // clients
    present = np.flatnonzero(left)
    mixes = np.zeros((clients, classes))
    mixes[:, present] = rng.dirichlet(settings.alpha * left[present] / len(labels), clients)
    drawn = np.zeros((clients, classes), np.int64)
    for index in rng.permutation(clients):
        drawn[index] = _draw(mixes[index], left, size, rng)
        left -= drawn[index]
    # Rows of one class are dealt out in blocks: first those of client 0, then of client 1, ...
    client = np.full(len(labels), -1)
    for label in present:
        rows = np.flatnonzero(labels == label)
        holders = np.repeat(np.arange(clients), drawn[:, label])
        client[rows[: len(holders)]] = holders
    return client


def _draw(mix: Array, left: Rows, size: int, rng: np.random.Generator) -> Rows:
    """Counts per class of `size` rows drawn by `mix` from those that are `left`."""
    drawn = np.zeros_like(left)
    while (lacking := size - drawn.sum()) > 0:
        open_ = drawn < left
        weights = np.where(open_, mix, 0.0)
        if weights.sum() <= 0:
            weights = (left - drawn).astype(np.float64)
        more = rng.multinomial(lacking, weights / weights.sum())
        drawn = np.minimum(drawn + more, left)
    return drawn


def _by_counts(
    labels: Rows, clients: int, settings: DataSettings, needed: int, rng: np.random.Generator
) -> Rows:
    """So many rows of each class for each client; the rest is left over."""
    counts = np.array(settings.class_counts)
    there = np.bincount(labels, minlength=counts.shape[1])
    if len(there) > counts.shape[1]:
        raise DataError(f"class_counts has {counts.shape[1]} classes, the data {len(there)}")
    wanted = counts.sum(0) + np.array(settings.test_counts or 0)
    if (short := np.flatnonzero(wanted > there)).size:
        raise DataError(
            f"class_counts and test_counts need {wanted[short[0]]} samples of class {short[0]}, "
            f"but there are {there[short[0]]}"
        )
    client = np.full(len(labels), -1)
    for label, column in enumerate(counts.T):
        rows = np.flatnonzero(labels == label)
        client[rows[: column.sum()]] = np.repeat(np.arange(clients), column)
    return client


def _natural(dataset: Dataset, pool: Rows, settings: DataSettings, needed: int) -> Division:
    """One client per group; the first `clients` of those that hold enough rows."""
    if dataset.groups is None:
        raise DataError(
            f"{dataset.name} has no natural clients. Choose another partition, or a data set with "
            "natural clients: femnist (writers), har (subjects), vehicle (sensors), or your own "
            "data with a group column"
        )
    groups = dataset.groups[pool]
    known = groups >= 0
    sizes = np.bincount(groups[known], minlength=len(dataset.group_names))
    chosen = np.flatnonzero(sizes >= needed)
    if len(chosen) < (settings.clients or 1):
        ways = ["fewer clients"] if settings.clients else []
        ways += ["a smaller min_samples"] if len(chosen) < np.count_nonzero(sizes) else []
        ways += [
            f"partition = '{'dirichlet' if dataset.classes else 'iid'}'"
            if settings.partition == "default"
            else "another partition"
        ]
        tested = f" ({needed} with those to test on)" if needed > settings.min_samples else ""
        wanted = f", and clients is {settings.clients}" if settings.clients else ""
        raise DataError(
            f"{dataset.name} has {len(chosen)} groups of at least min_samples = "
            f"{settings.min_samples} training samples{tested}{wanted}. Use {', or '.join(ways)}"
        )
    chosen = chosen[: settings.clients]
    client_of = np.full(len(dataset.group_names), -1)
    client_of[chosen] = np.arange(len(chosen))
    client = np.where(known, client_of[groups], -1)
    held = client >= 0
    names = tuple(dataset.group_names[group] for group in chosen)
    return group_by_client(pool[held], client[held], names)


_Scheme = Callable[[Rows, int, DataSettings, int, np.random.Generator], Rows]
"""Shuffled labels [n], clients, settings, rows needed, rng -> client of each row, or -1."""

_SCHEMES: dict[str, _Scheme] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "dirichlet-equal": _dirichlet_equal,
    "shards": _shards,
    "counts": _by_counts,
}
