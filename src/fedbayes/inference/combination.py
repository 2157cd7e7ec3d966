"""Linear combinations of weights: the factor of each model."""

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from fedbayes.fields import Only

Rule = Literal["mean", "linear", "exp"]
"""mean: α_s = 1/S; linear: α_s = c + r_s; exp: α_s = exp(c r_s)."""


class Combination(BaseModel):
    """How models are combined."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    alpha: Rule = Field("exp", description="factors: mean 1/S, linear c + r_s, exp exp(c r_s)")
    c: Annotated[float, Only("alpha", "linear", "exp")] = Field(
        1e-3, description="constant of the linear and the exponential rule"
    )


def factors(
    rule: Rule, c: float, samples: Sequence[float] | npt.NDArray[np.floating]
) -> npt.NDArray[np.float64]:
    """The factors α_s of a combination Σ_s α_s φ_s (Combined Learning, Eqs. 1, 3 and 4).

    Only the mean is convex: factors of the linear rule sum to 1 + S c, those of the exponential
    rule to about S, so that the combined weights grow with every round.

    Args:
        rule: which rule.
        c: its constant; the mean has none.
        samples: training samples behind each model [S], of which r_s is the share; at least one
            is positive.
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
    return alpha
