"""The Laplace approximation of all layers of a fused network, against brute-force Jacobians."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev, vmap

from fedbayes.core.targets import Target
from fedbayes.errors import ModelError
from fedbayes.fusion.kronecker import (
    Along,
    Linearized,
    all_layers,
    check_layers,
    fitted_layers,
    jacobians,
)
from fedbayes.fusion.laplace import PRECISIONS, calibrated, expected, last_layer
from fedbayes.likelihoods import build_likelihood
from fedbayes.models import MLP
from fedbayes.models.steps import Steps
from tests.helpers.toy_models import residual

THREE = build_likelihood("categorical", Target("class", ("a", "b", "c")))


class Twice(nn.Module):
    """A convolution, a dense layer that is called twice, a normalization, and one scale."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2, stride=2, padding=1)
        self.norm = nn.GroupNorm(1, 3)
        self.same = nn.Linear(27, 27)
        self.last = nn.Linear(27, 3, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x):
        h = self.norm(torch.tanh(self.conv(x))).flatten(1)
        h = torch.relu(self.same(torch.relu(self.same(h))))
        return self.last(h) * self.scale


def images(number, n=6):
    return torch.randn(n, 2, 4, 4, generator=torch.Generator().manual_seed(number))


def rows(number, n=20):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(number))


def twice():
    torch.manual_seed(0)
    return Twice().eval()


def jacobian(module, name, x):
    """Of the outputs by a layer's weights and bias, [n, K, o, d], sample by sample."""
    weights = {n: p.detach() for n, p in module.named_parameters()}
    own = [f"{name}.weight", *([f"{name}.bias"] if f"{name}.bias" in weights else [])]

    def outputs(some, one):
        return functional_call(module, {**weights, **some}, (one[None],))[0]

    found = vmap(jacrev(outputs), (None, 0))({n: weights[n] for n in own}, x)
    columns = [found[n].flatten(3) if n == own[0] else found[n][..., None] for n in own]
    return torch.cat(columns, 3).double()


def covariance_by_hand(module, found, x):
    """Σ J (spectrum + p)⁻¹ Jᵀ with whole matrices, [n, K, K]."""
    total = 0.0
    for name, spectrum in found.spectra.items():
        j = jacobian(module, name, x).flatten(2)
        q = torch.kron(spectrum.left, spectrum.right)
        precision = q @ torch.diag(spectrum.values.flatten() + found.precision) @ q.T
        total = total + j @ torch.linalg.inv(precision) @ j.mT
    return total


def test_factors_of_one_place_are_means_of_brute_force_gradients():
    """For a sample of one place in a layer, g aᵀ is its Jacobian: both sides follow from it."""
    torch.manual_seed(0)
    module, samples = MLP(4, [5], 3).eval(), 70
    found = all_layers(module, THREE, rows, 3, samples)
    x = torch.cat([rows(number) for number in range(3)])
    p = module(x).softmax(1).detach().double()
    h = torch.cat([x, torch.ones(60, 1)], 1).double()
    j = jacobian(module, "1", x)[..., -1]  # the bias' gradients are g
    each = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    a, b = h.T @ h / 60, torch.einsum("nko,nkl,nlq->oq", j, each, j) / 60
    spectrum = found.spectra["1"]
    q = torch.kron(spectrum.left, spectrum.right)
    whole = q @ torch.diag(spectrum.values.flatten()) @ q.T
    torch.testing.assert_close(whole, samples * torch.kron(b, a), rtol=1e-4, atol=1e-4)
    assert (list(found.spectra), found.fixed, found.width) == (["1", "3"], (), 3)


def test_factors_of_many_places_add_inputs_and_average_gradients():
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 3)).eval()
    found = all_layers(module, THREE, images, 2, 50)
    x, a, b = torch.cat([images(0), images(1)]), 0.0, 0.0
    weight = module[2].weight.detach().double().reshape(3, 3, 4)  # class, channel, place
    for one in x:
        p = module(one[None]).softmax(1)[0].detach().double()
        each = torch.diag(p) - p[:, None] * p
        for place in range(4):
            row, column = divmod(place, 2)
            patch = one[:, row : row + 3, column : column + 3].flatten().double()
            patch = torch.cat([patch, torch.ones(1)])
            a = a + patch[:, None] * patch / 12
            g = weight[:, :, place]
            b = b + g.T @ each @ g / 48
    spectrum = found.spectra["0"]
    q = torch.kron(spectrum.left, spectrum.right)
    whole = q @ torch.diag(spectrum.values.flatten()) @ q.T
    torch.testing.assert_close(whole, 50 * torch.kron(b, a), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_predictions_are_those_of_brute_force_jacobians_exported_too(tmp_path):
    module = twice()
    found = all_layers(module, THREE, images, 3, 40)
    assert list(found.spectra) == ["conv", "same", "last"]
    assert found.fixed == ("scale", "norm.weight", "norm.bias")
    found = type(found)(**{**vars(found), "precision": 0.7, "temperature": 1.6})
    x = images(9)
    with torch.no_grad():
        wanted = expected(module(x).double(), covariance_by_hand(module, found, x)) / 1.6
    whole = Linearized(module, found, images(0))
    given = whole(x)
    torch.testing.assert_close(given.double(), wanted, rtol=1e-4, atol=1e-4)
    assert not given.requires_grad
    sizes = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(whole, (images(0, 2),), dynamic_shapes=sizes)
    torch.export.save(program, tmp_path / "m.pt2")
    again = torch.export.load(tmp_path / "m.pt2").module()
    for n in (1, 5):
        torch.testing.assert_close(again(x[:n]), given[:n], rtol=1e-5, atol=1e-5)
    with pytest.raises(ModelError, match="operations, such"):
        Steps(again, x, "it")
    assert module.scale.requires_grad  # what was given is as it was


@pytest.mark.parametrize("bias", [True, False])
def test_of_one_dense_layer_it_is_the_posterior_of_the_last_with_factors(bias):
    torch.manual_seed(0)
    module = nn.Linear(4, 3, bias=bias)
    one = last_layer(module, THREE, rows, 3, 70, kind="kron")
    found = all_layers(module, THREE, rows, 3, 70)
    (spectrum,) = found.spectra.values()
    torch.testing.assert_close(spectrum.values, one.values, rtol=1e-4, atol=1e-5)
    x = rows(9)
    with torch.no_grad():
        wanted = calibrated(module, one)(x)
    torch.testing.assert_close(Linearized(module, found, x)(x), wanted, rtol=1e-4, atol=1e-4)


def test_of_a_linear_gaussian_model_it_is_the_exact_posterior():
    """N(0, 1/p) prior, y = W x + noise of σ: the covariance of outputs is known."""
    torch.manual_seed(0)
    sigma, p, n = 0.5, 2.0, 60
    target = Target("real", ("y", "z"), center=(0.0, 0.0), scale=(1.0, 1.0))
    gaussian = build_likelihood("gaussian", target, noise=sigma)
    module = MLP(4, [], 2)
    found = all_layers(module, gaussian, rows, 3, n)
    x = torch.cat([rows(number) for number in range(3)]).double()
    a = torch.cat([x, torch.ones(n, 1)], 1)
    exact = torch.linalg.inv(a.T @ a / sigma**2 + p * torch.eye(5))
    new = torch.cat([rows(9), torch.ones(20, 1)], 1).double()
    wanted = torch.einsum("nd,de,ne,kl->nkl", new, exact, new, torch.eye(2).double())
    spectrum = found.spectra["1"].to("cpu", torch.float32)
    along = Along.of(spectrum, *jacobians(module, ["1"], 2, rows(9))[1]["1"])
    given = along.covariance(1 / (spectrum.values + p)).double()
    torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("make", "draw"), [(twice, images), (lambda: MLP(4, [5], 3), rows)])
def test_the_prior_that_the_teacher_had_is_found(make, draw):
    torch.manual_seed(0)
    module = make().eval()
    with torch.no_grad():
        list(module.parameters())[-2].mul_(6)  # sure of what it says
    found = all_layers(module, THREE, draw, 3, 30)
    true = type(found)(**{**vars(found), "precision": PRECISIONS[14], "temperature": 1.7})
    teacher = Linearized(module, true, draw(0))
    chosen, divergence = fitted_layers(found, module, teacher, lambda i: draw(i + 50), 4)
    assert divergence < 1e-6
    assert chosen.precision == pytest.approx(true.precision)
    assert chosen.temperature == pytest.approx(1.7, rel=1e-2)
    sure, least = fitted_layers(found, module, module, lambda i: draw(i + 50), 4)
    assert sure.precision > 1e4  # a teacher that is as sure as the network
    assert least < 1e-4


def test_a_residual_network_has_one_with_normalizations_held_fixed():
    module = residual((1, 8, 8), 3).eval()
    x = torch.randn(4, 1, 8, 8)
    check_layers(module, THREE, x)
    found = all_layers(module, THREE, lambda _: x, 1, 50)
    with torch.no_grad():
        wanted = expected(module(x).double(), covariance_by_hand(module, found, x))
    torch.testing.assert_close(
        Linearized(module, found, x)(x).double(), wanted, rtol=1e-3, atol=1e-3
    )


def test_networks_that_have_none_are_refused():
    class Free(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3))

        def forward(self, x):
            return x @ self.weight

    with pytest.raises(ModelError, match="Free has no dense layer or convolution"):
        check_layers(Free(), THREE, rows(0))

    class Sorted(nn.Module):
        """Goes another way by what it computes."""

        def __init__(self):
            super().__init__()
            self.last = nn.Linear(4, 3)

        def forward(self, x):
            f = self.last(x)
            return f if float(f.detach().abs().sum()) > 0 else 2 * f

    with pytest.raises(
        ModelError,
        match=r"Sorted has no gradients that can be exported.*last-layer",
    ):
        check_layers(Sorted(), THREE, rows(0))

    class Beside(nn.Linear):
        def forward(self, x):
            return super().forward(x - x.mean(0))

    with pytest.raises(ModelError, match="depend on its batch"):
        check_layers(nn.Sequential(Beside(4, 4), nn.Linear(4, 3)), THREE, rows(0))
    with pytest.raises(ModelError, match="and 0 samples"):
        all_layers(MLP(4, [5], 3), THREE, rows, 1, 0)
