"""Temperatures of model files, from clients' files of sums: `sums --temperature`, `calibrate`."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_softmax

import fedbayes
from fedbayes.core.targets import Target
from fedbayes.data import Preprocessing
from fedbayes.likelihoods.temperature import PRIOR
from fedbayes.models import MLP
from fedbayes.storage.card import Card
from fedbayes.workflows.serve.model_files import read_with_card, write_model
from tests.helpers.command_line import cli, command

FEATURES = ("age", "dose")
MEAN, STD = (50.0, 1.0), (9.0, 0.5)
KINDS = {
    "class": (Target("class", ("no", "yes", "both")), {}),
    "labels": (Target("labels", ("cough", "fever")), {"likelihood": "multilabel"}),
    "real": (Target("real", ("days",), (3.0,), (2.0,)), {"likelihood": "gaussian", "noise": 1.0}),
}


def card_of(kind):
    target, task = KINDS[kind]
    seen = Preprocessing((2,), 1.0, MEAN, STD, target, FEATURES, "sick")
    data = {"labels": list(target.names)} if kind == "labels" else {"label": ["sick"]}
    return Card(seen, {"name": "mlp", "hidden": [6]}, {}, data, 1, task=task)


def network(outputs=3, seed=1):
    torch.manual_seed(seed)
    model = MLP(2, [6], outputs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 4  # too sure
    return model


def write_sites(folder):
    """A model, and rows of three sites that it did not see; the third has a single class."""
    rng = np.random.default_rng(0)
    write_model(folder / "m.safetensors", network().state_dict(), card_of("class"))
    frames = []
    for number, count in enumerate((80, 50, 30)):
        x = np.stack([rng.normal(50, 9, count), rng.normal(1, 0.5, count)], 1).astype(np.float32)
        classes = rng.choice(["no", "yes", "both"], count) if number < 2 else ["both"] * count
        frame = pd.DataFrame(x, columns=FEATURES).assign(sick=classes)
        frame.to_csv(folder / f"{number}.csv", index=False)
        frames.append(frame)
    return pd.concat(frames)


@pytest.fixture
def sites(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_sites(tmp_path)


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    """The same, with files of other kinds and damaged sums."""
    folder = tmp_path_factory.mktemp("bad")
    rows = write_sites(folder).assign(days=1.5).drop(columns="sick")
    rows.to_csv(folder / "days.csv", index=False)
    model, state = folder / "m.safetensors", network().state_dict()
    torch.save(state, folder / "plain.pt")
    write_model(folder / "other.safetensors", network(seed=2).state_dict(), card_of("class"))
    write_model(folder / "real.safetensors", network(1).state_dict(), card_of("real"))
    data = ("--data", folder / "0.csv")
    assert command("posterior", model, *data, "-o", folder / "post.safetensors") == 0
    assert command("sums", model, *data, "--temperature", "-o", folder / "0.json") == 0
    table = json.loads((folder / "0.json").read_text())
    for name, change in (
        ("bad", {"nll": [-n for n in table["nll"]]}),
        ("short", {"nll": table["nll"][1:]}),
        ("old", {"format": "fedbayes-sums-1"}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(table | change))
    (folder / "copy.json").write_bytes((folder / "0.json").read_bytes())
    return folder


def logits(model, frame):
    x = (frame[list(FEATURES)].to_numpy(np.float32) - np.array(MEAN)) / np.array(STD)
    with torch.no_grad():
        return model(torch.tensor(x, dtype=torch.float32)).double().numpy()


def best(loss):
    """T of the least loss under the prior of log T, by SciPy."""
    found = minimize_scalar(
        lambda g: loss(math.exp(g)) + g**2 / (2 * PRIOR**2),
        bounds=(-4, 4),
        method="bounded",
        options={"xatol": 1e-10},
    )
    return math.exp(-found.x)


def calibrated(*options, model="m.safetensors", out="c.safetensors"):
    for number in range(3):
        data = ("--data", f"{number}.csv", "--temperature", "-o", f"{number}.json")
        assert command("sums", model, *data, *options) == 0
    sums = [word for number in range(3) for word in ("--sums", f"{number}.json")]
    assert command("calibrate", model, *sums, "-o", out) == 0


def test_the_temperature_is_that_of_all_rows_together(sites, tmp_path, capsys):
    calibrated()
    assert "from 160 rows of 3 clients" in capsys.readouterr().out
    f = logits(network(), sites)
    y = sites["sick"].map({"no": 0, "yes": 1, "both": 2}).to_numpy()
    expected = best(lambda power: -log_softmax(power * f, axis=1)[np.arange(len(y)), y].sum())
    assert expected > 1.5
    weights, card = read_with_card(tmp_path / "c.safetensors")
    assert card.temperature == pytest.approx(expected, rel=1e-4)
    before, _ = read_with_card(tmp_path / "m.safetensors")
    assert weights.keys() == before.keys()
    assert all(torch.equal(weights[name], before[name]) for name in before)
    assert replace(card, temperature=None) == card_of("class")
    p = fedbayes.load("c.safetensors").predict_proba(sites[list(FEATURES)])
    assert np.allclose(p, np.exp(log_softmax(f / expected, axis=1)), atol=1e-4)
    told = json.loads((tmp_path / "0.json").read_text())
    assert (told["rows"], told["left_out"], len(told["nll"])) == (80, 0, 401)


def test_a_second_calibration_replaces_the_first(sites, capsys):
    calibrated()
    first = read_with_card(Path("c.safetensors"))[1].temperature
    calibrated(model="c.safetensors", out="d.safetensors")
    assert f"instead of {first:.4f}" in capsys.readouterr().out
    assert read_with_card(Path("d.safetensors"))[1].temperature == pytest.approx(first)


def test_every_label_is_a_choice_of_its_own(sites, tmp_path):
    rng = np.random.default_rng(1)
    for number in range(3):
        frame = pd.read_csv(f"{number}.csv").drop(columns="sick")
        two = rng.integers(0, 2, (len(frame), 2))
        frame.assign(cough=two[:, 0], fever=two[:, 1]).to_csv(f"{number}.csv", index=False)
    rows = pd.concat([pd.read_csv(f"{number}.csv") for number in range(3)])
    write_model(tmp_path / "m.safetensors", network(2).state_dict(), card_of("labels"))
    calibrated()
    f, y = logits(network(2), rows), rows[["cough", "fever"]].to_numpy()
    expected = best(lambda power: -np.log(expit(np.where(y, 1, -1) * power * f)).sum())
    assert read_with_card(tmp_path / "c.safetensors")[1].temperature == pytest.approx(
        expected, rel=1e-4
    )


def test_a_program_of_networks_without_cards(sites, tmp_path, capsys):
    """A fused program has its own temperature inside; that of the clients comes on top."""
    rng = np.random.default_rng(2)
    frames = []
    for number in range(3):
        frame = pd.read_csv(f"{number}.csv")
        frame["sick"] = rng.integers(0, 3, len(frame))
        frame.to_csv(f"{number}.csv", index=False)
        frames.append(frame)
        torch.save(network(seed=number).state_dict(), f"{number}.pt")
    rows, files = pd.concat(frames), ["0.pt", "1.pt"]
    mean, std = (",".join(map(str, numbers)) for numbers in (MEAN, STD))
    fuse = ("--shape", "2", "--classes", "3", "--minutes", "0", "--mean", mean, "--std", std)
    assert command("fuse", *files, "-o", "m.pt2", *fuse) == 0
    calibrated("--set", "data.label=sick", model="m.pt2", out="c.pt2")
    capsys.readouterr()
    program = torch.export.load(tmp_path / "m.pt2").module()
    with torch.no_grad():
        f = program(torch.tensor(rows[list(FEATURES)].to_numpy(np.float32))).double().numpy()
    y = rows["sick"].to_numpy()
    expected = best(lambda power: -log_softmax(power * f, axis=1)[np.arange(len(y)), y].sum())
    extra = {"fedbayes.json": ""}
    same = torch.export.load(tmp_path / "c.pt2", extra_files=extra).module()
    assert json.loads(extra["fedbayes.json"])["temperature"] == pytest.approx(expected, rel=1e-4)
    with torch.no_grad():
        again = same(torch.tensor(rows[list(FEATURES)].to_numpy(np.float32))).double().numpy()
    assert np.array_equal(again, f)
    rows.to_csv("all.csv", index=False)
    code, out, _ = cli(
        capsys, "evaluate", "c.pt2", "--set", "data.path=all.csv", "--set", "data.label=sick",
        "--json",
    )  # fmt: skip
    nll = -log_softmax(f / expected, axis=1)[np.arange(len(y)), y].mean()
    assert code == 0
    assert json.loads(out)[0]["nll"] == pytest.approx(nll, rel=1e-4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("calibrate m.safetensors", "m.safetensors is a model file, which is calibrated by its"),
        ("calibrate m.safetensors --sums 0.json", "--sums needs --out"),
        ("calibrate m.safetensors --sums 0.json -o m.safetensors", "would replace one of the"),
        ("calibrate m.safetensors --sums 0.json -o c.pt2", "unknown format"),
        ("calibrate other.safetensors --sums 0.json -o c.pt", "0.json has sums of another file"),
        (
            "calibrate m.safetensors --sums 0.json --sums ./0.json -o c.pt",
            "0.json is the same as 0.json",
        ),
        ("calibrate m.safetensors --sums 0.json --sums copy.json -o c.pt", "copy.json is the same"),
        ("calibrate m.safetensors --sums 0.csv -o c.pt", "0.csv does not contain sums for a"),
        ("calibrate m.safetensors --sums bad.json -o c.pt", "these sums are impossible"),
        ("calibrate m.safetensors --sums short.json -o c.pt", "there are 401 points"),
        ("calibrate m.safetensors --sums old.json -o c.pt", "its format is 'fedbayes-sums-1'"),
        ("calibrate m.safetensors --sums absent.json -o c.pt", "absent.json"),
        ("calibrate m.safetensors --sums 0.json -o c.pt --share 0.3", "--share has no effect"),
        ("calibrate m.safetensors --sums 0.json -o c.pt --personal", "--personal has no effect"),
        ("calibrate . --sums 0.json -o c.pt", "is a folder, not a model file"),
        ("calibrate . -o c.pt", "fedbayes calibrate . --method temperature"),
        ("sums --data 0.csv --temperature -o c.json", "--temperature needs a model"),
        ("sums . --data 0.csv --temperature -o c.json", ". is a folder, not a model file"),
        ("sums m.safetensors --data 0.csv --temperature -o c.json --category age", "--category"),
        ("sums m.safetensors --data 0.csv --temperature -o c.json --epsilon 1", "--epsilon"),
        ("sums m.safetensors --data 0.csv --temperature -o c.json --min-rows 81", "80 rows"),
        ("sums m.safetensors --data 0.csv --temperature -o 0.csv", "0.csv: unknown format"),
        ("sums plain.pt --data 0.csv --temperature -o c.json", "plain.pt has no card"),
        ("sums real.safetensors --data days.csv --temperature -o c.json", "has no temperature"),
        ("sums post.safetensors --data 0.csv --temperature -o c.json", "a client's posterior"),
        ("fuse m.safetensors other.safetensors -o c.pt --sums 0.json", "does not contain sums"),
    ],
)
def test_what_cannot_be_calibrated_is_named_and_nothing_is_written(
    bad, monkeypatch, capsys, words, said
):
    monkeypatch.chdir(bad)
    before = {path: path.read_bytes() for path in bad.iterdir()}
    code, _, err = cli(capsys, *words.split())
    assert code == 2
    assert said in " ".join(err.split())
    assert {path: path.read_bytes() for path in bad.iterdir()} == before
