"""IVON: its lines in the paper's terms, its own program, and posteriors in closed form."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbayes.inference.gaussian import divergence, kl_terms
from fedbayes.inference.ivon import Ivon

DELTA, COUNT, CURVATURE, CENTRE = 0.3, 50.0, (2.0, 0.1), (1.0, -2.0)


def energy(mean, log_precision, epsilon):
    """Per sample: the loss Σ ½ H (θ − c)² at drawn weights, and KL from N(0, 1/(N δ))."""
    theta = mean + (-log_precision / 2).exp() * epsilon
    loss = (0.5 * torch.tensor(CURVATURE).double() * (theta - torch.tensor(CENTRE)).square()).sum()
    prior = {"w": torch.full((2,), COUNT * DELTA).double()}, {"w": torch.zeros(2).double()}
    kl = divergence(kl_terms, {"w": mean}, {"w": log_precision.exp()}, *prior)
    return loss + kl / COUNT


def start():
    mean, log_precision = torch.tensor([0.4, 0.5]).double(), torch.tensor([3.0, 2.0]).double()
    return mean.requires_grad_(), log_precision.requires_grad_()


def stepped(optimizer, mean, log_precision, epsilon):
    value = energy(mean, log_precision, epsilon)
    mean.grad, log_precision.grad = torch.autograd.grad(value, (mean, log_precision))
    optimizer.step()


def test_a_step_is_that_of_the_paper():
    """Shen et al. 2024, Algorithm 1, with h + δ = Λ/N, momentum of the prior's gradient too."""
    mean, log_precision = start()
    optimizer = Ivon(mean, log_precision, 0.2, scale=COUNT, momentum=0.8, rate=0.1)
    m, h = mean.detach().clone(), log_precision.detach().exp() / COUNT - DELTA
    average = torch.zeros(2).double()
    rng = torch.Generator().manual_seed(0)
    for number in range(1, 6):
        epsilon = torch.randn(2, generator=rng, dtype=torch.float64)
        sigma = (COUNT * (h + DELTA)).rsqrt()
        gradient = torch.tensor(CURVATURE) * (m + sigma * epsilon - torch.tensor(CENTRE))
        estimate = gradient * epsilon / sigma
        average = 0.8 * average + 0.2 * (gradient + DELTA * m)
        h = 0.9 * h + 0.1 * estimate + 0.5 * 0.1**2 * (h - estimate) ** 2 / (h + DELTA)
        m = m - 0.2 * (average / (1 - 0.8**number)) / (h + DELTA)
        stepped(optimizer, mean, log_precision, epsilon)
        torch.testing.assert_close(mean.detach(), m)
        torch.testing.assert_close(log_precision.detach().exp(), COUNT * (h + DELTA))


def test_a_step_is_that_of_its_own_program():
    ivon = pytest.importorskip("ivon")
    mean, log_precision = start()
    own = torch.nn.Parameter(mean.detach().clone())
    h = float(log_precision.detach()[0].exp()) / COUNT - DELTA
    with torch.no_grad():
        log_precision.fill_(float(log_precision[0]))
    options = {"hess_init": h, "beta1": 0.0, "beta2": 0.95, "weight_decay": DELTA}
    other = ivon.IVON([own], lr=0.2, ess=COUNT, rescale_lr=False, **options)
    optimizer = Ivon(mean, log_precision, 0.2, scale=COUNT, momentum=0.0, rate=0.05)
    torch.manual_seed(0)
    for _ in range(5):
        precision = log_precision.detach().exp()
        with other.sampled_params(train=True):
            epsilon = (own.detach() - mean.detach()) * precision.sqrt()
            other.zero_grad()
            error = own - torch.tensor(CENTRE)
            (0.5 * torch.tensor(CURVATURE).double() * error.square()).sum().backward()
        other.step()
        stepped(optimizer, mean, log_precision, epsilon)
        torch.testing.assert_close(mean.detach(), own.detach())


def test_on_a_quadratic_it_ends_at_the_posterior():
    """Λ = N (H + δ), Λ m = N H c."""
    mean, log_precision = start()
    rng = torch.Generator().manual_seed(1)
    tail = []
    for rate in (0.1, 0.01):
        optimizer = Ivon(mean, log_precision, rate, scale=COUNT, rate=rate / 2)
        for _ in range(1500):
            stepped(
                optimizer,
                mean,
                log_precision,
                torch.randn(2, generator=rng, dtype=torch.float64),
            )
            tail.append(torch.stack([mean.detach(), log_precision.detach().exp()]))
    found = torch.stack(tail[-1000:]).mean(0)
    curvature, centre = torch.tensor(CURVATURE).double(), torch.tensor(CENTRE)
    torch.testing.assert_close(found[1], COUNT * (curvature + DELTA), rtol=0.05, atol=0)
    wanted = curvature * centre / (curvature + DELTA)
    torch.testing.assert_close(found[0], wanted, rtol=0, atol=0.03)


@settings(deadline=None, max_examples=30)
@given(st.floats(-1e4, 1e4), st.floats(0, 1))
def test_precisions_stay_positive_whatever_is_estimated(gradient, rate):
    mean, log_precision = torch.zeros(1), torch.zeros(1)
    mean.grad, log_precision.grad = torch.zeros(1), torch.tensor([gradient])
    Ivon(mean, log_precision, 0.1, rate=rate).step()
    assert torch.isfinite(log_precision).all()
    assert float(log_precision) >= -0.7  # half of it at least
    if rate == 0:
        assert float(log_precision) == 0
