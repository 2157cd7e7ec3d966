"""Posteriors of clients, and what is fused from them, against closed forms and loops."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples
from fedbayes.errors import ConfigError, FedbayesWarning, ModelError
from fedbayes.fusion.combining import combine
from fedbayes.fusion.curvature import posterior, scores
from fedbayes.fusion.posterior_settings import AveragingSettings, CurvatureSettings
from fedbayes.fusion.posteriors import KroneckerFactors, Posterior, fisher, kfac, regmean
from fedbayes.likelihoods import build_likelihood
from fedbayes.models import MLP
from fedbayes.testing import assert_identical
from tests.helpers.architectures import ARCHITECTURES, Attention, Convolutions, Recurrent, Shared
from tests.helpers.fused import shaken
from tests.helpers.toy_models import residual, sequence

CLASSES = build_likelihood("categorical", Target("class", tuple("abcd")))
NO_PRIOR = AveragingSettings(precision=1e-12, scaling=1, tolerance=1e-12, iterations=2000)


def classes(x, count=4):
    rng = torch.Generator().manual_seed(1)
    return Samples(x, torch.randint(count, (len(x),), generator=rng))


def fisher_by_loops(module, samples):
    """E_y of the outer products of all gradients, sample by sample and class by class."""
    total = 0
    for x in samples.x:
        log_probabilities = functional.log_softmax(module(x[None])[0], dim=0)
        for log_probability in log_probabilities:
            gradients = torch.autograd.grad(
                log_probability, list(module.parameters()), retain_graph=True, allow_unused=True
            )
            flat = torch.cat(
                [
                    torch.zeros(p.numel()) if g is None else g.flatten()
                    for p, g in zip(module.parameters(), gradients, strict=True)
                ]
            ).detach()
            total += log_probability.detach().exp() * torch.outer(flat, flat)
    return total / len(samples.y)


def test_logistic_regression_has_its_closed_form():
    """F = E[(diag p − p pᵀ) ⊗ x xᵀ]; with one place and one sample the factors give it exactly."""
    module, x = shaken(MLP(3, [], 4)), torch.randn(1, 3)
    found = posterior(module, CLASSES, classes(x))
    p = module(x)[0].softmax(0).detach()
    inner = torch.diag(p) - torch.outer(p, p)
    a = torch.cat([x[0], torch.ones(1)])
    torch.testing.assert_close(found.factors["1"].outputs, inner)
    torch.testing.assert_close(found.factors["1"].inputs, torch.outer(a, a))
    torch.testing.assert_close(
        found.diagonal["1.weight"], torch.outer(inner.diagonal(), x[0].square())
    )
    torch.testing.assert_close(found.diagonal["1.bias"], inner.diagonal())


IMAGES = (4, 3, 16, 16)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: MLP(6, [5, 4], 4), (5, 6)),
        (Convolutions, IMAGES),
        (lambda: residual((1, 8, 8), 4), (4, 1, 8, 8)),
        (lambda: sequence((9,), 4), (4, 9)),
        (ARCHITECTURES["depthwise"][0], IMAGES),
        (lambda: nn.Sequential(weight_norm(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 4)), (5, 6)),
    ],
    ids=["mlp", "batch norm", "residual", "sequence", "depthwise", "weight norm"],
)
def test_the_diagonal_is_that_of_the_fisher_matrix(make, shape):
    torch.manual_seed(0)
    module, samples = shaken(make()), classes(torch.randn(shape))
    found = posterior(module, CLASSES, samples, CurvatureSettings(batch_size=3))
    flat = torch.cat([found.diagonal[name].flatten() for name, _ in module.named_parameters()])
    wanted = fisher_by_loops(module, samples).diagonal()
    torch.testing.assert_close(flat, wanted, rtol=1e-3, atol=1e-6)
    assert found.samples == len(samples.y)
    assert found.counts.tolist() == torch.bincount(samples.y, minlength=4).tolist()
    # Nothing of what the sums came from is held on to: memory is that of a batch.
    assert not any(tensor.requires_grad for tensor in found.diagonal.values())


def test_layers_too_wide_for_factors_have_the_same_diagonal_by_matrix_products(monkeypatch):
    """A layer of 65 inputs and one of 12: gradients of single samples are not asked for."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 12), nn.Linear(12, 4)
    )
    samples = classes(torch.randn(5, 1, 4, 4))
    alone = "fedbayes.fusion.curvature._Sums._add_each"
    monkeypatch.setattr(alone, lambda *_: pytest.fail("sample by sample"))
    found = posterior(module, CLASSES, samples, CurvatureSettings(largest=13))
    assert found.factors.keys() == {"0", "4"}
    flat = torch.cat([found.diagonal[name].flatten() for name, _ in module.named_parameters()])
    wanted = fisher_by_loops(module, samples).diagonal()
    torch.testing.assert_close(flat, wanted, rtol=1e-3, atol=1e-6)


def test_parts_of_a_posterior_are_those_of_the_whole():
    torch.manual_seed(0)
    module = shaken(
        nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 30), nn.Tanh())
    )
    module.append(nn.Linear(30, 4))
    samples, settings = classes(torch.randn(7, 6)), CurvatureSettings(largest=10)
    whole = posterior(module, CLASSES, samples, settings)
    diagonal = posterior(module, CLASSES, samples, settings, parts="diagonal")
    assert not diagonal.factors
    assert_identical(diagonal.diagonal, whole.diagonal)
    factors = posterior(module, CLASSES, samples, settings, parts="factors")
    assert factors.factors.keys() == whole.factors.keys() == {"0"}
    assert_identical(vars(factors.factors["0"]), vars(whole.factors["0"]))
    others = {name: t for name, t in whole.diagonal.items() if not name.startswith("0.")}
    assert len(others) == 6
    assert_identical(factors.diagonal, others)


def test_factors_against_loops_over_samples_and_places():
    torch.manual_seed(0)
    conv, head = nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Linear(12, 4, bias=False)
    module = nn.Sequential(conv, nn.ReLU(inplace=True), nn.Flatten(), head)
    samples = classes(torch.randn(4, 2, 4, 4))
    found = posterior(module, CLASSES, samples).factors
    a, b = torch.zeros(19, 19), torch.zeros(3, 3)
    a_head, b_head = torch.zeros(12, 12), torch.zeros(4, 4)
    for x in samples.x:
        made = conv(x[None])
        hidden = functional.relu(made).flatten(1)
        logits = head(hidden)
        padded = functional.pad(x, (1, 1, 1, 1))
        for i in range(2):
            for j in range(2):
                patch = padded[:, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].flatten()
                patch = torch.cat([patch, torch.ones(1)])
                a += torch.outer(patch, patch)
        a_head += torch.outer(hidden[0], hidden[0]).detach()
        for log_probability in functional.log_softmax(logits[0], dim=0):
            p = log_probability.detach().exp()
            g, g_head = torch.autograd.grad(log_probability, [made, logits], retain_graph=True)
            b_head += p * torch.outer(g_head[0], g_head[0])
            for i in range(2):
                for j in range(2):
                    b += p * torch.outer(g[0, :, i, j], g[0, :, i, j])
    torch.testing.assert_close(found["0"].inputs, a / 4)
    torch.testing.assert_close(found["0"].outputs, b / 16)
    torch.testing.assert_close(found["3"].inputs, a_head / 4)
    torch.testing.assert_close(found["3"].outputs, b_head / 4)


def test_layers_that_are_used_twice_have_factors_of_both_uses():
    module, samples = shaken(Shared()), classes(torch.randn(5, 6), 3)
    likelihood = build_likelihood("categorical", Target("class", tuple("abc")))
    found = posterior(module, likelihood, samples)
    first = torch.relu(module.first(samples.x))
    second = torch.relu(module.twice(first))
    ones = torch.ones(5, 1)
    a = [torch.cat([h, ones], 1) for h in (first, second)]
    wanted = (a[0].T @ a[0] + a[1].T @ a[1]) / 5
    torch.testing.assert_close(found.factors["twice"].inputs, wanted)
    flat = torch.cat([found.diagonal[name].flatten() for name, _ in module.named_parameters()])
    torch.testing.assert_close(
        flat, fisher_by_loops(module, samples).diagonal(), rtol=1e-3, atol=1e-6
    )


class Tied(nn.Module):
    """An embedding that is the weight of the output layer as well."""

    def __init__(self):
        super().__init__()
        self.embedding, self.dense = nn.Embedding(4, 5), nn.Linear(5, 5)
        self.head = nn.Linear(5, 4, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(torch.tanh(self.dense(self.embedding(x).sum(1))))


@pytest.mark.parametrize(
    ("module", "factored"),
    [(Tied(), {"dense"}), (Recurrent(), {"dense", "head"})],
    ids=["tied", "lstm"],
)
def test_what_a_layer_does_not_see_whole_has_the_diagonal_alone(module, factored):
    module = shaken(module)
    x = torch.randint(4, (3, 5), generator=torch.Generator().manual_seed(0))
    count = len(module.head.weight)
    likelihood = build_likelihood("categorical", Target("class", tuple("abcd")[:count]))
    found = posterior(module, likelihood, classes(x, count))
    assert found.factors.keys() == factored
    flat = torch.cat([found.diagonal[name].flatten() for name, _ in module.named_parameters()])
    wanted = fisher_by_loops(module, classes(x, count)).diagonal()
    torch.testing.assert_close(flat, wanted, rtol=1e-3, atol=1e-6)
    assert found.diagonal.keys() >= {n for n, p in module.state_dict().items()}


def test_what_cannot_be_mapped_over_samples_is_computed_one_by_one():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.head = nn.Parameter(torch.rand(3)), nn.Linear(3, 4)

        def forward(self, x):
            x = x * self.scale
            return self.head(x if x.sum() > 0 else torch.tanh(x))

    module, samples = shaken(Branch()), classes(torch.rand(6, 3))
    with torch.no_grad():  # positive as the inputs, so that a batch answers as its samples
        module.scale.abs_()
    found = posterior(module, CLASSES, samples, CurvatureSettings(batch_size=1))
    wanted = fisher_by_loops(module, samples).diagonal()
    torch.testing.assert_close(found.diagonal["scale"], wanted[:3], rtol=1e-3, atol=1e-6)


def test_a_layer_whose_first_axis_is_not_of_samples_has_no_factors():
    """In attention written out, layers see [n, t, d]; here one sees [t, n, d] with t = n."""

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.head(torch.relu(self.body(x.transpose(0, 1))).mean(0))

    module, samples = shaken(Turned()), classes(torch.randn(5, 5, 3))
    found = posterior(module, CLASSES, samples)
    assert found.factors.keys() == {"head"}
    flat = torch.cat([found.diagonal[name].flatten() for name, _ in module.named_parameters()])
    wanted = fisher_by_loops(module, samples).diagonal()
    torch.testing.assert_close(flat, wanted, rtol=1e-3, atol=1e-6)
    attention = shaken(Attention())
    x = torch.randint(11, (3, 5))
    likelihood = build_likelihood("categorical", Target("class", tuple("abc")))
    found = posterior(attention, likelihood, classes(x, 3))
    assert found.factors.keys() == {
        *("query", "key", "value", "out", "gate", "up", "down", "head"),
    }


TARGETS = {
    "categorical": Target("class", tuple("abc")),
    "bernoulli": Target("class", ("no", "yes")),
    "multilabel": Target("labels", ("l", "m")),
    "gaussian": Target("real", ("r",), (2.0,), (3.0,)),
    "poisson": Target("count", ("c",)),
    "student-t": Target("real", ("r",), (2.0,), (3.0,)),
}
CLOSED = {
    "bernoulli": lambda f: f.sigmoid() * (1 - f.sigmoid()),
    "multilabel": lambda f: f.sigmoid() * (1 - f.sigmoid()),
    "poisson": lambda f: f.exp(),
}


@pytest.mark.parametrize("name", TARGETS)
def test_scores_give_the_fisher_matrix_in_the_outputs(name):
    """Drawn targets on average as the closed forms do; all have mean 0."""
    settings = {"noise": 0.5} if name in ("gaussian", "student-t") else {}
    likelihood = build_likelihood(name, TARGETS[name], **settings)
    f = torch.tensor([[0.3, -0.4, 1.0]])[:, : likelihood.outputs].repeat(20_000, 1)
    rng = torch.Generator().manual_seed(0)
    (drawn,) = scores(likelihood, f, 1, rng)
    found = drawn.T @ drawn / len(drawn)
    if name == "categorical":
        p = f[0].softmax(0)
        wanted = torch.diag(p) - torch.outer(p, p)
    elif name in CLOSED:
        wanted = torch.diag(CLOSED[name](f[0]))
    elif name == "gaussian":
        wanted = torch.eye(1) / 0.25
    else:  # Fisher information of the location of Student's t: (ν + 1) / ((ν + 3) σ²)
        freedom = likelihood.df
        wanted = torch.eye(1) * (freedom + 1) / (freedom + 3) / 0.25
    torch.testing.assert_close(found, wanted, rtol=0.06, atol=0.01)
    torch.testing.assert_close(drawn.mean(0), torch.zeros(f.shape[1]), rtol=0, atol=0.06)
    if name in ("categorical", "bernoulli"):
        exact = torch.stack(list(scores(likelihood, f[:1], None, rng)))[:, 0]
        torch.testing.assert_close(exact.T @ exact, wanted)


@pytest.mark.parametrize(
    ("first", "shape"),
    [
        (
            lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, track_running_stats=False)),
            (6,),
        ),
        (lambda: nn.BatchNorm2d(2, track_running_stats=False), (2, 4, 4)),
    ],
)
def test_networks_that_answer_a_sample_by_others_are_told(first, shape):
    torch.manual_seed(0)
    network = nn.Sequential(first(), nn.Flatten(), nn.LazyLinear(4))
    x = torch.randn(9, *shape)
    network(x)
    with pytest.raises(ModelError, match="depend on its batch, and a posterior sums up gradients"):
        posterior(network, CLASSES, classes(x))


def test_refusals_of_a_posterior():
    module = MLP(3, [], 2)
    quantile = build_likelihood("quantile", Target("real", ("r",), (0.0,), (1.0,)))
    with pytest.raises(ConfigError, match="no distribution, so there is no posterior"):
        list(scores(quantile, torch.zeros(2, quantile.outputs), None, torch.Generator()))
    with pytest.raises(ModelError, match="needs samples"):
        posterior(module, CLASSES, Samples(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)))
    module[1].weight.data[0, 0] = torch.nan
    two = build_likelihood("categorical", Target("class", ("a", "b")))
    with pytest.raises(ModelError, match="not finite: its training diverged"):
        posterior(module, two, classes(torch.randn(3, 3), 2))
    module[1].weight.data.fill_(3e38)  # finite, and outputs are not, which targets are drawn from
    with pytest.raises(ModelError, match="not finite: its training diverged"):
        posterior(module, two, classes(torch.ones(3, 3), 2), CurvatureSettings(draws=1))


def random_posteriors(count=3, seed=0):
    """Of a network of a layer with bias, one without, and a scale that has a diagonal alone."""
    rng = torch.Generator().manual_seed(seed)

    def moment(size):
        root = torch.randn(size, size + 3, generator=rng)
        return root @ root.T / size

    shapes = {"a.weight": (4, 3), "a.bias": (4,), "b.weight": (2, 1, 2, 2), "c.weight": (5,)}
    made = []
    for number in range(count):
        weights = {n: torch.randn(s, generator=rng) for n, s in shapes.items()}
        diagonal = {n: torch.rand(s, generator=rng) for n, s in shapes.items()}
        weights["c.steps"] = torch.tensor(10 * number)
        factors = {
            "a": KroneckerFactors(moment(4), moment(4)),
            "b": KroneckerFactors(moment(4), moment(2)),
        }
        made.append(Posterior(weights, 10 + 20 * number, None, factors, diagonal))
    return made


def test_regmean_of_linear_regressions_is_pooled_least_squares():
    """Least squares of each part, with intercepts, gives that of all of it."""
    rng = torch.Generator().manual_seed(0)
    parts, made = [], []
    for n in (9, 30, 14):
        x, y = torch.randn(n, 5, generator=rng), torch.randn(n, 2, generator=rng)
        a = torch.cat([x, torch.ones(n, 1)], dim=1)
        w = torch.linalg.lstsq(a, y).solution.T
        factors = {"0": KroneckerFactors(a.T @ a / n, torch.eye(2))}
        weights = {"0.weight": w[:, :5].contiguous(), "0.bias": w[:, 5].contiguous()}
        made.append(Posterior(weights, n, None, factors, {}))
        parts.append((a, y))
    pooled = torch.linalg.lstsq(*(torch.cat(p) for p in zip(*parts, strict=True))).solution.T
    for fuse in (regmean, kfac):  # with B = I they are one
        fused = fuse(made, NO_PRIOR)
        torch.testing.assert_close(fused["0.weight"], pooled[:, :5], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(fused["0.bias"], pooled[:, 5], rtol=1e-4, atol=1e-5)


def flat(posterior, layer):
    weight = posterior.weights[f"{layer}.weight"].flatten(1).double()
    bias = posterior.weights.get(f"{layer}.bias")
    return weight if bias is None else torch.cat([weight, bias.double()[:, None]], dim=1)


@pytest.mark.parametrize("layer", ["a", "b"])
@pytest.mark.parametrize("precision", [1e-6, 0.1])
def test_kfac_against_the_dense_system(layer, precision):
    made = random_posteriors()
    settings = AveragingSettings(precision=precision, tolerance=1e-12, iterations=5000)
    n = [one.samples for one in made]
    centre = sum(k * flat(p, layer) for k, p in zip(n, made, strict=True)) / sum(n)
    whole, right = 0, 0
    for k, one in zip(n, made, strict=True):
        f = one.factors[layer]
        matrix = k * torch.kron(f.outputs.double(), f.inputs.double())
        whole = whole + matrix
        right = right + matrix @ (flat(one, layer) - centre).flatten()
    prior = precision * whole.diagonal().mean() * torch.eye(len(whole))
    wanted = centre + torch.linalg.solve(whole + prior, right).reshape(centre.shape)
    fused = Posterior(kfac(made, settings), 1, None, {}, {})
    torch.testing.assert_close(flat(fused, layer), wanted, rtol=1e-4, atol=1e-5)
    scaled = AveragingSettings(precision=precision, scaling=0.7)
    identity = [
        Posterior(
            one.weights,
            one.samples,
            None,
            {
                name: KroneckerFactors(
                    0.7 * f.inputs + 0.3 * torch.diag(f.inputs.diagonal()), f.outputs
                )
                for name, f in one.factors.items()
            },
            one.diagonal,
        )
        for one in made
    ]
    plain = AveragingSettings(precision=precision, scaling=1)
    torch.testing.assert_close(regmean(made, scaled), regmean(identity, plain))


def test_that_conjugate_gradients_did_not_get_there_is_told():
    few = AveragingSettings(precision=1e-6, iterations=2)
    with pytest.warns(FedbayesWarning, match="stopped after 2 steps at a residual"):
        kfac(random_posteriors(), few)


def test_gradients_far_below_one_count_as_they_would_above():
    """As of networks that are sure of all their samples."""
    made = random_posteriors()
    tiny = [
        Posterior(
            one.weights,
            one.samples,
            None,
            {n: KroneckerFactors(f.inputs, 1e-25 * f.outputs) for n, f in one.factors.items()},
            one.diagonal,
        )
        for one in made
    ]
    for name, tensor in kfac(made).items():
        torch.testing.assert_close(kfac(tiny)[name], tensor, rtol=1e-3, atol=1e-3)


def test_fisher_is_its_formula_and_the_rest_is_the_mean():
    made = random_posteriors()
    n = [one.samples for one in made]
    for fused, names in (
        (fisher(made, NO_PRIOR), made[0].diagonal),
        (kfac(made, NO_PRIOR), ["c.weight"]),
    ):
        for name in names:
            top = sum(k * p.diagonal[name] * p.weights[name] for k, p in zip(n, made, strict=True))
            below = sum(k * p.diagonal[name] for k, p in zip(n, made, strict=True))
            torch.testing.assert_close(fused[name], top / below)
        assert fused["c.steps"] == round((30 * 10 + 50 * 20) / 90)
    mean = sum(k * p.weights["c.weight"] for k, p in zip(n, made, strict=True)) / sum(n)
    torch.testing.assert_close(regmean(made, NO_PRIOR)["c.weight"], mean)


@pytest.mark.parametrize("fuse", [regmean, fisher, kfac])
def test_what_all_agree_on_stays_and_nothing_known_is_the_mean(fuse):
    made = random_posteriors()
    same = [Posterior(made[0].weights, p.samples, None, p.factors, p.diagonal) for p in made]
    torch.testing.assert_close(fuse(same), made[0].weights)
    zero = [
        Posterior(
            one.weights,
            one.samples,
            None,
            {
                name: KroneckerFactors(torch.zeros_like(f.inputs), torch.zeros_like(f.outputs))
                for name, f in one.factors.items()
            },
            {name: torch.zeros_like(t) for name, t in one.diagonal.items()},
        )
        for one in made
    ]
    mean = combine([one.weights for one in made], [10 / 90, 30 / 90, 50 / 90])
    torch.testing.assert_close(fuse(zero), mean)


def test_refusals_of_posteriors_that_do_not_fit():
    one, two = random_posteriors(2)
    with pytest.raises(ModelError, match="no posteriors"):
        kfac([])
    less = Posterior(two.weights, 5, None, {}, two.diagonal)
    with pytest.raises(ModelError, match="posterior 1 has other layers"):
        kfac([one, less])
    none = Posterior(two.weights, 0, None, two.factors, two.diagonal)
    with pytest.raises(ModelError, match="has no samples"):
        regmean([one, none])
    odd = Posterior(two.weights, 5, None, {**two.factors, "a": two.factors["b"]}, two.diagonal)
    with pytest.raises(ModelError, match="factors of 'a' of shapes"):
        kfac([one, odd])
    wide = {**two.weights, "a.bias": torch.zeros(5)}
    with pytest.raises(ModelError, match=r"'a\.bias' of shape \(5,\)"):
        combine([one.weights, wide], [0.5, 0.5])
    del wide["a.bias"]
    with pytest.raises(ModelError, match=r"one of them has 'a\.bias'"):
        combine([one.weights, wide], [0.5, 0.5])


def test_the_mean_of_shares():
    a, b = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, -2.0])}
    torch.testing.assert_close(combine([a, b], [0.25, 0.75])["w"], torch.tensor([2.5, -1.0]))
    assert combine([{"n": torch.tensor(3)}, {"n": torch.tensor(4)}], [0.5, 0.5])["n"] == 4
    assert np.allclose(combine([a], [2.0])["w"], [2.0, 4.0])
