"""What MkDocs does with pages: mathematics to MathML, tables of settings from the code.

`CONTRIBUTING.md` and `CHANGELOG.md` are pages too, and a `*` in the navigation stands for all files
of that pattern. Links to edit a page need a `Repository` under `[project.urls]` in
`pyproject.toml`.

Formulas are written as GitHub shows them too: $`inline`$ and fences named `math`. MathML needs no
script and no network. Comments are replaced:

    <!-- parameters: NAME -->            the parameters of a method
    <!-- fields: package.module:Class -->  the fields of a settings class
    <!-- settings -->                    every table of a config
    <!-- command line -->                every command with its options
    <!-- names -->                       every name of the API pages
    <!-- matrix -->                     which features of a round each method supports
    <!-- colours -->                     every method with its colour and marker
    <!-- findings -->                    every experiment of the papers, with a verdict
    <!-- finding: NAME -->               tables and claims of one, as `fedbayes reproduce` left them
"""

import re
import tomllib
from collections.abc import Iterable
from fnmatch import fnmatch
from inspect import getdoc
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from click import Command, Context
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.main import get_command

from fedbayes.cli import app
from fedbayes.config.config import settings
from fedbayes.config.listing import built_in
from fedbayes.config.settings import SettingRow, rows
from fedbayes.methods import METHODS
from fedbayes.reports.marks import defs, key
from fedbayes.reports.palette import looks
from fedbayes_papers import lines
from fedbayes_papers.finding import overview

_BLOCK = re.compile(r"^```math\n(.*?)\n```$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"\$`(.+?)`\$", re.DOTALL)
_PARAMETERS = re.compile(r"<!-- parameters: (\S+) -->")
_FINDING = re.compile(r"<!-- finding: (\S+) -->")
FINDINGS = Path(__file__).parent / "findings"
"""`NAME/finding.json` of every experiment that the page of results has from its output."""

_ROW = re.compile(r"^\|.*$", re.MULTILINE)
API = Path(__file__).parent / "reference" / "api"
_API_NAME = re.compile(r"^::: (\S+)$", re.MULTILINE)
_FIELDS = re.compile(r"<!-- fields: (\S+) -->")
ROOT = Path(__file__).parent.parent
ROOT_PAGES = {
    "contributing/index.md": "CONTRIBUTING.md",
    "contributing/changelog.md": "CHANGELOG.md",
}
"""Pages that are files of the repository's root."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the address of the repository from `pyproject.toml`, if it has one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if address := project.get("urls", {}).get("Repository"):
        config.repo_url, config.repo_name = address, "Source"
        config.edit_uri = "edit/main/docs/"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root, and write out patterns of the navigation."""
    for name, source in ROOT_PAGES.items():
        text = (ROOT / source).read_text().replace("](docs/", "](../")
        files.append(File.generated(config, name, content=text))
    config.nav = expanded(config.nav, sorted(file.src_uri for file in files))
    return files


def expanded(nav: Any, names: list[str]) -> Any:
    """The navigation with the files that a pattern stands for, `index.md` first."""
    if isinstance(nav, list):
        return [expanded(entry, names) for entry in nav]
    if isinstance(nav, dict):
        return {title: expanded(entry, names) for title, entry in nav.items()}
    if "*" not in nav:
        return nav
    return sorted(
        (name for name in names if fnmatch(name, nav)),
        key=lambda name: not name.endswith("/index.md"),
    )


def on_page_markdown(markdown: str, page: Page | None = None, **_: Any) -> str:
    """The page as MkDocs shall read it; pages of the root have no comments to replace."""
    if page is not None and page.file.src_uri in ROOT_PAGES:
        return markdown
    markdown = _BLOCK.sub(lambda found: convert(found[1].strip(), display="block"), markdown)
    # A line that begins with <math> would be taken for a block.
    markdown = _INLINE.sub(lambda found: f"<span>{convert(found[1])}</span>", markdown)
    markdown = _PARAMETERS.sub(lambda found: parameters(found[1]), markdown)
    markdown = _FIELDS.sub(lambda found: table(rows(resolve_name(found[1]))), markdown)
    markdown = _FINDING.sub(lambda found: finding(found[1]), markdown)
    for comment, text in (
        ("settings", tables),
        ("command line", commands),
        ("names", names),
        ("matrix", matrix),
        ("colours", colours),
        ("findings", lambda: overview(lines(FINDINGS))),
    ):
        if f"<!-- {comment} -->" in markdown:
            markdown = markdown.replace(f"<!-- {comment} -->", text())
    # A cell breaks before a deviation and not within it.
    return _ROW.sub(lambda found: found[0].replace("± ", "±&nbsp;"), markdown)


def parameters(name: str) -> str:
    """The parameters of a method as a Markdown table."""
    method = METHODS[name]
    if not method.model_fields:
        return f"`{name}` has no parameters."
    return (
        f"<details markdown><summary>Parameters of <code>{name}</code>, in the table "
        f"<code>[method]</code></summary>\n\n{table(rows(method))}\n\n</details>"
    )


def matrix() -> str:
    """Methods by features; every "no" has a number, and below is the reason."""
    reasons: dict[str, int] = {}
    lines: list[str] = []
    for name, one in built_in().items():
        lines = lines or [f"| method | {' | '.join(one.refusals)} |", "|---" * 6 + "|"]
        cells = (
            f"no ({reasons.setdefault(why, len(reasons) + 1)})" if why else "yes"
            for why in one.refusals.values()
        )
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{n}. {why}" for why, n in reasons.items())])


def colours() -> str:
    """Every built-in method with its swatch, as pages of fedbayes show it."""
    shown = (f'<span class="swatch">{key(looks([name])[0])} `{name}`</span>' for name in METHODS)
    return f"{defs()}\n{' '.join(shown)}"


def finding(name: str) -> str:
    """What an experiment came to, in Markdown, with its verdict."""
    (line,) = (line for line in lines(FINDINGS) if line.name == name)
    assert line.finding is not None, f"docs/findings has no {name}"
    return f"{line.finding}\n\nVerdict: {line.verdict}."


def tables() -> str:
    """Every setting, a Markdown table for each table of a config."""
    parts: dict[str, list[SettingRow]] = {}
    for row in settings(None):
        parts.setdefault(row.key.rpartition(".")[0], []).append(row)
    return "\n\n".join(
        f"## {f'[{name}]' if name else 'Outside of tables'}\n\n{table(part)}"
        for name, part in parts.items()
    )


def table(part: Iterable[SettingRow]) -> str:
    """Settings as a Markdown table."""
    lines = ["| key | default | type | |", "|---|---|---|---|"]
    for row in part:
        default = row.default_text
        if isinstance(row.default, float) and len(default) > 12:
            default = f"{row.default:.4g}"  # 2 / 3, say
        default = default if row.default is None else f"`{default}`"
        about = f"{row.description} (only where {row.only})" if row.only else row.description
        kind, about = (text.replace("|", "\\|") for text in (row.type, about))
        lines.append(f"| `{row.key.rpartition('.')[2]}` | {default} | {kind} | {about} |")
    return "\n".join(lines)


def commands() -> str:
    """Every command with its arguments and options, a heading and a table each."""
    return "\n\n".join(_command(name, one) for name, one in _leaves("fedbayes", get_command(app)))


def _leaves(name: str, command: Command) -> Iterable[tuple[str, Command]]:
    """The command and those below it, as they are called; hidden ones are older names."""
    if name != "fedbayes":
        yield name, command
    for inner, one in getattr(command, "commands", {}).items():
        if not one.hidden:
            yield from _leaves(f"{name} {inner}", one)


def _command(name: str, command: Command) -> str:
    context = Context(command, info_name=name)
    usage = " ".join(command.get_usage(context).split()).removeprefix("Usage: ")
    parts = [f"## `{name}`", command.help or "", f"```text\n{usage}\n```"]
    lines = []
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is None or getattr(parameter, "hidden", False):
            continue
        if parameter.param_type_name == "option" or record[1]:
            about = " ".join(record[1].split()).replace("|", "\\|")
            lines.append(f"| `{record[0]}` | {about} |")
    if lines:
        parts.append("\n".join(["| option | |", "|---|---|", *lines]))
    return "\n\n".join(part for part in parts if part)


def names() -> str:
    """Every name of the API pages with its page and what it is for."""
    lines = ["| name | |", "|---|---|"]
    found = {
        name.rpartition(".")[2]: (name, page.name)
        for page in sorted(API.glob("*.md"))
        for name in _API_NAME.findall(page.read_text())
    }
    for short, (name, page) in sorted(found.items(), key=lambda item: item[0].lower()):
        about = (getdoc(resolve_name(name)) or "").partition("\n")[0].replace("|", "\\|")
        lines.append(f"| [`{short}`]({page}#{name}) | {about} |")
    return "\n".join(lines)
