"""What settings there are, in words: for the command line, the documentation and messages."""

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, to_jsonable_python

from fedbayes.core.fields import AUTO, PLACE, Chosen, OneOf, OneOrSeveral, Only, Place
from fedbayes.errors import did_you_mean


@dataclass(frozen=True)
class SettingRow:
    """One setting of the config, as lists and messages show it."""

    key: str
    """As in `--set`: `training.lr`."""
    type: str
    """What it takes, in words: `number > 0`, `sgd | adam`."""
    default: Any
    """In JSON's types; None where it is unset."""
    description: str
    choices: tuple[str, ...] = ()
    """The values it takes, or some of them, where they are words."""
    only: str = ""
    """Where it has an effect, if not everywhere: `engine is workers`."""

    @property
    def default_text(self) -> str:
        """The default as it is written in TOML."""
        return "unset" if self.default is None else toml_value(self.default)


def rows(kind: type[BaseModel], prefix: str = "") -> Iterator[SettingRow]:
    """Every setting of a table and of the tables in it, in the order of the fields.

    Fields that are excluded from a dump are no settings.
    """
    published = getattr(getattr(kind, "about", None), "published", {})  # those of a method
    for name, field in kind.model_fields.items():
        if field.exclude:
            continue
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            only = _only(kind, prefix, field)
            for row in rows(annotation, f"{prefix}{name}."):
                yield replace(row, only=" and ".join(filter(None, (only, row.only))))
        else:
            yield _row(kind, prefix, name, published)


def find(settings: Sequence[SettingRow], key: str) -> list[SettingRow]:
    """The setting of this key, or all of the table that it names."""
    return [row for row in settings if row.key == key or row.key.startswith(f"{key}.")]


def _only(kind: type[BaseModel], prefix: str, field: FieldInfo) -> str:
    """Where a setting, or those of a table, have an effect, in words; empty: everywhere."""
    return " and ".join(
        f"{prefix}{mark.other} is {mark.wanted(kind.model_fields[mark.other].default)}"
        for mark in field.metadata
        if isinstance(mark, Only)
    )


def _row(kind: type[BaseModel], prefix: str, name: str, published: Mapping[str, Any]) -> SettingRow:
    field = kind.model_fields[name]
    named = [name for part in field.metadata if isinstance(part, OneOf) for name in part.table]
    choices = tuple(named) or _words(field.annotation) or tuple(map(str, field.examples or ()))
    default = to_jsonable_python(field.get_default(call_default_factory=True))
    takes, about = " | ".join(named) or _type(field.annotation, field.metadata), field.description
    if any(isinstance(mark, Chosen) for mark in field.metadata):
        value = published.get(name, default)
        said = "unset" if value is None else toml_value(value)
        takes, about, default = f"{takes} | {AUTO}", f"{about}; published: {said}", AUTO
        choices = (AUTO, *choices)
    return SettingRow(
        prefix + name,
        takes,
        default,
        about or "",
        choices,
        _only(kind, prefix, field),
    )


def _words(annotation: Any) -> tuple[str, ...]:
    """The words among the values of a type."""
    if get_origin(annotation) is Literal:
        return tuple(map(str, get_args(annotation)))
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return tuple(word for part in get_args(annotation) for word in _words(part))
    return ("true", "false") if annotation is bool else ()


_NAMES = {bool: "true | false", int: "integer", float: "number", str: "text", Path: "path"}
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def _type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type in words, with its bounds."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation == Place:
        return PLACE
    if origin is Annotated:
        return _type(parts[0], [*metadata, *parts[1:]])
    if origin in (Union, types.UnionType):
        texts = [_type(part) for part in parts if part is not types.NoneType]
        text = " | ".join(t for t in texts if t != "integer" or "number" not in texts)
    elif origin is Literal:
        text = " | ".join(map(str, parts))
    elif origin in (tuple, list):
        item = _type(parts[0])
        several = f"lists of {item[8:]}" if item.startswith("list of ") else f"{item}s"
        text = f"list of {several}"
        if any(isinstance(part, OneOrSeveral) for part in metadata):
            text = f"{item}, or {text}"
    elif origin is dict or annotation is dict:
        text = "table"
    else:
        text = _NAMES.get(annotation) or str(getattr(annotation, "__name__", annotation))
    bounds = [
        f"{sign} {getattr(part, name):g}"
        for part in metadata
        for name, sign in _BOUNDS.items()
        if getattr(part, name, None) is not None
    ]
    return f"{text} {', '.join(bounds)}" if bounds else text


def toml_value(value: Any) -> str:
    """A value as it is written in TOML, on one line; tables in braces."""
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(key)} = {toml_value(item)}" for key, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if value is None or not isinstance(value, str | bool | int | float):
        return str(value)
    return tomli_w.dumps({"": value}).partition(" = ")[2].rstrip("\n")


def _key(name: str) -> str:
    """A key as it is written in TOML, in quotes where it needs them."""
    return tomli_w.dumps({name: 0}).removesuffix(" = 0\n")


def toml(settings: Sequence[SettingRow], values: Mapping[str, Any], table: str = "") -> str:
    """A table with every setting; unset ones are comments with their description.

    Args:
        settings: those that there are.
        values: those of this table, by name; None is unset. Tables are written last.
        table: its place, with a dot at the end; empty for the whole.
    """
    about = {row.key: row.description for row in settings}
    text = f"[{table.rstrip('.')}]\n" if table else ""
    for name, value in values.items():
        if value is None:
            comment = f"{name} = ...  # {about.get(table + name, '')}"
            text += fill(comment, 99, initial_indent="# ", subsequent_indent="#     ") + "\n"
        elif not isinstance(value, dict):
            line = f"{_key(name)} = {toml_value(value)}\n"
            if len(line) > 100 and isinstance(value, list):
                items = "".join(f"    {toml_value(item)},\n" for item in value)
                line = f"{_key(name)} = [\n{items}]\n"
            text += line
    for name, value in values.items():
        if isinstance(value, dict):
            text += "\n" + toml(settings, value, f"{table}{_key(name)}.")
    return text


def unknown(key: str, settings: Sequence[SettingRow]) -> str:
    """The error for an unknown setting, with a similar one or those of its table."""
    keys = [row.key for row in settings]
    table, _, last = key.rpartition(".")
    place = f"{table}." if table else ""
    known = {k[len(place) :].split(".")[0]: None for k in keys if k.startswith(place)}
    elsewhere = [k for k in keys if k.rpartition(".")[2] == last]
    like = get_close_matches(last, known, n=1) or [w for w in known if len(last) > 3 and last in w]
    close = [place + word for word in like]
    if guesses := elsewhere or close or (not known and get_close_matches(key, keys, n=1)):
        return f"{key} is not a setting (did you mean {' or '.join(map(repr, guesses))}?)"
    there = "there is" if len(known) == 1 else "there are"
    return f"{key} is not a setting; here {there} {', '.join(known) or 'none'}"


def explain(
    kind: type[BaseModel], error: ValidationError, settings: Sequence[SettingRow], prefix: str = ""
) -> str:
    """Lines that name the key, what is wrong, and what is allowed.

    Args:
        kind: what was checked.
        error: the result.
        settings: all that there are, some of which may have been put into the wrong table.
        prefix: place of the table that was checked, with a dot at the end.
    """
    lines = (_line(kind, details, settings, prefix) for details in error.errors())
    return "\n".join(dict.fromkeys(lines))


def _line(
    kind: type[BaseModel], error: ErrorDetails, settings: Sequence[SettingRow], prefix: str
) -> str:
    """One line on one error. What follows the field in its place names members of a union."""
    path, field = list[str](), None
    for part in map(str, error["loc"]):
        path.append(part)
        field = kind.model_fields.get(part)
        if not (field and isinstance(inner := field.annotation, type)):
            break
        if not issubclass(inner, BaseModel):
            break
        kind = inner
    key, value = prefix + ".".join(path), error["input"]
    if error["type"] == "extra_forbidden":
        return unknown(key, settings)
    message = error["msg"].removeprefix("Value error, ")
    matching = find(settings, key)
    if error["type"] in ("value_error", "assertion_error"):
        if isinstance(value, BaseModel | Mapping) or not path:
            return f"{key.rstrip('.') or 'config'}: {message}"
        return f"{key} is {_shown(value)}; {message}"
    if error["type"] == "finite_number":
        return f"{key} is {value}; it must be a finite number"
    if error["type"] == "too_short":
        return f"{key} is {_shown(value)}; give at least one"
    if [row.key for row in matching] != [key]:
        first = matching[0] if matching else settings[0]
        example = value if isinstance(value, str) and first.choices else first.default
        return (
            f"{key or 'config'} is {_shown(value)}; give a table with settings such as "
            f"{first.key} = {_shown(example)}"
        )
    if field and get_origin(field.annotation) is dict and error["loc"][len(path) :]:
        inside = error["loc"][len(path)]
        return f"{key}.{inside} is {_shown(value)}; {message[:1].lower()}{message[1:]}"
    (row,) = matching
    like = did_you_mean(value, row.choices) if isinstance(value, str) else ""
    verb = "has" if isinstance(error["loc"][-1], int) else "is"  # an item of a list
    return f"{key} {verb} {_shown(value)}{like}; expected {row.type}"


def _shown(value: Any) -> str:
    """A value for a message: as in TOML, text in single quotes."""
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, Mapping) or (isinstance(value, list | tuple) and len(value) > 8):
        return "a table" if isinstance(value, Mapping) else f"a list of {len(value)}"
    return toml_value(to_jsonable_python(value, fallback=_plain))


def _plain(value: Any) -> Any:
    """What a value of another library is to a reader."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
