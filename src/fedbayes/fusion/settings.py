"""How networks are fused in function space, with the names that the command line uses."""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedbayes.core.brief import Settings

PosteriorOf = Literal["last-layer", "kronecker"]
"""What of a network a posterior is of."""


class SeekingSettings(BaseModel):
    """How inputs are moved toward classes that a prior hardly draws."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    share: float = Field(0.0, ge=0, le=1, description="share of the draws that are moved")
    steps: int = Field(10, ge=1, description="steps up the gradient of the class' probability")
    size: float = Field(
        0.05, gt=0, description="length of a step, root mean square in standard deviations"
    )

    @model_validator(mode="after")
    def _act(self) -> Self:
        """See that how inputs are moved is not said where none are."""
        for name in ("steps", "size"):
            value, default = getattr(self, name), type(self).model_fields[name].default
            if not self.share and value != default:
                raise ValueError(
                    f"{name} = {value} has no effect where no inputs are moved; give share too, "
                    "such as 0.7, or leave it out"
                )
        return self


class DistillationSettings(BaseModel):
    """How a network learns the teacher's outputs on synthetic inputs, end to end."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    steps: int = Field(6000, ge=1, description="steps of Adam at most")
    batch_size: int = Field(64, ge=1, description="inputs in a step")
    repeats: int = Field(
        3, ge=1, description="steps that use a batch and what the teacher says of it"
    )
    lr: float = Field(5e-4, gt=0, description="highest learning rate of the cycle")
    warmup: float = Field(
        0.1, ge=0, lt=1, description="share of the steps in which the learning rate rises"
    )
    draws: int = Field(
        16_384, ge=1, description="different inputs; then they repeat, augmented again"
    )
    held_out: int = Field(2048, ge=1, description="inputs to watch the divergence on")
    checks: int = Field(20, ge=1, description="times that the divergence is looked at")
    patience: int | None = Field(
        8, ge=1, description="checks without improvement that end it; none: never"
    )
    minutes: float | None = Field(
        None, gt=0, description="time at most; the cycle is then as long as there is time for"
    )
    augment: bool = Field(True, description="turns, flips and the like of the prior")
    loss: Literal["auto", "logits", "kl"] = Field(
        "auto",
        description="squared error of centred logits over the teacher's variance, or the "
        "divergence of predictions; auto: logits where they are added up by shares of classes",
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of the arithmetic; auto: bfloat16 where processors have it for images"
    )


class FunctionSettings(Settings):
    """How networks become one in function space."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    draws: int = Field(
        4096, ge=64, description="inputs that layers are solved on, in whole batches of 512"
    )
    units: Literal["auto", "chosen", "merged"] = Field(
        "auto",
        description="chosen: each from one client; merged: neurons also of several, as one; auto: "
        "whichever is closer to the ensemble prediction, which takes longer",
    )
    augment: bool = Field(
        True,
        description="turns, flips and the like of the prior, of the inputs that layers are solved "
        "on",
    )
    ridge: float = Field(1e-3, ge=0, description="of the mean diagonal of normal equations")
    seeking: SeekingSettings = Field(
        default_factory=SeekingSettings, description="inputs moved toward rare classes"
    )
    balance: bool = Field(
        False,
        description="take inputs such that the teacher gives each class its share of the counts",
    )
    distillation: DistillationSettings | None = Field(
        default_factory=DistillationSettings,
        description="end to end from there; none: least squares alone",
    )
    posterior: PosteriorOf | None = Field(
        None,
        description="a Laplace approximation on the synthetic inputs, for calibrated uncertainty. "
        "last-layer: of that layer; kronecker: of all dense layers and convolutions; none: a "
        "temperature alone",
    )


class KeptChanges(Settings):
    """How much of changes since the start is kept."""

    density: float = Field(
        0.2, gt=0, le=1, description="share of each network's changes that is kept"
    )
    scale: float = Field(1.0, gt=0, description="factor of the change that is added to the start")
    drop_seed: int = Field(0, ge=0, description="seed of the changes that dare drops")


class TaskVectorSettings(KeptChanges):
    """How changes since the start become one.

    Examples:
        >>> from fedbayes.fusion.settings import TaskVectorSettings
        >>> TaskVectorSettings(base="start.safetensors", density=0.1).density
        0.1
    """

    base: Path | None = Field(
        None, description="file of the network that all clients started from; required"
    )


class AdapterSettings(Settings):
    """How low-rank adapters become one.

    Examples:
        >>> from fedbayes.fusion.settings import AdapterSettings
        >>> AdapterSettings(rank=8).rank
        8
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rank: int | None = Field(
        None,
        ge=1,
        description="rank of the fused adapter; by default the largest of the adapters",
    )


class AdapterTaskSettings(AdapterSettings, KeptChanges):
    """How adapters become one by TIES or DARE, of whole changes B A.

    Examples:
        >>> from fedbayes.fusion.settings import AdapterTaskSettings
        >>> AdapterTaskSettings(density=0.1).scale
        1.0
    """


class AdapterInputSettings(AdapterSettings):
    """How adapters become one on inputs of their network's layers."""

    base: str | None = Field(
        None,
        description="base network of adapters that do not name one which is here: a folder, or a "
        "name on the Hugging Face hub",
    )
    draws: int = Field(
        1024, ge=64, description="inputs that adapters are compared on, in batches of 64"
    )
    length: int = Field(
        64, ge=3, description="tokens of a drawn text at most, where files do not say"
    )
    ridge: float = Field(1e-3, ge=0, description="of the mean diagonal of normal equations")


class AdapterFunctionSettings(AdapterInputSettings):
    """How adapters become one in function space.

    Examples:
        >>> from fedbayes.fusion.settings import AdapterFunctionSettings
        >>> AdapterFunctionSettings(rank=4).draws
        1024
    """

    distillation: DistillationSettings | None = Field(
        default_factory=lambda: None,
        description="factors and heads end to end from there, kept if they are nearer to the "
        "ensemble; by default none, unless there are --minutes",
    )
