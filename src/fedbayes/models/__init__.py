"""Networks, and the way from a config to one of them."""

from fedbayes.models.build import BUILT_IN, ModelSettings, build
from fedbayes.models.files import (
    CARD,
    PICKLED,
    PROGRAMS,
    DenseLayer,
    dense_layers,
    named_as,
    read_model,
    read_program,
    read_weights,
    relu_network,
)
from fedbayes.models.network import Network, Precision
from fedbayes.models.networks import MLP, LeNet5, ResNet20

__all__ = [
    "BUILT_IN",
    "CARD",
    "MLP",
    "PICKLED",
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
]
