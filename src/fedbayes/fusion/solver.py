"""A fused network's layers, solved for one by one from the inputs up.

The features of a layer are those of the fused network as far as it is solved; its targets are
what the chosen units say in their own clients' networks, on the same inputs. A layer whose outputs
are added to something known (a residual stream) makes up for what that lacks. The last layer is
solved for the teacher's outputs. A normalization's scale and shift are solved for as well, its
running statistics are the units' own, so that with all units of all clients nothing changes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.fx import Node

from fedbayes.errors import ModelError
from fedbayes.fusion.assembly import FREE, OUTPUT, Origins
from fedbayes.fusion.donors import Donor
from fedbayes.fusion.normal import NormalEquations
from fedbayes.fusion.patches import patches, picked
from fedbayes.fusion.teacher import Teacher
from fedbayes.likelihoods import Classes
from fedbayes.models.steps import Step, Steps, kind
from fedbayes.tensors import Tensors

PLACES = 4096
"""Places (pixels, positions) of a batch that a layer is solved on, at most."""
ENOUGH = 40
"""Places for each feature, after which a layer has seen enough batches."""
LARGEST = 20_000
"""Features of a layer up to which its normal equations are set up: 3.2 GB."""
_NORMS = ("batch_norm", "group_norm", "layer_norm", "rms_norm")


@dataclass(frozen=True)
class Fit:
    """A layer that is solved for."""

    node: Node
    weight: str
    bias: str | None
    channel: int
    """The axis of its outputs on which units lie, from the end."""

    @property
    def name(self) -> str:
        """Of the layer."""
        return self.weight.removesuffix(".weight")


class Solver:
    """The fused network while it is solved for."""

    def __init__(
        self,
        own: Donor,
        donors: Sequence[Donor],
        origins: Origins,
        steps: Steps,
        tensors: Tensors,
        teacher: Teacher,
        draw: Callable[[int], Tensor],
        batches: int,
        anchor: int,
        shares: Tensor,
    ) -> None:
        self.own, self.donors, self.origins, self.steps = own, donors, origins, steps
        self.tensors, self.teacher, self.draw, self.batches = tensors, teacher, draw, batches
        self.anchor, self.shares = anchor, shares
        self._taught: dict[int, Tensor] = {}
        self.left: list[str] = []
        """Weights of operations that are not solved for, once `fits` are known."""

    @cached_property
    def fits(self) -> list[Fit]:
        """Layers to solve for, inputs to outputs."""
        depends, seen, found = self.steps.depends, set[str](), []
        for node in self.steps.nodes:
            weight, bias = self.steps.tensor(node, "weight"), self.steps.tensor(node, "bias")
            given = self.steps.argument(node, "input")
            if weight is None or weight in seen or not isinstance(given, Node):
                continue
            seen.add(weight)
            channel = _channel(node, self.tensors[weight])
            rows = self.origins.at(weight, 0)
            outputs = bool((rows.donor == OUTPUT).any())
            if given not in depends and not outputs:
                continue  # the chosen units' own weights are right
            if channel is None:
                self.left.append(weight)
                continue
            if self.donors[0].client < 0 and not outputs:
                continue
            features = self.tensors[weight][0].numel()
            if features > LARGEST:
                raise ModelError(
                    f"{weight} has {features:,} inputs; least squares are done up to {LARGEST:,}"
                )
            found.append(Fit(node, weight, bias, channel))
        return found

    def solve(self, fit: Fit, ridge: float) -> None:
        """Solve for one layer."""
        old = self.tensors[fit.weight]
        norm = kind(fit.node) in _NORMS
        split = 1 if norm else int(self.steps.argument(fit.node, "groups") or 1)
        if norm:
            start = old[:, None, None]
        else:
            kept = self._own_columns(fit, old)
            start = kept.reshape(split, len(old) // split, -1).mT
        shift = start.new_zeros(len(start), 1, start.shape[2])
        if fit.bias is not None:
            shift = self.tensors[fit.bias].reshape(shift.shape)
        equations = NormalEquations(*start.shape)
        rest = self._other_operand(fit.node)
        for number in range(self.batches):
            x = self.draw(number)
            features, places, before = self._features(fit, x, number, rest)
            targets = self._targets(fit, x, number, places, rest)
            if before is not None:
                targets = targets - before
            n = len(targets)
            if norm:
                targets = targets.T[:, :, None]
            else:
                targets = targets.reshape(n, split, -1).transpose(0, 1)
            # What is left by the start: the sums' rounding is that of a small change.
            equations.add(features, targets - features @ start - shift)
            if equations.rows >= max(ENOUGH * start.shape[1], 4 * PLACES):
                break
        weight, bias = equations.solve(ridge, intercept=fit.bias is not None)
        self.tensors[fit.weight] = (start + weight).mT.reshape(old.shape)
        if fit.bias is not None:
            self.tensors[fit.bias] = (shift[:, 0] + bias).reshape(-1)

    def _own_columns(self, fit: Fit, weight: Tensor) -> Tensor:
        """The weights without those between units of one client and what another's give whole."""
        if weight.shape[1] == 1:
            return weight
        rows, columns = (self.origins.at(fit.weight, axis).donor for axis in (0, 1))
        stranger = (rows[:, None] >= 0) & (rows[:, None] != self.anchor) & (columns == FREE)
        stranger |= (rows[:, None] == FREE) & (columns >= 0) & (columns != self.anchor)
        return weight * ~stranger.reshape(*stranger.shape, *[1] * (weight.ndim - 2))

    def _other_operand(self, node: Node) -> tuple[Node, Node] | None:
        """The sum that a layer's outputs go into, and what they are added to, if that is known."""
        reader = self.steps.sole_reader(node)
        if (
            reader is None
            or kind(reader) != "add"
            or self.steps.argument(reader, "alpha") not in (1, None)
        ):
            return None
        sides = [self.steps.argument(reader, side) for side in ("self", "other")]
        others = [
            s for s in sides if not isinstance(s, Node) or self.steps.handed_on(s) is not node
        ]
        if len(others) != 1 or not isinstance(others[0], Node):
            return None
        other, place = others[0], self.steps.place
        if other in place and place[other] > place[node]:
            return None
        known = node.meta["val"].shape == other.meta["val"].shape == reader.meta["val"].shape
        return (reader, other) if known else None

    def _features(
        self, fit: Fit, x: Tensor, number: int, rest: tuple[Node, Node] | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of the fused network on a batch: features [problems, n, F] at some places of the
        layer's outputs, these places, and what its outputs are added to there [n, rows].
        """
        step = self._until(self.steps, self.tensors, x, fit.node)
        shape = step.value.movedim(fit.channel, -1).shape[:-1]
        places = _places(shape, number)
        before = None if rest is None else picked(step.values[rest[1]], fit.channel, places)
        given = step.arguments
        if kind(fit.node) in _NORMS:
            plain = {**given, "weight": None} | ({"bias": None} if "bias" in given else {})
            value = fit.node.target(**plain)  # type: ignore[operator]
            return picked(value, fit.channel, places).T[:, :, None], places, before
        if kind(fit.node) == "linear":
            return picked(given["input"], -1, places)[None], places, before
        return patches(given, shape, places), places, before

    def _targets(
        self, fit: Fit, x: Tensor, number: int, places: Tensor, rest: tuple[Node, Node] | None
    ) -> Tensor:
        """What the layer is to say at these places, [n, rows]."""
        origin = self.origins.at(fit.weight, 0)
        node = fit.node if rest is None else rest[0]
        if bool((origin.donor == OUTPUT).any()):
            return self._from_teacher(fit, node, x, number, places)
        found = torch.zeros(places.shape[1], len(origin.donor))
        donors = torch.where(origin.donor == FREE, self.anchor, origin.donor)
        listening = fit is self._before_last and number not in self._taught
        outputs = []
        for at, donor in enumerate(self.donors):
            rows = (donors == at).nonzero()[:, 0]
            if len(rows) or listening:
                said, output = self._said(donor, node, x, fit.channel, places, listening)
                found[:, rows] = said[:, origin.entry[rows]]
                outputs.append(output)
        if listening:
            self._taught[number] = self.teacher.of(outputs)
        return found

    def _from_teacher(self, fit: Fit, node: Node, x: Tensor, number: int, places: Tensor) -> Tensor:
        """The teacher's outputs, if the layer's are the network's; else the donors' at this layer
        by their shares, which are of classes where it tells one for each.
        """
        if self.steps.handed_on(self.steps.output) is node:
            taught = self._taught.get(number)
            return picked(self.teacher(x) if taught is None else taught, fit.channel, places)
        found = torch.zeros(())
        for share, donor in zip(self.shares, self.donors, strict=True):
            value, _ = self._said(donor, node, x, fit.channel, places, False)
            if self._classes and value.shape[-1] == len(share):
                found = found + share * (value - value.mean(-1, keepdim=True))
            else:
                found = found + share.mean() * value
        return found

    @cached_property
    def _classes(self) -> bool:
        """Whether outputs of the network are of classes."""
        return isinstance(self.teacher.likelihood(self.shares.shape[1]), Classes)

    def _said(
        self, donor: Donor, node: Node, x: Tensor, channel: int, places: Tensor, on: bool
    ) -> tuple[Tensor, Tensor]:
        """What a donor says at some places of an operation's outputs, [n, channels], and, if it
        goes on to the end, its outputs.
        """
        steps, found = donor.steps, torch.empty(0)
        for step in steps.run(donor.tensors, x):
            if step.node is steps.nodes[self.steps.place[node]]:
                found = picked(step.value, channel, places)
                if not on:
                    break
            if step.node is steps.output:
                return found, step.value
        return found, found

    @cached_property
    def _before_last(self) -> Fit | None:
        """The layer before the last, if what clients say in the end can be heard while it is
        solved for: all of them give units, and the teacher is made of nothing else.
        """
        if len(self.fits) < 2 or len(self.donors) < len(self.teacher.clients):
            return None
        x = self.draw(0)
        outputs = [donor.steps.outputs(donor.tensors, x) for donor in self.donors]
        if not torch.allclose(self.teacher.of(outputs), self.teacher(x), rtol=1e-4, atol=1e-4):
            return None
        return self.fits[-2]

    @staticmethod
    def _until(steps: Steps, tensors: Tensors, x: Tensor, node: Node) -> Step:
        """The step at which an operation is carried out."""
        passed = steps.run(tensors, x)
        return next(step for step in passed if step.node is node)


def _channel(node: Node, weight: Tensor) -> int | None:
    """The axis of an operation's outputs on which its units lie, from the end; None: it is not
    solved for.
    """
    name = kind(node)
    if name in ("linear", "layer_norm", "rms_norm"):
        return -1 if weight.ndim == 1 + (name == "linear") else None
    if name in ("conv1d", "conv2d", "conv3d"):
        return 1 - weight.ndim
    if name in ("batch_norm", "group_norm"):
        return 1 - len(node.meta["val"].shape)
    return None


def _places(shape: Sequence[int], number: int) -> Tensor:
    """Some places of outputs of this shape, without their channels: indices [axes, n]."""
    total = torch.Size(shape).numel()
    if total <= PLACES:
        flat = torch.arange(total)
    else:
        flat = torch.randint(total, (PLACES,), generator=torch.Generator().manual_seed(number))
    return torch.stack(torch.unravel_index(flat, tuple(shape)))
