"""The `[model]` table of a config."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from fedbayes.core.brief import Settings
from fedbayes.core.fields import AbsolutePath, Arguments, Only, Several
from fedbayes.core.lazy import placed
from fedbayes.core.pretrained import PretrainedName

Precision = Literal["float32", "bf16"]

BUILT_IN = {
    "mlp": "fully connected, any hidden widths",
    "lenet5": "LeNet-5 with 20 and 50 filters and 500 units",
    "cnn": "two convolutions of 3 by 3 and 622 units; 1.02 million parameters on MNIST",
    "resnet20": "ResNet-20 with group normalization",
}

OTHERS = {
    "transformers": "a network of Hugging Face transformers, by name or from a folder (pretrained)",
    "timm": "a network of timm (PyTorch image models), by name (pretrained)",
}
"""Networks that others trained; of the extra `hf`."""
NAMES = {**OTHERS, **BUILT_IN}
"""All that a config may name without code of its own."""


class ModelSettings(Settings):
    """The network that all clients share: the `[model]` table of a config.

    Examples:
        >>> from fedbayes.models import ModelSettings
        >>> ModelSettings(name="mlp", hidden=[50]).hidden
        (50,)
    """

    name: str = Field(
        "mlp",
        description=f"{', '.join(NAMES)}, or package.module:factory",
        examples=list(NAMES),
    )
    pretrained: Annotated[PretrainedName | None, Only("name", *OTHERS)] = Field(
        None,
        description="pretrained network. transformers: a name on the Hugging Face hub (owner/name, "
        "with @revision for a fixed version) or a folder. timm: a name in timm",
    )
    task: Annotated[
        Literal["auto", "sequence-classification", "image-classification"],
        Only("name", "transformers"),
    ] = Field(
        "auto",
        description="task of a transformers network; auto: the task of its architecture. The "
        "likelihood sets the number of outputs, so numbers can be predicted too",
    )
    scratch: Annotated[bool, Only("name", *OTHERS)] = Field(
        False, description="whether to start from random weights of that architecture"
    )
    trains: Annotated[Literal["all", "head", "lora"], Only("name", *OTHERS)] = Field(
        "all",
        description="part of a pretrained network that is trained, sent and stored. all: all "
        "weights. head: the head. lora: low-rank adapters and the head (peft)",
    )
    lora_rank: Annotated[int, Only("trains", "lora")] = Field(
        8, ge=1, description="rank r of the adapters"
    )
    lora_alpha: Annotated[float, Only("trains", "lora")] = Field(
        16.0, gt=0, description="scale of the adapters: their output is multiplied by alpha / rank"
    )
    lora_targets: Annotated[Several[str], Only("trains", "lora")] = Field(
        (),
        description="endings of the names of the layers with adapters, such as query, value. "
        "Default: the layers that peft chooses for the architecture",
    )
    lora_dropout: Annotated[float, Only("trains", "lora")] = Field(
        0.0, ge=0, lt=1, description="dropout before the adapters during training"
    )
    lora_trains: Annotated[Literal["both", "b"], Only("trains", "lora")] = Field(
        "both",
        description="both: the factors A and B of the adapters are trained. b: only B is trained; "
        "that halves the bytes sent, and averaging B averages the adapters' outputs",
    )
    batch_norm: Literal["default", "averaged", "local", "frozen"] = Field(
        "default",
        description="batch normalization. averaged: statistics, scales and shifts are aggregated "
        "like all weights. local: each client keeps its own (FedBN). frozen: statistics do not "
        "change. Default: frozen if only a head or adapters are trained, else averaged",
    )
    hidden: Annotated[Several[int], Only("name", "mlp")] = Field(
        (100,), description="widths of the hidden layers (mlp)"
    )
    bias: Annotated[bool, Only("name", "mlp")] = Field(
        True, description="whether layers have biases (mlp)"
    )
    norm: Annotated[Literal["none", "batch"], Only("name", "mlp")] = Field(
        "none", description="normalization of hidden layers (mlp): none, or batch normalization"
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

    weights: AbsolutePath | None = Field(
        None,
        description="file with initial weights (.safetensors, .pt, .ckpt), such as the model of "
        "another run. The run folder keeps a copy",
    )

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return placed("model", name, NAMES)

    @property
    def only_named(self) -> bool:
        """Whether all settings but the name have their defaults."""
        return self.model_dump(exclude_defaults=True).keys() <= {"name"}

    @property
    def frozen_body(self) -> bool:
        """Whether a pretrained network trains but for a head or adapters."""
        return self.name in OTHERS and self.trains != "all"

    @model_validator(mode="after")
    def _agree(self) -> "ModelSettings":
        if self.arguments and self.name in NAMES:
            raise ValueError(
                f"model.arguments works only with your own factory. {self.name} takes none"
            )
        if self.name in OTHERS and self.pretrained is None:
            example = "prajjwal1/bert-tiny" if self.name == "transformers" else "resnet18"
            raise ValueError(
                f"model {self.name!r} needs the name of a network, such as pretrained = '{example}'"
            )
        if self.name in OTHERS and self.init != "default":
            raise ValueError(
                f"init has no effect on {self.name}. Set scratch = true for random weights"
            )
        if self.name not in OTHERS and self.pretrained is not None:
            raise ValueError(
                f"pretrained needs {' and '.join(OTHERS)}, but name is {self.name!r}. Set name too"
            )
        if self.batch_norm == "local" and self.frozen_body:
            raise ValueError(
                "batch_norm = 'local' needs trainable batch normalization, but trains = "
                f"{self.trains!r} freezes it. Leave one of them out"
            )
        if self.weights is not None and self.init != "default":
            raise ValueError("init has no effect on weights from a file. Leave one of them out")
        return self
