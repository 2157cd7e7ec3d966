"""What is left out is said, once, with numbers."""

import warnings

import numpy as np
import pandas as pd
import pytest

import fedbayes
from fedbayes.config.config import Config
from fedbayes.data import DataSettings, choose_scheme, load_dataset, partition
from fedbayes.errors import DataError, FedbayesWarning
from fedbayes.runs.build import runtime
from fedbayes.runs.simulation import Simulation
from tests.helpers.small_files import pool


def notes(dataset, **asked):
    """What is said of a division, and the division."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        part = partition(dataset, DataSettings(**asked), 0)
    assert {one.category for one in said} <= {FedbayesWarning}
    return part, [str(one.message) for one in said]


def labels(n, classes=3):
    return np.resize(np.arange(classes), n)


def grouped(*sizes, official=None):
    groups = np.repeat(np.arange(len(sizes)), sizes)
    return pool(labels(len(groups)), groups=groups, official=official)


@pytest.fixture
def hospitals(tmp_path):
    """A table of three hospitals, one of which has a single patient."""
    size = {"east": 30, "north": 1, "west": 29}
    frame = pd.DataFrame({"a": np.arange(60.0), "label": labels(60)})
    frame["hospital"] = np.repeat(list(size), list(size.values()))
    frame.to_csv(tmp_path / "patients.csv", index=False)
    return {"path": tmp_path / "patients.csv", "group": "hospital"}


def test_groups_of_own_data_are_the_clients(hospitals, tmp_path):
    dataset = load_dataset(DataSettings(**hospitals))
    part, (note,) = notes(dataset, **hospitals)
    assert part.names == ("east", "west")
    assert "1 of 3 groups are left out" in note
    assert "north (1 sample). data.min_samples = 1 keeps them" in note
    part, said = notes(dataset, **hospitals, min_samples=1)
    assert part.names == ("east", "north", "west")
    assert not said
    part, said = notes(dataset, **hospitals, partition="dirichlet", clients=4)
    assert part.names[0] == "client-0"
    assert not said
    with pytest.raises(DataError, match=r"2 groups .* or partition = 'dirichlet'"):
        notes(dataset, **hospitals, clients=10)


@pytest.mark.parametrize("kind", ["npz", "json"])
def test_groups_of_arrays_and_users_are_the_clients(tmp_path, kind):
    x, y, groups = np.random.default_rng(0).normal(size=(60, 2)), labels(60), labels(60, 4)
    file = tmp_path / f"own.{kind}"
    if kind == "npz":
        np.savez(file, x=x, y=y, groups=groups)
    else:
        import json

        users = {
            str(k): {"x": x[groups == k].tolist(), "y": y[groups == k].tolist()} for k in range(4)
        }
        file.write_text(json.dumps({"users": list(users), "user_data": users}))
    settings = DataSettings(path=file)
    dataset = load_dataset(settings)
    assert choose_scheme(dataset, settings) == "natural"
    assert partition(dataset, settings, 0).names == ("0", "1", "2", "3")


def test_built_in_sets_are_divided_as_ever():
    dataset = grouped(40, 40)
    assert choose_scheme(dataset, DataSettings(name="femnist")) == "dirichlet"
    one, other = (
        partition(dataset, DataSettings(clients=4, alpha=5, **asked), 3)
        for asked in ({}, {"partition": "dirichlet"})
    )
    assert np.array_equal(one.train, other.train)


def test_min_samples_that_the_note_names_keeps_them():
    dataset = grouped(*range(2, 21), 100)
    part, (note,) = notes(dataset, partition="natural", min_samples=12, test=0.4)
    assert part.names == ("g18", "g19")
    assert "18 of 20 groups" in note
    assert "g0 (2 samples), g1 (3), g2 (4)" in note
    assert "g9 (11) and 8 more. data.min_samples = 1 keeps" in note
    assert notes(dataset, partition="natural", min_samples=1, test=0.4)[0].clients == 20
    dataset = grouped(10, 40, 40)
    _, (note,) = notes(dataset, partition="natural", min_samples=20)
    assert "min_samples = 8 keeps" in note
    part, said = notes(dataset, partition="natural", min_samples=8)
    assert part.clients == 3
    assert not said
    with_nine, (note,) = notes(dataset, partition="natural", min_samples=9)
    assert with_nine.clients == 2
    assert "g0 (10 samples)" in note


def test_clients_that_are_fewer_than_the_groups():
    _, (note,) = notes(grouped(20, 30, 40), partition="natural", clients=1)
    assert note == "clients = 1 takes the first of 3 groups; left out: g1 (30 samples), g2 (40)"


def test_official_test_rows_of_no_client():
    groups = np.concatenate([np.repeat([0, 1], [30, 1]), [0, 1, 1, 1, 2, -1]])
    dataset = pool(labels(37), groups=groups, official=31)
    part, (small, empty, test) = notes(dataset, partition="natural")
    assert part.names == ("g0",)
    assert "g1 (1 sample)" in small
    assert "1 of 3 groups are left out, because they have no training samples" in empty
    assert test.startswith("4 of 6 official test samples are left out")
    assert test.endswith("g1, g2")
    assert len(part.test) == 2


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"partition": "shards", "clients": 7}, "left over by 7 x 2 shards"),
        ({"partition": "dirichlet-equal", "clients": 7}, "left over, because 7 clients"),
        ({"partition": "counts", "class_counts": [[3, 3, 3], [2, 0, 1]]}, "by class_counts"),
    ],
)
def test_rows_that_a_scheme_leaves_over(asked, says):
    dataset = pool(labels(101))
    part, (note,) = notes(dataset, **asked)
    left = 101 - len(part.train) - len(part.test)
    assert note.startswith(f"{left:,} of 101 samples are ")
    assert says in note


def test_test_counts_leave_the_official_test_part_out():
    asked = {"partition": "counts", "class_counts": [[9, 9, 9]] * 2, "test_counts": (2, 2, 2)}
    _, said = notes(pool(labels(100), official=80), **asked)
    assert said[0].startswith("20 of 80 samples are not assigned to a client")
    assert said[1].startswith("the official test part of 20 samples is not used")


def test_an_official_test_part_that_is_trained_on():
    part, (note,) = notes(pool(labels(100), official=80), partition="iid", clients=4, test=0.25)
    assert len(part.train) + len(part.test) == 100
    assert note.startswith("the official test part of 20 samples is pooled with the training part")
    groups = grouped(30, 30, official=50)
    assert "part of 10 samples is pooled" in notes(groups, partition="natural", test=0.5)[1][0]
    assert notes(pool(labels(100), official=80), partition="iid", clients=4)[1] == []


def test_classes_that_test_rows_alone_have():
    y = np.concatenate([labels(60, 2), labels(20, 4)])
    _, (note,) = notes(pool(y, official=60), partition="iid", clients=3)
    assert note == ("10 of 20 official test samples have classes that no client trains on: 2, 3")
    groups = np.concatenate([labels(60, 2), labels(20, 2)])
    _, said = notes(pool(y, official=60, groups=groups), partition="natural")
    assert said == [note]


def test_a_split_and_a_fraction_exclude_one_another(tmp_path):
    """The rows that the split keeps for testing were trained on without a word."""
    frame = pd.DataFrame({"a": np.arange(60.0), "label": labels(60)})
    frame["part"] = ["train"] * 40 + ["test"] * 20
    frame.to_csv(tmp_path / "t.csv", index=False)
    asked = {"path": tmp_path / "t.csv", "split": "part", "test": 0.25, "clients": 3}
    with pytest.raises(DataError, match=r"split = 'part' .* .* Leave data.test out"):
        notes(load_dataset(DataSettings(**asked)), **asked)
    frame.assign(part="train").to_csv(tmp_path / "t.csv", index=False)
    part, (note,) = notes(load_dataset(DataSettings(**asked)), **asked)
    assert "puts no row into the test part" in note
    assert len(part.test) == 15


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"test": 0.3}, "with test = 0.3 the official test part is pooled"),
        (
            {"partition": "counts", "class_counts": [[9, 9, 9]], "test_counts": (2, 2, 2)},
            "test_counts chooses the test samples",
        ),
        ({}, None),
    ],
)
def test_a_limit_of_a_test_part_that_is_not_tested_on(tmp_path, asked, why):
    x = np.random.default_rng(0).normal(size=(90, 2))
    parts = {"x": x[:60], "y": labels(60), "x_test": x[60:], "y_test": labels(30)}
    np.savez(tmp_path / "own.npz", **parts)
    data = {"path": tmp_path / "own.npz", "limit_test": 5, "clients": 1, **asked}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        Simulation(Config.create(data=data, rounds=1, model={"hidden": [3]})).close()
    told = [str(one.message) for one in said if "limit_test" in str(one.message)]
    assert len(told) == (why is not None)
    assert all(f"data.limit_test has no effect: {why}" in one for one in told)


@pytest.mark.parametrize(
    "asked",
    [
        {"partition": "iid", "clients": 7},
        {"alpha": 9.0, "clients": 3},
        {"partition": "iid", "limit": 50, "samples_per_client": 3},
    ],
)
def test_nothing_is_said_where_nothing_is_left_out_unasked(asked):
    assert not notes(pool(labels(101)), **asked)[1]


def test_rows_with_missing_values_that_are_dropped(tmp_path):
    frame = pd.DataFrame({"a": np.arange(60.0), "label": labels(60)})
    frame.loc[:6, "a"] = np.nan
    frame.to_csv(tmp_path / "t.csv", index=False)
    asked = {"path": tmp_path / "t.csv", "missing": "drop", "partition": "iid", "clients": 2}
    for _ in range(2):  # the second time from the cache
        _, (note,) = notes(load_dataset(DataSettings(**asked)), **asked)
        assert "7 of 60 rows are left out" in note


def test_a_run_says_it_once(hospitals, tmp_path):
    settings = {"data": hospitals, "rounds": 1, "model": {"hidden": [3]}}
    with pytest.warns(FedbayesWarning) as said:
        fedbayes.run(folder=tmp_path / "run", **settings)
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", FedbayesWarning)
        fedbayes.resume(tmp_path / "run")
        assert runtime(str(tmp_path / "run"), "cpu").data.clients == 2


def test_data_show_names_the_division_and_prints_the_notes(
    hospitals, tmp_path, monkeypatch, capsys
):
    from fedbayes.cli import main

    asked = [f"data.{setting}={value}" for setting, value in hospitals.items()]
    arguments = ["data", "show", *(part for text in asked for part in ("--set", text))]
    monkeypatch.setattr("sys.argv", ["fedbayes", *arguments])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    with warnings.catch_warnings(), pytest.raises(SystemExit):
        main()
    said = capsys.readouterr()
    assert said.out.startswith("own, natural, 2 clients")
    assert said.err.startswith("note: 1 of 3 groups are left out")
    assert (tmp_path / "own-natural.png").exists()


def test_of_an_official_test_part_it_is_said_whether_it_is_pooled():
    dataset = pool(labels(100), official=80)
    _, (note,) = notes(dataset, partition="iid", clients=4, test=0.25)
    assert "part of 20 samples is pooled" in note
    assert "official_test = 'unread'" in note
    _, (note,) = notes(dataset, partition="iid", clients=4, test=0.25, official_test="unread")
    assert "part of 20 samples is not read" in note
