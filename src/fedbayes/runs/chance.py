"""Whether a model is worse than a guess; light to import (no PyTorch)."""

import math
from collections.abc import Mapping
from typing import Any

from fedbayes.core.targets import Target
from fedbayes.storage.formatting import number


def below_chance(metrics: Mapping[str, Any], target: Target) -> str:
    """What to say of a model that on test rows is worse than a guess that knows no inputs; empty of
    others.

    The guess is uniform over classes, or over yes and no of each label. Of numbers it is the mean
    of the test targets (R² below 0), of times of events a coin (C-index below one half).
    """
    nll, guess = metrics.get("nll"), _uniform(target)
    if nll is not None and guess and nll > guess:
        return f"its NLL is {number(nll)}, the NLL of a uniform guess {number(guess)}"
    for metric, least, what in (
        ("accuracy", 1 / max(target.classes, 1), "a uniform guess"),
        ("r2", 0.0, "a constant, the mean of the test targets,"),
        ("c_index", 0.5, "a random order"),
    ):
        value = metrics.get(metric)
        if value is not None and value < least:
            name = {"r2": "R²", "c_index": "C-index"}.get(metric, metric)
            return f"its {name} is {number(value)}, for {what} it is {number(least)}"
    return ""


def warning(summary: Mapping[str, Any], target: Target) -> str:
    """The same of a run, by the metrics of its summary: of the global model that it saved, else of
    the clients' own; a sentence.
    """
    told = summary.get("best_metrics", summary["metrics"])
    whose = "global" if told.get("global") else "local"
    if not (why := below_chance(told.get(whose) or {}, target)):
        return ""
    if whose == "global":
        return f"the global model is worse than a guess: {why}"
    return f"clients' own models are worse than a guess: on average, {why}"


def _uniform(target: Target) -> float:
    """NLL of a uniform guess; 0 where there is none."""
    if target.classes:
        return math.log(target.classes)
    return target.columns * math.log(2) if target.kind == "labels" else 0.0
