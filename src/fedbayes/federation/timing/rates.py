"""How fast bytes pass."""

import math
import re
from typing import Any

from fedbayes.errors import quoted

FROM_FILE = "file"
"""In place of a rate: clients' rates are in a file."""
UNITS = {
    "B/s": 1.0,
    "kB/s": 1e3,
    "MB/s": 1e6,
    "GB/s": 1e9,
    "kbit/s": 125.0,
    "Mbit/s": 125e3,
    "Gbit/s": 125e6,
}
"""Bytes a second."""
_TEXT = re.compile(r"\s*(\S+?)\s*([A-Za-z]+/s)?\s*")


def rate(value: Any) -> float:
    """Bytes a second, above 0.

    Args:
        value: a number, or text such as `20 MB/s`; text without a unit is bytes a second.

    Raises:
        ValueError: it is no rate. The text says why.
    """
    number, unit, told = value, "B/s", quoted(str(value))
    if isinstance(value, str):
        found = _TEXT.fullmatch(value)
        number, unit = (found[1], found[2] or unit) if found else ("", unit)
    if unit not in UNITS:
        raise ValueError(f"{told} has the unit {unit}, and known are {', '.join(UNITS)}")
    try:
        each = math.nan if isinstance(number, bool) else float(number) * UNITS[unit]
    except (TypeError, ValueError, OverflowError):
        each = math.nan
    if not math.isfinite(each):
        raise ValueError(f"{told} is no rate; give bytes a second, or text such as '20 MB/s'")
    if each <= 0:
        raise ValueError(f"a rate of {told} carries nothing; it is above 0")
    return each
