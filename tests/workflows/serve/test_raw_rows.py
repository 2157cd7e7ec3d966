"""A model takes raw rows wherever it goes: from the run folder, from files, as a program."""

import json
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_breast_cancer

import fedbayes
from fedbayes.data import Preprocessing
from fedbayes.errors import FedbayesWarning, ModelError, RunError
from fedbayes.models import read_model
from fedbayes.runs import build
from fedbayes.storage.card import Card
from fedbayes.workflows.fuse.posterior_files import FROM_FILES
from fedbayes.workflows.serve.model_files import read_with_card
from tests.helpers.command_line import command


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Scikit-learn's breast cancer in five hospitals, with 30 patients who come later."""
    folder = tmp_path_factory.mktemp("patients")
    frame = load_breast_cancer(as_frame=True).frame
    frame["diagnosis"] = np.where(frame.pop("target") == 1, "benign", "malignant")
    rng = np.random.default_rng(0)
    frame["hospital"] = rng.choice(list("ABCDE"), len(frame))
    frame = frame.iloc[rng.permutation(len(frame))]
    frame[30:].to_csv(folder / "patients.csv", index=False)
    frame[:30].to_csv(folder / "new.csv", index=False)
    data = {"path": str(folder / "patients.csv"), "label": "diagnosis", "group": "hospital"}
    fedbayes.run(
        data={**data, "partition": "natural"},
        training={"lr": 0.1},
        rounds=10,
        folder=folder / "run",
    )
    return folder


@pytest.fixture
def run(place):
    return fedbayes.Result(place / "run")


@pytest.fixture
def new(place):
    return pd.read_csv(place / "new.csv")


def accuracy(logits, frame, run):
    truth = [run.preprocessing.classes.index(name) for name in frame.diagnosis]
    return (np.asarray(logits).argmax(1) == truth).mean()


def test_the_run_folder_says_what_the_network_sees(place, run, new):
    stored = Preprocessing.load((place / "run" / "preprocessing.json").read_text())
    assert stored.classes == ("benign", "malignant")
    assert set(stored.features) == set(new.columns) - {"diagnosis", "hospital"}
    assert stored.label == "diagnosis"
    partition = np.load(place / "run" / "partition.npz")
    frame = pd.read_csv(place / "patients.csv")[list(stored.features)]
    rows = frame.to_numpy()[partition["train"]]
    np.testing.assert_allclose(stored.mean, rows.mean(0), rtol=1e-5)
    np.testing.assert_allclose(stored.std, rows.std(0), rtol=1e-4)


def test_the_predictor_takes_raw_rows_and_needs_no_data(place, run, new, tmp_path):
    assert len(set(partition_names(place))) == 5
    logits = run.predictor()(new)
    assert accuracy(logits, new, run) >= 0.9
    shuffled = new[sorted(new.columns, reverse=True)]
    assert torch.equal(run.predictor()(shuffled), logits)
    array = new[list(run.preprocessing.features)].to_numpy()
    assert torch.equal(run.predictor()(array), logits)
    alone = place / "patients.csv"
    away = alone.rename(tmp_path / "away.csv")
    try:
        assert torch.equal(fedbayes.Result(place / "run").predictor()(new), logits)
    finally:
        away.rename(alone)


def partition_names(place):
    return np.load(place / "run" / "partition.npz")["names"].tolist()


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_a_program_takes_raw_rows(place, run, new, tmp_path, capsys, suffix):
    path = tmp_path / f"m.{suffix}"
    if suffix == "onnx":
        onnxruntime = pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    assert command("export", place / "run", "-o", path) == 0
    assert "on 64 test samples" in capsys.readouterr().out
    raw = new[list(run.preprocessing.features)].to_numpy()
    raw[3, 5] = np.nan
    if suffix == "pt2":
        extra = {"fedbayes.json": ""}
        program = torch.export.load(path, extra_files=extra).module()
        logits, text = program(torch.from_numpy(raw)).detach(), extra["fedbayes.json"]
        torch.testing.assert_close(program(torch.from_numpy(raw[:1])), logits[:1])
    else:
        session = onnxruntime.InferenceSession(path)
        (logits,) = session.run(None, {"samples": raw.astype(np.float32)})
        text = session.get_modelmeta().custom_metadata_map["fedbayes"]
    assert accuracy(logits, new, run) >= 0.9
    predicted = torch.as_tensor(logits).log_softmax(-1)
    np.testing.assert_allclose(predicted, run.predictor()(raw), atol=1e-4)
    card = Card.load(text, "m")
    assert card.preprocessing == run.preprocessing
    assert card.method["name"] == "fedavg"
    assert card.round == 10
    assert "raw" in card.inputs
    assert "logits" in card.outputs


@pytest.mark.parametrize("suffix", ["pt", "pth", "safetensors"])
def test_weights_carry_their_card(place, run, tmp_path, suffix):
    path = tmp_path / f"m.{suffix}"
    assert command("export", place / "run", "-o", path) == 0
    weights, text = read_model(path)
    assert Card.load(text, "m").preprocessing == run.preprocessing
    module = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(30, 100), torch.nn.ReLU(), torch.nn.Linear(100, 2)
    )
    if suffix != "safetensors":
        module.load_state_dict(torch.load(path, weights_only=True))
    assert weights.keys() == run.model.keys()
    assert read_model(place / "run" / "model.safetensors")[1] == text


@pytest.mark.parametrize(
    "arguments",
    [
        ("{run}/model.safetensors",),
        ("m.pt",),
        ("m.pt2",),
        ("plain.safetensors", "--run", "{run}"),
    ],
)
def test_new_rows_are_standardized_as_in_training(
    place, run, new, tmp_path, capsys, monkeypatch, arguments
):
    monkeypatch.chdir(tmp_path)
    from safetensors.torch import save_file

    save_file(run.model, "plain.safetensors")
    for name in ("m.pt", "m.pt2"):
        command("export", place / "run", "-o", name)
    # Half the patients, of one hospital which is not named, columns in another order.
    few = new[new.diagnosis == "malignant"]
    few = few[sorted(few.columns, reverse=True)].drop(columns="hospital").assign(note="x")
    few.to_csv("few.csv", index=False)
    capsys.readouterr()
    given = [str(argument).format(run=place / "run") for argument in arguments]
    assert command("evaluate", *given, "--set", "data.path=few.csv", "--json") == 0
    captured = capsys.readouterr()
    (score,) = json.loads(captured.out)
    assert score["rows"] == len(few)
    assert score["accuracy"] == pytest.approx(accuracy(run.predictor()(few), few, run))
    assert "training" in score["standardized"]
    assert not captured.err
    assert command("evaluate", *given, "--set", "data.path=few.csv") == 0
    assert f"all {len(few)} rows of" in capsys.readouterr().out
    patients = f"data.path={place / 'patients.csv'}"
    assert command("evaluate", *given, "--set", patients) == 0
    assert "the training data" in capsys.readouterr().err


def test_arrays_are_tried_by_a_model_of_a_table(place, run, new, tmp_path, capsys):
    model = place / "run" / "model.safetensors"
    x, y = new[list(run.preprocessing.features)].to_numpy(), new.diagnosis.to_numpy().astype(str)
    np.savez(tmp_path / "new.npz", x=x, y=y)
    np.savez(tmp_path / "short.npz", x=x[:, :5], y=y)
    np.savez(tmp_path / "objects.npz", x=x, y=y.astype(object))
    capsys.readouterr()
    given = ("evaluate", model, "--json", "--set")
    assert command(*given, f"data.path={place / 'new.csv'}") == 0
    assert command(*given, f"data.path={tmp_path / 'new.npz'}") == 0
    captured = capsys.readouterr()
    assert "the order of the model's features is assumed: mean radius" in captured.err
    table, array = map(json.loads, captured.out.splitlines())
    assert table == array
    for name, words in (
        ("short.npz", "samples of shape 5; the model was trained on 30"),
        ("objects.npz", "array 'y' is of dtype object"),
    ):
        assert command(*given, f"data.path={tmp_path / name}") == 2
        told = capsys.readouterr().err
        assert words in " ".join(told.split())
        assert "Get it again" not in told


def test_evaluate_says_what_it_cannot_use(place, run, tmp_path, capsys):
    model, new = place / "run" / "model.safetensors", f"data.path={place / 'new.csv'}"

    def told(*arguments):
        capsys.readouterr()
        assert command("evaluate", *arguments) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "data. Give test data" in told(model)
    assert "limit has no effect" in told(model, "--set", new, "--set", "data.limit=10")
    assert "no effect on the test sets" in told(
        model, "--run", place / "run", "--set", "data.label=x"
    )
    for idle in ("metrics=['brier']", "sed=1"):
        told_of = told(model, "--run", place / "run", "--set", idle)
        assert f"{idle.partition('=')[0]} has no effect on the test sets" in told_of
    assert "trained on 30" in told(model, "--dataset", "digits")
    other = tmp_path / "other.csv"
    pd.read_csv(place / "new.csv").drop(columns="mean area").to_csv(other, index=False)
    lacking = told(model, "--set", f"data.path={other}")
    assert "no column 'mean area', which the model of" in lacking
    assert "combined with them. Set data.features" not in lacking
    (tmp_path / "m.onnx").touch()
    assert "which evaluate cannot run" in told(tmp_path / "m.onnx", "--set", new)
    pd.read_csv(place / "new.csv").assign(diagnosis="well").to_csv(other, index=False)
    assert "well" in told(model, "--set", f"data.path={other}")
    assert "images of at least" in told(model, "--model", "lenet5", "--set", new)


@pytest.mark.parametrize("given", [False, True])
def test_without_a_card_inputs_are_raw_or_as_the_user_says(
    place, run, new, tmp_path, capsys, given
):
    from safetensors.torch import save_file

    save_file(run.model, tmp_path / "plain.safetensors")
    settings = [f"data.path={place / 'new.csv'}", "data.label=diagnosis", "data.group=hospital"]
    words = [word for setting in settings for word in ("--set", setting)]
    mean, std = run.preprocessing.statistics if given else (np.zeros(30), np.ones(30))
    if given:
        words += ["--mean", ",".join(map(repr, mean.tolist()))]
        words += ["--std", ",".join(map(repr, std.tolist()))]
    assert command("evaluate", tmp_path / "plain.safetensors", *words) == 0
    captured = capsys.readouterr()
    assert "all 30 rows of" in captured.out
    assert ("standardized by --mean and --std" if given else "not standardized") in captured.out
    said = " ".join(captured.err.split())
    assert not said or (said.count("note:") == 1 and "predicts one class for all rows" in said)
    assert command("evaluate", tmp_path / "plain.safetensors", *words, "--json") == 0
    (score,) = json.loads(capsys.readouterr().out)
    columns = new[list(run.preprocessing.features)].to_numpy(np.float64)
    x = torch.from_numpy((columns - mean) / std).float()
    one, two = run.model["1.weight"], run.model["3.weight"]
    hidden = torch.relu(x @ one.T + run.model["1.bias"])
    logits = hidden @ two.T + run.model["3.bias"]
    assert score["rows"] == 30
    assert score["accuracy"] == pytest.approx(accuracy(logits, new, run))
    given = words[:6]
    for setting in ("data.limit=5", "data.partition=iid"):
        assert command("evaluate", tmp_path / "plain.safetensors", *given, "--set", setting) == 2
        assert "has no effect" in capsys.readouterr().err


def test_export_without_the_data(place, run, new, tmp_path, capsys):
    data = place / "patients.csv"
    away = data.rename(tmp_path / "away.csv")
    try:
        assert command("export", place / "run", "-o", tmp_path / "m.pt2") == 0
        assert "on 64 random inputs" in " ".join(capsys.readouterr().out.split())
        assert command("calibrate", place / "run") == 2
        assert "test samples of" in " ".join(capsys.readouterr().err.split())
    finally:
        away.rename(data)
    program = torch.export.load(tmp_path / "m.pt2").module()
    raw = torch.from_numpy(new[list(run.preprocessing.features)].to_numpy())
    assert accuracy(program(raw).detach(), new, run) >= 0.9


@pytest.fixture
def short(place, tmp_path):
    """A run of its own on a copy of the data, of two rounds of which one is done."""
    copy = tmp_path / "mine.csv"
    copy.write_bytes((place / "patients.csv").read_bytes())
    config = fedbayes.Config.create(
        data={"path": str(copy), "label": "diagnosis", "group": "hospital", "partition": "natural"},
        rounds=2,
    )
    with fedbayes.Simulation(config, tmp_path / "short") as simulation:
        next(iter(simulation))
    return copy, tmp_path / "short"


@pytest.mark.parametrize("change", ["value", "row", "column", "class"])
def test_data_that_changed_are_not_used_in_silence(short, tmp_path, change):
    copy, folder = short
    frame = pd.read_csv(copy)
    match change:
        case "value":
            frame.loc[3, "mean area"] += 1
        case "row":
            frame = pd.concat([frame, frame[:1]])
        case "column":
            frame = frame.drop(columns="mean area")
        case "class":
            frame.loc[3, "diagnosis"] = "unclear"
    frame.to_csv(copy, index=False)
    with pytest.raises(RunError, match=r"the data have changed since .*short began: .*new run"):
        fedbayes.resume(folder)


def test_results_on_data_that_changed_come_with_a_note(short, capsys):
    copy, folder = short
    fedbayes.resume(folder)
    frame = pd.read_csv(copy)
    frame.loc[3, "mean area"] += 1
    frame.to_csv(copy, index=False)
    for arguments in (
        ("calibrate", folder),
        ("report", folder, "-o", folder / "r.html"),
        ("evaluate", folder / "model.safetensors", "--run", folder),
        ("export", folder, "-o", folder / "m.pt2"),
    ):
        capsys.readouterr()
        assert command(*arguments) == 0
        told = " ".join(capsys.readouterr().err.split())
        assert told.count("the data have changed since") == 1, arguments
    run = fedbayes.Result(folder)
    with pytest.warns(FedbayesWarning, match="some values"):
        build.stored_data(run.config, run.folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FedbayesWarning)
        build.runtime(str(folder), "cpu")  # workers do not say it once more


def test_an_old_run_folder_works_from_the_data(place, run, new, tmp_path, capsys):
    import shutil

    old = tmp_path / "old"
    shutil.copytree(place / "run", old)
    (old / "preprocessing.json").unlink()
    assert torch.equal(fedbayes.Result(old).predictor()(new), run.predictor()(new))
    assert command("export", old, "-o", tmp_path / "m.pt2") == 0


def test_a_suffix_that_names_no_format_is_refused(place, tmp_path, capsys):
    folder, model = place / "run", place / "run" / "model.safetensors"
    for arguments, formats in (
        (("export", folder, "-o", tmp_path / "m.h5"), ".onnx"),
        (("export", folder, "-o", tmp_path / "model"), ".safetensors"),
        (("fuse", model, model, "-o", tmp_path / "m.h5"), ".safetensors"),
        (("fuse", model, model, "-o", tmp_path / "m.pt", "--report", tmp_path / "r.txt"), ".html"),
        (("fuse", model, model, "-o", tmp_path / "m.pt", "--picture", tmp_path / "p.gif"), ".png"),
        (("calibrate", folder, "--plot", tmp_path / "p.txt"), ".png"),
        (("report", folder, "-o", tmp_path / "r.pdf"), ".html"),
        (("plot", folder, "-o", tmp_path / "r.doc"), ".pdf"),
        (("data", "show", "digits", "-o", tmp_path / "r.doc"), ".pdf"),
    ):
        capsys.readouterr()
        assert command(*arguments) == 2, arguments
        told = " ".join(capsys.readouterr().err.split())
        assert "Use a file name that ends in" in told
        assert formats in told
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def alone(place):
    """The hospitals' own models."""
    return fedbayes.run(
        method={"name": "local"},
        data={"path": str(place / "patients.csv"), "label": "diagnosis", "group": "hospital"},
        training={"lr": 0.1},
        rounds=5,
        folder=place / "alone",
    )


def test_a_client_has_its_own_model(alone, place, new, tmp_path, capsys):
    folder = place / "alone"
    client = partition_names(place).index("C")
    wanted = alone.predictor(client="C")(new)
    assert accuracy(wanted, new, alone) >= 0.9
    assert torch.equal(alone.predictor(client=client)(new), wanted)
    assert not torch.equal(alone.predictor(client="D")(new), wanted)
    for name in ("m.pt2", "m.safetensors"):
        assert command("export", folder, "-o", tmp_path / name, "--client", "C") == 0
    program = torch.export.load(tmp_path / "m.pt2").module()
    raw = torch.from_numpy(new[list(alone.preprocessing.features)].to_numpy())
    torch.testing.assert_close(program(raw).log_softmax(-1), wanted, atol=1e-5, rtol=1e-5)
    weights, text = read_model(tmp_path / "m.safetensors")
    (file,) = (folder / "clients").glob(f"{client:07d}-*")
    for name, tensor in read_model(file)[0].items():
        assert torch.equal(weights[name], tensor)
    assert Card.load(text, "m").client == "C"
    capsys.readouterr()
    assert command("calibrate", folder, "--client", "C", "--json") == 0
    metrics = json.loads(capsys.readouterr().out)
    part = np.load(folder / "partition.npz")
    rows = part["test"][slice(*part["test_offsets"][client : client + 2])]
    own = pd.read_csv(place / "patients.csv").iloc[rows]
    expected = accuracy(alone.predictor(client="C")(own), own, alone)
    assert metrics["accuracy"] == pytest.approx(expected)


def test_models_that_are_not_there_are_told(alone, place, tmp_path, capsys):
    out = tmp_path / "m.safetensors"
    for arguments, words in (
        (("export", place / "alone", "-o", out), "Choose one with --client: A, B, C, D, E"),
        (("calibrate", place / "alone"), "Choose one with --client: A, B, C, D, E"),
        (("calibrate", place / "alone", "--temperature"), "Add --personal"),
        (("conformal", place / "alone"), "Add --personal"),
        (
            ("export", place / "alone", "-o", out, "--client", "F"),
            "has no client 'F'. Its clients are A, B",
        ),
        (("export", place / "run", "-o", out, "--client", "C"), "under fedavg"),
        (("calibrate", place / "run", "--client", "C"), "under fedavg"),
        (("calibrate", place / "alone", "--client", "C", "--personal"), "Give only one of them"),
    ):
        capsys.readouterr()
        assert command(*arguments) == 2
        assert words in " ".join(capsys.readouterr().err.split())
    with pytest.raises(RunError, match="only clients have models"):
        alone.predictor()
    assert not out.exists()


def test_clients_states_are_known_by_their_run(alone, place, new, tmp_path, capsys):
    """What no card says of a file in `clients/`, its run does."""
    files = sorted((place / "alone" / "clients").iterdir())
    fused = tmp_path / "fused.safetensors"
    assert command("fuse", *files, "-o", fused, "--minutes", "0") == 0
    card = Card.load(read_model(fused)[1], "fused")
    assert card.preprocessing == alone.preprocessing
    assert card.method == {"name": "fuse function", "inputs": "gaussian"}
    assert command("fuse", *files, "-o", fused, "-m", "gpi-fnm") == 0
    card = Card.load(read_model(fused)[1], "fused")
    assert card.preprocessing == alone.preprocessing
    assert card.method == {"name": "fuse gpi-fnm"}
    assert not card.client
    few = tmp_path / "few.csv"
    shuffled = new.iloc[:7, ::-1]
    shuffled[shuffled.diagnosis == "benign"].assign(note="x").to_csv(few, index=False)
    rows = pd.read_csv(few)
    capsys.readouterr()
    setting = f"data.path={few}"
    assert command("evaluate", fused, *files, "--set", setting, "--json") == 0
    captured = capsys.readouterr()
    assert not captured.err
    scores = {score["name"]: score for score in json.loads(captured.out)}
    for client, file in enumerate(files):
        score = scores[str(file)]
        logits = alone.predictor(client=client)(rows)
        truth = [alone.preprocessing.classes.index(name) for name in rows.diagnosis]
        assert score["rows"] == len(rows)
        assert score["accuracy"] == pytest.approx(accuracy(logits, rows, alone))
        assert score["nll"] == pytest.approx(
            float(-logits[range(len(truth)), truth].mean()), rel=1e-4
        )
        assert "training" in score["standardized"]
    assert scores[str(fused)]["rows"] == len(rows)


def test_a_private_state_that_is_no_network_is_refused(tmp_path, capsys):
    fedbayes.run(
        method={"name": "scaffold"}, data={"clients": 3}, rounds=1, folder=tmp_path / "run"
    )
    state = next((tmp_path / "run" / "clients").iterdir())
    assert command("evaluate", state, "--run", tmp_path / "run") == 2
    assert "a network: with scaffold" in " ".join(capsys.readouterr().err.split())
    config = fedbayes.Config.create(method={"name": "local"}, engine="flower-simulation")
    (tmp_path / "run" / "config.toml").write_text(config.dump())
    with pytest.raises(
        ModelError, match=r"at their nodes\. Export a client's network with fedbayes"
    ):
        read_with_card(state)
    config = fedbayes.Config.create(method={"name": "local"}, engine="flower")
    (tmp_path / "run" / "config.toml").write_text(config.dump())
    with pytest.raises(ModelError, match="is a ticket, not a network"):
        read_with_card(state)


def test_what_was_standardized_otherwise_is_not_fused_in_silence(place, alone, tmp_path, capsys):
    files = [tmp_path / f"{name}.safetensors" for name in "CD"]
    for file in files:
        assert command("export", place / "alone", "-o", file, "--client", file.stem) == 0
    capsys.readouterr()
    fused = tmp_path / "fused.safetensors"
    assert command("fuse", *files, "-o", fused, "-m", "gpi-fnm") == 0
    assert capsys.readouterr().err == f"note: {FROM_FILES}\n"
    assert Card.load(read_model(fused)[1], "m").preprocessing == alone.preprocessing
    new = f"data.path={place / 'new.csv'}"
    assert command("evaluate", fused, *files, "--set", new, "--json") == 0
    scores = {score["name"]: score for score in json.loads(capsys.readouterr().out)}
    assert scores[str(fused)]["rows"] == 30
    assert scores[str(fused)]["accuracy"] >= 0.8
    assert "average of the inputs" in scores
    frame = pd.read_csv(place / "patients.csv")
    other = tmp_path / "other.csv"
    frame.assign(**{"mean area": frame["mean area"] * 2}).to_csv(other, index=False)
    fedbayes.run(
        data={"path": str(other), "label": "diagnosis", "group": "hospital"},
        rounds=1,
        folder=tmp_path / "other",
    )
    third = tmp_path / "other" / "model.safetensors"
    assert command("fuse", files[0], third, "-o", tmp_path / "none.pt") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "different standardizations" in said
    before = fused.read_bytes()
    assert command("fuse", files[0], third, "-o", fused, "-m", "gpi-fnm") == 2
    assert "different standardizations" in " ".join(capsys.readouterr().err.split())
    assert fused.read_bytes() == before
    assert command("evaluate", files[0], third, "--set", new) == 0
    assert "another standardization" in " ".join(capsys.readouterr().err.split())


def test_numbers_of_a_file_without_a_card_are_not_guessed(place, run, new, tmp_path, capsys):
    from safetensors.torch import save_file

    plain, carded = tmp_path / "plain.safetensors", place / "run" / "model.safetensors"
    save_file(run.model, plain)
    data = ("--set", f"data.path={place / 'new.csv'}")
    numbers = ("--mean", "0.5", "--std", "2")
    for words, told in (
        ((carded, plain, *data), "does not describe its standardization, unlike the first"),
        ((carded, *data, *numbers), "--mean and --std have no effect: the models describe"),
        ((carded, *data, *numbers, "--run", place / "run"), "out --mean and --std"),
        ((plain, *data, "--mean", "1,2"), "--mean has 2 numbers, and samples of 30 have 30"),
        ((plain, *data, "--std", "0"), "be above 0"),
    ):
        label = ("--set", "data.label=diagnosis", "--set", "data.group=hospital")
        assert command("evaluate", *words, *(() if words[0] is carded else label)) == 2
        assert told in " ".join(capsys.readouterr().err.split())
    assert command("evaluate", carded, plain, *data, *numbers, "--json") == 0
    capsys.readouterr()
    # Of a missing value nobody says what stands for it, but for a mean that is given.
    gaps = tmp_path / "gaps.csv"
    frame = new.drop(columns="hospital")
    frame.iloc[0, frame.columns.get_loc(run.preprocessing.features[0])] = np.nan
    frame.to_csv(gaps, index=False)
    settings = (f"data.path={gaps}", "data.label=diagnosis", "data.missing=impute")
    words = ("evaluate", plain, *(word for one in settings for word in ("--set", one)))
    assert command(*words) == 2
    assert "missing values, and the model has no rule" in capsys.readouterr().err
    assert command(*words, *numbers) == 0
    assert command(*words, "--set", "data.missing=drop") == 0
