"""What clients observe of a fused network's weights, and how precisely.

A client observes, with precision σ⁻², the global coordinates of which it owns the units of all
axes. In the top-down pass as published, one that owns the units which a tensor reads observes
zeros between these and the units that it does not own. What makes an output is observed by class
share; jointly, relative to an equal share (see `fedbayes.matching.network`).
"""

import numpy as np

from fedbayes.errors import ModelError
from fedbayes.fusion.coordinates import Array, Coordinates, Indices, Key, Matched, Places
from fedbayes.matching import MatchingSettings
from fedbayes.matching.network import class_shares
from fedbayes.models.steps import Steps, kind


class EntryEvidence:
    """What clients observe.

    Args:
        coordinates: of their tensors.
        settings: of the matching.
        counts: training samples of each client and class [S, K], or of each client [S, 1]; equal
            shares by default.

    Raises:
        ModelError: the counts do not fit.
    """

    def __init__(
        self, coordinates: Coordinates, settings: MatchingSettings, counts: Array | None
    ) -> None:
        self.coordinates, self.settings = coordinates, settings
        self.clients = len(coordinates.donors)
        self.means = _prior_means(coordinates.donors[0].steps, settings.bias_mean)
        """Prior means μ0 of tensors, where they are not 0."""
        self.shares = {
            group: _shares(counts, self.clients, coordinates.groups[group][0].count)
            for group in sorted(coordinates.outputs)
        }
        """By group of outputs, each client's share in each of them [S, K]."""

    def mean(self, name: str) -> float:
        """Prior mean μ0 of a tensor's entries."""
        return self.means.get(name, 0.0)

    def of_units(
        self, client: int, key: Key, group: int, cell: int, matched: Matched, joint: bool
    ) -> Array:
        """Precision of what a unit of its own has in a tensor, as `Coordinates.slices` has it."""
        found = np.ones(self.coordinates.per_unit(key, group, cell))
        for other in self.coordinates.keys(key[0]):
            if other != key:
                found = np.multiply.outer(found, self._along(client, other, matched, joint))
        return found.ravel() / self.settings.sigma**2

    def sums(self, name: str, matched: Matched, joint: bool) -> tuple[Array, Array]:
        """Of a tensor on global coordinates, sums over clients of u and b (see `costs`)."""
        keys, mean = self.coordinates.keys(name), self.mean(name)
        shape = [self.coordinates.starts(key, matched)[1] for key in keys]
        sums, precisions = np.zeros(shape), np.zeros(shape)
        for client in range(self.clients):
            q = np.full(shape, self.settings.sigma**-2)
            for key in keys:
                q *= _shaped(self._along(client, key, matched, joint), key, len(shape))
            sums += q * (self.coordinates.placed(client, name, matched) - mean)
            precisions += q
        return sums, precisions

    def combined(self, name: str, matched: Matched, joint: bool) -> Array:
        """A tensor that matched units are on, fused, on global coordinates.

        Posterior means (Eq. 5 of the GPI-FNM paper); joint, means over the clients that own all
        axes' units, and of tensors that make outputs sums over owners by class share.
        """
        sums, precisions = self.sums(name, matched, joint)
        prior = 0.0 if joint else self.settings.sigma0**-2
        if joint:
            precisions = self._of_all(name, matched, precisions)
        return self.mean(name) + _quotient(sums, precisions, prior)

    def averaged(self, name: str, matched: Matched) -> Array:
        """A tensor that no matched unit owns a weight of, fused: the mean over its owners.

        Such are biases of outputs, by class share; running statistics; what belongs to no units.
        """
        sums, precisions = self.sums(name, matched, joint=True)
        return self.mean(name) + _quotient(sums, precisions, 0.0)

    def process(self, places: Places) -> float:
        """The terms of the Beta-Bernoulli process, of each cell of a group on its own."""
        members, total = places.members, 0.0
        for cell in np.unique(places.cells):
            here = places.cells == cell
            alone = [int((here[of] & (members[of] == 1)).sum()) for of in places.of]
            owners: Indices = np.repeat(np.arange(self.clients), alone)
            total += self.settings.objective.process(members[here], owners, self.clients)
        return total

    def _along(self, client: int, key: Key, matched: Matched, joint: bool) -> Array:
        """How much a client observes on a global axis: all, its class share, nothing [size]."""
        starts, size = self.coordinates.starts(key, matched)
        reads = any(other in self.coordinates.readers for other in self.coordinates.keys(key[0]))
        found = np.ones(size)
        for group, begin in starts.items():
            places = matched[group]
            assert places is not None
            if group in self.shares:
                values = self.shares[group][client] * (self.clients if joint else 1)
            elif joint or not reads or key in self.coordinates.readers:
                values = places.owned(client)
            else:
                continue
            lengths = self.coordinates.lengths(key, group, places)
            found[begin[0] : begin[0] + lengths.sum()] = np.repeat(values, lengths)
        return found

    def _of_all(self, name: str, matched: Matched, precisions: Array) -> Array:
        """What sums are divided by: the precision of all clients where a tensor makes outputs."""
        for key in self.coordinates.keys(name):
            groups = self.coordinates.on(key)
            makes = bool(groups) and key not in self.coordinates.readers
            if makes and all(group in self.shares for group in groups):
                along = [self._along(s, key, matched, joint=True) for s in range(self.clients)]
                whole = np.sum(along, axis=0) / self.settings.sigma**2
                return np.broadcast_to(_shaped(whole, key, precisions.ndim), precisions.shape)
        return precisions


def _shares(counts: Array | None, clients: int, outputs: int) -> Array:
    if counts is None:
        return class_shares(None, clients, outputs)
    if len(counts) != clients or counts.shape[1] not in (1, outputs):
        raise ModelError(
            f"the counts have shape {counts.shape}, expected {(clients, outputs)}: a row for each "
            "network, a column for each class"
        )
    if not (np.isfinite(counts).all() and (counts >= 0).all()):
        raise ModelError("counts must be finite and at least 0")
    return class_shares(np.broadcast_to(counts, (clients, outputs)), clients, outputs)


def _prior_means(steps: Steps, bias_mean: float) -> dict[str, float]:
    """Of tensors whose prior mean is not 0: scales of normalizations, and biases."""
    found = {}
    for node in steps.nodes:
        norm = kind(node).endswith("norm")
        name = steps.tensor(node, "weight" if norm else "bias")
        if name is not None:
            found[name] = 1.0 if norm else bias_mean
    return found


def _quotient(sums: Array, precisions: Array, prior: float) -> Array:
    """Of what is observed; 0 elsewhere."""
    total = precisions + prior
    return np.divide(sums, total, out=np.zeros_like(sums), where=precisions > 0)


def _shaped(values: Array, key: Key, ndim: int) -> Array:
    """Values of an axis, shaped to multiply a tensor."""
    return values.reshape([-1 if axis == key[1] else 1 for axis in range(ndim)])
