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

    share: float = Field(0.0, ge=0, le=1, description="share of the inputs that are moved")
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
                    f"{name} = {value} has no effect without moved inputs. Set share too, such as "
                    "0.7, or leave it out"
                )
        return self


class DistillationSettings(BaseModel):
    """How a network learns the teacher's outputs on synthetic inputs, end to end."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    steps: int = Field(6000, ge=1, description="largest number of steps of Adam")
    batch_size: int = Field(64, ge=1, description="number of inputs in a step")
    repeats: int = Field(
        3, ge=1, description="number of steps that reuse a batch and the teacher's predictions"
    )
    lr: float | None = Field(
        None,
        gt=0,
        description="highest learning rate of the cycle. none: 0.002 for networks with batch or "
        "group normalization, else 0.0005",
    )
    warmup: float = Field(
        0.1, ge=0, lt=1, description="share of the steps in which the learning rate rises"
    )
    draws: int = Field(
        16_384,
        ge=1,
        description="number of different inputs; then they repeat with new augmentations",
    )
    held_out: int = Field(2048, ge=1, description="number of inputs to monitor the divergence on")
    checks: int = Field(20, ge=1, description="number of checks of the divergence")
    patience: int | None = Field(
        8, ge=1, description="checks without improvement after which training stops. none: never"
    )
    minutes: float | None = Field(
        None, gt=0, description="time limit in minutes; the learning-rate cycle fits into it"
    )
    augment: bool = Field(
        True, description="augmentations of the input prior, such as rotations and flips"
    )
    loss: Literal["auto", "logits", "kl"] = Field(
        "auto",
        description="loss: squared error of centred logits over the teacher's variance, or the "
        "divergence of predictions. auto: logits if they are added by shares of classes",
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="precision of the arithmetic. auto: bfloat16 for images and texts "
        "if the processor supports it",
    )


class FunctionSettings(Settings):
    """How networks become one in function space."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    draws: int = Field(
        4096,
        ge=64,
        description="number of inputs for the least squares of layers, in whole batches of 512",
    )
    units: Literal["auto", "chosen", "merged"] = Field(
        "auto",
        description="origin of neurons. chosen: each from one client. merged: also merged from "
        "several clients. auto: the one that is closer to the ensemble prediction, which "
        "takes longer",
    )
    augment: bool = Field(
        True,
        description="augmentations of the input prior for the least squares of layers, such as "
        "rotations and flips",
    )
    ridge: float = Field(
        1e-3, ge=0, description="ridge, as a share of the mean diagonal of the normal equations"
    )
    mirrored: bool = Field(
        True,
        description="whether an image and its mirror image have one prediction, the mean, where "
        "inputs are photographs. false: if left and right are different classes",
    )
    matched: int | None = Field(
        None,
        ge=0,
        description="gradient steps that bring synthetic images to the running statistics of the "
        "clients' batch normalization (not of programs), and to their classes. none: 5 for images "
        "of up to 64 × 64 pixels and training without a time limit, else 0",
    )
    seeking: SeekingSettings = Field(
        default_factory=SeekingSettings, description="inputs moved toward rare classes"
    )
    balance: bool = Field(
        False,
        description="whether to choose inputs so that the teacher gives each class its share of "
        "the counts",
    )
    distillation: DistillationSettings | None = Field(
        default_factory=DistillationSettings,
        description="training end to end after least squares. none: only least squares",
    )
    posterior: PosteriorOf | None = Field(
        None,
        description="a Laplace approximation on the synthetic inputs, for calibrated "
        "uncertainty. last-layer: of that layer. kronecker: of all dense layers and "
        "convolutions. none: only a temperature",
    )


class AlignedSettings(Settings):
    """How networks in one order of units become one.

    Examples:
        >>> from fedbayes.fusion.settings import AlignedSettings
        >>> AlignedSettings(repair=1024).repair
        1024
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    repair: int | None = Field(
        None,
        ge=2,
        description="number of inputs to restore the scale of activations on (REPAIR), such as "
        "1024. Default: no repair",
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
        description="rank of the fused adapter. Default: the largest rank of the adapters",
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
        description="base network of adapters, if their own is not available: a folder, or a "
        "name on the Hugging Face hub",
    )
    draws: int = Field(
        1024, ge=64, description="number of inputs to compare adapters on, in batches of 64"
    )
    length: int = Field(
        64, ge=3, description="largest number of tokens of a sampled text. Default: as in the files"
    )
    ridge: float = Field(
        1e-3, ge=0, description="ridge, as a share of the mean diagonal of the normal equations"
    )


class AdapterFunctionSettings(AdapterInputSettings):
    """How adapters become one in function space.

    Examples:
        >>> from fedbayes.fusion.settings import AdapterFunctionSettings
        >>> AdapterFunctionSettings(rank=4).draws
        1024
    """

    distillation: DistillationSettings | None = Field(
        default_factory=lambda: None,
        description="training of factors and heads end to end, kept if it is closer to the "
        "ensemble. Default: 200 steps, or none for language models",
    )
