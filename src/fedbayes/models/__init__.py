"""Networks, and the way from a config to one of them."""

from typing import TYPE_CHECKING

from fedbayes.lazy import attributes
from fedbayes.models.settings import BUILT_IN, ModelSettings, Precision

if TYPE_CHECKING:
    from fedbayes.models.construct import build
    from fedbayes.models.files import PICKLED, DenseLayer, dense_layers, read_weights, relu_network
    from fedbayes.models.network import Network
    from fedbayes.models.networks import MLP, LeNet5, ResNet20

__all__ = [
    "BUILT_IN",
    "MLP",
    "PICKLED",
    "DenseLayer",
    "LeNet5",
    "ModelSettings",
    "Network",
    "Precision",
    "ResNet20",
    "build",
    "dense_layers",
    "read_weights",
    "relu_network",
]

__getattr__, __dir__ = attributes(
    __name__,
    {
        "MLP": "fedbayes.models.networks",
        "PICKLED": "fedbayes.models.files",
        "DenseLayer": "fedbayes.models.files",
        "LeNet5": "fedbayes.models.networks",
        "Network": "fedbayes.models.network",
        "ResNet20": "fedbayes.models.networks",
        "build": "fedbayes.models.construct",
        "dense_layers": "fedbayes.models.files",
        "read_weights": "fedbayes.models.files",
        "relu_network": "fedbayes.models.files",
    },
)
