"""Networks that are given as Python objects, with the weights that they have."""

import tempfile
from functools import cache
from pathlib import Path

from torch import nn

from fedbayes.core.files import digest
from fedbayes.core.messages import encode
from fedbayes.errors import ModelError


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Where files of weights are until this process ends."""
    return tempfile.TemporaryDirectory(prefix="fedbayes-weights-")


def start_file(module: nn.Module) -> Path:
    """A file with the weights of a network, to start from; the same file for the same weights.

    Raises:
        ModelError: it has no weights, or some whose shapes are not known yet.
    """
    if any(nn.parameter.is_lazy(tensor) for tensor in module.state_dict().values()):
        raise ModelError(
            f"the network {type(module).__name__} has lazy layers without shapes. Run a batch "
            "through it before, or give its class"
        )
    if not module.state_dict():
        raise ModelError(f"the network {type(module).__name__} has no trainable weights")
    weights = {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}
    content = encode(weights, plain=True)
    file = Path(_folder().name) / f"{digest(content)[:16]}.safetensors"
    if not file.exists():
        file.write_bytes(content)
    return file
