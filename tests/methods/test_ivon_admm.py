"""Bayesian ADMM: exact posteriors of quadratic losses, its rate, federated ADMM as its limit."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

from fedbayes.contracts import Report, Solved, Sum
from fedbayes.core.fields import idle
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples
from fedbayes.errors import MessageError, ModelError
from fedbayes.inference.gaussian import NaturalGaussian, divergence, standard
from fedbayes.likelihoods import build_likelihood
from fedbayes.methods.ivon_admm import IvonAdmm, away, constant
from fedbayes.models import Network
from tests.helpers.places import at, network, run_of

NAME = "0.weight"


def regression(clients, inputs=2, **training):
    """A linear network of some inputs, known noise of deviation 1, and a run of clients."""
    net = Network(nn.Sequential(nn.Linear(inputs, 1, bias=False)), shape=(inputs,))
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
        NaturalGaussian(
            {NAME: one.x.double().square().sum(0)[None]},
            {NAME: (one.x * one.y).double().sum(0)[None]},
        )
        for one in parts
    ]


def correlated(sizes, inputs, seed=0):
    """Rows of sites whose columns have correlations of .5."""
    rng = torch.Generator().manual_seed(seed)
    truth = torch.randn(inputs, 1, generator=rng)
    root = torch.linalg.cholesky(torch.full((inputs, inputs), 0.5) + 0.5 * torch.eye(inputs))
    parts = []
    for size in sizes:
        x = torch.randn(size, inputs, generator=rng) @ root.T
        parts.append(Samples(x, x @ truth + torch.randn(size, 1, generator=rng)))
    return parts


def exactly(rows, dual, posterior, rho, damping):
    """Where a client's E-step ends: at the least of a quadratic in the means,

        ½ mᵀ H m − bᵀ m − (½ η^Λ m² − η^h m) + ρ/2 Λ (m − m̄)² + ½ max(η^Λ, 0) (m − m̄)²,

    the last with damping, and at precisions Λ + (diag H − η^Λ)/ρ.

    Returns:
        The posterior, and the least curvature: not positive if there is no minimum.
    """
    x, y = rows.x.double(), rows.y.double()
    hessian, slope = x.T @ x, (x.T @ y)[:, 0]
    prior, centre = posterior.precision[NAME][0], posterior.mean[NAME][0]
    zero = torch.zeros_like(prior)
    own = (dual.precision[NAME][0], dual.shift[NAME][0]) if dual.precision else (zero, zero)
    held = own[0].clamp_min(0) if damping else zero
    whole = hessian + torch.diag(rho * prior + held - own[0])
    mean = torch.linalg.solve(whole, slope - own[1] + (rho * prior + held) * centre)
    precision = prior + (hessian.diagonal() - own[0]) / rho
    found = NaturalGaussian({NAME: precision[None]}, {NAME: (precision * mean)[None]})
    return found, float(torch.linalg.eigvalsh(whole).min())


def rounds(method, run, parts, count, cohort=None, curvatures=None):
    """Posteriors of the server, and its and the clients' duals, with E-steps in closed form."""
    server, states = method.init(run), [method.join(at(run)) for _ in parts]
    found, rho = [], method.penalty(run)
    share = method.step(run) * rho
    for number in range(1, count + 1):
        reports = Sum()
        for client in cohort(number) if cohort else range(len(parts)):
            here = at(run, client=client, round=number)
            message = method.message(server, here)
            problem = method.problem(message, states[client], parts[client], here)
            own, least = exactly(
                parts[client],
                states[client].reported ** share,
                NaturalGaussian(**problem.given["posterior"]),
                rho,
                method.damping,
            )
            if curvatures is not None:
                curvatures.append(least)
            precision = own.precision[NAME][0]
            ended = {"mean": own.mean[NAME][0], "log_precision": precision.log()}
            solved = Solved(ended, 1, 0.0, 30)
            report, states[client], _ = method.report(solved, problem, states[client], here)
            method.accept(server, report, run)
            reports.add(client, report)
        server, _ = method.update(server, reports, at(run, round=number))
        found.append(server.posterior)
    return found, server.dual, [state.reported**share for state in states]


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


@pytest.mark.parametrize("damping", [True, False])
@pytest.mark.parametrize("clients", [1, 2, 5])
def test_one_round_is_enough_on_quadratic_losses_with_diagonal_hessians(clients, damping):
    parts, method = rows(clients), IvonAdmm(damping=damping)
    found, total, duals = rounds(method, regression(clients), parts, 3)
    assert all(apart(one, pooled(parts)) < 1e-5 for one in found)
    # Dual variables are what each client's data say, and the server knows their sum.
    for dual, site in zip(duals, sites(parts), strict=True):
        assert apart(dual, site) < 1e-4
    assert apart(total, pooled(parts) / standard({NAME: torch.zeros(1, 2)})) < 1e-4


@pytest.mark.parametrize("damping", [True, False])
@pytest.mark.parametrize("rho", [0.2, 1.0])
def test_with_whole_steps_the_distance_shrinks_as_theory_says(rho, damping):
    """By ρK/(1 + ρK) a round, with damping too: duals are what data say from round 1 on."""
    parts, method = rows(3), IvonAdmm(rho=rho, dual_step=1.0, damping=damping)
    found, _, _ = rounds(method, regression(3), parts, 12)
    distances = [apart(one, pooled(parts)) for one in found]
    for before, after in pairwise(distances[1:6]):
        assert after / before == pytest.approx(3 * rho / (1 + 3 * rho), rel=0.02)
    assert distances[-1] < distances[0]


@pytest.mark.parametrize(("rho", "clients"), [(1.0, 3), (0.5, 3), (2.0, 4)])
def test_with_the_step_of_its_own_choice_the_server_has_the_mean_of_the_clients(rho, clients):
    """Which is the prior times the dual variables; and the distance shrinks by 1 − 1/(ρK)."""
    parts, run = rows(clients), regression(clients)
    method = IvonAdmm(rho=rho, damping=False)
    found, _, _ = rounds(method, run, parts, 8)
    for before, after in pairwise(apart(one, pooled(parts)) for one in found):
        assert after / before == pytest.approx(1 - 1 / (rho * clients), rel=0.02)
    server = method.init(run)
    rng = torch.Generator().manual_seed(2)
    for number in range(1, 4):  # of clients that were trained in any other way too
        total, mean = Sum(), server.posterior**0.0
        for client in range(clients):
            more = torch.rand(1, 2, generator=rng).double(), torch.randn(1, 2, generator=rng)
            change = {f"precision/{NAME}": more[0], f"shift/{NAME}": more[1].double()}
            total.add(client, Report(change))
            own = server.posterior * method.changed_by(change)
            mean = mean * own ** (1 / clients)
        server, _ = method.update(server, total, at(run, round=number))
        assert apart(server.posterior, mean) < 1e-9
        assert apart(server.posterior, standard({NAME: torch.zeros(1, 2)}) * server.dual) < 1e-9


def test_with_a_step_of_its_own_a_dual_variable_comes_to_the_same_factor():
    """The error of each shrinks by 1 − γ a round, and the posterior is that of all rows."""
    parts, method = rows(3), IvonAdmm(rho=0.5, dual_step=0.4, damping=False)
    for count in (2, 3, 30):
        found, total, duals = rounds(method, regression(3), parts, count)
        share = 1 - 0.6**count
        for dual, site in zip(duals, sites(parts), strict=True):
            assert apart(dual, site**share) < 1e-4
    damped, *_ = rounds(IvonAdmm(rho=0.5, dual_step=0.4), regression(3), parts, 60)
    for one in (found[-1], damped[-1]):
        assert apart(one, pooled(parts)) < 1e-3
    assert apart(total, pooled(parts) / standard({NAME: torch.zeros(1, 2)})) < 1e-3


UNSAFE = [([50] * 4, 5), ([300, 30, 30, 30], 5), ([300, 30, 30, 30], 20), ([8] * 10, 10)]


@pytest.mark.parametrize(("sizes", "inputs"), UNSAFE)
@pytest.mark.parametrize("cohort", [None, 2])
def test_unequal_sites_with_correlated_columns_come_to_the_pooled_optimum(sizes, inputs, cohort):
    """Every E-step has a minimum, no report is rejected, and means are those of all rows."""
    parts, curvatures = correlated(sizes, inputs), []
    turns = None if cohort is None else lambda t: [(t + k) % len(sizes) for k in range(cohort)]
    found, _, _ = rounds(IvonAdmm(), regression(len(sizes), inputs), parts, 60, turns, curvatures)
    assert min(curvatures) > 0
    x = torch.cat([one.x for one in parts]).double()
    y = torch.cat([one.y for one in parts]).double()
    wanted = torch.linalg.solve(x.T @ x + torch.eye(inputs).double(), x.T @ y).T
    errors = [float((one.mean[NAME] - wanted).norm() / wanted.norm()) for one in found]
    assert errors[-1] < 0.02
    assert errors[-1] < 0.5 * errors[2]
    precision = 1 + x.square().sum(0)
    torch.testing.assert_close(found[-1].precision[NAME][0], precision, rtol=1e-2, atol=0)


@pytest.mark.parametrize(("sizes", "inputs"), UNSAFE)
def test_as_published_it_falls_apart_there(sizes, inputs):
    """Which is why damping is the default, and what its page says of 1/K."""
    parts, curvatures = correlated(sizes, inputs), []
    method = IvonAdmm(damping=False)
    try:
        found, _, _ = rounds(
            method, regression(len(sizes), inputs), parts, 20, curvatures=curvatures
        )
        fell = apart(found[-1], found[0]) > 1e3
    except MessageError as error:
        fell = "method.rho is" in str(error) and "method.damping = true" in str(error)
    assert min(curvatures) <= 0 or fell


def test_a_rejection_names_the_penalty():
    run, method = regression(2), IvonAdmm(rho=0.5)
    gone = {f"precision/{NAME}": torch.full((1, 2), -2.0), f"shift/{NAME}": torch.zeros(1, 2)}
    with pytest.raises(MessageError, match=r"posterior has; method.rho is 0.5; a larger"):
        method.accept(method.init(run), Report(gone), run)


def test_one_client_after_another_gets_there_too():
    parts = rows(3)
    found, _, _ = rounds(
        IvonAdmm(rho=1.0), regression(3), parts, 60, cohort=lambda number: [number % 3]
    )
    assert apart(found[-1], pooled(parts)) < 1e-3


@pytest.mark.slow
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


@pytest.mark.slow
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
    posterior, dual = (
        NaturalGaussian({NAME: p}, {NAME: h}),
        NaturalGaussian({NAME: dual_p}, {NAME: dual_h}),
    )
    ends = {NAME: mean}, {NAME: log.exp()}
    other = posterior / dual ** (1 / rho)
    wide = other.precision
    found = divergence(away, *ends, wide, other.precision, other.shift) + constant(posterior)
    q = Normal(mean, (-log / 2).exp())
    wanted = rho * kl_divergence(q, Normal(h / p, p.rsqrt())).sum()
    wanted = wanted + (dual_h * mean - dual_p * (q.variance + mean.square()) / 2).sum()
    torch.testing.assert_close(rho * found, wanted)
    # Means are drawn to a centre by precisions of their own, up to a constant of these.
    held, centre = dual_p.abs(), h / p
    drawn = other * NaturalGaussian({NAME: held}, {NAME: held * centre})
    more = divergence(away, *ends, wide, drawn.precision, drawn.shift) + constant(posterior) - found
    pull = 0.5 * (held * (mean - centre).square()).sum() - 0.5 * (held * centre.square()).sum()
    torch.testing.assert_close(more, pull)


def test_its_gradients_are_those_of_automatic_differentiation():
    rng = torch.Generator().manual_seed(4)
    h, p, mean, log, w = torch.randn(5, 3, 2, generator=rng, dtype=torch.float64)
    leaves = mean.requires_grad_(), log.requires_grad_()
    fixed = {NAME: p}, {NAME: w}, {NAME: h}  # which need not be normalizable

    def found(m, log):
        return divergence(away, {NAME: m}, {NAME: log.exp()}, *fixed)

    assert torch.autograd.gradcheck(found, leaves)


@pytest.mark.parametrize("step", [0.1, 1.0])
def test_rounds_are_those_of_its_authors_program(step):
    """In its terms: Hessians h of mean losses, n/(τρ) samples, dual variables of other sign."""
    parts, rho, tau, rate, lr, prior, first = rows(2), 0.5, 0.3, 0.02, 0.05, 0.04, 20.0
    given = {"dual_step": step, "kl_weight": tau, "damping": False, "rate": rate, "rho": rho}
    given |= {"prior_std": prior**-0.5, "start_std": first**-0.5, "momentum": 0.0}
    method, run = IvonAdmm(**given), regression(2, lr=lr, epochs=5, batch_size=30)
    server, states = method.init(run), [method.join(at(run)) for _ in parts]
    begin = run.network.initial[NAME][0].double()
    centre, whole = torch.zeros(2).double(), torch.full((2,), prior).double()
    v, u = torch.zeros(2, 2, 2).double()
    for number in range(1, 4):
        reports, precisions, products = Sum(), [], []
        for client, data in enumerate(parts):
            here = at(run, client=client, round=number)
            message = method.message(server, here)
            noise = method.problem(message, states[client], data, here).noise
            rng = here.rng(noise.purpose)
            count, x, y = len(data.y), data.x.double(), data.y.double()[:, 0]
            ess, scale = count / (tau * rho), count / tau
            decay = whole / ess
            mean, h = (begin, first / ess - decay) if number == 1 else (centre, 0 * decay)
            for _ in range(5):
                epsilon = noise.draw(rng, data)["weights"][0].double()
                theta = mean + epsilon / (ess * (h + decay)).sqrt()
                gradient = x.T @ (x @ theta - y) / count
                f = gradient * epsilon * (ess * (h + decay)).sqrt() + u[client] / scale
                part = 0.5 * rate**2 * (h - f) ** 2 / (h + decay)
                h = (1 - rate) * h + rate * f + part
                pull = u[client] / scale * mean - v[client] / scale + decay * (mean - centre)
                mean = mean - lr * (gradient + pull) / (h + decay)
            precisions.append(ess * (h + decay))
            products.append(precisions[-1] * mean)
            v[client] += step * rho * (whole * centre - products[-1])
            u[client] += step * rho * (whole - precisions[-1])
            report, states[client], _ = method.local(message, states[client], data, here)
            reports.add(client, report)
        server, _ = method.update(server, reports, at(run, round=number))
        a = 1 / (1 + 2 * rho)
        whole = (1 - a) * sum(precisions) / 2 + a * (prior - u.sum(0))
        centre = ((1 - a) * sum(products) / 2 - a * v.sum(0)) / whole
        torch.testing.assert_close(server.posterior.precision[NAME][0], whole, rtol=1e-4, atol=0)
        torch.testing.assert_close(server.posterior.mean[NAME][0], centre, rtol=1e-4, atol=1e-5)


def test_networks_and_settings_that_it_has_no_use_for():
    stack = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(ModelError, match="running"):
        IvonAdmm().check(run_of(Network(stack, shape=(4,))))
    *_, note = IvonAdmm().remarks(run_of(network(), optimizer="adam"))
    assert "training.optimizer has no effect" in note
    assert not any("method." in note for note in IvonAdmm().remarks(run_of(network())))
    (note,) = idle(IvonAdmm(rate=0, start_std=0.02), "method.")
    assert note.endswith("no effect: method.rate is 0.0, and must be above 0")
    *_, note = IvonAdmm(rho=0.05).remarks(run_of(network(), clients=10))
    assert "method.rho = 0.05 is less than 1/10" in note
