"""Types of settings that several tables share."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from numbers import Number
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError, core_schema

from fedbayes.core.brief import Settings

Item = TypeVar("Item")


@dataclass(frozen=True)
class OneOrSeveral:
    """Takes a plain value for a tuple of one, and text as values between commas."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(_several, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        several = handler(schema)
        return {"anyOf": [several["items"], several]}


def _several(value: Any) -> Any:
    if isinstance(value, str):
        return [part for text in value.split(",") if (part := text.strip())]
    if isinstance(value, Number):
        return [value]
    return value


@dataclass(frozen=True)
class OneOf:
    """Takes a name in a table, which is looked up when a config is checked."""

    table: Mapping[str, object]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._known, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {**handler(schema), "enum": list(self.table)}

    def _known(self, name: str) -> str:
        if name not in self.table:
            known = ", ".join(self.table)
            raise PydanticCustomError("one_of", "Input should be one of {known}", {"known": known})
        return name


AUTO = "auto"
"""The value of a setting that is chosen before the first round."""


@dataclass(frozen=True)
class Chosen:
    """Marks a setting that may be `auto`: the method chooses it before the first round.

    The field's own default is the published value, which counts where nobody chooses.
    """

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [{"const": AUTO}, handler(schema)]}


class Choosable(Settings):
    """A table of settings, some of which are chosen unless they are set (`Chosen`).

    A setting that is left out, or `auto`, is open: it reads as its published value and is dumped as
    `auto`, so that a copy made from a dump leaves it open too.
    """

    @classmethod
    def choosable(cls) -> tuple[str, ...]:
        """Names of the settings that may be `auto`."""
        return tuple(
            name
            for name, field in cls.model_fields.items()
            if any(isinstance(mark, Chosen) for mark in field.metadata)
        )

    @property
    def open(self) -> tuple[str, ...]:
        """Names of the settings that are still to be chosen."""
        return tuple(name for name in self.choosable() if name not in self.model_fields_set)

    @model_validator(mode="before")
    @classmethod
    def _leave_open(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        names = cls.choosable()
        return {k: v for k, v in values.items() if not (k in names and v == AUTO)}

    @model_serializer(mode="wrap")
    def _dump_open(
        self, handler: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        left_out = info.exclude or ()
        return values | {name: AUTO for name in self.open if name not in left_out}

    def with_chosen(self, values: Mapping[str, Any]) -> Self:
        """The table with nothing open: settings that are set stay, others take these values, or
        else their published ones.
        """
        given = {name: getattr(self, name) for name in (*self.model_fields_set, *self.open)}
        wanted = {name: value for name, value in values.items() if name in self.open}
        return type(self).model_validate({**given, **wanted})


@dataclass(frozen=True)
class Tuned:
    """Marks a setting that `fedbayes tune` searches, and where.

    With `times` alone, around the recommended value: from 1/times of it to times of it.
    """

    low: float | None = None
    high: float | None = None
    times: float = 10.0


PLACE = "package.module:name"


class _OfPlace:
    """Marks text that names a user's own class or function, which is found when it is needed."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {**handler(schema), "pattern": ":"}

    def _checked(self, text: str) -> str:
        if ":" not in text:
            raise PydanticCustomError("place", "Input should be package.module:name")
        return text


Place = Annotated[str, _OfPlace()]
"""`package.module:name`: a user's own, instead of one of the listed values."""


class Only:
    """Marks a setting that has an effect only with some values of another one of its table.

    Args:
        other: name of the other setting.
        values: its values; none: it is set at all.
    """

    def __init__(self, other: str, *values: object) -> None:
        self.other, self.values = other, values

    def holds(self, value: object) -> bool:
        """Whether this is such a value of the other setting."""
        return value in self.values if self.values else bool(value)

    def wanted(self, found: object) -> str:
        """Those values, in words.

        Args:
            found: the present value of the other setting: a number must be above 0.
        """
        number = isinstance(found, int | float) and not isinstance(found, bool)
        return " or ".join(map(_word, self.values)) or ("above 0" if number else "set")


def _word(value: object) -> str:
    """A value of a setting, as a config says it."""
    if value is None or value == ():
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def idle(
    table: BaseModel, prefix: str = "", resolved: Mapping[str, object] | None = None
) -> Iterator[str]:
    """Settings of a table, and of those in it, that differ from their defaults and do nothing.

    Args:
        table: the settings.
        prefix: its place, with a dot at the end. A method fills in what is unset, and knows then
            what does nothing (`Method.remarks`).
        resolved: what became of settings of it that were left to be found, by key.

    Yields:
        A sentence on each, with the values that it is for.
    """
    for name, field in type(table).model_fields.items():
        value = getattr(table, name)
        if isinstance(value, BaseModel):
            yield from idle(value, f"{prefix}{name}.", resolved)
        if value == field.get_default(call_default_factory=True):
            continue
        for mark in field.metadata:
            if not isinstance(mark, Only):
                continue
            key = prefix + mark.other
            beside = (resolved or {}).get(key, getattr(table, mark.other))
            if not mark.holds(beside) and not (beside is None and prefix == "method."):
                yield (
                    f"{prefix}{name} has no effect: {key} is {_word(beside)}, and must be "
                    f"{mark.wanted(beside)}"
                )


def changed(table: BaseModel, name: str) -> bool:
    """Whether a setting has another value than its default; a cohort of 1 is not one of 1.0."""
    return repr(getattr(table, name)) != repr(type(table).model_fields[name].default)


def unused(table: BaseModel, names: Iterable[str], why: str, prefix: str = "") -> list[str]:
    """That settings do nothing which have another value than their default, a sentence each.

    Args:
        table: the settings.
        names: of those that do nothing.
        why: in words that follow "has no effect: ".
        prefix: the place of the table, with a dot at the end.
    """
    return [f"{prefix}{n} has no effect: {why}" for n in names if changed(table, n)]


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


AbsolutePath = Annotated[Path, AfterValidator(_absolute)]
"""A path that means the same from every folder, so that a stored config does."""
Several = Annotated[tuple[Item, ...], OneOrSeveral()]
"""One or several: `x`, `"x,y"` and `["x", "y"]`. What holds a comma itself needs a list."""


def _storable(arguments: dict[str, Any]) -> dict[str, Any]:
    """A run that goes on takes them from its stored config."""
    for name, value in arguments.items():
        _require_storable(value, name)
    return arguments


def _require_storable(value: Any, place: str) -> None:
    """See that a config can hold a value."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{place} has the key {key!r}; keys of a config must be text")
            _require_storable(item, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _require_storable(item, f"{place}[{number}]")
    elif value is None:
        raise ValueError(
            f"{place} is None, which a config cannot store. Leave it out for its default"
        )
    elif isinstance(value, float) and not isfinite(value):
        raise ValueError(f"{place} is {value}; numbers of a config must be finite")
    elif not isinstance(value, str | bool | int | float):
        raise ValueError(
            f"{place} is a {type(value).__name__}, which a config cannot store. Give text, "
            "numbers, true or false, or lists or tables of these"
        )


Arguments = Annotated[dict[str, Any], AfterValidator(_storable)]
"""Arguments of a user's own code, by name: what a config can hold."""
