"""Metrics that people ask for by name, of predictions and targets: ranks, thresholds, errors.

A likelihood's own metrics come from sums that every sample adds to (`Likelihood.terms`). Those here
need the predictions of all samples in question at once. Most are NumPy's counts and SciPy's ranks,
for each client of each round: scikit-learn's take a hundred times as long of few samples. Another
one is a row of `MEASURES`. This file imports no PyTorch before it is needed.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias

from fedbayes.core.lazy import called, imported, own_function
from fedbayes.errors import ConfigError, not_among

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from fedbayes.core.tensors import Tensors
    from fedbayes.likelihoods.base import Likelihood

Array: TypeAlias = "npt.NDArray[Any]"

AUTO = "auto"
"""Instead of names: those of `default_measures`."""
MOST = 16
"""Metrics that a config may name: each is a figure that a client sends."""
THRESHOLD = 0.5
"""Probability above which the positive class, or a label, is predicted, unless another is asked."""
PREDICTION = "prediction/"
"""Beginning of the names of columns that `predictions` gives."""
SCORE = "metric/"
"""Beginning of the name of a metric among the scores that a client sends; NaN: undefined."""


@dataclass(frozen=True)
class Measure:
    """A metric by name."""

    summary: str
    """One line for lists."""
    kinds: tuple[str, ...]
    """Kinds of targets that it is for."""
    higher_is_better: bool | None
    """None where neither is: a share that should be as large as it says."""
    value: Callable[[Array, Array, float], float] | None = None
    """Targets, predictions (`_columns`) and a threshold to the metric, NaN where it is undefined;
    None of a likelihood's own, which come from its sums."""
    possible: tuple[float, float] = (0.0, 1.0)
    """Least and greatest value."""
    thresholds: bool = False
    """Whether predictions are cut at a threshold: `NAME@0.3`."""
    two_classes: bool = False
    """Whether it is for two classes alone."""


def _indicators(y: Array, p: Array) -> tuple[Array, Array]:
    """Whether samples are of each class, and its probability, where both kinds occur."""
    import numpy as np

    if p.ndim == 1:
        y, p = y[:, None], p[:, None]
    elif y.ndim == 1:
        y = y[:, None] == np.arange(p.shape[1])
    told = (y > 0).any(axis=0) & ~(y > 0).all(axis=0)
    return (y > 0)[:, told], p[:, told]


def auroc(positive: Array, score: Array) -> Array:
    """The area under the ROC curve of each column, from ranks: that of Mann and Whitney's U.

    Args:
        positive: whether samples are positive, [n, ...]: some, and not all.
        score: that should be higher of these, of the same shape, without NaN.
    """
    import numpy as np
    from scipy.stats import rankdata

    ranks = np.where(positive, rankdata(score, axis=0), 0.0).sum(axis=0)
    count = positive.sum(axis=0)
    areas: Array = (ranks - count * (count + 1) / 2) / (count * (len(positive) - count))
    return areas


def _auroc(y: Array, p: Array, threshold: float) -> float:
    y, p = _indicators(y, p)
    return float(auroc(y, p).mean()) if y.shape[1] else math.nan


def _average_precision(y: Array, p: Array, threshold: float) -> float:
    from sklearn import config_context
    from sklearn.metrics import average_precision_score

    y, p = _indicators(y, p)
    if not y.shape[1]:
        return math.nan
    with config_context(assume_finite=True, skip_parameter_validation=True):
        return float(average_precision_score(y, p, average="macro"))


def _share(found: Array, among: Array) -> float:
    """The share of samples that were found among some; NaN where there are none."""
    return float(found[among].mean()) if among.any() else math.nan


def _sensitivity(y: Array, p: Array, threshold: float) -> float:
    return _share(p > threshold, y > 0)


def _specificity(y: Array, p: Array, threshold: float) -> float:
    return _share(p <= threshold, y <= 0)


def _counts(y: Array, p: Array) -> tuple[Array, Array, Array]:
    """Of each class that there is: samples, predictions and right predictions."""
    import numpy as np

    found, true = p.argmax(axis=1), y.astype(np.int64)
    right = true[found == true]
    counts = (np.bincount(each, minlength=p.shape[1]) for each in (true, found, right))
    samples, predicted, matched = counts
    there = samples > 0
    return samples[there], predicted[there], matched[there]


def _f1(y: Array, p: Array, threshold: float) -> float:
    if p.ndim > y.ndim:
        # Of the classes that there are, as the others: of one that is only predicted F1 is 0.
        samples, predicted, right = _counts(y, p)
        return float((2 * right / (samples + predicted)).mean())
    # Of several labels all together: of a single one the micro average would be the accuracy.
    true, found = y > 0, p > threshold
    both = int(true.sum()) + int(found.sum())
    return 2 * int((true & found).sum()) / both if both else math.nan


def _balanced_accuracy(y: Array, p: Array, threshold: float) -> float:
    import numpy as np

    whole = p if p.ndim > 1 else np.stack([p <= threshold, p > threshold], axis=1)
    samples, _, right = _counts(y, whole)
    return float((right / samples).mean()) if len(samples) > 1 else math.nan


def _brier(y: Array, p: Array, threshold: float) -> float:
    import numpy as np

    if p.ndim > y.ndim:  # several classes: the sum over them
        return float((((y[:, None] == np.arange(p.shape[1])) - p) ** 2).sum(axis=1).mean())
    return float(((y - p) ** 2).mean())


def _error_auroc(y: Array, p: Array, threshold: float) -> float:
    import numpy as np
    from scipy.special import entr

    if p.ndim == 1:
        p = np.stack([1 - p, p], axis=1)
    wrong = p.argmax(axis=1) != y
    if wrong.all() or not wrong.any():
        return math.nan
    return float(auroc(wrong, entr(p).sum(axis=1)))


def _mean(y: Array, p: Array, threshold: float) -> float:
    return float(p.mean())


_CLASSES, _LABELS, _NUMBERS = ("class",), ("labels",), ("real", "count")
_ANY, _SURVIVAL = (*_CLASSES, *_LABELS), ("survival",)

MEASURES: Mapping[str, Measure] = {
    "auroc": Measure("area under the ROC curve", _ANY, True, _auroc),
    "average_precision": Measure(
        "area under precision over recall", _ANY, True, _average_precision
    ),
    "sensitivity": Measure(
        "share of positives that are found", _CLASSES, True, _sensitivity, (0, 1), True, True
    ),
    "specificity": Measure(
        "share of negatives that are found", _CLASSES, True, _specificity, (0, 1), True, True
    ),
    "f1": Measure("F1 score", _ANY, True, _f1, (0, 1), True),
    "balanced_accuracy": Measure(
        "mean recall of the classes", _CLASSES, True, _balanced_accuracy, (0, 1), True
    ),
    "brier": Measure("Brier score", _ANY, False, _brier, (0, 2)),
    "error_auroc": Measure(
        "AUROC of the entropy for detecting wrong predictions",
        _CLASSES,
        True,
        _error_auroc,
    ),
    "crps": Measure("continuous ranked probability score", _NUMBERS, False, _mean, (0, math.inf)),
    "accuracy": Measure("share of correct classes", _CLASSES, True),
    "label_accuracy": Measure("share of correct labels", _LABELS, True),
    "exact_match": Measure("share of samples with all labels correct", _LABELS, True),
    "rmse": Measure("root mean squared error", _NUMBERS, False),
    "mae": Measure("mean absolute error", _NUMBERS, False),
    "r2": Measure("share of variance explained", _NUMBERS, True),
    "deviance": Measure("mean Poisson deviance", ("count",), False),
    "pinball": Measure("mean pinball loss of quantiles", ("real",), False),
    "coverage": Measure("share of targets between the outer quantiles", ("real",), None),
    "c_index": Measure("share of pairs in the right order (Harrell's C)", _SURVIVAL, True),
    "nll": Measure("mean negative log-likelihood", (*_ANY, *_NUMBERS, *_SURVIVAL), False),
}
"""Every metric by its name; likelihoods themselves compute those without `value`."""


HOW = "function(y, predicted)"
"""How a user's own metric is called."""


def measure_of(base: str) -> Measure:
    """The metric of this name, or a user's own function as `package.module:function`.

    It gets the targets [n] or [n, T] and the predictions as arrays: of two classes the probability
    of the second [n], of more or of labels that of each [n, C], of numbers the mean [n, T]. Its
    attribute `higher_is_better` says which of two values is better; without one, none is.

    Raises:
        ConfigError: there is no such function.
    """
    if base in MEASURES:
        return MEASURES[base]
    function = own_function(base, "metric", HOW)
    return Measure(
        (getattr(function, "__doc__", "") or base).strip().partition("\n")[0],
        (*_ANY, *_NUMBERS),
        getattr(function, "higher_is_better", None),
        partial(_own, base),
        (-math.inf, math.inf),
    )


def _own(place: str, y: Array, p: Array, threshold: float) -> float:
    """A user's own metric."""
    found = called(place, "metric", HOW, y, p)
    try:
        return float(found)
    except (TypeError, ValueError):
        raise ConfigError(
            f"the metric {place!r} returned a {type(found).__name__}. Return one number"
        ) from None


def split(name: str) -> tuple[str, float]:
    """The metric and the threshold of a name such as `sensitivity@0.3`.

    Raises:
        ConfigError: there is no such metric, it has no threshold, or that is no probability.
    """
    if ":" in name:
        return name, THRESHOLD
    base, mark, text = name.partition("@")
    if base not in MEASURES:
        raise ConfigError(
            not_among("metric", base, MEASURES, "your own as package.module:function")
        )
    if not mark:
        return base, THRESHOLD
    if not MEASURES[base].thresholds:
        with_one = ", ".join(key for key, one in MEASURES.items() if one.thresholds)
        raise ConfigError(f"{name}: {base} has no threshold. {with_one} have one")
    try:
        threshold = float(text)
    except ValueError:
        threshold = math.nan
    if not 0 < threshold < 1:
        raise ConfigError(f"{name}: a threshold is a probability above 0 and below 1")
    return base, threshold


def check_names(names: Collection[str]) -> None:
    """See that names are those of metrics, whatever the target.

    Raises:
        ConfigError: one is not, is named twice, or there are too many.
    """
    if AUTO in names and len(names) > 1:
        raise ConfigError(f"metrics has {AUTO!r} and others. List all metrics, or only {AUTO!r}")
    if len(names) > MOST:
        raise ConfigError(f"metrics has {len(names)} names; the limit is {MOST}")
    twice = next((name for name in names if list(names).count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"metrics lists {twice!r} twice")
    for name in names:
        if name != AUTO:
            split(name)


def default_measures(likelihood: "Likelihood") -> tuple[str, ...]:
    """Metrics that suit a likelihood, in addition to its own."""
    target = likelihood.target
    if target.kind == "class" and target.classes == 2:
        wanted: tuple[str, ...] = (
            *("auroc", "average_precision", "sensitivity", "specificity"),
            *("f1", "balanced_accuracy", "brier"),
        )
    elif target.kind == "class":
        wanted = ("auroc", "f1", "balanced_accuracy", "brier")
    else:
        wanted = ("auroc", "average_precision", "brier")
        if target.kind == "real":  # of counts, quantiles take their time
            wanted = ("crps",)
    return tuple(name for name in wanted if not _unfit(name, likelihood))


def fitting(names: Iterable[str], likelihood: "Likelihood") -> tuple[str, ...]:
    """The metrics of these names that a likelihood does not compute itself.

    Args:
        names: as a config has them; `auto` stands for those of `default_measures`.
        likelihood: of the predictions.

    Raises:
        ConfigError: one is not for such targets or such a likelihood; names those that are.

    Examples:
        >>> from fedbayes.core.targets import Target
        >>> from fedbayes.likelihoods import build_likelihood
        >>> from fedbayes.likelihoods.measures import fitting
        >>> likelihood = build_likelihood("auto", Target("class", ("no", "yes")))
        >>> fitting(["auroc", "accuracy"], likelihood)
        ('auroc',)
    """
    found: list[str] = []
    for name in names:
        if name == AUTO:
            found += default_measures(likelihood)
        elif reason := _unfit(name, likelihood):
            able = [key for key in MEASURES if not _unfit(key, likelihood)]
            raise ConfigError(
                f"metrics lists {name}, which is {reason}. The likelihood {likelihood.name} has "
                f"{', '.join(able)}"
            )
        elif name not in own_metrics(likelihood):
            found.append(name)
    return tuple(found)


def _unfit(name: str, likelihood: "Likelihood") -> str:
    """What a metric is for, where it is not for the predictions of this likelihood; else empty."""
    base, _ = split(name)
    measure, target = measure_of(base), likelihood.target
    if name in own_metrics(likelihood):
        return ""
    if target.kind not in measure.kinds:
        return f"for {' or '.join(_IN_WORDS[kind] for kind in measure.kinds)}"
    if measure.value is None:
        return "available for other likelihoods"
    if base == "crps" and not hasattr(likelihood, "crps"):
        return "for likelihoods with a distribution"
    several = target.kind == "class" and target.classes > 2
    if several and (measure.two_classes or "@" in name):
        return f"for two classes, and there are {target.classes}"
    return ""


_IN_WORDS = {
    "class": "classes",
    "labels": "labels",
    "real": "real numbers",
    "count": "counts",
    "survival": "times of events",
}


@lru_cache(maxsize=8)
def own_metrics(likelihood: "Likelihood") -> frozenset[str]:
    """Names of the metrics that a likelihood computes itself."""
    from fedbayes.likelihoods.base import example_scores

    return frozenset(likelihood.metrics(example_scores(likelihood)))


def predictions(
    likelihood: "Likelihood", names: Collection[str], draws: "Tensor", y: "Tensor"
) -> "Tensors":
    """What metrics need of each sample.

    Args:
        likelihood: of the targets.
        names: of the metrics, as `fitting` gives them.
        draws: outputs under draws from a posterior, [draws, n, width].
        y: targets, [n] or [n, columns].

    Returns:
        By name, [n] or [n, C] each: `prediction/true`, the targets, and `prediction/of`, of two
        classes the probability of the second, of more or of labels that of each; of numbers
        `prediction/crps`, the score of each sample. Nothing where no metric needs it.
    """
    bases = {split(name)[0] for name in names}
    if not bases:
        return {}
    if likelihood.target.kind in _NUMBERS:
        found = {}
        if "crps" in bases:
            found["crps"] = likelihood.crps(draws, y)  # type: ignore[attr-defined]
        if bases - {"crps"}:
            found |= {"true": y, "of": likelihood.mean(draws.double())}
        return {f"{PREDICTION}{name}": values for name, values in found.items()}
    p = likelihood.mean(draws.double())
    two = likelihood.target.classes == 2
    return {f"{PREDICTION}true": y, f"{PREDICTION}of": p[:, 1] if two else p}


def measured(names: Collection[str], columns: "Mapping[str, Tensor]") -> dict[str, float]:
    """Metrics of samples, all taken together.

    Args:
        names: of the metrics, as `fitting` gives them.
        columns: what `predictions` gave of the samples.

    Returns:
        By name; NaN where a metric is undefined: there are no samples, or of one class alone, or a
        prediction is not finite.

    Examples:
        >>> import torch
        >>> from fedbayes.core.targets import Target
        >>> from fedbayes.likelihoods import build_likelihood
        >>> from fedbayes.likelihoods.measures import measured, predictions
        >>> likelihood = build_likelihood("auto", Target("class", ("no", "yes")))
        >>> draws = torch.tensor([[[2.0, 0.0], [0.0, 2.0]]])
        >>> measured(["auroc"], predictions(likelihood, ["auroc"], draws, torch.tensor([0, 1])))
        {'auroc': 1.0}
    """
    import numpy as np

    found = {name.removeprefix(PREDICTION): column.numpy() for name, column in columns.items()}
    none = np.empty(0)
    values = {}
    for name in names:
        base, threshold = split(name)
        measure = measure_of(base).value
        assert measure is not None
        of, true = ("crps", "crps") if base == "crps" else ("of", "true")
        y, p = found.get(true, none), found.get(of, none)
        known = len(y) and np.isfinite(p).all()
        values[name] = measure(y, p, threshold) if known else math.nan
    return values


def better(name: str) -> bool | None:
    """Whether a higher value is a better one of a metric, whose name may have a threshold or a
    column; None where neither is, or the metric is not known.
    """
    if ":" in name:  # who only reads runs imports nothing that they name
        return measure_of(name).higher_is_better if imported(name) else None
    base = name.partition("@")[0].partition("/")[0]
    return MEASURES[base].higher_is_better if base in MEASURES else None
