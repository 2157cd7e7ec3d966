"""The command line's help screens, examples, and names of version 0.2."""

import os
import re
import shlex
import subprocess

import click
import pytest
from typer.main import get_command

import fedbayes
from fedbayes.cli import app
from fedbayes.cli.commands import EXAMPLES, FORMER_COMMANDS, FORMER_OPTIONS, PANELS
from tests.helpers.command_line import command, process


def leaves():
    """Every command by its name, as in `stats glm`."""
    found = {}
    for name, outer in get_command(app).commands.items():
        inner = getattr(outer, "commands", None)
        found |= {f"{name} {n}": one for n, one in inner.items()} if inner else {name: outer}
    return found


def parsed(one, words):
    """Read the words as this command does; a word that it does not have is an error."""
    context = click.Context(one)
    return one.make_parser(context).parse_args(list(words))


def test_the_first_screen_has_all_commands_in_groups(capsys):
    assert command("--help") == 0
    shown = re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out)
    places = [shown.index(f"   {panel}") for panel in ("Options", *PANELS)]
    assert places == sorted(places)
    known = get_command(app).commands
    listed = [name for names in PANELS.values() for name in names if name in known]
    assert list(known) == listed
    for name in listed:
        assert re.search(rf"^ +{name}  ", shown, re.MULTILINE), name
    assert "Commands" not in shown


def test_every_command_has_examples_with_its_own_options():
    commands = leaves()
    for name, one in commands.items():
        lines = EXAMPLES[name]
        assert lines
        for line in lines:
            words = shlex.split(line)
            assert words[: 1 + len(name.split())] == ["fedbayes", *name.split()]
            parsed(one, words[1 + len(name.split()) :])
        assert all(line in one.epilog for line in lines)
    with pytest.raises(click.NoSuchOption):
        parsed(commands["run"], ["--picture", "x.png"])


def test_former_names_lead_to_commands_and_options_that_exist():
    commands = leaves()
    groups = {name.split()[0] for name in commands}
    for old, (first, *_) in FORMER_COMMANDS.items():
        assert old not in commands
        parent = old.split()[:-1]
        assert " ".join([*parent, first]) in {*commands, *groups}
    for name, options in FORMER_OPTIONS.items():
        known = {opt for parameter in commands[name].params for opt in parameter.opts}
        for old, new in options.items():
            assert old not in known, f"{name} {old} has two meanings"
            assert new[0] in known


def test_one_option_one_meaning():
    """An option with one name has one type, wherever it is."""
    kinds = {}
    for name, one in leaves().items():
        if name == "fuse":
            continue
        for parameter in one.params:
            for option in parameter.opts:
                if option in ("--alpha", "--epsilon", "--per-client", "--out", "--plot", "--json"):
                    kinds.setdefault(option, set()).add(parameter.type.name)
    assert kinds == {
        "--alpha": {"float"},
        "--epsilon": {"float"},
        "--json": {"boolean"},
        "--out": {"path"},
        "--per-client": {"boolean"},
        "--plot": {"path"},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("cli") / "run"
    return fedbayes.run(rounds=1, data={"limit": 300, "clients": 2}, folder=place).folder.path


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["conformal", "RUN", "--level", "0.8"],
         ["calibrate", "RUN", "--method", "conformal", "--level", "0.8"]),
        (["calibrate", "RUN", "--temperature"], ["calibrate", "RUN", "--method", "temperature"]),
    ],
)  # fmt: skip
def test_a_former_name_does_the_same_and_prints_the_new_one(folder, capsys, old, new):
    def out(words):
        assert command(*[str(folder) if word == "RUN" else word for word in words], "--json") == 0
        return capsys.readouterr()

    before, after = out(old), out(new)
    assert before.out == after.out != ""
    assert "the old name works until version 0.4" in before.err
    assert "old name" not in after.err


def test_several_calibrations_in_one_go(folder, capsys):
    import json

    def out(method):
        assert command("calibrate", folder, "--method", method, "--json") == 0
        return json.loads(capsys.readouterr().out)

    both = out("conformal,temperature")
    assert both == {"temperature": out("temperature"), "conformal": out("conformal")}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--share", "0.3"], "--share has no effect. Add --method temperature or conformal"),
        (["--method", "conformal", "--rows", "test"], "Add --method hazards"),
        (["--method", "conformal", "--plot", "x.png"], "--plot has no effect with --method"),
        (["--method", "platt"], "--method platt: choose temperature, conformal, hazards"),
    ],
)
def test_options_of_another_calibration_are_errors(folder, capsys, words, message):
    assert command("calibrate", folder, *words) == 2
    assert message in capsys.readouterr().err


def test_a_run_is_evaluated_by_its_folder(folder, capsys):
    import json

    assert command("evaluate", folder, "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert command("evaluate", folder / "model.safetensors", "--run", folder, "--json") == 0
    assert json.loads(capsys.readouterr().out) == [found]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train"], "Did you mean 'run'?"),
        (["list"], "Did you mean 'methods' or 'data list'?"),
        (["predict", "RUN"], "Missing argument 'INPUTS', the rows to predict."),
        (["stats", "gml"], "Did you mean 'glm'?"),
    ],
)
def test_mistakes_of_a_newcomer(folder, capsys, words, message):
    assert command(*[str(folder) if word == "RUN" else word for word in words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_an_error_in_own_code_is_shown_from_this_code_on(tmp_path):
    lines = [
        "from fedbayes.methods.fedavg import FedAvg",
        "class Broken(FedAvg):",
        "    name = 'broken'",
        "    def update(self, server, reports, at):",
        "        return nowhere",
    ]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    done = subprocess.run(
        process("run", "--method", "mine:Broken", "--rounds", 1, "--clients", 3, "-o", "run"),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 1
    told = done.stderr.partition("Traceback")[2].splitlines()
    assert told[1].endswith('mine.py", line 5, in update')
    assert told[-1] == "NameError: name 'nowhere' is not defined"
