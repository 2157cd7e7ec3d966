"""Clients that are solved at once end where each ends alone."""

import warnings
from functools import partial
from itertools import pairwise
from types import MappingProxyType

import pytest
import torch
from torch import nn

from fedbayes import Config, Simulation
from fedbayes.core.tensors import Samples, pack
from fedbayes.errors import FedbayesWarning, ModelError
from fedbayes.federation import client_runtime
from fedbayes.inference.problem import Noise, Problem
from fedbayes.inference.settings import LocalTraining
from fedbayes.inference.solve import solve
from fedbayes.inference.stacked import solve_stacked, stackable
from fedbayes.testing import assert_identical
from tests.helpers.cases import cases

COUNTS = [3, 20, 20, 20, 20, 41]


def quadratic(parameters, batch, given, noise):
    """A regression towards a centre, with noise at the weights."""
    w = parameters["w"] + 0.1 * noise["w"]
    error = batch.x @ w - batch.y
    return error.square().mean() + (parameters["w"] - given["centre"]).square().sum()


def clients():
    """Problems, samples and generators of clients with different numbers of samples."""
    draw = torch.Generator().manual_seed(1)
    noise = Noise("noise", lambda rng, batch: {"w": torch.randn(5, generator=rng)})
    problems, samples, rngs = [], [], []
    for client, count in enumerate(COUNTS):
        start, centre, x = (torch.randn(n, generator=draw) for n in ((5,), (5,), (count, 5)))
        problems.append(Problem({"w": start}, given={"centre": centre}, noise=noise))
        samples.append(Samples(x, x.sum(1)))

        def rng(purpose, client=client):
            return torch.Generator().manual_seed(100 * client + len(purpose))

        rngs.append(rng)
    return problems, samples, rngs


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "sgd"},
        {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1},
        {"optimizer": "adam", "epochs": 3},
        {"optimizer": "amsgrad", "weight_decay": 0.1},
        {"optimizer": "adamax", "last_batch": "drop"},
        {"optimizer": "sgd", "steps": 7},
    ],
)
def test_every_client_ends_where_it_ends_alone(settings):
    problems, samples, rngs = clients()
    training = LocalTraining(batch_size=8, **settings)
    assert stackable(problems, COUNTS, training)
    together = solve_stacked(problems, quadratic, samples, training, lr=0.05, rngs=rngs)
    alone = [
        solve(problem, quadratic, own, training, lr=0.05, rng=rng)
        for problem, own, rng in zip(problems, samples, rngs, strict=True)
    ]
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one.parameters["w"], other.parameters["w"])
        assert (one.steps, one.count) == (other.steps, other.count)
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
    ends = [solved.parameters["w"] for solved in together]
    assert not any(torch.equal(a, b) for a, b in pairwise(ends))


def test_what_steps_otherwise_is_not_stacked():
    problems, *_ = clients()
    own = Problem({"w": torch.zeros(5)}, given={"centre": torch.zeros(5)})
    moved = Problem(own.start, given=own.given, project=lambda *_: None)
    many = partial(stackable, counts=[20] * 7, settings=LocalTraining())
    assert many([own] * 7)
    assert not many([*problems, Problem({"w": torch.zeros(6)})])
    assert not many([*[own] * 6, moved])
    assert not many([Problem(own.start, given={"centre": torch.zeros(5), "n": 3.0})] * 7)
    assert not stackable([own] * 7, [20] * 7, LocalTraining(patience=2))
    assert not stackable([own] * 7, [20] * 7, LocalTraining(optimizer="torch.optim:LBFGS"))
    # Here batches of one size hardly meet, so that nothing would be saved.
    assert not stackable([own] * 7, [3, 5, 7, 9, 11, 13, 2000], LocalTraining())


def ended(folder, engine, method="fedavg", data=MappingProxyType({}), **more):
    settings = {"model": {"hidden": [8]}, **more}
    data = {"name": "digits", "clients": 8, "partition": "iid", "limit": 500, **data}
    config = Config.create(rounds=2, engine=engine, method={"name": method}, data=data, **settings)
    with Simulation(config, folder / engine) as simulation:
        lines = [step.metrics for step in simulation]
        return pack(simulation.server), lines


@pytest.mark.parametrize(
    "method",
    cases(["fedavg", "scaffold", "pvi", "fedgvi", "virtual", "fedsparse"], slow=["virtual"]),
)
def test_a_run_is_that_of_the_sequential_engine_up_to_rounding(method, tmp_path, monkeypatch):
    solved = []

    def counted(problems, *given, **named):
        solved.append(len(problems))
        return solve_stacked(problems, *given, **named)

    monkeypatch.setattr(client_runtime, "solve_stacked", counted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedbayesWarning)
        (one, lines), (other, more) = (
            ended(tmp_path, e, method) for e in ("sequential", "stacked")
        )
    assert solved == ([] if method == "fedsparse" else [8, 8])
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=2e-3, atol=1e-3)
    for key in ("bytes_up", "bytes_down"):
        assert [line[key] for line in lines] == [line[key] for line in more]


def dropping():
    """A network that draws in training: its masks cannot be those of one client alone."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(), nn.Linear(8, 10))


def test_a_network_that_draws_is_trained_one_by_one_and_it_is_said(tmp_path):
    model = {"name": "tests.inference.test_stacked:dropping"}
    one, _ = ended(tmp_path, "sequential", model=model)
    with pytest.warns(FedbayesWarning, match="trained one by one"):
        other, _ = ended(tmp_path, "stacked", model=model)
    assert_identical(one, other)


class Picky(nn.Module):
    """Fails on the samples of some clients."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x):
        if self.training and torch.is_grad_enabled() and len(x) < 4:
            raise KeyError("seven")
        return self.linear(x.flatten(1))


def picky():
    return Picky()


def test_an_error_of_the_network_names_the_client(tmp_path):
    model = {"name": "tests.inference.test_stacked:picky"}
    failing = partial(ended, tmp_path, "stacked", model=model, training={"batch_size": 3})
    with pytest.raises(ModelError, match=r"client \d+, with .* training samples"):
        failing()


@pytest.mark.parametrize(
    ("method", "data"), [("ditto", {}), ("fedavg", {"partition": "dirichlet", "alpha": 0.1})]
)
def test_what_is_not_stacked_is_said(method, data, tmp_path):
    with pytest.warns(FedbayesWarning, match="trained one by one"):
        ended(tmp_path, "stacked", method, data)
