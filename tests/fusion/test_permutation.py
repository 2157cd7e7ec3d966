"""Weight matching: random orders are undone exactly, and no step makes things worse."""

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbayes.errors import FedbayesWarning, ModelError
from fedbayes.fusion.permutation import align, distance, permuted_average
from fedbayes.models import MLP
from fedbayes.models.units import find_units, permute
from tests.helpers.architectures import ARCHITECTURES
from tests.helpers.fused import network, shuffled

RECOVERED = [
    "mlp",
    "lenet",
    "batch norm",
    "resnet20",
    "text",
    "pre-norm transformer",
    "attention",
    "u-net",
    "shared",
    "tied",
    "grouped",
    "channel shuffle",
    "decoder",
    "recurrent",
]


@pytest.mark.parametrize("name", RECOVERED)
def test_a_random_order_is_undone_exactly(name):
    _, groups, weights = network(name)
    other = shuffled(weights, groups, 1)
    assert distance(weights, other, weights) > 0
    found, orders = align(weights, other, groups)
    for key, tensor in weights.items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=0)
    assert orders.keys() == {group.layer for group in groups}
    for group in groups:  # the orders say what was done
        other = permute(other, group, orders[group.layer].tolist())
    for key, tensor in weights.items():
        torch.testing.assert_close(other[key], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("to", ["first", "mean"])
def test_the_mean_of_copies_in_random_orders_is_the_network(to):
    _, groups, weights = network("batch norm")
    models = [weights, *(shuffled(weights, groups, seed) for seed in (1, 2, 3))]
    found = permuted_average(models, groups, [0.1, 0.4, 0.3, 0.2], to=to)
    for key, tensor in weights.items():
        torch.testing.assert_close(found.weights[key], tensor)
    assert found.after < 1e-9 < found.before


@pytest.mark.parametrize("to", ["first", "mean"])
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1000), name=st.sampled_from(["mlp", "shared", "u-net"]))
def test_functions_stay_and_the_spread_does_not_grow(to, seed, name):
    module, groups, weights = network(name)
    rng = torch.Generator().manual_seed(seed)
    models = [
        {
            n: t + 0.3 * torch.randn(t.shape, generator=rng) if t.is_floating_point() else t
            for n, t in shuffled(weights, groups, seed + k).items()
        }
        for k in range(3)
    ]
    for model in models:
        for key in model:
            if "running_var" in key:
                model[key] = model[key].abs() + 0.1
    found = permuted_average(models, groups, [0.5, 0.3, 0.2], to=to)
    if to == "mean":
        assert found.after <= found.before * (1 + 1e-9)
    names = {axis.tensor for group in groups for axis in (*group.owned, *group.readers)}
    reference = models[0] if to == "first" else None
    x = torch.randn(3, *ARCHITECTURES[name][1]().shape[1:], generator=rng)
    for before, after in zip(models, found.aligned, strict=True):
        if reference is not None:
            first, second = (distance(reference, m, names) for m in (before, after))
            assert second <= first * (1 + 1e-9)
        module.load_state_dict(before)
        wanted = module(x)
        module.load_state_dict(after)
        torch.testing.assert_close(module(x), wanted, rtol=1e-3, atol=1e-4)


def test_one_hidden_layer_is_matched_as_by_trying_all_orders():
    """Given all other groups, an assignment is the best of all orders."""
    torch.manual_seed(3)
    one, two = ({n: t.clone() for n, t in MLP(3, [5], 2).state_dict().items()} for _ in "ab")
    groups = find_units(MLP(3, [5], 2), torch.zeros(2, 3)).groups
    hidden = [group for group in groups if not group.output]
    found, _ = align(one, two, hidden)
    every = [permute(two, hidden[0], order) for order in permutations(range(5))]
    best = min(distance(one, other, one) for other in every)
    assert distance(one, found, one) == pytest.approx(best)


def test_orders_of_the_outputs_stay():
    module, _, weights = network("mlp")
    every = find_units(module, torch.zeros(2, 6)).groups
    (output,) = [group for group in every if group.output]
    turned = permute(weights, output, [3, 2, 1, 0])
    found = permuted_average([weights, turned], every, [0.5, 0.5])
    wanted = (weights["5.weight"] + weights["5.weight"].flip(0)) / 2
    torch.testing.assert_close(found.weights["5.weight"], wanted)


def test_that_nothing_can_change_places_is_told():
    _, _, weights = network("mlp")
    with pytest.warns(FedbayesWarning, match="no units of these networks can"):
        found = permuted_average([weights, weights], [], [0.5, 0.5])
    assert found.before == found.after == 0


def test_refusals():
    _, groups, weights = network("mlp")
    other = MLP(6, [9, 8], 4).state_dict()
    with pytest.raises(ModelError, match="Networks of different widths have no mean"):
        permuted_average([weights, other], groups, [0.5, 0.5])
    _, elsewhere, _ = network("lenet")
    with pytest.raises(ModelError, match=r"lack '0\.weight', which the graph has"):
        permuted_average([weights, weights], elsewhere, [0.5, 0.5])
