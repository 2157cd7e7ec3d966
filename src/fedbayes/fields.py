"""Types of settings that several tables share."""

from dataclasses import dataclass
from numbers import Number
from typing import Annotated, Any, TypeVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import core_schema

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


Several = Annotated[tuple[Item, ...], OneOrSeveral()]
"""One or several: `x`, `"x,y"` and `["x", "y"]`. What holds a comma itself needs a list."""
