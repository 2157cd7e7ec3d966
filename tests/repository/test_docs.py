"""The documentation does what it says: tutorials run, every method has its page."""

import contextlib
import json
import re
import shlex
from pathlib import Path

import click
import pytest

from fedbayes.methods import METHODS
from fedbayes.reports.palette import DARK, LIGHT, MARKERS, looks
from tests import DOCS, ROOT
from tests.helpers.cases import cases
from tests.helpers.command_line import command
from tests.language import prose_of

BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = [
    *(f"{f}/{p.name}" for f in ("start", "tutorials") for p in (DOCS / f).glob("*.md")),
    *("howto/predict.md", "methods/personal.md", "methods/sparse.md"),
]
PAGES.remove("start/bayesian.md")  # which has nothing to run


QUICK = {"start/install.md", "tutorials/method.md"}
"""Pages that are run every time; the others are among the slow tests."""


@pytest.mark.parametrize(
    "page",
    cases(sorted(PAGES), slow={*PAGES} - {*QUICK}),
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


def test_the_site_is_short():
    """At most 38 pages besides the API, and 35,000 words of prose outside the changelog.

    Words stand outside code, tables, formulas, comments and what is made from the code.
    """
    pages = {
        path: path.read_text() for path in (DOCS.parent / "CONTRIBUTING.md", *DOCS.rglob("*.md"))
    }
    pages |= {
        path: "\n\n".join(
            "".join(cell["source"])
            for cell in json.loads(path.read_text())["cells"]
            if cell["cell_type"] == "markdown"
        )
        for path in DOCS.rglob("*.ipynb")
    }
    left_out = (DOCS / "reference" / "api", DOCS / "findings")
    texts = [
        text for path, text in pages.items() if not any(path.is_relative_to(f) for f in left_out)
    ]
    assert len(texts) + 1 <= 38, "with the changelog"
    count = 0
    for text in texts:
        prose = re.sub(r"`[^`\n]*`", "", re.sub(r"\$`[^`]*`\$", "", prose_of(text)))
        # A formula is left as x.
        count += sum(word != "x" for word in re.findall(r"[\w'’-]*[A-Za-z][\w'’-]*", prose))
    assert count <= 35_000


def test_every_method_has_its_section():
    """Its parameters once, and an anchor of its name, so that links and searches find it."""
    pages = "\n".join(page.read_text() for page in (DOCS / "methods").glob("*.md"))
    told = re.findall(r"<!-- parameters: (\S+) -->", pages)
    assert sorted(told) == sorted(METHODS)
    for name in METHODS:
        assert f"{{#{name}}}" in pages or f'id="{name}"' in pages, f"no anchor for {name}"


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(p.name for p in (DOCS / "methods").glob("*.md")))
def test_outputs_on_the_pages_of_methods_are_still_near(page, tmp_path, monkeypatch, capsys):
    """Accuracies within 0.02 and the very bytes; `benchmarks/method_pages.py` writes them anew."""
    from benchmarks.method_pages import PAIR, shown

    monkeypatch.chdir(tmp_path)
    for line, written in PAIR.findall((DOCS / "methods" / page).read_text()):
        assert command(*shlex.split(line)[1:]) == 0
        now = shown(capsys.readouterr().out).splitlines()
        before = written.splitlines()
        assert len(before) == len(now) > 0, line
        for old, new in zip(before, now, strict=True):
            value, found = old.split()[-1], new.split()[-1]
            if re.fullmatch(r"0\.\d+", value):
                assert float(found) == pytest.approx(float(value), abs=0.02), line
            else:
                assert old == new, line


@pytest.fixture(scope="module")
def hooks():
    import importlib.util

    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_settings_has_every_key(hooks):
    from fedbayes.config.config import settings

    page = hooks.on_page_markdown((DOCS / "reference" / "settings.md").read_text())
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

    page = hooks.on_page_markdown((DOCS / "reference" / "cli.md").read_text())
    assert page.startswith("# Command line\n")
    parts = dict(re.findall(r"^## `(fedbayes [\w ]+)`\n(.*?)(?=^## |\Z)", page, re.M | re.S))
    known = {}
    for name, outer in get_command(app).commands.items():
        inner = {n: one for n, one in getattr(outer, "commands", {}).items() if not one.hidden}
        if not outer.hidden:
            known |= {
                f"fedbayes {name}": outer,
                **{f"fedbayes {name} {n}": one for n, one in inner.items()},
            }
    assert parts.keys() == known.keys()
    for name, one in known.items():
        for parameter in one.params:
            if parameter.param_type_name == "option" and not parameter.hidden:
                row = rf"^\| `[^`]*{re.escape(parameter.opts[0])}\b[^`]*` \| .*\|$"
                assert re.search(row, parts[name], re.M), (name, parameter.opts)
    assert re.search(r"^\| `--model TEXT` \| Network", parts["fedbayes run"], re.M)


def test_the_index_of_names_has_every_name_of_the_api(hooks):
    page = hooks.on_page_markdown((DOCS / "reference" / "api" / "index.md").read_text())
    names = {
        name
        for file in (DOCS / "reference" / "api").glob("*.md")
        for name in re.findall(r"^::: (\S+)$", file.read_text(), re.MULTILINE)
    }
    assert len(names) > 100
    for name in names:
        assert re.search(rf"^\| \[`{name.rpartition('.')[2]}`\]\(\w+\.md#", page, re.MULTILINE), (
            name
        )


def test_the_page_of_comparisons_has_the_colour_of_every_method(hooks):
    """The same as on the pages that the commands write, in both themes."""
    page = hooks.on_page_markdown((DOCS / "howto" / "compare.md").read_text())
    for name in METHODS:
        (look,) = looks([name])
        colours = f"light-dark({look.colour(LIGHT)}, {look.colour(DARK)})"
        (swatch,) = re.findall(rf"<svg[^>]*>(?:(?!</svg>).)*</svg> `{re.escape(name)}`<", page)
        assert colours in swatch
        assert f'href="#m{MARKERS.index(look.marker)}"' in swatch


def test_the_page_of_results_is_made_from_findings(hooks):
    """Every experiment has a verdict, and what one left is where the page asks for it."""
    from fedbayes_papers import lines

    written = (DOCS / "benchmarks" / "papers.md").read_text()
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
    """Commands in blocks (too long to run here) at least name methods and options that exist."""
    from typer.main import get_command

    from fedbayes.cli import app
    from fedbayes.cli.commands import FORMER_COMMANDS, FORMER_OPTIONS

    known = get_command(app)
    pages = [DOCS.parent / "README.md", *DOCS.rglob("*.md")]
    texts = [page.read_text().replace("\\\n", " ") for page in pages]
    lines = [
        line.strip()
        for text in texts
        for line in [
            *re.findall(r"^    fedbayes .*$", text, re.MULTILINE),
            *(
                one
                for kind, _, code in BLOCK.findall(text)
                if kind == "sh"
                for one in code.splitlines()
            ),
        ]
    ]
    found = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("fedbayes ")]
    assert len(found) > 20
    for words in found:
        name, *rest = words
        name, *rest = *FORMER_COMMANDS.get(name, [name]), *rest
        inner = known.commands[name]
        if getattr(inner, "commands", None):
            # `federate` without another command is `federate run`.
            second = FORMER_COMMANDS.get(f"{name} {rest[0]}", rest)[0]
            inner = inner.commands[second if second in inner.commands else "run"]
            name = f"{name} {inner.name}"
        taken = inner.get_params(click.Context(inner))  # settings of fusion methods too
        options = {option for parameter in taken for option in parameter.opts}
        options |= FORMER_OPTIONS.get(name, {}).keys()
        assert {word for word in rest if re.fullmatch(r"--?[a-z][\w-]*", word)} <= options, words
        if "--method" in rest and name == "run":
            method = rest[rest.index("--method") + 1]
            assert method in METHODS or ":" in method, words


NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def test_what_is_said_of_attacks_is_tried_by_a_test():
    """Every line of tests/threats.md names tests that are there; one without says that it fails."""
    said = (ROOT / "tests" / "threats.md").read_text()
    for file, name in NAMED.findall(said):
        files = (ROOT / "tests").rglob(file)
        there = any(f"def {name}(" in found.read_text() for found in files)
        assert name == "test_name" or there, f"{file} has no {name}"
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
    """Their names are looked at; what they do is in tests/flower/test_federation.py."""
    text = (DOCS / "howto" / "deploy.md").read_text().replace("\\\n", " ")
    lines = re.findall(r"^    (?:fedbayes) (.*?)(?: &.*)?$", text, re.MULTILINE)
    assert len(lines) >= 6
    for line in lines:
        assert command(*shlex.split(line), "--help") == 0, line
    assert command("federate", "superlink", "keys", "--node", "x", "--help") == 2
    assert "No such option" in capsys.readouterr().err


def test_what_is_sent_and_staleness_are_told_of_every_method():
    text = (DOCS / "reference" / "rounds.md").read_text()
    sent = text.partition("{#updates}")[2].partition("\n## ")[0]
    assert [name for name in METHODS if f"`{name}`" not in sent] == []
    lines = text.partition("| Methods | Staleness |")[2].splitlines()[2:4]
    for line, stale in zip(lines, ("weighed", "whole"), strict=True):
        told = set(re.findall(r"`([\w-]+)`", line.split("|")[1]))
        assert told == {name for name, kind in METHODS.items() if kind.reports.stale == stale}
