"""The real data, against what is published of it."""

import numpy as np
import pytest

from fedbayes.data import DataSettings, FederatedData, load_dataset, partition

pytestmark = [
    pytest.mark.data,
    pytest.mark.usefixtures("real"),
]


@pytest.mark.slow
def test_mnist():
    mnist = load_dataset(DataSettings(name="mnist"))
    assert mnist.x.shape == (70_000, 1, 28, 28)
    assert mnist.official_train == 60_000
    # The constants that the field standardizes MNIST by.
    assert mnist.mean == pytest.approx([0.1307], abs=1e-4)
    assert mnist.std == pytest.approx([0.3081], abs=1e-4)
    assert np.bincount(mnist.y[:60_000]).tolist() == [
        5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949,
    ]  # fmt: skip
    assert mnist.y[:5].tolist() == [5, 0, 4, 1, 9]


@pytest.mark.slow
def test_mnist_among_many_clients():
    settings = DataSettings(name="mnist", partition="iid", clients=10_000)
    mnist = load_dataset(settings)
    data = FederatedData(mnist, partition(mnist, settings, 0), 0)
    assert set(data.train_sizes()) == {6}
    assert data.test_total == 10_000
    pooled = data.all_train().x
    assert float(pooled.mean()) == pytest.approx(0, abs=1e-3)
    assert float(pooled.std()) == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
def test_cifar10():
    cifar = load_dataset(DataSettings(name="cifar10"))
    assert cifar.x.shape == (60_000, 3, 32, 32)
    assert np.bincount(cifar.y).tolist() == [6000] * 10
    assert cifar.mean == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-3)


def test_vehicle():
    vehicle = load_dataset(DataSettings(name="vehicle"))
    assert vehicle.x.shape == (1860, 100)
    assert len(vehicle.group_names) == 23
    sizes = np.bincount(vehicle.groups)
    assert (sizes.min(), sizes.max()) == (7, 534)
    part = partition(vehicle, DataSettings(name="vehicle", partition="natural"), 0)
    assert part.clients == 23
    assert len(part.test) == pytest.approx(1860 / 4, abs=12)


def test_einstein():
    full = load_dataset(DataSettings(name="einstein"))
    assert full.x.shape == (598, 15)
    assert not np.isnan(full.x).any()
    every = load_dataset(DataSettings(name="einstein", missing="impute"))
    assert every.x.shape == (5644, 15)
    assert every.y.sum() == 558
    data = FederatedData(every, partition(every, DataSettings(clients=4), 0), 0)
    assert not data.all_train().x.isnan().any()
