"""The averaging family against closed forms and finite differences."""

import numpy as np
import pytest
import torch

from fedbayes.contracts import Report, Sum, Weights
from fedbayes.core.tensors import Samples
from fedbayes.methods import METHODS
from fedbayes.methods.fedavg import FedAvg
from fedbayes.methods.fedopt import FedAdam, FedAvgM, FedYogi, Reptile
from fedbayes.methods.fedprox import FedProx
from fedbayes.models import MLP, Network
from tests.helpers.places import at, run_of


@pytest.fixture
def network():
    torch.manual_seed(0)
    return Network(MLP(4, [5], 3))


@pytest.fixture
def samples():
    torch.manual_seed(1)
    return Samples(torch.randn(30, 4), torch.randint(0, 3, (30,)))


def summed(vectors, weights):
    reports = Sum()
    for client, (vector, weight) in enumerate(zip(vectors, weights, strict=True)):
        reports.add(client, Report({"w": vector}, weight))
    return reports


def test_fedavg_is_the_weighted_mean():
    rng = np.random.default_rng(0)
    vectors, weights = rng.normal(size=(7, 4)), rng.integers(1, 50, 7)
    reports = summed([torch.tensor(v, dtype=torch.float32) for v in vectors], weights.tolist())
    server, _ = FedAvg().update(Weights({"w": torch.zeros(4)}), reports, None)
    expected = np.average(vectors.astype(np.float32), axis=0, weights=weights)
    np.testing.assert_allclose(server.weights["w"].numpy(), expected, rtol=1e-7)
    assert server.weights["w"].dtype == torch.float32


def test_one_report_is_taken_exactly():
    vector = torch.randn(100)
    server, _ = FedAvg().update(Weights({"w": torch.zeros(100)}), summed([vector], [37.0]), None)
    assert torch.equal(server.weights["w"], vector)


def test_the_mean_does_not_depend_on_the_scale_of_the_weights():
    vectors = [torch.randn(50) for _ in range(4)]
    one = summed(vectors, [1, 2, 3, 4]).mean()["w"]
    two = summed(vectors, [10, 20, 30, 40]).mean()["w"]
    torch.testing.assert_close(one, two, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(("weighting", "weight"), [("samples", 30.0), ("uniform", 1.0)])
def test_weights_of_clients(network, samples, weighting, weight):
    method = FedAvg(weighting=weighting)
    here = at(network, client=1)
    server = method.init(here.run)
    message = method.message(server, here)
    report, _, _ = method.local(message, method.join(here), samples, here)
    assert report.weight == weight


def loss_of(method, network, samples):
    """A client's loss from the server's initial weights, of parameters and a batch."""
    here = at(network, client=1)
    problem = method.problem(network.initial, method.join(here), samples, here)
    loss = method.loss(here.run)
    return lambda parameters, batch: loss(parameters, batch, problem.given, {})


def test_fedprox_gradient_by_finite_differences(samples):
    torch.manual_seed(0)
    network = Network(MLP(4, [5], 3).double())
    samples = Samples(samples.x.double(), samples.y)
    weights = {n: w + 0.3 * torch.randn_like(w) for n, w in network.initial.items()}
    objective = loss_of(FedProx(proximal=0.7), network, samples)
    leaves = {n: w.clone().requires_grad_() for n, w in weights.items()}
    objective(leaves, samples).backward()
    for name, leaf in leaves.items():
        flat = leaf.grad.flatten()
        for index in range(0, len(flat), 3):
            step = torch.zeros(len(flat), dtype=torch.float64)
            step[index] = 1e-6
            step = step.view_as(leaf)
            above = objective({**weights, name: weights[name] + step}, samples)
            below = objective({**weights, name: weights[name] - step}, samples)
            slope = float((above - below) / 2e-6)
            assert slope == pytest.approx(float(flat[index]), rel=1e-5, abs=1e-8)


def test_fedprox_pull_in_closed_form(network, samples):
    """With the likelihood taken away, λ/2 ‖φ − w‖² is what remains."""
    weights = {n: w + 1.0 for n, w in network.initial.items()}
    with_pull = loss_of(FedProx(proximal=0.5), network, samples)
    without = loss_of(FedProx(proximal=0.0), network, samples)
    count = sum(w.numel() for w in weights.values())
    pull = float(with_pull(weights, samples) - without(weights, samples))
    assert pull == pytest.approx(0.25 * count, rel=1e-4)


def test_a_strong_prior_holds_clients_back(network, samples):
    def drift(proximal):
        method, here = FedProx(proximal=proximal), at(network, client=1, epochs=100, lr=0.05)
        report, _, _ = method.local(network.initial, method.join(here), samples, here)
        return sum(
            float((report.tensors[n] - w).square().sum()) for n, w in network.initial.items()
        )

    assert drift(0.0) > 2 * drift(1.0) > 4 * drift(10.0)


@pytest.mark.parametrize("same", [FedProx(proximal=0.0), Reptile(server_lr=1.0)])
def test_limits_that_are_fedavg(network, samples, same):
    results = []
    for method in (FedAvg(), same):
        server = method.init(run_of(network))
        for number in range(1, 4):
            reports = Sum()
            for client in range(3):
                here = at(run_of(network), client, number)
                rows = slice(10 * client, 10 * client + 5 + client)
                part = Samples(samples.x[rows], samples.y[rows])
                message = method.message(server, here)
                report, _, _ = method.local(message, method.join(here), part, here)
                reports.add(client, report)
            server, _ = method.update(server, reports, here)
        results.append(method.model(server, here.run))
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, rtol=1e-5, atol=1e-6)


def reference(method, means, start):
    """The server's path by the formulas of Reddi et al. 2021, in plain numbers."""
    w, m, v, path = start, 0.0, 0.0 if method == "adam" else 1e-6, []
    for t, mean in enumerate(means, 1):
        g = w - mean
        if method == "momentum":
            m = 0.9 * m + g
            w = w - m
        else:
            m = 0.9 * m + 0.1 * g
            if method == "adam":
                v = 0.99 * v + 0.01 * g * g
                w = w - 0.01 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + 1e-3)
            else:
                v = v - 0.01 * g * g * np.sign(v - g * g)
                w = w - 0.01 * m / (np.sqrt(v) + 1e-3)
        path.append(w)
    return path


@pytest.mark.parametrize(
    ("method", "kind"), [(FedAvgM(), "momentum"), (FedAdam(), "adam"), (FedYogi(), "yogi")]
)
def test_server_optimizers_by_their_formulas(method, kind):
    means = [0.3, -0.5, 0.8, 0.1, 0.1]
    network = Network(torch.nn.Linear(1, 1, bias=False))
    start = float(network.initial["weight"])
    server = method.init(run_of(network))
    for mean, expected in zip(means, reference(kind, means, start), strict=True):
        reports = Sum()
        reports.add(0, Report({"weight": torch.tensor([[mean]])}, 5.0))
        server, info = method.update(server, reports, at(network))
        assert float(server.weights["weight"]) == pytest.approx(expected, rel=1e-5)
        assert info["pseudo_gradient"] >= 0


def test_buffers_are_averaged_not_stepped():
    network = Network(torch.nn.BatchNorm1d(2))
    method = FedAdam()
    server = method.init(run_of(network))
    assert set(server.weights) == {"weight", "bias"}
    reports = Sum()
    for client, value in enumerate((1.0, 3.0)):
        report = {n: torch.full_like(t, value) for n, t in network.initial.items()}
        reports.add(client, Report(report))
    server, _ = method.update(server, reports, at(network))
    assert (server.buffers["running_var"] == 2).all()
    assert int(server.buffers["num_batches_tracked"]) == 2
    assert method.model(server, run_of(network)).keys() == network.initial.keys()


def test_every_method_tells_what_it_is():
    for name, method in METHODS.items():
        assert method.name == name
        assert method.about.summary
        assert all(field.description for field in method.model_fields.values()), name
