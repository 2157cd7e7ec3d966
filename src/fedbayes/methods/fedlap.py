"""FedLap: federated Laplace with a dual term for each client."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    AnyMethod,
    At,
    Info,
    Loss,
    Method,
    Problem,
    Report,
    Run,
    Sampler,
    Solved,
    Sum,
    Tree,
    nll,
)
from fedbayes.contracts.changes import norm
from fedbayes.contracts.moments import Moments, implicit
from fedbayes.contracts.product import around, is_unlearnt
from fedbayes.errors import ConfigError, MessageError, ModelError
from fedbayes.fields import Only
from fedbayes.fusion.curvature import (
    curvature_at,
    factored_layers,
    require_curvature,
    summed_diagonal,
)
from fedbayes.fusion.posterior_settings import CurvatureSettings
from fedbayes.inference.kronecker import Metric, Spectrum, layered, rows_of
from fedbayes.inference.problem import Projection
from fedbayes.messages import Message, dense
from fedbayes.tensors import Samples, Tensors, named, part


class FedLap(Moments):
    """Laplace's approximation at every client, and duals that make the fixed point the pool's.

    A client's factor is exp(v_iᵀθ − ½ θᵀV_iθ) with the dual v_i. It minimizes its summed loss and
    the quadratic of the others' factors and the prior (Swaroop et al. 2025, FedLap-Cov),

        w_i = argmin ℓ_i(w) + ½ wᵀ(S − V_i) w − (S w_g − v_i)ᵀ w,

    sets V_i to the diagonal of its Fisher matrix at w_i (which is the Gauss-Newton matrix under
    classes and Gaussian noise) and v_i ← S_i w_i − (S w_g − v_i), S_i = S − V_i + the new V_i.
    At convergence v_i = V_i w_g − ∇ℓ_i(w_g), so that w_g is stationary in the pooled loss.

    Without covariances (FedLap) the precision stays that of the prior, δ, and
    v_i ← v_i + δ (w_i − w_g).
    """

    name = "fedlap"
    summary = "Laplace at every client, with a dual for each"
    paper = "Swaroop, Khan and Doshi 2025"

    covariance: Literal["none", "diagonal", "kronecker"] = Field(
        "diagonal",
        description="what is known beside the mean: nothing (FedLap; the posterior is a point), "
        "a precision for each weight (FedLap-Cov), or for each dense layer and convolution a "
        "Kronecker product",
    )
    largest: Annotated[int, Only("covariance", "kronecker")] = Field(
        1000,
        ge=1,
        description="inputs or outputs up to which a layer has Kronecker factors; wider ones have "
        "a diagonal (kronecker)",
    )

    def variant(self) -> AnyMethod:
        """With Kronecker products states and messages are others."""
        return Kronecker(of=self) if self.covariance == "kronecker" else self

    @property
    def fixed_precision(self) -> bool:
        """Without covariances."""
        return self.covariance == "none"

    def check(self, run: Run) -> None:
        """Weights alone are inferred, and covariances need a Fisher matrix.

        Raises:
            ModelError: the network has buffers, such as running means.
            ConfigError: the precision is another, or the likelihood has no Fisher matrix.
        """
        super().check(run)
        if self.covariance != "none":
            require_curvature(run.likelihood)

    def moments(
        self, problem: Problem, samples: Samples, at: At
    ) -> tuple[Solved, Tensors, Tensors, Info]:
        """The mode, and the Fisher diagonal there beside the share of the prior."""
        solved = at.solve(problem, self.loss(at.run), samples, validation=self.validation(at.run))
        precision: Tensors = dict(problem.given["share"])
        if self.covariance == "diagonal":
            found = summed_diagonal(at.run.network, at.run.likelihood, solved.parameters, samples)
            precision = {n: p + found[n].to(p) / self.kl_weight for n, p in precision.items()}
        return solved, solved.parameters, precision, {}


@dataclass(frozen=True)
class Pool:
    """What the server keeps, or a client of its own: sums over clients, float64.

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
class Server:
    """The server's state."""

    weights: Tensors
    """w_g, float64; zero before the first round."""
    pool: Pool


PARTS = ("shift", "inputs", "outputs", "diagonal", "count")


class Kronecker(Method[Server, Pool, Sum]):
    """FedLap with one precision for the federation, a Kronecker product for each layer.

    Clients' products A_k ⊗ B_k do not add to a product. K-FAC takes the expectation of a product
    for that of its factors, so that of pooled data is S = (Σ n_k A_k) ⊗ (Σ n_k B_k)/Σ n_k + δ,
    whose factors add. It stands in for the sum, and each client has V = (S − δ)/K of it. Duals are
    kept as gradients at w_g, u_k, for which the fixed point does not depend on S:

        w_k = argmin ℓ_k(w) + ⟨u_k, w − w_g⟩ + ½ (w − w_g)ᵀ (S − V) (w − w_g)
        c_k = (S − V + n_k A_k ⊗ B_k) (w_k − w_g),    w_g ← w_g + S⁻¹ Σ_k c_k,
        u_k ← u_k + c_k − V (the change of w_g).

    c_k is −∇ℓ_k(w_g) − u_k where losses are quadratic with that curvature, so a round is a Newton
    step there. Σ u_k = δ w_g after every round. With H = Σ h_k, h_k a client's c_k of all rounds,
    u_k = h_k − (H − δ w_g)/K: the server keeps H, a client h_k.
    """

    name = FedLap.name
    summary = FedLap.summary
    paper = FedLap.paper
    server_state = Server
    client_state = Pool
    repeats_changes = True
    adds = True
    report_range = 65536.0

    of: FedLap

    @property
    def delta(self) -> float:
        """δ, the prior's precision."""
        return self.of.prior_std**-2

    def check(self, run: Run) -> None:
        """As without Kronecker products; and changes are not shortened.

        Raises:
            ConfigError: the server shortens what reports add.
        """
        self.of.check(run)
        if run.clips:
            raise ConfigError(
                "fedlap with method.covariance = 'kronecker' reports factors of a product, and "
                "parts that are shortened each by itself are no longer such; leave "
                "aggregation.clip and [privacy] away, or set covariance = 'diagonal'"
            )

    def init(self, run: Run) -> Server:
        """No weights and no curvature yet: the prior."""
        zero = {
            n: torch.zeros(t.shape, dtype=torch.float64) for n, t in run.network.initial.items()
        }
        layers = factored_layers(run.network, self.of.largest)
        covered = {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}
        pool = Pool(
            zero,
            {n: torch.zeros(d, d, dtype=torch.float64) for n, (d, _) in layers.items()},
            {n: torch.zeros(o, o, dtype=torch.float64) for n, (_, o) in layers.items()},
            {n: t for n, t in zero.items() if n not in covered},
            {"samples": torch.zeros((), dtype=torch.float64)},
        )
        return Server(zero, pool)

    def message(self, server: Server, at: At) -> Message:
        """Means, the sum of shifts, and the metric: eigenvectors and eigenvalues of its factors."""
        pool = server.pool
        message = named("mean", server.weights) | named("shift", pool.shift)
        message |= named("diagonal", pool.diagonal) | named("count", pool.count)
        for layer, inputs in pool.inputs.items():
            for key, matrix in (("inputs", inputs), ("outputs", pool.outputs[layer])):
                values, vectors = torch.linalg.eigh(matrix)
                message |= {f"{key}/{layer}": values.clamp_min(0), f"{key}_basis/{layer}": vectors}
        return {name: t.float() for name, t in message.items()}

    def expected(self, message: Message, run: Run) -> Message:
        """What is added to each of the sums."""
        rest = {key: part(message, key) for key in ("shift", "diagonal", "count")}
        factors = {key: part(message, f"{key}_basis") for key in ("inputs", "outputs")}
        return {n: t for key, each in (rest | factors).items() for n, t in named(key, each).items()}

    def reference(self, message: Message, run: Run) -> Tensors:
        """Sums are measured from nothing."""
        return {n: torch.zeros_like(t) for n, t in dense(self.expected(message, run)).items()}

    def _metric(self, message: Tensors) -> Metric:
        """S − δ by a server's message: what the pool's data say, float64."""
        count, double = float(message["count/samples"]), {n: t.double() for n, t in message.items()}
        outputs, bases = part(double, "outputs"), part(double, "outputs_basis")
        right, share = part(double, "inputs_basis"), 1 / self.of.kl_weight
        layers = {
            name: Spectrum(
                bases[name],
                right[name],
                torch.outer(outputs[name], a) * (share / max(count, _LEAST)),
            )
            for name, a in part(double, "inputs").items()
        }
        return Metric(layers, {n: share * t for n, t in part(double, "diagonal").items()})

    def problem(self, message: Message, client: Pool, samples: Samples, at: At) -> Problem:
        """Descend the loss, the dual and the quadratic of the others' share from w_g."""
        run, came = at.run, dense(message)
        initial, centre = (
            run.network.initial,
            {n: t.double() for n, t in part(came, "mean").items()},
        )
        kind, device = next(iter(initial.values())).dtype, run.network.device
        dual = {
            n: (client.shift[n] if client.shift else 0.0)
            - (h.double() - self.delta * centre[n]) / run.clients
            for n, h in part(came, "shift").items()
        }
        metric = self._metric(came)
        share = 1 - 1 / run.clients
        pull = Metric(
            {n: replace(s, values=share * s.values + self.delta) for n, s in metric.layers.items()},
            {n: share * t + self.delta for n, t in metric.diagonal.items()},
        )
        start = initial if is_unlearnt(centre) else centre
        given: Tree = {
            "centre": {n: t.to(device, kind) for n, t in centre.items()},
            "dual": {n: t.to(device, kind) for n, t in dual.items()},
            "layers": {n: vars(s.to(device, kind)) for n, s in pull.layers.items()},
            "diagonal": {n: t.to(device, kind) for n, t in pull.diagonal.items()},
            "count": torch.tensor(len(samples.y), device=device),
            "exact": {"centre": centre, "layers": {n: vars(s) for n, s in pull.layers.items()}}
            | {"diagonal": pull.diagonal},
        }
        began = run.network.prepare({n: t.to(kind) for n, t in start.items()})
        project = self._pulled(run.training.momentum) if implicit(run) else None
        return Problem(began, given=given, project=project)

    def _pulled(self, momentum: float) -> Projection:
        """What follows a step of SGD: an implicit one along the quadratic, stable at any rate."""

        def project(parameters: Tensors, given: Tree, lr: float) -> None:
            a = float(lr / (1 - momentum) * self.of.kl_weight / given["count"])
            moved = _moved(parameters, given)
            for name, step in _pull(given).scaled(lambda c: 1 / (1 + a * c), moved).items():
                parameters[name].copy_(given["centre"][name] + step)

        return project

    def loss(self, run: Run) -> Loss:
        """The energy per sample, times T; under SGD without the quadratic, whose steps follow."""
        likelihood, apart = nll(run), implicit(run)

        def loss(parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> Tensor:
            energy = likelihood(parameters, batch, given, noise)
            moved = _moved(parameters, given)
            slope = given["dual"]
            if not apart:
                half = _pull(given).scaled(lambda c: c / 2, moved)
                slope = {name: dual + half[name] for name, dual in slope.items()}
            pulls = sum((slope[name] * step).sum() for name, step in moved.items())
            total: Tensor = energy + self.of.kl_weight * pulls / given["count"]
            return total

        return loss

    def local(
        self, message: Message, client: Pool, samples: Samples, at: At
    ) -> tuple[Report, Pool, Info]:
        """The mode, and the curvature there."""
        problem, run = self.problem(message, client, samples, at), at.run
        solved = at.solve(problem, self.loss(run), samples, validation=self.validation(run))
        settings = CurvatureSettings(largest=self.of.largest)
        found = curvature_at(run.network, run.likelihood, solved.parameters, samples, settings)
        layers, n = problem.given["layers"], found.samples
        if missing := sorted(layers.keys() - found.factors.keys()):
            raise ModelError(
                f"the Fisher matrix of {', '.join(missing)} has no Kronecker factors on this data; "
                "set method.covariance = 'diagonal'"
            )
        tensors = {f"weights/{name}": t for name, t in solved.parameters.items()}
        tensors |= {f"inputs/{name}": n * found.factors[name].inputs for name in layers}
        tensors |= {f"outputs/{name}": n * found.factors[name].outputs for name in layers}
        tensors |= {f"diagonal/{m}": n * found.diagonal[m] for m in problem.given["diagonal"]}
        tensors["count/samples"] = torch.tensor(float(n))
        return self.report(replace(solved, parameters=tensors), problem, client, at)

    def report(
        self, solved: Solved, problem: Problem, client: Pool, at: At
    ) -> tuple[Report, Pool, Info]:
        """Report what is to be added to the sums, damped; keep what was added.

        Args:
            solved: its parameters are `weights/…`, w_k, and the client's own terms of the sums.
            problem: as it was stated.
            client: the private state.
            at: client and round.
        """
        exact = problem.given["exact"]
        found = {name: t.double() for name, t in solved.parameters.items()}
        count, temper = float(found["count/samples"]), self.of.kl_weight
        moved = {n: t - exact["centre"][n] for n, t in part(found, "weights").items()}
        change = _pull(exact).scaled(lambda c: c, moved)
        for layer in exact["layers"]:
            rows = found[f"outputs/{layer}"] @ rows_of(layer, moved) @ found[f"inputs/{layer}"]
            for name, t in layered(layer, rows / (count * temper), moved):
                change[name] = change[name] + t
        for name, t in part(found, "diagonal").items():
            change[name] = change[name] + t * moved[name] / temper
        rho = self.of.damping or 1 / at.run.cohort
        tensors = named("shift", {n: rho * t for n, t in change.items()})
        kept = _flat(client)
        for name, t in found.items():
            if not name.startswith("weights/"):
                tensors[name] = rho * (t - kept.get(name, 0.0))
        sent = {name: t.float() for name, t in tensors.items()}
        after = {name: t.double() + kept.get(name, 0.0) for name, t in sent.items()}
        return Report(dict(sent)), _pool(after), solved.info

    def accept(self, server: Server, report: Report, run: Run) -> None:
        """What is added leaves diagonals and the number of samples positive."""
        sums, tensors = _flat(server.pool), dense(report.tensors)
        for name, change in tensors.items():
            if name.startswith("shift/"):
                continue
            total = sums[name] + change
            least = (
                total.diagonal() if total.ndim == 2 and not name.startswith("diagonal/") else total
            )
            if bool((least < -1e-4 * (1 + sums[name].abs().max())).any()):
                raise MessageError(f"it takes more curvature off {name!r} than there is")

    def origin(self, server: Server, run: Run) -> Tensors:
        """Changes are measured from nothing."""
        return {}

    def ordinary(self, server: Server, run: Run) -> dict[str, float]:
        """The sums themselves, all that was learnt so far."""
        return {key: norm(getattr(server.pool, key).values()) for key in PARTS}

    def update(self, server: Server, reports: Sum, at: At) -> tuple[Server, Info]:
        """Add to the sums, and take the Newton step S⁻¹ Σ c_k with the new ones."""
        before = _flat(server.pool)
        pool = _pool({name: t + reports.tensors[name] for name, t in before.items()})
        return Server(self._stepped(server.weights, pool, part(reports.tensors, "shift")), pool), {}

    def _stepped(self, weights: Tensors, pool: Pool, shift: Tensors) -> Tensors:
        """Weights after the Newton step of some shifts."""
        step = self._pooled(pool).scaled(lambda v: 1 / (v + self.delta), shift)
        return {name: w + step[name] for name, w in weights.items()}

    def _pooled(self, pool: Pool) -> Metric:
        """S − δ by the sums."""
        count, share = float(pool.count["samples"]), 1 / self.of.kl_weight
        layers = {
            name: Spectrum.of(inputs, pool.outputs[name], count * self.of.kl_weight)
            for name, inputs in pool.inputs.items()
        }
        return Metric(layers, {n: share * t.clamp_min(0) for n, t in pool.diagonal.items()})

    def model(self, server: Server, run: Run) -> Tensors:
        """Means, and stds along eigenvectors of the precision."""
        return self._told(server.weights, self._pooled(server.pool))

    def _told(self, weights: Tensors, metric: Metric) -> Tensors:
        stds = {n: (t + self.delta).rsqrt() for n, t in metric.diagonal.items()}
        model = named("mean", weights) | named("std", stds)
        for name, spectrum in metric.layers.items():
            model[f"left/{name}"], model[f"right/{name}"] = spectrum.left, spectrum.right
            model[f"spread/{name}"] = (spectrum.values + self.delta).rsqrt()
        return {name: t.float() for name, t in model.items()}

    def personal_model(
        self, message: Message, report: Report | None, client: Pool, run: Run
    ) -> Tensors | None:
        """The posterior as the report moves it; between rounds there is none of its own."""
        if report is None:
            return None
        came, change = dense(message), {n: t.double() for n, t in dense(report.tensors).items()}
        sums = {name: came[name].double() for name in came if name.split("/")[0] in PARTS}
        for key in ("inputs", "outputs"):
            for layer, basis in part(came, f"{key}_basis").items():
                basis = basis.double()
                sums[f"{key}/{layer}"] = (basis * sums[f"{key}/{layer}"]) @ basis.T
        pool = _pool({name: t.cpu() + change[name].cpu() for name, t in sums.items()})
        weights = {n: t.double().cpu() for n, t in part(came, "mean").items()}
        return self._told(self._stepped(weights, pool, part(change, "shift")), self._pooled(pool))

    def draws(self, model: Tensors, run: Run) -> Sampler:
        """Outputs under draws from the posterior."""
        network = run.network
        mean = network.prepare(part(model, "mean"))
        if unlearnt := is_unlearnt(mean):
            mean = network.prepare(network.initial)
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
            return {n: (0.0 if unlearnt else 1.0) * t.to(mean[n]) for n, t in found.items()}

        linear = self.of.predictive == "linearized"
        return around(mean, moves, network, self.of.predictions, linearized=linear)


_LEAST = 1e-12
"""Count of samples below which there are none."""


def _flat(pool: Pool) -> Tensors:
    """Sums by `part/name`."""
    return {n: t for key in PARTS for n, t in named(key, getattr(pool, key)).items()}


def _pool(flat: Tensors) -> Pool:
    """The inverse of `_flat`."""
    return Pool(**{key: part(flat, key) for key in PARTS})


def _pull(given: Tree) -> Metric:
    """The metric of the quadratic, from what a problem gives."""
    return Metric({n: Spectrum(**s) for n, s in given["layers"].items()}, given["diagonal"])


def _moved(parameters: Tensors, given: Tree) -> Tensors:
    """How far weights are from w_g."""
    return {name: parameters[name] - centre for name, centre in given["centre"].items()}
