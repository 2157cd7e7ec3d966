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
        description="number of targets sampled per sample from the network's own prediction. "
        "Default: all classes, weighted by probability, if there are at most 20; exact for "
        "Gaussian noise on at most 20 columns; else one",
    )
    batch_size: int = Field(64, ge=1, description="number of samples in a batch")
    largest: int = Field(
        5000,
        ge=1,
        description="largest number of inputs or outputs of a layer with Kronecker factors; "
        "wider layers get only a diagonal",
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
        description="precision of the prior around the mean of the clients' weights, as a share "
        "of the clients' mean diagonal in each layer. Default: 0.1 for regmean, 0.001 for "
        "fisher, 1 for kfac",
    )
    scaling: float = Field(
        0.9,
        ge=0,
        le=1,
        description="factor of the off-diagonal entries of a layer's second moments (regmean)",
    )
    tolerance: float = Field(
        1e-3,
        gt=0,
        description="relative residual at which conjugate gradients stop (kfac). Below 1e-5 they "
        "use float64",
    )
    iterations: int = Field(
        200, ge=1, description="largest number of steps of conjugate gradients per layer (kfac)"
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
        description="strength of the prior of the covariance, in rows (gaussian-head). Default: "
        "the number with the highest marginal likelihood",
    )
    mean_rows: float = Field(
        0.01,
        gt=0,
        description="strength of the prior of the means of classes, in rows (gaussian-head)",
    )
