"""The layers of a fused network that least squares can be done for."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from fedbayes.core.tensors import Tensors
from fedbayes.errors import ModelError
from fedbayes.fusion.assembly import OUTPUT, Origin, Origins
from fedbayes.fusion.donors import TracedNetwork
from fedbayes.models.steps import Steps, kind

PLACES = 4096
"""Places (pixels, positions) of a batch that a layer is solved on, at most."""
ENOUGH = 40
"""Places for each feature, after which a layer has seen enough batches."""
LARGEST = 20_000
"""Features of a layer up to which its normal equations are set up: 3.2 GB."""
_NORMS = ("batch_norm", "group_norm", "layer_norm", "rms_norm")


@dataclass(frozen=True, eq=False)
class Fit:
    """A layer that is solved for."""

    node: Node
    weight: str
    bias: str | None
    rows: int
    """The axis of the weight on which its outputs lie."""
    channel: int
    """The axis of its outputs on which units lie, from the end."""
    origin: Origin
    """Of its outputs."""
    features: int
    """Of each of its problems."""
    rest: tuple[Node, Node] | None
    """The sum that its outputs go into, and what they are added to, if that is known."""

    @property
    def name(self) -> str:
        """Of the layer."""
        return self.weight.removesuffix(".weight")

    @property
    def norm(self) -> bool:
        """Whether it is a normalization."""
        return kind(self.node) in _NORMS

    @property
    def said(self) -> Node:
        """The operation whose result has targets."""
        return self.node if self.rest is None else self.rest[0]

    @property
    def outputs(self) -> bool:
        """Whether its outputs stand for those of the network."""
        return bool((self.origin.donor == OUTPUT).any())

    def batches(self, there: int) -> int:
        """How many batches are enough for it."""
        rows = min(self._shape.numel(), PLACES)
        return min(there, -(-max(ENOUGH * self.features, 4 * PLACES) // rows))

    def places(self, number: int) -> Tensor:
        """Some places of its outputs on a batch: indices of all axes but the channels [axes, n]."""
        total = self._shape.numel()
        if total <= PLACES:
            flat = torch.arange(total)
        else:
            flat = torch.randint(total, (PLACES,), generator=torch.Generator().manual_seed(number))
        return torch.stack(torch.unravel_index(flat, self._shape))

    @property
    def _shape(self) -> torch.Size:
        shape = list(self.node.meta["val"].shape)
        del shape[self.channel]
        return torch.Size(shape)


def fits(
    steps: Steps, origins: Origins, tensors: Tensors, own: TracedNetwork, donors: bool
) -> tuple[list[Fit], list[str]]:
    """Layers to solve for, inputs to outputs, and weights of operations that cannot be.

    Args:
        steps: of the fused network.
        origins: of its units.
        tensors: its parameters and buffers.
        own: the wanted network.
        donors: whether clients give units; else only what stands for outputs is solved for.

    Raises:
        ModelError: a layer has more features than least squares are done for.
    """
    seen: set[str] = set()
    looked_up = {  # and as embeddings they are what features are made of
        name
        for held, name in steps.names.items()
        if any(kind(user) == "embedding" for user in held.users)
    }
    found: list[Fit] = []
    left: list[str] = []
    for node in steps.nodes:
        weight, bias = steps.tensor(node, "weight"), steps.tensor(node, "bias")
        given = steps.argument(node, "input")
        if weight is None or weight in seen or not isinstance(given, Node):
            continue
        seen.add(weight)
        channel = _channel(steps, node, tensors[weight])
        rows = int("transpose" in kind(node))
        origin = origins.at(weight, rows)
        outputs = bool((origin.donor == OUTPUT).any())
        if given not in steps.depends and not outputs:
            continue  # the chosen units' own weights are right
        if channel is None or weight in own.across or weight in looked_up:
            left.append(weight)
            continue
        if not donors and not outputs:
            continue
        features = tensors[weight].select(rows, 0).numel()
        if features > LARGEST:
            raise ModelError(
                f"{weight} has {features:,} inputs; the limit of least squares is {LARGEST:,}. "
                "Fuse into a smaller network: another one with like, or a smaller width"
            )
        rest = _other_operand(steps, node)
        found.append(Fit(node, weight, bias, rows, channel, origin, features, rest))
    readers = {axis.tensor: None for group in own.groups.values() for axis in group.readers}
    left += [name for name in readers if donors and name not in seen]
    return found, left


def _other_operand(steps: Steps, node: Node) -> tuple[Node, Node] | None:
    """The sum that a layer's outputs go into, and what they are added to, if that is known."""
    reader = steps.sole_reader(node)
    if reader is None or kind(reader) != "add" or steps.argument(reader, "alpha") not in (1, None):
        return None
    sides = [steps.argument(reader, side) for side in ("self", "other")]
    others = [s for s in sides if not isinstance(s, Node) or steps.handed_on(s) is not node]
    if len(others) != 1 or not isinstance(others[0], Node):
        return None
    other, place = others[0], steps.place
    if other in place and place[other] > place[node]:
        return None
    known = node.meta["val"].shape == other.meta["val"].shape == reader.meta["val"].shape
    return (reader, other) if known else None


def _channel(steps: Steps, node: Node, weight: Tensor) -> int | None:
    """The axis of an operation's outputs that its units lie on, from the end; or None."""
    name = kind(node)
    if name in ("linear", "layer_norm", "rms_norm"):
        return -1 if weight.ndim == 1 + (name == "linear") else None
    if name.startswith("conv"):
        whole = "transpose" not in name or steps.argument(node, "groups") == 1
        return 1 - weight.ndim if whole else None
    if name in ("batch_norm", "group_norm"):
        return 1 - len(node.meta["val"].shape)
    return None


def bundles(found: Sequence[Fit], batches: int, memory: int) -> list[list[Fit]]:
    """Layers in their order, parted so that the targets of each part take so many bytes at most;
    a layer whose own take more is a part.
    """
    parts: list[list[Fit]] = []
    room = 0
    for fit in found:
        rows = fit.batches(batches) * fit.places(0).shape[1]
        size = 4 * rows * len(fit.origin.donor)
        if not parts or size > room:
            parts.append([])
            room = memory
        parts[-1].append(fit)
        room -= size
    return parts
