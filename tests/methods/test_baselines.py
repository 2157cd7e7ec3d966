"""Published baselines: what their equations say, in plain numbers, and what they have in common."""

import pytest
import torch

import fedbayes
from fedbayes.contracts import Problem, Reports, Solved, Stateless, Sum, Weights
from fedbayes.contracts.personal import PersonalTensors
from fedbayes.core.tensors import Samples
from fedbayes.errors import ConfigError
from fedbayes.methods import METHODS
from fedbayes.methods.apfl import ALPHA, Apfl
from fedbayes.methods.ditto import Ditto
from fedbayes.methods.fedbn import FedBN
from fedbayes.methods.feddyn import FedDyn
from fedbayes.methods.fednova import FedNova
from fedbayes.methods.fedper import FedPer
from fedbayes.methods.fedrep import FedRep
from fedbayes.methods.moon import Moon
from fedbayes.methods.perfedavg import PerFedAvg
from fedbayes.methods.pfedme import PFedMe
from fedbayes.methods.qfedavg import FACTORS, QFedAvg
from fedbayes.models import Network
from tests.helpers.places import at, network, rounds, run_of, samples
from tests.helpers.toy_models import head_first

SMALL = {
    "rounds": 3,
    "data": {"name": "digits", "clients": 4, "partition": "dirichlet", "limit": 400},
    "model": {"hidden": [8]},
    "training": {"steps": 7, "lr": 0.1, "optimizer": "sgd"},
    "calibration": "none",
}
NAMES = ("1.weight", "1.bias")


def final(method, **more):
    return fedbayes.run(method=method, progress=False, **{**SMALL, **more})


def slope(weights, data):
    """Loss and gradient of a linear network, by hand."""
    leaves = [weights[n].clone().requires_grad_() for n in NAMES]
    loss = torch.nn.functional.cross_entropy(data.x @ leaves[0].T + leaves[1], data.y)
    return loss.detach(), dict(zip(NAMES, torch.autograd.grad(loss, leaves), strict=True))


@pytest.fixture(scope="module")
def fedavg():
    return final("fedavg").model


@pytest.mark.filterwarnings("ignore:fedbn has no effect")
@pytest.mark.parametrize(
    "method",
    [
        {"name": "moon", "mu": 0.0},
        {"name": "ditto"},
        {"name": "perfedavg", "alpha": 0.0, "adaptation": 0},
        {"name": "apfl"},
        {"name": "fedbn"},
    ],
    ids=lambda method: method["name"],
)
def test_global_models_that_are_fedavg(method, fedavg):
    """Without its own term, or where that touches only personal models, a method is FedAvg."""
    if method["name"] == "fedbn":
        found = final(method).server().weights
    elif method["name"] == "perfedavg":  # whose steps see the second half of each batch alone
        found = final(method, training={**SMALL["training"], "batch_size": 1}).model
        fedavg = final("fedavg", training={**SMALL["training"], "batch_size": 1}).model
    else:
        found = final(method).model
    assert found.keys() == fedavg.keys()
    for name, tensor in fedavg.items():
        if method["name"] == "perfedavg":
            torch.testing.assert_close(found[name], tensor)
        else:
            assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", ["fednova", "qfedavg"])
def test_with_equal_steps_or_no_fairness_it_is_fedavg(name, fedavg):
    method = {"name": name, "q": 0.0} if name == "qfedavg" else {"name": name}
    for key, tensor in final(method).model.items():
        torch.testing.assert_close(tensor, fedavg[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova_counts_what_a_gradient_moves(momentum):
    """With a gradient of one everywhere, a change is the learning rate times its length."""
    method = FedNova()
    net, w, lr = network(), torch.zeros(1), 0.1
    buffer = torch.zeros(1)
    for steps in range(1, 6):
        buffer = momentum * buffer + 1
        w = w - lr * buffer
        place = at(net, momentum=momentum, lr=lr)
        problem = Problem(net.initial)
        ended = {name: tensor + w for name, tensor in net.initial.items()}
        report, _, _ = method.report(Solved(ended, steps, 0.0, 5), problem, Stateless(), place)
        for name in net.initial:
            own = report.tensors[name]
            torch.testing.assert_close(own, torch.full_like(own, lr), rtol=1e-4, atol=1e-5)
        found = method.personal_model(net.initial, report, Stateless(), place.run)
        for name, tensor in ended.items():
            torch.testing.assert_close(found[name], tensor)


def test_fednova_in_plain_numbers():
    """Two clients of 1 and 3 samples that went 2 steps of 1 and 6 steps of −1."""
    method, net, reports = FedNova(), network(), Sum()
    place = at(net)
    for client, (count, steps, change) in enumerate([(1, 2, 2.0), (3, 6, -6.0)]):
        ended = {name: tensor - change for name, tensor in net.initial.items()}
        solved = Solved(ended, steps, 0.0, count)
        reports.add(client, method.report(solved, Problem(net.initial), Stateless(), place)[0])
    after, info = method.update(Weights(net.initial), reports, place)
    assert info["effective_steps"] == pytest.approx(0.25 * 2 + 0.75 * 6)
    for name, tensor in net.initial.items():
        torch.testing.assert_close(after.weights[name], tensor - 5.0 * (0.25 - 0.75))


def _regression(sizes, seed=0):
    """Clients of least squares whose optima differ, float64, and their pooled optimum."""
    rng = torch.Generator().manual_seed(seed)
    data = []
    for size in sizes:
        x = torch.randn(size, 3, generator=rng, dtype=torch.float64)
        slopes = torch.randn(3, 1, generator=rng, dtype=torch.float64)
        data.append(Samples(x, x @ slopes + 0.5))
    whole = torch.cat([torch.cat([d.x, torch.ones(len(d.x), 1)], dim=1) for d in data])
    optimum = torch.linalg.lstsq(whole, torch.cat([d.y for d in data])).solution
    return data, optimum.ravel()


class Squares:
    """Half of the mean squared error, as a likelihood."""

    @staticmethod
    def nll(outputs, y):
        return 0.5 * (outputs - y).square().mean()


def _ran(method, sizes, count, **training):
    data, optimum = _regression(sizes)
    net = network(inputs=3, classes=1, dtype=torch.float64)
    settings = {"optimizer": "sgd", "lr": 0.1, "steps": 20, "batch_size": 64, **training}
    run = run_of(net, clients=len(sizes), cohort=len(sizes), likelihood=Squares(), **settings)
    server = rounds(method, run, data, count)[0][-1]
    found = torch.cat([server.weights["1.weight"].ravel(), server.weights["1.bias"].ravel()])
    return float((found - optimum).norm())


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(30, 30, 30), (10, 20, 60)])
def test_feddyn_ends_at_the_pooled_optimum_where_fedavg_does_not(sizes):
    """Least squares of clients that differ, in full batches and many local steps."""
    assert _ran(FedDyn(alpha=0.5), sizes, 80) < 1e-3
    assert _ran(METHODS["fedavg"](), sizes, 80) > 0.03


def test_feddyn_in_plain_numbers():
    """Two rounds of one client and one step, by the paper's own h and gradients."""
    net, data, alpha = network(), samples(6), 0.4
    method = FedDyn(alpha=alpha)
    run = run_of(net, clients=2, cohort=2, lr=0.1, steps=1, batch_size=6, optimizer="sgd")
    both = [data, samples(6, seed=3)]
    servers, _ = rounds(method, run, both, 2)
    theta = {n: net.initial[n].clone() for n in NAMES}
    h = {n: torch.zeros_like(t) for n, t in theta.items()}
    kept = [{n: torch.zeros_like(t) for n, t in theta.items()} for _ in both]  # ∇L_k(θ_k)
    for server in servers:
        ended = []
        for k, one in enumerate(both):
            _, g = slope(theta, one)
            ended.append({n: theta[n] - 0.1 * (g[n] - kept[k][n]) for n in NAMES})
            kept[k] = {n: kept[k][n] - alpha * (ended[k][n] - theta[n]) for n in NAMES}
        for n in NAMES:
            h[n] = h[n] - alpha * sum(e[n] - theta[n] for e in ended) / 2
        theta = {n: (ended[0][n] + ended[1][n]) / 2 - h[n] / alpha for n in NAMES}
        for n in NAMES:
            torch.testing.assert_close(server.weights[n], theta[n])


def test_qfedavg_in_plain_numbers():
    net, data = network(), [samples(5), samples(9, seed=1)]
    method, lr = QFedAvg(q=2.0, weighting="uniform"), 0.2
    run = run_of(net, clients=2, cohort=2, lr=lr, steps=1, batch_size=9, optimizer="sgd")
    (server,), _ = rounds(method, run, data, 1)
    moved, scale = dict.fromkeys(NAMES, 0.0), 0.0
    for one in data:
        loss, g = slope(net.initial, one)  # one step: L (w − w_k) is the gradient
        squares = sum(float(t.square().sum()) for t in g.values())
        moved = {n: moved[n] + loss**2 * g[n] for n in NAMES}
        scale += 2 * float(loss) * squares + float(loss) ** 2 / lr
    for n in NAMES:
        torch.testing.assert_close(server.weights[n], net.initial[n] - moved[n] / scale)


def test_qfedavg_rejects_losses_without_a_power():
    class Negative:
        @staticmethod
        def nll(outputs, y):
            return outputs.square().mean() - 100.0

    net = network()
    place = at(run_of(net, likelihood=Negative(), optimizer="sgd"), client=2)
    with pytest.raises(ConfigError, match=r"client 2 has a loss of -.*method\.q = 0"):
        QFedAvg(q=1.0).problem(net.initial, Stateless(), samples(5), place)
    report = QFedAvg(q=0.0).local(net.initial, Stateless(), samples(5), place)[0]
    assert report.tensors[FACTORS][0] == 1.0


def test_ditto_goes_to_the_regularized_optimum():
    """v = (n⁻¹ XᵀX + λ I)⁻¹ (n⁻¹ Xᵀy + λ w) for least squares, solved by many steps."""
    (data,), _ = _regression((40,))
    net = network(inputs=3, classes=1, dtype=torch.float64)
    run = run_of(net, likelihood=Squares(), lr=0.3, steps=400, batch_size=40, optimizer="sgd")
    _, client, _ = Ditto(strength=0.5).local(net.initial, PersonalTensors(), data, at(run))
    x = torch.cat([data.x, torch.ones(40, 1)], dim=1)
    w = torch.cat([net.initial["1.weight"].ravel(), net.initial["1.bias"]])
    wanted = torch.linalg.solve(
        x.T @ x / 40 + 0.5 * torch.eye(4), (x.T @ data.y).ravel() / 40 + 0.5 * w
    )
    found = torch.cat([client.tensors["1.weight"].ravel(), client.tensors["1.bias"]])
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)


def test_apfl_in_plain_numbers():
    """Two steps of the copy, of the client's own model, and of its share."""
    net, data = network(), samples(5)
    place = at(net, lr=0.1, steps=2, batch_size=5, optimizer="sgd")
    method = Apfl(alpha=0.3, alpha_lr=0.5)
    report, client, _ = method.local(net.initial, PersonalTensors(), data, place)
    w = {n: net.initial[n].clone() for n in NAMES}
    v, alpha = dict(w), 0.3
    for _ in range(2):
        _, g = slope(w, data)
        _, m = slope({n: alpha * v[n] + (1 - alpha) * w[n] for n in NAMES}, data)
        turned = sum(float(((v[n] - w[n]) * m[n]).sum()) for n in NAMES)
        w = {n: w[n] - 0.1 * g[n] for n in NAMES}
        v = {n: v[n] - 0.1 * alpha * m[n] for n in NAMES}
        alpha -= 0.5 * turned
    assert float(client.tensors[ALPHA]) == pytest.approx(alpha, rel=1e-5)
    mixed = method.personal_model(net.initial, report, client, place.run)
    between = method.personal_model(net.initial, None, client, place.run)
    for n in NAMES:
        torch.testing.assert_close(between[n], alpha * v[n] + (1 - alpha) * net.initial[n])
        torch.testing.assert_close(report.tensors[n], w[n])
        torch.testing.assert_close(client.tensors[f"own/{n}"], v[n])
        torch.testing.assert_close(mixed[n], alpha * v[n] + (1 - alpha) * w[n])


def test_pfedme_in_plain_numbers():
    """θ by gradient steps of its regularized loss, and every second the copy follows."""
    net, data = network(), samples(5)
    method = PFedMe(strength=2.0, rate=0.3, inner=2)
    place = at(net, lr=0.1, steps=4, batch_size=5, optimizer="sgd")
    report, state, _ = method.local(net.initial, method.join(place), data, place)
    theta = {n: net.initial[n].clone() for n in NAMES}
    copy = dict(theta)
    for step in range(1, 5):
        _, g = slope(theta, data)
        theta = {n: theta[n] - 0.1 * (g[n] + 2.0 * (theta[n] - copy[n])) for n in NAMES}
        if step % 2 == 0:
            copy = {n: copy[n] - 0.3 * 2.0 * (copy[n] - theta[n]) for n in NAMES}
    for name in NAMES:
        torch.testing.assert_close(state.tensors[name], theta[name])
        torch.testing.assert_close(report.tensors[name], copy[name])


@pytest.mark.parametrize("gradient", ["exact", "first-order"])
def test_perfedavg_is_the_derivative_by_differences(gradient):
    """The exact gradient is that of the loss after a step; the other leaves the Hessian out."""
    net, data = network(dtype=torch.float64), samples(8, dtype=torch.float64)
    method = PerFedAvg(alpha=0.7, gradient=gradient)
    place = at(net, lr=1.0, steps=1, batch_size=8, optimizer="sgd")
    order = torch.randperm(8, generator=place.rng("batches"))
    first = Samples(data.x[order][:4], data.y[order][:4])
    second = Samples(data.x[order][4:], data.y[order][4:])

    def adapted(weights):
        _, g = slope(weights, first)
        return {n: weights[n] - 0.7 * g[n] for n in NAMES}

    report = method.local(net.initial, PersonalTensors(), data, place)[0]
    _, outer = slope(adapted(net.initial), second)
    for n in NAMES:
        found = net.initial[n] - report.tensors[n]
        wanted = outer[n]
        if gradient == "exact":
            wanted = torch.zeros_like(found)
            for index in range(found.numel()):
                sides = []
                for sign in (1, -1):
                    moved = {k: t.clone() for k, t in net.initial.items()}
                    moved[n].view(-1)[index] += sign * 1e-6
                    sides.append(float(slope(adapted(moved), second)[0]))
                wanted.view(-1)[index] = (sides[0] - sides[1]) / 2e-6
            assert not torch.allclose(wanted, outer[n], rtol=1e-3)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def test_moon_contrasts_features_by_hand():
    net, data = network(hidden=(5,)), samples(6)
    moved = {
        n: t + 0.1 * torch.sin(torch.arange(t.numel()) + 1.0).reshape(t.shape)
        for n, t in net.initial.items()
    }
    previous = {n: t * 0.5 for n, t in moved.items()}
    run = run_of(net, optimizer="sgd")
    method = Moon(mu=2.0, tau=0.3)
    problem = method.problem(net.initial, PersonalTensors(previous), data, at(run))
    found = method.loss(run)(moved, data, problem.given, {})

    def features(w):
        return torch.relu(data.x @ w["1.weight"].T + w["1.bias"])

    z, near, far = features(moved), features(net.initial), features(previous)
    sims = [torch.nn.functional.cosine_similarity(z, other) / 0.3 for other in (near, far)]
    contrast = -(sims[0].exp() / (sims[0].exp() + sims[1].exp())).log().mean()
    outputs = z @ moved["3.weight"].T + moved["3.bias"]
    wanted = torch.nn.functional.cross_entropy(outputs, data.y) + 2.0 * contrast
    torch.testing.assert_close(found, wanted)
    with pytest.raises(ConfigError, match="one layer"):
        method.check(run_of(network(), optimizer="sgd"))


def test_layers_are_in_the_order_of_a_forward_pass():
    net = Network(head_first((4,), 3), shape=(4,))
    assert list(net.layers) == ["body", "head"]
    run = run_of(net, optimizer="sgd")
    assert FedPer().personal(run) == ["head.weight", "head.bias"]
    with pytest.raises(ConfigError, match="keeps 2 of the network's 2 layers"):
        FedPer(layers=2).check(run)


def test_fedrep_trains_the_head_first_and_then_the_body():
    """One epoch of each, in whole batches, by hand."""
    net, data = network(hidden=(5,)), samples(6)
    place = at(net, lr=0.1, steps=1, batch_size=6, optimizer="sgd")
    method = FedRep(head_epochs=2)
    sent = {n: net.initial[n] for n in ("1.weight", "1.bias")}
    report, client, _ = method.local(sent, method.join(place), data, place)
    w = {n: t.clone() for n, t in net.initial.items()}
    for names, steps in ((("3.weight", "3.bias"), 2), (("1.weight", "1.bias"), 1)):
        for _ in range(steps):
            leaves = {n: t.clone().requires_grad_(n in names) for n, t in w.items()}
            loss = torch.nn.functional.cross_entropy(net(leaves, data.x, training=True), data.y)
            slopes = torch.autograd.grad(loss, [leaves[k] for k in names])
            for n, g in zip(names, slopes, strict=True):
                w[n] = w[n] - 0.1 * g
    assert report.weight == len(data.y)
    assert report.tensors.keys() == sent.keys()
    for n in net.initial:
        torch.testing.assert_close((client.tensors | dict(report.tensors))[n], w[n])


@pytest.mark.parametrize("name", ["fedbn", "fedper"])
def test_what_is_personal_is_never_sent(name):
    settings = {**SMALL, "model": {"hidden": [8], "norm": "batch"}}
    with fedbayes.Simulation(fedbayes.Config.create(method={"name": name}, **settings)) as one:
        own = set(one.method.personal(one.run))
        kinds = {n.rpartition(".")[2] for n in own}
        step = list(one)[-1]
        assert own
        assert step.server.weights.keys() == one.network.initial.keys() - own
    moments = {"running_mean", "running_var", "num_batches_tracked"}
    assert kinds == ({"weight", "bias"} | moments if name == "fedbn" else {"weight", "bias"})


def test_fedbn_is_what_local_batch_normalization_is_under_fedavg():
    model = {"hidden": [8], "norm": "batch"}
    one = final("fedbn", model=model)
    two = final("fedavg", model={**model, "batch_norm": "local"})
    assert one.summary["metrics"]["local"] == two.summary["metrics"]["local"]


def test_fedbn_says_where_it_is_fedavg():
    (said,) = FedBN().remarks(run_of(network()))
    assert "fedbn has no effect" in said
    run = run_of(Network(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))))
    assert FedBN().remarks(run) == []


def test_retraction_keeps_what_arrived():
    """FedDyn's d_k loses what compression lost of a report, so that the sums agree."""
    net, data = network(), samples(6)
    method = FedDyn()
    place = at(net, lr=0.1, steps=2, batch_size=6, optimizer="sgd")
    report, client, _ = method.local(net.initial, method.join(place), data, place)
    missed = {f"change/{n}": report.tensors[f"change/{n}"] / 4 for n in NAMES}
    kept = Reports.of(method).retracted(client, missed)
    for n in NAMES:
        torch.testing.assert_close(kept.tensors[n], report.tensors[f"change/{n}"] * 0.75)
