"""Units: who owns what, and what is left when some are gone."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import fedbayes
from fedbayes.contracts import Report, Sum
from fedbayes.errors import FedbayesWarning, ModelError
from fedbayes.methods.feddrop import FedDrop
from fedbayes.models import LeNet5, ModelSettings, Network, ResNet20, build, units
from fedbayes.models.networks import MLP
from fedbayes.models.resize import with_weights
from tests.helpers.architectures import Decoder, Grouped, Separable
from tests.helpers.places import at, run_of
from tests.helpers.toy_models import normalized, residual


def test_lenet():
    network = Network(LeNet5(3, 32, 32, 10), shape=(3, 32, 32))
    first, second, hidden, last = network.groups
    assert (first.kind, first.count, first.layer) == ("conv", 20, "0")
    assert first.readers == (units.Axis("3.weight", 1, tuple(range(20))),)
    assert second.readers == (units.Axis("7.weight", 1, tuple(j // 25 for j in range(1250))),)
    assert hidden.kind == "dense"
    assert [axis.tensor for axis in hidden.owned] == ["7.weight", "7.bias"]
    assert last.output
    assert last.readers == ()
    assert not any(group.output for group in (first, second, hidden))
    assert network.traced.untouched == {}


def test_norms_are_over_all_that_makes_a_unit():
    """Against loops; a stream has producers of some of its units only."""
    network = Network(ResNet20(3, 10), shape=(3, 16, 16))
    stream = network.groups[0]
    squares = torch.zeros(64)
    for name in stream.producers:
        for unit, row in enumerate(network.initial[name]):
            squares[unit] += row.square().sum()
    found = units.row_norms(network.initial, stream)
    torch.testing.assert_close(found, squares.sqrt())


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (MLP(12, [8, 6], 3), (12,)),
        (LeNet5(1, 16, 16, 4), (1, 16, 16)),
        (residual((64,), 3), (64,)),
        (Grouped(), (3, 16, 16)),
        (Decoder(), (3, 16, 16)),
    ],
    ids=["mlp", "lenet", "residual", "grouped", "decoder"],
)
def test_a_small_network_answers_like_one_with_zeros(module, shape):
    """What belongs to missing units may go: the outputs stay (without normalization)."""
    network = Network(module, shape=shape)
    rng = torch.Generator().manual_seed(0)
    alive = {
        group.layer: group.thinned(group.step // 2, torch.rand(group.count, generator=rng))
        for group in network.narrowing
        if not group.norms
    }
    assert alive
    found = units.masks(network.groups, alive)
    message = units.mask(network.initial, found)
    x = torch.randn(5, *shape)
    zeroed = units.zero(network.initial, found)
    small = units.slice(message)
    assert sum(t.numel() for t in small.values()) < sum(t.numel() for t in zeroed.values())
    torch.testing.assert_close(network(small, x), network(zeroed, x))
    for name, tensor in zeroed.items():
        item = message[name]
        dense = item.dense() if name in found else item
        assert torch.equal(dense, tensor)


def test_dropout_takes_channels_with_their_own_filters():
    """A client trains the smaller network as the module of that size would be."""
    network = Network(Separable(), shape=(3, 16, 16))
    assert network.narrowing == network.groups[:-1]
    method = FedDrop(conv_rate=0.5)
    run = run_of(network, clients=1, rounds=1, classes=4, seed=0)
    small = units.slice(method.message(method.init(run), at(run, 0)))
    assert small["3.weight"].shape == (4, 1, 3, 3)
    own = with_weights(network.module, small)
    assert [own[place].groups for place in (0, 3, 9)] == [1, 4, 5]
    x = torch.randn(5, 3, 16, 16)
    torch.testing.assert_close(network(network.prepare(small), x), own(x))
    assert [network.module[place].groups for place in (3, 9)] == [8, 10], "as it was"


def test_the_same_share_of_every_cell_stays():
    network = Network(ResNet20(3, 10), shape=(3, 16, 16))
    stream = network.groups[0]
    assert stream.step == 8
    keep = stream.thinned(3, torch.rand(64))
    counts = [int(keep[torch.tensor(stream.cells) == cell].sum()) for cell in range(4)]
    assert counts == [5, 5, 10, 20]


def test_outputs_are_those_that_compute_last():
    network = build(ModelSettings(name="tests.helpers.toy_models:head_first"), (64,), 10, seed=0)
    assert [(group.layer, group.output) for group in network.groups] == [
        ("body", False),
        ("head", True),
    ]


def test_a_network_without_a_shape_says_what_is_missing():
    with pytest.raises(ModelError, match="Give its shape"):
        Network(MLP(4, [3], 2)).groups  # noqa: B018


def test_code_that_counts_on_widths_is_not_narrowed():
    network = build(ModelSettings(name="tests.helpers.toy_models:fixed"), (64,), 10, seed=0)
    body, hidden, _ = network.groups
    assert body.sliceable
    assert network.narrowing == (hidden,)
    with_drop = FedDrop().remarks(run_of(network))
    assert with_drop == [
        "feddrop sends these layers whole: body (the network's code depends on its width)"
    ]


def test_code_that_counts_on_widths_in_training_is_not_narrowed():
    network = build(ModelSettings(name="tests.helpers.toy_models:auxiliary"), (64,), 10, seed=0)
    before = torch.random.get_rng_state()
    assert network.narrowing == ()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert network.traced.untouched == {"side.weight": "its units are not used"}


class Joined(nn.Module):
    """Two branches side by side under one group normalization, whose groups lie across both."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Conv2d(1, 6, 3), nn.Conv2d(1, 6, 3)
        self.norm, self.head = nn.GroupNorm(4, 12), nn.Linear(12, 3)

    def forward(self, x):
        both = torch.relu(self.norm(torch.cat([self.left(x), self.right(x)], dim=1)))
        return self.head(both.mean(dim=(2, 3)))


def test_groups_that_share_a_normalization_are_not_narrowed():
    """Without units of one, those of the other would be normalized with others than before."""
    network = Network(Joined(), shape=(1, 8, 8))
    assert [group.layer for group in network.groups] == ["left", "right", "head"]
    assert network.narrowing == ()


def test_frozen_weights_are_never_cut():
    """Units that are made of frozen weights are not touched; those that these read, not sliced."""
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    module[2].requires_grad_(False)
    network = Network(module, shape=(6,))
    first, last = network.groups
    assert (first.layer, last.layer) == ("0", "4")
    assert first.readers == ()
    assert not first.sliceable
    assert network.narrowing == ()
    assert FedDrop().remarks(run_of(network))[1:] == [
        "feddrop sends these layers whole: 0 (frozen weights read its units)"
    ]


@pytest.mark.parametrize("method", ["fedsparse", "scaffold-fedsparse", "fedl1", "feddrop"])
def test_a_method_that_will_save_nothing_says_so(method):
    settings = {
        "rounds": 1,
        "data": {"name": "digits", "clients": 2, "limit": 60, "partition": "iid"},
        "method": {"name": method},
    }
    with pytest.warns(FedbayesWarning, match="no units of this network"):
        fedbayes.run(model={"name": "tests.helpers.toy_models:rolled"}, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FedbayesWarning)
        fedbayes.run(model={"hidden": [20]}, **settings)


def test_dropout_says_where_it_drops_nothing():
    settings = {"rounds": 1, "data": {"name": "digits", "clients": 2, "limit": 60}}
    with pytest.warns(FedbayesWarning, match=r"drops no units of all layers.*1 \(3\)"):
        run = fedbayes.run(
            model={"hidden": [3]}, method={"name": "feddrop", "dense_rate": 0.3}, **settings
        )
    whole = fedbayes.run(model={"hidden": [3]}, method={"name": "fedavg"}, **settings)
    assert run.summary["bytes_down"] >= whole.summary["bytes_down"]


def test_dropout_takes_running_statistics_along():
    """A dropped unit's running mean goes with it, and only those who had it move it."""
    network = Network(normalized((64,), 10), shape=(64,))
    method = FedDrop(dense_rate=0.7)
    run = run_of(network, clients=3, rounds=1, classes=10, seed=0)
    server = method.init(run)
    total, had = Sum(), torch.zeros(10)
    sums = torch.zeros(10)
    for client in range(3):
        message = method.message(server, at(run, client))
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
    following, _ = method.update(server, total, at(run))
    before = server.buffers["2.running_mean"]
    expected = torch.where(had > 0, sums / had.clamp_min(1), before)
    torch.testing.assert_close(following.buffers["2.running_mean"], expected)
    run = fedbayes.run(
        rounds=2,
        data={"name": "digits", "clients": 3, "limit": 200, "partition": "iid"},
        model={"name": "tests.helpers.toy_models:normalized"},
        method={"name": "feddrop"},
    )
    assert torch.isfinite(run.server().buffers["2.running_var"]).all()


def test_layers_under_two_names_have_units():
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    module.register_module("again", module[0])
    module.forward = lambda x: module[2](module[1](module[0](x)))
    network = Network(module, shape=(6,))
    assert [group.layer for group in network.groups] == ["0", "2"]
    assert not network.traced.untouched
