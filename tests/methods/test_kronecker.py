"""FedLap with Kronecker products: posteriors in closed form, and fixed points of pooled losses."""

import pytest
import torch
from torch import nn

import fedbayes
from fedbayes.config.config import Config
from fedbayes.contracts import Report, Sum
from fedbayes.contracts.kronecker import flattened
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples, named, part
from fedbayes.errors import ConfigError, MessageError
from fedbayes.inference.kronecker import Metric, Spectrum, layered, rows_of
from fedbayes.likelihoods import build_likelihood
from fedbayes.methods.fedlap import FedLap
from fedbayes.models import Network
from fedbayes.models.networks import MLP
from fedbayes.runs.rules import _of_reports
from fedbayes.storage.folder import RunFolder
from tests.helpers.places import at, rounds, run_of
from tests.helpers.regressions import linear_run, pooled, regressions


def kronecker(**settings):
    return FedLap(covariance="kronecker", **settings).variant()


@pytest.mark.parametrize("count", [1, 2])
def test_one_round_gives_the_whole_pooled_posterior(count):
    """Columns need not be orthogonal: under Gaussian noise all clients have B = 1/σ², so products
    add to one, Σ x xᵀ ⊗ 1/σ². Further rounds change nothing.
    """
    data = regressions(orthogonal=False)
    mean, precision = pooled(data)
    method, run = kronecker(damping=1.0, predictions=2000), linear_run()
    (*_, server), _ = rounds(method, run, data, count)
    torch.testing.assert_close(server.weights["0.weight"][0], mean, rtol=1e-5, atol=1e-6)
    model = {name: t.double() for name, t in method.model(server, run).items()}
    right, std = model["right/0"], model["spread/0"]
    covariance = (right * std[0] ** 2) @ right.T
    torch.testing.assert_close(covariance, torch.linalg.inv(precision), rtol=1e-4, atol=1e-6)
    x = torch.tensor([[1.0, 0.0], [1.0, -2.0]], dtype=torch.float64)
    drawn = method.draws(model, run)(x)[..., 0]
    wanted = x @ torch.linalg.inv(precision) @ x.T
    assert (torch.cov(drawn.T) - wanted).abs().max() < 0.15 * wanted.max()
    torch.testing.assert_close(drawn.mean(0), x @ mean, atol=0.02, rtol=0)


def test_layers_of_several_outputs_have_the_posterior_of_the_pool():
    """Two targets with a bias, of other noise scales by the targets' units: B is diagonal."""
    rng = torch.Generator().manual_seed(2)
    data = []
    for _ in range(2):
        x = torch.randn(15, 2, generator=rng, dtype=torch.float64)
        y = (
            torch.randn(15, 2, generator=rng, dtype=torch.float64) * 3
            + x @ torch.ones(2, 2).double()
        )
        data.append(Samples(x, y))
    net = Network(nn.Sequential(nn.Linear(2, 2).double()), shape=(2,))
    target = Target("real", ("a", "b"), center=(0.0, 1.0), scale=(1.0, 2.0))
    likelihood = build_likelihood("gaussian", target, noise=0.5)
    settings = {"lr": 0.1, "epochs": 200, "batch_size": 15, "likelihood": likelihood}
    run = run_of(net, clients=2, cohort=2, **settings)
    (*_, server), _ = rounds(kronecker(damping=1.0), run, data, 1)
    x = torch.cat([one.x for one in data])
    x = torch.cat([x, torch.ones(30, 1).double()], 1)
    y = (torch.cat([one.y for one in data]) - torch.tensor([0.0, 1.0])) / torch.tensor([1.0, 2.0])
    precision = torch.eye(3).double() + x.T @ x / 0.25
    wanted = torch.linalg.solve(precision, x.T @ y.double() / 0.25).T
    torch.testing.assert_close(rows_of("0", server.weights), wanted, rtol=1e-4, atol=1e-5)


PLAIN, HEAVY = {"lr": 0.5, "epochs": 60}, {"lr": 0.3, "momentum": 0.5, "epochs": 60}


@pytest.mark.parametrize(
    ("method", "count", "optimizer"),
    [
        (kronecker(), 16, PLAIN),
        (kronecker(damping=0.6), 12, HEAVY),
        pytest.param(FedLap(damping=0.5), 48, PLAIN, marks=pytest.mark.slow),
        pytest.param(
            FedLap(covariance="none"), 90, {"lr": 0.5, "epochs": 25}, marks=pytest.mark.slow
        ),
    ],
    ids=["kronecker", "momentum", "diagonal", "none"],
)
def test_the_fixed_point_is_the_pools_mode_whatever_the_precision(method, count, optimizer):
    """Logistic regression of clients with other classes, where curvatures differ and products do
    not add: Σ ∇ℓ_k(w) + δ w = 0 is the same. The mode is by Newton's method on the pooled rows.
    """
    rng = torch.Generator().manual_seed(3)
    data = []
    for client in range(3):
        x = torch.randn(12, 2, generator=rng, dtype=torch.float64) + client - 1
        y = torch.randint(2, (12,), generator=rng) + (client > 0)
        data.append(Samples(x, y))
    torch.manual_seed(0)
    net = Network(nn.Sequential(nn.Linear(2, 3).double()), shape=(2,))
    run = run_of(net, clients=3, cohort=3, batch_size=12, **optimizer)
    (*_, server), _ = rounds(method, run, data, count)
    x, y = torch.cat([one.x for one in data]), torch.cat([one.y for one in data])
    w = torch.zeros(9, dtype=torch.float64)

    def energy(flat):
        outputs = x @ flat[:6].reshape(3, 2).T + flat[6:]
        return nn.functional.cross_entropy(outputs, y, reduction="sum") + flat.square().sum() / 2

    for _ in range(20):
        hessian, slope = torch.func.hessian(energy)(w), torch.func.grad(energy)(w)
        w = w - torch.linalg.solve(hessian, slope)
    found = server.weights if hasattr(server, "weights") else server.posterior.mean
    flat = torch.cat([found["0.weight"].flatten(), found["0.bias"]])
    torch.testing.assert_close(flat, w, rtol=0, atol=0.03)


def test_sums_are_those_of_what_clients_keep():
    """Whoever takes part: so the server's sum of shifts is all that clients need of one another."""
    data = regressions(clients=4, orthogonal=False)
    run = linear_run(cohort=2, clients=4, epochs=5)
    method = kronecker()
    (*_, server), states = rounds(method, run, data, 4, [[0, 1], [1, 2], [0, 2], [0, 1]])
    assert not states[3].shift
    for key in ("shift", "inputs", "outputs", "count"):
        for name, total in getattr(server.pool, key).items():
            wanted = sum(getattr(one, key)[name] for one in states[:3])
            torch.testing.assert_close(total, wanted, rtol=1e-9, atol=1e-9)


def test_metrics_are_the_dense_matrices_that_they_stand_for():
    """Against torch.kron, with a bias and a weight of several axes."""
    rng = torch.Generator().manual_seed(4)
    like = {
        "c.weight": torch.randn(3, 2, 2, generator=rng).double(),
        "c.bias": torch.randn(3, generator=rng).double(),
        "n.weight": torch.randn(4, generator=rng).double(),
    }
    a, b = (torch.randn(n, n, generator=rng).double() for n in (5, 3))
    a, b = a @ a.T, b @ b.T
    (va, u), (vb, v) = torch.linalg.eigh(a), torch.linalg.eigh(b)
    metric = Metric(
        {"c": Spectrum(v, u, torch.outer(vb, va) / 7)}, {"n.weight": like["n.weight"] ** 2}
    )
    found = metric.scaled(lambda c: 1 / (c + 2), like)
    dense = torch.kron(b, a) / 7 + 2 * torch.eye(15).double()
    wanted = torch.linalg.solve(dense, rows_of("c", like).flatten()).reshape(3, 5)
    torch.testing.assert_close(rows_of("c", found), wanted)
    torch.testing.assert_close(found["n.weight"], like["n.weight"] / (like["n.weight"] ** 2 + 2))
    back = dict(layered("c", rows_of("c", like), like))
    assert all(torch.equal(back[name], like[name]) for name in back)


def test_wide_layers_have_diagonals():
    net = Network(MLP(6, (5,), 3), shape=(6,))
    run = run_of(net)
    method = kronecker(largest=6)
    server = method.init(run)
    assert set(server.pool.inputs) == {"3"}
    assert set(server.pool.diagonal) == {"1.weight", "1.bias"}
    data = Samples(torch.randn(9, 6), torch.arange(9) % 3)
    message = method.message(server, at(run))
    report, _, _ = method.local(message, method.join(at(run)), data, at(run))
    assert part(report.tensors, "diagonal").keys() == server.pool.diagonal.keys()
    assert report.tensors.keys() == method.expected(message, run).keys()


def test_refusals():
    method, run = kronecker(), linear_run()
    server = method.init(run)
    message = method.message(server, at(run))
    report, _, _ = method.local(message, method.join(at(run)), regressions()[0], at(run))
    false = {**report.tensors, "inputs/0": -report.tensors["inputs/0"]}
    with pytest.raises(MessageError, match="inputs/0"):
        method.accept(server, Report(false), run)
    clipped = run.__class__(**{**vars(run), "clips": run.clips.__class__(1.0)})
    with pytest.raises(ConfigError, match=r"aggregation\.clip"):
        method.check(clipped)
    for rule in ("median", "trimmed-mean", "krum"):
        config = Config.create(min_reports=1, clients_per_round=1, aggregation={"rule": rule})
        found = " ".join(_of_reports(config, method, run))
        assert (f"'{rule}' does not work with fedlap" in found) == (rule != "krum")
        assert "does not work" not in " ".join(_of_reports(config, method.of, run))


@pytest.mark.parametrize(("damping", "times"), [(None, 1.0), (0.25, 1.0), (1.0, 4.0)])
@pytest.mark.parametrize("furthest", [1.0, 2.0, 0.0])
@pytest.mark.parametrize(("energy", "length"), [(9e9, 9e9), (1e-3, 9e9), (9e9, 1e-3)])
def test_no_step_goes_further_than_those_of_the_clients(damping, times, energy, length, furthest):
    """x = S⁻¹ c, shortened until ⟨x, c⟩ and ‖x‖ are no more than told: against dense matrices."""
    run = linear_run(clients=4, cohort=4, epochs=3)
    method = kronecker(damping=damping, furthest=furthest)
    (*_, server), _ = rounds(method, run, regressions(clients=4, orthogonal=False), 1)
    pool, width = server.pool, len(server.pool.inputs["0"])
    c = torch.randn(1, width, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    precision = pool.inputs["0"] * pool.outputs["0"] / pool.count["samples"] + torch.eye(width)
    x = torch.linalg.solve(precision, c.T).T
    told = {"energy/0": energy * (x * c).sum(), "length/0": length * x.norm()}
    change = {n: torch.zeros_like(t) for n, t in flattened(pool).items()}
    change |= told | named("shift", dict(layered("0", c, server.weights)))
    after, _ = method.update(server, Sum(change, 4.0, 4), at(run, round=2))
    moved = rows_of("0", after.weights) - rows_of("0", server.weights)
    times = times * furthest or 1e9
    torch.testing.assert_close(moved, min(1.0, times * energy, times * length) * x)


def test_clients_tell_how_far_they_went():
    """Energy and length of w_k − w_g, damped as all of the report is; neither is ever negative."""
    run, method = linear_run(clients=4, cohort=4, epochs=3), kronecker()
    data = regressions(clients=4, orthogonal=False)
    (*_, server), states = rounds(method, run, data, 1)
    place = at(run, round=2)
    message = method.message(server, place)
    report, _, _ = method.local(message, states[0], data[0], place)
    problem = method.problem(message, states[0], data[0], place)
    solved = place.solve(problem, method.loss(run), data[0])
    centre = problem.given["exact"]["centre"]
    moved = {n: t.double() - centre[n] for n, t in solved.parameters.items()}
    shift, told = part(report.tensors, "shift"), report.tensors
    energy = sum(float((t.double() * moved[n]).sum()) for n, t in shift.items())
    assert float(told["energy/0"]) == pytest.approx(energy, rel=1e-4)
    assert float(told["length/0"]) == pytest.approx(float(rows_of("0", moved).norm()) / 4, rel=1e-4)
    method.accept(server, report, run)
    for key in ("energy/0", "length/0"):
        hostile = Report(report.tensors | {key: -report.tensors[key]})
        with pytest.raises(MessageError, match=f"'{key}' is negative"):
            method.accept(server, hostile, run)


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize("temper", [0.1, 1.0])
def test_a_convolutional_network_trains(temper, tmp_path):
    """Without bounds on the server's steps clients' weights were soon no longer finite."""
    fedbayes.run(
        data={"name": "mnist", "limit": 400, "clients": 3, "test": 0.25, "official_test": "unread"},
        model={"name": "lenet5"},
        method={"name": "fedlap", "covariance": "kronecker", "kl_weight": temper},
        training={"epochs": 5},
        rounds=6,
        evaluate_every=6,
        evaluate_local_every=6,
        folder=tmp_path / "run",
    )
    losses = [line["reported"]["loss"] for line in RunFolder(tmp_path / "run").metrics()]
    assert losses[-1] < 0.6 < 1.0 < losses[0]
