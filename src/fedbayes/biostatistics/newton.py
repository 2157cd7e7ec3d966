"""The one loop that every regression runs: Newton's method on sums that clients send."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedbayes.biostatistics.exchange import Array
from fedbayes.errors import DataError

TOLERANCE = 1e-10
"""Largest step, in standard deviations of a column, that counts as none."""
MOST_STEPS = 50
_HALVINGS = 30


@dataclass(frozen=True)
class Evaluation:
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
    evaluate: Callable[[Array], Evaluation],
    start: Array,
    names: Sequence[str],
    infinite: str,
    least: float = 0.0,
    flat: str = "makes no difference to any row",
) -> tuple[Evaluation, Evaluation]:
    """Climb to the maximum of a concave log-likelihood.

    Args:
        evaluate: asks the clients for their sums at some coefficients.
        start: where to begin [p].
        names: of the coefficients, for errors.
        infinite: what it means that coefficients grow without end.
        least: information on a coefficient at the start, of columns of variance 1, that is none
            but for rounding.
        flat: what it means that there is none.

    Returns:
        What was found at the start, and at the maximum.

    Raises:
        DataError: columns depend on one another linearly, or there is no maximum; the text names
            the columns.
    """
    first = here = evaluate(start)
    if not np.isfinite(here.loglik):
        raise DataError(
            "the log-likelihood is not finite at the start: some value of the outcome, the offset "
            "or the weights is far too large; mend it"
        )
    if not len(start):
        return first, here
    refuse_dependent(here.information, names, least, flat)
    for _ in range(MOST_STEPS):
        try:
            step: Array = np.asarray(np.linalg.solve(here.information, here.gradient), np.float64)
        except np.linalg.LinAlgError:
            break
        if np.abs(step).max() < TOLERANCE:
            return first, here
        following = _climb(evaluate, here, step)
        if following is None:
            if np.abs(step).max() < 1e4 * TOLERANCE:
                return first, here  # as far up as float64 tells
            break
        here = following
    reached = np.abs(here.at - start) * [name != "intercept" for name in names]
    far = [name for name, way in zip(names, reached, strict=True) if way > 0.1 * reached.max()]
    raise DataError(
        f"the fit does not settle within {MOST_STEPS} rounds: the coefficients of "
        f"{', '.join(far or names)} grow without end. {infinite}"
    )


def _climb(
    evaluate: Callable[[Array], Evaluation], here: Evaluation, step: Array
) -> Evaluation | None:
    """The first point along a step, halved as often as need be, that is not lower."""
    slack = 1e-12 * (1 + abs(here.loglik))
    for _ in range(_HALVINGS):
        following = evaluate(here.at + step)
        if following.loglik >= here.loglik - slack and np.isfinite(following.information).all():
            return following
        step = step / 2
        if np.abs(step).max() < TOLERANCE:
            return None
    return None


def refuse_dependent(information: Array, names: Sequence[str], least: float, flat: str) -> None:
    """See that no column is a combination of others; `least` and `flat` are those of `maximize`.

    Raises:
        DataError: one is; the text names those that depend on one another.
    """
    own = np.diag(information)
    none = [name for name, size in zip(names, own, strict=True) if not size > least]
    if none:
        raise DataError(f"{', '.join(none)} {flat}; leave it out (--drop)")
    diagonal = np.sqrt(own)
    values, vectors = np.linalg.eigh(information / np.outer(diagonal, diagonal))
    if values[0] > 1e-11 * len(names):
        return
    weight = np.abs(vectors[:, 0])
    involved = [n for n, share in zip(names, weight, strict=True) if share > 0.05 * weight.max()]
    raise DataError(
        f"{', '.join(involved)} depend on one another: each is a linear combination of the "
        "others, so their coefficients are not determined; leave one of them out (--drop)"
    )
