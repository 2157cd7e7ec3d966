"""The commands that list and draw."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from fedbayes import Config
from fedbayes.cli import main
from fedbayes.config.listing import built_in
from fedbayes.config.settings import toml_value
from fedbayes.methods import METHODS
from tests.helpers.command_line import command


@pytest.fixture
def cli(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["fedbayes", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        assert stop.value.code == 0, err
        return out

    return call


def test_methods(cli):
    listing = {entry["name"]: entry for entry in json.loads(cli("methods", "--json"))}
    assert listing.keys() == METHODS.keys()
    assert listing["fedprox"]["parameters"]["proximal"]["default"] == 0.01
    text = cli("methods", "fedprox")
    assert "method.proximal = 0.01" in text
    assert "Li et al. 2018" in text
    assert "fedavgm" not in text


def test_methods_are_a_line_each(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = cli("methods").splitlines()
    assert max(map(len, lines)) <= 80
    for (name, method), line in zip(METHODS.items(), lines, strict=False):
        assert line.startswith(f"{name} ")
        assert line.rstrip().endswith(f"  {method.about.summary}")
        assert method.name == name


@pytest.mark.parametrize("name", METHODS)
def test_published_values_are_those_of_the_preset(name):
    """As a run takes them, for every setting of the method that may be `auto`."""
    config = Config.create(rounds=1, method={"name": name, "preset": "published"}).closed()
    made = config.build_method()
    for row in built_in()[name].parameters:
        key = row.key.removeprefix("method.")
        if key in made.choosable():
            value = getattr(made, key)
            said = "unset" if value is None else toml_value(value)
            assert row.description.endswith(f"; published: {said}")


def test_settings(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = cli("settings", "training.lr")
    assert text == (
        'training.lr = "auto"  (number > 0 | auto)\n'
        "    learning rate in the first round; published: 0.1\n"
    )
    table = json.loads(cli("settings", "training", "--json"))
    assert [row["key"] for row in table][:2] == ["training.optimizer", "training.lr"]
    assert " | package.module:name" in table[0]["type"]
    assert table[0]["choices"] == ["auto", "sgd", "adam", "amsgrad", "adamax"]
    for asked in (("method.fedprox",), ("method", "--method", "fedprox")):
        keys = [row["key"] for row in json.loads(cli("settings", *asked, "--json"))]
        assert keys == ["method.name", "method.preset", "method.weighting", "method.proximal"]
    own = json.loads(cli("settings", "method.examples.fedexp:FedExP.epsilon", "--json"))
    assert [row["key"] for row in own] == ["method.epsilon"]
    whole = cli("settings")
    assert max(map(len, whole.splitlines())) <= 80
    assert "data.path unset  (path)" in whole
    assert "method.weighting" in whole
    assert json.loads(cli("settings", "--schema"))["properties"]["rounds"]["minimum"] == 1


def test_a_parameter_of_another_method_is_told(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fedbayes", "settings", "method.proximal"])
    with pytest.raises(SystemExit):
        main()
    told = " ".join(capsys.readouterr().err.split())
    assert "method.proximal is a parameter of fedprox, not of fedavg" in told
    assert "--method fedprox" in told


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("method.fedprx", "'fedprx' is not a method (did you mean 'fedprox'?)"),
        ("task.gauss", "'gauss' is not a likelihood (did you mean 'gaussian'?)"),
        ("task.noise", "task.noise is a setting of gaussian, student-t, quantile"),
    ],
)
def test_a_misspelt_method_or_likelihood_is_guessed(monkeypatch, capsys, key, words):
    monkeypatch.setattr("sys.argv", ["fedbayes", "settings", key])
    with pytest.raises(SystemExit):
        main()
    assert words in " ".join(capsys.readouterr().err.split())


def test_help_tells_choices_and_defaults(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = " ".join(cli("run", "--help").replace("│", " ").split())
    for words in ("scaffold-fedsparse", "permuted-mnist", "resnet20", "dirichlet-equal"):
        assert words in text
    assert "workers, ray, flower-simulation, flower. Default: auto." in text
    assert "Number of rounds. Default: 20." in text


def commands():
    """Every command with its words."""
    from typer.main import get_command

    from fedbayes.cli import app

    for name, outer in get_command(app).commands.items():
        nested = getattr(outer, "commands", None)
        yield from ((f"{name} {n}", c) for n, c in nested.items()) if nested else [(name, outer)]


@pytest.mark.parametrize(("words", "command"), list(commands()))
def test_help_is_shown_whole(cli, words, command):
    """Words in brackets would be taken for a style, and left out."""
    shown = "".join(cli(*words.split(), "--help").replace("│", " ").split())
    for parameter in command.get_params(click.Context(command)):
        assert "".join((getattr(parameter, "help", "") or "").rstrip(".").split()) in shown


def test_unknown_commands(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fedbayes", "rnu"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: No such command 'rnu'. Did you mean 'run'? See ")
    assert len(said.splitlines()) == 1


def test_version(cli):
    from importlib.metadata import version

    import fedbayes

    assert cli("--version") == cli("version") == version("fedbayes") + "\n"
    assert fedbayes.__version__ == version("fedbayes")
    assert "__version__" in dir(fedbayes)
    code = (
        "import importlib.metadata as m, sys\n"
        "def none(name): raise m.PackageNotFoundError(name)\n"
        "m.version = none\n"
        "import fedbayes\n"
        "print(fedbayes.__version__, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0+unknown", "False"], "only on the path"


COMPLETIONS = {
    "run --method fedpr": ["fedprox"],
    "run --dataset cifar": ["cifar10", "cifar100"],
    "run --model l": ["lenet5"],
    "run --engine flower": ["flower-simulation", "flower"],
    "run --partition dir": ["dirichlet", "dirichlet-equal"],
    "run --set training.l": ["training.lr=", "training.last_batch="],
    "run --set engine=w": ["engine=workers"],
    "settings secure.ena": ["secure.enabled"],
    "methods scaf": ["scaffold", "scaffold-fedsparse"],
    "data show per": ["permuted-mnist"],
    "evaluate m.pt --dataset fem": ["femnist"],
}


def test_values_are_completed():
    """As bash asks for it, without PyTorch."""

    code = """
import os, sys
from fedbayes.cli import app
os.environ["_FEDBAYES_COMPLETE"] = "complete_bash"
asked, sys.argv[1:] = sys.argv[1:], []
for words in asked:
    os.environ |= {"COMP_WORDS": "fedbayes " + words, "COMP_CWORD": str(len(words.split()))}
    try:
        app(prog_name="fedbayes")
    except SystemExit:
        print("--", "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *COMPLETIONS], capture_output=True, text=True
    )
    offered = done.stdout.split("-- False\n")
    assert [words.split() for words in offered[:-1]] == list(COMPLETIONS.values()), done.stderr


def test_the_package_lists_what_it_has():
    """For tab completion."""
    import fedbayes
    from fedbayes import data, models

    for package in (fedbayes, data, models):
        assert {*package.__all__} <= {*dir(package)}
        for name in package.__all__:
            assert getattr(package, name) is not None
        with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
            package.nonsense  # noqa: B018


def test_a_terminal_that_lacks_a_character_is_told_its_code():
    """δ is in no table of Western Europe."""
    done = subprocess.run(
        [sys.executable, "-m", "fedbayes", "settings", "privacy.delta"],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
    )
    assert done.returncode == 0, done.stderr
    assert rb"\u03b4 of differential privacy" in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="of Linux")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [("--version",), ("methods",)])
def test_an_output_that_is_full_is_told(unbuffered, words):
    """It was called the run folder, or a traceback came as the process ended."""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fedbayes", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )
    assert (done.returncode, done.stderr) == (
        2,
        "error: cannot write to standard output: No space left on device. Redirect it elsewhere\n",
    )


def test_a_name_of_other_bytes_is_told(monkeypatch, capsys, tmp_path):
    """Linux has such names from disks of other systems; nothing that is text can hold them."""
    table = tmp_path / os.fsdecode(b"caf\xe9.csv")
    try:
        table.write_text("a,label\n" + "1,0\n2,1\n" * 20)
    except (OSError, UnicodeError):
        pytest.skip("the file system takes no such names")
    given = ["--set", f"data.path={table}", "--set", "data.label=label", "-o", f"{tmp_path}/run"]
    monkeypatch.setattr("sys.argv", ["fedbayes", "run", *given])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: '{tmp_path}/caf\\udce9.csv': its name is not UTF-8. Rename it"
    )


def test_data_list(cli):
    names = [entry["name"] for entry in json.loads(cli("data", "list", "--json"))]
    assert names == [
        "digits", "diabetes", "mnist", "permuted-mnist", "fashion-mnist", "cifar10", "cifar100",
        "femnist", "har", "vehicle", "einstein",
    ]  # fmt: skip
    assert "scikit-learn" in cli("data", "list")


@pytest.mark.parametrize(
    ("suffix", "begin"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_data_show_draws(cli, tmp_path, suffix, begin):
    picture = tmp_path / f"shares.{suffix}"
    text = cli("data", "show", "digits", "--clients", 5, "--alpha", 0.2, "--out", picture)
    assert "5 clients" in text
    assert picture.read_bytes().startswith(begin)


def test_help_is_quick_to_import():
    """Help needs neither PyTorch nor the data libraries."""

    code = "import sys, fedbayes.cli; print([m for m in ('torch', 'datasets') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_module_is_the_command_line():
    asked = [sys.executable, "-m", "fedbayes", "methods", "fedprox"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert "method.proximal = 0.01" in done.stdout


def test_ctrl_c_before_the_command_line_is_there(monkeypatch):
    """Imports take a moment; whoever stops them sees no traceback."""
    from fedbayes import __main__

    class Interrupted:
        def find_spec(self, name, *_):
            if name == "fedbayes.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "fedbayes.cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as stop:
        __main__.main()
    assert stop.value.code == 130


def test_the_file_of_the_methods_is_what_they_say():
    """Else: python -m fedbayes.config.listing."""
    from fedbayes.config import listing

    assert listing.FILE.read_text(encoding="utf-8") == listing.content()


LISTS = ("methods", "methods fedprox --json", "settings", "settings method.fedgvi")
ABSENT = (
    *("run absent.toml", "run absent.csv", "run absent.csv other.csv", "compare absent.toml"),
    *("export absent", "calibrate absent", "conformal absent", "hazards absent", "resume absent"),
    *("evaluate absent.pt", "predict absent new.csv", "fuse absent.pt b.pt -o c.pt"),
    *("posterior absent.pt --data absent.csv -o o.safetensors", "glm absent.csv"),
    *("data check absent.csv", "data summarize absent.csv -o o.json", "federate resume absent"),
    *("sums --data absent.csv -o o.json", "attack absent.toml"),
)


def test_lists_and_absent_files_need_no_pytorch():
    code = (
        "import sys; from fedbayes.cli import main\n"
        f"for words in {(*LISTS, *ABSENT)!r}:\n"
        "    sys.argv = ['fedbayes', *words.split()]\n"
        "    try:\n        main()\n"
        "    except SystemExit as stop:\n"
        "        print('--', words, stop.code or 0, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ends = [line[3:] for line in done.stdout.splitlines() if line.startswith("-- ")]
    assert ends == [
        *(f"{words} 0 False" for words in LISTS),
        *(f"{words} 2 False" for words in ABSENT),
    ]
    errors = done.stderr.replace("\n", " ").split("error: ")[1:]
    assert len(errors) == len(ABSENT)
    for error in errors:
        assert "absent" in error
        assert "does not exist" in error or "not found" in error


@pytest.mark.parametrize("name", ["run", "compare", "tune"])
def test_defaults_are_shown_as_a_command_line_has_them(name, capsys):
    assert command(name, "--help") == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Device" in shown
    assert "Default: cpu." in shown
    assert "['" not in shown
