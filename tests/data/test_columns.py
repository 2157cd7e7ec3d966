"""Tables of mixed columns: read, encoded by the training rows, and applied to new ones.

The independent side is pandas: `get_dummies`, means and standard deviations of the pooled rows.
"""

import dataclasses
import warnings
from datetime import datetime

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbayes.core.categories import places, spelled_apart
from fedbayes.data import DataSettings, FederatedData, Preprocessing, load_dataset, partition
from fedbayes.data.sources.streams import Rows
from fedbayes.data.tables.cells import code
from fedbayes.data.tables.columns import Column, reading
from fedbayes.errors import DataError, FedbayesWarning


def patients(rows=300, seed=0):
    """A table with a column of each kind, and gaps in some."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "site": rng.choice(["north", "south", "east"], rows),
            "age": rng.normal(60, 12, rows).round(),
            "sex": rng.choice(["m", "f"], rows),
            "ward": rng.choice(["icu", "er", "ward"], rows, p=[0.1, 0.3, 0.6]),
            "smoker": rng.random(rows) < 0.3,
            "admitted": (
                pd.Timestamp("2021-01-01") + pd.to_timedelta(rng.integers(0, 700, rows), unit="D")
            ).strftime("%Y-%m-%d"),
            "stage": rng.integers(1, 4, rows),
            "label": rng.choice(["died", "lived"], rows),
        }
    )
    frame.loc[rng.random(rows) < 0.2, "age"] = np.nan
    frame.loc[rng.random(rows) < 0.1, "ward"] = None
    return frame


def write(frame, file):
    name = file.name
    if name.endswith(".parquet"):
        frame.to_parquet(file)
    elif name.endswith(".xlsx"):
        frame.to_excel(file, index=False)
    else:
        frame.to_csv(file, index=False)
    return file


def federated(file, seed=0, **asked):
    settings = DataSettings(path=file, group="site", **asked)
    dataset = load_dataset(settings)
    return FederatedData(dataset, partition(dataset, settings, seed), seed)


def by_pandas(frame, train):
    """The same rows encoded by pandas, with the numbers of the pooled training rows."""
    days = (pd.to_datetime(frame.admitted) - pd.Timestamp(0)) / pd.Timedelta(days=1)
    numbers = pd.DataFrame({"age": frame.age, "smoker": frame.smoker * 1.0, "admitted": days})
    mean, std = numbers.iloc[train].mean(), numbers.iloc[train].std(ddof=0)
    numbers = ((numbers - mean) / std).fillna(0.0)
    dummies = pd.get_dummies(frame[["sex", "ward"]], prefix_sep="=").astype(float)
    stage = pd.get_dummies(frame.stage.astype(str), prefix="stage", prefix_sep="=").astype(float)
    gaps = frame[["age", "ward"]].isna().add_suffix(" (missing)").astype(float)
    return pd.concat([numbers, dummies, stage, gaps], axis=1)


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.parquet", "t.xlsx"])
def test_clients_see_what_pandas_makes_of_the_pooled_training_rows(tmp_path, name):
    frame = patients()
    data = federated(write(frame, tmp_path / name), categorical="stage")
    features = data.preprocessing.features
    expected = by_pandas(frame, data.partition.train)
    assert sorted(features) == sorted(expected.columns)
    wanted = expected[list(features)].to_numpy()
    np.testing.assert_allclose(data.all_train().x, wanted[data.partition.train], atol=1e-5)
    np.testing.assert_allclose(
        data.test_union(0, data.test_total).x, wanted[data.partition.test], atol=1e-5
    )
    # What is stored is applied to the raw table, and to encoded rows, with the same result.
    stored = Preprocessing.load(data.preprocessing.dump())
    assert stored == data.preprocessing
    seen = stored.apply(frame.drop(columns="label").iloc[::-1])
    np.testing.assert_allclose(seen.flip(0), wanted, atol=1e-5)
    raw = data.raw_test(0, data.test_total)
    assert torch.equal(stored.apply(raw), data.test_union(0, data.test_total).x)
    assert torch.equal(stored.module()(raw), data.test_union(0, data.test_total).x)


def test_formats_hold_the_same_data(tmp_path):
    frame = patients()
    files = [write(frame, tmp_path / name) for name in ("t.csv", "t.csv.gz", "t.parquet", "t.xlsx")]
    read = [load_dataset(DataSettings(path=file)) for file in files]
    assert len({dataset.digest for dataset in read}) == 1
    assert {column.kind for column in read[0].columns} == {"number", "boolean", "category", "date"}


def test_unseen_categories_are_zeros_and_said(tmp_path):
    data = federated(write(patients(), tmp_path / "t.csv"))
    new = patients(6, seed=1).assign(ward="spa")
    with pytest.warns(FedbayesWarning, match=r"'ward' has a category, unlike all .* in 6 rows"):
        seen = data.preprocessing.apply(new)
    ward = [k for k, name in enumerate(data.preprocessing.features) if name.startswith("ward")]
    assert not seen[:, ward].any()
    new = new.assign(ward="icu", sex=["m", None, " ", "f", "f", "m"], age=50.0)
    with pytest.warns(FedbayesWarning, match=r"'sex' is empty, .* in 2 rows \(first in row 2\)"):
        seen = data.preprocessing.apply(new)
    sex = [k for k, name in enumerate(data.preprocessing.features) if name.startswith("sex=")]
    assert seen[:, sex].sum(1).tolist() == [1, 0, 0, 1, 1, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.preprocessing.apply(patients(50, seed=2))


def test_categories_are_those_of_the_training_rows(tmp_path):
    """What only test rows have is unseen, whatever the whole table has."""
    frame = patients().assign(part=["train"] * 200 + ["test"] * 100)
    frame["ward"] = frame.ward.fillna("er").where(frame.part == "train", "spa")
    frame["age"] = frame.age.fillna(50.0).where(frame.part == "train", np.nan)
    data = federated(write(frame, tmp_path / "t.csv"), split="part")
    features = data.preprocessing.features
    assert "ward=spa" not in features
    assert "ward (missing)" not in features
    assert "age (missing)" not in features
    seen = data.test_union(0, data.test_total).x
    assert not seen[:, [k for k, name in enumerate(features) if name.startswith("ward")]].any()
    assert not seen[:, features.index("age")].any()


def test_the_division_does_not_change_what_is_seen(tmp_path):
    """Sums, counts and sets add over clients: the same rows give the same numbers."""
    frame = patients().assign(part=["train"] * 200 + ["test"] * 100)
    file = write(frame, tmp_path / "t.csv")
    one = federated(file, split="part").preprocessing
    settings = DataSettings(path=file, split="part", drop="site", partition="iid", clients=7)
    dataset = load_dataset(settings)
    two = FederatedData(dataset, partition(dataset, settings, 3), 3).preprocessing
    assert one.columns == two.columns
    assert one.statistics[0].tolist() == two.statistics[0].tolist()


def test_missing_values_may_be_imputed_alone_or_dropped(tmp_path):
    file = write(patients(), tmp_path / "t.csv")
    imputed = federated(file, missing="impute").preprocessing
    assert "age (missing)" not in imputed.features
    assert "ward (missing)" in imputed.features  # there is no mean of categories
    dropped = load_dataset(DataSettings(path=file, missing="drop"))
    assert dropped.samples == int(patients().notna().all(axis=1).sum())
    assert "rows are left out" in " ".join(dropped.notes)


@pytest.mark.parametrize("missing", ["drop", "impute", "indicate"])
def test_what_becomes_of_missing_values_does_not_matter_without_any(tmp_path, missing):
    (tmp_path / "t.csv").write_text("x,ward,label\n1,a,u\n2,b,v\n3,a,u\n")
    said = "no value is missing, so data.missing has no effect"
    settings = DataSettings(path=tmp_path / "t.csv", drop="ward")
    assert not any(said in note for note in load_dataset(settings).notes)
    settings = settings.model_copy(update={"missing": missing})
    assert any(said in note for note in load_dataset(settings).notes)
    for row in ("4,,u", ",a,v"):  # of a category too
        (tmp_path / "t.csv").write_text(f"x,ward,label\n1,a,u\n2,b,v\n3,a,u\n{row}\n")
        settings = DataSettings(path=tmp_path / "t.csv", missing=missing)
        assert not any(said in note for note in load_dataset(settings).notes)


def test_rows_of_a_factory_are_left_out_there():
    with pytest.raises(ValueError, match="leave such rows out in your factory"):
        DataSettings(name="mine:make", missing="drop")


def test_texts_are_hashed_as_scikit_learn_does(tmp_path):
    from sklearn.feature_extraction.text import HashingVectorizer

    words = np.array(["chest pain", "short of breath", "cough and fever", "fall from a ladder"])
    rng = np.random.default_rng(0)
    frame = patients().assign(note=[" ".join(rng.permutation(words)[:3]) for _ in range(300)])
    frame.loc[::10, "note"] = None
    data = federated(write(frame, tmp_path / "t.csv"), text="note", text_width=16)
    stored, features = data.preprocessing, data.preprocessing.features
    seen = stored.apply(frame).numpy()
    at = features.index("note#0")
    expected = HashingVectorizer(n_features=16).transform(frame.note.fillna("")).toarray()
    np.testing.assert_allclose(seen[:, at : at + 16], expected, atol=1e-6)
    assert seen[:, features.index("note (missing)")].tolist() == frame.note.isna().tolist()
    assert b"ladder" not in stored.dump()


def test_categories_are_the_same_however_a_reader_takes_them(tmp_path):
    """1, 1.0 and "1" are one category, as integers become floats beside an empty cell."""
    data = federated(write(patients(), tmp_path / "t.csv"), categorical="stage").preprocessing
    new = patients(20, seed=5)
    expected = data.apply(new)
    for kind in (float, str, object, "Int64", "category"):
        assert torch.equal(data.apply(new.assign(stage=new.stage.astype(kind))), expected)
    text = new.assign(stage=new.stage.map("{:03d}".format), age=new.age.astype(object))
    assert torch.equal(data.apply(text), expected)
    numbers = new.age.map("{:.0f}".format).where(new.age.notna(), "")
    assert torch.equal(data.apply(new.assign(age=numbers)), expected)


@pytest.mark.parametrize(
    ("change", "asked", "says"),
    [
        ({"id": [f"P{k}" for k in range(300)]}, {}, r"'id' has 300 different texts.*drop"),
        ({"id": [f"P{k % 200}" for k in range(300)]}, {}, "'id' has 200 different texts"),
        (
            {"code": ["1", "2", "x"] * 100},
            {},
            r"'code' has 100 cells that are not numbers \(first 'x' in row 3",
        ),
        ({"when": ["31.03.2020", "01.04.2020"] * 150}, {"dates": "when"}, "'31.03.2020' in row 1"),
        (
            {"when": 43921},
            {"dates": "when"},
            r"not a date written as 2020-03-31 \('43921' in row 1",
        ),
        ({"fold": ["train", "test", "test"] * 100}, {}, "has the values train and test"),
        ({}, {"numeric": "sex"}, r"'sex' has 300 cells that are not numbers \(first '.' in row 1"),
        (
            {},
            {"numeric": "sexx"},
            r"no column 'sexx' \(did you mean 'sex'\?\)\. Set data.numeric to",
        ),
        ({"age (missing)": 1.0}, {}, r"two features would have the name 'age \(missing\)'"),
        ({}, {"scale": 2.0}, "scale has no effect"),
        ({}, {"sheet": "first"}, "has no sheets"),
    ],
)
def test_a_column_that_cannot_be_used_says_why(tmp_path, change, asked, says):
    file = write(patients().assign(**change), tmp_path / "t.csv")
    with pytest.raises(DataError, match=says):
        load_dataset(DataSettings(path=file, **asked))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"categorical": "label"}, "categorical and label both list 'label'"),
        ({"categorical": "a", "text": "a"}, "text and categorical both list 'a'"),
        ({"numeric": "a", "drop": "a"}, "numeric and drop both list 'a'"),
        ({"numeric": "a", "features": ("b",)}, "numeric lists 'a', which features does not."),
        ({"dates": ("a", "a")}, "dates lists 'a' twice"),
    ],
)
def test_settings_of_kinds_that_contradict(asked, says):
    with pytest.raises(ValueError, match=says):
        DataSettings(path="t.csv", **asked)


def test_dates_in_a_format_of_ones_own(tmp_path):
    frame = patients()
    expected = federated(write(frame, tmp_path / "t.csv"))
    german = frame.assign(admitted=pd.to_datetime(frame.admitted).dt.strftime("%d.%m.%Y"))
    file = write(german, tmp_path / "g.csv")
    data = federated(file, dates="admitted", date_format="%d.%m.%Y")
    assert torch.equal(data.all_train().x, expected.all_train().x)
    assert torch.equal(data.preprocessing.apply(german), expected.preprocessing.apply(frame))
    # Dates of ISO 8601 have one meaning, and American ones another than those of the format.
    assert torch.equal(data.preprocessing.apply(frame), expected.preprocessing.apply(frame))
    american = frame.assign(admitted=pd.to_datetime(frame.admitted).dt.strftime("%m/%d/%Y"))
    with pytest.raises(DataError, match=r"not a date written as %d\.%m\.%Y .*in row 1; 300"):
        data.preprocessing.apply(american)


def test_a_file_with_other_things_in_a_column_is_named(tmp_path):
    write(patients(), tmp_path / "train-a.csv")
    other = patients(seed=1).assign(age="old")
    other.loc[:4, "age"] = "50"
    write(other, tmp_path / "train-b.csv")
    with pytest.raises(
        DataError, match=r"train-b\.csv: column 'age' .*'old' in row 6.*numbers in .*train-a\.csv"
    ):
        load_dataset(DataSettings(path=tmp_path))
    write(patients().assign(sex=1.0), tmp_path / "train-b.csv")
    with pytest.raises(
        DataError, match=r"column 'sex' has numbers \('1.0' in row 1\)\. It has text"
    ):
        load_dataset(DataSettings(path=tmp_path))


@pytest.mark.parametrize("suffix", [".csv", ".xlsx", ".parquet"])
@pytest.mark.parametrize("other", ["050607", "A1"])
def test_text_and_dates_that_look_like_numbers_are_read_as_they_are(tmp_path, suffix, other):
    """007 is no 7, and 020304 the second of March, when training and when predicting: whatever else
    is in the column, and however few rows are read at a time.
    """
    from sklearn.feature_extraction.text import HashingVectorizer

    codes = ["007", "1.50", "1e3", other] * 5
    days = ["020304", "010203", "110805", "050607"] * 5
    frame = pd.DataFrame({"code": codes, "day": days, "label": list("xy") * 10})
    file = tmp_path / f"t{suffix}"
    writers = {".csv": "to_csv", ".xlsx": "to_excel", ".parquet": "to_parquet"}
    getattr(frame, writers[suffix])(file, index=False)
    asked = {"text": ("code",), "text_width": 32, "dates": ("day",), "date_format": "%d%m%y"}
    dataset = load_dataset(DataSettings(path=file, **asked))
    hashed = HashingVectorizer(n_features=32).transform(codes).toarray()
    since = [(datetime.strptime(day, "%d%m%y") - datetime(1970, 1, 1)).days for day in days]
    expected = np.column_stack([hashed, since]).astype(np.float32)
    np.testing.assert_array_equal(dataset.x, expected)
    pieces = [code(piece.x, dataset.columns, "t") for piece in Rows(file, dataset.columns, size=3)]
    np.testing.assert_array_equal(np.concatenate(pieces), expected)


def test_texts_with_decimal_commas_are_texts(tmp_path):
    """In a file with semicolons a text such as 1,5 is not mended, as numbers and categories are."""
    frame = pd.DataFrame(
        {"note": ["1,5", "2,5"] * 3, "dose": ["0,5", "3"] * 3, "label": list("xy") * 3}
    )
    frame.to_csv(file := tmp_path / "t.csv", sep=";", index=False)
    dataset = load_dataset(DataSettings(path=file, text=("note",), text_width=16))
    (piece,) = Rows(file, dataset.columns)
    np.testing.assert_array_equal(code(piece.x, dataset.columns, "t"), dataset.x)
    assert dataset.x[:2, -1].tolist() == [0.5, 3]


@pytest.mark.parametrize("numbers", [[10203, 111213], [10203.0, np.nan]])
def test_numbers_that_have_lost_a_zero_are_no_dates(tmp_path, numbers):
    """010203 as a number is 10203, which `strptime` takes for the tenth of February."""
    frame = pd.DataFrame({"day": numbers, "label": ["x", "y"]})
    frame.to_parquet(file := tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"'day'.*written as %d%m%y \('10203.* in row 1"):
        load_dataset(DataSettings(path=file, dates=("day",), date_format="%d%m%y"))


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_whole_numbers_beside_empty_cells_are_dates(tmp_path, suffix):
    """pandas writes such numbers as 20200331.0, which `predict` refused."""
    frame = pd.DataFrame({"day": [20200331, np.nan, 20210401], "label": list("xyx")})
    file = tmp_path / f"t{suffix}"
    frame.to_csv(file, index=False) if suffix == ".csv" else frame.to_parquet(file)
    dataset = load_dataset(DataSettings(path=file, dates=("day",), date_format="%Y%m%d"))
    (piece,) = Rows(file, dataset.columns)
    wanted = [(datetime(2020, 3, 31) - datetime(1970, 1, 1)).days, np.nan]
    for x in (dataset.x, code(piece.x, dataset.columns, "t")):
        np.testing.assert_array_equal(x[:2, 0], np.float32(wanted))


def test_a_sheet_of_several_is_named(tmp_path):
    with pd.ExcelWriter(tmp_path / "t.xlsx") as book:
        patients().to_excel(book, sheet_name="rows", index=False)
        patients().to_excel(book, sheet_name="legend", index=False)
    with pytest.raises(DataError, match=r"has the sheets rows, legend\. Choose one with sheet"):
        load_dataset(DataSettings(path=tmp_path / "t.xlsx"))
    with pytest.raises(DataError, match=r"no sheet 'row' \(did you mean 'rows'\?\)"):
        load_dataset(DataSettings(path=tmp_path / "t.xlsx", sheet="row"))
    assert load_dataset(DataSettings(path=tmp_path / "t.xlsx", sheet="rows")).samples == 300
    (tmp_path / "t.xlsx").write_bytes(b"PK no workbook")
    with pytest.raises(DataError, match=r"cannot read .*t\.xlsx"):
        load_dataset(DataSettings(path=tmp_path / "t.xlsx"))


def test_stored_columns_that_do_not_fit_are_told(tmp_path):
    stored = federated(write(patients(), tmp_path / "t.csv")).preprocessing
    with pytest.raises(DataError, match="invalid preprocessing"):
        Preprocessing.load(stored.dump().replace(b'"gaps": true', b'"gaps": false'))
    with pytest.raises(ValueError, match="columns do not fit"):
        dataclasses.replace(stored, columns=stored.columns[1:])


@pytest.mark.parametrize("bad", ["inf", "-1e39"])
def test_the_row_and_client_of_an_infinite_number_are_named(tmp_path, bad):
    """`sample 0` was counted from 0, and behind the rows of the training part."""
    (tmp_path / "t.csv").write_text(f"x,ward,label\n1,a,u\n{bad},b,v\n2,a,u\n")
    with pytest.raises(
        DataError, match=r"t.csv: .*'x' is infinite.*row 2 .*row 2 belongs to client 'b'"
    ):
        load_dataset(DataSettings(path=tmp_path / "t.csv", group="ward"))


def test_a_client_with_other_things_in_a_column_is_named(tmp_path):
    frame = patients().assign(crp="1.5")
    row = frame.index[frame.site == "south"][3]
    frame.loc[row, "crp"] = "high"
    file = write(frame, tmp_path / "t.csv")
    with pytest.raises(
        DataError,
        match=rf"'crp' .*'high' in row {row + 1}.* \(row {row + 1} belongs to client 'south'",
    ):
        load_dataset(DataSettings(path=file, group="site"))


@pytest.mark.parametrize("kind", [object, "string", "category"])
def test_truth_values_as_text_are_those_of_a_csv(tmp_path, kind):
    frame = patients()
    frame["smoker"] = frame.smoker.astype(object).where(np.arange(len(frame)) % 9 != 4)
    path = write(frame, tmp_path / "t.csv")
    data = federated(path)
    by_csv = data.preprocessing.encode(pd.read_csv(path))[0]
    texts = frame.assign(smoker=frame.smoker.map({True: "True", False: "false "}).astype(kind))
    np.testing.assert_array_equal(data.preprocessing.encode(texts)[0], by_csv)
    odd = frame.assign(smoker=frame.smoker.where(frame.index != 6, "perhaps"))
    with pytest.raises(
        DataError, match=r"'smoker' has 1 cell that is not a number \('perhaps' in row 7"
    ):
        data.preprocessing.encode(odd)


def test_columns_of_which_float32_keeps_too_little_are_named(tmp_path):
    """Seconds since 1970, and times within a minute; not a year, nor numbers far apart."""
    rows = np.arange(60)
    moments = pd.Timestamp("2024-03-01 10:00:00") + pd.to_timedelta(rows, "s")
    table = {"since": 1_700_000_000 + rows, "at": moments.strftime("%Y-%m-%dT%H:%M:%S")}
    table |= {"year": 2020, "far": rows * 1e9, "gap": [None, *rows[1:]], "y": rows % 2}
    pd.DataFrame(table).to_csv(tmp_path / "t.csv", index=False)
    found = load_dataset(DataSettings(path=tmp_path / "t.csv", label=["y"]))
    notes = [note for note in found.notes if "has a rounding error of" in note]
    assert len(notes) == 2
    assert "'since' has a rounding error of" in notes[0]
    assert "'at' has a rounding error of" in notes[1]


def test_truth_values_as_text_where_a_table_is_of_numbers_alone(tmp_path):
    """Without gaps and categories columns are plain numbers, and truth values are all the same."""
    frame = patients()[["site", "age", "smoker", "label"]].assign(age=60.0)
    data = federated(write(frame, tmp_path / "t.csv"))
    assert not data.preprocessing.columns
    texts = frame.assign(smoker=frame.smoker.map({True: " TRUE", False: "false"}))
    found = data.preprocessing.encode(texts)[0]
    np.testing.assert_array_equal(found, frame[["age", "smoker"]].to_numpy(np.float32))
    path = write(texts, tmp_path / "new.csv")
    (piece,) = Rows(path, data.preprocessing.table)
    np.testing.assert_array_equal(data.preprocessing.encode(piece.x)[0], found)
    asked = DataSettings(path=path, **reading(data.preprocessing.table))
    np.testing.assert_array_equal(load_dataset(asked).x, found)
    odd = texts.assign(smoker=texts.smoker.where(texts.index != 6, "perhaps"))
    with pytest.raises(
        DataError, match=r"'smoker' has 1 cell that is not a number \('perhaps' in row 7"
    ):
        data.preprocessing.encode(odd)
    ages = frame.assign(age=frame.age.astype(str).where(frame.index != 2, "true"))
    with pytest.raises(DataError, match=r"'age' has .* not .* \(.*'true' in row 3"):
        data.preprocessing.encode(ages)


@pytest.mark.parametrize(
    ("names", "categories", "wanted"),
    [
        (["true", "False", "maybe"], ["False", "True"], [1, 0, -1]),
        (["True", "False"], ["false", "maybe", "true"], [2, 0]),
        (["1", "01", "1.0", "001"], ["01", "A1"], [0, 0, -1, -1]),
        (["1", "01", "001", "2"], ["1", "01", "2"], [0, 1, 0, 2]),
        (["1", "01"], ["01", "001"], [-1, 0]),  # either could be meant
        (["12345678901234567890"], ["12345678901234567891"], [-1]),
    ],
)
def test_one_category_in_several_spellings(names, categories, wanted):
    assert places(names, categories) == wanted


def test_the_row_of_a_bad_cell_is_told_whatever_the_rows_are_called():
    """Rows of a DataFrame may be called alike."""
    frame = pd.DataFrame({"a": ["1", "2", "x", "4"]}, index=[7, 7, 7, 7])
    with pytest.raises(DataError, match=r"1 cell that is not a number \('x' in row 3\)"):
        code(frame, [Column("a")], "the frame")


@given(
    st.lists(
        st.sets(st.sampled_from(["01", "1", "1.0", "true", "True", "a", "2"]), max_size=4),
        max_size=5,
    )
)
def test_spellings_are_compared_as_in_all_pairs_of_tables(tables):
    """Against a search over all pairs of tables and of their categories."""

    def alike(one, other):
        numbers = {"01": "1", "1": "1", "1.0": "1", "true": "True", "True": "True"}
        return one != other and numbers.get(one, one) == numbers.get(other, other)

    apart = {
        ((i, one), (j, other))
        for i, first in enumerate(tables)
        for j, second in enumerate(tables)
        for one in first - second
        for other in second - first
        if i < j and alike(one, other)
    }
    found = spelled_apart(dict(enumerate(tables)))
    assert (tuple(found) in apart) if apart else found == ()


def test_spellings_of_many_tables_are_compared_in_a_time_that_grows_as_they_do():
    """In all pairs of 20,000 tables this would be 10 billion categories."""
    tables = {k: [f"k{k % 7}", "01", str(k % 50 + 2)] for k in range(20_000)}
    assert spelled_apart(tables) == ()
    assert spelled_apart(tables | {"last": ["1"]}) == ((0, "01"), ("last", "1"))
