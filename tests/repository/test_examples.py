"""The example keeps the contract, and does what its paper says."""

import pytest
import torch
from examples.fedexp import FedExP

import fedbayes
from fedbayes.contracts import Problem, Solved, Stateless, Sum, Weights
from fedbayes.testing import MethodContract
from tests.helpers.places import at, network


class TestFedExP(MethodContract):
    method = "examples.fedexp:FedExP"


def test_fedexp_in_plain_numbers():
    """Two clients of 1 and 3 samples whose changes are 2 and −1 in every weight."""
    method, net, reports = FedExP(epsilon=0.5), network(), Sum()
    place, entries = at(net), sum(t.numel() for t in net.initial.values())
    for client, (count, change) in enumerate([(1, 2.0), (3, -1.0)]):
        ended = {name: tensor + change for name, tensor in net.initial.items()}
        solved = Solved(ended, 1, 0.0, count)
        reports.add(client, method.report(solved, Problem(net.initial), Stateless(), place)[0])
    after, info = method.update(Weights(net.initial), reports, place)
    mean = 0.25 * 2.0 - 0.75
    rate = entries * (0.25 * 4 + 0.75) / (2 * (entries * mean**2 + 0.5))
    assert info["server_rate"] == pytest.approx(rate)
    for name, tensor in net.initial.items():
        torch.testing.assert_close(after.weights[name], tensor + rate * mean)


def test_where_clients_agree_it_is_fedavg():
    shared = {"rounds": 2, "data": {"clients": 1, "limit": 200}, "model": {"hidden": [8]}}
    one = fedbayes.run(method="examples.fedexp:FedExP", **shared).model
    for name, tensor in fedbayes.run(method="fedavg", **shared).model.items():
        torch.testing.assert_close(one[name], tensor)
