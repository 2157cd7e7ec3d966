"""Terms that a first step, a small rate or a lucky order would hide, seen in whole runs."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from fedbayes import Config, Simulation
from fedbayes.contracts import About, Problem, Report, Sum
from fedbayes.core.messages import Masked, decode, dense
from fedbayes.core.tensors import Samples, unpack
from fedbayes.inference.settings import LocalTraining
from fedbayes.inference.solve import solve
from fedbayes.methods.fedsparse import FedSparse
from fedbayes.methods.virtual import VirtualClient

DATA = {"name": "digits", "clients": 3, "partition": "iid", "limit": 150}


def servers(folder, **settings):
    """The server's state after every round, and the simulation's clients' states."""
    config = Config.published(data=DATA, model={"hidden": [6, 5]}, **settings)
    with Simulation(config, folder) as simulation:
        for step in simulation:
            assert not step.metrics.get("refused")
            yield step.server, simulation.states


@dataclass
class Updates:
    """What a method's server had before each update, and what it heard."""

    servers: list
    opened: list


SEEN = Updates([], [])


class Watched(FedSparse):
    """FedSparse whose updates are written down."""

    name = "watched"
    about = About("for a test")

    def update(self, server, *rest):
        (reports,) = (item for item in rest if isinstance(item, Sum))
        SEEN.servers.append(server)
        SEEN.opened.append(
            {layer: reports.share(f"{layer}.weight").amax(dim=1) for layer in server.thresholds}
        )
        return super().update(server, *rest)


def test_fedsparse_thresholds_go_down_the_slope_of_their_cross_entropy(tmp_path):
    """Over rounds with steps so long that sigmoid(v), by which the slope changes, matters.

    Adamax by hand; the slope is autograd's, of the mean of −log p(z_s given θ(v)).
    """
    SEEN.servers.clear(), SEEN.opened.clear()
    rate, temperature, rounds = 0.7, 0.1, 5
    method = {
        "name": "tests.methods.test_small_terms:Watched",
        "server_gate_lr": rate,
        "temperature": temperature,
        "prune": False,
        "start": 0.6,
    }
    found = [s.thresholds for s, _ in servers(tmp_path, rounds=rounds, method=method)]
    for layer in found[0]:
        m = scale = 0.0
        for number in range(rounds):
            before = SEEN.servers[number]
            v = before.thresholds[layer].double().clone().requires_grad_()
            norms = before.weights[f"{layer}.weight"].double().norm(dim=1)
            theta = torch.sigmoid((norms - torch.log1p(v.exp())) / temperature)
            z = SEEN.opened[number][layer]
            loss = -(z * theta.log() + (1 - z) * (1 - theta).log()).sum()
            (slope,) = torch.autograd.grad(loss, v)
            m = 0.9 * m + 0.1 * slope
            scale = torch.maximum(torch.as_tensor(0.999 * scale), slope.abs() + 1e-8)
            wanted = v.detach() - rate / (1 - 0.9 ** (number + 1)) * m / scale
            torch.testing.assert_close(found[number][layer].double(), wanted, rtol=1e-3, atol=1e-3)


class Steered(FedSparse):
    """FedSparse that hears of one unit moving through zero, and of no other moving at all."""

    name = "steered"
    about = About("for a test")

    def update(self, server, *rest):
        weights, thresholds = dict(server.weights), dict(server.thresholds)
        layer = next(iter(thresholds))
        if not SEEN.servers:  # every weight 0.35, and a threshold for a norm as of weights of 0.15
            for name in (f"{layer}.weight", f"{layer}.bias"):
                weights[name] = weights[name].clone()
                weights[name][0] = 0.35
            threshold = torch.tensor(0.15 * weights[f"{layer}.weight"].shape[1] ** 0.5)
            thresholds[layer] = thresholds[layer].clone()
            thresholds[layer][0] = threshold.expm1().log()
        heard = {name: weight.clone() for name, weight in weights.items()}
        if not SEEN.servers:
            heard[f"{layer}.weight"][0] -= 1
            heard[f"{layer}.bias"][0] -= 1
        reports = Sum()
        reports.add(0, Report(heard))
        server = replace(server, weights=weights, thresholds=thresholds)
        SEEN.servers.append(server)
        return super().update(server, *(reports if isinstance(r, Sum) else r for r in rest))


def test_a_unit_that_fedsparse_has_pruned_is_not_revived_by_adams_momentum(tmp_path):
    """The first step, of 0.3, takes its weights from 0.35 to 0.05: it is pruned. The second is of
    0.67 · 0.3 by momentum alone; a unit of weights −0.2 would be above the threshold.
    """
    SEEN.servers.clear()
    method = {
        "name": "tests.methods.test_small_terms:Steered",
        "server_optimizer": "adam",
        "server_lr": 0.3,
    }
    for server, _ in servers(tmp_path, rounds=4, method=method):
        layer, following = list(server.thresholds)
        dead = server.weights[f"{layer}.weight"].norm(dim=1) == 0
        assert dead.tolist() == [True] + [False] * 5
        assert server.weights[f"{layer}.bias"][0] == 0
        assert (server.weights[f"{following}.weight"][:, 0] == 0).all()
    assert len(SEEN.servers) == 4


def test_the_last_batch_of_samples_held_out_counts_by_its_size():
    """From 0 towards 1, with four samples at 0.3 and a fifth, in a batch alone, at 0.9.

    Their mean loss is least at 0.42; were both batches equal, it would be at 0.6.
    """

    def loss(parameters, batch, given, noise):
        return (parameters["w"] - batch.x).square().mean()

    def samples(*values):
        return Samples(torch.tensor(values)[:, None], torch.zeros(len(values), dtype=torch.int64))

    settings = LocalTraining(epochs=100, batch_size=4, patience=5, validation=0.4)
    solved = solve(
        Problem({"w": torch.zeros(1)}),
        loss,
        samples(1.0, 1.0, 1.0, 1.0),
        settings,
        lr=0.005,
        rng=lambda purpose: torch.Generator().manual_seed(0),
        held_out=samples(0.3, 0.3, 0.3, 0.3, 0.9),
    )
    path = 1 - 0.99 ** np.arange(1, 101)
    best = int(np.abs(path - 0.42).argmin())
    assert solved.steps == best + 1
    assert float(solved.parameters["w"]) == pytest.approx(path[best], abs=1e-5)


def test_a_newcomer_of_virtual_starts_with_the_precision_asked_or_its_share(tmp_path):
    """At a rate of nothing, what is added to the posterior is where the client starts.

    The first brings it to 1/start_std²; each later one, its prior factor off, adds a K-th of
    what there is.
    """
    states = servers(
        tmp_path,
        rounds=3,
        cohort=1,
        sampling="cyclic",
        method={"name": "virtual", "samples": 2, "start_std": 0.05, "prior_std": 0.8},
        training={"lr": 1e-30, "epochs": 1},
    )
    share = 0.8**-2 / 3
    wanted = 0.05**-2
    for server, _ in states:
        for precision in server.posterior.precision.values():
            torch.testing.assert_close(
                precision, torch.full_like(precision, wanted), rtol=1e-5, atol=0
            )
        wanted = wanted - share + wanted / 3


def test_a_factor_of_virtual_that_falls_to_nothing_keeps_a_positive_precision(tmp_path):
    """A third is less than its float32: sent so, its fall would leave less than nothing."""
    fall = {"kl_weight": 1e8, "start_std": 0.9, "samples": 2, "lateral": False}
    for server, states in servers(
        tmp_path,
        rounds=1,
        cohort=1,
        method={"name": "virtual", **fall},
        training={"lr": 1e-3, "steps": 1, "batch_size": 50},
        aggregation={"max_change": 0},
    ):
        factors = [unpack(VirtualClient, dense(decode(state))) for state in states.values()]
        lowest = min(float(p.min()) for f in factors for p in f.factor.precision.values())
        assert 0 < lowest < 1e-6
        assert all(bool((p > 0).all()) for p in server.posterior.precision.values())


def test_what_a_client_of_virtual_knows_goes_back_to_the_prior_without_data(tmp_path):
    """Data count for nothing beside so heavy a KL term: means go to 0, stds to 0.8."""
    method = {"name": "virtual", "samples": 1, "kl_weight": 1e4, "prior_std": 0.8}
    training = {"optimizer": "adam", "lr": 0.05, "steps": 120, "batch_size": 10}
    (_, states), *_ = servers(tmp_path, rounds=1, cohort=1, method=method, training=training)
    (client,) = (unpack(VirtualClient, dense(decode(state))) for state in states.values())
    for name, mean in client.mean.items():
        torch.testing.assert_close(mean, torch.zeros_like(mean), atol=0.05, rtol=0)
        std = client.log_std[name].exp()
        torch.testing.assert_close(std, torch.full_like(std, 0.8), rtol=0.05, atol=0)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_shares_do_not_depend_on_whether_sparse_reports_come_first(order):
    """Two reports that hold some rows and one that holds all, with weights of their own."""
    whole = torch.ones(3, 2)
    kept = [[True, False, False], [True, True, False], None]
    weights = [2.0, 3.0, 5.0]
    total = Sum()
    for client in order:
        rows = kept[client]
        item = whole if rows is None else Masked.keep(whole, {(0,): torch.tensor(rows)})
        total.add(client, Report({"w": item}, weights[client]))
    wanted = torch.tensor([[1.0] * 2, [0.8] * 2, [0.5] * 2], dtype=torch.float64)
    torch.testing.assert_close(total.share("w"), wanted)
    torch.testing.assert_close(total.mean()["w"], wanted.float())
