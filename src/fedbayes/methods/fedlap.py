"""FedLap: federated Laplace with a dual term for each client."""

from dataclasses import dataclass, replace
from math import inf
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    About,
    AnyMethod,
    Federation,
    Info,
    Loss,
    Noise,
    Part,
    Problem,
    Report,
    RoundContext,
    Sampler,
    Solved,
    Sum,
    Tree,
    nll,
)
from fedbayes.contracts.changes import norm
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
from fedbayes.contracts.moments import MomentMatching, MomentsClient, implicit, retracted
from fedbayes.contracts.natural import is_unlearnt, retracting
from fedbayes.contracts.needs import where
from fedbayes.contracts.product import PosteriorServer
from fedbayes.core.devices import placed
from fedbayes.core.fields import Only, unused
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples, Tensors, named, part, to
from fedbayes.errors import ConfigError, MessageError, ModelError
from fedbayes.fusion.curvature import curvature_at, factored_layers, fisher_matrix, summed_diagonal
from fedbayes.fusion.posterior_settings import CurvatureSettings
from fedbayes.fusion.rounds import drawable, draws_of_round, input_remarks
from fedbayes.inference.gaussian import NaturalGaussian
from fedbayes.inference.kronecker import Metric, Spectrum, layered, rows_of
from fedbayes.inference.problem import Projection
from fedbayes.likelihoods import Classes, Parametric


def _drawable_inputs(method: Any, run: Federation) -> None:
    """Where clients tell predictions, inputs can be drawn, and outputs have a Fisher matrix.

    Raises:
        ConfigError: the likelihood has no Fisher matrix, inputs cannot be drawn, or covariances
            are Kronecker products.
    """
    if method.inputs is None:
        return
    fisher_matrix(method, run)
    drawable(method, run)
    if method.covariance == "kronecker":
        raise ConfigError(
            f"method.inputs is {method.inputs!r}, but with method.covariance = 'kronecker' "
            "clients tell no predictions. Leave one of the two out"
        )


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
        "Laplace approximation at every client, with dual variables",
        "Swaroop, Khan and Doshi 2025",
        needs=(where("covariance", "diagonal", "kronecker", need=fisher_matrix), _drawable_inputs),
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
        "file of public samples that the server and all clients have. none: no predictions are "
        "sent",
    )
    points: Annotated[int, Only("inputs")] = Field(
        200, ge=1, description="number of inputs at which clients tell predictions"
    )
    strength: Annotated[float, Only("inputs")] = Field(
        0.1, ge=0, description="weight of predictions relative to that of a client's samples"
    )

    def variant(self) -> AnyMethod:
        """With Kronecker products or predictions states and messages are others."""
        if self.covariance == "kronecker":
            return Kronecker(of=self)
        if self.inputs is None:
            return self
        return InFunctionSpace.model_construct(self.model_fields_set, **dict(self))

    def remarks(self, run: Federation) -> list[str]:
        """Of settings of draws where there is nothing to draw."""
        names = ("predictions", "predictive") if self.fixed_precision else ()
        why = "with covariance = 'none' the posterior is a point"
        notes = super().remarks(run) + unused(self, names, why, "method.")
        if self.inputs is None:
            names = ("points", "strength")
            notes += unused(self, names, "method.inputs is unset", "method.")
        return notes + input_remarks(self, run)

    @property
    def fixed_precision(self) -> bool:
        """Without covariances."""
        return self.covariance == "none"

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
    """The server's state: the posterior around w_g, which it sends."""

    slack: Tensors
    """What the factors' shifts are more than the posterior's, S w_g; float64, 0 where all agree."""


class InFunctionSpace(FedLap):
    """FedLap with terms in function space, after FedLap-Func of Swaroop et al. 2025.

    Clients tell soft labels n_k μ_k(x_j), their predicted means at inputs x_j that all share, and
    their weights n_k. Up to constants the others' losses are taken for the dual terms of FedLap and
    τ n/T mean_j D(μ(x_j) ‖ μ_w(x_j)). D is the KL divergence of classes and labels, of numbers the
    squared error over twice the variance. With v = Σ v_i, S and D̄ the mean over inputs,

        w_i = argmin ℓ_i(w)/T + ½ wᵀ(S − V_i) w − (S w_g − v_i)ᵀ w + τ (K − 1) n_i/T D̄(μ_g ‖ μ_w),

        w_g = argmin ½ wᵀS w − vᵀw + τ K n̄/T D̄(Σ n_i μ_i/Σ n_i ‖ μ_w).

    Duals change as in FedLap. Where all agree, terms D have no gradient, so w_g is stationary in
    the pooled loss, whatever inputs and τ are. The equations follow the paper's abstract and
    reviews, since its full text was not available. Inputs are drawn by a prior, and never rows of
    clients. Labels are those of the round: with older ones training diverged.
    """

    server_state = FunctionServer  # type: ignore[assignment]
    reports = replace(
        FedLap.reports,
        parts={
            **FedLap.reports.parts,
            "label": Part(origin="zero", range=65536.0, typical=inf),
            "rows": Part(origin="zero", exact=True, range=65536.0, typical=20e6),  # as max_weight
        },
    )

    def variant(self) -> AnyMethod:
        """Itself."""
        return self

    def init(self, run: Federation) -> FunctionServer:
        """The prior."""
        posterior = super().init(run).posterior
        return FunctionServer(
            posterior, {n: torch.zeros_like(t) for n, t in posterior.shift.items()}
        )

    def expected(self, message: Message, run: Federation) -> Message:
        """Changes of natural parameters, soft labels, and their weight."""
        means = self._told(run.network.prepare(run.network.initial), run)["means"]
        labels = {"label/means": torch.zeros(means.shape), "rows/samples": torch.zeros(())}
        return super().expected(message, run) | labels

    def accept(self, server: PosteriorServer, report: Report, run: Federation) -> None:
        """Also the labels' weight is positive."""
        super().accept(server, report, run)
        if bool(dense(report.tensors)["rows/samples"] < 0):
            raise MessageError("its predictions have a negative weight")

    def _told(self, weights: Tensors, run: Federation) -> Tree:
        """The inputs, the same everywhere, and there means and variances of numbers' noise."""
        x = draws_of_round(self.inputs or "auto", RoundContext(run, 0)).batch(0, self.points)
        with torch.no_grad():
            f, likelihood = run.network(weights, x), run.likelihood
            means = likelihood.mean(f[None])
            variances = torch.ones_like(means)
            if isinstance(likelihood, Parametric):
                variances = likelihood.moments(f)[1]
        return {"x": x, "means": means, "variances": variances}

    def problem(
        self, message: Message, client: MomentsClient, samples: Samples, at: RoundContext
    ) -> Problem:
        """Also stay near the predictions of w_g, once there are any."""
        problem, run = super().problem(message, client, samples, at), at.run
        told, device = self._told(problem.start, run), run.network.device
        learnt = not is_unlearnt(part(dense(message), "mean"))
        told["weight"] = torch.tensor(self.strength * (run.clients - 1) * learnt, device=device)
        size = min(self.points, run.training.batch_size)

        def points(rng: torch.Generator, batch: Samples) -> Tree:
            return {"points": placed(torch.randint(self.points, (size,), generator=rng), device)}

        given = {**problem.given, "told": told}
        return replace(problem, given=given, noise=Noise("points", points))

    def loss(self, run: Federation) -> Loss:
        """Also the distance of predictions, at some of the inputs in each step."""
        rest = super().loss(run)

        def loss(parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> Tensor:
            told, points = given["told"], noise["points"]
            some = {name: told[name][points] for name in ("x", "means", "variances")}
            apart: Tensor = told["weight"] * _apart(some, parameters, run)
            return rest(parameters, batch, given, noise) + apart

        return loss

    def report(
        self, solved: Solved, problem: Problem, client: MomentsClient, at: RoundContext
    ) -> tuple[Report, MomentsClient, Info]:
        """Report soft labels and their weight with the change of the factor."""
        report, after, info = super().report(solved, problem, client, at)
        means = self._told(part(solved.parameters, "mean"), at.run)["means"]
        rows = problem.given["count"].to(means)
        labels = {"label/means": rows * means, "rows/samples": rows}
        return replace(report, tensors={**report.tensors, **labels}), after, info

    def update(  # type: ignore[override]
        self, server: FunctionServer, reports: Sum, at: RoundContext
    ) -> tuple[FunctionServer, Info]:
        """Multiply the changes of the factors into the posterior, and fit w_g to it and labels."""
        run, before = at.run, _whole(server)
        whole, info = super().update(before, reports, at)
        start = _moved_along(server, before, whole)
        ready = run.network.prepare({n: t.to(run.network.initial[n]) for n, t in start.items()})
        told, rows = self._told(ready, run), float(reports.tensors["rows/samples"])
        if rows <= 0:
            return _around(whole, start), info
        means = reports.tensors["label/means"].to(told["means"]) / rows
        told["means"] = _proper(means, told, run)
        weight = self.strength * rows / self.kl_weight * run.clients / reports.clients
        fitted, info["predictions_apart"] = _fitted(ready, told, weight, whole.posterior, run)
        return _around(whole, fitted), info

    def forget(  # type: ignore[override]
        self, server: FunctionServer, client: MomentsClient, run: Federation
    ) -> FunctionServer:
        """Divide by the client's factor. What labels of the last round moved w_g by remains, until
        the next rounds fit it again.

        Without all factors the state is that before the first round.
        """
        before = _whole(server)
        whole = super().forget(before, client, run)
        if norm(whole.posterior.shift.values()) <= _ROUNDING * norm(
            before.posterior.shift.values()
        ):
            return self.init(run)
        return _around(whole, _moved_along(server, before, whole))


def _whole(server: FunctionServer) -> PosteriorServer:
    """The product of the prior and the factors."""
    posterior = server.posterior
    shift = {n: t + server.slack[n] for n, t in posterior.shift.items()}
    return PosteriorServer(NaturalGaussian(posterior.precision, shift))


def _around(whole: PosteriorServer, weights: Tensors) -> FunctionServer:
    """The state with a product of factors, and w_g."""
    precision, shift = whole.posterior.precision, whole.posterior.shift
    sent = {n: p * weights[n] for n, p in precision.items()}
    slack = {n: t - sent[n] for n, t in shift.items()}
    return FunctionServer(NaturalGaussian(precision, sent), slack)


def _moved_along(
    server: FunctionServer, before: PosteriorServer, after: PosteriorServer
) -> Tensors:
    """The weights w_g, moved as far as the mean of the product of factors."""
    moved = {n: t - before.posterior.mean[n] for n, t in after.posterior.mean.items()}
    return {n: t + moved[n] for n, t in server.posterior.mean.items()}


def _proper(means: Tensor, told: Tree, run: Federation) -> Tensor:
    """Means of soft labels that noise, compression or a client may have moved too far.

    Args:
        means: sums of labels by their weights [points, columns].
        told: means and variances that numbers may be some deviations off.
        run: the run.
    """
    if isinstance(run.likelihood, Parametric):
        reach = _DEVIATIONS * told["variances"].sqrt()
        return torch.clamp(means, told["means"] - reach, told["means"] + reach)
    means = means.clamp(0, 1)
    if isinstance(run.likelihood, Classes):
        means = means / means.sum(dim=1, keepdim=True).clamp_min(_NO_LABEL)
    return means


def _apart(told: Tree, weights: Tensors, run: Federation) -> Tensor:
    """The mean over inputs of D(μ ‖ μ_w), a scalar."""
    f, means = run.network(weights, told["x"]), told["means"]
    match run.likelihood:
        case Parametric() as numbers:
            apart = (numbers.moments(f)[0] - means).square() / (2 * told["variances"])
        case Classes() as classes:
            apart = torch.special.xlogy(means, means) - means * classes.normalized(f)
        case labels:
            known = torch.special.xlogy(means, means) + torch.special.xlogy(1 - means, 1 - means)
            apart = known.sum(dim=-1, keepdim=True) - labels.log_prob(f, means)[..., None]
    distance: Tensor = apart.sum(dim=-1).mean()
    return distance


def _fitted(
    start: Tensors, told: Tree, weight: float, posterior: NaturalGaussian, run: Federation
) -> tuple[Tensors, float]:
    """The weights of least ½ (w − m)ᵀS(w − m) + weight · D̄, by L-BFGS; and D̄ there."""
    goal = posterior.to(run.network.device, torch.float64)
    mean, precision = goal.mean, goal.precision
    found = {n: t.clone().requires_grad_() for n, t in start.items()}
    optimizer = torch.optim.LBFGS(
        list(found.values()), max_iter=_STEPS, history_size=_STEPS, line_search_fn="strong_wolfe"
    )

    def energy() -> Tensor:
        optimizer.zero_grad()
        pulls = [(p * (found[n].double() - mean[n]).square()).sum() for n, p in precision.items()]
        total = _apart(told, found, run).double() + torch.stack(pulls).sum() / (2 * weight)
        total.backward()  # type: ignore[no-untyped-call]
        return total

    if weight > 0:
        optimizer.step(energy)  # type: ignore[no-untyped-call]
    ended = {n: t.detach() for n, t in found.items()}
    with torch.no_grad():
        apart = float(_apart(told, ended, run))
    return {n: t.cpu().double() for n, t in ended.items()}, apart


_DEVIATIONS = 10.0
"""Standard deviations of its noise that a number is moved in a round at most."""
_NO_LABEL = 1e-12
"""Sum of probabilities below which there are none."""
_ROUNDING = 1e-9
"""Share of all shifts that sums of factors may be off by."""
_STEPS = 20
"""Most steps of the server in a round."""


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
        """As without Kronecker products; and changes are not shortened."""
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
        """Report the damped change of the sums, and store it."""
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
