"""The `[model]` table of a config."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from fedbayes.errors import did_you_mean
from fedbayes.fields import Several

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
    hidden: Several[int] = Field((100,), description="widths of the hidden layers (mlp)")
    bias: bool = Field(True, description="whether layers have biases (mlp)")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="dropout before every dense layer (mlp, lenet5)"
    )
    groups: int = Field(2, ge=1, description="groups of the group normalization (resnet20)")
    arguments: dict[str, Any] = Field({}, description="keyword arguments of your own factory")
    init: Literal["default", "normal", "xavier", "kaiming"] = Field(
        "default", description="initialization of weights; default is PyTorch's"
    )
    init_std: float = Field(0.1, ge=0, description="standard deviation (init = normal)")
    init_bias: float = Field(0.1, description="value of all biases (init other than default)")

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in BUILT_IN and ":" not in name:
            raise ValueError(
                f"no model is called {name!r}{did_you_mean(name, BUILT_IN)}; choose "
                f"{', '.join(BUILT_IN)}, or name your own as package.module:factory"
            )
        return name
