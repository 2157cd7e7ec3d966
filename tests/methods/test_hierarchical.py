"""The mixed model: the pooled maximum of the marginal likelihood, and its posteriors."""

import csv
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedbayes
from fedbayes.contracts import Report
from fedbayes.contracts.personal import PersonalTensors
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples
from fedbayes.errors import ConfigError, MessageError, ModelError
from fedbayes.likelihoods import build_likelihood
from fedbayes.likelihoods.noise import LIMIT, LearntNoise
from fedbayes.likelihoods.numeric import bounded
from fedbayes.methods.hierarchical import Hierarchical, _Population
from fedbayes.models import Network
from tests.helpers.places import at, network, rounds, run_of

CENTRE, SCALE = 300.0, 50.0


def federation(clients, **more):
    """A linear mixed model of one column, whose noise is learned, in units of SCALE."""
    target = Target("real", ("y",), (CENTRE,), (SCALE,))
    module = nn.Sequential(nn.Flatten(), nn.Linear(1, 1), LearntNoise(1)).double()
    likelihood = build_likelihood("gaussian", target)
    net = Network(module, shape=(1,))
    return run_of(net, clients=clients, cohort=clients, likelihood=likelihood, **more)


def estimates(method, server, run):
    """Intercept and slope, their standard deviations and correlation, and the residual's."""
    covariance = method.model(server, run)["last/covariance"] * SCALE**2
    slope, intercept = (server.mean * SCALE).tolist()
    stds = covariance.diagonal().sqrt()
    noise = float(bounded(server.shared["2.log_std"], LIMIT).exp()) * SCALE
    correlation = float(covariance[0, 1] / stds.prod())
    return [intercept + CENTRE, slope, float(stds[1]), float(stds[0]), correlation, noise]


def test_sleepstudy_is_the_published_mixed_model():
    """Belenky et al. 2003 by lme4, maximum likelihood (Bates et al. 2015, section 3)."""
    with (Path(__file__).parent / "sleepstudy.csv").open() as file:
        rows = list(csv.DictReader(file))
    data = []
    for subject in sorted({row["subject"] for row in rows}):
        own = [row for row in rows if row["subject"] == subject]
        x, y = ([[float(row[name])] for row in own] for name in ("days", "reaction"))
        data.append(Samples(torch.tensor(x).double(), torch.tensor(y).double()))
    method, run = Hierarchical(), federation(18)
    servers, _ = rounds(method, run, data, 25)
    found = estimates(method, servers[-1], run)
    wanted = [251.405, 10.467, 23.78, 5.72, 0.08, 25.59]
    assert found == pytest.approx(wanted, abs=5e-3)


def test_a_variance_may_be_zero_but_not_negative():
    for variance in (0.0, -1e-9):
        report = Report({"spread/variance": torch.tensor([1.0, variance])})
        with pytest.raises(MessageError, match="negative") if variance else nullcontext():
            Hierarchical().accept(None, report, None)


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_linear_models_are_those_of_statsmodels(covariance):
    """Unbalanced clients; the marginal likelihood is maximized by another program."""
    from statsmodels.regression.mixed_linear_model import MixedLM, MixedLMParams

    rng = np.random.default_rng(3)
    sizes = rng.integers(4, 30, 15)
    groups = np.repeat(np.arange(15), sizes)
    x = rng.normal(size=len(groups))
    own = rng.multivariate_normal([2.0, -1.0], [[1.0, 0.4], [0.4, 0.6]], size=15)
    y = own[groups, 0] + own[groups, 1] * x + 0.7 * rng.normal(size=len(groups))
    y = CENTRE + SCALE * y
    design = np.column_stack([np.ones_like(x), x])
    free = None
    if covariance == "diagonal":
        free = MixedLMParams.from_components(fe_params=np.ones(2), cov_re=np.eye(2))
    fit = MixedLM(y, design, groups, exog_re=design).fit(reml=False, free=free, gtol=1e-9)
    stds = np.sqrt(np.diag(fit.cov_re))
    wanted = [*fit.fe_params, *stds, fit.cov_re[0, 1] / stds.prod(), np.sqrt(fit.scale)]
    data = [
        Samples(torch.from_numpy(x[groups == k, None]), torch.from_numpy(y[groups == k, None]))
        for k in range(15)
    ]
    method, run = Hierarchical(covariance=covariance), federation(15)
    servers, states = rounds(method, run, data, 40)
    assert estimates(method, servers[-1], run) == pytest.approx(wanted, rel=1e-3, abs=1e-3)
    for k, effects in fit.random_effects.items():
        slope, intercept = (states[k].tensors["mean"] * SCALE).tolist()
        expected = [one + other for one, other in zip(fit.fe_params, effects, strict=True)]
        assert [intercept + CENTRE, slope] == pytest.approx(expected, rel=1e-3)


def logistic(seed=0):
    """A few samples of a linear network of three classes, float64."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(9, 4, generator=rng, dtype=torch.float64)
    return Samples(x, torch.randint(3, (9,), generator=rng))


def test_the_posterior_of_classes_is_laplaces():
    """Mode and curvature by automatic derivatives of the whole log-posterior."""
    net, data = network(dtype=torch.float64), logistic()
    method, run = Hierarchical(prior_std=0.8), run_of(network(dtype=torch.float64))
    server = method.init(run)
    place = at(run)
    report, client, _ = method.local(method.message(server, place), PersonalTensors(), data, place)
    design = torch.cat([data.x, torch.ones(9, 1).double()], dim=1)

    def energy(flat):
        logits = design @ flat.reshape(3, 5).T
        loss = nn.functional.cross_entropy(logits, data.y, reduction="sum")
        return loss + 0.5 * (flat - server.mean).square().sum() / 0.64

    mode = client.tensors["mean"]
    gradient = torch.func.grad(energy)(mode)
    torch.testing.assert_close(gradient, torch.zeros_like(mode), rtol=0, atol=1e-5)
    covariance = torch.linalg.inv(torch.func.hessian(energy)(mode))
    torch.testing.assert_close(client.tensors["covariance"], covariance, rtol=1e-5, atol=1e-8)
    apart = mode - server.mean
    second = covariance + torch.outer(apart, apart)
    torch.testing.assert_close(report.tensors["spread/covariance"], second, rtol=1e-5, atol=1e-8)
    assert net.initial.keys() == {"1.weight", "1.bias"}


def test_predictions_of_classes_are_the_probit_of_two():
    """For two classes: the sigmoid of the mean margin over √(1 + π/8 its variance)."""
    run = run_of(network(classes=2, dtype=torch.float64), classes=2)
    method = Hierarchical()
    data = Samples(logistic().x, torch.arange(9) % 2)
    server = method.init(run)
    message = method.message(server, at(run))
    _, client, _ = method.local(message, PersonalTensors(), data, at(run))
    model = method.personal_model(message, None, client, run)
    found = torch.softmax(method.draws(model, run)(data.x)[0], dim=1)[:, 1]
    design = torch.cat([data.x, torch.ones(9, 1).double()], dim=1)
    contrast = torch.cat([-design, design], dim=1)
    margin = contrast @ client.tensors["mean"]
    variance = (contrast @ client.tensors["covariance"] * contrast).sum(dim=1)
    wanted = torch.sigmoid(margin / (1 + torch.pi / 8 * variance).sqrt())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-8)


def test_draws_of_numbers_have_the_posteriors_moments():
    method, run = Hierarchical(predictions=4000), federation(3)
    model = method.model(method.init(run), run)
    x = torch.tensor([[0.0], [2.0]]).double()
    drawn = method.draws(model, run)(x)[:, :, 0]
    mean = model["last/mean"] @ torch.tensor([[0.0, 2.0], [1.0, 1.0]]).double()
    torch.testing.assert_close(drawn.mean(dim=0), mean)  # antithetic draws
    torch.testing.assert_close(
        drawn.var(dim=0), torch.tensor([1.0, 5.0]).double(), rtol=0.1, atol=0
    )


def test_low_rank_is_factor_analysis():
    """Weights with one factor, known without doubt: Σ comes to their covariance, by sums alone."""
    loading = torch.tensor([[2.0], [-1.0], [0.5], [0.0], [1.0]]).double()
    wanted = loading @ loading.T + torch.diag(torch.tensor([0.3, 0.1, 0.2, 0.5, 0.4])).double()
    method, run = Hierarchical(covariance="low-rank", rank=1), run_of(network(classes=1))
    population = _Population(torch.zeros(5).double(), method.init(run).spread)
    for _ in range(300):
        terms = method._terms({"mean": population.mean, "covariance": wanted}, population)
        fresh = method._spread(terms, torch.zeros(5).double(), population)
        population = _Population(population.mean, fresh)
    torch.testing.assert_close(population.covariance(), wanted, rtol=1e-3, atol=1e-3)


def test_networks_that_do_not_fit_are_named():
    wide = run_of(network(hidden=(50,)))
    with pytest.raises(ModelError, match=r"all 153 weights .* method\.largest"):
        Hierarchical(largest=100).check(wide)
    with pytest.raises(ConfigError, match=r"method\.rank is 15"):
        Hierarchical(covariance="low-rank", rank=15).check(run_of(network()))
    squashed = Network(nn.Sequential(nn.Linear(4, 3), nn.Softmax(dim=1)), shape=(4,))
    method, run = Hierarchical(), run_of(squashed)
    with pytest.raises(ModelError, match="outputs of its last layer"):
        method.local(
            method.message(method.init(run), at(run)), PersonalTensors(), logistic(), at(run)
        )


def test_an_honest_client_two_deviations_away_is_not_rejected():
    """By its squared distance it would be far more than five times the median client."""
    rng = np.random.default_rng(0)
    intercepts = rng.normal(size=12)
    intercepts[0] = 2.0
    frames = [
        pd.DataFrame({"x": (x := rng.normal(size=17)), "y": b + x + rng.normal(size=17), "site": k})
        for k, b in enumerate(intercepts)
    ]
    done = fedbayes.run(
        method="hierarchical",
        data=pd.concat(frames),
        label="y",
        group="site",
        model={"hidden": []},
        rounds=10,
    )
    assert done.summary["refused_reports"] == 0
