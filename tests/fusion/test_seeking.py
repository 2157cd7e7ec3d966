"""Inputs that seek classes, against steps written anew and a teacher that is known."""

import numpy as np
import pytest
import torch
from torch import nn

from fedbayes.core.targets import Target
from fedbayes.errors import ModelError
from fedbayes.fusion.class_counts import class_shares
from fedbayes.fusion.seeking import Seeker
from fedbayes.fusion.settings import SeekingSettings
from fedbayes.fusion.teacher import Teacher
from fedbayes.likelihoods import build_likelihood
from tests.helpers.toy_inputs import Gauss, inputs


def linear(*rows, bias=None):
    layer = nn.Linear(len(rows[0]), len(rows))
    layer.weight.data = torch.tensor(rows)
    layer.bias.data = torch.tensor(bias or [0.0] * len(rows))
    return layer


def rare():
    """Of normal inputs, 1 % is taken for the last class."""
    return linear([1.0, 0, 0], [-1.0, 0, 0], [0, 1.0, 0], bias=[0.0, 0.0, -2.5])


def some(**settings):
    """Most of the draws are moved."""
    return SeekingSettings(share=0.7, **settings)


@pytest.mark.parametrize("shares", [None, class_shares([[5, 5, 0], [5, 5, 10]])])
def test_a_rare_class_becomes_frequent(shares):
    plain = inputs(Gauss((3,)))
    teacher = Teacher([rare(), rare()], shares)
    seeker = Seeker(plain, teacher, some(size=0.3))

    def frequency(draws):
        said = torch.cat([teacher(draws.batch(number, 1000)) for number in range(4)])
        return float((said.argmax(1) == 2).float().mean())

    assert frequency(plain) < 0.03
    assert frequency(seeker) > 0.15


def test_a_share_of_the_draws_is_moved_and_always_the_same():
    plain, teacher = inputs(Gauss((3,))), Teacher([rare()])
    seeker = Seeker(plain, teacher, SeekingSettings(share=0.3))
    x, moved = plain.batch(5, 4000), seeker.batch(5, 4000)
    changed = (x != moved).any(1)
    assert float(changed.float().mean()) == pytest.approx(0.3, abs=0.03)
    assert torch.equal(moved, Seeker(plain, teacher, SeekingSettings(share=0.3)).batch(5, 4000))
    assert not torch.equal(seeker.batch(-5, 4000), moved)
    none = Seeker(plain, teacher, SeekingSettings(share=0.0))
    assert torch.equal(none.batch(5, 40), plain.batch(5, 40))


def test_a_step_goes_up_the_gradient_by_its_length():
    """Of softmax regression the gradient of log p_k is w_k − Σ_j p_j w_j."""
    layer = rare()
    seeker = Seeker(
        inputs(Gauss((3,))), Teacher([layer]), SeekingSettings(share=0.7, steps=2, size=0.1)
    )
    x, wanted = torch.randn(7, 3), torch.tensor([0, 1, 2, 2, 1, 0, 2])
    found = seeker.sought(x, wanted, torch.Generator())
    w = layer.weight.detach().double().numpy()
    for row in range(7):
        at = x[row].double().numpy()
        for _ in range(2):
            p = np.exp(w @ at + layer.bias.detach().double().numpy())
            slope = w[wanted[row]] - p / p.sum() @ w
            at = at + 0.1 * slope / np.sqrt((slope**2).mean())
        np.testing.assert_allclose(found[row].numpy(), at, atol=1e-5)


@pytest.mark.parametrize("sure", [1e20, 1e30, 1e40])
def test_a_step_is_no_longer_where_a_class_is_sure(sure):
    """log p of a class of odds e^a has a slope of about e^−a, whose square no float32 holds."""
    margin = float(np.log(sure))
    layer = linear([1.0, 2.0, 0], [0.0, 0.0, 0], bias=[margin, 0.0])
    seeker = Seeker(inputs(Gauss((3,))), Teacher([layer]), some(steps=1, size=0.1))
    x = torch.zeros(4, 3)
    moved = seeker.sought(x, torch.zeros(4, dtype=torch.int64), torch.Generator())
    slope = np.array([1.0, 2.0, 0]) / np.sqrt(5 / 3)
    np.testing.assert_allclose(moved.numpy(), np.tile(0.1 * slope, (4, 1)), rtol=1e-4)


def test_with_shares_clients_that_know_the_class_are_asked():
    """One client alone has each class; the others' networks are not to be asked of it."""
    asked = [0, 0]

    def counted(number, layer):
        def function(x):
            asked[number] += len(x)
            return layer(x)

        return function

    layers = [linear([1.0, 0], [0, 1.0]), linear([-1.0, 0], [0, -1.0])]
    for layer in layers:
        layer.requires_grad_(False)
    teacher = Teacher([counted(i, layer) for i, layer in enumerate(layers)], torch.eye(2))
    seeker = Seeker(inputs(Gauss((2,))), teacher, some(steps=1, size=1.0))
    x = torch.zeros(4, 2)
    found = seeker.sought(x, torch.tensor([0, 1, 1, 0]), torch.Generator())
    assert asked == [2, 2]
    # Up w_0 − w_1 of the first client, or w_1 − w_0 of the second.
    assert found.sign().tolist() == [[1, -1]] * 4


def test_images_are_smooth_and_stay_in_range():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 4))
    plain = inputs(Gauss((3, 8, 8)))
    seeker = Seeker(plain, Teacher([network]), SeekingSettings(share=1.0, steps=1, size=0.5))
    x = plain.batch(0, 30)
    moved = seeker.batch(0, 30)
    assert (moved.amax((0, 2, 3)) <= x.amax((0, 2, 3))).all()
    assert (moved.amin((0, 2, 3)) >= x.amin((0, 2, 3))).all()
    step = moved - x
    rough = (step[..., 1:] - step[..., :-1]).square().mean()
    # Neighbours in an image of white noise differ by twice its variance, means of three by 2 / 3.
    assert float(rough / step.square().mean()) < 1.0


def test_seeking_is_for_classes():
    kind = build_likelihood("poisson", Target("count", ("n",)))
    teacher = Teacher([nn.Linear(3, 1)], likelihood=kind)
    with pytest.raises(ModelError, match="the likelihood poisson has none"):
        Seeker(inputs(Gauss((3,))), teacher, some()).batch(0, 10)
