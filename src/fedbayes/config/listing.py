"""What lists tell of the built-in methods, without PyTorch: from a file that a test compares.

`python -m fedbayes.config.listing` writes it again, after a method's words or parameters changed.
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
    """A built-in method in a list."""

    summary: str
    paper: str
    parameters: tuple[SettingRow, ...]
    """Its settings, `method.NAME`."""
    refusals: dict[str, str]
    """Why each feature of a round is not for it; empty where it is."""


def listed(method: "type[AnyMethod]") -> Listed:
    """A method as lists have it."""
    about, refusals = method.about, dict(method.reports.refusals)
    return Listed(about.summary, about.paper, tuple(rows(method, "method.")), refusals)


@cache
def built_in() -> dict[str, Listed]:
    """The built-in methods by name, in the order of the catalogue."""
    found = parse_json(read_text(FILE))
    return {
        name: Listed(
            one["summary"],
            one["paper"],
            tuple(
                SettingRow(**row | {"choices": tuple(row["choices"])}) for row in one["parameters"]
            ),
            one["refusals"],
        )
        for name, one in found.items()
    }


def content() -> str:
    """What the file is to hold."""
    methods = {
        name: one._asdict() | {"parameters": [asdict(row) for row in one.parameters]}
        for name, one in ((name, listed(method)) for name, method in METHODS.items())
    }
    return json_text(methods, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(content(), encoding="utf-8")
