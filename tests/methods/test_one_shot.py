"""FedLPA and PredBayes: one round against closed forms."""

import math

import pytest
import torch

import fedbayes
from fedbayes.contracts import Report, ReportList, Weights
from fedbayes.errors import MessageError
from fedbayes.inference.kronecker import layered, rows_of
from fedbayes.methods.fedlpa import FedLpa, _packed, _symmetric
from fedbayes.methods.predbayes import GRID, NLL, PredBayes, PredBayesServer, combined
from tests.helpers.places import at, network, run_of, samples
from tests.helpers.regressions import STD, linear_run, pooled, regressions


def answered(method, run, data, server=None):
    """The server's state after a round of all clients."""
    server, reports = server or method.init(run), ReportList()
    for client, own in enumerate(data):
        place = at(run, client=client)
        message = method.message(server, place)
        report, _, _ = method.local(message, method.join(place), own, place)
        method.accept(server, report, run)
        reports.add(client, report)
    return method.update(server, reports, at(run))[0]


@pytest.mark.parametrize("prior_std", [1.0, 0.2])
def test_fedlpa_gives_the_ridge_regression_of_all_rows(prior_std):
    """Gaussian noise: each client's curvature is exact, Σ x xᵀ/σ², also with rows that differ."""
    data = [*regressions(orthogonal=False), *regressions(1, rows=7, orthogonal=False, seed=5)]
    run = linear_run(clients=4, cohort=4, epochs=400)
    found = answered(FedLpa(prior_std=prior_std), run, data).weights["0.weight"]
    wanted, _ = pooled(data, prior_std**-2)
    torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_fedlpa_solves_the_sum_of_quadratics(damping):
    """Against one dense system of all weights of a layer, for factors that do not commute."""
    rng = torch.Generator().manual_seed(3)
    run = run_of(network(), clients=3, cohort=3)
    method, reports, width = FedLpa(prior_std=0.5, damping=damping), ReportList(), 3 * 5
    total = 3 / (3 * 0.25) * torch.eye(width, dtype=torch.float64)
    right = torch.zeros(width, dtype=torch.float64)
    for client in range(3):
        a, b = (torch.randn(n, n, generator=rng, dtype=torch.float64) for n in (5, 3))
        a, b = a @ a.T, b @ b.T
        weights = {n: torch.randn(t.shape, generator=rng) for n, t in run.network.initial.items()}
        sent = {"inputs/1": _packed(a.float()), "outputs/1": _packed(b.float())}
        reports.add(client, Report({**weights, **sent}, weight=float(client + 1)))
        own = torch.kron(b + damping * torch.eye(3), a + damping * torch.eye(5))
        precision = (client + 1) * own + torch.eye(width) / (3 * 0.25)
        total += (client + 1) * own
        right += precision @ rows_of("1", weights).double().flatten()
    after, _ = method.update(method.init(run), reports, at(run))
    wanted = dict(layered("1", torch.linalg.solve(total, right).reshape(3, 5), after.weights))
    for name, tensor in after.weights.items():
        torch.testing.assert_close(tensor, wanted[name].float(), rtol=1e-4, atol=1e-5)


def test_fedlpa_sends_a_triangle_of_each_factor():
    """64-8-10: 65 inputs and 8 outputs, 9 and 10. What is wider than `largest` has a diagonal."""
    settings = {"model": {"hidden": [8]}, "rounds": 1, "data": {"clients": 2, "limit": 200}}
    plain = fedbayes.run(method="fedavg", progress=False, **settings).metrics[0]["bytes_up"] / 2
    numbers = {1000: 65 * 66 // 2 + 8 * 9 // 2 + 9 * 10 // 2 + 10 * 11 // 2}
    numbers[20] = 65 * 8 + 9 * 10 // 2 + 10 * 11 // 2
    for largest, more in numbers.items():
        method = {"name": "fedlpa", "largest": largest}
        run = fedbayes.run(method=method, progress=False, **settings)
        assert run.metrics[0]["bytes_up"] / 2 - plain - 4 * more < 600
    matrix = torch.tensor([[1.0, 2.0, 4.0], [2.0, 3.0, 5.0], [4.0, 5.0, 6.0]])
    torch.testing.assert_close(_symmetric(_packed(matrix)), matrix.double())


def test_fedlpa_rejects_negative_curvature():
    run = run_of(network(), clients=2, cohort=2)
    tensors = {**run.network.initial, "inputs/1": _packed(-torch.eye(5))}
    tensors["outputs/1"] = _packed(torch.eye(3))
    with pytest.raises(MessageError, match="negative curvature"):
        FedLpa().accept(Weights(run.network.initial), Report(tensors), run)


def quantiles(mean, variance, count=4000):
    """Draws of a Gaussian, evenly spaced in probability, [count]."""
    places = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return mean + math.sqrt(variance) * torch.special.ndtri(places)


def test_predbayes_multiplies_or_mixes_gaussian_predictions():
    """One weight, f = w x: the product of the clients' posteriors, each with a share of the prior,
    is the posterior of all rows. The mixture has the mean and variance of all draws together.
    """
    rng = torch.Generator().manual_seed(4)
    rows = [torch.randn(n, 2, generator=rng, dtype=torch.float64) for n in (5, 9, 20)]
    likelihood = linear_run().likelihood
    precision = [1 / 3 + one[:, 0].square().sum() / STD**2 for one in rows]
    mean = [one.prod(1).sum() / STD**2 / p for one, p in zip(rows, precision, strict=True)]
    x = torch.tensor([0.5, -2.0], dtype=torch.float64)
    draws = torch.stack([quantiles(m, 1 / p) for m, p in zip(mean, precision, strict=True)])
    every = (draws[..., None] * x)[..., None]
    whole = torch.cat(rows)
    total = 1 + whole[:, 0].square().sum() / STD**2
    shares = torch.tensor([5.0, 9.0, 20.0]) / 34
    for beta in (0.0, 1.0, 0.3):
        found = combined(likelihood, every, shares, beta)[..., 0]
        middle = (shares.double() @ draws.mean(1)) * x
        second = (shares.double() @ draws.square().mean(1)) * x.square()
        one = 1 / (second - middle.square()), x**-2 * total
        each = middle, whole.prod(1).sum() / STD**2 / total * x
        both = (1 - beta) * one[0] + beta * one[1]
        wanted = ((1 - beta) * one[0] * each[0] + beta * one[1] * each[1]) / both
        torch.testing.assert_close(found.mean(0), wanted, rtol=2e-3, atol=1e-4)
        torch.testing.assert_close(found.var(0, correction=0), 1 / both, rtol=5e-3, atol=0)


def test_predbayes_multiplies_or_mixes_probabilities():
    every = torch.randn(3, 4, 6, 3, generator=torch.Generator().manual_seed(1))
    shares, likelihood = torch.tensor([0.5, 0.3, 0.2]), run_of(network()).likelihood
    each = every.softmax(-1).mean(1)
    mixture = (shares[:, None, None] * each).sum(0)
    found = combined(likelihood, every, shares, 0.0).softmax(-1)
    torch.testing.assert_close(found[0], mixture)
    product = each.prod(0)
    found = combined(likelihood, every, shares, 1.0).softmax(-1)
    torch.testing.assert_close(found[0], product / product.sum(-1, keepdim=True))
    between = product**0.4 * mixture**0.6
    found = combined(likelihood, every, shares, 0.4).softmax(-1)
    torch.testing.assert_close(found[0], between / between.sum(-1, keepdim=True))


@pytest.mark.slow
def test_predbayes_draws_the_posterior_of_all_rows():
    """Langevin dynamics of three clients, multiplied, at rows of one column: within its noise."""
    data = regressions(rows=12)
    data = [type(one)(one.x * torch.tensor([1.0, 0.0]), one.y) for one in data]
    run = linear_run(lr=0.05, epochs=6000, batch_size=12)
    method = PredBayes(beta=1.0, samples=500, burn_in=0.2)
    server = answered(method, run, data)
    mean, precision = pooled(data)
    x = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    found = method.draws(method.model(server, run), run)(x)[:, 0, 0]
    wanted = 1 / precision[0, 0]
    assert abs(float(found.mean() - mean[0])) < 0.2 * math.sqrt(wanted)
    assert float(found.var()) == pytest.approx(float(wanted), rel=0.25)
    assert server.stopped


def test_predbayes_chooses_beta_on_rows_that_were_held_out():
    """Rows in round 2 are those that round 1 left out; the sums are those of single rows."""
    run = run_of(network(), clients=2, cohort=2, optimizer="sgd", epochs=12, batch_size=8)
    data, method = [samples(20, seed=k) for k in range(2)], PredBayes(samples=2, held_out=0.3)
    seen = []
    for client, own in enumerate(data):
        training, kept = method._parted(own, at(run, client=client))
        again = method._parted(own, at(run, client=client, round=2))
        assert torch.equal(kept.x, again[1].x)
        assert (len(training.y), len(kept.y)) == (14, 6)
        assert not (training.x[:, None] == kept.x[None]).all(-1).any()
        seen.append(kept)
    server = answered(method, run, data)
    assert not server.stopped
    after = answered(method, run, data, server)
    model = method.model(after, run)
    totals = []
    for beta in GRID:
        draw = method.draws({**model, "beta": torch.tensor(beta)}, run)
        logs = [draw(one.x)[0].log_softmax(-1)[range(6), one.y].sum() for one in seen]
        totals.append(-float(sum(logs)))
    assert float(after.beta) == pytest.approx(GRID[totals.index(min(totals))])
    assert after.stopped
    empty = Report({NLL: torch.zeros(len(GRID))}, 0.0)
    reports = ReportList()
    reports.add(0, empty)
    unchanged, _ = method.update(server, reports, at(run, round=2))
    assert float(unchanged.beta) == 0.0
    with pytest.raises(MessageError, match="log-likelihood"):
        method.accept(server, Report({NLL: torch.full((len(GRID),), 1e9)}), run)


def test_predbayes_ends_with_one_network_where_inputs_are_given():
    settings = {"model": {"hidden": [8]}, "data": {"clients": 2, "limit": 200}}
    method = {"name": "predbayes", "inputs": "auto", "steps": 20, "drawn": 64, "samples": 2}
    run = fedbayes.run(method=method, progress=False, **settings)
    assert isinstance(run.server(), PredBayesServer)
    assert run.model.keys() == run.server().weights.keys()
    assert run.summary["rounds"] == 2
    assert "combined" in run.summary["stopped_reason"]


def test_predbayes_says_that_one_round_is_too_few_for_beta():
    run = run_of(network(), clients=3, cohort=2, rounds=1)
    first, second = PredBayes().remarks(run)
    assert "2 clients" in first
    assert "Run 2 rounds" in second
    assert not PredBayes(beta=0.5).remarks(run_of(network(), clients=3, cohort=3, rounds=1))
