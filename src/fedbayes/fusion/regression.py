"""A network that says what clients' networks say together, layer by layer, by least squares.

Units of every group are chosen among all clients' (`fedbayes.fusion.choice`). Then, from the
inputs up, each layer is solved for: its inputs are the features of the fused network as far as it
is solved, its outputs those of the chosen units in their own clients' networks, on the same
inputs. The last layer is solved for the teacher's outputs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.fx import Node

from fedbayes.errors import ConfigError, ModelError
from fedbayes.fusion.assembly import FREE, OUTPUT, Origins, assembled, whole_tensors
from fedbayes.fusion.choice import choose
from fedbayes.fusion.donors import Donor, find_donors
from fedbayes.fusion.normal import NormalEquations
from fedbayes.fusion.patches import patches, picked
from fedbayes.fusion.teacher import Teacher
from fedbayes.models.resize import widened, with_weights
from fedbayes.models.steps import Step, Steps, kind
from fedbayes.models.units import Group
from fedbayes.tensors import Tensors

Widths = Mapping[str, int | float] | float
"""Of all groups, as a multiple of the wanted network's; or by a group's layer, as a number of
units (int) or a multiple (float)."""
PLACES = 4096
"""Places (pixels, positions) of a batch that a layer is solved on, at most."""
ENOUGH = 40
"""Places for each feature, after which a layer has seen enough batches."""
LARGEST = 20_000
"""Features of a layer up to which its normal equations are set up: 3.2 GB."""
_NORMS = ("batch_norm", "group_norm", "layer_norm", "rms_norm")


@dataclass(frozen=True)
class _Fit:
    """A layer that is solved for."""

    node: Node
    weight: str
    bias: str | None
    channel: int
    """The axis of its outputs on which units lie, from the end."""

    @property
    def name(self) -> str:
        return self.weight.removesuffix(".weight")


def regress(
    clients: Sequence[nn.Module],
    like: nn.Module,
    teacher: Teacher,
    draw: Callable[[int], Tensor],
    batches: int,
    *,
    widths: Widths = 1.0,
    samples: Sequence[float] | None = None,
    ridge: float = 1e-3,
    watch: Callable[[str], None] | None = None,
) -> nn.Module:
    """Fuse networks by least squares in function space.

    Memory: one batch's activations of one network at a time, 16 (F + 1)² bytes for the layer of
    the most features F, 16 KB for every unit of the largest group, and the teacher's outputs on
    all batches; nothing else grows with the number of batches.

    Args:
        clients: their networks. Those with the graph of `like`, in whatever widths, give units;
            of others only the teacher's outputs count.
        like: the network whose graph the fused one has.
        teacher: what the clients say together, in their order.
        draw: the i-th batch of inputs [n, *shape]; it is asked several times for each, and all
            batches have one size.
        batches: how many there are.
        widths: of the groups of units; never more than all donors' units.
        samples: of each client; what no unit can be followed through is taken whole from the
            client with the most. By default they follow the teacher's shares.
        ridge: of the mean diagonal of the normal equations, toward the chosen units' own weights.
        watch: called with what is being done.

    Raises:
        ModelError: `like` cannot be traced, its code does not bear the widths, batches differ in
            size, or outputs are not of one kind.
        ConfigError: widths name no group, or are none; or there are no batches.
    """
    say = watch or (lambda text: None)
    if batches < 1:
        raise ConfigError(f"{batches} batches of inputs: at least one is needed")
    if not clients:
        raise ModelError("there are no models to fuse")
    example = draw(0)
    own, donors = find_donors(clients, like, example, say)
    with torch.no_grad():
        classes = own.steps.outputs(own.tensors, example).shape[-1]
    shares = _shares(teacher, donors, len(clients), classes)
    weight = list(samples) if samples is not None else None
    weights = [shares[i].sum().item() if weight is None else weight[d.client] for i, d in enumerate(donors)]
    anchor = max(range(len(donors)), key=weights.__getitem__)
    untouched = own.steps.units().untouched
    if untouched and own is not donors[0]:
        say(f"taken whole from one client: {whole_tensors(untouched)}")
    orders = _orders(own, donors, widths, say)
    chosen, whole = choose(donors, orders, draw, batches, shares, anchor)
    if whole:
        say(f"units of one client alone: {', '.join(whole)}")
    origins = Origins(own, donors, chosen)
    tensors = assembled(own, donors, origins, shares, anchor)
    steps = _recorded(own, with_weights(like, tensors), example)
    solver = _Solver(own, donors, origins, steps, tensors, teacher, draw, batches, anchor, shares)
    with torch.no_grad():
        for fit in solver.fits:
            say(f"solving {fit.name}")
            solver.solve(fit, ridge)
    return with_weights(like, solver.tensors)


def _shares(teacher: Teacher, donors: Sequence[Donor], clients: int, classes: int) -> Tensor:
    """Of donors in classes, [donors, K], columns that add to 1."""
    if donors[0].client < 0:
        return torch.ones(1, classes)
    if teacher.shares is None:
        return torch.full((len(donors), classes), 1 / len(donors))
    if teacher.shares.shape != (clients, classes):
        raise ModelError(
            f"the teacher's shares are of {tuple(teacher.shares.shape)} clients and classes; "
            f"there are {clients} and {classes}"
        )
    shares = teacher.shares[[donor.client for donor in donors]].float()
    total = shares.sum(0)
    return torch.where(total > 0, shares / total.clamp(min=1e-12), 1 / len(donors))


def _orders(
    own: Donor, donors: Sequence[Donor], widths: Widths, say: Callable[[str], None]
) -> list[tuple[Group, list[int]]]:
    """Of every group that can be chosen: the units in whose places its new ones stand."""
    able = {layer: group for layer, group in own.groups.items() if not group.output}
    if isinstance(widths, Mapping) and (unknown := [w for w in widths if w not in able]):
        raise ConfigError(
            f"widths: there is no group of units {unknown[0]!r}; there are {', '.join(able)}"
        )
    found = []
    for layer, group in able.items():
        width = widths.get(layer, 1.0) if isinstance(widths, Mapping) else widths
        if not 0 < width < float("inf"):
            raise ConfigError(f"widths: {width} is no width for {layer!r}")
        times = width / group.count if isinstance(width, int) and isinstance(widths, Mapping) else width
        order = widened(group.count, group.cells, times)
        there = [cell for donor in donors for cell in donor.groups[layer].cells]
        kept: list[int] = []
        for cell in dict.fromkeys(group.cells):
            of_cell = [unit for unit in order if group.cells[unit] == cell]
            kept += of_cell[: there.count(cell)]
        if len(kept) < len(order):
            say(f"{layer}: {len(kept)} units, all that there are, in place of {len(order)}")
        if isinstance(widths, Mapping) and isinstance(width, int) and len(kept) != width:
            say(f"{layer}: {len(kept)} units in place of {width}, in equal parts")
        found.append((group, sorted(kept)))
    return found


def _recorded(own: Donor, module: nn.Module, example: Tensor) -> Steps:
    """The operations of the fused network at its widths."""
    fresh = {name: tensor.shape for name, tensor in module.named_parameters()}
    if all(own.tensors[name].shape == shape for name, shape in fresh.items()):
        return own.steps
    try:
        steps = Steps(module, example)
    except ModelError as error:
        raise ModelError(
            f"the network's own code does not bear other widths ({error}); leave them at 1"
        ) from None
    if not steps.alike(own.steps):
        raise ModelError("the network's own code computes otherwise at other widths; leave them at 1")
    return steps


class _Solver:
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

    @cached_property
    def fits(self) -> list[_Fit]:
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
            if channel is None or (given not in depends and not outputs):
                continue  # the chosen units' own weights are right
            if self.donors[0].client < 0 and not outputs:
                continue
            features = self.tensors[weight][0].numel()
            if features > LARGEST:
                raise ModelError(
                    f"{weight} has {features:,} inputs; least squares are done up to {LARGEST:,}"
                )
            found.append(_Fit(node, weight, bias, channel))
        return found

    def solve(self, fit: _Fit, ridge: float) -> None:
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

    def _own_columns(self, fit: _Fit, weight: Tensor) -> Tensor:
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
        if reader is None or kind(reader) != "add" or self.steps.argument(reader, "alpha") not in (1, None):
            return None
        sides = [self.steps.argument(reader, side) for side in ("self", "other")]
        others = [s for s in sides if not isinstance(s, Node) or self.steps.handed_on(s) is not node]
        if len(others) != 1 or not isinstance(others[0], Node):
            return None
        other, place = others[0], self.steps.place
        if other in place and place[other] > place[node]:
            return None
        known = node.meta["val"].shape == other.meta["val"].shape == reader.meta["val"].shape
        return (reader, other) if known else None

    def _features(
        self, fit: _Fit, x: Tensor, number: int, rest: tuple[Node, Node] | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of the fused network on a batch: features [problems, n, F] at some places of the
        layer's outputs, these places, and what its outputs are added to there [n, rows]."""
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
        self, fit: _Fit, x: Tensor, number: int, places: Tensor, rest: tuple[Node, Node] | None
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

    def _from_teacher(
        self, fit: _Fit, node: Node, x: Tensor, number: int, places: Tensor
    ) -> Tensor:
        """The teacher's outputs, if the layer's are the network's; else the donors' at this layer
        by their shares."""
        if self.steps.handed_on(self.steps.output) is node:
            taught = self._taught.get(number)
            return picked(self.teacher(x) if taught is None else taught, fit.channel, places)
        found = torch.zeros(())
        for share, donor in zip(self.shares, self.donors, strict=True):
            value, _ = self._said(donor, node, x, fit.channel, places, False)
            found = found + share * (value - value.mean(-1, keepdim=True))
        return found

    def _said(
        self, donor: Donor, node: Node, x: Tensor, channel: int, places: Tensor, on: bool
    ) -> tuple[Tensor, Tensor]:
        """What a donor says at some places of an operation's outputs, [n, channels], and, if it
        goes on to the end, its outputs."""
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
    def _before_last(self) -> _Fit | None:
        """The layer before the last, if what clients say in the end can be heard while it is
        solved for: all of them give units, and the teacher is made of nothing else."""
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
    solved for."""
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
