import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbayes.data import DataSettings, Partition, partition
from fedbayes.data.schemes import _SCHEMES
from fedbayes.errors import DataError
from tests.helpers.small_files import pool

SCHEMES = ("iid", "dirichlet", "dirichlet-equal", "shards", "natural")


def labels(n, classes=10, seed=0):
    return np.random.default_rng(seed).integers(classes, size=n)


def counts(dataset, part):
    client = np.repeat(np.arange(part.clients), np.diff(part.train_offsets))
    table = np.zeros((part.clients, len(dataset.classes)), int)
    np.add.at(table, (client, dataset.y[part.train]), 1)
    return table


@settings(deadline=None, max_examples=40)
@given(
    scheme=st.sampled_from(SCHEMES),
    clients=st.integers(1, 8),
    n=st.integers(60, 200),
    classes=st.integers(2, 6),
    test=st.sampled_from(["official", 0.1, 0.25, 0.7]),
    seed=st.integers(0, 2**32),
)
def test_any_partition_uses_rows_once_and_is_fixed_by_its_seed(
    scheme, clients, n, classes, test, seed
):
    y = np.resize(np.arange(classes), n)
    dataset = pool(y, official=n - 20, groups=np.resize(np.arange(8), n))
    asked = DataSettings(
        partition=scheme, clients=clients, test=test, alpha=5, min_samples=1, shards_per_client=2
    )
    part = partition(dataset, asked, seed)
    used = np.concatenate([part.train, part.test])
    assert len(np.unique(used)) == len(used)
    assert used.min() >= 0
    assert used.max() < n
    assert part.clients == clients
    for rows, offsets in ((part.train, part.train_offsets), (part.test, part.test_offsets)):
        assert offsets[0] == 0
        assert offsets[-1] == len(rows)
        assert (np.diff(offsets) >= 0).all()
    assert (np.diff(part.train_offsets) >= 1).all()
    if test == "official":
        assert part.train.max() < n - 20
        assert part.test.size == 0 or part.test.min() >= n - 20
        if scheme != "natural":
            assert sorted(part.test) == list(range(n - 20, n))
    again = partition(dataset, asked, seed)
    assert all(np.array_equal(getattr(part, f), getattr(again, f)) for f in ("train", "test"))


def test_another_seed_gives_another_partition():
    dataset = pool(labels(300))
    asked = DataSettings(partition="iid", clients=5)
    assert not np.array_equal(
        partition(dataset, asked, 1).train, partition(dataset, asked, 2).train
    )


def test_iid_sizes_differ_by_one_at_most():
    part = partition(pool(labels(1003), official=903), DataSettings(partition="iid", clients=7), 3)
    sizes = np.diff(part.train_offsets)
    assert sizes.sum() == 903
    assert sizes.max() - sizes.min() <= 1


def test_dirichlet_class_shares_have_the_moments_of_the_distribution():
    """Share of a client in a class ~ Beta(a, (S-1)a): mean 1/S, variance (S-1)/(S^2 (Sa+1))."""
    clients, alpha = 10, 2.0
    dataset = pool(np.resize(np.arange(10), 10_000), official=9_990)
    asked = DataSettings(clients=clients, alpha=alpha)
    shares = []
    for seed in range(30):
        table = counts(dataset, partition(dataset, asked, seed))
        shares.append(table / table.sum(0))
    shares = np.array(shares)
    assert shares.mean((0, 2)) == pytest.approx(np.full(clients, 0.1), abs=0.015)
    expected = (clients - 1) / (clients**2 * (clients * alpha + 1))
    assert shares.var() == pytest.approx(expected, rel=0.1)


def test_balance_bounds_the_sizes():
    """A client over the mean gets no more, so it exceeds the mean by one class at most."""
    dataset = pool(np.resize(np.arange(10), 5_000), official=4_990)
    spread = {}
    for balance in (False, True):
        asked = DataSettings(clients=20, alpha=0.2, balance=balance, min_samples=1)
        sizes = [np.diff(partition(dataset, asked, seed).train_offsets) for seed in range(5)]
        spread[balance] = np.std(sizes)
        if balance:
            assert np.max(sizes) <= 4_990 / 20 + 500
    assert spread[True] < spread[False]


def test_dirichlet_equal_sizes_and_skew():
    dataset = pool(np.resize(np.arange(10), 4_010), official=4_000)
    skew = {}
    for alpha in (0.1, 100.0):
        asked = DataSettings(partition="dirichlet-equal", clients=20, alpha=alpha)
        table = counts(dataset, partition(dataset, asked, 0))
        assert (table.sum(1) == 200).all()
        skew[alpha] = (table.max(1) / 200).mean()
    assert skew[0.1] > 0.6
    assert skew[100.0] < 0.2


def test_shards_bound_the_classes_of_a_client():
    dataset = pool(np.repeat(np.arange(10), 100), official=None)
    part = partition(dataset, DataSettings(partition="shards", clients=10, test=0.1), 0)
    assert ((counts(dataset, part) > 0).sum(1) <= 2).all()
    assert len(part.train) + len(part.test) == 1000


def test_natural_clients_are_the_groups():
    groups = np.repeat([0, 1, 2, 3], [40, 3, 20, 37])
    dataset = pool(labels(100), groups=groups)
    part = partition(dataset, DataSettings(partition="natural"), 0)
    assert part.names == ("g0", "g1", "g2", "g3")
    for client in range(4):
        rows = np.concatenate([part.train_rows(client), part.test_rows(client)])
        assert sorted(rows) == np.flatnonzero(groups == client).tolist()
    first = partition(dataset, DataSettings(partition="natural", clients=2, min_samples=5), 0)
    assert first.names == ("g0", "g2")


def test_natural_clients_keep_their_own_official_test_rows():
    groups = np.array([0, 1, 0, 1, 0, 1, 0, 1, 1, 0, -1])
    dataset = pool(np.resize([0, 1], 11), official=6, groups=groups)
    part = partition(dataset, DataSettings(partition="natural"), 0)
    assert set(part.test_rows(0)) - {10} == {6, 9}
    assert set(part.test_rows(1)) - {10} == {7, 8}
    assert 10 in part.test


def test_official_test_rows_follow_the_training_classes():
    dataset = pool(np.resize(np.arange(10), 12_000), official=10_000)
    part = partition(dataset, DataSettings(clients=8, alpha=0.3), 4)
    train = counts(dataset, part)
    dealt = np.zeros_like(train)
    client = np.repeat(np.arange(8), np.diff(part.test_offsets))
    np.add.at(dealt, (client, dataset.y[part.test]), 1)
    assert sorted(part.test) == list(range(10_000, 12_000))
    assert np.abs(dealt - train / train.sum(0) * 200).max() <= 1


@pytest.mark.parametrize(("size", "tested"), [(1, 0), (2, 1), (3, 1), (10, 2), (100, 25)])
def test_a_fraction_leaves_something_on_both_sides(size, tested):
    dataset = pool(np.resize([0, 1], 100 + size), groups=np.repeat([0, 1], [100, size]))
    part = partition(dataset, DataSettings(partition="natural", min_samples=1), 0)
    assert np.diff(part.test_offsets).tolist() == [25, tested]


def test_many_clients_of_few_samples_may_have_no_test_sample():
    dataset = pool(labels(7_000), official=6_500)
    part = partition(dataset, DataSettings(partition="iid", clients=1_000), 0)
    assert (np.diff(part.train_offsets) >= 6).all()
    assert (np.diff(part.test_offsets) == 0).any()
    assert len(part.test) == 500


def test_limits():
    dataset = pool(labels(1_000), official=800)
    asked = DataSettings(
        partition="iid", clients=4, limit=400, limit_test=50, samples_per_client=30
    )
    part = partition(dataset, asked, 0)
    assert np.diff(part.train_offsets).tolist() == [30] * 4
    assert len(part.test) == 50


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"partition": "iid", "clients": 101}, "fewer clients"),
        ({"partition": "iid", "clients": 60, "min_samples": 3}, "client-.*fewer clients"),
        ({"clients": 40, "alpha": 0.01}, "larger alpha, balance = true"),
        ({"partition": "natural"}, "femnist"),
        ({"partition": "shards", "clients": 50, "shards_per_client": 9}, "shards_per_client"),
        ({"test": "official"}, "official"),
    ],
)
def test_what_cannot_be_divided_says_so(asked, says):
    with pytest.raises(DataError, match=says):
        partition(pool(labels(100)), DataSettings(**asked), 0)


def test_too_few_groups():
    dataset = pool(labels(100), groups=np.resize([0, 1], 100))
    with pytest.raises(DataError, match="2 groups") as caught:
        partition(dataset, DataSettings(partition="natural", clients=3), 0)
    told = str(caught.value)
    assert "at least min_samples = 2 training samples (3 with those to test on)" in told
    assert "clients is 3. Use fewer clients, or another partition" in told  # no group is too small
    with pytest.raises(
        DataError, match=r"0 groups .* = 99 .*\(132 with.*. Use a smaller min_sample"
    ):
        partition(dataset, DataSettings(partition="natural", min_samples=99), 0)


def test_saved_and_loaded(tmp_path):
    part = partition(pool(labels(200)), DataSettings(clients=5, alpha=5), 0)
    (tmp_path / "partition.npz").write_bytes(part.dump())
    back = Partition.load(tmp_path / "partition.npz")
    assert back.names == part.names
    for field in ("train", "train_offsets", "test", "test_offsets"):
        assert np.array_equal(getattr(back, field), getattr(part, field))
    assert [file.name for file in tmp_path.iterdir()] == ["partition.npz"]


def test_a_damaged_file_is_refused(tmp_path):
    file = tmp_path / "partition.npz"
    with pytest.raises(DataError, match="partition file"):
        Partition.load(file)
    part = partition(pool(labels(200)), DataSettings(clients=5, alpha=5), 0)
    file.write_bytes(part.dump())
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"nonsense", whole.replace(b"train", b"trail")):
        file.write_bytes(damaged)
        with pytest.raises(DataError, match=r"partition\.npz"):
            Partition.load(file)
    np.savez(
        file, train=part.train, train_offsets=part.train_offsets[:-1], test=part.test,
        test_offsets=part.test_offsets, names=np.array(part.names),
    )  # fmt: skip
    with pytest.raises(DataError, match="inconsistent"):
        Partition.load(file)


@given(
    table=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=4
    ).filter(lambda rows: all(sum(row) for row in rows)),
    test=st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 5)),
    seed=st.integers(0, 100),
)
@settings(deadline=None, max_examples=40)
def test_counts_are_met_exactly(table, test, seed):
    dataset = pool(np.resize(np.arange(3), 120))
    asked = DataSettings(partition="counts", class_counts=table, test_counts=test, min_samples=1)
    found = partition(dataset, asked, seed)
    assert (counts(dataset, found) == np.array(table)).all()
    assert (np.bincount(dataset.y[found.test], minlength=3) == np.array(test)).all()
    assert not np.intersect1d(found.train, found.test).size


def test_counts_are_drawn_by_the_seed():
    dataset = pool(np.resize(np.arange(3), 120))
    asked = DataSettings(partition="counts", class_counts=[[9, 9, 9], [9, 9, 9]])
    one, same, other = (partition(dataset, asked, seed) for seed in (0, 0, 1))
    assert np.array_equal(one.train, same.train)
    assert not np.array_equal(one.train, other.train)


def test_counts_that_cannot_be():
    dataset = pool(np.resize(np.arange(2), 20))
    with pytest.raises(DataError, match="need 14 samples of class 1"):
        partition(
            dataset,
            DataSettings(partition="counts", class_counts=[[3, 8], [2, 4]], test_counts=(1, 2)),
            0,
        )
    for wrong in (
        {"partition": "counts"},
        {"class_counts": [[1, 2]]},
        {"partition": "counts", "class_counts": [[1, 2], [3]]},
        {"partition": "counts", "class_counts": [[1, -2]]},
        {"partition": "counts", "class_counts": [[1, 2]], "clients": 3},
        {"partition": "counts", "class_counts": [[1, 2]], "test_counts": (1, 1), "test": 0.3},
        {"test_counts": (1, 1)},
    ):
        with pytest.raises(ValueError, match="count"):
            DataSettings(**wrong)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("scheme", "changes"),
    [
        ("dirichlet", {"alpha": 1.0}),
        ("dirichlet", {"alpha": 0.5, "balance": True}),
        ("dirichlet", {"alpha": 0.1}),  # drawn again, or refused
        ("shards", {"shards_per_client": 1}),
        ("shards", {"shards_per_client": 3}),
    ],
)
def test_divisions_are_those_of_flowers_partitioners(scheme, changes, seed):
    """Draw for draw, with their loops over clients."""
    import datasets
    from flwr_datasets.partitioner import DirichletPartitioner, ShardPartitioner

    rng = np.random.default_rng(seed)
    clients, needed = int(rng.integers(2, 9)), int(rng.integers(1, 5))
    labels = rng.choice([0, 1, 2, 5], int(rng.integers(60, 200)))
    asked = DataSettings(partition=scheme, clients=clients, **changes)
    common = {
        "num_partitions": clients,
        "partition_by": "label",
        "shuffle": False,
        "seed": int(np.random.default_rng(seed).integers(2**63)),
    }
    theirs = (
        DirichletPartitioner(
            alpha=asked.alpha,
            min_partition_size=needed,
            self_balancing=asked.balance,
            **common,
        )
        if scheme == "dirichlet"
        else ShardPartitioner(num_shards_per_partition=asked.shards_per_client, **common)
    )
    theirs.dataset = datasets.Dataset.from_dict({"row": np.arange(len(labels)), "label": labels})
    wanted = np.full(len(labels), -1)
    try:
        with warnings.catch_warnings(action="ignore"):
            for client in range(theirs.num_partitions):
                wanted[theirs.load_partition(client)["row"]] = client
    except ValueError:
        with pytest.raises(DataError, match="no sampled Dirichlet partition"):
            _SCHEMES[scheme](labels, clients, asked, needed, np.random.default_rng(seed))
        return
    found = _SCHEMES[scheme](labels, clients, asked, needed, np.random.default_rng(seed))
    assert (found == wanted).all()


def test_an_official_test_part_can_be_left_unread():
    dataset = pool(labels(1_000), official=800)
    pooled = partition(dataset, DataSettings(partition="iid", clients=4, test=0.2), 0)
    assert max(*pooled.train, *pooled.test) >= 800
    asked = DataSettings(partition="iid", clients=4, test=0.2, official_test="unread")
    part = partition(dataset, asked, 0)
    assert sorted([*part.train, *part.test]) == list(range(800))
    assert len(part.test) == 160


@pytest.mark.parametrize(
    ("official", "asked", "reason"),
    [
        (None, {"test": 0.2}, "pool has no official test part"),
        (800, {}, "the official part is used for testing. With a fraction"),
        (
            800,
            {
                "partition": "counts",
                "class_counts": [[5] * 3, [5] * 3],
                "test_counts": [2] * 3,
                "clients": 2,
            },
            "test_counts already leaves that part out",
        ),
    ],
)
def test_only_a_test_part_that_is_not_asked_for_is_left_unread(official, asked, reason):
    dataset = pool(labels(1_000), official=official)
    with pytest.raises(DataError, match=f"official_test = 'unread' has no effect here: {reason}"):
        partition(dataset, DataSettings(official_test="unread", **asked), 0)
