"""The `[privacy]` table of a config."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from fedbayes.core.brief import Settings
from fedbayes.core.fields import Only

LEAST = 1e-6
"""The least standard deviation of noise, below which ε has no meaning."""


class Privacy(Settings):
    """The `[privacy]` table of a config, for methods whose reports add."""

    noise: float = Field(
        0.0,
        ge=0,
        description="noise multiplier z of central differential privacy. Gaussian noise of "
        "standard deviation z · aggregation.clip is added to the sum of a round's changes. 0: no "
        "noise",
    )
    delta: Annotated[float, Only("noise")] = Field(
        1e-5, gt=0, lt=1, description="δ of differential privacy"
    )
    mechanism: Annotated[Literal["gaussian", "matrix"], Only("noise")] = Field(
        "gaussian",
        description="gaussian: independent noise in each round. matrix: correlated noise that "
        "later rounds partly cancel (DP-FTRL with the square root of the prefix-sum matrix)",
    )
    bands: Annotated[int | None, Only("mechanism", "matrix")] = Field(
        None,
        ge=1,
        description="number of bands of the matrix factor (matrix). Default: all rounds",
    )
    clips: Annotated[dict[str, Annotated[float, Field(gt=0)]], Only("noise")] = Field(
        default_factory=dict,
        description="norm bounds of single parts of an update (control, gates, shift, ...), "
        "instead of aggregation.clip",
    )
    quantile: Annotated[float | None, Only("noise")] = Field(
        None,
        gt=0,
        lt=1,
        description="share of the clients that are not clipped. The bound starts at "
        "aggregation.clip and follows this quantile of the norms. Default: the bound is constant",
    )
    quantile_rate: Annotated[float, Only("quantile")] = Field(
        0.2, gt=0, le=10, description="step size of the logarithm of the bound (quantile)"
    )
    count_noise: Annotated[float | None, Only("quantile")] = Field(
        None,
        ge=LEAST,
        description="standard deviation of the noise on the number of changes within the bound "
        "(quantile). Default: a twentieth of the cohort",
    )
    metrics: Annotated[Literal["off", "on"], Only("noise")] = Field(
        "off",
        description="whether clients send metrics, scores and numbers of samples, which ε does "
        "not cover",
    )
    repeatable: Annotated[bool, Only("noise")] = Field(
        False,
        description="whether the seed determines the noise. Clients know the seed, so use it for "
        "experiments only",
    )

    @field_validator("noise")
    @classmethod
    def _some_noise(cls, noise: float) -> float:
        if 0 < noise < LEAST:
            raise ValueError(f"give at least {LEAST:g}, or 0 for no noise")
        return noise
