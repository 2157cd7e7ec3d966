"""FedGVI: PVI as its limit, the generalized posterior by quadrature, outliers that do not pull."""

import numpy as np
import pytest
import torch
from numpy.polynomial.hermite_e import hermegauss
from scipy.optimize import minimize
from scipy.stats import norm
from torch import nn

from fedbayes import Config
from fedbayes.contracts import Sum
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples
from fedbayes.errors import ConfigError
from fedbayes.likelihoods import build_likelihood
from fedbayes.methods.fedgvi import FedGvi
from fedbayes.methods.pvi import Pvi
from fedbayes.models import Network
from tests.helpers.places import at, network, posterior_of, run_of

REAL = Target("real", ("y",), center=(0.0,), scale=(1.0,))
TRAINING = {"optimizer": "adam", "lr": 0.02, "epochs": 400, "batch_size": 100}


def test_with_the_log_loss_and_kl_it_is_pvi_bit_for_bit():
    common = {"samples": 2, "predictions": 2}
    pvi = posterior_of({"name": "pvi", **common})
    same = posterior_of({"name": "fedgvi", "data_loss": "log", **common})
    other = posterior_of({"name": "fedgvi", **common})
    for name, precision in pvi.precision.items():
        assert torch.equal(precision, same.precision[name])
        assert torch.equal(pvi.shift[name], same.shift[name])
        assert not torch.equal(precision, other.precision[name])


def of_a_mean(method, clients, rounds=1):
    """The posterior of the mean of clients' samples, known to deviate by 1."""
    net = Network(nn.Sequential(nn.Linear(1, 1, bias=False)), shape=(1,))
    run = run_of(
        net,
        clients=len(clients),
        cohort=len(clients),
        likelihood=build_likelihood("gaussian", REAL, noise=1.0),
        **TRAINING,
    )
    server, states = method.init(run), [method.join(at(run)) for _ in clients]
    for number in range(1, rounds + 1):
        reports = Sum()
        for client, y in enumerate(clients):
            here = at(run, client=client, round=number)
            data = Samples(torch.ones(len(y), 1), torch.tensor(y, dtype=torch.float32)[:, None])
            message = method.message(server, here)
            report, states[client], _ = method.local(message, states[client], data, here)
            reports.add(client, report)
        server, _ = method.update(server, reports, at(run, round=number))
    name = next(iter(net.initial))
    return float(server.posterior.mean[name]), float(server.posterior.std[name])


def by_quadrature(y, loss, divergence):
    """Mean and deviation of the Gaussian that minimizes D(q ‖ N(0, 1)) + Σ E_q[L]."""
    nodes, weights = hermegauss(60)
    weights = weights / weights.sum()

    def energy(parameters):
        mean, std = parameters[0], np.exp(parameters[1])
        lost = loss(np.asarray(y)[:, None] - (mean + std * nodes)).sum(0)
        return divergence(mean, std) + float(weights @ lost)

    found = minimize(energy, [np.median(y), -1.0], method="Nelder-Mead", options={"xatol": 1e-6})
    return found.x[0], np.exp(found.x[1])


def log_loss(error):
    return -norm.logpdf(error)


def beta_loss(error, beta=1.5):
    b = beta - 1
    whole = (2 * np.pi) ** (-b / 2) / np.sqrt(beta)
    return (1 - norm.pdf(error) ** b) / b + (whole - 1) / beta


def kl(mean, std):
    return 0.5 * (std**2 + mean**2 - 1) - np.log(std)


def renyi(alpha):
    def divergence(mean, std):
        grid = np.linspace(-30, 30, 20001)
        log = alpha * norm.logpdf(grid, mean, std) + (1 - alpha) * norm.logpdf(grid)
        return np.log(np.exp(log).sum() * 60 / 20000) / (alpha * (alpha - 1))

    return divergence


Y = [1.2, 0.4, 2.1, 1.7, 0.3, 1.1, 9.0]
"""The last one is an outlier."""


@pytest.mark.parametrize(
    ("settings", "loss", "divergence"),
    [
        pytest.param(
            {"data_loss": "log", "divergence": "renyi", "alpha": 0.4},
            log_loss,
            renyi(0.4),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"data_loss": "log", "divergence": "renyi", "alpha": 2.5},
            log_loss,
            renyi(2.5),
            marks=pytest.mark.slow,
        ),
        pytest.param({"data_loss": "beta"}, beta_loss, kl, marks=pytest.mark.slow),
        ({"data_loss": "beta", "divergence": "renyi"}, beta_loss, renyi(2.5)),
    ],
)
def test_a_single_client_has_the_generalized_posterior(settings, loss, divergence):
    method = FedGvi(samples=16, start_std=0.3, **settings)
    mean, std = of_a_mean(method, [Y])
    wanted = by_quadrature(Y, loss, divergence)
    assert mean == pytest.approx(wanted[0], abs=0.06)
    assert std == pytest.approx(wanted[1], rel=0.08)


@pytest.mark.slow
def test_several_clients_end_at_the_pooled_generalized_posterior():
    """Damped and synchronous, with an outlier at one of them."""
    method = FedGvi(samples=20, start_std=0.3, data_loss="beta")
    mean, std = of_a_mean(method, [Y[:3], Y[3:]], rounds=8)
    wanted = by_quadrature(Y, beta_loss, kl)
    assert mean == pytest.approx(wanted[0], abs=0.06)
    assert std == pytest.approx(wanted[1], rel=0.1)


def test_an_outlier_moves_pvi_without_bound_and_fedgvi_hardly():
    clean, far = [Y[:-1]], [[*Y[:-1], 30.0]]
    log, beta = Pvi(samples=2, start_std=0.3), FedGvi(samples=2, start_std=0.3, data_loss="beta")
    assert of_a_mean(log, far)[0] - of_a_mean(log, clean)[0] > 2
    assert of_a_mean(beta, far)[0] == pytest.approx(of_a_mean(beta, clean)[0], abs=0.1)


def test_orders_below_one_spread_and_above_narrow():
    """As α falls, the divergence weighs more."""
    stds = [
        of_a_mean(Pvi(samples=2, start_std=0.3, **settings), [Y[:3]])[1]
        for settings in (
            {"divergence": "renyi", "alpha": 0.3},
            {},
            {"divergence": "renyi", "alpha": 3.0},
        )
    ]
    assert stds[0] > stds[1] > stds[2]


def test_refusals():
    with pytest.raises(ConfigError, match="probabilities of classes"):
        FedGvi().check(run_of(network(), likelihood=build_likelihood("gaussian", REAL)))
    count = build_likelihood("poisson", Target("count", ("y",)))
    with pytest.raises(ConfigError, match="no closed form"):
        FedGvi(data_loss="beta").check(run_of(network(), likelihood=count))
    with pytest.raises(ConfigError, match="order 1 is KL"):
        Config.create(method={"name": "fedgvi", "divergence": "renyi", "alpha": 1.0})
    FedGvi().check(run_of(network()))
