"""`fedbayes sums`: a client's rows as sums, and what `fedbayes fuse` makes of several."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from fedbayes.core.targets import Target
from fedbayes.data import Preprocessing
from fedbayes.inputs import read_sums
from fedbayes.inputs.spectra import read_spectra
from fedbayes.models import MLP
from fedbayes.storage.card import Card
from fedbayes.workflows.serve.model_files import write_model
from tests.helpers.command_line import command

NAMES = ("age", "grade", "dose")


@pytest.fixture
def silos(tmp_path, monkeypatch):
    """Three tables, columns of one in another order, and a network of each; all rows together."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    frames = []
    seen = Preprocessing(
        (3,), 1.0, (50.0, 1.0, 0.1), (9.0, 1.0, 0.3), Target("class", ("no", "yes")), NAMES, "sick"
    )
    card = Card(seen, {"name": "mlp", "hidden": [4]}, {}, {}, 1)
    for number, count in enumerate((30, 40, 25)):
        frame = pd.DataFrame(
            {
                "age": rng.normal(50, 9, count).astype(np.float32),
                "grade": rng.integers(0, 3, count),
                "dose": rng.normal(0.1, 0.3, count).astype(np.float32),
                "sick": rng.permutation(["no", "yes"] * count)[:count],
            }
        )
        columns = ["sick", "dose", "age", "grade"] if number == 1 else list(frame.columns)
        frame[columns].to_csv(f"{number}.csv", index=False)
        frames.append(frame)
        torch.manual_seed(number)
        write_model(tmp_path / f"{number}.safetensors", MLP(3, [4], 2).state_dict(), card)
    return pd.concat(frames)


def sums(number, *options):
    data = ("--data", f"{number}.csv", "-o", f"{number}.json")
    return command("sums", f"{number}.safetensors", *data, *options)


def test_sums_of_clients_add_to_those_of_all_rows(silos, capsys):
    for number in range(3):
        assert sums(number, "--category", "grade", "--json") == 0
    told = json.loads(capsys.readouterr().out.splitlines()[0])
    assert told == {
        "path": "0.json",
        "rows": 30,
        "features": list(NAMES),
        "categories": ["grade"],
    }
    found = [read_sums(path) for path in map(_path, range(3))]
    x = silos[list(NAMES)].to_numpy(np.float64)
    np.testing.assert_allclose(sum(one.total for one in found), x.sum(0), rtol=1e-6)
    np.testing.assert_allclose(sum(one.products for one in found), x.T @ x, rtol=1e-6)
    assert {one.features for one in found} == {NAMES}
    counts = silos["grade"].value_counts()
    assert sum(one.categories[1][2.0] for one in found) == counts[2]
    files = [f"{number}.safetensors" for number in range(3)]
    several = [word for number in range(3) for word in ("--sums", f"{number}.json")]
    options = ("-o", "g.pt2", "--minutes", "0", "--report", "r.json", "--show-inputs", "x.png")
    assert command("fuse", *files, *options, *several) == 0
    told = json.loads(_path("r").read_text())
    assert told["inputs"]["assumes"] == "a Gaussian copula, from sums of 95 rows; categories: grade"
    assert told["sent"] == ["their weights", "sums over their data"]
    assert "files of sums" not in " ".join(told["notes"])
    assert command("fuse", *files, *options, *several[:4]) == 0
    alone = "2 files of sums for 3 models: the inputs are drawn by the sums of those clients only"
    assert alone in json.loads(_path("r").read_text())["notes"]


def test_inputs_in_other_units_are_noticed(silos):
    files = [f"{number}.safetensors" for number in range(3)]
    for scale, told in ((1, False), (100, True)):
        silos.assign(dose=silos["dose"] * scale).to_csv("new.csv", index=False)
        asked = ("--minutes", 0, "--inputs", "new.csv", "--report", "r.json")
        assert command("fuse", *files, "-o", "h.safetensors", *asked) == 0
        notes = json.loads(_path("r").read_text())["notes"]
        assert any("inputs: values of 'dose' are far" in note for note in notes) == told


def _path(name):
    from pathlib import Path

    return Path(f"{name}.json")


def test_without_a_model_all_columns_but_the_label_are_summed(silos):
    assert command("sums", "--data", "0.csv", "-o", "a.json", "--set", "data.label=sick") == 0
    assert sums(0) == 0
    assert _path("a").read_text() == _path("0").read_text()
    drop = ("--set", "data.label=sick", "--set", 'data.drop=["dose"]')
    assert command("sums", "--data", "0.csv", "-o", "b.json", *drop) == 0
    assert read_sums(_path("b")).features == ("age", "grade")


def test_rows_with_missing_values_are_left_out_and_it_is_said(silos, capsys):
    frame = pd.read_csv("0.csv")
    frame.loc[[3, 7], "dose"] = np.nan
    frame.to_csv("0.csv", index=False)
    assert sums(0) == 0
    assert "2 of 30 rows are left out" in " ".join(capsys.readouterr().err.split())
    assert read_sums(_path(0)).count == 28
    frame.iloc[:12].to_csv("0.csv", index=False)
    assert sums(0) == 0, "ten are left"
    frame.iloc[:11].to_csv("0.csv", index=False)
    assert sums(0) == 2
    assert "9 rows without missing values" in " ".join(capsys.readouterr().err.split())


def test_few_rows_are_allowed_where_they_are_asked_for(silos, capsys):
    pd.read_csv("0.csv").iloc[:3].to_csv("0.csv", index=False)
    assert sums(0) == 2
    assert "--min-rows" in capsys.readouterr().err
    assert not _path(0).exists()
    assert sums(0, "--min-rows", "3") == 0
    assert "most as many rows as features" in " ".join(capsys.readouterr().err.split())
    assert read_sums(_path(0)).count == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--data 0.csv -o s.txt", "ends in .json"),
        ("--data gone.csv -o s.json", "gone.csv"),
        ("--data 0.csv -o s.json", "has no column 'label'"),
        ("0.safetensors --data 0.csv -o s.json --category age", "30 different values in 30 rows"),
        ("0.safetensors --data 0.csv -o s.json --category grad", "did you mean 'grade'"),
        ("--data images.npz -o s.json --category grade", "no effect on images and signals"),
        ("--data images.npz -o s.json --min-rows 30", "has 20 samples"),
        ("--data images.npz -o s.json --epsilon 1", "--epsilon works only with texts"),
        ("--data 0.csv -o 0.csv", "ends in .json"),
    ],
)
def test_mistakes_are_told_and_leave_no_file(silos, capsys, words, said, tmp_path):
    np.savez("images.npz", x=np.zeros((20, 1, 2, 2), np.float32), y=np.arange(20) % 2)
    before = set(tmp_path.iterdir())
    assert command("sums", *words.split()) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert set(tmp_path.iterdir()) == before


def test_a_value_of_one_row_is_told_of(silos, capsys):
    frame = pd.read_csv("0.csv")
    frame.loc[0, "grade"] = 7
    frame.to_csv("0.csv", index=False)
    assert sums(0, "--category", "grade") == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "1 of the 4 values of 'grade' is in only one row" in said


def test_the_way_out_of_a_single_gap_is_one_that_was_not_asked_for(silos, capsys):
    frame = pd.read_csv("0.csv")
    frame.loc[0, "dose"] = np.nan
    frame.to_csv("0.csv", index=False)
    asked = ("sums", "--data", "0.csv", "-o", "a.json", "--set", "data.label=sick")
    assert command(*asked) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "is in only one row" in said
    assert "--category" not in said
    assert command(*asked, "--set", "data.missing=impute") == 0
    assert "in only one row" not in " ".join(capsys.readouterr().err.split())
    assert read_sums(_path("a")).features == ("age", "grade", "dose")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda: None, "0.json is given twice"),
        (lambda: _other("1", ["dose", "age", "grade"]), "All clients need the same"),
        (lambda: [_other(n, ["age", "dose", "grade"]) for n in "01"], "'dose' instead of"),
    ],
)
def test_sums_that_do_not_belong_together_are_refused(silos, capsys, spoil, said):
    assert sums(0) == sums(1) == 0
    spoil()
    files = [f"{number}.safetensors" for number in range(3)]
    named = ("--sums", "0.json", "--sums", "0.json" if "twice" in said else "1.json")
    assert command("fuse", *files, "-o", "g.pt2", "--minutes", "0", *named) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not _path("g").with_suffix(".pt2").exists()


def _other(name, features):
    content = json.loads(_path(name).read_text())
    _path(name).write_text(json.dumps({**content, "features": features}))


@pytest.fixture
def signals(tmp_path, monkeypatch):
    """Three clients' signals of two channels in volts, and a network of each."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    seen = Preprocessing(
        (2, 24), 1.0, (300.0, -4.0), (25.0, 3.0), Target("class", ("no", "yes")), label="sick"
    )
    card = Card(seen, {"name": "mlp", "hidden": [8]}, {}, {}, 1)
    for number in range(3):
        x = 300 + 25 * rng.standard_normal((30, 2, 24)).astype(np.float32)
        x[:, 1] = -4 + 3 * rng.standard_normal((30, 24))
        np.savez(f"{number}.npz", x=x, y=np.array(["no", "yes"])[np.arange(30) % 2])
        torch.manual_seed(number)
        write_model(tmp_path / f"{number}.safetensors", MLP(48, [8], 2).state_dict(), card)


def test_signals_in_any_unit_are_fused_by_their_spectra(signals, capsys):
    for number in range(3):
        file, data = f"{number}.safetensors", f"{number}.npz"
        assert command("sums", file, "--data", data, "-o", f"{number}.json") == 0
    assert "mean and spectra of 30 samples of 2 x 24" in " ".join(capsys.readouterr().out.split())
    x = np.load("1.npz")["x"]
    np.testing.assert_allclose(read_spectra(_path("1")).total, x.sum(0, np.float64), rtol=1e-6)
    files = [f"{number}.safetensors" for number in range(3)]
    options = ("-o", "g.safetensors", "--minutes", "0", "--report", "r.json")
    assert command("fuse", *files, *options) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "'noise' are moved to the data's mean" in said, said
    several = [word for number in range(3) for word in ("--sums", f"{number}.json")]
    assert command("fuse", *files, *options, *several) == 0
    told = json.loads(_path("r").read_text())
    assert told["inputs"]["assumes"].endswith("with the mean and spectra of 90 samples")
    assert told["sent"] == ["their weights", "sums over their data"]
    assert command("fuse", *files, *options, *several, "--inputs", "0.npz") == 2
    assert "have no effect on '0.npz'" in " ".join(capsys.readouterr().err.split())
    assert command("fuse", *files, *options, "--sums", "0.json", "--sums", "0.json") == 2
    assert "0.json is given twice" in " ".join(capsys.readouterr().err.split())
