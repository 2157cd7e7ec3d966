"""FedLap and FedEP: against pooled posteriors in closed form, and against one another."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedbayes import Config, Simulation
from fedbayes.contracts.drawn import draws_of, sampler_of
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples, named, part
from fedbayes.errors import ConfigError, FedbayesWarning, ModelError
from fedbayes.likelihoods import build_likelihood
from fedbayes.methods.fedep import FedEP
from fedbayes.methods.fedlap import FedLap
from fedbayes.models import Network
from tests.helpers.places import at, network, rounds, run_of
from tests.helpers.regressions import STD, linear_run, pooled, regressions


def posteriors(*arguments):
    """Those of the server after each of the `rounds`, and the clients' states."""
    servers, states = rounds(*arguments)
    return [server.posterior for server in servers], states


EXACT = [FedLap(damping=1.0), FedEP(damping=1.0)]


@pytest.mark.parametrize("method", EXACT, ids=lambda m: m.name)
def test_one_synchronous_round_gives_the_pooled_posterior(method):
    """Quadratic losses and diagonal curvature: v_i = Σ x y/σ² and V_i = Σ x²/σ², wherever the
    cavity draws the mode. So one undamped round is enough, and others change nothing.
    """
    data = regressions()
    mean, precision = pooled(data)
    found, states = posteriors(method, linear_run(), data, 2)
    for posterior in found:
        torch.testing.assert_close(posterior.mean["0.weight"][0], mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            posterior.precision["0.weight"][0], precision.diagonal(), rtol=1e-6, atol=0
        )
    product = sum(state.factor.precision["0.weight"] for state in states)
    torch.testing.assert_close(found[-1].precision["0.weight"], product, rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("method", [FedLap, FedEP])
def test_drawn_targets_give_the_precision_on_average(method):
    """Gaussian targets of 60 rows, 400 for each: (y − f)²/σ⁴ has the deviation √2/σ² around 1/σ²,
    so precisions are off by a hundredth. Targets are others in every round and at every client.
    """
    data = [regressions()[0]] * 3
    _, precision = pooled(data)
    _, exact = pooled(data[:1], 1 / 3)
    found, states = posteriors(method(damping=1.0, fisher_draws=400), linear_run(), data, 2)
    drawn = [posterior.precision["0.weight"][0] for posterior in found]
    for one in drawn:
        torch.testing.assert_close(one, precision.diagonal(), rtol=0.05, atol=0)
    assert (drawn[0] != drawn[1]).all()
    factors = [state.factor.precision["0.weight"][0] for state in states]
    assert (factors[0] != factors[1]).all()
    torch.testing.assert_close(factors[0], exact.diagonal(), rtol=0.1, atol=0)


@pytest.mark.parametrize("method", [FedLap(), FedEP(damping=0.5)], ids=lambda m: m.name)
def test_damped_rounds_come_nearer_by_the_factor_that_damping_leaves(method):
    """Factors have Σx²/σ² for a fixed point, and keep 1 − ρ of the distance: ρ is 1/3 or 1/2."""
    data, count = regressions(), 6
    _, precision = pooled(data)
    kept = 1 - (method.damping or 1 / 3)
    found, _ = posteriors(method, linear_run(), data, count)
    for number, posterior in enumerate(found, 1):
        left = precision.diagonal() - posterior.precision["0.weight"][0]
        wanted = (precision.diagonal() - 1) * kept**number
        torch.testing.assert_close(left, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", EXACT, ids=lambda m: m.name)
def test_one_after_another_is_exact_once_all_were_there(method):
    data = regressions()
    mean, precision = pooled(data)
    found, _ = posteriors(method, linear_run(cohort=1), data, 3, [[1], [0], [2]])
    torch.testing.assert_close(found[-1].mean["0.weight"][0], mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        found[-1].precision["0.weight"][0], precision.diagonal(), rtol=1e-6, atol=0
    )
    assert not torch.allclose(found[1].mean["0.weight"][0], mean, rtol=1e-2)


def test_diagonals_of_designs_that_are_not_orthogonal_end_at_the_pooled_mode():
    """The dual makes the mean exact, and precisions are the diagonal of the pooled one; more than
    one round is needed.
    """
    data = regressions(orthogonal=False)
    mean, precision = pooled(data)
    found, _ = posteriors(FedLap(damping=0.5), linear_run(epochs=60), data, 20)
    torch.testing.assert_close(found[-1].mean["0.weight"][0], mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        found[-1].precision["0.weight"][0], precision.diagonal(), rtol=1e-5, atol=0
    )
    assert not torch.allclose(found[0].mean["0.weight"][0], mean, rtol=1e-2)


def test_without_covariances_rounds_follow_the_recursion_of_duals():
    """v_i ← v_i + ρ δ (w_i − w), w ← Σ v_i / δ, with w_i in closed form: the gradient of the summed
    loss and δ (w_i − w) + v_i is 0. Its fixed point is the pooled mode.
    """
    data, delta = regressions(orthogonal=False), 20.0
    run = linear_run()
    method = FedLap(covariance="none", prior_std=delta**-0.5, damping=0.8)
    found, _ = posteriors(method, run, data, 12)
    duals, w = torch.zeros(3, 2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for number in range(400):
        ends = []
        for dual, one in zip(duals, data, strict=True):
            hessian = one.x.T @ one.x / STD**2 + delta * torch.eye(2, dtype=torch.float64)
            ends.append(
                torch.linalg.solve(hessian, (one.x.T @ one.y)[:, 0] / STD**2 + delta * w - dual)
            )
        duals = duals + 0.8 * delta * (torch.stack(ends) - w)
        w = duals.sum(0) / delta
        if number < len(found):
            torch.testing.assert_close(found[number].mean["0.weight"][0], w, rtol=1e-3, atol=1e-4)
    mean, _ = pooled(data, delta)
    torch.testing.assert_close(w, mean, rtol=1e-5, atol=1e-6)
    assert (found[-1].precision["0.weight"] - delta).abs().max() < 1e-9


LINEAR = FedLap(covariance="none", prior_std=20.0**-0.5, damping=0.8, inputs="gaussian")


def test_predictions_without_weight_change_nothing():
    data, run = regressions(orthogonal=False), linear_run(epochs=5)
    told = LINEAR.model_copy(update={"strength": 0.0}).variant()
    plain = LINEAR.model_copy(update={"inputs": None})
    found, _ = posteriors(told, run, data, 3)
    wanted, _ = posteriors(plain, run, data, 3)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.mean, other.mean, rtol=1e-6, atol=1e-7)


def test_predictions_count_once_there_are_any():
    """As the other clients do, and not in the first round, when nothing is learnt."""
    data, run = regressions(orthogonal=False), linear_run(epochs=1)
    method = LINEAR.model_copy(update={"strength": 0.3}).variant()
    servers, states = rounds(method, run, data, 1)
    weights = []
    for server in (method.init(run), *servers):
        message = method.message(server, at(run))
        problem = method.problem(message, states[0], data[0], at(run))
        weights.append(float(problem.given["told"]["weight"]))
    assert weights == pytest.approx([0.0, 0.3 * (run.clients - 1)])


@pytest.mark.slow
def test_predictions_leave_the_fixed_point_at_the_pooled_mode():
    """And they change the way there."""
    data = regressions(orthogonal=False)
    method = LINEAR.model_copy(update={"strength": 1.0}).variant()
    found, _ = posteriors(method, linear_run(lr=0.1), data, 40)
    mean, _ = pooled(data, 20.0)
    torch.testing.assert_close(found[-1].mean["0.weight"][0], mean, rtol=1e-3, atol=1e-3)
    plain, _ = posteriors(LINEAR.model_copy(update={"inputs": None}), linear_run(), data, 2)
    assert not torch.allclose(found[1].mean["0.weight"], plain[1].mean["0.weight"], rtol=1e-2)


def logistic(seed=3):
    """Rows of three clients, each mostly of one class."""
    rng = torch.Generator().manual_seed(seed)
    found = []
    for client in range(3):
        y = torch.where(torch.rand(30, generator=rng) < 0.7, client, torch.arange(30) % 3)
        x = torch.randn(30, 4, generator=rng, dtype=torch.float64)
        x[torch.arange(30), y] += 1.0
        found.append(Samples(x, y))
    return found


@pytest.mark.slow
def test_in_function_space_logistic_regression_ends_at_the_pooled_mode():
    """That by Newton's method on all rows."""
    data, delta = logistic(), 8.0
    net = network(dtype=torch.float64)
    run = run_of(net, clients=3, rounds=40, lr=0.5, epochs=60, batch_size=30)
    method = FedLap(covariance="none", prior_std=delta**-0.5, damping=0.8, inputs="gaussian")
    found, _ = posteriors(method.variant(), run, data, 40)
    x, y = torch.cat([d.x for d in data]), torch.cat([d.y for d in data])
    x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)

    def energy(w):
        return cross_entropy(x @ w.T, y, reduction="sum") + delta / 2 * w.square().sum()

    w = torch.zeros(3, 5, dtype=torch.float64)
    for _ in range(20):
        slope = torch.func.grad(energy)(w).flatten()
        curvature = torch.func.hessian(energy)(w).reshape(15, 15)
        w = w - torch.linalg.solve(curvature, slope).reshape(3, 5)
    (weight, bias) = found[-1].mean.values()
    torch.testing.assert_close(torch.cat([weight, bias[:, None]], 1), w, rtol=1e-3, atol=1e-3)


def test_a_client_that_is_removed_leaves_the_others_factors():
    """Labels of its rounds hold nothing back: the sum of the others' factors and the prior."""
    data, run = regressions(), linear_run()
    method = LINEAR.variant()
    servers, states = rounds(method, run, data, 2)
    after = method.forget(servers[-1], states[0], run)
    left = {n: t + after.slack[n] for n, t in after.posterior.shift.items()}
    wanted = states[1].factor.shift["0.weight"] + states[2].factor.shift["0.weight"]
    torch.testing.assert_close(left["0.weight"], wanted, rtol=1e-6, atol=1e-7)


def test_predictions_need_inputs_and_no_kronecker_products():
    config = {"name": "fedlap", "inputs": "auto", "covariance": "kronecker"}
    with pytest.raises(ConfigError, match="tell no predictions"):
        Simulation(Config.create(method=config))


def test_a_tempered_likelihood_counts_more_often():
    """T = ½ is the posterior of every row taken twice."""
    data = regressions()
    twice = [Samples(torch.cat([d.x, d.x]), torch.cat([d.y, d.y])) for d in data]
    mean, precision = pooled(twice)
    for method in (FedLap(damping=1.0, kl_weight=0.5), FedEP(damping=1.0, kl_weight=0.5)):
        (found,), _ = posteriors(method, linear_run(), data, 1)
        torch.testing.assert_close(found.mean["0.weight"][0], mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            found.precision["0.weight"][0], precision.diagonal(), rtol=1e-6, atol=0
        )


@pytest.mark.slow
def test_langevin_moments_come_near_the_pooled_posterior():
    """One round of several thousand steps: within Monte-Carlo error and that of finite steps."""
    data = regressions(apart=0.0)
    mean, precision = pooled(data)
    run = linear_run(steps=2000, epochs=1, lr=0.2)
    method = FedEP(inference="sgld", burn_in=0.05, thinning=3, damping=1.0)
    (found,), _ = posteriors(method, run, data, 1)
    std = precision.diagonal().rsqrt()
    assert ((found.mean["0.weight"][0] - mean).abs() < 0.5 * std).all()
    ratio = found.precision["0.weight"][0] / precision.diagonal()
    assert ((ratio - 1).abs() < 0.25).all()
    run = linear_run(steps=600, epochs=1, lr=0.2)
    cold, _ = posteriors(method.model_copy(update={"kl_weight": 0.25}), run, data, 1)
    assert (cold[0].precision["0.weight"][0] > 3 * precision.diagonal()).all()


def test_laplace_moments_and_diagonal_covariances_are_one_method():
    """Bit for bit, on a network."""
    posteriors = []
    for method in ({"name": "fedlap"}, {"name": "fedep"}):
        config = Config.create(
            data={"name": "digits", "clients": 3, "limit": 200, "partition": "iid"},
            model={"hidden": [6]},
            rounds=2,
            cohort=2,
            method=method,
        )
        with Simulation(config) as simulation:
            for _ in simulation:
                pass
            posteriors.append(simulation.server.posterior)
    one, two = posteriors
    for name, precision in one.precision.items():
        assert torch.equal(precision, two.precision[name])
        assert torch.equal(one.shift[name], two.shift[name])


def test_a_point_is_saved_as_a_network():
    """Without covariances messages and models hold weights alone."""
    method, net = FedLap(covariance="none"), network((5,))
    run = run_of(net)
    server = method.init(run)
    message = method.message(server, at(run))
    assert {n.partition("/")[0] for n in message} == {"mean"}
    assert {n.partition("/")[0] for n in method.expected(message, run)} == {"shift"}
    model = method.model(server, run)
    assert model.keys() == net.initial.keys()
    assert method.draws(model, run)(torch.zeros(2, 4)).shape == (1, 2, 3)
    drawn = FedLap(predictions=3)
    several = drawn.draws(drawn.model(drawn.init(run), run), run)
    assert several(torch.zeros(2, 4)).shape == (3, 2, 3)


@pytest.mark.parametrize(
    "method",
    [
        {"name": "fedlap"},
        {"name": "fedlap", "covariance": "kronecker"},
        {"name": "fedep"},
        {"name": "fedep", "inference": "sgld"},
    ],
)
@pytest.mark.parametrize("clients", [1, 2])
def test_the_only_client_of_a_round_may_say_as_much_as_its_rows_do(method, clients, tmp_path):
    """Its first report is beside nothing that was learnt, and no other's."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 3)).astype(np.float32)
    y = (x @ [1.0, -1.0, 0.5] + 0.05 * rng.normal(size=2000)).astype(np.float32)
    np.savez(tmp_path / "rows.npz", x=x, y=y)
    config = Config.create(
        method=method,
        data={"path": str(tmp_path / "rows.npz"), "clients": clients, "partition": "iid"},
        model={"hidden": [4]},
        training={"lr": 0.05, "steps": 30},
        cohort=1,
        rounds=2,
    )
    with Simulation(config) as simulation:
        lines = [step.metrics for step in simulation]
    assert not any(line["skipped"] or line.get("refused") for line in lines)


def test_samples_wider_than_the_cavity_leave_the_share_of_the_prior():
    """Data that say nothing of a weight: its tilted variance is the cavity's, estimated."""
    run = run_of(network((), inputs=3), epochs=1, lr=0.1, clients=2, cohort=2)
    run = run_of(run.network, steps=400, lr=0.1, clients=2, cohort=2)
    method = FedEP(inference="sgld", damping=1.0, prior_std=0.02)
    x = torch.randn(10, 3) * torch.tensor([1.0, 1.0, 0.0])
    data = Samples(x, torch.zeros(10, dtype=torch.int64))
    message = method.message(method.init(run), at(run))
    report, client, info = method.local(message, method.join(at(run)), data, at(run))
    share = method.prior_std**-2 / run.clients
    for precision in client.factor.precision.values():
        assert (precision >= share * (1 - 1e-6)).all()
    assert 0 < info["wider_than_cavity"] < 1
    assert all(torch.isfinite(t).all() for t in part(report.tensors, "shift").values())


def test_refusals():
    stack = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    survival = build_likelihood("cox", Target("survival", ("time", "event")))
    for method in (FedLap(), FedEP()):
        with pytest.raises(ModelError, match="running"):
            method.check(run_of(Network(stack, shape=(4,))))
        with pytest.raises(ConfigError, match="weight_decay"):
            method.check(run_of(network(), weight_decay=0.1))
        with pytest.raises(ConfigError, match="cox has no distribution"):
            method.check(run_of(network(), likelihood=survival))
    FedLap(covariance="none").check(run_of(network(), likelihood=survival))
    with pytest.raises(ConfigError, match="sgd"):
        FedEP(inference="sgld").check(run_of(network(), optimizer="adam"))
    run = run_of(network(), steps=4)
    method = FedEP(inference="sgld")
    message = method.message(method.init(run), at(run))
    data = Samples(torch.randn(6, 4), torch.zeros(6, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"training\.steps"):
        method.local(message, method.join(at(run)), data, at(run))


def test_linearized_draws_have_the_covariance_of_the_derivatives():
    """J Σ Jᵀ around f(m), with J by central differences; a linear network is linear already."""
    net = network((5,), dtype=torch.float64)
    run, rng = run_of(net), torch.Generator().manual_seed(0)
    std = {n: 0.1 + torch.rand(t.shape, generator=rng).double() for n, t in net.initial.items()}
    model = named("mean", net.initial) | named("std", std)
    x = torch.randn(3, 4, generator=rng).double()
    drawn = FedLap(predictions=4000).draws(model, run)(x).flatten(1)
    columns = []
    for name, m in net.initial.items():
        for index in range(m.numel()):
            step = torch.zeros_like(m)
            step.view(-1)[index] = 1e-5
            ends = [net({**net.initial, name: m + sign * step}, x) for sign in (1, -1)]
            slope = (ends[0] - ends[1]).flatten() / 2e-5
            columns.append(slope * std[name].view(-1)[index])
    jacobian = torch.stack(columns, 1)
    wanted = jacobian @ jacobian.T
    error = (torch.cov(drawn.T) - wanted).abs().max() / wanted.diagonal().max()
    assert error < 0.1
    torch.testing.assert_close(drawn.mean(0), net(net.initial, x).flatten(), atol=0.2, rtol=0)
    flat = network(())
    model = named("mean", flat.initial) | named("std", flat.initial)
    x = torch.randn(3, 4)
    one, two = (
        FedLap(predictions=3, predictive=kind).draws(model, run_of(flat))(x)
        for kind in ("linearized", "sampled")
    )
    torch.testing.assert_close(one, two)


def test_linearized_draws_of_a_network_with_group_normalization():
    """Against central differences: GroupNorm's derivative wants images with channels first."""
    torch.manual_seed(0)
    stack = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3),
        torch.nn.GroupNorm(2, 4),
        torch.nn.Tanh(),
        torch.nn.Flatten(),
        torch.nn.Linear(36, 3),
    )
    net = Network(stack.double(), shape=(2, 5, 5))
    mean = net.prepare(net.initial)
    std = {n: torch.full_like(t, 0.3) for n, t in mean.items()}
    x = torch.randn(6, 2, 5, 5).double()
    found = sampler_of(mean, std, net, 4, linearized=True)(x)
    for drawn, weights in zip(found, draws_of(mean, std, 4), strict=True):
        step = {n: 1e-5 * (w - mean[n]) for n, w in weights.items()}
        ends = [net({n: m + sign * step[n] for n, m in mean.items()}, x) for sign in (1, -1)]
        wanted = net(mean, x) + (ends[0] - ends[1]) / 2e-5
        torch.testing.assert_close(drawn, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("thinning", [1, 2])
def test_clients_that_cannot_answer_are_counted_before_the_first_round(thinning):
    """Of 5 steps 3 are left after burn-in, of 8 there are 4, which are samples if none is left
    out; the others end the run.
    """
    config = Config.create(
        rounds=1,
        data={
            **{"name": "digits", "clients": 2, "partition": "counts", "test_counts": [1] * 10},
            "class_counts": [[4] * 10, [6] * 10],
        },
        model={"hidden": 4},
        training={"batch_size": 8, "epochs": 1},
        calibration="none",
        method={"name": "fedep", "inference": "sgld", "thinning": thinning},
    )
    with pytest.warns(FedbayesWarning, match=f"{thinning} of 2 clients take too few steps"):
        simulation = Simulation(config)
    with simulation, pytest.raises(ConfigError, match="client 0 takes 5 steps in a round"):
        list(simulation)
