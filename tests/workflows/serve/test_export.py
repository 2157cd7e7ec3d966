"""Exported models: smaller, and the same to the user."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedbayes
from fedbayes import Simulation
from fedbayes.data import pixel_order
from fedbayes.models import LeNet5, Network, ResNet20, read_weights, units
from fedbayes.models.compact import PrunedGroupNorm, compact, difference
from fedbayes.models.networks import MLP
from fedbayes.models.resize import with_weights
from fedbayes.runs import build
from fedbayes.runs.personal import temperature_of
from tests.helpers.architectures import Separable
from tests.helpers.command_line import command
from tests.helpers.toy_models import residual

NETWORKS = {
    "mlp": (MLP(20, [12, 9], 4), (20,)),
    "lenet": (LeNet5(3, 32, 32, 10), (3, 32, 32)),
    "resnet": (ResNet20(3, 10), (3, 16, 16)),
    "residual": (residual((64,), 3), (64,)),
    "separable": (Separable(), (3, 16, 16)),
}


def pruned(module, shape, share, seed=0):
    """Weights with units gone in every group but the last, and the groups."""
    network = Network(module, shape=shape)
    rng = torch.Generator().manual_seed(seed)
    weights = {
        n: w + 0.02 * torch.randn(w.shape, generator=rng) for n, w in network.initial.items()
    }
    alive = {
        u.layer: torch.rand(u.count, generator=rng) >= share for u in network.groups if not u.output
    }
    return units.zero(weights, units.masks(network.groups, alive)), alive, network.groups


@pytest.mark.parametrize("share", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_compact_network_answers_the_same(name, share):
    module, shape = NETWORKS[name]
    weights, alive, groups = pruned(module, shape, share)
    x = torch.randn(7, *shape)
    small = compact(module, weights, groups, x)
    assert difference(with_weights(module, weights), small, x) < 1e-5
    left = dict(small.named_parameters())
    for group in groups:
        for axis in group.made if not group.output else ():
            count = max(int(alive[group.layer][list(axis.units)].sum()), 1)
            assert len(left[axis.tensor]) == count, "rows are cut out"
    zero = sum(int((w == 0).sum()) for w in weights.values())
    kept = sum(p.numel() for p in small.parameters())
    assert kept < sum(w.numel() for w in weights.values()) - 0.8 * zero


def test_group_normalization_counts_what_is_gone():
    """Against PyTorch's on the whole layer, with zeros in the places."""
    norm = nn.GroupNorm(2, 6)
    kept = torch.tensor([True, False, True, False, False, True])
    x = torch.randn(3, 6, 4, 4) + 2
    x[:, ~kept] = 0
    torch.testing.assert_close(PrunedGroupNorm(norm, kept)(x[:, kept]), norm(x)[:, kept])


def test_batch_normalization_is_cut():
    module = nn.Sequential(
        nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 36, 3)
    )
    module(torch.randn(30, 1, 8, 8))  # running means
    weights, _, groups = pruned(module, (1, 8, 8), 0.5, seed=1)
    weights["1.running_var"] = weights["1.running_var"].abs()
    weights["1.num_batches_tracked"] = torch.tensor(1)
    x = torch.randn(4, 1, 8, 8)
    small = compact(module, weights, groups, x)
    assert small[1].num_features < 5
    assert difference(with_weights(module, weights), small, x) < 1e-5


@pytest.fixture(scope="module")
def sparse_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sparse") / "run"
    fedbayes.run(
        rounds=6,
        data={"name": "digits", "clients": 4, "partition": "iid"},
        model={"hidden": [40, 30]},
        method={"name": "fedsparse", "scale": "paper", "l0": 3e-5},
        calibration="none",
        folder=folder,
    )
    return folder


def test_export_of_a_run(sparse_run, tmp_path, capsys):
    path = tmp_path / "small.safetensors"
    assert command("export", sparse_run, "--compact", "-o", path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    run = fedbayes.Result(sparse_run)
    assert found["kept"] < found["parameters"] == sum(t.numel() for t in run.model.values())
    assert found["difference"] < 1e-5
    weights = read_weights(path)
    assert sum(t.numel() for t in weights.values()) == found["kept"]
    widths = [len(weights[f"{i}.weight"]) for i in (1, 3)]
    module = MLP(64, widths, 10)
    module.load_state_dict(weights)
    x = torch.randint(17, (5, 64))
    mine = module(run.preprocessing.apply(x)).log_softmax(-1)
    torch.testing.assert_close(mine, run.predictor()(x).log_softmax(-1), atol=1e-5, rtol=0)


def test_export_of_a_program(sparse_run, tmp_path, capsys):
    path = tmp_path / "model.pt2"
    assert command("export", sparse_run, "--compact", "-o", path) == 0
    assert "outputs the same to" in capsys.readouterr().out
    program = torch.export.load(path).module()
    predict = fedbayes.Result(sparse_run).predictor()
    for count in (1, 7):
        x = torch.randint(17, (count, 1, 8, 8))
        torch.testing.assert_close(program(x).log_softmax(-1), predict(x), atol=1e-5, rtol=1e-4)


def test_export_as_it_is(sparse_run, tmp_path):
    path = tmp_path / "model.pt"
    assert command("export", sparse_run, "-o", path) == 0
    stored = torch.load(path, weights_only=True)
    for name, tensor in fedbayes.Result(sparse_run).model.items():
        assert torch.equal(stored[name], tensor)


def test_mistakes_are_told(tmp_path, capsys):
    folder = tmp_path / "ensemble"
    fedbayes.run(method={"name": "mixture"}, rounds=1, model={"hidden": [4]}, folder=folder)
    out = tmp_path / "model.safetensors"

    def told(*arguments):
        capsys.readouterr()
        assert command("export", *arguments) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "not a single network" in told(folder, "--compact", "-o", out)
    assert not out.exists()
    assert "nowhere" in told(tmp_path / "nowhere", "-o", out)
    assert "folder" in told(folder, "-o", tmp_path / "no" / "model.pt")
    model = folder / "model.safetensors"
    before = model.read_bytes()
    assert "would replace one of the inputs" in told(folder, "-o", model)
    assert model.read_bytes() == before
    assert command("export", folder, "-o", out) == 0
    assert {name[:2] for name in read_weights(out)} == {"0/", "1/"}


def pictures(folder):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (120, 20, 20), dtype=np.uint8)
    np.savez(folder / "pictures.npz", x=x, y=np.arange(120) % 3)
    return {"path": str(folder / "pictures.npz"), "clients": 3, "partition": "iid"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", ["lenet5", "cnn", "resnet20", "tests.helpers.toy_models:residual"]
)
def test_programs_and_weights_of_every_network(tmp_path, capsys, model):
    """Pixels of 8 bits go in as they are; files of weights say which network they are of."""
    folder, data = tmp_path / "run", pictures(tmp_path)
    if ":" in model:
        data = {"name": "digits", "clients": 3}
    run = fedbayes.run(data=data, model={"name": model}, rounds=1, folder=folder)
    with Simulation(None, folder) as simulation:
        raw = simulation.data.raw_test(0, 20)
        total = simulation.data.test_total
    for name in ("m.pt2", "m.pt"):
        assert command("export", folder, "-o", tmp_path / name) == 0
    program = torch.export.load(tmp_path / "m.pt2").module()
    torch.testing.assert_close(
        program(raw).log_softmax(-1), run.predictor()(raw), atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(program(raw.double()), program(raw))
    capsys.readouterr()
    files = (tmp_path / "m.pt", tmp_path / "m.pt2")
    assert command("evaluate", *files, "--run", folder, "--json") == 0
    one, two, *_ = json.loads(capsys.readouterr().out)
    assert one["accuracy"] == two["accuracy"] == pytest.approx(run.summary["global_accuracy"])
    assert one["parameters"] == two["parameters"]
    assert one["rows"] == total
    save_file(run.model, tmp_path / "plain.safetensors")
    plain = (tmp_path / "plain.safetensors", "--run", folder, "--json")
    for given in ((), ("--model", model)):
        assert command("evaluate", *plain, *given) == 0
        (score,) = json.loads(capsys.readouterr().out)
        assert score["accuracy"] == one["accuracy"]
    if model == "lenet5":
        assert command("evaluate", *plain, "--model", "cnn") == 2
        assert "has no weights of model 'cnn'" in capsys.readouterr().err


def test_pixels_in_an_order_of_each_client(tmp_path, capsys, monkeypatch):
    """The order is built into a client's program; the global one wants it, and says so."""
    load = build.load_dataset
    monkeypatch.setattr(
        build, "load_dataset", lambda *asked: dataclasses.replace(load(*asked), permuted=True)
    )
    settings = {"data": {"clients": 2, "partition": "iid"}, "rounds": 1, "model": {"hidden": [8]}}
    run = fedbayes.run(method={"name": "local"}, folder=tmp_path / "local", **settings)
    out = tmp_path / "m.pt2"
    assert command("export", tmp_path / "local", "-o", out, "--client", "1") == 0
    assert not capsys.readouterr().err
    program = torch.export.load(out).module()
    x = torch.randint(17, (6, 64))
    seen = run.preprocessing.apply(x).flatten(1)[:, pixel_order(0, 1, (64,))]
    (file,) = (tmp_path / "local" / "clients").glob("0000001-*")
    expected = MLP(64, [8], 10)
    expected.load_state_dict(read_weights(file))
    cooled = (expected(seen) / temperature_of(run.folder, 1)).log_softmax(-1)
    torch.testing.assert_close(program(x.reshape(6, 1, 8, 8)).log_softmax(-1), cooled)
    torch.testing.assert_close(run.predictor(client=1)(x), cooled)
    assert command("evaluate", out, "--run", tmp_path / "local") == 2
    assert "calibrate RUN --client client-1" in " ".join(capsys.readouterr().err.split())
    fedbayes.run(folder=tmp_path / "global", **settings)
    assert command("export", tmp_path / "global", "-o", out) == 0
    assert "in the order of its client" in " ".join(capsys.readouterr().err.split())
