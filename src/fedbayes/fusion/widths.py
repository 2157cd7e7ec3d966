"""How wide the groups of a fused network are."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fedbayes.errors import ConfigError, ModelError
from fedbayes.fusion.donors import TracedNetwork
from fedbayes.models.resize import Placed, placed, resized, widened
from fedbayes.models.steps import Steps, clean
from fedbayes.models.units import Group, evaluating

Widths = Mapping[str, int | float] | float
"""Of all groups, as a multiple of the wanted network's; or by a group's layer, as a number of
units (int) or a multiple (float), where groups that are not named stay as they are."""

Orders = list[tuple[Group, list[int]]]
"""Groups of the wanted network, each with the units in whose places the fused one's stand."""


def orders(
    own: TracedNetwork,
    donors: Sequence[TracedNetwork],
    widths: Widths,
    example: Tensor,
    say: Callable[[str], None],
) -> Orders:
    """Return the widths of all groups but the outputs.

    Cells of a group (those of a group normalization, parts of a stream that grows) take the same
    share, each rounded. No group becomes wider than all donors' units together. A group whose
    width the network's own code fixes stays unchanged if the setting is for all groups. If the
    setting names that group, it is an error.

    Args:
        own: the wanted network.
        donors: the networks that the units are from.
        widths: as given.
        example: a batch of inputs.
        say: called with a warning where a width differs from the given one.

    Raises:
        ConfigError: a width is invalid, or names no group.
        ModelError: the network's own code does not work with a width that was given for one group.
    """
    able = {layer: group for layer, group in own.groups.items() if not group.output}
    named = widths if isinstance(widths, Mapping) else {layer: float(widths) for layer in able}
    if unknown := [layer for layer in named if layer not in able]:
        raise ConfigError(
            f"widths: unknown group of units {unknown[0]!r}. Choose {', '.join(able)}"
        )
    if not able and widths != 1:
        say("no layer has units that can be left out or added, so the width has no effect")
    found = []
    for layer, group in able.items():
        width = named.get(layer, 1.0)
        if not 0 < width < float("inf"):
            raise ConfigError(f"widths: {width} is not a width for {layer!r}. It must be above 0")
        times = width / group.count if isinstance(width, int) else width
        there = sum(donor.groups[layer].count for donor in donors)
        order = _limited(group, widened(group.count, group.cells, min(times, there)), donors)
        if isinstance(width, int) and len(order) != width:
            say(f"{layer}: {len(order)} units instead of {width}")
        elif not isinstance(width, int) and len(order) < 0.99 * width * group.count - 1:
            wanted = round(width * group.count)
            say(f"{layer}: {len(order)} units instead of {wanted}, as clients have no more")
        found.append((group, order))
    return _borne(found, own, example, isinstance(widths, Mapping), say)


def _limited(group: Group, order: Sequence[int], donors: Sequence[TracedNetwork]) -> list[int]:
    """No more units of a cell than there are."""
    there = [cell for donor in donors for cell in donor.groups[group.layer].cells]
    kept: list[int] = []
    for cell in dict.fromkeys(group.cells):
        of_cell = [unit for unit in order if group.cells[unit] == cell]
        kept += of_cell[: there.count(cell)]
    return sorted(kept)


def _borne(
    found: Orders,
    own: TracedNetwork,
    example: Tensor,
    told: bool,
    say: Callable[[str], None],
) -> Orders:
    """The widths that the network's own code supports: each is tried."""

    def borne(units: Orders) -> bool:
        return computes(own, units, example) if told else bears(own, units, example)

    if borne(found):
        return found
    result: Orders = []
    for group, order in found:
        if borne([(group, order)]):
            result.append((group, order))
            continue
        text = f"{group.layer}: the network's own code does not support {len(order)} units"
        if told:
            raise ModelError(f"{text}. Leave it at {group.count}")
        say(f"{text}; it stays at {group.count}")
        result.append((group, list(range(group.count))))
    if not borne(result):
        raise ModelError(
            "the network's own code does not support these widths together. Set widths of single "
            "groups"
        )
    return result


def computes(own: TracedNetwork, units: Orders, example: Tensor) -> bool:
    """Whether a network's own code supports these widths, so that outputs keep their shape."""
    changed = [(group, order) for group, order in units if order != list(range(group.count))]
    if not changed:
        return True
    try:
        with torch.no_grad():
            answer = resized(own.module, changed)(example)
            return bool(answer.shape == evaluating(own.module)(example).shape)
    except Exception:  # whatever a module of somebody's own may raise
        return False


def bears(own: TracedNetwork, units: Orders, example: Tensor) -> bool:
    """Whether a network's own code computes the same at these widths, its units laid out alike."""
    if not computes(own, units, example):
        return False
    try:
        recorded(own, resized(own.module, units), units, example)
    except ModelError:
        return False
    return True


def recorded(own: TracedNetwork, module: nn.Module, found: Orders, example: Tensor) -> Steps:
    """The operations of the fused network at its widths.

    Raises:
        ModelError: at these widths the network's own code computes otherwise, or its units lie
            otherwise than they are placed.
    """
    fresh = clean(module)
    if all(fresh[name].shape == tensor.shape for name, tensor in own.tensors.items()):
        return own.steps
    steps = Steps(module, example, "at these widths the network")
    there = {group.layer: group for group in steps.units().groups}
    places = placed(found)
    for number, (group, order) in enumerate(found):
        if group.layer not in there or not _laid_out(there[group.layer], number, places):
            raise ModelError(
                f"{group.layer}: the network's own code uses {len(order)} units differently "
                f"from {group.count}. Leave it at {group.count}"
            )
    if not steps.alike(own.steps):
        raise ModelError("the network's own code depends on its widths. Leave them at 1")
    return steps


def _laid_out(group: Group, number: int, places: Mapping[str, Mapping[int, Placed]]) -> bool:
    """Whether a group's units are where they were placed, on all axes alike."""
    names: dict[int, int] = {}
    for axis in (*group.owned, *group.readers):
        place = places.get(axis.tensor, {}).get(axis.axis)
        if place is None or len(place.slot) != len(axis.units):
            return False
        slots = torch.where(place.group == number, place.slot, -1).tolist()
        for slot, unit in zip(slots, axis.units, strict=True):
            if (slot < 0) != (unit < 0) or names.setdefault(slot, unit) != unit:
                return False
    return len(set(names.values())) == len(names)
