"""`fedbayes fuse --method function`: networks from files, made one without data."""

import contextlib
import copy
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import fedbayes
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples
from fedbayes.data import Preprocessing
from fedbayes.errors import ConfigError, FedbayesWarning, ModelError
from fedbayes.fusion import choice, function, targets
from fedbayes.fusion.class_counts import RESTART
from fedbayes.fusion.curvature import posterior
from fedbayes.fusion.distillation import DistillationProgress
from fedbayes.fusion.function import HeldOut, fuse_functions, teacher_of
from fedbayes.fusion.graph_matching import match_graph
from fedbayes.fusion.settings import DistillationSettings, FunctionSettings, SeekingSettings
from fedbayes.inputs import Inputs, build_prior
from fedbayes.likelihoods import build_likelihood
from fedbayes.matching import MatchingSettings
from fedbayes.models import MLP, read_model, read_program
from fedbayes.runs.build import build_runtime, stored_data
from fedbayes.storage.card import Card
from fedbayes.storage.folder import RunFolder
from fedbayes.workflows.fuse import graph_fusing, network_fusing
from fedbayes.workflows.fuse.frontier import SizeTradeoff, average, multiplications
from fedbayes.workflows.fuse.posterior_files import sent_counts
from fedbayes.workflows.serve.export import program_file
from fedbayes.workflows.serve.model_files import write_model
from tests.helpers.cases import cases
from tests.helpers.command_line import command
from tests.helpers.eyes import OF_EYES, Eyes, Tied
from tests.helpers.toy_inputs import Gauss
from tests.helpers.toy_inputs import inputs as toy_inputs

QUICK = FunctionSettings(draws=1024, distillation=DistillationSettings(steps=30))
SMALL = ("--minutes", "0", "--seed", "1", "--set", "function.draws=512")


@pytest.fixture(scope="module")
def inputs():
    return Inputs(build_prior("gaussian", (6,)), torch.tensor(0.0), torch.tensor(1.0), seed=3)


def networks(count=3, hidden=7):
    found = {}
    for number in range(count):
        torch.manual_seed(number)
        found[f"n{number}"] = MLP(6, [hidden], 3).eval()
    return found


def test_weights_load_into_the_factory_and_the_report_tells_all(photos, tmp_path):
    out, report, picture = tmp_path / "g.pt", tmp_path / "r.json", tmp_path / "in.png"
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps([[5, 0, 1, 2], [0, 5, 1, 2], [1, 1, 4, 2]]))
    scaling = ("--mean", "0.5,0.5,0.4", "--std", "0.2")
    status = command(
        *("fuse", *photos, "-o", out, *OF_EYES, *scaling, "--counts", counts, *SMALL),
        *("--report", report, "--show-inputs", picture),
    )
    assert status == 0
    fresh = Eyes((3, 8, 8), 4)
    fresh.load_state_dict(read_model(out)[0])
    told = json.loads(report.read_text())
    assert told["inputs"]["name"] == "leaves"
    assert told["clients"].keys() == {"c0", "c1", "c2"}
    assert told["parameters"] == sum(p.numel() for p in fresh.parameters())
    worst = max(one["divergence"] for one in told["clients"].values())
    assert 0 <= told["divergence"] < worst
    assert [row["name"] for row in told["with_each_client"]] == ["c0", "c1", "c2", "ensemble"]
    assert told["sent"] == ["their weights", "counts of samples"]
    assert picture.stat().st_size > 10_000


def written_as(program, photos):
    """A fused network as a program; raw inputs, and the answers of its weights to them."""
    weights = program.with_suffix(".safetensors")
    for out in (program, weights):
        scaling = ("--mean", "0.5", "--std", "0.25")
        assert command("fuse", *photos, "-o", out, *OF_EYES, *scaling, *SMALL) == 0
    fresh = Eyes((3, 8, 8), 4).eval()
    fresh.load_state_dict(read_model(weights)[0])
    x = torch.rand(5, 3, 8, 8)
    with torch.no_grad():
        return x, fresh((x - 0.5) / 0.25)


@pytest.mark.slow
def test_a_program_runs_without_the_package_and_standardizes_by_itself(photos, tmp_path):
    """Its answers are those of the weights, at raw inputs, in a process that has no fedbayes."""
    x, wanted = written_as(tmp_path / "g.pt2", photos)
    torch.save(x, tmp_path / "x.pt")
    code = (
        "import sys, torch\n"
        "program = torch.export.load('g.pt2').module()\n"
        "assert not any(name.startswith('fedbayes') for name in sys.modules)\n"
        "torch.save(program(torch.load('x.pt')), 'y.pt')\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    torch.testing.assert_close(torch.load(tmp_path / "y.pt"), wanted)


@pytest.mark.slow
def test_an_onnx_program_answers_as_the_weights_do(photos, tmp_path, capsys):
    onnxruntime = pytest.importorskip("onnxruntime")
    x, wanted = written_as(tmp_path / "g.onnx", photos)
    session = onnxruntime.InferenceSession(tmp_path / "g.onnx")
    (found,) = session.run(None, {"samples": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), wanted)
    capsys.readouterr()
    more = ("--posterior", "kronecker", "--counts", tmp_path / "n.json")
    (tmp_path / "n.json").write_text("[[5, 0, 1, 2], [0, 5, 1, 2], [1, 1, 4, 2]]")
    out = tmp_path / "h.onnx"
    assert command("fuse", *photos, "-o", out, *OF_EYES, *SMALL, *more) == 2
    assert "has no ONNX form" in capsys.readouterr().err
    assert not out.exists()


class Waves(Eyes):
    """The same network after a function that ONNX does not know."""

    def forward(self, x):
        return super().forward(torch.special.bessel_j0(x))


def waves(shape, classes):
    return Waves(shape, classes)


@pytest.mark.parametrize("method", ["function", "match"])
def test_networks_without_an_onnx_form_are_rejected_before_the_work(
    method, photos, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(network_fusing, "fuse_functions", None)
    monkeypatch.setattr(graph_fusing, "match_graph", None)
    out = tmp_path / "g.onnx"
    model = ("--model", f"{__name__}:waves", *OF_EYES[2:])
    assert command("fuse", *photos, "-o", out, *model, "--method", method) == 2
    error = capsys.readouterr().err
    assert "PyTorch finds no ONNX form of the network. Write a .pt2 program" in error
    assert not out.exists()


class Scaled(nn.Module):
    """A network of raw inputs: they are scaled by tensors of its own first."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.register_buffer("mean", torch.tensor(0.5))
        self.register_buffer("factor", torch.tensor(4.0))

    def forward(self, x):
        return self.network((x - self.mean) * self.factor)


class Untied(Tied):
    """The same without a name for what is there twice."""

    def __init__(self, classes):
        super().__init__(classes)
        del self.again


@pytest.mark.parametrize(
    "method", cases(["function", "match", "permute", "c2m3", "average"], slow=["c2m3"])
)
def test_tensors_that_layers_share_have_one_name_of_several(method, tmp_path, capsys):
    """What comes out is what networks give whose layers have one name each, and stays shared."""
    given = {}
    for kind in (Tied, Untied):
        for number in range(2):
            torch.manual_seed(number)
            path = tmp_path / f"{kind.__name__}{number}.pt"
            network = kind(3)
            torch.save(network.state_dict(), path)
            given.setdefault(kind, []).append(path)
    scale = ["--set", "function.draws=512"] if method == "function" else []
    places = {"tied": "tests.helpers.eyes", "untied": "tests.workflows.fuse.test_network_fusing"}
    for kind, factory in ((Tied, "tied"), (Untied, "untied")):
        asked = (
            "--model",
            f"{places[factory]}:{factory}",
            "--shape",
            6,
            "--classes",
            3,
        )
        minutes = SMALL if method == "function" else ()
        out = tmp_path / f"{factory}.pt"
        status = command(
            "fuse", *given[kind], "-o", out, "--method", method, *asked, *scale, *minutes
        )
        assert status == 0, capsys.readouterr().err
        said = capsys.readouterr().out
        assert "are not used" not in said
        count = sum(parameter.numel() for parameter in kind(3).parameters())
        assert f" {count} parameters" in said
    fused = torch.load(tmp_path / "tied.pt")
    other = torch.load(tmp_path / "untied.pt")
    assert all(torch.equal(fused[name], tensor) for name, tensor in other.items())
    assert torch.equal(fused["one.weight"], fused["two.weight"])
    assert torch.equal(fused["first.bias"], fused["again.bias"])
    parted = dict(torch.load(given[Tied][0]))
    parted["two.weight"] = parted["two.weight"] + 1
    torch.save(parted, given[Tied][0])
    asked = (
        "--model",
        "tests.helpers.eyes:tied",
        "--shape",
        6,
        "--classes",
        3,
    )
    assert command("fuse", *given[Tied], "-o", tmp_path / "g.pt", *asked, "--method", method) == 2
    assert "has no weights of model" in capsys.readouterr().err


def untied(shape, classes):
    return Untied(classes)


def test_programs_are_fused_as_the_weights_in_them_are(photos, tmp_path):
    """Also where tensors that nobody learns come before the first layer."""
    networks, programs = {}, {}
    for path in photos:
        networks[path.stem] = Eyes((3, 8, 8), 4).eval()
        networks[path.stem].load_state_dict(torch.load(path))
        batch = {0: torch.export.Dim("batch")}
        whole = torch.export.export(
            Scaled(networks[path.stem]), (torch.rand(2, 3, 8, 8),), dynamic_shapes=(batch,)
        )
        torch.export.save(whole, tmp_path / "c.pt2")
        programs[path.stem] = read_program(tmp_path / "c.pt2")[0]
    settings = FunctionSettings(draws=512, distillation=None)
    prior, found = build_prior("leaves", (3, 8, 8)), []
    x = torch.rand(50, 3, 8, 8)
    for clients, mean, std, seen in (
        (programs, 0.0, 1.0, x),
        (networks, 0.5, 0.25, (x - 0.5) * 4),
    ):
        inputs = Inputs(prior, torch.tensor(mean), torch.tensor(std), seed=1)
        first = next(iter(clients.values()))
        fusion = fuse_functions(clients, first, inputs, settings=settings)
        with torch.no_grad():
            found.append(fusion.module(seen).softmax(-1))
    torch.testing.assert_close(*found, atol=1e-2, rtol=0)


def test_programs_of_rows_in_other_units_are_fused_as_weights_are(tmp_path):
    """And a missing value is the mean to what they become, as it is to them."""
    target = Target("class", ("ill", "well"))
    seen = Preprocessing((3,), 1.0, (500.0, -2.0, 0.1), (40.0, 3.0, 0.01), target)
    likelihood = build_likelihood("auto", target)
    outs = {}
    for suffix in (".pt2", ".safetensors"):
        files = [tmp_path / f"{number}{suffix}" for number in range(2)]
        for number, path in enumerate(files):
            torch.manual_seed(number)
            network, card = MLP(3, [6], 2).eval(), Card(seen, {}, {"name": "local"}, {}, 1)
            raw = seen.example(4, torch.Generator().manual_seed(0))
            if suffix == ".pt2":
                path.write_bytes(program_file(path, network, seen, likelihood, card, raw))
            else:
                write_model(path, network.state_dict(), card)
        outs[suffix] = tmp_path / f"fused{suffix}.pt2"
        assert command("fuse", *files, "-o", outs[suffix], *SMALL) == 0
    program, of_weights = (read_program(out)[0] for out in outs.values())
    rows = seen.example(50, torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(program(rows), of_weights(rows), atol=0.01, rtol=0)
        gaps = torch.where(torch.rand(rows.shape) < 0.3, math.nan, rows)
        filled = torch.where(gaps.isnan(), torch.tensor(seen.mean), gaps)
        torch.testing.assert_close(program(gaps), program(filled))


def test_one_logit_of_two_classes_is_fused_by_shares_of_both(inputs):
    """Where clients have the same share of both classes, the chain is a mean of probabilities."""
    torch.manual_seed(0)
    clients = {name: MLP(6, [7], 1).eval() for name in "ab"}
    two = build_likelihood("bernoulli", Target("class", ("no", "yes")))
    counts = [[900, 300], [300, 100]]
    settings = FunctionSettings(draws=512, distillation=None)
    like = next(iter(clients.values()))
    fusion = fuse_functions(
        clients, like, inputs, counts=counts, likelihood=two, widths=2, settings=settings
    )
    x = inputs.batch(7, 50)
    with torch.no_grad():
        a, b = (client(x) for client in clients.values())
        # Of two centred logits the deviation is half of their difference.
        warmth = 1 + 0.4 * (a.abs() / 2) ** 0.75 * (b.abs() / 2) ** 0.25
        mean = 0.75 * (a / warmth).sigmoid() + 0.25 * (b / warmth).sigmoid()
        chain = ((1 - RESTART) * mean + RESTART * 402 / 1604).logit()
        wanted = (chain + 0.75 * a + 0.25 * b) / 2
        torch.testing.assert_close(fusion.module(x), wanted, atol=1e-2, rtol=0)


def test_networks_of_other_widths_and_a_wider_program(photos, tmp_path):
    paths = []
    for number, hidden in enumerate(([5], [9], [4, 6])):
        torch.manual_seed(number)
        paths.append(tmp_path / f"m{number}.pt")
        torch.save(MLP(6, hidden, 3).state_dict(), paths[-1])
    out = tmp_path / "g.safetensors"
    assert command("fuse", *paths, "-o", out, "--method", "function", *SMALL) == 0
    assert read_model(out)[0]["1.weight"].shape == (5, 6)
    like = ("--like", paths[1], "--width", "2")
    assert command("fuse", *paths, "-o", out, "--method", "function", *like, *SMALL) == 0
    assert read_model(out)[0]["1.weight"].shape == (14, 6), "no more than the donors have"
    wide = tmp_path / "wide.pt2"
    assert command("fuse", *photos, "-o", wide, *OF_EYES, "--width", "2", *SMALL) == 0
    assert read_program(wide)[0](torch.rand(3, 3, 8, 8)).shape == (3, 4)
    again = tmp_path / "again.pt2"
    shape = ("--shape", "3,8,8", "--classes", "4")
    assert command("fuse", wide, photos[0], "-o", again, *SMALL, *shape) == 2, "in two forms"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--width", "0"), "widths must be above 0"),
        (("--width", "wide"), "give numbers"),
        (("--width", "2"), "write a program"),
        (("--width", "free", "--bound", "-1"), "-1"),
        (("--bound", "1"), "only with --width free"),
        (("--mean", "1,2"), "2 numbers"),
        (("--std", "0"), "above 0"),
        (("--inputs", "leafs"), "did you mean 'leaves'"),
        (("--inputs", "gone.npz"), "gone.npz"),
        (("--gamma", "2"), "--gamma has no effect on function"),
        (("--set", "rounds=3"), "settings of the model (model.KEY)"),
        (("--shape", "3,x"), "--shape 3,x: give numbers"),
        (("--shape", "3,8"), "fails on inputs of shape (3, 8)"),
        (("--classes", "5"), "has no weights"),
        (("--frontier", "1,2", "--state", "s.safetensors", "--minutes", "1"), "one width"),
        (("--picture", "f.txt"), "f.txt"),
        (("--state", "s.safetensors"), "--state has no effect with --minutes 0"),
        (("--method", "gpi-fnm"), "no effect on gpi-fnm"),
    ],
)
def test_mistakes_are_told_and_write_nothing(options, words, photos, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    assert command("fuse", *photos, "-o", "g.pt", *OF_EYES, *SMALL, *options) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert words in said
    assert "Traceback" not in said
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("permute", ("--report", "r.json"), "--report has no effect on permute"),
        ("permute", ("--picture", "p.png"), "--picture has no effect on permute"),
        ("permute", ("--width", "2"), "--width has no effect on permute"),
        (
            "c2m3",
            ("--inputs", "leaves"),
            "--inputs has no effect on c2m3 without",
        ),
        ("average", ("--repair", "99"), "--repair has no effect on average. It works"),
        ("kfac", ("--shape", "3,8,8"), "--shape has no effect on kfac"),
        ("permute", ("--mean", "0.5"), "--mean has no effect on permute without --repair"),
        (
            "function",
            ("--set", "draws=99", "--set", "function.draws=98"),
            "--set draws and --set function.draws are the same setting",
        ),
        ("kfac", ("--scaling", "0.5"), "--scaling has no effect on kfac. It works with regmean"),
        ("fisher", ("--tolerance", "0.1"), "--tolerance has no effect on fisher"),
        ("ties", ("--drop-seed", "1"), "--drop-seed has no effect on ties. It works with dare"),
        ("regmean", ("--counts", "c.json"), "file not found: c.json"),
        ("fisher", (), "has only weights"),
    ],
)
def test_averages_refuse_what_has_no_effect(
    method, options, words, photos, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert command("fuse", *photos, "-o", "g.pt", "--method", method, *options) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "g.pt").exists()


@pytest.mark.parametrize("method", ["permute", "c2m3"])
def test_repair_restores_deviations_on_drawn_inputs(method, photos, tmp_path, capsys):
    plain, mended, report = tmp_path / "p.pt", tmp_path / "m.pt", ("--json",)
    asked = ("fuse", *photos, "--method", method, *OF_EYES)
    assert command(*asked, "-o", plain, *report) == 0
    before = json.loads(capsys.readouterr().out)
    assert command(*asked, "-o", mended, "--repair", 256, "--inputs", "leaves", *report) == 0
    after = json.loads(capsys.readouterr().out)
    assert after["repaired_on"] == 256
    assert "repaired_on" not in before
    assert after["spread_after"] == before["spread_after"]
    one, two = (torch.load(path) for path in (plain, mended))
    assert one.keys() == two.keys()
    assert any(not torch.equal(one[name], two[name]) for name in one)
    # What is known of inputs is in the file.
    more = ("--repair", 64, "--mean", "0.5,0.5,0.4", "--std", "0.2")
    assert command(*asked, "-o", mended, *more) == 0
    card = Card.load(read_model(mended)[1], "m.pt")
    assert card.method == {"name": f"fuse {method}"}
    assert card.preprocessing.mean == (0.5, 0.5, 0.4)


def test_a_picture_that_cannot_be_is_refused_before_anything_is_fused(
    tmp_path, capsys, monkeypatch
):
    def never(*args, **kwargs):
        pytest.fail("has fused")

    monkeypatch.setattr("fedbayes.workflows.fuse.network_fusing.fuse_functions", never)
    for number in range(2):
        torch.save(MLP(8, [3], 2).state_dict(), tmp_path / f"{number}.pt")
    models = (tmp_path / "0.pt", tmp_path / "1.pt")
    films = ("--shape", "1,2,2,2", "--mean", "0", "--std", "1", "--method", "function")
    asked = (
        *films,
        "--inputs",
        "tests.inputs.test_inputs:ramps",
        "--show-inputs",
        tmp_path / "x.png",
    )
    assert command("fuse", *models, "-o", tmp_path / "g.pt", *asked) == 2
    assert "inputs of 1 x 2 x 2 x 2" in " ".join(capsys.readouterr().err.split())


def test_files_that_do_not_fit_are_named(photos, tmp_path, capsys):
    for change, words in (
        ({"see.weight": torch.zeros(4, 1, 3, 3)}, "c1.pt has no weights of model"),
        ({"see.bias": torch.full((4,), torch.nan)}, "'see.bias' of c1 are not all finite"),
    ):
        torch.save({**torch.load(photos[0]), **change}, photos[1])
        assert command("fuse", *photos, "-o", tmp_path / "g.pt", *OF_EYES, *SMALL) == 2
        assert words in " ".join(capsys.readouterr().err.split())
    for method in ("average", "permute"):
        asked = (*OF_EYES, "-m", method)
        assert command("fuse", *photos, "-o", tmp_path / "g.pt", *asked) == 2
        assert "'see.bias' of c1 are not all finite" in " ".join(capsys.readouterr().err.split())
    counts = tmp_path / "counts.json"
    counts.write_text("[[1, 2, 3], [1, 2, 3], [1, 2, 3]]")
    torch.save(torch.load(photos[0]), photos[1])
    options = (*OF_EYES, *SMALL, "--counts", counts)
    assert command("fuse", *photos, "-o", tmp_path / "g.pt", *options) == 2
    assert "counts of 3 classes" in " ".join(capsys.readouterr().err.split())
    counts.write_text("[[1], [2], [3]]")
    assert command("fuse", *photos, "-o", tmp_path / "h.pt", *options) == 0, "samples alone"
    assert command("fuse", *photos, "-o", tmp_path / "g.pt", *SMALL, "--shape", "3,8,8") == 2
    assert "--classes" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "g.pt").exists()


def test_clients_of_a_run_are_fused_by_what_their_files_say(tmp_path):
    """Better than any of them, and near their ensemble; the default where files have cards."""
    run = fedbayes.run(
        method={"name": "local"},
        data={"clients": 4, "partition": "dirichlet", "alpha": 0.5},
        training={"epochs": 5},
        rounds=1,
        folder=tmp_path / "run",
    )
    files = sorted((tmp_path / "run" / "clients").glob("*"))
    out = tmp_path / "g.safetensors"
    assert command("fuse", *files, "-o", out, *SMALL) == 0
    from fedbayes.workflows.serve.evaluation_set import find_tests
    from fedbayes.workflows.serve.model_evaluation import compare, open_model
    from fedbayes.workflows.serve.model_files import ModelFiles

    tests = find_tests(out, tmp_path / "run", [])
    paths = [out, *files]
    scores = compare(
        {str(path): open_model(path, tests) for path in paths},
        tests,
        inputs=[*map(str, files)],
        counts=sent_counts(files, ModelFiles()),
    )
    accuracy = {score.name: score.metrics["accuracy"] for score in scores}
    fused = accuracy.pop(str(out))
    ensemble = accuracy.pop("ensemble, as fuse learns it")
    assert fused > max(accuracy[str(path)] for path in files)
    assert fused > ensemble - 0.03
    assert run.summary["rounds"] == 1


@pytest.mark.parametrize("told", ["auto", False])
def test_files_of_clients_have_their_counts_of_classes(told, tmp_path, capsys):
    """Files say what a file of counts says; without counts fusion has another teacher."""
    run = fedbayes.run(
        method={"name": "local", "class_shares": told},
        data={"clients": 3, "partition": "dirichlet", "alpha": 0.1, "limit": 300},
        model={"hidden": [8]},
        rounds=1,
        folder=tmp_path / "run",
    )
    counts = tmp_path / "counts.json"
    data = stored_data(run.config, RunFolder(tmp_path / "run"))
    runtime = build_runtime(run.config, data, quiet=True)
    trained = [runtime.parts(client)[0].y for client in range(3)]
    counts.write_text(json.dumps([y.bincount(minlength=10).tolist() for y in trained]))
    files = sorted((tmp_path / "run" / "clients").glob("*"))
    exported = [tmp_path / f"{client}.safetensors" for client in range(3)]
    for client, path in enumerate(exported):
        assert command("export", tmp_path / "run", "--client", str(client), "-o", path) == 0
        said = "number of samples of each class" in " ".join(capsys.readouterr().err.split())
        assert said == bool(told)
    program = tmp_path / "0.pt2"
    assert command("export", tmp_path / "run", "--client", "0", "-o", program) == 0
    assert json.loads(read_program(program)[1])["counts"] is None
    found = {}
    for name, paths, more in (
        ("files", files, ()),
        ("exported", exported, ()),
        ("given", files, ("--counts", counts)),
    ):
        out, page = tmp_path / f"{name}.safetensors", tmp_path / f"{name}.json"
        assert command("fuse", *paths, "-o", out, *more, *SMALL, "--report", page) == 0
        found[name] = read_model(out)[0]
        sent = "counts of samples" in json.loads(page.read_text())["sent"]
        assert sent == (bool(told) or name == "given")
    same = {
        name: all(torch.equal(t, found["given"][n]) for n, t in found[name].items())
        for name in ("files", "exported")
    }
    assert same == dict.fromkeys(same, bool(told))


@pytest.mark.parametrize(
    ("options", "method"),
    [((), "function"), (("--gamma", "2"), "gpi-fnm"), (("-m", "average"), "average")],
)
def test_each_file_is_read_once(options, method, tmp_path, monkeypatch, capsys):
    """Whatever the method, and whoever chose it."""
    from fedbayes.workflows.serve import model_files

    seen = Preprocessing(
        (6,), 1.0, (0.0,) * 6, (1.0,) * 6, Target("class", ("a", "b", "c")), tuple("uvwxyz")
    )
    card = Card(seen, {"name": "mlp", "hidden": [7]}, {}, {}, 1)
    paths = []
    for name, network in networks().items():
        paths.append(tmp_path / f"{name}.safetensors")
        model_files.write_model(paths[-1], network.state_dict(), card)
    read, real = [], model_files.read_with_card
    monkeypatch.setattr(
        model_files, "read_with_card", lambda path, *more: (read.append(path), real(path, *more))[1]
    )
    minutes = () if options else ("--minutes", "0")
    assert command("fuse", *paths, "-o", tmp_path / "g.pt", *options, *minutes, "--json") == 0
    assert sorted(read) == sorted(paths)
    told = json.loads(capsys.readouterr().out)
    assert told.get("method", method) == method


def test_a_width_is_free_within_a_bound(tmp_path, capsys):
    paths = []
    for name, network in networks(2, 8).items():
        paths.append(tmp_path / f"{name}.pt")
        torch.save(network.state_dict(), paths[-1])
    free = ("--method", "function", "--width", "free", *SMALL, "--json")
    assert command("fuse", *paths, "-o", tmp_path / "g.pt", *free, "--bound", "100") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["width"] == 0.25, "the least of all"
    assert command("fuse", *paths, "-o", tmp_path / "h.pt", *free, "--bound", "1e-4") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["width"] == 2, "as wide as both together, which say it all"
    assert told["divergence"] <= 1e-4
    options = (*free, "--frontier", "0.25", "--bound", "0")
    assert command("fuse", *paths, "-o", tmp_path / "i.pt", *options) == 2
    assert "the nearest is 0.25" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "i.pt").exists()


def test_a_frontier_of_one_width_is_one(tmp_path, inputs, capsys):
    paths = []
    for name, network in networks(2, 4).items():
        paths.append(tmp_path / f"{name}.pt")
        torch.save(network.state_dict(), paths[-1])
    asked = ("--frontier", "1", "--method", "function", *SMALL, "--json")
    assert command("fuse", *paths, "-o", tmp_path / "g.pt", *asked) == 0
    names = [mark["name"] for mark in json.loads(capsys.readouterr().out)["frontier"]]
    assert names[0] == "fused, width 1"
    assert any(name.startswith("ensemble") for name in names)


def test_the_frontier_has_the_sizes_of_networks_and_of_their_ensemble(tmp_path, inputs, capsys):
    clients = networks(2, 7)
    paths = []
    for name, network in clients.items():
        paths.append(tmp_path / f"{name}.pt")
        torch.save(network.state_dict(), paths[-1])
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "test.npz", x=rng.normal(size=(40, 6)), y=rng.integers(3, size=40))
    report, picture = tmp_path / "r.json", tmp_path / "f.png"
    (tmp_path / "c.json").write_text("[[30], [10]]")
    options = ("--frontier", "1,2", "--test", tmp_path / "test.npz", "--method", "function")
    options += ("--counts", tmp_path / "c.json")
    pictures = ("--picture", picture, "--report", report)
    asked = ("fuse", *paths, "-o", tmp_path / "g.pt", *options, *pictures, *SMALL, "--json")
    assert command(*asked) == 0
    told = json.loads(report.read_text())
    printed = json.loads(capsys.readouterr().out)
    assert (printed["frontier"], printed["notes"]) == (told["frontier"], told["notes"])
    marks = {mark["name"].split(" (")[0]: mark for mark in told["frontier"]}
    single = 6 * 7 + 7 + 7 * 3 + 3
    assert marks["fused, width 1"]["parameters"] == single
    assert marks["fused, width 2"]["multiplications"] == 14 * 6 + 14 * 3
    assert marks["ensemble"]["parameters"] == 2 * single
    assert marks["ensemble"]["multiplications"] == 2 * (7 * 6 + 7 * 3)
    assert marks["fused, width 2"]["divergence"] < marks["fused, width 1"]["divergence"]
    x = torch.from_numpy(np.load(tmp_path / "test.npz")["x"]).float()
    y = torch.from_numpy(np.load(tmp_path / "test.npz")["y"])
    with torch.no_grad():
        shares = dict(zip(clients, (0.75, 0.25), strict=True))
        mean = sum(shares[name] * n(x).softmax(-1) for name, n in clients.items())
        middle = average(list(clients.values()), [3, 1])
        together = float((middle(x).argmax(1) == y).float().mean())
        alone = [float((n(x).argmax(1) == y).float().mean()) for n in clients.values()]
    assert alone[0] != alone[1]
    assert marks["best member"]["accuracy"] == pytest.approx(max(alone))
    assert marks["average"]["accuracy"] == pytest.approx(together)
    assert marks["ensemble"]["accuracy"] == pytest.approx(
        float((mean.argmax(1) == y).float().mean())
    )
    assert picture.stat().st_size > 10_000


def test_likeness_and_agreement_are_by_their_formulas(inputs):
    clients = networks()
    teacher, _ = teacher_of(clients, None, None)
    x = torch.cat([inputs.batch(-1 - number, 512) for number in range(4)])
    with torch.no_grad():
        said = torch.stack([n(x).softmax(-1) for n in clients.values()]).mean(0)
        own = clients["n1"](x).log_softmax(-1)
    held_out = HeldOut(teacher, inputs)
    found = held_out.likeness(held_out.outputs(clients["n1"]))
    wanted = (said * (said.log() - own)).sum(-1).mean()
    assert found.divergence == pytest.approx(float(wanted), rel=1e-4)
    same = own.argmax(-1) == said.argmax(-1)
    assert found.agreement == pytest.approx(float(same.float().mean()))


def test_average_and_multiplications(inputs):
    one, two, three = networks().values()
    mean = average([one, two, three])
    for name, tensor in mean.state_dict().items():
        wanted = torch.stack([n.state_dict()[name] for n in (one, two, three)]).mean(0)
        torch.testing.assert_close(tensor, wanted)
    assert average([one, MLP(6, [3], 3)]) is None
    weighted = average([one, two, three], [30, 10, 0])
    for name, tensor in weighted.state_dict().items():
        wanted = 0.75 * one.state_dict()[name] + 0.25 * two.state_dict()[name]
        torch.testing.assert_close(tensor, wanted)
    conv = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 64, 5))
    assert multiplications(conv, torch.zeros(1, 3, 8, 8)) == 64 * 4 * 27 + 4 * 64 * 5
    blocks = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 12, 1, groups=4))
    assert multiplications(blocks, torch.zeros(1, 8, 10, 10)) == 64 * 8 * 9 + 64 * 12 * 2
    teacher, _ = teacher_of({"a": one, "b": two}, None, None)
    scale = SizeTradeoff(HeldOut(teacher, inputs), None)
    names = [mark.name for mark in scale.clients({"a": one, "b": two})]
    assert names[1:] == ["average", "ensemble"]


def test_from_python_it_is_the_same_again_and_training_end_to_end_helps(inputs):
    clients = networks(4, 12)
    first = next(iter(clients.values()))
    counts = [[9, 1, 0], [0, 8, 2], [3, 0, 7], [3, 3, 3]]
    one, two = (
        fuse_functions(clients, first, inputs, counts=counts, settings=QUICK) for _ in range(2)
    )
    for name, tensor in one.module.state_dict().items():
        assert torch.equal(tensor, two.module.state_dict()[name])
    assert one.likeness.divergence <= one.solved.divergence
    assert one.parameters == 6 * 12 + 12 + 12 * 3 + 3
    assert set(one.clients) == set(clients)


class Half(Gauss):
    """Rows whose last columns are zero, and that augmentation puts into other orders."""

    def draw(self, count, rng):
        return super().draw(count, rng) * (torch.arange(6) < 2)

    def augmented(self, x, rng):
        return x.gather(1, torch.rand(x.shape, generator=rng).argsort(1))


def test_layers_are_solved_on_augmented_draws():
    """Draws that tell of two columns alone tell of all once they are augmented."""
    clients = networks(3, 12)
    counts = [[9, 1, 0], [0, 8, 2], [3, 0, 7]]
    teacher, _ = teacher_of(clients, counts, None)
    x, far = torch.randn(2000, 6), []
    for augment in (True, False):
        settings = replace_settings(distillation=None, draws=4096, augment=augment)
        draws = toy_inputs(Half((6,)))
        fused = fuse_functions(clients, clients["n0"], draws, counts=counts, settings=settings)
        with torch.no_grad():
            said, found = (_centred(f(x).T) for f in (teacher, fused.module))
        far.append(float((said - found).norm() / said.norm()))
    assert far[0] < 0.8 * far[1]


FOUR = Target("class", ("a", "b", "c", "d"))


class WideAndDeep(nn.Module):
    """A linear map of inputs, and a hidden layer beside it."""

    def __init__(self, outputs):
        super().__init__()
        self.wide, self.hidden = nn.Linear(6, outputs), nn.Linear(6, 8)
        self.deep = nn.Linear(8, outputs)

    def forward(self, x):
        return self.wide(x) + self.deep(torch.relu(self.hidden(x)))


@pytest.mark.parametrize(
    ("name", "target", "outputs"),
    [
        ("bernoulli", Target("class", ("no", "yes")), 1),
        ("poisson", Target("count", ("y",)), 1),
        ("categorical", Target("class", ("a", "b", "c")), 3),
    ],
)
def test_clients_that_say_the_same_are_fused_into_it_whatever_outputs_mean(
    inputs, name, target, outputs
):
    likelihood = build_likelihood(name, target)
    torch.manual_seed(0)
    one = WideAndDeep(outputs).eval()
    with torch.no_grad():
        one.wide.weight *= 4
    clients = {"a": one, "b": copy.deepcopy(one)}
    fused = fuse_functions(
        clients, one, inputs, likelihood=likelihood, settings=replace_settings(distillation=None)
    )
    assert fused.solved.divergence == pytest.approx(0, abs=1e-5)
    torch.testing.assert_close(
        _centred(fused.module.wide.weight), _centred(one.wide.weight), rtol=1e-2, atol=1e-2
    )


def _centred(weight):
    return weight - weight.mean(0) if len(weight) > 1 else weight


def replace_settings(**changes):
    return QUICK.model_copy(update=changes)


@pytest.mark.parametrize("outputs", [1, 2])
def test_units_are_chosen_among_all_clients_of_networks_with_few_outputs(inputs, outputs):
    """Those of a client whose hidden layer is dead come last."""
    clients = {}
    for number in range(4):
        torch.manual_seed(number)
        clients[str(number)] = MLP(6, [12], outputs).eval()
    with torch.no_grad():
        clients["0"].get_parameter("1.bias").fill_(-100.0)
    fused = fuse_functions(
        clients,
        clients["0"],
        inputs,
        likelihood=build_likelihood("bernoulli", Target("class", ("no", "yes")))
        if outputs == 1
        else None,
        settings=replace_settings(distillation=None, units="chosen"),
    )
    assert (fused.module.get_parameter("1.bias") > -50).all()


def test_signals_are_scaled_by_channel():
    channels, length = 2, 5
    seen = Preprocessing((channels, length), 1.0, (0.4, 0.5), (0.3, 0.2), FOUR)
    drawn = Inputs.seen(build_prior("noise", (channels, length)), seen)
    x = torch.rand(3, channels, length)
    torch.testing.assert_close(drawn.scaled(x), seen.apply(x))
    assert drawn.batch(0, 4).shape == (4, channels, length)


def test_priors_between_0_and_1_are_moved_to_other_values():
    """Networks see inputs of mean 0 and standard deviation 1, before and after augmentation."""
    for shape, name in (((3, 8, 8), "leaves"), ((3, 8, 8), "noise"), ((2, 64), "noise")):
        seen = Preprocessing(shape, 1.0, (112.0,) * shape[0], (70.0,) * shape[0], FOUR)
        prior = build_prior(name, shape)
        inputs = Inputs.seen(prior, seen)
        assert "mean 112 and standard deviation 70" in prior.notes[0]
        x = inputs.batch(0, 2048)
        for drawn in (x, inputs.augmented(x, torch.Generator().manual_seed(0))):
            assert float(drawn.mean()) == pytest.approx(0, abs=0.05)
            assert float(drawn.std()) == pytest.approx(1, abs=0.05)
    rows = Preprocessing((5,), 1.0, (50.0,) * 5, (10.0,) * 5, FOUR)
    with pytest.raises(ConfigError, match="trained on values of mean 50"):
        Inputs.seen(build_prior("noise", (5,)), rows)
    grey = Preprocessing((5,), 255.0, (0.25,) * 5, (0.5,) * 5, FOUR)
    inputs = Inputs.seen(build_prior("noise", (5,)), grey)
    x = inputs.batch(0, 64)
    assert -0.5 <= float(x.min()) < 0 < float(x.max()) <= 1.5
    torch.testing.assert_close(x, grey.apply(255 * (0.25 + 0.5 * x)))


def test_real_samples_are_held_out(tmp_path):
    x = np.arange(100, dtype=np.float32).reshape(50, 2)
    np.savez(tmp_path / "x.npz", x=x)
    drawn = Inputs(build_prior(str(tmp_path / "x.npz"), (2,)), torch.zeros(()), torch.ones(()))
    fitted = {float(v) for n in range(20) for v in drawn.batch(n, 30)[:, 0]}
    held = {float(v) for n in range(20) for v in drawn.batch(-1 - n, 30)[:, 0]}
    assert fitted.isdisjoint(held)
    assert len(fitted) == 40
    assert fitted | held == set(x[:, 0].tolist())
    np.savez(tmp_path / "few.npz", x=x[:3])
    (note,) = build_prior(str(tmp_path / "few.npz"), (2,)).notes
    assert "too few for held-out ones" in note


def test_multiplications_of_fused_kernels_are_counted():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.recurrent = nn.LSTM(16, 16, batch_first=True)

        def forward(self, x):
            return self.recurrent(x)[0][:, -1]

    assert multiplications(Last().eval(), torch.zeros(1, 10, 16)) == 10 * 2 * 16 * 4 * 16
    attention = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    assert multiplications(attention, torch.zeros(1, 10, 16)) > 0


def test_training_that_diverges_loses_nothing_and_is_told(tmp_path, capsys):
    out, report = tmp_path / "g.safetensors", tmp_path / "r.json"
    files = [tmp_path / f"{name}.pt" for name in networks()]
    for file, network in zip(files, networks().values(), strict=True):
        torch.save(network.state_dict(), file)
    asked = ("draws=512", "distillation.lr=1e20", "distillation.steps=60")
    more = [word for entry in asked for word in ("--set", f"function.{entry}")]
    where = ("--mean", "0", "-o", out, "--report", report)
    assert command("fuse", *files, "--method", "function", *more, *where) == 0
    assert "training end to end stopped early" in " ".join(capsys.readouterr().err.split())
    checks = json.loads(report.read_text())["distillation"]["checks"]
    assert checks[-1][1] is None
    assert out.exists()


@pytest.mark.parametrize("suffix", ["pt2", "pt"])
def test_what_is_scored_is_what_is_written(suffix, photos, tmp_path, capsys):
    rng, out, report = np.random.default_rng(0), tmp_path / f"g.{suffix}", tmp_path / "r.json"
    x, y = rng.random((60, 3, 8, 8)).astype(np.float32), rng.integers(4, size=60)
    np.savez(tmp_path / "test.npz", x=x, y=y)
    (tmp_path / "counts.json").write_text("[[9, 1, 5, 5], [1, 9, 5, 5], [5, 5, 9, 1]]")
    asked = (*OF_EYES, "--mean", "0.5", "--std", "0.3", "--counts", tmp_path / "counts.json")
    more = ("--set", "function.draws=512", "--set", "function.distillation.steps=40")
    test = ("--test", tmp_path / "test.npz", "--report", report, "-o", out)
    assert command("fuse", *photos, *asked, *more, *test, "--method", "function") == 0
    told = json.loads(report.read_text())
    assert told["temperature"] != 1
    way = f"divide the logits of {out} by {told['temperature']:.4g}"
    assert (way in " ".join(capsys.readouterr().out.split())) == (suffix == "pt")
    if suffix == "pt2":
        program, _ = read_program(out)
        with torch.no_grad():
            outputs = program(torch.from_numpy(x))
    else:  # whose card has the temperature
        weights, text = read_model(out)
        network = Eyes((3, 8, 8), 4).eval()
        network.load_state_dict(weights)
        with torch.no_grad():
            outputs = network((torch.from_numpy(x) - 0.5) / 0.3) / json.loads(text)["temperature"]
    nll = functional.cross_entropy(outputs, torch.from_numpy(y))
    assert told["frontier"][0]["nll"] == pytest.approx(float(nll), rel=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--width", "1,2"), "give one number"),
        (("--shape=-3,8,8",), "all lengths are 1 or more"),
        (("--picture", "p.png", "--show-inputs", "p.png"), "the picture and the picture of inputs"),
        (("--minutes", "1", "--state", "g.safetensors"), "would be both the model and the state"),
        (("--minutes", "1", "--state", "nowhere/s"), "folder not found: nowhere"),
    ],
)
def test_options_that_cannot_all_be_meant_are_told_first(
    options, words, photos, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    asked = [*photos, *OF_EYES, *SMALL, "--mean", "0", "--std", "1", "-o", "g.safetensors"]
    assert command("fuse", *asked, "--method", "function", *options) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "g.safetensors").exists()


class Shifting(nn.Module):
    """A network that shifts its inputs where they are."""

    def __init__(self, inputs, classes):
        super().__init__()
        self.body, self.head = nn.Linear(inputs, 5), nn.Linear(5, classes)

    def forward(self, x):
        x.sub_(0.5)
        return self.head(torch.relu(self.body(x.flatten(1))))


def shifting(shape, classes):
    return Shifting(int(np.prod(shape)), classes)


def test_networks_that_write_over_their_inputs_are_refused(inputs, tmp_path, capsys):
    """Each that is asked after them would be asked at other inputs."""
    nets = {"a": MLP(6, [5], 3), "b": Shifting(6, 3)}
    x = inputs.batch(-1, 4)
    with pytest.raises(ModelError, match=r"^b changes its inputs in place"):
        fuse_functions(nets, nets["a"], inputs, settings=QUICK)
    with pytest.raises(ModelError, match=r"^b changes its inputs in place"):
        match_graph(nets, MatchingSettings(), x)
    torch.testing.assert_close(x, inputs.batch(-1, 4))
    for shape in ("6", "3,4,4", "1,4,4"):
        size = int(np.prod([int(n) for n in shape.split(",")]))
        paths = []
        for number in range(2):
            paths.append(tmp_path / f"{size}-{number}.pt")
            torch.save(Shifting(size, 3).state_dict(), paths[-1])
        asked = (
            "--model",
            "tests.workflows.fuse.test_network_fusing:shifting",
            "--shape",
            shape,
            "--classes",
            3,
        )
        assert command("fuse", *paths, "-o", tmp_path / "g.pt", *asked, *SMALL) == 2
        assert "changes its inputs" in capsys.readouterr().err
    assert not (tmp_path / "g.pt").exists()


class Words(nn.Module):
    """A network of token ids, which takes no negative ones."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.words(x.long()).mean(1))


class Random(MLP):
    """A network that forgets that it does not train."""

    def forward(self, x):
        return super().forward(functional.dropout(x, 0.3))


def words(shape, classes):
    return Words()


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (Words(), r"^b fails on inputs of shape \(n, 6\) and type float32: .*real samples"),
        (Random(6, [5], 3), r"^b answers an input differently each time.*self\.training"),
    ],
)
def test_networks_that_are_no_functions_of_the_inputs_are_refused(network, said, inputs):
    nets = {"a": MLP(6, [5], 3), "b": network}
    with pytest.raises(ModelError, match=said):
        fuse_functions(nets, nets["a"], inputs, settings=QUICK)
    if isinstance(network, Random):
        with pytest.raises(ModelError, match=said):
            match_graph(nets, MatchingSettings(), inputs.batch(-1, 4))


def test_networks_of_words_ask_for_real_samples(tmp_path, capsys):
    paths = [tmp_path / f"{number}.pt" for number in range(2)]
    for path in paths:
        torch.save(Words().state_dict(), path)
    own = ("--model", "tests.workflows.fuse.test_network_fusing:words", "--shape", "6")
    asked = ("-o", tmp_path / "g.pt", *own, "--classes", 3, *SMALL)
    assert command("fuse", *paths, *asked) == 2
    assert "give real samples as inputs" in " ".join(capsys.readouterr().err.split())
    np.savez(tmp_path / "texts.npz", x=np.random.default_rng(0).integers(0, 4, (600, 6)))
    assert command("fuse", *paths, *asked, "--inputs", tmp_path / "texts.npz") == 0


class Added(nn.Module):
    """A network that trains, whose dropout hands on in evaluation what it then writes over."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.drop = nn.Linear(6, 5), nn.Linear(6, 5), nn.Dropout()
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        hidden = self.drop(torch.relu(self.one(x)))
        hidden += self.two(x)
        return self.head(hidden)


class Pair(nn.Module):
    """Outputs and something beside them."""

    def __init__(self, inputs, classes):
        super().__init__()
        self.body = nn.Linear(inputs, classes)

    def forward(self, x):
        return self.body(x), x


def pair(shape, classes):
    return Pair(*shape, classes)


def test_networks_of_several_outputs_are_refused(inputs, tmp_path, capsys):
    nets = {"a": MLP(6, [5], 3), "b": Pair(6, 3)}
    with pytest.raises(
        ModelError, match=r"^b returns a tuple\. Let forward return only its outputs"
    ):
        fuse_functions(nets, nets["a"], inputs, settings=QUICK)
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for path in paths:
        torch.save(nets["b"].state_dict(), path)
    asked = (
        "--model",
        "tests.workflows.fuse.test_network_fusing:pair",
        "--shape",
        "6",
        "--classes",
        3,
    )
    assert command("fuse", *paths, "-o", tmp_path / "g.pt", *asked, *SMALL) == 2
    assert "pair' returns a tuple" in capsys.readouterr().err


class Steep(nn.Module):
    """Steps, as trees have them."""

    def __init__(self):
        super().__init__()
        self.leaves = nn.Parameter(torch.randn(6, 3))

    def forward(self, x):
        return (x > 0).float() @ self.leaves


def test_networks_without_gradients_are_told(inputs):
    """In evaluation mode, or anywhere."""
    nets = {"a": MLP(6, [5], 3), "b": Added()}
    with pytest.raises(ModelError, match=r"^b has no gradients in evaluation mode.* x = x \+ …"):
        fuse_functions(nets, nets["a"], inputs, settings=QUICK)
    samples = Samples(torch.randn(4, 6), torch.tensor([0, 1, 2, 0]))
    with pytest.raises(ModelError, match="no gradients in evaluation mode"):
        posterior(
            nets["b"], build_likelihood("categorical", Target("class", tuple("abc"))), samples
        )
    nets["b"] = Steep()
    assert fuse_functions(nets, nets["a"], inputs, settings=QUICK).parameters
    counts = [[5, 0, 1], [2, 3, 4]]
    moved = FunctionSettings(draws=512, seeking=SeekingSettings(share=0.5))
    with pytest.raises(ModelError, match=r"which a network does not have\. Leave seeking out"):
        fuse_functions(nets, nets["a"], inputs, counts=counts, settings=moved)


def test_labels_of_no_class_are_told_before_anything_is_fused(photos, tmp_path, capsys):
    test, out = tmp_path / "t.npz", tmp_path / "g.pt"
    np.savez(test, x=np.zeros((5, 3, 8, 8), np.float32), y=np.arange(5))
    assert command("fuse", *photos, "-o", out, *OF_EYES, *SMALL, "--test", test) == 2
    said = capsys.readouterr().err
    assert "a label is 4, but the models have 4 classes, 0 to 3" in said
    assert not out.exists()
    for most, warned in ((1.0, False), (16.0, True)):
        np.savez(test, x=np.full((4, 3, 8, 8), most, np.float32), y=np.arange(4))
        asked = (*OF_EYES, *SMALL, "--inputs", "leaves", "--test", test)
        assert command("fuse", *photos, "-o", out, *asked) == 0
        said = " ".join(capsys.readouterr().err.split())
        assert ("from 16 to 16, but synthetic ones are in [0, 1]" in said) == warned


@pytest.mark.parametrize(
    ("size", "kind", "options", "words"),
    [
        (2, torch.float32, ("6", "3"), "2"),
        (None, torch.bfloat16, ("6", "3"), "type float32: "),
        (None, torch.float32, ("6", "4"), "no logits of 4 classes"),
        (None, torch.float32, ("7", "3"), "of shape (n, 7)"),
    ],
)
def test_programs_that_do_not_answer_the_samples_are_refused(
    size, kind, options, words, tmp_path, capsys
):
    """Such as those that were exported for a batch of one size."""
    paths = [tmp_path / f"{number}.pt2" for number in range(2)]
    for path in paths:
        batch = None if size else ({0: torch.export.Dim("batch")},)
        x = torch.zeros(size or 2, 6, dtype=kind)
        whole = torch.export.export(nn.Linear(6, 3).to(kind), (x,), dynamic_shapes=batch)
        torch.export.save(whole, path)
    shape, classes = options
    asked = ("--shape", shape, "--classes", classes, "--inputs", "noise", *SMALL)
    assert command("fuse", *paths, "-o", tmp_path / "g.pt2", *asked) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"error: {paths[0]} returns no logits" in said
    assert words in said
    assert not (tmp_path / "g.pt2").exists()


class Named(nn.Module):
    """A fully connected network whose layers have names of their own, and no biases if told."""

    def __init__(self, bias):
        super().__init__()
        self.first, self.second = nn.Linear(6, 5, bias=bias), nn.Linear(5, 3, bias=bias)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("method", ["function", "match", "permute", "c2m3", "average"])
def test_networks_that_shapes_tell_keep_the_names_and_biases_of_the_first(bias, method, tmp_path):
    paths, nets = [], []
    for number in range(2):
        torch.manual_seed(number)
        nets.append(Named(bias).eval())
        paths.append(tmp_path / f"{number}.pt")
        torch.save(nets[-1].state_dict(), paths[-1])
    out, fresh = tmp_path / "g.pt", Named(bias).eval()
    options = SMALL if method == "function" else ("--gamma", 1e-9) if method == "match" else ()
    given = ("--method", method, "--shape", 6, *options)
    assert command("fuse", *paths, "-o", out, *given) == 0
    fresh.load_state_dict(torch.load(out))
    x = torch.randn(50, 6)
    with torch.no_grad():
        mean = torch.stack([net(x).log_softmax(-1) for net in nets]).mean(0)
        far, alone = ((net(x).log_softmax(-1) - mean).abs().mean() for net in (fresh, nets[0]))
    if method == "function":
        assert far < 0.5 * alone
    assert command("fuse", out, paths[0], "-o", tmp_path / "again.pt", *given) == 0


def test_weights_of_other_types_are_told(tmp_path, capsys):
    paths = [tmp_path / f"{number}.pt" for number in range(2)]
    for path, kind in zip(paths, (torch.float64, torch.bfloat16), strict=True):
        torch.save(Named(True).to(kind).state_dict(), path)
    out = tmp_path / "g.pt"
    assert command("fuse", *paths, "-o", out, "--shape", 6, *SMALL) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "the files have bfloat16, float64 weights; the fused ones are" in said
    assert {tensor.dtype for tensor in torch.load(out).values()} == {torch.float32}


def test_counts_say_how_many_classes_there_are(photos, tmp_path, capsys):
    counts = tmp_path / "counts.json"
    counts.write_text("[[5, 0, 1, 2], [0, 5, 1, 2], [1, 1, 4, 2]]")
    given = ("--counts", counts, *OF_EYES[:4], *SMALL)
    assert command("fuse", *photos, "-o", tmp_path / "g.pt", *given) == 0
    assert command("fuse", *photos, "-o", tmp_path / "f.pt", *given, "--classes", "4") == 0
    one, two = (read_model(tmp_path / f"{name}.pt")[0] for name in "gf")
    assert all(torch.equal(one[name], two[name]) for name in one)
    counts.write_text("[5, 5, 4]")
    assert command("fuse", *photos, "-o", tmp_path / "g.pt", *given) == 2


@pytest.mark.slow
def test_a_fusion_on_guessed_inputs_warns_and_names_the_options(photos, tmp_path, capsys):
    out, rng = tmp_path / "g.pt", np.random.default_rng(0)
    np.savez(tmp_path / "t.npz", x=rng.random((8, 3, 8, 8)), y=np.arange(8) % 4)
    for more, warned in (
        ((), True),
        (("--inputs", "leaves"), False),
        (("--inputs", tmp_path / "t.npz"), False),
        (("--test", tmp_path / "t.npz"), False),
    ):
        capsys.readouterr()
        assert command("fuse", *photos, "-o", out, *OF_EYES, *SMALL, *more) == 0
        said = " ".join("".join(capsys.readouterr()).split())
        assert ("warning: the scores are on synthetic inputs only" in said) == warned
        assert ("Score it on real samples with --test; --inputs" in said) == warned


@pytest.mark.slow
def test_a_program_says_what_it_takes_and_rejects_images_that_are_standardized(
    photos, tmp_path, capsys
):
    out = tmp_path / "g.pt2"
    scaling = ("--mean", "0.5", "--std", "0.25")
    assert command("fuse", *photos, "-o", out, *OF_EYES, *scaling, *SMALL) == 0
    said = " ".join("".join(capsys.readouterr()).split())
    assert "shape (n, 3, 8, 8), with values from 0 to 1, and standardizes them itself" in said
    program, _ = read_program(out)
    x = torch.rand(4, 3, 8, 8)
    before = program(x)
    x[0, 0, 0, 0] = torch.nan  # a missing value is no error
    torch.testing.assert_close(program(x)[1:], before[1:])
    for odd in ((x.nan_to_num() - 0.5) / 0.25, x.nan_to_num() * 255):
        with pytest.raises(RuntimeError, match="outside of 0 to 1"):
            program(odd)
    # Fused again, it is a network as any other.
    again = tmp_path / "again.pt2"
    assert command("fuse", out, out.with_name("h.pt2"), "-o", again, *SMALL) == 2
    (tmp_path / "h.pt2").write_bytes(out.read_bytes())
    assert command("fuse", out, tmp_path / "h.pt2", "-o", again, *SMALL) == 0
    capsys.readouterr()
    # Without --mean and --std nobody knows what raw images are, and all are taken.
    assert command("fuse", *photos, "-o", out, *OF_EYES, *SMALL) == 0
    said = " ".join("".join(capsys.readouterr()).split())
    assert "takes samples in the form that the fused networks expect" in said
    assert read_program(out)[0](x * 255 - 100).shape == (4, 4)


def test_training_that_takes_hours_is_warned_about_once():
    told = []
    tell = network_fusing._long_told(told.append)
    left = [math.nan, *[9e3] * 8, 8e3]
    steps = [DistillationProgress(step, 0.0, 1.0, 1.0, s) for step, s in enumerate(left)]
    with pytest.warns(FedbayesWarning) as found:
        list(map(tell, steps))
    assert [str(one.message) for one in found] == [
        "training end to end is going to take 2.5 hours. --minutes bounds it, and with --state "
        "FILE it can be stopped and resumed"
    ]
    assert len(told) == 10


def test_every_pass_through_the_clients_is_shown(photos, monkeypatch, tmp_path):
    bars = {}

    @contextlib.contextmanager
    def shown(what, total):
        bars.setdefault(what, []).append([total, 0])
        own = bars[what][-1]

        def advance(count):
            own[1] += count

        yield advance

    monkeypatch.setattr(function, "shown", shown)
    for place in (choice, targets):
        monkeypatch.setattr(place, "progress", shown)
    asked = (*OF_EYES, "--mean", "0.5", "--std", "0.25", *SMALL, "--report", tmp_path / "g.html")
    assert command("fuse", *photos, "-o", tmp_path / "g.pt2", *asked) == 0
    assert bars.keys() == {"choosing units", "recording activations", "asking the clients"}
    assert len(bars["asking the clients"]) == 1  # the order of classes, results and the page
    assert all(total == done for several in bars.values() for total, done in several), bars
