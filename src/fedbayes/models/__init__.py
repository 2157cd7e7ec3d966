"""Networks, and the way from a config to one of them."""

from typing import TYPE_CHECKING

from fedbayes.core.lazy import attributes
from fedbayes.models.settings import BUILT_IN, ModelSettings, Precision

if TYPE_CHECKING:
    from fedbayes.models.construct import build
    from fedbayes.models.files import (
        CARD,
        PICKLED,
        POSTERIOR,
        PROGRAMS,
        DenseLayer,
        dense_layers,
        named_as,
        read_model,
        read_program,
        read_weights,
        relu_network,
        unlike,
    )
    from fedbayes.models.network import Network
    from fedbayes.models.networks import MLP, LeNet5, ResNet20

__all__ = [
    "BUILT_IN",
    "CARD",
    "MLP",
    "PICKLED",
    "POSTERIOR",
    "PROGRAMS",
    "DenseLayer",
    "LeNet5",
    "ModelSettings",
    "Network",
    "Precision",
    "ResNet20",
    "build",
    "dense_layers",
    "named_as",
    "read_model",
    "read_program",
    "read_weights",
    "relu_network",
    "unlike",
]

__getattr__, __dir__ = attributes(
    __name__,
    {
        "CARD": "fedbayes.models.files",
        "MLP": "fedbayes.models.networks",
        "PROGRAMS": "fedbayes.models.files",
        "PICKLED": "fedbayes.models.files",
        "POSTERIOR": "fedbayes.models.files",
        "DenseLayer": "fedbayes.models.files",
        "LeNet5": "fedbayes.models.networks",
        "Network": "fedbayes.models.network",
        "ResNet20": "fedbayes.models.networks",
        "build": "fedbayes.models.construct",
        "dense_layers": "fedbayes.models.files",
        "named_as": "fedbayes.models.files",
        "read_model": "fedbayes.models.files",
        "read_program": "fedbayes.models.files",
        "read_weights": "fedbayes.models.files",
        "relu_network": "fedbayes.models.files",
        "unlike": "fedbayes.models.files",
    },
)
