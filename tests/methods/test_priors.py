"""The Laplace and mixture priors, and the EM view, against closed forms."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from torch import nn

import fedbayes
from fedbayes.contracts import Known, Report, ReportList, Stateless
from fedbayes.contracts.prior import in_words
from fedbayes.core.fields import idle
from fedbayes.core.messages import Masked, dense
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples
from fedbayes.errors import ConfigError, MessageError
from fedbayes.inference.optimizers import ServerOptimizer
from fedbayes.inference.problem import Problem, Solved
from fedbayes.inference.settings import LocalTraining
from fedbayes.inference.solve import solve
from fedbayes.likelihoods import build_likelihood
from fedbayes.methods.fedavg import FedAvg
from fedbayes.methods.fedprox import FedProx
from fedbayes.methods.fedsparse import FedSparse, ScaffoldFedSparse
from fedbayes.methods.laplace import Laplace, LaplaceServer, median, proximal
from fedbayes.methods.mixture import Mixture
from fedbayes.models import Network
from fedbayes.runs.build import build_data
from fedbayes.runs.cohorts import sample_cohort
from tests.helpers.places import at, difference, network, run_of, samples


def prior_of(method):
    """The prior of clients by their number of samples."""
    return lambda samples: method.note(samples, None).prior


@given(
    a=st.floats(-3, 3),
    w=st.floats(-3, 3),
    lr=st.floats(0.01, 1),
    scale=st.floats(0, 3),
)
def test_the_proximal_map_is_the_minimum(a, w, lr, scale):
    weights = {"x": torch.tensor([a], dtype=torch.double)}
    centre = torch.tensor([w], dtype=torch.double)
    proximal(scale)(weights, {"centre": {"x": centre}}, lr)

    def cost(phi):
        return (phi - a) ** 2 / (2 * lr) + scale * abs(phi - w)

    found = float(weights["x"])
    best = min(cost(minimize_scalar(cost, bounds=(-4, 4), method="bounded").x), cost(w))
    assert cost(found) <= best + 1e-6
    if abs(a - w) < lr * scale:
        assert found == w


@given(
    st.lists(st.lists(st.floats(-5, 5, width=32), min_size=3, max_size=3), min_size=1, max_size=7)
)
def test_the_median_is_numpys(values):
    found = median(torch.tensor(values, dtype=torch.double))
    np.testing.assert_allclose(found.numpy(), np.median(values, axis=0), atol=1e-12)


@given(
    values=st.lists(st.integers(-5, 5), min_size=1, max_size=7),
    data=st.data(),
)
def test_the_weighted_median_is_the_median_of_copies(values, data):
    counts = data.draw(
        st.lists(st.integers(0, 4), min_size=len(values), max_size=len(values)).filter(any)
    )
    points, votes = torch.tensor(values).double()[:, None], torch.tensor(counts).double()[:, None]
    found = float(median(points, votes))
    assert found == np.median(np.repeat(values, counts))
    costs = [sum(n * abs(x - m) for n, x in zip(counts, values, strict=True)) for m in values]
    assert sum(n * abs(x - found) for n, x in zip(counts, values, strict=True)) <= min(costs)
    assert median(points, 0 * votes).isnan().all()


def test_votes_on_rows_of_classes_by_brute_force():
    """Row by row: the weighted median over those that have the class; nobody's row stays."""
    net = network([5])
    method = Laplace(weighting="samples", class_rows=True)
    place = at(net)
    method.check(place.run)
    server = method.init(place.run)
    has = np.array([[1, 0, 0], [1, 1, 0], [1, 1, 0], [0, 1, 0]])
    sizes, reports = [3, 10, 4, 5], ReportList()
    found = [{n: w + torch.randn_like(w) for n, w in net.initial.items()} for _ in sizes]
    for client, (own, size) in enumerate(zip(found, sizes, strict=True)):
        present = {"present": torch.from_numpy(has[client])}
        reports.add(client, Report({**own, **present}, float(size)))
    following, _ = method.update(server, reports, place)
    for name, start in net.initial.items():
        last = name.startswith("3.")
        for index in np.ndindex(*start.shape):
            voters = [s for s in range(4) if not last or has[s][index[0]]]
            values = [float(found[s][name][index]) for s in voters]
            copies = np.repeat(values, [sizes[s] for s in voters])
            expected = np.median(copies) if voters else float(start[index])
            assert float(following.weights[name][index]) == pytest.approx(expected, abs=1e-6)
    data = samples(6)
    data.y[:] = torch.tensor([0, 0, 2, 0, 2, 0])
    report, _, _ = method.local(method.message(server, place), Stateless(), data, place)
    assert report.tensors["present"].tolist() == [1, 0, 1]
    assert report.weight == 6
    with pytest.raises(MessageError, match="classes"):
        method.accept(server, Report({**found[0], "present": torch.tensor([0, 2, 1])}), place.run)


@pytest.mark.parametrize("m_step", ["median", "sign"])
def test_steps_towards_the_median_are_pytorchs(m_step):
    """Adam on w − median, or on minus the mean sign, over three rounds."""
    net = network(dtype=torch.double)
    method = Laplace(server_optimizer="adam", server_lr=0.05, m_step=m_step)
    place = at(net)
    server = method.init(place.run)
    leaves = {n: w.clone().requires_grad_() for n, w in net.initial.items()}
    adam = torch.optim.Adam(leaves.values(), lr=0.05)
    for _ in range(3):
        found = [{n: w.detach() + torch.randn_like(w) for n, w in leaves.items()} for _ in range(5)]
        server, _ = method.update(server, gathered(found), place)
        for name, leaf in leaves.items():
            stacked = torch.stack([own[name] for own in found])
            if m_step == "median":
                leaf.grad = leaf.detach() - stacked.median(dim=0).values
            else:
                leaf.grad = -torch.sign(stacked - leaf.detach()).mean(dim=0)
        adam.step()
        for name, leaf in leaves.items():
            torch.testing.assert_close(server.weights[name], leaf.detach())


def test_what_a_median_cannot_do_is_said():
    run = run_of(network([5]))
    assert "no effect" in Laplace(server_lr=0.5).remarks(run)[0]
    assert not Laplace(server_lr=0.5, server_optimizer="sgd").remarks(run)
    target = Target("real", ("y",), (0.0,), (1.0,))
    regression = run_of(network([5], classes=1), likelihood=build_likelihood("auto", target))
    with pytest.raises(ConfigError, match="class_rows"):
        Laplace(class_rows=True).check(regression)


def gathered(tensors):
    reports = ReportList()
    for client, own in enumerate(tensors):
        reports.add(client, Report(own))
    return reports


def test_the_m_steps_of_the_laplace_prior():
    """Eq. 46, and Eq. 45 as a step; entries that were not sent are the server's."""
    w = torch.tensor([0.0, 1.0, 2.0])
    found = [
        torch.tensor([0.5, 1.0, 3.0]),
        torch.tensor([0.0, 4.0, 1.0]),
        torch.tensor([0.0, 5, 2]),
    ]
    sent = [{"w": Masked.keep(phi, {(0,): phi != w})} for phi in found]
    assert sent[0]["w"].values.tolist() == [0.5, 3.0]
    following, _ = Laplace().update(LaplaceServer({"w": w}), gathered(sent), at(network()))
    np.testing.assert_allclose(following.weights["w"], np.median(np.stack(found), axis=0))
    method = Laplace(m_step="sign", server_lr=0.3)
    following, _ = method.update(LaplaceServer({"w": w}), gathered(sent), at(network()))
    expected = w + 0.3 * torch.tensor([1 / 3, 2 / 3, 0.0])
    torch.testing.assert_close(following.weights["w"], expected)


def test_the_laplace_report_is_what_has_changed():
    net = network([6])
    data = samples(40)
    sizes = []
    for scale in (0.0, 0.02, 0.05, 10.0):
        method = Laplace(scale=scale)
        server = method.init(run_of(net))
        place = at(net, lr=0.1, epochs=3)
        report, _, info = method.local(method.message(server, place), Stateless(), data, place)
        sizes.append(sum(item.values.numel() for item in report.tensors.values()))
        total = sum(w.numel() for w in server.weights.values())
        assert info["changed"] == pytest.approx(sizes[-1] / total)
    assert sizes[0] > sizes[1] > sizes[2] > sizes[3] == 0


def test_laplace_at_the_optimum_is_the_lasso_around_the_server():
    """Entries at the server's value have |gradient| ≤ λ, the others gradient −λ sign (Eq. 43)."""
    net, data = network(dtype=torch.double), samples(30, dtype=torch.double)
    method = Laplace(scale=0.03)
    server = method.init(run_of(net))
    place = at(net, lr=0.5, steps=3000, batch_size=30)
    report, _, _ = method.local(method.message(server, place), Stateless(), data, place)
    phi = {
        n: torch.where(i.mask(), i.dense(), server.weights[n]) for n, i in report.tensors.items()
    }
    leaves = {n: t.clone().requires_grad_() for n, t in phi.items()}
    torch.nn.functional.cross_entropy(net(leaves, data.x), data.y).backward()
    kept = 0
    for name, leaf in leaves.items():
        moved = report.tensors[name].mask()
        kept += int((~moved).sum())
        assert (leaf.grad[~moved].abs() <= 0.03 + 1e-6).all()
        sign = torch.sign(phi[name] - server.weights[name])
        torch.testing.assert_close(leaf.grad[moved], -0.03 * sign[moved], atol=1e-5, rtol=0)
    assert kept > 0


@pytest.mark.parametrize(("likelihood", "by_class"), [(None, True), ("gaussian", False)])
def test_rows_of_classes_have_votes_of_their_own_where_there_are_any(likelihood, by_class):
    likelihood = likelihood and build_likelihood(likelihood, Target("real", ("y",), (0.0,), (1.0,)))
    run = run_of(network(), likelihood=likelihood)
    assert Laplace().recommended(Known(run, 100, 25))["method.class_rows"] is by_class


def test_laplace_needs_sgd():
    with pytest.raises(ConfigError, match="laplace needs steps of SGD"):
        fedbayes.run(method={"name": "laplace"}, training={"optimizer": "adam"}, rounds=1)


def test_the_local_objective_of_the_mixture():
    """Value and gradient of Eq. 48, per sample."""
    net, data = network(dtype=torch.double), samples(dtype=torch.double)
    method = Mixture(components=3, precision=0.8)
    server = method.init(run_of(net))
    centres = [
        {n.removeprefix(f"{k}/"): t for n, t in server.components.items() if n.startswith(f"{k}/")}
        for k in range(3)
    ]
    place = at(net)
    problem = method.problem(method.message(server, place), Stateless(), data, place)
    loss = method.loss(place.run)

    def objective(parameters):
        return loss(parameters, data, problem.given, {})

    phi = {n: 0.3 * torch.randn(t.shape).double() for n, t in centres[0].items()}

    def value(weight):
        return objective({**phi, "1.weight": weight})

    leaf = phi["1.weight"].clone().requires_grad_()
    value(leaf).backward()
    torch.testing.assert_close(leaf.grad, difference(value, phi["1.weight"]), rtol=1e-5, atol=1e-7)
    alone = torch.nn.functional.cross_entropy(net(phi, data.x), data.y)
    squares = [sum(float(((phi[n] - c[n]) ** 2).sum()) for n in phi) for c in centres]
    expected = float(alone) - np.log(sum(np.exp(-0.4 * d) for d in squares)) / 12
    assert float(objective(phi)) == pytest.approx(expected, rel=1e-9)


def test_the_m_step_of_the_mixture():
    """Eq. 51 and 52 in plain arrays."""
    method = Mixture(components=2, precision=1.5, weighting="uniform")
    net = network()
    server = method.init(run_of(net))
    found = [{n: w + 0.3 * torch.randn(w.shape) for n, w in net.initial.items()} for _ in range(4)]
    following, info = method.update(server, gathered(found), at(net))
    flat = np.stack([np.concatenate([t.flatten() for t in phi.values()]) for phi in found])
    centres = np.stack(
        [
            np.concatenate([server.components[f"{k}/{n}"].flatten() for n in net.initial])
            for k in range(2)
        ]
    )
    raw = np.exp(-0.75 * ((flat[:, None] - centres) ** 2).sum(-1).astype(np.float64))
    shares = raw / raw.sum(1, keepdims=True)
    expected = shares.T @ flat / shares.sum(0)[:, None]
    for k in range(2):
        got = np.concatenate([following.components[f"{k}/{n}"].flatten() for n in net.initial])
        np.testing.assert_allclose(got, expected[k], rtol=1e-4, atol=1e-6)
        assert info[f"responsibility_{k}"] == pytest.approx(shares[:, k].mean(), rel=1e-5)


def test_responsibilities_far_away_are_stable():
    method = Mixture(components=2, precision=1e4)
    near, far = {"w": torch.zeros(1000)}, {"w": torch.full((1000,), 10.0)}
    shares = method.responsibilities([{"w": torch.full((1000,), 9.0)}], [near, far], ["w"])
    assert shares.tolist() == [[0.0, 1.0]]


def test_a_component_of_nobody_stays():
    method = Mixture(components=2, precision=1e4)
    net = network()
    server = method.init(run_of(net))
    first = {n: server.components[f"0/{n}"] + 0.01 for n in net.initial}
    following, _ = method.update(server, gathered([first, first]), at(net))
    for name in net.initial:
        torch.testing.assert_close(following.components[f"0/{name}"], first[name])
        assert torch.equal(following.components[f"1/{name}"], server.components[f"1/{name}"])


@given(seed=st.integers(0, 10**6), weighting=st.sampled_from(["uniform", "samples"]))
def test_an_update_of_the_mixture_climbs_its_objective(seed, weighting):
    """EM never lowers Σ_s n_s log Σ_k exp(−λ/2 ‖φ_s − w_k‖²), n_s = 1 by default."""
    rng = np.random.default_rng(seed)
    net = network(inputs=2, classes=2, dtype=torch.double)
    method = Mixture(components=3, precision=2.0, weighting=weighting)
    server = method.init(run_of(net))
    sizes = rng.integers(1, 200, 6)
    found = [
        {n: torch.from_numpy(rng.normal(0, 1, tuple(w.shape))) for n, w in net.initial.items()}
        for _ in range(6)
    ]
    reports = ReportList()
    for client, (own, size) in enumerate(zip(found, sizes, strict=True)):
        reports.add(client, Report(own, float(size) if weighting == "samples" else 1.0))

    def flat(tensors, start=""):
        return np.concatenate([tensors[start + n].numpy().ravel() for n in net.initial])

    def objective(server):
        phi = np.stack([flat(own) for own in found])
        centres = np.stack([flat(server.components, f"{k}/") for k in range(3)])
        squares = np.square(phi[:, None] - centres).sum(-1)
        each = np.logaddexp.reduce(-squares, axis=1)
        return float(each @ sizes if weighting == "samples" else each.sum())

    values = [objective(server)]
    for _ in range(4):
        server, _ = method.update(server, reports, at(net))
        values.append(objective(server))
    assert all(after >= before - 1e-9 for before, after in itertools.pairwise(values))


def test_the_default_update_of_the_mixture_is_its_own_m_step():
    """From the fixed point of Eqs. 51 and 52 the default moves nothing, whatever the sizes are."""
    net = network(inputs=2, classes=2, dtype=torch.double)
    method, place = Mixture(components=2, precision=2.0, weighting="uniform"), at(net)
    found = [{n: torch.randn_like(w) for n, w in net.initial.items()} for _ in range(5)]
    server = method.init(place.run)
    for _ in range(300):
        server, _ = method.update(server, gathered(found), place)
    data = [samples(n, inputs=2, classes=2, dtype=torch.double) for n in (3, 50, 7, 90, 11)]
    reports = ReportList()
    for client, (own, part) in enumerate(zip(found, data, strict=True)):
        solved = Solved(own, steps=1, loss=0.0, count=len(part.y))
        report, _, _ = method.report(solved, Problem(own), Stateless(), place)
        reports.add(client, report)
    following, _ = method.update(server, reports, place)
    for name, tensor in server.components.items():
        torch.testing.assert_close(following.components[name], tensor)


@pytest.mark.parametrize(("components", "clients", "cohort"), [(2, 8, 1), (3, 9, 3), (2, 2, 1)])
def test_every_component_has_its_turn_when_cohorts_are_cyclic(components, clients, cohort):
    """Also where client + round is always odd."""
    method = Mixture(components=components)
    run = run_of(network(), clients=clients, cohort=cohort, rounds=60)
    started = [
        method.turn(at(run, client=client, round=number))
        for number in range(1, 61)
        for client in sample_cohort(run.seed, number, clients, cohort, cyclic=True)
    ]
    counts = np.bincount(started, minlength=components)
    assert counts.min() > 0.6 * len(started) / components


def test_components_have_adams_of_their_own():
    """Each against PyTorch's Adam over the rounds in which it was heard; others do not count."""
    net = network(inputs=2, classes=2, dtype=torch.double)
    method = Mixture(components=2, precision=1e4, server_optimizer="adam", server_lr=0.1)
    place = at(net)
    server = method.init(place.run)
    names = list(net.initial)
    own = [
        [server.components[f"{k}/{n}"].clone().requires_grad_() for n in names] for k in range(2)
    ]
    adams = [torch.optim.Adam(leaves, lr=0.1) for leaves in own]
    rng = torch.Generator().manual_seed(3)
    for near in (0, 1, 0, 0, 1, 0):
        phi = {
            n: leaf.detach() + 0.01 * torch.randn(leaf.shape, generator=rng).double()
            for n, leaf in zip(names, own[near], strict=True)
        }
        server, info = method.update(server, gathered([phi]), place)
        for name, leaf in zip(names, own[near], strict=True):
            leaf.grad = leaf.detach() - phi[name]
        adams[near].step()
        assert info[f"responsibility_{near}"] == pytest.approx(1)
        for k, leaves in enumerate(own):
            for name, leaf in zip(names, leaves, strict=True):
                torch.testing.assert_close(server.components[f"{k}/{name}"], leaf.detach())
    assert (info["updates_0"], info["updates_1"]) == (pytest.approx(4), pytest.approx(2))


@pytest.mark.parametrize(
    "method", [FedProx(proximal=0.07), Laplace(scale=0.03), Mixture(components=1, precision=1.7)]
)
def test_the_prior_of_a_method_is_what_its_loss_adds(method):
    """Sum of the loss over samples, less that of the likelihood: −log of the prior's density, but
    for its constant. Laplace's is in the step after the loss's, on a loss that is flat.
    """
    net, data = network(dtype=torch.double), samples(9, dtype=torch.double)
    place = at(net, lr=0.01)
    server = method.init(place.run)
    problem = method.problem(method.message(server, place), Stateless(), data, place)
    phi = {n: w + torch.randn_like(w) for n, w in net.initial.items()}
    found = method.note(len(data.y), None).prior
    if problem.project is not None:
        moved = {n: w.clone() for n, w in phi.items()}
        problem.project(moved, problem.given, 0.01)
        for name, w in net.initial.items():
            slope = (phi[name] - moved[name]) / 0.01 * len(data.y)
            far = (phi[name] - w).abs() > 0.01
            expected = found.strength * torch.sign(phi[name] - w)
            torch.testing.assert_close(slope[far], expected[far])
        return
    alone = torch.nn.functional.cross_entropy(net(phi, data.x), data.y)
    added = method.loss(place.run)(phi, data, problem.given, {}) - alone
    squares = sum((phi[n] - w).square().sum() for n, w in net.initial.items())
    torch.testing.assert_close(len(data.y) * added, found.strength / 2 * squares)


@pytest.mark.parametrize("kind", [FedSparse, ScaffoldFedSparse])
def test_the_slab_of_open_gates_is_a_gaussian(kind):
    """What λ adds to the summed loss where every gate is open."""
    net, data = network([6], dtype=torch.double), samples(9, dtype=torch.double)
    place, losses = at(net), {}
    for drift in (0.0, 0.07):
        method = kind(start=1 - 1e-12, scale="logits", drift=drift, output_gates=True)
        server = method.init(place.run)
        problem = method.problem(method.message(server, place), method.join(place), data, place)
        noise = problem.noise.draw(place.rng(problem.noise.purpose), data)
        phi = {
            n: w + 0.1 * torch.sin(torch.arange(w.numel()).view(w.shape))
            for n, w in problem.start.items()
            if n in net.initial
        }
        here = {**problem.start, **phi}
        losses[drift] = method.loss(place.run)(here, data, problem.given, noise)
    squares = sum((phi[n] - w).square().sum() for n, w in net.initial.items())
    found = method.note(len(data.y), None).prior
    added = len(data.y) * (losses[0.07] - losses[0.0])
    torch.testing.assert_close(added, found.strength / 2 * squares)
    assert "precision of the slab 0.63 relative to the summed loss" in in_words(
        prior_of(method), [9]
    )
    assert in_words(prior_of(kind()), [9]) == ""


def test_the_start_of_a_run_says_what_its_prior_is():
    method = FedProx(proximal=0.01)
    said = in_words(prior_of(method), [30, 610, 0])
    assert "precision 0.3 to 6.1 relative to the summed loss" in said
    assert "0.01 relative to its mean loss" in said
    said = in_words(prior_of(Mixture(precision=10)), [20, 100])
    assert "precision 10 relative to the summed loss of a client, 0.1 to 0.5 relative" in said
    assert (
        in_words(prior_of(FedAvg()), [20]) == in_words(prior_of(FedProx(proximal=0.0)), [20]) == ""
    )


@pytest.mark.parametrize("precision", [0.0, 0.1])
def test_one_component_is_fedprox(precision):
    """FedProx's λ is per sample. With λ = 0 both are FedAvg."""
    data = {"name": "digits", "clients": 5, "partition": "iid", "limit": 500}
    shared = {"rounds": 3, "cohort": 3, "data": data, "model": {"hidden": [8]}}
    shared["calibration"] = "none"
    sizes = {len(build_data(fedbayes.Config.published(**shared)).train(c).y) for c in range(5)}
    assert len(sizes) == 1
    one = {"name": "mixture", "components": 1, "precision": precision * sizes.pop()}
    mixture = fedbayes.run(method=one, **shared)
    others = [fedbayes.run(method={"name": "fedprox", "proximal": precision}, **shared)]
    if precision == 0:
        others.append(fedbayes.run(method={"name": "fedavg"}, **shared))
    for other in others:
        assert mixture.model.keys() == other.model.keys()
        for name, tensor in other.model.items():
            torch.testing.assert_close(mixture.model[name], tensor, rtol=1e-4, atol=1e-5)


def test_the_ensemble_predicts_with_the_mean_of_softmaxes(tmp_path):
    run = fedbayes.run(
        method={"name": "mixture", "components": 3},
        calibration="none",
        rounds=4,
        folder=tmp_path,
        model={"hidden": [8]},
    )
    x = torch.randint(17, (6, 64))
    seen = run.preprocessing.apply(x)
    single = network([8], inputs=64, classes=10)
    probabilities = []
    for k in range(3):
        own = {n.removeprefix(f"{k}/"): t for n, t in run.model.items() if n.startswith(f"{k}/")}
        probabilities.append(single(own, seen).softmax(-1))
    mean = torch.stack(probabilities).mean(0)
    torch.testing.assert_close(run.predictor()(x).exp(), mean)
    assert not torch.allclose(probabilities[0], probabilities[1], atol=0.05)
    shares = [run.metrics[-1]["update"][f"responsibility_{k}"] for k in range(3)]
    assert sum(shares) == pytest.approx(1)
    assert min(shares) > 0.1
    assert run.summary["bytes_down"] > 2.5 * run.summary["bytes_up"]


@pytest.mark.slow
def test_single_step_em_climbs_the_marginal_likelihood():
    """Appendix F on a conjugate model: D_s ~ N(φ_s, σ²), φ_s ~ N(w, 1/λ).

    The E-step by our training loop finds the posterior mean; one gradient step of the M-step is
    then a gradient step on log p(D given w) = Σ_s log N(D_s; w, σ² + 1/λ), and many of them end
    at its maximum, the mean of the data.
    """
    data = torch.tensor([[1.0, -2.0], [4.0, 0.5], [2.5, 3.0]], dtype=torch.double)
    variance, precision, lr = 0.5, 0.8, 0.2
    w = {"w": torch.tensor([5.0, -5.0], dtype=torch.double)}
    settings = LocalTraining(lr=0.3, steps=200, batch_size=1)
    server, state = ServerOptimizer(server_lr=lr), {}
    rng = torch.Generator().manual_seed(0)
    for _ in range(40):
        means = []
        for own in data:

            def negative(p, batch, given, noise, own=own):
                fit = (own - p["w"]).square().sum() / variance
                return 0.5 * (fit + precision * (p["w"] - given["centre"]).square().sum())

            batch = Samples(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
            problem = Problem(w, given={"centre": w["w"]})
            solved = solve(problem, negative, batch, settings, lr=0.3, rng=lambda _: rng)
            means.append(solved.parameters["w"])
        step = {"w": -precision * (torch.stack(means) - w["w"]).sum(dim=0)}
        marginal = (data - w["w"]).sum(dim=0) / (variance + 1 / precision)
        torch.testing.assert_close(step["w"], -marginal, rtol=1e-9, atol=1e-9)
        w, state = server.server_step(w, step, state, 1.0)
    torch.testing.assert_close(w["w"], data.mean(dim=0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_laplace_ends_at_the_minimum_of_its_objective_whatever_the_momentum(momentum):
    """½ ‖φ − t‖² + λ ‖φ − w‖₁ with w = 0 is least at the soft threshold of t."""
    net = network()
    target = {
        n: torch.linspace(-1.5, 1.5, t.numel()).reshape(t.shape) for n, t in net.initial.items()
    }
    run = run_of(net, lr=0.01, momentum=momentum, steps=3000, batch_size=12)
    method, here = Laplace(scale=0.5), at(run)
    centre = {n: torch.zeros_like(t) for n, t in net.initial.items()}
    problem = method.problem(dict(centre), Stateless(), samples(), here)

    def loss(parameters, batch, given, noise):
        return sum(0.5 * (parameters[n] - t).square().sum() for n, t in target.items())

    solved = here.solve(problem, loss, samples())
    for name, t in target.items():
        least = torch.nn.functional.softshrink(t, 0.5)
        torch.testing.assert_close(solved.parameters[name], least, atol=2e-3, rtol=0)


def test_laplace_by_signs_takes_the_median_of_running_statistics():
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    run = run_of(Network(module, shape=(4,)), lr=0.1, batch_size=4)
    method = Laplace(m_step="sign")
    server = method.init(run)
    reports = ReportList()
    for client in range(3):
        here = at(run, client)
        data = samples(seed=client)
        reports.add(client, method.local(method.message(server, here), Stateless(), data, here)[0])
    after, _ = method.update(server, reports, at(run))
    told = [dense(report.tensors) for report in reports.reports.values()]
    for name in ("1.running_mean", "1.running_var"):
        middle = torch.stack([one[name] for one in told]).median(0).values
        torch.testing.assert_close(after.weights[name], middle)
    assert after.weights["1.num_batches_tracked"].dtype == torch.int64
    assert after.weights["1.num_batches_tracked"] == told[0]["1.num_batches_tracked"]


def test_noise_around_components_that_are_drawn_apart_is_said_to_do_nothing():
    assert "method.noise has no effect" in "".join(idle(Mixture(noise=0.9), "method."))
    assert not [*idle(Mixture(noise=0.9, spread="near"), "method.")]
