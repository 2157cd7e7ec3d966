"""Tensors of networks of one graph on the coordinates of one fused network.

A tensor's axis has entries of units of groups (`fedbayes.models.units`), and *free* ones: inputs,
taps of a filter, rows of an embedding, whatever can change places with nothing. Once it is known
which global unit each client's units are, each entry has a place on the global axis: that of its
unit and of its rank among the unit's entries, or its own place among the free ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedbayes.errors import ModelError
from fedbayes.fusion.donors import TracedNetwork
from fedbayes.models.units import Group

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

Key = tuple[str, int]
"""A tensor by name, and one of its axes."""


@dataclass(frozen=True)
class Places:
    """Which global units of a group the clients' units are."""

    of: tuple[Indices, ...]
    """Of each client, the global unit of each of its units, all different [units]."""
    cells: Indices
    """The cell of each global unit [J]."""

    @property
    def size(self) -> int:
        """Number of global units, J."""
        return len(self.cells)

    @property
    def members(self) -> Indices:
        """Clients that share each global unit [J]."""
        members: Indices = np.bincount(np.concatenate(self.of), minlength=self.size)
        return members

    def owned(self, client: int) -> Array:
        """1 for the client's global units, 0 for others [J]."""
        owned = np.zeros(self.size)
        owned[self.of[client]] = 1.0
        return owned


Matched = Sequence[Places | None]
"""By group; None where its units have no places yet."""


@dataclass(frozen=True)
class PlacedEntries:
    """An axis of a client's tensor."""

    group: Indices
    """Number of the group of each entry; -1 for free ones [entries]."""
    unit: Indices
    """Its unit there; -1 for free ones."""
    rank: Indices
    """Which of its unit's entries it is; of free ones, which of these."""


class Coordinates:
    """What the tensors of clients' networks of one graph are on global coordinates; `names` are for
    errors.

    Raises:
        ModelError: units have more entries in one network than in another, or free axes differ.
    """

    def __init__(self, donors: Sequence[TracedNetwork], names: Sequence[str]) -> None:
        self.donors = donors
        self.layers = list(donors[0].groups)
        """Groups by their layer; elsewhere they are numbers in this order."""
        self.groups: list[list[Group]] = [
            [donor.groups[layer] for donor in donors] for layer in self.layers
        ]
        """By group, that of each client."""
        self.entries = [_entries(donor, self.layers) for donor in donors]
        """Of each client."""
        self.readers: frozenset[Key] = frozenset(
            (axis.tensor, axis.axis) for own in donors[0].groups.values() for axis in own.readers
        )
        """Axes on which a tensor reads units."""
        self._per_unit = {key: self._counted(key, names) for key in self.entries[0]}
        self._free = {key: self._alike(key, names) for key in self.entries[0]}

    @cached_property
    def outputs(self) -> frozenset[int]:
        """Groups of the networks' outputs."""
        return frozenset(n for n, own in enumerate(self.groups) if own[0].output)

    def keys(self, tensor: str) -> list[Key]:
        """A tensor's axes."""
        return [(tensor, axis) for axis in range(self.donors[0].tensors[tensor].ndim)]

    def on(self, key: Key) -> list[int]:
        """Groups that have units on an axis."""
        return [int(g) for g in np.unique(self.entries[0][key].group) if g >= 0]

    def units(self, client: int, group: int, cell: int) -> Indices:
        """A client's units of a group that are in a cell."""
        return np.flatnonzero(np.array(self.groups[group][client].cells) == cell)

    def per_unit(self, key: Key, group: int, cell: int) -> int:
        """Entries that each unit of a cell has on an axis."""
        return self._per_unit[key][group].get(cell, 0)

    def lengths(self, key: Key, group: int, places: Places) -> Indices:
        """PlacedEntries of each global unit on an axis [J]."""
        cells, index = np.unique(places.cells, return_inverse=True)
        return np.array([self.per_unit(key, group, int(cell)) for cell in cells])[index]

    def starts(self, key: Key, matched: Matched) -> tuple[dict[int, Indices], int]:
        """Where units begin on the global axis, by group [J], and its length.

        Groups follow one another, and free entries stand behind them.
        """
        begin, found = 0, {}
        for group in self.on(key):
            places = matched[group]
            assert places is not None
            lengths = self.lengths(key, group, places)
            found[group] = begin + np.cumsum(lengths) - lengths
            begin += int(lengths.sum())
        return found, begin + self._free[key]

    def positions(self, client: int, key: Key, matched: Matched) -> Indices:
        """Where a client's entries are on the global axis [entries]."""
        own = self.entries[client][key]
        starts, size = self.starts(key, matched)
        found = own.rank + (size - self._free[key])
        for group, begin in starts.items():
            here = own.group == group
            places = matched[group]
            assert places is not None
            found[here] = begin[places.of[client][own.unit[here]]] + own.rank[here]
        return found

    def tensor(self, client: int, name: str) -> Array:
        """A client's tensor."""
        return as_array(self.donors[client].tensors[name])

    def slices(self, client: int, key: Key, group: int, cell: int, matched: Matched) -> Array:
        """What a client's units of a cell have in a tensor, other axes on global coordinates.

        Returns:
            [units, entries of one on this axis × all others].
        """
        name, axis = key
        own = self.entries[client][key]
        units = self.units(client, group, cell)
        here = np.flatnonzero((own.group == group) & np.isin(own.unit, units))
        here = here[np.lexsort([own.rank[here], own.unit[here]])]
        found = self.tensor(client, name).take(here, axis=axis)
        for other in self.keys(name):
            if other != key:
                found = self._spread(found, client, other, matched)
        return np.moveaxis(found, axis, 0).reshape(len(units), -1)

    def placed(self, client: int, name: str, matched: Matched) -> Array:
        """A client's tensor on global coordinates, zeros where it has nothing."""
        found = self.tensor(client, name)
        for key in self.keys(name):
            found = self._spread(found, client, key, matched)
        return found

    def _spread(self, values: Array, client: int, key: Key, matched: Matched) -> Array:
        """An axis of an array on global coordinates."""
        groups = self.on(key)
        if not groups:
            return values
        size = self.starts(key, matched)[1]
        shape = list(values.shape)
        shape[key[1]] = size
        found = np.zeros(shape)
        np.moveaxis(found, key[1], 0)[self.positions(client, key, matched)] = np.moveaxis(
            values, key[1], 0
        )
        return found

    def _counted(self, key: Key, names: Sequence[str]) -> dict[int, dict[int, int]]:
        """By group and cell, the entries of a unit on an axis."""
        found: list[dict[int, dict[int, int]]] = []
        for client, entries in enumerate(self.entries):
            own = entries[key]
            counted: dict[int, dict[int, int]] = {}
            for group in self.on(key):
                units = own.unit[own.group == group]
                cells = np.array(self.groups[group][client].cells)
                numbers = np.bincount(units, minlength=len(cells))
                counted[group] = dict(zip(cells.tolist(), numbers.tolist(), strict=True))
            found.append(counted)
            if counted != found[0]:
                raise ModelError(
                    f"{names[client]} and {names[0]} have different layouts of units in "
                    f"{key[0]!r}, so these cannot be matched"
                )
        return found[0]

    def _alike(self, key: Key, names: Sequence[str]) -> int:
        """Number of free entries of an axis."""
        found = [int((entries[key].group < 0).sum()) for entries in self.entries]
        for name, number in zip(names, found, strict=True):
            if number != found[0]:
                raise ModelError(
                    f"{key[0]!r} has {number} entries on axis {key[1]} in {name} and {found[0]} "
                    f"in {names[0]}, and they do not belong to units that can be matched"
                )
        return found[0]


def _entries(donor: TracedNetwork, layers: Sequence[str]) -> dict[Key, PlacedEntries]:
    """Of all axes of a network's tensors."""
    found = {}
    for name, tensor in donor.tensors.items():
        for number, size in enumerate(tensor.shape):
            group, unit = np.full(size, -1), np.full(size, -1)
            found[name, number] = PlacedEntries(group, unit, np.zeros(size, dtype=np.int64))
    for number, layer in enumerate(layers):
        own = donor.groups[layer]
        for axis in (*own.owned, *own.readers, *own.running):
            units = np.array(axis.units)
            here, entries = units >= 0, found[axis.tensor, axis.axis]
            entries.group[here], entries.unit[here] = number, units[here]
    for entries in found.values():
        entries.rank[:] = _ranks(entries.group, entries.unit)
    return found


def _ranks(group: Indices, unit: Indices) -> Indices:
    """How many entries of the same unit stand before each."""
    order = np.lexsort([unit, group])
    sorted_group, sorted_unit = group[order], unit[order]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (sorted_group[1:] != sorted_group[:-1]) | (sorted_unit[1:] != sorted_unit[:-1])
    begins = np.flatnonzero(new)
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = np.arange(len(order)) - begins[np.cumsum(new) - 1]
    return ranks


def as_array(tensor: Tensor) -> Array:
    """A tensor in float64."""
    array: Array = tensor.detach().cpu().double().numpy()
    return array
