"""The card that goes with an exported program."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

import fedbayes
from fedbayes.workflows.serve.export import export
from fedbayes.workflows.serve.model_card import markdown


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("card")
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(50, 5, size=(300, 2)), columns=["age", "b|mi"])
    frame["site"] = rng.choice(["north", "so*uth"], 300)
    frame["ill"] = np.where(frame.age + rng.normal(size=300) > 50, "yes", "no")
    frame.to_csv(folder / "t.csv", index=False)
    data = {"path": str(folder / "t.csv"), "label": ["ill"], "group": "site"}
    return fedbayes.run(folder=folder / "run", data=data, rounds=3)


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("out") / "risk.pt2"
    done = export(run.folder.path, path)
    return done, json.loads(done.cards[0].read_text()), done.cards[1].read_text()


def test_metrics_are_of_each_clients_test_rows(run, exported):
    done, card, text = exported
    assert [path.name for path in done.cards] == ["risk.pt2.card.json", "risk.pt2.card.md"]
    assert card["metrics"]["accuracy"] == pytest.approx(run.summary["global_accuracy"])
    assert card["calibration"]["ece"] == pytest.approx(run.summary["global_ece"])
    frame = pd.read_csv(run.config.data.path)
    partition = run.folder.partition()
    for client, name in enumerate(partition.names):
        rows = partition.test[slice(*partition.test_offsets[client : client + 2])]
        part = frame.iloc[rows]
        right = run.predict_frame(part).predicted == part.ill
        assert card["clients"][name]["test_rows"] == len(rows)
        assert card["clients"][name]["accuracy"] == pytest.approx(right.mean())
        assert f"{right.mean():.4g}" in text
    assert card["metrics"]["test_rows"] == len(partition.test)


@pytest.mark.slow
def test_programs_of_one_name_have_a_card_each(run, tmp_path):
    pytest.importorskip("onnxscript")
    for name in ("risk.pt2", "risk.onnx"):
        export(run.folder.path, tmp_path / name)
    for name in ("risk.pt2", "risk.onnx"):
        assert json.loads((tmp_path / f"{name}.card.json").read_text())["file"] == name
        assert (tmp_path / f"{name}.card.md").read_text().startswith(f"# {name}")


def test_a_card_says_how_columns_are_encoded(tmp_path):
    rng = np.random.default_rng(0)
    days = pd.to_datetime("2020-01-01") + pd.to_timedelta(rng.integers(0, 900, 60), unit="D")
    frame = pd.DataFrame({"seen": days.strftime("%d.%m.%Y"), "sex": rng.choice(["f", "m"], 60)})
    frame["ill"] = rng.choice(["no", "yes"], 60)
    frame.to_csv(tmp_path / "t.csv", index=False)
    data = {"path": tmp_path / "t.csv", "label": "ill", "clients": 2, "partition": "iid"}
    data |= {"dates": ["seen"], "date_format": "%d.%m.%Y"}
    fedbayes.run(folder=tmp_path / "run", data=data, rounds=1)
    done = export(tmp_path / "run", tmp_path / "m.pt2")
    columns = {
        one["name"]: one for one in json.loads(done.cards[0].read_text())["inputs"]["columns"]
    }
    assert columns["seen"]["encoded"] == "days since 1970-01-01, in UTC"
    assert columns["seen"]["date_format"] == "%d.%m.%Y"
    assert columns["sex"]["encoded"] == "an input of 0 or 1 for each category"
    text = done.cards[1].read_text()
    assert "| seen | date, written as %d.%m.%Y | days since 1970-01-01, in UTC |" in text


def test_what_it_says_of_data_and_inputs(run, exported):
    _, card, text = exported
    assert card["data"]["clients"] == ["north", "so*uth"]
    assert card["data"]["samples"] == 300
    assert card["data"]["digest"] == run.preprocessing.digest
    assert [one["name"] for one in card["inputs"]["features"]] == ["age", "b|mi"]
    means = [one["mean"] for one in card["inputs"]["features"]]
    np.testing.assert_allclose(means, run.preprocessing.mean)
    assert card["target"]["names"] == ["no", "yes"]
    assert card["privacy"] is None
    assert "No differential privacy" in text
    assert "so\\*uth" in text  # names mark nothing up
    assert "b\\|mi" in text


def test_its_code_runs(exported, monkeypatch):
    done, card, _ = exported
    monkeypatch.chdir(done.path.parent)
    space = {"x": torch.zeros(5, 2)}
    exec(card["use"], space)
    assert space["answer"].shape == (5, 2)


def test_privacy_and_absent_data_are_told(exported):
    _, card, _ = exported
    spent = {"epsilon": 3.25, "delta": 1e-5, "privacy": {"protects": "all data", "notes": ["so"]}}
    text = markdown(card | {"privacy": spent, "metrics": {}, "calibration": {}})
    assert "Spent: ε = 3.25 at δ = 1e-05, for all data.\n- so" in text
    assert "Not measured" in text
    assert "Not measured." in text


def test_absent_data(run, tmp_path):
    run.config.data.path.rename(tmp_path / "moved.csv")
    try:
        done = export(run.folder.path, tmp_path / "m.pt2")
    finally:
        (tmp_path / "moved.csv").rename(run.config.data.path)
    assert json.loads(done.cards[0].read_text())["metrics"] == {}
