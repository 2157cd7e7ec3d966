"""FedLap: federated Laplace with a dual term for each client."""

from dataclasses import dataclass, replace
from math import inf
from typing import Annotated, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    About,
    AnyMethod,
    Federation,
    Info,
    Loss,
    Problem,
    Report,
    RoundContext,
    Sampler,
    Solved,
    Tree,
    nll,
)
from fedbayes.contracts.drawn import around
from fedbayes.contracts.kronecker import (
    CurvatureSums,
    KroneckerServer,
    Moves,
    SharedKroneckerPosterior,
    flattened,
    pooled,
    reach,
)
from fedbayes.contracts.moments import MomentMatching, implicit, retracted
from fedbayes.contracts.natural import is_unlearnt, retracting
from fedbayes.contracts.product import PosteriorServer
from fedbayes.contracts.parts import Part
from fedbayes.inference.problem import Noise
from fedbayes.fusion.rounds import draws_of_round
from fedbayes.core.fields import Only, Tuned, unused
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples, Tensors, named, part, to
from fedbayes.errors import ConfigError, ModelError
from fedbayes.fusion.curvature import (
    curvature_at,
    factored_layers,
    require_curvature,
    summed_diagonal,
)
from fedbayes.fusion.posterior_settings import CurvatureSettings
from fedbayes.inference.kronecker import Metric, Spectrum, layered, rows_of
from fedbayes.inference.problem import Projection


class FedLap(MomentMatching):
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
    about = About(
        "Laplace approximation at every client, with dual variables", "Swaroop, Khan and Doshi 2025"
    )
    reports = retracting(
        MomentMatching.reports, retracted, "with method.covariance = 'none' there is no precision"
    )

    covariance: Literal["none", "diagonal", "kronecker"] = Field(
        "diagonal",
        description="covariance of the posterior. none: a point (FedLap). diagonal: a precision "
        "for each weight (FedLap-Cov). kronecker: a Kronecker product for each dense layer "
        "and convolution",
    )
    largest: Annotated[int, Only("covariance", "kronecker")] = Field(
        1000,
        ge=1,
        description="largest number of inputs or outputs of a layer with Kronecker factors; "
        "wider layers have a diagonal (kronecker)",
    )

    furthest: Annotated[float, Only("covariance", "kronecker")] = Field(
        1.0,
        ge=0,
        allow_inf_nan=False,
        description="largest step of the server in a layer, as a multiple of its clients' steps, "
        "in energy and in length. 0: no bound (kronecker)",
    )

    fisher_draws: Annotated[int | None, Only("covariance", "diagonal", "kronecker")] = Field(
        None,
        ge=1,
        description="number of targets sampled per sample for the Fisher matrix; each needs a "
        "backward pass. Default: all classes if there are at most 20 (diagonal, kronecker)",
    )
    inputs: str | None = Field(
        None,
        description="inputs at which clients tell predictions (FedLap-Func): auto (synthetic, by "
        "their shape), leaves, strokes, noise, gaussian, package.module:function, or a folder or "
        "file of public samples that all have. none: no predictions are sent",
    )
    points: Annotated[int, Only("inputs")] = Field(
        200, ge=1, description="number of inputs at which clients tell predictions"
    )
    strength: Annotated[float, Only("inputs"), Tuned(times=10)] = Field(
        1.0,
        ge=0,
        description="weight of a client's predictions, relative to that of its samples",
    )

    def variant(self) -> AnyMethod:
        """With Kronecker products or predictions states and messages are others."""
        if self.covariance == "kronecker":
            return Kronecker(of=self)
        return self if self.inputs is None else InFunctionSpace.of(self)

    def remarks(self, run: Federation) -> list[str]:
        """Of settings of draws where there is nothing to draw."""
        names = ("predictions", "predictive") if self.fixed_precision else ()
        why = "with covariance = 'none' the posterior is a point"
        return super().remarks(run) + unused(self, names, why, "method.")

    @property
    def fixed_precision(self) -> bool:
        """Without covariances."""
        return self.covariance == "none"

    def check(self, run: Federation) -> None:
        """Only weights are inferred, and covariances need a Fisher matrix.

        Raises:
            ModelError: the network has buffers, such as running means.
            ConfigError: the precision is another, or the likelihood has no Fisher matrix.
        """
        super().check(run)
        if self.covariance != "none":
            require_curvature(run.likelihood)

    def moments(
        self, problem: Problem, samples: Samples, at: RoundContext
    ) -> tuple[Solved, Tensors, Tensors, Info]:
        """The mode, and the Fisher diagonal there plus the share of the prior."""
        solved = at.solve(problem, self.loss(at.run), samples, validation=self.validation(at.run))
        precision: Tensors = dict(problem.given["share"])
        if self.covariance == "diagonal":
            settings = CurvatureSettings(draws=self.fisher_draws)
            found = summed_diagonal(solved.parameters, samples, settings, at)
            precision = {n: p + found[n].to(p) / self.kl_weight for n, p in precision.items()}
        return solved, solved.parameters, precision, {}


@dataclass(frozen=True)
class FunctionServer(PosteriorServer):
    """The server's state: also the weights that fit the posterior and predictions."""

    weights: Tensors
    """w_g, float64."""


class InFunctionSpace(FedLap):
    server_state = FunctionServer
    reports = replace(
        FedLap.reports,
        parts={
            **FedLap.reports.parts,
            "label": Part(origin="zero", range=65536.0, typical=inf),
            "rows": Part(origin="zero", exact=True, range=65536.0, typical=inf),
        },
    )

    @classmethod
    def of(cls, method: FedLap) -> Self:
        return cls.model_construct(method.model_fields_set, **dict(method))

    def variant(self) -> AnyMethod:
        return self

    def init(self, run):
        found = super().init(run)
        return FunctionServer(found.posterior, {n: torch.zeros_like(t) for n, t in found.posterior.shift.items()})

    def message(self, server, at):
        message = super().message(server, at)
        return message | {f"mean/{n}": t.float() for n, t in server.weights.items()}

    def expected(self, message, run):
        x = self._x(run)
        columns = run.likelihood.mean(run.network(run.network.prepare(run.network.initial), x[:1])[None]).shape[1]
        return super().expected(message, run) | {"label/means": torch.zeros(self.points, columns), "rows/all": torch.zeros(())}

    def _x(self, run):
        return draws_of_round(self.inputs, RoundContext(run, 0)).batch(0, self.points)

    def problem(self, message, client, samples, at):
        problem, run = super().problem(message, client, samples, at), at.run
        x = self._x(run)
        with torch.no_grad():
            f = run.network(problem.start, x)
            told = {"x": x, "means": run.likelihood.mean(f[None]).double()}
        learnt = not is_unlearnt(part(dense(message), "mean"))
        told["rows"] = torch.tensor(self.strength * len(samples.y) * (run.clients - 1) / self.kl_weight * learnt * CLIENT)
        size = min(self.points, run.training.batch_size)
        noise = Noise("points", lambda rng, batch: {"points": torch.randint(self.points, (size,), generator=rng).to(x.device)})
        return replace(problem, given={**problem.given, "told": told}, noise=noise)

    def loss(self, run):
        inner = super().loss(run)
        def loss(parameters, batch, given, noise):
            told, points = given["told"], noise["points"]
            some = {"x": told["x"][points], "means": told["means"][points], "rows": told["rows"]}
            energy = _energy(some, parameters, run)
            value = inner(parameters, batch, given, noise)
            return value + (self.kl_weight / given["count"] * energy).to(value)
        return loss

    def report(self, solved, problem, client, at):
        report, client, info = super().report(solved, problem, client, at)
        run = at.run
        w = part(solved.parameters, "mean")
        with torch.no_grad():
            means = run.likelihood.mean(run.network(w, problem.given["told"]["x"])[None])
        rows = means.new_tensor(self.strength * float(problem.given["count"]) / self.kl_weight)
        return replace(report, tensors={**report.tensors, "label/means": rows * means, "rows/all": rows}), client, info

    def update(self, server, reports, at):
        found, info = super().update(server, reports, at)
        run, device, before, after = at.run, at.run.network.device, server.posterior, found.posterior
        moved = {n: m - before.mean[n] for n, m in after.mean.items()}
        start = {n: (t + moved[n]).to(run.network.initial[n].dtype) for n, t in server.weights.items()}
        start = run.network.prepare(start)
        label, rows = reports.tensors["label/means"], reports.tensors["rows/all"].clamp_min(0)
        if not rows > 0 or not SERVER:
            return FunctionServer(after, after.mean), info
        sums = label.clamp_min(0)
        told = {"x": self._x(run), "means": (sums / sums.sum(1, keepdim=True)).to(device), "rows": rows.to(device)}
        centre = {n: t.to(device) for n, t in after.mean.items()}
        precision = {n: t.to(device) for n, t in after.precision.items()}
        w = {n: t.clone().requires_grad_() for n, t in start.items()}
        optimizer = torch.optim.LBFGS(list(w.values()), max_iter=STEPS, history_size=20, line_search_fn="strong_wolfe", tolerance_grad=1e-9, tolerance_change=1e-12)
        def closure():
            optimizer.zero_grad()
            apart = [(precision[n] * (t.double() - centre[n]).square()).sum() for n, t in w.items()]
            energy = (_energy(told, w, run) + sum(apart) / 2) / (1 + float(rows))
            energy.backward()
            return energy
        first = float(closure())
        optimizer.step(closure)
        last = float(closure())
        info |= {"fit_before": first, "fit": last}
        return FunctionServer(after, {n: t.detach().cpu().double() for n, t in w.items()}), info

    def model(self, server, run):
        found = super().model(server, run)
        weights = {n: t.float() for n, t in server.weights.items()}
        if self.fixed_precision:
            return run.network.initial if is_unlearnt(weights) else weights
        return found | named("mean", weights)


import os
CLIENT = float(os.environ.get("FL_CLIENT", "1")); SERVER = int(os.environ.get("FL_SERVER", "1")); STEPS=int(os.environ.get("FL_STEPS", "20"))

def _energy(told, weights, run):
    f, means = run.network(weights, told["x"]).double(), told["means"]
    d = torch.special.xlogy(means, means) - means * run.likelihood.normalized(f)
    return told["rows"] * d.sum(dim=-1).mean()


class Kronecker(SharedKroneckerPosterior):
    """FedLap with one precision for the federation, a Kronecker product for each layer.

    Clients' products A_k ⊗ B_k do not add to a product. K-FAC takes the expectation of a product
    for that of its factors, so that of pooled data is S = (Σ n_k A_k) ⊗ (Σ n_k B_k)/Σ n_k + δ,
    whose factors add. It replaces the sum, and each client has V = (S − δ)/K of it. The duals u_k
    are gradients at w_g, for which the fixed point does not depend on S. A round is

        w_k = argmin ℓ_k(w) + ⟨u_k, w − w_g⟩ + ½ (w − w_g)ᵀ (S − V) (w − w_g),

        c_k = (S − V + n_k A_k ⊗ B_k) (w_k − w_g),    w_g ← w_g + S⁻¹ Σ_k c_k,

        u_k ← u_k + c_k − V (the change of w_g).

    Where losses are quadratic with that curvature, c_k is −∇ℓ_k(w_g) − u_k, so a round is a Newton
    step. Σ u_k = δ w_g after every round. A client keeps h_k, the sum of its c_k of all rounds, and
    the server keeps H = Σ h_k. So u_k = h_k − (H − δ w_g)/K.
    """

    name = FedLap.name
    about = FedLap.about

    of: FedLap

    @property
    def delta(self) -> float:
        """δ, the prior's precision."""
        return self.of.prior_std**-2

    @property
    def temper(self) -> float:
        """T."""
        return self.of.kl_weight

    @property
    def rho(self) -> float:
        """As it is set."""
        return self.of.damping or 0.0

    @property
    def furthest(self) -> float:
        """As it is set."""
        return self.of.furthest

    def sampler(self, mean: Tensors, moves: Moves, run: Federation) -> Sampler:
        """Linearized or not, as many as are wanted."""
        linear = self.of.predictive == "linearized"
        return around(mean, moves, run.network, self.of.predictions, linearized=linear)

    def check(self, run: Federation) -> None:
        """As without Kronecker products; and changes are not shortened.

        Raises:
            ConfigError: the server shortens what reports add.
        """
        self.of.check(run)
        if run.clips:
            raise ConfigError(
                "fedlap with method.covariance = 'kronecker' sends factors of a product, which "
                "clipping of single parts destroys. Leave out aggregation.clip and [privacy], or "
                "set covariance = 'diagonal'"
            )

    def init(self, run: Federation) -> KroneckerServer:
        """The initialization, and no curvature yet."""
        return self.begin(run, factored_layers(run.network, self.of.largest))

    def problem(
        self, message: Message, client: CurvatureSums, samples: Samples, at: RoundContext
    ) -> Problem:
        """Descend the loss, the dual and the quadratic of the others' share from w_g."""
        run, came = at.run, dense(message)
        initial = run.network.initial
        centre = {n: t.double() for n, t in part(came, "mean").items()}
        kind, device = next(iter(initial.values())).dtype, run.network.device
        dual = {
            n: (client.shift[n] if client.shift else 0.0)
            - (h.double() - self.delta * centre[n]) / run.clients
            for n, h in part(came, "shift").items()
        }
        metric = self.metric_of(came)
        share = 1 - 1 / run.clients
        pull = Metric(
            {n: replace(s, values=share * s.values + self.delta) for n, s in metric.layers.items()},
            {n: share * t + self.delta for n, t in metric.diagonal.items()},
        )
        given: Tree = {
            "centre": {n: t.to(device, kind) for n, t in centre.items()},
            "dual": {n: t.to(device, kind) for n, t in dual.items()},
            "layers": {n: vars(s.to(device, kind)) for n, s in pull.layers.items()},
            "diagonal": {n: t.to(device, kind) for n, t in pull.diagonal.items()},
            "count": torch.tensor(len(samples.y), device=device),
            "exact": {"centre": centre, "layers": {n: vars(s) for n, s in pull.layers.items()}}
            | {"diagonal": pull.diagonal},
        }
        began = run.network.prepare({n: t.to(kind) for n, t in centre.items()})
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

    def loss(self, run: Federation) -> Loss:
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
        self, message: Message, client: CurvatureSums, samples: Samples, at: RoundContext
    ) -> tuple[Report, CurvatureSums, Info]:
        """The mode, and the curvature there."""
        problem, run = self.problem(message, client, samples, at), at.run
        solved = at.solve(problem, self.loss(run), samples, validation=self.validation(run))
        settings = CurvatureSettings(largest=self.of.largest, draws=self.of.fisher_draws)
        found = curvature_at(solved.parameters, samples, settings, at, "factors")
        layers, n = problem.given["layers"], found.samples
        if missing := sorted(layers.keys() - found.factors.keys()):
            raise ModelError(
                f"the Fisher matrix of {', '.join(missing)} has no Kronecker factors on this "
                "data. Set method.covariance = 'diagonal'"
            )
        tensors = {f"weights/{name}": t for name, t in solved.parameters.items()}
        tensors |= {f"inputs/{name}": n * found.factors[name].inputs for name in layers}
        tensors |= {f"outputs/{name}": n * found.factors[name].outputs for name in layers}
        tensors |= {f"diagonal/{m}": n * found.diagonal[m] for m in problem.given["diagonal"]}
        tensors["count/samples"] = torch.tensor(float(n))
        tensors = to(tensors, run.network.device)
        return self.report(replace(solved, parameters=tensors), problem, client, at)

    def report(
        self, solved: Solved, problem: Problem, client: CurvatureSums, at: RoundContext
    ) -> tuple[Report, CurvatureSums, Info]:
        """Report the damped change of the sums, and store it.

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
        for name, t in reach(exact["layers"], moved, change).items():
            tensors[name] = rho * t
        kept = flattened(client)
        for name, t in found.items():
            if not name.startswith("weights/"):
                tensors[name] = rho * (t - kept.get(name, 0.0))
        sent = {name: t.float() for name, t in tensors.items()}
        after = {name: t.double() + kept.get(name, 0.0) for name, t in sent.items()}
        return Report(dict(sent)), pooled(after), solved.info


def _pull(given: Tree) -> Metric:
    """The metric of the quadratic, from what a problem gives."""
    return Metric({n: Spectrum(**s) for n, s in given["layers"].items()}, given["diagonal"])


def _moved(parameters: Tensors, given: Tree) -> Tensors:
    """How far weights are from w_g."""
    return {name: parameters[name] - centre for name, centre in given["centre"].items()}
