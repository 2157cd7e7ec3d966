"""What lists tell of methods: of the built-in ones from a file, without PyTorch.

A test compares the file. `python -m fedbayes.config.listing` writes it again, after a method's
words or parameters changed.
"""

from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fedbayes.config.settings import SettingRow, rows
from fedbayes.core.files import json_text, parse_json, read_text
from fedbayes.methods import METHODS

if TYPE_CHECKING:
    from fedbayes.contracts import AnyMethod

FILE = Path(__file__).with_name("methods.json")


class Listed(NamedTuple):
    """A method in a list."""

    summary: str
    paper: str
    parameters: tuple[SettingRow, ...]
    """Its settings, `method.NAME`."""
    refusals: dict[str, str]
    """Why each feature of a round is not for it; empty where it is."""
    package: str = "fedbayes"
    """The installed package that has it."""


def listed(method: "type[AnyMethod]") -> Listed:
    """A method as lists have it."""
    about, refusals = method.about, dict(method.reports.refusals)
    return Listed(about.summary, about.paper, tuple(rows(method, "method.")), refusals)


@cache
def built_in() -> dict[str, Listed]:
    """The built-in methods by name, in the order of the catalogue."""
    methods = {}
    for name, summary, paper, refusals, *parameters in parse_json(read_text(FILE)):
        settings = (SettingRow(**row | {"choices": tuple(row["choices"])}) for row in parameters)
        methods[name] = Listed(summary, paper, tuple(settings), refusals)
    return methods


def content() -> str:
    """What the file is to hold: a line for each method, and one for each of its settings."""
    methods = []
    for name, method in METHODS.items():
        summary, paper, parameters, refusals, _ = listed(method)
        lines = [json_text([name, summary, paper, refusals])[1:-1]]
        methods.append(",\n".join([*lines, *(json_text(asdict(row)) for row in parameters)]))
    return "[[" + "],\n[".join(methods) + "]]\n"


if __name__ == "__main__":
    FILE.write_text(content(), encoding="utf-8")
