"""Targets that are not classes: how they are read, divided and kept, against NumPy."""

import dataclasses
import json
import warnings

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_diabetes

from fedbayes.core.targets import Target
from fedbayes.data import (
    DataSettings,
    FederatedData,
    Preprocessing,
    load_dataset,
    partition,
    plot_partition,
)
from fedbayes.data.dataset import build_dataset, standardized
from fedbayes.errors import DataError, FedbayesWarning

RNG = np.random.default_rng(0)
REAL = ("real",)
COUNT = ("count",)
LABELS = ("labels",)


def table(tmp_path, **columns):
    """A CSV file of a feature and these columns."""
    length = len(next(iter(columns.values())))
    file = tmp_path / "t.csv"
    pd.DataFrame({"x": RNG.normal(size=length), **columns}).to_csv(file, index=False)
    return file


def load(file, kinds=(), **asked):
    return load_dataset(DataSettings(path=file, **asked), kinds)


def divided(dataset, seed=0, **asked):
    """The clients' data, and what was said of them."""
    settings = DataSettings(**asked)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        data = FederatedData(dataset, partition(dataset, settings, seed), seed)
    return data, [str(one.message) for one in said]


@pytest.fixture
def diabetes(tmp_path):
    """scikit-learn's diabetes as a user's table, at three sites."""
    frame = load_diabetes(as_frame=True, scaled=False).frame
    frame["site"] = np.resize(["east", "north", "west"], len(frame))
    file = tmp_path / "diabetes.csv"
    frame.to_csv(file, index=False)
    return file


# What the labels are.


def test_diabetes_is_built_in():
    wanted = load_diabetes(scaled=False)
    dataset = load_dataset(DataSettings(name="diabetes"))
    assert dataset.features == tuple(wanted.feature_names)
    assert dataset.y.dtype == np.float32
    np.testing.assert_array_equal(dataset.y[:, 0], wanted.target)
    np.testing.assert_allclose(dataset.x, wanted.data, rtol=1e-6)
    assert (dataset.target.kind, dataset.target.names) == ("real", ("progression",))
    assert dataset.target.center == pytest.approx((wanted.target.mean(),), rel=1e-12)
    assert dataset.target.scale == pytest.approx((wanted.target.std(),), rel=1e-12)
    data, (note,) = divided(dataset, name="diabetes")
    assert data.clients == 10
    assert "divided at random (partition = 'iid')" in note
    assert "real: progression" in note


@pytest.mark.parametrize("suffix", ["csv", "parquet", "npz", "json"])
def test_a_label_that_is_no_class_is_real(tmp_path, suffix):
    wanted = load_diabetes()
    x, y = wanted.data.astype(np.float32), wanted.target
    file = tmp_path / f"own.{suffix}"
    frame = pd.DataFrame(x, columns=wanted.feature_names).assign(label=y)
    if suffix == "csv":
        frame.to_csv(file, index=False)
    elif suffix == "parquet":
        frame.to_parquet(file)
    elif suffix == "npz":
        np.savez(file, x=x, y=y)
    else:
        users = {"u": {"x": x.tolist(), "y": y.tolist()}}
        file.write_text(json.dumps({"users": ["u"], "num_samples": [442], "user_data": users}))
    own = load(file)
    assert own.target.kind == "real"
    assert own.target.names == (("label",) if suffix in ("csv", "parquet") else ("y",))
    np.testing.assert_array_equal(own.y, y[:, None].astype(np.float32))
    (note,) = own.notes
    assert "214 different values in 442 rows" in note
    assert "a real target. If" in note
    # What was asked for need not be said.
    asked = load(file, REAL)
    assert (asked.target, asked.notes) == (own.target, ())
    assert asked.digest == own.digest


@pytest.mark.parametrize(
    ("label", "kind"),
    [
        ([0, 1, 2] * 9, "class"),
        (["a", "b"] * 9, "class"),
        ([True, False] * 9, "class"),
        ([0.5, 1.0, 1.5] * 9, "class"),
        (np.arange(30), "real"),
        (RNG.normal(size=40), "real"),
        (np.repeat(np.arange(50), 4), "real"),
    ],
)
def test_the_label_says_what_it_is(tmp_path, label, kind):
    own = load(table(tmp_path, label=label))
    assert own.target.kind == kind
    assert own.target.columns == 1
    assert (own.y.dtype, own.y.ndim) == ((np.int64, 1) if kind == "class" else (np.float32, 2))
    assert (own.classes == own.target.names) == (kind == "class")
    assert bool(own.notes) == (kind == "real")


def test_identifiers_are_neither(tmp_path):
    file = table(tmp_path, label=[f"p-{k}" for k in range(300)])
    with pytest.raises(DataError, match="identifiers, not classes"):
        load(file)
    with pytest.raises(
        DataError, match=r"column 'label' has .* not numbers \(first 'p-0' in row 1"
    ):
        load(file, REAL)


def test_a_likelihood_decides_on_few_values(tmp_path):
    y = np.array([1, 2, 3, 1, 5] * 8)
    file = table(tmp_path, label=y)
    assert load(file).target.kind == "class"
    for kind in ("real", "count"):
        own = load(file, (kind,))
        assert own.target.kind == kind
        assert own.y.tolist() == y[:, None].tolist()
    assert load(file, COUNT).target.center == pytest.approx((y.mean(),), rel=1e-12)
    # Of the kinds that it takes, the one that the labels have by themselves comes first.
    assert load(file, ("real", "class")).target.kind == "class"
    assert load(file, ("count", "real")).target.kind == "real"
    with pytest.raises(DataError, match=r"Leave data\.classes out"):
        load(file, REAL, classes=("1", "2", "3", "5"))


@pytest.mark.parametrize(
    ("value", "kinds", "says"),
    [
        (-1, COUNT, r"'label' is -1 in row 4 \(1 such rows\), which is not a whole number from 0"),
        (0.5, COUNT, "0.5 in row 4"),
        (2**25, COUNT, "not a whole number from 0 to 16,777,216"),
        (2, LABELS, "2 in row 4.*neither 0 nor 1"),
        (1e39, REAL, r"1e\+39 in row 4.*too large for float32"),
        (np.inf, REAL, "inf in row 4"),
        (np.inf, COUNT, "inf in row 4"),
        (np.nan, REAL, "1 of 12 rows have no label, first row 4"),
        (np.nan, (), "row 4"),
        ("many", REAL, r"'many' in row 4\)\. Encode it as numbers"),
    ],
)
def test_what_is_not_of_the_kind_is_refused_by_its_row(tmp_path, value, kinds, says):
    label = [0, 1, 0, value, *[1, 0] * 4]
    with pytest.raises(DataError, match=says):
        load(table(tmp_path, label=label), kinds)


def test_digits_that_float32_loses_are_said(tmp_path):
    seconds = 1.6e9 + RNG.normal(size=50) * 60
    own = load(table(tmp_path, label=seconds), REAL)
    (note,) = own.notes
    assert "Subtract a constant" in note


# Several columns.


def test_columns_of_zero_and_one_are_labels(tmp_path):
    y = RNG.integers(0, 2, (60, 3))
    y[:2] = [[1, 1, 0], [0, 0, 0]]
    file = table(tmp_path, rain=y[:, 0], wind=y[:, 1].astype(bool), snow=y[:, 2].astype(float))
    for label in (["rain", "wind", "snow"], "rain,wind,snow"):
        own = load(file, label=label)
        assert own.target == Target("labels", ("rain", "wind", "snow"))
        assert own.features == ("x",)
        np.testing.assert_array_equal(own.y, y)
    (note,) = own.notes
    assert "labels that do not exclude each" in note
    # The order of the settings is that of the columns.
    swapped = load(file, label=["snow", "rain"], drop="wind")
    np.testing.assert_array_equal(swapped.y, y[:, [2, 0]])
    real = load(file, REAL, label=["rain", "wind", "snow"])
    assert real.target.kind == "real"
    np.testing.assert_allclose(real.target.center, y.mean(0))
    with pytest.raises(DataError, match=r"label lists 3 columns \(rain, wind, snow\)"):
        load(file, ("class",), label=["rain", "wind", "snow"])
    with pytest.raises(DataError, match="label lists 2 columns"):
        load(file, label=["rain", "wind"], drop="snow", classes=("0", "1"))


def test_columns_of_numbers_are_real(tmp_path):
    y = RNG.normal(size=(50, 2)) * (3, 100) + (0, 7)
    own = load(table(tmp_path, a=y[:, 0], b=y[:, 1]), label="a,b")
    assert own.target.names == ("a", "b")
    np.testing.assert_allclose(own.y, y, rtol=1e-6)
    np.testing.assert_allclose(own.target.center, y.mean(0), rtol=1e-5)
    np.testing.assert_allclose(own.target.scale, y.std(0), rtol=1e-5)
    np.savez(tmp_path / "t.npz", x=y, y=y.astype(np.float32))
    arrays = load(tmp_path / "t.npz")
    assert arrays.target.names == ("y0", "y1")
    np.testing.assert_array_equal(arrays.y, y.astype(np.float32))


def test_a_class_written_as_columns_is_refused(tmp_path):
    y = np.eye(3, dtype=int)[np.arange(30) % 3]
    file = table(tmp_path, a=y[:, 0], b=y[:, 1], c=y[:, 2])
    with pytest.raises(DataError, match=r"exactly one of a, b, c is 1 in every row.*multilabel"):
        load(file, label="a,b,c")
    assert load(file, LABELS, label="a,b,c").target.kind == "labels"


def test_a_label_that_never_changes_is_said(tmp_path):
    own = load(table(tmp_path, a=[0, 1] * 9, b=[0, 0] * 9), LABELS, label="a,b")
    (note,) = own.notes
    assert "'b' is 0 in every row" in note


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"label": ["y", "y"]}, "label lists 'y' twice"),
        ({"label": ["y", "z"], "features": ["x", "z"]}, "features lists 'z', which is the label"),
        ({"label": ["y"], "group": "y"}, "group and label both list 'y'"),
        ({"label": []}, "label"),
    ],
)
def test_settings_of_labels(tmp_path, asked, says):
    with pytest.raises(ValueError, match=says):
        DataSettings(path=tmp_path / "t.csv", **asked)


def test_an_absent_column_of_labels_is_named(tmp_path):
    with pytest.raises(DataError, match=r"no column 'high'.*\. Set data.label to one of"):
        load(table(tmp_path, low=[1.5, 2.5]), label="low,high")


# Center and scale.


def test_center_and_scale_are_of_the_clients_training_rows(diabetes):
    dataset = load(diabetes, label="target", group="site")
    data, _ = divided(dataset, path=diabetes, label="target", group="site", limit=300)
    rows = data.partition.train
    y = load_diabetes(scaled=False).target[rows]
    assert len(rows) == 225
    assert data.target.center == pytest.approx((y.mean(),), rel=1e-12)
    assert data.target.scale == pytest.approx((y.std(),), rel=1e-12)
    assert data.preprocessing.target == data.target
    x = load_diabetes(scaled=False).data[rows]
    np.testing.assert_allclose(data.mean, x.mean(0), rtol=1e-5)
    # Each client has its own rows, in the unit of the source.
    assert data.partition.names == ("east", "north", "west")
    for client in range(3):
        wanted = load_diabetes(scaled=False).target[data.partition.train_rows(client)]
        samples = data.train(client)
        np.testing.assert_array_equal(samples.y.numpy(), wanted[:, None].astype(np.float32))
        assert samples.x.shape == (len(wanted), 10)
        assert data.test(client).y.shape == (len(data.partition.test_rows(client)), 1)
    assert data.counts().shape == (3, 0)


def test_a_target_that_is_given_is_kept(diabetes):
    dataset = load(diabetes, label="target", drop="site")
    given = Target("real", ("target",), (1.0,), (2.0,))
    part = partition(dataset, DataSettings(path=diabetes, partition="iid"), 0)
    data = FederatedData(dataset, part, 0, target=given)
    assert data.preprocessing.target == given


@pytest.mark.parametrize("kinds", [REAL, COUNT])
def test_a_constant_target_is_refused(tmp_path, kinds):
    dataset = load(table(tmp_path, label=[7] * 40), kinds)
    with pytest.raises(DataError, match="target 'label' is 7 in all 30 training rows"):
        divided(dataset, path="t.csv", clients=2)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=30), st.data())
def test_standardized_targets_have_mean_zero_and_deviation_one(values, data):
    y = np.array(values, np.float32)[:, None]
    rows = np.array(sorted(data.draw(st.sets(st.sampled_from(range(len(y))), min_size=1))))
    target = standardized(Target("real", ("y",)), y, rows)
    z = (y[rows].astype(np.float64) - target.center) / target.scale
    assert abs(z.mean()) < 1e-6
    if np.ptp(y[rows]) > 1e-3 * np.abs(y[rows]).max():
        assert z.std() == pytest.approx(1.0)
    else:
        assert np.isfinite(z).all()


def test_counts_have_a_center_if_any_is_above_zero():
    y = np.array([[0.0], [3.0], [0.0]], np.float32)
    count = Target("count", ("n",))
    assert standardized(count, y, np.arange(3)).center == (1.0,)
    assert standardized(count, y, np.array([0, 2])).center == ()
    labels = Target("labels", ("n",))
    assert standardized(labels, y, np.arange(3)) is labels


# Division.


def real_pool(n=90, official=None, groups=None, kind="real"):
    y = RNG.integers(0, 2, (n, 2)) if kind == "labels" else RNG.poisson(3.0, (n, 2))
    names = () if groups is None else tuple(f"g{k}" for k in range(int(np.max(groups)) + 1))
    return build_dataset(
        "pool",
        RNG.normal(size=(n, 3)).astype(np.float32),
        y,
        Target(kind, ("a", "b")),
        official_train=official,
        groups=groups,
        group_names=names,
    )


@pytest.mark.parametrize("kind", ["real", "count", "labels"])
@pytest.mark.parametrize(
    "asked",
    [
        {"partition": "dirichlet"},
        {"partition": "dirichlet-equal"},
        {"partition": "shards"},
        {"partition": "counts", "class_counts": [[1, 2], [2, 1]]},
    ],
)
def test_what_divides_classes_is_refused(kind, asked):
    says = rf"partition = '{asked['partition']}' needs classes.*Set data.partition = 'iid'"
    with pytest.raises(DataError, match=says):
        partition(real_pool(kind=kind), DataSettings(**asked), 0)


def test_the_way_out_names_the_groups():
    dataset = real_pool(groups=np.arange(90) % 3)
    with pytest.raises(DataError, match="'iid' or 'natural'"):
        partition(dataset, DataSettings(partition="shards"), 0)


@pytest.mark.parametrize("kind", ["real", "count", "labels"])
@pytest.mark.parametrize("test", [0.5, "official"])
@pytest.mark.parametrize("scheme", ["default", "iid", "natural"])
def test_every_row_is_dealt_once(kind, test, scheme):
    dataset = real_pool(official=60, groups=np.arange(90) % 3, kind=kind)
    data, said = divided(dataset, clients=3, partition=scheme, test=test)
    rows = np.concatenate([data.partition.train, data.partition.test])
    assert sorted(rows) == list(range(90))
    if test == "official":
        # In proportion to the training rows, which are as many for all.
        assert data.train_sizes().tolist() == [20] * 3
        assert data.test_sizes().tolist() == [10] * 3
    if scheme == "natural":
        assert all((dataset.groups[data.partition.train_rows(k)] == k).all() for k in range(3))
    assert any("divided at random" in note for note in said) == (scheme == "default")


def test_own_groups_are_the_clients(diabetes):
    asked = {"path": diabetes, "label": "target", "group": "site"}
    data, said = divided(load(**{"file": diabetes, "label": "target", "group": "site"}), **asked)
    assert data.partition.names == ("east", "north", "west")
    assert len(said) == 1
    assert "a real target. If" in said[0]
    with pytest.raises(DataError, match="partition = 'iid'"):
        divided(load(diabetes, label="target", group="site"), **asked, clients=5)


# What is kept.


def test_the_cache_keeps_the_target_and_what_was_asked(tmp_path, monkeypatch):
    file = table(tmp_path, label=[1, 2, 3, 1, 5] * 8)
    first = {kind: load(file, (kind,)) for kind in ("class", "real", "count")}
    monkeypatch.setattr("fedbayes.data.sources.own.read_own", None)
    again = {kind: load(file, (kind,)) for kind in ("class", "real", "count")}
    assert {kind: own.target for kind, own in again.items()} == {
        kind: own.target for kind, own in first.items()
    }
    assert len({own.digest for own in again.values()}) == 3


def test_the_digest_knows_kind_names_and_values(tmp_path):
    x = np.ones((4, 1), np.float32)
    y = np.array([[0.0], [1.0], [1.0], [0.0]])
    targets = [Target(kind, (name,)) for kind in ("real", "count", "labels") for name in "ab"]
    digests = [build_dataset("d", x, y, target).digest for target in targets]
    digests.append(build_dataset("d", x, 1 - y, targets[0]).digest)
    assert len(set(digests)) == 7


def test_preprocessing_keeps_the_target(diabetes):
    dataset = load(diabetes, label="target", drop="site")
    data, _ = divided(dataset, path=diabetes, partition="iid", clients=3)
    kept = Preprocessing.load(data.preprocessing.dump())
    assert kept == data.preprocessing
    assert kept.classes == ()


def test_preprocessing_of_older_versions_has_classes():
    kept = Preprocessing(
        (2,), 1.0, (0.0, 1.0), (1.0, 2.0), Target("class", ("no", "yes")), label="sick"
    )
    old = json.loads(kept.dump())
    del old["target"]
    old["classes"] = ["no", "yes"]
    assert Preprocessing.load(json.dumps(old)) == kept
    damaged = dataclasses.asdict(kept) | {"target": {"kind": "class", "names": ["a", "a"]}}
    with pytest.raises(DataError):
        Preprocessing.load(json.dumps(damaged))


# Pictures.


@pytest.mark.parametrize("kind", ["real", "labels"])
@pytest.mark.parametrize("clients", [3, 60])
def test_the_picture_of_targets(tmp_path, kind, clients):
    from PIL import Image

    data, _ = divided(real_pool(300, kind=kind), clients=clients)
    plot_partition(data, tmp_path / "plot.png", "targets")
    with Image.open(tmp_path / "plot.png") as picture:
        assert min(picture.size) > 300
        assert len(np.unique(np.asarray(picture.convert("L")))) > 8


def test_boxes_are_percentiles(monkeypatch):
    """The median and quartiles that are drawn are NumPy's, of each client's training rows."""
    from matplotlib.axes import Axes

    drawn = []
    monkeypatch.setattr(Axes, "bxp", lambda self, boxes, **_: drawn.append(boxes))
    data, _ = divided(real_pool(90), clients=4)
    from fedbayes.data import plot

    monkeypatch.setattr(plot, "save_figure", lambda figure, path: None)
    plot_partition(data, None, "targets")
    assert len(drawn) == 2
    for column, boxes in enumerate(drawn):
        for client, box in enumerate(boxes):
            y = data.train(client).y[:, column].numpy()
            wanted = np.percentile(y, [25, 50, 75])
            np.testing.assert_allclose([box["q1"], box["med"], box["q3"]], wanted)


def test_warnings_are_of_the_package(diabetes):
    dataset = load(diabetes, label="target", drop="site")
    with pytest.warns(FedbayesWarning, match=r"a real target\. If"):
        partition(dataset, DataSettings(path=diabetes, partition="iid"), 0)
