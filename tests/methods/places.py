"""Runs and places in them for tests of single methods; float64 where derivatives are taken."""

import torch

from fedbayes.contracts import At, Run
from fedbayes.data.preprocessing import Preprocessing
from fedbayes.inference.settings import LocalTraining
from fedbayes.likelihoods import build_likelihood
from fedbayes.models import Network
from fedbayes.models.networks import MLP
from fedbayes.targets import Target
from fedbayes.tensors import Samples


def network(hidden=(), inputs=4, classes=3, seed=0, dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Network(MLP(inputs, hidden, classes).to(dtype), shape=(inputs,))


def run_of(net, *, clients=4, cohort=3, rounds=5, seed=7, classes=3, likelihood=None, **training):
    """A run of some classes, or under another likelihood."""
    target = Target("class", tuple(str(k) for k in range(classes)))
    shape = net.shape or (1,)
    seen = Preprocessing(shape, 1.0, (0.0,) * shape[0], (1.0,) * shape[0], target)
    return Run(
        network=net,
        preprocessing=seen,
        likelihood=likelihood or build_likelihood("auto", target),
        training=LocalTraining(**training),
        clients=clients,
        cohort=cohort,
        rounds=rounds,
        seed=seed,
    )


def at(run, client=0, round=1, **more):
    """A client's place in a round: of a run, or of one over this network with these settings."""
    if isinstance(run, Network):
        run, more = run_of(run, **more), {}
    return At(run, round=round, client=client, own_network=lambda: run.network, **more)


def samples(n=12, inputs=4, classes=3, seed=0, dtype=torch.float32):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, inputs, generator=rng, dtype=dtype)
    return Samples(x, torch.randint(classes, (n,), generator=rng))


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
