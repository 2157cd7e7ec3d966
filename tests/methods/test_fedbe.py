"""FedBE: the distribution in closed form, its ensemble by brute force, and what goes out."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedbayes import Config, Simulation, run
from fedbayes.contracts import Report, ReportList, Reports, Solved, Stateless, Sum
from fedbayes.errors import ConfigError
from fedbayes.federation.stages.bounds import norms_compared
from fedbayes.methods.fedbe import FedBe, FedBeServer, FedBeSums
from fedbayes.models import Network
from fedbayes.models.networks import MLP
from tests.helpers.places import at, network, run_of, samples

SIZES = [5.0, 1.0, 14.0]


def clients_of(net, count=3, scale=0.3):
    """Networks around the initial one."""
    return [
        {
            name: t + scale * torch.randn(t.shape, generator=torch.Generator().manual_seed(client))
            for name, t in net.initial.items()
        }
        for client in range(count)
    ]


def updated(method, net, models, sizes=SIZES, **run_settings):
    """The server after a round in which clients end at these networks."""
    run = run_of(net, **run_settings)
    server, reports = method.init(run), Reports.of(method).reduction()
    for client, (model, size) in enumerate(zip(models, sizes, strict=True)):
        here = at(run, client=client)
        problem = method.problem(method.message(server, here), Stateless(), samples(), here)
        solved = Solved(model, steps=1, loss=0.0, count=int(size))
        report, _, _ = method.report(solved, problem, Stateless(), here)
        reports.add(client, report)
    return method.update(server, reports, at(run))


def closed_form(models, sizes, name):
    """Mean and standard deviation, by NumPy."""
    values = np.stack([model[name].numpy().astype(float) for model in models])
    mean = np.average(values, axis=0, weights=sizes)
    return mean, np.sqrt(np.average((values - mean) ** 2, axis=0, weights=sizes))


@pytest.mark.parametrize("kind", [FedBe, FedBeSums])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_the_gaussian_has_the_moments_of_the_clients_networks(kind, weighting):
    net = network((5,))
    models = clients_of(net)
    server, info = updated(kind(weighting=weighting), net, models)
    sizes = SIZES if weighting == "samples" else [1.0] * 3
    spreads = []
    for name in net.initial:
        mean, std = closed_form(models, sizes, name)
        np.testing.assert_allclose(server.mean[name].numpy(), mean, atol=1e-6)
        np.testing.assert_allclose(server.std[name].numpy(), std, atol=1e-5)
        assert torch.equal(server.weights[name], server.mean[name])
        spreads.append(std.ravel())
    assert info["spread"] == pytest.approx(np.sqrt(np.mean(np.concatenate(spreads) ** 2)), rel=1e-4)


def by_hand(weights, x):
    """Class probabilities of a network with one hidden layer, by NumPy."""
    first, bias, second, last = (t.numpy().astype(float) for t in weights.values())
    hidden = np.maximum(x.numpy() @ first.T + bias, 0)
    logits = hidden @ second.T + last
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


@pytest.mark.parametrize("method", [FedBe(members=4), FedBeSums(members=4)])
def test_the_ensemble_predicts_by_its_mean_probabilities(method):
    net = network((5,))
    models = clients_of(net)
    server, _ = updated(method, net, models)
    run, x = run_of(net), samples(n=9).x
    model = method.model(server, run)
    predicted = run.likelihood.mean(method.draws(model, run)(x))
    members = [
        {name: torch.from_numpy(closed_form(models, SIZES, name)[0]) for name in net.initial}
    ]
    if isinstance(method, FedBe):
        members += models
    rng = torch.Generator().manual_seed(0)
    for _ in range(4):
        member = {}
        for name in net.initial:
            mean, std = (torch.from_numpy(a) for a in closed_form(models, SIZES, name))
            member[name] = mean + std * torch.randn(mean.shape, generator=rng)
        members.append(member)
    expected = np.mean([by_hand(member, x) for member in members], axis=0)
    np.testing.assert_allclose(predicted.numpy(), expected, atol=1e-5)


def test_shares_are_drawn_from_a_dirichlet_distribution():
    """Every network is a mean of the clients' with shares γ_s n_s / Σ γ_s n_s."""
    net = network((), classes=3)
    models = clients_of(net)
    method = FedBe(distribution="dirichlet", members=400, alpha=2.0)
    server, _ = updated(method, net, models)
    run = run_of(net)
    drawn = list(method.ensemble(method.model(server, run), run))[4:]
    assert len(drawn) == 400
    basis = torch.stack([torch.cat([t.flatten() for t in m.values()]) for m in models]).double()
    found = torch.stack([torch.cat([t.flatten() for t in m.values()]) for m in drawn]).double()
    shares = torch.linalg.lstsq(basis.T, found.T).solution.T
    torch.testing.assert_close(shares @ basis, found, atol=1e-5, rtol=0)
    assert shares.min() > -1e-5
    torch.testing.assert_close(shares.sum(1), torch.ones(400).double(), atol=1e-5, rtol=0)
    gammas = shares / torch.tensor(SIZES)
    gammas = gammas / gammas.sum(1, keepdim=True)
    torch.testing.assert_close(gammas.mean(0), torch.full((3,), 1 / 3).double(), atol=0.03, rtol=0)
    # Var γ_s = (1/3)(2/3) / (3 α + 1)
    expected = torch.full((3,), 2 / 63).double()
    torch.testing.assert_close(gammas.var(0), expected, rtol=0.2, atol=0)


def test_clients_who_are_one_have_no_spread():
    net = network((5,))
    server, info = updated(FedBeSums(), net, [net.initial] * 3)
    assert info["spread"] == 0.0
    for name, tensor in net.initial.items():
        torch.testing.assert_close(server.mean[name], tensor)


def test_before_any_round_one_network_predicts():
    net = network((5,))
    run, method = run_of(net), FedBe()
    model = method.model(method.init(run), run)
    assert method.draws(model, run)(samples().x).shape == (1, 12, 3)


def test_running_statistics_are_the_clients_mean():
    stack = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    net = Network(stack, shape=(4,))
    models = [
        {n: t + k if t.is_floating_point() else t + 4 * k for n, t in net.initial.items()}
        for k in range(2)
    ]
    for method in (FedBe(members=2), FedBeSums(members=2)):
        server, _ = updated(method, net, models, [1.0, 3.0])
        assert server.std.keys() == net.split()[0].keys()
        torch.testing.assert_close(server.weights["1.running_mean"], torch.full((6,), 0.75))
        assert server.weights["1.num_batches_tracked"] == 3
        run = run_of(net)
        outputs = method.draws(method.model(server, run), run)(samples().x)
        assert torch.isfinite(outputs).all()


@pytest.mark.slow
@pytest.mark.parametrize("cycles", [1, 2])
def test_what_goes_out_learns_the_ensemble(cycles):
    """Its predictions on fresh inputs come nearer to the ensemble's than the mean's do."""
    net = network((16,), seed=3)
    models = clients_of(net, scale=0.6)
    method = FedBe(members=3, inputs="auto", steps=400, drawn=512, server_lr=0.01, cycles=cycles)
    server, info = updated(method, net, models)
    run = run_of(net)
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(5))
    ensemble = run.likelihood.mean(method.draws(method.model(server, run), run)(x))

    def off(weights):
        said = run.likelihood.mean(net(weights, x)[None])
        return float((ensemble * (ensemble.log() - said.log())).sum(1).mean())

    assert off(server.weights) < 0.3 * off(server.mean)
    assert info["divergence"] < 0.3 * info["divergence_of_start"]
    assert not torch.equal(next(iter(server.weights.values())), next(iter(server.mean.values())))
    single, _ = updated(method.model_copy(update={"predicts": "single"}), net, models)
    for name, tensor in method.model_copy(update={"predicts": "single"}).model(single, run).items():
        assert torch.equal(tensor, server.weights[name])
    assert not single.mean


def test_real_samples_at_the_server_serve(tmp_path):
    rows = np.random.default_rng(0).random((50, 4))
    np.savez(tmp_path / "x.npz", x=rows.astype(np.float32))
    net = network((5,))
    method = FedBe(inputs=str(tmp_path / "x.npz"), steps=3, drawn=64)
    method.check(run_of(net))
    assert "50" in " ".join(method.remarks(run_of(net)))


def test_refusals_and_remarks():
    net = network((5,))
    run = run_of(net)
    permuted = replace(run, preprocessing=replace(run.preprocessing, permuted=True))
    FedBe().check(permuted)
    with pytest.raises(ConfigError, match="its own"):
        FedBe(inputs="auto").check(permuted)
    with pytest.raises(ConfigError, match="gives photographs"):
        FedBeSums(inputs="leaves").check(run)
    assert "federated averaging" in FedBe(predicts="single").remarks(run)[0]
    assert FedBe().remarks(run) == []


def test_a_negative_variance_counts_as_none():
    """Noise on sums may leave one."""
    net = network(())
    method, place = FedBeSums(), at(net)
    reports = Sum()
    tensors = {n: t + 1 for n, t in net.initial.items()}
    squares = {f"square/{n}": torch.full_like(t, 0.5) for n, t in net.initial.items()}
    reports.add(0, Report({**tensors, **squares}))
    server, _ = method.update(FedBeServer(net.initial), reports, place)
    assert all(not bool(s.any()) for s in server.std.values())


def test_sums_and_single_networks_come_to_one_gaussian_in_a_run():
    data = {"name": "digits", "clients": 4, "limit": 150}
    found = []
    for name in ("fedbe", "fedbe-sums"):
        config = Config.create(data=data, rounds=2, model={"hidden": [8]}, method={"name": name})
        with Simulation(config) as simulation:
            for _ in simulation:
                pass
            found.append(simulation.server)
    for name, mean in found[0].mean.items():
        torch.testing.assert_close(found[1].mean[name], mean, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(found[1].std[name], found[0].std[name], atol=1e-5, rtol=1e-3)


@pytest.mark.filterwarnings("ignore::fedbayes.errors.FedbayesWarning")
def test_a_liars_network_is_left_out_of_the_ensemble():
    net = network((5,))
    found = norms_compared(Report({**net.initial}), FedBe.reports, run_of(net))
    assert found.keys() == net.initial.keys()
    result = run(
        data={"name": "digits", "clients": 3, "limit": 200},
        model={"hidden": [4]},
        method={"name": "fedbe", "members": 2},
        aggregation={"outliers": "leave-out"},
        rounds=1,
    )
    assert {n.partition("/")[0] for n in result.model} == {"mean", "std", "client"}


def test_gathered_networks_are_those_reported():
    net = network(())
    models = clients_of(net, 2)
    reports = ReportList({k: Report({**m}, 2.0) for k, m in enumerate(models)})
    server, _ = FedBe().update(FedBeServer(net.initial), reports, at(net))
    for k, model in enumerate(models):
        for name, tensor in model.items():
            assert torch.equal(server.clients[f"{k}/{name}"], tensor)


def test_frozen_weights_are_no_part_of_it():
    module = MLP(4, (5,), 3)
    first = next(iter(dict(module.named_parameters())))
    module.get_parameter(first).requires_grad_(False)
    net = Network(module, shape=(4,))
    method = FedBe(members=2, inputs="auto", steps=3, drawn=64)
    server, _ = updated(method, net, clients_of(net))
    assert first not in server.weights
    assert first not in server.std
