"""Settings of what clients compute beside their weights, and of what is fused from it."""

from pydantic import BaseModel, ConfigDict, Field


class CurvatureSettings(BaseModel):
    """How a client computes the curvature of its network on its samples."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    draws: int | None = Field(
        None,
        ge=1,
        description="targets drawn for each sample from the network's own prediction; by default "
        "all classes weighted by their probabilities where there are at most 20, else one draw",
    )
    batch_size: int = Field(64, ge=1, description="samples at a time")
    largest: int = Field(
        5000,
        ge=1,
        description="inputs of a layer, or outputs, up to which it gets Kronecker factors; wider "
        "ones get the diagonal alone",
    )


class AveragingSettings(BaseModel):
    """How networks of one graph are averaged by their posteriors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    precision: float = Field(
        1e-3,
        gt=0,
        description="of the prior around the mean of the clients' weights, as a share of the mean "
        "diagonal of what the clients send, layer by layer",
    )
    scaling: float = Field(
        0.9,
        ge=0,
        le=1,
        description="of the entries of a layer's second moments that are off their diagonal "
        "(regmean)",
    )
    tolerance: float = Field(
        1e-5, gt=0, description="relative residual at which conjugate gradients stop (kfac)"
    )
    iterations: int = Field(
        200, ge=1, description="steps of conjugate gradients at most, for each layer (kfac)"
    )
