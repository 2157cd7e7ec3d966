"""Images moved to the statistics of batch normalization, against PyTorch and steps by hand."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional

from fedbayes.core.targets import Target
from fedbayes.fusion.frozen import frozen
from fedbayes.fusion.function import fuse_functions
from fedbayes.fusion.norm_matching import NormMatched, norm_matched, normalizations, statistics_gap
from fedbayes.fusion.settings import DistillationSettings, FunctionSettings
from fedbayes.fusion.teacher import Teacher
from fedbayes.inputs import Inputs, build_prior
from fedbayes.inputs.samples import RealSamples
from fedbayes.likelihoods import build_likelihood

THREE = build_likelihood("categorical", Target("class", ("a", "b", "c")))


def network(seed, shift=0.2):
    """Of images of 3 × 8 × 8, with statistics of darker or brighter ones than a prior draws."""
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3)]
    module = nn.Sequential(*layers, nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(80, 3))
    module[1].momentum = module[4].momentum = None
    module(0.6 * leaves().batch(7, 400) + shift)
    return module.eval()


class NoGradients(nn.Module):
    """The same, without gradients."""

    def forward(self, x):
        return x.detach()


def leaves(seed=0):
    """Photographs as networks see them."""
    return Inputs(build_prior("leaves", (3, 8, 8)), torch.zeros(3), torch.ones(3), seed)


def test_a_gap_is_the_divergence_of_normals_at_each_layer():
    module, x = network(0), torch.rand(50, 3, 8, 8)
    found, outputs = statistics_gap(frozen(module), x)
    wanted = torch.tensor(0.0)
    for layer, norm in ((1, module[1]), (4, module[4])):
        seen = module[:layer](x).detach().transpose(0, 1).flatten(1)
        std = (seen.var(1, correction=0) + norm.eps).sqrt()
        own = Normal(norm.running_mean, (norm.running_var + norm.eps).sqrt())
        wanted = wanted + kl_divergence(Normal(seen.mean(1), std), own).mean()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(outputs, module(x).detach())
    assert not any(layer._forward_pre_hooks for layer in module.modules())


def test_one_step_is_down_the_slope_of_gap_and_classes():
    module, draws = network(0, shift=0.4), leaves()
    own = NormMatched(draws, [frozen(module)], torch.ones(1, 3), THREE, steps=1)
    x, classes = draws.batch(0, 40), torch.arange(40) % 3
    leaf = x.clone().requires_grad_()
    gap, outputs = statistics_gap(frozen(module), leaf)
    (gap + 0.3 * functional.cross_entropy(outputs, classes)).backward()
    slope = functional.avg_pool2d(leaf.grad, 3, 1, 1, count_include_pad=False)
    slope = slope / slope.square().mean((1, 2, 3), keepdim=True).sqrt()
    low, high = x.amin((0, 2, 3), keepdim=True), x.amax((0, 2, 3), keepdim=True)
    wanted = (x - 0.1 * x.std() * slope).clamp(low, high)
    torch.testing.assert_close(own.matched(x, own.clients[0], classes), wanted)


def test_draws_come_near_the_statistics_and_classes_of_their_client():
    clients, draws = [network(0), network(1, shift=0.4)], leaves()
    counts = torch.tensor([[0, 50, 0], [0.0, 0, 0]])
    matched = NormMatched(draws, [frozen(c) for c in clients], counts, THREE, steps=5)
    x, moved = draws.batch(3, 600), matched.batch(3, 600)
    assert torch.equal(moved, matched.batch(3, 600))
    assert not torch.equal(moved, matched.batch(-3, 600))
    assert moved.min() >= x.min()
    assert moved.max() <= x.max()
    before, after = (statistics_gap(frozen(clients[0]), each) for each in (x, moved))
    assert after[0] < before[0] / 3
    wanted = torch.ones(600, dtype=torch.int64)
    assert THREE.log_prob(after[1], wanted).mean() > THREE.log_prob(before[1], wanted).mean()
    rng = torch.Generator().manual_seed(0)
    inner = matched.augmented(moved, rng)[:, :, 2:-2, 2:-2]
    windows = [
        each[:, :, i : i + 4, j : j + 4]
        for each in (moved, moved.flip(-1))
        for i in range(5)
        for j in range(5)
    ]
    same = torch.stack([(inner == window).flatten(1).all(1) for window in windows])
    assert (same.sum(0) == 1).all()
    assert (same.sum(1) > 0).all()
    assert 200 < same[:25].sum() < 400


def test_clients_are_drawn_by_their_samples():
    clients = [frozen(network(0)), frozen(network(1, shift=0.4))]
    gaps = []
    for shares in ([1.0, 0.0], [0.0, 1.0]):
        counts = torch.tensor(shares)[:, None]
        moved = NormMatched(leaves(), clients, counts, None, steps=5).batch(0, 256)
        gaps.append([float(statistics_gap(client, moved)[0]) for client in clients])
    assert gaps[0][0] < gaps[1][0]
    assert gaps[1][1] < gaps[0][1]


def test_only_invented_images_of_such_networks_are_moved(tmp_path):
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 3))
    counts, own = torch.tensor([[5.0, 5, 5], [5, 5, 5]]), network(0)
    teacher = Teacher([own, plain], counts=counts)
    assert [len(normalizations(client)) for client in teacher.clients] == [2, 0]
    matched = norm_matched(teacher, leaves(), [15, 15], FunctionSettings())
    assert isinstance(matched.draws, NormMatched)
    assert matched.draws.counts.tolist() == [[5, 5, 5]]
    path = tmp_path / "real.npz"
    np.savez(path, x=np.random.default_rng(0).random((40, 3, 8, 8), np.float32))
    real = Inputs(RealSamples(path, (3, 8, 8)), torch.zeros(3), torch.ones(3))
    large = Inputs(build_prior("leaves", (3, 65, 64)), torch.zeros(3), torch.ones(3))
    for who, draws, steps in (
        (teacher, leaves(), 0),
        (Teacher([nn.Sequential(NoGradients(), *network(0))]), leaves(), 5),
        (teacher, large, None),
        (teacher, real, 5),
        (Teacher([plain, plain], counts=counts), leaves(), 5),
    ):
        same = norm_matched(who, draws, [15, 15], FunctionSettings(matched=steps))
        assert torch.equal(same.batch(0, 8), draws.batch(0, 8))


@pytest.mark.parametrize("distillation", [None, DistillationSettings(minutes=5)])
def test_limited_time_is_for_training(distillation):
    settings = FunctionSettings(distillation=distillation)
    found = norm_matched(Teacher([network(0)]), leaves(), None, settings)
    assert not isinstance(found.draws, NormMatched)


@pytest.mark.parametrize("samples", [None, [18.0, 36.0]])
def test_without_classes_clients_count_by_their_samples(samples):
    teacher = Teacher([network(0), network(1)])
    found = norm_matched(teacher, leaves(), samples, FunctionSettings(matched=1)).draws
    assert found.kind is None
    assert found.counts[:, 0].tolist() == (samples or [1, 1])


def test_fusing_says_that_images_were_moved():
    clients, counts = {"north": network(0), "south": network(1)}, [[9, 9, 0], [0, 9, 9]]
    settings = FunctionSettings(draws=512, matched=5, distillation=None)
    fused = fuse_functions(clients, clients["north"], leaves(), counts=counts, settings=settings)
    assert any("batch normalization" in note for note in fused.notes)
    still = settings.model_copy(update={"matched": 0})
    other = fuse_functions(clients, clients["north"], leaves(), counts=counts, settings=still)
    assert not any("batch normalization" in note for note in other.notes)
