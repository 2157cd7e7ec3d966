"""Networks of one graph to be matched: what they have in common, and which groups may grow."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from fedbayes.core.tensors import Tensors
from fedbayes.errors import ModelError
from fedbayes.fusion.combining import combine
from fedbayes.fusion.donors import TracedNetwork, find_donors
from fedbayes.fusion.widths import bears
from fedbayes.models.resize import widened
from fedbayes.models.steps import clean, require_finite
from fedbayes.models.units import require_functions


def of_one_graph(
    clients: Mapping[str, nn.Module], example: Tensor
) -> tuple[TracedNetwork, list[TracedNetwork]]:
    """The first network and all of them, as they were traced.

    Raises:
        ModelError: they are not of one graph, or hold values that are not finite.
    """
    for name, client in clients.items():
        require_finite(client, name)
        learnt = dict(client.named_parameters())
        for tensor, values in clean(client).items():
            if values.is_complex() and tensor in learnt:
                raise ModelError(
                    f"the weights {tensor!r} of {name} are complex numbers, which cannot be "
                    "matched. Use --method function"
                )
    require_functions(clients, example)
    networks = list(clients.values())
    own, donors = find_donors(networks, networks[0], example, lambda _: None)
    known = {donor.client for donor in donors}
    for number, (name, client) in enumerate(clients.items()):
        if number not in known:
            raise ModelError(
                f"{name} has another graph than {next(iter(clients))}, but matching needs the "
                f"same{_difference(own, client)}. Use --method function, which fuses any networks"
            )
    return _used(own), [_used(donor) for donor in donors]


def _difference(own: TracedNetwork, client: nn.Module) -> str:
    """What of a network keeps it from the graph of another: tensors of no units, if it is these."""
    tensors, untouched = clean(client), own.steps.units().untouched
    axes = (a for g in own.groups.values() for a in (*g.owned, *g.readers, *g.running))
    grouped = {axis.tensor for axis in axes}
    for name, tensor in own.tensors.items():
        other = tensors.get(name)
        if other is not None and name not in grouped and other.shape != tensor.shape:
            why = untouched.get(name, "it belongs to no units")
            return f" ({name!r} has other widths, which cannot be matched: {why})"
    return ""


def _used(donor: TracedNetwork) -> TracedNetwork:
    """A network with the tensors alone that its operations name, each once though shared."""
    names = set(donor.steps.names.values())
    return replace(donor, tensors={n: t for n, t in donor.tensors.items() if n in names})


def idle_tensors(donors: Sequence[TracedNetwork], used: Collection[str]) -> Tensors:
    """The mean of tensors that networks hold but their operations do not use: learnt noise, say."""
    tensors = [clean(donor.module) for donor in donors]
    first = tensors[0]
    shared = {first[name].data_ptr() for name in used}
    names = [
        name
        for name, tensor in first.items()
        if name not in used and tensor.is_floating_point() and tensor.data_ptr() not in shared
    ]
    mean = [1 / len(tensors)] * len(tensors)
    return combine([{name: own[name] for name in names} for own in tensors], mean)


def fixed_numbers(own: TracedNetwork, example: Tensor) -> dict[str, str]:
    """Of each group, why its number of units stays; empty if it need not."""
    found, free = {}, []
    for layer, group in own.groups.items():
        if group.norms:
            found[layer] = f"group normalization {group.norms[0]!r} counts its units"
        elif len(set(group.cells)) > 1:
            found[layer] = "its units can be exchanged only with some others"
        else:
            found[layer] = group.mixed or ("frozen weights read it" if group.frozen_readers else "")
        if not found[layer] and not group.output:
            free.append((group, widened(group.count, group.cells, 2)))
    if not bears(own, free, example):
        for group, twice in free:
            if not bears(own, [(group, twice)], example):
                found[group.layer] = "the network's own code supports no other number"
    return found
