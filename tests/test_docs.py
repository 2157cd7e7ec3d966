"""The documentation does what it says: tutorials run, every method has its page."""

import contextlib
import re
import shlex
from pathlib import Path

import pytest

from fedbayes.methods import METHODS
from fedbayes.reports.palette import DARK, LIGHT, MARKERS, looks
from tests.command_line import command

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = ["quickstart.md", *(f"tutorials/{p.name}" for p in (DOCS / "tutorials").glob("*.md"))]


QUICK = {"quickstart.md", "tutorials/method.md"}
"""Pages that are run every time; the others are among the slow tests."""


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=() if p in QUICK else pytest.mark.slow) for p in sorted(PAGES)],
)
def test_tutorials_run(page, tmp_path, monkeypatch, capsys):
    """Code with a title is saved under it; other Python runs in one namespace; shell lines are
    commands of fedbayes; a TOML block is the config that a later command names.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    text = (DOCS / page).read_text()
    names: dict[str, object] = {}
    for language, title, code in BLOCK.findall(text):
        if title:
            Path(title).write_text(code)
        elif language == "python":
            exec(compile(code, page, "exec"), names)
        elif language == "toml":
            (found,) = set(re.findall(r"[\w-]+\.toml", text)) - {"config.toml"}
            Path(found).write_text(code)
        elif language == "sh":
            for line in code.splitlines():
                program, *arguments = shlex.split(line)
                assert program == "fedbayes"
                assert command(*arguments) == 0, f"{line}\n{capsys.readouterr().err}"
    with contextlib.suppress(KeyError):
        monkeypatch.delitem(__import__("sys").modules, "lookahead")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "file", "most"),
    [("docs/tutorials/method.md", "lookahead", 45), ("CONTRIBUTING.md", "further", 28)],
)
def test_the_own_method_keeps_the_contract(page, file, most, tmp_path):
    """The class in the page, as its test file there would."""
    import subprocess
    import sys

    for _, title, code in BLOCK.findall((DOCS.parent / page).read_text()):
        if title:
            (tmp_path / title).write_text(code)
    lines = (tmp_path / f"{file}.py").read_text().split("\n")
    assert sum(map(bool, lines)) <= most, "it is meant to be short"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"test_{file}.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "failed" not in done.stdout


def test_every_method_has_its_page():
    told = [
        name
        for page in (DOCS / "methods").glob("*.md")
        for name in re.findall(r"<!-- parameters: (\S+) -->", page.read_text())
    ]
    assert sorted(told) == sorted(METHODS)


@pytest.fixture(scope="module")
def hooks():
    import importlib.util

    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_settings_has_every_key(hooks):
    from fedbayes.config.config import settings

    page = hooks.on_page_markdown((DOCS / "settings.md").read_text())
    found, table = [], ""
    for line in page.splitlines():
        if line.startswith("## "):
            table = line[4:-1] + "." if line.startswith("## [") else ""
        elif key := re.match(r"\| `(\w+)` \| (.*?) \| .+ \| .+ \|$", line):
            found.append(table + key[1])
            cells = re.split(r"(?<!\\)\|", line)
            assert len(cells) == 6, line
    assert found == [row.key for row in settings(None)]
    assert "| `clients_per_round` | unset | integer >= 1 |" in page
    assert "(only where engine is workers) |" in page
    words = " \\| ".join(("sgd", "adam", "amsgrad", "adamax", "package.module:name", "auto"))
    assert f'| `optimizer` | `"auto"` | {words} |' in page


def test_the_page_of_commands_has_every_option(hooks):
    """Every option of every command, each under the head of its command."""
    from typer.main import get_command

    from fedbayes.cli import app

    page = hooks.on_page_markdown((DOCS / "cli.md").read_text())
    assert page.startswith("# Command line\n")
    parts = dict(re.findall(r"^##+ `(fedbayes [\w ]+)`\n(.*?)(?=^##|\Z)", page, re.M | re.S))
    known = {}
    for name, outer in get_command(app).commands.items():
        known[f"fedbayes {name}"] = outer
        for inner, nested in getattr(outer, "commands", {}).items():
            known[f"fedbayes {name} {inner}"] = nested
    assert parts.keys() == known.keys()
    for name, one in known.items():
        for parameter in one.params:
            if parameter.param_type_name == "option":
                assert parameter.opts[0] in parts[name], (name, parameter.opts)
    assert "resnet20. Default: mlp." in parts["fedbayes run"]


def test_the_page_of_comparisons_has_the_colour_of_every_method(hooks):
    """The same as on the pages that the commands write, in both themes."""
    page = hooks.on_page_markdown((DOCS / "compare.md").read_text())
    for name in METHODS:
        (look,) = looks([name])
        colours = f"light-dark({look.colour(LIGHT)}, {look.colour(DARK)})"
        (swatch,) = re.findall(rf"<svg[^>]*>(?:(?!</svg>).)*</svg> `{re.escape(name)}`<", page)
        assert colours in swatch
        assert f'href="#m{MARKERS.index(look.marker)}"' in swatch


def test_the_page_of_results_is_made_from_findings(hooks):
    """Every experiment has a verdict, and what one left is where the page asks for it."""
    from fedbayes_papers import lines

    written = (DOCS / "results.md").read_text()
    page = hooks.on_page_markdown(written)
    assert "<!--" not in page
    left = [line for line in lines(DOCS / "findings") if line.finding is not None]
    assert left
    assert sorted(file.name for file in (DOCS / "findings").iterdir()) == sorted(
        line.name for line in left
    )
    for line in lines(DOCS / "findings"):
        assert f"| `{line.name}` | {line.what} | {line.verdict} |" in page
    for line in left:
        assert written.count(f"<!-- finding: {line.name} -->") == 1
        assert all(str(claim) in page for claim in line.finding.claims)


def test_commands_in_the_pages_are_known():
    """Indented commands (too long to run here) at least name methods and options that exist."""
    from typer.main import get_command

    from fedbayes.cli import app

    known = get_command(app)
    pages = [DOCS.parent / "README.md", *DOCS.rglob("*.md")]
    found = [
        shlex.split(line, comments=True)[1:]
        for page in pages
        for line in re.findall(
            r"^    (fedbayes .*)$", page.read_text().replace("\\\n", " "), re.MULTILINE
        )
    ]
    assert len(found) > 20
    for words in found:
        name, *rest = words
        inner = known.commands[name]
        if getattr(inner, "commands", None):
            # `federate` without another command is `federate run`.
            inner = inner.commands[rest[0] if rest[0] in inner.commands else "run"]
        options = {option for parameter in inner.params for option in parameter.opts}
        assert {word for word in rest if re.fullmatch(r"--?[a-z][\w-]*", word)} <= options, words
        if "--method" in rest and name == "run":
            assert rest[rest.index("--method") + 1] in METHODS


NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def test_what_is_said_of_attacks_is_tried_by_a_test():
    """Every line of docs/security.md names tests that are there; one without says that it fails."""
    said = (DOCS / "security.md").read_text()
    for file, name in NAMED.findall(said):
        where = Path(__file__).parent / file
        assert name == "test_name" or f"def {name}(" in where.read_text(), f"{file} has no {name}"
    rows = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in said.splitlines()
        if line.startswith("|") and not line.startswith("|---")
    ]
    attacks = [row for row in rows if len(row) == 4 and row[0] != "attack"]
    assert len(attacks) > 30
    for attack, holds, _, tests in attacks:
        assert re.match(r"(yes|no|in part)\b", holds), attack
        assert NAMED.findall(tests) or (holds == "no" and tests == "-"), attack


def test_the_commands_of_a_federation_have_these_options(capsys):
    """Names of commands and options are looked at; what they do is in tests/test_federation.py."""
    text = (DOCS / "federation.md").read_text().replace("\\\n", " ")
    lines = re.findall(r"^    (?:fedbayes) (.*?)(?: &.*)?$", text, re.MULTILINE)
    assert len(lines) >= 6
    for line in lines:
        assert command(*shlex.split(line), "--help") == 0, line
    assert command("federate", "hub", "keys", "--node", "x", "--help") == 2
    assert "No such option" in capsys.readouterr().err
