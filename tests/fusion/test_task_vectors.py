"""TIES and DARE against PEFT's functions, their formulas and closed forms."""

import pytest
import torch
from torch import nn

from fedbayes.core.pretrained import require
from fedbayes.errors import ModelError
from fedbayes.fusion.combining import Merging, combine
from fedbayes.fusion.settings import TaskVectorSettings
from fedbayes.fusion.task_vectors import dare, ties
from fedbayes.models import read_model
from tests.helpers.command_line import command


def states(count=3):
    """A start, and networks that left it; one tensor, with counters next to it."""
    torch.manual_seed(0)
    start = {"weight": torch.randn(6, 8), "seen": torch.tensor(4)}
    found = [
        {"weight": start["weight"] + torch.randn(6, 8), "seen": torch.tensor(4 + k)}
        for k in range(count)
    ]
    return start, found


def merging(start, found, alpha=None):
    alpha = alpha or [1 / len(found)] * len(found)
    return Merging(found, alpha, nn.Linear(8, 6), torch.zeros(1, 8), start)


@pytest.mark.parametrize("density", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("alpha", [[1 / 3] * 3, [0.5, 0.3, 0.2]])
def test_ties_is_that_of_peft(density, alpha):
    require("peft", "this test", ModelError)
    from peft.utils import merge_utils

    start, found = states()
    settings = TaskVectorSettings(density=density, scale=0.7)
    merged = ties(merging(start, found, alpha), settings).weights
    kept = [
        merge_utils.prune(one["weight"] - start["weight"], density, "magnitude") for one in found
    ]
    weighted = torch.stack(kept) * torch.tensor(alpha)[:, None, None]
    majority = merge_utils.calculate_majority_sign_mask(weighted, method="total")
    # PEFT divides a sum of weighted entries by their number, and the mean is by their weights.
    total = (weighted * majority).sum(0)
    shares = ((weighted != 0) * majority * torch.tensor(alpha)[:, None, None]).sum(0)
    wanted = start["weight"] + 0.7 * total / shares.clamp_min(1e-12)
    torch.testing.assert_close(merged["weight"], wanted)
    if len(set(alpha)) == 1:
        mean = merge_utils.disjoint_merge(torch.stack(kept), majority)
        torch.testing.assert_close(merged["weight"], start["weight"] + 0.7 * mean)
    assert int(merged["seen"]) == 5


def test_ties_by_hand():
    start = {"w": torch.zeros(1, 5)}
    found = [
        {"w": torch.tensor([[4.0, -3.0, 0.1, 2.0, 0.0]])},
        {"w": torch.tensor([[2.0, 5.0, 0.2, -1.0, 0.0]])},
    ]
    settings = TaskVectorSettings(density=0.6)
    result = ties(merging(start, found), settings)
    assert result.weights["w"].tolist() == [[3.0, 5.0, 0.0, 2.0, 0.0]]
    assert result.told["share_of_changes_that_agree"] == pytest.approx(4 / 6)


def test_dare_keeps_the_mean_and_the_share():
    start, found = states(2)
    draws = torch.stack(
        [
            dare(
                merging(start, found, [0.75, 0.25]),
                TaskVectorSettings(density=0.3, drop_seed=seed),
            ).weights["weight"]
            for seed in range(2000)
        ]
    )
    mean = 0.75 * found[0]["weight"] + 0.25 * found[1]["weight"]
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - mean).abs() < 5 * error).all()
    untouched = (draws == start["weight"]).float().mean()
    assert float(untouched) == pytest.approx(0.7**2, abs=0.01)


def test_with_all_changes_dare_is_the_average():
    start, found = states()
    settings = TaskVectorSettings(density=1.0)
    average = combine(found, [0.2, 0.3, 0.5])
    torch.testing.assert_close(
        dare(merging(start, found, [0.2, 0.3, 0.5]), settings).weights, average
    )


@pytest.mark.parametrize("merge", [ties, dare])
def test_a_start_that_does_not_fit_is_named(merge):
    _, found = states()
    with pytest.raises(ModelError, match="--base"):
        merge(merging(None, found), TaskVectorSettings())
    other = {"weight": torch.zeros(2, 2), "seen": torch.tensor(0)}
    with pytest.raises(ModelError, match=r"'weight' of shape \(2, 2\)"):
        merge(merging(other, found), TaskVectorSettings())


@pytest.mark.parametrize("method", ["ties", "dare"])
def test_of_files(tmp_path, capsys, method):
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    torch.save(start.state_dict(), tmp_path / "start.pt")
    files = []
    for number in range(2):
        files.append(tmp_path / f"client{number}.pt")
        torch.save({n: t + torch.randn(t.shape) for n, t in start.state_dict().items()}, files[-1])
    out = tmp_path / "fused.safetensors"
    asked = ("fuse", *files, "--out", out, "--method", method)
    assert command(*asked) == 2
    assert "--base" in capsys.readouterr().err
    assert not out.exists()
    assert command(*asked, "--base", tmp_path / "start.pt", "--density", "0.5") == 0, (
        capsys.readouterr().err
    )
    fused = read_model(out)[0]
    assert fused.keys() == start.state_dict().keys()
    assert any((fused[n] != t).any() for n, t in start.state_dict().items())
    onto = (*asked[:4], tmp_path / "start.pt", *asked[5:], "--base", tmp_path / "start.pt")
    assert command(*onto) == 2
    assert "would replace one of the inputs" in " ".join(capsys.readouterr().err.split())
