"""Calibration and uncertainty against plain loops, and the command."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedbayes
from fedbayes.metrics import calibrate, evaluate, uncertainty
from fedbayes.tensors import Samples
from tests.test_fusion import command


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60))
def test_calibration_error_by_hand(pairs):
    confidence, right = (np.array(column) for column in zip(*pairs, strict=True))
    expected = 0.0
    for low in range(10):
        inside = (confidence * 10 >= low) & ((confidence * 10 < low + 1) | (low == 9))
        if inside.any():
            gap = abs(right[inside].mean() - confidence[inside].mean())
            expected += inside.mean() * gap
    found = calibrate(torch.tensor(confidence), torch.tensor(right), bins=10)
    assert found.error == pytest.approx(expected, abs=1e-9)
    assert int(found.count.sum()) == len(pairs)


def test_uncertainty_of_known_cases():
    sure, unsure = [1 - 1e-9, 1e-9], [0.5, 0.5]
    agree = torch.tensor([[unsure], [unsure]]).double().log()
    differ = torch.tensor([[sure], [sure[::-1]]]).double().log()
    for draws, information in ((agree, 0.0), (differ, math.log(2))):
        found = uncertainty(draws)
        assert float(found.entropy) == pytest.approx(math.log(2), abs=1e-6)
        assert float(found.information) == pytest.approx(information, abs=1e-6)


def test_impossible_classes_are_no_nan():
    found = uncertainty(torch.tensor([[[0.0, -torch.inf]]]))
    assert float(found.entropy) == 0.0


def test_confidence_is_the_largest_probability():
    logits = torch.tensor([[0.0, 1.0, 3.0], [torch.nan, 0.0, 0.0]])
    found = evaluate(lambda x: logits, Samples(torch.zeros(2, 1), torch.tensor([2, 0])))
    assert float(found.confidence[0]) == pytest.approx(math.exp(3) / (1 + math.e + math.exp(3)))
    assert float(found.confidence[1]) == 0.0


@pytest.mark.parametrize("method", ["fedavg", "mixture", "virtual"])
def test_the_command(method, tmp_path, capsys):
    run = fedbayes.run(
        method={"name": method},
        rounds=3,
        data={"name": "digits", "clients": 4, "partition": "iid"},
        model={"hidden": [16]},
        training={"epochs": 5},
        folder=tmp_path / "run",
    )
    picture = tmp_path / "trust.png"
    assert command("calibrate", tmp_path / "run", "--picture", picture, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["accuracy"] == pytest.approx(run.summary["global_accuracy"])
    assert figures["nll"] == pytest.approx(run.summary["global_nll"], rel=1e-4)
    assert figures["ece"] == pytest.approx(run.summary["global_ece"], abs=1e-3)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert ("entropy_right" in figures) == (method != "fedavg")
    assert command("calibrate", tmp_path / "nothing") == 2
    assert "nothing" in capsys.readouterr().err


def test_personal_models_between_rounds(tmp_path, capsys):
    """With one client nothing happens between its refinement and the end of the round."""
    for method in ("virtual", "local"):
        folder = tmp_path / method
        run = fedbayes.run(
            method={"name": method},
            rounds=2,
            data={"name": "digits", "clients": 1, "partition": "iid"},
            model={"hidden": [16]},
            training={"epochs": 5},
            folder=folder,
        )
        assert command("calibrate", folder, "--personal", "--json") == 0
        figures = json.loads(capsys.readouterr().out)
        assert figures["accuracy"] == pytest.approx(run.summary["local_accuracy"], abs=0.005)
        assert figures["accuracy"] > 0.3
        assert figures["ece"] >= 0
        if method == "local":
            assert figures["information_right"] == pytest.approx(0, abs=1e-5)
        else:
            assert figures["information_wrong"] > figures["information_right"] > 0


def test_personal_models_on_flowers_simulation_and_after_damage(tmp_path, capsys):
    pytest.importorskip("flwr")
    settings = {
        "rounds": 2,
        "data": {"name": "digits", "clients": 2, "partition": "iid"},
        "model": {"hidden": [8]},
        "method": {"name": "virtual", "samples": 2},
    }
    found = []
    for engine in ("sequential", "flower-simulation"):
        fedbayes.run(folder=tmp_path / engine, engine=engine, **settings)
        assert command("calibrate", tmp_path / engine, "--personal", "--json") == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    folder = tmp_path / "sequential"
    for file in (folder / "clients").iterdir():
        file.write_bytes(file.read_bytes()[:100])
    assert command("calibrate", folder, "--personal") == 2
    assert "private state of client 0" in " ".join(capsys.readouterr().err.split())
    for file in (folder / "checkpoints").iterdir():
        file.unlink()
    assert command("calibrate", folder, "--personal") == 2
    assert "has no checkpoint" in " ".join(capsys.readouterr().err.split())


def test_no_personal_models(tmp_path, capsys):
    fedbayes.run(
        rounds=1,
        data={"name": "digits", "clients": 2, "partition": "iid"},
        folder=tmp_path / "run",
    )
    assert command("calibrate", tmp_path / "run", "--personal") == 2
    assert "clients under fedavg keep none" in " ".join(capsys.readouterr().err.split())
