"""`fedbayes.fuse` of files and of networks is the command."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import Conv2d, Flatten, Linear, ReLU, Sequential

import fedbayes
from fedbayes.errors import ConfigError, DataError, FedbayesWarning, ModelError
from fedbayes.inputs import sums_of, write_sums
from fedbayes.models import read_model
from tests.helpers.command_line import cli, command


def network(seed):
    torch.manual_seed(seed)
    return Sequential(Conv2d(1, 4, 3), ReLU(), Flatten(), Linear(4 * 36, 3))


@pytest.fixture(scope="module")
def clients(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuse") / "run"
    fedbayes.run(method="local", rounds=2, data={"limit": 600, "clients": 3}, folder=folder)
    return sorted((folder / "clients").glob("*.safetensors"))


@pytest.mark.parametrize("method", ["average", "gpi-fnm", "permute"])
def test_files_are_fused_as_the_command_does(clients, method, tmp_path):
    found = fedbayes.fuse(clients, method=method)
    out = tmp_path / "fused.safetensors"
    assert command("fuse", *clients, "--method", method, "--out", out) == 0
    wanted = read_model(out)[0]
    assert found.weights.keys() == wanted.keys()
    assert all(torch.equal(found.weights[name], wanted[name]) for name in wanted)
    again = fedbayes.fuse([str(path) for path in clients], method=method, out=tmp_path / "b.pt")
    assert again.path == tmp_path / "b.pt"
    assert all(torch.equal(again.weights[name], wanted[name]) for name in wanted)


def test_auto_is_the_default_of_the_command(clients):
    found = fedbayes.fuse(clients, minutes=0, draws=200)
    assert found.summary["method"] == "function"
    x = np.zeros((2, 1, 8, 8), np.float32)
    assert fedbayes.load(found.path).predict_proba(x).shape == (2, 10)


def test_networks_are_fused_and_stay_as_they_are():
    networks = [network(0), network(1)]
    before = [copy.deepcopy(one.state_dict()) for one in networks]
    found = fedbayes.fuse(networks, method="average", shape=(1, 8, 8))
    for name, tensor in found.weights.items():
        torch.testing.assert_close(tensor, (before[0][name] + before[1][name]) / 2)
    for one, state in zip(networks, before, strict=True):
        assert all(torch.equal(one.state_dict()[name], state[name]) for name in state)
    fused = network(2)
    fused.load_state_dict(found.weights)
    match = fedbayes.fuse({"a": networks[0], "b": networks[0]}, method="permute", shape=(1, 8, 8))
    for name, tensor in match.weights.items():
        torch.testing.assert_close(tensor, before[0][name])


@pytest.mark.slow
def test_networks_of_different_architectures():
    torch.manual_seed(0)
    x = torch.randn(50, 1, 8, 8)
    networks = [Sequential(Flatten(), Linear(64, n), ReLU(), Linear(n, 10)) for n in (12, 20)]
    teacher = (networks[0](x).softmax(1) + networks[1](x).softmax(1)) / 2
    found = fedbayes.fuse(networks, shape=(1, 8, 8), inputs="noise", minutes=0.05)
    assert found.path.suffix == ".pt2"
    student = torch.export.load(found.path).module()(x)
    assert (teacher * (teacher.log() - student.log_softmax(1))).sum(1).mean() < 0.05
    told = fedbayes.load(found.path).predict_proba(x.numpy())
    np.testing.assert_allclose(told, student.softmax(1).detach(), rtol=1e-4)


def test_mistakes_say_the_way_out(clients):
    with pytest.raises(ModelError, match=r"model 0 is a int\. Give a model file"):
        fedbayes.fuse([1, 2])
    with pytest.raises(ModelError, match=r"files and networks\. Give models"):
        fedbayes.fuse([clients[0], network(0)])
    with pytest.raises(ModelError, match=r"different weights\. Give the shape"):
        fedbayes.fuse([network(0), Sequential(Linear(2, 3))])
    with pytest.raises(ConfigError, match=r"no setting count \(did you mean 'counts'"):
        fedbayes.fuse([network(0), network(1)], method="average", shape=(1, 8, 8), count=[1])
    with pytest.raises(ConfigError, match="unknown fusion method 'avrage'"):
        fedbayes.fuse(clients, method="avrage")
    with pytest.raises(ConfigError, match="out has no effect on state_dicts"):
        fedbayes.fuse([network(0).state_dict()] * 2, out="x.pt")


def test_what_client_files_lack_or_lose_is_told(tmp_path, capsys):
    """Counts that one file lacks, a state copied out of its run, and units that do not fit."""
    data = {"clients": 3, "validation": 0.2, "limit": 300}
    given = {"method": {"name": "local"}, "model": {"hidden": [6]}, "data": data, "rounds": 1}
    run = fedbayes.run(out=tmp_path / "run", **given)
    files = sorted(run.folder.clients.iterdir())
    plain = tmp_path / "plain"
    bare = fedbayes.run(out=plain, **given | {"method": {"name": "local", "class_shares": False}})
    mixed = [*files[:2], sorted(bare.folder.clients.iterdir())[2]]
    code, _, err = cli(capsys, "fuse", *mixed, "-o", tmp_path / "a.safetensors", "--minutes", 0)
    assert code == 0
    assert "counts of samples in 2 files are not used" in " ".join(err.split())
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(files[0].read_bytes())
    with pytest.warns(FedbayesWarning, match="counts, temperature in it and the standardization"):
        read_model(copy)
    options = ("--minutes", 0, "--set", "model.hidden=[5]")
    code, _, err = cli(capsys, "fuse", *files, "-o", tmp_path / "b.safetensors", *options)
    assert code == 2
    assert not (tmp_path / "b.safetensors").exists()


def test_options_are_those_of_the_command(tmp_path):
    networks = [Sequential(Linear(3, 4), ReLU(), Linear(4, 2)) for _ in range(2)]
    assert fedbayes.fuse(networks, method="gpi-fnm").weights
    tables = []
    for number, x in enumerate(torch.randn(2, 50, 3)):
        tables.append(str(tmp_path / f"{number}.json"))
        write_sums(sums_of(x.numpy()), Path(tables[-1]))
    one = fedbayes.fuse(networks, shape=(3,), sums=tables, minutes=0, mean=0.5, std=2.0)
    assert one.weights["0.weight"].shape == (4, 3)
    files = [tmp_path / f"{number}.pt" for number in range(2)]
    for network, file in zip(networks, files, strict=True):
        torch.save(network.state_dict(), file)
    with pytest.raises(ModelError, match=r"7 outputs are expected\. Check --shape, and --classes"):
        fedbayes.fuse(files, shape=(3,), classes=7)
    with pytest.raises(ConfigError, match=r"numpy\.savez"):
        fedbayes.fuse(files, shape=(3,), inputs=np.zeros((9, 3)))
    few = {"shape": (3,), "minutes": 0, "draws": 512}
    found = [fedbayes.fuse(files, counts=np.array([[9, 1], [1, 9]], kind), **few) for kind in "if"]
    assert torch.equal(found[0].weights["0.weight"], found[1].weights["0.weight"])
    with pytest.raises(DataError, match="must contain a list of counts"):
        fedbayes.fuse(files, counts=np.full((2, 2), 0.5), **few)


def test_counts_go_by_the_names_of_the_models():
    nets = {name: Sequential(Linear(4, 3)) for name in ("north", "south")}
    given = {"method": "average", "shape": (4,)}
    counts = {"south": [1, 1, 1], "north": [3, 3, 3]}
    fused = fedbayes.fuse(nets, counts=counts, **given)
    wanted = 0.75 * nets["north"][0].weight + 0.25 * nets["south"][0].weight
    torch.testing.assert_close(fused.weights["0.weight"], wanted.detach())
