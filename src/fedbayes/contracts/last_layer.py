"""The last layer of a network, for methods that treat it apart from the layers below."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedbayes.contracts.run import Federation
from fedbayes.core.tensors import Tensors
from fedbayes.errors import ModelError


@dataclass(frozen=True)
class FinalLayer:
    """A linear layer whose outputs are the network's."""

    path: str
    """Its module's name."""
    outputs: int
    inputs: int
    """Inputs, with a constant 1 where it has a bias."""
    weight: str
    bias: str | None

    @property
    def size(self) -> int:
        """d, the number of its weights."""
        return self.outputs * self.inputs

    @property
    def names(self) -> list[str]:
        """Names of its tensors."""
        return [self.weight, *([self.bias] if self.bias else [])]

    def flat(self, weights: Tensors) -> Tensor:
        """The weights of the layer as one vector [d], float64."""
        matrix = weights[self.weight].double()
        if self.bias is not None:
            matrix = torch.cat([matrix, weights[self.bias].double()[:, None]], dim=1)
        return matrix.reshape(-1)

    def tensors(self, flat: Tensor, like: torch.dtype) -> Tensors:
        """The inverse of `flat`."""
        matrix = flat.reshape(self.outputs, self.inputs).to(like)
        if self.bias is None:
            return {self.weight: matrix}
        return {self.weight: matrix[:, :-1].contiguous(), self.bias: matrix[:, -1].contiguous()}

    @torch.no_grad()
    def features(self, model: Tensors, x: Tensor, run: Federation) -> tuple[Tensor, Tensor]:
        """What the layer sees [n, inputs], and outputs that others append [n, more]; float64.

        Args:
            model: weights of the network; those of this layer do not count.
            x: inputs [n, ...].
            run: of which network.

        Raises:
            ModelError: the layer does not see a row for each sample, or outputs are not its own.
        """
        network, found = run.network, list[tuple[Tensor, Tensor]]()
        weights = {n: t for n, t in model.items() if n in network.initial}
        like = {n: torch.zeros_like(network.initial[n]) for n in self.names}
        module = network.module.get_submodule(self.path)
        with module.register_forward_hook(lambda _, i, o: found.append((i[0], o))):
            outputs = network(network.prepare({**weights, **like}), x)
        if not found or found[-1][0].ndim != 2:
            raise ModelError(f"the last layer {self.path!r} does not get one row per sample")
        if bool(outputs[:, : self.outputs].any()):  # of a layer of zeros
            raise ModelError(
                "the method needs a network that returns the outputs of its last layer"
            )
        seen = torch.cat([one[0] for one in found]).double().cpu()
        if self.bias is not None:
            seen = torch.cat([seen, torch.ones(len(seen), 1, dtype=torch.float64)], dim=1)
        return seen, outputs[:, self.outputs :].double().cpu()


def last_layer(run: Federation, method: str, other: str) -> FinalLayer:
    """The last layer of the network of a run; `method` needs it, and the method `other` does not.

    Raises:
        ModelError: it is no linear layer that trains.
    """
    network = run.network
    path = next(reversed(network.layers), "")
    module = network.module.get_submodule(path)
    if not isinstance(module, nn.Linear):
        raise ModelError(
            f"{method} needs a last layer that is linear, got {type(module).__name__} "
            f"({path or 'the network'}). Choose another network, or method.name = {other!r}"
        )
    biased = module.bias is not None
    start = f"{path}." if path else ""
    names = [f"{start}weight", *([f"{start}bias"] if biased else [])]
    if missing := [n for n in names if n not in network.initial]:
        raise ModelError(f"{method} needs a last layer that trains, and {missing[0]} is frozen")
    width, inputs = network.initial[names[0]].shape
    return FinalLayer(path, width, inputs + biased, names[0], names[1] if biased else None)
