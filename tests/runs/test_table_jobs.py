"""Tables of mixed columns on their way: checked, summed up, trained on, resumed and tried."""

import json
import re
import sys
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import create_engine

import fedbayes
from fedbayes import Config
from fedbayes.cli import main
from fedbayes.data import DataSettings, Preprocessing, load_dataset
from fedbayes.data.tables.summaries import (
    ColumnSummary,
    TableSummary,
    add_summaries,
    read_summary,
    summarize,
)
from fedbayes.errors import ConfigError, DataError, FedbayesWarning
from fedbayes.inputs import add_sums, read_sums
from fedbayes.runs.build import build_data, stored_data
from fedbayes.storage.folder import RunFolder


def patients(rows=120, seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": rng.normal(60, 12, rows).round(1),
            "sex": rng.choice(["m", "f"], rows),
            "ward": rng.choice(["icu", "er", "ward"], rows),
            "label": rng.choice(["died", "lived"], rows),
        }
    )
    frame.loc[rng.random(rows) < 0.2, "age"] = np.nan
    return frame


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the tables of three sites, and one of all their rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDBAYES_CACHE", str(tmp_path / "cache"))
    warnings.simplefilter("ignore", FedbayesWarning)
    frames = [patients(60 + 20 * k, k).assign(site=f"s{k}") for k in range(3)]
    for k, frame in enumerate(frames):
        frame.drop(columns="site").to_csv(f"s{k}.csv", index=False)
    pd.concat(frames).to_csv("all.csv", index=False)
    return tmp_path


def run(*arguments):
    """The exit status of the command line."""
    sys.argv = ["fedbayes", *map(str, arguments)]
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_summaries_add_to_that_of_the_pooled_rows(place):
    datasets = [load_dataset(DataSettings(path=f"s{k}.csv")) for k in range(3)]
    parts = [summarize(dataset, np.arange(dataset.samples)) for dataset in datasets]
    whole = add_summaries(parts, ["a", "b", "c"])
    frame = pd.read_csv("all.csv")
    age, sex, _ = whole.columns
    assert whole.rows == len(frame)
    assert age.missing == frame.age.isna().sum()
    np.testing.assert_allclose(age.mean, frame.age.mean(), rtol=1e-6)
    np.testing.assert_allclose(age.squares, frame.age.var(ddof=0) * frame.age.count(), rtol=1e-5)
    assert sex.categories == frame.sex.value_counts().to_dict()
    # In any order the same.
    back = add_summaries(parts[::-1], ["c", "b", "a"])
    np.testing.assert_allclose(back.columns[0].squares, age.squares, rtol=1e-9)
    assert "s0" not in whole.model_dump_json()


def test_a_federation_encodes_by_the_clients_summaries(place):
    """What three clients' files say is what the pooled training rows would."""
    for k in range(3):
        assert (
            run("data", "summarize", f"s{k}.csv", "-o", f"s{k}.json", "-s", "data.test=0.01") == 0
        )
    reference = patients(30, 9).assign(ward="er", age=50.0)
    reference.to_csv("reference.csv", index=False)
    config = Config.create(
        data={
            "path": "reference.csv",
            "clients": 2,
            "partition": "iid",
            "summaries": [f"s{k}.json" for k in range(3)],
        }
    )
    seen = build_data(config).preprocessing
    whole = add_summaries([read_summary(place / f"s{k}.json") for k in range(3)], list("abc"))
    assert seen.features == (
        *("age", "age (missing)", "sex=f", "sex=m", "ward=er", "ward=icu", "ward=ward"),
    )
    assert seen.mean[0] == pytest.approx(whole.columns[0].mean, rel=1e-6)
    frame = pd.read_csv("all.csv")
    assert seen.mean[0] == pytest.approx(frame.age.mean(), rel=0.02)
    assert seen.std[0] == pytest.approx(frame.age.std(ddof=0), rel=0.05)
    assert seen.mean[1:] == (0.0,) * 6
    assert seen.std[1:] == (1.0,) * 6


def test_center_and_scale_of_a_target_are_of_the_clients_too(place):
    frames = [patients(50, k).assign(label=patients(50, k + 9).age.fillna(1.0)) for k in range(2)]
    for k, frame in enumerate(frames):
        frame.to_csv(f"s{k}.csv", index=False)
        asked = ["-s", "data.test=0.01", "-s", "task.likelihood=gaussian"]
        assert run("data", "summarize", f"s{k}.csv", "-o", f"s{k}.json", *asked) == 0
    source = {"path": "s0.csv", "clients": 2, "summaries": ["s0.json", "s1.json"]}
    target = build_data(Config.create(data=source, task={"likelihood": "gaussian"})).target
    pooled = pd.concat(frames).label
    assert target.center[0] == pytest.approx(pooled.mean(), rel=0.05)
    assert target.scale[0] == pytest.approx(pooled.std(ddof=0), rel=0.1)
    exact = add_summaries([read_summary(place / f"s{k}.json") for k in range(2)], list("ab"))
    assert target.center[0] == exact.target[0].mean
    classes = patients(50)
    classes.to_csv("c.csv", index=False)
    with pytest.raises(
        DataError, match="describe the target label, and this table has the classes"
    ):
        build_data(Config.create(data={**source, "path": "c.csv"}))


@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), min_size=2, max_size=5))
def test_sums_of_squares_add_in_any_division(parts):
    """Chan's formula against NumPy on the pooled values, whatever the division."""
    several = [
        TableSummary(
            rows=len(part) + 1,
            columns=(
                ColumnSummary(
                    name="x",
                    kind="number",
                    missing=1,
                    mean=float(np.mean(part)),
                    squares=float(np.var(part) * len(part)),
                ),
            ),
        )
        for part in parts
    ]
    (found,) = add_summaries(several, list("abcde"[: len(parts)])).columns
    pooled = np.concatenate(parts)
    assert found.missing == len(parts)
    assert found.mean == pytest.approx(pooled.mean(), rel=1e-9, abs=1e-6)
    assert found.squares == pytest.approx(np.var(pooled) * len(pooled), rel=1e-9, abs=1e-2)


def test_spellings_that_differ_are_told_of_the_files_that_have_them():
    def codes(*names):
        column = ColumnSummary(
            name="code", kind="category", missing=0, categories=dict.fromkeys(names, 1)
        )
        return TableSummary(rows=len(names), columns=(column,))

    several = [codes("a"), codes("a", "01"), codes("b", "1")]
    with pytest.raises(DataError, match=r"two has the category .01. of .*, which in three is .1."):
        add_summaries(several, ["one", "two", "three"])


def test_a_summary_counts_once():
    with pytest.raises(ValueError, match=r"summaries lists .*a\.json. twice"):
        DataSettings(path="t.csv", summaries=["a.json", "b.json", "a.json"])


def test_summaries_that_do_not_belong_together_are_refused(place):
    run("data", "summarize", "s0.csv", "-o", "s0.json")
    run("data", "summarize", "s1.csv", "-o", "s1.json", "-s", "data.categorical=age")
    run("data", "summarize", "s1.csv", "-o", "short.json", "-s", "data.drop=ward")
    both = [read_summary(place / name) for name in ("s0.json", "s1.json")]
    with pytest.raises(DataError, match="s1 has column 'age' as category, and s0 as number"):
        add_summaries(both, ["s0", "s1"])
    short = read_summary(place / "short.json")
    for pair in ([both[0], short], [short, both[0]]):
        with pytest.raises(DataError, match="has no column 'ward'"):
            add_summaries(pair, ["one", "two"])
    for name, codes in (("zeros", ["01", "02"]), ("bare", ["1", "02"])):
        frame = pd.DataFrame({"code": codes * 10, "label": list("xxyy") * 5})
        frame.to_csv(f"{name}.csv", index=False)
        run("data", "summarize", f"{name}.csv", "-o", f"{name}.json", "-s", "data.categorical=code")
    apart = [read_summary(place / f"{name}.json") for name in ("zeros", "bare")]
    with pytest.raises(DataError, match=r"zeros has the category '01' of column 'code', .* '1'"):
        add_summaries(apart, ["zeros", "bare"])
    text = (place / "s0.json").read_text()
    for damaged in (
        "{",
        "[]",
        text.replace("number", "word"),
        text.replace('"rows": 45', '"rows": 1'),
    ):
        (place / "bad.json").write_text(damaged)
        with pytest.raises(DataError, match=r"bad\.json is not a summary of a table"):
            read_summary(place / "bad.json")
    with pytest.raises(ConfigError, match="summaries has no effect on digits"):
        Config.create(data={"name": "digits", "summaries": ["s0.json"]})


def test_few_rows_and_rare_categories_are_said_or_left_out(place, capsys):
    patients(12).to_csv("few.csv", index=False)
    assert run("data", "summarize", "few.csv", "-o", "few.json") == 2
    assert "9 training rows, and sums of few rows nearly reveal them" in capsys.readouterr().err
    assert not (place / "few.json").exists()
    frame = patients(100)
    frame.loc[:0, "ward"] = "isolation"
    frame.to_csv("rare.csv", index=False)
    options = ["rare.csv", "-s", "data.test=0.01", "-o"]
    assert run("data", "summarize", *options, "one.json", "--min-rows", 5) == 0
    assert run("data", "summarize", *options, "two.json", "--min-count", 2) == 0
    one, two = (read_summary(place / f"{name}.json").columns[2] for name in ("one", "two"))
    assert one.categories.items() - two.categories.items() == {("isolation", 1)}
    assert one.missing == two.missing == 0


def test_check_says_what_becomes_of_every_column(place, capsys):
    frame = patients(60).assign(
        id=[f"P{k}" for k in range(60)], born="1960-02-29", code=range(60), site=["a", "b"] * 30
    )
    frame.loc[:9, "sex"] = " "
    frame.to_csv("t.csv", index=False)
    assert run("data", "check", "t.csv", "--json", "-s", "data.group=site") == 1
    said = json.loads(capsys.readouterr().out)
    columns = {column["name"]: column for column in said["columns"]}
    assert {name: column["kind"] for name, column in columns.items()} == {
        "age": "number",
        "sex": "category",
        "ward": "category",
        "label": "the classes died, lived",
        "id": "",
        "born": "date",
        "code": "number",
        "site": "2 clients",
    }
    assert columns["age"]["missing"] == int(frame.age.isna().sum())
    assert (columns["age"]["width"], columns["sex"]["width"], columns["ward"]["width"]) == (2, 3, 3)
    assert columns["sex"]["missing"] == 10
    assert "60 different texts" in columns["id"]["refused"]
    assert "different whole number in every row" in columns["code"]["hint"]
    assert "same value in every row" in columns["born"]["hint"]
    assert not said["usable"]
    # Numbers of persons, one of whom was there twice.
    frame["code"] = [1234567890123 + max(k, 1) for k in range(60)]
    frame.to_csv("persons.csv", index=False)
    assert run("data", "check", "persons.csv", "--json") == 1
    (code,) = (c for c in json.loads(capsys.readouterr().out)["columns"] if c["name"] == "code")
    assert code["values"] == ["1234567890124", "1234567890182"]
    assert "different whole number in almost every row" in code["hint"]
    # What it says is what a run does.
    assert run("data", "check", "t.csv", "--json", "-s", "data.drop=id,site") == 0
    said = json.loads(capsys.readouterr().out)
    config = Config.create(
        data={"path": "t.csv", "drop": ["id", "site"], "clients": 2, "test": 0.1}
    )
    assert said["width"] == build_data(config).shape[0]
    assert run("data", "check", "t.csv", "-o", "t.png", "-s", "data.drop=id") == 0
    assert "12 features" in capsys.readouterr().out
    assert (place / "t.png").read_bytes().startswith(b"\x89PNG")
    assert run("data", "check", "t.csv", "-o", "t.txt") == 2
    assert run("data", "check", "t.csv", "-s", "data.label=outcome", "--json") == 1
    assert "no column 'outcome'. Choose the" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "asked", "column", "says"),
    [
        ({"age": [np.inf] + [1.0] * 59}, (), "age", "infinite, or too large .* in row 1 "),
        ({"age": [1.0] * 59 + [1e300]}, (), "age", "infinite, or too large .* in row 60 "),
        ({"part": ["train", "validation"] * 30}, ("data.split=part",), "part", "'validation' in"),
        ({"part": ["train", None] * 30}, ("data.split=part",), "part", "30 of 60 rows have no"),
        ({"part": ["test"] * 60}, ("data.split=part",), "part", "training rows. Leave data."),
        ({"label": ["lived"] * 60}, (), "label", "at least two"),
    ],
)
def test_check_refuses_what_a_run_does(place, capsys, change, asked, column, says):
    """Status 0 was for tables that no run begins with."""
    patients(60).assign(**change).to_csv("t.csv", index=False)
    settings = [part for one in asked for part in ("-s", one)]
    assert run("data", "check", "t.csv", "--json", *settings) == 1
    said = json.loads(capsys.readouterr().out)
    (refused,) = (one for one in said["columns"] if one["refused"])
    assert refused["name"] == column
    assert re.search(says, refused["refused"])
    settings = DataSettings(path="t.csv", **dict(one[5:].split("=") for one in asked))
    with pytest.raises(DataError):
        load_dataset(settings)


def test_rows_of_a_query_are_those_of_the_file(place, capsys, monkeypatch):
    frame = pd.read_csv("all.csv")
    with create_engine(f"sqlite:///{place}/p.db").connect() as connection:
        frame.to_sql("patients", connection, index=False)
        connection.commit()
    source = {"query": "select * from patients", "database": f"sqlite:///{place}/p.db"}
    found = load_dataset(DataSettings(**source, group="site"))
    file = load_dataset(DataSettings(path="all.csv", group="site"))
    assert found.columns == file.columns
    assert sorted(map(str, found.x.tolist())) == sorted(map(str, file.x.tolist()))
    other = {**source, "query": "select * from patients order by age desc"}
    assert load_dataset(DataSettings(**other, group="site")).digest == found.digest
    monkeypatch.setenv("FEDBAYES_DATABASE", source["database"])
    named = load_dataset(DataSettings(query=source["query"], group="site"))
    assert named.digest == found.digest
    for query, says in (
        ("selec 1", "the query to sqlite.* failed: near"),
        ("select age, age from patients", "two columns 'age'"),
        ("select * from patients where age > 1000", "no rows"),
    ):
        with pytest.raises(DataError, match=says):
            load_dataset(DataSettings(query=query))
    with pytest.raises(DataError, match=r"file .*not found: .*gone\.db"):
        load_dataset(DataSettings(query="select 1", database="sqlite:///gone.db"))


def test_no_password_of_a_database_is_kept_or_said(place, capsys, monkeypatch):
    for url in ("postgresql://me:s3cret@host/db", "mysql://me@host/db?password=s3cret"):
        assert run("run", "-s", "data.query=select 1", "-s", f"data.database={url}") == 2
        said = capsys.readouterr().err
        assert "FEDBAYES_DATABASE_PASSWORD" in said
        assert "s3cret" not in said
    monkeypatch.setenv("FEDBAYES_DATABASE", "nothing+there://me:s3cret@host/db")
    assert run("run", "-s", "data.query=select 1", "-o", "r") == 2
    assert "s3cret" not in capsys.readouterr().err
    # A file may be called anything.
    (place / "passes").mkdir()
    database = f"sqlite:///{place}/passes/key.db"
    with create_engine(database).connect() as connection:
        pd.read_csv("all.csv").to_sql("patients", connection, index=False)
        connection.commit()
    monkeypatch.setenv("FEDBAYES_DATABASE", f"{database}?timeout=7")
    monkeypatch.setenv("FEDBAYES_DATABASE_PASSWORD", "s3cret")
    config = Config.create(data={"query": "select * from patients", "clients": 2}, rounds=1)
    folder = fedbayes.run(config, folder=place / "r").folder.path
    kept = b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())
    assert b"select * from patients" in kept
    assert not {one for one in (b"s3cret", b"passes/key.db") if one in kept}
    DataSettings(query="select 1", database=f"{database}?timeout=7")


def test_a_run_keeps_its_columns_and_goes_on_with_them(place, capsys):
    config = {"data": {"path": "all.csv", "group": "site"}, "rounds": 2, "checkpoint_every": 1}
    config["model"] = {"hidden": [4]}
    whole = fedbayes.run(Config.create(**config), folder=place / "whole")
    stopped = fedbayes.run(Config.create(**{**config, "rounds": 1}), folder=place / "part")
    assert stopped.preprocessing == whole.preprocessing
    stored = place / "part" / "config.toml"
    stored.write_text(stored.read_text().replace("rounds = 1\n", "rounds = 2\n"))
    assert run("resume", "part") == 0
    folder = RunFolder(place / "part")
    again = stored_data(folder.config(), folder)
    assert again.preprocessing == whole.preprocessing
    for name, tensor in whole.model.items():
        assert torch.equal(folder.model()[name], tensor)
    frame = pd.read_csv("all.csv")
    seen = whole.predictor()(frame.iloc[:5])
    encoded, odd = whole.preprocessing.encode(frame.iloc[:5])
    assert not odd
    assert torch.equal(whole.predictor()(torch.from_numpy(encoded)), seen)
    # A model file reads other tables by the same columns, whatever they hold.
    assert run("export", "whole", "-o", "m.safetensors") == 0
    new = patients(40, 7).assign(ward="spa")
    new.to_csv("new.csv", index=False)
    capsys.readouterr()
    assert run("evaluate", "m.safetensors", "--json", "-s", "data.path=new.csv") == 0
    said = capsys.readouterr()
    assert "'ward' has a category, unlike all training rows, in 40 rows" in said.err
    truth = new.label.map(whole.preprocessing.classes.index).to_numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answered = whole.predictor()(new).argmax(-1).numpy()
    assert json.loads(said.out)[0]["accuracy"] == pytest.approx((answered == truth).mean())
    for like in ("whole", "m.safetensors"):
        assert run("data", "check", "new.csv", "--like", like, "--json") == 0
        said = json.loads(capsys.readouterr().out)
        columns = {column["name"]: column for column in said["columns"]}
        assert said["width"] == whole.preprocessing.shape[0]
        assert "all training rows, in 40 rows (first in row 1)" in columns["ward"]["hint"]
    new.assign(ward=["", *["spa"] * 39]).to_csv("both.csv", index=False)
    assert run("data", "check", "both.csv", "--like", "whole", "--json") == 0
    hints = [column["hint"] for column in json.loads(capsys.readouterr().out)["columns"]]
    (hint,) = (hint for hint in hints if "'ward'" in hint)
    assert "'ward' is empty, unlike all training rows, in 1 row (first in row 1)" in hint
    assert "'ward' has a category, unlike all training rows, in 39 rows (first in row 2)" in hint
    new.to_csv("semi.csv", index=False, sep=";", decimal=",")
    assert run("data", "check", "semi.csv", "--json") == 0
    apart = json.loads(capsys.readouterr().out)["notes"]
    assert run("data", "check", "semi.csv", "--like", "whole", "--json") == 0
    assert json.loads(capsys.readouterr().out)["notes"] == apart
    assert any("is read with semicolons between columns" in note for note in apart)
    new.drop(columns="label").assign(age="old").to_csv("bare.csv", index=False)
    assert run("data", "check", "bare.csv", "--like", "whole", "--json") == 1
    assert "has 40 cells that are not numbers (first 'old' in row 1" in capsys.readouterr().out
    new.drop(columns="sex").to_csv("bare.csv", index=False)
    assert run("data", "check", "bare.csv", "--like", "whole") == 2
    assert "has no column 'sex'" in capsys.readouterr().err
    assert run("data", "check", "bare.csv", "--like", "all.csv") == 2
    new.assign(age="old").to_csv("new.csv", index=False)
    assert run("evaluate", "m.safetensors", "-s", "data.path=new.csv") == 2
    assert "that are not numbers (first 'old' in row 1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_program_takes_encoded_rows(place):
    config = {"data": {"path": "all.csv", "group": "site"}, "rounds": 1, "model": {"hidden": [4]}}
    model = fedbayes.run(Config.create(**config), folder=place / "r")
    assert run("export", "r", "-o", "m.pt2") == 0
    frame = pd.read_csv("all.csv")
    encoded, _ = model.preprocessing.encode(frame)
    program = torch.export.load(place / "m.pt2").module()
    answered = program(torch.from_numpy(encoded)).log_softmax(-1)
    torch.testing.assert_close(answered, model.predictor()(frame), atol=1e-5, rtol=1e-4)


def test_sums_for_fusion_are_of_what_networks_see(place):
    """Clients' sums by one model's columns add to those of the pooled encoded rows."""
    config = {"data": {"path": "all.csv", "group": "site"}, "rounds": 1, "model": {"hidden": [4]}}
    model = fedbayes.run(Config.create(**config), folder=place / "r")
    assert run("export", "r", "-o", "m.safetensors") == 0
    for k in range(3):
        assert run("sums", "m.safetensors", "--data", f"s{k}.csv", "-o", f"sums{k}.json") == 0
    names = [f"sums{k}.json" for k in range(3)]
    whole = add_sums([read_sums(place / name) for name in names], names)
    assert whole.features == model.preprocessing.features
    seen = model.preprocessing.apply(pd.read_csv("all.csv")).double().numpy()
    mean, std = (np.float64(numbers) for numbers in model.preprocessing.statistics)
    rows = seen * std + mean
    np.testing.assert_allclose(whole.mean, rows.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(whole.covariance, np.cov(rows.T, ddof=0), rtol=1e-3, atol=1e-4)
    # Features of 0 and 1 are categories of the input prior, without a word.
    assert [whole.features[k] for k in whole.categories] == [
        name for name in whole.features if name != "age"
    ]


def test_runs_of_older_versions_have_plain_numbers(place):
    """Their preprocessing has no columns, and a gap no feature of its own."""
    frame = patients(60).assign(dose=np.arange(60.0)).drop(columns=["sex", "ward"])
    frame.to_csv("numbers.csv", index=False)
    config = Config.create(data={"path": "numbers.csv", "clients": 2}, rounds=1)
    fedbayes.run(
        Config.create(data={"path": "numbers.csv", "clients": 2, "missing": "impute"}, rounds=1),
        folder=place / "r",
    )
    folder = RunFolder(place / "r")
    stored = json.loads(folder.preprocessing_file.read_text())
    assert stored.pop("columns") == []
    assert Preprocessing.load(json.dumps(stored)) == folder.preprocessing()
    # Their config says nothing of missing values either, which now would be indicated.
    assert build_data(config).shape == (3,)
    again = stored_data(config, folder)
    assert again.shape == (2,)
    before = stored_data(folder.config(), folder)
    assert torch.equal(again.all_train().x, before.all_train().x)
