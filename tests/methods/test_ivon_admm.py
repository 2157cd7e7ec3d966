"""Bayesian ADMM: exact posteriors of quadratic losses, its rate, federated ADMM as its limit."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

from fedbayes.contracts import Solved, Sum
from fedbayes.errors import ModelError
from fedbayes.inference.gaussian import Gaussian, standard
from fedbayes.likelihoods import build_likelihood
from fedbayes.methods.ivon_admm import IvonAdmm, away, constant
from fedbayes.models import Network
from fedbayes.targets import Target
from fedbayes.tensors import Samples, named
from tests.methods.places import at, network, run_of

NAME = "0.weight"


def regression(clients, **training):
    """A linear network of two inputs, known noise of deviation 1, and a run of clients."""
    net = Network(nn.Sequential(nn.Linear(2, 1, bias=False)), shape=(2,))
    target = Target("real", ("y",), center=(0.0,), scale=(1.0,))
    likelihood = build_likelihood("gaussian", target, noise=1.0)
    return run_of(net, clients=clients, cohort=clients, likelihood=likelihood, **training)


def rows(clients, count=30):
    """Orthogonal columns, where a mean-field posterior is exact; other rows at every client."""
    rng = torch.Generator().manual_seed(1)
    parts = []
    for number in range(clients):
        x = torch.linalg.qr(torch.randn(count, 2, generator=rng))[0] * (5.0 + 3 * number)
        y = x @ torch.tensor([[1.5], [-0.5]]) + torch.randn(count, 1, generator=rng)
        parts.append(Samples(x, y))
    return parts


def sites(parts):
    """What clients' data add to natural parameters: Σ x², Σ x y."""
    return [
        Gaussian(
            {NAME: one.x.double().square().sum(0)[None]},
            {NAME: (one.x * one.y).double().sum(0)[None]},
        )
        for one in parts
    ]


def exactly(site, dual, posterior, rho):
    """Where a client's E-step ends: λ_k = λ + (t_k − η_k)/ρ."""
    return posterior * ((site / dual) if dual.precision else site) ** (1 / rho)


def rounds(method, run, parts, count, cohort=None):
    """Posteriors of the server, and its and the clients' duals, with E-steps in closed form."""
    server, states = method.init(run), [method.join(at(run)) for _ in parts]
    found, rho = [], method.penalty(run)
    for number in range(1, count + 1):
        reports = Sum()
        for client in cohort(number) if cohort else range(len(parts)):
            here = at(run, client=client, round=number)
            message = method.message(server, here)
            problem = method.problem(message, states[client], parts[client], here)
            own = exactly(
                sites(parts)[client],
                states[client].reported ** rho,
                Gaussian(**problem.given["posterior"]),
                rho,
            )
            ended = named("posterior/mean", own.mean) | named(
                "posterior/log_precision", {n: p.log() for n, p in own.precision.items()}
            )
            solved = Solved(ended, 1, 0.0, 30)
            report, states[client], _ = method.report(solved, problem, states[client], here)
            method.accept(server, report, run)
            reports.add(client, report)
        server, _ = method.update(server, reports, at(run, round=number))
        found.append(server.posterior)
    return found, server.dual, [state.reported**rho for state in states]


def pooled(parts):
    total = standard({NAME: torch.zeros(1, 2)})
    for site in sites(parts):
        total = total * site
    return total


def apart(one, other):
    """Largest relative distance of natural parameters."""
    return max(
        float(((a[NAME] - b[NAME]) / b[NAME]).abs().max())
        for a, b in ((one.precision, other.precision), (one.shift, other.shift))
    )


@pytest.mark.parametrize("clients", [1, 2, 5])
def test_one_round_is_enough_on_quadratic_losses(clients):
    parts, method = rows(clients), IvonAdmm()
    found, total, duals = rounds(method, regression(clients), parts, 3)
    assert all(apart(one, pooled(parts)) < 1e-5 for one in found)
    # Dual variables are what each client's data say, and the server knows their sum.
    for dual, site in zip(duals, sites(parts), strict=True):
        assert apart(dual, site) < 1e-4
    assert apart(total, pooled(parts) / standard({NAME: torch.zeros(1, 2)})) < 1e-4


@pytest.mark.parametrize("rho", [0.2, 1.0])
def test_with_other_penalties_the_distance_shrinks_as_theory_says(rho):
    parts, method = rows(3), IvonAdmm(rho=rho)
    found, _, _ = rounds(method, regression(3), parts, 12)
    distances = [apart(one, pooled(parts)) for one in found]
    for before, after in pairwise(distances[1:6]):
        assert after / before == pytest.approx(3 * rho / (1 + 3 * rho), rel=0.02)
    assert distances[-1] < distances[0]


def test_one_client_after_another_gets_there_too():
    parts = rows(3)
    found, _, _ = rounds(
        IvonAdmm(rho=1.0), regression(3), parts, 60, cohort=lambda number: [number % 3]
    )
    assert apart(found[-1], pooled(parts)) < 1e-3


def test_ivon_finds_the_posterior_of_the_pooled_rows():
    """E-steps by gradients of drawn weights, in place of closed forms."""
    parts = rows(2)
    method = IvonAdmm(rho=0.5, samples=4, rate=0.02, start_std=0.3)
    run = regression(2, lr=0.02, epochs=400, batch_size=30)
    server, states, tail = method.init(run), [method.join(at(run)) for _ in parts], []
    for number in range(1, 4):
        reports = Sum()
        for client, data in enumerate(parts):
            here = at(run, client=client, round=number)
            message = method.message(server, here)
            report, states[client], _ = method.local(message, states[client], data, here)
            reports.add(client, report)
        server, _ = method.update(server, reports, at(run, round=number))
        tail.append(server.posterior)
    wanted = pooled(parts)
    torch.testing.assert_close(tail[-1].mean[NAME], wanted.mean[NAME], atol=0.03, rtol=0)
    torch.testing.assert_close(tail[-1].precision[NAME], wanted.precision[NAME], rtol=0.15, atol=0)


def test_with_precisions_that_stay_it_is_federated_admm():
    """min Σ_k f_k(m_k) + |m|²/2s² with m_k = m and penalty ρ/s², against its own steps."""
    parts, std, rho = rows(2), 0.05, 0.4
    method = IvonAdmm(rate=0.0, prior_std=std, rho=rho, samples=4, momentum=0.0)
    run = regression(2, lr=0.05, epochs=300, batch_size=30)
    server, states = method.init(run), [method.join(at(run)) for _ in parts]
    hessians = [site.precision[NAME] for site in sites(parts)]
    slopes = [site.shift[NAME] for site in sites(parts)]
    penalty, centre = rho / std**2, torch.zeros(1, 2).double()
    multipliers = [torch.zeros(1, 2).double() for _ in parts]
    for number in range(1, 4):
        reports, points = Sum(), []
        for client, data in enumerate(parts):
            here = at(run, client=client, round=number)
            message = method.message(server, here)
            report, states[client], _ = method.local(message, states[client], data, here)
            reports.add(client, report)
            # ∇f_k + v_k + penalty (m_k − m) = 0, then v_k ← v_k + penalty (m_k − m).
            pull = slopes[client] - multipliers[client] + penalty * centre
            points.append(pull / (hessians[client] + penalty))
            multipliers[client] = multipliers[client] + penalty * (points[-1] - centre)
        server, _ = method.update(server, reports, at(run, round=number))
        # argmin_m |m|²/2s² − Σ v_k m + penalty/2 Σ (m_k − m)²
        centre = (sum(multipliers) + penalty * sum(points)) / (std**-2 + 2 * penalty)
        precision = server.posterior.precision[NAME]
        torch.testing.assert_close(precision, torch.full_like(precision, std**-2))
        torch.testing.assert_close(server.posterior.mean[NAME], centre, atol=0.02, rtol=0.05)


def test_what_is_minimized_is_kl_and_the_dual_term():
    """ρ KL(q ‖ p) + ⟨η, μ⟩ with torch's KL and E[θ], E[θ²]."""
    rng = torch.Generator().manual_seed(3)
    h, p, mean, log, dual_h, dual_p = torch.randn(6, 1, 2, generator=rng, dtype=torch.float64)
    p, rho = p.exp(), 0.7
    posterior, dual = Gaussian({NAME: p}, {NAME: h}), Gaussian({NAME: dual_p}, {NAME: dual_h})
    found = away({NAME: mean}, {NAME: log}, posterior / dual ** (1 / rho)) + constant(posterior)
    q = Normal(mean, (-log / 2).exp())
    wanted = rho * kl_divergence(q, Normal(h / p, p.rsqrt())).sum()
    wanted = wanted + (dual_h * mean - dual_p * (q.variance + mean.square()) / 2).sum()
    torch.testing.assert_close(rho * found, wanted)


def test_its_gradients_are_those_of_automatic_differentiation():
    rng = torch.Generator().manual_seed(4)
    h, p, mean, log = torch.randn(4, 3, 2, generator=rng, dtype=torch.float64)
    leaves = mean.requires_grad_(), log.requires_grad_()
    other = Gaussian({NAME: p}, {NAME: h})  # which need not be normalizable
    assert torch.autograd.gradcheck(lambda m, ell: away({NAME: m}, {NAME: ell}, other), leaves)


def test_networks_and_settings_that_it_has_no_use_for():
    stack = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(ModelError, match="running"):
        IvonAdmm().check(run_of(Network(stack, shape=(4,))))
    (note,) = IvonAdmm().remarks(run_of(network(), optimizer="adam"))
    assert "training.optimizer = 'adam' has no effect" in note
    assert IvonAdmm().remarks(run_of(network())) == []
    (note,) = IvonAdmm(rho=0.05).remarks(run_of(network(), clients=10))
    assert "method.rho = 0.05 is less than 1/10" in note
