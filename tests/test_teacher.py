"""The teacher of a fusion against its formulas written anew, one input at a time."""

import numpy as np
import pytest
import torch
from torch import nn

from fedbayes.core.targets import Target
from fedbayes.errors import ModelError
from fedbayes.fusion.function import teacher_of
from fedbayes.fusion.teacher import Teacher, class_shares, divergence, frozen, set_training
from fedbayes.likelihoods import build_likelihood

COUNTS = [[50, 3, 0], [0, 41, 0], [30, 20, 0]]


def networks(count=3, outputs=3, inputs=4):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(inputs, 5), nn.ReLU(), nn.Linear(5, outputs))] + [
        nn.Linear(inputs, outputs) for _ in range(count - 1)
    ]


def test_shares_are_of_each_class_and_equal_where_nobody_has_it():
    third = 1 / 3
    wanted = torch.tensor(
        [[50 / 80, 3 / 64, third], [0, 41 / 64, third], [30 / 80, 20 / 64, third]]
    )
    torch.testing.assert_close(class_shares(COUNTS), wanted)


def test_a_client_without_samples_has_no_share():
    shares = class_shares([[5, 1], [0, 0]])
    assert shares.tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize(
    ("counts", "clients", "match"),
    [
        ([[1, 2], [3, 4]], 3, "counts are of 2 clients; there are 3"),
        ([[1, -2]], None, "at least 0"),
        ([[1.0, float("nan")]], None, "at least 0"),
        ([[0, 0]], None, "not all of them 0"),
        ([1, 2], None, "one row for each client"),
    ],
)
def test_counts_that_do_not_fit_are_refused(counts, clients, match):
    with pytest.raises(ModelError, match=match):
        class_shares(counts, clients)


def test_class_share_logits_are_those_of_the_formula():
    clients, x, shares = networks(), torch.randn(6, 4), class_shares(COUNTS)
    found = Teacher(clients, shares)(x)
    for row in range(len(x)):
        for k in range(3):
            wanted = 0.0
            for s, client in enumerate(clients):
                f = client(x[row]).tolist()
                wanted += float(shares[s, k]) * (f[k] - sum(f) / 3)
            assert float(found[row, k]) == pytest.approx(wanted, abs=1e-5)


def test_counts_take_away_what_a_client_knows_of_its_classes_alone():
    """The formula, one input and class at a time; frequencies have one more sample of each."""
    clients, x = networks(), torch.randn(6, 4)
    teacher, samples = teacher_of(dict(zip("abc", clients, strict=True)), COUNTS, None)
    assert samples == [53, 41, 50]
    found = teacher(x).log_softmax(1)
    shares, more = class_shares(COUNTS).double().numpy(), np.array(COUNTS) + 1
    for row in range(len(x)):
        wanted = np.log(more.sum(0) / more.sum())
        deviations = np.array([np.std(client(x[row]).tolist()) for client in clients])
        deviations = deviations.clip(min=0.1 * deviations.max())
        warmth = 1 + 0.6 * np.prod(deviations ** shares.mean(1))
        for k in range(3):
            for s, client in enumerate(clients):
                f = np.array(client(x[row]).tolist())
                level = warmth * np.log(np.exp(f / warmth).sum())
                wanted[k] += shares[s, k] * (f[k] - level - np.log(more[s, k] / more[s].sum()))
        wanted -= np.log(np.exp(wanted).sum())
        np.testing.assert_allclose(found[row].tolist(), wanted, atol=1e-5)


def test_surer_clients_say_the_same_louder():
    """Outputs that are so many times as large, whatever is added to each: so is the sum of them.
    Those that say next to nothing are added up by Bayes' rule.
    """
    clients, x, offsets = networks(), torch.randn(6, 4), torch.tensor([0.2, -0.1, 0.0])

    def said(factor, shift):
        louder = [lambda x, c=client: factor * c(x) + shift for client in clients]
        found = Teacher(louder, class_shares(COUNTS), offsets=offsets)(x) - offsets
        return found - found.mean(1, keepdim=True)

    torch.testing.assert_close(said(1e4, 5.0), 10 * said(1e3, 0.0), rtol=5e-3, atol=10)
    bayes = [(1e-3 * client(x)).log_softmax(1) for client in clients]
    wanted = (class_shares(COUNTS)[:, None] * torch.stack(bayes)).sum(0)
    wanted = wanted - wanted.mean(1, keepdim=True)
    torch.testing.assert_close(said(1e-3, 0.0), wanted, rtol=0, atol=5e-5)
    assert said(1e-3, 0.0).abs().max() > 5e-4


@pytest.mark.parametrize("outputs", [lambda f: 0 * f, lambda f: 50 * f, lambda f: 1e-4 * f])
def test_a_client_without_samples_changes_nothing(outputs):
    """Whatever it says, and however sure of it it is."""
    clients, x = networks(), torch.randn(6, 4)
    shares, offsets = class_shares(COUNTS), torch.tensor([0.2, -0.1, 0.0])
    none = torch.zeros(1, 3)
    more = Teacher(
        [*clients, lambda x: outputs(clients[0](-x))], torch.cat([shares, none]), offsets=offsets
    )
    torch.testing.assert_close(more(x), Teacher(clients, shares, offsets=offsets)(x))


def test_a_client_that_says_nothing_hardly_changes_what_others_say():
    """It is heard as one whose outputs deviate by a tenth, and not as one of no deviation."""
    x, shares, offsets = torch.randn(6, 4), torch.full((3, 3), 1 / 3), torch.zeros(3)
    loud = [lambda x: 10 * x[:, :3], lambda x: 10 * x[:, 1:]]
    silent = Teacher([*loud, lambda x: 0 * x[:, :3]], shares, offsets=offsets)(x)
    quiet = Teacher([*loud, lambda x: 1e-9 * x[:, :3]], shares, offsets=offsets)(x)
    torch.testing.assert_close(silent, quiet)


@pytest.mark.parametrize("size", [1e19, 1e25])
def test_huge_outputs_are_added_up(size):
    """As networks have that were combined without a bound."""
    x, offsets = torch.randn(6, 3), torch.zeros(3)
    found = Teacher([lambda x: size * x, lambda x: -size * x], torch.full((2, 3), 0.5), None)
    with_counts = Teacher(found.clients, found.shares, offsets=offsets)(x)
    assert torch.isfinite(with_counts).all()


def test_outputs_that_say_nothing_have_finite_gradients():
    """All classes alike, as an input moved toward a class may find them."""
    x = torch.zeros(2, 3, requires_grad=True)
    teacher = Teacher([lambda x: x] * 3, class_shares(COUNTS), offsets=torch.zeros(3))
    teacher(x)[:, 0].sum().backward()
    assert torch.isfinite(x.grad).all()
    assert (x.grad[:, 0] > 0).all()


def test_where_inputs_say_nothing_classes_are_as_frequent_as_among_all_samples():
    """Each client then says its own frequencies, which are others."""
    counts = torch.tensor([[8e6, 2e6], [1e6, 4e6]])
    clients = {
        name: lambda x, own=own: (own / own.sum()).log().expand(len(x), 2)
        for name, own in zip("ab", counts, strict=True)
    }
    teacher, _ = teacher_of(clients, counts, None)
    wanted = torch.tensor([[0.6, 0.4]])
    torch.testing.assert_close(teacher(torch.ones(1, 4)).softmax(1), wanted, atol=1e-5, rtol=0)


def test_without_shares_it_is_the_mean_of_probabilities():
    clients, x = networks(), torch.randn(6, 4)
    wanted = torch.stack([client(x).softmax(-1) for client in clients]).mean(0)
    torch.testing.assert_close(Teacher(clients)(x).softmax(-1), wanted)
    weights = torch.tensor([0.2, 0.3, 0.5])
    wanted = sum(w * client(x).softmax(-1) for w, client in zip(weights, clients, strict=True))
    torch.testing.assert_close(Teacher(clients, weights)(x).softmax(-1), wanted)


def test_bernoulli_is_categorical_of_two_classes():
    """A logit f is the outputs (0, f)."""
    clients, x = networks(outputs=1), torch.randn(6, 4)
    shares = class_shares([[5, 1], [1, 9], [3, 3]])
    kind = build_likelihood("bernoulli", Target("class", ("no", "yes")))
    two = [
        lambda x, c=client: torch.cat([torch.zeros(len(x), 1), c(x)], dim=1) for client in clients
    ]
    for given in (shares, None):
        wanted = Teacher(two, given)(x)
        found = Teacher(clients, given, kind)(x)
        torch.testing.assert_close(found[:, 0], wanted[:, 1] - wanted[:, 0])


def test_real_targets_have_the_mean_and_variance_of_the_mixture():
    kind = build_likelihood("gaussian", Target("real", ("y",), (3.0,), (2.0,)), noise="each")
    clients, x = networks(outputs=2), torch.randn(6, 4)
    teacher = Teacher(clients, likelihood=kind)
    draws = torch.stack([client(x) for client in clients])
    mean, variance = kind.moments(teacher(x))
    torch.testing.assert_close(mean, kind.mean(draws))
    torch.testing.assert_close(variance.sqrt(), kind.std(draws).total)


def test_a_client_that_is_not_finite_is_named():
    clients = networks()
    with torch.no_grad():
        clients[1].weight[0, 0] = torch.nan
    with pytest.raises(ModelError, match="'weight' of b are not all finite"):
        Teacher(clients, names=["a", "b", "c"])
    with pytest.raises(ModelError, match="outputs of client 1 are not finite"):
        Teacher([lambda x: x, lambda x: x / 0])(torch.ones(2, 3))


def test_outputs_of_another_number_are_refused():
    clients = [*networks(2), nn.Linear(4, 5)]
    with pytest.raises(ModelError, match=r"client 2 answers \(6, 5\) and client 0 \(6, 3\)"):
        Teacher(clients)(torch.randn(6, 4))


def test_shares_that_do_not_fit_are_refused():
    clients = networks()
    with pytest.raises(ModelError, match="shares are of 2 clients; there are 3"):
        Teacher(clients, class_shares(COUNTS[:2]))
    with pytest.raises(ModelError, match="shares are of 2 classes, and the networks tell 3"):
        Teacher(clients, class_shares([[1, 2]] * 3))(torch.randn(2, 4))
    with pytest.raises(ModelError, match="add to 1"):
        Teacher(clients, torch.ones(3, 3))
    kind = build_likelihood("gaussian", Target("real", ("y",), (0.0,), (1.0,)))
    with pytest.raises(ModelError, match="the likelihood gaussian has none"):
        Teacher(clients, class_shares(COUNTS), kind)
    with pytest.raises(ModelError, match="one client at least"):
        Teacher([])


class Viewed(nn.Module):
    """`view` behind a convolution bears no images that are laid out channels last."""

    def __init__(self):
        super().__init__()
        self.conv, self.end = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 2)

    def forward(self, x):
        return self.end(self.conv(x).view(len(x), -1))


def test_frozen_modules_say_the_same_and_share_memory():
    modules = [
        Viewed(),
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten()),
    ]
    for module in modules:
        x = torch.randn(5, 3, 8, 8)
        module.train()
        module(x)
        function = frozen(module)
        assert module.training
        assert all(p.requires_grad for p in module.parameters())
        x.requires_grad_()
        found = function(x)
        assert torch.autograd.grad(found.sum(), x)[0].shape == x.shape
        torch.testing.assert_close(found, module.eval()(x))
        with torch.no_grad():
            next(module.parameters()).fill_(0.5)
        torch.testing.assert_close(function(x), module(x))


def test_programs_of_export_can_teach():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten()).eval()
    x = torch.randn(5, 3, 8, 8)
    program = torch.export.export(
        module, (x,), dynamic_shapes=({0: torch.export.Dim("n", min=2)},)
    ).module()
    torch.testing.assert_close(frozen(program)(x), module(x))
    set_training(program, True)


def test_divergence_is_that_of_the_teachers_prediction():
    kind = build_likelihood("categorical", Target("class", ("a", "b")))
    p, q = torch.tensor([[0.2, 0.8], [0.5, 0.5]]), torch.tensor([[0.6, 0.4], [0.5, 0.5]])
    wanted = (0.2 * np.log(0.2 / 0.6) + 0.8 * np.log(0.8 / 0.4)) / 2
    assert float(divergence(q.log(), p.log(), kind)) == pytest.approx(wanted)
