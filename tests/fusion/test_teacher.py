"""The teacher of a fusion against its formulas written anew, one input at a time."""

import numpy as np
import pytest
import torch
from scipy.linalg import inv, sqrtm
from scipy.optimize import brentq
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn

from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples
from fedbayes.errors import ModelError
from fedbayes.fusion.class_counts import class_shares, groups, of_groups, stationary
from fedbayes.fusion.frozen import frozen, set_training
from fedbayes.fusion.function import teacher_of
from fedbayes.fusion.teacher import Teacher, divergence
from fedbayes.fusion.temperature import own_temperature
from fedbayes.inputs import Inputs, build_prior
from fedbayes.likelihoods import build_likelihood

COUNTS = [[50, 3, 0], [0, 41, 0], [30, 20, 0]]
KIND = build_likelihood("auto", Target("class", tuple("0123456789")))
SEEN = Inputs(build_prior("gaussian", (3,)), torch.zeros(3), torch.ones(3))


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
        ([[1, 2], [3, 4]], 3, "counts have 2 clients; there are 3"),
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


def chain(p, counts, restart):
    """Predictions [S, K] of one input to the stationary distribution, of a matrix of K × K."""
    counts = np.array(counts, float)
    shares = np.stack(
        [row / row.sum() if row.any() else counts.sum(1) / counts.sum() for row in counts.T], 1
    )
    frequencies = (counts.sum(0) + len(counts)) / (counts + 1).sum()
    p = p * (counts > 0)
    p = p / p.sum(1, keepdims=True)
    matrix = np.einsum("sj,sk->kj", shares, p)
    np.testing.assert_allclose(matrix.sum(0), 1)
    size = len(frequencies)
    return np.linalg.solve(np.eye(size) - (1 - restart) * matrix, restart * frequencies)


def softmax(f):
    e = np.exp(f - f.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("counts", [COUNTS, [[30, 9, 0], [20, 11, 0], [0, 0, 50]]])
@pytest.mark.parametrize("temperatures", [None, [1.0, 2.5, 0.7], [None, 2.5, 0.7]])
def test_with_counts_it_is_the_geometric_mean_of_the_chain_and_a_sum_of_logits(
    temperatures, counts
):
    """Both formulas, one input at a time; frequencies of the sum have one more sample of each.

    A class that no client connects to the others has the probability of the sum.
    """
    clients, x = networks(), torch.randn(6, 4)
    named = dict(zip("abc", clients, strict=True))
    teacher, samples = teacher_of(named, counts, None, temperatures)
    assert samples == np.sum(counts, axis=1).tolist()
    found = teacher(x).log_softmax(1)
    shares, more = class_shares(counts).double().numpy(), np.array(counts) + 1
    for row in range(len(x)):
        f = np.array([client(x[row]).tolist() for client in clients])
        if temperatures:
            f /= np.array([t or 1.0 for t in temperatures])[:, None]
        deviations = f.std(1).clip(min=0.1 * f.std(1).max())
        deviation = np.prod(deviations ** shares.mean(1))
        total, warmth = np.log(more.sum(0) / more.sum()), 1 + 0.6 * deviation
        for s in range(3):
            level = warmth * np.log(np.exp(f[s] / warmth).sum())
            total += shares[s] * (f[s] - level - np.log(more[s] / more[s].sum()))
        known = np.array([bool(t) for t in temperatures or [None] * 3])
        lacking = np.array(counts) == 0
        group = np.ones((3, 3)) if counts is COUNTS else np.array([[1, 1, 0], [1, 1, 0], [0, 0, 1]])
        of_all = group * more.sum(0)
        untold = np.where(known, (lacking * of_all).sum(1) / of_all.sum(1), 1)
        softer = (1 + 0.4 * untold * deviation)[:, None]
        stationary = chain(softmax(f / softer), counts, 1e-4)
        wanted = softmax((total + np.log(stationary)) / 2)
        if counts is not COUNTS:
            alone = softmax(total)[2]
            wanted[:2] *= (1 - alone) / wanted[:2].sum()
            wanted[2] = alone
        np.testing.assert_allclose(found[row].tolist(), np.log(wanted), atol=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_exact_clients_are_exactly_the_posterior_of_all_samples(seed):
    """Bayes' rule for inputs of five kinds, of which each client knows its own classes' shares."""
    rng = np.random.default_rng(seed)
    given = rng.dirichlet(np.ones(5), 4)  # p(x | k) [K, x]
    counts = rng.integers(1, 50, (3, 4)) * (rng.random((3, 4)) < 0.7)
    counts[0] += 1  # a client that connects the classes
    own = [torch.tensor(given.T * row + 1e-300).log() for row in counts]
    pooled = softmax(np.log(given.T * counts.sum(0)))
    q = stationary(torch.stack(own), torch.tensor(counts), restart=1e-9)
    np.testing.assert_allclose(q.numpy(), pooled, atol=1e-6)


def test_three_exact_clients_of_two_classes_each():
    """No client has all classes; the posterior is (.168, .457, .374)."""
    counts = np.array([[90, 10, 0], [10, 0, 90], [0, 90, 10]])
    pooled = torch.tensor([0.168, 0.457, 0.374], dtype=torch.float64)
    own = torch.stack([(pooled * torch.tensor(row) + 1e-300).log() for row in counts])[:, None]
    q = stationary(own, torch.tensor(counts), restart=1e-9)
    torch.testing.assert_close(q[0], pooled / pooled.sum(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_groups_of_classes_are_those_that_no_path_of_clients_connects(seed):
    """Two clients of classes that share one, and so on, by powers of a matrix.

    Stray samples connect nothing: classes a fifth as frequent as among all do, rarer ones do not.
    """
    rng = np.random.default_rng(seed)
    had = rng.random((4, 9)) < 0.25
    counts = had * rng.integers(90, 110, (4, 9)) + (rng.random((4, 9)) < 0.3)
    mine, all_ = counts / counts.sum(1, keepdims=True).clip(1), counts.sum(0) / counts.sum()
    known = (counts > 0) & (mine / all_.clip(1e-9) >= 0.2)
    reached = np.linalg.matrix_power(known.T.astype(float) @ known + np.eye(9), 9) > 0
    wanted = {tuple(row) for row, any_has in zip(reached, counts.any(0), strict=True) if any_has}
    found = groups(torch.tensor(counts))
    assert len(found) == len(wanted)
    assert {tuple(own.tolist()) for own in found} == wanted


def test_rare_classes_connect_as_often_as_everywhere():
    """One in a hundred at each client, and 100 classes of one in a hundred each."""
    assert len(groups(torch.tensor([[99, 1], [198, 2]]))) == 1
    assert len(groups(torch.ones(2, 100))) == 1
    assert [own.tolist() for own in groups(torch.tensor([[136, 131, 2], [0, 0, 120]]))] == [
        [True, True, False],
        [False, False, True],
    ]


def test_within_its_group_of_classes_a_client_is_not_softened():
    """It lacks only classes that q compares with none of its own."""
    clients, x = networks(outputs=5), torch.randn(6, 4)
    counts = [[6000, 4000, 0, 0, 0], [0, 0, 5000, 0, 5000], [0, 0, 5000, 0, 0]]
    with torch.no_grad():
        told = Teacher(clients, counts=counts, temperatures=[2.0, 3.0, 1.0])(x)
        raw = [client(x) for client in clients]
    alone = raw[0][:, 0] - raw[0][:, 1]
    torch.testing.assert_close(told[:, 0] - told[:, 1], alone / 2, atol=1e-3, rtol=0)
    lacks = Teacher(clients, counts=counts, temperatures=[2.0, 3.0, 1.0])._untold(
        torch.tensor(counts)
    )
    torch.testing.assert_close(lacks, torch.tensor([0, 0, 1 / 3]).double(), atol=1e-3, rtol=0)


def test_groups_of_other_classes_than_the_networks_have_are_refused():
    teacher = Teacher(networks(2, inputs=3), counts=[[5, 5, 0, 0], [0, 0, 5, 5]])
    with pytest.raises(ModelError, match="shares have 4 classes, but the networks have 3"):
        teacher.compared(SEEN)


def test_a_class_that_nobody_has_takes_no_part_in_groups():
    log, of_each = torch.randn(5, 4), torch.randn(5, 2)
    masks = groups(torch.tensor([[5, 5, 0, 0], [0, 0, 5, 0]]))
    found = of_groups(log, of_each, masks).exp()
    torch.testing.assert_close(found[:, 3], log.softmax(1)[:, 3])
    torch.testing.assert_close(found.sum(1), torch.ones(5))
    second = [bool(own[2]) for own in masks].index(True)
    wanted = of_each.softmax(1)[:, second] * (1 - found[:, 3])
    torch.testing.assert_close(found[:, 2], wanted)
    assert of_groups(log, of_each, masks[:1]) is log


def test_groups_that_no_client_compares_are_as_clear_cut_as_their_clients_find_them():
    """The mean of that and of the sum, by formulas; offsets make groups as frequent on the inputs
    that they are compared on as among the samples.
    """
    counts = [[30, 10, 0, 0, 0], [0, 40, 0, 0, 0], [0, 0, 20, 25, 15]]
    warmth, x = [2.0, 0.5, 1.5], torch.randn(6, 3)
    clients = networks(3, inputs=3, outputs=5)
    teacher = Teacher(clients, counts=counts, temperatures=warmth).compared(SEEN)

    def clear(x):
        with torch.no_grad():
            f = [c(x).double().numpy() / t for c, t in zip(clients, warmth, strict=True)]
        first = np.log(np.exp(f[0][:, :2]).sum(1)) - f[0][:, :2].mean(1)
        second = np.log(np.exp(f[2][:, 2:]).sum(1)) - f[2][:, 2:].mean(1)
        return np.stack([first / 2, second], 1)  # half of the first group's samples know one class

    seen = clear(torch.cat([SEEN.batch(-1 - n, 512) for n in range(4)]))
    spread = seen.std(0, ddof=1) * [(2 + 0.5) / 2, 1.5]
    share = np.array([80, 60]) / 140
    middle = seen.mean(0)
    odds = lambda b: softmax((seen - middle) / spread + [0, b])[:, 1].mean() - share[1]  # noqa: E731
    wanted = softmax((clear(x) - middle) / spread + [0, brentq(odds, -60, 60)])
    found = teacher(x).softmax(1).double()
    masks = groups(torch.tensor(counts))
    order = [0, 1] if masks[0][0] else [1, 0]
    plain = Teacher(clients, counts=counts, temperatures=warmth)(x)
    each, by_sum = (
        torch.stack([p[:, masks[k]].sum(1) for k in order], 1).numpy()
        for p in (found, plain.softmax(1).double())
    )
    np.testing.assert_allclose(each, softmax(np.log(wanted * by_sum) / 2), atol=1e-4)
    inside = plain[:, 2:].log_softmax(1)
    torch.testing.assert_close(teacher(x)[:, 2:].log_softmax(1), inside, atol=1e-4, rtol=0)


def one_class(counts, outputs=3, **given):
    """Clients of one class each, compared on inputs; and a client's odds of a class, by input."""
    clients = networks(len(counts), outputs=outputs, inputs=3)
    teacher = Teacher(clients, counts=counts, **given)
    assert "its only class" in teacher.told

    def odds(client, k, x):
        with torch.no_grad():
            p = clients[client](x).double().softmax(-1)[:, k]
        return (p / (1 - p)).log()

    return teacher.compared(SEEN), odds


HELD = torch.cat([SEEN.batch(-1 - number, 512) for number in range(4)])
"""What clients of one class are compared on."""


def test_clients_of_one_class_are_compared_by_white_preferences():
    teacher, odds = one_class([[30, 0, 0], [0, 60, 0], [0, 0, 60]], temperatures=[2.0, None, None])
    x = torch.randn(40, 3)
    seen, own = (torch.stack([odds(k, k, part) for k in range(3)], 1) for part in (HELD, x))
    white = torch.tensor(inv(sqrtm(np.corrcoef(seen.numpy().T) + 1e-3 * np.eye(3)))) * 1.5
    with torch.no_grad():
        found = teacher(x).double()
    scores = ((own - seen.mean(0)) / seen.std(0)) @ white
    offsets = (found - scores).log_softmax(-1)  # the same for all inputs
    torch.testing.assert_close(offsets, offsets[:1].expand(40, 3), rtol=0, atol=5e-3)


def test_classes_are_as_frequent_on_inputs_as_among_all_samples():
    """One more of every class at each client; of a class that nobody has, that is all."""
    teacher, _ = one_class([[30, 0, 0], [0, 60, 0]])
    with torch.no_grad():
        found = teacher(HELD).double().softmax(-1)
    theta = torch.tensor([32, 62, 2], dtype=torch.float64) / 96
    torch.testing.assert_close(found.mean(0), theta, rtol=1e-4, atol=1e-5)


def test_it_is_the_same_however_sure_a_client_is_of_its_only_class():
    """Neither a constant nor a factor of a client's preference counts."""
    found = []
    for bias, factor in ((0.0, 1.0), (8.0, 3.0)):
        clients = networks(2, outputs=2, inputs=3)
        with torch.no_grad():
            clients[1].weight *= factor
            clients[1].bias *= factor
            clients[1].bias[1] += bias
        teacher = Teacher(clients, counts=[[30, 0], [0, 60]]).compared(SEEN)
        with torch.no_grad():
            found.append(teacher(SEEN.batch(5, 200)).softmax(-1))
    torch.testing.assert_close(*found, rtol=0, atol=1e-3)
    assert 0.5 < (found[0][:, 1] > 0.5).double().mean() < 0.8


def test_what_all_networks_have_in_common_does_not_count():
    """Each prefers its class by the size of an input, and a little by what its class is like."""
    towards = torch.eye(3)

    def client(k):
        def answer(x):
            f = torch.zeros(len(x), 3)
            f[:, k] = 40 * (k + 1) * (x.norm(dim=1) + 0.05 * x @ towards[k])
            return f

        return answer

    teacher = Teacher([client(k) for k in range(3)], counts=torch.eye(3) * 50).compared(SEEN)
    x = SEEN.batch(5, 300)
    right = (teacher(x).argmax(1) == (x @ towards).argmax(1)).double().mean()
    loudest = torch.stack([client(k)(x)[:, k] for k in range(3)], 1).argmax(1)
    assert right > 0.9
    assert (loudest == (x @ towards).argmax(1)).double().mean() < 0.5


def test_clients_of_one_class_are_compared_on_inputs_only():
    teacher = Teacher(networks(2, inputs=3), counts=[[5, 0, 0], [0, 0, 5]])
    with pytest.raises(ModelError, match="compared on synthetic inputs"):
        teacher(torch.randn(4, 3))


def test_networks_that_always_say_the_same_leave_the_frequencies():
    same = [lambda x: torch.tensor([[40.0, -40.0]]).expand(len(x), 2)] * 2
    teacher = Teacher(same, counts=[[30, 0], [0, 60]]).compared(SEEN)
    found = teacher(torch.randn(4, 3)).softmax(-1)
    torch.testing.assert_close(found, torch.tensor([[32 / 94, 62 / 94]]).expand(4, 2))


def test_other_clients_are_the_same_on_any_inputs():
    teacher = Teacher(networks(2, inputs=3), counts=[[5, 1, 0], [0, 2, 5]])
    x = torch.randn(4, 3)
    torch.testing.assert_close(teacher.compared(SEEN)(x), teacher(x), rtol=0, atol=0)


def test_a_temperature_takes_the_place_of_larger_outputs():
    clients, x = networks(), torch.randn(6, 4)
    louder = [lambda x, c=c: 7 * c(x) + 3 for c in clients]
    found = Teacher(louder, counts=COUNTS, temperatures=[7.0] * 3)(x)
    wanted = Teacher(clients, counts=COUNTS, temperatures=[1.0] * 3)(x)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("shares", [None, torch.tensor([0.2, 0.5, 0.3])])
def test_without_counts_probabilities_at_temperatures_are_mixed(shares):
    clients, x, warmth = networks(), torch.randn(6, 4), [0.5, None, 3.0]
    found = Teacher(clients, shares, temperatures=warmth)(x).softmax(1)
    parts = [(c(x) / (t or 1)).softmax(1) for c, t in zip(clients, warmth, strict=True)]
    weights = [1 / 3] * 3 if shares is None else shares.tolist()
    wanted = sum(w * p for w, p in zip(weights, parts, strict=True))
    torch.testing.assert_close(found, wanted)


def noisy_clients(clients, counted):
    """Binary clients whose outputs are off by normal noise, their temperature, and labels."""
    rng = np.random.default_rng(4)
    truth, deviation = rng.uniform(-8, 8, 20_000), 2.0
    raw = torch.tensor(truth + deviation * rng.standard_normal((clients, len(truth))))
    said = [torch.stack([f / 2, -f / 2], 1).float() for f in raw]
    warmth = float(np.sqrt(1 + np.pi / 8 * deviation**2))
    first = torch.tensor(rng.random(len(truth)) < 1 / (1 + np.exp(-truth)))
    counts = [[10_000, 10_000]] * clients if counted else None
    return said, warmth, first, counts


def gap(log, first):
    """How much surer it is than it is right."""
    right = (log[:, 0] > log[:, 1]) == first
    return float(log.softmax(1).amax(1).mean() - right.float().mean())


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("clients", [3, 8])
def test_pooled_it_is_nearer_to_being_as_sure_as_right(clients, counted):
    """Labels drawn by the true probabilities: clients are calibrated, their mean is unsure."""
    said, warmth, first, counts = noisy_clients(clients, counted)
    assert max(abs(gap(one / warmth, first)) for one in said) < 0.01
    asked = [lambda x: x] * clients
    teacher = Teacher(asked, counts=counts, temperatures=[warmth] * clients)
    plain, pooled = teacher.of(said), teacher.pooled().of(said)
    assert gap(plain, first) < -0.025
    assert gap(plain, first) * 0.5 < gap(pooled, first) < 0.012
    nll = [float(-log.log_softmax(1)[:, 0][first].mean()) for log in (pooled, plain)]
    assert nll[0] < nll[1]
    assert (plain.argmax(1) == pooled.argmax(1)).float().mean() > 0.99


def small_clients(seed):
    """Linear classifiers of 40 digits each, their temperatures by ten more, and counts; with what
    they say of other digits, and these.
    """
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(y))
    x, y = torch.tensor((x - x.mean()) / x.std())[order], torch.tensor(y)[order]
    said, warmth, counts = [], [], []
    for rows in torch.arange(1000).split(50):
        own, kept = rows[:40], rows[40:]
        fitted = LogisticRegression(C=1e3, max_iter=300).fit(x[own].numpy(), y[own].numpy())
        outputs = torch.full((len(y), 10), -30.0)
        found = torch.tensor(fitted.decision_function(x.numpy())).float()
        outputs[:, torch.tensor(fitted.classes_)] = found
        said.append(outputs[1000:])
        warmth.append(own_temperature(lambda f: f, KIND, Samples(outputs[kept], y[kept])))
        counts.append(torch.bincount(y[own], minlength=10).tolist())
    return said, warmth, counts, y[1000:]


def test_many_small_clients_are_hardly_too_sure_together():
    """They learn from few digits, so they err alike. As if each erred alone, it would be .05."""
    gaps = []
    for seed in range(3):
        said, warmth, counts, y = small_clients(seed)
        teacher = Teacher([lambda x: x] * len(said), counts=counts, temperatures=warmth)
        mine, plain = (one.of(said).softmax(1) for one in (teacher.pooled(), teacher))
        right = (mine.argmax(1) == y).float().mean()
        gaps.append([float(p.amax(1).mean() - right) for p in (mine, plain)])
    mine, plain = np.mean(gaps, 0)
    assert plain < -0.05
    assert abs(mine) < 0.03


def test_the_pooled_prediction_is_that_of_its_formulas():
    clients, x = networks(), torch.randn(6, 4)
    counts = np.array([[50, 3, 9], [4, 41, 2], [30, 20, 7]])
    warmth, factor = np.array([1.0, 2.5, 0.7]), np.pi / 8
    teacher = Teacher(clients, counts=counts, temperatures=warmth)
    found = teacher.pooled()(x).log_softmax(1)
    shares = counts / counts.sum(0)
    prior = np.log((counts + 1) / (counts + 1).sum(1, keepdims=True))
    own = np.array([c(x).tolist() for c in clients]) / warmth[:, None, None]
    q = stationary(torch.tensor(own), torch.tensor(counts)).log().numpy()
    for row in range(len(x)):
        together = np.exp(2 * teacher(x)[row].log_softmax(0).numpy() - q[row])
        total = np.log(together / together.sum())
        t = softmax((total + q[row]) / 2)
        f = own[:, row] - np.log(np.exp(own[:, row]).sum(1, keepdims=True)) - prior
        f -= f.mean(1, keepdims=True)
        v, w, n = 0.0, 0.0, 0.0
        before = f * np.maximum(warmth, 1)[:, None]
        for k in range(3):
            alone = (shares[:, k] ** 2).sum()
            middle = shares[:, k] @ f[:, k]
            v += 2 / 3 * shares[:, k] @ (f[:, k] - middle) ** 2 / (1 - alone)
            middle = shares[:, k] @ before[:, k]
            w += 2 / 3 * shares[:, k] @ (before[:, k] - middle) ** 2 / (1 - alone)
            n += t[k] / alone
        alike = 50 / (50 + counts.sum() / 3)
        w /= 1 - alike
        a = np.sqrt((1 + factor * w) / (1 + factor * w * (alike + (1 - alike) / n)))
        b = np.sqrt(1 + factor * v * (1 - 1 / n))
        wanted = np.log(softmax((a * b * q[row] + a * total) / 2))
        np.testing.assert_allclose(found[row].tolist(), wanted, atol=1e-3)


@pytest.mark.parametrize("counts", [None, COUNTS, [[50, 3, 9]] * 3])
def test_pooling_changes_nothing_where_it_knows_no_more(counts):
    """Without temperatures, with copies of one client, and with one client."""
    clients, x = networks(), torch.randn(6, 4)
    plain = Teacher(clients, counts=counts)
    torch.testing.assert_close(plain.pooled()(x), plain(x), rtol=0, atol=0)
    copies = [[50, 3, 9]] * 3
    for several in ([clients[0]] * 3, clients[:1]):
        own = None if counts is None else copies[: len(several)]
        teacher = Teacher(several, counts=own, temperatures=[2.0] * len(several))
        found, wanted = teacher.pooled()(x).softmax(1), teacher(x).softmax(1)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_exact_clients_stay_the_posterior_of_all_samples():
    """They differ by their classes' frequencies alone, and are unsure for no lack of samples."""
    counts = np.array([[900, 50, 50], [50, 450, 500], [50, 500, 450]])
    given = np.array([0.2, 0.5, 0.3])
    exact = [torch.tensor(np.log(given * row / row.sum()))[None] for row in counts]
    teacher = Teacher([lambda x: x] * 3, counts=counts, temperatures=[1.0] * 3)
    torch.testing.assert_close(
        teacher.pooled().of(exact).softmax(1), teacher.of(exact).softmax(1), atol=1e-3, rtol=0
    )


def test_it_says_what_it_is_made_of():
    named = {"names": ["a", "b", "c"]}
    assert "none of which has a temperature" in Teacher(networks(), **named).told
    told = Teacher(networks(), counts=COUNTS, temperatures=[0.5, None, 2], **named).told
    assert "by counts of classes" in told
    assert "temperatures of 0.5 to 2; b have no temperature" in told
    assert "groups" not in told
    apart = Teacher(networks(), counts=[[9, 9, 0], [3, 1, 0], [0, 0, 9]], **named).told
    assert apart.endswith("group is where a model is more certain: 0, 1 | 2")


@pytest.mark.parametrize("warmth", [[1.0, 2.0], [1.0, 0.0, 1.0], [1.0, float("nan"), 1.0]])
def test_temperatures_that_do_not_fit_are_rejected(warmth):
    with pytest.raises(ModelError, match="each of the 3 clients needs one above 0"):
        Teacher(networks(), counts=COUNTS, temperatures=warmth)
    gaussian = build_likelihood("gaussian", Target("real", ("y",), (0.0,), (1.0,)), noise=1.0)
    with pytest.raises(ModelError, match="likelihood gaussian have no temperature"):
        Teacher(networks(), None, gaussian, temperatures=[1.0, 1.0, 1.0])
    with pytest.raises(ModelError, match="shares or counts"):
        Teacher(networks(), class_shares(COUNTS), counts=COUNTS)


@pytest.mark.parametrize("outputs", [lambda f: 0 * f, lambda f: 50 * f, lambda f: 1e-4 * f])
@pytest.mark.parametrize("warmth", [None, 1.5])
def test_a_client_without_samples_changes_nothing(outputs, warmth):
    """Whatever it predicts, and however sure of it it is."""
    clients, x = networks(), torch.randn(6, 4)
    more = [*clients, lambda x: outputs(clients[0](-x))]
    found, wanted = (
        Teacher(
            asked,
            counts=[[50, 3, 2], [0, 41, 0], [30, 20, 0], [0, 0, 0]][: len(asked)],
            temperatures=warmth and [warmth] * len(asked),
        )(x)
        for asked in (more, clients)
    )
    torch.testing.assert_close(
        found.log_softmax(1)[:, :2], wanted.log_softmax(1)[:, :2], rtol=0, atol=0.05
    )


def test_a_client_that_says_nothing_hardly_changes_what_others_say():
    """It counts as one whose outputs deviate by a tenth, and not as one of no deviation."""
    x, counts = torch.randn(6, 4), torch.full((3, 3), 10.0)
    loud = [lambda x: 10 * x[:, :3], lambda x: 10 * x[:, 1:]]
    silent = Teacher([*loud, lambda x: 0 * x[:, :3]], counts=counts)(x)
    quiet = Teacher([*loud, lambda x: 1e-9 * x[:, :3]], counts=counts)(x)
    torch.testing.assert_close(silent, quiet)


@pytest.mark.parametrize("size", [1e19, 1e25])
@pytest.mark.parametrize("warmth", [None, [1.0, 1.0]])
def test_huge_outputs_are_added_up(size, warmth):
    """As networks have that were combined without a bound."""
    clients = [lambda x: size * x, lambda x: -size * x]
    x, counts = torch.randn(6, 3), torch.ones(2, 3)
    assert torch.isfinite(Teacher(clients, counts=counts, temperatures=warmth)(x)).all()


@pytest.mark.parametrize("warmth", [None, [1.0, 1.0, 2.0]])
def test_outputs_that_say_nothing_have_finite_gradients(warmth):
    """All classes alike, as an input moved toward a class may find them."""
    x = torch.zeros(2, 3, requires_grad=True)
    teacher = Teacher([lambda x: x] * 3, counts=[[5, 3, 1]] * 3, temperatures=warmth)
    teacher(x).log_softmax(1)[:, 0].sum().backward()
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
    torch.testing.assert_close(teacher(torch.ones(1, 4)).softmax(1), wanted, atol=0.02, rtol=0)
    exact, _ = teacher_of(clients, counts, None, [1.0, 1.0])
    torch.testing.assert_close(exact(torch.ones(1, 4)).softmax(1), wanted, atol=1e-5, rtol=0)


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
    with pytest.raises(ModelError, match=r"client 2 returns \(6, 5\) and client 0 \(6, 3\)"):
        Teacher(clients)(torch.randn(6, 4))


def test_one_output_is_not_a_class():
    """Every network would agree with the teacher, whatever it predicts."""
    clients = networks(outputs=1)
    for kind in (None, build_likelihood("categorical", Target("class", ("0",)))):
        with pytest.raises(ModelError, match="one output, which is a number or the logit"):
            Teacher(clients, likelihood=kind)(torch.randn(6, 4))
    kind = build_likelihood("gaussian", Target("real", ("y",), (3.0,), (2.0,)), noise=1.0)
    x = torch.randn(6, 4)
    mean = sum(client(x) for client in clients) / len(clients)
    torch.testing.assert_close(Teacher(clients, likelihood=kind)(x), mean)


def test_shares_that_do_not_fit_are_refused():
    clients = networks()
    with pytest.raises(ModelError, match="shares have 2 clients; there are 3"):
        Teacher(clients, class_shares(COUNTS[:2]))
    with pytest.raises(ModelError, match="shares have 2 classes, but the networks have 3"):
        Teacher(clients, class_shares([[1, 2]] * 3))(torch.randn(2, 4))
    with pytest.raises(ModelError, match="add to 1"):
        Teacher(clients, torch.ones(3, 3))
    kind = build_likelihood("gaussian", Target("real", ("y",), (0.0,), (1.0,)))
    with pytest.raises(ModelError, match="the likelihood gaussian has none"):
        Teacher(clients, class_shares(COUNTS), kind)
    with pytest.raises(ModelError, match="one client's network"):
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
