"""Networks as functions of their weights, and the way from a config or a file to one.

A new built-in network is a class in `networks.py` and a name in `settings.py`. A rule in
`operations.py` lets methods leave out units of more networks. The names of tensors must stay, since
model files have them. `files.py` reads model files with bounds, and never runs code of theirs.

`network.initial` are the weights that training may change. Frozen parameters (`network.constants`)
stay in the module: everybody builds them from the same settings, and tasks, checkpoints and model
files carry their digest. `network.whole(model)` puts both together. Weights that each client keeps
for itself are `network.own`; `federation/stages/personal_layers.py` stores them in its private
state. Methods ask `at.run.network.groups` for units that can be left out (`units.py`), which come
from a trace of one forward pass (`trace.py`). Nobody describes a network by hand.
"""

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
        "fedbayes.models.construct": "build",
        "fedbayes.models.files": (
            "CARD DenseLayer PICKLED POSTERIOR PROGRAMS dense_layers named_as read_model "
            "read_program read_weights relu_network unlike"
        ),
        "fedbayes.models.network": "Network",
        "fedbayes.models.networks": "LeNet5 MLP ResNet20",
    },
)
