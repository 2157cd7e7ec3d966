"""Calibration and uncertainty against plain loops, and the command."""

import json
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedbayes
from fedbayes.core.metrics import calibrate, uncertainty
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples
from fedbayes.likelihoods import evaluate
from fedbayes.likelihoods.categorical import Categorical
from fedbayes.likelihoods.multilabel import Multilabel
from fedbayes.likelihoods.trust import Trust, examine
from fedbayes.reports.charts import diagram
from fedbayes.runs.personal import temperature_of
from fedbayes.workflows.calibrate.calibration import plot, summary
from fedbayes.workflows.calibrate.temperature import calibrate_temperature
from tests.helpers.command_line import command


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60))
def test_calibration_error_by_hand(pairs):
    confidence, right = (np.array(column) for column in zip(*pairs, strict=True))
    expected = 0.0
    for low in range(10):
        inside = (confidence > low / 10) & (confidence <= (low + 1) / 10)
        if inside.any():
            gap = abs(right[inside].mean() - confidence[inside].mean())
            expected += inside.sum() / (confidence > 0).sum() * gap
    found = calibrate(torch.tensor(confidence), torch.tensor(right), bins=10)
    assert found.untold == (confidence == 0).sum()
    assert int(found.count.sum()) == len(pairs) - found.untold
    if found.untold < len(pairs):
        assert found.error == pytest.approx(expected, abs=1e-9)
    else:
        assert math.isnan(found.error)


def test_an_edge_belongs_to_the_bin_below():
    confidence = torch.tensor([k / 5 for k in range(1, 6)], dtype=torch.float64)
    found = calibrate(confidence, torch.ones(5, dtype=torch.bool), bins=5)
    assert found.count.tolist() == [1] * 5
    torch.testing.assert_close(found.confidence, confidence)


def test_a_class_that_is_ruled_out_is_a_prediction():
    """A probability of 0 of one class leaves those of the others as they are."""
    logits = torch.tensor([[-torch.inf, 1.0, 3.0], [-torch.inf, 0.0, 0.0], [-torch.inf] * 3])
    likelihood = Categorical(target=Target("class", ("a", "b", "c")))
    terms = likelihood.terms(logits[None], torch.tensor([2, 0, 1]))
    assert terms["correct"].tolist() == [1, 0, 0]
    assert float(terms["nll"][0]) == pytest.approx(math.log1p(math.exp(-2)))
    assert terms["nll"][1:].tolist() == [math.inf, math.inf]
    assert float(terms["confidence"][1]) == pytest.approx(0.5)
    assert float(terms["confidence"][2]) == 0.0


def test_what_is_not_a_number_is_neither_right_nor_sure():
    """Of classes and of labels; the other samples' calibration is as without it."""
    rng = torch.Generator().manual_seed(0)
    for kind, target, y in (
        (Categorical, Target("class", ("a", "b")), torch.randint(2, (40,), generator=rng)),
        (Multilabel, Target("labels", ("a", "b")), torch.randint(2, (40, 2), generator=rng)),
    ):
        likelihood, f = kind(target=target), torch.randn(40, 2, generator=rng)
        y = y if kind is Categorical else y.float()
        clean = examine(likelihood, [(lambda x: x[None], Samples(f[1:], y[1:]))])
        f[0] = torch.nan
        found = examine(likelihood, [(lambda x: x[None], Samples(f, y))])
        assert found.calibration.error == clean.calibration.error
        assert found.calibration.untold == (1 if kind is Categorical else 2)
        assert "no prediction" in diagram(found.calibration).note
        assert summary(found)["not_predicted"] == found.calibration.untold
        assert "not_predicted" not in summary(clean)


@given(st.integers(0, 10**6), st.integers(1, 3000), st.floats(0.1, 5))
def test_thin_bins_are_merged_in_the_diagram(seed, samples, skew):
    """Every bin against its samples picked out by hand; the error is of the bins as defined."""
    rng = np.random.default_rng(seed)
    confidence = rng.beta(skew, 1, samples)
    right = rng.random(samples) < confidence
    whole = calibrate(torch.tensor(confidence), torch.tensor(right))
    found = diagram(whole)
    assert found.error == whole.error
    least = max(10, math.ceil(samples / 100))
    assert len(found.bins) == 1 or min(one.count for one in found.bins) >= least
    assert sum(one.count for one in found.bins) == samples
    for before, after in zip(found.bins, found.bins[1:], strict=False):
        assert before.high <= after.low + 1e-12
    for one in found.bins:
        low, high = round(one.low * 15), round(one.high * 15)
        place = np.ceil(confidence * 15).astype(int) - 1
        inside = (place >= low) & (place < high)
        assert inside.sum() == one.count
        assert right[inside].mean() == pytest.approx(one.accuracy)
        assert confidence[inside].mean() == pytest.approx(one.confidence)


def test_a_single_wrong_sample_is_no_gap():
    confidence = torch.tensor([0.95] * 60 + [0.05])
    found = diagram(calibrate(confidence, confidence > 0.5))
    (one,) = found.bins
    assert one.accuracy == pytest.approx(60 / 61)
    assert "15 bins" in found.note
    assert "fewer than 10 samples merged" in found.note


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_what_is_no_prediction_has_no_entropy(tmp_path):
    rng = torch.Generator().manual_seed(0)
    likelihood = Categorical(target=Target("class", ("a", "b", "c")))
    f, y = torch.randn(3, 40, 3, generator=rng), torch.randint(3, (40,), generator=rng)
    clean = examine(likelihood, [(lambda _: f[:, 1:], Samples(f[0, 1:], y[1:]))])
    f[1, 0, 2] = torch.nan
    found = examine(likelihood, [(lambda _: f, Samples(f[0], y))])
    for name in ("entropy_wrong", "information_wrong"):
        assert summary(found)[name] == pytest.approx(summary(clean)[name])
    plot(found, tmp_path / "a.svg")


def test_the_picture_tells_its_counts(tmp_path):
    confidence = torch.tensor([0.95] * 60 + [0.05])
    right = confidence > 0.5
    found = Trust(
        {},
        Target("class", ("a", "b")),
        right,
        calibration=calibrate(confidence, right),
        right=right,
    )
    plot(found, tmp_path / "a.svg")
    picture = (tmp_path / "a.svg").read_text()
    # Matplotlib says in a comment what each drawn text is.
    assert "<!-- 61 -->" in picture
    assert "<!-- calibration error 0.0500 -->" in picture
    assert "Guo et al." in picture


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
    samples = Samples(torch.zeros(2, 1), torch.tensor([2, 0]))
    likelihood = Categorical(target=Target("class", ("a", "b", "c")))
    confidence = evaluate(likelihood, lambda x: logits[None], samples)["confidence"]
    assert float(confidence[0]) == pytest.approx(math.exp(3) / (1 + math.e + math.exp(3)))
    assert float(confidence[1]) == 0.0


@pytest.mark.parametrize(
    "method", ["fedavg", "mixture", pytest.param("virtual", marks=pytest.mark.slow)]
)
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
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["accuracy"] == pytest.approx(run.summary["global_accuracy"])
    assert metrics["nll"] == pytest.approx(run.summary["global_nll"], rel=1e-4)
    assert metrics["ece"] == pytest.approx(run.summary["global_ece"], abs=1e-3)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert ("entropy_right" in metrics) == (method != "fedavg")
    assert command("calibrate", tmp_path / "run") == 0
    assert re.search("^F1 +0", capsys.readouterr().out, re.MULTILINE), "as run and report call it"
    assert command("calibrate", tmp_path / "nothing") == 2
    assert "nothing" in capsys.readouterr().err


@pytest.mark.slow
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
        metrics = json.loads(capsys.readouterr().out)
        assert metrics["accuracy"] == pytest.approx(run.summary["local_accuracy"], abs=0.005)
        assert metrics["accuracy"] > 0.3
        assert metrics["ece"] >= 0
        if method == "local":
            assert "information_right" not in metrics  # a single draw does not disagree
        else:
            assert metrics["information_wrong"] > metrics["information_right"] > 0


@pytest.mark.slow
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
    assert "clients keep no model between rounds under fedavg, but" in " ".join(
        capsys.readouterr().err.split()
    )


def test_clients_own_temperatures_are_said_to_be_replaced(tmp_path):
    data = {"name": "digits", "clients": 3, "limit": 300, "validation": 0.2}
    done = fedbayes.run(rounds=1, method={"name": "local"}, data=data, folder=tmp_path / "run")
    own = [temperature_of(done.folder, client) for client in range(3)]
    assert calibrate_temperature(tmp_path / "run", personal=True).replaced == tuple(own)
    assert not calibrate_temperature(tmp_path / "run", personal=True).replaced
