"""`fedbayes.fuse` and `fedbayes fuse`: models from files to one model."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fedbayes
from fedbayes.core.targets import Target
from fedbayes.data import DataSettings, Preprocessing, load_dataset
from fedbayes.data.plot import PICTURES
from fedbayes.errors import ConfigError, ModelError
from fedbayes.inference.combination import Combination
from fedbayes.matching import MatchingSettings
from fedbayes.models import MLP, dense_layers, relu_network
from fedbayes.storage.card import Card
from fedbayes.workflows.fuse.job import FusionJob
from fedbayes.workflows.serve.model_files import write_model
from tests.helpers.command_line import command

BEGIN = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}
"""How files of pictures begin."""


@pytest.fixture(scope="module")
def silos():
    """Three networks of different widths, trained apart on parts of digits, and what they saw."""
    dataset = load_dataset(DataSettings())
    x = torch.tensor(np.asarray(dataset.x, dtype=np.float32)).flatten(1) / 16
    y = torch.tensor(np.asarray(dataset.y, dtype=np.int64))
    models, counts = [], []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for index, width in enumerate((20, 25, 30)):
        torch.manual_seed(index)
        model = MLP(64, [width], 10)
        own = torch.arange(index, 1500, 3)
        own = own[(y[own] + index) % 5 != 0]
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for _ in range(150):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[own]), y[own]).backward()
            optimizer.step()
        models.append(model.state_dict())
        counts.append(torch.bincount(y[own], minlength=10).tolist())
    torch.set_num_threads(threads)
    return models, counts, (x[1500:], y[1500:])


@pytest.fixture
def files(silos, tmp_path):
    """The same as files, with the counts and held-out samples."""
    models, counts, (x, y) = silos
    paths = [tmp_path / f"{name}.safetensors" for name in "abc"]
    for path, weights in zip(paths, models, strict=True):
        save_file(weights, path)
    (tmp_path / "counts.json").write_text(json.dumps(counts))
    np.savez(tmp_path / "val.npz", x=x.numpy(), y=y.numpy())
    return tmp_path, [str(path) for path in paths]


def accuracy(weights, samples):
    x, y = samples
    return float((relu_network(dense_layers(weights, "m"), x).argmax(1) == y).double().mean())


def test_fusion_beats_its_inputs(silos):
    models, counts, test = silos
    fusion = fedbayes.fuse(models, counts=counts, gamma=5.0)
    alone = [accuracy(weights, test) for weights in models]
    assert accuracy(fusion.weights, test) > max(alone) + 0.03
    assert list(fusion.weights) == list(models[0])
    (size,) = fusion.sizes
    assert 30 <= size < 75
    fresh = MLP(64, [size], 10)
    fresh.load_state_dict(fusion.weights)
    assert fusion.parameters == sum(p.numel() for p in fresh.parameters())
    for weights, places in zip(models, fusion.assignments.values(), strict=True):
        assert len(set(places[0].tolist())) == len(weights["1.bias"])


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (None, "; with --state FILE, training end to end can be resumed"),
        ("old.state", "; the same command resumes it"),
        ("new.state", ""),
    ],
)
def test_ctrl_c_says_how_to_go_on(files, monkeypatch, capsys, state, said):
    folder, models = files
    (folder / "old.state").touch()
    monkeypatch.chdir(folder)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(FusionJob, "run", interrupted)
    given = () if state is None else ("--state", state)
    asked = ("fuse", *models, "-o", "g.safetensors", *given)
    assert command(*asked, "--method", "function") == 130
    words = " ".join(capsys.readouterr().err.split())
    assert words == f"stopped before g.safetensors was written{said}"
    if state is None:
        assert command(*asked, "--method", "gpi-fnm") == 130, "which has no state"
        assert "--state" not in capsys.readouterr().err


def test_models_that_are_no_state_dicts_are_refused_with_the_way_out(files):
    _, paths = files
    for models, kind in ((paths, "str"), ([nn.Linear(2, 2)] * 2, "Linear")):
        with pytest.raises(ModelError, match=f"model 0 is of type {kind}. .*state_dict"):
            fedbayes.fusion.fuse(models)
    read = [fedbayes.models.read_model(Path(path))[0] for path in paths]
    assert fedbayes.fuse(read).sizes


def test_fused_neurons_are_means_of_their_members(silos):
    """The report can be checked by hand: θ = Σ w / (1 + n) on the inputs, with σ = σ0 = 1."""
    models, counts, _ = silos
    fusion = fedbayes.fuse(dict(zip("abc", models, strict=True)), counts=counts)
    sums = torch.zeros(fusion.sizes[0], 64)
    members = torch.zeros(fusion.sizes[0], 1)
    for name, weights in zip("abc", models, strict=True):
        places = torch.from_numpy(fusion.assignments[name][0])
        sums[places] += weights["1.weight"]
        members[places] += 1
    torch.testing.assert_close(fusion.weights["1.weight"], sums / (1 + members))


def test_pfnm_is_epsilon_zero(silos):
    models, counts, _ = silos
    one = fedbayes.fuse(models, method="pfnm", counts=counts)
    two = fedbayes.fuse(models, epsilon=0.0, counts=counts)
    assert one.method == two.method == "pfnm"
    for name, tensor in one.weights.items():
        assert torch.equal(tensor, two.weights[name])


def test_names_and_types_are_free():
    torch.manual_seed(0)
    one = MLP(6, [5, 5], 3).double().state_dict()
    names = ["enter.weight", "enter.bias", "a.weight", "a.bias", "zz.weight", "zz.bias"]
    two = dict(zip(names, MLP(6, [4, 7], 3).state_dict().values(), strict=True))
    three = {n: t.half() for n, t in MLP(6, [3, 2], 3, bias=False).state_dict().items()}
    fusion = fedbayes.fuse([one, two, three], alternations=3)
    assert list(fusion.weights) == list(one)
    assert all(tensor.dtype == torch.float64 for tensor in fusion.weights.values())
    bare = fedbayes.fuse([three, three])
    assert list(bare.weights) == list(three)
    assert all(tensor.dtype == torch.float16 for tensor in bare.weights.values())


def test_average():
    torch.manual_seed(0)
    models = [MLP(6, [5], 3).state_dict() for _ in range(3)]
    fusion = fedbayes.fuse(models, method="average")
    for name, tensor in fusion.weights.items():
        torch.testing.assert_close(tensor, torch.stack([m[name] for m in models]).mean(0))
    counts = [[3, 0, 1], [2, 0, 0], [0, 1, 3]]
    fusion = fedbayes.fuse(models, method="average", counts=counts)
    for name, tensor in fusion.weights.items():
        wanted = np.average([m[name].numpy() for m in models], axis=0, weights=[4, 2, 4])
        np.testing.assert_allclose(tensor.numpy(), wanted, rtol=1e-5, atol=1e-7)
    with pytest.raises(ModelError, match="no average"):
        fedbayes.fuse([models[0], MLP(6, [4], 3).state_dict()], method="average")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sigma": 0}, "sigma = 0"),
        ({"popularity_cap": -1}, "popularity_cap"),
        ({"temperature": 1}, "It has sigma"),
        ({"method": "best"}, "Choose gpi-fnm"),
        ({"method": "pfnm", "epsilon": 1.0}, "gpi-fnm"),
        ({"starts": 3}, "starts has no effect: alternations is 0"),
        ({"start_gamma": 3.0}, "start_gamma has no effect"),
        ({"method": "average", "sigma": 1.0}, "no setting 'sigma'"),
    ],
)
def test_wrong_settings_are_named(arguments, words):
    with pytest.raises(ConfigError, match=words):
        fedbayes.fuse([MLP(3, [2], 2).state_dict()] * 2, **arguments)


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ([], "no models"),
        ([MLP(3, [2], 2), MLP(3, [2, 2], 2)], "1 has 3 layers and 0 has 2"),
        ([MLP(3, [2], 2), MLP(4, [2], 2)], "1 has 4 inputs"),
        ([MLP(3, [2], 2), MLP(3, [2], 3)], "1 has 3 outputs"),
        ([MLP(3, [2], 2), nn.Conv1d(3, 3, 1)], "belongs to no linear layer"),
    ],
)
def test_models_that_do_not_match_are_named(models, words):
    with pytest.raises(ModelError, match=words):
        fedbayes.fuse([model.state_dict() for model in models])


def carded(silos, folder):
    """The networks as files that say how samples are standardized, and as files that do not.

    Both take (pixel / 16 - 0.3) / 0.4, which is folded into their first layers.
    """
    models, _, (x, y) = silos
    preprocessing = Preprocessing(
        (1, 8, 8), 16.0, (0.3,), (0.4,), Target("class", tuple("0123456789"))
    )
    with_card, without = [], []
    for index, weights in enumerate(models):
        layers = dense_layers(weights, str(index))
        changed = dict(weights)
        (name,) = (n for n, tensor in weights.items() if tensor is layers[0].weight)
        bias = name.replace("weight", "bias")
        changed[name] = weights[name] * 0.4
        changed[bias] = weights[bias] + 0.3 * weights[name].sum(1)
        with_card.append(folder / f"with-{index}.safetensors")
        without.append(folder / f"without-{index}.safetensors")
        write_model(with_card[-1], changed, Card(preprocessing, {}, {"name": "local"}, {}, 1))
        write_model(without[-1], changed)
    raw = x.numpy() * 16
    np.savez(folder / "raw.npz", x=raw.reshape(-1, 1, 8, 8).astype(np.uint8), y=y.numpy())
    np.savez(folder / "seen.npz", x=(raw / 16 - 0.3) / 0.4, y=y.numpy())
    return with_card, without


def test_held_out_samples_are_raw_where_the_models_say_how_they_are_standardized(
    silos, tmp_path, capsys
):
    with_card, without = carded(silos, tmp_path)
    reports, notes = [], []
    for paths, samples in ((with_card, "raw.npz"), (without, "seen.npz")):
        report = tmp_path / "report.json"
        options = ["--select", tmp_path / samples, "--report", report, "--sigma", "1"]
        assert command("fuse", *paths, "-o", tmp_path / "g.safetensors", *options) == 0
        reports.append(json.loads(report.read_text()))
        notes.append(capsys.readouterr().err)
    one, two = reports
    assert one["sizes"] == two["sizes"]
    assert one["settings"] == two["settings"]
    for trial, other in zip(one["trials"], two["trials"], strict=True):
        assert trial == {**other, "nll": pytest.approx(other["nll"], rel=1e-4)}
    assert max(trial["accuracy"] for trial in one["trials"]) > 0.65
    assert "raw.npz are read as raw samples, and standardized" in notes[0]
    assert "seen.npz are used without standardization, because the files of" in notes[1]


def test_missing_values_are_for_raw_samples_alone(silos, tmp_path, capsys):
    with_card, without = carded(silos, tmp_path)
    x = np.full((4, 64), 3.0)
    x[0, 0] = np.nan
    np.savez(tmp_path / "gaps.npz", x=x, y=np.arange(4))
    np.savez(tmp_path / "wide.npz", x=np.ones((4, 65)), y=np.arange(4))
    fuse = ["fuse", "-o", tmp_path / "g.pt", "--grid", "gamma=1", "--sigma0", 1, "--epsilon", 0]
    assert command(*fuse, *with_card, "--select", tmp_path / "gaps.npz") == 0
    for paths, name, words in (
        (without, "gaps.npz", "gaps.npz: NaN or infinite values"),
        (with_card, "wide.npz", "wide.npz: the samples have shape (4, 65)"),
    ):
        assert command(*fuse, *paths, "--select", tmp_path / name) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("suffix", PICTURES)
def test_a_picture_is_what_its_name_says(files, suffix):
    folder, paths = files
    picture = folder / f"p{suffix}"
    assert command("fuse", *paths, "-o", folder / "g.pt", "--picture", picture) == 0
    assert picture.read_bytes().startswith(BEGIN[suffix])
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("name", ["p.webp", "p.jpg", "p"])
def test_a_picture_of_no_known_format_is_refused_before_anything_is_written(files, name, capsys):
    folder, paths = files
    for words in (
        ["fuse", *paths, "-o", folder / "new.pt", "--picture", folder / name],
        ["data", "show", "digits", "-o", folder / name],
        ["calibrate", folder, "--plot", folder / name],
    ):
        assert command(*words) == 2
        assert "ends in .png, .svg or .pdf" in " ".join(capsys.readouterr().err.split())
    assert not (folder / "new.pt").exists()
    assert not (folder / name).exists()


def test_command_writes_all_it_was_asked_for(files, capsys):
    folder, paths = files
    out, report, picture = folder / "g.safetensors", folder / "r.json", folder / "p.png"
    extra = ["--counts", folder / "counts.json", "--report", report, "--picture", picture]
    assert command("fuse", *paths, "-o", out, *extra, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.keys() == {"sizes", "seconds", "parameters"}
    weights = load_file(out)
    assert printed["parameters"] == sum(t.numel() for t in weights.values())
    content = json.loads(report.read_text())
    (layer,) = content["layers"]
    assert content["sizes"] == [layer["size"]] == [len(weights["1.bias"])]
    assert sum(layer["members"]) == 75
    assert list(layer["assignments"]) == content["inputs"] == paths
    assert layer["seconds"] > 0
    assert layer["objective"] == sorted(layer["objective"], reverse=True)
    assert picture.read_bytes().startswith(b"\x89PNG")
    again = folder / "g.pt"
    assert command("fuse", *paths, "-o", again, *extra[:2]) == 0
    for name, tensor in torch.load(again, weights_only=True).items():
        assert torch.equal(tensor, weights[name])
    assert command("evaluate", out, *paths, "--dataset", "digits", "--json") == 0


def test_select_prints_the_grid_and_keeps_the_best(files, silos, capsys):
    folder, paths = files
    out, report = folder / "g.safetensors", folder / "r.json"
    options = ["--select", folder / "val.npz", "--sigma", "1", "--grid", "gamma=0.1,5"]
    options += ["--grid", "epsilon=0,0.3", "--grid", "sigma0=1", "--report", report]
    assert command("fuse", *paths, "-o", out, *options, "--max-neurons", "60") == 0
    assert "chosen" in capsys.readouterr().out
    trials = json.loads(report.read_text())["trials"]
    assert [t["values"] for t in trials] == [
        {"sigma0": 1, "gamma": g, "epsilon": e} for g in (0.1, 5) for e in (0, 0.3)
    ]
    best = accuracy(load_file(out), silos[2])
    eligible = [t["accuracy"] for t in trials if max(t["sizes"]) <= 60]
    error = np.sqrt(max(eligible) * (1 - max(eligible)) / len(silos[2][1]))
    assert best >= max(eligible) - error - 1e-9
    assert command("fuse", *paths, "-o", folder / "no.pt", *options, "--max-neurons", "3") == 2
    assert "at most 3 neurons" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--counts", "absent.json"], "absent.json"),
        (["--counts", "bad.json"], "3 models"),
        (["--select", "absent.npz"], "absent.npz"),
        (["--select", "bad.npz"], "x [n, ...]"),
        (["--select", "wide.npz"], "65 features"),
        (["--grid", "gamma=1"], "--select"),
        (["--select", "val.npz", "--grid", "iterations=1"], "choose"),
        (["--select", "val.npz", "--grid", "gamma=a"], "gamma=0.5"),
        (["--method", "average", "--select", "val.npz"], "no settings to select"),
        (["--method", "average"], "no average"),
        (["--epsilon", "-1"], "epsilon = -1"),
        (["--popularity-cap", "some"], "popularity_cap"),
        (["--report", "nowhere/r.json"], "folder not found"),
        (["nan.pt"], "NaN"),
        (["broken.safetensors"], "damaged"),
        (["a.safetensors"], "given twice"),
        (["a.safetensors", "--method", "kfac"], "given twice"),
        (["deep.pt"], "deep.pt has 3 layers"),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(files, monkeypatch, capsys, options, words):
    folder, paths = files
    monkeypatch.chdir(folder)
    (folder / "bad.json").write_text("[[1, 2], [3, 4]]")
    np.savez(folder / "bad.npz", x=np.ones(3))
    np.savez(folder / "wide.npz", x=np.ones((3, 65)), y=np.zeros(3, dtype=int))
    torch.save({"w": torch.full((2, 2), torch.nan), "v.weight": torch.ones(2, 2)}, "nan.pt")
    torch.save(MLP(64, [3, 3], 10).state_dict(), "deep.pt")
    (folder / "broken.safetensors").write_bytes(b"no model")
    before = sorted(folder.iterdir())
    names = [path.rpartition("/")[2] for path in paths]
    assert command("fuse", *names, *options, "-o", "g.safetensors") == 2
    told = capsys.readouterr().err
    assert told.startswith("error:")
    assert words in told
    assert sorted(folder.iterdir()) == before


def test_one_model_is_nothing_to_fuse(files, capsys):
    folder, paths = files
    assert command("fuse", paths[0], "-o", folder / "g.pt") == 2
    assert "at least 2 models, got 1" in capsys.readouterr().err


def test_an_unknown_method_is_told_with_all_that_there_are(files, capsys):
    folder, paths = files
    assert command("fuse", *paths, "-o", folder / "no.pt", "--method", "fischer") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "did you mean 'fisher'" in said
    for method in ("function", "match", "gpi-fnm", "regmean", "kfac", "permute", "average"):
        assert method in said


def test_an_input_is_never_overwritten(files, capsys):
    _, paths = files
    before = Path(paths[0]).read_bytes()
    assert command("fuse", *paths, "-o", paths[0]) == 2
    assert "one of the inputs" in capsys.readouterr().err
    assert Path(paths[0]).read_bytes() == before


@pytest.mark.parametrize("method", ["gpi-fnm", "match", "function"])
def test_counts_are_never_overwritten_by_a_report(files, tmp_path, capsys, method):
    _, paths = files
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps([[5] * 10] * len(paths)))
    before = counts.read_bytes()
    options = ("--method", method, "--counts", counts, "--report", counts)
    assert command("fuse", *paths, "-o", tmp_path / "g.pt", *options) == 2
    assert "would replace one of the inputs" in " ".join(capsys.readouterr().err.split())
    assert counts.read_bytes() == before
    assert not (tmp_path / "g.pt").exists()


def test_every_setting_of_a_fusion_is_an_option_with_its_words_and_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert command("fuse", "--help") == 0
    shown = "".join(capsys.readouterr().out.replace("│", " ").split())
    for kind in (MatchingSettings, Combination):
        for name, field in kind.model_fields.items():
            default = "" if field.default is None else f"Default: {field.default}."
            help_text = f"{field.description[1:]}. {default}"
            assert f"--{name.replace('_', '-')}" in shown
            assert "".join(help_text.split()) in shown
