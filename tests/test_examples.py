"""The examples keep the contract, and do what their papers say."""

from typing import ClassVar

import pytest
import torch
from examples.fedbn import FedBN, own_names
from examples.fednova import FedNova
from examples.pfedme import PFedMe

import fedbayes
from fedbayes.contracts import Problem, Solved, Stateless, Sum, Weights
from fedbayes.errors import ConfigError
from fedbayes.testing import MethodContract
from tests.methods.places import at, network, run_of, samples


class TestFedNova(MethodContract):
    method = "examples.fednova:FedNova"
    settings: ClassVar = {
        "training": {"momentum": 0.5},
        "model": {"name": "tests.toy_models:normalized"},
    }


class TestFedBN(MethodContract):
    method = "examples.fedbn:FedBN"
    settings: ClassVar = {"model": {"name": "examples.fedbn:network"}}


class TestPFedMe(MethodContract):
    method = "examples.pfedme:PFedMe"
    parameters: ClassVar = {"inner": 2, "beta": 0.5}


def test_fednova_with_equal_steps_is_fedavg():
    shared = {
        "rounds": 3,
        "data": {"name": "digits", "clients": 4, "partition": "dirichlet"},
        "model": {"hidden": [8]},
        "training": {"steps": 7, "momentum": 0.9},
    }
    one = fedbayes.run(method={"name": "examples.fednova:FedNova"}, **shared).model
    two = fedbayes.run(method={"name": "fedavg"}, **shared).model
    for name, tensor in two.items():
        torch.testing.assert_close(one[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova_counts_what_a_gradient_moves(momentum):
    """With a gradient of one everywhere, a change is the learning rate times its length."""
    method = FedNova()
    net, w, lr = network(), torch.zeros(1), 0.1
    buffer = torch.zeros(1)
    for steps in range(1, 6):
        buffer = momentum * buffer + 1
        w = w - lr * buffer
        place = at(net, momentum=momentum, lr=lr)
        problem = Problem(net.initial)
        ended = {name: tensor + w for name, tensor in net.initial.items()}
        report, _, _ = method.report(Solved(ended, steps, 0.0, 5), problem, Stateless(), place)
        for name in net.initial:
            own = report.tensors[name]
            torch.testing.assert_close(own, torch.full_like(own, lr), rtol=1e-4, atol=1e-5)
        found = method.personal_model(net.initial, report, Stateless(), place.run)
        for name, tensor in ended.items():
            torch.testing.assert_close(found[name], tensor)


def test_fednova_in_plain_numbers():
    """Two clients of 1 and 3 samples that went 2 steps of 1 and 6 steps of −1."""
    method, net, reports = FedNova(), network(), Sum()
    place = at(net)
    for client, (count, steps, change) in enumerate([(1, 2, 2.0), (3, 6, -6.0)]):
        ended = {name: tensor - change for name, tensor in net.initial.items()}
        solved = Solved(ended, steps, 0.0, count)
        reports.add(client, method.report(solved, Problem(net.initial), Stateless(), place)[0])
    after, info = method.update(Weights(net.initial), reports, place)
    assert info["effective_steps"] == pytest.approx(0.25 * 2 + 0.75 * 6)
    for name, tensor in net.initial.items():
        torch.testing.assert_close(after.weights[name], tensor - 5.0 * (0.25 - 0.75))


def test_fedbn_sends_no_normalization(tmp_path):
    settings = {"rounds": 2, "model": {"name": "examples.fedbn:network"}}
    with fedbayes.Simulation(
        fedbayes.Config.create(method={"name": "examples.fedbn:FedBN"}, **settings), tmp_path
    ) as simulation:
        names = own_names(simulation.run)
        assert {n.rpartition(".")[2] for n in names} == {
            "weight",
            "bias",
            "running_mean",
            "running_var",
            "num_batches_tracked",
        }
        step = list(simulation)[-1]
        assert step.server.weights.keys() == simulation.network.initial.keys() - set(names)
    with pytest.raises(ConfigError, match="has none"):
        FedBN().check(run_of(network([4])))


def test_pfedme_in_plain_numbers():
    """θ by gradient steps of its pulled loss, and every second the copy follows."""
    net, data = network(), samples(5)
    method = PFedMe(strength=2.0, rate=0.3, inner=2)
    place = at(net, lr=0.1, steps=4, batch_size=5)
    report, state, _ = method.local(net.initial, method.join(place), data, place)
    theta = [net.initial[n].clone() for n in ("1.weight", "1.bias")]
    copy = [t.clone() for t in theta]
    for step in range(1, 5):
        leaves = [t.clone().requires_grad_() for t in theta]
        loss = torch.nn.functional.cross_entropy(data.x @ leaves[0].T + leaves[1], data.y)
        slopes = torch.autograd.grad(loss, leaves)
        theta = [t - 0.1 * (g + 2.0 * (t - w)) for t, g, w in zip(theta, slopes, copy, strict=True)]
        if step % 2 == 0:
            copy = [w - 0.3 * 2.0 * (w - t) for w, t in zip(copy, theta, strict=True)]
    for index, name in enumerate(("1.weight", "1.bias")):
        torch.testing.assert_close(state.weights[name], theta[index])
        torch.testing.assert_close(report.tensors[name], copy[index])
