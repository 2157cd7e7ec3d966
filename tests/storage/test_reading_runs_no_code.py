"""What a folder or a model file names is not run by who only reads it."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import fedbayes
from fedbayes import Config
from fedbayes.errors import FedbayesError, ModelError, RunError
from fedbayes.reports import gather, plot, write_page
from fedbayes.workflows.calibrate.calibration import trust
from fedbayes.workflows.serve.evaluation_set import find_tests, named_by
from fedbayes.workflows.serve.export import export
from fedbayes.workflows.serve.model_evaluation import compare, open_model
from fedbayes.workflows.serve.model_files import read_models, read_with_card, write_model
from tests.hostile import folders

PLANTED = "from pathlib import Path\nPath({mark!r}).touch()\n"
OWN = (
    PLANTED
    + """
from torch import nn
from fedbayes.contracts import About, Models, PointEstimate, Weights
from fedbayes.likelihoods.categorical import Categorical

class Mine(PointEstimate[Weights]):
    name = "mine"
    about = About("averages")
    server_state = Weights
    models = Models.BOTH

    def init(self, run):
        return Weights(run.network.initial)

    def update(self, server, reports, at):
        return Weights(reports.mean()), {{}}

class Likely(Categorical):
    name = "likely"

def network(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))
"""
)
NAMES = {"method": {"name": "ownmod:Mine"}, "model": {"name": "ownmod:network"}}


def in_process_of_its_own(code, folder, mode=("-c",)):
    return subprocess.run(
        [sys.executable, *mode, *([code] if isinstance(code, str) else code)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A run under a method and a network of the user's own, whose module is then forgotten."""
    sys.modules.pop("ownmod", None)
    place, mark = tmp_path / "code", tmp_path / "was imported"
    place.mkdir()
    (place / "ownmod.py").write_text(OWN.format(mark=str(mark)))
    monkeypatch.syspath_prepend(place)
    fedbayes.run(folders.config(**NAMES), tmp_path / "run", progress=False)
    assert mark.exists()
    mark.unlink()
    sys.modules.pop("ownmod")
    return tmp_path / "run", mark


def test_reports_import_nothing_that_a_folder_names(own, tmp_path):
    folder, mark = own
    (record,) = gather([folder])
    assert record.settings["method.name"] == "ownmod:Mine"
    assert record.headline == "local_accuracy"
    assert record.metrics[-1]["round"] == 4
    assert record.counts is not None, "the split is told by the data alone"
    assert record.confusion is None
    assert any("a report does not import. Use" in note for note in record.notes)
    write_page([folder], tmp_path / "r.html")
    plot([folder], "headline", tmp_path / "f.png")
    assert fedbayes.Result(folder).summary["method"] == "ownmod:Mine"
    assert "ownmod" not in sys.modules
    assert not mark.exists()
    # What the folder says is what the run says, which may import it.
    assert trust(folder).metrics["accuracy"] == pytest.approx(
        record.metrics[-1]["global_accuracy"], abs=1e-6
    )
    assert mark.exists()


def test_a_report_of_a_run_that_goes_on_knows_its_headline(own):
    folder, mark = own
    for name in ("summary.json", "SHA256SUMS", "model.safetensors"):
        (folder / name).unlink()
    assert gather([folder])[0].headline == "local_accuracy"
    assert not mark.exists()


@pytest.mark.parametrize("use", [fedbayes.resume, trust, lambda f: export(f, f / "x.pt")])
def test_what_is_refused_is_refused_before_it_is_imported(tmp_path, monkeypatch, use):
    run = fedbayes.run(folders.config(), tmp_path / "run", progress=False).folder.path
    (tmp_path / "evil.py").write_text(PLANTED.format(mark=str(tmp_path / "mark")))
    monkeypatch.syspath_prepend(tmp_path)
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace('name = "scaffold"', 'name = "evil:Method"'))
    with pytest.raises(RunError, match=r"method.name was 'scaffold', and is now 'evil:Method'"):
        use(run)
    assert not (tmp_path / "mark").exists()


LOOKED_FOR = (
    *("torch", "numpy", "typer", "rich", "difflib", "tomllib", "json"),
    # What pandas, PyTorch and others try to import, and can do without.
    *("numexpr", "bottleneck", "cupy", "dill", "fastparquet", "IPython", "mkl", "opt_einsum"),
)
STARTS = {
    "script": [Path(sys.executable).with_name("fedbayes")],
    "module": [sys.executable, "-m", "fedbayes"],
    "its command line": [sys.executable, "-m", "fedbayes.cli"],
}


@pytest.fixture
def planted(tmp_path):
    """A folder with a table, in which modules lie that libraries look for; what starts the command
    line there, and says which of them were run."""
    for name in LOOKED_FOR:
        (tmp_path / f"{name}.py").write_text(PLANTED.format(mark=str(tmp_path / f"{name} ran")))
    rows = [f"{k % 7},{k % 5},{'yn'[k % 2]}" for k in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,label", *rows]))

    def started(mode, *arguments):
        done = subprocess.run(
            [*STARTS[mode], *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert not list(tmp_path.glob("* ran"))
        assert done.returncode == 0, done.stderr
        return done.stdout

    return started


RUN = ("run", "--rounds", "1", "--clients", "2", "--set", "data.path=t.csv", "--json", "-o", "run")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["script", *STARTS])
def test_what_lies_in_the_current_directory_is_not_run_unasked(planted, mode):
    done = planted(mode, *RUN, "--engine", "workers")
    assert json.loads(done)["rounds"] == 1
    planted(mode, "data", "check", "t.csv")
    planted(mode, "predict", "run", "t.csv", "-o", "p.csv")


@pytest.mark.slow
def test_nor_is_it_in_actors_of_ray(planted):
    pytest.importorskip("ray")
    assert json.loads(planted("script", *RUN, "--engine", "ray"))["rounds"] == 1


NET = """
from helper import width

def network(shape, outputs):
    import late
    import pandas, torch
    return torch.nn.Sequential(torch.nn.Linear(shape[0], width), torch.nn.Linear(width, outputs))
"""


@pytest.mark.parametrize(
    "engine",
    [
        "sequential",
        pytest.param("workers", marks=pytest.mark.slow),
        pytest.param("ray", marks=pytest.mark.slow),
    ],
)
def test_a_users_own_modules_are_found_there_and_what_they_import(planted, tmp_path, engine):
    (tmp_path / "mine.py").write_text(NET)
    (tmp_path / "helper.py").write_text("width = 3")
    (tmp_path / "late.py").write_text("")
    done = planted("script", *RUN, "--set", "model.name=mine:network", "--engine", engine)
    assert json.loads(done)["rounds"] == 1


def test_a_folder_is_searched_for_names_that_are_given_alone(tmp_path):
    for name, code in {"ownmod": "import sibling", "sibling": "", "other": ""}.items():
        (tmp_path / f"{name}.py").write_text(code)
    code = (
        "import sys; from pathlib import Path; sys.path[:0] = ['', str(Path.cwd())]\n"
        "from fedbayes.core.here import only_own_modules, variables\n"
        "from fedbayes.core.lazy import own\n"
        "only_own_modules(str(Path.cwd())); assert not {'', str(Path.cwd())} & {*sys.path}\n"
        "assert list(variables().values()) == [str(Path.cwd())]\n"
        "print(own('ownmod:sibling').__file__)\n"
        "try: import other\n"
        "except ImportError: print('no other')"
    )
    done = in_process_of_its_own(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(tmp_path / "sibling.py"), "no other"]


def test_copies_of_a_folder_are_read_alike(own, tmp_path):
    folder, mark = own
    again = shutil.copytree(folder, tmp_path / "again")
    one, two = gather([folder, again])
    assert one.metrics == two.metrics
    assert not mark.exists()


@pytest.fixture
def stranger(tmp_path, own, monkeypatch):
    """A model file whose card names a stranger's method, network or likelihood, one at a time."""
    folder, mark = own
    weights, card = read_with_card(folder / "model.safetensors")

    def make(**tables):
        plain = {
            "model": {"name": "mlp", "hidden": []},
            "method": {"name": "fedavg"},
            "task": {"likelihood": "categorical"},
        }
        path = tmp_path / "m.safetensors"
        write_model(path, weights, replace(card, **(plain | tables)))
        return path

    return make, mark


def tried(path, *given, model=None, run=None):
    """As `fedbayes evaluate` does."""
    settings = None if model is None else Config.load(None, [f"model.name={model}"]).model
    tests = find_tests(path, run, ["data.name=digits", *given] if run is None else given)
    return compare({"m": open_model(path, tests, settings)}, tests)[0].metrics["accuracy"]


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ({"task": {"likelihood": "ownmod:Likely"}}, "task.likelihood"),
        ({"model": {"name": "ownmod:network"}}, "model.name"),
        ({"model": {"name": "os:system", "arguments": {"command": "x"}}}, "model.name"),
        ({"method": {"name": "ownmod:Mine"}}, "method.name"),
    ],
)
def test_a_model_file_has_nothing_imported(stranger, tables, named):
    make, mark = stranger
    path = make(**tables)
    for read in (tried, fedbayes.load):
        with pytest.raises(ModelError, match=rf"needs the code {named} = '.*--set {named}="):
            read(path)
    assert not mark.exists()


def test_what_a_user_names_too_is_imported(stranger, own):
    make, _ = stranger
    wanted = trust(own[0]).metrics["accuracy"]
    run = own[0]
    assert tried(run / "model.safetensors", run=run) == pytest.approx(wanted, abs=1e-6)
    path = make(model={"name": "ownmod:network"}, task={"likelihood": "ownmod:Likely"})
    with pytest.raises(ModelError, match=r"model.name = 'ownmod:network'"):
        tried(path, "task.likelihood=ownmod:Likely")
    assert tried(path, "task.likelihood=ownmod:Likely", model="ownmod:network") > 0
    trusted = frozenset(["task.likelihood=ownmod:Likely", "model.name=ownmod:network"])
    assert fedbayes.load(path, trusted=named_by(sorted(trusted))).likelihood.name == "likely"
    with pytest.raises(ModelError, match=r"task.likelihood = 'ownmod:Likely'"):
        read_models([path])


@pytest.mark.parametrize(
    "tables",
    [
        {"task": {"likelihood": 5}},
        {"task": {"target": 1}},
        {"model": {"name": 5}},
        {"model": {"x": 1}},
    ],
)
def test_a_card_that_no_version_wrote_is_told(stranger, tables):
    with pytest.raises(FedbayesError):
        tried(stranger[0](**tables))
