"""Matching of networks of any traced graph: PFNM and GPI-FNM, group by group of units.

The model is that of `fedbayes.matching` on tensors with any axes. Every coordinate of the fused
network has the prior N(μ0, σ0²) and is observed once by each client that owns the units of all its
axes; μ0 is 0, `bias_mean` for biases and 1 for scales of normalizations. With f, b and u as in
`fedbayes.matching.costs`, the objective is

    Σ over coordinates of f(b) u²  +  Σ over groups of the process' terms

An atom is a unit: what it owns and what reads it in all tensors, other axes on global coordinates
(`fedbayes.fusion.coordinates`). Given all other groups, the part of the objective that one group
decides is that of `match_layer`, where a client has precision 0 at what it does not own. So no
sweep over a group raises the objective of the whole; of tensors with the group on two axes one is
held where it was, and a move after which the objective is higher is undone. Cells of a group are
matched one by one, and a group whose number counts is matched without growth. The fused module is
that of the first client, widened (`fedbayes.models.resize`); a group may grow if the module's own
code bears twice its units.

Top down, groups are gone through from the outputs: by the last operation that reads them. Only
tensors count whose other axes are free or matched. As published for fully connected networks, a
client observes zeros where a layer that it does not have would read units of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
import torch
from torch import Tensor, nn

from fedbayes.core.brief import Brief
from fedbayes.core.tensors import Tensors
from fedbayes.errors import ModelError
from fedbayes.fusion.coordinates import Array, Coordinates, Indices, Key, Matched, Places
from fedbayes.fusion.donors import TracedNetwork
from fedbayes.fusion.evidence import EntryEvidence
from fedbayes.fusion.one_graph import fixed_numbers, idle_tensors, of_one_graph
from fedbayes.fusion.widths import computes, recorded
from fedbayes.matching import MatchingSettings, match_layer
from fedbayes.matching.passes import Passes
from fedbayes.models.resize import Placed, placed, with_weights
from fedbayes.models.steps import module_size
from fedbayes.models.units import Group


@dataclass(frozen=True, repr=False)
class GroupMatching(Brief):
    """The matching of one group of units."""

    layer: str
    """The first layer that makes them."""
    places: Places
    """Which global units the clients' units are."""
    fixed: str
    """Why their number stays that of each client; empty if it does not."""
    seconds: float
    """Time that it took."""

    @property
    def members(self) -> Indices:
        """Clients that share each global unit [J]."""
        return self.places.members


@dataclass(frozen=True, repr=False)
class GraphMatching(Brief):
    """A fused network and how it came about.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from fedbayes.fusion import GraphMatching
        >>> from fedbayes.fusion import match_graph
        >>> from fedbayes.matching import MatchingSettings
        >>> def network():
        ...     return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> clients = {"north": network(), "south": network()}
        >>> found = match_graph(clients, MatchingSettings(), torch.zeros(1, 3))
        >>> [group.layer for group in found.groups]
        ['0']
    """

    module: nn.Module
    """The fused network, in evaluation mode."""
    groups: list[GroupMatching]
    """Of all groups but the outputs, from inputs to outputs."""
    objective: list[float]
    """Twice the objective of the whole network, at the start and after every pass."""
    notes: tuple[str, ...]
    """What a user should know: what could not be matched, and why."""
    settings: MatchingSettings
    seconds: float

    @property
    def parameters(self) -> int:
        """Scalars of the fused network."""
        return module_size(self.module)

    @property
    def wider(self) -> bool:
        """Whether some group has more units than in the first network."""
        return any(group.places.size > len(group.places.of[0]) for group in self.groups)


def match_graph(
    clients: Mapping[str, nn.Module],
    settings: MatchingSettings,
    example: Tensor,
    *,
    counts: Array | None = None,
    seed: int = 0,
    watch: Callable[[str], None] | None = None,
) -> GraphMatching:
    """Fuse networks of one graph, of any widths, by matching their units.

    In three cases a group keeps its number of units, and these only change places:

    - The number counts, as in layer and group normalization.
    - Units can be exchanged only with some of the others.
    - The network's own code works with no other number.

    Tensors that belong to no group (an LSTM, say) are the mean of the clients', weight by weight.
    Running statistics are the means over owners.

    Where clients share nothing (a large γ0, with alternations), the fused network is theirs side by
    side: the ensemble by class share. Memory is some 32 bytes for each global coordinate of each
    unit of each client, of one group at a time.

    Args:
        clients: their networks by name.
        settings: of the matching; the same numbers on fully connected networks as
            `match_networks`.
        example: a batch of at least two inputs as the networks see them.
        counts: training samples of each client and class [S, K]; see `match_networks`.
        seed: of the order of clients in sweeps.
        watch: called with what is being done.

    Raises:
        ModelError: the networks are not of one graph, their widths differ where they may not,
            there is nothing to match, or the counts do not fit.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from fedbayes.fusion import match_graph
        >>> from fedbayes.matching import MatchingSettings
        >>> def network():
        ...     return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> clients = {"north": network(), "south": network()}
        >>> found = match_graph(clients, MatchingSettings(), torch.zeros(1, 3))
        >>> found.module(torch.zeros(5, 3)).shape
        torch.Size([5, 2])
    """
    begin = perf_counter()
    names = list(clients)
    if not clients:
        raise ModelError("there are no networks to match")
    own, donors = of_one_graph(clients, example)
    work = _Graph(own, donors, names, settings, counts, fixed_numbers(own, example))
    found = work.best(seed, watch or (lambda _: None))
    idle = idle_tensors(donors, set(own.tensors))
    module = work.assemble(found.layers, example, idle)
    groups = [
        GroupMatching(work.coordinates.layers[number], places, work.fixed[number], spent)
        for number, places, spent in zip(work.order, found.layers, found.seconds, strict=True)
    ]
    seconds = perf_counter() - begin
    return GraphMatching(module, groups, found.objective, work.notes(), settings, seconds)


class _Graph(Passes[Places]):
    """Networks of one graph, and what follows from a matching of their groups."""

    def __init__(
        self,
        own: TracedNetwork,
        donors: Sequence[TracedNetwork],
        names: Sequence[str],
        settings: MatchingSettings,
        counts: Array | None,
        fixed: Mapping[str, str],
    ) -> None:
        self.own = own
        self.coordinates = coordinates = Coordinates(donors, names)
        self.fixed = [fixed[layer] for layer in coordinates.layers]
        self.order = self._order()
        """Groups from inputs to outputs, by the last operation that reads them."""
        super().__init__(len(self.order), settings)
        self.clients = len(donors)
        self._check(names)
        self.evidence = EntryEvidence(coordinates, settings, counts)
        self.axes: list[list[Key]] = [
            [(axis.tensor, axis.axis) for axis in (*group.owned, *group.readers)]
            for group in own.groups.values()
        ]
        """By group, axes of tensors that its units are on."""
        keys = [key for group in self.order for key in self.axes[group]]
        self.tensors = list(dict.fromkeys(tensor for tensor, _ in keys))
        """Parameters that matched units are on."""
        self.twice = {
            g for g in self.order if len({t for t, _ in self.axes[g]}) < len(self.axes[g])
        }
        """Groups that a tensor has on two axes."""

    def match(
        self,
        depth: int,
        layers: Sequence[Places | None],
        rng: np.random.Generator,
        joint: bool,
    ) -> Places:
        """Match one group given those that have places, cell by cell."""
        group, current = self.order[depth], layers[depth]
        matched = self._by_group(layers)
        found = current
        for cell in dict.fromkeys(self.own_group(group).cells):
            start = None if current is None else self._within(group, cell, current)
            assignments = self._match(group, cell, matched, rng, joint, start)
            found = self._placing(group, cell, found, assignments)
        assert found is not None
        if current is not None and group in self.twice:
            before = [places for places in layers if places is not None]  # which are all
            after = [*before[:depth], found, *before[depth + 1 :]]
            if self.value(after) > self.value(before):
                return current
        return found

    def value(self, layers: Sequence[Places]) -> float:
        """Twice the objective of the whole network; see the head of this file."""
        matched = self._by_group(layers)
        objective, prior = self.settings.objective, np.array(self.settings.sigma0**-2)
        total = sum(self.evidence.process(places) for places in layers)
        for name in self.tensors:
            sums, precisions = self.evidence.sums(name, matched, joint=True)
            total += float((objective.curvature(precisions, prior) * sums**2).sum())
        return total

    def assemble(self, layers: Sequence[Places], example: Tensor, idle: Tensors) -> nn.Module:
        """The fused network, as `match_networks` has it of fully connected ones.

        As published, weights are posterior means; after alternating, means over the clients that
        own all axes' units, and those that make outputs are sums over owners by class share.

        Raises:
            ModelError: the network's own code does not bear these widths.
        """
        matched = self._by_group(layers)
        units = [
            (self.own_group(number), self._stand_ins(number, places))
            for number, places in zip(self.order, layers, strict=True)
        ]
        if not computes(self.own, units, example):
            sizes = ", ".join(f"{group.layer}: {len(order)}" for group, order in units)
            raise ModelError(
                f"the network's own code does not support these widths together: {sizes}"
            )
        there = placed(units)
        fresh: Tensors = {}
        joint = self.settings.alternations > 0
        for name, old in self.own.tensors.items():
            if not old.is_floating_point() and name not in there:
                continue  # it stays the first network's
            if not old.is_floating_point():
                values = self.coordinates.placed(0, name, matched)
            elif name in self.tensors:
                values = self.evidence.combined(name, matched, joint)
            else:
                values = self.evidence.averaged(name, matched)
            for axis, place in there.get(name, {}).items():
                values = values.take(self._standing((name, axis), place, matched), axis=axis)
            fresh[name] = torch.from_numpy(np.asarray(values)).to(old.dtype)
        module = with_weights(self.own.module, fresh | idle)
        recorded(self.own, module, units, example)
        return module

    def own_group(self, number: int) -> Group:
        """A group of the first network."""
        return self.coordinates.groups[number][0]

    def notes(self) -> tuple[str, ...]:
        """What could not be matched, and why."""
        found: list[str] = []
        for number in self.order:
            if self.fixed[number]:
                group = self.own_group(number)
                found.append(f"{group.layer} keeps its {group.count} units: {self.fixed[number]}")
        for name, reason in self.own.steps.units().untouched.items():
            if name not in self.own.tensors:
                continue
            found.append(
                f"{name} is averaged in its given order, which is suitable for models with the "
                f"same start: {reason}"
            )
        if not self.evidence.shares:
            found.append("the outputs could not be traced, so counts of classes have no effect")
        return tuple(found)

    def _order(self) -> list[int]:
        """Groups but the outputs, by the last operation that reads them."""
        steps, last = self.own.steps, dict[str, int]()
        for node in steps.nodes:
            for used in node.all_input_nodes:
                if used in steps.names:
                    last[steps.names[used]] = steps.place[node]
        found = []
        for number, group in enumerate(self.own.groups.values()):
            if not group.output:
                axes = group.readers or group.owned
                found.append((max(last.get(axis.tensor, 0) for axis in axes), number))
        return [number for _, number in sorted(found)]

    def _check(self, names: Sequence[str]) -> None:
        """See that there is something to match, and that fixed groups are of one width."""
        if not self.order:
            why = "; ".join(f"{n}: {w}" for n, w in self.own.steps.units().untouched.items())
            raise ModelError(f"{names[0]} has no units that can be matched" + (why and f" ({why})"))
        for number in self.order:
            first = self.own_group(number)
            for name, group in zip(names, self.coordinates.groups[number], strict=True):
                if self.fixed[number] and group.cells != first.cells:
                    raise ModelError(
                        f"{name} has {group.count} units in {first.layer!r} and {names[0]} has "
                        f"{first.count}, which must agree: {self.fixed[number]}"
                    )

    def _by_group(self, layers: Sequence[Places | None]) -> list[Places | None]:
        """Places by number of the group; outputs are where they are."""
        found: list[Places | None] = [None] * len(self.coordinates.layers)
        for number in self.coordinates.outputs:
            group = self.own_group(number)
            found[number] = Places((np.arange(group.count),) * self.clients, np.array(group.cells))
        for number, places in zip(self.order, layers, strict=True):
            found[number] = places
        return found

    def _match(
        self,
        group: int,
        cell: int,
        matched: Matched,
        rng: np.random.Generator,
        joint: bool,
        start: Sequence[Indices] | None,
    ) -> Sequence[Indices]:
        """Match the units of a cell; of each client, which of the cell's global units they are."""
        settings, objective = self.settings, self.settings.objective
        if settings.alternations and settings.start_gamma and not joint:
            objective = replace(objective, gamma=settings.start_gamma)
        keys = [key for key in self.axes[group] if self._counts(key, group, cell, matched)]
        if not keys:  # nothing tells units apart before the groups below are matched
            sizes = [len(self.coordinates.units(s, group, cell)) for s in range(self.clients)]
            return [np.arange(size) for size in sizes]
        atoms = [
            np.hstack([self.coordinates.slices(s, key, group, cell, matched) for key in keys])
            for s in range(self.clients)
        ]
        precisions = np.array(
            [
                np.concatenate(
                    [self.evidence.of_units(s, key, group, cell, matched, joint) for key in keys]
                )
                for s in range(self.clients)
            ]
        )
        sizes = [len(self.evidence.of_units(0, key, group, cell, matched, joint)) for key in keys]
        return match_layer(
            atoms,
            precisions,
            prior_mean=np.repeat([self.evidence.mean(name) for name, _ in keys], sizes),
            prior_precision=np.full(precisions.shape[1], settings.sigma0**-2),
            objective=objective,
            iterations=1 if start else settings.iterations,
            rng=rng,
            start=start,
            growing=not self.fixed[group],
        ).assignments

    def _counts(self, key: Key, group: int, cell: int, matched: Matched) -> bool:
        """Whether a tensor tells something of units whose other axes have places."""
        others = (other for other in self.coordinates.keys(key[0]) if other != key)
        known = all(matched[g] is not None for other in others for g in self.coordinates.on(other))
        return known and self.coordinates.per_unit(key, group, cell) > 0

    def _within(self, group: int, cell: int, places: Places) -> list[Indices]:
        """Of each client, which of a cell's global units its units there are."""
        here = np.flatnonzero(places.cells == cell)
        return [
            np.searchsorted(here, places.of[s][self.coordinates.units(s, group, cell)])
            for s in range(self.clients)
        ]

    def _placing(
        self, group: int, cell: int, before: Places | None, assignments: Sequence[Indices]
    ) -> Places:
        """Places of a group's units with those of one cell changed."""
        if not self.fixed[group]:  # there is one cell
            size = 1 + max(int(own.max()) for own in assignments)
            return Places(tuple(assignments), np.full(size, cell))
        cells = np.array(self.own_group(group).cells)
        here, changed = np.flatnonzero(cells == cell), []
        for client, own in enumerate(assignments):
            of = np.arange(len(cells)) if before is None else before.of[client].copy()
            of[self.coordinates.units(client, group, cell)] = here[own]
            changed.append(of)
        return Places(tuple(changed), cells)

    def _stand_ins(self, group: int, places: Places) -> list[int]:
        """The first network's units in whose places global ones stand."""
        count = self.own_group(group).count
        return [unit * count // places.size for unit in range(places.size)]

    def _standing(self, key: Key, place: Placed, matched: Matched) -> Indices:
        """Where on the global axis is what stands at each entry of the fused network's axis."""
        starts, _ = self.coordinates.starts(key, matched)
        found: Indices = self.coordinates.positions(0, key, matched)[place.entry.numpy()]
        group, slot, rank = (part.numpy() for part in (place.group, place.slot, place.rank))
        for at, number in enumerate(self.order):
            if (here := group == at).any():
                found[here] = starts[number][slot[here]] + rank[here]
        return found
