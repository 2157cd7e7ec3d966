"""Federated dropout and FedL1 against plain arrays."""

import pytest
import torch

import fedbayes
from fedbayes.contracts import ChangeCoordinates, Report, Stateless, Sum, Total
from fedbayes.core.messages import Masked, dense, encode
from fedbayes.methods.feddrop import FedDrop
from fedbayes.methods.fedl1 import FedL1
from fedbayes.models import LeNet5, Network, ResNet20, units
from tests.helpers.places import at, difference, network, run_of, samples


def test_every_client_drops_a_fixed_share_of_its_own():
    net = Network(LeNet5(3, 32, 32, 10), shape=(3, 32, 32))
    method = FedDrop(conv_rate=0.2, dense_rate=0.5)
    server = method.init(run_of(net))
    messages = [method.message(server, at(net, client)) for client in range(2)]
    for message in messages:
        alive = {n: int(message[n].masks[(0,)].sum()) for n in ("0.weight", "3.weight", "7.weight")}
        assert alive == {"0.weight": 16, "3.weight": 40, "7.weight": 250}
        assert message["7.weight"].values.numel() == 250 * 40 * 25
        assert message["9.weight"].values.numel() == 10 * 250
        assert isinstance(message["9.bias"], torch.Tensor), "outputs are never dropped"
    one, two = (message["7.weight"].masks[(0,)] for message in messages)
    assert not torch.equal(one, two)
    again = method.message(server, at(net))["7.weight"].masks[(0,)]
    assert torch.equal(one, again)
    assert not torch.equal(one, method.message(server, at(net, round=2))["7.weight"].masks[(0,)])


def test_the_small_network_answers_like_one_without_the_units():
    net = network([8, 6])
    method = FedDrop()
    message = method.message(method.init(run_of(net)), at(net))
    x = torch.randn(5, 4)
    torch.testing.assert_close(net(units.slice(message), x), net(dense(message), x))
    report, _, _ = method.local(message, Stateless(), samples(), at(net))
    small = units.slice(report.tensors)
    assert small["1.weight"].shape == (4, 4)
    personal = method.personal_model(message, report, Stateless(), run_of(net))
    predicted = method.draws(personal, run_of(net))(x)
    torch.testing.assert_close(predicted, net(dense(report.tensors), x)[None])


def test_a_weight_moves_to_the_mean_of_those_who_had_it():
    net = network([6])
    method = FedDrop(dense_rate=0.7)
    server = method.init(run_of(net))
    total, found = Sum(), []
    for client in range(3):
        message = method.message(server, at(net, client))
        report, _, _ = method.local(message, Stateless(), samples(seed=client), at(net, client))
        total.add(client, report)
        found.append(report.tensors)
    following, _ = method.update(server, total, at(net))
    for name, w in server.weights.items():
        expected = w.clone()
        for index in range(w.numel()):
            had = []
            for item in (tensors[name] for tensors in found):
                sparse = isinstance(item, Masked)
                if not sparse or bool(item.mask().view(-1)[index]):
                    whole = item.dense() if sparse else item
                    had.append(float(whole.view(-1)[index]))
            if had:
                expected.view(-1)[index] = sum(had) / len(had)
        torch.testing.assert_close(following.weights[name], expected)


def test_under_noise_a_weight_moves_as_far_as_with_those_who_had_it():
    """Nobody is told who had it, and a sum over all is divided by how many it is likely to be."""
    net, clients = network([8, 6]), 2000
    method = FedDrop(dense_rate=0.5)
    server, run = method.init(run_of(net)), run_of(net)
    sums = {n: torch.zeros(w.shape, dtype=torch.float64) for n, w in server.weights.items()}
    for client in range(clients):
        for name, item in method.message(server, at(net, client)).items():
            sums[name] += item.mask() if isinstance(item, Masked) else 1.0
    assert min(float(t.mean()) for t in sums.values()) < 0.3 * clients
    dtypes = {name: w.dtype for name, w in server.weights.items()}
    total = Total({"weights": sums}, {"weights": {}}, dtypes, float(clients), clients)
    following, _ = method.update(
        server, ChangeCoordinates.of(method, server, run).resummed(total), at(net)
    )
    for name, w in server.weights.items():
        moved = following.weights[name] - w
        assert float(moved.mean()) == pytest.approx(1, abs=0.02)
        assert float((moved - 1).abs().max()) < 0.2


def test_bytes_of_dropped_networks():
    """ResNet-20 at rate 0.1: inner filters alone are dropped, and about 0.9 is sent, as in the
    paper's CIFAR-100 table (112 of 124 GB)."""
    net = Network(ResNet20(3, 100), shape=(3, 32, 32))
    method = FedDrop(conv_rate=0.1)
    message = method.message(method.init(run_of(net)), at(net))
    whole = len(encode(dict(net.initial)))
    assert len(encode(message)) / whole == pytest.approx(112 / 124, abs=0.03)


def test_group_lasso_and_its_gradient():
    """Eq. 24, and a zero group with a gradient that is finite."""
    net, data = network(dtype=torch.double), samples(dtype=torch.double)
    method = FedL1(l1=0.4, output_groups=True)
    loss = method.loss(run_of(net))

    def objective(parameters):
        return loss(parameters, data, {}, {})

    start = {n: t.clone() for n, t in net.initial.items()}
    alone = torch.nn.functional.cross_entropy(net(start, data.x), data.y)
    expected = float(alone) + 0.4 * sum(float(row.norm()) for row in start["1.weight"])
    assert float(objective(start)) == pytest.approx(expected)
    leaf = start["1.weight"].clone().requires_grad_()

    def value(weight):
        return objective({**start, "1.weight": weight})

    value(leaf).backward()
    torch.testing.assert_close(
        leaf.grad, difference(value, start["1.weight"]), rtol=1e-5, atol=1e-7
    )
    zero = torch.zeros_like(leaf, requires_grad=True)
    value(zero).backward()
    assert torch.isfinite(zero.grad).all()


def test_groups_below_the_threshold_are_not_sent():
    net = network([5])
    norms = net.initial["1.weight"].norm(dim=1)
    level = float(norms.sort().values[2])  # three groups are at most this
    method = FedL1(l1=level, output_groups=False)
    server = method.init(run_of(net))
    message = method.message(server, at(net))
    kept = norms > level
    assert int(kept.sum()) == 2
    assert torch.equal(message["1.weight"].masks[(0,)], kept)
    expected = net.initial["1.weight"] * kept[:, None]
    assert torch.equal(dense(message)["1.weight"], expected)
    assert torch.equal(server.weights["1.bias"], net.initial["1.bias"] * kept)
    assert isinstance(message["3.weight"], torch.Tensor)


def test_the_server_steps_along_the_difference_of_sparse_models():
    net = network([5])
    method = FedL1(l1=0.1, server_optimizer="sgd", server_lr=0.5)
    server = method.init(run_of(net))
    total, plain = Sum(), []
    for client in range(3):
        weights = {n: w * (0.3 + client) for n, w in net.initial.items()}
        total.add(client, Report(method._sparse(weights, method._groups(run_of(net)))))
        plain.append(dense(method._sparse(weights, method._groups(run_of(net)))))
    following, _ = method.update(server, total, at(net))
    for layer in net.groups:
        w = server.weights[layer.weight]
        stepped = w + 0.5 * (torch.stack([p[layer.weight] for p in plain]).mean(0) - w)
        stepped[stepped.flatten(1).norm(dim=1) <= 0.1] = 0
        torch.testing.assert_close(following.weights[layer.weight], stepped)


def test_fedl1_gets_sparse(tmp_path):
    run = fedbayes.run(
        method={"name": "fedl1", "l1": 0.02, "server_optimizer": "sgd"},
        rounds=15,
        data={"name": "digits", "clients": 4, "partition": "iid"},
        model={"hidden": [40]},
        training={"lr": 0.1, "epochs": 5},
        folder=tmp_path,
    )
    alive = [line["update"]["alive_1"] for line in run.metrics]
    assert alive[-1] < 38
    assert run.summary["sparsity"] > 0.05
    assert run.metrics[-1]["bytes_down"] < 0.97 * run.metrics[0]["bytes_down"]
    assert run.summary["global_accuracy"] > 0.8
