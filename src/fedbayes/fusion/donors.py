"""Clients' networks from which a fused network may take units: those that compute as it does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from fedbayes.core.tensors import Tensors
from fedbayes.errors import ModelError
from fedbayes.models.steps import Steps, clean, same_function
from fedbayes.models.units import Axis, Group

FEW = 8
"""Inputs on which it is seen whether a client's network is the one that was recorded."""


@dataclass(frozen=True)
class TracedNetwork:
    """A network of the wanted graph, maybe of other widths, with its tensors and its trace."""

    client: int
    """Its place among the clients; -1 of the wanted network itself."""
    module: nn.Module
    steps: Steps
    tensors: Tensors
    """Parameters and buffers by name."""
    groups: dict[str, Group]
    """Groups of units by their layer."""
    across: frozenset[str]
    """Layers whose places are units of others; see `fedbayes.models.units.Groups`."""

    @cached_property
    def entries(self) -> dict[tuple[str, str, int], dict[int, list[int]]]:
        """By group, tensor and axis: of each unit, its entries in their order."""
        found: dict[tuple[str, str, int], dict[int, list[int]]] = {}
        for layer, group in self.groups.items():
            for axis in (*group.owned, *group.readers, *group.running):
                of_unit = found.setdefault((layer, axis.tensor, axis.axis), {})
                for entry, unit in enumerate(axis.units):
                    of_unit.setdefault(unit, []).append(entry)
        return found


def find_donors(
    clients: Sequence[nn.Module],
    like: nn.Module,
    example: Tensor,
    say: Callable[[str], None],
) -> tuple[TracedNetwork, list[TracedNetwork]]:
    """The wanted network as it stands, of the graph of `like`, and the clients that compute as it
    does; `say` is called with what should be known.

    Where none does, the wanted network is its own donor: its units stay, whatever they are.

    Raises:
        ModelError: `like` cannot be traced.
    """
    steps = Steps(like, example, "the wanted network")
    few = example[:FEW]
    try:
        small = Steps(like, few)
    except ModelError:
        small = None
    if small is None or not small.alike(steps):
        small, few = steps, example
    units = steps.units()
    own = TracedNetwork(
        -1, like, steps, clean(like), {g.layer: g for g in units.groups}, units.across
    )
    shapes = {name: tensor.shape for name, tensor in own.tensors.items()}
    donors = []
    for number, client in enumerate(clients):
        tensors = clean(client)
        if {name: t.shape for name, t in tensors.items()} == shapes and same_function(
            small, client, few
        ):
            donors.append(TracedNetwork(number, client, steps, tensors, own.groups, own.across))
            continue
        donor = _other_widths(number, client, tensors, own, example)
        if donor is not None:
            donors.append(donor)
    strangers = len(clients) - len(donors)
    if not donors:
        say(
            "no client has the graph of the fused network, so its hidden units stay random and "
            "only its outputs are fitted. Start from a trained network, or train end to end"
        )
        return own, [own]
    if strangers:
        say(f"{strangers} of {len(clients)} clients have other graphs: only their outputs are used")
    return own, donors


def _other_widths(
    number: int, client: nn.Module, tensors: Tensors, own: TracedNetwork, example: Tensor
) -> TracedNetwork | None:
    """A client as a donor, if it differs from the wanted network in widths alone."""
    try:
        steps = Steps(client, example)
    except Exception:  # whatever a module of somebody's own may raise
        return None
    groups = {g.layer: g for g in steps.units().groups}
    if not steps.alike(own.steps) or tensors.keys() != own.tensors.keys():
        return None
    if groups.keys() != own.groups.keys():
        return None
    for layer, group in groups.items():
        other = own.groups[layer]
        if set(group.cells) != set(other.cells) or _places(group) != _places(other):
            return None
        if group.output and group.count != other.count:
            return None
    free = {axis.tensor for g in own.groups.values() for axis in _axes(g)}
    same = all(t.shape == own.tensors[n].shape for n, t in tensors.items() if n not in free)
    return TracedNetwork(number, client, steps, tensors, groups, own.across) if same else None


def _axes(group: Group) -> tuple[Axis, ...]:
    return (*group.owned, *group.readers, *group.running)


def _places(group: Group) -> list[tuple[str, int]]:
    return [(axis.tensor, axis.axis) for axis in _axes(group)]
