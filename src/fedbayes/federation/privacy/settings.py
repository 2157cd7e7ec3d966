"""The `[privacy]` table of a config."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, field_validator

from fedbayes.core.brief import Settings
from fedbayes.core.fields import Only

LEAST = 1e-6
"""The least deviation of noise, beside which ε is beyond all meaning."""


class Privacy(Settings):
    """The `[privacy]` table of a config, for methods whose reports add."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    noise: float = Field(
        0.0,
        ge=0,
        description="noise multiplier z: Gaussian noise of standard deviation z · aggregation.clip "
        "on the sum of a round's changes (central differential privacy); 0: none",
    )
    delta: Annotated[float, Only("noise")] = Field(
        1e-5, gt=0, lt=1, description="δ of differential privacy"
    )
    mechanism: Annotated[Literal["gaussian", "matrix"], Only("noise")] = Field(
        "gaussian",
        description="gaussian: every round has noise of its own; matrix: noise that later rounds "
        "partly take back (DP-FTRL by the square root of the matrix of prefix sums)",
    )
    bands: Annotated[int | None, Only("mechanism", "matrix")] = Field(
        None,
        ge=1,
        description="rounds that a change's share of the factor reaches (matrix); all by default",
    )
    clips: Annotated[dict[str, Annotated[float, Field(gt=0)]], Only("noise")] = Field(
        default_factory=dict,
        description="bounds of single parts of a report (control, gates, shift, ...), in place of "
        "aggregation.clip",
    )
    quantile: Annotated[float | None, Only("noise")] = Field(
        None,
        gt=0,
        lt=1,
        description="share of the clients whose changes stay unclipped: the bound follows this "
        "quantile of their norms, from aggregation.clip on; it stays as it is by default",
    )
    quantile_rate: Annotated[float, Only("quantile")] = Field(
        0.2, gt=0, le=10, description="step of the bound's logarithm (quantile)"
    )
    count_noise: Annotated[float | None, Only("quantile")] = Field(
        None,
        ge=LEAST,
        description="deviation of the noise on how many changes were within the bound (quantile); "
        "a twentieth of the cohort by default",
    )
    metrics: Annotated[Literal["off", "on"], Only("noise")] = Field(
        "off",
        description="off: clients send no metrics, scores or numbers of samples, which ε does not "
        "cover; on: they do",
    )
    repeatable: Annotated[bool, Only("noise")] = Field(
        False,
        description="whether noise follows from the seed, which clients know: for experiments, "
        "not for privacy",
    )

    @field_validator("noise")
    @classmethod
    def _some_noise(cls, noise: float) -> float:
        if 0 < noise < LEAST:
            raise ValueError(f"less than {LEAST:g} is no noise; 0 is none")
        return noise
