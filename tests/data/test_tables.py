"""CSV files in the forms that programs write, and what is wrong with some of them."""

import numpy as np
import pandas as pd
import pytest

from fedbayes import Config
from fedbayes.data import DataSettings, load_dataset
from fedbayes.data.tables.check import check_table
from fedbayes.errors import ConfigError, DataError

FRAME = pd.DataFrame(
    {"a": [1.5, -2.25, 3.0, 1e-3] * 3, "b": range(12), "label": ["x", "y", "x", "z"] * 3}
)


def load(file, **asked):
    return load_dataset(DataSettings(path=file, **asked))


@pytest.fixture
def plain(tmp_path):
    FRAME.to_csv(tmp_path / "plain.csv", index=False)
    return load(tmp_path / "plain.csv")


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
@pytest.mark.parametrize("decimal", [".", ","])
def test_other_delimiters_and_decimal_commas(tmp_path, plain, delimiter, decimal):
    file = tmp_path / "other.csv"
    FRAME.to_csv(file, index=False, sep=delimiter, decimal=decimal)
    own = load(file)
    assert own.digest == plain.digest
    (note,) = own.notes
    assert ("with decimal commas in a" in note) == (decimal == ",")
    assert not plain.notes


def test_a_comma_is_a_delimiter_though_cells_hold_others(tmp_path, plain):
    frame = FRAME.assign(note=["one; two | three", '"x", y;', "a\nb", "c\td;\u2028e"] * 3)
    frame.to_csv(tmp_path / "t.csv", index=False)
    assert load(tmp_path / "t.csv", drop=("note",)).digest == plain.digest
    # A single column and a label in the place of many: nothing but the comma divides it.
    (tmp_path / "long.csv").write_text("a,label\n" + "1,x\n2,y\n" * 20_000)
    assert load(tmp_path / "long.csv").samples == 40_000


@pytest.mark.slow
def test_a_header_longer_than_what_is_looked_at(tmp_path):
    names = [f"expression of gene {k}" for k in range(3_500)]
    x = np.arange(14_000.0).reshape(4, -1)
    frame = pd.DataFrame(x, columns=names).assign(label=list("xyxy"))
    frame.to_csv(tmp_path / "wide.csv", index=False, sep="\t")
    own = load(tmp_path / "wide.csv")
    assert own.features == tuple(names)
    np.testing.assert_array_equal(own.x, x)


def test_a_byte_order_mark_and_spaces_in_the_header(tmp_path, plain):
    text = FRAME.to_csv(index=False).replace("a,b,label", "\ufeffa, b , label")
    (tmp_path / "t.csv").write_text(text, "utf-8")
    assert load(tmp_path / "t.csv").digest == plain.digest


def test_row_numbers_are_no_feature(tmp_path, plain):
    FRAME.to_csv(tmp_path / "t.csv")
    own = load(tmp_path / "t.csv")
    assert own.digest == plain.digest
    assert "numbers the rows, so it is left out" in own.notes[0]
    asked = load(tmp_path / "t.csv", features=("Unnamed: 0", "a"))
    assert asked.x[:, 0].tolist() == list(range(12))


def test_columns_of_odd_types_that_are_numbers(tmp_path):
    frame = FRAME.assign(flag=pd.Series([True, None, False] * 4, dtype=object), none=None)
    for file in (tmp_path / "t.csv", tmp_path / "t.parquet"):
        frame.to_csv(file, index=False) if file.suffix == ".csv" else frame.to_parquet(file)
        own = load(file)
        np.testing.assert_array_equal(own.x[:3, 2], [1, np.nan, 0])
        assert np.isnan(own.x[:, 3]).all()
        assert "none has no values, so" in own.notes[0]
        with pytest.raises(DataError, match="every row has a missing value"):
            load(file, missing="drop")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "t.csv is empty"),
        ("a,b,label\n", "t.csv has no rows"),
        ("a,a,label\n1,2,x\n", "two columns 'a'"),
        ("a,b,label\n0,1,2,x\n1,3,4,y\n", "more values than its first line has names"),
        ("a,b,label\n1,2,x\n2,?,y\n3,?,y\n", r"column 'b' has 2 cells .*\(first '\?' in row 2\)"),
        ("a,b,label\n1,2,x\n2,3\n", "1 of 2 rows have no label"),
        ("a,b,label\n1,2,x\n2,3,x\n", "all rows are of the class 'x'"),
        ("label\nx\ny\n", "no columns besides label"),
        ("a,lable\n1,x\n2,y\n", r"no column 'label' \(did you mean 'lable'\?\)"),
    ],
)
def test_a_file_that_is_wrong_says_how(tmp_path, text, says):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=says):
        load(tmp_path / "t.csv")


def test_messages_have_words_and_no_python(tmp_path):
    (tmp_path / "t.csv").write_bytes("a,label\né,x\n".encode("latin-1") + b"\x81")
    with pytest.raises(DataError, match="neither UTF-8 nor Western European text: byte 12"):
        load(tmp_path / "t.csv")
    when = FRAME.assign(when=pd.Timestamp("2020-03-01"))
    when.to_parquet(tmp_path / "t.parquet")
    with pytest.raises(DataError, match="'2020-03-01 00:00:00' in row 1"):
        load(tmp_path / "t.parquet", numeric="when")
    FRAME.assign(many=[[1, 2]] * 12).to_parquet(tmp_path / "t.parquet")
    with pytest.raises(DataError, match="column 'many' has a cell with several values in row 1"):
        load(tmp_path / "t.parquet")
    x, y = np.zeros((4, 2)), np.arange(3)
    np.savez(tmp_path / "t.npz", x=x, y=y, groups=np.arange(2))
    with pytest.raises(DataError, match="differ in number: 4 samples, 3 labels, 2 groups"):
        load(tmp_path / "t.npz")
    np.savez(tmp_path / "t.npz", x=x, y=np.eye(4))
    with pytest.raises(DataError, match="exactly one of y0, y1, y2, y3 is 1 in every row"):
        load(tmp_path / "t.npz")
    FRAME.assign(photo=[{"bytes": b"", "path": None}] * 12).to_parquet(tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"pictures.*Set data.features = \['photo'\]"):
        load(tmp_path / "t.parquet")
    FRAME.assign(part=["train", None] * 6).to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(DataError, match="6 of 12 rows have no value in column 'part'"):
        load(tmp_path / "t.csv", split="part")
    np.savez(tmp_path / "t.npz", x=np.full((2, 3, 4), np.inf), y=np.arange(2))
    with pytest.raises(DataError, match="sample 0 has an infinite value at position 0, 0"):
        load(tmp_path / "t.npz")


def test_features_are_taken_in_their_order(tmp_path):
    frame = FRAME.assign(id="p", site=["s", "t"] * 6)
    frame.to_csv(tmp_path / "t.csv", index=False)
    own = load(tmp_path / "t.csv", features=("b", "a"))
    assert own.features == ("b", "a")
    np.testing.assert_allclose(own.x, FRAME[["b", "a"]])
    with pytest.raises(
        DataError, match=r"no column 'aa' \(did you mean 'a'\?\). Set data.features to"
    ):
        load(tmp_path / "t.csv", features=("b", "aa"))
    with pytest.raises(
        DataError, match=r"no column 'idd' \(did you mean 'id'\?\). Set data.drop to"
    ):
        load(tmp_path / "t.csv", drop=("idd", "site"))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"features": ("a", "b"), "drop": ("c",)}, "exclude each other"),
        ({"features": ("a", "kind"), "label": "kind"}, "'kind', which is the label"),
        ({"features": ("a", "a")}, "'a' twice"),
        ({"classes": ("x", "x")}, "'x' twice"),
    ],
)
def test_features_that_contradict(asked, says):
    with pytest.raises(ValueError, match=says):
        DataSettings(path="t.csv", **asked)


def test_a_setting_without_effect_is_refused(tmp_path):
    with pytest.raises(ValueError, match="group has no effect on mnist"):
        DataSettings(name="mnist", group="writer")
    np.savez(tmp_path / "t.npz", x=np.zeros((4, 2)), y=[0, 1, 0, 1], group=[0, 0, 1, 1])
    with pytest.raises(DataError, match=r"no columns, so data\.group has no effect"):
        load(tmp_path / "t.npz", group="group")
    FRAME.to_csv(tmp_path / "t.csv", index=False)
    for name in ("t.npz", "t.csv"):
        with pytest.raises(DataError, match=f"{name} has no picture files, so data.size has"):
            load(tmp_path / name, size=8)
    (note,) = load(tmp_path / "t.npz").notes
    assert "the array 'group' is not read (did you mean 'groups'?)" in note


def test_files_of_one_part_have_the_same_columns(tmp_path):
    FRAME.to_csv(tmp_path / "train-0.csv", index=False)
    FRAME.rename(columns={"b": "c"}).to_csv(tmp_path / "train-1.csv", index=False)
    with pytest.raises(DataError, match=r"train-1\.csv has no column 'b', which .*train-0"):
        load(tmp_path)
    FRAME.assign(c=1).to_csv(tmp_path / "train-1.csv", index=False)
    own = load(tmp_path)
    assert own.samples == 24
    assert "c left out" in own.notes[0]


def test_files_of_several_clients_are_one_table_with_a_column_of_clients(tmp_path):
    north = FRAME.assign(sex=["m", "f"] * 6)
    south = FRAME.assign(a=FRAME.a + 1, sex=["f", "d"] * 6)
    whole = pd.concat([north.assign(ward="north"), south.assign(ward="south")])
    whole.to_csv(tmp_path / "whole.csv", index=False)
    north.to_csv(tmp_path / "north.csv", index=False)
    south[south.columns[::-1]].to_csv(tmp_path / "south.csv", index=False, sep=";", decimal=",")
    several = tmp_path / "north.csv", tmp_path / "south.csv"
    data = Config.create(data=several).data
    assert (data.path, *data.more) == several
    own, wanted = load(several[0], more=several[1:]), load(tmp_path / "whole.csv", group="ward")
    assert own.columns == wanted.columns
    assert own.group_names == wanted.group_names == ("north", "south")
    np.testing.assert_array_equal(own.x, wanted.x)
    np.testing.assert_array_equal(own.y, wanted.y)
    np.testing.assert_array_equal(own.groups, wanted.groups)
    *_, last = check_table(data).columns
    assert (last.role, last.kind) == ("group", "2 clients")
    with pytest.raises(ConfigError, match="2 files is a client, so group = 'sex' has no"):
        load(several[0], more=several[1:], group="sex")
    south.drop(columns="b").to_csv(several[1], index=False)
    with pytest.raises(DataError, match=r"south\.csv has no column 'b', which .*north\.csv has"):
        load(several[0], more=several[1:])
    (tmp_path / "other").mkdir()
    north.to_csv(tmp_path / "other" / "north.csv", index=False)
    with pytest.raises(DataError, match="both have the name 'north'"):
        load(several[0], more=(tmp_path / "other" / "north.csv",))


@pytest.fixture
def wards(tmp_path):
    """Three tables of 12, 24 and 36 rows, as frames to change, and what reads them."""
    frames = {
        name: pd.concat([FRAME] * k, ignore_index=True)
        for k, name in enumerate(("north", "south", "west"), 1)
    }

    def read(**settings):
        files = [tmp_path / f"{name}.csv" for name in frames]
        for file, frame in zip(files, frames.values(), strict=True):
            frame.to_csv(file, index=False)
        notes = load(files[0], more=files[1:], **settings).notes
        return [note.replace(f"{tmp_path}/", "") for note in notes]

    return frames, read


def test_rows_are_numbered_within_the_file_that_they_are_in(wards):
    frames, read = wards
    frames["west"].loc[3, "label"] = None
    with pytest.raises(DataError, match=r"/west\.csv: 1 of 36 rows have no label, first row 4\."):
        read()
    frames["south"].loc[[5, 8], "label"] = None
    two = r"/south\.csv: 2 of 24 rows .* first row 6; .*/west\.csv: 1 of 36 .* row 4\. Leave"
    with pytest.raises(DataError, match=two):
        read()
    for frame in frames.values():
        frame["label"] = "x"
    frames["west"]["b"] = frames["west"].b.astype(float)
    frames["west"].loc[[4, 6], "b"] = np.inf
    infinite = r"/west\.csv: column 'b' is inf.*in row 5 \(2 such .*row 5 belongs to client 'west'"
    with pytest.raises(DataError, match=infinite):
        read()


def test_empty_cells_are_counted_in_each_file(wards):
    """One note, whose counts are those that were taken out."""
    frames, read = wards
    frames["north"].loc[[1, 2], "a"] = None
    frames["north"].loc[4, "b"] = None
    frames["west"]["a"] = None
    (note,) = read()
    assert note.startswith(
        "north.csv: 2 of 12 cells of a are empty, 1 of 12 of b; west.csv: all 36 of a. Numbers"
    )
    assert not read(missing="impute")
    for frame in frames.values():
        frame[["c", "d", "e"]] = np.arange(3.0 * len(frame)).reshape(-1, 3)
        frame.loc[0, ["a", "b", "c", "d", "e"]] = None
    (note,) = read()
    assert "; south.csv: 1 of 24 of a, 1 of 24 of b, 1 of 24 of c and 2 more columns; " in note


def test_a_class_of_one_row_may_be_a_typo(wards):
    frames, read = wards
    assert not read()
    frames["south"].loc[6, "label"] = "xx"
    assert read() == ["1 row of south.csv has class 'xx', which no other row has: is it a typo?"]
    assert not read(classes=("x", "y", "z", "xx"))


def test_a_check_shows_the_first_and_the_last_day_and_the_ends_of_numbers_in_text(tmp_path):
    days = pd.date_range("2021-06-01", periods=40, freq="17D")  # ends on 2023-03-26
    frame = pd.DataFrame({"day": days.strftime("%d.%m.%Y"), "code": [f" {k}" for k in range(40)]})
    frame.loc[3, "day"] = None
    frame.assign(label=["x", "y"] * 20).to_parquet(tmp_path / "days.parquet")
    asked = {"dates": ("day",), "date_format": "%d.%m.%Y", "numeric": ("code",)}
    day, code, _ = check_table(DataSettings(path=tmp_path / "days.parquet", **asked)).columns
    assert day.values == ("01.06.2021", "26.03.2023")
    assert [value.strip() for value in code.values] == ["0", "39"]


@pytest.mark.parametrize("decimal", [".", ","])
def test_a_word_among_numbers_may_be_a_code_of_missing_values(tmp_path, decimal):
    file = tmp_path / "codes.csv"
    frame = pd.DataFrame({"a": [k + 0.25 for k in range(40)], "label": ["x", "y"] * 20})
    frame.loc[[3, 9], "a"] = None
    frame.to_csv(file, index=False, sep=";", decimal=decimal, na_rep="k.A.")
    with pytest.raises(DataError, match=r"column 'a' has .*'k\.A\.'.*na_values"):
        load(file)
    own = load(file, na_values=("k.A.",))
    assert np.isnan(own.x[:, 0]).nonzero()[0].tolist() == [3, 9]


@pytest.mark.parametrize(
    ("train", "test", "says"),
    [
        (["01", "02", "A1"], ["1", "2"], "'label' has numbers .*has text in .*train"),
        (["1", "2"], ["1", "x", "2"], r"'label' .* \(first 'x' in row 2\).*has numbers in .*train"),
    ],
)
def test_labels_of_test_files_are_of_the_kind_of_the_others(tmp_path, train, test, says):
    """Classes 01 and 1 were two, and no test sample was of a class that was trained on."""
    for part, names in (("train", train), ("test", test)):
        rows = [f"{k},{name}" for k, name in enumerate(names * 6)]
        (tmp_path / f"{part}.csv").write_text("\n".join(["a,label", *rows]))
    with pytest.raises(DataError, match=f"test.csv: column {says}.* save both as .parquet"):
        load(tmp_path)
    for part, names in (("train", train), ("test", test)):
        frame = pd.DataFrame({"a": range(6 * len(names)), "label": names * 6})
        frame.to_parquet(tmp_path / f"{part}.parquet")
        (tmp_path / f"{part}.csv").unlink()
    assert set(load(tmp_path).classes) == {*train, *test}


@pytest.mark.parametrize("suffix", [".csv", ".xlsx"])
@pytest.mark.parametrize(
    ("ids", "clients"),
    [
        (["01", "1", "001"], ("001", "01", "1")),  # three hospitals, and not one
        (["10", "9", "2"], ("2", "9", "10")),  # in the order of numbers
        (["10", "9.0", " 2"], ("2", "9", "10")),
        (["0", "0.5", "-1"], ("-1", "0", "0.5")),
        (["10", "9", "a"], ("10", "9", "a")),
        (["true", "false", "true"], ("False", "True")),
    ],
)
def test_clients_are_told_apart_by_leading_zeros(tmp_path, suffix, ids, clients):
    frame = FRAME.assign(site=ids * 4)
    file = tmp_path / f"t{suffix}"
    frame.to_csv(file, index=False) if suffix == ".csv" else frame.to_excel(file, index=False)
    dataset = load(file, group="site")
    assert {name.lower() for name in dataset.group_names} == {name.lower() for name in clients}
    if "true" not in ids:
        assert dataset.group_names == clients


@pytest.mark.parametrize("delimiter", [",", ";", None])
@pytest.mark.parametrize(
    ("labels", "named"),
    [
        (["01", "1", "02"], ["01", "1", "02"]),
        (["07", "08", "10"], ["07", "08", "10"]),
        (["2", "10", "1.0"], ["2", "10", "1"]),
        (["true", "FALSE", "true"], ["True", "False", "True"]),
    ],
)
def test_classes_are_told_apart_by_leading_zeros(tmp_path, delimiter, labels, named):
    frame = pd.DataFrame({"a": np.arange(12), "label": labels * 4})
    file = tmp_path / f"t{'.csv' if delimiter else '.xlsx'}"
    if delimiter:
        frame.to_csv(file, index=False, sep=delimiter)
    else:
        frame.to_excel(file, index=False)
    dataset = load(file)
    assert [dataset.classes[k] for k in dataset.y] == named * 4


def test_labels_with_zeros_are_found_among_classes_that_are_named(tmp_path):
    """As categories are: `01` is 1 where nothing else is."""
    file = tmp_path / "t.csv"
    rows = [f"{k},{label}" for k, label in enumerate(["01", "02", "2"] * 4)]
    file.write_text("\n".join(["a,label", *rows]))
    assert load(file, classes=["1", "2"]).y.tolist() == [0, 1, 1] * 4
    with pytest.raises(DataError, match=r"unknown class 2\. The classes are 01, 02, 002"):
        load(file, classes=["01", "02", "002"])


def test_numbers_with_zeros_are_targets_as_they_are(tmp_path):
    file = tmp_path / "t.csv"
    rows = [f"{k};{label}" for k, label in enumerate(["007", "010,5", "1"] * 4)]
    file.write_text("\n".join(["a;label", *rows]))
    dataset = load_dataset(DataSettings(path=file), ("real",))
    assert dataset.y[:3].tolist() == [[7.0], [10.5], [1.0]]


@pytest.mark.parametrize("delimiter", [",", ";", None])
def test_columns_of_categories_are_read_cell_by_cell(tmp_path, delimiter):
    """Codes keep their zeros, numbers their name, whatever the other cells of the column are."""
    names = []
    for odd in ("A1", ""):
        frame = pd.DataFrame(
            {
                " code ": ["01", "02", "1", "2.0", "1E5", odd],
                "dose": ["0.50", "1", "2.0", "+3", "", " 1"],
                "flag": ["TRUE", "true", "False", "", "TRUE", "true"],
                "label": list("xyxyxy"),
            }
        )
        if delimiter == ";":
            frame["dose"] = frame.dose.str.replace(".", ",", regex=False)
        file = tmp_path / f"t{len(names)}{'.csv' if delimiter else '.xlsx'}"
        if delimiter:
            frame.to_csv(file, index=False, sep=delimiter)
        else:
            frame.to_excel(file, index=False)
        names.append(
            {c.name: c.categories for c in load(file, categorical=["code", "dose", "flag"]).columns}
        )
    for found in names:
        assert found["dose"] == ("0.5", "1", "2", "3")
        assert found["flag"] == ("False", "True")
    assert set(names[0]["code"]) == {"01", "02", "1", "1E5", "2", "A1"}
    assert set(names[1]["code"]) == {"01", "02", "1", "1E5", "2"}
