"""`fedbayes predict` of folders of pictures and of SQL queries, against `predict` of arrays and
tables.
"""

import json
import sqlite3
import warnings

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import fedbayes
from fedbayes.errors import DataError, FedbayesWarning, ModelError, RunError
from tests.helpers.command_line import cli
from tests.helpers.small_files import text

KINDS = ("cat", "dog")


def save(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Pictures of several sizes by class, cats brighter; a run that resizes them, one that cuts."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for number in range(60):
        kind = number % 2
        shape = (8 + number % 3, 9, 3)
        pixels = rng.integers(0, 160, shape) + 90 * (kind == 0)
        save(folder / "photos" / KINDS[kind] / f"{number:03d}.png", pixels.astype(np.uint8))
    data = {"path": str(folder / "photos"), "size": [6], "clients": 2, "partition": "iid"}
    for name, crop in (("stretched", False), ("cut", True)):
        fedbayes.run(folder=folder / name, data=data | {"crop": crop}, rounds=3)
    return folder


def opened(file, size=6):
    """A picture stretched by Pillow itself, uint8 [3, size, size]."""
    with Image.open(file) as image:
        return np.asarray(image.convert("RGB").resize((size, size), 2)).transpose(2, 0, 1)


def numeric(frame, names=("p_cat", "p_dog")):
    return frame[list(names)].astype(float).to_numpy()


def test_a_folder_is_predicted_as_its_pixels_are(tmp_path, pictures):
    out = tmp_path / "out.csv"
    model = fedbayes.load(pictures / "stretched")
    done = fedbayes.predict_file(model, pictures / "photos", out, rows=7)
    found = text(out)
    files = sorted((pictures / "photos").rglob("*.png"))
    assert found.file.tolist() == [f"{file.parent.name}/{file.name}" for file in files]
    assert found["class"].tolist() == [file.parent.name for file in files]
    assert done.rows == len(files)
    wanted = model.expectation(np.stack([opened(file) for file in files]))
    np.testing.assert_allclose(numeric(found), wanted.numpy(), atol=1e-6)
    assert (found.predicted == found["class"]).mean() > 0.9


def test_pictures_of_any_mode_flat_or_alone(tmp_path, pictures):
    grey = np.arange(80, dtype=np.uint8).reshape(8, 10)
    save(tmp_path / "new" / "b.jpg", grey)
    save(tmp_path / "new" / "a.png", np.stack([grey] * 4, 2))
    (tmp_path / "new" / "notes.txt").write_text("no picture")
    (tmp_path / "new" / ".hidden.png").write_text("left out")
    model = fedbayes.load(pictures / "stretched")
    fedbayes.predict_file(model, tmp_path / "new", tmp_path / "all.csv")
    found = text(tmp_path / "all.csv")
    assert list(found.columns) == ["file", "p_cat", "p_dog", "predicted"]
    assert found.file.tolist() == ["a.png", "b.jpg"]
    fedbayes.predict_file(model, tmp_path / "new" / "b.jpg", tmp_path / "one.parquet")
    one = pd.read_parquet(tmp_path / "one.parquet")
    assert one.file.tolist() == ["b.jpg"]
    np.testing.assert_allclose(numeric(one), numeric(found)[1:], atol=1e-6)


def test_pictures_are_cut_as_in_training_also_from_a_file(tmp_path, pictures, capsys):
    results = {}
    weights, program = tmp_path / "m.safetensors", tmp_path / "m.pt2"
    for name in (weights, program):
        assert cli(capsys, "export", pictures / "cut", "-o", name)[0] == 0
    for name in (pictures / "cut", weights, program, pictures / "stretched"):
        out = tmp_path / f"{name.name}.csv"
        code, said, _ = cli(capsys, "predict", name, pictures / "photos", "-o", out, "--json")
        assert code == 0
        assert json.loads(said)["rows"] == 60
        results[name.name] = numeric(text(out))
    for name in ("m.safetensors", "m.pt2"):
        np.testing.assert_allclose(results[name], results["cut"], atol=1e-5)
    assert np.abs(results["cut"] - results["stretched"]).max() > 1e-3
    both = fedbayes.load(pictures / "cut", pictures / "stretched")
    with pytest.raises(ModelError, match=r"picture sizes or crops\. Predict"):
        fedbayes.predict_file(both, pictures / "photos", tmp_path / "both.csv")


def test_bad_pictures_leave_nothing(tmp_path, pictures):
    model, out = fedbayes.load(pictures / "stretched"), tmp_path / "out.csv"
    folder = tmp_path / "bad"
    for number in range(300):
        save(folder / f"{number:03d}.png", np.zeros((7, 7, 3), np.uint8))
    (folder / "280.png").write_bytes((folder / "280.png").read_bytes()[:40])
    with pytest.raises(DataError, match=r"cannot read the picture .*280\.png"):
        fedbayes.predict_file(model, folder, out)
    save(folder / "280.png", np.zeros((7, 7), np.uint16))
    with pytest.raises(DataError, match=r"280\.png has more than 8 bits per pixel"):
        fedbayes.predict_file(model, folder, out)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty contains no pictures \(.png"):
        fedbayes.predict_file(model, tmp_path / "empty", out)
    with pytest.raises(DataError, match=r"such folder or picture: .*absent\.png"):
        fedbayes.predict_file(model, tmp_path / "absent.png", out)
    with pytest.raises(RunError, match="no columns to keep"):
        fedbayes.predict_file(model, folder, out, keep_inputs=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "empty"]


def test_models_that_read_no_such_pictures(tmp_path, pictures, stays):
    model = fedbayes.load(stays[0] / "run")
    with pytest.raises(DataError, match=r"reads samples of \d+ numbers"):
        fedbayes.predict_file(model, pictures / "photos", tmp_path / "o.csv")
    fedbayes.run(folder=tmp_path / "digits", data={"clients": 2}, rounds=1)
    model = fedbayes.load(tmp_path / "digits")
    with pytest.raises(DataError, match="numbers divided by 16"):
        fedbayes.predict_file(model, pictures / "photos", tmp_path / "o.csv")
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (40, 3, 6, 6)).astype(np.uint8)
    np.savez(tmp_path / "x.npz", x=x, y=rng.integers(0, 2, 40))
    data = {"path": str(tmp_path / "x.npz"), "clients": 2, "partition": "iid"}
    fedbayes.run(folder=tmp_path / "arrays", data=data, rounds=1)
    model = fedbayes.load(tmp_path / "arrays")
    words = r"000\.png is 3 x 8 x 9 \(channels, height, width\), and the model reads 3 x 6 x 6"
    with pytest.raises(DataError, match=words):
        fedbayes.predict_file(model, pictures / "photos", tmp_path / "o.csv")
    assert not (tmp_path / "o.csv").exists()


@pytest.fixture(scope="module")
def stays(tmp_path_factory):
    """Rows in a database, and a run on a query of them."""
    folder = tmp_path_factory.mktemp("stays")
    rng = np.random.default_rng(1)
    rows = 300
    frame = pd.DataFrame(
        {
            "id": rng.permutation(rows) + 1,
            "age": rng.normal(60, 9, rows).round(1),
            "ward": rng.choice(["icu", "er", None], rows),
            "grade": rng.choice([1, 2, 10], rows),
            "seen": rng.choice(["2020-03-31", "2021-01-02"], rows),
        }
    )
    frame.loc[::13, "age"] = np.nan
    frame["grade"] = frame.grade.astype("Int64").where(frame.index % 17 != 3)
    frame["died"] = np.where(rng.normal(size=rows) + (frame.ward == "icu") > 0.5, "yes", "no")
    with sqlite3.connect(folder / "stays.db") as connection:
        frame.to_sql("stays", connection, index=False)
    url = f"sqlite:///{folder}/stays.db"
    data = {"query": "select * from stays", "database": url, "drop": ["id"]}
    data |= {"categorical": ["grade"], "label": ["died"], "clients": 3, "partition": "iid"}
    fedbayes.run(folder=folder / "run", data=data, rounds=2)
    return folder, url, frame


@pytest.mark.parametrize("rows", [1, 7, 1000])
@pytest.mark.parametrize("out", ["out.csv", "out.parquet"])
def test_a_query_is_predicted_as_a_table_is(tmp_path, stays, rows, out):
    folder, url, frame = stays
    if rows == 1:
        frame = frame.head(20)
    model = fedbayes.load(folder / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedbayesWarning)
        wanted = model.predict_frame(frame)
        query = f"select ward, id, grade, age, seen from stays limit {len(frame)}"
        done = fedbayes.predict_file(model, url, tmp_path / out, query=query, rows=rows)
    found = text(tmp_path / out) if out.endswith("csv") else pd.read_parquet(tmp_path / out)
    assert done.rows == len(frame)
    assert list(found.columns) == ["id", "p_no", "p_yes", "predicted"]
    assert found.id.tolist() == frame.id.astype(str).tolist()
    np.testing.assert_allclose(
        numeric(found, ("p_no", "p_yes")), numeric(wanted, ("p_no", "p_yes")), atol=1e-6
    )


def test_what_a_query_keeps_is_alike_in_every_piece(tmp_path, stays):
    folder, url, _ = stays
    query = "select *, case when id > 0 then null end as none, 1.5 as half from stays order by id"
    model = fedbayes.load(folder / "run")
    fedbayes.predict_file(model, url, tmp_path / "o.parquet", query=query, rows=10)
    found = pd.read_parquet(tmp_path / "o.parquet")
    assert found.id.tolist() == [str(k) for k in range(1, 301)]
    assert found["none"].isna().all()
    assert set(found.half) == {"1.5"}
    assert set(found.died) == {"yes", "no"}


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("select age from nowhere", r"no such table: nowhere\. Correct the query, the URL"),
        ("select id, age, grade, seen from stays", "the query has no column 'ward', which the"),
        ("select * from stays where id < 0", "the query returns no rows to predict"),
        ("delete from stays", "it is not a SELECT. Nothing was changed"),
        ("select *, 1 as age from stays", "returns two columns 'age'"),
        ("select id, ward, grade, seen, 'old' as age from stays", r"'old' in row 1"),
    ],
)
def test_bad_queries_leave_nothing(tmp_path, stays, query, words):
    folder, url, _ = stays
    with pytest.raises(DataError, match=words):
        fedbayes.predict_file(fedbayes.load(folder / "run"), url, tmp_path / "o.csv", query=query)
    assert not list(tmp_path.iterdir())
    with sqlite3.connect(folder / "stays.db") as connection:
        assert connection.execute("select count(*) from stays").fetchone() == (300,)


def test_databases_at_the_command_line(tmp_path, stays, capsys):
    folder, url, _ = stays
    out = tmp_path / "o.csv"

    def predict(inputs, *more):
        return cli(capsys, "predict", folder / "run", inputs, "-o", out, *more)

    code, said, _ = predict(url, "--query", "select * from stays", "--json")
    assert code == 0
    assert json.loads(said)["rows"] == 300
    out.unlink()
    secret = "postgresql://me:hunter2@host/db"
    for inputs, more, words in (
        (url, (), "Give one with --query"),
        (tmp_path / "absent.csv", ("--query", "select 1"), "file or folder"),
        (
            "sqlite:////none.db",
            ("--query", "select 1"),
            "file not found: /none.db. Correct",
        ),
        (secret, ("--query", "select 1"), "set FEDBAYES_DATABASE_PASSWORD"),
        ("none://x", ("--query", "select 1"), "none"),
    ):
        code, said, err = predict(inputs, *more)
        assert code == 2
        assert words in " ".join(err.split())
        assert "hunter2" not in said + err
        assert not out.exists()
