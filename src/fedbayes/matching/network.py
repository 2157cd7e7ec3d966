"""Matching whole networks: top down as published, then, if asked, up and down the layers.

A fully connected network of L hidden layers is a list of L + 1 weights [outputs, inputs] and
biases [outputs]. An atom is a neuron of a hidden layer.

Top down is Algorithm 2 of the GPI-FNM paper. An atom is its bias and its outgoing weights, placed
on the global neurons of the layer above with zeros elsewhere. In the lowest layer it has its
incoming weights too. So upper layers are matched by very little.

Alternating takes the matching from there by coordinate descent on one objective for the whole
network. Every global weight has the prior N(μ0, σ0²) and is observed once by each client that
owns both its ends, so

    Σ over weights and biases of f(b) u²  +  Σ over layers of the process' terms

with f, b and u as in `costs`. Given the other layers, the part of it that one layer decides is
the objective of `match_layer`. Its atoms have incoming weights, bias and outgoing weights. A client
observes only the coordinates of global neurons that it owns (precision 0 elsewhere). So every sweep
over a layer's clients lowers the objective of the whole or leaves it.

Class shares are relative to an equal share here. Otherwise the few weights that lead to the outputs
would count S times less than all others, although they say most about a neuron.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedbayes.core.brief import Brief
from fedbayes.errors import ModelError
from fedbayes.matching.costs import Array, Indices
from fedbayes.matching.layer import LayerMatching, match_layer
from fedbayes.matching.passes import Passes, Watch
from fedbayes.matching.settings import MatchingSettings


@dataclass(frozen=True)
class Dense:
    """A fully connected network as plain arrays."""

    weights: list[Array]
    """[outputs, inputs] of each layer, first to last."""
    biases: list[Array] | None
    """[outputs] of each layer; None where there are none."""

    @property
    def widths(self) -> list[int]:
        """Sizes of the inputs, the hidden layers and the outputs."""
        return [self.weights[0].shape[1], *(len(weight) for weight in self.weights)]


@dataclass(frozen=True, repr=False)
class NetworkMatching(Brief):
    """A fused network and how it came about."""

    network: Dense
    """The fused network, layer by layer."""
    layers: list[LayerMatching]
    """The matching of each hidden layer, first to last."""
    seconds: list[float]
    """Time spent on each hidden layer."""
    objective: list[float]
    """Twice the objective of the whole network, at the start and after every pass."""


def match_networks(
    networks: Sequence[Dense],
    settings: MatchingSettings,
    *,
    counts: Array | None = None,
    names: Sequence[str] | None = None,
    seed: int = 0,
    watch: Watch | None = None,
    start: Sequence[Sequence[Indices]] | None = None,
) -> NetworkMatching:
    """Fuse networks that were trained apart.

    Args:
        networks: of each client; depth, inputs and outputs agree, widths need not.
        settings: the model.
        counts: training samples of each client and class [S, K]; outgoing weights of the last
            hidden layer are observed with precision share/σ², share = N_sk / Σ_s N_sk. Equal
            shares by default.
        names: of the networks, for errors.
        seed: of the order of clients in sweeps.
        watch: called with what is being done.
        start: of each client and hidden layer, the global neuron of each neuron: the matching to
            go up and down the layers from, instead of top-down ones. Needs `alternations`.

    Raises:
        ModelError: the networks differ in depth, inputs, outputs or biases, or counts do not fit.
        ValueError: there is a start, and no pass that goes on from it.
    """
    _check(networks, counts, names or [f"network {client}" for client in range(len(networks))])
    work, say = _Networks(networks, settings, counts), watch or (lambda _: None)
    if start is not None and not settings.alternations:
        raise ValueError("a start has no effect without alternations")
    begin = None if start is None else [_started(layer) for layer in zip(*start, strict=True)]
    best = work.best(seed, say) if begin is None else work.improved(begin, seed, say)
    return NetworkMatching(work.assemble(best.layers), best.layers, best.seconds, best.objective)


def _started(places: Sequence[Indices]) -> LayerMatching:
    """A layer's matching by its assignments alone; atoms have no coordinates before a pass."""
    used, index = np.unique(np.concatenate(places), return_inverse=True)
    ends = np.cumsum([len(own) for own in places])[:-1]
    members = np.bincount(index, minlength=len(used))
    return LayerMatching(np.split(index, ends), np.empty((len(used), 0)), members, [])


def class_shares(counts: Array | None, clients: int, outputs: int) -> Array:
    """Of each client, its share of the samples of each class [S, K]; equal ones by default.

    A class that nobody saw says nothing of anybody.
    """
    if counts is None:
        return np.full((clients, outputs), 1 / clients)
    totals = np.broadcast_to(counts.sum(axis=0), counts.shape)
    shares = np.full(counts.shape, 1 / clients)
    np.divide(counts, totals, out=shares, where=totals > 0)
    return shares


class _Networks(Passes[LayerMatching]):
    """The clients' networks, and what follows from a matching of their hidden layers."""

    def __init__(
        self, networks: Sequence[Dense], settings: MatchingSettings, counts: Array | None
    ) -> None:
        super().__init__(len(networks[0].weights) - 1, settings)
        self.networks = networks
        self.inputs, self.outputs = networks[0].widths[0], networks[0].widths[-1]
        self.biases = networks[0].biases is not None
        self.shares = class_shares(counts, len(networks), self.outputs)

    def assemble(self, layers: Sequence[LayerMatching]) -> Dense:
        """The global network of a matching.

        As published, weights are posterior means (Eq. 5), where a client observes zeros between
        its neuron and those above that it does not own. After alternating, every weight is the
        mean over the clients that own both its ends: the prior that steers the matching would
        shrink weights by how few own them, again in every layer. Weights to the outputs are the
        sum over owners by class share, as in an ensemble: were nothing matched, the logits would
        be the clients' logits weighted by class share.
        """
        joint = self.settings.alternations > 0
        prior = 0.0 if joint else self.settings.sigma0**-2
        weights, biases = [], []
        for depth in range(self.hidden + 1):
            last = depth == self.hidden
            mean = 0.0 if last else self.settings.bias_mean
            sums, precisions = self._weight_sums(depth, layers, joint)
            bias_sums, bias_precisions = self._bias_sums(depth, layers, joint)
            if joint and last:
                precisions = np.broadcast_to(bias_precisions[:, None], sums.shape)
            weights.append(_divide(sums, precisions + prior))
            biases.append(mean + _divide(bias_sums, bias_precisions + (0.0 if last else prior)))
        return Dense(weights, biases if self.biases else None)

    def value(self, layers: Sequence[LayerMatching]) -> float:
        """Twice the objective of the whole network; see the head of this file."""
        objective, prior = self.settings.objective, np.array(self.settings.sigma0**-2)
        total = 0.0
        for depth in range(self.hidden + 1):
            sums, precisions = self._weight_sums(depth, layers, joint=True)
            total += float((objective.curvature(precisions, prior) * sums**2).sum())
            if self.biases and depth < self.hidden:
                sums, precisions = self._bias_sums(depth, layers, joint=True)
                total += float((objective.curvature(precisions, prior) * sums**2).sum())
        for layer in layers:
            owners = np.concatenate(
                [
                    np.full(int(alone.sum()), client)
                    for client, places in enumerate(layer.assignments)
                    for alone in [layer.members[places] == 1]
                ]
            )
            total += objective.process(layer.members, owners, len(self.networks))
        return total

    def match(
        self,
        depth: int,
        layers: Sequence[LayerMatching | None],
        rng: np.random.Generator,
        joint: bool,
    ) -> LayerMatching:
        """Match one hidden layer given those above (and, if joint, below)."""
        settings, objective = self.settings, self.settings.objective
        if settings.alternations and settings.start_gamma and not joint:
            objective = replace(objective, gamma=settings.start_gamma)
        atoms = [self._atoms(client, depth, layers, joint) for client in range(len(self.networks))]
        precisions = np.array(
            [self._precision(client, depth, layers, joint) for client in range(len(self.networks))]
        )
        width = precisions.shape[1]
        mean = np.zeros(width)
        if self.biases:
            mean[self._size(depth - 1, layers) if joint or depth == 0 else 0] = settings.bias_mean
        current = layers[depth]
        return match_layer(
            atoms,
            precisions,
            prior_mean=mean,
            prior_precision=np.full(width, settings.sigma0**-2),
            objective=objective,
            iterations=1 if current else settings.iterations,
            rng=rng,
            start=current.assignments if current else None,
        )

    def _atoms(
        self, client: int, depth: int, layers: Sequence[LayerMatching | None], joint: bool
    ) -> Array:
        """[incoming weights, bias, outgoing weights] of each neuron, on global coordinates."""
        network = self.networks[client]
        parts = []
        if joint or depth == 0:
            parts.append(self._placed(network.weights[depth], client, depth - 1, layers))
        if network.biases is not None:
            parts.append(network.biases[depth][:, None])
        parts.append(self._placed(network.weights[depth + 1].T, client, depth + 1, layers))
        return np.hstack(parts)

    def _precision(
        self, client: int, depth: int, layers: Sequence[LayerMatching | None], joint: bool
    ) -> Array:
        """Precision of each coordinate of `_atoms`."""
        parts = []
        if joint or depth == 0:
            parts.append(self._owned(client, depth - 1, layers))
        if self.biases:
            parts.append(np.ones(1))
        if depth == self.hidden - 1:
            parts.append(self._share(client, joint))
        elif joint:
            parts.append(self._owned(client, depth + 1, layers))
        else:
            parts.append(np.ones(self._size(depth + 1, layers)))
        return np.concatenate(parts) / self.settings.sigma**2

    def _size(self, depth: int, layers: Sequence[LayerMatching | None]) -> int:
        """Global neurons of a hidden layer; −1 is the inputs, `hidden` the outputs."""
        layer = layers[depth] if 0 <= depth < self.hidden else None
        if layer is not None:
            return layer.size
        return self.inputs if depth < 0 else self.outputs

    def _places(
        self, client: int, depth: int, layers: Sequence[LayerMatching | None]
    ) -> Indices | slice:
        """Where a client's neurons of a layer are among the global ones."""
        layer = layers[depth] if 0 <= depth < self.hidden else None
        return layer.assignments[client] if layer is not None else slice(None)

    def _placed(
        self, rows: Array, client: int, depth: int, layers: Sequence[LayerMatching | None]
    ) -> Array:
        placed = np.zeros((len(rows), self._size(depth, layers)))
        placed[:, self._places(client, depth, layers)] = rows
        return placed

    def _owned(self, client: int, depth: int, layers: Sequence[LayerMatching | None]) -> Array:
        owned = np.zeros(self._size(depth, layers))
        owned[self._places(client, depth, layers)] = 1.0
        return owned

    def _weight_sums(
        self, depth: int, layers: Sequence[LayerMatching], joint: bool
    ) -> tuple[Array, Array]:
        """Sums of precision times weight, and of precision, of one layer's global weights."""
        # Unless joint, a client with the lower neuron observes zeros to upper ones it has not.
        shape = (self._size(depth, layers), self._size(depth - 1, layers))
        sums, precisions = np.zeros(shape), np.zeros(shape)
        inner = 0 < depth < self.hidden
        for client, network in enumerate(self.networks):
            above = np.arange(shape[0])[self._places(client, depth, layers)]
            below = np.arange(shape[1])[self._places(client, depth - 1, layers)]
            q = self._output_precision(client, depth, joint)[:, None]
            block = np.ix_(above, below)
            sums[block] += q * network.weights[depth]
            if inner and not joint:
                precisions[:, below] += q
            else:
                precisions[block] += q
        return sums, precisions

    def _bias_sums(
        self, depth: int, layers: Sequence[LayerMatching], joint: bool
    ) -> tuple[Array, Array]:
        """The same for biases, less their prior mean; networks without have none to add."""
        size = self._size(depth, layers)
        sums, precisions = np.zeros(size), np.zeros(size)
        mean = 0.0 if depth == self.hidden else self.settings.bias_mean
        for client, network in enumerate(self.networks):
            q = self._output_precision(client, depth, joint)
            places = self._places(client, depth, layers)
            precisions[places] += q
            if network.biases is not None:
                sums[places] += q * (network.biases[depth] - mean)
        return sums, precisions

    def _share(self, client: int, joint: bool) -> Array:
        """A client's share of each class [K]; joint, relative to an equal one."""
        share: Array = self.shares[client]
        return share * len(self.networks) if joint else share

    def _output_precision(self, client: int, depth: int, joint: bool) -> Array:
        """Precision of a layer's weights by output [outputs], or the same for all [1]."""
        one = self._share(client, joint) if depth == self.hidden else np.ones(1)
        return one / self.settings.sigma**2


def _divide(sums: Array, precisions: Array) -> Array:
    """Their quotient, 0 where nobody observed anything."""
    return np.divide(sums, precisions, out=np.zeros_like(sums), where=precisions > 0)


def _check(networks: Sequence[Dense], counts: Array | None, names: Sequence[str]) -> None:
    if not networks:
        raise ModelError("there are no networks to match")
    first = networks[0]
    for name, network in zip(names, networks, strict=True):
        for what, own, wanted in (
            ("layers", len(network.weights), len(first.weights)),
            ("inputs", network.widths[0], first.widths[0]),
            ("outputs", network.widths[-1], first.widths[-1]),
        ):
            if own != wanted:
                raise ModelError(
                    f"{name} has {own} {what} and {names[0]} has {wanted}. Networks of different "
                    f"{what} cannot be matched"
                )
        if (network.biases is None) != (first.biases is None):
            raise ModelError(f"of {name} and {names[0]}, only one has biases")
        if min(network.widths) < 1:
            raise ModelError(f"{name} has a layer without neurons")
    if len(first.weights) < 2:
        raise ModelError(f"{names[0]} has no hidden layer, so there is nothing to match")
    shape = (len(networks), first.widths[-1])
    if counts is not None and counts.shape != shape:
        raise ModelError(
            f"the counts have shape {counts.shape}, expected {shape}: a row for each network, a "
            "column for each class"
        )
    if counts is not None and not (np.isfinite(counts).all() and (counts >= 0).all()):
        raise ModelError("counts must be finite and at least 0")
