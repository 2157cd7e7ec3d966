"""C2M3 against brute force, finite differences and planted orders."""

from functools import cache
from itertools import permutations, product

import numpy as np
import pytest
import torch

from fedbayes.errors import FedbayesWarning
from fedbayes.fusion.cycles import _Universe, cycle_consistent
from fedbayes.fusion.permutation import align
from fedbayes.models import MLP
from fedbayes.models.units import find_units, permute
from tests.helpers.architectures import ARCHITECTURES
from tests.helpers.fused import network, shuffled

ALPHA = [0.5, 0.3, 0.2]


def states(seed, count=3, sizes=(3,)):
    torch.manual_seed(seed)
    return [MLP(2, list(sizes), 2).state_dict() for _ in range(count)]


@cache
def hidden(sizes=(3,)):
    groups = find_units(MLP(2, list(sizes), 2), torch.zeros(2, 2)).groups
    return [group for group in groups if not group.output]


def inner(models, alpha):
    """Σ_{s<t} α_s α_t ⟨w_s, w_t⟩, over weights that belong to hidden units."""
    flat = [torch.cat([m[n].flatten() for n in m]).double() for m in models]
    pairs = [(s, t) for t in range(len(flat)) for s in range(t)]
    return sum(alpha[s] * alpha[t] * float(flat[s] @ flat[t]) for s, t in pairs)


def last_bias(models):
    """Tensors that no hidden unit has any part of."""
    names = {a.tensor for g in hidden() for a in (*g.owned, *g.readers)}
    return [{n: t for n, t in m.items() if n in names} for m in models]


@pytest.mark.parametrize("name", ["mlp", "batch norm", "shared", "grouped"])
def test_copies_in_random_orders_become_one(name):
    _, groups, weights = network(name)
    models = [weights, *(shuffled(weights, groups, seed) for seed in (1, 2))]
    found, objective = cycle_consistent(models, groups, ALPHA)
    assert found.after < 1e-9 < found.before
    for key, tensor in found.weights.items():
        for model in found.aligned:
            torch.testing.assert_close(model[key], tensor)
    assert objective == sorted(objective)


def test_no_order_of_all_is_better_and_most_are_found():
    """All 6³ orders of three networks of three hidden units: equal to the best in most cases."""
    best_found = 0
    (group,) = hidden()
    for seed in range(30):
        models = last_bias(states(seed))
        found, _ = cycle_consistent(models, [group], ALPHA)
        orders = list(permutations(range(3)))
        best = max(
            inner([models[0], permute(models[1], group, p), permute(models[2], group, q)], ALPHA)
            for p, q in product(orders, orders)
        )
        own = inner(found.aligned, ALPHA)
        assert own <= best + 1e-6
        assert own >= inner(models, ALPHA) - 1e-6
        best_found += own > best - 1e-6
    assert best_found >= 20


@pytest.mark.parametrize("seed", range(5))
def test_the_objective_never_decreases_and_is_that_of_all_pairs(seed):
    models = last_bias(states(seed, sizes=(3,)))
    found, objective = cycle_consistent(models, hidden(), ALPHA)
    first = [align(models[0], model, hidden())[0] for model in models]
    assert objective[0] == pytest.approx(inner(first, ALPHA), abs=1e-6)
    assert objective == sorted(objective)
    spread = sum(  # Σ_s α_s ‖w_s − w̄‖² = Σ_{s<t} α_s α_t ‖w_s − w_t‖², as the α add to 1
        ALPHA[s] * ALPHA[t] * float((found.aligned[s][n] - found.aligned[t][n]).square().sum())
        for n in models[0]
        for t in range(3)
        for s in range(t)
    )
    assert found.after == pytest.approx(spread, rel=1e-5)
    assert found.after <= found.before


def test_gradients_are_those_of_finite_differences():
    """At matrices that are no permutations; of a network with two hidden layers."""
    models, groups = states(1, sizes=(3, 4)), hidden((3, 4))
    names = list(dict.fromkeys(a.tensor for g in groups for a in (*g.owned, *g.readers)))
    same = {group.layer: np.arange(group.count) for group in groups}
    universe, rng = _Universe(models, groups, ALPHA, names, [same] * 3), np.random.default_rng(0)
    for own in universe.matrices:
        for matrix in own:
            matrix += 0.3 * torch.tensor(rng.standard_normal(matrix.shape))
    slopes = universe.gradients(universe.matrices)
    for s, g in product(range(3), range(2)):
        for i, j in ((0, 1), (2, 2)):
            values = []
            for step in (1e-4, -1e-4):
                moved = [[matrix.clone() for matrix in own] for own in universe.matrices]
                moved[s][g][i, j] += step
                values.append(universe.objective(moved))
            wanted = (values[0] - values[1]) / 2e-4
            assert float(slopes[s][g][i, j]) == pytest.approx(wanted, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", ["mlp", "grouped", "shared"])
def test_matching_around_a_cycle_leads_back(name):
    """From one network to the next and back by the universe; functions stay."""
    module, groups, weights = network(name)
    rng = torch.Generator().manual_seed(0)
    models = [
        {
            n: t + 0.3 * torch.randn(t.shape, generator=rng) if t.is_floating_point() else t
            for n, t in shuffled(weights, groups, seed).items()
        }
        for seed in range(3)
    ]
    found, _ = cycle_consistent(models, groups, ALPHA)
    x = torch.randn(3, *ARCHITECTURES[name][1]().shape[1:], generator=rng)
    for before, after in zip(models, found.aligned, strict=True):
        module.load_state_dict(before)
        wanted = module(x)
        module.load_state_dict(after)
        torch.testing.assert_close(module(x), wanted, rtol=1e-3, atol=1e-4)
    for group in groups:
        orders = [order[group.layer] for order in found.orders]
        for order in orders:
            cells = np.array(group.cells)
            assert sorted(order) == list(range(group.count))
            assert (cells[order] == cells).all()
        around = np.arange(group.count)
        for one, two in zip(orders, [*orders[1:], orders[0]], strict=True):
            around = two[np.argsort(one)][around]  # a unit of one, in the order of the next
        assert around.tolist() == list(range(group.count))


def test_networks_without_units_are_averaged_and_told():
    _, _, weights = network("mlp")
    with pytest.warns(FedbayesWarning, match="no units of these networks can"):
        found, _ = cycle_consistent([weights, weights], [], [0.5, 0.5])
    assert found.before == found.after == 0
