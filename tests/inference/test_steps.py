"""Optimizers with what they take when nothing is said, and gates at the ends of their noise."""

import math

import numpy as np
import pytest
import torch

from fedbayes.core.tensors import Samples
from fedbayes.inference import gates
from fedbayes.inference.combination import factors
from fedbayes.inference.controls import mean_gradient
from fedbayes.inference.optimizers import OptimizerMoments, ServerOptimizer, step


def test_yogi_as_it_comes_is_fedyogi_of_reddi_et_al():
    """Appendix D there: β = (0.9, 0.99), τ = 1e-3, v from 1e-6."""
    leaf = torch.tensor([2.0], dtype=torch.float64)
    leaf.grad = torch.tensor([0.5], dtype=torch.float64)
    OptimizerMoments([leaf]).step()
    v = 1e-6 + 0.01 * 0.25
    assert leaf.item() == pytest.approx(2.0 - 1e-2 * 0.1 * 0.5 / (math.sqrt(v) + 1e-3), rel=1e-12)


@pytest.mark.parametrize(
    ("optimizer", "rate", "wanted"),
    [
        ("sgd", None, 1.0),
        ("sgd", 0.3, 0.3),
        ("adam", None, 1e-3),  # the first step of Adam is the rate, whatever the gradient
        ("adam", 0.3, 0.3),
        ("yogi", None, 1e-3 * 0.1 / (math.sqrt(0.01 + 1e-6) + 1e-3)),
        ("yogi", 0.3, 0.3 * 0.1 / (math.sqrt(0.01 + 1e-6) + 1e-3)),
    ],
)
def test_a_servers_first_step(optimizer, rate, wanted):
    server = ServerOptimizer(server_optimizer=optimizer, server_lr=rate)
    weights = {"w": torch.tensor([4.0], dtype=torch.float64)}
    found, _ = server.server_step(weights, {"w": torch.ones(1).double()}, {}, 1.0)
    assert float(weights["w"] - found["w"]) == pytest.approx(wanted, rel=1e-6)


def test_the_mean_gradient_passes_over_what_has_none():
    """Least squares with a counter among the weights and a last batch that is smaller."""
    x, y = torch.randn(11, 3).double(), torch.randn(11).double()
    weights = {"w": torch.randn(3).double(), "seen": torch.tensor(4)}

    def loss(parameters, batch, given, noise):
        return (batch.x @ parameters["w"] - batch.y).square().mean()

    found = mean_gradient(weights, loss, Samples(x, y), [4, 4, 3], ["w"])
    torch.testing.assert_close(found, {"w": 2 * x.T @ (x @ weights["w"] - y) / 11})


def test_noise_at_its_ends_gives_gates_with_gradients():
    """Random numbers of float32 can be 0, whose logit is infinite."""
    logits = torch.zeros(2, requires_grad=True)
    z = gates.relaxed(logits, torch.tensor([0.0, 1.0]), 0.5)
    assert z.tolist() == [0.0, 1.0]
    hot = gates.relaxed(logits, torch.tensor([0.0, 1.0]), 20.0)
    # logit(1e-6) = −13.8: at this temperature the gates are half open.
    soft = torch.sigmoid(torch.tensor([-1.0, 1.0]) * math.log(1e6) / 20)
    torch.testing.assert_close(hot, 1.2 * soft - 0.1, rtol=1e-3, atol=0)
    hot.sum().backward()
    assert (logits.grad > 0).all()


def test_factors_are_exact_for_sizes_of_any_type():
    sizes = np.array([1, 2, 4], dtype=np.float32)
    for rule in ("mean", "linear", "exp"):
        found = factors(rule, 1 / 3, sizes)
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, factors(rule, 1 / 3, [1, 2, 4]), rtol=1e-15)


def test_pure_steps_take_any_name_and_gradients_of_any_type():
    """Two steps of momentum, by hand, on weights whose name has the sign that state uses."""
    weights, state = {"a:b": torch.tensor([1.0])}, {}
    gradients = {"a:b": torch.tensor([0.5], dtype=torch.float64)}
    for wanted in (1 - 0.05, 1 - 0.05 - 0.1 * 0.95):
        weights, state = step(
            lambda leaves: torch.optim.SGD(leaves, lr=0.1, momentum=0.9), weights, gradients, state
        )
        assert weights["a:b"].dtype == torch.float32
        assert weights["a:b"].item() == pytest.approx(wanted)
