"""DSVGD: against pooled posteriors in closed form and on a grid, and Stein's gradient in loops."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedbayes.contracts import Report, Sum
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples, part
from fedbayes.errors import ConfigError, MessageError
from fedbayes.likelihoods import build_likelihood
from fedbayes.methods.dsvgd import Dsvgd, _stein
from fedbayes.models import Network
from tests.helpers.places import at, network, rounds, run_of
from tests.helpers.regressions import STD, pooled, regressions


def linear(inputs, likelihood, clients=3, cohort=1, **training):
    """A run of a network without hidden layers and bias, float64."""
    width = 1 if likelihood.name == "gaussian" else 2
    net = Network(nn.Linear(inputs, width, bias=False).double(), shape=(inputs,))
    settings = {"optimizer": "adam", "lr": 0.05, "epochs": 60, "batch_size": 64, **training}
    return run_of(net, clients=clients, cohort=cohort, likelihood=likelihood, **settings)


def gaussian():
    target = Target("real", ("y",), center=(0.0,), scale=(1.0,))
    return build_likelihood("gaussian", target, noise=STD)


def correlated(inputs, clients=3, seed=1):
    """Rows of clients whose columns are correlated and whose weights differ."""
    rng = torch.Generator().manual_seed(seed)
    mix = torch.eye(inputs) + 0.5 * torch.randn(inputs, inputs, generator=rng)
    found = []
    for number in range(clients):
        x = torch.randn(20, inputs, generator=rng).double() @ mix.double()
        truth = torch.linspace(-1, 1.5, inputs).double() + 0.3 * number
        noise = STD * torch.randn(20, generator=rng).double()
        found.append(Samples(x, (x @ truth + noise)[:, None]))
    return found


def posterior(data, rows=1):
    """Mean and covariance of a linear regression on pooled rows, each taken so often."""
    x, y = (torch.cat(columns) for columns in zip(*data, strict=True))
    precision = torch.eye(x.shape[1]).double() + rows * x.T @ x / STD**2
    covariance = torch.linalg.inv(precision)
    return (covariance @ x.T @ y)[:, 0] * rows / STD**2, covariance


def moments(server):
    """Mean and covariance of particles [N, 1, d]."""
    places = next(iter(server.particles.values())).flatten(1)
    return places.mean(dim=0), torch.cov(places.T)


@pytest.mark.slow
@pytest.mark.parametrize(("particles", "inputs"), [(6, 3), (20, 5), (100, 4)])
def test_one_after_another_comes_to_the_pooled_posterior_and_stays(particles, inputs):
    """Twelve sweeps over three clients, of correlated columns."""
    data = correlated(inputs)
    mean, covariance = posterior(data)
    method, run = Dsvgd(particles=particles), linear(inputs, gaussian(), epochs=15)
    found, _ = rounds(method, run, data, 36, [[number % 3] for number in range(36)])
    std = covariance.diagonal().sqrt()
    for server in found[2:]:
        own, spread = moments(server)
        assert float(((own - mean) / std).abs().max()) < 1e-3
        assert float(((spread - covariance) / torch.outer(std, std)).abs().max()) < 1e-3
    assert not torch.allclose(moments(found[1])[0], mean, rtol=1e-2)


@pytest.mark.slow
def test_all_at_once_comes_nearer_by_what_damping_leaves():
    """Precisions keep 1 − ρ = 2/3 of their distance in a round."""
    data = correlated(4)
    mean, covariance = posterior(data)
    run = linear(4, gaussian(), cohort=3, epochs=15)
    found, _ = rounds(Dsvgd(particles=12), run, data, 30)
    whole, one = torch.linalg.inv(covariance), torch.eye(4).double()
    for number, server in enumerate(found, 1):
        wanted = (whole - one) * (2 / 3) ** number
        torch.testing.assert_close(whole - server.precision, wanted, rtol=1e-4, atol=1e-3)
    own, spread = moments(found[-1])
    torch.testing.assert_close(own, mean, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(spread, covariance, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_few_particles_come_to_the_posterior_of_orthogonal_columns():
    """A diagonal, by Fisher matrices: six sweeps with two particles of two weights."""
    data = regressions()
    mean, precision = pooled(data)
    run = linear(2, gaussian(), epochs=80, lr=0.1)
    found, _ = rounds(Dsvgd(particles=2), run, data, 18, [[number % 3] for number in range(18)])
    for server in found[5:]:
        torch.testing.assert_close(server.precision, precision.diagonal(), rtol=1e-4, atol=0)
        places = server.particles["weight"][:, 0]
        torch.testing.assert_close(places.var(dim=0), 1 / precision.diagonal(), rtol=1e-4, atol=0)
        gap = (places.mean(dim=0) - mean) * precision.diagonal().sqrt()
        assert float(gap.abs().max()) < 0.1


def test_without_a_client_the_posterior_is_that_of_the_others_rows():
    """Losses are quadratic, so factors do not depend on one another."""
    data = correlated(3)
    method, run = Dsvgd(particles=8), linear(3, gaussian(), epochs=15)
    found, states = rounds(method, run, data, 6, [[k % 3] for k in range(6)])
    left = method.forget(found[-1], states[1], run)
    mean, covariance = posterior([data[0], data[2]])
    own, spread = moments(left)
    torch.testing.assert_close(own, mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(spread, covariance, rtol=1e-3, atol=1e-6)
    assert not torch.allclose(moments(found[-1])[0], mean, rtol=1e-2)
    assert method.forget(left, method.join(at(run)), run) is left


def test_a_temperature_counts_rows_more_often():
    data = correlated(3)
    mean, covariance = posterior(data, rows=2)
    run = linear(3, gaussian(), epochs=15)
    found, _ = rounds(
        Dsvgd(particles=8, temperature=0.5), run, data, 6, [[k % 3] for k in range(6)]
    )
    own, spread = moments(found[-1])
    torch.testing.assert_close(own, mean, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(spread, covariance, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_logistic_regression_is_near_the_posterior_on_a_grid():
    """The slope of two classes' difference, whose prior has the variance 2, of 90 rows."""
    rng = torch.Generator().manual_seed(3)
    data = []
    for _ in range(3):
        x = torch.randn(30, 1, generator=rng).double()
        y = (torch.rand(30, generator=rng) < torch.sigmoid(1.2 * x[:, 0])).long()
        data.append(Samples(x, y))
    grid = torch.linspace(-2, 4, 2001).double()
    x, y = (torch.cat(columns) for columns in zip(*data, strict=True))
    signed = (2 * y - 1)[:, None] * x * grid
    log = torch.nn.functional.logsigmoid(signed).sum(dim=0) - grid.square() / 4
    density = torch.softmax(log, dim=0)
    mean = float(density @ grid)
    variance = float(density @ (grid - mean).square())
    run = linear(1, build_likelihood("auto", Target("class", ("a", "b"))))
    method = Dsvgd(particles=20)
    found, _ = rounds(method, run, data, 30, [[number % 3] for number in range(30)])
    for server in found[12:]:
        slopes = server.particles["weight"][:, 1, 0] - server.particles["weight"][:, 0, 0]
        assert abs(float(slopes.mean()) - mean) < 0.1 * math.sqrt(variance)
        assert float(slopes.var()) == pytest.approx(variance, rel=0.2)


def test_gradients_are_those_of_stein():
    """Σ_j k(w_i, w_j) ∇E(w_j) − ∇_j k(w_i, w_j), in loops, with the median over log N."""
    rng = torch.Generator().manual_seed(0)
    places = torch.randn(5, 3, generator=rng).double().requires_grad_()

    def energy(w):
        return w.sin().sum(-1) + w.prod(-1)

    moved, crowding = _stein({"w": places})
    torch.testing.assert_close(moved["w"], places)
    (found,) = torch.autograd.grad(energy(moved["w"]).sum() + crowding, places)
    still = places.detach()
    squares = [float((still[i] - still[j]).square().sum()) for i in range(5) for j in range(i)]
    width = (sorted(squares)[4] + sorted(squares)[5]) / 2 / math.log(5)
    slopes = torch.func.vmap(torch.func.grad(energy))(still)
    for i in range(5):
        wanted = torch.zeros(3).double()
        for j in range(5):
            apart = still[i] - still[j]
            kernel = math.exp(-float(apart.square().sum()) / width)
            wanted += kernel * (slopes[j] - 2 * apart / width)
        torch.testing.assert_close(found[i], wanted)


def test_particles_that_fell_together_are_spread_again():
    run = run_of(network(), clients=2, cohort=1)
    method = Dsvgd(particles=3)
    server, reports = method.init(run), Sum()
    one = {f"particle/{n}": t[:1].expand_as(t) for n, t in server.particles.items()}
    zeros = torch.zeros_like(server.shift)
    reports.add(0, Report({**one, "factor/precision": zeros + 3.0, "factor/shift": zeros}))
    after, info = method.update(server, reports, at(run))
    for places in after.particles.values():
        torch.testing.assert_close(places.var(dim=0), torch.full_like(places[0], 0.25))
    assert info["mean_std"] == pytest.approx(0.5)
    assert set(part(method.model(after, run), "particle")) == set(run.network.initial)


def test_refusals():
    method, run = Dsvgd(particles=3), run_of(network(), clients=2, cohort=1)
    server = method.init(run)
    change = {"factor/precision": -2.0 * torch.ones_like(server.precision)}
    with pytest.raises(MessageError, match="more precision"):
        method.accept(server, Report({**change, "factor/shift": server.shift}), run)
    survival = build_likelihood("cox", Target("survival", ("time", "event")))
    with pytest.raises(ConfigError, match="cox has no distribution"):
        method.check(replace(run, likelihood=survival))
    Dsvgd(particles=40).check(replace(run, likelihood=survival))
    with pytest.raises(ConfigError, match="weight_decay"):
        method.check(run_of(network(), weight_decay=0.1))
