"""How CSV files are written: decimals, thousands, encodings, headers and missing values."""

import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError

import fedbayes
from fedbayes.data import DataSettings, load_dataset
from fedbayes.data.sources.conventions import Numbers
from fedbayes.errors import DataError, UnclearError
from fedbayes.workflows.serve.evaluation_set import find_tests
from fedbayes.workflows.serve.prediction import predict_file

RNG = np.random.default_rng(3)
ROWS = 40
FRAME = pd.DataFrame(
    {
        "dose": RNG.uniform(0, 9, ROWS).round(2),
        "cost": RNG.integers(900, 2_000_000, ROWS),
        "count": RNG.integers(0, 30, ROWS),
        "label": RNG.choice(["ja", "nein"], ROWS),
    }
)


def german(frame=FRAME):
    """As a German program writes it: 1.234.567 and 0,5."""
    cost = [f"{value:,}".replace(",", ".") for value in frame.cost]
    return frame.assign(cost=cost).to_csv(index=False, sep=";", decimal=",")


def american(frame=FRAME):
    """As spreadsheets write it: "1,234,567" and 0.5."""
    return frame.assign(cost=[f"{value:,}" for value in frame.cost]).to_csv(index=False)


def load(tmp_path, text, name="t.csv", encoding="utf-8", **asked):
    (tmp_path / name).write_bytes(text.encode(encoding))
    return load_dataset(DataSettings(path=tmp_path / name, **asked))


def plain(tmp_path, frame=FRAME):
    return load(tmp_path, frame.to_csv(index=False), "plain.csv").x


@pytest.mark.parametrize("write", [german, american])
def test_thousands_and_decimals_of_a_file(tmp_path, write):
    own = load(tmp_path, write())
    np.testing.assert_array_equal(own.x, plain(tmp_path))
    assert own.decimal == ("," if write is german else ".")
    assert any("thousands separators in cost" in note for note in own.notes)


@pytest.mark.parametrize("mark", [" ", "'", "\u00a0", "\u202f"])
def test_blanks_and_apostrophes_between_thousands(tmp_path, mark):
    frame = FRAME.assign(cost=[f"{value:,}".replace(",", mark) for value in FRAME.cost])
    text = frame.to_csv(index=False, sep=";", decimal=",")
    np.testing.assert_array_equal(load(tmp_path, text).x, plain(tmp_path))


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_what_can_be_read_in_two_ways_is_an_error(tmp_path, separator):
    text = "dose;cost;label\n1;1.581;a\n2;757;b\n3;2.004;a\n".replace(";", separator)
    with pytest.raises(UnclearError, match=r"column 'cost' .*'1\.581' is 1\.581 .*data\.decimal"):
        load(tmp_path, text)
    assert load(tmp_path, text, decimal=",").x[:, 1].tolist() == [1581, 757, 2004]
    points = load(tmp_path, text, decimal=".").x[:, 1]
    np.testing.assert_allclose(points, [1.581, 757, 2.004], rtol=1e-6)
    none = load(tmp_path, text, thousands="none").x[:, 1]
    np.testing.assert_allclose(none, points)
    assert load(tmp_path, text, drop="cost").x.tolist() == [[1], [2], [3]]


def test_a_comma_between_columns_means_points_unless_cells_say_otherwise(tmp_path):
    fixed = "a,label\n1.581,x\n2.004,y\n3.100,x\n"
    np.testing.assert_allclose(load(tmp_path, fixed).x[:, 0], [1.581, 2.004, 3.1], rtol=1e-6)
    for text in ("a,b,label\n1,1.581,x\n2,757,y\n", 'a,b,label\n1,"1,581",x\n2,"2,757",y\n'):
        with pytest.raises(UnclearError, match="'b' can be read in two ways"):
            load(tmp_path, text)


def test_columns_of_one_file_that_differ_are_told(tmp_path):
    own = load(tmp_path, "a;b;label\n1,5;1.25;x\n2,5;0.75;y\n")
    assert own.x.tolist() == [[1.5, 1.25], [2.5, 0.75]]
    assert "with decimal commas in a and decimal points in b" in own.notes[0]
    with pytest.raises(UnclearError, match="column 'c'"):
        load(tmp_path, "a;b;c;label\n1,5;1.25;1.581;x\n2,5;0.75;3.004;y\n")
    with pytest.raises(DataError, match=r"'a' has decimal points .*data\.decimal is ','"):
        load(tmp_path, "a;label\n1.5;x\n2.5;y\n", decimal=",")


def test_files_of_several_clients_are_read_each_in_its_way(tmp_path):
    (tmp_path / "train-a.csv").write_text(german(FRAME[:20]))
    (tmp_path / "train-b.csv").write_text(american(FRAME[20:]))
    own = load_dataset(DataSettings(path=tmp_path))
    np.testing.assert_array_equal(own.x, plain(tmp_path))
    assert own.decimal == ""


def test_a_target_in_groups_of_three_digits(tmp_path):
    own = load(tmp_path, german().replace("label", "kind"), label="cost", drop="kind")
    np.testing.assert_array_equal(own.y[:, 0], FRAME.cost.astype(np.float32))


@pytest.mark.parametrize(
    ("text", "point", "comma"),
    [
        ("757", 757, 757),
        ("1.581", 1.581, 1581),
        ("1,581", 1581, 1.581),
        ("-1.234,56", None, -1234.56),
        ("1,234.56", 1234.56, None),
        ("1.234.567", None, 1234567),
        ("0.581", 0.581, None),
        ("1234.567", 1234.567, None),
        ("1.5e3", 1500, None),
        (",5", None, 0.5),
        ("12.31.2020", None, None),
        ("1.23.456", None, None),
        ("1.234 567", None, None),
    ],
)
def test_what_a_cell_can_be(text, point, comma):
    numbers = Numbers(None, None)
    for decimal, value in ((".", point), (",", comma)):
        assert numbers.look([text]).fits[decimal] == (value is not None)
        if value is not None:
            read, _ = numbers.read(pd.Series([text]), decimal)
            assert float(read[0]) == value


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "utf-8-sig"])
def test_encodings(tmp_path, encoding):
    text = "größe,label\n1,Köln\n2,Bad Öynhausen\n"
    own = load(tmp_path, text, encoding=encoding)
    assert own.features == ("größe",)
    assert own.classes == ("Bad Öynhausen", "Köln")
    assert any("cp1252" in note and "'größe'" in note for note in own.notes) == (
        encoding == "cp1252"
    )


def test_an_encoding_that_is_named(tmp_path):
    text = "größe,label\n1,Łódź\n2,y\n"
    own = load(tmp_path, text, encoding="cp1250")
    assert "Łódź" not in own.classes
    (tmp_path / "u.csv").write_bytes(text.encode("cp1250"))
    named = load_dataset(DataSettings(path=tmp_path / "u.csv", encoding="cp1250"))
    assert named.classes == ("y", "Łódź")
    with pytest.raises(ValidationError, match="unknown encoding 'klingon'"):
        DataSettings(path=tmp_path / "u.csv", encoding="klingon")


def test_tabs_and_packed_files(tmp_path):
    import gzip

    text = FRAME.to_csv(index=False, sep="\t", decimal=",")
    np.testing.assert_array_equal(load(tmp_path, text, "t.tsv").x, plain(tmp_path))
    (tmp_path / "t.tsv.gz").write_bytes(gzip.compress(text.encode()))
    packed = load_dataset(DataSettings(path=tmp_path / "t.tsv.gz"))
    np.testing.assert_array_equal(packed.x, plain(tmp_path))


def test_values_that_stand_for_missing_ones(tmp_path):
    text = "a,b,label\n1.5,?,x\n-999,4,y\n3,unknown,x\n2,-999.0,y\n"
    with pytest.raises(DataError, match=r"column 'b'.*'\?' in row 1"):
        load(tmp_path, text)
    asked = {"na_values": ["-999", "?", "unknown"]}
    expected = [[1.5, np.nan], [np.nan, 4], [3, np.nan], [2, np.nan]]
    np.testing.assert_array_equal(load(tmp_path, text, **asked).x, expected)
    frame = pd.DataFrame(
        {"a": [1.5, -999, 3, 2], "b": [-999, 4, -999, -999], "label": list("xyxy")}
    )
    frame.to_parquet(tmp_path / "t.parquet")
    frame.astype({"b": object}).replace({"b": {-999: "?"}}).to_excel(
        tmp_path / "t.xlsx", index=False
    )
    for name in ("t.parquet", "t.xlsx"):
        own = load_dataset(DataSettings(path=tmp_path / name, **asked))
        np.testing.assert_array_equal(own.x, expected)


def test_several_rows_of_a_header(tmp_path):
    units = "age,dose,label\nyears,mg,\n31,1.5,x\n42,2.5,y\n55,0.5,x\n"
    with pytest.raises(DataError, match=r"'years' in row 1 .*data\.header_rows"):
        load(tmp_path, units)
    own = load(tmp_path, units, header_rows=2)
    assert own.features == ("age", "dose")
    assert own.x[:, 0].tolist() == [31, 42, 55]
    merged = "Labor,,Vital,,label\nCRP,Leuko,CRP,HF,\n1,5,3,4,x\n2,6,3,4,y\n"
    own = load(tmp_path, merged, header_rows=2)
    assert own.features == ("Labor CRP", "Labor Leuko", "Vital CRP", "Vital HF")
    with pytest.raises(DataError, match="row 2 of the header contains numbers"):
        load(tmp_path, "a,b,label\n1,2,x\n3,4,y\n", header_rows=2)
    head = pd.DataFrame([["age", "label"], ["years", None], [31, "x"], [42, "y"]])
    head.to_excel(tmp_path / "t.xlsx", header=False, index=False)
    own = load_dataset(DataSettings(path=tmp_path / "t.xlsx", header_rows=2))
    assert (own.features, own.x[:, 0].tolist()) == (("age",), [31, 42])


@pytest.mark.parametrize(
    ("form", "suggested"),
    [("%d.%m.%Y", r"=%d\.%m\.%Y\."), ("%m/%d/%Y", "=%m/%d/%Y"), ("%d-%m-%Y %H:%M", "%Y %H:%M")],
)
def test_dates_of_other_forms_are_named(tmp_path, form, suggested):
    days = pd.date_range("2020-01-20", periods=ROWS, freq="9D").strftime(form)
    text = FRAME.assign(day=days).to_csv(index=False)
    with pytest.raises(DataError, match=rf"'day' has dates .*data.dates.*date_format.*{suggested}"):
        load(tmp_path, text)
    own = load(tmp_path, text, dates="day", date_format=form)
    steps = np.diff(own.x[:, 3])
    np.testing.assert_allclose(steps, 9, atol=1e-3)


def test_settings_without_effect_are_errors(tmp_path):
    FRAME.to_parquet(tmp_path / "t.parquet")
    for asked in ({"decimal": ","}, {"encoding": "cp1252"}, {"header_rows": 2}):
        with pytest.raises(DataError, match=f"data.{next(iter(asked))} has no effect"):
            load_dataset(DataSettings(path=tmp_path / "t.parquet", **asked))
    with pytest.raises(ValidationError, match="both ','"):
        DataSettings(path=tmp_path / "t.csv", decimal=",", thousands=",")
    with pytest.raises(ValidationError, match="na_values has no effect on own_module:factory"):
        DataSettings(name="own_module:factory", na_values=["?"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on a German file with missing values, and its folder."""
    place = tmp_path_factory.mktemp("german")
    (place / "t.csv").write_text(german().replace(";1;", ";-9;"))
    data = {"path": str(place / "t.csv"), "na_values": ["-9"], "clients": 2, "partition": "iid"}
    return fedbayes.run(None, place / "run", rounds=1, data=data)


def test_predict_reads_files_by_the_rules_of_training(trained, tmp_path):
    def predicted(text, chunk=7):
        (tmp_path / "new.csv").write_text(text)
        found = predict_file(
            trained.folder.path,
            tmp_path / "new.csv",
            tmp_path / "o.csv",
            overwrite=True,
            rows=chunk,
        )
        return pd.read_csv(tmp_path / "o.csv").select_dtypes("number"), found.notes

    expected, _ = predicted(FRAME.to_csv(index=False))
    for text in (german(), american()):
        found, notes = predicted(text)
        pd.testing.assert_frame_equal(found, expected)
        assert any("thousands" in note for note in notes)
    whole = FRAME.assign(dose=1, cost=FRAME.cost % 9000 + 1000)
    expected, _ = predicted(whole.to_csv(index=False))
    found, notes = predicted(german(whole))  # no cell says how decimals are written
    pd.testing.assert_frame_equal(found, expected)
    assert any("can be read in two ways" in note and "training" in note for note in notes)
    marked = FRAME.assign(count=FRAME["count"].replace(1, -9))
    emptied = FRAME.assign(count=FRAME["count"].astype(float).replace(1, np.nan))
    assert (marked["count"] == -9).any()
    found, _ = predicted(marked.to_csv(index=False))
    pd.testing.assert_frame_equal(found, predicted(emptied.to_csv(index=False))[0])


def test_evaluate_reads_files_by_the_rules_of_training(trained, tmp_path):
    whole = FRAME.assign(dose=1, cost=FRAME.cost % 9000 + 1000)
    (tmp_path / "new.csv").write_text(german(whole))
    model = trained.folder.path / "model.safetensors"
    with pytest.warns(fedbayes.errors.FedbayesWarning, match="decimals are commas, as in training"):
        x = find_tests(model, None, [f"data.path={tmp_path / 'new.csv'}"]).samples.x
    assert x[:, 1].tolist() == whole.cost.tolist()
