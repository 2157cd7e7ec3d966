"""Units: who owns what, and what is left when some are gone."""

import pytest
import torch
from torch import nn

from fedbayes.models import LeNet5, Network, ResNet20, units
from fedbayes.models.networks import MLP
from tests.toy_models import residual


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
