"""Networks whose outputs are in another order than the classes they are compared with."""

import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedbayes
from fedbayes.errors import FedbayesWarning
from fedbayes.workflows.fuse.posterior_files import PosteriorJob
from fedbayes.workflows.serve.output_order import GAIN, other_order
from tests.helpers.command_line import command

NAMES = ["mild", "moderate", "severe"]


def test_the_order_is_the_best_of_all():
    """By a search through all orders."""
    rng = torch.Generator().manual_seed(0)
    for count in (2, 3, 5):
        classes = torch.randint(count, (400,), generator=rng)
        moved = torch.randperm(count, generator=rng)
        outputs = moved[classes]
        noise = torch.rand(400, generator=rng) < 0.2
        outputs[noise] = torch.randint(count, (int(noise.sum()),), generator=rng)

        def share(order, outputs=outputs, classes=classes):
            return float((torch.tensor(order)[outputs] == classes).double().mean())

        best = max(itertools.permutations(range(count)), key=share)
        plain = share(tuple(range(count)))
        found = other_order(outputs, classes, count)
        if share(best) - plain < GAIN:
            assert found is None
            continue
        assert found is not None
        assert found.classes == best
        assert found.assumed == pytest.approx(plain)
        assert found.found == pytest.approx(share(best))


def test_nothing_is_found_where_the_order_fits_or_a_class_is_rare():
    classes = torch.arange(300) % 3
    assert other_order(classes, classes, 3) is None
    one = torch.full((300,), 2)  # a network that has seen a single class
    assert other_order(one, classes, 3) is None
    assert other_order(classes, one, 3) is None
    assert other_order(classes[:0], classes[:0], 3) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Rows of three classes, and the weights of the rule that made them, in two orders."""
    path = tmp_path_factory.mktemp("orders")
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(300, 4)).astype(np.float32), rng.normal(size=(3, 4))
    hidden = np.concatenate([np.eye(4), -np.eye(4)])
    y = (x @ weight.T).argmax(1)
    table = pd.DataFrame(x, columns=list("abcd"))
    table.assign(grade=np.array(NAMES)[y]).to_csv(path / "rows.csv", index=False)
    for name, order in (("plain", [0, 1, 2]), ("moved", [2, 0, 1])):
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        last = np.concatenate([weight, -weight], axis=1)[order]
        with torch.no_grad():
            for at, value in ((0, hidden), (2, last)):
                net[at].weight.copy_(torch.from_numpy(value))
                net[at].bias.zero_()
        torch.save(net.state_dict(), path / f"{name}.pt")
    return path


DATA = ("--set", "data.label=grade")
MOVED = "data.classes=severe,mild,moderate"


def test_evaluate_warns(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    rows = ("--set", "data.path=rows.csv", *DATA)
    assert command("evaluate", "moved.pt", *rows) == 0
    err = capsys.readouterr().err
    assert "moved.pt does not name its classes: its accuracy is 0." in err
    assert f"and 1.000 in another. If it was trained so, set {MOVED}" in err
    for more in (("moved.pt", "--set", MOVED), ("plain.pt",)):
        assert command("evaluate", *more, *rows) == 0
        out, err = capsys.readouterr()
        assert "name its classes" not in err
        assert "1.0000" in out


def test_posterior_warns(folder, tmp_path):
    given = ["data.label=grade"]
    job = PosteriorJob(folder / "moved.pt", folder / "rows.csv", tmp_path / "a.safetensors", given)
    with pytest.warns(FedbayesWarning, match=MOVED):
        job.run()


def test_fuse_warns(folder, tmp_path):
    files = [folder / "plain.pt", folder / "moved.pt"]
    given = {"shape": (4,), "minutes": 0, "method": "function"}
    with pytest.warns(FedbayesWarning, match="agrees with plain on .* as the classes 2,0,1"):
        fedbayes.fuse(files, out=tmp_path / "fused.pt", **given)
