"""The one loop that every regression runs: Newton's method on sums that clients send."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedbayes.biostatistics.exchange import Array
from fedbayes.errors import DataError

TOLERANCE = 1e-10
"""Largest step, in standard deviations of a column, that counts as none."""
MOST_STEPS = 50
_HALVINGS = 30
_CERTAIN = 1e-6
"""Share of the information at the start, along a step, that is none: of fitted probabilities within
a millionth of 0 or 1."""
_MOST = 1e6
"""Condition number that float64 bears: its square is that of the information."""
ILL = 1000.0
"""Condition number above which columns are reported as nearly collinear."""


@dataclass(frozen=True)
class NewtonEvaluation:
    """A log-likelihood at some coefficients, with its derivatives."""

    at: Array
    """The coefficients [p]."""
    loglik: float
    gradient: Array
    """[p]."""
    information: Array
    """The negative Hessian [p, p]."""
    deviance: float = float("nan")


def packed(matrix: Array) -> Array:
    """The upper triangle of a symmetric matrix [p (p + 1) / 2], as it travels."""
    return matrix[np.triu_indices(len(matrix))]


def unpacked(triangle: Array, size: int) -> Array:
    """The inverse of `packed` [size, size]."""
    matrix = np.zeros((size, size))
    upper = np.triu_indices(size)
    matrix[upper] = triangle
    matrix[upper[::-1]] = triangle
    return matrix


def maximize(
    evaluate: Callable[[Array], NewtonEvaluation],
    start: Array,
    names: Sequence[str],
    infinite: str,
    least: float = 0.0,
    flat: str = "makes no difference to any row",
    *,
    rows: float = 0.0,
    quadratic: bool = False,
) -> tuple[NewtonEvaluation, NewtonEvaluation]:
    """Climb to the maximum of a concave log-likelihood.

    It ends where a step is none, or below rounding: where it would gain less than the sum of the
    log-likelihood is rounded by, and steps no longer become shorter.

    Args:
        evaluate: asks the clients for their sums at some coefficients.
        start: where to begin [p].
        names: of the coefficients, for errors.
        infinite: what it means that coefficients grow without end.
        least: information on a coefficient at the start, of columns of variance 1, that is none
            but for rounding.
        flat: what it means that there is none.
        rows: how many there are, by weight, whose information is at most of order 1 each.
        quadratic: whether the log-likelihood is quadratic, so that one step leads to its maximum.

    Returns:
        What was found at the start, and at the maximum.

    Raises:
        DataError: columns depend on one another linearly, or there is no maximum; the text names
            the columns.
    """
    first = here = evaluate(start)
    if not np.isfinite(here.loglik):
        raise DataError(
            "the log-likelihood is not finite at the start: a value of the outcome, the offset "
            "or the weights is far too large. Correct it"
        )
    if not len(start):
        return first, here
    refuse_dependent(here.information, names, least, flat)
    if quadratic:
        return first, _refined(evaluate(start + _step(here)))
    before, step, solved = np.inf, np.zeros(len(start)), True
    for _ in range(MOST_STEPS):
        try:
            step = _step(here)
        except np.linalg.LinAlgError:
            solved = False
            break
        size = float(np.abs(step).max())
        if size < TOLERANCE:
            return first, here
        rounded = here.gradient @ step / 2 < _slack(here)
        if rounded and size > before / 2:
            break
        following = _climb(evaluate, here, step)
        if following is None:
            break
        here, before = following, size
    if vanished(here.information, first.information, step, rows):
        ways = np.abs(step) * [name != "intercept" for name in names]
        far = [name for name, way in zip(names, ways, strict=True) if way > 0.1 * ways.max()]
        raise DataError(
            f"the fit does not converge: the coefficients of {', '.join(far or names)} grow "
            f"without bound. {infinite}"
        )
    if solved and here.gradient @ step / 2 < _slack(here):
        return first, here  # as far up as float64 tells
    number, involved = condition(here.information, names)
    raise DataError(
        f"the fit does not converge within {MOST_STEPS} rounds. The condition number of the "
        f"columns is {number:.2g}, mainly because of {', '.join(involved)}. Leave one of them out "
        "(--drop), or give them in another unit"
    )


def _step(here: NewtonEvaluation) -> Array:
    """Newton's step [p]."""
    return np.asarray(np.linalg.solve(here.information, here.gradient), np.float64)


def _slack(here: NewtonEvaluation) -> float:
    """What the log-likelihood may be off by, as a sum of numbers that are rounded."""
    return 1e-12 * (1 + abs(here.loglik))


def _refined(here: NewtonEvaluation) -> NewtonEvaluation:
    """The maximum of a quadratic log-likelihood, without what rounding lost on the way."""
    step = _step(here)
    gain = float(here.gradient @ step) / 2
    return replace(
        here,
        at=here.at + step,
        loglik=here.loglik + gain,
        gradient=np.zeros_like(here.gradient),
        deviance=here.deviance - 2 * gain,
    )


def _climb(
    evaluate: Callable[[Array], NewtonEvaluation], here: NewtonEvaluation, step: Array
) -> NewtonEvaluation | None:
    """The first point along a step, halved as often as need be, that is not lower."""
    for _ in range(_HALVINGS):
        following = evaluate(here.at + step)
        finite = np.isfinite(following.information).all()
        if following.loglik >= here.loglik - _slack(here) and finite:
            return following
        step = step / 2
        if np.abs(step).max() < TOLERANCE:
            return None
    return None


def vanished(information: Array, start: Array, step: Array, rows: float) -> bool:
    """Whether the information along a step is almost none of what it was at the start, or could
    be: outcomes are then as good as certain in every row that it moves (fitted probabilities of 0
    or 1). Columns that nearly depend on one another have little information along it at both.
    """
    if not np.isfinite(information).all() or not step.any():
        return False
    if np.diag(information).max() < _CERTAIN**2 * rows:
        return True
    return bool(step @ information @ step < _CERTAIN * (step @ start @ step))


def condition(information: Array, names: Sequence[str]) -> tuple[float, list[str]]:
    """The condition number of the columns, each scaled to the same information, and the names of
    those that nearly depend on one another: the square root of that of the information.
    """
    if not len(names):
        return 1.0, []
    diagonal = np.sqrt(np.diag(information))
    values, vectors = np.linalg.eigh(information / np.outer(diagonal, diagonal))
    weight = np.abs(vectors[:, 0])
    involved = [n for n, share in zip(names, weight, strict=True) if share > 0.05 * weight.max()]
    return float(np.sqrt(values[-1] / values[0])) if values[0] > 0 else np.inf, involved


def refuse_dependent(information: Array, names: Sequence[str], least: float, flat: str) -> None:
    """See that no column is a combination of others; `least` and `flat` are those of `maximize`.

    Raises:
        DataError: one is; the text names those that depend on one another.
    """
    own = np.diag(information)
    none = [name for name, size in zip(names, own, strict=True) if not size > least]
    if none:
        raise DataError(f"{', '.join(none)} {flat}. Leave it out (--drop)")
    number, involved = condition(information, names)
    if number < _MOST:
        return
    raise DataError(
        f"{', '.join(involved)} depend on one another: each is a linear combination of the others "
        f"within rounding (condition number {number:.2g}), so their coefficients are not "
        "determined. Leave one of them out (--drop)"
    )


def of_condition(number: float, involved: Sequence[str]) -> str:
    """What a user should know of columns that nearly depend on one another; empty if none do."""
    if number < ILL or not involved:
        return ""
    return (
        f"{', '.join(involved)} nearly depend on one another: the condition number of the columns "
        f"is {number:.2g}. Their standard errors are large, and only their sum or difference is "
        "estimated well. Leave one of them out (--drop) to interpret the others"
    )
