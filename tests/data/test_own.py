"""The user's own tables and arrays."""

import io

import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError

from fedbayes.data import DataSettings, load_dataset
from fedbayes.data.sources.streams import Rows
from fedbayes.data.tables.check import check_table
from fedbayes.errors import DataError
from fedbayes.inputs import build_prior
from fedbayes.workflows.serve.model_files import read_samples
from tests.helpers.small_files import encode


@pytest.fixture
def frame():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(40, 3)), columns=["a", "b", "c"])
    frame.loc[::7, "b"] = np.nan
    frame["flag"] = rng.integers(2, size=40).astype(bool)
    frame["kind"] = np.resize(["oak", "elm", "fir"], 40)
    frame["site"] = np.resize([5, 3], 40)
    frame["part"] = ["train"] * 10 + ["test"] * 5 + ["train"] * 25
    return frame


def write(frame, file):
    frame.to_parquet(file) if file.suffix == ".parquet" else frame.to_csv(file, index=False)
    return file


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_a_table(tmp_path, frame, suffix):
    file = write(frame, tmp_path / f"trees.{suffix}")
    own = load_dataset(DataSettings(path=file, label="kind", group="site", split="part"))
    assert own.name == "own"
    assert own.features == ("a", "b", "c", "flag")
    assert own.classes == ("elm", "fir", "oak")
    assert own.group_names == ("3", "5")
    assert own.official_train == 35
    order = [*range(10), *range(15, 40), *range(10, 15)]
    expected = frame.loc[order, ["a", "b", "c", "flag"]].to_numpy(np.float32)
    np.testing.assert_array_equal(own.x, expected)
    assert [own.classes[k] for k in own.y] == frame.kind[order].tolist()
    assert [int(own.group_names[k]) for k in own.groups] == frame.site[order].tolist()
    assert own.mean[1] == pytest.approx(np.nanmean(expected[:35, 1]), rel=1e-5)
    asked = {"path": file, "label": "kind", "drop": ("a", "site", "part"), "missing": "drop"}
    dropped = load_dataset(DataSettings(**asked))
    assert dropped.features == ("b", "c", "flag")
    assert dropped.samples == frame.b.notna().sum()
    assert dropped.official_train is None


def test_a_folder_of_train_and_test_files(tmp_path, frame):
    numbers = frame[["a", "c", "kind"]]
    numbers[:30].to_csv(tmp_path / "train.csv", index=False)
    numbers[30:][["kind", "c", "a"]].to_csv(tmp_path / "test.csv", index=False)
    own = load_dataset(DataSettings(path=tmp_path, label="kind"))
    assert own.official_train == 30
    np.testing.assert_allclose(own.x, frame[["a", "c"]].to_numpy(np.float32))


@pytest.mark.parametrize("other", ["csv.gz", "parquet", "npz"])
def test_train_and_test_files_of_two_formats_are_refused(tmp_path, frame, other):
    """The test file was not read, and a quarter of the training part took its place."""
    numbers = frame[["a", "c", "kind"]]
    numbers[:30].to_csv(tmp_path / "train.csv", index=False)
    numbers[30:].to_csv(tmp_path / "test.csv", index=False)
    (tmp_path / "test.csv").rename(tmp_path / f"test.{other}")
    with pytest.raises(
        DataError, match=rf"has train\.csv and test\.{other}, .* need the same format"
    ):
        load_dataset(DataSettings(path=tmp_path, label="kind"))
    (tmp_path / f"test.{other}").rename(tmp_path / "test.CSV")
    assert load_dataset(DataSettings(path=tmp_path, label="kind")).official_train == 30


def test_files_that_are_not_read_are_told(tmp_path, frame):
    numbers = frame[["a", "c", "kind"]]
    (tmp_path / ".kept").mkdir()
    for name in ("train.csv", ".kept/train.csv"):
        numbers.to_csv(tmp_path / name, index=False)
    settings = DataSettings(path=tmp_path, label="kind")
    own = load_dataset(settings)
    assert own.samples == 40
    assert own.notes == ()
    for name in ("valid.csv", "test.txt", "notes.md"):
        (tmp_path / name).write_text("a,c,kind\n")
    for _ in range(2):  # the second time from the cache
        (note,) = load_dataset(settings).notes
        assert note == f"{tmp_path}: test.txt, valid.csv are not read, next to train.csv"
    assert check_table(settings).notes[0] == note
    (tmp_path / "valid.csv").unlink()
    assert load_dataset(settings).notes[0].endswith("test.txt is not read, next to train.csv")
    assert load_dataset(settings.model_copy(update={"path": tmp_path / "train.csv"})).notes == ()


def test_pictures_in_a_table(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (6, 9, 7, 3), dtype=np.uint8)
    cells = [{"bytes": encode(one), "path": None} for one in x]
    pd.DataFrame({"photo": cells, "label": [0, 1] * 3}).to_parquet(tmp_path / "p.parquet")
    own = load_dataset(DataSettings(path=tmp_path / "p.parquet"))
    assert own.shape == (3, 9, 7)
    assert own.scale == 255
    assert np.array_equal(own.x.transpose(0, 2, 3, 1), x)


def test_raw_values_are_divided_by_what_is_said(tmp_path):
    x = np.random.default_rng(0).integers(0, 17, (12, 4, 5))
    for kind in (np.uint8, np.float64):
        np.savez(tmp_path / "d.npz", x=x.astype(kind), y=np.arange(12) % 2)
        own = load_dataset(DataSettings(path=tmp_path / "d.npz", scale=16))
        assert own.scale == 16
        assert float(own.mean.mean()) == pytest.approx(x.mean() / 16, rel=1e-5)
        np.testing.assert_array_equal(own.x.reshape(x.shape), x)
    with pytest.raises(ValidationError, match="greater than 0"):
        DataSettings(path=tmp_path / "d.npz", scale=0)
    with pytest.raises(ValidationError, match="scale has no effect on digits"):
        DataSettings(scale=16)


@pytest.mark.parametrize(
    ("shape", "dtype", "seen", "scale"),
    [
        ((8, 5), np.float64, (5,), 1),
        ((8, 9, 12), np.uint8, (1, 9, 12), 255),
        ((8, 6, 7, 3), np.uint8, (3, 6, 7), 255),
        ((8, 3, 6, 7), np.uint8, (3, 6, 7), 255),
        ((8, 2, 30), np.float32, (2, 30), 1),
    ],
)
def test_arrays(tmp_path, shape, dtype, seen, scale):
    rng = np.random.default_rng(0)
    x = (rng.random(shape) * 200).astype(dtype)
    y = np.array(list("abababab"))
    np.savez(tmp_path / "d.npz", x=x[:6], y=y[:6], groups=np.arange(6) % 2, x_test=x[6:],
             y_test=y[6:], groups_test=np.array([0, 1]))  # fmt: skip
    own = load_dataset(DataSettings(path=tmp_path / "d.npz"))
    assert own.shape == seen
    assert own.scale == scale
    assert own.official_train == 6
    assert own.classes == ("a", "b")
    assert own.groups.tolist() == [0, 1] * 4
    values = x.transpose(0, 3, 1, 2) if shape[1:] == (6, 7, 3) else x
    np.testing.assert_allclose(own.x.reshape(values.shape), values, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "asked", "says"),
    [
        ({}, {"label": "species"}, "Set data.label to one of a, b"),
        ({}, {"label": "kind", "group": "farm"}, "Set data.group"),
        ({}, {"label": "kind"}, "column 'part' has the values train and test.*drop"),
        ({}, {"label": "kind", "split": "site"}, "neither train nor test"),
        (
            {"a": np.inf},
            {"label": "kind", "split": "part"},
            "column 'a' is infinite, or too large for float32, in row 1 .40",
        ),
        (
            {"kind": None},
            {"label": "kind", "split": "part"},
            "40 rows have no label, first row 1",
        ),
        ({"kind": "oak"}, {"label": "kind", "split": "part"}, "all rows are of the class 'oak'"),
        ({"part": "train"}, {"label": "kind", "split": "part"}, None),
        ({"part": "test"}, {"label": "kind", "split": "part"}, "no training rows"),
        ({"site": None}, {"label": "kind", "split": "part", "group": "site"}, "no group"),
    ],
)
def test_a_table_that_does_not_fit(tmp_path, frame, change, asked, says):
    file = write(frame.assign(**change), tmp_path / "trees.csv")
    settings = DataSettings(path=file, **asked)
    if says is None:
        load_dataset(settings)
    else:
        with pytest.raises(DataError, match=says):
            load_dataset(settings)


@pytest.mark.parametrize("name", ["t.parquet", "t.csv", "t.npz", "t.json"])
def test_damaged_files_are_named(tmp_path, name):
    file = tmp_path / name
    for content in (b"", b"\x89\x00\xff garbage \x00" * 9):
        file.write_bytes(content)
        with pytest.raises(DataError, match=name.replace(".", r"\.")):
            load_dataset(DataSettings(path=file))


def test_no_file_of_samples_advises_to_unpickle(tmp_path):
    file = tmp_path / "d.npz"
    bare = io.BytesIO()
    np.save(bare, np.zeros((4, 2)))
    readers = (
        lambda: load_dataset(DataSettings(path=file)),
        lambda: list(Rows(file, (), size=9)),
        lambda: build_prior(str(file), (2,)),
        lambda: read_samples(file),
    )
    for content, words in ((b"text", "it is not a .npz"), (bare.getvalue(), "without a name")):
        file.write_bytes(content)
        for read in readers:
            with pytest.raises(DataError, match=words) as refused:
                read()
            assert "pickle" not in str(refused.value)


def test_arrays_that_do_not_fit(tmp_path):
    file = tmp_path / "d.npz"
    x, y = np.zeros((4, 2)), np.array([0, 1, 0, 1])
    for arrays, says in (
        ({"x": x}, "no array 'y'"),
        ({"x": x, "y": y[:3]}, "differ in number"),
        ({"x": x, "y": y, "x_test": x}, "together"),
        ({"x": x, "y": y, "x_test": x[:, :1], "y_test": y}, "differ in shape"),
        ({"x": x, "y": y.astype(str), "x_test": x, "y_test": y}, "y_test of type int64"),
        ({"x": np.array([{}] * 4), "y": y}, r"d\.npz"),
        ({"x": x, "y": y, "groups": y[:2]}, "differ in number"),
        ({"x": x, "y": np.array([0, 1, np.nan, 1])}, "no label"),
        ({"x": x[:0], "y": y[:0]}, "d.npz has no samples"),
        ({"x": x, "y": y[:0]}, "differ in number"),
    ):
        np.savez(file, **arrays)
        with pytest.raises(DataError, match=says):
            load_dataset(DataSettings(path=file))


def test_nothing_to_read(tmp_path):
    for path in (tmp_path, tmp_path / "absent.csv", tmp_path / "note.txt"):
        (tmp_path / "note.txt").write_text("")
        with pytest.raises(DataError, match=str(path)):
            load_dataset(DataSettings(path=path))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"name": "imagenet"}, "Choose one of digits"),
        ({"name": "own"}, "path"),
        ({"name": "mnist", "path": "x.csv"}, "path"),
        ({"test": 1.5}, "between 0 and 1"),
        ({"alpha": 0}, "alpha"),
        ({"client": 3}, "client"),
    ],
)
def test_settings_that_contradict(asked, says):
    with pytest.raises(ValidationError, match=says):
        DataSettings(**asked)


def test_settings_survive_a_round_trip():
    for asked in ({}, {"path": "x.csv", "clients": 4}, {"name": "mnist", "test": 0.3}):
        settings = DataSettings(**asked)
        assert DataSettings.model_validate_json(settings.model_dump_json()) == settings


@pytest.mark.parametrize("form", ["csv", "npz"])
def test_an_empty_test_part_is_told(form, tmp_path):
    """It was replaced by a quarter of the training part without a word."""
    rows = "a,b,label\n" + "1,2,x\n3,4,y\n" * 10
    if form == "csv":
        (tmp_path / "train.csv").write_text(rows)
        (tmp_path / "test.csv").write_text("a,b,label\n")
        settings = {"path": tmp_path}
    else:
        x, y = np.ones((20, 2)), np.arange(20) % 2
        np.savez(tmp_path / "train.npz", x=x, y=y)
        np.savez(tmp_path / "test.npz", x=x[:0], y=y[:0])
        settings = {"path": tmp_path}
    with pytest.raises(DataError, match=r"empty|no rows|no samples"):
        load_dataset(DataSettings(**settings))
