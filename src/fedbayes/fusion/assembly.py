"""A fused network's first weights: those of the chosen units, each from its own client.

Between units of one client stand that client's weights, between units of two clients zeros: with
all units of all clients this is their networks side by side. Rows of the outputs stand by the
clients' shares in the classes, centred: their sum over clients is the teacher's but for its levels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbayes.core.tensors import Tensors
from fedbayes.fusion.choice import UnitChoice
from fedbayes.fusion.donors import TracedNetwork
from fedbayes.fusion.shares import Shares
from fedbayes.models.resize import placed

FREE, OUTPUT = -1, -2


@dataclass(frozen=True)
class Origin:
    """Where the entries of an axis come from."""

    donor: Tensor
    """Which donor, int64 [entries]; FREE: any, such as inputs; OUTPUT: outputs of the network."""
    entry: Tensor
    """Which entry of the donor's axis, int64 [entries]."""
    parts: "Parts"
    """What the entries are sums of."""

    def of(self, donor: int) -> tuple[Tensor, Tensor, Tensor]:
        """The places that a donor has a part in, its entries for them, and what these count for."""
        own = ((self.parts.donor == donor) | (self.parts.donor < 0)).nonzero()[:, 0]
        return self.parts.place[own], self.parts.entry[own], self.parts.share[own]


@dataclass(frozen=True)
class Parts:
    """Entries of donors that entries of the fused network are sums of; tensors [parts]."""

    place: Tensor
    """The entry of the fused network, int64."""
    donor: Tensor
    """As in `Origin`."""
    entry: Tensor
    """As in `Origin`."""
    share: Tensor
    """What it counts for; 1 where nothing is merged."""


class Origins:
    """Where every entry of every tensor of the fused network comes from: of the wanted network, or
    of donors for chosen groups.
    """

    def __init__(
        self, own: TracedNetwork, donors: Sequence[TracedNetwork], chosen: Sequence[UnitChoice]
    ) -> None:
        self._own, self._donors, self._chosen = own, donors, chosen
        self._placed = placed([(one.group, one.order) for one in chosen])
        self._outputs = {
            (axis.tensor, axis.axis): axis.index
            for group in own.groups.values()
            if group.output
            for axis in group.owned
        }
        self._found: dict[tuple[str, int], Origin] = {}

    def at(self, tensor: str, axis: int) -> Origin:
        """Of one axis."""
        key = (tensor, axis)
        if key not in self._found:
            self._found[key] = self._origin(tensor, axis)
        return self._found[key]

    def _origin(self, tensor: str, axis: int) -> Origin:
        place = self._placed.get(tensor, {}).get(axis)
        if place is None:
            size = self._own.tensors[tensor].shape[axis]
            donor, entry = torch.full((size,), FREE), torch.arange(size)
            if (outputs := self._outputs.get((tensor, axis))) is not None:
                donor[outputs >= 0] = OUTPUT
            return Origin(donor, entry, Parts(entry, donor, entry, torch.ones(size)))
        donor, entry = torch.full_like(place.entry, FREE), place.entry.clone()
        parts: list[tuple[int, int, int, float]] = []
        for here, number in enumerate(place.group.tolist()):
            if number < 0:
                parts.append((here, FREE, int(entry[here]), 1.0))
                continue
            one, slot = self._chosen[number], int(place.slot[here])
            rank = int(place.rank[here])

            key = (one.group.layer, tensor, axis)
            made_of = one.made_of[slot] if one.makes(tensor, axis) else [one.alone(slot)]
            for giver, unit, share in made_of:
                parts.append((here, giver, self._donors[giver].entries[key][unit][rank], share))
            giver, unit, _ = one.alone(slot)
            donor[here], entry[here] = giver, self._donors[giver].entries[key][unit][rank]
        columns = zip(*parts, strict=True)
        where, donors, entries = (torch.tensor(next(columns), dtype=torch.int64) for _ in range(3))
        shares = torch.tensor(next(columns))
        return Origin(donor, entry, Parts(where, donors, entries, shares))


def assembled(
    own: TracedNetwork,
    donors: Sequence[TracedNetwork],
    origins: Origins,
    shares: Shares,
    anchor: int,
) -> Tensors:
    """The fused network's first weights; the donor `anchor` gives what belongs to no group."""
    found: Tensors = {}
    for name, old in own.tensors.items():
        axes = [origins.at(name, axis) for axis in range(old.ndim)]
        fresh = old.new_zeros([len(axis.donor) for axis in axes])
        grouped = any(bool((axis.donor >= 0).any()) for axis in axes)
        outputs = [a for a, axis in enumerate(axes) if bool((axis.donor == OUTPUT).any())]
        for number, donor in enumerate(donors):
            if not (grouped or outputs) and number != anchor:
                continue
            here, there, counts = (
                zip(*(axis.of(number) for axis in axes), strict=True) if axes else ((), (), ())
            )
            part = _picked(donor.tensors[name], there)
            for axis, share in enumerate(counts):
                if bool((share != 1).any()):
                    part = part * share.reshape([-1 if a == axis else 1 for a in range(old.ndim)])
            if outputs:
                part = shares.part(number, part, outputs[0])
            if part.numel() and axes:
                fresh.index_put_(_grid(here), part, accumulate=True)
            elif part.numel():
                fresh = part
        free = [(axis.donor == FREE).nonzero()[:, 0] for axis in axes]
        if grouped and all(map(len, free)):  # of no donor, so added up of all
            fresh[_grid(free)] = _picked(donors[anchor].tensors[name], free)
        found[name] = fresh
    return found


def _picked(tensor: Tensor, entries: Sequence[Tensor]) -> Tensor:
    for axis, index in enumerate(entries):
        tensor = tensor.index_select(axis, index)
    return tensor


def _grid(places: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Places as an index of the block that they span."""
    return tuple(
        place.reshape([-1 if at == axis else 1 for at in range(len(places))])
        for axis, place in enumerate(places)
    )


def whole_tensors(untouched: Mapping[str, str]) -> str:
    """A message about tensors copied from one client."""
    shown = [f"{name} ({why})" for name, why in untouched.items()]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")
