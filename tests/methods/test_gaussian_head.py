"""The Gaussian head: sums of any partition against scikit-learn on pooled features, and SciPy."""

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_t
from sklearn.datasets import load_breast_cancer
from sklearn.discriminant_analysis import (
    LinearDiscriminantAnalysis,
    QuadraticDiscriminantAnalysis,
)
from torch import nn

import fedbayes
from fedbayes import Config, Simulation
from fedbayes.contracts import Report, Sum
from fedbayes.errors import ConfigError, MessageError, ModelError
from fedbayes.federation.client_runtime import Task
from fedbayes.federation.settings import Aggregation, Secure
from fedbayes.federation.stages.secure import plan
from fedbayes.inference.gaussian_head import GRID, GaussianHead, Moments

LITTLE = 1e-9
"""Rows of a prior that changes nothing."""


def rows(seed, classes=4, columns=6, count=300):
    """Features of classes with their own means and covariances, and of unlike sizes."""
    rng = np.random.default_rng(seed)
    y = rng.choice(classes, count, p=np.arange(1, classes + 1) / sum(range(classes + 1)))
    mixing = rng.normal(size=(classes, columns, columns)) / np.sqrt(columns)
    centres = 2 * rng.normal(size=(classes, columns)) + 5
    h = centres[y] + np.einsum("nij,nj->ni", mixing[y], rng.normal(size=(count, columns)))
    return h, y


def divided(h, y, owner, *, each=False):
    """What clients send."""
    return [
        Moments.of(torch.tensor(h[owner == c]), torch.tensor(y[owner == c]), 4, each=each)
        for c in np.unique(owner)
    ]


PARTITIONS = {
    "one": lambda y: np.zeros(len(y), int),
    "by class": lambda y: y,
    "at random": lambda y: np.random.default_rng(1).integers(0, 7, len(y)),
    "one row": lambda y: np.arange(len(y)),
}


@pytest.mark.parametrize("owner", PARTITIONS.values(), ids=PARTITIONS)
@pytest.mark.parametrize("shrinkage", [0.0, 0.2])
def test_linear_discriminants_are_those_of_the_pooled_rows(owner, shrinkage):
    h, y = rows(0)
    prior_rows = len(y) * shrinkage / (1 - shrinkage) or LITTLE
    head = GaussianHead.fit(divided(h, y, owner(y)), prior_rows, LITTLE)
    wanted = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage or None).fit(h, y)
    np.testing.assert_allclose(head.means, wanted.means_, atol=1e-5)
    covariance = np.linalg.inv(head.roots[0].T @ head.roots[0])
    np.testing.assert_allclose(covariance, wanted.covariance_, atol=1e-5)
    weight, bias = head.linear()
    found = torch.tensor(h) @ weight.T + bias - head.prior + np.log(wanted.priors_)
    np.testing.assert_allclose(found, wanted.decision_function(h), atol=1e-5)


@pytest.mark.parametrize("owner", PARTITIONS.values(), ids=PARTITIONS)
def test_quadratic_discriminants_are_those_of_the_pooled_rows(owner):
    """Scikit-learn divides scatters by n_k − 1, or from 1.8 on by n_k as we do."""
    h, y = rows(0)
    head = GaussianHead.fit(divided(h, y, owner(y), each=True), LITTLE, LITTLE)
    wanted = QuadraticDiscriminantAnalysis(store_covariance=True).fit(h, y)
    np.testing.assert_allclose(head.means, wanted.means_, atol=1e-5)
    counts = np.bincount(y)
    less = not np.allclose(wanted.covariance_[0], np.cov(h[y == 0].T, bias=True))
    roots = head.roots * np.sqrt((counts - less) / counts)[:, None, None]
    for root, covariance in zip(roots, wanted.covariance_, strict=True):
        np.testing.assert_allclose(np.linalg.inv(root.T @ root), covariance, atol=1e-5)
    distance = torch.einsum("kij,nkj->nki", roots, torch.tensor(h)[:, None] - head.means)
    found = torch.linalg.slogdet(roots)[1] - distance.square().sum(2) / 2 + np.log(wanted.priors_)
    np.testing.assert_allclose(found, wanted.decision_function(h), atol=1e-5)


def normal_inverse_wishart(h, y, k, prior_rows, mean_rows, psi, group):
    """The posterior predictive of class k row by row: conjugate updates of one row at a time."""
    columns = h.shape[1]
    overall = h.mean(0)
    scale, freedom = prior_rows * psi, prior_rows + columns - 1
    centres = dict.fromkeys(range(4), (overall, mean_rows))
    for row, own in zip(h, y, strict=True):
        if group is not None and own != group:
            continue
        mean, strength = centres[own]
        scale = scale + strength / (strength + 1) * np.outer(row - mean, row - mean)
        centres[own] = (strength * mean + row) / (strength + 1), strength + 1
        freedom += 1
    mean, strength = centres[k]
    free = freedom - columns + 1
    return multivariate_t(mean, scale * (strength + 1) / (strength * free), df=free)


@pytest.mark.parametrize("each", [False, True])
def test_scores_are_the_posterior_predictive(each):
    h, y = rows(2, count=60)
    head = GaussianHead.fit(divided(h, y, y % 2, each=each), 7.0, 0.5)
    within = sum(((h[y == k] - h[y == k].mean(0)) ** 2).sum() for k in range(4))
    psi = within / h.size * np.eye(6)
    if each:
        pooled = GaussianHead.fit(divided(h, y, y % 2), 7.0, 0.5)
        psi = np.linalg.inv(pooled.roots[0].T @ pooled.roots[0])
    new = rows(3, count=20)[0]
    for k in range(4):
        t = normal_inverse_wishart(h, y, k, 7.0, 0.5, psi, k if each else None)
        wanted = np.log(((y == k).sum() + 1) / (len(y) + 4)) + t.logpdf(new)
        np.testing.assert_allclose(head.scores(torch.tensor(new))[:, k], wanted, atol=1e-8)


def test_the_strength_of_the_prior_makes_the_sums_most_probable():
    """The evidence is the product of predictive densities, one row after another."""
    h, y = rows(4, count=40)
    head = GaussianHead.fit(divided(h, y, y), None, 0.5)
    within = sum(((h[y == k] - h[y == k].mean(0)) ** 2).sum() for k in range(4))
    psi, found = within / h.size * np.eye(6), []
    grid = GRID[10:50:4].numpy()
    for prior_rows in grid:
        scale, freedom, total = prior_rows * psi, prior_rows, 0.0
        centres = {c: (h.mean(0), 0.5) for c in range(4)}
        for row, own in zip(h, y, strict=True):
            mean, strength = centres[own]
            wide = scale * (strength + 1) / (strength * freedom)
            total += multivariate_t(mean, wide, df=freedom).logpdf(row)
            scale = scale + strength / (strength + 1) * np.outer(row - mean, row - mean)
            centres[own] = (strength * mean + row) / (strength + 1), strength + 1
            freedom += 1
        found.append(total)
    best = grid[int(np.argmax(found))]
    assert best / 2 < head.prior_rows < 2 * best


def settings(**more):
    return {
        "data": {"clients": 4, "limit": 400},
        "model": {"hidden": [12]},
        "calibration": "none",
        **more,
    }


@pytest.mark.parametrize("head", ["student", "lda", "qda"])
def test_a_federation_has_the_head_of_all_its_rows(head, tmp_path):
    """Whatever the partition, and in one round."""
    models = []
    for partition in ("iid", "dirichlet"):
        given = settings(method={"name": "gaussian-head", "head": head})
        given["data"] |= (
            {"partition": partition, "test": "official"} if False else {"partition": partition}
        )
        given["data"]["clients"] = 4
        with Simulation(Config.create(**given), tmp_path / partition) as simulation:
            steps = list(simulation)
            run, method = simulation.run, simulation.method
            samples = simulation.data.all_train()
            layer = method._layer(run)
            h = layer.features(run.network.initial, samples.x, run)[0][:, :-1]
            whole = Moments.of(h, samples.y, 10, each=head == "qda")
            model = method.model(simulation.server, run)
            x = simulation.data.test_union(0, 50).x
            found = method.draws(model, run)(x)[0].log_softmax(1)
            seen = layer.features(run.network.initial, x, run)[0][:, :-1]
        assert len(steps) == 1
        assert "all clients" in simulation.server.stopped
        wanted = GaussianHead.fit([whole])
        scores = wanted.scores(seen)
        if head == "lda":
            weight, bias = wanted.linear()
            scores = seen @ weight.T + bias
        torch.testing.assert_close(found, scores.log_softmax(1).float(), atol=2e-3, rtol=1e-3)
        models.append(model)
    assert models[0].keys() == models[1].keys()


def reports_of(simulation, clients):
    """What these clients say."""
    method, run = simulation.method, simulation.run
    message = method.message(simulation.server, simulation.runtime.at(_task(0)))
    return (
        {
            client: method.local(message, method.join(at), simulation.data.train(client), at)[0]
            for client in clients
            for at in [simulation.runtime.at(_task(client))]
        },
        run,
        method,
        message,
    )


def _task(client):
    return Task(client, 1, b"", None)


def test_secure_sums_have_the_same_head():
    given = settings(method={"name": "gaussian-head", "head": "lda"})
    with Simulation(Config.create(**given)) as simulation:
        told, run, method, message = reports_of(simulation, range(4))
        plain = Sum()
        for client, report in told.items():
            plain.add(client, report)
        secure = plan(
            Secure(enabled=True, max_weight=max(r.weight for r in told.values())),
            method,
            Aggregation(),
            4,
        )
        centre = {
            n: torch.zeros(p.shape).double() for n, p in method.expected(message, run).items()
        }
        mean = np.mean([secure.write(report, centre) for report in told.values()], axis=0)
        rounded = np.round(mean / secure.step) * secure.step
        found = secure.read(rounded, centre)
        hidden = Sum(
            {n: t.double() * 4 * found.weight for n, t in found.tensors.items()},
            4 * found.weight,
            4,
            dtypes=plain.dtypes,
        )
        at = simulation.runtime.at(_task(0))
        one, other = (method.update(simulation.server, r, at)[0] for r in (plain, hidden))
    for name, tensor in one.weights.items():
        torch.testing.assert_close(other.weights[name], tensor, rtol=2e-2, atol=2e-2)


def test_rounds_of_some_clients_add_up_to_one_report_each():
    given = settings(method="gaussian-head", clients_per_round=2, rounds=2)
    with Simulation(Config.create(**given)) as simulation:
        told, _, method, _ = reports_of(simulation, range(4))
        server, at = simulation.server, simulation.runtime.at(_task(0))
        for cohort in ([0, 1], [2, 3], [0, 1], [2, 3]):
            reports = Sum()
            for client in cohort:
                reports.add(client, told[client])
            server, info = method.update(server, reports, at)
        every = Sum()
        for client, report in told.items():
            every.add(client, report)
        wanted, _ = method.update(simulation.server, every, at)
        assert info["rows"] == pytest.approx(sum(r.weight for r in told.values()))
    assert not server.stopped
    for name, tensor in wanted.head.items():
        torch.testing.assert_close(server.head[name].abs(), tensor.abs(), rtol=1e-5, atol=1e-7)


def test_reports_that_no_rows_have_are_rejected():
    with Simulation(Config.create(**settings(method="gaussian-head"))) as simulation:
        told, run, method, _ = reports_of(simulation, [0])
        report, server = told[0], simulation.server
        method.accept(server, report, run)
        for name, change, words in (
            ("counts/rows", lambda t: t - 0.5, "counts of classes"),
            ("counts/rows", lambda t: 2 * t, "counts of classes"),
            ("products/features", lambda t: t / 10, "squares are less"),
            ("products/features", lambda t: t + torch.triu(torch.ones(12, 12)), "not symmetric"),
        ):
            bad = Report({**report.tensors, name: change(report.tensors[name])}, report.weight)
            with pytest.raises(MessageError, match=words):
                method.accept(server, bad, run)


def test_it_says_what_it_cannot():
    with pytest.raises(ConfigError, match="predicts classes, but the likelihood is gaussian"):
        Simulation(Config.create(method="gaussian-head", data={"name": "diabetes"}))
    no_bias = {"name": "tests.methods.test_gaussian_head:no_bias"}
    with pytest.raises(ConfigError, match="need a bias"):
        Simulation(Config.create(method={"name": "gaussian-head", "head": "lda"}, model=no_bias))
    wide = {"name": "gaussian-head", "head": "qda"}
    with pytest.raises(ModelError, match="would send"):
        Simulation(Config.create(method=wide, model={"hidden": [3000]}))


def no_bias(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, classes, False))


def test_two_classes_by_one_output_and_a_network_without_a_bias(tmp_path):
    load_breast_cancer(as_frame=True).frame.to_csv(tmp_path / "rows.csv", index=False)
    data = {"path": tmp_path / "rows.csv", "label": "target", "clients": 3}
    for head in ("student", "lda"):
        result = fedbayes.run(
            method={"name": "gaussian-head", "head": head},
            data=data,
            task={"likelihood": "bernoulli"},
            model={"hidden": [30]},
        )
        assert result.summary["global_accuracy"] > 0.9
    ended = fedbayes.run(method="gaussian-head", model=no_bias)
    assert ended.summary["global_accuracy"] > 0.4
