"""Matching the neurons of one layer: assignments by coordinate descent over the clients."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from fedbayes.core.brief import Brief
from fedbayes.errors import ModelError
from fedbayes.matching.costs import Array, Blocks, Indices, Objective

CACHE = 2 * 1024**3
"""Bytes of products kept between visits; beyond, they are computed again at every visit."""


@dataclass(frozen=True, repr=False)
class LayerMatching(Brief):
    """Which atoms of which clients are the same global atom."""

    assignments: list[Indices]
    """Of each client, the global atom of each of its atoms [L_s], all different."""
    atoms: Array
    """Posterior means θ of the global atoms, Eq. 5 [J, D]; the most shared first."""
    members: Indices
    """Atoms that each global atom holds [J]."""
    objective: list[float]
    """Twice the objective (see `costs`) after the first pass and after each sweep."""

    @property
    def size(self) -> int:
        """Number of global atoms, J."""
        return len(self.atoms)


def match_layer(
    atoms: Sequence[Array],
    precisions: Array,
    *,
    prior_mean: Array,
    prior_precision: Array,
    objective: Objective,
    iterations: int = 5,
    rng: np.random.Generator | None = None,
    start: Sequence[Indices] | None = None,
    growing: bool = True,
) -> LayerMatching:
    """Match the atoms of S clients (Algorithm 1 of the GPI-FNM paper).

    The largest client is first: its atoms become the first global ones. The others follow by
    size, each assigned at least cost. Then, in every sweep, clients in random order are taken
    out and assigned again; a client keeps its old places unless the new ones lower the
    objective, so no sweep raises it. Sweeps end early when one changes nothing.

    Args:
        atoms: of each client [L_s, D].
        precisions: of each client's observations [S, D], at least 0; 0 is "not observed".
        prior_mean: μ0 [D].
        prior_precision: p0 [D], above 0.
        objective: ε, γ0 and the popularity terms.
        iterations: number of sweeps after the first pass.
        rng: order of the clients in sweeps; a fixed one by default.
        start: assignments to improve, instead of the first pass.
        growing: whether atoms may found global ones; else those of the first client are all that
            there are, each client has as many atoms, and all of them join.

    Raises:
        ModelError: shapes do not fit, or there are values that are not finite.
    """
    _check(atoms, precisions, prior_mean, prior_precision)
    if not growing and len({len(own) for own in atoms}) > 1:
        raise ModelError("the clients have different numbers of atoms, and none can be added")
    rng = rng or np.random.default_rng(0)
    layer = _Layer(atoms, precisions, prior_mean, prior_precision, objective, growing)
    if start is None:
        for client in sorted(range(len(atoms)), key=lambda s: -len(atoms[s])):
            layer.visit(client)
    else:
        layer.place(start)
    values = [layer.value()]
    for _ in range(iterations):
        moved = [layer.visit(int(client)) for client in rng.permutation(len(atoms))]
        values.append(layer.value())
        if not any(moved):
            break
    return layer.result(values)


def assign(costs: Array, objective: Objective) -> Indices:
    """Assign atoms at least cost, where the k-th of L that joins none pays for being the k-th.

    An atom that could join only at more than the L-th pays founds a new global atom whatever the
    others do; such atoms, and global atoms that nobody would join, are kept out of the
    assignment problem.

    Args:
        costs: of joining instead of founding the first new one [L, J].
        objective: what new ones cost (`Objective.growth`).

    Returns:
        Of each atom the column that it joins, or J for a new global atom [L].
    """
    atoms, columns = costs.shape
    possible = costs < objective.growth(np.array([atoms]))
    rows, joined = np.flatnonzero(possible.any(axis=1)), np.flatnonzero(possible.any(axis=0))
    growth = objective.growth(np.arange(atoms - len(rows) + 1, atoms + 1))
    problem = np.hstack(
        [costs[np.ix_(rows, joined)], np.broadcast_to(growth, (len(rows), len(rows)))]
    )
    index, chosen = linear_sum_assignment(problem)
    result = np.full(atoms, columns, dtype=np.int64)
    matched = chosen < len(joined)
    result[rows[index[matched]]] = joined[chosen[matched]]
    return result


def _columns(rows: Indices, wanted: Indices) -> Indices:
    """Where among `rows`, ascending, each wanted one is; their number if it is not there."""
    columns = np.searchsorted(rows, wanted)
    there = np.append(rows, -1)[columns] == wanted
    return np.where(there, columns, len(rows))


def _joined(costs: Array, columns: Indices) -> float:
    """Sum of the costs of atoms that join; founding costs nothing here."""
    joins = np.flatnonzero(columns < costs.shape[1])
    return float(costs[joins, columns[joins]].sum())


def _check(atoms: Sequence[Array], precisions: Array, mean: Array, prior: Array) -> None:
    if not atoms:
        raise ModelError("there are no clients to match")
    width = len(mean)
    for client, own in enumerate(atoms):
        if own.ndim != 2 or own.shape[1] != width:
            raise ModelError(
                f"atoms of client {client} have shape {own.shape}, expected [L, {width}]"
            )
        if not np.isfinite(own).all():
            raise ModelError(f"atoms of client {client} have NaN or infinite values")
    if precisions.shape != (len(atoms), width) or prior.shape != (width,):
        raise ModelError(
            f"precisions have shapes {precisions.shape} and {prior.shape}, expected "
            f"{(len(atoms), width)} and {(width,)}"
        )
    if not (precisions >= 0).all() or not np.isfinite(precisions).all():
        raise ModelError("precisions of observations must be finite and at least 0")
    if not (prior > 0).all() or not np.isfinite(prior).all():
        raise ModelError("precisions of the prior must be finite and above 0")


class _Layer:
    """Global atoms as rows of arrays that grow, and each client's places among them."""

    # A row without members is free. Rows have the time of their last change, so that a client
    # recomputes products with changed rows alone.

    def __init__(
        self,
        atoms: Sequence[Array],
        precisions: Array,
        mean: Array,
        prior: Array,
        objective: Objective,
        growing: bool = True,
    ) -> None:
        self.objective, self.growing = objective, growing
        self.mean = mean
        self.blocks = blocks = Blocks(precisions, prior)
        order = blocks.order
        self.v = [((own - mean) * q)[:, order] for own, q in zip(atoms, precisions, strict=True)]
        self.squares = [blocks.sums(v) for v in self.v]
        self.places: list[Indices | None] = [None] * len(atoms)
        rows = max(len(own) for own in atoms)
        self.sums = np.zeros((rows, len(mean)))
        self.precisions = np.zeros((rows, len(blocks.prior)))
        self.members = np.zeros(rows, dtype=np.int64)
        self.clients = np.zeros(rows, dtype=np.int64)  # sum of the members' indices
        self.changed = np.zeros(rows, dtype=np.int64)
        self.time = 0
        self.visited = [-1] * len(atoms)
        total = sum(len(own) for own in atoms)
        self.caching = 8 * total * total * len(blocks.wide) <= CACHE
        self.products: list[list[Array]] = [[] for _ in atoms]
        self.products_time = [-1] * len(atoms)
        self.gram = [blocks.products(v, v) for v in self.v]

    def place(self, assignments: Sequence[Indices]) -> None:
        """Begin with these assignments."""
        self._reserve(max(int(places.max()) + 1 for places in assignments if len(places)))
        for client, places in enumerate(assignments):
            self._add(client, slice(None), places)
            self.places[client] = np.array(places)

    def visit(self, client: int) -> bool:
        """Assign one client's atoms given all others; whether anything changed."""
        old = self.places[client]
        if old is not None and self.changed.max() <= self.visited[client]:
            return False
        self.time += 1
        self.visited[client] = self.time
        others = self.members.copy()
        if old is not None:
            others[old] -= 1
        rows = np.flatnonzero(others)
        costs = self._costs(client, rows, others[rows], old)
        founding = self.growing or not len(rows)  # without growth, others hold all atoms or none
        columns = assign(costs, self.objective) if founding else linear_sum_assignment(costs)[1]
        free = np.flatnonzero(others == 0)
        new = columns == len(rows)
        found = np.empty(len(columns), dtype=np.int64)
        found[~new] = rows[columns[~new]]
        if old is not None:
            # An atom that stays alone keeps its row, so that it does not count as moved.
            stays = new & (others[old] == 0)
            found[stays] = old[stays]
            new &= ~stays
            free = np.setdiff1d(free, old[stays], assume_unique=True)
            if (found[~new] == old[~new]).all() and not new.any():
                return False
            if not self._better(client, costs, rows, others, old, columns):
                return False
        count = int(new.sum())
        if count > len(free):
            begin = len(self.members)
            self._reserve(begin + count - len(free))
            free = np.concatenate([free, np.arange(begin, len(self.members))])
        found[new] = free[:count]
        moved = slice(None) if old is None else np.flatnonzero(found != old)
        if old is not None:
            self._remove(client, moved, old[moved])
        self._add(client, moved, found[moved])
        self.places[client] = found
        return True

    def value(self) -> float:
        """Twice the objective."""
        rows = np.flatnonzero(self.members)
        sums = self.blocks.sums(self.sums[rows])
        curvature = self.objective.curvature(self.precisions[rows], self.blocks.prior)
        members = self.members[rows]
        owners = self.clients[rows][members == 1]
        return float((curvature * sums).sum()) + self.objective.process(
            members, owners, len(self.v)
        )

    def result(self, values: list[float]) -> LayerMatching:
        """The matching, its atoms in order: the most shared first, then by first owner."""
        places = [p if p is not None else np.empty(0, dtype=np.int64) for p in self.places]
        rows, first = np.unique(np.concatenate(places), return_index=True)
        order = np.lexsort([first, -self.members[rows]])
        rows = rows[order]
        index = np.empty(len(self.members), dtype=np.int64)
        index[rows] = np.arange(len(rows))
        totals = self.precisions[rows] + self.blocks.prior
        theta = np.empty((len(rows), len(self.mean)))
        theta[:, self.blocks.order] = self.sums[rows] / totals[:, self.blocks.group]
        return LayerMatching(
            [index[p] for p in places], theta + self.mean, self.members[rows], values
        )

    def _costs(self, client: int, rows: Indices, others: Indices, old: Indices | None) -> Array:
        """Costs [L, J] of joining the global atoms `rows` instead of the first new one."""
        v, squares, blocks = self.v[client], self.squares[client], self.blocks
        q = blocks.precisions[client]
        sums, precisions = self.sums[rows], self.precisions[rows]
        products = self._products(client, rows)
        if old is not None:
            columns = _columns(rows, old)
            mine = np.flatnonzero(columns < len(rows))
            shared = columns[mine]
            sums[shared] -= v[mine]
            precisions[shared] -= q
            for product, gram in zip(products, self.gram[client], strict=True):
                product[:, shared] -= gram[:, mine]
        joined = self.objective.curvature(precisions + q, blocks.prior)
        before = self.objective.curvature(precisions, blocks.prior)
        match = blocks.match(v, squares, joined, products, sums)
        match += ((joined - before) * blocks.sums(sums)).sum(axis=1)
        match += self.objective.joining(others, len(self.v))
        alone = squares @ self.objective.curvature(q, blocks.prior)
        match -= (alone + self.objective.founding(len(self.v)))[:, None]
        return match

    def _products(self, client: int, rows: Indices) -> list[Array]:
        """v·u of the client's atoms with these rows as they are, a copy for each wide group."""
        if not self.caching:
            return self.blocks.products(self.v[client], self.sums[rows])
        kept = self.products[client]
        v, total = self.v[client], len(self.members)
        if not kept:
            kept = [np.zeros((len(v), total)) for _ in self.blocks.wide]
        elif kept[0].shape[1] < total:
            room = total - kept[0].shape[1]
            kept = [np.pad(product, ((0, 0), (0, room))) for product in kept]
        stale = rows[self.changed[rows] > self.products_time[client]]
        if len(stale):
            fresh = self.blocks.products(v, self.sums[stale])
            for product, columns in zip(kept, fresh, strict=True):
                product[:, stale] = columns
        # Rows that the client itself changes at this visit are stale at its next one.
        self.products_time[client] = self.time - 1
        self.products[client] = kept
        return [product[:, rows] for product in kept]

    def _better(
        self,
        client: int,
        costs: Array,
        rows: Indices,
        others: Indices,
        old: Indices,
        columns: Indices,
    ) -> bool:
        """Whether the new places lower the objective."""
        # The costs leave out that fewer atoms are another client's alone if this one joins some.
        before = _columns(rows, old)
        gain = _joined(costs, columns) - _joined(costs, before)
        singles = others[rows] == 1
        owners = (self.clients[rows] - client * np.isin(rows, old))[singles]

        def own(chosen: Indices) -> float:
            left = np.ones(len(rows) + 1, dtype=bool)
            left[chosen] = False
            count = np.bincount(owners[left[:-1][singles]], minlength=len(self.v))
            count[client] += int((chosen == len(rows)).sum())
            return float(self.objective.own(count).sum())

        return bool(gain + own(columns) - own(before) < -1e-9 * max(1.0, abs(gain)))

    def _add(self, client: int, atoms: Indices | slice, rows: Indices) -> None:
        self.sums[rows] += self.v[client][atoms]
        self.precisions[rows] += self.blocks.precisions[client]
        self.members[rows] += 1
        self.clients[rows] += client
        self.changed[rows] = self.time

    def _remove(self, client: int, atoms: Indices | slice, rows: Indices) -> None:
        self.sums[rows] -= self.v[client][atoms]
        self.precisions[rows] -= self.blocks.precisions[client]
        self.members[rows] -= 1
        self.clients[rows] -= client
        self.changed[rows] = self.time
        empty = rows[self.members[rows] == 0]
        self.sums[empty] = 0.0
        self.precisions[empty] = 0.0

    def _reserve(self, rows: int) -> None:
        """Make room for so many rows at least, half as many again for what may come."""
        have = len(self.members)
        if rows <= have:
            return
        room = max(rows, have + have // 2) - have
        self.sums = np.pad(self.sums, ((0, room), (0, 0)))
        self.precisions = np.pad(self.precisions, ((0, room), (0, 0)))
        self.members = np.pad(self.members, (0, room))
        self.clients = np.pad(self.clients, (0, room))
        self.changed = np.pad(self.changed, (0, room))
