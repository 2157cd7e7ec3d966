"""Linear combinations of weights: the factor of each model."""

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field

from fedbayes.core.brief import Settings
from fedbayes.core.fields import Only
from fedbayes.errors import ConfigError

Rule = Literal["mean", "linear", "exp"]
"""mean: α_s = 1/S; linear: α_s = c + r_s; exp: α_s = exp(c r_s)."""


class Combination(Settings):
    """How models are combined."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    alpha: Rule = Field("exp", description="factors: mean 1/S, linear c + r_s, exp exp(c r_s)")
    c: Annotated[float, Only("alpha", "linear", "exp")] = Field(
        1e-3, description="constant of the linear and the exponential rule"
    )
    normalized: Annotated[bool, Only("alpha", "linear", "exp")] = Field(
        False,
        description="whether the factors are divided by their sum, which keeps the scale of "
        "weights. false: as in the paper",
    )


def factors(
    rule: Rule,
    c: float,
    samples: Sequence[float] | npt.NDArray[np.floating],
    *,
    normalized: bool = False,
) -> npt.NDArray[np.float64]:
    """The factors α_s of a combination Σ_s α_s φ_s (Combined Learning, Eqs. 1, 3 and 4).

    Only the mean is convex: factors of the linear rule sum to 1 + S c, those of the exponential
    rule to about S, so that the combined weights grow with every round; or shrink, with c below 0.

    Normalized, factors are divided by their sum A in every layer. A network of ReLUs with weights
    A W_l and biases A^l b_l in layer l puts out A^L times what the one with W_l and b_l does: the
    normalized combination is the paper's, had its biases been multiplied by the power of A that
    belongs to their depth, with the same most probable classes, and without the growth.

    Args:
        rule: which rule.
        c: its constant; the mean has none.
        samples: training samples behind each model [S], of which r_s is the share; at least one
            is positive.
        normalized: whether they are to sum to 1.

    Raises:
        ConfigError: they sum to 0 or less, and are to be normalized.
    """
    sizes = np.asarray(samples, dtype=np.float64)
    share: npt.NDArray[np.float64] = sizes / sizes.sum()
    match rule:
        case "mean":
            alpha = np.full_like(share, 1 / len(share))
        case "linear":
            alpha = c + share
        case "exp":
            alpha = np.exp(c * share)
    if normalized:
        total = alpha.sum()
        if not (np.isfinite(total) and total > 0):
            raise ConfigError(
                f"the factors of alpha = {rule!r} with c = {c:g} sum to {total:.3g} for "
                f"{len(share)} models, and cannot be normalized. Choose c closer to 0"
            )
        alpha = alpha / total
    return alpha
