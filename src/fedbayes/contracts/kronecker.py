"""The posterior of methods whose precision is the federation's: Kronecker products by layer.

Clients' products A_k ⊗ B_k do not add to a product. K-FAC takes the expectation of a product for
that of its factors: of pooled data it is S − δ = (Σ n_k A_k) ⊗ (Σ n_k B_k)/Σ n_k, whose factors
add. Sums travel: the server keeps them, a client its own terms.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

import torch

from fedbayes.contracts.changes import norm
from fedbayes.contracts.method import Info, Method, Sampler
from fedbayes.contracts.natural import KNOWN_STD
from fedbayes.contracts.parts import Part, Reports
from fedbayes.contracts.reports import Report, Sum
from fedbayes.contracts.run import Federation, RoundContext
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Tensors, named, part
from fedbayes.errors import MessageError
from fedbayes.inference.kronecker import Metric, Spectrum, layered

Moves = Callable[[torch.Generator], Tensors]
"""Draws how far weights are from their means."""


@dataclass(frozen=True)
class CurvatureSums:
    """Sums over clients, float64, at the server; at a client, its own.

    Without tensors before the client's first report.
    """

    shift: Tensors = field(default_factory=dict)
    """Σ h_k by weight."""
    inputs: Tensors = field(default_factory=dict)
    """Σ n_k A_k [d, d] by layer."""
    outputs: Tensors = field(default_factory=dict)
    """Σ n_k B_k [o, o] by layer."""
    diagonal: Tensors = field(default_factory=dict)
    """Summed Fisher diagonals of the other weights."""
    count: Tensors = field(default_factory=dict)
    """`samples`, Σ n_k, a scalar."""


@dataclass(frozen=True)
class KroneckerServer:
    """The server's state."""

    weights: Tensors
    """w_g, float64."""
    pool: CurvatureSums
    basis: Tensors
    """Of each layer's sums `inputs/LAYER` and `outputs/LAYER` the eigenvalues, and eigenvectors by
    `inputs_basis/LAYER` and `outputs_basis/LAYER`."""


PARTS = ("shift", "inputs", "outputs", "diagonal", "count")
REACH = ("energy", "length")
"""What a report also has, for its round alone."""


def _typical(part: str, method: object, server: KroneckerServer, run: Federation) -> float:
    """The sum so far; before, one of enough samples that the first report is not too long."""
    sums: Tensors = getattr(server.pool, part)
    ones = {n: torch.ones_like(t) for n, t in sums.items()}
    each = run.network.initial if part == "shift" else ones
    least = KNOWN_STD**-2 * norm(t.cpu().double() for t in each.values())
    return max(norm(sums.values()), least)


_SUM = Part(
    origin="zero",
    tracked=True,
    range=65536.0,
    joint="an entrywise median of curvature matrices is not a curvature. Set method.covariance = "
    "'diagonal'",
    uncompressed="a Newton step divides by second moments, and compression errors can make them "
    "invalid",
)
"""A part of which the server keeps the sum."""


class SharedKroneckerPosterior(Method[KroneckerServer, CurvatureSums, Sum]):
    """A Gaussian around w_g whose precision is S, and Newton steps of what clients report.

    w_g ← w_g + S⁻¹ Σ_k c_k with the shifts c_k of a round, and the S that the round comes to.
    """

    server_state = KroneckerServer
    client_state = CurvatureSums
    reports = Reports(
        {name: replace(_SUM, typical=partial(_typical, name)) for name in PARTS}
        | dict.fromkeys(REACH, replace(_SUM, typical=inf))
    )

    @property
    @abstractmethod
    def delta(self) -> float:
        """δ, the prior's precision."""

    @property
    @abstractmethod
    def temper(self) -> float:
        """T, of the likelihood: curvature counts 1/T."""

    @property
    @abstractmethod
    def rho(self) -> float:
        """The damping of clients' changes; 0 if it is one over the cohort."""

    @property
    @abstractmethod
    def furthest(self) -> float:
        """How many times as far as clients the server's step may go in a layer; 0: no bound."""

    @abstractmethod
    def sampler(self, mean: Tensors, moves: Moves, run: Federation) -> Sampler:
        """Outputs under draws around means."""

    def begin(self, run: Federation, layers: Mapping[str, tuple[int, int]]) -> KroneckerServer:
        """The initialization, and no curvature yet.

        Args:
            run: the run.
            layers: inputs and outputs of those that have Kronecker factors.
        """
        zero = {
            n: torch.zeros(t.shape, dtype=torch.float64) for n, t in run.network.initial.items()
        }
        covered = {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}
        pool = CurvatureSums(
            zero,
            {n: torch.zeros(d, d, dtype=torch.float64) for n, (d, _) in layers.items()},
            {n: torch.zeros(o, o, dtype=torch.float64) for n, (_, o) in layers.items()},
            {n: t for n, t in zero.items() if n not in covered},
            {"samples": torch.zeros((), dtype=torch.float64)},
        )
        weights = {n: t.double() for n, t in run.network.initial.items()}
        return KroneckerServer(weights, pool, _basis(pool))

    def message(self, server: KroneckerServer, at: RoundContext) -> Message:
        """Means, the sum of shifts, and the metric: eigenvectors and eigenvalues of its factors."""
        pool = server.pool
        message = named("mean", server.weights) | named("shift", pool.shift) | server.basis
        message |= named("diagonal", pool.diagonal) | named("count", pool.count)
        return {name: t.float() for name, t in message.items()}

    def expected(self, message: Message, run: Federation) -> Message:
        """What is added to each of the sums."""
        rest = {key: part(message, key) for key in ("shift", "diagonal", "count")}
        factors = {key: part(message, f"{key}_basis") for key in ("inputs", "outputs")}
        places = dict.fromkeys([*factors["inputs"], *rest["diagonal"]], rest["count"]["samples"])
        every = rest | factors | dict.fromkeys(REACH, places)
        return {n: t for key, each in every.items() for n, t in named(key, each).items()}

    def metric_of(self, told: Tensors) -> Metric:
        """S − δ, the curvature of all data, from a server's message or its parts."""
        double = {n: t.double() for n, t in told.items()}
        share = 1 / self.temper
        each = share / max(float(told["count/samples"]), _LEAST)
        left, right = part(double, "outputs_basis"), part(double, "inputs_basis")
        outputs, inputs = part(double, "outputs"), part(double, "inputs")
        layers = {
            name: Spectrum(left[name], right[name], each * torch.outer(outputs[name], values))
            for name, values in inputs.items()
        }
        diagonal = part(double, "diagonal")
        return Metric(layers, {n: share * t.clamp_min(0) for n, t in diagonal.items()})

    def accept(self, server: KroneckerServer, report: Report, run: Federation) -> None:
        """What is added leaves diagonals and the number of samples positive, and no step is of
        negative reach.
        """
        sums, tensors = flattened(server.pool), dense(report.tensors)
        for name, change in tensors.items():
            key = name.partition("/")[0]
            if key in REACH:
                if bool(change < 0):
                    raise MessageError(f"{name!r} is negative")
                continue
            total = sums[name] + change
            entries = total.diagonal() if key in ("inputs", "outputs") else total
            least = -1e-4 * (1 + sums[name].abs().max())
            if key != "shift" and bool((entries < least).any()):
                raise MessageError(f"it removes more curvature from {name!r} than there is")

    def update(
        self, server: KroneckerServer, reports: Sum, at: RoundContext
    ) -> tuple[KroneckerServer, Info]:
        """Add to the sums, and take the Newton step S⁻¹ Σ c_k with the new ones."""
        before = flattened(server.pool)
        pool = pooled({name: t + reports.tensors[name] for name, t in before.items()})
        return self._stepped(server.weights, pool, reports.tensors, reports.clients), {}

    def _stepped(
        self, weights: Tensors, pool: CurvatureSums, told: Tensors, clients: int
    ) -> KroneckerServer:
        """The state after the Newton step x = S⁻¹ Σ ρ c_k.

        Each c_k is M_k m_k with a client's own metric M_k and step m_k = w_k − w_g. Were S at least
        Σ ρ M_k, ⟨x, Σ ρ c_k⟩ would be at most the clients' Σ ρ ⟨m_k, c_k⟩, as ⟨c, M⁻¹ c⟩ is convex
        in both. A product of sums may be far less than the sum of products, and x then goes much
        further than any client. So in each layer x is shortened to `furthest` times that, and to as
        many times their Σ ρ ‖m_k‖, if `furthest` is not 0. Both count n ρ times where that is more
        than 1, the sum of n undamped changes.

        Args:
            weights: w_g.
            pool: the sums with the reports.
            told: `shift/…`, and what `reach` has, of all reports.
            clients: how many they are of.
        """
        basis, shift = _basis(pool), part(told, "shift")
        metric = self.metric_of(
            basis | flattened(CurvatureSums(diagonal=pool.diagonal, count=pool.count))
        )
        step = metric.scaled(lambda v: 1 / (v + self.delta), shift)
        if not self.furthest:
            return KroneckerServer(
                {name: w + step[name] for name, w in weights.items()}, pool, basis
            )
        own = reach(metric.layers, step, shift)
        times = self.furthest * max(1.0, clients * self.rho)
        share = {name: (times * told[name] / t).nan_to_num(1.0) for name, t in own.items()}
        after = {}
        for name, w in weights.items():
            place = _place(name, metric.layers)
            least = torch.minimum(*(share[f"{key}/{place}"] for key in REACH))
            after[name] = w + least.clamp(0, 1) * step[name]
        return KroneckerServer(after, pool, basis)

    def model(self, server: KroneckerServer, run: Federation) -> Tensors:
        """Means, and stds along eigenvectors of the precision."""
        metric = self.metric_of(dense(self.message(server, RoundContext(run, 0))))
        # Nothing is learnt before there are samples; the prior's noise would be all there is.
        learnt = float(server.pool.count["samples"] > 0)
        stds = {n: learnt * (t + self.delta).rsqrt() for n, t in metric.diagonal.items()}
        model = named("mean", server.weights) | named("std", stds)
        for name, spectrum in metric.layers.items():
            model[f"left/{name}"], model[f"right/{name}"] = spectrum.left, spectrum.right
            model[f"spread/{name}"] = learnt * (spectrum.values + self.delta).rsqrt()
        return {name: t.float() for name, t in model.items()}

    def personal_model(
        self, message: Message, report: Report | None, client: CurvatureSums, run: Federation
    ) -> Tensors | None:
        """The posterior after the report; between rounds a client has none."""
        if report is None:
            return None
        came, change = dense(message), {n: t.double() for n, t in dense(report.tensors).items()}
        sums = {name: came[name].double() for name in came if name.split("/")[0] in PARTS}
        for key in ("inputs", "outputs"):
            for layer, basis in part(came, f"{key}_basis").items():
                basis = basis.double()
                sums[f"{key}/{layer}"] = (basis * sums[f"{key}/{layer}"]) @ basis.T
        pool = pooled({name: t.cpu() + change[name].cpu() for name, t in sums.items()})
        weights = {n: t.double().cpu() for n, t in part(came, "mean").items()}
        return self.model(self._stepped(weights, pool, change, 1), run)

    def draws(self, model: Tensors, run: Federation) -> Sampler:
        """Outputs under draws from the posterior."""
        network = run.network
        mean = network.prepare(part(model, "mean"))
        told = {name: t.to(network.device) for name, t in model.items()}
        stds, spread = part(told, "std"), part(told, "spread")
        left, right = part(told, "left"), part(told, "right")

        def moves(rng: torch.Generator) -> Tensors:
            found: Tensors = {}
            for name, std in stds.items():
                found[name] = std * torch.randn(std.shape, generator=rng).to(std)
            for name, std in spread.items():
                noise = torch.randn(std.shape, generator=rng).to(std)
                rows = left[name] @ (std * noise) @ right[name].T
                found.update(layered(name, rows, mean))
            return {n: t.to(mean[n]) for n, t in found.items()}

        return self.sampler(mean, moves, run)


_LEAST = 1e-12
"""Count of samples below which there are none."""


def reach(layers: Collection[str], moved: Tensors, change: Tensors) -> Tensors:
    """The length of a step by layer, or by weight without layers.

    Args:
        layers: that have Kronecker factors.
        moved: the step m, by weight.
        change: c, what it changes the gradient by.

    Returns:
        `energy/PLACE` ⟨m, c⟩ and `length/PLACE` ‖m‖, scalars.
    """
    energy: Tensors = {}
    square: Tensors = {}
    for name, t in moved.items():
        place = _place(name, layers)
        energy[place] = (t * change[name]).sum() + energy.get(place, 0.0)
        square[place] = t.square().sum() + square.get(place, 0.0)
    lengths = {place: t.sqrt() for place, t in square.items()}
    return named("energy", energy) | named("length", lengths)


def _place(name: str, layers: Collection[str]) -> str:
    """The layer of a weight, or itself."""
    layer = name.rpartition(".")[0]
    return layer if layer in layers else name


def flattened(pool: CurvatureSums) -> Tensors:
    """Sums by `part/name`."""
    return {n: t for key in PARTS for n, t in named(key, getattr(pool, key)).items()}


def pooled(flat: Tensors) -> CurvatureSums:
    """The inverse of `flattened`."""
    return CurvatureSums(**{key: part(flat, key) for key in PARTS})


def _basis(pool: CurvatureSums) -> Tensors:
    """Eigenvalues and eigenvectors of the sums of each layer: see `KroneckerServer.basis`."""
    found: Tensors = {}
    for key, sums in (("inputs", pool.inputs), ("outputs", pool.outputs)):
        for layer, matrix in sums.items():
            values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
            found[f"{key}/{layer}"] = values.clamp_min(0)
            found[f"{key}_basis/{layer}"] = vectors
    return found
