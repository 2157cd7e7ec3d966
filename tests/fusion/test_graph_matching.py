"""Matching of any traced graph, against the dense one, formulas written out, and all matchings."""

import copy
import json
from itertools import combinations, permutations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedbayes.errors import ModelError
from fedbayes.fusion import fuse, match_graph
from fedbayes.fusion.combining import combine
from fedbayes.matching import MatchingSettings
from fedbayes.models import MLP, read_model, read_program
from fedbayes.models.networks import CNN
from fedbayes.models.resize import with_weights
from tests.helpers.architectures import ARCHITECTURES
from tests.helpers.cases import cases
from tests.helpers.command_line import command
from tests.helpers.eyes import OF_EYES, Eyes
from tests.helpers.fused import network, shuffled

# No deviation is 1, so that none can be left out or squared once too often.
UNEVEN = MatchingSettings(sigma=0.6, sigma0=1.7, bias_mean=1.5, gamma=3.0)
COPIES = MatchingSettings(sigma=0.3, sigma0=1000.0, epsilon=0.0, gamma=1e-200)
"""A prior of no precision makes new units free but for their number; γ0 keeps them away."""


def noisy(name, count=3, scale=0.2, seed=0):
    """Networks that share some units, in orders of their own."""
    module, groups, weights = network(name)
    rng, found = torch.Generator().manual_seed(seed), {}
    for client in range(count):
        own = {
            n: t + scale * torch.randn(t.shape, generator=rng) if t.is_floating_point() else t
            for n, t in shuffled(weights, groups, seed + client).items()
        }
        for key in own:
            if "running_var" in key:
                own[key] = own[key].abs() + 0.1
        found[f"n{client}"] = with_weights(module, own)
    return found


@pytest.mark.parametrize("alternations", [0, 6])
@pytest.mark.parametrize(("hidden", "uneven"), [([9], 0), ([9, 7], 1), ([8, 7, 6], 0)])
def test_fully_connected_networks_get_the_numbers_of_their_own_matching(
    alternations, hidden, uneven
):
    nets = {}
    for client in range(5):
        torch.manual_seed(client % 2)
        net = MLP(6, [width + uneven * client for width in hidden], 4).double()
        torch.manual_seed(10 + client)
        with torch.no_grad():
            for weight in net.parameters():
                weight.mul_(3).add_(0.1 * torch.randn_like(weight))
        nets[f"n{client}"] = net
    counts = np.array([[5, 0, 2, 0], [0, 3, 1, 0], [2, 2, 0, 0], [0, 0, 4, 0], [1, 1, 1, 0]])
    given = {"sigma": 0.7, "sigma0": 1.7, "gamma": 3.0, "bias_mean": 0.3}
    if alternations:
        given |= {"alternations": alternations, "starts": 2, "start_gamma": 5.0}
    weights = {name: net.state_dict() for name, net in nets.items()}
    wanted = fuse(weights, counts=counts, seed=3, **given)
    example = torch.zeros(2, 6, dtype=torch.float64)
    shares = counts.astype(float)
    found = match_graph(nets, MatchingSettings(**given), example, counts=shares, seed=3)
    assert [group.places.size for group in found.groups] == wanted.sizes
    assert max(wanted.sizes) > max(hidden) + 4 * uneven, "some are shared, some are not"
    np.testing.assert_allclose(found.objective, wanted.matching.objective, rtol=1e-12)
    for name, tensor in found.module.state_dict().items():
        torch.testing.assert_close(tensor, wanted.weights[name], rtol=1e-10, atol=1e-12)
    for depth, group in enumerate(found.groups):
        for name, own in zip(nets, group.places.of, strict=True):
            assert (own == wanted.assignments[name][depth]).all()


QUICK_ORDERS = [
    ("lenet", 0),
    ("batch norm", 0),
    ("text", 0),
    ("attention", 0),
    ("parallel", 0),
    ("shuffle", 0),
    ("separable", 0),
    ("channel shuffle", 0),
]
SLOW_ORDERS = [
    ("lenet", 3),
    ("batch norm", 3),
    ("resnet20", 3),
    ("pre-norm transformer", 3),
    ("u-net", 0),
    ("squeeze and excite", 3),
    ("shared", 3),
    ("tied", 3),
    ("depthwise", 3),
    ("grouped", 3),
    ("decoder", 3),
    ("odd: sigmoid", 3),
    ("odd: scaled", 0),
]


@pytest.mark.parametrize(
    ("name", "alternations"),
    cases([*QUICK_ORDERS, *SLOW_ORDERS], slow=SLOW_ORDERS),
)
def test_networks_in_other_orders_match_back_to_the_network(name, alternations):
    module, groups, weights = network(name)
    example = ARCHITECTURES[name][1]()
    copies = {f"n{s}": with_weights(module, shuffled(weights, groups, s)) for s in range(3)}
    chosen = COPIES.model_copy(update={"alternations": alternations})
    found = match_graph(copies, chosen, example)
    sizes = {group.layer: group.count for group in groups}
    assert {group.layer: group.places.size for group in found.groups} == sizes
    assert not found.wider
    rng = torch.Generator().manual_seed(1)
    shape = (5, *example.shape[1:])
    words = example.dtype == torch.int64
    x = torch.randint(11, shape, generator=rng) if words else torch.randn(shape, generator=rng)
    with torch.no_grad():
        torch.testing.assert_close(found.module(x), module.eval()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    name=st.sampled_from(
        [
            "batch norm",
            "u-net",
            "shared",
            "depthwise",
            "attention",
            "text",
            "channel shuffle",
            "slopes",
        ]
    ),
    epsilon=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_no_pass_raises_the_objective(seed, name, epsilon):
    """Nor does any group's, of tensors that it has on two axes either."""
    chosen = UNEVEN.model_copy(update={"alternations": 4, "epsilon": epsilon})
    found = match_graph(noisy(name, seed=seed), chosen, ARCHITECTURES[name][1](), seed=seed)
    values = np.array(found.objective)
    assert len(values) > 1
    assert (np.diff(values) <= 1e-9 * np.abs(values[:-1])).all()
    for group in found.groups:
        for own in group.places.of:
            assert len(set(own.tolist())) == len(own)
        assert group.places.members.min() >= 1


@pytest.mark.parametrize("name", ["shared", "depthwise"])
@pytest.mark.parametrize("seed", range(3))
def test_a_move_along_two_axes_of_a_tensor_that_raises_the_objective_is_undone(name, seed):
    """Without that, it rises in five of these."""
    chosen = UNEVEN.model_copy(update={"alternations": 4, "epsilon": 0.0, "gamma": 1.0})
    example = ARCHITECTURES[name][1]()
    found = match_graph(noisy(name, 3, 0.5, seed), chosen, example, seed=seed)
    values = np.array(found.objective)
    assert (np.diff(values) <= 1e-9 * np.abs(values[:-1])).all()


def seeing(units, seed):
    """A convolution of some filters, two of them alike for all seeds, and a head over pixels."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(2, units, 2), nn.ReLU(), nn.Flatten(), nn.Linear(units * 4, 3))
    shared = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(2)
        for unit in range(2):
            place = (unit + seed) % units
            net[0].weight[place] = torch.randn(2, 2, 2, generator=shared)
            net[3].weight[:, 4 * place : 4 * place + 4] = torch.randn(3, 4, generator=shared)
    return net.double()


def written_out(nets, pairs, share, chosen):
    """Twice the objective of a matching of two networks of `seeing`."""
    clients = len(nets)
    atoms, precisions = [], []
    for client, net in enumerate(nets):
        columns = net[3].weight.reshape(3, -1, 4)
        rows = [
            torch.cat([net[0].weight[j].flatten(), net[0].bias[j : j + 1], columns[:, j].flatten()])
            for j in range(len(net[0].weight))
        ]
        atoms.append(torch.stack(rows).detach().numpy())
        heads = np.repeat(share[client] * clients, 4)
        precisions.append(np.concatenate([np.ones(9), heads]) / chosen.sigma**2)
    mean = np.zeros(21)
    mean[8] = chosen.bias_mean
    of_two = {pair[1] for pair in pairs}
    units = [[(0, a), (1, b)] for a, b in pairs]
    units += [[(0, a)] for a in range(len(atoms[0])) if a not in {pair[0] for pair in pairs}]
    units += [[(1, b)] for b in range(len(atoms[1])) if b not in of_two]
    total, p0 = 0.0, chosen.sigma0**-2
    for unit in units:
        u = sum((atoms[s][j] - mean) * precisions[s] for s, j in unit)
        b = sum(precisions[s] for s, _ in unit)
        total += float(((-1 / (p0 + b) + chosen.epsilon * b / (p0 + b) ** 2) * u**2).sum())
        total += -2 * np.log(chosen.gamma / 2)  # and log(1 / 1) for a second member
    for client in range(2):
        alone = sum(len(unit) == 1 and unit[0][0] == client for unit in units)
        total += 2 * np.log(np.arange(1, alone + 1)).sum()
    return total


@pytest.mark.parametrize("seed", range(4))
def test_filters_are_matched_as_by_trying_all_matchings(seed):
    nets = [seeing(3, seed), seeing(4, seed + 1)]
    counts = np.array([[4.0, 0, 1], [1, 5, 1]])
    chosen = UNEVEN.model_copy(update={"alternations": 3})
    example = torch.zeros(2, 2, 3, 3, dtype=torch.float64)
    found = match_graph({"a": nets[0], "b": nets[1]}, chosen, example, counts=counts)
    every = {
        tuple(zip(some, order, strict=True))
        for shared in range(4)
        for some in combinations(range(3), shared)
        for order in permutations(range(4), shared)
    }
    share = counts / counts.sum(0)
    values = {pairs: written_out(nets, pairs, share, chosen) for pairs in every}
    one, two = found.groups[0].places.of
    ours = tuple((a, b) for a, b in product(range(3), range(4)) if one[a] == two[b])
    assert found.objective[-1] == pytest.approx(values[ours])
    assert values[ours] == pytest.approx(min(values.values()))
    assert 0 < len(ours) < 3, "some are shared, some are not"


@pytest.mark.parametrize("alternations", [0, 3])
def test_fused_tensors_are_the_means_that_they_should_be(alternations):
    """Entry by entry; top down with zeros to what a client lacks, else means over owners."""
    name = "batch norm"
    nets = noisy(name, 3, 0.4)
    counts = np.array([[4.0, 0, 1, 0], [1, 5, 1, 0], [0, 0, 3, 0]])
    chosen = UNEVEN.model_copy(update={"alternations": alternations})
    found = match_graph(nets, chosen, ARCHITECTURES[name][1](), counts=counts)
    share = np.array([[0.8, 0, 0.2, 1 / 3], [0.2, 1, 0.2, 1 / 3], [0, 0, 0.6, 1 / 3]])
    first, second, third = (group.places for group in found.groups)
    assert [set(group.places.members.tolist()) for group in found.groups] != [{3}] * 3
    own = [{n: t.double() for n, t in net.state_dict().items()} for net in nets.values()]
    fused = {n: t.double() for n, t in found.module.state_dict().items()}
    p0, q = chosen.sigma0**-2, chosen.sigma**-2

    def wanted(places, value, mean=0.0, reads=True):
        """Of one entry: whether clients own the upper and the lower unit, and what they have."""
        total = precision = 0.0
        for client in range(3):
            upper, lower = (np.flatnonzero(p.of[client] == i) for p, i in places)
            both = len(upper) and len(lower)
            total += q * (value(client, upper[0], lower[0]) - mean) if both else 0.0
            precision += q if both or (reads and not alternations and len(lower)) else 0.0
        if alternations:
            return mean + total / precision if precision else 0.0
        return mean + total / (precision + p0)

    for g, h in product(range(second.size), range(first.size)):
        kernel = fused["4.weight"][g, h]
        there = wanted(((second, g), (first, h)), lambda c, a, b: own[c]["4.weight"][a, b])
        torch.testing.assert_close(kernel, torch.zeros(3, 3).double() + there, atol=1e-6, rtol=1e-5)
    for g, h in product(range(third.size), range(second.size)):
        pixels = fused["8.weight"][g, 36 * h : 36 * h + 36]
        there = wanted(
            ((third, g), (second, h)), lambda c, a, b: own[c]["8.weight"][a, 36 * b : 36 * b + 36]
        )
        torch.testing.assert_close(pixels, torch.zeros(36).double() + there, atol=1e-6, rtol=1e-5)
    for h in range(second.size):
        twice = ((second, h), (second, h))
        for key, mean in (("4.bias", 1.5), ("5.weight", 1.0), ("5.bias", 0.0)):
            there = wanted(twice, lambda c, a, _, key=key: own[c][key][a], mean, reads=False)
            assert float(fused[key][h]) == pytest.approx(float(there), abs=1e-5), key
        owners = [(c, np.flatnonzero(second.of[c] == h)) for c in range(3)]
        for key in ("5.running_mean", "5.running_var"):
            mean = np.mean([float(own[c][key][a[0]]) for c, a in owners if len(a)])
            assert float(fused[key][h]) == pytest.approx(mean, abs=1e-5)
    for k, h in product(range(4), range(third.size)):
        total = precision = 0.0
        for client in range(3):
            for unit in np.flatnonzero(third.of[client] == h):
                total += share[client, k] * float(own[client]["11.weight"][k, unit])
                precision += share[client, k] * q
        there = total if alternations else total * q / (precision + p0)
        assert float(fused["11.weight"][k, h]) == pytest.approx(there, abs=1e-5)
    bias = sum(torch.from_numpy(share[c]) * own[c]["11.bias"] for c in range(3))
    torch.testing.assert_close(fused["11.bias"], bias, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "lenet",
        "batch norm",
        "text",
        "u-net",
        "squeeze and excite",
        "shared",
        "parallel",
        "separable",
        "channel shuffle",
        "resnet18",
        "mobilenet",
    ],
)
def test_networks_that_share_nothing_are_their_ensemble_by_class_share(name):
    """Side by side, with zeros between them: logits are sums by share."""
    nets = noisy(name, 2, 0.05)
    example = ARCHITECTURES[name][1]()
    apart = MatchingSettings(gamma=1e300, alternations=1)
    outputs = next(iter(nets.values()))(example).shape[1]
    share = np.random.default_rng(0).integers(1, 9, (2, outputs)).astype(float)
    found = match_graph(nets, apart, example, counts=share)
    assert all(group.places.members.max() == 1 for group in found.groups)
    rng = torch.Generator().manual_seed(1)
    shape, words = (5, *example.shape[1:]), example.dtype == torch.int64
    x = torch.randint(11, shape, generator=rng) if words else torch.randn(shape, generator=rng)
    with torch.no_grad():
        said = torch.stack([net.eval()(x) for net in nets.values()])
        wanted = (torch.from_numpy(share / share.sum(0)).float()[:, None] * said).sum(0)
        torch.testing.assert_close(
            found.module(x), wanted, rtol=1e-3, atol=1e-4 * float(said.abs().max())
        )


def test_groups_that_are_counted_keep_their_number():
    found = match_graph(noisy("resnet20", 2, 0.5), UNEVEN, ARCHITECTURES["resnet20"][1]())
    assert all(group.places.members.min() == 2 for group in found.groups)
    assert all("group normalization" in group.fixed for group in found.groups)
    assert any("3.conv1 keeps its 16 units" in note for note in found.notes)
    for group, (_, owned, _) in zip(found.groups, [(0, g, 0) for g in found.groups], strict=True):
        cells = owned.places.cells
        for own in group.places.of:
            assert (cells[own] == cells).all(), "units stay in their cells"


def test_what_cannot_be_followed_is_averaged_and_named():
    nets = noisy("recurrent", 2, 0.1)
    found = match_graph(nets, UNEVEN, ARCHITECTURES["recurrent"][1]())
    (note,) = [note for note in found.notes if note.startswith("lstm.weight_ih_l0 ")]
    assert "lstm() is not known" in note
    name = "lstm.weight_hh_l0"
    mean = sum(net.state_dict()[name] for net in nets.values()) / 2
    torch.testing.assert_close(found.module.state_dict()[name], mean)
    assert [group.layer for group in found.groups] == ["dense"]
    assert found.module(torch.zeros(3, 5, dtype=torch.int64)).shape == (3, 3)


def test_a_tensor_that_two_layers_share_stays_one():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.e, self.h = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
            self.h.weight = self.e.weight

        def forward(self, x):
            return self.h(torch.relu(self.e(x)).mean(1))

    nets = {str(s): Tied() for s in range(3)}
    found = match_graph(nets, UNEVEN, torch.zeros(2, 4, dtype=torch.int64), counts=np.ones((3, 7)))
    assert found.module.e.weight is found.module.h.weight
    assert any("counts of classes have no effect" in note for note in found.notes)


def test_what_no_operation_reads_is_averaged():
    """Such as noise that was learnt behind a network."""
    nets = {str(s): wide(5, nn.BatchNorm1d) for s in range(3)}
    for number, net in enumerate(nets.values()):
        net.noise = nn.Parameter(torch.tensor([float(number), 4.0]))
    found = match_graph(nets, UNEVEN, torch.zeros(2, 6))
    assert found.module.noise.tolist() == [1.0, 4.0]


def wide(width, norm=nn.LayerNorm):
    return nn.Sequential(nn.Linear(6, width), norm(width), nn.ReLU(), nn.Linear(width, 3))


def test_networks_of_other_widths_match_where_they_may():
    nets = {"a": wide(5, nn.BatchNorm1d), "b": wide(8, nn.BatchNorm1d)}
    found = match_graph(nets, UNEVEN, torch.zeros(2, 6))
    assert found.groups[0].places.size >= 8
    assert found.wider
    assert found.module(torch.randn(4, 6)).shape == (4, 3)


def broken():
    net = wide(5)
    with torch.no_grad():
        net[0].weight[1, 1] = torch.nan
    return net


@pytest.mark.parametrize(
    ("nets", "counts", "words"),
    [
        (lambda: {}, None, "no networks"),
        (lambda: {"a": wide(5), "b": MLP(6, [5], 3)}, None, "b has another graph than a"),
        (lambda: {"a": wide(5), "b": wide(6)}, None, "b has 6 units in '0' and a has 5"),
        (lambda: {"a": MLP(6, [], 3), "b": MLP(6, [], 3)}, None, "units that can be matched"),
        (lambda: {"a": wide(5), "b": broken()}, None, r"'0\.weight' of b are not all finite"),
        (lambda: {"a": wide(5), "b": wide(5)}, np.ones((2, 4)), r"expected \(2, 3\)"),
        (lambda: {"a": wide(5), "b": wide(5)}, -np.ones((2, 3)), "at least 0"),
    ],
)
def test_refusals(nets, counts, words):
    with pytest.raises(ModelError, match=words):
        match_graph(nets(), UNEVEN, torch.zeros(2, 6), counts=counts)


def test_lstms_of_other_widths_are_refused_by_name():
    make = ARCHITECTURES["recurrent"][0]
    one, two = make(), make()
    two.embedding, two.lstm = nn.Embedding(11, 7), nn.LSTM(7, 5, batch_first=True)
    with pytest.raises(ModelError, match=r"'embedding.* has other widths.*lstm\(\) is not"):
        match_graph({"a": one, "b": two}, UNEVEN, ARCHITECTURES["recurrent"][1]())


MATCH = ("--method", "match")


def test_files_match_to_a_program_with_a_report_and_a_picture(photos, tmp_path, capsys):
    out, report, picture = tmp_path / "g.pt2", tmp_path / "r.json", tmp_path / "p.png"
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps([[5, 0, 1, 2], [0, 5, 1, 2], [1, 1, 4, 2]]))
    scaling = ("--mean", "0.5", "--std", "0.25")
    given = ("--sigma", "0.2", "--gamma", "20", "--alternations", "4", "--counts", counts)
    status = command(
        *("fuse", *photos, "-o", out, *OF_EYES, *scaling, *MATCH, *given),
        *("--report", report, "--picture", picture),
    )
    assert status == 0
    assert "match: 3 models to one with units of see: " in capsys.readouterr().out
    told = json.loads(report.read_text())
    (layer,) = told["layers"]
    assert layer["layer"] == "see"
    assert layer["size"] > 4
    assert layer["assignments"].keys() == {"c0", "c1", "c2"}
    assert picture.stat().st_size > 10_000
    nets = {}
    for path in photos:
        nets[path.stem] = Eyes((3, 8, 8), 4)
        nets[path.stem].load_state_dict(read_model(path)[0])
    wanted = match_graph(
        nets,
        MatchingSettings(sigma=0.2, gamma=20, alternations=4),
        torch.zeros(2, 3, 8, 8),
        counts=np.array(json.loads(counts.read_text()), dtype=float),
    )
    x = torch.rand(5, 3, 8, 8)
    with torch.no_grad():
        answers = read_program(out)[0](x)
        torch.testing.assert_close(answers, wanted.module((x - 0.5) / 0.25))
    assert told["parameters"] == wanted.parameters


def test_weights_are_written_where_they_load_into_the_factory(photos, tmp_path, capsys):
    out = tmp_path / "g.safetensors"
    few = ("--gamma", "1e-300", "--sigma0", "100")
    assert command("fuse", *photos, "-o", out, *OF_EYES, *MATCH, *few) == 0
    fresh = Eyes((3, 8, 8), 4)
    fresh.load_state_dict(read_model(out)[0])
    many = ("--gamma", "1e9")
    wide = tmp_path / "wide.safetensors"
    capsys.readouterr()
    assert command("fuse", *photos, "-o", wide, *OF_EYES, *MATCH, *many) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "wider than a model (see: 12)" in said
    assert "wide.pt2" in said
    assert not wide.exists()


@pytest.mark.slow
def test_programs_match_to_a_program(photos, tmp_path, capsys):
    programs = []
    for number in range(2):
        programs.append(tmp_path / f"p{number}.pt2")
        given = ("--gamma", "1e-300", "--sigma", str(1 + number))
        assert command("fuse", *photos, "-o", programs[-1], *OF_EYES, *MATCH, *given) == 0
    again = tmp_path / "again.pt2"
    assert command("fuse", *programs, "-o", again, *MATCH, "--gamma", "1e-300") == 0
    assert read_program(again)[0](torch.rand(3, 3, 8, 8)).shape == (3, 4)
    assert command("fuse", *programs, "-o", tmp_path / "again.pt", *MATCH) == 2
    assert "Write a program" in capsys.readouterr().err


def test_fully_connected_files_get_the_very_numbers_of_gpi_fnm(tmp_path):
    paths = []
    for number, hidden in enumerate(([5], [9], [4])):
        torch.manual_seed(number)
        paths.append(tmp_path / f"m{number}.pt")
        torch.save(MLP(6, hidden, 3).state_dict(), paths[-1])
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    assert command("fuse", *paths, "-o", one, *MATCH, "--gamma", "3") == 0
    assert command("fuse", *paths, "-o", two, "--method", "gpi-fnm", "--gamma", "3") == 0
    first, second = read_model(one)[0], read_model(two)[0]
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    program, x = tmp_path / "p.pt2", torch.rand(4, 6)
    assert command("fuse", *paths, "-o", program, *MATCH, "--gamma", "3") == 0
    net = MLP(6, [len(first["1.weight"])], 3)
    net.load_state_dict(first)
    torch.testing.assert_close(read_program(program)[0](x), net(x))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((*MATCH, "--width", "2"), "--width has no effect on match"),
        ((*MATCH, "--select", "x.npz"), "file not found: x.npz"),
        ((*MATCH, "--alpha", "mean"), "--alpha has no effect on match"),
        ((*MATCH, "--sigma", "0"), "sigma is 0.0; expected number > 0"),
        ((*MATCH, "--report", "r.txt"), "r.txt"),
    ],
)
def test_mistakes_are_told_and_write_nothing(options, words, photos, tmp_path, capsys):
    out = tmp_path / "g.pt2"
    assert command("fuse", *photos, "-o", out, *OF_EYES, *options) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert words in said
    assert "Traceback" not in said
    assert not out.exists()


def test_gpi_fnm_of_other_networks_names_the_way(tmp_path, capsys):
    paths = []
    for number in range(2):
        paths.append(tmp_path / f"c{number}.pt")
        torch.save(CNN(1, 10, 10, 2).state_dict(), paths[-1])
    assert command("fuse", *paths, "-o", tmp_path / "g.pt", "--method", "gpi-fnm") == 2
    assert "Name its network with --model" in " ".join(capsys.readouterr().err.split())


class Rotated(nn.Module):
    """Pairs of features turned by position, as rotary embeddings are, by complex factors."""

    def __init__(self, learnt=False):
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, 6), nn.Linear(6, 8), nn.Linear(8, 3)
        turns = torch.polar(torch.ones(5, 4), torch.arange(20.0).reshape(5, 4))
        if learnt:
            self.turns = nn.Parameter(turns)
        else:
            self.register_buffer("turns", turns)
        self.register_buffer("large", torch.tensor(2**53 + 1))

    def forward(self, x):
        x = self.two(torch.relu(self.one(x)))
        pairs = torch.view_as_complex(x.unflatten(-1, (4, 2))) * self.turns
        x = torch.view_as_real(pairs).flatten(2) * (self.large - 2**53)
        return self.head(x.mean(1))


def test_numbers_that_are_no_reals_stay_what_they_are():
    torch.manual_seed(0)
    net = Rotated()
    nets = {name: copy.deepcopy(net) for name in "abc"}
    found = match_graph(nets, COPIES, torch.zeros(2, 5, 4))
    x = torch.randn(7, 5, 4)
    torch.testing.assert_close(found.module(x), net(x), rtol=1e-4, atol=1e-5)
    mean = combine([net.state_dict() for _ in range(3)], [0.25, 0.25, 0.5])
    assert torch.equal(mean["turns"], net.turns)
    with pytest.raises(ModelError, match="'turns' of a are complex numbers"):
        match_graph({"a": Rotated(True), "b": Rotated(True)}, COPIES, torch.zeros(2, 5, 4))


class Scaled(nn.Module):
    """Logits times one number that is learnt."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 7), nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor(1.7))

    def forward(self, x):
        return self.head(torch.relu(self.body(x))) * self.scale


def test_tensors_without_axes_are_averaged():
    nets = {"a": Scaled(), "b": Scaled()}
    with torch.no_grad():
        nets["b"].scale.fill_(0.7)
    found = match_graph(nets, UNEVEN, torch.zeros(2, 6))
    torch.testing.assert_close(found.module.scale.detach(), torch.tensor(1.2))
