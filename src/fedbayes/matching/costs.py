"""The objective of matching and the costs that follow from it, on plain arrays.

Notation (GPI-FNM paper, section 4, for diagonal Gaussians): an atom w of client s, observed with
precision q_s, brings v = (w − μ0) q_s. A global atom i with members from several clients has
u_i = Σ v and b_i = Σ q over its members, and prior precision p0, all per coordinate; n_i is the
number of members. Twice the objective of Eq. 8, up to constants, is

    Σ_i Σ_d f(b_id) u_id²  +  Σ_i g(n_i)  +  2 Σ_s log K_s!,      f(b) = −1/(p0+b) + ε b/(p0+b)²

The first term holds Eq. 4 (through Eq. 20) and, times ε, the KL divergence of Eq. 10, exact for
unequal precisions too, where Eq. 11 is not. The others are the Beta-Bernoulli process: g(n) adds
up the costs of joining, g(1) = −2 log(γ0/S) and −weight · log(n/(S−n)) for each further member,
and K_s is the number of atoms that client s alone owns. The paper's weight is 2.

The last term is the paper's: from the Poisson probability of the number of new atoms of the last
client, in which atoms are interchangeable. But their weights distinguish them: k of them have the
density (γ0/S)^k e^(−γ0/S) Π h(θ), without k!. Then the terms Σ_i g(n_i) alone
are, with weight 2 and without a cap, −2 log of the marginal of the process,
Π_i γ0 (S − n_i)! (n_i − 1)! / S!, which is the same in whatever order the clients come. With the
term it is not, and what is best for one client may raise the objective of all.

Putting an atom into global atom i changes the first term by f(b+q)(u+v)² − f(b)u². Expanded, all
that couples atoms with global atoms is the products v·u: a few matrix products in all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

NewAtoms = Literal["paper", "exchangeable"]
"""The cost of k new atoms of a client in addition to −2 k log(γ0/S): 2 log k!, or nothing."""
WIDE = 32
"""Coordinates of one precision from which they get a matrix product of their own."""


@dataclass(frozen=True)
class Objective:
    """The numbers of the objective besides the Gaussians' means and precisions."""

    epsilon: float = 0.0
    """Weight ε of the KL term, Eq. 8, at least 0; 0 is PFNM."""
    gamma: float = 1.0
    """Mass γ0 of the Beta-Bernoulli process, above 0: more of it, more global atoms."""
    popularity_cap: int | None = 10
    """Members above this count no more for an atom's popularity; None for the paper's formula."""
    popularity_weight: float = 2.0
    """Factor of the log-odds of joining: 2 in the paper, 1 in its authors' earlier program."""
    new_atoms: NewAtoms = "paper"
    """Whether new atoms of a client pay for their number."""

    def curvature(self, b: Array, prior: Array) -> Array:
        """f(b), what a squared sum counts for: −1/(p0+b) + ε b/(p0+b)².

        Args:
            b: sum of the members' precisions.
            prior: p0, of a shape that broadcasts with b.
        """
        total = prior + b
        return (self.epsilon * b / total - 1) / total

    def joining(self, members: Indices, clients: int) -> Array:
        """Cost of joining atoms with so many other members, each at least 1: −log-odds [J]."""
        counted = members.astype(np.float64)
        if self.popularity_cap is not None:
            counted = np.minimum(counted, self.popularity_cap)
        return -self.popularity_weight * np.log(counted / (clients - counted))

    def founding(self, clients: int) -> float:
        """Cost of a new atom, without the log k that counts how many there are."""
        return float(-2 * np.log(self.gamma / clients))

    def process(self, members: Indices, owners: Indices, clients: int) -> float:
        """The terms of the Beta-Bernoulli process, Σ_i g(n_i) + 2 Σ_s log K_s! (paper).

        Args:
            members: n_i [J], at least 1.
            owners: of each atom with one member, the client that it belongs to [number of such].
            clients: S.
        """
        steps = np.concatenate([[self.founding(clients)], self._steps(clients)])
        own = np.bincount(owners, minlength=clients)
        return float(np.cumsum(steps)[members - 1].sum() + self.own(own).sum())

    def own(self, count: Indices) -> Array:
        """What atoms cost for their number K that a client alone owns: 2 log K!, or nothing."""
        if self.new_atoms == "exchangeable":
            return np.zeros(len(count))
        return np.asarray(2 * gammaln(count + 1.0))

    def growth(self, order: Indices) -> Array:
        """What the k-th new atom costs more than the first: 2 log k, or nothing."""
        if self.new_atoms == "exchangeable":
            return np.zeros(len(order))
        return np.asarray(2 * np.log(order))

    def _steps(self, clients: int) -> Array:
        return self.joining(np.arange(1, clients), clients)


class Blocks:
    """Coordinates grouped by precision: equal ones share every number but the sums themselves.

    Args:
        precisions: of the clients' observations, q [S, D], at least 0; 0 is "not observed".
        prior: p0 [D], above 0.
    """

    def __init__(self, precisions: Array, prior: Array) -> None:
        table, group = np.unique(np.vstack([precisions, prior]), axis=1, return_inverse=True)
        sizes = np.bincount(group)
        ranks = np.argsort(np.argsort(sizes < WIDE, kind="stable"))
        self.order = np.argsort(ranks[group], kind="stable")
        """Original index of each coordinate, groups sequentially, wide ones first."""
        places = np.argsort(ranks)
        sizes = sizes[places]
        self.starts = np.cumsum(sizes) - sizes
        self.group = np.repeat(np.arange(len(sizes)), sizes)
        self.precisions: Array = table[:-1, places]
        """Precisions by group [S, B]."""
        self.prior: Array = table[-1, places]
        """Prior precision by group [B]."""
        ends = self.starts + sizes
        wide = int((sizes >= WIDE).sum())
        self.wide = [slice(a, b) for a, b in zip(self.starts[:wide], ends[:wide], strict=True)]
        """Coordinates of each wide group, the first groups."""
        self.narrow = slice(int(ends[wide - 1]) if wide else 0, len(self.order))
        """The other coordinates."""

    def sums(self, values: Array) -> Array:
        """Squares summed over each group, [n, D] to [n, B]."""
        return np.add.reduceat(values * values, self.starts, axis=1)

    def products(self, v: Array, u: Array) -> list[Array]:
        """v·u over each wide group, a matrix [L, J] for each."""
        return [v[:, block] @ u[:, block].T for block in self.wide]

    def match(
        self, v: Array, squares: Array, joined: Array, products: Sequence[Array], u: Array
    ) -> Array:
        """Σ_d f(b+q) (v² + 2uv) for every atom and global atom [L, J].

        Args:
            v: atoms of the client [L, D].
            squares: their `sums` [L, B].
            joined: f(b+q) by group [J, B].
            products: v·u over each wide group.
            u: sums of the global atoms [J, D]; wide coordinates are not read.
        """
        narrow = self.narrow
        tail = u[:, narrow] * joined[:, self.group[narrow]]
        left = np.hstack([squares, 2 * v[:, narrow]])
        costs = left @ np.hstack([joined, tail]).T
        for group, product in enumerate(products):
            costs += product * (2 * joined[:, group])
        return costs


def cost_matrix(
    atoms: Array,
    precision: Array,
    sums: Array,
    precisions: Array,
    members: Indices,
    clients: int,
    *,
    prior_mean: Array,
    prior_precision: Array,
    objective: Objective,
) -> Array:
    """Costs of giving a client's atoms to global atoms or to new ones (Eq. 6 + ε Eq. 11).

    Each entry is the change of twice Eq. 8: column i < J for joining global atom i, column J + k
    for founding the k-th new one. Corrected where the paper misprints or holds for equal
    precisions alone.

    Args:
        atoms: w of the client [L, D].
        precision: q of the client [D].
        sums: u of the global atoms without this client [J, D].
        precisions: b of the global atoms [J, D].
        members: how many atoms each holds [J], at least 1.
        clients: number of clients S, this one included.
        prior_mean: μ0 [D].
        prior_precision: p0 [D], above 0.
        objective: ε, γ0 and the popularity terms.

    Returns:
        [L, J + L].
    """
    v = (atoms - prior_mean) * precision
    joined = objective.curvature(precisions + precision, prior_precision)
    before = (objective.curvature(precisions, prior_precision) * sums**2).sum(axis=1)
    costs = v**2 @ joined.T + 2 * v @ (joined * sums).T
    costs += (joined * sums**2).sum(axis=1) - before + objective.joining(members, clients)
    alone = v**2 @ objective.curvature(precision, prior_precision)
    return np.hstack([costs, new_costs(alone, clients, objective)])


def new_costs(alone: Array, clients: int, objective: Objective) -> Array:
    """Costs of new atoms [L, L]; `alone` is Σ_d f(q) v² of each atom [L]."""
    order = np.arange(1, len(alone) + 1)
    costs: Array = alone[:, None] + (objective.founding(clients) + objective.growth(order))
    return costs
