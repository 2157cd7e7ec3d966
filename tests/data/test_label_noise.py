"""Label noise: training labels alone, by the number of a row and the seed alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, chisquare

from fedbayes import Config, Simulation
from fedbayes.data import DataSettings, FederatedData, load_dataset, partition
from fedbayes.errors import ConfigError, FedbayesWarning
from fedbayes.runs.build import build_data
from tests.helpers.small_files import pool


def federate(dataset, share, seed=0, **asked):
    divided = partition(dataset, DataSettings(**asked), seed)
    return FederatedData(dataset, divided, seed, label_noise=share)


def labels_by_row(data):
    """The label that a client trains on, by the row of the pool."""
    found = {}
    for client in range(data.clients):
        rows, y = data.partition.train_rows(client), data.train(client).y
        found |= dict(zip(rows.tolist(), y.tolist(), strict=True))
    return found


@given(
    share=st.floats(0, 1),
    classes=st.integers(2, 6),
    seed=st.integers(0, 99),
    clients=st.integers(1, 4),
)
@settings(max_examples=40, deadline=None)
def test_a_rows_label_is_the_same_however_rows_are_divided(share, classes, seed, clients):
    dataset = pool(np.resize(np.arange(classes), 120))
    one = federate(dataset, share, seed, clients=clients, partition="iid")
    rows = one.partition
    other = FederatedData(dataset, rows, seed, label_noise=share)
    assert labels_by_row(one) == labels_by_row(other)
    elsewhere = labels_by_row(federate(dataset, share, seed, clients=clients + 1, partition="iid"))
    first = labels_by_row(one)
    assert all(first[row] == elsewhere[row] for row in first.keys() & elsewhere.keys())
    assert one.wrong_labels == sum(label != dataset.y[row] for row, label in first.items())
    # More noise is the same noise and more.
    most = labels_by_row(FederatedData(dataset, rows, seed, label_noise=1.0))
    assert all(label in (dataset.y[row], most[row]) for row, label in first.items())
    for client in range(one.clients):
        assert one.test(client).y.tolist() == dataset.y[rows.test_rows(client)].tolist()


def test_so_many_labels_are_another_class_and_none_is_likelier():
    dataset = pool(np.resize(np.arange(5), 20_000))
    data = federate(dataset, 0.3, seed=3, clients=3, partition="iid", test=0.1)
    found = labels_by_row(data)
    steps = [(label - dataset.y[row]) % 5 for row, label in found.items()]
    wrong = np.bincount(steps, minlength=5)[1:]
    low, high = binom.ppf([1e-4, 1 - 1e-4], len(found), 0.3)
    assert low <= wrong.sum() <= high
    assert data.wrong_labels == wrong.sum()
    assert chisquare(wrong).pvalue > 1e-3
    assert (data.counts().sum(0) == np.bincount(list(found.values()), minlength=5)).all()
    again = federate(dataset, 0.3, seed=4, clients=3, partition="iid", test=0.1)
    both = found.keys() & labels_by_row(again).keys()
    assert any(found[row] != labels_by_row(again)[row] for row in both)


def test_labels_become_the_next_class_and_the_same_rows_are_wrong():
    dataset = pool(np.resize(np.arange(4), 400))
    rows = federate(dataset, 0.3, clients=2, partition="iid").partition
    uniform = FederatedData(dataset, rows, 0, label_noise=0.3)
    shifted = FederatedData(dataset, rows, 0, label_noise=0.3, label_noise_kind="next")
    one, other = labels_by_row(uniform), labels_by_row(shifted)
    for row, label in other.items():
        y = dataset.y[row]
        assert label == (y if one[row] == y else (y + 1) % 4)
    assert uniform.wrong_labels == shifted.wrong_labels > 0
    with pytest.warns(FedbayesWarning, match="label_noise_kind has no effect"):
        Simulation(Config.create(rounds=1, data={"label_noise_kind": "next"})).close()
    asked = {"label_noise": 0.5, "label_noise_kind": "next", "clients": 2}
    built = build_data(Config.create(data=asked))
    labels = labels_by_row(built)
    steps = {(label - load_dataset(DataSettings()).y[row]) % 10 for row, label in labels.items()}
    assert steps == {0, 1}


def test_all_that_trains_has_the_same_labels():
    """Pooled data, and samples set aside for patience, are training samples."""
    dataset = pool(np.resize([0, 1, 2], 90))
    data = federate(dataset, 1.0, clients=3, partition="iid")
    assert (data.all_train().y.numpy() != dataset.y[data.partition.train]).all()
    assert (data.test_labels() == dataset.y[data.partition.test]).all()


def test_without_noise_the_pool_itself_is_used():
    dataset = pool(np.resize([0, 1], 20))
    assert federate(dataset, 0.0, clients=2, partition="iid").dataset is dataset


def test_targets_that_are_no_classes_are_refused():
    with (
        pytest.warns(FedbayesWarning, match="no classes"),
        pytest.raises(ConfigError, match=r"label_noise = 0\.2 replaces classes"),
    ):
        build_data(Config.create(data={"name": "diabetes", "label_noise": 0.2}))


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_it_is_a_share(share):
    with pytest.raises(ConfigError, match="label_noise"):
        Config.create(data={"label_noise": share})


def test_clients_with_their_own_data_have_their_own_noise(tmp_path):
    """The same file in two hands: the noise is of each client's own."""
    pytest.importorskip("flwr")
    from fedbayes.flower.own_data import own_data

    path = tmp_path / "mine.csv"
    rng = np.random.default_rng(0)
    rows = [f"{x:.4f},{'abc'[row % 3]}" for row, x in enumerate(rng.normal(size=80))]
    path.write_text("x,label\n" + "\n".join(rows) + "\n")
    config = Config.create(
        data={"path": str(path), "clients": 2, "partition": "iid", "label_noise": 0.5}
    )
    schema = build_data(config).preprocessing.public()
    clean = config.model_copy(update={"data": config.data.model_copy(update={"label_noise": 0.0})})
    right = own_data(clean, path, schema).train(0).y
    one, same, two = (own_data(config, path, schema, client=client) for client in (0, 0, 1))
    assert one.train(0).y.tolist() == same.train(0).y.tolist() != two.train(1).y.tolist()
    for mine in (one, two):
        assert mine.wrong_labels == int((mine.train(0).y != right).sum()) > 0
    assert one.test(0).y.tolist() == own_data(clean, path, schema).test(0).y.tolist()


def test_a_run_records_it_and_resumes_with_the_same_labels(tmp_path):
    config = Config.create(
        data={"name": "digits", "clients": 3, "limit": 300, "label_noise": 0.2},
        model={"hidden": [4]},
        rounds=2,
    )
    with Simulation(config, tmp_path / "run") as simulation:
        next(iter(simulation))
        before = simulation.data.train(1).y
    with Simulation(None, tmp_path / "run") as simulation:
        assert simulation.data.train(1).y.tolist() == before.tolist()
        for _ in simulation:
            pass
        summary = simulation.folder.summary()
        wrong = simulation.data.wrong_labels
        rows = simulation.data.partition.train
        clean = load_dataset(config.data).y
        assert wrong == int((simulation.data.all_train().y.numpy() != clean[rows]).sum())
    assert summary["label_noise"] == {"labels": wrong, "of": len(rows)}
