"""Units: who owns what, and what is left when some are gone."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import fedbayes
from fedbayes.contracts import Federation, Report, Sum
from fedbayes.errors import FedbayesWarning
from fedbayes.methods.feddrop import FedDrop
from fedbayes.models import LeNet5, ModelSettings, Network, ResNet20, build, units
from fedbayes.models.networks import MLP
from tests.toy_models import head_first, normalized, residual, sequence


def kept(network, share=0.5, seed=0):
    stream = torch.Generator().manual_seed(seed)
    found = {}
    for layer in network.units:
        if layer.reader is None or layer.last:
            continue
        size = layer.count // layer.norm_groups
        order = torch.rand(layer.norm_groups, size, generator=stream).argsort(dim=1)
        found[layer.layer] = (order >= int(share * size)).flatten()
    return found


def test_lenet():
    first, second, hidden, last = units.find_units(LeNet5(3, 32, 32, 10))
    assert (first.kind, first.count, first.reader, first.repeats) == ("conv", 20, "3.weight", 1)
    assert (second.count, second.reader, second.repeats) == (50, "7.weight", 25)
    assert (hidden.kind, hidden.owned) == ("dense", ("7.weight", "7.bias"))
    assert last.last
    assert last.reader is None
    assert not any(layer.last for layer in (first, second, hidden))


def test_a_residual_stream_has_no_known_reader():
    found = {layer.layer: layer for layer in units.find_units(ResNet20(3, 10))}
    assert found["3.conv1"].reader == "3.conv2.weight"
    assert found["3.conv1"].owned == ("3.conv1.weight", "3.norm1.weight", "3.norm1.bias")
    assert found["3.conv2"].reader is None
    assert found["0"].reader is None
    assert found["14"].last


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.two(torch.sigmoid(self.one(x)))


@pytest.mark.parametrize(
    "module",
    [
        Odd(),
        nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.Linear(6, 3)),
        nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)),
    ],
)
def test_where_zero_does_not_stay_zero_no_reader_is_claimed(module):
    first, last = units.find_units(module)
    assert first.reader is None
    assert last.last


def test_shared_weights_are_left_alone():
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    two.weight = one.weight
    assert units.find_units(nn.Sequential(one, nn.ReLU(), two)) == ()


@pytest.mark.parametrize(
    ("module", "shape"),
    [(MLP(12, [8, 6], 3), (12,)), (LeNet5(1, 16, 16, 4), (1, 16, 16)), (residual((64,), 3), (64,))],
    ids=["mlp", "lenet", "residual"],
)
def test_a_small_network_answers_like_one_with_zeros(module, shape):
    """Rows and columns of missing units may go: the outputs stay (without normalization)."""
    network = Network(module)
    alive = kept(network)
    if any(layer.norm for layer in network.units):
        alive = {u.layer: alive[u.layer] for u in network.units if u.layer in alive and not u.norm}
        assert alive
    found = units.masks(network.units, alive)
    message = units.restrict(network.initial, found)
    x = torch.randn(5, *shape)
    blank = units.blank(network.initial, found)
    small = units.cut(message)
    assert sum(t.numel() for t in small.values()) < sum(t.numel() for t in blank.values())
    torch.testing.assert_close(network(small, x), network(blank, x))
    for name, tensor in blank.items():
        item = message[name]
        dense = item.dense() if name in found else item
        assert torch.equal(dense, tensor)
    assert units.load_units(units.store_units(network.units)) == network.units


def test_outputs_are_those_that_compute_last():
    network = build(ModelSettings(name="tests.toy_models:head_first"), (64,), 10, seed=0)
    assert {layer.layer: layer.last for layer in network.units} == {"head": True, "body": False}
    assert units.find_units(head_first((64,), 10))[1].last, "by registration it is the body"


def test_layers_of_unknown_units_are_named():
    network = Network(sequence((64,), 10))
    assert network.unknown_layers == ["2 (Conv1d)"]
    network(network.initial, torch.zeros(2, 64))
    assert Network(residual((64,), 3)).unknown_layers == []


@pytest.mark.parametrize("method", ["fedsparse", "scaffold-fedsparse", "fedl1", "feddrop"])
def test_a_method_that_will_save_nothing_says_so(method):
    settings = {
        "rounds": 1,
        "data": {"name": "digits", "clients": 2, "limit": 60, "partition": "iid"},
        "method": {"name": method},
    }
    with pytest.warns(FedbayesWarning, match="no units in this network"):
        fedbayes.run(model={"name": "tests.toy_models:sequence"}, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FedbayesWarning)
        fedbayes.run(model={"hidden": [20]}, **settings)


def test_dropout_says_where_it_drops_nothing():
    settings = {"rounds": 1, "data": {"name": "digits", "clients": 2, "limit": 60}}
    with pytest.warns(FedbayesWarning, match=r"drops nothing of all layers.*1 \(3\)"):
        run = fedbayes.run(
            model={"hidden": [3]}, method={"name": "feddrop", "dense_rate": 0.3}, **settings
        )
    whole = fedbayes.run(model={"hidden": [3]}, method={"name": "fedavg"}, **settings)
    assert run.summary["bytes_down"] >= whole.summary["bytes_down"]


def test_dropout_takes_running_statistics_along():
    """A dropped unit's running mean goes with it, and only those who had it move it."""
    network = Network(normalized((64,), 10))
    method = FedDrop(dense_rate=0.7)
    federation = Federation(clients=3, cohort=3, rounds=1, classes=10, seed=0)
    server = method.init(network, federation)
    total, had = Sum(), torch.zeros(10)
    sums = torch.zeros(10)
    for client in range(3):
        message = method.message(server, client)
        report = dict(message)
        kept = message["2.running_mean"].masks[(0,)]
        value = float(client + 1)
        report["2.running_mean"] = replace(
            message["2.running_mean"], values=torch.full((int(kept.sum()),), value)
        )
        total.add(client, Report(report, weight=2.0))
        had += kept
        sums += value * kept
    assert 0 < int((had == 0).sum()) < 10, "some that nobody had, for a test of something"
    following, _ = method.update(server, total)
    before = server.buffers["2.running_mean"]
    expected = torch.where(had > 0, sums / had.clamp_min(1), before)
    torch.testing.assert_close(following.buffers["2.running_mean"], expected)
    run = fedbayes.run(
        rounds=2,
        data={"name": "digits", "clients": 3, "limit": 200, "partition": "iid"},
        model={"name": "tests.toy_models:normalized"},
        method={"name": "feddrop"},
    )
    assert torch.isfinite(run.server().buffers["2.running_var"]).all()
