"""Methods that leave units out, on ResNet-20: every inner layer, residual streams as one group."""

import numpy as np
import pytest
import torch

import fedbayes
from fedbayes.contracts import Report, Stateless, Sum
from fedbayes.core.messages import Masked, encode
from fedbayes.core.tensors import Samples
from fedbayes.inference import gates
from fedbayes.methods.feddrop import FedDrop
from fedbayes.methods.fedl1 import FedL1
from fedbayes.methods.fedsparse import FedSparse, FedSparseServer
from fedbayes.models import Network, ResNet20, units
from fedbayes.models.compact import compact
from fedbayes.workflows.serve.export import export
from tests.helpers.places import at, run_of

SHAPE = (3, 16, 16)


@pytest.fixture(scope="module")
def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Network(ResNet20(3, 3), shape=SHAPE)


def inner(net):
    """Weights of all convolutions and of the dense layer."""
    return [name for name, w in net.initial.items() if w.ndim > 1]


def assert_shrunk_everywhere(net, message):
    """Rows and columns go in every layer, but for pixels that come in and classes that go out."""
    for name in inner(net):
        item = message[name]
        assert isinstance(item, Masked), name
        axes = {axis for axis, *_ in item.masks}
        assert axes == {"0.weight": {0}, "14.weight": {1}}.get(name, {0, 1}), name
        assert all(not mask.all() and mask.any() for mask in item.masks.values()), name
    whole = len(encode(dict(net.initial)))
    assert len(encode(message)) < 0.75 * whole


def assert_compact(net, weights):
    x = torch.randn(5, *SHAPE)
    whole = net(net.prepare(weights), x)
    small = compact(net.module, weights, net.groups, x)
    with torch.no_grad():
        torch.testing.assert_close(small(x), whole, rtol=1e-4, atol=1e-4)
    return sum(p.numel() for p in small.parameters())


def test_fedsparse_prunes_the_stream_as_one(net):
    method = FedSparse(temperature=0.05)
    server = method.init(run_of(net))
    rng = torch.Generator().manual_seed(0)
    gated = method._gated(run_of(net))
    assert [group.count for group in gated] == [64, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    thresholds, dead = {}, {}
    for group in gated:
        dead[group.layer] = torch.rand(group.count, generator=rng) < 0.4
        level = torch.where(dead[group.layer], -5.0, 5.0)
        norms = units.row_norms(server.weights, group)
        thresholds[group.layer] = gates.thresholds(norms, level, method.heat)
    server = FedSparseServer(**{**vars(server), "thresholds": thresholds})
    reported = Sum()
    reported.add(0, Report(dict(server.weights)))
    following, info = method.update(server, reported, at(net))
    assert info["alive_0"] == int((~dead["0"]).sum())
    message = method.message(following, at(net))
    assert_shrunk_everywhere(net, message)
    for name in ("0.weight", "3.conv2.weight", "6.conv2.weight"):  # one unit, all its rows
        rows = message[name].masks[(0,)]
        assert torch.equal(rows, ~dead["0"][: len(rows)])
    model = method.model(following, run_of(net))
    kept = assert_compact(net, model)
    assert kept < 0.6 * sum(w.numel() for w in model.values())


def test_a_client_of_fedsparse_gates_the_stream(net):
    """The relaxed loss has a gradient in the thresholds of every group; the report fits."""
    method = FedSparse(temperature=0.05, start=0.6)
    server = method.init(run_of(net))
    message = method.message(server, at(net))
    data = Samples(torch.randn(6, *SHAPE), torch.arange(6) % 3)
    problem = method.problem(message, Stateless(), data, at(net))
    leaves = {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in problem.start.items()}
    noise = problem.noise.draw(torch.Generator().manual_seed(0), data)
    method.loss(run_of(net))(leaves, data, problem.given, noise).backward()
    for group in net.groups[:-1]:
        assert leaves[f"threshold/{group.layer}"].grad.abs().sum() > 0
    report, _, _ = method.local(message, Stateless(), data, at(net, epochs=1))
    rows = report.tensors["0.weight"].masks[(0,)]
    assert 0 < int(rows.sum()) < 16
    for name in ("3.conv2.weight", "5.norm2.bias", "9.conv2.weight"):
        assert torch.equal(report.tensors[name].masks[(0,)][:16], rows)


def test_fedl1_leaves_small_units_of_the_stream_out(net):
    norms = torch.cat([units.row_norms(net.initial, group) for group in net.groups[:-1]])
    for share in (0.3, 0.6):
        level = float(norms.quantile(share))
        method = FedL1(l1=level)
        server = method.init(run_of(net))
        message = method.message(server, at(net))
        for group in net.groups[:-1]:
            alive = units.row_norms(net.initial, group) > level
            for axis in group.owned:
                expected = alive[list(axis.units)]
                assert torch.equal(message[axis.tensor].masks[(0,)], expected)
        assert len(encode(message)) < len(encode(dict(net.initial)))
        assert_compact(net, method.model(server, run_of(net)))


def test_feddrop_trains_a_narrower_resnet(net):
    method = FedDrop(conv_rate=0.25)
    assert method.remarks(run_of(net)) == []
    message = method.message(method.init(run_of(net)), at(net))
    assert_shrunk_everywhere(net, message)
    small = units.slice(message)
    assert small["0.weight"].shape == (12, 3, 3, 3)
    assert small["9.conv2.weight"].shape == (48, 48, 3, 3)
    data = Samples(torch.randn(6, *SHAPE), torch.arange(6) % 3)
    report, _, _ = method.local(message, Stateless(), data, at(net, epochs=1))
    trained = units.slice(report.tensors)
    assert all(not torch.equal(trained[name], small[name]) for name in inner(net))
    narrow = ResNet20(3, 3)
    for name, tensor in trained.items():  # a network that was never wide answers the same
        path, _, key = name.rpartition(".")
        narrow.get_submodule(path)._parameters[key] = torch.nn.Parameter(tensor)
    for norm in (m for m in narrow.modules() if isinstance(m, torch.nn.GroupNorm)):
        norm.num_channels = len(norm.weight)
    personal = method.personal_model(message, report, Stateless(), run_of(net))
    draw = method.draws(personal, run_of(net))
    with torch.no_grad():
        torch.testing.assert_close(
            draw(data.x)[0].log_softmax(-1), narrow(data.x).log_softmax(-1), rtol=1e-4, atol=1e-4
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        {"name": "fedsparse", "scale": "paper", "l0": 1e-3, "gate_lr": 0.5, "server_gate_lr": 0.5},
        {"name": "fedl1", "l1": 1.0},
        {"name": "feddrop", "conv_rate": 0.25},
    ],
    ids=lambda method: method["name"],
)
def test_runs_and_their_compact_export(tmp_path, method):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (60, 16, 16), dtype=np.uint8)
    np.savez(tmp_path / "pictures.npz", x=x, y=np.arange(60) % 3)
    data = {"path": str(tmp_path / "pictures.npz"), "clients": 2, "partition": "iid"}
    common = {"data": data, "model": {"name": "resnet20"}, "rounds": 2}
    run = fedbayes.run(method=method, folder=tmp_path / "run", **common)
    whole = fedbayes.run(method={"name": "fedavg"}, **common)
    lines = list(run.metrics)
    assert lines[-1]["bytes_down"] < whole.metrics[-1]["bytes_down"]
    if method["name"] != "feddrop":
        assert lines[-1]["update"]["alive_0"] < 64
    done = export(tmp_path / "run", tmp_path / "small.safetensors", small=True)
    assert done.difference < 1e-4
    assert (done.kept < done.parameters) == (method["name"] != "feddrop")
