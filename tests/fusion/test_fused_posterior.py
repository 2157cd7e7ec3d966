"""`fedbayes fuse --posterior`: how sure the fused network is."""

import json

import numpy as np
import pytest
import torch

from fedbayes.errors import ModelError
from fedbayes.fusion import calibration
from fedbayes.fusion.calibration import FIRST, FITTED
from fedbayes.fusion.draws import CHUNK
from fedbayes.fusion.function import HeldOut, fuse_functions, teacher_of
from fedbayes.fusion.laplace import expected, features
from fedbayes.fusion.settings import FunctionSettings
from fedbayes.inputs import Inputs, build_prior
from fedbayes.models import MLP, read_program
from tests.helpers.command_line import command

INPUTS = Inputs(build_prior("gaussian", (6,)), torch.tensor(0.0), torch.tensor(1.0), seed=3)
COUNTS = [[9, 1, 0], [0, 8, 2], [3, 0, 7]]
WITH = FunctionSettings(draws=512, distillation=None, posterior="last-layer")


def networks():
    found = {}
    for seed in range(3):
        torch.manual_seed(seed)
        network = MLP(6, [7], 3).eval()
        with torch.no_grad():
            network[3].weight.mul_(6)  # sure of what it says
        found[f"n{seed}"] = network
    return found


@pytest.fixture
def files(tmp_path):
    paths = []
    for name, network in networks().items():
        paths.append(tmp_path / f"{name}.pt")
        torch.save(network.state_dict(), paths[-1])
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps(COUNTS))
    return [*paths, "--counts", counts, "--minutes", "0", "--method", "function"]


class Recorded:
    """Draws, and the numbers of the batches that were asked for."""

    seed, mirrors = 3, False

    def __init__(self):
        self.numbers = set()

    def batch(self, number, count):
        self.numbers.add(number)
        return INPUTS.batch(number, count)

    def augmented(self, x, rng):
        return x


def test_it_is_fitted_to_the_teacher_on_draws_that_nothing_is_compared_on():
    clients, draws = networks(), Recorded()
    fusion = fuse_functions(clients, clients["n0"], draws, counts=COUNTS, settings=WITH)
    found = fusion.calibration
    assert found.samples == 30
    assert {-1 - FIRST - number for number in range(FITTED)} <= draws.numbers
    teacher, _ = teacher_of(clients, COUNTS, None)
    held_out = HeldOut(teacher, INPUTS)
    assert sum(map(len, held_out.inputs)) == FIRST * CHUNK
    for network, said in (
        (found.module, found.divergence),
        (found.cooled, found.divergence_cooled),
    ):
        wanted = held_out.likeness(held_out.outputs(network)).divergence
        assert said == pytest.approx(wanted)

    def far(logits, target):
        return float((target.exp() * (target - logits.log_softmax(-1))).sum(-1).mean())

    x = torch.cat([INPUTS.batch(-1 - FIRST - number, CHUNK) for number in range(FITTED)])
    with torch.no_grad():
        logits, target = fusion.module(x).double(), teacher(x).double().log_softmax(-1)
        h, f = features(fusion.module, fusion.module[3], x)
        covariance = found.module[3].covariance(h)
        with_posterior = expected(f, covariance) / found.gaussian.temperature
        torch.testing.assert_close(found.module(x), with_posterior)
    least = far(logits / found.cooled.temperature, target)
    for other in (0.9, 1.1):
        assert far(logits / (other * found.cooled.temperature), target) >= least
    assert far(with_posterior.double(), target) <= least + 1e-6, "no worse than p = ∞"


def test_it_is_said_where_it_changes_nothing():
    """One network and its copy are as sure as both together."""
    network = networks()["n0"]
    clients = {"a": network, "b": network}
    fusion = fuse_functions(clients, network, INPUTS, counts=[[5, 5, 5]] * 2, settings=WITH)
    assert any("no better confidence" in note for note in fusion.notes)
    x, (wanted, _) = INPUTS.batch(9, 50), teacher_of(clients, [[5, 5, 5]] * 2, None)
    with torch.no_grad():
        torch.testing.assert_close(
            fusion.calibration.module(x).softmax(-1), wanted(x).softmax(-1), atol=3e-2, rtol=0
        )


@pytest.mark.slow
def test_a_program_has_it_and_the_report_says_what_it_did(files, tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(200, 6)).astype(np.float32), rng.integers(3, size=200)
    np.savez(tmp_path / "test.npz", x=x, y=y)
    out, plain = tmp_path / "g.pt2", tmp_path / "plain.pt2"
    wish = ("--posterior", "last-layer", "--test", tmp_path / "test.npz")
    for report in (tmp_path / "r.json", tmp_path / "r.html"):
        assert command("fuse", *files, "-o", out, *wish, "--report", report) == 0
    assert command("fuse", *files, "-o", plain) == 0
    whole = json.loads((tmp_path / "r.json").read_text())
    told = whole["posterior"]
    assert whole["frontier"][0]["nll"] == told["test"]["posterior"]["nll"]
    assert "Confidence</h2>" in (tmp_path / "r.html").read_text()
    assert (told["kind"], told["samples"], told["factors"]) == ("last-layer", 30, False)
    for path, way in ((out, "posterior"), (plain, "network")):
        with torch.no_grad():
            p = read_program(path)[0](torch.from_numpy(x)).softmax(-1)
        sure, right = p.max(-1).values, p.argmax(-1).numpy() == y
        gaps = 0.0
        for low in range(15):
            rows = ((sure >= low / 15) & (sure < (low + 1) / 15)).numpy()
            if rows.any():
                gaps += abs(right[rows].mean() - sure.numpy()[rows].mean()) * rows.mean()
        assert told["test"][way]["ece"] == pytest.approx(gaps, abs=1e-4)
        nll = -p[torch.arange(200), torch.from_numpy(y)].log().mean()
        assert told["test"][way]["nll"] == pytest.approx(float(nll), rel=1e-4)
    assert told["divergence"].keys() == told["test"].keys()


@pytest.mark.slow
def test_a_program_has_that_of_all_layers_and_predicts_by_it(files, tmp_path):
    out, report = tmp_path / "g.pt2", tmp_path / "r.json"
    wish = ("--posterior", "kronecker", "--report", report, "--json")
    assert command("fuse", *files, "-o", out, *wish, "--seed", "3") == 0
    settings = WITH.model_copy(update={"posterior": "kronecker", "draws": 4096})
    clients = networks()
    fusion = fuse_functions(clients, clients["n0"], INPUTS, counts=COUNTS, settings=settings)
    found, told = fusion.calibration, json.loads(report.read_text())["posterior"]
    assert (told["kind"], told["layers"], told["fixed"]) == ("kronecker", ["1", "3"], [])
    assert told["precision"] == pytest.approx(found.gaussian.precision)
    assert told["divergence"]["posterior"] == pytest.approx(found.divergence, rel=1e-3)
    assert told["multiplications"] > 3 * 65, "a pass for each class, at least"
    x = INPUTS.batch(9, 7)
    np.savez(tmp_path / "x.npz", x=x.numpy())
    rows = tmp_path / "p.csv"
    assert command("predict", out, tmp_path / "x.npz", "-o", rows) == 0
    given = np.genfromtxt(rows, delimiter=",", skip_header=1)[:, :3]
    with torch.no_grad():
        wanted = found.module(x).softmax(-1).numpy()
        plain = fusion.module(x).softmax(-1).numpy()
    np.testing.assert_allclose(given, wanted, atol=1e-4)
    assert abs(given - plain).max() > 1e-3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-o", "g.pt", "--posterior", "last-layer"), "write a program, as in -o g.pt2"),
        (("-o", "g.pt2", "--posterior", "all"), "--posterior all: choose last-layer, kronecker"),
        (("-o", "g.pt2", "--posterior", "last-layer", "--method", "gpi-fnm"), "no effect"),
    ],
)
def test_mistakes_are_told(files, tmp_path, options, words, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    assert command("fuse", *files, *options) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert set(tmp_path.iterdir()) == before


def test_many_classes_have_factors_and_very_many_none(monkeypatch):
    """Memory of a whole covariance grows with the cube of the classes."""
    clients = networks()
    monkeypatch.setattr(calibration, "MEMORY", 8 * 3 * 24 * FITTED * CHUNK)
    found = fuse_functions(clients, clients["n0"], INPUTS, counts=COUNTS, settings=WITH)
    assert not found.calibration.gaussian.left.numel()
    monkeypatch.setattr(calibration, "MEMORY", calibration.MEMORY - 1)
    found = fuse_functions(clients, clients["n0"], INPUTS, counts=COUNTS, settings=WITH)
    assert found.calibration.gaussian.left.shape == (3, 3)
    most = {name: MLP(6, [3], 201) for name in "ab"}
    with pytest.raises(ModelError, match="up to 200 classes"):
        fuse_functions(most, most["a"], INPUTS, counts=torch.ones(2, 201).long(), settings=WITH)


def test_without_counts_and_without_layers_there_is_none(files, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wish = ("-o", "g.pt2", "--posterior", "last-layer", "--minutes", "0")
    alone = [*files[:3], "--method", "function"]
    assert command("fuse", *alone, *wish) == 2
    assert "--counts" in " ".join(capsys.readouterr().err.split())
    assert command("fuse", *files, "-o", "a.pt2") == 0
    assert command("fuse", *files, "-o", "b.pt2", "--seed", "2") == 0
    (tmp_path / "c.json").write_text("[[5], [6]]")
    shape = ("--shape", "6", "--classes", "3", "--counts", "c.json")
    prior = ("--inputs", "test.npz")
    np.savez("test.npz", x=np.random.default_rng(0).normal(size=(600, 6)), y=np.zeros(600, int))
    capsys.readouterr()
    assert command("fuse", "a.pt2", "b.pt2", *shape, *prior, *wish) == 2
    assert "graphs of operations" in " ".join(capsys.readouterr().err.split())
