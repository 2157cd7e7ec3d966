"""The README is short, its links lead somewhere, and its commands do what it says."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from fedbayes.methods import METHODS
from tests import ROOT
from tests.helpers.command_line import command

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?")
TOLERANCE = 0.006
"""Of accuracies of 451 digits: two of them, for other processors round in another way."""


def test_it_can_be_read_in_five_minutes():
    assert len(README.split()) <= 1200
    assert README.count("<img ") == 2


def test_its_links_lead_to_files():
    inner = [*re.findall(r"\]\(([^)#]+)", README), *re.findall(r'(?:src|srcset)="([^"]+)"', README)]
    inner = [link for link in inner if not link.startswith("http")]
    assert len(inner) > 20
    assert [link for link in inner if not (ROOT / link).is_file()] == []


def test_it_names_every_method_once():
    part = README[README.index("## Methods") : README.index("`fedbayes methods NAME`")]
    assert sorted(re.findall(r"`([\w-]+)`", part)) == sorted(METHODS)


def test_its_set_up_commands_and_extras_exist_and_the_citation_has_the_version():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (listed,) = re.findall(r"# extras: (.*)", README)
    assert set(listed.split(", ")) < set(project["optional-dependencies"])
    assert f"\nversion: {project['version']}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.slow
def test_its_commands_print_its_numbers(tmp_path, monkeypatch, capsys):
    """Commands and Python in their order; a block of output has lines of the commands before."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    ran, shown, out = 0, 0, ""
    for language, code in BLOCK.findall(README):
        if language == "sh":
            out = ""
            for line in code.splitlines():
                program, *typed = shlex.split(line)
                assert program == "fedbayes"
                words = [
                    found
                    for word in typed
                    for found in (sorted(map(str, Path().glob(word))) if "*" in word else [word])
                ]
                assert command(*words) == 0, f"{line}\n{capsys.readouterr().err}"
                out += "".join(capsys.readouterr())
                ran += 1
        elif language == "python":
            exec(compile(code, "README.md", "exec"), names)
        elif language == "text":
            for line in code.splitlines():
                words = NUMBER.sub("", line).split()
                like = [o for o in out.splitlines() if NUMBER.sub("", o).split() == words]
                assert len(like) == 1, (line, like)
                numbers = [[float(n) for n in NUMBER.findall(o)] for o in (line, like[0])]
                assert numbers[0] == pytest.approx(numbers[1], abs=TOLERANCE), line
                shown += 1
    assert (ran, shown) == (9, 3)
    clients = sorted(Path("runs/apart/clients").glob("*.safetensors"))
    files = ("fused.safetensors", *clients)
    assert command("evaluate", *files, "--run", "runs/apart", "--json") == 0
    scores = json.loads(capsys.readouterr().out)
    accuracy = {one["name"]: one["accuracy"] for one in scores}
    fused = accuracy.pop("fused.safetensors")
    average, ensemble = accuracy["average of the inputs"], accuracy["ensemble, as fuse learns it"]
    own = [accuracy[str(path)] for path in clients]
    found = [min(own), max(own), average, fused, ensemble]
    (sentence,) = re.findall(r"^Test accuracy: .*?\.$", README, re.DOTALL | re.MULTILINE)
    assert [float(n) for n in re.findall(r"0\.\d{3}", sentence)] == pytest.approx(
        found, abs=TOLERANCE
    )
