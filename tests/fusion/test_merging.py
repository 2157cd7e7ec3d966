"""Neurons of several clients that become one of the fused network."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbayes.fusion.merging import merge
from fedbayes.fusion.regression import regress
from fedbayes.fusion.targets import Targets
from fedbayes.models import MLP
from fedbayes.testing import assert_identical
from tests.helpers.fused import error, inputs, teacher_of, trained_like


def random_units(seed, count=24, samples=40):
    rng = torch.Generator().manual_seed(seed)
    raw = torch.randn(count, samples, generator=rng).relu()
    return raw, torch.rand(count, generator=rng) + 0.1


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 1000))
def test_what_is_left_is_that_of_a_projection(seed):
    """Against least squares of all rows on the merged ones, whose shares are of raw activations."""
    raw, importance = random_units(seed)
    factor = raw * importance[:, None]
    chosen = torch.randperm(24, generator=torch.Generator().manual_seed(seed))[:7]
    cells = torch.arange(24) % 2
    merged = merge(factor, importance, chosen, cells)
    rows = np.zeros((7, raw.shape[1]))
    for unit, (slot, share) in enumerate(zip(merged.slot, merged.share, strict=True)):
        if slot >= 0:
            assert cells[chosen[slot]] == cells[unit]
            assert share > 0
            rows[slot] += float(share) * raw[unit].numpy()
        else:
            assert share == 0
    assert merged.slot[chosen].tolist() == list(range(7)), "chosen ones stay with their own"
    for told, basis in ((merged.left, rows), (merged.left_by_choice, factor[chosen].numpy())):
        a = factor.numpy()
        solution, *_ = np.linalg.lstsq(basis.T, a.T, rcond=None)
        left = np.square(a.T - basis.T @ solution).sum() / np.square(a).sum()
        assert told == pytest.approx(left, abs=1e-4)


def test_noisy_copies_are_averaged():
    """Ten clients saw the same five units through noise: means are nearer to all than any one."""
    rng = torch.Generator().manual_seed(0)
    true = torch.randn(5, 400, generator=rng).relu()
    factor = true.repeat(10, 1) + 0.2 * torch.randn(50, 400, generator=rng)
    merged = merge(factor, torch.ones(50), torch.arange(5), torch.zeros(50))
    assert merged.slot.tolist() == [0, 1, 2, 3, 4] * 10
    torch.testing.assert_close(merged.share, torch.full((50,), 0.1), rtol=0.1, atol=0)
    assert merged.better
    assert merged.left_by_choice - merged.left > 0.5 * merged.left_by_choice - 0.05


def test_silent_units_stay_alone():
    raw, importance = random_units(1)
    raw[[2, 3]] = 0
    importance[[4, 5]] = 0
    merged = merge(raw * importance[:, None], importance, torch.tensor([0, 2, 4]), torch.zeros(24))
    assert merged.slot[[0, 2, 4]].tolist() == [0, 1, 2]
    assert merged.slot[[3, 5]].tolist() == [-1, -1]
    assert merged.share[[2, 4]].tolist() == [1, 1]
    assert merged.share.isfinite().all()


def test_nothing_is_better_where_all_units_are_kept():
    raw, importance = random_units(2)
    merged = merge(raw * importance[:, None], importance, torch.arange(24), torch.zeros(24))
    assert not merged.better


def noisy_copies(noise, count=6):
    """Networks whose first layers are one network's, each with noise of its own."""
    module = trained_like(lambda: MLP(6, [9, 7], 4), 1)
    modules = []
    for seed in range(count):
        copy = trained_like(lambda: MLP(6, [9, 7], 4), 1)
        rng = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in list(copy.parameters())[:4]:
                parameter += noise * torch.randn(parameter.shape, generator=rng)
        modules.append(copy)
    return module, modules


def test_merged_neurons_of_noisy_copies_are_nearer_to_the_teacher():
    module, modules = noisy_copies(0.15)
    example = torch.zeros(2, 6)
    teacher = teacher_of(modules, 4)
    errors, said = {}, []
    for units in ("chosen", "merged", "auto"):
        fused = regress(
            modules,
            module,
            teacher,
            lambda i: inputs(example, i, 256),
            8,
            units=units,
            watch=said.append,
        )
        errors[units] = error(fused, teacher, inputs(example, 99, 500))
    assert errors["merged"] < 0.9 * errors["chosen"]
    assert errors["auto"] == errors["merged"]
    assert said == ["neurons of several clients are merged in layer 1, 3"] * 2


def test_the_clients_say_once_what_both_choices_are_solved_for(monkeypatch):
    module, modules = noisy_copies(0.15)
    teacher, example = teacher_of(modules, 4), torch.zeros(2, 6)
    listened, inner = [], Targets._inner

    def counted(self, asking, number, *rest):
        listened.append((len(asking), number))
        return inner(self, asking, number, *rest)

    monkeypatch.setattr(Targets, "_inner", counted)
    fused = {}
    for name, more in {"auto": {}, "merged": {"units": "merged"}, "little": {"memory": 0}}.items():
        listened.clear()
        fused[name] = regress(
            modules, module, teacher, lambda i: inputs(example, i, 256), 4, **more
        ).state_dict()
        # The first layer keeps the clients' own weights, and the last has the teacher's outputs.
        layers = {"auto": 2, "merged": 1, "little": 1}[name]
        assert max(listened) == (layers, 3)
        assert len(listened) == (4 * 4 if name == "little" else 4)
    assert_identical(fused["auto"], fused["merged"])
    assert_identical(fused["auto"], fused["little"])


def test_a_first_layer_of_merged_neurons_is_the_sum_of_theirs():
    """Copies of one network, whose neurons are scaled: the fused function is the network's."""
    module = trained_like(lambda: MLP(6, [9], 4), 1)
    scaled = trained_like(lambda: MLP(6, [9], 4), 1)
    with torch.no_grad():
        scaled[1].weight *= 3
        scaled[1].bias *= 3
        scaled[3].weight /= 3
    modules = [module, scaled]
    example = torch.zeros(2, 6)
    teacher = teacher_of(modules, 4)
    fused = regress(
        modules, module, teacher, lambda i: inputs(example, i, 128), 4, ridge=1e-7, units="merged"
    )
    assert error(fused, teacher, inputs(example, 99)) < 1e-3
