"""Several networks in one order of units at once: C2M3 (Crisostomi et al. 2024).

Each network s has one permutation P_s per group of units, from its own order to that of a
universe which all share. Between two networks units go by P_t⁻¹ P_s, so that matching along any
cycle of networks leads back to where it began. The permutations of all groups and networks are
found together by the algorithm of Frank and Wolfe on doubly stochastic matrices.
"""

from collections.abc import Sequence

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedbayes.core.tensors import Tensors
from fedbayes.fusion.combining import MergedWeights, Merging, combine
from fedbayes.fusion.permutation import Order, Permuted, align, merged, require_groups, spread
from fedbayes.fusion.settings import AlignedSettings
from fedbayes.models.units import Axis, Group, find_units, permute

MOST_STEPS = 200
"""Steps of Frank and Wolfe after which to stop."""
_LEAST = 1e-7
"""Relative gain of the objective below which to stop."""


def c2m3(merging: Merging, settings: AlignedSettings) -> MergedWeights:
    """The mean of networks whose units were brought into the order of a universe."""
    units = find_units(merging.network, merging.example)
    found, objective = cycle_consistent(merging.states, units.groups, merging.alpha)
    result = merged(merging, found, units.untouched, settings)
    result.told["steps"] = len(objective) - 1
    return result


def cycle_consistent(
    models: Sequence[Tensors], groups: Sequence[Group], alpha: Sequence[float]
) -> tuple[Permuted, list[float]]:
    """Bring units of several networks into one order, all of them at once.

    With W_s(P_s) the weights of network s in the universe's order, maximized is

        f = Σ_{s<t} α_s α_t ⟨W_s(P_s), W_t(P_t)⟩                (equation 6, all α equal)

    over doubly stochastic P_s, from where each network is aligned to the first. Every step solves
    a linear assignment for the gradient by each P_s, moves all of them toward its solutions and
    takes the length that is best on this line, so that f never decreases. The permutations nearest
    to the result are taken, or the first order where that is nearer.

    Args:
        models: `state_dict`s of one graph.
        groups: of its units; those of the outputs keep their order.
        alpha: weights of the mean, which add to 1.

    Returns:
        The networks in one order and their mean, and f after each step.

    Raises:
        ModelError: the networks are not of one graph, or the groups are not of it.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from fedbayes.fusion.cycles import cycle_consistent
        >>> from fedbayes.models.units import find_units
        >>> networks = [nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)) for _ in "abc"]
        >>> groups = find_units(networks[0], torch.zeros(1, 3)).groups
        >>> states = [network.state_dict() for network in networks]
        >>> found, objective = cycle_consistent(states, groups, [1 / 3] * 3)
        >>> objective == sorted(objective)
        True
    """
    groups, names = require_groups(models, groups, alpha)
    before = spread(models, alpha, names)
    start = [align(models[0], model, groups)[1] for model in models]
    universe = _Universe(models, groups, alpha, names, start)
    objective = universe.climb()
    orders = universe.orders()
    aligned = []
    for model, order in zip(models, orders, strict=True):
        moved = dict(model)
        for group in groups:
            moved = permute(moved, group, order[group.layer].tolist())
        aligned.append(moved)
    after = spread(aligned, alpha, names)
    if after > before:
        same: list[dict[str, Order]] = [
            {group.layer: np.arange(group.count) for group in groups} for _ in models
        ]
        aligned, orders, after = [dict(model) for model in models], same, before
    return Permuted(combine(aligned, alpha), aligned, orders, before, after), objective


class _Turn:
    """A tensor's axis, along which the units of a group are mixed by a matrix."""

    def __init__(self, number: int, axis: Axis, count: int) -> None:
        self.number, self.axis, self.count = number, axis, count
        entries = torch.arange(1, len(axis.units) + 1, dtype=torch.float64)
        self.places = axis.rows(entries, count).long() - 1
        """Entries of each unit [count, most]; -1 where it has fewer."""
        self.there = self.places >= 0

    def rows(self, tensor: Tensor) -> Tensor:
        """Entries by unit, [count, most · rest]."""
        return self.axis.rows(tensor, self.count)

    def __call__(self, tensor: Tensor, matrix: Tensor) -> Tensor:
        """The tensor with unit i replaced by Σ_j matrix_ij unit j."""
        moved = tensor.movedim(self.axis.axis, 0)
        flat = moved.reshape(len(moved), -1).clone()
        new = (matrix @ self.rows(tensor)).reshape(*self.places.shape, -1)
        flat[self.places[self.there]] = new[self.there]
        return flat.reshape(moved.shape).movedim(0, self.axis.axis)


class _Universe:
    """All networks, and the doubly stochastic matrix of each group in each of them."""

    def __init__(
        self,
        models: Sequence[Tensors],
        groups: Sequence[Group],
        alpha: Sequence[float],
        names: Sequence[str],
        start: Sequence[dict[str, Order]],
    ) -> None:
        self.models = [{name: model[name].double() for name in names} for model in models]
        self.groups, self.alpha = groups, alpha
        self.turns: dict[str, list[_Turn]] = {name: [] for name in names}
        for number, group in enumerate(groups):
            for axis in (*group.owned, *group.readers):
                self.turns[axis.tensor].append(_Turn(number, axis, group.count))
        self.degree = 2 * max((len(turns) for turns in self.turns.values()), default=0)
        """Of f along a line, a polynomial."""
        self.cells = []
        for group in groups:
            cells = np.array(group.cells)
            self.cells.append(
                [np.flatnonzero(cells == cell) for cell in dict.fromkeys(group.cells)]
            )
        self.matrices = [[self._matrix(order[g.layer]) for g in groups] for order in start]

    def _matrix(self, order: Order) -> Tensor:
        return torch.eye(len(order), dtype=torch.float64)[torch.from_numpy(order)]

    def climb(self) -> list[float]:
        """Steps of Frank and Wolfe until f hardly rises; f after each."""
        found = [self.objective(self.matrices)]
        for _ in range(MOST_STEPS):
            ends = [
                [self._assigned(slope, cells) for slope, cells in zip(own, self.cells, strict=True)]
                for own in self.gradients(self.matrices)
            ]
            length, best = self._length(ends, found[-1])
            if best <= found[-1] + _LEAST * abs(found[-1]):
                break
            self.matrices = self._at(ends, length)
            found.append(best)
        return found

    def orders(self) -> list[dict[str, Order]]:
        """The permutations nearest to the matrices, by network and group."""
        return [
            {
                group.layer: self._assigned(matrix, cells).argmax(1).numpy()
                for group, matrix, cells in zip(self.groups, own, self.cells, strict=True)
            }
            for own in self.matrices
        ]

    def objective(self, matrices: Sequence[Sequence[Tensor]]) -> float:
        """f, as (‖Σ_s α_s W_s‖² − Σ_s α_s² ‖W_s‖²) / 2."""
        whole = 0.0
        for name in self.turns:
            several = [
                a * self._turned(name, model, own)
                for a, model, own in zip(self.alpha, self.models, matrices, strict=True)
            ]
            squares = sum(float(one.square().sum()) for one in several)
            whole += (float(sum(several).square().sum()) - squares) / 2  # type: ignore[union-attr]
        return whole

    def gradients(self, matrices: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Of f by each matrix."""
        slopes = [[torch.zeros_like(one) for one in own] for own in matrices]
        for name, turns in self.turns.items():
            several = [
                a * self._turned(name, model, own)
                for a, model, own in zip(self.alpha, self.models, matrices, strict=True)
            ]
            total = torch.stack(several).sum(0)
            for s, own in enumerate(matrices):
                others = self.alpha[s] * (total - several[s])
                for turn in turns:
                    rest = self._turned(name, self.models[s], own, without=turn)
                    slopes[s][turn.number] += turn.rows(others) @ turn.rows(rest).T
        return slopes

    def _turned(
        self, name: str, model: Tensors, own: Sequence[Tensor], without: _Turn | None = None
    ) -> Tensor:
        """A tensor of a network in the universe's order."""
        tensor = model[name]
        for turn in self.turns[name]:
            if turn is not without:
                tensor = turn(tensor, own[turn.number])
        return tensor

    def _assigned(self, scores: Tensor, cells: Sequence[Order]) -> Tensor:
        """The permutation matrix with the largest inner product, cell by cell."""
        table, found = scores.numpy(), torch.zeros_like(scores)
        for cell in cells:
            rows, columns = linear_sum_assignment(table[np.ix_(cell, cell)], maximize=True)
            found[cell[rows], cell[columns]] = 1
        return found

    def _at(self, ends: Sequence[Sequence[Tensor]], length: float) -> list[list[Tensor]]:
        return [
            [torch.lerp(start, end, length) for start, end in zip(*both, strict=True)]
            for both in zip(self.matrices, ends, strict=True)
        ]

    def _length(self, ends: Sequence[Sequence[Tensor]], start: float) -> tuple[float, float]:
        """How far to go toward the ends, and f there."""
        points = np.linspace(0, 1, self.degree + 1)
        values = [start, *(self.objective(self._at(ends, float(t))) for t in points[1:])]
        line = np.polyfit(points, values, self.degree)
        inner = [float(r.real) for r in np.roots(np.polyder(line)) if abs(r.imag) < 1e-9]
        best = max(
            (*(t for t in inner if 0 < t < 1), 1.0), key=lambda t: float(np.polyval(line, t))
        )
        return best, values[-1] if best == 1.0 else self.objective(self._at(ends, best))
