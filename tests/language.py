"""Plain English: words and phrases that we do not write, and sentences that are too long.

The test `tests/repository/test_language.py` reads documentation, help texts, settings,
docstrings and messages.
`python -m tests.language docs` lists the findings in docs/ and README.md by file;
`python -m tests.language src` those in the package.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from tests import ROOT

LONGEST = 35
"""Words in a sentence."""

PHRASES = {
    r"in place of": "instead of",
    r"beside(?!s)": "next to, in addition to, relative to",
    r"go(?:es)? on with": "resume, continue",
    r"how sure": "confidence, uncertainty",
    r"unsure": "uncertain",
    r"surer": "more confident, overconfident",
    r"surest": "most confident",
    r"broken off|breaks off|broke off": "interrupted",
    r"one after the other|one after another": "sequentially",
    r"so many (?!that)": "a number of, n",
    r"likel(?:ier|iest)": "more probable, most probable",
    r"what a unit is worth": "its importance",
    r"(?:in|the) (?:clients'|skewed|several|many|two|three) hands": "clients, sites, the partition",
    r"whose (?:a row|a sample|each row|rows) (?:is|are)": "client, site",
    r"division of the (?:data|rows)": "partition",
    r"nats from": "KL divergence to",
    r"as ever": "as before, unchanged",
    r"(?:is|are|was|were) refused": "is rejected, raises an error",
    r"refuses?": "reject, raise an error",
    r"(?:is|are|was|were) (?:said|told)": "is printed, logged, reported",
    r"(?:is|are) told (?:by|of)": "given by",
    r"tells? apart": "distinguish",
    r"mend(?:s|ed|ing)?": "fix",
    r"foreign inputs?": "out-of-distribution inputs",
    r"made-up inputs?|drawn inputs?": "synthetic inputs",
    r"networks? of others": "pretrained networks",
    r"what (?:the )?(?:clients|networks|models?) says?": "predictions, outputs",
    r"promise of coverage|promised coverage|keeps? (?:this|the) promise": "coverage guarantee",
    r"hostile": "malicious",
    r"anew": "again",
    r"hands over": "sends",
    r"what (?:comes|came|will come) of (?:it|them|that|this|a run|the runs?)": "the result",
    r"says? not what": "does not say what",
    r"of which it is told": "for which",
}
"""Patterns in lower case, and what to write instead. Each is a whole word or phrase."""

SHOWN_PHRASES = {
    r"(?<!there )(?:is|are|was|were) no (?!longer|more\b)\w+": "is not a, are not",
    r"holds?(?! out| shares)": "has, contains, stores",
    r"what is no|which is none": "that is not a",
    r"whoever": "anyone who",
    r"(?:says?|tells?) nothing|nothing of": "does not describe, has no",
    r"stands? (?:in|for)": "occurs in, means",
    r"comes? (?:at|to nothing)": "connects to, fails",
    r"lies?": "is",
    r"as (?:it is|they are)": "unchanged",
    r"taken (?:for|as)": "read as, used as",
    r"go(?:es)? (?:with|together)": "works with",
    r"exclude one another": "exclude each other",
    r"(?:is|are) wanted|wanted (?:is|are)": "expected",
    r"(?:is|are) believed": "the limit is",
    r"(?:is|are) for (?!a sum|another)": "works only with",
    r"(?:has|have) to be": "must be",
    r"ask(?:s|ed)? for": "requested, needs",
    r"(?:is|are) of (?!type|kind|several kinds)": "has, belongs to",
    r"(?<!with each )(?<!one of them )alone": "only",
    r"mentions?|spoke|speaks?": "lists, describes",
    r"let it": "return, use",
    r"in its place|take (?:it|them) back": "instead, restore",
    r"make it again": "create it again",
    r"draws? .{1,20} otherwise|otherwise than": "differently from",
    r"names? (?:one|it|them|another|two|some)": "give, list, choose",
    r"say (?:it|so|which|how|what)": "give, set",
}
"""Patterns for what the program prints: messages, help texts and settings."""


def _compiled(phrases: dict[str, str]) -> list[tuple[re.Pattern[str], str]]:
    return [
        (re.compile(rf"(?<![\w`.-])(?:{pattern})(?![\w`-])", re.IGNORECASE), instead)
        for pattern, instead in phrases.items()
    ]


_PATTERNS = _compiled(PHRASES)
_SHOWN_PATTERNS = _compiled(SHOWN_PHRASES)


@dataclass(frozen=True)
class Finding:
    """A place in a text that is not plain English."""

    where: str
    """The file and line, or the command."""
    text: str
    """What is written."""
    instead: str
    """What to write instead."""

    def __str__(self) -> str:
        return f"{self.where}: {self.text!r}; {self.instead}"


@dataclass(frozen=True)
class Prose:
    """A piece of text and where it is."""

    where: str
    text: str
    shown: bool = False
    """Whether the program prints it."""


def findings(prose: Prose) -> Iterator[Finding]:
    """The phrases and the sentences of a text that break the rules."""
    text = re.sub(r"`[^`]*`", "`x`", prose.text)
    for pattern, instead in (*_PATTERNS, *(_SHOWN_PATTERNS if prose.shown else ())):
        for found in pattern.finditer(text):
            yield Finding(prose.where, found[0], f"write: {instead}")
    for sentence in sentences(text):
        words = re.findall(r"[\w`][\w`'’.,/%-]*", sentence)
        if len(words) > LONGEST:
            start = " ".join(words[:8])
            yield Finding(prose.where, f"{start} …", f"{len(words)} words in a sentence")


def sentences(text: str) -> list[str]:
    """The sentences of a text; paragraphs and items of lists end one too."""
    parts = re.split(r"\n\s*\n|\n\s*[-*] |\n\s*\d+\. |\n\s*>>> ", text)
    found = []
    for part in parts:
        joined = " ".join(part.split())
        found += re.split(r"(?<=[.!?:;])[)\"”*_]*\s+(?=[^a-z]|[a-z`])", joined)
    return found


def pages(paths: list[Path]) -> Iterator[Prose]:
    """The prose of Markdown pages by paragraph: no code, tables, formulas or comments."""
    for path in paths:
        text = path.read_text(encoding="utf-8")
        blank = prose_of(text)
        line = 1
        for paragraph in re.split(r"(\n\s*\n)", blank):
            if paragraph.strip():
                yield Prose(f"{path.relative_to(ROOT)}:{line}", paragraph)
            line += paragraph.count("\n")


def prose_of(text: str) -> str:
    """A page with what is no prose left out; lines keep their numbers."""

    def keep_lines(found: re.Match[str]) -> str:
        return "\n" * found[0].count("\n")

    text = re.sub(r"\A---\n.*?\n---\n", keep_lines, text, flags=re.DOTALL)
    text = re.sub(
        r"^( *)(```|~~~).*?^\1\2[^\n]*$", keep_lines, text, flags=re.DOTALL | re.MULTILINE
    )
    text = re.sub(r"<!--.*?-->", keep_lines, text, flags=re.DOTALL)
    lines = []
    for line in text.split("\n"):
        code = line.startswith(("    ", "\t")) and not re.match(r"\s+([-*]|\d+\.) ", line)
        inside = bool(lines) and bool(lines[-1].strip())
        if (code and not inside) or line.lstrip().startswith(("|", "![", "<", "$", ":::")):
            lines.append("")
        else:
            line = re.sub(r"\]\([^)]*\)", "]", line)
            line = re.sub(r"\$`[^`]*`\$|\$[^$]+\$", "x", line)
            lines.append(re.sub(r"^#+ ", "", line))
    return "\n".join(lines)


def helps() -> Iterator[Prose]:
    """The help texts of all commands, arguments and options."""
    from typer.main import get_command

    from fedbayes.cli import app

    def below(command: click.Command, name: str) -> Iterator[Prose]:
        yield Prose(name, command.help or "", shown=True)
        for parameter in command.get_params(click.Context(command, info_name=name)):
            text = getattr(parameter, "help", None) or ""
            yield Prose(f"{name} {parameter.opts[0]}", _without_choices(text), shown=True)
        for inner, one in getattr(command, "commands", {}).items():
            yield from below(one, f"{name} {inner}")

    yield from below(get_command(app), "fedbayes")


def _without_choices(text: str) -> str:
    """A text without its lists of names, which are no sentences."""
    return re.sub(r"(?:[\w.-]+, ){5,}", "x, ", text)


def described() -> Iterator[Prose]:
    """The descriptions of all settings."""
    from fedbayes.config.config import settings
    from fedbayes.config.listing import built_in

    for row in settings(None):
        yield Prose(f"setting {row.key}", _without_choices(row.description), shown=True)
    for name, one in built_in().items():
        yield Prose(f"method {name}", one.summary, shown=True)
        for row in one.parameters:
            yield Prose(f"method {name}, {row.key}", row.description, shown=True)


def docstrings(paths: list[Path]) -> Iterator[Prose]:
    """The docstrings of modules, and of public classes, functions and methods in them."""
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        yield from _docstrings(tree, path)


def _docstrings(node: ast.AST, path: Path) -> Iterator[Prose]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        text = ast.get_docstring(node, clean=True)
        if text:
            line = node.body[0].lineno
            text = re.split(r"\nExamples?:", text)[0]
            # Each argument is a sentence of its own; its name is no prose.
            text = re.sub(r"\n {4}\*{0,2}\w+:", "\n\n`x`:", text)
            yield Prose(f"{path.relative_to(ROOT)}:{line}", text)
        if isinstance(node, ast.FunctionDef):
            return
        for one in node.body:
            name = getattr(one, "name", "_")
            if not name.startswith("_"):
                yield from _docstrings(one, path)


def messages(paths: list[Path]) -> Iterator[Prose]:
    """The literal texts of three words or more, docstrings apart."""
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = list(ast.walk(tree))
        apart = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                apart.update(id(inner) for inner in ast.walk(node) if inner is not node)
        for node in nodes:
            if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in apart:
                text = "".join(_literals(node))
                if len(text.split()) > 2 and "://" not in text:
                    yield Prose(f"{path.relative_to(ROOT)}:{node.lineno}", text, shown=True)


def _literals(node: ast.AST) -> Iterator[str]:
    """The texts of a literal in their order; a value counts as one word."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        for part in node.values:
            if isinstance(part, ast.Constant):
                yield str(part.value)
            else:
                yield "x"


def former_names(prose: Prose) -> Iterator[Finding]:
    """Former names of commands in a page's whole text."""
    from fedbayes.cli.commands import FORMER_COMMANDS

    for old, new in FORMER_COMMANDS.items():
        for found in re.finditer(rf"fedbayes {old}\b", prose.text):
            *outer, _ = old.split()
            yield Finding(prose.where, found[0], f"write: {' '.join(['fedbayes', *outer, *new])}")


def in_docs(paths: list[Path] | None = None) -> list[Finding]:
    """The findings in pages; those of docs/ and the README unless others are named."""
    if paths is None:
        generated = [ROOT / "docs" / "findings"]
        paths = [
            path
            for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
            if not any(path.is_relative_to(folder) for folder in generated)
        ]
    found = [one for prose in pages(paths) for one in findings(prose)]
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            found += former_names(Prose(f"{path.relative_to(ROOT)}:{number}", line))
    return found


def in_package(places: tuple[str, ...] = ("",)) -> list[Finding]:
    """The findings in docstrings and messages of files below src/fedbayes."""
    package = ROOT / "src" / "fedbayes"
    paths = [
        path
        for path in sorted(package.rglob("*.py"))
        if any(path.relative_to(package).as_posix().startswith(place) for place in places)
    ]
    return [one for prose in (*docstrings(paths), *messages(paths)) for one in findings(prose)]


def in_interface() -> list[Finding]:
    """The findings in help texts and settings."""
    return [one for prose in (*helps(), *described()) for one in findings(prose)]


def main(asked: list[str]) -> int:
    """List findings by file; 1 if there are any."""
    known = {"docs": in_docs, "src": in_package, "help": in_interface}
    if not asked or asked[0] not in known:
        print(f"python -m tests.language {'|'.join(known)} [start of a path ...]", file=sys.stderr)
        return 2
    found = known[asked[0]]()
    if asked[1:]:
        found = [one for one in found if one.where.startswith(tuple(asked[1:]))]
    files: dict[str, int] = {}
    for one in found:
        print(one)
        file = one.where.partition(":")[0]
        files[file] = files.get(file, 0) + 1
    for file, count in sorted(files.items(), key=lambda item: -item[1]):
        print(f"{count:5} {file}")
    print(f"{len(found):5} in all")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
