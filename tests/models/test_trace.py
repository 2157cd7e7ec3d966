"""Units that are traced: whatever is claimed of a group holds, by brute force."""

from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from fedbayes.models import units
from fedbayes.models.compact import compact
from fedbayes.models.steps import clean
from tests.helpers.architectures import ARCHITECTURES, ODD


@cache
def traced(name):
    """Module, weights at random, inputs, their outputs, and what the trace says."""
    make, example = ARCHITECTURES[name]
    rng = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    module = make().eval()
    found = units.find_units(module, example())
    weights = {}
    for key, tensor in clean(module).items():
        if key not in module.state_dict():
            continue
        if not tensor.is_floating_point():
            weights[key] = tensor
        else:  # nothing may hold only since a scale is one or a shift is zero
            noise = torch.rand(tensor.shape, generator=rng)
            weights[key] = tensor + 0.3 * (noise + 0.1 if "running_var" in key else noise - 0.5)
    x = example()
    x = (
        torch.randn(3, *x.shape[1:], generator=rng)
        if x.is_floating_point()
        else torch.randint(11, (3, *x.shape[1:]), generator=rng)
    )
    return module, weights, x, answer(module, weights, x), found


NARROWED = {
    *("mlp", "lenet", "cnn", "batch norm", "resnet20", "resnet18", "mobilenet", "vgg", "text"),
    *("u-net", "squeeze and excite", "shared", "tied", "parallel", "depthwise"),
    *("grouped", "separable", "decoder", "slopes"),
}
"""Architectures without a width in their code, and without layer normalization."""


def answer(module, weights, x):
    with torch.no_grad():
        return functional_call(module, weights, (x,))


def assert_close(one, two):
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5 * float(two.abs().max()))


def permutation(group, rng):
    """Any order of a group's units, inside their cells."""
    order = torch.arange(group.count)
    cells = torch.tensor(group.cells)
    for cell in cells.unique():
        own = (cells == cell).nonzero()[:, 0]
        order[own] = own[torch.randperm(len(own), generator=rng)]
    return order.tolist()


@pytest.mark.parametrize("name", ARCHITECTURES)
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6), every=st.booleans())
def test_permuted_units_answer_the_same(name, seed, every):
    module, weights, x, wanted, found = traced(name)
    rng = torch.Generator().manual_seed(seed)
    for group in found.groups:
        if group.output or not (every or torch.rand(1, generator=rng) < 0.3):
            continue
        weights = units.permute(weights, group, permutation(group, rng))
    assert_close(answer(module, weights, x), wanted)


@pytest.mark.parametrize("name", ARCHITECTURES)
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6), share=st.floats(0.1, 0.9))
def test_zeroed_units_can_be_left_out(name, seed, share):
    """Readers see zeros, so their columns may go; and the network without them is compact."""
    module, weights, x, _, found = traced(name)
    rng = torch.Generator().manual_seed(seed)
    alive = {}
    for group in found.groups:
        if not group.output and torch.rand(1, generator=rng) < 0.5:
            keep = torch.rand(group.count, generator=rng) >= share
            keep[[group.cells.index(cell) for cell in set(group.cells)]] = True
            alive[group.layer] = keep
    zeroed = units.zero(weights, units.masks(found.groups, alive, readers=False))
    wanted = answer(module, zeroed, x)
    assert_close(answer(module, units.zero(zeroed, units.masks(found.groups, alive)), x), wanted)
    small = compact(module, zeroed, found.groups, x)
    with torch.no_grad():
        assert_close(small(x), wanted)
    if name in NARROWED:
        left = units.slice(
            units.mask(dict(module.named_parameters()), units.masks(found.groups, alive))
        )
        assert sum(p.numel() for p in small.parameters()) == sum(p.numel() for p in left.values())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_are_in_a_group_or_named_with_a_reason(name):
    module, _, _, _, found = traced(name)
    made = [producer for group in found.groups for producer in group.producers]
    assert len(made) == len(set(made))
    named = {n for n, p in module.named_parameters() if p.ndim > 1}
    assert named - set(made) == found.untouched.keys()
    assert all(found.untouched.values())


def groups_of(name):
    return {group.layer: group for group in traced(name)[4].groups}


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("recurrent", {"embedding", "lstm.weight_ih_l0", "lstm.weight_hh_l0"}),
        ("mixer", {"back"}),
        *((f"odd: {odd}", {"one"}) for odd in ("roll", "sort", "cumulative", "positions", "pairs")),
        *((f"odd: {odd}", {"one"}) for odd in ("gathered", "picked", "transform", "in place")),
    ],
)
def test_what_is_not_understood_is_left_alone(name, left):
    assert {n.removesuffix(".weight") for n in traced(name)[4].untouched} == left


def test_a_network_that_branches_has_no_groups():
    found = traced("odd: branch")[4]
    assert found.groups == ()
    assert all(why.startswith("it cannot be traced: ") for why in found.untouched.values())


EVERYTHING = set(ARCHITECTURES) - {f"odd: {odd}" for odd in ODD} - {"recurrent", "mixer"}


@pytest.mark.parametrize("name", sorted(EVERYTHING))
def test_every_layer_of_usual_networks_is_traced(name):
    found = traced(name)[4]
    assert found.untouched == {}
    assert sum(group.output for group in found.groups) == 1


def test_a_residual_stream_is_one_group():
    found = groups_of("resnet20")
    stream = found["0"]
    assert stream.count == 64
    assert len(stream.producers) == 10
    assert len(stream.readers) == 10  # first convolutions of nine blocks, and the outputs
    assert [stream.cells.count(cell) for cell in range(4)] == [8, 8, 16, 32]
    first = next(axis for axis in stream.owned if axis.tensor == "3.conv2.weight")
    assert first.units == tuple(range(16))
    assert all(group.sliceable for group in found.values() if not group.output)
    assert sum(not group.output for group in found.values()) == 10


def test_heads_are_blocks():
    packed = groups_of("pre-norm transformer")["encoder.layers.0.self_attn.in_proj_weight"]
    assert packed.count == 4
    assert packed.owned[0].units == tuple(row // 2 for row in range(8)) * 3
    own = groups_of("attention")["query"]
    assert own.producers == ("query.weight", "key.weight", "value.weight")
    assert [(axis.tensor, axis.units) for axis in own.readers] == [
        ("out.weight", (0, 0, 0, 0, 1, 1, 1, 1))
    ]


def test_layer_normalization_forbids_to_slice_and_sigmoids_to_leave_readers():
    stream = groups_of("pre-norm transformer")["embedding"]
    assert "layer normalization" in stream.mixed
    assert stream.zero_safe
    assert not stream.sliceable
    assert not groups_of("odd: sigmoid")["one"].zero_safe


def test_filters_of_single_channels_go_with_the_channel():
    deep = groups_of("depthwise")
    assert set(deep) == {"stem", "head"}
    by_tensor = {axis.tensor: axis.units for axis in deep["stem"].owned}
    assert by_tensor["deep.weight"] == tuple(channel // 2 for channel in range(16))
    assert len(set(deep["stem"].cells)) == 2


def test_a_unit_of_a_convolution_in_groups_is_a_channel_of_every_block():
    found = groups_of("grouped")
    read, made = found["stem"], found["groups"]
    assert (read.count, made.count) == (4, 4)
    assert read.owned[0].units == (0, 1, 2, 3, 0, 1, 2, 3)
    assert [(axis.tensor, axis.axis, axis.units) for axis in read.readers] == [
        ("groups.weight", 1, (0, 1, 2, 3))
    ]
    assert made.owned[0].units == (0, 1, 2, 3, 0, 1, 2, 3)
    assert groups_of("channel shuffle")["one"].count == 4


def test_units_that_are_joined_in_other_ways_are_in_other_cells():
    """The shuffle has two circles of three, but brings no order of one to that of the other."""
    shuffled = groups_of("odd: shuffled")["one"]
    assert shuffled.owned[0].units == (0, 1, 1, 2, 1, 2, 2, 3)
    assert shuffled.cells == (0, 1, 2, 0)


def test_a_concatenation_is_read_by_both():
    found = groups_of("u-net")
    (reader,) = found["up"].readers
    assert reader.tensor == "last.weight"
    assert reader.units == (-1,) * 4 + tuple(range(5))
    assert [a.axis for a in found["up"].owned if a.tensor == "up.weight"] == [1]


class LowRank(nn.Module):
    """A layer whose weight is a product of two tensors."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(8, 2))
        self.down = nn.Parameter(torch.randn(2, 6))
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.relu(functional.linear(x, self.up @ self.down)))


def test_units_on_two_axes_of_a_tensor_are_groups_of_their_own():
    module, x = LowRank().eval(), torch.randn(4, 6)
    groups = units.find_units(module, x).groups
    assert [(g.layer, g.count) for g in groups] == [("up", 8), ("up:2", 2), ("last", 3)]
    weights = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    alive = {"up": torch.arange(8) > 3, "up:2": torch.tensor([True, False])}
    zeroed = units.zero(weights, units.masks(groups, alive))
    wanted = weights | {"up": weights["up"].clone()}
    wanted["up"][:4], wanted["up"][:, 1] = 0, 0
    torch.testing.assert_close(answer(module, zeroed, x), answer(module, wanted, x))
