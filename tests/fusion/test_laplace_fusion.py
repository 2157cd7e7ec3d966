"""The Laplace approximation of a fused network's last layer, against closed forms and draws."""

import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian
from torch.nn import functional

from fedbayes.core.messages import decode_file, encode
from fedbayes.core.targets import Target
from fedbayes.core.tensors import pack, unpack
from fedbayes.errors import ModelError
from fedbayes.fusion.laplace import (
    PRECISIONS,
    LastLayer,
    calibrated,
    features,
    find_last,
    fitted,
    last_layer,
)
from fedbayes.likelihoods import build_likelihood
from fedbayes.models import MLP
from tests.helpers.toy_models import HeadFirst, residual

THREE = build_likelihood("categorical", Target("class", ("a", "b", "c")))


def network():
    torch.manual_seed(0)
    return MLP(4, [5], 3)


def draw(number):
    return torch.randn(20, 4, generator=torch.Generator().manual_seed(number))


def precision_of(found):
    """The whole matrix [K d, K d]."""
    vectors = torch.kron(found.left, found.right) if found.left.numel() else found.right
    return vectors @ torch.diag(found.values.flatten() + found.precision) @ vectors.T


def test_the_whole_precision_is_the_hessian_of_logistic_regression():
    module, samples = network(), 70
    found = last_layer(module, THREE, draw, 3, samples, kind="full")
    x = torch.cat([draw(number) for number in range(3)])
    h = torch.relu(module[1](module[0](x))).detach().double()
    h = torch.cat([h, torch.ones(60, 1)], dim=1)
    w = torch.cat([module[3].weight, module[3].bias[:, None]], dim=1).detach().double()
    y = torch.randint(3, (60,))  # of which the Hessian does not depend

    def loss(flat):
        return samples * functional.cross_entropy(h @ flat.reshape(3, 6).T, y)

    wanted = hessian(loss, w.flatten()) + torch.eye(18)
    torch.testing.assert_close(precision_of(found), wanted, rtol=1e-5, atol=1e-5)
    assert (found.layer, found.width, found.precision) == ("3", 3, 1.0)


def test_factors_are_means_of_both_sides():
    module = network()
    found = last_layer(module, THREE, draw, 3, 70, kind="kron")
    h, f = features(module, module[3], torch.cat([draw(number) for number in range(3)]))
    h = torch.cat([h, torch.ones(60, 1)], dim=1).double()
    p = f.softmax(1).double()
    b = torch.diag(p.mean(0)) - p.T @ p / 60
    wanted = 70 * torch.kron(b, h.T @ h / 60) + torch.eye(18)
    torch.testing.assert_close(precision_of(found), wanted, rtol=1e-4, atol=1e-4)


def test_of_two_classes_the_approximation_is_mackays():
    module, two = MLP(4, [], 2), build_likelihood("categorical", Target("class", ("a", "b")))
    found = last_layer(module, two, draw, 2, 30)
    x = draw(9)
    f, covariance = module(x), found.layer_of(module[1]).covariance(x)
    variance = covariance[:, 0, 0] + covariance[:, 1, 1] - 2 * covariance[:, 0, 1]
    wanted = torch.sigmoid((f[:, 0] - f[:, 1]) / (1 + torch.pi / 8 * variance).sqrt())
    torch.testing.assert_close(calibrated(module, found)(x).softmax(1)[:, 0], wanted)


@pytest.mark.parametrize("kind", ["full", "kron"])
@pytest.mark.parametrize("bias", [True, False])
def test_covariances_and_calibrated_logits_are_those_of_the_gaussian(kind, bias):
    torch.manual_seed(0)
    module = MLP(4, [5], 3, bias=bias)
    found = last_layer(module, THREE, draw, 3, 70, kind=kind)
    covariance = torch.linalg.inv(precision_of(found))
    x = draw(9)
    h, f = features(module, module[3], x)
    a = torch.cat([h, torch.ones(20, 1)], dim=1).double() if bias else h.double()
    jacobian = torch.stack([torch.kron(torch.eye(3), row[None]) for row in a])
    wanted = jacobian @ covariance @ jacobian.transpose(1, 2)
    found = LastLayer(**{**vars(found), "temperature": 2.0})
    found = unpack(LastLayer, decode_file(encode(pack(found))))  # it can be stored
    layer = found.layer_of(module[3])
    torch.testing.assert_close(layer.covariance(h).double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.covariance(found.along(a)), wanted, rtol=1e-6, atol=1e-9)
    with torch.no_grad():
        given = calibrated(module, found)(x).double()
    for row in range(20):  # pair by pair
        logits = []
        for k in range(3):
            total = 0.0
            for j in range(3):
                pair = torch.zeros(3).double()
                pair[k], pair[j] = pair[k] + 1, pair[j] - 1
                variance = pair @ wanted[row] @ pair
                apart = (f[row, k] - f[row, j]) / (1 + torch.pi / 8 * variance).sqrt()
                total += (-apart).exp()
            logits.append(-total.log() / 2)
        torch.testing.assert_close(given[row], torch.stack(logits), rtol=1e-4, atol=1e-4)
    assert module[3].weight.requires_grad  # what was given is as it was


def test_probabilities_are_about_those_of_drawn_weights():
    module = network()
    module[3].weight.data *= 6
    found = last_layer(module, THREE, draw, 3, 10)
    x = draw(9)
    h, f = features(module, module[3], x)
    covariance = found.layer_of(module[3]).covariance(h).detach().double()
    drawn = torch.distributions.MultivariateNormal(f.double(), covariance)
    torch.manual_seed(0)
    wanted = drawn.sample((20_000,)).softmax(-1).mean(0)
    with torch.no_grad():
        given = calibrated(module, found)(x).softmax(1).double()
    plain = f.softmax(1).double()
    assert (given - wanted).abs().mean() < 0.4 * (plain - wanted).abs().mean()
    torch.testing.assert_close(given, wanted, rtol=0, atol=0.06)


@pytest.mark.parametrize("kind", ["full", "kron"])
def test_the_prior_that_the_teacher_had_is_found(kind):
    module = network()
    module[3].weight.data *= 6
    found = last_layer(module, THREE, draw, 3, 30, kind=kind)
    true = LastLayer(**{**vars(found), "precision": PRECISIONS[14], "temperature": 1.7})
    teacher = calibrated(module, true)
    chosen, divergence = fitted(found, module, teacher, lambda i: draw(i + 50), 4)
    assert divergence < 1e-6
    assert chosen.precision == pytest.approx(true.precision)
    assert chosen.temperature == pytest.approx(1.7, rel=1e-2)
    sure, least = fitted(found, module, module, lambda i: draw(i + 50), 4)
    assert sure.precision > 1e4  # a teacher that is as sure as the network
    assert least < 1e-4


def test_a_calibrated_network_is_exported(tmp_path):
    module = residual((1, 8, 8), 3).eval()
    x = torch.randn(6, 1, 8, 8)
    found = last_layer(module, THREE, lambda number: x, 1, 50, kind="kron")
    whole = calibrated(module, found)
    program = torch.export.export(whole, (x,))
    torch.export.save(program, tmp_path / "m.pt2")
    again = torch.export.load(tmp_path / "m.pt2").module()
    with torch.no_grad():
        torch.testing.assert_close(again(x), whole(x))


def test_the_last_layer_is_found_wherever_it_is():
    assert find_last(HeadFirst(4, 3), torch.randn(2, 4))[0] == "head"
    alone = nn.Linear(4, 3)
    found = last_layer(alone, THREE, draw, 1, 5)
    assert calibrated(alone, found)(draw(0)).shape == (20, 3)
    squashed = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    with pytest.raises(ModelError, match="does not end with a linear layer"):
        last_layer(squashed, THREE, draw, 1, 5)
    with pytest.raises(ModelError, match="and 0 samples"):
        last_layer(alone, THREE, draw, 1, 0)
