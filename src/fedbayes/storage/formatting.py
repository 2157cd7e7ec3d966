"""Metrics, their names and durations, as people read them; light to import (no PyTorch)."""

import math
import re


def number(value: float | None) -> str:
    """A metric for people, in any unit, or a dash where there is none yet."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "undefined"
    size = abs(value)
    if size == 0 or 1e-3 <= size < 10:
        return f"{value:.4f}"
    if 10 <= size < 1e4:
        return f"{value:.2f}"
    return f"{value:,.0f}" if 1e4 <= size < 1e7 else f"{value:.4g}"


def words(metric: str) -> str:
    """The name of a metric for people, as in `global accuracy`."""
    name = metric.replace("c_index", "C-index").replace("_", " ")
    if " uncalibrated " in name:
        name = name.replace(" uncalibrated", "") + " before calibration"
    return re.sub(r"\b(ece|nll|auroc|crps|f1)\b", lambda m: m[0].upper(), name)


def clock(seconds: float) -> str:
    """A duration as 0:41, or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
