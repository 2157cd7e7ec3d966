"""The `[model]` table of a config."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fedbayes.errors import did_you_mean
from fedbayes.fields import Arguments, Only, Several

Precision = Literal["float32", "bf16"]

BUILT_IN = {
    "mlp": "fully connected, any hidden widths",
    "lenet5": "LeNet-5 with 20 and 50 filters and 500 units",
    "cnn": "two convolutions of 3 by 3 and 622 units; 1.02 million parameters on MNIST",
    "resnet20": "ResNet-20 with group normalization",
}


class ModelSettings(BaseModel):
    """The network that all clients share: the `[model]` table of a config."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(
        "mlp",
        description=f"{', '.join(BUILT_IN)}, or package.module:factory",
        examples=list(BUILT_IN),
    )
    hidden: Annotated[Several[int], Only("name", "mlp")] = Field(
        (100,), description="widths of the hidden layers (mlp)"
    )
    bias: Annotated[bool, Only("name", "mlp")] = Field(
        True, description="whether layers have biases (mlp)"
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="dropout before every dense layer (mlp, lenet5)"
    )
    groups: Annotated[int, Only("name", "resnet20")] = Field(
        2, ge=1, description="groups of the group normalization (resnet20)"
    )
    arguments: Arguments = Field({}, description="keyword arguments of your own factory")
    init: Literal["default", "normal", "xavier", "kaiming"] = Field(
        "default", description="initialization of weights; default is PyTorch's"
    )
    init_std: Annotated[float, Only("init", "normal")] = Field(
        0.1, ge=0, description="standard deviation (init = normal)"
    )
    init_bias: Annotated[float, Only("init", "normal", "xavier", "kaiming")] = Field(
        0.1, description="value of all biases (init other than default)"
    )

    weights: Path | None = Field(
        None,
        description="file with weights to start from (.safetensors, .pt, .ckpt), such as the model "
        "of another run; the run folder keeps a copy",
    )

    @field_validator("weights")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        """So that a stored config means the same from every folder."""
        return None if path is None else path.expanduser().absolute()

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in BUILT_IN and ":" not in name:
            raise ValueError(
                f"no model is called {name!r}{did_you_mean(name, BUILT_IN)}; choose "
                f"{', '.join(BUILT_IN)}, or name your own as package.module:factory"
            )
        return name

    @model_validator(mode="after")
    def _agree(self) -> "ModelSettings":
        if self.arguments and self.name in BUILT_IN:
            raise ValueError(f"arguments are for your own factory; {self.name} takes none")
        if self.weights is not None and self.init != "default":
            raise ValueError("init has no effect on weights from a file; leave one of them out")
        return self
