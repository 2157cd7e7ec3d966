"""Runs and places in them for tests of single methods; float64 where derivatives are taken."""

import torch

from fedbayes import Config, Simulation
from fedbayes.contracts import Federation, RoundContext, Sum
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples
from fedbayes.data.preprocessing import Preprocessing
from fedbayes.inference.settings import LocalTraining
from fedbayes.likelihoods import build_likelihood
from fedbayes.models import Network
from fedbayes.models.networks import MLP


def network(hidden=(), inputs=4, classes=3, seed=0, dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Network(MLP(inputs, hidden, classes).to(dtype), shape=(inputs,))


def run_of(net, *, clients=4, cohort=3, rounds=5, seed=7, classes=3, likelihood=None, **training):
    """A run of some classes, or under another likelihood."""
    target = Target("class", tuple(str(k) for k in range(classes)))
    shape = net.shape or (1,)
    seen = Preprocessing(shape, 1.0, (0.0,) * shape[0], (1.0,) * shape[0], target)
    return Federation(
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
    return RoundContext(run, round=round, client=client, own_network=lambda: run.network, **more)


def samples(n=12, inputs=4, classes=3, seed=0, dtype=torch.float32):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, inputs, generator=rng, dtype=dtype)
    return Samples(x, torch.randint(classes, (n,), generator=rng))


def rounds(method, run, data, count, cohorts=None):
    """The server's states after the rounds of clients with these samples, and the clients' last.

    Args:
        method: that they follow.
        run: that they are of.
        data: of each client.
        count: of rounds.
        cohorts: of each round; everybody by default.
    """
    server, states = method.init(run), [method.join(at(run)) for _ in data]
    servers = []
    for number in range(1, count + 1):
        reports = Sum()
        for client in cohorts[number - 1] if cohorts else range(len(data)):
            here = at(run, client=client, round=number)
            message = method.message(server, here)
            report, states[client], _ = method.local(message, states[client], data[client], here)
            method.accept(server, report, run)
            reports.add(client, report)
        server, _ = method.update(server, reports, at(run, round=number))
        servers.append(server)
    return servers, states


def posterior_of(method, **more):
    """What two rounds of a method with these settings come to at the server."""
    config = Config.create(
        data={"name": "digits", "clients": 3, "limit": 200, "partition": "iid"},
        model={"hidden": [6]},
        rounds=2,
        cohort=2,
        training={"optimizer": "adam", "lr": 0.01},
        method=method,
        **more,
    )
    with Simulation(config) as simulation:
        for _ in simulation:
            pass
        return simulation.server.posterior


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
