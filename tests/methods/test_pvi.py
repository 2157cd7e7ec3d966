"""PVI: against VIRTUAL without clients' own networks, and posteriors in closed form."""

import warnings

import pytest
import torch
from torch import nn

from fedbayes import Config, Simulation
from fedbayes.contracts import Sum
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples, flat, part
from fedbayes.errors import ConfigError, FedbayesWarning, ModelError
from fedbayes.likelihoods import build_likelihood
from fedbayes.methods.pvi import Pvi
from fedbayes.methods.virtual import Virtual
from fedbayes.models import Network
from fedbayes.models.networks import MLP
from tests.helpers.places import at, network, posterior_of, run_of


def test_it_is_virtual_without_networks_of_clients():
    """The same draws of weights: only the order of sums differs."""
    own = posterior_of({"name": "pvi", "samples": 1, "predictions": 2})
    other = posterior_of(
        {
            "name": "virtual",
            "lateral": False,
            "samples": 1,
            "predictions": 2,
            "estimator": "reparametrization",
        }
    )
    for name, mean in other.mean.items():
        torch.testing.assert_close(own.mean[name], mean, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(own.precision[name], other.precision[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("cohort", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_linear_regression_has_the_posterior_of_the_pooled_rows(cohort):
    """y = x w + noise of deviation 1 with orthogonal columns: Λ = 1 + Σ x², Λ μ = Σ x y.

    Clients have different rows. One after another or side by side, the fixed point is the exact
    posterior; with noisy gradients it is reached within their noise.
    """
    rng = torch.Generator().manual_seed(1)
    truth = torch.tensor([[1.5], [-0.5]])
    clients = []
    for _ in range(2):
        x = torch.linalg.qr(torch.randn(30, 2, generator=rng))[0] * 30**0.5
        y = x @ truth + torch.randn(30, 1, generator=rng)
        clients.append(Samples(x, y))
    net = Network(nn.Sequential(nn.Linear(2, 1, bias=False)), shape=(2,))
    target = Target("real", ("y",), center=(0.0,), scale=(1.0,))
    likelihood = build_likelihood("gaussian", target, noise=1.0)
    method = Pvi(samples=8, start_std=0.2)
    run = run_of(
        net,
        clients=2,
        cohort=cohort,
        rounds=30,
        likelihood=likelihood,
        optimizer="adam",
        lr=0.02,
        epochs=40,
        batch_size=30,
    )
    server, states = method.init(run), [method.join(at(run)) for _ in range(2)]
    tail = []
    for number in range(1, 25):
        reports = Sum()
        chosen = [number % 2] if cohort == 1 else [0, 1]
        for client in chosen:
            here = at(run, client=client, round=number)
            message = method.message(server, here)
            report, states[client], _ = method.local(message, states[client], clients[client], here)
            reports.add(client, report)
        server, _ = method.update(server, reports, at(run, round=number))
        tail.append(server.posterior)
    x = torch.cat([one.x for one in clients]).double()
    y = torch.cat([one.y for one in clients]).double()
    precision = 1 + (x * x).sum(0)
    mean = (x * y).sum(0) / precision
    found = tail[-8:]
    name = next(iter(net.initial))
    averaged = torch.stack([one.mean[name][0] for one in found]).mean(0)
    spread = torch.stack([one.precision[name][0] for one in found]).mean(0)
    torch.testing.assert_close(averaged, mean, atol=0.03, rtol=0)
    torch.testing.assert_close(spread, precision, rtol=0.15, atol=0)
    # The server's posterior is the prior times the clients' factors.
    product = states[0].factor.precision[name] + states[1].factor.precision[name]
    torch.testing.assert_close(server.posterior.precision[name], product, rtol=1e-4, atol=1e-4)


def test_the_posterior_is_of_what_trains():
    """A frozen body is no random variable: neither sent nor drawn."""
    module = MLP(4, (5,), 3)
    first, *rest = [name for name, _ in module.named_parameters()]
    module.get_parameter(first).requires_grad_(False)
    net = Network(module, shape=(4,))
    method, run = Pvi(predictions=3), run_of(net)
    message = method.message(method.init(run), at(run))
    assert {name.partition("/")[2] for name in message} == set(rest)
    outputs = method.draws(method.model(method.init(run), run), run)(torch.zeros(2, 4))
    assert outputs.shape == (3, 2, 3)


def test_refusals():
    stack = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(ModelError, match="running"):
        Pvi().check(run_of(Network(stack, shape=(4,))))
    half = network((5,))
    half.precision = "bf16"
    with pytest.raises(ConfigError, match="float32"):
        Pvi().check(run_of(half))


def test_both_state_the_same_problem():
    """What is given to losses comes from one place."""
    net = network((5,))
    run = run_of(net)
    data = Samples(torch.randn(6, 4), torch.zeros(6, dtype=torch.int64))
    found = []
    for method in (Pvi(), Virtual(lateral=False)):
        message = method.message(method.init(run), at(run))
        found.append(method.problem(message, method.join(at(run)), data, at(run)))
    one, two = found
    for kind, entries in one.start.items():
        assert torch.equal(entries, flat(part(two.start, kind), net.initial))


@pytest.mark.parametrize("method", ["pvi", "virtual"])
def test_plain_gradient_steps_are_warned_of(method):
    """They leave networks at chance, or diverge; Adam is what the papers take."""
    for optimizer, said in (("sgd", True), ("adam", False)):
        config = Config.create(
            data={"name": "digits", "clients": 3, "limit": 100, "partition": "iid"},
            model={"hidden": [4]},
            training={"optimizer": optimizer},
            method={"name": method},
            rounds=1,
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", FedbayesWarning)
            with Simulation(config):
                pass
        told = " ".join(str(one.message) for one in caught)
        assert ("Set training.optimizer = 'adam'" in told) == said


def test_few_rounds_are_said():
    """Ten of 100 clients for 20 rounds: a factor has had two changes of 0.3, or of 0.1."""
    run = run_of(network((4,)), clients=100, cohort=10, rounds=20, optimizer="adam")
    (said,) = Pvi(damping=0.3).remarks(run)
    assert "in 2 of 20 rounds" in said
    assert "51%" in said  # 1 - 0.7 ** 2
    assert "19%" in Pvi().remarks(run)[0]
    assert not Pvi(damping=0.5).remarks(run)
