import dataclasses

import numpy as np
import pytest
import torch

from fedbayes.data import DataSettings, FederatedData, load_dataset, partition
from fedbayes.data.dataset import build_dataset, moments
from fedbayes.errors import DataError, FedbayesWarning
from tests.helpers.small_files import pool


def federate(dataset, seed=0, **asked):
    return FederatedData(dataset, partition(dataset, DataSettings(**asked), seed), seed)


@pytest.fixture
def images():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (300, 3, 5, 4), dtype=np.uint8)
    x[:, 2] = 7
    y = rng.integers(4, size=300)
    return build_dataset("toy", x, y, tuple("abcd"), official_train=200, scale=255.0)


def test_images_are_standardized_by_channel(images):
    data = federate(images, partition="iid", clients=7)
    assert data.clients == 7
    assert data.shape == (3, 5, 4)
    assert data.classes == tuple("abcd")
    values = images.x.astype(np.float64) / 255
    mean, std = values[:200].mean((0, 2, 3)), values[:200].std((0, 2, 3))
    std[2] = 1.0
    expected = (values - mean[:, None, None]) / std[:, None, None]
    for client in range(7):
        for part, rows in (
            (data.train(client), data.partition.train_rows(client)),
            (data.test(client), data.partition.test_rows(client)),
        ):
            assert part.x.dtype == torch.float32
            assert part.y.dtype == torch.int64
            assert part.y.tolist() == images.y[rows].tolist()
            assert part.x.numpy() == pytest.approx(expected[rows], abs=1e-5)


@pytest.mark.parametrize("permuted", [False, True])
def test_the_union_is_the_clients_parts_in_order(images, permuted):
    data = federate(dataclasses.replace(images, permuted=permuted), partition="iid", clients=7)
    parts = [data.test(client) for client in range(7)]
    x, y = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
    assert data.test_total == 100
    for start, stop in ((0, 100), (0, 1), (13, 57), (99, 100), (40, 40), (90, 1000)):
        union = data.test_union(start, stop)
        assert torch.equal(union.x, x[start:stop])
        assert torch.equal(union.y, y[start:stop])
    pooled = data.all_train()
    assert torch.equal(pooled.x, torch.cat([data.train(client).x for client in range(7)]))
    assert torch.equal(pooled.y, torch.cat([data.train(client).y for client in range(7)]))


@pytest.mark.parametrize("permuted", [False, True])
def test_clients_that_are_gathered_at_once_have_what_each_has_alone(images, permuted):
    data = federate(dataclasses.replace(images, permuted=permuted), partition="iid", clients=7)
    together = data.train_each([5, 0, 3])
    for client, found in zip([5, 0, 3], together, strict=True):
        alone = data.train(client)
        assert torch.equal(found.x, alone.x)
        assert torch.equal(found.y, alone.y)
        assert found.x.untyped_storage().nbytes() == found.x.nbytes  # and no one else's


def test_a_subclass_says_what_each_client_has_however_it_is_asked(images):
    class One(FederatedData):
        def train(self, client):
            return super().train(0)

    divided = partition(images, DataSettings(partition="iid", clients=7), 0)
    data = One(images, divided, 0)
    for found in data.train_each([5, 0, 3]):
        assert torch.equal(found.x, data.train(0).x)


def test_each_client_has_a_fixed_pixel_order_of_its_own(images):
    plain = federate(images, partition="iid", clients=3)
    mixed = federate(dataclasses.replace(images, permuted=True), partition="iid", clients=3)
    orders = set()
    for client in range(3):
        before, after = plain.train(client).x.flatten(1), mixed.train(client).x.flatten(1)
        # Columns of so many samples are distinct outside of the constant channel (pixels 40 on).
        where = {tuple(column): pixel for pixel, column in enumerate(before.T.tolist())}
        order = [where[tuple(column)] for column in after.T.tolist()]
        assert order != sorted(order)
        assert {pixel for pixel in order if pixel < 40} == set(range(40))
        # The same order serves its test samples.
        tested, seen = plain.test(client).x.flatten(1), mixed.test(client).x.flatten(1)
        assert torch.equal(tested[:, order], seen)
        orders.add(tuple(order))
    assert len(orders) == 3


def test_missing_values_become_the_mean_of_the_training_rows():
    base = pool(np.resize([0, 1], 400), width=3)
    x = base.x.copy()
    x[:, 2] = np.nan
    x[np.random.default_rng(1).random(400) < 0.3, 1] = np.nan
    dataset = build_dataset("table", x, base.y, base.classes, features=("a", "b", "c"))
    with pytest.warns(FedbayesWarning, match=r"no training row has a value of 'c'\. Leave"):
        data = federate(dataset, partition="iid", clients=4)
    train = x[np.sort(data.partition.train)].astype(np.float64)
    mean, std = np.nanmean(train[:, :2], 0), np.nanstd(train[:, :2], 0)
    for client in range(4):
        raw = x[data.partition.test_rows(client), :2]
        filled = np.where(np.isnan(raw), mean, raw)
        got = data.test(client).x.numpy()
        assert got[:, :2] == pytest.approx((filled - mean) / std, abs=1e-4)
        assert (got[:, 2] == 0).all()


def test_gaps_that_are_imputed_are_not_said_to_be_of_no_training_row(tmp_path):
    rows = [f"{'' if k % 3 else k},{'xyz'[k % 3]},{k % 2}" for k in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["a,site,label", *rows]))
    asked = {"path": tmp_path / "t.csv", "missing": "impute", "partition": "iid", "clients": 2}
    with pytest.warns(
        FedbayesWarning, match="column 'a' is empty in 40 rows, and the model has no feature"
    ):
        federate(load_dataset(DataSettings(**asked)), **asked)


def test_statistics_survive_a_large_offset():
    x = (1e6 + np.random.default_rng(0).normal(size=(5000, 2))).astype(np.float32)
    mean, std = moments(x, np.arange(5000), 1.0)
    assert mean == pytest.approx(x.astype(np.float64).mean(0), rel=1e-6)
    assert std == pytest.approx(x.astype(np.float64).std(0), rel=1e-6)


def test_counts_and_sizes():
    dataset = pool(np.random.default_rng(0).integers(5, size=500), official=400)
    data = federate(dataset, clients=6, alpha=1.0)
    table = data.counts()
    assert table.shape == (6, 5)
    for client in range(6):
        labels = data.train(client).y
        assert table[client].tolist() == torch.bincount(labels, minlength=5).tolist()
        assert data.train_sizes()[client] == len(labels)
        assert data.test_sizes()[client] == len(data.test(client).y)


def test_reading_changes_nothing():
    dataset = load_dataset(DataSettings())
    data = federate(dataset, clients=5)
    before = np.array(dataset.x)
    first = data.train(0)
    first.x.zero_()
    first.y.zero_()
    assert torch.equal(data.train(0).x, federate(dataset, clients=5).train(0).x)
    assert data.train(0).y.any()
    assert np.array_equal(before, dataset.x)


def test_the_partition_of_another_set_is_refused():
    part = partition(pool(np.resize([0, 1], 100)), DataSettings(clients=2), 0)
    with pytest.raises(DataError, match="Use the partition of this data set"):
        FederatedData(pool(np.resize([0, 1], 50)), part, 0)
