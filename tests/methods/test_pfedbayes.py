"""pFedBayes: the free energy and the copy's steps in closed form, and a conjugate fixed point."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

from fedbayes import Config, Simulation
from fedbayes.contracts import Report, Sum
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples
from fedbayes.errors import ConfigError, MessageError, ModelError
from fedbayes.likelihoods import build_likelihood
from fedbayes.methods.pfedbayes import PFedBayes, PFedBayesClient, PFedBayesServer
from fedbayes.models import Network
from fedbayes.models.networks import MLP
from tests.helpers.places import at, network, run_of

NAME = "0.weight"


def mean_estimation(**training):
    """Samples y ~ N(θ, 1) of one unknown θ: a linear layer of one weight at inputs of 1."""
    net = Network(nn.Sequential(nn.Linear(1, 1, bias=False)), shape=(1,))
    target = Target("real", ("y",), center=(0.0,), scale=(1.0,))
    likelihood = build_likelihood("gaussian", target, noise=1.0)
    return run_of(net, likelihood=likelihood, clients=3, cohort=3, **training)


def data_around(mean, n):
    """Samples with this very mean and variance 1."""
    y = torch.randn(n, 1, generator=torch.Generator().manual_seed(n))
    y = (y - y.mean()) / y.std(correction=0) + mean
    return Samples(torch.ones(n, 1), y)


def one(value):
    return {NAME: torch.full((1, 1), float(value))}


def test_the_loss_is_the_free_energy_of_a_conjugate_model():
    """−E log p = ½ log 2π + ½ ((ȳ − m)² + 1 + s²), and ζ KL in closed form, by sample."""
    run, data = mean_estimation(), data_around(0.7, 25)
    method = PFedBayes(zeta=3.0, samples=2000)
    server, own = (
        PFedBayesServer(one(0.4), one(0.5)),
        PFedBayesClient(one(-0.2), one(math.log(0.3))),
    )
    problem = method.problem(method.message(server, at(run)), own, data, at(run))
    noise = problem.noise.draw(torch.Generator().manual_seed(0), data)
    found = method.loss(run)(problem.start, data, problem.given, noise)
    fit = 0.5 * math.log(2 * math.pi) + 0.5 * (0.9**2 + 1 + 0.3**2)
    divergence = float(kl_divergence(Normal(-0.2, 0.3), Normal(0.4, 0.5)))
    assert float(found) == pytest.approx(fit + 3.0 * divergence / 25, abs=0.03)


def moved_copy(rate, own, copy):
    """Mean and standard deviation of a copy after a step to (mean, standard deviation)."""
    values = {"mean": own[0], "log_std": math.log(own[1])}
    values |= {"global_mean": copy[0], "global_std": copy[1]}
    current = {kind: torch.tensor([value], dtype=torch.float64) for kind, value in values.items()}
    PFedBayes(global_lr=rate)._follow(current, {}, 0.1)
    return float(current["global_mean"]), float(current["global_std"])


def natural(mean, std):
    """(h, Λ)."""
    return torch.tensor([mean / std**2, std**-2], dtype=torch.float64)


def test_the_copys_step_is_of_the_natural_gradient():
    """In natural parameters, F⁻¹ ∇ KL(q ‖ w), with the Fisher matrix as the Hessian of the log
    normalizer, by automatic differentiation; and at rate 1 the copy is q.
    """
    own, copy, rate = (0.8, 0.2), (-0.1, 0.5), 1e-5

    def normalizer(parameters):
        shift, precision = parameters
        return 0.5 * shift**2 / precision - 0.5 * precision.log()

    def divergence(parameters):
        shift, precision = parameters
        other = Normal(shift / precision, precision.rsqrt())
        mine = Normal(*(torch.tensor(v, dtype=torch.float64) for v in own))
        return kl_divergence(mine, other)

    start = natural(*copy)
    gradient = torch.func.grad(divergence)(start)
    fisher = torch.func.hessian(normalizer)(start)
    expected = -torch.linalg.solve(fisher, gradient)
    found = (natural(*moved_copy(rate, own, copy)) - start) / rate
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)
    assert moved_copy(1.0, own, copy) == pytest.approx(own)


def fixed_point(means, n, zeta):
    """The stationary point of Σ F_i in w and all q_i, by iterating its equations to the end:
    q_i from its prior, and w from the first two moments of all q_i.
    """
    centre, variance = 0.0, 1.0
    for _ in range(20_000):
        precision = 1 / variance + n / zeta
        own = [(centre / variance + n * m / zeta) / precision for m in means]
        centre = sum(own) / len(own)
        variance = 1 / precision + sum((m - centre) ** 2 for m in own) / len(own)
    return centre, variance**0.5, own, precision**-0.5


@pytest.mark.slow
@pytest.mark.parametrize("zeta", [1.0, 4.0])
def test_the_conjugate_fixed_point_stays_and_another_point_does_not(zeta):
    """Clients' copies leave w, each towards its own data; their mean stays where theory says."""
    means, n = [-0.9, 0.3, 1.2], 20
    centre, spread, own, own_spread = fixed_point(means, n, zeta)
    run = mean_estimation(lr=0.002, steps=40, batch_size=n)
    method = PFedBayes(zeta=zeta, samples=20, global_lr=5e-4)

    def round_from(mean, std):
        reports, copies, states = Sum(), [], []
        server = PFedBayesServer(one(mean), one(std))
        for client in range(3):
            here = at(run, client=client)
            state = PFedBayesClient(one(own[client]), one(math.log(own_spread)))
            message = method.message(server, here)
            report, state, _ = method.local(message, state, data_around(means[client], n), here)
            reports.add(client, report)
            copies.append(float(report.tensors[f"mean/{NAME}"]) - mean)
            states.append(state)
        after, _ = method.update(server, reports, at(run))
        return float(after.mean[NAME]) - mean, float(after.std[NAME]) - std, copies, states

    shift, change, copies, states = round_from(centre, spread)
    assert max(map(abs, copies)) > 0.01
    assert abs(shift) < 0.05 * max(map(abs, copies))
    assert abs(change) < 3e-4
    for client, state in enumerate(states):
        assert float(state.mean[NAME]) == pytest.approx(own[client], abs=0.02)
        assert float(state.log_std[NAME].exp()) == pytest.approx(own_spread, rel=0.05)
    assert round_from(centre + 0.5, spread)[0] < -0.006
    assert round_from(centre, 2 * spread)[1] < -0.005
    assert round_from(centre, spread / 2)[1] > 0.005


@pytest.mark.parametrize("start", ["own", "global"])
def test_a_round_starts_where_it_is_to(start):
    run, data = mean_estimation(), data_around(0.0, 5)
    method, server = PFedBayes(start=start), PFedBayesServer(one(0.4), one(0.5))
    message, own = method.message(server, at(run)), PFedBayesClient(one(-1.0), one(-2.0))
    problem = method.problem(message, own, data, at(run)).start
    expected = (-1.0, -2.0) if start == "own" else (0.4, math.log(0.5))
    assert float(problem["mean"]) == pytest.approx(expected[0])
    assert float(problem["log_std"]) == pytest.approx(expected[1])
    newcomer = method.problem(message, method.join(at(run)), data, at(run)).start
    assert float(newcomer["mean"]) == pytest.approx(0.4)


def test_the_server_goes_part_of_the_way():
    net = network((5,))
    run, method = run_of(net), PFedBayes(beta=0.25)
    server, reports = method.init(run), Sum()
    for client in range(2):
        reports.add(
            client,
            Report(
                {f"mean/{n}": t + 1 + client for n, t in net.initial.items()}
                | {f"std/{n}": torch.full_like(t, 0.1) for n, t in net.initial.items()}
            ),
        )
    after, info = method.update(server, reports, at(run))
    for name, tensor in net.initial.items():
        torch.testing.assert_close(after.mean[name], tensor + 0.25 * 1.5)
        torch.testing.assert_close(after.std[name], torch.full_like(tensor, 0.0475))
    assert info["mean_std"] == pytest.approx(0.0475)


def test_a_client_keeps_its_posterior_and_a_newcomer_has_the_global_one():
    data = {"name": "digits", "clients": 4, "limit": 200}
    config = Config.create(
        data=data,
        model={"hidden": [6]},
        rounds=2,
        cohort=2,
        training={"optimizer": "adam", "lr": 0.01},
        method={"name": "pfedbayes"},
    )
    with Simulation(config) as simulation:
        for _ in simulation:
            pass
        method, run = simulation.method, simulation.run
        message = method.message(simulation.server, at(run))
        newcomer = method.personal_model(message, None, method.join(at(run)), run)
        assert newcomer == dict(message)
        found = method.draws(newcomer, run)(simulation.data.train(0).x)
        assert found.shape[0] == 20
        assert found.std(0).min() > 0
        assert {"local"} <= simulation.summary()["metrics"].keys()


def test_refusals():
    stack = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(
        ModelError,
        match=r"pfedbayes needs a network that gradients train completely, but not .*running",
    ):
        PFedBayes().check(run_of(Network(stack, shape=(4,))))
    half = network((5,))
    half.precision = "bf16"
    with pytest.raises(ConfigError, match="float32"):
        PFedBayes().check(run_of(half))
    net = network((5,))
    method, run = PFedBayes(), run_of(net)
    server = method.init(run)
    method.accept(server, Report(method.message(server, at(run))), run)
    bad = {**method.message(server, at(run)), "std/first": torch.zeros(2)}
    with pytest.raises(MessageError, match="'first' is not positive"):
        method.accept(server, Report(bad), run)


def test_frozen_weights_are_no_random_variables():
    module = MLP(4, (5,), 3)
    first, *rest = [name for name, _ in module.named_parameters()]
    module.get_parameter(first).requires_grad_(False)
    net = Network(module, shape=(4,))
    method, run = PFedBayes(predictions=3), run_of(net)
    message = method.message(method.init(run), at(run))
    assert {name.partition("/")[2] for name in message} == set(rest)
    outputs = method.draws(method.model(method.init(run), run), run)(torch.zeros(2, 4))
    assert outputs.shape == (3, 2, 3)
