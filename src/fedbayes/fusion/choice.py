"""Which of the clients' units a fused network keeps.

Of a group's units in all donors, those are chosen whose activations say most of the others'. With
C the second moments of all units' activations over draws, each times the unit's importance on
both sides, the choice is a greedy pivoted Cholesky factorization: the unit with the largest part
of C that those chosen before leave unexplained, again and again. A unit's importance is the root
mean square of the derivative of what its client adds to the teacher (by class shares), so it is
carried from the outputs down through whatever is between.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from fedbayes.data.progress import progress
from fedbayes.fusion.donors import TracedNetwork
from fedbayes.fusion.merging import Members, merge
from fedbayes.fusion.shares import Shares
from fedbayes.models.steps import kind
from fedbayes.models.units import Axis, Group

SAMPLES = 1024
"""Places (draws, pixels, positions) at which all units of a group are compared: this many, or
twice as many as units are wanted."""


@dataclass(frozen=True)
class UnitChoice:
    """Units of a group of the fused network."""

    group: Group
    """As the wanted network has it."""
    order: list[int]
    """The wanted network's units in whose places they stand, in rising order."""
    donor: Tensor
    """Of each: which donor it comes from, int64 [units]."""
    unit: Tensor
    """And which of its units it is, int64 [units]."""
    members: Members | None = None
    """All units that are merged into these, themselves among them; None: they stand alone."""

    @property
    def without(self) -> "UnitChoice":
        """The same units, each by itself."""
        return replace(self, members=None)

    def alone(self, slot: int) -> tuple[int, int, float]:
        """TracedNetwork, unit and share of a chosen unit by itself."""
        return int(self.donor[slot]), int(self.unit[slot]), 1.0

    @cached_property
    def made_of(self) -> list[list[tuple[int, int, float]]]:
        """Of each chosen unit: donors, units and shares of what is merged into it."""
        if self.members is None:
            return [[self.alone(slot)] for slot in range(len(self.order))]
        found: list[list[tuple[int, int, float]]] = [[] for _ in self.order]
        for slot, *member in zip(*(t.tolist() for t in vars(self.members).values()), strict=True):
            found[slot].append(tuple(member))
        return found

    def makes(self, tensor: str, axis: int) -> bool:
        """Whether the entries of an axis of a parameter make the units."""
        return any((own.tensor, own.axis) == (tensor, axis) for own in self.group.owned)


def choose(
    donors: Sequence[TracedNetwork],
    orders: Sequence[tuple[Group, list[int]]],
    draw: Callable[[int], Tensor],
    batches: int,
    shares: Shares,
    anchor: int,
    merging: bool = True,
) -> tuple[list[UnitChoice], list[str]]:
    """Choose the units of every group.

    Args:
        donors: networks whose units there are.
        orders: groups of the wanted network, each with the units in whose places the new ones
            stand.
        draw: batches of inputs by number.
        batches: how many to look at.
        shares: of donors in outputs.
        anchor: the donor that gives all units of a group whose activations are not to be had.
        merging: whether others are merged into the chosen neurons of a layer where that explains
            more of all neurons' activations. Filters never are: their mean is blurred.

    Returns:
        The choice, and the groups that the anchor gives whole.
    """
    samples = max(SAMPLES, *(2 * len(order) for _, order in orders), 0)
    groups = [group for group, _ in orders]
    moments = activations(donors, groups, draw, batches, shares, samples)
    chosen, whole = [], []
    for group, order in orders:
        own = [donor.groups[group.layer] for donor in donors]
        seen = moments.get(group.layer)
        if seen is None:
            whole.append(group.layer)
            chosen.append(_whole(group, own[anchor], anchor))
            continue
        cells = torch.tensor([cell for of in own for cell in of.cells])
        room = dict.fromkeys(group.cells, 0)
        for place in order:
            room[group.cells[place]] += 1
        factor, importance = (torch.cat(parts) for parts in zip(*seen, strict=True))
        factor = factor * importance[:, None]
        picked = pivots(factor, cells, room)
        of_cell: dict[int, list[int]] = {cell: [] for cell in room}
        for number in picked:
            of_cell[int(cells[number])].append(number)
        # Places of a cell are filled in the order of the choice.
        taken = torch.tensor([of_cell[group.cells[place]].pop(0) for place in order])
        starts = torch.tensor([0] + [of.count for of in own]).cumsum(0)
        merged = None
        if merging and group.kind == "dense" and all(map(_single, own)):
            merged = merge(factor, importance, taken, cells)
        members = None
        if merged is not None and merged.better:
            inside = (merged.slot >= 0).nonzero()[:, 0]
            members = Members(merged.slot[inside], *_split(inside, starts), merged.share[inside])
        chosen.append(UnitChoice(group, order, *_split(taken, starts), members))
    return chosen, whole


def _single(group: Group) -> bool:
    """Whether units are one number each, and not a head of attention or a cell with gates."""
    entries = [[unit for unit in axis.units if unit >= 0] for axis in group.owned]
    return all(len(units) == len(set(units)) for units in entries)


def _split(numbers: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Donors, and their units, of units by number among those of all donors."""
    donor = torch.searchsorted(starts, numbers, right=True) - 1
    return donor, numbers - starts[donor]


def _whole(group: Group, of: Group, donor: int) -> UnitChoice:
    """As many units of one donor as the wanted network has, or as there are."""
    left = {cell: [u for u in range(of.count) if of.cells[u] == cell] for cell in set(of.cells)}
    order, unit = [], []
    for place in range(group.count):
        if left[group.cells[place]]:
            order.append(place)
            unit.append(left[group.cells[place]].pop(0))
    return UnitChoice(group, order, torch.full((len(order),), donor), torch.tensor(unit))


def pivots(factor: Tensor, cells: Tensor, room: Mapping[int, int]) -> list[int]:
    """The pivots of a greedy Cholesky factorization of C = A Aᵀ, in their order.

    Args:
        factor: A, a row for each unit, [N, samples].
        cells: of the units, [N].
        room: how many units of each cell are wanted; no more than there are.
    """
    left = factor.square().sum(1)
    closed = torch.zeros(len(factor), dtype=torch.bool)
    free = dict(room)
    for cell, count in free.items():
        if count == 0:
            closed |= cells == cell
    smallest = 1e-10 * float(left.max())
    basis = factor.new_zeros(sum(room.values()), factor.shape[1])
    found: list[int] = []
    for step in range(len(basis)):
        pivot = int(left.masked_fill(closed, -torch.inf).argmax())
        found.append(pivot)
        closed[pivot] = True
        cell = int(cells[pivot])
        free[cell] -= 1
        if free[cell] == 0:
            closed |= cells == cell
        rest = factor[pivot]
        for _ in range(2):  # twice, against the rounding of the first
            rest = rest - basis[:step].T @ (basis[:step] @ rest)
        norm = rest.norm()
        if norm.square() > smallest:
            basis[step] = rest / norm
            left = (left - (factor @ basis[step]).square()).clamp(min=0)
    return found


def activations(
    donors: Sequence[TracedNetwork],
    groups: Sequence[Group],
    draw: Callable[[int], Tensor],
    batches: int,
    shares: Shares,
    samples: int,
) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """A sample of the units' activations where weights read them, and their importance.

    Args:
        donors: networks whose units there are.
        groups: of the wanted network.
        draw: batches of inputs by number.
        batches: how many there are; no more are drawn than the sample wants.
        shares: of donors in outputs.
        samples: about how many places to compare units at.

    Returns:
        By group, of every donor [units, samples] at the same draws and places, and [units];
        groups that no linear layer or convolution reads are left out.
    """
    batches = min(batches, -(-samples // len(draw(0))))
    sampled: dict[str, list[list[Tensor]]] = {g.layer: [[] for _ in donors] for g in groups}
    squares: dict[str, list[Tensor]] = {
        g.layer: [torch.zeros(d.groups[g.layer].count) for d in donors] for g in groups
    }
    with progress("choosing units", batches * len(donors)) as advance:
        for number in range(batches):
            x = draw(number)
            for at, donor in enumerate(donors):
                for layer, kept, grade in _looked(
                    donor, groups, x, partial(shares.part, at), number, samples // batches
                ):
                    sampled[layer][at].append(kept)
                    squares[layer][at] += grade
                advance(1)
    return {
        layer: [
            (torch.cat(parts, dim=1), (square / batches).sqrt())
            for parts, square in zip(of_donors, squares[layer], strict=True)
        ]
        for layer, of_donors in sampled.items()
        if of_donors[0]
    }


def _looked(
    donor: TracedNetwork,
    groups: Sequence[Group],
    x: Tensor,
    part: Callable[[Tensor], Tensor],
    number: int,
    samples: int,
) -> list[tuple[str, Tensor, Tensor]]:
    """Of one donor and batch: activations by reader, and squares of what depends on them."""
    rng = torch.Generator().manual_seed(number)
    steps = donor.steps
    wanted: dict[str, list[tuple[str, Axis]]] = {}
    for group in groups:
        for axis in donor.groups[group.layer].readers:
            if axis.tensor in donor.across:
                continue  # at the same places donors have units of their own
            wanted.setdefault(axis.tensor, []).append((group.layer, axis))
    seen: list[tuple[str, Axis, Tensor, int]] = []
    first = steps.first
    tensors = {
        name: t.clone().requires_grad_() if name in first else t
        for name, t in donor.tensors.items()
    }
    output = x
    with torch.enable_grad():
        for step in steps.run(tensors, x):
            if step.node is steps.output:
                output = step.value
            name = steps.tensor(step.node, "weight")
            channels = _channels(kind(step.node))
            if name not in wanted or channels is None:
                continue
            value = step.arguments["input"]
            value.retain_grad()
            space = step.arguments["weight"].ndim - 2
            seen += [(y, a, value, -1 - space * channels) for y, a in wanted[name]]
        signs = torch.randint(2, output.shape, generator=rng) * 2.0 - 1
        (part(output) * signs).sum().backward()  # type: ignore[no-untyped-call]
    found = []
    readers = {layer: sum(other == layer for other, *_ in seen) for layer, *_ in seen}
    for layer, axis, value, at in seen:
        count = donor.groups[layer].count
        blocks = value.shape[at] // len(axis.units)  # that a convolution in groups reads alike
        along = replace(axis, axis=1, units=axis.units * blocks)
        rows = value.detach().movedim(at, -1).reshape(-1, value.shape[at])
        assert value.grad is not None
        slopes = value.grad.movedim(at, -1).reshape(-1, value.shape[at])
        own = max(sum(u >= 0 for u in along.units) // count, 1)
        wish = max(samples // (readers[layer] * own), 1)
        picked = torch.randperm(len(rows), generator=torch.Generator().manual_seed(number))
        kept = along.rows(rows[picked[:wish]], count)
        grade = along.rows(slopes.square().mean(0)[None], count).mean(1)
        found.append((layer, kept, grade / readers[layer]))
    return found


def _channels(name: str) -> int | None:
    """Whether units lie before the places of an image (1) or last (0); None: not followed."""
    if name.startswith(("conv1d", "conv2d", "conv3d", "conv_transpose")):
        return 1
    return 0 if name == "linear" else None
