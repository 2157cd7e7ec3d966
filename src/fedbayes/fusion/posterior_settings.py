"""Settings of the posterior statistics that clients compute, and of their fusion."""

from typing import Literal

from pydantic import ConfigDict, Field

from fedbayes.core.brief import Settings

PRECISION = {"regmean": 0.1, "fisher": 1e-3, "kfac": 1.0}
"""Of the prior, where none is set."""


class CurvatureSettings(Settings):
    """How a client computes the curvature of its network on its samples.

    Examples:
        >>> from fedbayes.fusion.posterior_settings import CurvatureSettings
        >>> CurvatureSettings(draws=1).draws
        1
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    draws: int | None = Field(
        None,
        ge=1,
        description="targets drawn for each sample from the network's own prediction; by default "
        "all classes weighted by their probabilities where there are at most 20, exactly under "
        "Gaussian noise on as few columns, else one draw",
    )
    batch_size: int = Field(64, ge=1, description="samples at a time")
    largest: int = Field(
        5000,
        ge=1,
        description="inputs of a layer, or outputs, up to which it gets Kronecker factors; wider "
        "ones get the diagonal alone",
    )


class AveragingSettings(Settings):
    """How networks of one graph are averaged by their posteriors.

    Examples:
        >>> from fedbayes.fusion.posterior_settings import AveragingSettings
        >>> AveragingSettings(precision=0.1).precision
        0.1
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    precision: float | None = Field(
        None,
        gt=0,
        description="of the prior around the mean of the clients' weights, as a share of the mean "
        "diagonal of what the clients send, layer by layer; by default 0.1 for regmean, 0.001 for "
        "fisher, 1 for kfac",
    )
    scaling: float = Field(
        0.9,
        ge=0,
        le=1,
        description="of the entries of a layer's second moments that are off their diagonal "
        "(regmean)",
    )
    tolerance: float = Field(
        1e-3,
        gt=0,
        description="relative residual at which conjugate gradients stop (kfac); below 1e-5 they "
        "compute in float64",
    )
    iterations: int = Field(
        200, ge=1, description="steps of conjugate gradients at most, for each layer (kfac)"
    )

    def precision_of(self, method: Literal["regmean", "fisher", "kfac"]) -> float:
        """That of a method, its own by default."""
        return PRECISION[method] if self.precision is None else self.precision


class HeadSettings(Settings):
    """How strong the prior of a Gaussian head is; see `fedbayes.inference.gaussian_head`.

    Examples:
        >>> from fedbayes.fusion.posterior_settings import HeadSettings
        >>> HeadSettings(prior_rows=20).prior_rows
        20.0
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    prior_rows: float | None = Field(
        None,
        gt=0,
        description="rows that the prior of the covariance counts as (gaussian-head); by default "
        "as many as make the sums most probable",
    )
    mean_rows: float = Field(
        0.01,
        gt=0,
        description="rows that the prior of the means of classes counts as (gaussian-head)",
    )
