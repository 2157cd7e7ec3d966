"""Where settings are searched: ranges that methods declare, and those that a user gives.

A range is `0.001..10`, sampled evenly in the logarithm, or evenly where it begins at 0. A list is
its values. Any setting of a config can have one.
"""

import math
import re
import tomllib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedbayes.config.config import Config, settings
from fedbayes.config.settings import find, toml_value
from fedbayes.core.fields import Only, Tuned
from fedbayes.core.files import parse_toml
from fedbayes.errors import ConfigError

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"\s*({_NUMBER})\s*\.\.\s*({_NUMBER})\s*")
_DIGITS = 3
"""Significant digits of a number that is drawn: more say nothing."""


@dataclass(frozen=True)
class Range:
    """The values that a setting is tried at: from `low` to `high`, or one of `choices`."""

    low: float = 0.0
    high: float = 0.0
    whole: bool = False
    """Whether only integers are."""
    choices: tuple[Any, ...] = ()

    def __str__(self) -> str:
        if self.choices:
            return toml_value(list(self.choices))
        return f"{self.low:g}..{self.high:g}"

    @property
    def logarithmic(self) -> bool:
        """Whether values are even in their logarithm."""
        return not self.choices and self.low > 0

    def contains(self, value: Any) -> bool:
        """Whether a value is between `low` and `high`; of choices none is."""
        return (
            not self.choices and isinstance(value, int | float) and self.low <= value <= self.high
        )

    def draw(self, rng: np.random.Generator) -> Any:
        """A value."""
        place = float(rng.random())
        if self.choices:
            return self.choices[min(int(place * len(self.choices)), len(self.choices) - 1)]
        if self.logarithmic:
            low, high = math.log(self.low), math.log(self.high)
            value = math.exp(low + place * (high - low))
        else:
            value = self.low + place * (self.high - self.low)
        if self.whole:
            return min(max(round(value), math.ceil(self.low)), math.floor(self.high))
        return min(max(float(f"{value:.{_DIGITS}g}"), self.low), self.high)


Ranges = Mapping[str, Range]
"""By key of the setting, such as `training.lr`."""


def given_ranges(overrides: Iterable[str]) -> tuple[dict[str, Range], list[str]]:
    """The ranges among changes of settings, `key=low..high` or `key=[a, b]`, and the others.

    A list is one value where the setting itself is a list, unless its items are lists too.

    Raises:
        ConfigError: a range is empty.
    """
    known = {row.key: row for row in settings(None)}
    found: dict[str, Range] = {}
    rest: list[str] = []
    for override in overrides:
        key, _, text = override.partition("=")
        key = key.strip()
        if numbers := _RANGE.fullmatch(text):
            low, high = map(float, numbers.groups())
            if not (low < high and math.isfinite(low) and math.isfinite(high)):
                raise ConfigError(f"{override}: the first number must be less than the second")
            whole = all(re.fullmatch(r"[-+]?\d+", number) for number in numbers.groups())
            found[key] = Range(low, high, whole and _is_whole(key))
        elif choices := _choices(text, key in known and "list" in known[key].type):
            found[key] = Range(choices=choices)
        else:
            rest.append(override)
    return found, rest


def _is_whole(key: str) -> bool:
    """Whether a setting is an integer; of a method's parameter the method says it later."""
    rows = [row for row in settings(None) if row.key == key]
    return bool(rows) and rows[0].type.startswith("integer")


def _choices(text: str, is_list: bool) -> tuple[Any, ...]:
    """The values of a list; none where the text is none, or is one value."""
    try:
        value = parse_toml(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, ValueError):
        return ()
    if not isinstance(value, list) or not value:
        return ()
    inside = all(isinstance(item, list) for item in value)
    return tuple(value) if inside or not is_list else ()


def declared_ranges(config: Config, given: Ranges, fixed: Container[str] = ()) -> dict[str, Range]:
    """The ranges of a method: those that are given, and the declared ones of other settings.

    Args:
        config: its settings, with recommended values where none were set.
        given: ranges by key; those of parameters that the method lacks are left out.
        fixed: keys of settings whose declared range does not count.

    Raises:
        ConfigError: a key is no setting, or a range of integers has none.
    """
    name = str(config.method["name"])
    known = settings(name)
    method = config.named_method()
    found: dict[str, Range] = {}
    for table, prefix in ((config.training, "training."), (method, "method.")):
        for key, field in type(table).model_fields.items():
            for mark in field.metadata:
                if isinstance(mark, Tuned) and prefix + key not in fixed and _works(table, field):
                    span = _around(getattr(table, key), mark, field)
                    if span is not None:
                        found[prefix + key] = span
    for key, span in given.items():
        rows = find(known, key)
        if not rows and key.startswith("method."):
            continue
        if len(rows) != 1 or rows[0].key != key:
            raise ConfigError(f"{key} cannot have a range ({span})")
        whole = span.whole or (rows[0].type.startswith("integer") and not span.choices)
        if whole and math.ceil(span.low) > math.floor(span.high):
            raise ConfigError(f"{key} is an integer, and {span} contains none. Give another range")
        found[key] = Range(span.low, span.high, whole, span.choices)
    return found


def _works(table: BaseModel, field: FieldInfo) -> bool:
    """Whether a setting has an effect with the others of its table."""
    marks = [mark for mark in field.metadata if isinstance(mark, Only)]
    return all(mark.holds(getattr(table, mark.other)) for mark in marks)


def _around(value: Any, mark: Tuned, field: FieldInfo) -> Range | None:
    """The range that a setting declares, within its bounds; None where there is no value."""
    if mark.low is not None and mark.high is not None:
        return Range(mark.low, mark.high)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        return None
    bounds = [getattr(part, name, None) for part in field.metadata for name in ("le", "lt")]
    high = min([value * mark.times, *(float(b) for b in bounds if b is not None)])
    low = value / mark.times
    return Range(float(f"{low:.{_DIGITS}g}"), float(f"{high:.{_DIGITS}g}"))


def drawn(ranges: Ranges, seed: Sequence[int]) -> dict[str, Any]:
    """A value of each range, by key; the same seed gives the same values.

    Each key has a generator of its own, so a further range leaves the values of others alone.
    """
    found = {}
    for key in sorted(ranges):
        numbers = [*seed, *key.encode()]
        found[key] = ranges[key].draw(np.random.default_rng(numbers))
    return found
