"""How fast bytes pass."""

import math
import re
from typing import Any

FROM_FILE = "file"
"""Instead of a rate: clients' rates are in a file."""
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
SLOWEST = 0.001
"""Bytes a second."""
_TEXT = re.compile(r"\s*([-+0-9.eE]+)\s*([A-Za-z/]*)\s*")


def rate(value: Any) -> float:
    """Bytes a second, `SLOWEST` or more.

    Args:
        value: a number, or text such as `20 MB/s`; text without a unit is bytes a second.

    Raises:
        ValueError: it is no rate. The text says why.
    """
    number, unit = value, ""
    if isinstance(value, str) and (found := _TEXT.fullmatch(value)):
        number, unit = found[1], found[2]
    if unit and unit not in UNITS:
        raise ValueError(f"known units are {', '.join(UNITS)}")
    try:
        each = math.nan if isinstance(number, bool) else float(number) * UNITS[unit or "B/s"]
    except (TypeError, ValueError, OverflowError):
        each = math.nan
    if not math.isfinite(each):
        raise ValueError("give bytes per second, or text such as '20 MB/s'")
    if each < SLOWEST:
        raise ValueError(f"a rate must be {SLOWEST:g} bytes per second or more")
    return each
