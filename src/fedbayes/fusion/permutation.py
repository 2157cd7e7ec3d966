"""Weight matching on any traced graph: units of networks in the same order, then the mean.

The function of a network does not change with the order of a group's units
(`fedbayes.models.units`). Orders are chosen, group by group, so that the squared distance of all
weights to a reference is the least: given all other groups, a linear assignment (weight matching;
Ainsworth, Hayase and Srinivasa 2023, algorithms 1 and 3).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedbayes.core.tensors import Tensors
from fedbayes.errors import ModelError, warn
from fedbayes.fusion.combining import MergedWeights, Merging, combine
from fedbayes.fusion.repair import repaired
from fedbayes.fusion.settings import AlignedSettings
from fedbayes.models.units import Axis, Group, find_units, permute

Order = npt.NDArray[np.int64]
"""Of the units of a group: unit j becomes what unit order[j] was."""
MOST_SWEEPS = 100
"""Sweeps over all groups, and over all networks, after which to stop."""
_LEAST = 1e-9
"""Relative gain below which an order stays as it is."""


@dataclass(frozen=True)
class Permuted:
    """Networks in one order, and their mean."""

    weights: Tensors
    """The mean of the networks in their new orders."""
    aligned: list[Tensors]
    """These networks; each computes what it did before."""
    orders: list[dict[str, Order]]
    """Of each network, by group (`Group.layer`)."""
    before: float
    """Σ_s α_s ‖w_s − w̄‖² over all trained tensors of the groups in the orders that they came in."""
    after: float
    """The same in the new orders; not more where each is matched to the mean of the others."""


def permuted(merging: Merging, settings: AlignedSettings) -> MergedWeights:
    """The mean of networks whose units were brought into one order."""
    units = find_units(merging.network, merging.example)
    found = permuted_average(merging.states, units.groups, merging.alpha)
    return merged(merging, found, units.untouched, settings)


def merged(
    merging: Merging, found: Permuted, untouched: Mapping[str, str], settings: AlignedSettings
) -> MergedWeights:
    """The mean of networks in one order, repaired if that is asked for, and how it came about."""
    told: dict[str, Any] = {
        "spread_before": found.before,
        "spread_after": found.after,
        "untouched": dict(untouched),
    }
    if settings.repair is None:
        return MergedWeights(found.weights, told)
    assert merging.draw is not None
    x = merging.draw(settings.repair)
    weights, left = repaired(merging.network, found.weights, found.aligned, merging.alpha, x)
    return MergedWeights(weights, {**told, "repaired_on": len(x), "unrepaired": left})


def require_groups(
    models: Sequence[Tensors], groups: Sequence[Group], alpha: Sequence[float]
) -> tuple[list[Group], list[str]]:
    """The groups that can be reordered, and the tensors that they are of.

    Raises:
        ModelError: the networks are not of one graph, or the groups are not of it.
    """
    combine(models, alpha)  # they are of one graph
    groups = [group for group in groups if not group.output]
    names = list(dict.fromkeys(a.tensor for g in groups for a in (*g.owned, *g.readers)))
    absent = [name for name in names if name not in models[0]]
    if absent:
        raise ModelError(f"the networks lack {absent[0]!r}, which the graph has")
    if not groups:
        warn("no units of these networks can be permuted, so this is the plain mean")
    return groups, names


def permuted_average(
    models: Sequence[Tensors],
    groups: Sequence[Group],
    alpha: Sequence[float],
    *,
    to: Literal["first", "mean"] = "mean",
) -> Permuted:
    """Bring units of networks into one order and take the mean weight by weight.

    Running statistics of normalizations go with their units, and are averaged too.

    Args:
        models: `state_dict`s of one graph.
        groups: of its units; those of the outputs keep their order.
        alpha: weights of the mean, which add to 1.
        to: what the others are matched to: the first network, or, again and again, each network to
            the mean of the others, until none changes.

    Raises:
        ModelError: the networks are not of one graph, or the groups are not of it.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from fedbayes.fusion.permutation import permuted_average
        >>> from fedbayes.models.units import find_units
        >>> def network():
        ...     return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> one, two = network(), network()
        >>> groups = find_units(one, torch.zeros(1, 3)).groups
        >>> found = permuted_average([one.state_dict(), two.state_dict()], groups, [0.5, 0.5])
        >>> found.weights["0.weight"].shape
        torch.Size([4, 3])
    """
    groups, names = require_groups(models, groups, alpha)
    if len(models) == 1 or not groups:
        same = [{g.layer: np.arange(g.count) for g in groups} for _ in models]
        alone = spread(models, alpha, names)
        return Permuted(combine(models, alpha), list(models), same, alone, alone)
    start = [align(models[0], model, groups) for model in models[1:]]
    aligned = [dict(models[0]), *(tensors for tensors, _ in start)]
    orders = [{g.layer: np.arange(g.count) for g in groups}, *(order for _, order in start)]
    before = spread(models, alpha, names)
    if to == "mean":
        if spread(aligned, alpha, names) > before:  # nearer the first, farther from one another
            aligned = [dict(model) for model in models]
            orders = [{g.layer: np.arange(g.count) for g in groups} for _ in models]
        _toward_mean(aligned, orders, groups, alpha)
    after = spread(aligned, alpha, names)
    return Permuted(combine(aligned, alpha), aligned, orders, before, after)


def align(
    reference: Tensors, weights: Tensors, groups: Sequence[Group]
) -> tuple[Tensors, dict[str, Order]]:
    """The network in the orders that bring it nearest to a reference, as far as is found.

    Coordinate descent from the orders that there are, and from those that a first pass from the
    inputs to the outputs finds, which compares by what is in order already; the nearer one is kept.

    Args:
        reference: a `state_dict`.
        weights: that of the network.
        groups: whose units may change places, without those of the outputs.

    Returns:
        The network's weights in the new orders, and these orders by group.
    """
    tables = [_Table(group, groups) for group in groups]
    names = list(dict.fromkeys(axis.tensor for table in tables for axis in table.axes))
    found = []
    for first in (False, True):
        moved = dict(weights)
        orders: dict[str, Order] = {g.layer: np.arange(g.count) for g in groups}
        if first:
            placed: set[str] = set()
            for table in tables:
                moved = table.match(reference, moved, orders, placed=placed)
                placed.add(table.group.layer)
        for _ in range(MOST_SWEEPS):
            changed = False
            for table in tables:
                following = table.match(reference, moved, orders)
                changed |= following is not moved
                moved = following
            if not changed:
                break
        found.append((distance(reference, moved, names), moved, orders))
    _, moved, orders = min(found, key=lambda one: one[0])
    return moved, orders


def distance(one: Mapping[str, Tensor], two: Mapping[str, Tensor], names: Collection[str]) -> float:
    """Squared distance of two networks over these tensors."""
    return sum(float((one[name].double() - two[name].double()).square().sum()) for name in names)


class _Table:
    """A group, and where its units are."""

    def __init__(self, group: Group, groups: Sequence[Group]) -> None:
        self.group = group
        self.axes: list[Axis] = [*group.owned, *group.readers]
        self.across = {
            axis.tensor: {
                other.layer
                for other in groups
                for theirs in (*other.owned, *other.readers)
                if theirs.tensor == axis.tensor and theirs.axis != axis.axis
            }
            for axis in self.axes
        }
        """Groups on other axes of the tensors; the group itself where it has two axes of one."""
        cells = np.array(group.cells)
        self.cells = [np.flatnonzero(cells == cell) for cell in dict.fromkeys(group.cells)]

    def match(
        self,
        reference: Tensors,
        weights: Tensors,
        orders: dict[str, Order],
        placed: set[str] | None = None,
    ) -> Tensors:
        """The weights with this group in the order that is the nearest to the reference, which is
        noted; the very same weights if it is the one that they have.

        Args:
            reference: what to be near to.
            weights: to bring there.
            orders: of all groups so far.
            placed: groups that are in order, if others are not: tensors that these have an axis of
                do not count, if there are any without.
        """
        axes = self.axes
        if placed is not None:
            axes = [axis for axis in axes if self.across[axis.tensor] <= placed] or axes
        count = self.group.count
        alike = torch.zeros(count, count, dtype=torch.float64)
        for axis in axes:
            wanted = axis.rows(reference[axis.tensor].double(), count)
            alike += wanted @ axis.rows(weights[axis.tensor].double(), count).T
        table = alike.numpy()
        order = np.arange(count)
        for cell in self.cells:
            rows, columns = linear_sum_assignment(table[np.ix_(cell, cell)], maximize=True)
            order[cell[rows]] = cell[columns]
        before, after = table.trace(), table[np.arange(count), order].sum()
        if after <= before + _LEAST * np.abs(table).max():
            return weights
        moved = permute(weights, self.group, order.tolist())
        twice = any(self.group.layer in others for others in self.across.values())
        if twice and placed is None:  # the assignment takes the other axis for fixed
            names = {axis.tensor for axis in self.axes}
            if distance(reference, moved, names) >= distance(reference, weights, names):
                return weights
        orders[self.group.layer] = orders[self.group.layer][order]
        return moved


def _toward_mean(
    aligned: list[Tensors],
    orders: list[dict[str, Order]],
    groups: Sequence[Group],
    alpha: Sequence[float],
) -> None:
    """Match each network to the mean of the others, in place, until none changes."""
    tables = [_Table(group, groups) for group in groups]
    for _ in range(MOST_SWEEPS):
        changed = False
        for index, weights in enumerate(aligned):
            others = [model for number, model in enumerate(aligned) if number != index]
            rest = [share for number, share in enumerate(alpha) if number != index]
            if not sum(rest):
                continue
            reference = combine(others, [share / sum(rest) for share in rest])
            moved = weights
            for table in tables:
                moved = table.match(reference, moved, orders[index])
            changed |= moved is not weights
            aligned[index] = moved
        if not changed:
            return


def spread(models: Sequence[Tensors], alpha: Sequence[float], names: Sequence[str]) -> float:
    """Σ_s α_s ‖w_s − w̄‖² over these tensors."""
    mean = combine([{name: model[name].double() for name in names} for model in models], alpha)
    return sum(a * distance(model, mean, names) for a, model in zip(alpha, models, strict=True))
