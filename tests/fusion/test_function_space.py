"""Networks fused in function space by least squares, and what it is made of."""

import gc
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from fedbayes.errors import ConfigError, ModelError
from fedbayes.fusion import layers, regression, widths
from fedbayes.fusion.choice import pivots
from fedbayes.fusion.draws import CachedInputs
from fedbayes.fusion.function import fuse_functions
from fedbayes.fusion.graph_matching import match_graph
from fedbayes.fusion.normal import NormalEquations
from fedbayes.fusion.patches import patches, picked
from fedbayes.fusion.regression import regress
from fedbayes.fusion.settings import FunctionSettings
from fedbayes.fusion.teacher import Teacher
from fedbayes.inputs import Inputs, build_prior
from fedbayes.matching import MatchingSettings
from fedbayes.models import MLP, LeNet5, units
from fedbayes.models.resize import resized, widened, with_weights
from fedbayes.models.steps import Steps, clean
from tests.helpers.architectures import ARCHITECTURES
from tests.helpers.cases import cases
from tests.helpers.fused import error, inputs, teacher_of, trained_like

UNITED = (
    *("mlp", "lenet", "batch norm", "text", "u-net", "squeeze and excite"),
    *("shared", "tied", "parallel", "separable", "grouped", "decoder", "channel shuffle"),
    "slopes",
)


@pytest.mark.parametrize("name", cases(UNITED, slow=("u-net", "decoder")))
def test_all_units_of_all_clients_are_the_teacher(name):
    """Side by side they compute the sum by shares, so that there is nothing to approximate."""
    make, example = ARCHITECTURES[name][0], ARCHITECTURES[name][1]()
    modules = [trained_like(make, seed) for seed in (1, 2)]
    teacher = teacher_of(modules, modules[0](example).shape[-1])
    said = []
    fused = regress(
        modules, make(), teacher, lambda i: inputs(example, i), 2, widths=2.0, watch=said.append
    )
    assert error(fused, teacher, inputs(example, 99)) < 1e-4
    unsolved = "not fitted, with their clients' own weights: groups.weight, deep.weight"
    assert (unsolved in said) == (name == "decoder")
    count = sum(p.numel() for p in fused.parameters())
    assert count > sum(p.numel() for p in modules[0].parameters())


COPIED = (
    "mlp",
    "batch norm",
    "text",
    "depthwise",
    "attention",
    "pre-norm transformer",
    "grouped",
    "separable",
    "decoder",
    "slopes",
    "channel shuffle",
    "recurrent",
    "mixer",
    "cross attention",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", COPIED)
def test_copies_with_their_units_in_other_orders_give_the_network_again(name):
    make, example = ARCHITECTURES[name][0], ARCHITECTURES[name][1]()
    module = trained_like(make, 1)
    modules, rng = [module], np.random.default_rng(0)
    groups = units.find_units(module, example).groups
    for _ in range(2):
        weights = clean(module)
        for group in groups:
            if group.output:
                continue
            cells, order = np.array(group.cells), np.arange(group.count)
            for cell in set(group.cells):
                order[cells == cell] = rng.permutation(order[cells == cell])
            weights = units.permute(weights, group, order.tolist())
        modules.append(with_weights(module, weights))
        torch.testing.assert_close(modules[-1](example), module(example))
    teacher = teacher_of(modules, module(example).shape[-1])
    # Fewer places than features leave the ridge to decide between copies.
    fused = regress(modules, make(), teacher, lambda i: inputs(example, i, 64), 6, ridge=1e-7)
    assert error(fused, teacher, inputs(example, 99)) < 0.02


class Products(nn.Module):
    """Layers as matrices."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Parameter(torch.randn(6, 7)), nn.Parameter(torch.randn(7, 4))

    def forward(self, x):
        return torch.relu(x @ self.one) @ self.two


class Vocabulary(nn.Module):
    """A network that tells words, by the vectors that it has of them."""

    def __init__(self):
        super().__init__()
        self.words, self.body = nn.Embedding(11, 6), nn.Linear(6, 6)

    def forward(self, x):
        return functional.linear(self.body(self.words(x).mean(1)), self.words.weight)


def test_vectors_that_are_looked_up_stay_as_they_are():
    """Side by side they give the clients' sum; solved for as the last layer, features moved."""
    modules = [trained_like(Vocabulary, seed) for seed in (1, 2)]
    example, said = torch.zeros(2, 5, dtype=torch.int64), []
    draw = lambda i: inputs(example, i)  # noqa: E731
    teacher = teacher_of(modules, 11)
    fused = regress(modules, Vocabulary(), teacher, draw, 3, widths=2.0, watch=said.append)
    assert error(fused, lambda x: sum(module(x) for module in modules), draw(9)) < 1e-4
    assert "not fitted, with their clients' own weights: words.weight" in said


@pytest.mark.parametrize(
    ("make", "shape", "left"),
    [
        (ARCHITECTURES["mixer"][0], (3, 16, 16), "token.weight, back.weight"),
        (Products, (6,), "two"),
    ],
    ids=["across the units of others", "no layers of PyTorch"],
)
def test_layers_that_are_not_solved_for_are_named(make, shape, left):
    module, said, example = make(), [], torch.zeros(2, *shape)
    teacher = teacher_of([module] * 2, 4)
    regress([module] * 2, make(), teacher, lambda i: inputs(example, i), 1, watch=said.append)
    assert f"not fitted, with their clients' own weights: {left}" in said


@pytest.mark.slow
def test_copies_of_a_residual_network_give_it_again():
    make, example = ARCHITECTURES["resnet20"][0], ARCHITECTURES["resnet20"][1]()
    modules = [trained_like(make, 1)] * 2
    teacher = teacher_of(modules, 4)
    fused = regress(modules, make(), teacher, lambda i: inputs(example, i), 4, ridge=1e-7)
    assert error(fused, teacher, inputs(example, 99)) < 0.01


def test_a_wider_network_is_nearer_to_the_teacher():
    modules = [trained_like(lambda: MLP(6, [9, 7], 4), seed) for seed in range(4)]
    example = torch.zeros(2, 6)
    teacher = teacher_of(modules, 4)
    errors = []
    for width in (0.5, 1.0, 2.0, {"1": 30, "3": 3.0}):
        fused = regress(
            modules, modules[0], teacher, lambda i: inputs(example, i), 20, widths=width
        )
        errors.append(error(fused, teacher, inputs(example, 99, 500)))
    assert errors == sorted(errors, reverse=True)
    assert [len(fused[1].weight), len(fused[3].weight)] == [30, 21]
    worse = min(error(m, teacher, inputs(example, 99, 500)) for m in modules)
    assert errors[1] < worse, "at a client's size it is better than any client"


def test_clients_of_other_widths_and_other_graphs():
    torch.manual_seed(1)
    narrow, wide = MLP(6, [5], 4), MLP(6, [9], 4)
    example = torch.zeros(2, 6)
    teacher = teacher_of([narrow, wide], 4)
    draw = lambda i: inputs(example, i)  # noqa: E731
    for width in (2.0, 1e5):
        fused = regress([narrow, wide], MLP(6, [7], 4), teacher, draw, 3, widths=width)
        assert len(fused[1].weight) == 14
        assert error(fused, teacher, draw(99)) < 1e-4

    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(widths, "widened", lambda *given: asked.append(given[2]) or widened(*given))
        regress([narrow, wide], MLP(6, [7], 4), teacher, draw, 3, widths=1e12)
    assert asked == [14], "lists of places are no longer than there are units"

    said = []
    other = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    teacher = teacher_of([narrow, other], 4)
    fused = regress([narrow, other], narrow, teacher, draw, 20, watch=said.append)
    assert any("other graphs" in text for text in said)
    assert error(fused, teacher, draw(99)) < error(narrow, teacher, draw(99))
    torch.testing.assert_close(fused[1].weight.sort(0)[0], narrow[1].weight.sort(0)[0])

    said = []
    fused = regress([other, other], wide, teacher_of([other] * 2, 4), draw, 20, watch=said.append)
    assert any("no client has the graph of the fused network, so" in text for text in said)
    torch.testing.assert_close(fused[1].weight.sort(0)[0], wide[1].weight.sort(0)[0])
    x, target = draw(0), other(draw(0)).detach()
    with torch.no_grad():
        assert (fused(x) - target).norm() < 0.7 * target.norm(), "its outputs are fitted. Start"


def test_filters_of_single_channels_are_least_squares_channel_by_channel():
    """Against NumPy's, on what the fused layers below give."""

    def make():
        return nn.Sequential(
            *(nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Conv2d(6, 6, 1), nn.Tanh()),
            *(nn.Conv2d(6, 6, 3, groups=6), nn.Tanh(), nn.Flatten(), nn.Linear(24, 4)),
        )

    client, example = trained_like(make, 1), torch.zeros(2, 3, 6, 6)
    draws = [inputs(example, number) for number in range(3)]
    teacher = teacher_of([client], 4)
    fused = regress([client], make(), teacher, draws.__getitem__, 3, widths=0.5, ridge=1e-12)
    assert (fused[4].groups, fused[4].weight.shape) == (3, (3, 1, 3, 3))
    with torch.no_grad():
        below, said = (f[:4](torch.cat(draws)) for f in (fused, client))
        seen = functional.unfold(below, 3).reshape(len(below), 3, 9, 4)
        said = client[4](said).permute(1, 0, 2, 3).reshape(6, -1).numpy()
    units_of = set()
    for channel, filters in enumerate(fused[4].weight.detach().flatten(1).numpy()):
        rows = seen[:, channel].transpose(1, 2).reshape(-1, 9).numpy().astype(float)
        rows = np.hstack([rows, np.ones((len(rows), 1))])
        wanted, left, *_ = np.linalg.lstsq(rows, said.T.astype(float), rcond=None)
        far = np.abs(wanted[:9] - filters[:, None]).max(0)
        units_of.add(unit := int(far.argmin()))
        assert far[unit] < 1e-4 < np.delete(far, unit).min()
        assert wanted[9, unit] == pytest.approx(fused[4].bias[channel].item(), abs=1e-4)
        assert left[unit] > 1e-3, "something is left, so that this is no copy"
    assert len(units_of) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["separable", "grouped", "decoder", "channel shuffle"])
def test_blocks_and_single_channels_of_other_widths(name):
    make, example = ARCHITECTURES[name][0], ARCHITECTURES[name][1]()
    modules = [trained_like(make, seed) for seed in (1, 2)]
    teacher = teacher_of(modules, 4)
    errors = []
    for width in (0.5, 1.0, 1.5):
        said = []
        fused = regress(
            modules, make(), teacher, lambda i: inputs(example, i), 8, widths=width,
            watch=said.append,
        )  # fmt: skip
        errors.append(error(fused, teacher, inputs(example, 99)))
        kept = [f"{layer}: the network's own code does not support 1 units; it stays at 2"
                for layer in ("stem",) if name == "decoder" and width == 0.5]  # fmt: skip
        assert [text for text in said if "support" in text] == kept
    assert errors[0] > errors[1] > errors[2]


def test_other_numbers_of_groups_are_other_graphs():
    def network(groups):
        return nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=groups), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(32, 4)),
        )

    clients, said = [network(2), network(4)], []
    example = torch.zeros(2, 3, 6, 6)
    teacher = teacher_of(clients, 4)
    regress(clients, network(2), teacher, lambda i: inputs(example, i), 2, watch=said.append)
    assert any("1 of 2 clients have other graphs" in text for text in said)
    with pytest.raises(ModelError, match="b has another graph than a"):
        match_graph(dict(zip("ab", clients, strict=True)), MatchingSettings(), example)


def test_programs_are_networks_too():
    def program(seed):
        module = trained_like(lambda: MLP(6, [9], 4), seed)
        batch = ({0: torch.export.Dim("n")},)
        return torch.export.export(module, (torch.zeros(3, 6),), dynamic_shapes=batch).module()

    modules = [program(1), program(2)]
    teacher = teacher_of(modules, 4)
    example = torch.zeros(2, 6)
    fused = regress(modules, modules[0], teacher, lambda i: inputs(example, i), 3, widths=2.0)
    assert error(fused, teacher, inputs(example, 99)) < 1e-4


def test_mistakes_are_told():
    module, example = MLP(6, [9], 4), torch.zeros(2, 6)
    teacher = teacher_of([module], 4)

    def told(
        kind, match, draw=lambda i: inputs(example, i), like=module, clients=(module,), **more
    ):
        said, batches = more.pop("said", teacher), more.pop("batches", 3)
        with pytest.raises(kind, match=match):
            regress(clients, like, said, draw, batches, **more)

    told(ConfigError, "unknown group of units 'body'. Choose 1", widths={"body": 3})
    told(ConfigError, "-1.0 is not a width for '1'", widths=-1.0)
    told(ConfigError, "0 batches", batches=0)
    told(ModelError, "no models", clients=())
    told(ModelError, "batches of one size", draw=lambda i: inputs(example, i, 8 + i))
    told(ModelError, r"outputs of shape \(48, 3\), but the ensemble \(48, 4\)", like=MLP(6, [9], 3))
    told(ModelError, "cannot be traced", like=Branch())
    told(ModelError, "not finite", draw=lambda i: inputs(example, i) * torch.nan)
    shuffle, image = ARCHITECTURES["shuffle"][0](), ARCHITECTURES["shuffle"][1]()
    told(
        ModelError,
        "stem: the network's own code uses 16 units differently from 8",
        draw=lambda i: inputs(image, i),
        like=shuffle,
        clients=[shuffle] * 2,
        said=teacher_of([shuffle] * 2, 4),
        widths={"stem": 16},
    )
    stiff = Stiff()
    told(
        ModelError,
        r"does not support 12 units\. Leave it at 6",
        like=stiff,
        clients=[stiff] * 2,
        said=teacher_of([stiff] * 2, 4),
        widths={"one": 12},
    )
    said = []
    regress([stiff] * 2, stiff, teacher_of([stiff] * 2, 4), lambda i: inputs(example, i), 2,
            widths=2.0, watch=said.append)  # fmt: skip
    assert any("stays at 6" in text for text in said)


class Branch(nn.Module):
    def forward(self, x):
        return x[:, :4] if x.sum() > 0 else -x[:, :4]


class Stiff(nn.Module):
    """Code that counts on a width."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.two(self.one(x).relu().view(-1, 6))


@pytest.mark.slow
@pytest.mark.parametrize("memory", [0, 300_000])
def test_memory_does_not_grow_with_the_number_of_batches(memory):
    """Bytes of all tensors whenever a batch is drawn, beside what may be kept."""
    make = lambda: MLP(6, [60, 50], 4)  # noqa: E731
    modules = [trained_like(make, seed) for seed in range(3)]
    teacher, example = teacher_of(modules, 4), torch.zeros(2, 6)

    def most(batches):
        seen = []

        def draw(number):
            if number != batches - 1:
                return inputs(example, number, 512)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                alive = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
            alive = [t for t in alive if not isinstance(t, FakeTensor)]  # of traces: no memory
            seen.append(sum(t.numel() * t.element_size() for t in alive))
            return inputs(example, number, 512)

        regress(modules, modules[0], teacher, draw, batches, memory=memory)
        return max(seen)

    few, many = most(2), most(12)
    activations = 10 * 512 * 50 * 4
    assert many - few < 2 * memory + activations / 4


@pytest.mark.slow
@pytest.mark.parametrize("memory", [0, 40_000])
def test_what_is_kept_changes_no_weight(memory):
    make = lambda: LeNet5(1, 28, 28, 4)  # noqa: E731
    modules = [trained_like(make, seed) for seed in range(3)]
    teacher, example = teacher_of(modules, 4), torch.zeros(2, 1, 28, 28)
    draw = lambda number: inputs(example, number, 16)  # noqa: E731
    plain, again = (
        regress(modules, modules[0], teacher, draw, 6, **bound).state_dict()
        for bound in ({}, {"memory": memory})
    )
    for name, weights in plain.items():
        torch.testing.assert_close(again[name], weights, rtol=1e-4, atol=1e-5)


@given(st.integers(0, 10**6), st.booleans())
def test_normal_equations_against_least_squares_on_all_rows(seed, intercept):
    rng = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 60, 5, generator=rng), torch.randn(2, 60, 3, generator=rng)
    x[..., 4] = 0
    equations = NormalEquations(2, 5, 3)
    for part in range(0, 60, 20):
        equations.add(x[:, part : part + 20], y[:, part : part + 20])
    weight, bias = equations.solve(0.1, intercept=intercept)
    for problem in range(2):
        a, b = x[problem].double().numpy(), y[problem].double().numpy()
        pull = np.sqrt(0.1 * (a**2).sum(0).mean()) * np.eye(5)
        ones = np.vstack([np.ones((60, 1)), np.zeros((5, 1))]) * intercept
        rows = np.hstack([np.vstack([a, pull]), ones])
        best = np.linalg.lstsq(rows, np.vstack([b, np.zeros((5, 3))]), rcond=None)[0]
        np.testing.assert_allclose(weight[problem], best[:5], atol=1e-4)
        np.testing.assert_allclose(bias[problem], best[5], atol=1e-4)


@given(st.integers(0, 10**6))
def test_pivots_against_what_is_left_of_every_unit(seed):
    """Each next unit is the one that those before explain least, by least squares on them all."""
    rng = torch.Generator().manual_seed(seed)
    factor = torch.randn(8, 12, generator=rng, dtype=torch.float64)
    factor[3] = 0.4 * factor[0] + 0.5 * factor[1]
    cells = torch.tensor([0, 0, 1, 0, 1, 1, 0, 0])
    room = {0: 3, 1: 2}
    chosen, left = [], dict(room)
    while any(left.values()):
        rest = []
        for unit in range(8):
            target, known = factor[unit].numpy(), factor[chosen].numpy().T
            best = known @ np.linalg.lstsq(known, target, rcond=None)[0] if chosen else 0
            free = unit not in chosen and left[int(cells[unit])] > 0
            rest.append(((target - best) ** 2).sum() if free else -1)
        chosen.append(int(np.argmax(rest)))
        left[int(cells[chosen[-1]])] -= 1
    assert pivots(factor, cells, room) == chosen


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
        nn.Conv2d(4, 6, (3, 2), dilation=2, padding=(2, 0)),
        nn.Conv2d(4, 8, 3, groups=4, padding="same"),
        nn.Conv1d(2, 5, 4, stride=3, bias=False),
        nn.Conv1d(3, 5, 4, padding="same"),
        nn.Conv3d(2, 3, 2, padding="valid"),
        nn.ConvTranspose2d(3, 4, 3, 2, 1, output_padding=1),
        nn.ConvTranspose2d(3, 2, (3, 2), (1, 3), (2, 3), dilation=2),
        nn.ConvTranspose1d(2, 5, 4, stride=3, bias=False),
    ],
)
def test_filters_times_patches_are_the_convolution(layer):
    x = torch.randn(3, layer.in_channels, *[9] * (layer.weight.ndim - 2))
    wanted = layer(x)
    shape = wanted.movedim(1, -1).shape[:-1]
    places = torch.stack([torch.randint(size, (40,)) for size in shape])
    keys = ("weight", "stride", "dilation", "padding", "output_padding", "groups")
    given = {key: getattr(layer, key) for key in keys}
    found = patches({**given, "input": x}, shape, places, transposed=layer.transposed)
    filters = layer.weight.transpose(0, int(layer.transposed))
    filters = filters.reshape(layer.groups, len(filters) // layer.groups, -1)
    said = (found @ filters.mT).transpose(0, 1).flatten(1)
    bias = 0 if layer.bias is None else layer.bias
    torch.testing.assert_close(said + bias, picked(wanted, 1, places))


@pytest.mark.parametrize(
    "name",
    [
        *("mlp", "batch norm", "depthwise", "u-net", "grouped", "decoder", "channel shuffle"),
        pytest.param("resnet20", marks=pytest.mark.slow),
    ],
)
def test_units_that_stand_twice_with_half_of_their_readers_change_nothing(name):
    make, example = ARCHITECTURES[name]
    module, x = trained_like(make, 3), torch.randn(3, *example().shape[1:])
    found = units.find_units(module, example()).groups
    groups = [group for group in found if not group.output]
    weights = clean(module)
    for group in groups:
        for axis in group.readers:
            half = torch.full((group.count,), 0.5)
            tensor = weights[axis.tensor]
            weights[axis.tensor] = tensor * axis.along(half, tensor)
    twice = [(g, widened(g.count, g.cells, 2.0)) for g in groups]
    wide = resized(with_weights(module, weights), twice)
    torch.testing.assert_close(wide(x), module(x), atol=1e-4, rtol=1e-4)
    back = [(g, widened(g.count, g.cells, 0.5)) for g in groups]
    assert resized(module, back)(x).shape == module(x).shape
    assert Steps(wide, x).alike(Steps(module, x))


def test_widths_of_cells():
    assert widened(6, [0, 0, 0, 1, 1, 1], 2 / 3) == [0, 1, 3, 4]
    assert widened(4, [0, 0, 1, 1], 0.1) == [0, 2]
    assert widened(3, [0, 0, 0], 5 / 3) == [0, 0, 1, 1, 2]
    assert functional.one_hot(torch.tensor(widened(2, [0, 0], 3.0))).sum(0).tolist() == [3, 3]


@pytest.mark.parametrize("steps", [None, 20])
def test_the_temperature_of_calibrated_clients_is_nearest_to_what_they_say_pooled(steps):
    """By a search of the least cross-entropy on the held-out inputs."""
    clients = dict(zip("abc", (MLP(5, [8], 3) for _ in range(3)), strict=True))
    drawn = CachedInputs(Inputs(build_prior("gaussian", (5,)), torch.zeros(5), torch.ones(5)))
    counts = [[90, 5, 20], [4, 80, 20], [30, 30, 70]]
    settings = FunctionSettings(draws=512, distillation=steps and {"steps": steps, "draws": 512})
    found = fuse_functions(
        clients, clients["a"], drawn, counts=counts, temperatures=[0.3, 0.4, 0.5], settings=settings
    )
    teacher = Teacher(list(clients.values()), counts=counts, temperatures=[0.3, 0.4, 0.5])
    x = torch.cat([drawn.batch(-1 - number, 512) for number in range(4)])
    with torch.no_grad():
        # In float64: the least cost is flat, and rounding would move it.
        f, said = found.module(x).double(), teacher.pooled()(x).double().softmax(1)

    def cost(log):
        return float(-(said * (f / np.exp(log)).log_softmax(1)).sum(1).mean())

    best = optimize.minimize_scalar(cost, bounds=(-3, 3), method="bounded").x
    assert found.temperature == pytest.approx(np.exp(best), rel=1e-3)
    assert found.temperature < 0.95, "clients who differ are together surer than the teacher"


def test_a_layer_of_too_many_inputs_names_the_way_out(monkeypatch):
    """Before units are chosen, which takes minutes for large networks."""
    monkeypatch.setattr(layers, "LARGEST", 7)
    monkeypatch.setattr(regression, "choose", None)
    clients = {name: MLP(6, [8], 3) for name in "ab"}
    drawn = Inputs(build_prior("gaussian", (6,)), torch.zeros(6), torch.ones(6))
    settings = FunctionSettings(draws=512, distillation=None)
    with pytest.raises(ModelError, match=r"8 inputs; the limit .* is 7\. Fuse into a smaller"):
        fuse_functions(clients, clients["a"], drawn, settings=settings)
