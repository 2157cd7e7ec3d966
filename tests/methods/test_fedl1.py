"""FedL1's units that no sample moves, against arithmetic."""

import pytest
import torch

from fedbayes.contracts import Stateless, Sum
from fedbayes.core.tensors import Samples
from fedbayes.methods.fedl1 import FedL1
from fedbayes.models import units
from tests.helpers.places import at, network, run_of


@pytest.mark.parametrize("by_size", [False, True])
def test_a_dead_unit_loses_the_lassos_share_of_its_norm_a_round(by_size):
    """Inputs of zero: each step takes lr λ √d or lr λ of the norm, at a plain server."""
    net, steps, lr = network([5], inputs=9, dtype=torch.double), 6, 0.05
    method = FedL1(l1=0.02, by_size=by_size, server_optimizer="sgd")
    place = at(net, lr=lr, steps=steps, batch_size=4)
    server = method.init(run_of(net))
    (group,) = method._groups(run_of(net))
    start = units.row_norms(server.weights, group)
    price = 0.02 * (3 if by_size else 1)
    data = Samples(torch.zeros(8, 9).double(), torch.zeros(8, dtype=torch.int64))
    for number in range(1, 40):
        reports = Sum()
        for client in range(2):
            report, _, _ = method.local(method.message(server, place), Stateless(), data, place)
            reports.add(client, report)
        server, _ = method.update(server, reports, place)
        left = start - number * steps * lr * price
        expected = torch.where(left > price, left, 0.0)
        torch.testing.assert_close(units.row_norms(server.weights, group), expected)
    assert bool(expected.any()) != by_size, "with and without the end of the units"
