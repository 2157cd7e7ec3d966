"""From the weights of a file to the network that they are of: the one way.

Which network that is the file's card says, or the user; without either it is fully connected with
ReLU, and the shapes of its tensors say of which widths.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import nn

from fedbayes.core.tensors import Tensors
from fedbayes.core.wording import size
from fedbayes.errors import ModelError
from fedbayes.likelihoods import Likelihood
from fedbayes.models.construct import build
from fedbayes.models.files import dense_layers, named_as, other_names, single, unlike
from fedbayes.models.network import Network
from fedbayes.models.networks import MLP
from fedbayes.models.settings import ModelSettings


@dataclass(frozen=True)
class OpenedWeights:
    """The weights of a file, compared with the network that settings build."""

    source: str
    """What to call the file in errors."""
    settings: ModelSettings
    network: Network
    """With weights of its own."""
    weights: Tensors
    """Of the file, float32, with those that it leaves out since they were frozen."""
    named: Tensors | None
    """The same under the network's names; None if the file has other tensors."""

    @property
    def fits(self) -> bool:
        """Whether they are tensors of the network, of its shapes."""
        return self.named is not None and all(
            self.named[name].shape == tensor.shape for name, tensor in self.network.start.items()
        )

    def unlike(self) -> ModelError:
        """The error for weights of another network."""
        found = self.weights if self.named is None else self.named
        told = unlike(found, self.network.start)
        return ModelError(f"{self.source} has no weights of model {self.settings.name!r}: {told}")

    def require(self) -> Tensors:
        """The weights under the network's names. A ModelError if they are of another network."""
        if self.named is None or not self.fits:
            raise self.unlike()
        return self.named

    @cached_property
    def names(self) -> Mapping[str, str]:
        """The file's names of its tensors by those of the network."""
        places = {id(tensor): name for name, tensor in self.weights.items()}
        found = {name: places[id(tensor)] for name, tensor in (self.named or {}).items()}
        for other, name in other_names(self.network.module).items():
            place = found.get(name, name)
            more = len(place) - len(name)  # of a prefix in the file, or if negative of one here
            found[other] = place[: max(more, 0)] + other[max(-more, 0) :]
        return found


def open_weights(
    weights: Tensors,
    settings: ModelSettings,
    shape: tuple[int, ...],
    likelihood: Likelihood,
    source: str,
    *,
    frozen: str | None = None,
) -> OpenedWeights:
    """Compare the weights of a file with the network that settings build.

    Args:
        weights: as the file has them.
        settings: of the network.
        shape: of a sample.
        likelihood: what the outputs mean.
        source: what to call the file in errors.
        frozen: digest of the weights that the file leaves out, as its card says; None: it has no
            card.

    Raises:
        ModelError: the frozen weights here are others.
    """
    network = build(settings, shape, likelihood.outputs, head=likelihood.head(), seed=0)
    own = single(weights)
    if frozen is not None:
        own = network.completed(own, frozen, source)
    return OpenedWeights(source, settings, network, own, named_as(own, network.module))


def absent_classes(outputs: int, likelihood: Likelihood) -> str:
    """What to do where samples may lack classes that a model has outputs for; empty elsewhere."""
    classes = likelihood.target.classes
    if not classes or outputs <= classes:
        return ""
    return (
        f". The samples have {classes} classes. If they lack some, set data.classes to all "
        f"{outputs}"
    )


def open_dense(
    weights: Tensors,
    shape: tuple[int, ...],
    likelihood: Likelihood,
    source: str,
    *,
    biases: bool | None = None,
    way: str | None = None,
) -> tuple[MLP, dict[str, str]]:
    """A fully connected ReLU network from the shapes of its tensors, in evaluation mode.

    Args:
        weights: as the file has them.
        shape: of a sample.
        likelihood: what the outputs mean.
        source: what to call the file in errors.
        biases: whether layers have biases, 0 where the file has none; None: those that it has.
        way: what to do if inputs or outputs do not fit; by default what samples may lack.

    Returns:
        The network, and the file's names of its tensors by those of the network.

    Raises:
        ModelError: they are of no such network, or it has other inputs or outputs.
    """
    layers = dense_layers(single(weights), source)
    widths = [len(layer.weight) for layer in layers]
    inputs, wanted = layers[0].weight.shape[1], (prod(shape), likelihood.outputs)
    if (inputs, widths[-1]) != wanted:
        raise ModelError(
            f"{source} maps {inputs} inputs to {widths[-1]} outputs, but inputs of {size(shape)} "
            f"and {wanted[1]} outputs are expected"
            f"{absent_classes(widths[-1], likelihood) if way is None else way}"
        )
    module = MLP(inputs, widths[:-1], widths[-1])
    names: dict[str, str] = {}
    places = [(name, part) for name, part in module.named_children() if isinstance(part, nn.Linear)]
    for layer, (place, linear) in zip(layers, places, strict=True):
        names |= {f"{place}.weight": layer.name, f"{place}.bias": layer.bias_name}
        linear.weight = nn.Parameter(layer.weight.clone())
        has = layer.bias is not None if biases is None else biases
        bias = torch.zeros(len(layer.weight)) if layer.bias is None else layer.bias.clone()
        linear.bias = nn.Parameter(bias) if has else None  # type: ignore[assignment]
    return module.eval(), names
