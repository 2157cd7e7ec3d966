"""From probabilities of two classes to one of them: the threshold of `fedbayes predict`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedbayes.core.wording import describe
from fedbayes.errors import ConfigError
from fedbayes.runs.trained import TrainedModel
from fedbayes.workflows.serve.evaluation_set import find_tests

COST = "cost:"


@dataclass(frozen=True)
class Decision:
    """From which probability of the second class on it is predicted."""

    threshold: float
    told: str
    """How it was found, in words."""


def decide(model: TrainedModel, paths: Sequence[Path], text: str) -> Decision:
    """The threshold that a user asks for.

    Args:
        model: of two classes, the second of which is the positive one.
        paths: what the model was read from.
        text: a number between 0 and 1; `cost:C`, where a missed positive costs C times as much as
            a false alarm, so that it is 1 / (1 + C); or `youden`, the one with the largest sum of
            sensitivity and specificity on the test rows of a run.

    Raises:
        ConfigError: it is none of these, there are no two classes, or there are no test rows.
    """
    target = model.target
    if target.classes != 2:
        raise ConfigError(
            f"--threshold needs two classes, and {model.source} predicts {describe(target)}"
        )
    positive = f"p_{target.names[1]}"
    if text == "youden":
        return _youden(model, paths, positive)
    if text.startswith(COST):
        ratio = _number(text.removeprefix(COST), text)
        if not ratio > 0:
            raise ConfigError(f"--threshold {text}: give a ratio of costs above 0")
        found = 1 / (1 + ratio)
        return Decision(
            found,
            f"{target.names[1]} if {positive} >= {found:.4g}: a miss costs {ratio:g} false alarms",
        )
    found = _number(text, text)
    if not 0 < found < 1:
        raise ConfigError(f"--threshold {text}: give a probability between 0 and 1")
    return Decision(found, f"{target.names[1]} if {positive} >= {found:g}")


def _number(text: str, given: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f"--threshold {given}: give a number such as 0.2, youden, or cost:C, where a missed "
            "positive costs C times as much as a false alarm, such as cost:10"
        ) from None


def _youden(model: TrainedModel, paths: Sequence[Path], positive: str) -> Decision:
    (path,) = paths if len(paths) == 1 else (None,)
    if path is None or not path.is_dir():
        raise ConfigError(
            "--threshold youden needs the test rows of a run. Predict with one run folder, or "
            "give a number or cost:C"
        )
    samples = find_tests(path, path, []).samples
    y = samples.y.numpy()
    if len(set(y.tolist())) < 2:
        raise ConfigError(f"--threshold youden: the test rows of {path} do not have both classes")
    p = model.expectation(samples.x)[:, 1].double().numpy()
    found, sensitivity, specificity = youden(p, y == 1)
    return Decision(
        found,
        f"{model.target.names[1]} if {positive} >= {found:.4g}: sensitivity {sensitivity:.3f} and "
        f"specificity {specificity:.3f} on the {len(y):,} test rows that chose it",
    )


def youden(
    p: npt.NDArray[np.float64], positive: npt.NDArray[np.bool_]
) -> tuple[float, float, float]:
    """The threshold with the largest sum of sensitivity and specificity, and both there.

    Args:
        p: probabilities of the positive class [n].
        positive: which rows are of it [n]; some are, and some are not.
    """
    order = np.argsort(-p, kind="stable")
    hits, alarms = np.cumsum(positive[order]), np.cumsum(~positive[order])
    last = np.append(np.diff(p[order]) != 0, True)  # rows of one probability are on one side
    gain = np.where(last, hits / hits[-1] - alarms / alarms[-1], -np.inf)
    best = int(gain.argmax())
    # Halfway to the next lower probability, so that rounding does not move a row.
    lower = p[order[best + 1]] if best + 1 < len(p) else p[order[best]]
    threshold = float((p[order[best]] + lower) / 2)
    return threshold, float(hits[best] / hits[-1]), float(1 - alarms[best] / alarms[-1])
