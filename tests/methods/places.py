"""A client's place for tests of single methods, in float64 where derivatives are taken."""

import torch
from fedbayes.inference.local import LocalTraining

from fedbayes.contracts import Federation, Site
from fedbayes.models import Network
from fedbayes.models.networks import MLP
from fedbayes.tensors import Samples

FEDERATION = Federation(clients=4, cohort=3, rounds=5, classes=3, seed=7)


def network(hidden=(), inputs=4, classes=3, seed=0, dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Network(MLP(inputs, hidden, classes).to(dtype))


def site(net, client=0, round=1, **training):
    return Site(
        client=client,
        round=round,
        rounds=5,
        seed=7,
        network=net,
        training=LocalTraining(**training),
        own_network=lambda: net,
    )


def samples(n=12, inputs=4, classes=3, seed=0, dtype=torch.float32):
    stream = torch.Generator().manual_seed(seed)
    x = torch.randn(n, inputs, generator=stream, dtype=dtype)
    return Samples(x, torch.randint(classes, (n,), generator=stream))


def difference(function, tensor, step=1e-6):
    """The gradient of a scalar function by central differences."""
    gradient = torch.zeros_like(tensor)
    for index in range(tensor.numel()):
        moved = []
        for sign in (1, -1):
            other = tensor.clone()
            other.view(-1)[index] += sign * step
            moved.append(float(function(other)))
        gradient.view(-1)[index] = (moved[0] - moved[1]) / (2 * step)
    return gradient
