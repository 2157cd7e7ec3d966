"""Samples along iterates, against distributions in closed form and iterates by hand."""

import pytest
import torch

from fedbayes.core.tensors import Samples
from fedbayes.errors import ConfigError
from fedbayes.inference.problem import Problem
from fedbayes.inference.sampling import Langevin, Pulled, sampled
from fedbayes.inference.settings import LocalTraining
from fedbayes.inference.solve import solve


def squares(parameters, batch, given, noise):
    """½ mean (w x − y)²: n times it is the energy of a Gaussian."""
    return 0.5 * (batch.x * parameters["w"] - batch.y).square().mean(0).sum()


def solver(samples, lr, seed=1, **settings):
    training = LocalTraining(batch_size=len(samples.y), **settings)

    def run(problem):
        rng = torch.Generator().manual_seed(seed)
        return solve(problem, squares, samples, training, lr=lr, rng=lambda purpose: rng)

    return run


def rows(n=40, columns=3):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(n, columns, generator=rng)
    return Samples(x, x + torch.randn(n, columns, generator=rng))


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_langevin_samples_are_those_of_the_posterior(temperature):
    """Under noise 1 and a flat prior, w ~ N(Σxy/Σx², T/Σx²), each column by itself.

    A step shrinks the distance by 1 − a, a = η Σx²/n, so the variance is T/Σx² / (1 − a/2).
    """
    data, lr = rows(columns=200), 0.3
    problem = Problem({"w": torch.zeros(200)})
    langevin = Langevin(torch.Generator().manual_seed(2), len(data.y), temperature)
    run = solver(data, lr, steps=1050)
    _, found = sampled(problem, run, ["w"], burn_in=50, every=10, langevin=langevin)
    assert found["w"].shape == (100, 200)
    curvature = (data.x * data.x).sum(0)
    mean = (data.x * data.y).sum(0) / curvature
    variance = temperature / curvature / (1 - 0.5 * lr * curvature / len(data.y))
    away = (found["w"].mean(0) - mean) / (variance / 100).sqrt()
    assert away.abs().max() < 5
    assert abs(float(away.mean())) < 0.25
    assert (found["w"].var(0) / variance).mean() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("lr", [0.05, 30.0])
def test_gaussians_beside_the_likelihood_are_sampled_exactly(lr):
    """Rows that say nothing leave N(c, 1/Λ), however large steps are; T tempers the rows alone."""
    data = Samples(torch.zeros(5, 4000), torch.zeros(5, 4000))
    centre, precision = torch.full((4000,), 2.0), torch.full((4000,), 16.0)
    rng = torch.Generator().manual_seed(3)
    langevin = Pulled(rng, 5, 0.5, {"w": centre}, {"w": precision})
    steps = 60
    problem = Problem({"w": torch.zeros(4000)})
    run = solver(data, lr, steps=steps)
    _, found = sampled(problem, run, ["w"], burn_in=steps - 2, every=1, langevin=langevin)
    left = torch.exp(torch.tensor(-lr * 0.5 / 5 * 16.0 * steps))
    last = found["w"][-1]
    assert float(last.mean()) == pytest.approx(2 - 2 * float(left), abs=0.02)
    assert float(last.var()) == pytest.approx((1 - float(left) ** 2) / 16, rel=0.1)


@pytest.mark.parametrize("averaged", [False, True])
def test_windows_hold_the_iterates_of_plain_steps(averaged):
    """Seven steps, one of burn-in, windows of two: the last iterates or the means of three windows.
    What follows a step by the problem's own rule goes before.
    """
    data, lr = rows(), 0.3
    iterates, w = [], torch.ones(3)
    for _ in range(7):
        gradient = (data.x * (data.x * w - data.y)).mean(0)
        w = (w - lr * gradient).clamp(max=1.5)
        iterates.append(w)
    windows = [iterates[1:3], iterates[3:5], iterates[5:7]]
    wanted = [torch.stack(one).mean(0) if averaged else one[-1] for one in windows]

    def project(parameters, given, lr):
        parameters["w"].clamp_(max=1.5)

    problem = Problem({"w": torch.ones(3)}, project=project)
    run = solver(data, lr, steps=7)
    solved, found = sampled(problem, run, ["w"], burn_in=1, every=2, averaged=averaged)
    torch.testing.assert_close(found["w"], torch.stack(wanted))
    torch.testing.assert_close(solved.parameters["w"], iterates[-1])


def test_refusals():
    problem = Problem({"w": torch.ones(3)})
    with pytest.raises(ConfigError, match="give 1 samples"):
        sampled(problem, solver(rows(), 0.1, steps=5), ["w"], burn_in=2, every=2)
