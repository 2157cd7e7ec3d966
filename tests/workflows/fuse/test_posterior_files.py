"""`fedbayes posterior`: from a model and data to a file, and back."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from scipy.optimize import minimize_scalar
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import nn
from torch.nn import functional

import fedbayes
from fedbayes.core.files import write_beside
from fedbayes.core.seals import sealed
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples
from fedbayes.data.preprocessing import Preprocessing
from fedbayes.errors import ModelError
from fedbayes.fusion.curvature import posterior
from fedbayes.fusion.posteriors import kfac
from fedbayes.likelihoods import build_likelihood
from fedbayes.models import MLP, dense_layers, read_model, relu_network
from fedbayes.storage.card import Card
from fedbayes.testing import assert_identical
from fedbayes.workflows.fuse import network_fusing
from fedbayes.workflows.fuse.posterior_files import read_posterior, write_posterior
from fedbayes.workflows.serve.inputs_told import TOLD, InputsTold
from tests.helpers.command_line import command
from tests.helpers.eyes import Tied
from tests.helpers.toy_models import residual

THREE = build_likelihood("categorical", Target("class", ("0", "1", "2")))


@pytest.fixture
def client(tmp_path):
    """An MLP with names of its own, and data of three classes that it sees as they are."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 6)).astype(np.float32)
    y = rng.permutation(np.arange(40) % 3)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    torch.manual_seed(0)
    module = MLP(6, [5], 3)
    names = ["in.weight", "in.bias", "out.weight", "out.bias"]
    tensors = [parameter.detach().clone() for parameter in module.parameters()]
    save_file(dict(zip(names, tensors, strict=True)), tmp_path / "m.safetensors")
    return tmp_path, module, Samples(torch.from_numpy(x), torch.from_numpy(y))


def test_the_file_holds_what_was_computed(client, capsys):
    folder, module, samples = client
    out = folder / "client.safetensors"
    asked = [folder / "m.safetensors", "--data", folder / "data.npz", "-o", out, "--json"]
    assert command("posterior", *asked, "--mean", "0", "--std", "1") == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["samples"], done["layers"]) == (40, ["in", "out"])
    assert done["bytes"] == out.stat().st_size
    found, card = read_posterior(out)
    assert card is None
    wanted = posterior(module, THREE, samples)
    names = {"in": "1", "out": "3"}
    for layer, own in names.items():
        torch.testing.assert_close(found.factors[layer].inputs, wanted.factors[own].inputs)
        torch.testing.assert_close(found.factors[layer].outputs, wanted.factors[own].outputs)
        for kind in ("weight", "bias"):
            key, theirs = f"{layer}.{kind}", f"{own}.{kind}"
            assert torch.equal(found.weights[key], wanted.weights[theirs])
            torch.testing.assert_close(found.diagonal[key], wanted.diagonal[theirs])
    assert found.samples == 40
    assert found.counts.tolist() == torch.bincount(samples.y).tolist()
    weights, _ = read_model(out)  # whoever wants weights alone finds them
    for name, tensor in load_file(folder / "m.safetensors").items():
        assert torch.equal(weights[name], tensor)
    torch.testing.assert_close(kfac([found, found]), weights)


def test_such_files_can_be_fused_by_their_weights(client):
    folder, module, samples = client
    other = MLP(6, [5], 3)
    for name, network in (("a", module), ("b", other)):
        write_posterior(folder / f"{name}.safetensors", posterior(network, THREE, samples))
    files = [folder / "a.safetensors", folder / "b.safetensors"]
    out = folder / "g.safetensors"
    assert command("fuse", *files, "-o", out, "--method", "average") == 0
    for key, tensor in load_file(out).items():
        torch.testing.assert_close(tensor, (module.state_dict()[key] + other.state_dict()[key]) / 2)


def test_posteriors_of_different_targets_have_no_average(client, capsys):
    """As wide as one another, and of other classes."""
    folder, module, samples = client
    first, other = folder / "a.safetensors", folder / "b.safetensors"
    seen = Preprocessing((6,), 1.0, (0.0,) * 6, (1.0,) * 6, THREE.target)
    card, found = Card(seen, {}, {}, {}, 1), posterior(module, THREE, samples)
    write_posterior(first, found, card)
    turned = replace(card.preprocessing.target, names=("2", "1", "4"))
    write_posterior(other, found, replace(card, preprocessing=replace(seen, target=turned)))
    assert command("fuse", first, other, "-o", folder / "g.safetensors", "--method", "kfac") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "predicts the classes 2, 1, 4" in said
    assert not (folder / "g.safetensors").exists()


@pytest.mark.parametrize("network", [[], ["--model", "mlp", "--set", "model.hidden=[5]"]])
@pytest.mark.parametrize("method", ["average", "match", "permute"])
def test_counts_in_them_are_used_as_those_of_a_file_and_that_is_said(
    client, method, network, capsys
):
    folder, _, samples = client
    numbers, plain, told = [], [], []
    for name, rows in (("a", 30), ("b", 10)):
        own = MLP(6, [5], 3)
        seen = Samples(samples.x[:rows], samples.y[:rows])
        told.append(folder / f"{name}.safetensors")
        plain.append(folder / f"plain-{name}.safetensors")
        write_posterior(told[-1], posterior(own, THREE, seen))
        save_file(own.state_dict(), plain[-1])
        numbers.append(torch.bincount(seen.y, minlength=3).tolist())
    (folder / "counts.json").write_text(json.dumps(numbers))
    options = ["--method", method, *network, "--shape", "6", "--classes", "3"]
    options = options if network or method == "permute" else options[:2]
    counted = ["--counts", folder / "counts.json"]
    results = []
    for number, asked in enumerate(([*told], [*plain, *counted], [*plain])):
        out = folder / f"g{number}.safetensors"
        assert command("fuse", *asked, "-o", out, *options) == 0
        printed = "".join(capsys.readouterr())
        assert ("counts of samples are those in the files" in printed) == (number == 0)
        results.append(load_file(out))
    assert_identical(results[0], results[1])
    assert any(not torch.equal(results[0][key], results[2][key]) for key in results[0])


def test_counts_in_them_are_heard_in_function_space(client):
    folder = client[0]
    files = [folder / "a.safetensors", folder / "b.safetensors"]
    for out in files:
        asked = ("posterior", folder / "m.safetensors", "--data", folder / "data.npz", "-o", out)
        assert command(*asked, "--mean", "0", "--std", "1") == 0
    options = ("--method", "function", "--minutes", "0", "--posterior", "last-layer")
    report = folder / "r.json"
    assert command("fuse", *files, "-o", folder / "g.pt2", *options, "--report", report) == 0
    told = json.loads(report.read_text())
    assert told["posterior"]["samples"] == 80
    assert told["sent"][1:] == [
        "counts of samples",
        "curvatures of their weights, which are not used",
    ]


def test_inputs_are_scaled_as_the_model_says_or_as_is_given(client, capsys):
    folder, module, samples = client
    out, data = folder / "client.safetensors", folder / "data.npz"
    asked = ["posterior", folder / "m.safetensors", "--data", data, "-o", out]
    means = "1,2,3,4,5,6"
    assert command(*asked, "--mean", means, "--std", "2") == 0
    x = (samples.x - torch.arange(1.0, 7.0)) / 2
    wanted = posterior(module, THREE, Samples(x, samples.y))
    found, _ = read_posterior(out)
    torch.testing.assert_close(found.factors["in"].inputs, wanted.factors["1"].inputs)
    capsys.readouterr()
    assert command(*asked) == 0  # by their own, which is told
    assert "does not describe its standardization" in capsys.readouterr().err
    run = fedbayes.run(
        rounds=1,
        data={"path": str(data), "clients": 2, "partition": "iid"},
        model={"name": "mlp", "hidden": [4]},
        folder=folder / "run",
    )
    model = folder / "run" / "model.safetensors"
    assert command("posterior", model, "--data", data, "-o", out) == 0
    assert "note:" not in capsys.readouterr().err
    found, card = read_posterior(out)
    assert card.model["hidden"] == [4]
    own = MLP(6, [4], 3)
    own.load_state_dict(run.model)
    seen = Samples(run.preprocessing.apply(samples.x), samples.y)
    wanted = posterior(own, THREE, seen)
    torch.testing.assert_close(found.factors["1"].inputs, wanted.factors["1"].inputs)
    assert command("posterior", model, "--data", data, "-o", out, "--mean", "0", "--std", "1") == 2
    assert "--mean and --std have no effect" in capsys.readouterr().err


def test_samples_of_another_scale_have_a_way_in(client, capsys):
    """Digits are divided by 16; an NPZ of the same numbers does not say so."""
    from sklearn.datasets import load_digits

    folder = client[0]
    run = fedbayes.run(rounds=1, data={"clients": 2}, folder=folder / "run")
    x, y = load_digits(return_X_y=True)
    np.savez(folder / "digits.npz", x=x[:50].reshape(-1, 1, 8, 8), y=y[:50])
    out = folder / "client.safetensors"
    asked = ["posterior", folder / "run" / "model.safetensors", "--data", folder / "digits.npz"]
    asked += ["-o", out]
    assert command(*asked) == 2
    assert "Set data.scale=16" in " ".join(capsys.readouterr().err.split())
    assert not out.exists()
    assert command(*asked, "--set", "data.scale=16") == 0
    module = MLP(64, [100], 10)
    module.load_state_dict(run.model)
    raw = torch.from_numpy(x[:50]).float().reshape(-1, 1, 8, 8)
    seen = (raw / 16 - run.preprocessing.mean[0]) / run.preprocessing.std[0]
    ten = build_likelihood("categorical", Target("class", tuple("0123456789")))
    wanted = posterior(module, ten, Samples(seen, torch.from_numpy(y[:50])))
    found, _ = read_posterior(out)
    torch.testing.assert_close(found.factors["1"].inputs, wanted.factors["1"].inputs)
    assert found.counts.tolist() == np.bincount(y[:50], minlength=10).tolist()


def test_a_network_of_ones_own_is_named(tmp_path, capsys):
    rng = np.random.default_rng(0)
    data = tmp_path / "data.npz"
    np.savez(data, x=rng.integers(0, 256, (12, 1, 8, 8), dtype=np.uint8), y=np.arange(12) % 3)
    torch.manual_seed(0)
    module = residual((1, 8, 8), 3)
    torch.save(module.state_dict(), tmp_path / "m.pt")
    out = tmp_path / "c.safetensors"
    asked = ["posterior", tmp_path / "m.pt", "--data", data, "-o", out, "--mean", "0", "--std", "1"]
    assert command(*asked, "--model", "tests.helpers.toy_models:residual") == 0
    found, _ = read_posterior(out)
    assert found.factors.keys() == {"1", "4.conv1", "4.conv2", "5", "8", "10"}
    assert found.diagonal.keys() == {name for name, _ in module.named_parameters()}
    out.unlink()
    capsys.readouterr()
    assert command(*asked, "--model", "mlp") == 2
    assert "has no weights of model 'mlp'" in capsys.readouterr().err
    assert command(*asked) == 2
    assert "belongs to no linear layer" in capsys.readouterr().err
    np.savez(data, x=rng.integers(0, 256, (12, 1, 8, 8), dtype=np.uint8), y=np.arange(12) % 2)
    own = ("--model", "tests.helpers.toy_models:residual")
    assert command(*asked, *own) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "m.pt has 3 outputs. The samples have 2 classes" in told
    assert "set data.classes to all 3" in told
    assert not out.exists()


def test_code_that_a_file_names_is_run_if_it_is_named_too(client, capsys):
    folder, _, _ = client
    data, out = folder / "data.npz", folder / "client.safetensors"
    fedbayes.run(
        rounds=1,
        data={"path": str(data), "clients": 2, "partition": "iid"},
        model={"name": "tests.helpers.toy_models:normalized"},
        folder=folder / "run",
    )
    asked = ["posterior", folder / "run" / "model.safetensors", "--data", data, "-o", out]
    assert command(*asked) == 2
    assert "fedbayes never runs code only because a file lists it" in capsys.readouterr().err
    assert not out.exists()
    assert command(*asked, "--model", "tests.helpers.toy_models:normalized") == 0
    found, _ = read_posterior(out)
    assert found.factors.keys() == {"1", "4"}
    assert "2.running_mean" in found.weights


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--mean", "0", "--std", "1,2"], "--std has 2 numbers, and samples of 6"),
        (["--mean", "0", "--std", "0"], "be above 0"),
        (["--mean", "a", "--std", "1"], "--mean a: give it as 0.5"),
        (["-o", "c.pt"], "Use a file name that ends in"),
        (["--data", "absent.npz"], "absent.npz"),
        (["--set", "data.groups=3"], "data.groups"),
        (["--draws", "0"], "draws"),
        (
            ["--mean", "0", "--std", "1", "--set", "task.likelihood=gaussian"],
            "inputs of 6 and 1 outputs are expected",
        ),
    ],
)
def test_mistakes_are_told_and_leave_no_file(client, capsys, monkeypatch, change, said):
    folder, _, _ = client
    monkeypatch.chdir(folder)
    before = set(folder.iterdir())
    asked = ["posterior", "m.safetensors", "--data", "data.npz", "-o", "c.safetensors", *change]
    assert command(*asked) == 2
    assert said in capsys.readouterr().err
    assert set(folder.iterdir()) == before


def test_files_that_hold_no_posterior_are_refused(client):
    folder, module, samples = client
    with pytest.raises(ModelError, match="has only weights"):
        read_posterior(folder / "m.safetensors")
    found = posterior(module, THREE, samples)
    path = folder / "c.safetensors"
    write_posterior(path, found)
    read_posterior(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ModelError, match="not match its digest"):
        read_posterior(path)


def _negative(tensors):
    tensors["inputs/1"] = -tensors["inputs/1"]


def _crooked(tensors):
    tensors["outputs/1"][0, 1] += 1


def _infinite(tensors):
    tensors["outputs/1"][0, 0] = torch.inf


def _below(tensors):
    tensors["diagonal/1.weight"][0, 0] = -1


def _none(tensors):
    tensors["samples"] = torch.tensor(0)


def _more(tensors):
    tensors["counts"] = tensors["counts"] + 1


def _half(tensors):
    del tensors["outputs/1"]


def _nan(tensors):
    tensors["weights/1.bias"][0] = torch.nan


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_negative, "not a matrix of second moments"),
        (_crooked, "not a matrix of second moments"),
        (_infinite, "not a matrix of second moments"),
        (_below, "numbers of 0 or more"),
        (_none, "has no number of samples"),
        (_more, "do not add to its samples"),
        (_half, "different layers"),
        (_nan, "NaN or infinite"),
    ],
)
def test_factors_that_cannot_be_are_refused(client, spoil, said):
    folder, module, samples = client
    path = folder / "c.safetensors"
    write_posterior(path, posterior(module, THREE, samples))
    tensors = load_file(path)
    spoil(tensors)
    path.write_bytes(b"".join(sealed(tensors, {"fedbayes-posterior": "1"})))
    with pytest.raises(ModelError, match=said):
        read_posterior(path)


def test_tensors_that_layers_share_are_counted_once(tmp_path, capsys):
    data, out = tmp_path / "data.npz", tmp_path / "c.safetensors"
    np.savez(data, x=np.random.default_rng(0).normal(size=(12, 6)), y=np.arange(12) % 3)
    torch.save(Tied(3).state_dict(), tmp_path / "m.pt")
    asked = ["posterior", tmp_path / "m.pt", "--data", data, "-o", out, "--mean", "0", "--std", "1"]
    assert command(*asked, "--model", "tests.helpers.eyes:tied") == 0
    count = sum(parameter.numel() for parameter in Tied(3).parameters())
    assert f": {count} weights, the diagonal" in " ".join(capsys.readouterr().out.split())


def test_a_temperature_is_the_best_on_rows_that_were_kept(client, capsys, monkeypatch):
    folder, module, samples = client
    for weight in module.parameters():
        weight.data *= 4  # overconfident
    tensors = [parameter.detach().clone() for parameter in module.parameters()]
    names = ["in.weight", "in.bias", "out.weight", "out.bias"]
    save_file(dict(zip(names, tensors, strict=True)), folder / "m.safetensors")
    with torch.no_grad():
        f = module(samples.x[:30]).double()
    y = torch.where(torch.arange(30) % 3 > 0, f.argmax(1), samples.y[:30])  # two of three right
    np.savez(folder / "kept.npz", x=samples.x[:30].numpy(), y=y.numpy())
    asked = ["posterior", folder / "m.safetensors", "--data", folder / "data.npz", "--mean", "0"]
    files = [folder / f"client{number}.safetensors" for number in range(2)]
    for out in files:
        kept = ("--temperature", folder / "kept.npz")
        assert command(*asked, "--std", "1", *kept, "-o", out) == 0
    assert "temperature" in capsys.readouterr().out
    best = minimize_scalar(
        lambda log: float(30 * functional.cross_entropy(f / np.exp(log), y)) + 2 * log**2,
        bounds=(-3, 4),
        method="bounded",
        options={"xatol": 1e-8},
    )
    assert read_posterior(files[0])[0].temperature == pytest.approx(np.exp(best.x), rel=1e-3)
    trained = ("--temperature", folder / "data.npz", "-o", folder / "low.safetensors")
    assert command(*asked, "--std", "1", *trained) == 0
    assert "has the rows of --data" in " ".join(capsys.readouterr().err.split())
    seen = []
    teach = network_fusing.teacher_of
    monkeypatch.setattr(network_fusing, "teacher_of", lambda *a: seen.append(a[3]) or teach(*a))
    small = ("--mean", "0", "--std", "1", "--set", "draws=256", "--minutes", "0")
    fuse = ["fuse", *files, "-o", folder / "g.safetensors", "--method", "function", *small]
    assert command(*fuse) == 0
    assert seen == [[pytest.approx(np.exp(best.x), rel=1e-3)] * 2]
    assert command(*asked, "--std", "1", "-o", files[1]) == 0
    capsys.readouterr()
    assert command(*fuse) == 0
    assert seen[1] == [seen[0][0], None]
    assert "client1 have no temperature" in capsys.readouterr().err


def test_rows_that_were_kept_are_read_as_the_data(tmp_path, capsys):
    """They may lack a class, and have columns in another order; other classes are an error."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(60, 3)), columns=["a", "b", "c"])
    frame["label"] = np.array(["lo", "mid", "top"])[rng.integers(0, 3, 60)]
    frame[:30].to_csv(tmp_path / "data.csv", index=False)
    kept = frame[30:].query("label != 'lo'")
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))
    torch.save(module.state_dict(), tmp_path / "m.pt")
    asked = ["posterior", tmp_path / "m.pt", "--data", tmp_path / "data.csv"]
    out = tmp_path / "p.safetensors"

    def fitted(rows, code=0):
        rows.to_csv(tmp_path / "kept.csv", index=False)
        more = ["--temperature", tmp_path / "kept.csv", "-o", out, "--mean", "0", "--std", "1"]
        assert command(*asked, *more) == code
        return read_posterior(out)[0].temperature if out.exists() else None

    x = torch.tensor(kept[["a", "b", "c"]].to_numpy(), dtype=torch.float32)
    y = torch.tensor([["lo", "mid", "top"].index(label) for label in kept["label"]])
    with torch.no_grad():
        f = module(x).double()
    best = minimize_scalar(
        lambda log: float(len(y) * functional.cross_entropy(f / np.exp(log), y)) + 2 * log**2,
        bounds=(-3, 4),
        method="bounded",
    )
    for rows in (kept, kept[["c", "label", "a", "b"]]):
        assert fitted(rows) == pytest.approx(np.exp(best.x), rel=1e-3)
    out.unlink()
    capsys.readouterr()
    assert fitted(kept.replace({"label": {"mid": "no"}}), 2) is None
    assert "unknown class no. The classes are lo, mid, top" in " ".join(
        capsys.readouterr().err.split()
    )
    assert fitted(kept.drop(columns="a"), 2) is None
    assert "has no column 'a'" in " ".join(capsys.readouterr().err.split())
    kept.iloc[0, 0] = np.nan
    kept.to_csv(tmp_path / "kept.csv", index=False)
    assert command(*asked, "--temperature", tmp_path / "kept.csv", "-o", out) == 2
    assert "samples have missing values" in " ".join(capsys.readouterr().err.split())


def test_a_posterior_of_plain_weights_is_scored_as_its_network_sees_samples(client, capsys):
    """And so is what is fused from such: against the networks in PyTorch."""
    folder, module, samples = client
    torch.manual_seed(1)
    before = load_file(folder / "m.safetensors")
    other = {name: t + 0.1 * torch.randn(t.shape) for name, t in before.items()}
    save_file(other, folder / "o.safetensors")
    asked = ("--data", folder / "data.npz", "--mean", "0.5", "--std", "0.1")
    for name in ("m", "o"):
        assert (
            command(
                "posterior",
                folder / f"{name}.safetensors",
                *asked,
                "-o",
                folder / f"p{name}.safetensors",
            )
            == 0
        )
    files = (folder / "pm.safetensors", folder / "po.safetensors")
    fused = folder / "f.safetensors"
    assert command("fuse", *files, "--method", "regmean", "-o", fused) == 0
    capsys.readouterr()
    data = f"data.path={folder / 'data.npz'}"
    assert command("evaluate", fused, *files, "--set", data, "--json") == 0
    scores = {Path(one["name"]).stem: one for one in json.loads(capsys.readouterr().out)}
    assert scores["ensemble, as fuse learns it"]["parameters"] == 2 * scores["f"]["parameters"]
    with torch.no_grad():
        own = functional.cross_entropy(module((samples.x - 0.5) / 0.1), samples.y)
    assert scores["pm"]["nll"] == pytest.approx(float(own), rel=1e-5)
    layers = dense_layers(read_model(fused)[0], "f")
    with torch.no_grad():
        own = functional.cross_entropy(relu_network(layers, (samples.x - 0.5) / 0.1), samples.y)
    assert scores["f"]["nll"] == pytest.approx(float(own), rel=1e-5)
    assert command("evaluate", files[0], "--set", data, "--mean", "0.5") == 2
    assert "has its own. Leave them out" in " ".join(capsys.readouterr().err.split())
    # Nothing stated is nothing known: no rule for gaps, no card of what is fused.
    for name in ("m", "o"):
        out = folder / f"p{name}.safetensors"
        assert command("posterior", folder / f"{name}.safetensors", *asked[:2], "-o", out) == 0
    assert command("fuse", *files, "--method", "regmean", "-o", fused) == 0
    assert not read_model(fused)[1]
    x = samples.x.numpy().copy()
    x[::3, 0] = np.nan
    np.savez(folder / "gaps.npz", x=x, y=samples.y.numpy())
    capsys.readouterr()
    assert command("evaluate", files[0], "--set", f"data.path={folder / 'gaps.npz'}") == 2
    assert "the model has no rule to impute them" in " ".join(capsys.readouterr().err.split())


def test_posteriors_of_a_fused_network_keep_its_card(tmp_path):
    """It names the network, which what a posterior says of its inputs does not."""
    rng, own = np.random.default_rng(0), "tests.helpers.toy_models:residual"
    words = ("--shape", "1,8,8", "--classes", "3", "--mean", "0.5", "--std", "0.3")
    clients, parts = [], []
    for seed in (0, 1):
        torch.manual_seed(seed)
        clients.append(tmp_path / f"{seed}.safetensors")
        save_file(residual((1, 8, 8), 3).state_dict(), clients[-1])
    fused, out = tmp_path / "fused.safetensors", tmp_path / "again.safetensors"
    assert command("fuse", *clients, "-o", fused, "--model", own, *words, "--minutes", "0.02") == 0
    for number in (0, 1):
        data = tmp_path / f"{number}.npz"
        np.savez(data, x=rng.random((12, 1, 8, 8), dtype=np.float32), y=np.arange(12) % 3)
        parts.append(tmp_path / f"posterior{number}.safetensors")
        assert command("posterior", fused, "--data", data, "--model", own, "-o", parts[-1]) == 0
    assert command("fuse", *parts, "--method", "regmean", "-o", out) == 0
    before, after = (Card.load(read_model(p)[1], "", frozenset({own})) for p in (fused, out))
    assert after.model == before.model != {}


def test_a_range_of_images_is_that_of_all_clients(tmp_path, capsys):
    """Whatever the order of their files; and a flat network takes images as rows."""
    rng, y = np.random.default_rng(0), np.arange(40) % 3
    for number, most in enumerate((1.0, 1.5)):
        torch.manual_seed(0)
        save_file(MLP(16, [5], 3).state_dict(), tmp_path / f"{number}.safetensors")
        x = (most * rng.random((40, 1, 4, 4))).astype(np.float32)
        np.savez(tmp_path / f"{number}.npz", x=x, y=y)
        words = ("--data", tmp_path / f"{number}.npz", "--mean", "0.5", "--std", "0.3")
        out = tmp_path / f"p{number}.safetensors"
        assert command("posterior", tmp_path / f"{number}.safetensors", *words, "-o", out) == 0
    files, fused = [tmp_path / f"p{n}.safetensors" for n in (0, 1)], tmp_path / "f.safetensors"
    for order in (files, files[::-1]):
        assert command("fuse", *order, "--method", "fisher", "-o", fused) == 0
        assert Card.load(read_model(fused)[1], "f").preprocessing.bounds is None
    np.savez(tmp_path / "flat.npz", x=x.reshape(40, 16), y=y)
    assert command("evaluate", *files, "--set", f"data.path={tmp_path / 'flat.npz'}") == 0


def test_a_network_in_the_unit_of_its_target_is_refused_next_to_one_that_is_not(tmp_path, capsys):
    """Its outputs would be scaled by the other's standard deviation."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 3))
    rows = pd.DataFrame(x, columns=list("abc")).assign(target=100 + 50 * x[:, 0])
    rows.to_csv(tmp_path / "rows.csv", index=False)
    data = {"path": tmp_path / "rows.csv", "label": ["target"], "clients": 2}
    task = {"likelihood": "gaussian", "noise": 1.0}
    fedbayes.run(data=data, task=task, rounds=1, model={"hidden": [4]}, out=tmp_path / "run")
    save_file(MLP(3, [4], 1).state_dict(), tmp_path / "own.safetensors")
    words = [f"data.path={tmp_path / 'rows.csv'}"]
    own = ("data.label=target", "task.likelihood=gaussian", "task.noise=1")
    sets = [word for entry in (*words, *own) for word in ("--set", entry)]
    asked = ("--data", tmp_path / "rows.csv", "--mean", "0", "--std", "1", *sets[2:])
    out = tmp_path / "posterior.safetensors"
    assert command("posterior", tmp_path / "own.safetensors", *asked, "-o", out) == 0
    assert command("evaluate", out, *sets) == 0
    capsys.readouterr()
    model = tmp_path / "run" / "model.safetensors"
    for other, more in ((out, ()), (tmp_path / "own.safetensors", ("--mean", "0"))):
        assert command("evaluate", model, other, *sets[:2], *more) == 2
        assert "in a command of" in " ".join(capsys.readouterr().err.split())


def test_posteriors_of_a_former_form_are_read(client, capsys):
    """Of version 0.3 before shapes were told."""
    folder, *_ = client
    asked = ("--data", folder / "data.npz", "--mean", "0.5", "--std", "0.1")
    out = folder / "p.safetensors"
    assert command("posterior", folder / "m.safetensors", *asked, "-o", out) == 0
    with safe_open(out, "pt") as file:
        kept, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    kept[TOLD] = json.dumps(json.loads(kept[TOLD])[:3])
    write_beside(out, sealed(tensors, kept))
    assert InputsTold.read(out).shape == ()
    assert command("evaluate", out, "--set", f"data.path={folder / 'data.npz'}") == 0


def test_a_temperature_that_is_none_is_rejected(client):
    folder, module, samples = client
    found = posterior(module, THREE, samples)
    for warmth in (0.0, -1.0, float("nan"), float("inf")):
        write_posterior(folder / "c.safetensors", replace(found, temperature=warmth))
        with pytest.raises(ModelError, match="temperature that is not a number above 0"):
            read_posterior(folder / "c.safetensors")


def test_a_gaussian_head_of_files_is_that_of_all_rows(client, capsys):
    """Linear discriminants of scikit-learn on the features of all clients' rows together."""
    folder, *_ = client
    rng = np.random.default_rng(1)
    y = rng.integers(0, 3, 400)
    x = (rng.normal(size=(400, 6)) + np.eye(3, 6)[y]).astype(np.float32)
    owner, files = np.minimum(y, rng.integers(0, 3, 400)), []
    asked = ["posterior", folder / "m.safetensors", "--mean", "0", "--std", "1"]
    for number in range(3):
        rows = owner == number
        np.savez(folder / f"{number}.npz", x=x[rows], y=y[rows])
        files.append(folder / f"with{number}.safetensors")
        told = ("--set", "data.classes=[0,1,2]")
        data = ("--data", folder / f"{number}.npz", *told)
        assert command(*asked, *data, "--head", "-o", files[-1]) == 0
    assert "sums of 5 features by class" in " ".join(capsys.readouterr().out.split())
    fuse = ["fuse", "--method", "gaussian-head", "-o", folder / "g.safetensors"]
    strength = ("--prior-rows", "1e-9", "--mean-rows", "1e-9")
    assert command(*fuse, *files, *strength) == 0
    fused, before = load_file(folder / "g.safetensors"), load_file(folder / "m.safetensors")
    for name in ("in.weight", "in.bias"):
        assert torch.equal(fused[name], before[name])
    with torch.no_grad():
        h = torch.relu(torch.tensor(x) @ before["in.weight"].T + before["in.bias"]).double().numpy()
    wanted = LinearDiscriminantAnalysis(solver="lsqr").fit(h, y)
    found = h @ fused["out.weight"].double().numpy().T + fused["out.bias"].double().numpy()
    counts = np.bincount(y)
    found += np.log(wanted.priors_) - np.log((counts + 1) / (counts + 1).sum())
    np.testing.assert_allclose(found, wanted.decision_function(h), atol=1e-4)
    assert command(*fuse, *files) == 0  # of the most probable strength
    # What files must have.
    assert command(*asked, "--data", folder / "0.npz", *told, "-o", folder / "c.safetensors") == 0
    capsys.readouterr()
    assert command(*fuse, files[0], folder / "c.safetensors") == 2
    lacks = f"{folder / 'c.safetensors'} has no sums of features. Make it with fedbayes posterior"
    assert lacks in " ".join(capsys.readouterr().err.split())
    other = {name: 2 * t if name == "in.bias" else t for name, t in before.items()}
    save_file(other, folder / "o.safetensors")
    asked[1] = folder / "o.safetensors"
    data = ("--data", folder / "0.npz", *told)
    assert command(*asked, *data, "--head", "-o", folder / "c.safetensors") == 0
    capsys.readouterr()
    assert command(*fuse, files[0], folder / "c.safetensors") == 2
    differs = f"'in.bias' of {folder / 'c.safetensors'} differs from {files[0]}"
    assert differs in " ".join(capsys.readouterr().err.split())
    # The files say in which order classes are, and how inputs are standardized.
    asked[1] = folder / "m.safetensors"
    moved = ("--data", folder / "1.npz", "--set", "data.classes=[2,0,1]", "--head")
    assert command(*asked, *moved, "-o", folder / "c.safetensors") == 0
    capsys.readouterr()
    assert command(*fuse, files[0], folder / "c.safetensors") == 2
    told = f"has the targets 2, 0, 1, and {files[0]} has 0, 1, 2. Give fedbayes posterior"
    assert told in " ".join(capsys.readouterr().err.split())
    asked[5] = "2"
    assert command(*asked, *data, "--head", "-o", folder / "c.safetensors") == 0
    capsys.readouterr()
    assert command(*fuse, files[0], folder / "c.safetensors") == 2
    assert "different standardizations" in " ".join(capsys.readouterr().err.split())
    sent = read_posterior(files[0])[0]
    bad = replace(sent.head["out"], counts=-sent.head["out"].counts)
    write_posterior(folder / "c.safetensors", replace(sent, head={"out": bad}))
    with pytest.raises(ModelError, match="counts of classes are negative"):
        read_posterior(folder / "c.safetensors")
