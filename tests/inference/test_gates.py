"""Gates against sampling, finite differences and closed forms."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbayes.inference import gates


@pytest.mark.parametrize("temperature", [0.2, 2 / 3, 1.5])
def test_probability_of_an_open_gate_against_sampling(temperature):
    logits = torch.tensor([-3.0, -1.0, 0.0, 0.7, 2.5])
    noise = torch.rand(400_000, 5, generator=torch.Generator().manual_seed(0))
    share = (gates.relaxed(logits, noise, temperature) > 0).float().mean(dim=0)
    torch.testing.assert_close(
        share, gates.open_probability(logits, temperature), atol=3e-3, rtol=0
    )


def test_cold_gates_are_bernoulli():
    """At vanishing temperature the relaxation is the exact gate: z = [u > 1 − π]."""
    logits = torch.tensor([-1.0, 0.5])
    noise = torch.rand(10_000, 2, generator=torch.Generator().manual_seed(0))
    cold = gates.relaxed(logits, noise, 1e-4)
    assert torch.equal(cold > 0.5, noise > torch.sigmoid(-logits))
    assert ((cold == 0) | (cold == 1)).float().mean() > 0.999


def test_gradient_of_the_relaxation():
    logits = torch.tensor([-1.0, 0.1, 0.8], dtype=torch.double, requires_grad=True)
    noise = torch.tensor([0.6, 0.4, 0.5], dtype=torch.double)
    assert torch.autograd.gradcheck(lambda x: gates.relaxed(x, noise, 0.7), logits)
    assert torch.autograd.gradcheck(lambda x: gates.open_probability(x, 0.7), logits)


@given(
    norm=st.floats(0.1, 10.0),
    probability=st.floats(1e-6, 1 - 1e-6),
    temperature=st.sampled_from([1e-3, 1e-2]),
)
def test_thresholds_invert_the_logits(norm, probability, temperature):
    level = torch.logit(torch.tensor([probability], dtype=torch.double))
    norms = torch.tensor([norm], dtype=torch.double)
    v = gates.thresholds(norms, level, temperature)
    if norm - temperature * level > 0:
        torch.testing.assert_close(
            torch.sigmoid(gates.logits(norms, v, temperature)),
            torch.sigmoid(level),
            rtol=1e-6,
            atol=1e-9,
        )


@given(pi=st.floats(0, 1), theta=st.floats(0.001, 0.999))
def test_cross_entropy(pi, theta):
    level = torch.logit(torch.tensor(theta, dtype=torch.double))
    found = gates.cross_entropy(torch.tensor(pi, dtype=torch.double), level)
    assert float(found) == pytest.approx(
        -pi * math.log(theta) - (1 - pi) * math.log(1 - theta), abs=1e-9
    )


def test_far_logits_stay_finite():
    logits = torch.tensor([-2000.0, 2000.0])
    assert torch.isfinite(gates.cross_entropy(torch.tensor([0.5, 0.5]), logits)).all()
    assert gates.relaxed(logits, torch.tensor([0.5, 0.5]), 2 / 3).tolist() == [0.0, 1.0]
