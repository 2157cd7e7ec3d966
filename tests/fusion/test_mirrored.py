"""One prediction for a photograph and its mirror image, against its formula."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from fedbayes.core.targets import Target
from fedbayes.fusion import fuse_functions
from fedbayes.fusion.distillation import distill
from fedbayes.fusion.function import HeldOut, teacher_of
from fedbayes.fusion.settings import DistillationSettings, FunctionSettings
from fedbayes.fusion.teacher import _correlations
from fedbayes.inputs import Inputs, build_prior
from fedbayes.likelihoods import build_likelihood
from tests.helpers.command_line import command

SHAPE = (3, 8, 8)
COUNTS = [[50, 3, 9], [0, 41, 20]]


def seen(name="leaves", shape=SHAPE):
    return Inputs(build_prior(name, shape), torch.full((3,), 0.5), torch.full((3,), 0.25))


def clients(outputs=3):
    """Networks that say much the same of an image and its mirror image."""
    torch.manual_seed(0)
    found = {}
    for name in ("a", "b"):
        layer = nn.Linear(3 * 8 * 8, outputs)
        weight = layer.weight.data.reshape(outputs, *SHAPE)
        weight += 0.5 * weight.flip(-1)
        found[name] = nn.Sequential(nn.Flatten(), layer)
    return found


class Sides(nn.Module):
    """Which side of an image is brighter, left, right or neither."""

    def __init__(self, scale):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, x):
        left, right = x[..., :4].mean((1, 2, 3)), x[..., 4:].mean((1, 2, 3))
        edge = (left - right) * self.scale
        return torch.stack([edge, torch.full_like(edge, 0.3), -edge], 1)


@pytest.mark.parametrize("warmth", [None, [1.3, 0.8]])
@pytest.mark.parametrize("counts", [COUNTS, None])
def test_it_is_the_mean_of_both_log_probabilities(counts, warmth):
    apart, _ = teacher_of(clients(), counts, None, warmth, seen())
    both, _ = teacher_of(clients(), counts, None, warmth, seen(), mirrored=True)
    x = torch.randn(6, *SHAPE)
    mean = (apart(x).log_softmax(1) + apart(x.flip(-1)).log_softmax(1)) / 2
    torch.testing.assert_close(both(x).log_softmax(1), mean.log_softmax(1))
    torch.testing.assert_close(both(x), both(x.flip(-1)))
    assert both.told == f"{apart.told}; each image counts with its mirror image"


@pytest.mark.parametrize("name", ["strokes", "noise"])
def test_what_is_no_photograph_is_not_mirrored(name):
    apart, _ = teacher_of(clients(), COUNTS, None, None, seen())
    found, _ = teacher_of(clients(), COUNTS, None, None, seen(name), mirrored=True)
    x = torch.randn(6, *SHAPE)
    assert torch.equal(found(x), apart(x))
    assert found.told == apart.told


def test_real_targets_are_not_mirrored():
    target = Target("real", ("age", "size"), (0.0, 0.0), (1.0, 1.0))
    kind = build_likelihood("auto", target)
    apart, _ = teacher_of(clients(4), None, kind)
    found, _ = teacher_of(clients(4), None, kind, None, seen(), mirrored=True)
    x = torch.randn(6, *SHAPE)
    assert torch.equal(found(x), apart(x))


def test_classes_that_are_each_other_in_a_mirror_stay():
    kind = build_likelihood("auto", Target("class", ("left", "neither", "right")))
    networks = {"a": Sides(3.0), "b": Sides(5.0)}
    found, _ = teacher_of(networks, [[30, 30, 30], [20, 20, 20]], kind, None, seen(), mirrored=True)
    left = torch.zeros(1, *SHAPE)
    left[..., :4] = 1.0
    assert found(left).argmax(1).tolist() == [0]
    assert found(left.flip(-1)).argmax(1).tolist() == [2]
    assert found.told.endswith(
        ". Mirror images do not count: in a mirror left and right change places"
    )


def test_correlations_are_those_of_all_log_odds():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(50, 4)), rng.normal(size=(50, 4))
    a[:, 3] = a[:, 2] + 1  # of which the log-odds say nothing
    found = _correlations(torch.tensor(a), torch.tensor(b))
    for j in range(4):
        for k in range(4):
            same = j == k or {j, k} == {2, 3}
            wanted = 1 if same else np.corrcoef(a[:, j] - a[:, k], b[:, j] - b[:, k])[0, 1]
            assert found[j, k] == pytest.approx(wanted)


def test_held_out_clients_answer_for_themselves():
    teacher, _ = teacher_of(clients(), COUNTS, None, [1.3, None], seen(), mirrored=True)
    held_out = HeldOut(teacher, seen())
    x = torch.cat(held_out.inputs)
    torch.testing.assert_close(held_out.taught, teacher(x))
    for said, client in zip(held_out.clients, teacher.clients, strict=True):
        torch.testing.assert_close(said, client(x))


def test_each_prediction_is_learnt_in_both_directions():
    """So a mirrored teacher is asked once in two images, and training takes as long as without."""
    asked, learnt = [], []
    student = clients()["a"]
    student.register_forward_pre_hook(lambda _, given: learnt.append(given[0].clone()))
    teacher, _ = teacher_of(clients(), COUNTS, None, None, seen(), mirrored=True)
    teacher.clients = (lambda x, own=teacher.clients[0]: asked.append(x) or own(x),) * 2
    many = 32
    steps = 4 * many  # twice in two directions
    chosen = DistillationSettings(steps=steps, repeats=2, held_out=512, checks=1, draws=512)
    before = len(asked)
    distill(student, teacher, seen(), chosen)
    of_batches = [x for x in learnt if len(x) == 64]
    assert len(of_batches) >= steps
    first, second = of_batches[:many], of_batches[many : 2 * many]
    for x, other in zip(first, second, strict=True):
        torch.testing.assert_close(x.flip(-1), other)
    torch.testing.assert_close(first[0], of_batches[2 * many])
    batches = [x for x in asked[before:] if len(x) == 64]
    assert len(batches) == many * 2 * 2  # two clients, two directions


def test_a_fused_network_predicts_both_alike():
    """Without it the network learns what the clients say of each direction."""
    networks, x = clients(), seen().batch(7, 256)
    gaps = []
    for mirrored in (True, False):
        chosen = FunctionSettings(draws=512, mirrored=mirrored, distillation=None)
        module = fuse_functions(
            networks, networks["a"], seen(), counts=COUNTS, settings=chosen
        ).module.requires_grad_(False)
        gaps.append(float((module(x).softmax(1) - module(x.flip(-1)).softmax(1)).abs().mean()))
    assert gaps[0] < gaps[1] / 3


def test_the_command_says_so(photos, tmp_path, capsys):
    words = ("fuse", *photos, "--shape", "3,8,8", "--model", "tests.helpers.eyes:eyes")
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps([[9, 4, 3, 2], [2, 9, 4, 3], [5, 5, 5, 5]]))
    words += (
        "--counts",
        counts,
        "--minutes",
        "0",
        "--set",
        "function.draws=512",
        "--report",
        tmp_path / "r.json",
    )
    for options, told in ((), True), (("--set", "function.mirrored=false"), False):
        assert command(*words, "-o", tmp_path / "g.pt", *options) == 0, capsys.readouterr().err
        notes = " ".join(json.loads((tmp_path / "r.json").read_text())["notes"])
        assert ("; each image counts with its mirror image" in notes) is told
    assert np.isfinite(json.loads((tmp_path / "r.json").read_text())["divergence"])
