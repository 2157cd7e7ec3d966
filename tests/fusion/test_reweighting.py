"""Entropy balancing against closed forms and a general optimizer."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from fedbayes.errors import ConfigError, DataError
from fedbayes.fusion import function
from fedbayes.fusion.reweighting import Balanced, entropy_balance
from fedbayes.fusion.settings import FunctionSettings
from fedbayes.models import MLP
from tests.helpers.toy_inputs import Gauss, inputs


def test_a_gaussian_is_tilted_exponentially():
    """Of draws of N(0, 1), weights of mean m are those of N(m, 1): w ∝ exp(m x)."""
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(20_000, 1)))
    m = 0.4
    weights = entropy_balance(x, torch.tensor([m]))
    # The tilt that meets the mean of these very draws.
    wanted = torch.softmax(x[:, 0] * (m - float(x.mean())) / float(x.var()), 0)
    tilt = torch.log(weights)
    slope = np.polyfit(x[:, 0].numpy(), tilt.numpy(), 1)[0]
    assert slope == pytest.approx(m, abs=0.03)
    assert float((tilt - slope * x[:, 0]).std()) < 1e-9
    assert float((weights - wanted).abs().sum()) < 0.03
    assert float(weights @ (x[:, 0] - m).square()) == pytest.approx(1, abs=0.05)


def test_two_values_have_one_solution():
    """Draws 0 and 1, mean m: the ones weigh m together, whatever the base weights among them."""
    x = torch.tensor([[0.0], [0.0], [0.0], [1.0], [1.0]])
    base = torch.tensor([1.0, 1.0, 2.0, 3.0, 1.0])
    found = entropy_balance(x, torch.tensor([0.3]), base)
    wanted = torch.tensor([0.7 / 4, 0.7 / 4, 0.7 / 2, 0.3 * 3 / 4, 0.3 / 4]).double()
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)


def test_no_other_weights_are_nearer():
    """The primal problem, by a general optimizer with constraints."""
    rng = np.random.default_rng(1)
    g = rng.normal(size=(12, 2))
    m = np.array([0.3, -0.2])
    found = entropy_balance(torch.from_numpy(g), torch.from_numpy(m)).numpy()
    primal = minimize(
        lambda w: float(np.sum(w * np.log(np.maximum(w, 1e-300) * 12))),
        np.full(12, 1 / 12),
        bounds=[(1e-12, 1)] * 12,
        constraints=[
            {"type": "eq", "fun": lambda w: w.sum() - 1},
            {"type": "eq", "fun": lambda w: w @ g - m},
        ],
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert primal.success
    np.testing.assert_allclose(found, primal.x, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6))
def test_means_are_met_wherever_they_can_be(seed, features):
    rng = np.random.default_rng(seed)
    g = torch.from_numpy(rng.normal(size=(60, features)) * rng.lognormal(0, 3, features))
    g = torch.cat([g, g.sum(1, keepdim=True)], 1)  # one of them follows from the others
    wanted = torch.from_numpy(rng.dirichlet(np.ones(60))) @ g
    weights = entropy_balance(g, wanted)
    assert (weights >= 0).all()
    assert float(weights.sum()) == pytest.approx(1)
    assert ((weights @ g - wanted).abs() <= 1e-3 * g.std(0)).all()


def test_means_that_no_weights_meet_are_told():
    g = torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])
    with pytest.raises(DataError, match="size must be 3, but samples are between 0 and 2"):
        entropy_balance(g, torch.tensor([3.0, 1.0]), names=["size", "colour"])
    with pytest.raises(DataError, match=r"all means together: .*colour"):
        entropy_balance(g, torch.tensor([0.5, 1.5]), names=["size", "colour"])


@pytest.mark.parametrize(
    ("features", "wanted", "base", "match"),
    [
        (torch.ones(3, 2), torch.ones(3), None, "Give .n, d."),
        (torch.ones(3, 2), torch.full((2,), torch.nan), None, "finite"),
        (torch.ones(3, 2), torch.ones(2), -torch.ones(3), "at least 0"),
        (torch.ones(0, 2), torch.ones(2), None, "Give .n, d."),
    ],
)
def test_what_does_not_fit_is_refused(features, wanted, base, match):
    with pytest.raises(DataError, match=match):
        entropy_balance(features, wanted, base)


def test_draws_that_are_taken_have_the_means():
    def signs(x):
        return (x[:, :2] > 0).float()

    balanced = Balanced(inputs(Gauss((3,))), signs, torch.tensor([0.9, 0.2]))
    x = balanced.batch(4, 4000)
    assert x.shape == (4000, 3)
    assert signs(x).mean(0).tolist() == pytest.approx([0.9, 0.2], abs=0.005)
    assert torch.equal(x, balanced.batch(4, 4000))
    assert not torch.equal(x, balanced.batch(5, 4000))


def test_with_slack_there_are_always_weights():
    """Of the objective as it is stated, no other weights have less."""
    rng = np.random.default_rng(2)
    g = rng.normal(size=(15, 3))
    m = np.array([5.0, 0.0, -1.0])
    spread = g.std(0)

    def objective(logits):
        w = np.exp(logits - logits.max())
        w = w / w.sum()
        missed = (w @ g - m) / spread
        return float(np.sum(w * np.log(np.maximum(w * 15, 1e-300))) + missed @ missed / (2 * 0.5))

    found = entropy_balance(torch.from_numpy(g), torch.from_numpy(m), slack=0.5).numpy()
    best = minimize(objective, np.zeros(15), options={"gtol": 1e-9})
    assert objective(np.log(found)) <= best.fun + 1e-7


def test_draws_of_a_fusion_are_balanced_by_the_counts(monkeypatch):
    """What layers are solved on: the teacher's mean probabilities are the classes' shares."""
    torch.manual_seed(3)
    clients = {"a": MLP(4, [5], 3), "b": MLP(4, [5], 3)}
    for network in clients.values():  # sure of its classes, each of which is drawn
        for parameter in network.parameters():
            parameter.data *= 4 if parameter.ndim > 1 else 0
    counts = np.array([[30, 5, 10], [25, 5, 25]])
    teacher, _ = function.teacher_of(clients, counts, None)
    wanted, seen = counts.sum(0) / counts.sum(), {}
    original = function.regress

    def watched(networks, like, taught, draw, batches, **rest):
        seen["mean"] = torch.cat([teacher(draw(i)).softmax(-1) for i in range(4)]).mean(0)
        return original(networks, like, taught, draw, batches, **rest)

    monkeypatch.setattr(function, "regress", watched)
    far = {}
    for balance in (False, True):
        chosen = FunctionSettings(draws=2048, distillation=None, balance=balance)
        draws = inputs(Gauss((4,)))
        function.fuse_functions(clients, clients["a"], draws, counts=counts, settings=chosen)
        far[balance] = np.abs(seen["mean"].numpy() - wanted).max()
    assert far[True] < 0.01 < 0.05 < far[False]
    for table in (None, [45, 55]):
        with pytest.raises(ConfigError, match="needs counts of classes, and there are none"):
            function.fuse_functions(clients, clients["a"], draws, counts=table, settings=chosen)
