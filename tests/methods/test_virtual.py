"""VIRTUAL against conjugate models, finite differences and torch.distributions."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional

import fedbayes
from fedbayes import Config, Simulation
from fedbayes.contracts import ChangeCoordinates, Report, Reports, Solved
from fedbayes.contracts.changes import clipped, norm
from fedbayes.contracts.product import PosteriorServer as Server
from fedbayes.core.fields import idle
from fedbayes.core.messages import decode, decode_file, dense
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples, named, part, unpack
from fedbayes.errors import ConfigError, MessageError, ModelError
from fedbayes.inference.gaussian import NaturalGaussian, kl, standard
from fedbayes.likelihoods import build_likelihood
from fedbayes.methods.ivon_admm import IvonAdmm
from fedbayes.methods.virtual import Virtual, VirtualClient, _newcomer, sampled
from fedbayes.models import MLP, LeNet5, Network, ResNet20
from fedbayes.models.variational import (
    GaussianWeights,
    Perturbation,
    WeightDraws,
    affine,
    forward,
    repeat,
    stack,
)
from fedbayes.workflows.calibrate.calibration import trust
from fedbayes_papers.virtual import accuracies, final_accuracies
from tests.helpers.places import at, network, run_of, samples


def random_gaussian(seed, **shapes):
    rng = torch.Generator().manual_seed(seed)
    precision = {n: torch.rand(s, generator=rng).double() + 0.3 for n, s in shapes.items()}
    shift = {n: torch.randn(s, generator=rng).double() for n, s in shapes.items()}
    return NaturalGaussian(precision, shift)


def test_products_and_quotients_of_densities():
    """log N1 + log N2 − log N(product) is a constant, and so for the quotient."""
    one, two = random_gaussian(0, w=(3,)), random_gaussian(1, w=(3,))
    product = one * two
    x = torch.linspace(-2, 2, 7).double()[:, None]

    def logs(g):
        return Normal(g.mean["w"], g.std["w"]).log_prob(x)

    rest = logs(one) + logs(two) - logs(product)
    torch.testing.assert_close(rest, rest[:1].expand_as(rest))
    torch.testing.assert_close((product / two).shift["w"], one.shift["w"])
    torch.testing.assert_close((one**0.25 * one**0.75).precision["w"], one.precision["w"])


def test_kl_is_that_of_torch():
    one, two = random_gaussian(0, a=(3,), b=(2, 2)), random_gaussian(1, a=(3,), b=(2, 2))
    expected = sum(
        kl_divergence(Normal(one.mean[n], one.std[n]), Normal(two.mean[n], two.std[n])).sum()
        for n in ("a", "b")
    )
    torch.testing.assert_close(kl(one.mean, one.precision, two), expected)


@pytest.mark.parametrize("estimator", ["flipout", "reparametrization"])
@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Linear(5, 4), (5,)), (nn.Conv2d(2, 3, 3, 2, 1), (2, 6, 6))]
)
def test_perturbed_outputs_have_the_exact_mean_and_variance(estimator, layer, shape):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, *shape, generator=rng)
    mean = layer.weight.detach(), layer.bias.detach()
    spread = tuple(0.1 + 0.4 * torch.rand(t.shape, generator=rng) for t in mean)
    draws = []
    for _ in range(1500):
        noise = Perturbation(20, estimator, WeightDraws(rng))
        with torch.no_grad():
            out = affine(layer, repeat(x, 20), mean, spread, noise)
        draws.append(out.reshape(20, 2, *out.shape[1:]))
    y = torch.cat(draws)
    with torch.no_grad():
        exact = layer(x)
        squares = x.square(), spread[0].square(), spread[1].square()
        if isinstance(layer, nn.Linear):
            variance = functional.linear(*squares)
        else:
            variance = functional.conv2d(*squares, layer.stride, layer.padding)
    scale = variance.sqrt()
    # 30,000 draws; the squares of those that share a perturbation in flipout are correlated.
    assert ((y.mean(0) - exact).abs() / scale).max() < 0.05
    assert (y.var(0) / variance - 1).abs().max() < (0.12 if estimator == "flipout" else 0.06)


def test_rows_of_flipout_are_uncorrelated():
    layer = nn.Linear(3, 1, bias=False)
    mean, spread = (torch.zeros(1, 3), None), (torch.ones(1, 3), None)
    rng = torch.Generator().manual_seed(0)
    x = torch.tensor([[1.0, 2.0, -1.0], [1.0, 2.0, -1.0]])
    noise = Perturbation(2, "flipout", WeightDraws(rng))
    y = torch.stack([affine(layer, repeat(x, 2), mean, spread, noise)[:, 0] for _ in range(4000)])
    correlation = torch.corrcoef(y.T) - torch.eye(4)
    assert correlation.abs().max() < 0.06
    torch.testing.assert_close(y.var(0), torch.full((4,), 6.0), rtol=0.12, atol=0)


def test_without_std_it_is_the_network_itself():
    net = Network(LeNet5(1, 16, 16, 4))
    x = torch.randn(3, 1, 16, 16)
    weights = GaussianWeights(net.initial, {n: torch.zeros_like(t) for n, t in net.initial.items()})
    for estimator in ("flipout", "reparametrization"):
        noise = Perturbation(2, estimator, WeightDraws(torch.Generator().manual_seed(0)))
        logits, seen = forward(stack(net.module), weights, repeat(x, 2), noise)
        torch.testing.assert_close(logits, net(net.initial, x).repeat(2, 1), rtol=1e-4, atol=1e-5)
    assert [tuple(h.shape[1:]) for h in seen] == [(20, 12, 12), (50, 2, 2), (500,), (4,)]


def test_what_is_no_stack_is_refused():
    with pytest.raises(ModelError, match="GroupNorm"):
        stack(ResNet20(3, 10))
    with pytest.raises(ModelError, match="not a stack"):
        stack(nn.Linear(3, 2))
    for odd in ({"groups": 2}, {"dilation": 2}, {"padding": 1, "padding_mode": "circular"}):
        with pytest.raises(ModelError, match="with groups, dilation"):
            stack(nn.Sequential(nn.Conv2d(2, 4, 3, **odd)))
    for padded in ({"padding": "same"}, {"padding": 1, "stride": 2}):
        assert stack(nn.Sequential(nn.Conv2d(2, 4, 3, **padded)))


def test_half_precision_is_refused():
    half = Network(nn.Sequential(nn.Linear(3, 2)), precision="bf16")
    with pytest.raises(ConfigError, match="float32"):
        Virtual().check(run_of(half, classes=2))


def prepared(method, net):
    """Client 0 of three that are refined one by one, and what it is sent first."""
    place = at(run_of(net, clients=3, cohort=1, optimizer="adam", lr=0.01))
    server = method.init(place.run)
    return server, method.message(server, place), place


def test_gradients_of_the_free_energy():
    """Against central differences, in float64, with the same noise."""
    net = network([3], dtype=torch.double)
    method = Virtual(samples=4, prior_std=0.7)
    place, data = at(run_of(net, clients=2)), samples(dtype=torch.double)
    message = method.message(Server(standard(net.initial, 0.9)), place)
    problem = method.problem(message, method.join(place), data, place)
    noise = problem.noise.draw(place.rng("weights"), data)
    loss = method.loss(place.run)

    def energy(parameters):
        return loss(parameters, data, problem.given, noise)

    start = {n: t + 0.1 * torch.randn(t.shape).double() for n, t in problem.start.items()}
    leaves = {n: t.clone().requires_grad_() for n, t in start.items()}
    energy(leaves).backward()
    rng = torch.Generator().manual_seed(0)
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        index = int(torch.randint(leaf.numel(), (1,), generator=rng))
        values = []
        for step in (1e-5, -1e-5):
            moved = {n: t.clone() for n, t in start.items()}
            moved[name].view(-1)[index] += step
            values.append(float(energy(moved)))
        numeric = (values[0] - values[1]) / 2e-5
        assert float(leaf.grad.view(-1)[index]) == pytest.approx(numeric, rel=1e-3, abs=1e-7), name


@pytest.mark.parametrize(
    "settings",
    [
        {"cohort": 1, "sampling": "cyclic", "rounds": 9},
        {"cohort": 3, "rounds": 4, "method": {"damping": 0.4}},
    ],
    ids=["sequential", "side by side"],
)
def test_the_posterior_is_the_product_of_the_factors(settings, tmp_path):
    """To 1e-9 in float64, with those of clients that never took part at p(θ)^{1/K}."""
    method = {"name": "virtual", "samples": 2, **settings.pop("method", {})}
    config = fedbayes.Config.create(
        **settings,
        data={"name": "digits", "clients": 5, "partition": "iid", "limit": 200},
        model={"hidden": [4]},
        training={"optimizer": "adam", "lr": 0.05, "epochs": 5},
        method=method,
    )
    with Simulation(config, tmp_path) as simulation:
        for step in simulation:
            states = {
                c: unpack(VirtualClient, dense(decode(s))) for c, s in simulation.states.items()
            }
            posterior = step.server.posterior
            share = standard(posterior.precision) ** 0.2
            product = share**0.0
            for client in range(5):
                own = states.get(client)
                product = product * (own.factor if own else share)
            for name, p in posterior.precision.items():
                torch.testing.assert_close(product.precision[name], p, rtol=1e-9, atol=1e-9)
                torch.testing.assert_close(
                    product.shift[name], posterior.shift[name], rtol=1e-9, atol=1e-9
                )
                assert (p > 0).all()
            for own in states.values():
                assert all((p > 0).all() for p in own.factor.precision.values())
    assert len(states) >= 4


@pytest.mark.parametrize("damping", [1.0, 1 / 3])
def test_what_leaves_a_client(damping):
    """Changes of the shared factor's natural parameters and nothing else.

    The factor itself is where it started and all of its changes, so who keeps them has it.
    """
    net = network([3])
    method = Virtual(samples=2, damping=damping)
    _, message, place = prepared(method, net)
    report, state, _ = method.local(message, method.join(place), samples(), place)
    names = set(net.initial)
    assert set(report.tensors) == {f"{kind}/{n}" for kind in ("precision", "shift") for n in names}
    second, after, _ = method.local(message, state, samples(), place)
    own = [*state.mean.values(), *state.log_std.values(), *state.gates.values()]
    assert not alike(own, report.tensors.values())
    own += [*after.mean.values(), *after.log_std.values(), *after.gates.values()]
    factors = [*after.factor.precision.values(), *after.factor.shift.values()]
    assert not alike(own + factors, second.tensors.values())
    share = standard(net.initial) ** (1 / 3)
    for name, precision in after.factor.precision.items():
        kept = report.tensors[f"precision/{name}"].double() + second.tensors[f"precision/{name}"]
        torch.testing.assert_close(share.precision[name] + kept, precision)


def alike(secrets, sent):
    """Whether one of the secrets can be read off what was sent, up to its sign."""
    return any(
        secret.shape == item.shape
        and (
            torch.allclose(secret.float(), item, rtol=1e-3)
            or torch.allclose(secret.float(), -item, rtol=1e-3)
        )
        for item in sent
        for secret in secrets
    )


KNOWN_NOISE = build_likelihood(
    "gaussian", Target("real", ("y",), center=(0.0,), scale=(1.0,)), noise=0.5
)
"""With linear networks a linear Gaussian model, in which everything is known."""


def regression(seed, count=40):
    """Orthogonal inputs, so that the exact posterior of each weight stands alone."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.linalg.qr(torch.randn(count, 3, generator=rng))[0] * count**0.5
    x[:, 2] *= 0.3
    y = x @ torch.tensor([1.0, -0.5, 2.0]) + 0.5 * torch.randn(count, generator=rng)
    return Samples(x, y[:, None])


@pytest.mark.parametrize(
    "mode",
    [
        "one client",
        pytest.param("sequential", marks=pytest.mark.slow),
        pytest.param("side by side", marks=pytest.mark.slow),
    ],
)
def test_refinement_reaches_the_exact_posterior(mode):
    """Of linear regression with noise variance 1/4, prior N(0, 1) and orthogonal inputs."""
    net = Network(nn.Sequential(nn.Linear(3, 1, bias=False)))
    method = Virtual(samples=128, estimator="reparametrization", lateral=False, start_std=0.2)
    data = [regression(seed) for seed in range(1 if mode == "one client" else 3)]
    settings = {"clients": len(data), "cohort": 1, "likelihood": KNOWN_NOISE}
    server = method.init(run_of(net, **settings))
    states = {}
    rates = [0.03, 0.02, 0.003, 0.0007]
    if len(data) == 1:
        rates = [0.03, 0.03, *rates]
    for number, lr in enumerate(rates, start=1):
        group = range(len(data)) if mode == "side by side" else None
        for turn in range(len(data) if group is None else 1):
            reports = Reports.of(method).reduction()
            for client in group if group is not None else [turn]:
                training = {"optimizer": "adam", "lr": lr, "steps": 500, "batch_size": 40}
                place = at(run_of(net, **settings, **training), client, number)
                state = states.get(client) or method.join(place)
                report, states[client], _ = method.local(
                    method.message(server, place), state, data[client], place
                )
                reports.add(client, report)
            server, _ = method.update(server, reports, place)
    x = torch.cat([d.x for d in data]).double()
    y = torch.cat([d.y for d in data]).double()[:, 0]
    precision = torch.eye(3).double() + x.T @ x / 0.25
    mean = torch.linalg.solve(precision, x.T @ y / 0.25)
    found = server.posterior
    std = precision.diagonal().rsqrt()
    assert ((found.mean["0.weight"][0] - mean) / std).abs().max() < 0.3
    torch.testing.assert_close(
        found.precision["0.weight"][0], precision.diagonal(), rtol=0.06, atol=0
    )


class Exact(Virtual):
    """Refinement in closed form: the Gaussian q = N(m, diag(d)⁻¹) that is nearest to cavity ·
    share · likelihood has d = d₀ + diag(XᵀX)/σ² and (diag(d₀) + XᵀX/σ²) m = h₀ + Xᵀy/σ²."""

    def local(self, message, client, samples, at):
        problem = self.problem(message, client, samples, at)
        cavity = NaturalGaussian(**problem.given["cavity"])
        share = standard(cavity.precision, self.prior_std) ** (1 / at.run.clients)
        x, y = samples.x.double(), samples.y[:, 0].double()
        (name,) = cavity.precision
        inner = (cavity.precision[name] + share.precision[name])[0]
        gram = x.T @ x / 0.25
        pull = (cavity.shift[name] + share.shift[name])[0] + x.T @ y / 0.25
        mean = torch.linalg.solve(inner.diag() + gram, pull)
        own = share.precision[name][0] + gram.diagonal()
        ended = {f"mean/{name}": mean[None], f"log_precision/{name}": own.log()[None]}
        return self.report(Solved(ended, 1, 0.0, len(y)), problem, client, at)


@pytest.mark.parametrize(("cohort", "rounds"), [(1, 90), (2, 90), (3, 60)])
def test_refinement_and_damping_end_at_the_exact_posterior_of_correlated_inputs(cohort, rounds):
    """The exact mean, and the mean-field precision: the diagonal of the exact one."""
    net = Network(nn.Sequential(nn.Linear(3, 1, bias=False)))
    method = Exact(lateral=False)
    rng = torch.Generator().manual_seed(5)
    mixed = torch.eye(3) + 0.5 * torch.rand(3, 3, generator=rng)
    data = [Samples((one := regression(seed)).x @ mixed, one.y) for seed in range(3)]
    run = run_of(net, clients=3, cohort=cohort, rounds=rounds, likelihood=KNOWN_NOISE)
    server = method.init(run)
    states, share = {}, standard(net.initial) ** (1 / 3)
    for number in range(rounds):
        reports = Reports.of(method).reduction()
        for client in sorted((number * cohort + turn) % 3 for turn in range(cohort)):
            place = at(run, client, number + 1)
            state = states.get(client) or method.join(place)
            message = method.message(server, place)
            report, states[client], _ = method.local(message, state, data[client], place)
            method.accept(server, report, place.run)
            reports.add(client, report)
        server, _ = method.update(server, reports, place)
        product = share**0
        for client in range(3):
            own = states.get(client)
            product = product * (own.factor if own else share)
        torch.testing.assert_close(
            product.precision, server.posterior.precision, rtol=1e-9, atol=1e-9
        )
        torch.testing.assert_close(product.shift, server.posterior.shift, rtol=1e-9, atol=1e-9)
    x = torch.cat([d.x for d in data]).double()
    y = torch.cat([d.y for d in data]).double()[:, 0]
    precision = torch.eye(3).double() + x.T @ x / 0.25
    mean = torch.linalg.solve(precision, x.T @ y / 0.25)
    found = server.posterior
    torch.testing.assert_close(found.mean["0.weight"][0], mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        found.precision["0.weight"][0], precision.diagonal(), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("cohort", [1, 2, 3])
def test_a_change_is_damped_by_the_number_of_clients_beside(cohort):
    """Unless told otherwise: a report is the whole change by their number."""
    net = Network(nn.Sequential(nn.Linear(3, 1, bias=False)))
    place = at(run_of(net, clients=3, cohort=cohort, likelihood=KNOWN_NOISE))
    found = []
    for method in (Exact(lateral=False), Exact(lateral=False, damping=1.0)):
        message = method.message(method.init(place.run), place)
        found.append(method.local(message, method.join(place), regression(0), place)[0].tensors)
    damped, whole = found
    for name, change in whole.items():
        torch.testing.assert_close(cohort * damped[name], change)


def test_reports_that_no_client_can_have_are_refused():
    net = network([3])
    method = Virtual(samples=2)
    server, message, place = prepared(method, net)
    report, _, _ = method.local(message, method.join(place), samples(), place)
    method.accept(server, report, place.run)
    name = next(iter(server.posterior.precision))
    taken = {
        n: -t.float() if n == f"precision/{name}" else t
        for n, t in report.tensors.items()
        for t in [server.posterior.precision[name] if n == f"precision/{name}" else t]
    }
    with pytest.raises(MessageError, match=f"removes more precision from '{name}'"):
        method.accept(server, Report(taken), place.run)
    # Each takes less than all, both together more.
    half = {n: 0.6 * t if n == f"precision/{name}" else 0 * t for n, t in taken.items()}
    reports = Reports.of(method).reduction()
    for client in range(2):
        method.accept(server, Report(half), place.run)
        reports.add(client, Report(half))
    after, _ = method.update(server, reports, place)
    assert all((p > 0).all() for p in after.posterior.precision.values())


@pytest.mark.parametrize("method", [Virtual(prior_std=0.5), IvonAdmm(prior_std=0.5)])
def test_noise_that_takes_all_precision_leaves_the_prior_round_after_round(method):
    """The mean stays, and so does what the prior knows: what is taken again is not taken off it."""
    net = network([3])
    place = at(run_of(net, clients=2, cohort=2))
    server = method.init(place.run)
    some = next(iter(server.posterior.precision))
    posterior = NaturalGaussian(
        {n: 3 * p for n, p in server.posterior.precision.items()},
        {n: 6 * p for n, p in server.posterior.precision.items()},
    )
    server = replace(server, posterior=posterior)
    for _ in range(20):
        before, reports = server.posterior, Reports.of(method).reduction()
        taken = {f"precision/{n}": 0 * p for n, p in before.precision.items()}
        taken[f"precision/{some}"] = -1e3 * before.precision[some]
        zero = {f"shift/{n}": 0 * h for n, h in before.shift.items()}
        reports.add(0, Report(taken | zero))
        server, _ = method.update(server, reports, place)
        assert torch.equal(server.posterior.precision[some], 0 * before.precision[some] + 4.0)
        torch.testing.assert_close(server.posterior.mean[some], 0 * before.shift[some] + 2.0)


def test_a_long_prediction_of_convolutions_is_the_same_in_pieces(monkeypatch):
    net = Network(LeNet5(1, 16, 16, 4))
    structure = stack(net.module)
    shared = GaussianWeights(
        net.initial, {n: torch.full_like(t, 0.1) for n, t in net.initial.items()}
    )
    x = torch.randn(7, 1, 16, 16)
    whole = sampled(structure, shared, None, {}, 3, 0.0, x)
    monkeypatch.setattr("fedbayes.methods.virtual.PORTION", 2)
    torch.testing.assert_close(sampled(structure, shared, None, {}, 3, 0.0, x), whole)


@pytest.mark.parametrize("module", [LeNet5(1, 16, 16, 4), nn.Sequential(nn.Linear(5, 3))])
def test_predictions_are_the_networks_outputs_under_draws_one_after_the_other(module):
    means = {n: p.detach() for n, p in module.named_parameters()}
    spread = {n: torch.rand_like(t) for n, t in means.items()}
    x = torch.randn(4, 1, 16, 16) if isinstance(module, LeNet5) else torch.randn(4, 5)
    weights = GaussianWeights(means, spread)
    found = sampled(stack(module), weights, None, {}, 3, 0.0, x)
    rng = torch.Generator().manual_seed(0)
    for outputs in found:
        drawn = {n: m + spread[n] * torch.randn(m.shape, generator=rng) for n, m in means.items()}
        expected = torch.func.functional_call(module, drawn, x)
        torch.testing.assert_close(outputs, expected.detach(), rtol=1e-3, atol=1e-3)


def free_energy(method, place, share, start, data, *, training=True):
    """The energy at some parameters where the posterior without the client's factor is flat."""
    rest = {n: torch.zeros_like(t) for n, t in share.precision.items()}
    prior = {"precision": share.precision, "mean": share.mean}
    given = {"rest": rest, "prior": prior, "count": torch.tensor(len(data.y))}
    noise = method._draw(start, rest, place.run)(place.rng("weights"), data)
    loss = method.loss(place.run) if training else method.validation(place.run)
    return float(loss(start, data, given, noise))


def test_one_client_without_network_of_its_own_is_bayes_by_backprop():
    """The free energy is KL(q ‖ N(0, 1))/N + E[nll], written out."""
    net = network([3])
    method = Virtual(samples=5, lateral=False, estimator="reparametrization")
    place, data = at(net), samples()
    share = standard(net.initial).to("cpu", torch.float32)
    start = {f"mean/{n}": t for n, t in net.initial.items()}
    start |= {f"log_precision/{n}": torch.full_like(t, 4.0) for n, t in net.initial.items()}
    found = free_energy(method, place, share, start, data)
    q = Normal(
        torch.cat([t.flatten() for t in net.initial.values()]),
        torch.tensor(-2.0).exp(),
    )
    complexity = float(kl_divergence(q, Normal(0.0, 1.0)).sum())
    rng = place.rng("weights")
    spread = torch.tensor(-2.0).exp()
    drawn = [t + spread * torch.randn(5, *t.shape, generator=rng) for t in net.initial.values()]
    total = 0.0
    for k in range(5):
        w1, b1, w2, b2 = (d[k] for d in drawn)
        hidden = torch.relu(data.x @ w1.T + b1)
        total += float(functional.cross_entropy(hidden @ w2.T + b2, data.y)) / 5
    assert found == pytest.approx(total + complexity / 12, rel=1e-5)
    tempered = method.model_copy(update={"kl_weight": 0.25})
    found = free_energy(tempered, place, share, start, data)
    assert found == pytest.approx(total + 0.25 * complexity / 12, rel=1e-5)


@pytest.mark.slow
def test_a_sequential_run(tmp_path):
    """A run as a user would start it: personal models that are good, a proper predictor."""
    run = fedbayes.run(
        rounds=12,
        cohort=1,
        sampling="cyclic",
        data={"name": "digits", "clients": 4, "partition": "dirichlet", "alpha": 0.3},
        model={"hidden": [50]},
        training={"optimizer": "adam", "lr": 0.005, "epochs": 30},
        method={"name": "virtual", "samples": 5},
        folder=tmp_path,
    )
    assert run.summary["local_accuracy"] > 0.9
    x = torch.randint(17, (4, 1, 8, 8))
    probabilities = run.predictor()(x).exp()
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(4))
    assert part(run.model, "std")["1.weight"].min() > 0


@pytest.mark.slow
def test_the_server_can_be_asked_to_predict_too():
    """Without a likelihood of its own outputs the server's network knows features, not labels."""
    settings = {
        "rounds": 9,
        "cohort": 1,
        "sampling": "cyclic",
        "data": {"name": "digits", "clients": 3, "partition": "iid"},
        "model": {"hidden": [32]},
        "training": {"optimizer": "adam", "lr": 0.01, "epochs": 10},
    }
    table = {"name": "virtual", "samples": 3, "kl_weight": 1e-3}
    paper = fedbayes.run(**settings, method=table).summary
    asked = fedbayes.run(**settings, method={**table, "server_likelihood": 1.0}).summary
    assert paper["global_accuracy"] < 0.5 < 0.85 < asked["global_accuracy"]
    assert asked["local_accuracy"] > 0.85


def test_predictions_average_the_client_and_the_server():
    """A draw is the mean of two softmaxes, weighted 1 to w."""
    net, weight = network((5,)), 0.5
    structure = stack(net.module)
    shared = GaussianWeights(net.initial, {n: 0 * t for n, t in net.initial.items()})
    here = at(net)
    means, gates = _newcomer(here)
    own = GaussianWeights(means, {n: 0 * t for n, t in means.items()})
    x = samples().x
    both = sampled(structure, shared, own, gates, 2, weight, x).exp()
    alone = sampled(structure, shared, own, gates, 2, 0.0, x).softmax(-1)
    server = torch.softmax(net(net.prepare(net.initial), x), dim=-1)
    torch.testing.assert_close(both, (alone + weight * server) / (1 + weight))
    torch.testing.assert_close(both.sum(-1), torch.ones(2, len(x)))


def test_trust_is_of_predictions_and_the_likelihood_of_training(tmp_path):
    """Whatever the trust is, the same is learnt; none given, it is the likelihood's weight."""
    settings = {
        "rounds": 2,
        "cohort": 1,
        "sampling": "cyclic",
        "data": {"name": "digits", "clients": 2, "partition": "iid", "limit": 300},
        "model": {"hidden": [8]},
        "training": {"optimizer": "adam", "lr": 0.01, "epochs": 3},
    }
    table = {"name": "virtual", "samples": 2, "server_likelihood": 0.7}
    runs = {
        weight: fedbayes.run(
            **settings, method=table | ({} if weight is None else {"server_trust": weight})
        )
        for weight in (None, 0.7, 0.0, 3.0)
    }
    for run in runs.values():
        for name, tensor in runs[None].model.items():
            assert torch.equal(run.model[name], tensor)
    nll = {weight: run.summary["metrics"]["local"]["nll"] for weight, run in runs.items()}
    assert nll[None] == nll[0.7]
    assert len({round(value, 6) for value in nll.values()}) == 3


def test_only_trust_needs_classes():
    target = Target("real", ("y",), (0.0,), (1.0,))
    run = run_of(network((4,), classes=1), likelihood=build_likelihood("auto", target))
    Virtual(server_likelihood=1.0, server_trust=0.0).check(run)
    Virtual(server_likelihood=1.0, lateral=False).check(run)
    for table in ({"server_likelihood": 1.0}, {"server_trust": 0.3}):
        with pytest.raises(ConfigError, match=r"server_trust = 0"):
            Virtual(**table).check(run)
    assert "does not learn" in Virtual(server_trust=0.3).remarks(run)[-1]
    assert "lateral is false" in next(idle(Virtual(server_trust=0.3, lateral=False), "method."))


def test_clients_under_the_final_posterior(tmp_path):
    """What Table 2 says of them is what `calibrate --personal` finds in the run's folder."""
    config = Config.create(
        rounds=4,
        cohort=1,
        sampling="cyclic",
        data={"name": "digits", "clients": 3, "partition": "iid", "limit": 400},
        model={"hidden": [8]},
        training={"optimizer": "adam", "lr": 0.01, "epochs": 5},
        method={"name": "virtual", "samples": 2, "kl_weight": 1e-3, "server_likelihood": 1.0},
    )
    with Simulation(config, tmp_path / "run") as simulation:
        for _ in simulation:
            pass
        found = accuracies(simulation, "VIRTUAL")
        each = final_accuracies(simulation)
    pooled = trust(tmp_path / "run", personal=True).metrics["accuracy"]
    assert found["final_pooled"] == pytest.approx(pooled)
    assert found["final"] == pytest.approx(each.mean())
    # The last client that was refined has the same model either way.
    last = trust(tmp_path / "run", client="0").metrics["accuracy"]
    assert each[0] == pytest.approx(last)


def test_what_early_stopping_watches_is_the_likelihood_alone():
    """By hand: no KL terms, whatever they weigh, and no dropout."""
    net = Network(MLP(4, [6], 3, dropout=0.5))
    data, place = samples(), at(net)
    share = standard(net.initial).to("cpu", torch.float32)
    start = named("mean", net.initial)
    start |= {f"log_precision/{n}": torch.full_like(t, 30.0) for n, t in net.initial.items()}
    plain = float(functional.cross_entropy(net(net.initial, data.x), data.y))
    for weight in (1.0, 1e-3):
        method = Virtual(lateral=False, kl_weight=weight)
        watched = free_energy(method, place, share, start, data, training=False)
        assert watched == pytest.approx(plain, abs=1e-3)
        assert free_energy(method, place, share, start, data) > plain + 20 * weight


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_one_sample_at_least_is_watched_and_one_trained_on(share):
    settings = {"patience": 2, "validation": share}
    with Simulation(Config.create(training=settings)) as simulation:
        runtime = simulation.runtime
    for count in (2, 3, 60):
        kept, watched = runtime._set_aside(samples(count), 0)
        assert len(kept.y) + len(watched.y) == count
        assert min(len(kept.y), len(watched.y)) >= 1
    assert runtime._set_aside(samples(1), 0)[1] is None


@pytest.mark.slow
def test_a_client_stops_early_by_its_validation_loss():
    """What is watched is the likelihood on samples set aside, not the falling KL term."""
    run = fedbayes.run(
        rounds=2,
        data={"name": "digits", "clients": 4, "partition": "iid"},
        model={"hidden": [16]},
        training={
            "optimizer": "adam",
            "lr": 0.02,
            "epochs": 200,
            "patience": 3,
            "validation": 0.2,
        },
        method={"name": "virtual", "samples": 2, "kl_weight": 1e-3},
    )
    # 337 samples, of which 67 are set aside: 9 steps an epoch.
    assert all(0 < line["reported"]["steps"] < 100 * 9 for line in run.metrics)
    assert run.summary["local_accuracy"] > 0.7


def test_noise_is_planned_once_for_all_rounds(monkeypatch):
    """A later problem asks for the same numbers, of the same stream, without a pass of its own."""
    method, place = Virtual(samples=2), at(network(hidden=(3,)))
    data, passes = samples(), []
    real = Virtual._outputs
    monkeypatch.setattr(Virtual, "_outputs", lambda *a, **k: passes.append(1) or real(*a, **k))

    def draws(place, batch):
        message = method.message(method.init(place.run), place)
        noise = method.problem(message, method.join(place), data, place).noise
        return noise.draw(torch.Generator().manual_seed(0), batch)["draws"]

    first = draws(place, data)
    again = draws(at(place.run, client=1, round=2), data)
    assert len(passes) == 1
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    smaller = Samples(data.x[:5], data.y[:5])
    assert [d.shape for d in draws(place, smaller)] != [d.shape for d in first]
    assert len(passes) == 2


@pytest.mark.filterwarnings("ignore::fedbayes.errors.FedbayesWarning")
@pytest.mark.parametrize("clip", [1.0, 50.0])
def test_under_clipping_the_posterior_is_the_product_of_the_factors_and_nobody_is_refused(clip):
    """What a client keeps is what the server adds, in parts that the bound shortens."""
    with Simulation(clipped_run(clip, rounds=4)) as simulation:
        refused = [step.metrics["refused"] for step in simulation]
        states = [
            unpack(VirtualClient, decode_file(simulation.states[client])) for client in range(6)
        ]
        posterior = simulation.server.posterior
    assert refused == [{}] * 4
    product = math.prod((state.factor for state in states[1:]), start=states[0].factor)
    for name, precision in posterior.precision.items():
        torch.testing.assert_close(product.precision[name], precision, rtol=1e-6, atol=0)
        torch.testing.assert_close(product.shift[name], posterior.shift[name], rtol=1e-4, atol=1e-4)
        assert (precision > 1).all()  # of the prior, which every client adds to


def test_a_clipped_report_is_as_long_as_the_server_lets_it_be():
    with Simulation(clipped_run(1.0)) as simulation:
        list(simulation)
        method, run = simulation.method, simulation.run
    server = method.init(run)
    place = at(run)
    message = method.message(server, place)
    report, _, _ = method.local(message, method.join(place), simulation.data.train(0), place)
    changes = ChangeCoordinates.of(method, server, run).changes(report)
    lengths = {part: norm(tensors.values()) for part, tensors in changes.items()}
    assert lengths == pytest.approx({"precision": 1.0, "shift": 1.0}, rel=1e-5)
    assert clipped(changes, 1.0) == changes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fedbayes.errors.FedbayesWarning")
def test_under_clipping_no_honest_client_is_refused_in_thirty_rounds():
    with Simulation(clipped_run(1.0, rounds=30)) as simulation:
        lines = [step.metrics for step in simulation]
    assert [line["refused"] for line in lines] == [{}] * 30
    assert lines[-1]["local_accuracy"] > lines[0]["local_accuracy"]


def clipped_run(clip, rounds=1):
    return Config.create(
        rounds=rounds,
        data={"name": "digits", "clients": 6},
        model={"hidden": [16]},
        training={"epochs": 1},
        aggregation={"clip": clip},
        calibration="none",
        method={"name": "virtual", "samples": 4, "predictions": 2},
    )
