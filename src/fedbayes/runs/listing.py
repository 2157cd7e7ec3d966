"""What lists tell of the built-in methods, without PyTorch: from a file that a test compares.

`python -m fedbayes.runs.listing` writes it anew, after a method's words or parameters changed.
"""

from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fedbayes.files import json_text, parse_json, read_text
from fedbayes.methods import METHODS
from fedbayes.runs.settings import Row, rows

FILE = Path(__file__).with_name("methods.json")


class Listed(NamedTuple):
    """A built-in method in a list."""

    summary: str
    paper: str
    parameters: tuple[Row, ...]
    """Its settings, `method.NAME`."""


@cache
def built_in() -> dict[str, Listed]:
    """The built-in methods by name, in the order of the catalogue."""
    found = parse_json(read_text(FILE))
    return {
        name: Listed(
            one["summary"],
            one["paper"],
            tuple(Row(**row | {"choices": tuple(row["choices"])}) for row in one["parameters"]),
        )
        for name, one in found.items()
    }


def content() -> str:
    """What the file is to hold."""
    methods = {
        name: {
            "summary": method.summary,
            "paper": method.paper,
            "parameters": [asdict(row) for row in rows(method, "method.")],
        }
        for name, method in METHODS.items()
    }
    return json_text(methods, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(content(), encoding="utf-8")
