"""Gates of single weights against the printed equations, gates of units, and what is sent."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedbayes
from fedbayes import Simulation
from fedbayes.contracts import Report, RoundContext, Stateless, Sum
from fedbayes.core.messages import Masked, decode, dense, encode, payload
from fedbayes.errors import ConfigError, FedbayesWarning
from fedbayes.methods.fedsparse import FedSparse, FedSparseServer, ScaffoldFedSparse
from fedbayes.models import Network
from fedbayes.models.networks import MLP
from fedbayes.models.units import Entries, masks, row_norms, zero
from tests.helpers.places import at, network, run_of, samples
from tests.helpers.toy_models import rolled


def spread(net, method, seed=1):
    """A server whose gates have all kinds of probabilities."""
    server = method.init(run_of(net))
    rng = torch.Generator().manual_seed(seed)
    thresholds = {}
    for layer in method._gated(run_of(net)):
        norms = row_norms(server.weights, layer)
        level = 2 * torch.randn(layer.count, generator=rng, dtype=norms.dtype)
        thresholds[layer.layer] = method.gate_thresholds(norms, level)
    return FedSparseServer(**{**vars(server), "thresholds": thresholds})


def softplus(v):
    return torch.log1p(torch.exp(v))


@pytest.mark.parametrize("scale", ["paper", "logits"])
def test_the_local_objective_is_the_printed_equation_weight_by_weight(scale):
    """Value and all gradients of Eq. 41, written out in scalars and left to autograd."""
    net = network([3], inputs=4, classes=2, dtype=torch.double)
    heat, l0, beta, drift, warm = 0.05, 0.01, 0.02, 0.3, 2 / 3
    method = FedSparse(
        gates="weights",
        output_gates=True,
        l0=l0,
        cross_entropy=beta,
        drift=drift,
        scale=scale,
        temperature=heat,
    )
    server, place = spread(net, method), at(net, classes=2)
    batch = samples(classes=2, dtype=torch.double)
    problem = method.problem(method.message(server, place), Stateless(), batch, place)
    noise = problem.noise.draw(place.rng(problem.noise.purpose), batch)
    rng = torch.Generator().manual_seed(3)
    moved = {
        n: (t + 0.02 * torch.randn(t.shape, generator=rng).double()).requires_grad_()
        for n, t in problem.start.items()
    }
    loss = method.loss(place.run)(moved, batch, problem.given, noise)
    found = torch.autograd.grad(loss, list(moved.values()))

    def logit(w, v):
        tau = softplus(v) if scale == "paper" else heat * v
        return (w.abs().detach() - tau) / heat

    gated, penalty = dict(moved), 0.0
    for layer in ("1", "3"):
        name = f"{layer}.weight"
        rows, columns = moved[name].shape
        z = []
        for i in range(rows):
            for j in range(columns):
                place_ = i * columns + j
                w, w_old = moved[name][i, j], problem.start[name][i, j]
                v, v_old = (t[f"threshold/{layer}"][place_] for t in (moved, problem.start))
                u = noise[layer].double()[place_]
                soft = torch.sigmoid((torch.log(u / (1 - u)) + logit(w, v)) / warm)
                z.append((soft * 1.2 - 0.1).clamp(0, 1))
                opened = torch.sigmoid(logit(w, v) - warm * math.log(0.1 / 1.1))
                theta = torch.sigmoid(logit(w_old, v_old)).detach()
                penalty += l0 * opened + drift / 2 * opened * (w - w_old) ** 2
                penalty -= beta * (opened * torch.log(theta) + (1 - opened) * torch.log1p(-theta))
        gated[name] = moved[name] * torch.stack(z).reshape(rows, columns)
    hidden = torch.relu(batch.x @ gated["1.weight"].T + moved["1.bias"])
    outputs = hidden @ gated["3.weight"].T + moved["3.bias"]
    expected = nn.functional.cross_entropy(outputs, batch.y) + penalty
    wanted = torch.autograd.grad(expected, list(moved.values()))
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-9)
    for name, one, other in zip(moved, found, wanted, strict=True):
        assert other.abs().sum() > 0, name
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("method", [FedSparse, ScaffoldFedSparse])
@pytest.mark.parametrize("scale", ["paper", "logits"])
@pytest.mark.parametrize("rule", ["gradient", "average"])
def test_units_of_one_weight_have_the_gates_of_their_weights(method, scale, rule):
    """One input and no biases: every number of five rounds is the same."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Network(MLP(1, (), 8, bias=False), shape=(1,))
    heat = {"temperature": 0.05, "l0": 0.3, "gate_lr": 0.2, "server_gate_lr": 0.3, "start": 0.5}
    histories = []
    for gates in ("units", "weights"):
        own = method(
            gates=gates, output_gates=True, scale=scale, update_rule=rule, prune_below=0.3, **heat
        )
        run = run_of(net, classes=8)
        server, states, history = own.init(run), {}, []
        for number in range(1, 6):
            total = Sum()
            for client in range(3):
                place = at(run, client, number)
                state = states.get(client) or own.join(place)
                data = samples(inputs=1, classes=8, seed=client)
                message = decode(encode(own.message(server, place)))
                report, states[client], _ = own.local(message, state, data, place)
                total.add(client, report)
                history.append(dense(report.tensors))
            server, info = own.update(server, total, at(run, round=number))
            history.append({**server.weights, **server.thresholds})
        histories.append((history, info["alive_1"]))
    assert histories[0][1] == histories[1][1]
    if rule == "gradient":
        assert 0 < histories[0][1] < 8, "the test needs some pruning to be about something"
    for one, other in zip(histories[0][0], histories[1][0], strict=True):
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=0)


def test_the_update_is_that_of_the_equations_weight_by_weight():
    """Eq. 21 and 22, and Algorithm 1 with plain descent: w + mean z (ŵ_s − w)."""
    net = network([5])
    for rule in ("average", "gradient"):
        method = FedSparse(
            gates="weights",
            update_rule=rule,
            prune=False,
            server_optimizer="sgd",
            temperature=0.05,
        )
        server, rng = spread(net, method), torch.Generator().manual_seed(0)
        total, ws, zs = Sum(), [], []
        for client in range(4):
            noise = {n: torch.randn(t.shape, generator=rng) for n, t in server.weights.items()}
            weights = {n: t + 0.1 * noise[n] for n, t in server.weights.items()}
            z = torch.rand(5, 4, generator=rng) < 0.6
            report = {**weights, "1.weight": Masked.keep(weights["1.weight"], {(0, 1): z})}
            total.add(client, Report(report))
            ws.append(weights["1.weight"])
            zs.append(z.float())
        following, info = method.update(server, total, at(net))
        w, opened = server.weights["1.weight"], torch.stack(zs)
        spoken = (opened * torch.stack(ws)).sum(0)
        if rule == "average":
            count = opened.sum(0)
            wanted = torch.where(count > 0, spoken / count.clamp_min(1), w)
            (layer,) = method._gated(run_of(net))
            theta = torch.sigmoid(method._logits(following.weights, following.thresholds, layer))
            # A positive threshold lets no gate close more than |w|/T does, nor open it further.
            level = torch.logit(opened.mean(0), eps=1e-6).clamp_max(wanted.abs() / 0.05)
            torch.testing.assert_close(theta, torch.sigmoid(level).flatten(), atol=1e-4, rtol=1e-4)
        else:
            wanted = w + (spoken - opened.sum(0) * w) / 4
        torch.testing.assert_close(following.weights["1.weight"], wanted)
        assert info == {"alive_1": 20.0}


REGRESSION = {
    "data": {"name": "digits", "clients": 4, "partition": "iid", "limit": 400},
    "model": {"hidden": []},
}
PRUNING = {
    "gates": "weights",
    "output_gates": True,
    "scale": "logits",
    "l0": 3.0,
    "server_gate_lr": 0.6,
}


@pytest.mark.parametrize("name", ["fedsparse", "scaffold-fedsparse"])
def test_a_pruned_weight_is_zero_for_ever_and_not_sent(name, tmp_path):
    """Neither in the message, nor in a report; bytes are the values', thresholds' and bits'."""
    config = fedbayes.Config.published(rounds=8, method={"name": name, **PRUNING}, **REGRESSION)
    beside = 2 if name == "scaffold-fedsparse" else 1  # the weights, and their control variate
    gone, sent = torch.zeros(10, 64, dtype=torch.bool), 0
    with Simulation(config, tmp_path) as simulation:
        for step in simulation:
            assert step.metrics["bytes_down"] == 4 * sent or not sent
            now = step.server.weights["1.weight"] == 0
            assert now[gone].all(), "momentum revives nothing"
            gone, place = now, RoundContext(simulation.run, step.number + 1)
            message = simulation.method.message(step.server, place)
            alive = int((~gone).sum())
            assert step.metrics["update"]["alive_1"] == alive
            assert message["1.weight"].values.numel() == alive
            assert message["threshold/1"].values.numel() == alive
            # alive floats in each part, a bit for each weight, the shape of each, ten biases each
            count = 4 * (beside + 1) * alive + (beside + 1) * 80 + (2 * beside + 1) * 4
            assert payload(message) == count + 40 * beside
            sent = len(encode(message))
            assert sent < payload(message) + 500
        client = simulation.method.join(place)
        data = simulation.data.train(0)
        report, _, _ = simulation.method.local(message, client, data, place)
    assert 64 < alive < 576, "the test needs some pruning to be about something"
    assert not report.tensors["1.weight"].mask()[gone].any()
    assert report.tensors["1.weight"].mask().any()
    assert simulation.summary()["sparsity"] == pytest.approx((640 - alive) / 650)


@given(
    shape=st.lists(st.integers(1, 4), min_size=2, max_size=4).map(tuple),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=40)
def test_masks_of_entries_are_those_of_the_weight(shape, seed):
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=rng)
    group = Entries("a.weight", shape, output=False)
    keep = torch.rand(group.count, generator=rng) < 0.5
    found = masks([group], {"a": keep})
    assert found.keys() == {"a.weight"}
    plain = torch.where(keep.reshape(shape), weight, 0.0)
    assert torch.equal(zero({"a.weight": weight}, found)["a.weight"], plain)
    assert torch.equal(Masked.keep(weight, found["a.weight"]).dense(), plain)
    assert torch.equal(row_norms({"a.weight": weight}, group), weight.abs().flatten())


def test_weights_of_networks_without_units_are_gated():
    """A recurrent network has no units that could be traced; biases have no gates."""
    settings = {
        "rounds": 1,
        "data": {"name": "digits", "clients": 2, "limit": 60, "partition": "iid"},
        "model": {"name": "tests.helpers.toy_models:rolled"},
    }
    run = fedbayes.run(method={"name": "fedsparse", **PRUNING}, **settings)
    gated = {n.removeprefix("alive_") for n in run.metrics[-1]["update"] if n.startswith("alive_")}
    with torch.random.fork_rng():
        module = rolled((64,), 10)
    assert {n: p.ndim for n, p in module.named_parameters()} == {
        "body.weight": 2,
        "body.bias": 1,
        "head.weight": 2,
        "head.bias": 1,
    }
    assert gated == {"body", "head"}


def test_what_gates_cannot_do_is_said():
    with pytest.warns(FedbayesWarning, match=r"only a last layer\. Set method\.output_gates"):
        fedbayes.run(method={"name": "fedsparse", "gates": "weights"}, rounds=1, **REGRESSION)
    method = {"name": "fedsparse", "gates": "weights", "output_gates": True}
    with pytest.warns(FedbayesWarning, match=r"of 640 gates start below 0\.99.*'logits'"):
        fedbayes.run(method=method, rounds=1, **REGRESSION)
    zeros = {"hidden": [], "init": "normal", "init_std": 0.0}
    with pytest.raises(ConfigError, match=r"all of 1\.weight is zero at the start"):
        fedbayes.run(method=method, rounds=1, **{**REGRESSION, "model": zeros})
