"""How objects show themselves: a line in a terminal, a small table in a notebook.

A dataclass with hundreds of tensors would print all of them. A class that derives from `Brief` says
in a line what it holds: numbers as they are, arrays by type and shape, collections by their length.
Light to import.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from html import escape
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

WIDTH = 300
"""Characters of a line, in which what does not fit is left out."""
MOST = 6
"""Items of a collection that are shown."""
_LONGEST = 60
_ROWS = 20


class Brief:
    """Shows itself in a line, and as a table in notebooks.

    A dataclass that derives from it has `repr=False`.
    """

    def _shows(self) -> Mapping[str, object]:
        """What is shown, by name: the fields of a dataclass, or public attributes."""
        if is_dataclass(self):
            return {field.name: getattr(self, field.name) for field in fields(self) if field.repr}
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __repr__(self) -> str:
        return line(type(self).__name__, self._shows())

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        frame = getattr(self, "frame", None)
        if callable(frame):
            head = escape(type(self).__name__)
            return f"<div><div>{head}</div>{frame().to_html(max_rows=_ROWS, border=0)}</div>"
        return table(type(self).__name__, {name: told(v) for name, v in self._shows().items()})


class Settings(BaseModel):
    """Settings that show those of them which differ from their defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        """The settings that are shown, by name."""
        return [
            (name, value)
            for name, field in type(self).model_fields.items()
            if (value := getattr(self, name)) != field.get_default(call_default_factory=True)
        ]

    def __repr__(self) -> str:
        return line(type(self).__name__, {str(k): v for k, v in self.__repr_args__()})

    def __str__(self) -> str:
        return repr(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        shown = {str(name): told(value) for name, value in self.__repr_args__()}
        return table(type(self).__name__, shown or {"settings": "all by default"})


def line(name: str, values: Mapping[str, object]) -> str:
    """A name and values in a line of at most `WIDTH` characters."""
    parts: list[str] = []
    for key, value in values.items():
        part = f"{key}={told(value)}"
        if sum(map(len, parts)) + 2 * len(parts) + len(part) + len(name) > WIDTH:
            parts.append("…")
            break
        parts.append(part)
    return f"{name}({', '.join(parts)})"


def told(value: object) -> str:
    """A value in a few words: an array by its type and shape, a collection by its length."""
    shape, kind = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and kind is not None and hasattr(value, "tolist"):
        count = 1
        for size in shape:
            count *= int(size)
        if len(shape) < 2 and count <= MOST:
            return told(value.tolist())
        return f"{str(kind).removeprefix('torch.')} {list(map(int, shape))}"
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Path):
        return _cut(repr(str(value)))
    if isinstance(value, Mapping):
        if len(value) <= MOST and all(map(_is_plain, value.values())):
            return "{" + ", ".join(f"{told(k)}: {told(v)}" for k, v in value.items()) + "}"
        return _counted([*value], "entry", "entries")
    if isinstance(value, str | int):
        return _cut(repr(value))
    if isinstance(value, Sequence | Set) and not isinstance(value, bytes | bytearray):
        items = list(value)
        if len(items) <= MOST and all(map(_is_plain, items)):
            return f"[{', '.join(map(told, items))}]"
        return _counted([], "item", "items", count=len(items))
    if isinstance(value, bytes | bytearray):
        return f"{len(value):,} bytes"
    if hasattr(value, "columns") and hasattr(value, "index"):
        return f"{type(value).__name__} of {len(value.index):,} rows"
    text = repr(value)
    short = len(text) <= 2 * _LONGEST and "\n" not in text and " at 0x" not in text
    return text if short else type(value).__name__


def table(title: str, rows: Mapping[str, str], picture: str = "") -> str:
    """Rows as HTML, below a title and a picture."""
    cells = "".join(
        f'<tr><th style="text-align: left">{escape(name)}</th>'
        f'<td style="text-align: left">{escape(value)}</td></tr>'
        for name, value in rows.items()
    )
    return f"<div><div>{escape(title)}</div>{picture}<table>{cells}</table></div>"


def grid(title: str, cells: Sequence[Sequence[str]]) -> str:
    """A table as HTML, below a title; the first row has its headings."""
    head, *rows = cells
    first = "".join(f"<th>{escape(text)}</th>" for text in head)
    rest = "".join(f"<tr>{''.join(f'<td>{escape(t)}</td>' for t in row)}</tr>" for row in rows)
    return f"<div><div>{escape(title)}</div><table><tr>{first}</tr>{rest}</table></div>"


def _is_plain(value: object) -> bool:
    """Whether a value is a number, a short word, or nothing."""
    if isinstance(value, str):
        return len(value) <= _LONGEST
    return value is None or isinstance(value, int | float)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _counted(names: list[object], one: str, more: str, count: int | None = None) -> str:
    """How many there are, and the first names."""
    number = len(names) if count is None else count
    words = f"{number:,} {one if number == 1 else more}"
    if not names:
        return words
    first = ", ".join(_cut(str(name)) for name in names[:3])
    return f"{words} ({first}{', …' if number > 3 else ''})"
