"""Masks, Langevin draws and multiplied Gaussians: what the papers' equations say."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

import fedbayes
from fedbayes.contracts import Report, ReportList, Stateless, Sum
from fedbayes.contracts.chain import effective_size, r_hat
from fedbayes.contracts.personal import PersonalTensors
from fedbayes.core.messages import encode
from fedbayes.errors import MessageError
from fedbayes.methods.fald import Fald
from fedbayes.methods.fedivon import FedIvon, FedIvonServer
from fedbayes.methods.fedpm import FedPm, _fixed
from fedbayes.methods.fens import MIXER, Fens, FensServer
from fedbayes.methods.qlsd import Qlsd, _read
from fedbayes.models import MLP, Network
from tests.helpers.places import at, network, rounds, run_of, samples
from tests.helpers.regressions import linear_run, pooled, regressions

PLAIN = {"optimizer": "sgd"}


def masks(count, seed=0):
    """Reports of some masks of a layer of 3 by 4 weights, and the masks."""
    rng = torch.Generator().manual_seed(seed)
    found = [torch.rand(3, 4, generator=rng) < 0.4 for _ in range(count)]
    reports = ReportList()
    for client, mask in enumerate(found):
        bits = torch.zeros(2, dtype=torch.uint8)
        for index, bit in enumerate(mask.flatten().tolist()):
            bits[index // 8] |= bit << (7 - index % 8)
        reports.add(client, Report({"bits/1.weight": bits}))
    return reports, torch.stack(found).double()


def test_fedpm_counts_masks_in_beta_posteriors():
    """Mode of Beta(1 + kept, 1 + dropped), over the rounds until about all clients were heard."""
    method, run = FedPm(), run_of(network(), clients=6, cohort=3, optimizer="adam")
    server = method.init(run)
    (first, one), (second, two), (third, last) = (masks(3, seed) for seed in range(3))
    after, info = method.update(server, first, at(run, round=1))
    torch.testing.assert_close(after.theta["1.weight"], one.mean(dim=0).float())
    assert info["kept_share"] == pytest.approx(float(one.mean()))
    after, _ = method.update(after, second, at(run, round=2))
    both = torch.cat([one, two])
    torch.testing.assert_close(after.theta["1.weight"], both.mean(dim=0).float())
    torch.testing.assert_close(after.alpha["1.weight"], 1 + both.sum(dim=0))
    after, _ = method.update(after, third, at(run, round=3))  # anew
    torch.testing.assert_close(after.theta["1.weight"], last.mean(dim=0).float())


def test_fedpm_reports_one_bit_for_each_weight():
    settings = {"model": {"hidden": [400]}, "rounds": 1, "data": {"clients": 2, "limit": 200}}
    run = fedbayes.run(method="fedpm", progress=False, **settings)
    weights = 64 * 400 + 400 * 10
    empty = torch.zeros(0, dtype=torch.uint8)
    header = len(encode({"bits/1.weight": empty, "bits/3.weight": empty}))
    sent = run.metrics[0]["bytes_up"] / 2
    assert weights / 8 <= sent <= weights / 8 + 2 * header


def test_fedpm_trains_scores_through_the_draws():
    """The gradient of a score is that of its masked weight times w σ'(s)."""
    net, data = network(), samples(7)
    method, run = FedPm(), run_of(network(), optimizer="adam")
    place = at(run)
    problem = method.problem(method.message(method.init(run), place), Stateless(), data, place)
    noise = problem.noise.draw(torch.Generator().manual_seed(1), data)
    score = {n: (0.3 * torch.cos(torch.arange(12.0))).reshape(3, 4) for n in problem.start}
    found = torch.func.grad(lambda s: method.loss(run)(s, data, problem.given, noise))(score)
    theta = score["score/1.weight"].sigmoid()
    fixed = _fixed(run)["1.weight"]
    torch.testing.assert_close(fixed.abs(), torch.full((3, 4), math.sqrt(2 / 4)))
    masked = (fixed * (noise["1.weight"] < theta)).requires_grad_()
    outputs = data.x @ masked.T + net.initial["1.bias"]
    (slope,) = torch.autograd.grad(torch.nn.functional.cross_entropy(outputs, data.y), masked)
    torch.testing.assert_close(found["score/1.weight"], slope * fixed * theta * (1 - theta))


def test_fedpm_rejects_bits_beyond_a_mask():
    method, run = FedPm(), run_of(network(), optimizer="adam")
    bad = Report({"bits/1.weight": torch.tensor([255, 255], dtype=torch.uint8)})
    with pytest.raises(MessageError, match="more bits than entries"):
        method.accept(method.init(run), bad, run)


def test_fald_adds_the_noise_of_the_federations_posterior():
    """The mean of clients of 4 and 12 rows: its steps' noise has the variance 2 η T/N."""
    net, data, lr = network(), [samples(4), samples(12, seed=1)], 0.1
    run = run_of(net, clients=2, cohort=2, lr=lr, steps=1, batch_size=12, **PLAIN)
    moved = {}
    for temperature in (0.0, 2.0):
        method = Fald(temperature=temperature)
        count = 120 if temperature else 1
        moved[temperature] = [_stepped(method, run, data, k + 1) for k in range(count)]
    noise = torch.stack(moved[2.0]) - moved[0.0][0]
    wanted = 2 * lr * 2.0 / 16
    assert float(noise.var(dim=0).mean()) == pytest.approx(wanted, rel=0.1)
    assert float(noise.mean(dim=0).abs().max()) < 4 * math.sqrt(wanted / len(noise))


def _stepped(method, run, data, number):
    """The server's weights after one round from the start, as a vector."""
    server, reports = method.init(run), Sum()
    for client, own in enumerate(data):
        place = at(run, client=client, round=number)
        message = method.message(server, place)
        reports.add(client, method.local(message, Stateless(), own, place)[0])
    after, _ = method.update(server, reports, at(run, round=number))
    return torch.cat([t.flatten() for t in after.weights.values()])


def test_fald_without_noise_or_prior_is_fedavg():
    settings = {
        "rounds": 2,
        "data": {"name": "digits", "clients": 3, "limit": 200},
        "model": {"hidden": [6]},
        "training": {"optimizer": "sgd", "lr": 0.1, "epochs": 1},
    }
    method = {"name": "fald", "temperature": 0.0, "prior_std": 1e6, "keep": 1}
    found = fedbayes.run(method=method, progress=False, **settings).server().weights
    for name, tensor in fedbayes.run(method="fedavg", progress=False, **settings).model.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


def test_fald_keeps_draws_after_burn_in():
    run = run_of(network(), clients=2, cohort=2, rounds=6, lr=0.1, **PLAIN)
    method = Fald(burn_in=0.5, keep=2)
    servers, _ = rounds(method, run, [samples(5), samples(6, seed=1)], 6)
    assert [len(s.draws.get("1.bias", ())) for s in servers] == [0, 0, 0, 1, 2, 2]
    assert torch.equal(servers[-1].draws["1.bias"][0], servers[-2].weights["1.bias"])
    drawn = method.draws(method.model(servers[-1], run), run)(samples(3).x)
    assert drawn.shape == (2, 3, 3)
    longer, info = method.kept(servers[-1], servers[0].weights, at(run, round=6))
    assert info == {"draws": 4.0, "r_hat": r_hat(longer.track), "ess": effective_size(longer.track)}


def test_r_hat_and_effective_size_of_chains_that_are_known():
    """Independent draws, an AR(1) chain of known autocorrelation time, and halves that differ."""
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn(20000, 2, generator=rng, dtype=torch.float64)
    assert r_hat(noise) == pytest.approx(1.0, abs=1e-3)
    assert effective_size(noise) == pytest.approx(20000, rel=0.1)
    chain, rho = noise.clone(), 0.8
    for step in range(1, len(chain)):
        chain[step] = rho * chain[step - 1] + noise[step]
    assert effective_size(chain) == pytest.approx(20000 * (1 - rho) / (1 + rho), rel=0.15)
    halves = torch.tensor([[0.0], [1.0], [4.0], [5.0]]).double()
    assert r_hat(halves) == pytest.approx(math.sqrt((0.5 * 0.5 + 2 * 8 / 2) / 0.5))
    assert math.isnan(r_hat(halves[:3]))


def test_fedivon_multiplies_gaussians():
    """Weights 1 and 3: Λ is the weighted mean of precisions, m that of means by precision."""
    method, run = FedIvon(), run_of(network(), clients=2, cohort=2, **PLAIN)
    reports, server = Sum(), method.init(run)
    assert isinstance(server, FedIvonServer)
    for client, (count, precision, mean) in enumerate([(1.0, 2.0, 5.0), (3.0, 6.0, 1.0)]):
        full = {n: torch.full_like(t, precision) for n, t in server.mean.items()}
        tensors = {f"precision/{n}": t for n, t in full.items()}
        tensors |= {f"shift/{n}": t * mean for n, t in full.items()}
        reports.add(client, Report(tensors, count))
    after, _ = method.update(server, reports, at(run))
    for name in server.mean:
        wanted = torch.full_like(server.mean[name], 5.0)
        torch.testing.assert_close(after.precision[name], wanted)
        torch.testing.assert_close(after.mean[name], wanted * (2 * 5 + 18 * 1) / 20 / 5)


def test_fedivon_watches_the_likelihood_at_the_mean_without_dropout():
    net, data, method = Network(MLP(4, [6], 3, dropout=0.5)), samples(), FedIvon()
    place = at(run_of(net, **PLAIN))
    start = method.problem(method.message(method.init(place.run), place), Stateless(), data, place)
    found = method.validation(place.run)(start.start, data, start.given, {})
    torch.testing.assert_close(found, cross_entropy(net(net.initial, data.x), data.y))


def test_fedivon_finds_the_variational_optimum_of_a_quadratic():
    """Λ = N h + 1/s² and m = N h t/Λ, where the mean loss is h/2 (w − t)² in each weight."""
    h, target, count = 2.0, 0.5, 8

    net = network()
    run = run_of(net, clients=1, cohort=1, lr=0.1, steps=1500, batch_size=8, **PLAIN)
    method = FedIvon(prior_std=0.7, rate=0.05, samples=4)

    class Net:
        initial = net.initial

        def __call__(self, weights, x, training=False):
            squares = [(w - target).square().sum() for w in weights.values()]
            return h / 2 * torch.stack(squares).sum()

    class Likelihood:
        @staticmethod
        def nll(outputs, y):
            return outputs

    run_like = replace(run, likelihood=Likelihood())
    object.__setattr__(run_like, "network", Net())
    place = at(run)
    message = method.message(method.init(run), place)
    problem = method.problem(message, Stateless(), samples(count), place)
    solved = place.solve(problem, method.loss(run_like), samples(count))
    report, _, _ = method.report(solved, problem, Stateless(), place)
    precision = report.tensors["precision/1.weight"]
    wanted = count * h + 1 / 0.49
    assert float(precision.mean()) == pytest.approx(wanted, rel=0.1)
    mean = report.tensors["shift/1.weight"] / precision
    assert float(mean.mean()) == pytest.approx(count * h * target / wanted, rel=0.1)


def ensemble(net, count=3):
    """A server's ensemble of networks that differ, and an aggregator that is no mean."""
    rng = torch.Generator().manual_seed(2)
    networks = {n: torch.randn(count, *t.shape, generator=rng) for n, t in net.initial.items()}
    return FensServer(net.initial, torch.rand(count, 3, generator=rng), networks)


def test_fens_mixes_the_outputs_of_networks():
    """Once by hand; and one step of the aggregator is one of a linear model of these outputs."""
    net, data = network(), samples(6)
    run = run_of(net, clients=3, cohort=3, batch_size=6, **PLAIN)
    server, method = ensemble(net), Fens(mixer_lr=0.3, mixer_epochs=1)
    outputs = torch.stack(
        [
            data.x @ w.T + b
            for w, b in zip(server.networks["1.weight"], server.networks["1.bias"], strict=True)
        ]
    )
    mixer = server.mixer.clone().requires_grad_()
    mixed = sum(mixer[k] * outputs[k] for k in range(3))
    drawn = method.draws(method.model(server, run), run)(data.x)
    torch.testing.assert_close(drawn[0], mixed.detach())
    (slope,) = torch.autograd.grad(torch.nn.functional.cross_entropy(mixed, data.y), mixer)
    place = at(run, round=2)
    message = method.message(server, place)
    report, client, _ = method.local(message, PersonalTensors(), data, place)
    torch.testing.assert_close(report.tensors[MIXER], mixer.detach() - 0.3 * slope)
    later = method.message(server, at(run, round=3))
    assert list(later) == [MIXER]
    again, _, _ = method.local(later, client, data, at(run, round=2))
    assert torch.equal(again.tensors[MIXER], report.tensors[MIXER])
    missed, _, _ = method.local(later, PersonalTensors(), data, at(run, round=3))
    assert torch.equal(missed.tensors[MIXER], server.mixer)


def test_fens_starts_at_the_mean_of_the_networks_that_came():
    net = network()
    run, method, reports = run_of(net, clients=3, cohort=3, **PLAIN), Fens(), ReportList()
    for client in (0, 2):
        reports.add(client, Report({n: t + client for n, t in net.initial.items()}, 1.0 + client))
    server, _ = method.update(method.init(run), reports, at(run))
    assert server.mixer.tolist() == [[0.5] * 3, [0.0] * 3, [0.5] * 3]
    x = samples(4).x
    found = method.draws(method.model(server, run), run)(x)[0]
    both = [net({n: t + k for n, t in net.initial.items()}, x) for k in (0, 2)]
    torch.testing.assert_close(found, (both[0] + both[1]) / 2)


@pytest.mark.slow
def test_qlsd_draws_the_posterior_of_all_rows():
    """Mean and covariance of the chain on a linear regression, at any division of rows."""
    data = [*regressions(orthogonal=False), *regressions(1, rows=7, orthogonal=False, seed=5)]
    mean, precision = pooled(data)
    method, run = Qlsd(), replace(linear_run(clients=4, cohort=4, lr=0.05), rounds=10_000)
    server, found = method.init(run), []
    for number in range(1, 4501):  # before burn-in ends
        reports = ReportList()
        for client, own in enumerate(data):
            place = at(run, client=client, round=number)
            message = method.message(server, place)
            reports.add(client, method.local(message, Stateless(), own, place)[0])
        server, _ = method.update(server, reports, at(run, round=number))
        found.append(server.weights["0.weight"][0])
    drawn, wanted = torch.stack(found[500:]), torch.linalg.inv(precision)
    std = wanted.diagonal().sqrt()
    assert float(((drawn.mean(0) - mean) / std).abs().max()) < 0.25
    assert float(((torch.cov(drawn.T) - wanted) / torch.outer(std, std)).abs().max()) < 0.25


def test_qlsd_sends_gradients_that_are_right_on_average():
    """Of one byte a number, off by less than a step, in the mean the gradient of all rows."""
    net, data = network(), samples(40)
    method, run = Qlsd(), run_of(network(), clients=2, cohort=2, batch_size=16, **PLAIN)
    start = {n: t.clone().requires_grad_() for n, t in net.initial.items()}
    loss = torch.nn.functional.cross_entropy(net(start, data.x), data.y)
    wanted = dict(zip(start, torch.autograd.grad(loss, list(start.values())), strict=True))
    read = {n: [] for n in wanted}
    for number in range(1, 401):
        place = at(run, round=number)
        report, _, info = method.local(
            method.message(method.init(run), place), Stateless(), data, place
        )
        assert report.weight == 40
        assert info["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
        for name in wanted:
            assert report.tensors[f"code/{name}"].dtype == torch.int8
            read[name].append(_read(report.tensors, name))
    for name, slope in wanted.items():
        every, step = torch.stack(read[name]), float(slope.abs().max()) / 127
        assert float((every - slope).abs().max()) < step * 1.001
        assert float((every.mean(0) - slope).abs().max()) < 4 * step / 2 / math.sqrt(400)
    weights = sum(t.numel() for t in wanted.values())
    sent = sum(t.numel() * t.element_size() for t in report.tensors.values())
    assert sent == weights + 4 * len(wanted)


def test_qlsd_says_that_epochs_have_no_effect_and_rejects_negative_steps():
    run = run_of(network(), epochs=3, **PLAIN)
    assert "training.epochs has no effect" in Qlsd().remarks(run)[0]
    assert not Qlsd().remarks(run_of(network(), epochs=1, **PLAIN))
    bad = Report({"step/1.bias": torch.tensor(-1.0)})
    with pytest.raises(MessageError, match="negative"):
        Qlsd().accept(Qlsd().init(run), bad, run)
